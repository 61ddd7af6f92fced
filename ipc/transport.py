"""Sockets, their addresses, the folders of Unix sockets, and helpers to wait for descriptors and processes."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import zmq

from .config import EngineConfig
from .errors import AddressInUseError, InvalidArgumentError
from .messages import CorePlace, DesiredState, Listening

MAX_PATH_BYTES = 107  # of a Unix socket's path, a limit of the kernel
MAX_MESSAGE_BYTES = 256 << 20  # of one frame, if nothing else limits it
CORE_TIMEOUT = 30.0  # seconds without an answer from the core's machine after which its connection is lost
RECEIVE_QUEUE, SEND_QUEUE = 100, 100  # messages that libzmq queues for each peer of the core
PARENT_POLL_SECONDS = 0.5  # interval between checks of the parent process, if the kernel has no pidfd
Socket = zmq.Socket[bytes]


class Endpoints(msgspec.Struct, frozen=True):
    """Where a core listens, and which frontends may connect."""

    address: str  # ipc://PATH or tcp://HOST:PORT
    admin_address: str = ""  # connections to this address may change the engine for all frontends
    secret_key: str = ""  # the server's CURVE key in Z85; empty: no CURVE
    allowed_keys: str = ""  # path of the list of public keys, read anew for each connection
    token: bytes = b""  # a secret that every Hello must hold; then every connection is an admin's
    worker_token: bytes = b""  # a secret of the daemon's own processes, whose connections are an admin's

    def of(self, number: int) -> Endpoints:
        """Those of core `number` of a group, whose first core listens here."""
        address, admin = beside(self.address, number), beside(self.admin_address, number)
        return msgspec.structs.replace(self, address=address, admin_address=admin)


class CoreLaunch(msgspec.Struct):
    """The message that a starting core reads from its standard input, as msgpack."""

    config: EngineConfig
    endpoints: Endpoints
    instance_id: bytes
    parent_pid: int
    journal_fd: int
    crash_fd: int  # where its last traceback goes
    runtime_dir: str  # removed by the core if its parent dies
    drain_timeout: float  # seconds; 0: SIGTERM ends it at once
    report_fd: int = -1  # where its `StartReport` goes, and each `DesiredState` after it
    epoch: int = 0
    suspects: dict[int, int] = {}  # key → output position up to which the request is computed alone
    quarantined: dict[int, str] = {}  # key → reason why the request is refused
    decisions: msgspec.Raw = msgspec.Raw(b"\xc0")  # the `Decisions` of the previous core's worker
    state: DesiredState = DesiredState()
    restarts: int = 0
    last_crash: str = ""
    import_path: list[str] = []  # folders, after the core's own, with the modules of `logits_processors`
    number: int = 0  # of the core in its group
    news_fd: int = -1  # where the supervisor's `News` come from
    cores: list[Listening] = []  # as in `News`
    over: dict[int, int] = {}  # as in `News`
    media: list[str] = []  # where media workers listen, as in `Ready`


def free_port(host: str) -> int:
    """A port of this machine at which nobody listens now."""
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


def address_towards(host: str) -> str:
    """The address of this machine that `host` can reach: that of the network on the way there. Nothing is sent."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        found: str = probe.getsockname()[0]
        return found


def make_runtime_dir() -> str:
    """Make a folder for the socket of one embedded core. Only this user can enter it."""
    return tempfile.mkdtemp(prefix="mainspring-", dir=_runtime_base() or tempfile.gettempdir())


def remove_runtime_dir(path: str) -> None:
    """Remove the folder that `make_runtime_dir` made, also while another thread makes its socket there, or removes it.
    An empty `path` is no folder."""
    if path:
        unused = f"{path}.unused"  # under another name nothing new gets into it
        with contextlib.suppress(OSError):  # another thread or process has renamed it, and may end before it is removed
            os.rename(path, unused)
        shutil.rmtree(unused, ignore_errors=True)


