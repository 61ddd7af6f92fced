"""The core process: ``python -P -m mainspring.core``, its configuration on standard input. Started by launch.py."""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from typing import NoReturn

import msgspec

from ..ipc.errors import MainspringError, wire_name, wire_text
from ..ipc.inproc_client import Core
from ..ipc.messages import Abort, AddRequest, Bye, Hello, Ready, StartReport, UtilityCall, UtilityResult
from ..ipc.server import CoreServer, Event
from ..ipc.transport import CoreLaunch, ProcessWatch, remove_runtime_dir

logger = logging.getLogger("mainspring.core")


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the frontend decides what Ctrl-C means
    logging.basicConfig(
        level=os.environ.get("MAINSPRING_LOG_LEVEL", "WARNING").upper(),
        format="%(asctime)s core %(levelname)s %(name)s: %(message)s",
    )
    launch = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=CoreLaunch)
    # Whoever ends this process may end its parent in the same instant, so the folder is not left to the parent alone.
    signal.signal(signal.SIGTERM, lambda *_: _leave(launch))
    parent = ProcessWatch(launch.parent_pid, lambda: os.getppid() != launch.parent_pid)
    if os.getppid() != launch.parent_pid:
        _leave(launch)
    try:
        server = CoreServer(
            launch.address, launch.instance_id, launch.epoch, launch.token, parent, lambda: _leave(launch)
        )
        from .engine_core import EngineCore  # torch and transformers: only now, so that the watch runs beside it

        core = EngineCore(launch.config)
    except BaseException as error:
        logger.debug("%s", traceback.format_exc())
        if not isinstance(error, MainspringError):
            traceback.print_exc()
        _report(launch, StartReport(wire_name(error), wire_text(error)))
        return 1
    server.announce(Ready(launch.instance_id, launch.epoch, core.model, msgspec.json.encode(core.config)))
    _report(launch, StartReport())
    try:
        serve(core, server)
    except BaseException as error:
        traceback.print_exc()
        server.stop(wire_text(error))
        return 1


def serve(core: Core, server: CoreServer) -> NoReturn:
    """Drive `core` for the frontends of `server`, for ever."""
    while True:
        for event in server.receive(wait=not core.has_work):
            handle(core, server, event)
        if core.has_work:
            for frontend, outputs in core.step().items():
                server.send(frontend, outputs)


def handle(core: Core, server: CoreServer, event: Event) -> None:
    frontend, message = event.frontend, event.message
    match message:
        case AddRequest():
            core.add_request(frontend, message, event.tensors)
        case Abort():
            core.abort(frontend, message.handles)
        case UtilityCall():
            server.send(frontend, _answer(core, message))
        case Hello():
            core.connect(frontend, message.weight)
        case Bye():
            core.disconnect(frontend)
            server.release(frontend)


def _answer(core: Core, call: UtilityCall) -> UtilityResult:
    try:
        return UtilityResult(call.call_id, core.call(call.method, call.args))
    except Exception as error:  # whatever a method raises is the caller's to see, and must not end the core
        logger.debug("%s failed: %s", call.method, traceback.format_exc())
        return UtilityResult(call.call_id, error=wire_name(error), error_text=wire_text(error))


def _report(launch: CoreLaunch, report: StartReport) -> None:
    os.write(launch.report_fd, msgspec.msgpack.encode(report))
    os.close(launch.report_fd)


def _leave(launch: CoreLaunch) -> NoReturn:
    remove_runtime_dir(launch.runtime_dir)
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
