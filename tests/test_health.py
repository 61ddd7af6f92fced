"""A daemon's messages to systemd and its answers over HTTP."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainspring.ipc.errors import AddressInUseError
from mainspring.serve.health import heartbeat, notify, probes
from wire import eventually


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """systemd's end of NOTIFY_SOCKET."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(str(tmp_path / "notify"))
        inbox.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        before = signal.getsignal(signal.SIGALRM)
        yield inbox
        signal.signal(signal.SIGALRM, before)


def test_systemd_is_told(systemd: socket.socket) -> None:
    notify("READY=1\nSTATUS=serving")
    assert systemd.recv(1000) == b"READY=1\nSTATUS=serving"


@pytest.mark.skipif(not os.path.exists("/proc/net/unix"), reason="abstract sockets are Linux's")
def test_systemd_may_have_an_abstract_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"mainspring-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as inbox:
        inbox.bind(f"\0{name}")
        inbox.settimeout(60)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@{name}")
        notify("READY=1")
        assert inbox.recv(1000) == b"READY=1"


def test_without_systemd_or_when_it_is_gone_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify("READY=1")


def test_the_watchdog_is_told_twice_in_its_time(systemd: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "40000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    with heartbeat(lambda: "fine"):
        assert signal.getitimer(signal.ITIMER_REAL)[1] == pytest.approx(0.02)
        assert systemd.recv(1000) == b"WATCHDOG=1\nSTATUS=fine"
        assert systemd.recv(1000) == b"WATCHDOG=1\nSTATUS=fine"
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_a_watchdog_meant_for_another_process_is_not_ours(
    systemd: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "40000")
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid() + 1))
    with heartbeat(lambda: "fine"):
        assert signal.getitimer(signal.ITIMER_REAL)[1] > 1


def get(port: int, path: str) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_healthz_is_always_well_and_readyz_when_the_core_serves() -> None:
    ready = False
    with probes("127.0.0.1", 0, lambda: ready) as port:
        assert [get(port, path) for path in ("/healthz", "/readyz", "/", "/readyz?x=1")] == [200, 503, 404, 503]
        ready = True
        assert [get(port, path) for path in ("/healthz", "/readyz")] == [200, 200]
    with pytest.raises(OSError, match="refused"):
        get(port, "/healthz")


@pytest.mark.skipif(not os.path.exists("/proc/net/if_inet6"), reason="there is no IPv6")
def test_a_host_may_be_of_ipv6() -> None:
    with (
        probes("::1", 0, lambda: True) as port,
        urllib.request.urlopen(f"http://[::1]:{port}/healthz", timeout=60) as answer,
    ):
        assert answer.status == 200


def test_a_silent_connection_does_not_delay_others() -> None:
    with probes("127.0.0.1", 0, lambda: True) as port, socket.create_connection(("127.0.0.1", port)) as silent:
        assert get(port, "/healthz") == 200
        silent.setblocking(False)
        with pytest.raises(BlockingIOError):  # its iteration of the loop has not ended
            silent.recv(1)


def test_connections_without_a_free_descriptor_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 64))
    with probes("127.0.0.1", 0, lambda: True) as port:
        with contextlib.ExitStack() as stack:
            for _ in range(4):
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            with socket.create_connection(("127.0.0.1", port)) as refused:
                refused.settimeout(10)
                assert refused.recv(1) == b""

        def answers() -> bool:
            with contextlib.suppress(ConnectionError):  # the server has not seen yet that the others are closed
                return get(port, "/healthz") == 200
            return False

        assert eventually(answers)


def test_a_port_in_use_is_named() -> None:
    with (
        probes("127.0.0.1", 0, lambda: True) as port,
        pytest.raises(AddressInUseError, match=f"http_port is {port}, .* in use; choose another"),
        probes("127.0.0.1", port, lambda: True),
    ):
        pass