def default_folder() -> Path:
    """This user's folder for the socket of a daemon. It is made if it does not exist.

    Raises:
        InvalidArgumentError: the path is no folder, or other users could enter it.
    """
    base = _runtime_base()
    folder = Path(base, "mainspring") if base else Path(tempfile.gettempdir(), f"mainspring-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise InvalidArgumentError(f"the folder {folder} can't be made: {error.strerror}; give --listen") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise InvalidArgumentError(f"{folder} is not a folder that only you can enter: remove it, or give --listen")
    return folder


def _runtime_base() -> str:
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    return base if base and os.path.isdir(base) and os.access(base, os.W_OK) else ""


def ipc_path(address: str) -> Path | None:
    """The path of the socket of an ipc address; None for tcp.

    Raises:
        InvalidArgumentError: not an ipc or tcp address, or the path is too long for a socket.
    """
    kind, _, rest = address.partition("://")
    if kind == "tcp" and rest.rpartition(":")[0] and rest.rpartition(":")[2].isdigit():
        return None
    if kind != "ipc" or not rest:
        raise InvalidArgumentError(f"{address!r} is no address; it must be ipc://PATH or tcp://HOST:PORT")
    size = len(os.fsencode(rest))
    if size > MAX_PATH_BYTES:
        raise InvalidArgumentError(
            f"socket path {rest!r} has {size} bytes; the limit is {MAX_PATH_BYTES}: choose a shorter one, or set "
            "TMPDIR or XDG_RUNTIME_DIR to a shorter folder"
        )
    return Path(rest)


def ipc_address(folder: str | Path) -> str:
    address = f"ipc://{folder}/core.sock"
    ipc_path(address)
    return address


def beside(address: str, number: int) -> str:
    """Where core `number` of a group listens, whose first core listens at `address`: at a socket beside that one, or at
    a further port."""
    if not number or not address:
        return address
    if ipc_path(address) is not None:
        return f"{address}.{number}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + number}"


def place_of(address: str) -> str:
    """The part of an address in which the cores of a group differ, see `CorePlace`."""
    path = ipc_path(address)
    return address.rpartition(":")[2] if path is None else path.name


def address_at(own: str, place: str) -> str:
    """The address of a core of the group whose other core is reached at `own`."""
    path = ipc_path(own)
    return f"{own.rpartition(':')[0]}:{place}" if path is None else f"ipc://{path.with_name(place)}"


def places(cores: Sequence[Listening], admin: bool, number: int) -> list[CorePlace]:
    """The cores of a group as core `number` tells a frontend; none if it is the only one."""
    where = [CorePlace(one.number, place_of((admin and one.admin_address) or one.address)) for one in cores]
    return [] if [one.number for one in where] == [number] else where


def lock_address(address: str) -> int | None:
    """Lock an ipc address until the returned descriptor is closed or the process ends; None for tcp, where binding is
    the lock. Without it a second bind to a live Unix socket would succeed and take it over. A socket file without a
    lock is left over from a crash, and is replaced.

    Raises:
        AddressInUseError: another process holds the lock.
        InvalidArgumentError: the path is too long, or its folder can't be written.
    """
    path = ipc_path(address)
    if path is None:
        return None
    try:
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700, parents=True)
        fd = os.open(f"{path}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidArgumentError(f"{path.parent} can't be written: {error.strerror}; choose another folder") from None
    for _ in range(3):  # `lock_holder` in another process may hold it for an instant
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(0.02)
    else:
        owner = os.pread(fd, 20, 0).decode()
        os.close(fd)
        raise AddressInUseError(f"{address} is in use by process {owner}: stop it, or choose another address")
    os.ftruncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def lock_holder(address: str) -> int | None:
    """The process that holds the lock of `address`; None if no process does, and for tcp."""
    path = ipc_path(address)
    if path is None:
        return None
    with contextlib.suppress(OSError, ValueError):
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return int(os.pread(fd, 20, 0))
        finally:
            os.close(fd)
    return None


def bind_router(
    context: zmq.Context[Socket],
    address: str,
    peer_timeout: float = 10.0,
    secret_key: str = "",
    monitored: int = 0,
    max_frame_bytes: int = MAX_MESSAGE_BYTES,
) -> Socket:
    """A core's socket. Sends never block: they raise for a peer that is gone or slow. A peer whose machine has not
    answered for `peer_timeout` seconds is gone. The socket is monitored for the events `monitored` from the start on.
    libzmq closes the connection of a peer that sends a larger frame than `max_frame_bytes`.

    Raises:
        AddressInUseError: another process listens there.
        InvalidArgumentError: the address can't be opened.
    """
    # libzmq numbers its peers from an unseeded rand(). A peer that guessed the next number and used it as its routing
    # id would make the process abort.
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "big"))
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.ROUTER_MANDATORY, 1)
    router.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
    router.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
    router.setsockopt(zmq.SNDHWM, SEND_QUEUE)
    _keep_alive(router, peer_timeout)
    if secret_key:
        router.setsockopt(zmq.CURVE_SERVER, 1)
        router.setsockopt_string(zmq.CURVE_SECRETKEY, secret_key)
    monitor = router.get_monitor_socket(monitored) if monitored else None
    try:
        bind(router, address)
    except BaseException:
        if monitor is not None:
            monitor.close(linger=0)
        router.close()
        raise
    return router


