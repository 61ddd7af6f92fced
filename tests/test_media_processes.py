"""Media workers as processes: started on first need, replaced when they die; a core gets each item of its requests."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import dying_media_worker as dying
from mainspring.ipc import media_workers
from mainspring.ipc.client import connect
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import EngineConfig, ModelConfig, MultiModalConfig
from mainspring.ipc.connection import Connection
from mainspring.ipc.errors import InvalidRequestError, NotPermittedError, NotSupportedError, ProtocolError
from mainspring.ipc.keys import AllowedKey, append_allowed, new_keypair
from mainspring.ipc.media_client import MediaInput, PreparedPrompt
from mainspring.ipc.media_messages import Deliver, Prepare, decode_order, encode_order
from mainspring.ipc.media_remote import RemoteMedia
from mainspring.ipc.media_workers import MediaWorkers
from mainspring.ipc.messages import AddRequest, Ready, Sampling
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.transport import Endpoints, address_at
from media_folders import file_of, picture, save_folder
from stand_in_core import StandInCore, StandInOwner

PATIENCE_S = 300  # a worker of the real program is nice, and waits for others on a busy machine


class MediaCore(StandInCore):
    """It begins with a request when it has the request's items."""

    def __init__(self) -> None:
        super().__init__()
        self.items: dict[bytes, tuple[str, list[str]]] = {}
        self.sizes: dict[bytes, int] = {}
        self.puts: list[bytes] = []
        self.waiting: list[tuple[int, AddRequest]] = []
        self.is_admin: dict[int, bool] = {}

    def connect(
        self, frontend: int, weight: float = 1.0, session: bytes = b"", name: str = "", admin: bool = True
    ) -> None:
        self.is_admin[frontend] = admin
        super().connect(frontend, weight, session, name, admin)

    def add_request(self, frontend: int, request: AddRequest, tensors: Sequence[Any] = (), *more: Any) -> None:
        self.added.append(request)
        self.waiting.append((frontend, request))
        self._begin()

    def _begin(self) -> None:
        for frontend, request in list(self.waiting):
            if all(item.digest in self.items for item in request.media):
                self.waiting.remove((frontend, request))
                self._requests[frontend, request.handle] = request, len(request.output_token_ids)

    def call(self, method: str, args: msgspec.Raw, frontend: int = 0, arrays: Sequence[Any] = ()) -> msgspec.Raw:
        if method == "offer_media":
            assert self.is_admin[frontend]
            return encode_value([digest for digest in decode_value(args)[0] if digest not in self.items])
        if method == "put_media":
            assert self.is_admin[frontend]
            digest, modality, names = decode_value(args)
            assert len(names) == len(arrays)
            self.items[digest], self.sizes[digest] = (modality, names), sum(array.nbytes for array in arrays)
            self.puts.append(digest)
            self._begin()
            return encode_value(None)
        return super().call(method, args, frontend, arrays)


class MediaOwner(StandInOwner):
    """A core and media workers beside it."""

    def __init__(self, config: EngineConfig, workers: int = 1, item_seconds: float = 60.0, **endpoints: str) -> None:
        media = msgspec.structs.replace(config.multimodal_config, media_workers=workers)
        self.config = msgspec.structs.replace(config, multimodal_config=media)
        self.item_seconds, self.workers = item_seconds, None
        super().__init__(**endpoints)

    def load(self, **facts: Any) -> None:
        super().load(**facts)
        self.core = MediaCore()
        self.core.model = msgspec.structs.replace(self.core.model, media=["image"])
        self.core.config = self.config
        if self.workers is None:
            self.workers = MediaWorkers(self.config, self.endpoints, self.item_seconds)
            self.workers.start()

    def announce(self) -> None:
        made = self.server.announce
        places = self.workers.places

        def announce(ready: Ready) -> None:
            made(msgspec.structs.replace(ready, media=places))

        self.server.announce = announce
        super().announce()

    def end(self) -> None:
        self.workers.close()
        super().end()


