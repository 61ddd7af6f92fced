"""Media workers as processes: started on first need, replaced when they die; a core gets each item of its requests."""

from __future__ import annotations

import base64
import ctypes
import errno
import itertools
import os
import platform
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import psutil
import pytest
import zmq

import dying_media_worker as dying
from daemons import short_folder
from mainspring.ipc import media_workers
from mainspring.ipc.client import connect
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import EngineConfig, ModelConfig, MultiModalConfig
from mainspring.ipc.connection import Connection
from mainspring.ipc.errors import InvalidRequestError, NotPermittedError, NotSupportedError, ProtocolError
from mainspring.ipc.keys import AllowedKey, append_allowed, new_keypair
from mainspring.ipc.media_client import MediaInput, PreparedPrompt
from mainspring.ipc.media_messages import (
    Answer,
    Content,
    Deliver,
    MediaLaunch,
    Prepare,
    ResetCache,
    decode_order,
    encode_answer,
    encode_order,
    most_bytes,
)
from mainspring.ipc.media_remote import MAX_SENDS, RemoteMedia, _Job, _Worker
from mainspring.ipc.media_workers import TIMED_OUT, MediaWorkers
from mainspring.ipc.messages import AddRequest, Ready, Sampling
from mainspring.ipc.sync_client import SyncClient
from mainspring.ipc.transport import Endpoints, address_at, make_dealer
from mainspring.media import server as media_server
from mainspring.media.server import FETCHES_OF_ONE, MediaServer, _inputs
from media_folders import file_of, picture, save_folder
from stand_in_core import StandInCore, StandInOwner
from wire import eventually

PATIENCE_S = 300  # a worker of the real program is nice, and waits for others on a busy machine
CODE = "import sys; sys.path.insert(0, {folder!r}); {more}import dying_media_worker; dying_media_worker.run()"


class MediaCore(StandInCore):
    """It begins with a request when it has the request's items."""

    def __init__(self) -> None:
        super().__init__()
        self.items: dict[bytes, tuple[str, list[str]]] = {}
        self.sizes: dict[bytes, int] = {}
        self.puts: list[bytes] = []
        self.put_seconds = 0.0
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

    def call(self, method: str, args: msgspec.Raw, frontend: int = 0, arrays: Iterable[Any] = ()) -> msgspec.Raw:
        if method == "offer_media":
            assert self.is_admin[frontend]
            return encode_value([digest for digest in decode_value(args)[0] if digest not in self.items])
        if method == "put_media":
            assert self.is_admin[frontend]
            time.sleep(self.put_seconds)
            digest, modality, names, shapes = decode_value(args)
            given = [*arrays]
            assert len(names) == len(given)
            assert not shapes
            self.items[digest], self.sizes[digest] = (modality, names), sum(array.nbytes for array in given)
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


