"""Access over tcp: clients with a listed key are accepted, with the rights in the list; all others are refused with a
reason."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mainspring.ipc.connection import Connection, ask_status
from mainspring.ipc.errors import ConnectError, EngineDeadError, InvalidArgumentError
from mainspring.ipc.keys import AllowedKey, KeyPair, append_allowed, new_keypair
from mainspring.ipc.messages import Bye
from mainspring.ipc.sync_client import SyncClient
from stand_in_core import StandInOwner, stand_in
from wire import PROMPTLY, Raw, collect, eventually, request


class Keys:
    """A folder with the daemon's keys, its list of allowed keys, and the keys of any number of clients."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server = new_keypair(folder / "server.key")
        self.allowed = folder / "allowed_keys"
        self.new("unused", allowed=AllowedKey("unused"))

    def new(self, name: str, allowed: AllowedKey | None = None) -> KeyPair:
        pair = new_keypair(self.folder / f"{name}.key")
        if allowed is not None:
            append_allowed(self.allowed, pair.public, allowed)
        return pair

    def of(self, name: str) -> dict[str, Any]:
        """Connection options for these keys."""
        return {"key": str(self.folder / f"{name}.key"), "server_key": self.server.public}


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Keys(tmp_path)


@pytest.fixture
def owner(keys: Keys) -> Iterator[StandInOwner]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with stand_in(address=address, secret_key=keys.server.secret, allowed_keys=str(keys.allowed)) as owner:
        yield owner


def test_a_listed_key_comes_in_with_the_name_and_at_most_the_weight_of_the_list(
    owner: StandInOwner, keys: Keys
) -> None:
    keys.new("laptop", AllowedKey("ann", weight=2.5))
    for weight in (1.0, 50.0):
        client = SyncClient(Connection(owner.address, weight=weight, name="whatever it says", **keys.of("laptop")))
        client.add_request(request(0))
        assert collect(client, 1) == {0: [100, 101, 102]}
        client.close()
    assert [weight for _, weight in owner.core.connected] == [1.0, 2.5]
    assert [(name, admin) for _, name, admin in owner.core.sessions] == [("ann", False)] * 2


def test_the_list_says_who_is_an_admin(owner: StandInOwner, keys: Keys) -> None:
    for name, admin in (("ann", True), ("bob", False)):
        pair = keys.new(name, AllowedKey(name, admin=admin))
        raw = Raw(owner, keys=(pair.public, pair.secret, keys.server.public))
        assert raw.greet().capabilities == (["admin"] if admin else [])
        raw.close()
    assert eventually(lambda: [admin for _, _, admin in owner.core.sessions] == [True, False])


def test_an_unlisted_key_is_refused_at_once_with_what_to_do(
    owner: StandInOwner, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    pair = keys.new("stranger")
    with pytest.raises(ConnectError, match="does not know our key; have it listed with mainspring keys allow"):
        Connection(owner.address, connect_timeout=1000, **keys.of("stranger"))
    assert f"refused a connection with the key {pair.public}" in caplog.text
    assert owner.core.connected == []


def test_the_list_is_read_anew_for_each_connection(owner: StandInOwner, keys: Keys) -> None:
    pair = keys.new("late")
    with pytest.raises(ConnectError):
        Connection(owner.address, **keys.of("late"))
    append_allowed(keys.allowed, pair.public, AllowedKey("late"))
    Connection(owner.address, **keys.of("late")).close()
    keys.allowed.write_text("# nobody\n")
    with pytest.raises(ConnectError, match="does not know our key"):
        Connection(owner.address, **keys.of("late"))


def test_with_a_list_that_cannot_be_read_every_client_is_refused(
    owner: StandInOwner, keys: Keys, caplog: pytest.LogCaptureFixture
) -> None:
    keys.allowed.write_text("what is this\n")
    with pytest.raises(ConnectError, match="does not know our key"):
        Connection(owner.address, **keys.of("unused"))
    assert "nobody is let in:" in caplog.text
    assert "'what' is no public key" in caplog.text


def test_a_wrong_server_key_is_an_error_that_says_what_to_check(owner: StandInOwner, keys: Keys) -> None:
    other = keys.new("other server")
    options = {**keys.of("unused"), "server_key": other.public}
    with pytest.raises(ConnectError, match="the handshake failed; check that both sides use keys, and --server-key"):
        Connection(owner.address, connect_timeout=0.3, **options)


def test_a_client_without_keys_is_refused(owner: StandInOwner) -> None:
    with pytest.raises(ConnectError, match="check that both sides use keys"):
        Connection(owner.address, connect_timeout=0.3)
    assert owner.core.connected == []


def test_a_key_without_the_servers_is_refused_before_anything_is_sent(owner: StandInOwner, keys: Keys) -> None:
    with pytest.raises(InvalidArgumentError, match="key is given without server_key"):
        Connection(owner.address, key=keys.of("unused")["key"])


def test_the_status_is_told_to_listed_keys_only(owner: StandInOwner, keys: Keys) -> None:
    keys.new("stranger")
    assert ask_status(owner.address, timeout=PROMPTLY, **keys.of("unused")).core.epoch == owner.epoch
    with pytest.raises(ConnectError):
        ask_status(owner.address, timeout=0.3, **keys.of("stranger"))


def test_requests_go_on_over_tcp_with_keys_as_well(owner: StandInOwner, keys: Keys) -> None:
    client = SyncClient(Connection(owner.address, **keys.of("unused")))
    client.add_request(request(0, max_tokens=2000))
    assert client.get_outputs(PROMPTLY) is not None
    owner.kill()
    owner.restart()
    assert collect(client, 1)[0][-1] == 2099
    client.close()


def test_a_key_that_is_struck_off_while_its_connection_is_lost_ends_with_the_reason(
    owner: StandInOwner, keys: Keys
) -> None:
    client = SyncClient(Connection(owner.address, reconnect_timeout=1.0, **keys.of("unused")))
    owner.kill()
    keys.allowed.write_text("# nobody\n")
    owner.restart()
    with pytest.raises(EngineDeadError, match="it does not know our key"):
        client.get_outputs(30)
    client.close()


def test_only_the_key_of_a_session_may_take_it_over(owner: StandInOwner, keys: Keys) -> None:
    session = b"s" * 16
    raws = []
    for name in ("ann", "bob"):
        pair = keys.new(name, AllowedKey(name))
        raws += [Raw(owner, keys=(pair.public, pair.secret, keys.server.public)) for _ in range(2)]
    ann, ann_again, bob, bob_again = raws
    for raw in (ann, bob):
        raw.greet(session)
        raw.send(request(0, max_tokens=1))
        assert raw.receive().token_ids == [100]
    assert owner.core.disconnected == [], "another key takes nothing over"
    ann_again.greet(session)
    assert isinstance(ann.receive(), Bye)
    assert eventually(lambda: owner.core.disconnected == [0])
    bob.send(request(1, max_tokens=1))
    assert bob.receive().token_ids == [100]
    bob_again.greet(session)
    assert isinstance(bob.receive(), Bye)
    assert eventually(lambda: len(owner.core.sessions) == 4)
    sessions = [session for session, _, _ in owner.core.sessions]
    assert sessions[0] == sessions[2] != sessions[1] == sessions[3]
    assert all(len(session) == 16 for session in sessions)
    for raw in raws:
        raw.close()