@pytest.fixture(scope="session")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder("llava", tmp_path_factory.mktemp("processors") / "llava")


def config_of(folder: Path, **fields: Any) -> EngineConfig:
    return EngineConfig(model_config=ModelConfig(model=str(folder)), multimodal_config=MultiModalConfig(**fields))


@pytest.fixture
def owner(llava: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MediaOwner]]:
    """Makes cores with workers that may die of pictures, and ends them."""
    folder = str(Path(dying.__file__).parent)
    code = f"import sys; sys.path.insert(0, {folder!r}); import dying_media_worker; dying_media_worker.run()"
    monkeypatch.setattr(media_workers, "COMMAND", [sys.executable, "-P", "-c", code])
    made: list[MediaOwner] = []

    def make(workers: int = 1, item_seconds: float = 60.0, **fields: Any) -> MediaOwner:
        made.append(MediaOwner(config_of(llava, **fields), workers, item_seconds))
        return made[-1]

    yield make
    for one in made:
        one.end()


def image(seed: int = 0) -> MediaInput:
    return MediaInput("image", file_of(picture(seed)))


def deadly(how: int, seed: int = 0) -> MediaInput:
    found = picture(seed)
    found.putpixel((0, 0), (how, 7, 7))
    return MediaInput("image", file_of(found))


def request(handle: int, prepared: PreparedPrompt, tokens: int = 5) -> AddRequest:
    return AddRequest(handle, str(handle), prepared.token_ids, Sampling(tokens), media=prepared.media)


def outputs_of(client: SyncClient, count: int) -> dict[int, list[int]]:
    """The tokens of `count` requests, when all have ended."""
    tokens: dict[int, list[int]] = {}
    ended: dict[int, str] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(ended) < count:
        assert time.monotonic() < deadline, (tokens, ended)
        if (outputs := client.get_outputs(1.0)) is None:
            continue
        for handle, token in zip(outputs.handles, outputs.token_ids, strict=True):
            tokens.setdefault(handle, []).append(token)
        ended |= {one.handle: one.error_text or one.reason for one in outputs.finished}
    assert set(ended.values()) <= {"length"}, ended
    return tokens


def expected(prepared: PreparedPrompt, tokens: int = 5) -> list[int]:
    return [prepared.token_ids[0] + step for step in range(tokens)]


def test_a_worker_starts_when_there_is_something_to_prepare(llava: Path) -> None:
    core = MediaOwner(config_of(llava))
    client = SyncClient(connect(core))
    media = client.media()
    client.call("ping")
    assert core.workers.pids == []
    prepared = media.prepare("a <image>", [image(1)], {}).result(PATIENCE_S)
    [pid] = core.workers.pids
    assert psutil.Process(pid).nice() == 19
    client.add_request(request(1, prepared))
    assert outputs_of(client, 1) == {1: expected(prepared)}
    assert core.core.items[prepared.media[0].digest] == ("image", ["pixel_values"])
    assert core.core.sizes[prepared.media[0].digest] == 3 * 56 * 56 * 4
    client.add_request(request(2, prepared))
    assert outputs_of(client, 1) == {2: expected(prepared)}
    assert len(core.core.puts) == 1  # what the core has is not sent again
    media.close()
    client.close()
    core.end()
    assert not psutil.pid_exists(pid)


def test_a_worker_that_stops_answering_holds_up_only_what_it_has(owner: Callable[..., MediaOwner]) -> None:
    core = owner(workers=2)
    media = SyncClient(connect(core)).media()
    for future in [media.prepare("<image>", [image(seed)], {}) for seed in range(8)]:
        future.result(PATIENCE_S)
    stopped, _ = core.workers.pids
    os.kill(stopped, signal.SIGSTOP)
    try:
        stuck = [media.prepare("<image>", [image(seed)], {}) for seed in range(8, 16)]
        while sum(future.done() for future in stuck) < 3:  # of those that the other worker has, 3 at least
            time.sleep(0.01)
        for seed in range(16, 24):
            media.prepare("<image>", [image(seed)], {}).result(PATIENCE_S)
        assert not all(future.done() for future in stuck)
    finally:
        os.kill(stopped, signal.SIGCONT)
    for future in stuck:
        future.result(PATIENCE_S)


