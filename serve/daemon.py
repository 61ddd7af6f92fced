"""The daemon: a supervisor that keeps a core running at an address until it is stopped. Manual: docs/daemon.md."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import zmq

from ..engine.observe.metrics import OF_SUPERVISOR, PREFIX, Metric, metrics_of
from ..engine.placement import place
from ..ipc.config import EngineConfig
from ..ipc.connection import ask_status
from ..ipc.core_group import CoreGroup
from ..ipc.errors import AddressInUseError, InvalidArgumentError, MainspringError
from ..ipc.journal import Phase
from ..ipc.keys import default_allowed, load_allowed, load_keypair
from ..ipc.messages import Measured, Stats
from ..ipc.supervisor import Supervisor
from ..ipc.transport import Endpoints, bind_router, default_folder, ipc_address, ipc_path, lock_address
from .daemon_options import DaemonOptions
from .health import heartbeat, notify, probes


def serve(options: DaemonOptions, config: EngineConfig, on_ready: Callable[[str], None], runtime_dir: str = "") -> None:
    """Keep the cores running until SIGTERM or SIGINT, or until all have died too often. For the main thread.

    Args:
        on_ready: called once, with how to connect, when the cores serve.
        runtime_dir: as for `Supervisor`.

    Raises:
        InvalidArgumentError: the options contradict each other, or a key can't be read.
        AddressInUseError: an address is another's, or can't be listened at.
        EngineDeadError: the core died too often.
        MainspringError: the first core did not start; its error.
    """
    endpoints = endpoints_of(options)
    paths = [
        path for address in (endpoints.address, endpoints.admin_address) if address and (path := ipc_path(address))
    ]
    stopping = False

    def stop(*_: Any) -> None:
        nonlocal stopping
        stopping = True
        notify("STOPPING=1")
        group.stop()

    def ready() -> bool:
        supervisor, listens = group.first, all(path.is_socket() for path in paths)  # a core makes a deleted file again
        return supervisor.ready and not stopping and supervisor.phase is not Phase.DRAINING and listens

    def status() -> str:
        phase = "stopping" if stopping else "serving" if ready() else "starting"
        pids = ", ".join(f"core pid {one.core_pid}" for one in group.running)
        return f"{phase} at {endpoints.address}, {pids}, {sum(one.launch.restarts for one in group.running)} restarts"

    with contextlib.ExitStack() as stack:
        for number in range(config.parallel_config.num_cores):
            each = endpoints.of(number)
            for address in filter(None, (each.address, each.admin_address)):
                _claim(address, stack)
        placement = place(config)
        stack.callback(placement.close)
        config = placement.config
        group = CoreGroup(config, endpoints, runtime_dir, options.drain_timeout, partial(_claim, stack=stack))
        if options.http_port is not None:
            stack.enter_context(probes(options.http_host, options.http_port, ready))
        if (port := config.observability_config.metrics_port) is not None:
            from ..engine.observe.prometheus import serve_metrics

            keys = {"key": options.key, "server_key": load_keypair(options.key).public} if options.key else {}
            tell = partial(_metrics, group, config, keys)
            stack.callback(serve_metrics(options.http_host, port, tell)[1])
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        stack.enter_context(heartbeat(status))
        try:
            group.start()
        except Exception:
            if stopping:  # we ended it ourselves
                return
            raise
        on_ready(_how_to_connect(endpoints.address, options))
        notify(f"READY=1\nSTATUS={status()}")
        group.run()


def endpoints_of(options: DaemonOptions) -> Endpoints:
    """Where to listen, and which keys may connect.

    Raises:
        InvalidArgumentError: tcp without keys, or options that contradict each other.
        AddressInUseError: an address can't be opened.
    """
    try:
        address = _absolute(options.listen or ipc_address(default_folder()))
        over_tcp = ipc_path(address) is None
        beside = f"{address}.admin" if options.listen else address.replace("core.sock", "admin.sock")
        admin = _absolute(options.admin_listen or ("" if over_tcp else beside))
        if admin and (ipc_path(admin) is None) != over_tcp:
            raise InvalidArgumentError(f"admin_listen is {admin}; it must be of the same kind as listen, {address}")
    except InvalidArgumentError as error:
        raise AddressInUseError(str(error)) from None
    if not over_tcp:
        for name in ("key", "allowed_keys", "insecure"):
            if getattr(options, name):
                raise InvalidArgumentError(f"{name} is for tcp, but listen is {address}, where the folder decides")
        return Endpoints(address, admin)
    if options.insecure:
        if options.key or options.allowed_keys:
            raise InvalidArgumentError("insecure is set beside key or allowed_keys; choose one")
        return Endpoints(address, admin)
    if not options.key:
        raise InvalidArgumentError(
            f"listen is {address}, where anybody could come in: give --key (mainspring keys new makes one) and list "
            "who may connect (mainspring keys allow), or write --insecure"
        )
    allowed = os.path.abspath(options.allowed_keys or default_allowed())
    load_allowed(allowed)  # raise its errors now, not at the first connection
    return Endpoints(address, admin, load_keypair(options.key).secret, allowed)


def _metrics(group: CoreGroup, config: EngineConfig, keys: dict[str, Any]) -> list[Metric]:
    """The metrics of all cores."""
    return [metric for one in group.running for metric in _metrics_of_core(one, config, keys)]


def _metrics_of_core(supervisor: Supervisor, config: EngineConfig, keys: dict[str, Any]) -> list[Metric]:
    """The metrics of a core. While it does not answer, only those that the supervisor knows."""
    launch = supervisor.launch
    address = launch.endpoints.address.replace("//*:", "//127.0.0.1:")
    ours: dict[str, Any] = {
        "epoch": launch.epoch,
        "requests_quarantined": supervisor.siblings.num_quarantined,
        "core": launch.number,
    }
    model, lora = config.model_config.shown_name, config.lora_config
    try:
        status = ask_status(address, **keys)
    except MainspringError:
        found = metrics_of(Stats(**ours), Measured(), model, launch.restarts)
        return [one for one in found if one.name.removeprefix(PREFIX) in OF_SUPERVISOR]
    stats = msgspec.structs.replace(status.core.stats, malformed_frames=status.core.malformed_frames, **ours)
    return metrics_of(stats, status.measured, model, launch.restarts, lora.max_loras if lora.enable_lora else 0)


def _absolute(address: str) -> str:
    """The address with an absolute path."""
    path = ipc_path(address) if address else None
    return address if path is None else f"ipc://{path.expanduser().absolute()}"


def _claim(address: str, stack: contextlib.ExitStack) -> None:
    """Lock an address for as long as `stack` is open, or raise why that fails."""
    try:
        path = ipc_path(address)
        if path is not None and (lock := lock_address(address)) is not None:
            stack.callback(os.close, lock)
            stack.callback(path.unlink, missing_ok=True)
        else:  # the core will bind it; bind it once now, to find errors early
            with zmq.Context() as context:
                bind_router(context, address).close()
    except InvalidArgumentError as error:
        raise AddressInUseError(str(error)) from None


def _how_to_connect(address: str, options: DaemonOptions) -> str:
    keys = f" --server-key {load_keypair(options.key).public!r}" if options.key else ""
    return f'ready at {address}; in another terminal: mainspring generate --connect {address}{keys} "Hello"'