def bind(router: Socket, address: str) -> None:
    """Let a core's socket listen at an address. Raises like `bind_router`."""
    old = os.umask(0o177)  # only the owner may open the socket file
    try:
        router.bind(address)
    except zmq.ZMQError as error:
        if error.errno == zmq.EADDRINUSE:
            raise AddressInUseError(f"{address} is in use: stop who listens there, or choose another") from None
        raise InvalidArgumentError(f"nobody can listen at {address}: {error.strerror}") from None
    finally:
        os.umask(old)


def _keep_alive(one: Socket, timeout: float) -> None:
    """Let the kernels detect, within `timeout` seconds, that the other machine is gone. Nothing else ends a connection:
    a peer that is stopped or busy is not lost. (ZMTP's heartbeats would end its connection; and with heartbeats libzmq
    4.3.5 aborts the process when a peer goes away while its messages wait to be read.)"""
    one.setsockopt(zmq.TCP_KEEPALIVE, 1)
    one.setsockopt(zmq.TCP_KEEPALIVE_IDLE, max(1, int(timeout / 2)))
    one.setsockopt(zmq.TCP_KEEPALIVE_INTVL, max(1, int(timeout / 6)))
    one.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)
    one.setsockopt(zmq.TCP_MAXRT, int(timeout * 1000))


def make_dealer(context: zmq.Context[Socket], keys: tuple[str, str, str] | None = None, queue: int = 0) -> Socket:
    """A frontend's socket. Connect it after its monitor is made, or the monitor misses the first events. Make a new one
    for each connection, because frames queued in an old one would reach the next core. `keys`: own public, own secret,
    and the server's public key. `queue`: most messages that libzmq receives ahead; 0: no limit."""
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.SNDHWM, 0)
    dealer.setsockopt(zmq.RCVHWM, queue)  # outputs are received without a limit, even while step() is not called
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 500)
    _keep_alive(dealer, CORE_TIMEOUT)
    if keys is not None:
        own, secret, server = keys
        dealer.setsockopt_string(zmq.CURVE_PUBLICKEY, own)
        dealer.setsockopt_string(zmq.CURVE_SECRETKEY, secret)
        dealer.setsockopt_string(zmq.CURVE_SERVERKEY, server)
    return dealer


def readable(fds: Iterable[int], seconds: float | None) -> set[int]:
    """The descriptors that can be read or have ended. Waits for the first one, at most `seconds`; None: no limit."""
    poll = select.poll()  # select() does not work with descriptors above 1023
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return {fd for fd, _ in poll.poll(None if seconds is None else seconds * 1000)}


def process_fd(pid: int) -> int | None:
    """A descriptor that can be read when the process has ended (pidfd); None if the kernel has no pidfd."""
    with contextlib.suppress(OSError, AttributeError):
        return os.pidfd_open(pid)
    return None


def wait_for_parent(pid: int) -> None:
    """Wait until the process `pid`, which has started this one, has ended."""
    fd = process_fd(pid)
    while os.getppid() == pid:
        readable([] if fd is None else [fd], PARENT_POLL_SECONDS)


class Waker:
    """Wakes a thread that polls `fd`, from any other thread."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)

    def wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)

    def __del__(self) -> None:
        os.close(self.fd)
        os.close(self._write)


def describe_exit(returncode: int) -> str:
    """How a process ended, for an error message."""
    if returncode >= 0:
        return f"with exit code {returncode}"
    try:
        return f"by signal {signal.Signals(-returncode).name}"
    except ValueError:
        return f"by signal {-returncode}"


def seconds_left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