def test_errors_have_their_types(owner: Callable[..., MediaOwner]) -> None:
    media = SyncClient(connect(owner())).media()
    for prompt, given, error in (
        ("no place", image(), InvalidRequestError),
        ("<image>", MediaInput("image", b"<svg/>"), InvalidRequestError),
        ("<image>", MediaInput("image", "file:///etc/passwd"), InvalidRequestError),
        ("<video>", MediaInput("video", b"\0\0\0\x18ftypmp42"), Exception),
    ):
        with pytest.raises(error):
            media.prepare(prompt, [given], {}).result(PATIENCE_S)
    with pytest.raises(InvalidRequestError, match="can't go to another process"):
        media.prepare("<image>", [image()], {"size": object()}).result(PATIENCE_S)
    assert media.prepare("<image>", [image()], {}).result(PATIENCE_S).media
    media.close()


def test_without_workers_it_is_said(llava: Path) -> None:
    owner = StandInOwner()
    client = SyncClient(connect(owner))
    with pytest.raises(NotSupportedError, match="no media workers"):
        client.media()
    client.close()
    owner.end()


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_no_request(owner: Callable[..., MediaOwner]) -> None:
    core = owner(workers=2)
    client = SyncClient(connect(core))
    media = client.media()
    prepared: dict[int, PreparedPrompt] = {}
    for round_ in range(2):
        asked = {
            round_ * 10 + n: media.prepare("<image> <image>", [image(n), image(50 + n + round_)], {}) for n in range(4)
        }
        for _ in range(2):  # while they start, or prepare
            time.sleep(0.3)
            for pid in core.workers.pids:
                os.kill(pid, signal.SIGKILL)
        for handle, future in asked.items():
            prepared[handle] = future.result(PATIENCE_S)
        for pid in core.workers.pids:  # none has the items any more
            os.kill(pid, signal.SIGKILL)
        for handle in asked:
            client.add_request(request(handle, prepared[handle]))
        assert outputs_of(client, 4) == {handle: expected(prepared[handle]) for handle in asked}
    media.close()
    client.close()


@pytest.mark.slow
def test_the_next_core_gets_the_items_of_the_requests_again(owner: Callable[..., MediaOwner]) -> None:
    core = owner()
    client = SyncClient(connect(core))
    media = client.media()
    prepared = media.prepare("<image><image>", [image(1), image(2)], {}).result(PATIENCE_S)
    core.core.paused.set()
    client.add_request(request(1, prepared))
    deadline = time.monotonic() + PATIENCE_S
    while len(core.core.puts) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    core.kill()
    os.kill(core.workers.pids[0], signal.SIGKILL)  # the frontend has the files
    core.restart()
    assert outputs_of(client, 1) == {1: expected(prepared)}
    assert len(core.core.puts) == 2
    media.forget(prepared)
    client.close()
    media.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", [dying.SEGV, dying.HANG, dying.HOLD])
def test_a_file_that_kills_workers_is_refused_alone(how: int, owner: Callable[..., MediaOwner]) -> None:
    core = owner(item_seconds=2.0)
    media = SyncClient(connect(core)).media()
    media.prepare("<image>", [image(9)], {}).result(PATIENCE_S)  # it is loaded
    good = [media.prepare("<image>", [image(n)], {}) for n in range(3)]
    bad = media.prepare("<image>", [deadly(how)], {})
    good += [media.prepare("<image>", [image(n)], {}) for n in range(3, 6)]
    with pytest.raises(InvalidRequestError, match=r"media workers died|took longer"):
        bad.result(PATIENCE_S)
    assert all(future.result(PATIENCE_S).media for future in good)
    with pytest.raises(InvalidRequestError, match="media workers died"):  # and it stays refused
        media.prepare("<image>", [deadly(how)], {}).result(PATIENCE_S)
    assert media.prepare("<image>", [deadly(how, seed=1)], {}) is not None
    media.close()


