"""The core process, started by a supervisor as ``python -P -m mainspring.core``. It reads its configuration from
standard input."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from ..ipc import logs
from ..ipc.codec import encode_value, read_tensor
from ..ipc.errors import InvalidRequestError, wire_name, wire_text
from ..ipc.inbox import Credit, Event, Undecoded
from ..ipc.journal import Journal, Phase
from ..ipc.messages import (
    Abort,
    AddRequest,
    Bye,
    CoreStatus,
    Hello,
    News,
    Outputs,
    Ready,
    StartReport,
    UtilityCall,
    UtilityResult,
)
from ..ipc.server import CoreServer
from ..ipc.supervisor import write_message
from ..ipc.time_slices import take_short_slices
from ..ipc.transport import CoreLaunch, process_fd, readable, remove_runtime_dir, wait_for_parent
from ..kernels import prefault
from .batched_outputs import OutputBatcher

if TYPE_CHECKING:
    from ..ipc.config import EngineConfig
    from .loop import EngineCore
    from .worker.ranks import Ranks

logger = logging.getLogger("mainspring.core")

PUBLISH_SECONDS = 0.25  # seconds between two published status snapshots
TERMINATED_TOGETHER_SECONDS = 0.5  # time in which one SIGTERM to all processes has ended the supervisor, too
STUCK_SECONDS = 10.0  # time that the main thread has to report that a rank has died while it loaded the model
RATE_SECONDS = 5.0  # length in seconds of the window over which the status averages tokens per second


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend decides what Ctrl-C means
    take_short_slices()
    logs.set_up("core")
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CoreLaunch)
    faulthandler.enable(launch.crash_fd)
    if launch.number:
        parallel = msgspec.structs.replace(launch.config.parallel_config, data_parallel_rank=launch.number)
        launch.config = msgspec.structs.replace(launch.config, parallel_config=parallel)
    signal.signal(signal.SIGTERM, lambda *_: _terminated(launch))
    threading.Thread(target=_end_with_parent, args=(launch,), name="mainspring-parent", daemon=True).start()
    report = functools.partial(write_message, launch.report_fd)
    try:
        return _load_and_serve(launch, report)
    except BaseException as error:
        _write_down(launch)
        try:
            report(StartReport(wire_name(error), wire_text(error)))
        except OSError:  # the supervisor has died, and this process ends before its other thread knows
            _leave(launch)
        return 1


def _load_and_serve(launch: CoreLaunch, report: Callable[[msgspec.Struct], None]) -> int:
    # Each connection takes a file descriptor, and libzmq aborts the process when none is left.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    ranks = launch.config.parallel_config.num_local_ranks
    journal = Journal(launch.journal_fd, launch.config.scheduler_config.max_num_seqs, ranks)
    journal.set_pid(0)
    journal.set_phase(Phase.LOADING)
    status = CoreStatus(
        launch.epoch,
        os.getpid(),
        launch.parent_pid,
        Phase.LOADING.name.lower(),
        launch.config.model_config.shown_name,
        launch.restarts,
        launch.last_crash,
        core=launch.number,
    )
    server = CoreServer(
        launch.endpoints,
        launch.instance_id,
        launch.epoch,
        status,
        launch.config.service_config,
        launch.news_fd,
        launch.cores,
    )
    if gpus := launch.config.parallel_config.device_ids:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    sys.path += [folder for folder in launch.import_path if folder not in sys.path]
    _prefault(launch.config)
    decisions, others = msgspec.msgpack.decode(launch.decisions), None
    with contextlib.ExitStack() as on_error:
        if launch.config.parallel_config.num_ranks > 1:
            others = _start_ranks(launch, decisions, report)
            on_error.callback(others.close, kill=True)
        gc.disable()  # objects made by an import stay alive; collections would take a tenth of the import time
        from ..kernels import host_memory  # imports torch, which takes seconds; the server listens meanwhile
        from .loop import EngineCore
        from .worker.make_worker import start_worker

        gc.freeze()
        gc.enable()
        core = EngineCore(
            launch.config,
            functools.partial(start_worker, decisions=decisions, ranks=others),
            journal=journal,
            suspects=launch.suspects,
            quarantined=launch.quarantined,
            over=launch.over,
        )
        on_error.pop_all()
    # Free what loading left. Only the core process does so: in a user's process a collection may take long.
    gc.collect()
    prefault.drop()
    host_memory.trim()
    core.restore(launch.state)
    core.meter.epoch, core.meter.malformed_frames = launch.epoch, lambda: server.malformed_frames
    core.meter.core = launch.number
    core.on_state = report
    core.on_model = lambda model: server.announce(
        Ready(
            launch.instance_id,
            launch.epoch,
            model,
            msgspec.json.encode(core.config),
            number=launch.number,
            media=launch.media if model.media else [],
        )
    )
    core.on_model(core.model)
    loop = ServeLoop(core, server, journal, status)
    if launch.drain_timeout:
        signal.signal(signal.SIGTERM, lambda *_: loop.drain(launch.drain_timeout, lambda: _leave(launch)))
    report(StartReport(config=core.config, decisions=encode_value(core.worker.decisions), media=core.model.media))
    try:
        loop.run()
    except BaseException as error:
        _write_down(launch)
        server.stop(wire_text(error))
        return 1
    server.stop("the daemon was stopped")
    core.close()
    return 0


def _start_ranks(launch: CoreLaunch, decisions: Any, report: Callable[[msgspec.Struct], None]) -> Ranks:
    """The further ranks of the core. They import torch while this process does."""
    from .worker.ranks import Death, Host, Ranks

    def rank_died(death: Death) -> None:
        if not death.serving:  # the main thread reports it, unless it waits for the dead rank
            later = threading.Timer(STUCK_SECONDS, _end, (death.error, report))
            later.daemon = True
            return later.start()
        with os.fdopen(os.dup(launch.crash_fd), "w") as file:
            file.write(f"{death.text}\n{death.trace}\n")
        if death.killed:  # end in the same way, because what comes from outside accuses no request
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)

    host = Host(launch.runtime_dir or None, launch.journal_fd, launch.crash_fd, rank_died)
    return Ranks(launch.config, decisions, host)


def _prefault(config: EngineConfig) -> None:
    """Begin with the memory in which the weights of a model on a CPU are packed."""
    model, device = config.model_config, config.device_config.device
    on_cpu = device == "cpu" or (device == "auto" and not os.path.exists("/dev/nvidiactl"))
    layered = config.lora_config.enable_lora or model.enable_return_routed_experts  # nothing is packed
    if (
        on_cpu
        and model.quantization is None
        and not layered
        and config.parallel_config.num_ranks == 1
        and model.runner != "pooling"
    ):
        files = Path(model.model or "").expanduser().glob("*.safetensors")
        if size := sum(file.stat().st_size for file in files):
            prefault.begin(size)


class ServeLoop:
    """Runs the steps of `core`, and carries messages between it and the frontends of `server`."""

    def __init__(self, core: EngineCore, server: CoreServer, journal: Journal, status: CoreStatus) -> None:
        self._core, self._server, self._journal, self._status = core, server, journal, status
        self._started = time.monotonic()
        self._published = 0.0
        self._counts: list[tuple[float, int]] = []  # (time, tokens generated so far), within RATE_SECONDS
        self._drain_until: float | None = None
        self._batcher = OutputBatcher()
        core.worker.interrupt, core.worker.beat = server.messages_wait, journal.beat
        core.hand_out(self._send)
        journal.set_phase(Phase.SERVING)
        self._publish(self._started)

    def run(self) -> None:
        """Returns only after `drain`."""
        core, server, journal, batcher = self._core, self._server, self._journal, self._batcher
        while True:
            journal.beat()
            events = server.receive(wait=not core.has_work)
            for event in events:
                before, is_call = journal.phase, isinstance(event.message, UtilityCall)
                if is_call:
                    journal.set_phase(Phase.CALLING)
                handle(core, server, event)
                if is_call:
                    journal.set_phase(before if self._drain_until is None else Phase.DRAINING)
                elif isinstance(event.message, AddRequest):
                    batcher.added(event.frontend, event.message)
                elif isinstance(event.message, Bye):
                    batcher.forget(event.frontend)
            brought = core.step() if core.has_work else {}
            self._send(brought, core.has_work)
            now, at_rest = time.monotonic(), bool(events) and not core.has_work
            if at_rest or now - self._published > PUBLISH_SECONDS:
                self._publish(now)
            if self._drain_until is not None and (core.drained or now > self._drain_until):
                return

    def _send(self, brought: dict[int, Outputs], more: bool = True) -> None:
        for frontend, outputs in self._batcher.due(brought, time.monotonic(), more):
            self._server.send(frontend, outputs)

    def drain(self, seconds: float, end_now: Callable[[], NoReturn]) -> None:
        """Let `run` finish the accepted requests within `seconds`, and then return. A second call ends the process at
        once. A signal handler may call this."""
        if self._drain_until is not None:
            end_now()
        self._drain_until = time.monotonic() + seconds
        self._journal.set_phase(Phase.DRAINING)
        self._core.drain()

    def _publish(self, now: float) -> None:
        core, stats = self._core, self._core.stats()
        self._published = now
        self._counts.append((now, stats.generation_tokens))
        while self._counts[0][0] < now - RATE_SECONDS:
            self._counts.pop(0)
        (then, before), seconds = self._counts[0], now - self._counts[0][0]
        first, between = core.latencies()
        self._server.publish(
            msgspec.structs.replace(
                self._status,
                phase=core.phase or self._journal.phase.name.lower(),
                uptime_s=now - self._started,
                num_blocks=core.config.cache_config.num_gpu_blocks or 0,
                tokens_per_s=(stats.generation_tokens - before) / seconds if then < now else 0.0,
                time_to_first_token=first,
                inter_token_latency=between,
                stats=stats,
                frontends=core.frontends(),
            ),
            core.meter.measured(),
        )


def handle(core: EngineCore, server: CoreServer, event: Event) -> None:
    frontend, message = event.frontend, event.message
    match message:
        case AddRequest():
            core.add_request(frontend, message, event.tensors)
        case Undecoded():
            core.refuse(frontend, message.handle, InvalidRequestError(message.reason))
        case Abort():
            core.abort(frontend, message.handles)
        case UtilityCall():
            _answer(core, server, event)
        case Hello():
            core.connect(frontend, message.weight, message.session, message.client_name, event.admin)
        case Credit():
            core.set_credit(frontend, message.given)
        case News():
            core.hear(message)
            server.failed_start = message.failed_start
            if [*server.cores] != message.cores:
                server.cores = message.cores
                core.on_model(core.model)
        case Bye():
            core.disconnect(frontend)
            server.release(frontend)


NOTHING = msgspec.Raw(b"\xc0")


def _answer(core: EngineCore, server: CoreServer, event: Event) -> None:
    """Answer a utility call: now, or when its future is done."""
    frontend, call = event.frontend, event.message

    def tell(result: msgspec.Raw = NOTHING, error: BaseException | None = None) -> None:
        name, text = (wire_name(error), wire_text(error)) if error else ("", "")
        server.send(frontend, UtilityResult(call.call_id, result, name, text))

    def tell_later(done: Future[Any]) -> None:
        error = done.exception()
        tell(NOTHING if error else encode_value(done.result()), error)

    try:
        arrays = (read_tensor(tensor, event.tensors) for tensor in call.tensors)  # once the caller may call the method
        answer = core.call(call.method, call.args, frontend, arrays)
    except Exception as error:  # send any error of the method to the caller; it must not end the core
        logger.debug("%s failed", call.method, exc_info=True)
        return tell(error=error)
    if not isinstance(answer, Future):
        return tell(answer)
    answer.add_done_callback(lambda done: None if done.cancelled() else tell_later(done))


def _write_down(launch: CoreLaunch) -> None:
    """Write the traceback of the current exception to the crash file, which the supervisor reads."""
    with os.fdopen(os.dup(launch.crash_fd), "w") as file:
        traceback.print_exc(file=file)


def _end(error: BaseException, report: Callable[[msgspec.Struct], None]) -> NoReturn:
    """End the process, whose main thread hangs, with the error of its start."""
    with contextlib.suppress(OSError):
        report(StartReport(wire_name(error), wire_text(error)))
    os._exit(1)


def _end_with_parent(launch: CoreLaunch) -> None:
    wait_for_parent(launch.parent_pid)
    _leave(launch)


def _terminated(launch: CoreLaunch) -> NoReturn:
    """End on SIGTERM. If the supervisor lives, it starts the next core in the runtime folder, or removes the folder. If
    the same signal ends the supervisor at this moment, this process removes the folder."""
    parallel, seqs = launch.config.parallel_config, launch.config.scheduler_config.max_num_seqs
    journal = Journal(launch.journal_fd, seqs, parallel.num_local_ranks)
    if journal.phase is not Phase.DRAINING and (fd := process_fd(launch.parent_pid)) is not None:
        readable([fd], TERMINATED_TOGETHER_SECONDS)
    if os.getppid() == launch.parent_pid:
        os._exit(0)
    _leave(launch)


def _leave(launch: CoreLaunch) -> NoReturn:
    remove_runtime_dir(launch.runtime_dir)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
