"""A core process without a model: the code of `mainspring.core` is real, but it loads a `StandInCore`, which keeps the
journal, runs suspects alone, and dies when a request or a call tells it to. It starts in a fraction of a second."""

from __future__ import annotations

import os
import secrets
import signal
import stat
import sys
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mainspring.core.features.moved import MovedRequests
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import EngineConfig
from mainspring.ipc.errors import InvalidArgumentError
from mainspring.ipc.journal import Journal, request_key
from mainspring.ipc.messages import (
    AddRequest,
    DesiredState,
    Finished,
    FrontendStatus,
    Latency,
    ModelFacts,
    News,
    Outputs,
    Stats,
)
from stand_in_core import StandInCore

# The second token of a prompt selects how the core dies when it computes the request; the third is the output position.
HARMLESS, SEGV, KILL, RAISE, HANG, EXIT = range(6)


def die(how: int) -> None:
    if how in (SEGV, KILL):
        signal.raise_signal(signal.SIGSEGV if how == SEGV else signal.SIGKILL)
    elif how == RAISE:
        raise RuntimeError("this step fails")
    elif how == HANG:
        time.sleep(600)
    elif how == EXIT:
        os._exit(7)


@dataclass
class _Worker:
    decisions: Any
    interrupt: Any = None
    beat: Any = None