@pytest.mark.slow
def test_a_file_that_needs_too_much_memory_is_refused(owner: Callable[..., MediaOwner]) -> None:
    core = owner()
    media = SyncClient(connect(core)).media()
    media.prepare("<image>", [image()], {}).result(PATIENCE_S)
    [pid] = core.workers.pids
    with pytest.raises(InvalidRequestError, match="memory"):
        media.prepare("<image>", [deadly(dying.GREEDY)], {}).result(PATIENCE_S)
    assert core.workers.pids == [pid]
    media.close()


@pytest.mark.slow
def test_frontends_take_turns(owner: Callable[..., MediaOwner]) -> None:
    """One frontend's long queue does not delay another one's item."""
    core = owner()
    clients = [SyncClient(connect(core)) for _ in range(2)]
    flood, other = (client.media() for client in clients)
    flood.prepare("<image>", [image()], {}).result(PATIENCE_S)
    many = [flood.prepare("<image>", [deadly(dying.SLOW, seed)], {}) for seed in range(12)]
    assert other.prepare("<image>", [image(99)], {}).result(PATIENCE_S).media
    assert sum(future.done() for future in many) <= 4
    for one in (flood, other, *clients):
        one.close()


@pytest.mark.slow
def test_a_url_whose_content_has_changed_fails_its_request(owner: Callable[..., MediaOwner], tmp_path: Path) -> None:
    core = owner(allowed_local_media_path=str(tmp_path))
    client = SyncClient(connect(core))
    media = client.media()
    file = tmp_path / "a.png"
    file.write_bytes(file_of(picture(1)))
    prepared = media.prepare("<image>", [MediaInput("image", f"file://{file}")], {}).result(PATIENCE_S)
    file.write_bytes(file_of(picture(2)))
    media.reset_cache()
    client.add_request(request(1, prepared))
    deadline = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < deadline
        if (outputs := client.get_outputs(1.0)) is not None and outputs.finished:
            break
    assert "another content" in outputs.finished[0].error_text
    assert not outputs.token_ids
    client.close()
    media.close()


@pytest.mark.slow
def test_strangers_get_no_answer_from_a_worker(owner: Callable[..., MediaOwner]) -> None:
    """Without the engine's token a message is refused, and bytes that are no message are dropped."""
    core = owner()
    address = address_at(core.address, core.workers.places[0])
    stranger = RemoteMedia([address], b"wrong")
    with pytest.raises(Exception, match="token is wrong"):
        stranger.prepare("<image>", [image()], {}).result(PATIENCE_S)
    stranger.close()
    [pid] = core.workers.pids
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 50):
        with socket.socket(socket.AF_UNIX) as raw:
            raw.connect(address.removeprefix("ipc://"))
            raw.sendall(data)
    media = SyncClient(connect(core)).media()
    assert media.prepare("<image>", [image()], {}).result(PATIENCE_S).media
    assert core.workers.pids == [pid]
    media.close()


@pytest.mark.slow
def test_workers_listen_over_tcp_beside_their_core(llava: Path) -> None:
    workers = MediaWorkers(config_of(llava), Endpoints("tcp://127.0.0.1:1234"))
    workers.start()
    media = RemoteMedia([f"tcp://127.0.0.1:{place}" for place in workers.places])
    assert media.prepare("<image>", [image()], {}).result(PATIENCE_S).media
    media.close()
    workers.close()


