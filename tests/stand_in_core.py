"""Cores without a model behind real servers, and a stand-in for the supervisor that starts them one after another, for
tests of the clients."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from mainspring.core.__main__ import handle
from mainspring.core.core_meter import CoreMeter
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import EngineConfig, ServiceConfig
from mainspring.ipc.errors import EngineDeadError, InvalidRequestError
from mainspring.ipc.messages import AddRequest, CoreStatus, Finished, ModelFacts, Outputs, Ready, Started
from mainspring.ipc.server import CoreServer
from mainspring.ipc.transport import Endpoints, ipc_address, make_runtime_dir, remove_runtime_dir

EPOCH = 3
STEP_SECONDS = 0.0002


class StandInCore:
    """The output of a request is its first prompt token and the numbers after it, `max_tokens` in all, one a step. A
    resumed request continues after its output tokens."""

    def __init__(self) -> None:
        self.config = EngineConfig()
        self.model = ModelFacts(1000, 8, 1 << 20, "float32")
        self.connected: list[tuple[int, float]] = []
        self.sessions: list[tuple[bytes, str, bool]] = []
        self.credits: list[tuple[int, bool]] = []
        self.added: list[AddRequest] = []
        self.disconnected: list[int] = []
        self.num_ended = 0
        self.tensors: list[bytes] = []
        self.paused = threading.Event()
        self.meter = CoreMeter()
        self._requests: dict[tuple[int, int], tuple[AddRequest, int]] = {}
        self._notices: list[tuple[int, Finished]] = []

    def connect(
        self, frontend: int, weight: float = 1.0, session: bytes = b"", name: str = "", admin: bool = True
    ) -> None:
        self.connected.append((frontend, weight))
        self.sessions.append((session, name, admin))

    def set_credit(self, frontend: int, given: bool) -> None:
        self.credits.append((frontend, given))

    error = None

    def close(self) -> None:
        pass

    def disconnect(self, frontend: int) -> None:
        self.disconnected.append(frontend)
        for key in [key for key in self._requests if key[0] == frontend]:
            del self._requests[key]

    def add_request(self, frontend: int, request: AddRequest, tensors: Sequence[Any] = (), *more: Any) -> None:
        self.added.append(request)
        self._requests[frontend, request.handle] = request, len(request.output_token_ids)
        self.tensors += map(bytes, tensors)

    def abort(self, frontend: int, handles: Sequence[int]) -> None:
        for handle_ in handles:
            if self._requests.pop((frontend, handle_), None):
                self._notices.append((frontend, Finished(handle_, "abort")))

    def call(self, method: str, args: msgspec.Raw, frontend: int = 0, arrays: Iterable[Any] = ()) -> msgspec.Raw:
        values = decode_value(args, list)
        if method == "sleep":
            time.sleep(values[0])
        elif method == "refuse":
            raise InvalidRequestError("this is refused")
        elif method == "fail":
            raise KeyError("missing")
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


class StandInOwner:
    """A stand-in for the owner of a core as clients see it. Each core is a server and a thread; `kill` ends it without
    a message, `restart` starts the next, `give_up` reports that there will be none."""

    def __init__(self, address: str | None = None, service: ServiceConfig | None = None, **endpoints: str) -> None:
        self.token = b"" if address else secrets.token_bytes(16)
        self.folder = make_runtime_dir()
        self.address = address or ipc_address(self.folder)
        self.endpoints = Endpoints(self.address, token=self.token, **endpoints)
        self.instance_id = secrets.token_bytes(8)
        self.epoch = EPOCH - 1
        self.error: EngineDeadError | None = None
        self._service = service or ServiceConfig()
        self.events: list[Any] = []  # a list, because a deque can't be read while another thread appends to it
        self.busy = False
        self.restart()

    def restart(self, **facts: Any) -> None:
        """Start the next core; `facts` replace fields of its `ModelFacts`."""
        self.load(**facts)
        self.announce()

    def load(self, **facts: Any) -> None:
        """Start the next core up to the point where it would load its model."""
        self.epoch += 1
        core = self.core = StandInCore()
        core.model = msgspec.structs.replace(core.model, **facts)
        status = CoreStatus(self.epoch, os.getpid(), os.getpid(), "loading")
        self.server = CoreServer(self.endpoints, self.instance_id, self.epoch, status, self._service)

    def announce(self) -> None:
        core = self.core
        self.server.announce(Ready(self.instance_id, self.epoch, core.model, msgspec.json.encode(core.config)))
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def kill(self) -> None:
        """End the core at once: nothing more is sent, not even messages already handed to its server."""
        self._end_loop()
        self.server.stop(None)

    def stop(self, reason: str) -> None:
        """End the core in good order, with a `Bye`."""
        self._end_loop()
        self.server.stop(reason)

    def give_up(self, reason: str) -> None:
        self.error = EngineDeadError(reason)

    def dead_error(self) -> EngineDeadError | None:
        return self.error

    def close(self) -> None:
        """A client disconnects; a shared core keeps running."""

    def end(self) -> None:
        self.stop("")
        remove_runtime_dir(self.folder)

    def _end_loop(self) -> None:
        self._stopping = True
        self._thread.join()

    def _serve(self) -> None:
        """The loop of the core process, until told to stop; while `busy` it accepts no message."""
        while not self._stopping:
            if self.busy:
                time.sleep(0.001)
                continue
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
def stand_in(**options: Any) -> Iterator[StandInOwner]:
    owner = StandInOwner(**options)
    try:
        yield owner
    finally:
        owner.end()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))
