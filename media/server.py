"""A media worker's side of the exchange with frontends and cores.

The main thread has the socket and watches the clock. One thread prepares prompts, one after another; the frontends take
turns. For each core there are threads that send items to it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import zmq

from ..ipc.access import Access
from ..ipc.connection import LOAD_SECONDS, Connection
from ..ipc.errors import (
    EngineDeadError,
    InvalidRequestError,
    MainspringError,
    NotPermittedError,
    ProtocolError,
    wire_name,
    wire_text,
)
from ..ipc.media_client import MediaInput
from ..ipc.media_messages import (
    DELIVERIES,
    Answer,
    Content,
    Deliver,
    MediaLaunch,
    Prepare,
    ResetCache,
    decode_order,
    encode_answer,
    most_bytes,
)
from ..ipc.media_workers import TIMED_OUT
from ..ipc.sync_client import SyncClient
from ..ipc.transport import Endpoints, Socket, Waker
from .local import deliver
from .preparer import Preparer

logger = logging.getLogger(__name__)

FETCHES = 8  # prompts with URLs that are fetched at once, so that a slow host does not hold up the others
FETCHES_OF_ONE = 4  # of one frontend
FREE_BYTES = 3 << 30  # address space that preparing may take, beside what the process has when it begins
QUEUED_BYTES = 512 << 20  # of messages that wait to be prepared; above, frontends have to wait
RECEIVE_QUEUE = 2  # messages of a frontend that libzmq holds, because QUEUED_BYTES does not count these
TURN = 64  # messages received between two looks at the answers and the clock
ALARM_SECONDS = 5.0  # after the time limit of an item the kernel ends the process, if it could not do so itself
FAREWELL_MS = 500  # longest wait for the last answer to be sent


@dataclass(slots=True)
class _Waiting:
    """A prompt that waits to be prepared."""

    origin: bytes  # routing id of the frontend
    order: Prepare
    inputs: list[MediaInput]
    num_bytes: int


class MediaServer:
    """Serves until the process ends."""

    def __init__(self, launch: MediaLaunch) -> None:
        self._launch = launch
        self._refused = set(launch.refused)
        self._preparer = Preparer(launch.config, guard=self._guarded)
        self._waiting: OrderedDict[bytes, deque[_Waiting]] = OrderedDict()  # by frontend, in the order of their turns
        self._waiting_bytes = 0
        self._arrived = threading.Condition()
        self._began: tuple[float, bytes, int] | None = None  # when the item in work began, its frontend and job
        self._ends = False  # because that took too long: no other item is to be blamed
        self._job: tuple[bytes, int] = (b"", 0)
        self._fetching = ThreadPoolExecutor(FETCHES, "mainspring-fetch")
        self._to_fetch: dict[bytes, deque[_Waiting]] = {}  # by frontend
        self._fetches = Counter[bytes]()  # under way, by frontend
        self._outbox: SimpleQueue[tuple[bytes, Answer]] = SimpleQueue()
        self._waker = Waker()
        self._givers: dict[int, _Giver] = {}
        self._context = zmq.Context()
        self._access = Access(self._context, launch.endpoints)

    def run(self) -> None:
        router = self._listen()
        threading.Thread(target=self._prepare_all, name="mainspring-prepare", daemon=True).start()
        poller = zmq.Poller()
        poller.register(self._waker.fd, zmq.POLLIN)
        if self._access.zap is not None:
            poller.register(self._access.zap, zmq.POLLIN)
        while True:
            poller.register(router, zmq.POLLIN if self._waiting_bytes < QUEUED_BYTES else 0)
            poller.poll(None if self._began is None else max(0, int(self._left() * 1000) + 1))
            self._waker.clear()
            self._access.authenticate()
            for _ in range(TURN):
                if self._waiting_bytes >= QUEUED_BYTES or not router.poll(0):
                    break
                self._take(router.recv_multipart(copy=False))
            while not self._outbox.empty():
                _send(router, *self._outbox.get())
            self._watch_the_clock(router)

    def _listen(self) -> Socket:
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        router.setsockopt(zmq.MAXMSGSIZE, most_bytes(self._launch.config.multimodal_config))
        if self._launch.endpoints.secret_key:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt_string(zmq.CURVE_SECRETKEY, self._launch.endpoints.secret_key)
        router.setsockopt(zmq.USE_FD, self._launch.listen_fd)
        router.bind(self._launch.address)
        return router

    # ------------------------------------------------------------------ the main thread

    def _take(self, frames: Sequence[zmq.Frame]) -> None:
        origin = frames[0].bytes
        try:
            token, order, contents = decode_order([frame.buffer for frame in frames[1:]])
            key = self._access.admit(frames[1], token)
            if isinstance(order, ResetCache) and key is not None and not key.admin:
                raise NotPermittedError(
                    "reset_mm_cache empties the cache of all frontends: have this client's key listed with `admin` "
                    "among the allowed keys"
                )
        except ProtocolError as error:
            logger.warning("dropped a message: %s", error)
            return
        except MainspringError as error:
            logger.warning("refused a message: %s", error)
            self._answer(origin, Answer(order.job, wire_name(error), wire_text(error)))
            return
        match order:
            case Prepare():
                self._admit(origin, order, contents, len(frames[3].buffer))
            case Deliver():
                if order.core not in self._givers:
                    self._givers[order.core] = _Giver(order.core, self._launch.endpoints, self._preparer, self._answer)
                self._givers[order.core].put(origin, order)
            case ResetCache():
                self._preparer.reset()
                self._answer(origin, Answer(order.job))

    def _admit(self, origin: bytes, order: Prepare, contents: Sequence[Any], size: int) -> None:
        """Queue a prompt, when what its URLs name is here."""
        try:
            inputs = _inputs(order.contents, contents)
        except (MainspringError, MemoryError) as error:
            return self._answer(origin, _failure(order.job, error))
        waiting = _Waiting(origin, order, inputs, size + sum(len(content) for content in contents))
        fetches = any(content.url and content.url[:5].lower() != "data:" for content in order.contents)
        with self._arrived:
            self._waiting_bytes += waiting.num_bytes
            if fetches:
                self._to_fetch.setdefault(origin, deque()).append(waiting)
        if fetches:
            self._fetch_next(origin)
        else:
            self._queue(waiting)

    def _fetch_next(self, origin: bytes) -> None:
        """Fetch what a frontend's prompts name, few at once, so that all frontends get threads."""
        with self._arrived:
            mine = self._to_fetch.get(origin)
            if not mine or self._fetches[origin] >= FETCHES_OF_ONE:
                return
            self._fetches[origin] += 1
            self._fetching.submit(self._fetch, mine.popleft())
            if not mine:
                del self._to_fetch[origin]

    def _fetch(self, waiting: _Waiting) -> None:
        try:
            inputs = self._preparer.fetched(waiting.inputs)
        except Exception as error:
            with self._arrived:
                self._waiting_bytes -= waiting.num_bytes
            self._answer(waiting.origin, _failure(waiting.order.job, error))
        else:
            before, waiting.inputs = waiting.inputs, inputs
            fetched = (now.content for old, now in zip(before, inputs, strict=True) if now is not old)
            more = sum(len(content) for content in fetched)
            with self._arrived:
                waiting.num_bytes += more
                self._waiting_bytes += more
            self._queue(waiting)
        with self._arrived:
            self._fetches[waiting.origin] -= 1
            if not self._fetches[waiting.origin]:
                del self._fetches[waiting.origin]
        self._fetch_next(waiting.origin)

    def _queue(self, waiting: _Waiting) -> None:
        with self._arrived:
            self._waiting.setdefault(waiting.origin, deque()).append(waiting)
            self._arrived.notify()

    def _answer(self, origin: bytes, answer: Answer) -> None:
        self._outbox.put((origin, answer))
        self._waker.wake()

    def _left(self) -> float:
        """Seconds that the item in work may still take."""
        began = self._began
        return 1.0 if began is None else began[0] + self._launch.item_seconds - time.monotonic()

    def _watch_the_clock(self, router: Socket) -> None:
        """End the process if an item takes too long, because a library can't be interrupted."""
        if (began := self._began) is None or self._left() > 0:
            return
        self._ends = True
        if self._began is not began:  # it was ready in the last moment
            self._ends = False
            return
        text = f"an item of this prompt took longer to prepare than {self._launch.item_seconds:.0f} s"
        _send(router, began[1], Answer(began[2], InvalidRequestError.__name__, text))
        router.close(linger=FAREWELL_MS)
        time.sleep(FAREWELL_MS / 1000)
        os._exit(TIMED_OUT)

    # ------------------------------------------------------------------ the preparing thread

    def _prepare_all(self) -> None:
        try:
            while True:
                waiting = self._next()
                answer = self._prepare(waiting)
                self._answer(waiting.origin, answer)
        except BaseException:
            logger.critical("the preparing thread failed", exc_info=True)
            os._exit(1)

    def _next(self) -> _Waiting:
        with self._arrived:
            while not self._waiting:
                self._arrived.wait()
            origin, mine = self._waiting.popitem(last=False)
            found = mine.popleft()
            if mine:
                self._waiting[origin] = mine  # behind the others
            self._waiting_bytes -= found.num_bytes
        self._waker.wake()
        return found

    def _prepare(self, waiting: _Waiting) -> Answer:
        order = waiting.order
        self._job = waiting.origin, order.job
        try:
            limit_memory(self._preparer)
            prepared = self._preparer.prepare(order.prompt, waiting.inputs, order.kwargs, order.add_special_tokens)
        except Exception as error:
            if not isinstance(error, MainspringError | MemoryError):
                logger.exception("a prompt can't be prepared")
            return _failure(order.job, error)
        windows = list(prepared.windows)
        return Answer(order.job, token_ids=prepared.token_ids, media=prepared.media, windows=windows)

    @contextlib.contextmanager
    def _guarded(self, digest: bytes) -> Iterator[None]:
        """Mark the content in work, so that it is known of what the process died."""
        if digest in self._refused:
            raise InvalidRequestError("this item is refused, because media workers died while they prepared it")
        while self._ends:
            time.sleep(FAREWELL_MS / 1000)
        os.pwrite(self._launch.mark_fd, digest, 0)
        self._began = time.monotonic(), *self._job
        self._waker.wake()
        signal.setitimer(signal.ITIMER_REAL, self._launch.item_seconds + ALARM_SECONDS)  # SIGALRM ends the process
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            self._began = None
            if not self._ends:
                os.pwrite(self._launch.mark_fd, bytes(len(digest)), 0)