@pytest.mark.slow
def test_over_tcp_workers_let_in_the_keys_of_their_daemon(llava: Path, tmp_path: Path) -> None:
    server, friend, stranger = (new_keypair(tmp_path / f"{name}.key") for name in ("server", "friend", "stranger"))
    append_allowed(tmp_path / "allowed", friend.public, AllowedKey("friend"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    keys = {"secret_key": server.secret, "allowed_keys": str(tmp_path / "allowed")}
    core = MediaOwner(config_of(llava), address=address, **keys)
    client = SyncClient(Connection(address, key=str(tmp_path / "friend.key"), server_key=server.public))
    media = client.media()
    prepared = media.prepare("<image>", [image()], {}).result(PATIENCE_S)
    client.add_request(request(1, prepared))
    assert outputs_of(client, 1) == {1: expected(prepared)}  # the worker may give items; its frontend may not
    assert sorted(core.core.is_admin.values()) == [False, True]
    other = RemoteMedia(media_addresses(core), b"", (stranger.public, stranger.secret, server.public))
    future = other.prepare("<image>", [image()], {})
    time.sleep(2)
    assert not future.done()
    for one in (other, media, client):
        one.close()
    core.end()


@pytest.mark.slow
def test_over_tcp_only_an_administrator_empties_the_cache_of_all(llava: Path, tmp_path: Path) -> None:
    server, tenant, operator = (new_keypair(tmp_path / f"{name}.key") for name in ("server", "tenant", "operator"))
    append_allowed(tmp_path / "allowed", tenant.public, AllowedKey("tenant"))
    append_allowed(tmp_path / "allowed", operator.public, AllowedKey("operator", admin=True))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    keys = {"secret_key": server.secret, "allowed_keys": str(tmp_path / "allowed")}
    core = MediaOwner(config_of(llava), workers=2, address=address, **keys)
    clients = {
        name: SyncClient(Connection(address, key=str(tmp_path / f"{name}.key"), server_key=server.public))
        for name in ("tenant", "operator")
    }
    tenants, operators = (clients[name].media() for name in ("tenant", "operator"))
    prepared = {seed: operators.prepare("<image>", [image(seed)], {}).result(PATIENCE_S) for seed in range(8)}
    handles = itertools.count()
    for media, error in ((tenants, NotPermittedError), (operators, None)):
        asked = media.reset_cache()
        assert type(asked.exception(PATIENCE_S)) is (error or type(None))
        # what a worker has not any more it can't give: the media client prepares it again, from what it was asked
        prepares = count_of_prepares(operators)
        for one in prepared.values():
            clients["operator"].add_request(request(next(handles), one))
        outputs_of(clients["operator"], len(prepared))
        core.core.items.clear()
        assert prepares() == (0 if error else len(prepared))
    for one in (tenants, operators, *clients.values()):
        one.close()
    core.end()


@pytest.mark.parametrize("core", [-1, 64, 2**62])
def test_a_worker_knows_no_core_with_an_impossible_number(core: int) -> None:
    frames = encode_order(b"", Deliver(1, 0, []))
    assert decode_order(frames)[1] == Deliver(1, 0, [])
    with pytest.raises(ProtocolError, match="does not decode"):
        decode_order(encode_order(b"", Deliver(1, core, [])))


def count_of_prepares(media: RemoteMedia) -> Callable[[], int]:
    """How many prompts a client has sent to workers since this call."""
    sent: list[Prepare] = []
    send = media._exchange.send

    def noted(worker: int, job: Any) -> None:
        order = decode_order(job.frames)[1]
        if isinstance(order, Prepare):
            sent.append(order)
        send(worker, job)

    media._exchange.send = noted
    return lambda: len(sent)


def media_addresses(core: MediaOwner) -> list[str]:
    return [address_at(core.address, place) for place in core.workers.places]


@pytest.mark.slow
def test_closing_ends_what_waits(owner: Callable[..., MediaOwner]) -> None:
    before = set(threading.enumerate())
    media = SyncClient(connect(owner())).media()
    future = media.prepare("<image>", [image()], {})
    assert any(thread.name == "mainspring-media" for thread in set(threading.enumerate()) - before)
    media.close()
    assert future.exception(5) is not None
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "mainspring-media"]
