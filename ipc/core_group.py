"""The cores of a daemon, or of an engine: one, or several that each hold a copy of the model (data parallel).

Each core has a supervisor of its own, so that the death of one concerns no other. The first one's supervisor runs in
the caller's thread, because nearly every group is a single core.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any

from msgspec.structs import replace

from .config import EngineConfig
from .errors import EngineDeadError, EngineStartError
from .media_workers import MediaWorkers
from .messages import DesiredState, Listening
from .siblings import Siblings
from .supervisor import Supervisor
from .transport import Endpoints, ipc_address, make_runtime_dir, remove_runtime_dir

logger = logging.getLogger(__name__)

LEAVE_SECONDS = 0.5  # from when frontends are told that a core takes no more requests until it begins to drain


class CoreGroup:
    """Has the interface of a `Supervisor`. Cores have numbers from 0 on; core 0 listens at the given endpoints, and the
    others beside it.

    Args:
        config, endpoints, runtime_dir, drain_timeout: as for `Supervisor`.
        claim: called with an address before a core that was added later listens there; raises if that is impossible.
    """

    def __init__(
        self,
        config: EngineConfig,
        endpoints: Endpoints,
        runtime_dir: str = "",
        drain_timeout: float = 0.0,
        claim: Callable[[str], None] = lambda address: None,
    ) -> None:
        if not endpoints.token:
            endpoints = replace(endpoints, worker_token=secrets.token_bytes(16))
        self._endpoints, self._claim = endpoints, claim
        self._runtime_dir, self._drain_timeout = runtime_dir, drain_timeout
        self._lock = threading.Lock()  # guards the members and their number
        self._siblings = Siblings()
        self._threads: dict[int, threading.Thread] = {}
        self._down: set[int] = set()  # cores that did not start or stay down
        self._stopping = False
        self._wanted = config.parallel_config.num_cores
        first = [endpoints.of(number) for number in range(self._wanted)]
        self._claimed = {address for one in first for address in (one.address, one.admin_address)}
        self.dead_error: EngineDeadError | None = None
        self.supervisors: dict[int, Supervisor] = {}
        self.media = MediaWorkers(config, endpoints)
        for number in range(self._wanted):
            self._make(number, config)

    @property
    def first(self) -> Supervisor:
        return self.supervisors[0]

    @property
    def running(self) -> list[Supervisor]:
        """Those of the cores that there are to be."""
        return [one for number, one in sorted(self.supervisors.items()) if number < self._wanted]

    def start(self) -> None:
        """Start the cores, and wait until all serve. The first one decides about the size of the KV cache and how the
        model is computed.

        Raises:
            MainspringError: a core did not start; this is its error.
        """
        others, errors = [one for number, one in self.supervisors.items() if number], list[BaseException]()

        def start(one: Supervisor) -> None:
            try:
                found = self.first.launch  # as its core has filled it in
                one.launch.config, one.launch.decisions = found.config, found.decisions
                one.start()
            except BaseException as error:
                errors.append(error)

        self._siblings.listen({number: self._listening(number) for number in self.supervisors})
        try:
            self.first.start()
            starting = [threading.Thread(target=start, args=(one,), daemon=True) for one in others]
            for thread in starting:
                thread.start()
            for thread in starting:
                thread.join()
            if errors:
                raise errors[0]
            self._start_media()
        except BaseException:
            self.media.close()
            for one in self.supervisors.values():
                if one.ready or one.core_pid is None:
                    one.end()
                else:
                    one.stop()
            raise
        for number, one in self.supervisors.items():
            if number:
                self._in_thread(number, self._keep, one)

    def run(self) -> None:
        """Keep all cores running until `stop`. A core that has died too often stays down; the others go on.

        Raises:
            EngineDeadError: all cores died too often.
        """
        try:
            self._keep(self.first)
            while threads := [thread for thread in self._threads.values() if thread.is_alive()]:
                threads[0].join()
            if not self._stopping:
                self.dead_error = self.first.dead_error
        except BaseException as error:
            self.dead_error = EngineDeadError(f"the supervisor failed: {error!r}")
            raise
        finally:
            self.stop()
            for thread in list(self._threads.values()):
                thread.join()
            self.media.close()
        if self.dead_error is not None:
            raise self.dead_error

    def stop(self) -> None:
        """Let all cores finish their requests, as `Supervisor.stop`. A signal handler may call this."""
        again, self._stopping = self._stopping, True
        for one in list(self.supervisors.values()):
            if again:
                one.stop()
            else:
                one.stop_once()

    # ------------------------------------------------------------------ more cores, or fewer

    def scale(self, count: int) -> None:
        """Have `count` cores. Further ones, and those that did not start or stay down, take requests when they have
        loaded. Those above the count take no more, finish theirs within `drain_timeout`, and leave the rest to the
        others."""
        with self._lock:
            if self._stopping:
                return
            before, self._wanted = self._wanted, count
            logger.info("%d cores are wanted, so far %d", count, before)
            leaving = range(count, before)
            down, self._down = self._down, set()
            for number in range(1, count):
                if number >= before or number in down:
                    self._in_thread(number, self._join, number, self._threads.get(number))
            if 0 in down:  # the others may be all that serve so far
                self._in_thread(0, self._join, 0, self._threads.get(0), leaving)
            elif self.first.dead_error is None:
                self._let_leave(leaving)

    def _let_leave(self, numbers: Iterable[int]) -> None:
        """Tell frontends to send these cores no more requests, and stop the cores `LEAVE_SECONDS` later."""
        self._siblings.listen(dict.fromkeys(numbers))
        for number in numbers:
            if number in self.supervisors:
                threading.Timer(LEAVE_SECONDS, self.supervisors[number].stop_once).start()

    def _join(self, number: int, earlier: threading.Thread | None, leaving: Iterable[int] = ()) -> None:
        """Start a further core, and keep it running. leaving: the cores that leave when it serves."""
        if earlier is not None:
            earlier.join()  # a core of this number may still be finishing its requests
        try:
            one = self._load(number)
        except Exception as error:
            logger.error("core %d did not start: %s", number, error)
            with self._lock:
                if number < self._wanted and not self._stopping:
                    self._down.add(number)
                    self._siblings.failed(f"{datetime.now():%Y-%m-%d %H:%M:%S.%f} core {number} did not start: {error}")
            return
        if one is None:
            return
        if number < self._wanted:
            self._siblings.listen({number: self._listening(number)})
        self._let_leave(leaving)
        self._keep(one)

    def _load(self, number: int) -> Supervisor | None:
        """Start a further core. It begins with the state that users have set. If they set another one while it loads,
        it is started again. None: it is not wanted any more."""
        endpoints = self._endpoints.of(number)
        while not self._stopping and number < self._wanted:
            for address in (endpoints.address, endpoints.admin_address):
                if address and address not in self._claimed:
                    self._claim(address)
                    self._claimed.add(address)
            serving = next((one for one in self.running if one.ready), self.first)
            with self._lock:
                one = self._make(number, serving.launch.config)
            one.launch.decisions = serving.launch.decisions
            one.launch.state = before = serving.launch.state
            one.start()
            now = serving.launch.state
            if _of_all(now) == _of_all(before):
                return one
            one.end()
            if now.weights_version != before.weights_version:
                raise EngineStartError("the weights were replaced while it loaded, and it has those of the checkpoint")
            logger.info("core %d starts again: the engine's state changed while it loaded", number)
        return None

    # ------------------------------------------------------------------ one core

    def _make(self, number: int, config: EngineConfig) -> Supervisor:
        self.supervisors[number] = one = Supervisor(
            config,
            self._endpoints.of(number),
            "" if number else self._runtime_dir,
            self._drain_timeout,
            number,
            self._siblings,
            environment_of(config, number, self._wanted),
            self._on_state,
        )
        if self._stopping:  # `stop` may not have seen it
            one.stop_once()
        one.launch.media = self.media.places
        return one

    def _start_media(self) -> None:
        """Let media workers start on demand, if the model takes media."""
        if self.first.media:
            self.media.config = self.first.launch.config
            self.media.start()
        else:
            self.media.close()

    def _on_state(self, now: DesiredState) -> None:
        if now.num_cores is not None:
            self.scale(now.num_cores)

    def _keep(self, one: Supervisor) -> None:
        try:
            one.run()
        except EngineDeadError as error:
            logger.error("core %d stays down: %s", one.launch.number, error)
        finally:
            with self._lock:
                if one.dead_error is not None:
                    self._down.add(one.launch.number)
                self._siblings.listen({one.launch.number: None})

    def _in_thread(self, number: int, run: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=run, args=args, name=f"mainspring-core-{number}", daemon=True)
        self._threads[number] = thread
        thread.start()

    def _listening(self, number: int) -> Listening:
        endpoints = self._endpoints.of(number)
        return Listening(number, endpoints.address, endpoints.admin_address)


def _of_all(state: DesiredState) -> DesiredState:
    """What is the same for all cores. Each has the adapters of its own requests."""
    return replace(state, adapters=[], fingerprint="", num_cores=None)


def environment_of(config: EngineConfig, number: int, count: int) -> dict[str, str]:
    """The environment of core `number` of `count`: its own GPUs, or its share of the processors."""
    parallel = config.parallel_config
    if count == 1 and not number:
        return {}
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = [str(at) for at in range(len(glob.glob("/dev/nvidia[0-9]*")))] if listed is None else listed.split(",")
    if config.device_config.device != "cpu" and any(devices):
        width = parallel.num_local_ranks
        own = [devices[(number * width + at) % len(devices)] for at in range(width)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(dict.fromkeys(own))}
    if "OMP_NUM_THREADS" in os.environ:
        return {}
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // max(count, number + 1)))}


class EmbeddedCores:
    """Cores that belong to this process, with their supervisors in threads. They end with this process, however that
    ends.

    Each is a fresh interpreter, so scripts and notebooks need no ``__main__`` guard. Its configuration comes over
    standard input. It watches this process and exits when this one has ended.

    Raises:
        MainspringError: a core did not start; the error it raised, under its own type.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.token = secrets.token_bytes(16)
        folder = make_runtime_dir()
        try:
            self.address = ipc_address(folder)
            self.group = CoreGroup(config, Endpoints(self.address, token=self.token), folder)
            self.group.start()
        except BaseException:
            remove_runtime_dir(folder)
            raise
        self._thread = threading.Thread(target=_run, args=(self.group,), name="mainspring-supervisor", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self.group, self._thread, folder, os.getpid())

    @property
    def supervisor(self) -> Supervisor:
        """Of the first core."""
        return self.group.first

    def dead_error(self) -> EngineDeadError | None:
        return self.group.dead_error

    def close(self) -> None:
        """End the cores and remove their sockets. A second call does nothing."""
        self._end()


def _run(group: CoreGroup) -> None:
    with contextlib.suppress(EngineDeadError):  # kept in `dead_error`
        group.run()


def _end(group: CoreGroup, thread: threading.Thread, folder: str, owner: int) -> None:
    if os.getpid() != owner:
        return  # in a forked child: the cores belong to their parent
    group.stop()
    thread.join()
    remove_runtime_dir(folder)