def command(more: str = "") -> list[str]:
    """What starts a worker that may die of pictures, after some other statements."""
    return [sys.executable, "-P", "-c", CODE.format(folder=str(Path(dying.__file__).parent), more=more)]


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that start in a fraction of the time, and may die of pictures."""
    monkeypatch.setattr(media_workers, "COMMAND", command())


@pytest.fixture
def owner(llava: Path, light: None) -> Iterator[Callable[..., MediaOwner]]:
    """Makes cores with such workers, and ends them."""
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
    assert psutil.Process(pid).nice() == 10
    if platform.machine() == "x86_64" and tuple(map(int, platform.release().split(".")[:2])) >= (6, 12):
        attributes = ctypes.create_string_buffer(48)
        assert ctypes.CDLL(None).syscall(315, pid, attributes, 48, 0) == 0  # sched_getattr
        assert struct.unpack_from("=Q", attributes, 24) == (100_000,)
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
        other: Any = media._exchange._workers[1]  # type: ignore[attr-defined]
        # until the other worker has answered all it has, 3 at least: what is asked before that may go to either
        while sum(future.done() for future in stuck) < 3 or other.jobs:
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
def test_a_new_worker_waits_for_a_core_that_takes_long_to_come_back(owner: Callable[..., MediaOwner]) -> None:
    core = owner()
    client = SyncClient(connect(core))
    media = client.media()
    prepared = media.prepare("<image>", [image(1)], {}).result(PATIENCE_S)
    core.core.put_seconds = 3.0
    client.add_request(request(1, prepared))
    time.sleep(1.0)
    [pid] = core.workers.pids
    os.kill(pid, signal.SIGKILL)  # it was sending the item
    core.kill()
    while core.workers.pids in ([], [pid]):
        time.sleep(0.1)
    time.sleep(9.0)  # the new worker has started, and was asked to send it again; others give up after 5 s
    core.restart()
    assert outputs_of(client, 1) == {1: expected(prepared)}
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


def test_a_disk_that_was_full_when_a_worker_was_wanted_only_delays_it(monkeypatch: pytest.MonkeyPatch) -> None:
    make, tries = tempfile.TemporaryFile, list[int]()

    def full_once(*args: Any, **options: Any) -> Any:
        tries.append(1)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return make(*args, **options)

    monkeypatch.setattr(media_workers, "COMMAND", [sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(media_workers, "MAX_WAIT_SECONDS", 0.0)
    with short_folder() as folder, socket.socket(socket.AF_UNIX) as frontend:
        workers = MediaWorkers(EngineConfig(), Endpoints(f"ipc://{folder}/core.sock"))
        try:
            monkeypatch.setattr(tempfile, "TemporaryFile", full_once)
            workers.start()
            frontend.connect(f"{folder}/core.sock.media")
            assert eventually(lambda: bool(workers.pids))
        finally:
            workers.close()
    assert len(tries) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_workers_listen_over_tcp_beside_their_core(llava: Path) -> None:
    workers = MediaWorkers(config_of(llava), Endpoints("tcp://127.0.0.1:1234"))
    workers.start()
    media = RemoteMedia([f"tcp://127.0.0.1:{place}" for place in workers.places])
    assert media.prepare("<image>", [image()], {}).result(PATIENCE_S).media
    media.close()
    workers.close()


@pytest.mark.slow
@pytest.mark.usefixtures("light")
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
@pytest.mark.usefixtures("light")
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


# ---------------------------------------------------------------------- what is too large or too much


@pytest.mark.slow
def test_what_is_larger_than_a_worker_takes_is_refused_and_holds_up_nothing_else(
    owner: Callable[..., MediaOwner],
) -> None:
    """The worker would end the connection, and the client would send the same again."""
    core = owner(max_media_bytes=1 << 20, max_media_pixels=100_000)
    media = SyncClient(connect(core)).media()
    limit = most_bytes(core.config.multimodal_config)
    urls = ["data:image/png;base64," + base64.b64encode(bytes(limit // 3)).decode()] * 3
    for prompt, given in (
        ("<image>", [MediaInput("image", bytes(limit + 1))]),
        ("<image>" * 3, [MediaInput("image", url) for url in urls]),
    ):
        refused, good = media.prepare(prompt, given, {}), media.prepare("<image>", [image()], {})
        with pytest.raises(InvalidRequestError, match=f"the limit is {limit}"):
            refused.result(PATIENCE_S)
        assert good.result(PATIENCE_S).media
    media.close()


@pytest.mark.parametrize("shape", [[2**63], [3, 5], [0]])
def test_an_array_of_an_impossible_shape_is_refused(shape: list[int]) -> None:
    with pytest.raises(InvalidRequestError, match="does not fit its shape"):
        _inputs([Content("image", dtype="uint8", shape=shape)], [bytes(12)])


@pytest.mark.slow
def test_a_batch_that_the_workers_cache_does_not_hold_is_delivered(owner: Callable[..., MediaOwner]) -> None:
    """All prompts are prepared before the first item is delivered, and the core takes its time."""
    core = owner(mm_processor_cache_gb=0.0)
    client = SyncClient(connect(core))
    media = client.media()
    asked = [media.prepare("<image>", [image(seed)], {}) for seed in range(60)]
    prepared = dict(enumerate(future.result(PATIENCE_S) for future in asked))
    core.core.put_seconds = 0.02
    prepares = count_of_prepares(media)
    for handle, one in prepared.items():
        client.add_request(request(handle, one))
    assert outputs_of(client, 60) == {handle: expected(one) for handle, one in prepared.items()}
    assert prepares() < 3 * 60
    media.close()
    client.close()


@pytest.mark.slow
def test_no_item_is_delivered_for_a_request_that_has_ended(owner: Callable[..., MediaOwner]) -> None:
    core = owner()
    client = SyncClient(connect(core))
    media = client.media()
    asked = [media.prepare("<image>", [image(seed)], {}) for seed in range(20)]
    prepared = [future.result(PATIENCE_S) for future in asked]
    core.core.put_seconds = 0.2
    for handle, one in enumerate(prepared):
        client.add_request(request(handle, one))
    for one in prepared[:19]:
        media.forget(one)
    ended: set[int] = set()
    while 19 not in ended:
        if (outputs := client.get_outputs(1.0)) is not None:
            ended |= {one.handle for one in outputs.finished}
    assert len(core.core.puts) < 10
    media.close()
    client.close()


@pytest.mark.slow
def test_a_worker_holds_no_more_messages_than_it_should(
    owner: Callable[..., MediaOwner], monkeypatch: pytest.MonkeyPatch
) -> None:
    more = "from mainspring.media import server; server.QUEUED_BYTES = 4 << 20; "
    monkeypatch.setattr(media_workers, "COMMAND", command(more))
    core = owner()
    media = SyncClient(connect(core)).media()
    media.prepare("<image>", [image()], {}).result(PATIENCE_S)
    worker = psutil.Process(core.workers.pids[0])
    media.prepare("<image>", [deadly(dying.HANG)], {})
    before = worker.memory_info().rss
    for _ in range(300):
        media.prepare("<image>", [MediaInput("image", os.urandom(1 << 20))], {})
    time.sleep(5)
    assert worker.memory_info().rss - before < 100 << 20
    media.close()


@pytest.mark.slow
def test_answers_are_sent_while_messages_keep_coming(owner: Callable[..., MediaOwner]) -> None:
    core = owner()
    media = SyncClient(connect(core)).media()
    media.prepare("<image>", [image()], {}).result(PATIENCE_S)
    stop = threading.Event()

    def flood() -> None:
        order = encode_order(core.token, ResetCache(1))
        with zmq.Context() as context, make_dealer(context, None) as dealer:
            dealer.setsockopt(zmq.SNDHWM, 1000)
            dealer.connect(address_at(core.address, core.workers.places[0]))
            while not stop.is_set():
                for _ in range(1000):
                    if dealer.poll(100, zmq.POLLOUT):
                        dealer.send_multipart(order, zmq.NOBLOCK)
                while dealer.poll(0):
                    dealer.recv_multipart()

    floods = [threading.Thread(target=flood) for _ in range(2)]
    for one in floods:
        one.start()
    try:
        for seed in range(1, 6):
            assert media.prepare("<image>", [image(seed)], {}).result(60).media
    finally:
        stop.set()
        for one in floods:
            one.join()
    media.close()


def test_data_urls_do_not_wait_for_hosts(llava: Path) -> None:
    launch = MediaLaunch(config_of(llava), Endpoints("ipc:///nowhere"), 0, -1, -1, "")
    server = MediaServer(launch)
    fetched: list[Any] = []
    server._fetching.submit = lambda *asked: fetched.append(asked)
    urls = ["data:image/png;base64,AAAA", "DATA:,x", "https://media.example/x.png"]
    for job, url in enumerate(urls):
        server._admit(b"frontend", Prepare(job, "<image>", [Content("image", url)], {}, True), [], 10)
    assert [waiting.order.job for waiting in server._waiting[b"frontend"]] == [0, 1]
    assert [waiting.order.job for _, waiting in fetched] == [2]


def test_an_item_that_took_too_long_is_blamed_though_it_is_ready_while_its_worker_ends(
    llava: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ended(BaseException):
        """Of the process."""

    slow, other, told = b"slow" * 4, b"next" * 4, list[Any]()
    begun, go_on, is_ready = (threading.Event() for _ in range(3))

    def prepare() -> None:
        with server._guarded(slow):
            begun.set()
            assert go_on.wait(PATIENCE_S)
        is_ready.set()
        with server._guarded(other):
            pass

    def end(code: int) -> None:
        told.append(code)
        go_on.set()
        assert is_ready.wait(PATIENCE_S)
        raise Ended

    router: Any = SimpleNamespace(close=lambda linger: None)
    monkeypatch.setattr(media_server, "signal", SimpleNamespace(setitimer=lambda *_: None, ITIMER_REAL=0))
    monkeypatch.setattr(media_server, "_send", lambda router, *answer: told.append(answer))
    monkeypatch.setattr(media_server, "FAREWELL_MS", 1)
    monkeypatch.setattr(os, "_exit", end)
    with tempfile.TemporaryFile(buffering=0) as mark:
        launch = MediaLaunch(config_of(llava), Endpoints("ipc:///nowhere"), 0, -1, mark.fileno(), "", item_seconds=0.0)
        server = MediaServer(launch)
        server._job = b"frontend", 7
        thread = threading.Thread(target=prepare)
        thread.start()
        assert begun.wait(PATIENCE_S)
        with pytest.raises(Ended):
            server._watch_the_clock(router)
        [(origin, answer), code] = told
        assert (origin, answer.job, answer.error, code) == (b"frontend", 7, "InvalidRequestError", TIMED_OUT)
        thread.join(0.1)
        assert thread.is_alive(), "it does not begin another item"
        assert os.pread(mark.fileno(), 99, 0) == slow
        server._ends = False
        thread.join()
        assert os.pread(mark.fileno(), 99, 0) == bytes(16)


def test_a_frontend_with_many_urls_leaves_threads_to_others_and_counts_what_waits(llava: Path) -> None:
    server = MediaServer(MediaLaunch(config_of(llava), Endpoints("ipc:///nowhere"), 0, -1, -1, ""))
    fetched: list[Any] = []
    server._fetching.submit = lambda *asked: fetched.append(asked)
    for origin, count in ((b"one", 9), (b"other", 1)):
        for job in range(count):
            content = Content("image", "https://media.example/x.png")
            server._admit(origin, Prepare(job, "<image>", [content], {}, True), [], 10)
    assert [waiting.origin for _, waiting in fetched] == [b"one"] * FETCHES_OF_ONE + [b"other"]
    assert server._waiting_bytes == 100
    while fetched:
        fetch, waiting = fetched.pop(0)
        fetch(waiting)  # refused: no domain is allowed
    assert server._outbox.qsize() == 10
    assert server._waiting_bytes == 0
    assert not server._fetches
    assert not server._to_fetch


class Dying:
    """A link to workers that die as soon as they have got a message."""

    lost, reached, trouble, opened_at = True, True, "", 0.0

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def open(self) -> None: ...

    def send(self, frames: Any) -> None:
        self.sent.append(frames)

    def read_events(self) -> None: ...

    def receive(self) -> None: ...


def test_what_workers_die_of_is_not_sent_for_ever() -> None:
    media = RemoteMedia([f"ipc://{tempfile.gettempdir()}/nobody"])
    failed: list[Any] = []
    link, worker = Dying(), _Worker("", jobs={1: _Job(1, [], lambda answer: None, failed.append)})
    for _ in range(100):
        media._exchange._look_at(worker, link)
    assert not worker.jobs
    assert len(link.sent) == MAX_SENDS - 1
    assert "media workers died" in str(failed[0])


@pytest.mark.slow
@pytest.mark.usefixtures("light")
def test_what_was_asked_goes_to_the_workers_of_the_next_daemon(llava: Path) -> None:
    """Over tcp they have other ports, and there may be more or fewer of them."""
    first, then = (MediaWorkers(config_of(llava, media_workers=n), Endpoints("tcp://127.0.0.1:1234")) for n in (1, 2))
    addresses = [[f"tcp://127.0.0.1:{place}" for place in one.places] for one in (first, then)]
    media = RemoteMedia(addresses[0])
    asked = [media.prepare("<image>", [image(seed)], {}) for seed in range(3)]  # the first does not start
    media.move(addresses[1])
    then.start()
    later = [media.prepare("<image>", [image(seed)], {}) for seed in range(3)]
    assert [one.result(PATIENCE_S) for one in asked] == [one.result(PATIENCE_S) for one in later]
    media.close()
    first.close()
    then.close()


class Silent:
    """A link over which one answer comes."""

    lost, reached, trouble = False, True, ""

    def __init__(self, answer: Answer) -> None:
        self.frames = [encode_answer(answer)]

    def read_events(self) -> None: ...

    def receive(self) -> Any:
        return self.frames.pop() if self.frames else None


def test_an_answer_that_comes_while_the_client_is_closed_ends_no_thread() -> None:
    """The worker lacks an item, and to have it prepared again a message would be sent."""
    media = RemoteMedia([f"ipc://{tempfile.gettempdir()}/nobody"])
    exchange = media._exchange
    job = _Job(1, [], lambda answer: exchange.send(0, job), lambda error: None)
    exchange.closed = True
    exchange._look_at(_Worker("", jobs={1: job}), Silent(Answer(1, lacks=[b"x"])))
