"""A core without a model behind a real server, and a stand-in for the process it would run in: what tests of the
clients connect to."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from mainspring.core.__main__ import handle
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import EngineConfig
from mainspring.ipc.errors import InvalidRequestError
from mainspring.ipc.messages import AddRequest, Finished, ModelFacts, Outputs, Ready, Started
from mainspring.ipc.server import CoreServer
from mainspring.ipc.transport import ProcessWatch, describe_exit, ipc_address, make_runtime_dir, remove_runtime_dir

EPOCH = 3
STEP_SECONDS = 0.0002


class StandInCore:
    """Each request's tokens are its first prompt token and the numbers after it, `max_tokens` of them, one a step."""

    def __init__(self) -> None:
        self.config = EngineConfig()
        self.model = ModelFacts(1000, 8, 1 << 20, "float32")
        self.connected: list[tuple[int, float]] = []
        self.disconnected: list[int] = []
        self.num_ended = 0
        self.tensors: list[bytes] = []
        self.paused = threading.Event()
        self._requests: dict[tuple[int, int], tuple[AddRequest, int]] = {}
        self._notices: list[tuple[int, Finished]] = []

    def connect(self, frontend: int, weight: float = 1.0) -> None:
        self.connected.append((frontend, weight))

    def disconnect(self, frontend: int) -> None:
        self.disconnected.append(frontend)
        for key in [key for key in self._requests if key[0] == frontend]:
            del self._requests[key]

    def add_request(self, frontend: int, request: AddRequest, tensors: Sequence[Any] = ()) -> None:
        self._requests[frontend, request.handle] = request, 0
        self.tensors += map(bytes, tensors)

    def abort(self, frontend: int, handles: Sequence[int]) -> None:
        for handle_ in handles:
            if self._requests.pop((frontend, handle_), None):
                self._notices.append((frontend, Finished(handle_, "abort")))

    def call(self, method: str, args: msgspec.Raw) -> msgspec.Raw:
        values = decode_value(args, list)
        if method == "sleep":
            time.sleep(values[0])
        elif method == "refuse":
            raise InvalidRequestError("this is refused")
        elif method == "fail":
            raise KeyError("missing")
        elif method == "die":
            raise SystemExit("told to")
        return encode_value(values)

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._notices) and not self.paused.is_set()

    def step(self) -> dict[int, Outputs]:
        time.sleep(STEP_SECONDS)
        outputs: dict[int, Outputs] = {}
        for frontend, finished in self._notices:
            outputs.setdefault(frontend, Outputs([], [])).finished.append(finished)
        self._notices = []
        for (frontend, handle_), (request, done) in list(self._requests.items()):
            out = outputs.setdefault(frontend, Outputs([], []))
            out.handles.append(handle_)
            out.token_ids.append(request.prompt_token_ids[0] + done)
            if not done:
                out.started.append(Started(handle_, 0.0, 0.0, 0))
            if done + 1 < request.sampling.max_tokens:
                self._requests[frontend, handle_] = request, done + 1
            else:
                del self._requests[frontend, handle_]
                out.finished.append(Finished(handle_, "length"))
                self.num_ended += 1
        return outputs


class StandInProcess:
    """What a `CoreProcess` offers a client: here the core is a thread, and a sleeping child process is what lives and
    dies in its place."""

    def __init__(self) -> None:
        self.core = StandInCore()
        self.token = secrets.token_bytes(16)
        self.folder = make_runtime_dir()
        self.address = ipc_address(self.folder)
        self.instance_id = secrets.token_bytes(8)
        self._child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.watch = ProcessWatch(self._child.pid, lambda: self._child.poll() is not None)
        self.server = CoreServer(self.address, self.instance_id, EPOCH, self.token)
        ready = Ready(self.instance_id, EPOCH, self.core.model, msgspec.json.encode(self.core.config))
        self.server.announce(ready)
        self._stopping = False
        self.events: deque[Any] = deque(maxlen=100_000)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def exit_text(self) -> str | None:
        code = self._child.poll()
        return None if code is None else describe_exit(code)

    def kill(self) -> None:
        """The core dies with SIGKILL: nothing more comes from it."""
        self._stop_serving("")
        self._child.kill()

    def fail(self, reason: str) -> None:
        """The core ends by an error of its own, and says so."""
        self._stop_serving(reason)
        self._child.kill()

    def close(self) -> None:
        """A client lets go: a core that is shared stays."""

    def end(self) -> None:
        self._stop_serving("")
        self._child.kill()
        self._child.wait()
        self.watch.close()
        remove_runtime_dir(self.folder)

    def _stop_serving(self, reason: str) -> None:
        self._stopping = True
        self._thread.join(5)
        self.server.stop(reason)

    def _serve(self) -> None:
        """As `serve` of the core process, until told to stop."""
        while not self._stopping:
            events = self.server.receive(wait=False)
            for event in events:
                self.events.append(event)
                handle(self.core, self.server, event)
            if self.core.has_work:
                for frontend, outputs in self.core.step().items():
                    self.server.send(frontend, outputs)
            elif not events:
                time.sleep(0.001)


@contextlib.contextmanager
def stand_in() -> Iterator[StandInProcess]:
    process = StandInProcess()
    try:
        yield process
    finally:
        process.end()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