class _Giver:
    """Sends items to one core, in some threads: the core lets an item wait for room, but not one of a request that has
    some of its items already."""

    def __init__(
        self, core: int, endpoints: Endpoints, preparer: Preparer, answer: Callable[[bytes, Answer], None]
    ) -> None:
        self._endpoints, self._preparer, self._answer = endpoints.of(core), preparer, answer
        self._client: _OneCore | None = None
        self._lock = threading.Lock()  # guards the client
        self._pool = ThreadPoolExecutor(DELIVERIES, f"mainspring-give-{core}")

    def put(self, origin: bytes, order: Deliver) -> None:
        self._pool.submit(self._run, origin, order)

    def _run(self, origin: bytes, order: Deliver) -> None:
        try:
            gone = deliver(self._connected().call, self._preparer, order.digests)
            answer = Answer(order.job, lacks=gone)
        except Exception as error:
            if isinstance(error, EngineDeadError):
                self._client = None
            answer = Answer(order.job, wire_name(error), wire_text(error))
        self._answer(origin, answer)

    def _connected(self) -> _OneCore:
        with self._lock:
            if self._client is None:
                self._client = _OneCore(_connect(self._endpoints))
            return self._client


class _OneCore(SyncClient):
    """A client of one core, whether or not it is in a group."""

    def _receive(self) -> bool:
        return self._connection.receive()


