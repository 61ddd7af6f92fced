"""Addresses, their owners, and their folders."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest
import zmq

from mainspring.ipc import transport
from mainspring.ipc.errors import AddressInUseError, InvalidArgumentError
from mainspring.ipc.transport import (
    bind_router,
    default_folder,
    ipc_address,
    ipc_path,
    lock_address,
    lock_holder,
    make_runtime_dir,
    remove_runtime_dir,
    wait_for_parent,
)
from wire import PROMPTLY

HOLDER = """
import sys, time
from mainspring.ipc.transport import lock_address
lock_address(sys.argv[1])
print("locked", flush=True)
time.sleep(600)
"""


# ---------------------------------------------------------------------- addresses


def test_an_ipc_address_has_a_path_and_a_tcp_address_has_none() -> None:
    assert ipc_path("ipc:///run/x/core.sock") == Path("/run/x/core.sock")
    assert ipc_path("ipc://here.sock") == Path("here.sock")
    assert ipc_path("tcp://127.0.0.1:5555") is None
    assert ipc_path("tcp://[::1]:5555") is None


@pytest.mark.parametrize(
    "address",
    ["", "core.sock", "/run/core.sock", "ipc://", "tcp://", "tcp://host", "tcp://:5", "tcp://host:x", "http://h"],
)
def test_an_invalid_address_is_refused_with_the_valid_forms(address: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"is no address; it must be ipc://PATH or tcp://HOST:PORT"):
        ipc_path(address)


def test_a_path_as_long_as_the_kernel_allows_can_be_listened_at_and_a_longer_one_is_refused() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        longest = folder + "/" + "é" * ((transport.MAX_PATH_BYTES - len(folder) - 1) // 2)
        longest += "x" * (transport.MAX_PATH_BYTES - len(os.fsencode(longest)))
        with zmq.Context() as context:
            bind_router(context, f"ipc://{ipc_path(f'ipc://{longest}')}").close(linger=0)
        with pytest.raises(InvalidArgumentError, match="has 108 bytes; the limit is 107: choose a shorter one"):
            ipc_path(f"ipc://{longest}x")


# ---------------------------------------------------------------------- whose an address is


def test_an_address_is_one_processs_at_a_time(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)
    first = lock_address(address)
    assert first is not None
    assert lock_holder(address) == os.getpid()
    with pytest.raises(AddressInUseError, match=rf"{address} is in use by process {os.getpid()}: stop it, or choose"):
        lock_address(address)
    os.close(first)
    assert lock_holder(address) is None
    second = lock_address(address)
    assert second is not None
    os.close(second)


def test_a_process_that_was_killed_holds_nothing_whatever_files_it_left(tmp_path: Path) -> None:
    address = ipc_address(tmp_path)
    with subprocess.Popen([sys.executable, "-P", "-c", HOLDER, address], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert lock_holder(address) == holder.pid
        with pytest.raises(AddressInUseError, match=f"in use by process {holder.pid}"):
            lock_address(address)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(ipc_path(address)))
    assert lock_holder(address) is None
    lock = lock_address(address)
    assert lock is not None
    with zmq.Context() as context:
        bind_router(context, address).close(linger=0)
    os.close(lock)


def test_a_lock_is_not_inherited_by_children(tmp_path: Path) -> None:
    lock = lock_address(ipc_address(tmp_path))
    assert lock is not None
    assert not os.get_inheritable(lock)
    os.close(lock)


def test_for_tcp_binding_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as other, zmq.Context() as context:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        assert lock_address(address) is None
        assert lock_holder(address) is None
        with pytest.raises(AddressInUseError, match=f"{address} is in use: stop who listens there, or choose another"):
            bind_router(context, address)
    assert list(tmp_path.iterdir()) == []


def test_an_address_of_another_machine_cannot_be_listened_at() -> None:
    with (
        zmq.Context() as context,
        pytest.raises(InvalidArgumentError, match=r"nobody can listen at tcp://192\.0\.2\.1:1"),
    ):
        bind_router(context, "tcp://192.0.2.1:1")


def test_a_folder_that_is_not_there_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    lock = lock_address(f"ipc://{tmp_path}/new/core.sock")
    assert lock is not None
    os.close(lock)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_written_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgumentError, match=r"/file can't be written: Not a directory; choose another folder"):
        lock_address(f"ipc://{tmp_path}/file/core.sock")


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_refused_with_the_reason(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InvalidArgumentError, match="can't be written: Permission denied"):
        lock_address(ipc_address(tmp_path))
    tmp_path.chmod(0o700)


def test_a_socket_is_its_owners_alone(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        with zmq.Context() as context:
            router = bind_router(context, ipc_address(tmp_path))
            assert stat.S_IMODE((tmp_path / "core.sock").stat().st_mode) & 0o077 == 0
            router.close(linger=0)
        assert os.umask(0) == 0, "as it was"
    finally:
        os.umask(umask)


# ---------------------------------------------------------------------- folders


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_the_default_folder_is_made_once_in_the_users_runtime_folder(base: Path) -> None:
    assert default_folder() == base / "mainspring" == default_folder()
    assert stat.S_IMODE((base / "mainspring").stat().st_mode) == 0o700


@pytest.mark.parametrize("runtime", ["", "/no/such/folder"])
def test_without_a_runtime_folder_the_default_one_is_in_the_temporary_folder_under_the_users_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert default_folder() == tmp_path / f"mainspring-{os.getuid()}"


def test_a_default_folder_that_others_may_enter_is_not_used(base: Path) -> None:
    (base / "mainspring").mkdir()
    (base / "mainspring").chmod(0o750)
    with pytest.raises(InvalidArgumentError, match="not a folder that only you can enter: remove it, or give --listen"):
        default_folder()


def test_a_default_folder_that_is_anothers_is_not_used(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    default_folder()
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    with pytest.raises(InvalidArgumentError, match="not a folder that only you can enter"):
        default_folder()


def test_a_link_in_place_of_the_default_folder_is_not_followed(
    base: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (base / "mainspring").symlink_to("elsewhere")
    (base / "elsewhere").mkdir(mode=0o700)
    with pytest.raises(InvalidArgumentError, match="not a folder that only you can enter"):
        default_folder()


def test_a_file_in_place_of_the_default_folder_is_named(base: Path) -> None:
    (base / "mainspring").write_text("")
    with pytest.raises(InvalidArgumentError, match=r"mainspring can't be made: File exists; give --listen"):
        default_folder()


def test_a_runtime_folder_is_its_owners_alone_and_removed_with_all_in_it(base: Path) -> None:
    folder = Path(make_runtime_dir())
    assert folder.parent == base
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "core.sock").write_text("")
    remove_runtime_dir(str(folder))
    remove_runtime_dir(str(folder))
    remove_runtime_dir("")
    assert list(base.iterdir()) == []


# ---------------------------------------------------------------------- the parent process


def test_the_parents_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "PARENT_POLL_SECONDS", 60.0)  # so that only the descriptor can tell
    check_parent_watch(monkeypatch)


def test_the_parents_end_is_noticed_where_the_kernel_has_no_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    check_parent_watch(monkeypatch)


def check_parent_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "600"]) as parent:
        monkeypatch.setattr(os, "getppid", lambda: parent.pid if parent.poll() is None else 1)
        waiting = threading.Thread(target=wait_for_parent, args=(parent.pid,), daemon=True)
        waiting.start()
        waiting.join(0.1)
        assert waiting.is_alive()
        parent.kill()
        waiting.join(PROMPTLY)
        assert not waiting.is_alive()