class ScriptedCore(StandInCore):
    def __init__(
        self,
        config: EngineConfig,
        make_worker: Callable[[EngineConfig], _Worker],
        journal: Journal,
        suspects: Mapping[int, int],
        quarantined: Mapping[int, str],
        over: Mapping[int, int],
    ) -> None:
        super().__init__()
        assert "torch" not in sys.modules, "this process takes seconds to start"
        self.worker = make_worker(config)
        script = config.model_config.model
        order = Path(script).read_text() if script else ""  # action while the core loads
        if order == "wait":
            time.sleep(600)
        elif order == "hold":
            while Path(script).read_text():
                time.sleep(0.01)
        elif order == "orphan":  # load until the supervisor has died; the thread that waits for that does not notice
            parent, parent_now = os.getppid(), os.getppid
            os.getppid = lambda: parent
            Path(script).unlink()
            while parent_now() == parent:
                time.sleep(0.01)
        elif order:
            raise InvalidArgumentError(order)
        cache, replace = config.cache_config, msgspec.structs.replace
        blocks = cache.num_gpu_blocks_override or secrets.randbelow(10**6) + 1
        self.config = replace(config, cache_config=replace(cache, num_gpu_blocks=blocks))
        self.on_state: Callable[[DesiredState], None] = lambda state: None
        self.on_model: Callable[[ModelFacts], None] = lambda model: None
        self._journal, self._suspects, self._quarantined = journal, dict(suspects), dict(quarantined)
        self._moved = MovedRequests(over)
        self._sessions: dict[int, bytes] = {}
        self._order = HARMLESS
        self._gate = Future[Any]()
        self._steps = 0
        self._draining = False

    def connect(self, frontend: int, weight: float = 1.0, session: bytes = b"", *more: Any) -> None:
        super().connect(frontend, weight, session, *more)
        self._sessions[frontend] = session

    def _key(self, frontend: int, handle: int) -> int:
        return request_key(self._sessions[frontend], handle)

    def add_request(self, frontend: int, request: AddRequest, tensors: Sequence[Any] = (), *more: Any) -> None:
        reason = self._quarantined.get(self._key(frontend, request.handle))
        if reason is not None or self.model.weights_lost:
            error = "WeightsLostError" if reason is None else "RequestFailedError"
            self._notices.append((frontend, Finished(request.handle, "error", error=error, error_text=reason or "")))
        elif not self._draining:
            if (released := self._moved.hold(request.moved_from)) is None:
                super().add_request(frontend, request, tensors)
            else:
                unmoved = msgspec.structs.replace(request, moved_from=[])
                released.add_done_callback(lambda _: self.add_request(frontend, unmoved))

    def hear(self, news: News) -> None:
        self._quarantined |= news.quarantined
        self._suspects |= news.suspects
        self._suspects = {key: at for key, at in self._suspects.items() if key not in news.harmless}
        self._journal.set_suspects(self._suspects)
        self._journal.set_heard(news.number)
        self._moved.end(news.over)

    phase = ""

    def restore(self, state: DesiredState) -> None:
        if state.paused:
            self.paused.set()
        self.model = msgspec.structs.replace(self.model, weights_lost=state.weights_version is not None)

    def call(self, method: str, args: msgspec.Raw, frontend: int = 0, arrays: Iterable[Any] = ()) -> Any:
        if method == "die_in_step":
            (self._order,) = decode_value(args)
        elif method == "die_now":
            die(*decode_value(args))
        elif method == "pause_generation":
            self.paused.set()
            self.on_state(DesiredState(True))
        elif method == "resume_generation":
            self.paused.clear()
            self.on_state(DesiredState(False))
        elif method == "update_weights":
            self.model = msgspec.structs.replace(self.model, weights_lost=False)
            self.on_state(DesiredState(weights_version="sent"))
            self.on_model(self.model)
        elif method == "wait":  # until any frontend calls "go_on"
            return self._gate
        elif method == "go_on":
            self._gate.set_result([4])
        elif method == "scale":
            self.on_state(DesiredState(num_cores=decode_value(args)[0]))
        elif method == "suspects":
            return encode_value(len(self._suspects))
        elif method == "facts":
            return encode_value([self.config.cache_config.num_gpu_blocks, self.worker.decisions])
        return super().call(method, args, frontend)

    def hand_out(self, give: Callable[[dict[int, Outputs]], None]) -> None:
        """No step here has outputs before its end."""

    def step(self) -> dict[int, Outputs]:
        mine = dict(self._requests)
        tried = [place for place in mine if self._key(*place) in self._suspects][:1]
        chosen = tried or list(mine)
        self._journal.launched(
            self._steps,
            np.array([self._key(*place) for place in chosen], np.uint64),
            np.array([mine[place][1] for place in chosen], np.int64),
            bool(tried),
        )
        die(self._order)
        for place in chosen:
            request, done = mine[place]
            how, at = request.prompt_token_ids[1:]
            if done >= at:
                die(how)
        self._requests = {place: mine[place] for place in chosen}
        outputs = super().step()
        self._requests = {p: self._requests.get(p, mine[p]) for p in mine if p not in chosen or p in self._requests}
        for place in tried:
            if mine[place][1] >= self._suspects[self._key(*place)]:
                del self._suspects[self._key(*place)]
        self._journal.set_suspects(self._suspects)
        self._journal.retired(self._steps)
        self._steps += 1
        return outputs

    def drain(self) -> None:
        self._draining = True

    @property
    def drained(self) -> bool:
        return self._draining and not self.has_work

    def stats(self) -> Stats:
        return Stats(num_running=len(self._requests), num_steps=self._steps)

    def latencies(self) -> tuple[Latency, Latency]:
        return Latency(), Latency()

    def frontends(self) -> list[FrontendStatus]:
        return []


def replace_cores(folder: Path, monkeypatch: Any) -> None:
    """Let supervisors start this file instead of a core: `sys.executable` becomes a script that runs it."""
    script, here = folder / "python", Path(__file__)
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{here.parent}:$PYTHONPATH" exec "{sys.executable}" -P "{here}"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr("mainspring.ipc.supervisor.sys.executable", str(script))
    monkeypatch.setattr("mainspring.ipc.supervisor.SETTLED_SECONDS", 0.0)  # no delays between restarts


def start_worker(config: EngineConfig, decisions: Any = None, ranks: Any = None) -> _Worker:
    return _Worker(secrets.token_hex(4) if decisions is None else decisions)


# In place of modules that import torch and transformers, which take seconds: what the core's main file wants of them.
REPLACED: dict[str, dict[str, Any]] = {
    "core.loop": {"EngineCore": ScriptedCore},
    "core.worker.make_worker": {"start_worker": start_worker},
    "kernels.host_memory": {"trim": lambda: None},
}


if __name__ == "__main__":
    for name, members in REPLACED.items():
        module = sys.modules[f"mainspring.{name}"] = types.ModuleType(name)
        vars(module).update(members)
    from mainspring.core.__main__ import main

    sys.exit(main())
