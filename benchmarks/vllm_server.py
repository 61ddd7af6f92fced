"""vLLM's own API server, for comparison: its command-line defaults, before a core process of its own without a model.

    .bench/peers/vllm/bin/python benchmarks/vllm_server.py MODEL

The core process is vLLM's, with its threads, queues and messages. In place of scheduler and model it answers each
request with one token at once, and all that have come meanwhile in one message. benchmarks/http_load.py --vllm starts
this program.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
import urllib.request
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore, EngineCoreProc

TOKEN = 300  # as http_load.py's


class NoScheduler:
    """What a core asks of its scheduler while it has no request."""

    def has_requests(self) -> bool:
        return False

    def get_num_unfinished_requests(self) -> int:
        return 0

    def finish_requests(self, *_: Any) -> list[Any]:
        return []

    def get_kv_event_publisher_config(self) -> None:
        return None


def without_model(self: Any, vllm_config: Any, executor_class: Any, log_stats: bool, *_: Any) -> None:
    self.vllm_config, self.log_stats, self.scheduler, self.batch_queue = vllm_config, log_stats, NoScheduler(), None
    self.aborts_queue, self._idle_state_callbacks = queue.Queue(), []
    self._answers = {}


def add_request(self: Any, request: EngineCoreRequest, wave: int = 0) -> None:
    answer = EngineCoreOutput(request.request_id, [TOKEN], finish_reason=FinishReason.LENGTH)
    self._answers.setdefault(request.client_index, []).append(answer)


def run_busy_loop(self: Any) -> None:
    while self._handle_shutdown():
        self._handle_client_request(*self.input_queue.get())
        while not self.input_queue.empty():
            self._handle_client_request(*self.input_queue.get_nowait())
        for client, outputs in self._answers.items():
            finished = {one.request_id for one in outputs}
            self.output_queue.put_nowait((client, EngineCoreOutputs(outputs=outputs, finished_requests=finished)))
        self._answers = {}
    raise SystemExit


def replace_core() -> None:
    EngineCore.__init__ = without_model
    for name, function in {
        "add_request": add_request,
        "run_busy_loop": run_busy_loop,
        "preprocess_add_request": lambda self, request: (request, 0),
        "abort_requests": lambda self, request_ids: None,
        "get_supported_tasks": lambda self: ("generate",),
        "reset_mm_cache": lambda self: None,
        "shutdown": lambda self: None,
    }.items():
        setattr(EngineCoreProc, name, function)


replace_core()  # here, because the core process is spawned, and imports this program


def tell_when_ready(port: int, out: int) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=5):
                os.write(out, f"ready at http://127.0.0.1:{port};\n".encode())
                return
        except OSError:
            time.sleep(0.1)


def main() -> None:
    out = os.dup(1)
    os.dup2(2, 1)  # vLLM's log goes there
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(
        [f"--model={sys.argv[1]}", "--host=127.0.0.1", f"--port={port}", "--disable-uvicorn-access-log"]
    )
    validate_parsed_serve_args(args)
    threading.Thread(target=tell_when_ready, args=(port, out), daemon=True).start()
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