class _Owner:
    """A core that the supervisor of this process starts again: it is waited for as long as this process lives."""

    def __init__(self, endpoints: Endpoints) -> None:
        # over ipc, frames that come to the address of all frontends have a lower limit
        address = endpoints.address if endpoints.secret_key else endpoints.admin_address or endpoints.address
        self.address = address.replace("//*:", "//127.0.0.1:")
        self.token = endpoints.worker_token or endpoints.token

    def dead_error(self) -> EngineDeadError | None:
        return None

    def close(self) -> None:
        """It does not end with this process."""


def _connect(endpoints: Endpoints) -> Connection:
    keys = None
    if endpoints.secret_key:
        public = zmq.curve_public(endpoints.secret_key.encode()).decode()
        keys = public, endpoints.secret_key, public
    return Connection(_Owner(endpoints), name=f"media worker {os.getpid()}", keys=keys, connect_timeout=LOAD_SECONDS)


def _failure(job: int, error: Exception) -> Answer:
    if isinstance(error, MemoryError):
        error = InvalidRequestError("this prompt needs more memory than a media worker may use")
    return Answer(job, wire_name(error), wire_text(error))


def _inputs(contents: Sequence[Content], frames: Sequence[Any]) -> list[MediaInput]:
    if len(frames) != sum(not content.url for content in contents):
        raise InvalidRequestError(f"{len(contents)} items came with {len(frames)} frames")
    rest, found = iter(frames), []
    for content in contents:
        if content.url:
            value: Any = content.url
        elif not content.dtype:
            value = bytes(next(rest))
        else:
            if content.dtype not in ("int64", "uint8", "float32", "float64", "float16"):
                raise InvalidRequestError(f"an array of {content.dtype:.20} is no {content.modality:.20}")
            try:
                value = np.frombuffer(next(rest), np.dtype(content.dtype)).reshape(content.shape)
            except (ValueError, OverflowError) as error:
                raise InvalidRequestError(f"an array does not fit its shape {content.shape}: {error}") from None
        found.append(MediaInput(content.modality, value, content.facts))
    return found


def limit_memory(preparer: Preparer) -> None:
    """Limit the address space once the processor's libraries are loaded, so that a bomb is an error here."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return
    _ = preparer.processor
    with contextlib.suppress(OSError, ValueError):  # only Linux has this file
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + FREE_BYTES + preparer.cache_bytes
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _send(router: Socket, origin: bytes, answer: Answer) -> None:
    with contextlib.suppress(zmq.ZMQError):  # the frontend has left
        router.send_multipart([origin, *encode_answer(answer)], zmq.NOBLOCK)
