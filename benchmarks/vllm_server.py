"""vLLM's own API server, for comparison: its command-line defaults, in front of a stand-in for its engine core.

    .bench/peers/vllm/bin/python benchmarks/vllm_server.py MODEL

The stand-in lies in the server's process, answers each request with one token at once, and all that have come meanwhile
in one message. So this server has no work for messages to a core, which a real one has, as ours in the same comparison.
benchmarks/http_load.py --vllm starts it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
import urllib.request
from types import SimpleNamespace
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient

TOKEN = 300  # as http_load.py's


class StandIn:
    """What the server calls of a client of an engine core."""

    def __init__(self, **_: Any) -> None:
        self.engine_ranks_managed = [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self._outputs: list[EngineCoreOutput] = []
        self._arrived = asyncio.Event()

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._outputs.append(EngineCoreOutput(request.request_id, [TOKEN], finish_reason=FinishReason.LENGTH))
        self._arrived.set()

    async def get_output_async(self) -> EngineCoreOutputs:
        await self._arrived.wait()
        self._arrived.clear()
        outputs, self._outputs = self._outputs, []
        return EngineCoreOutputs(outputs=outputs, finished_requests={one.request_id for one in outputs})

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        pass

    async def reset_mm_cache_async(self) -> None:
        pass

    def shutdown(self, timeout: float | None = None) -> None:
        pass


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
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **given: StandIn(**given))
    parser = make_arg_parser(FlexibleArgumentParser())
    args = parser.parse_args(
        [f"--model={sys.argv[1]}", "--host=127.0.0.1", f"--port={port}", "--disable-uvicorn-access-log"]
    )
    validate_parsed_serve_args(args)
    threading.Thread(target=tell_when_ready, args=(port, out), daemon=True).start()
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
