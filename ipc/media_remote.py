"""The client of media workers: prepares prompts there, and has their items delivered to cores.

What a worker has not answered is sent again when the connection is lost, and an item that the next worker lacks is
prepared again, so the death of a worker costs time only.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from .errors import EngineDeadError, InvalidRequestError, MainspringError, ProtocolError, RequestFailedError, from_wire
from .link import Link
from .media_client import Asked, AskedFor, MediaInput, PreparedPrompt, digests_of
from .media_messages import DELIVERIES, Answer, Content, Deliver, Prepare, ResetCache, decode_answer, encode_order
from .messages import MAX_MEDIA_ITEMS, MediaItem
from .transport import MAX_MESSAGE_BYTES, Waker, readable

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.1  # interval between two attempts to reach a worker
START_SECONDS = 120.0  # longest wait for a worker that does not answer at all
MAX_ATTEMPTS = 20  # times that an item is prepared for one delivery, because those of other prompts took its place
MAX_SENDS = 100  # times that a message is sent to workers that die before they answer
KEPT_HOMES = 10_000  # items of which it is remembered which worker had them
Failed = Callable[[Sequence[MediaItem], MainspringError], None]


@dataclass(eq=False, slots=True)
class _Job:
    """An unanswered message."""

    number: int
    frames: list[Any]
    done: Callable[[Answer], None]
    failed: Callable[[MainspringError], None]
    times: int = 0  # that a worker died that had got it


@dataclass(eq=False, slots=True)
class _Worker:
    """The connection to one worker."""

    address: str
    link: Link | None = None  # made when it is needed, because a connection starts the worker
    jobs: dict[int, _Job] = field(default_factory=dict)
    waits_since: float | None = None  # it has jobs and is not reached


class _Exchange:
    """Sends messages, and sends them again when a connection is lost. One thread has the sockets."""

    def __init__(self, addresses: Sequence[str], keys: tuple[str, str, str] | None) -> None:
        self._workers, self._keys = [_Worker(address) for address in addresses], keys
        self._addresses = list(addresses)  # those that the workers are to have
        self._lock = threading.Lock()  # guards the lists of new jobs and of addresses
        self._new: list[tuple[int, _Job]] = []
        self._waker, self.closed, self._pid = Waker(), False, os.getpid()
        self._thread: threading.Thread | None = None

    def send(self, worker: int, job: _Job) -> None:
        with self._lock:
            if self.closed:
                raise EngineDeadError("the engine was shut down")
            self._new.append((worker, job))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mainspring-media", daemon=True)
                self._thread.start()
        self._waker.wake()

    def move(self, addresses: Sequence[str]) -> None:
        """Go on with the workers at these addresses."""
        with self._lock:
            self._addresses = list(addresses)
        self._waker.wake()

    def spare(self, wanted: int) -> int:
        """The worker `wanted`, or the one with the fewest unanswered messages if `wanted` has several more."""
        with self._lock:
            workers = self._workers
            open_ = Counter(number for number, _ in self._new)
            open_.update({number: len(one.jobs) for number, one in enumerate(workers)})
        least = min(range(len(workers)), key=open_.__getitem__)
        return wanted if open_[wanted] <= open_[least] + 1 else least

    def stop(self) -> None:
        with self._lock:
            self.closed = True
        self._waker.wake()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread() and os.getpid() == self._pid:
            thread.join(timeout=5)

    def _run(self) -> None:
        try:
            self._serve()
        except BaseException as error:
            if not threading.main_thread().is_alive():  # the program ends, and has closed the sockets
                return
            logger.exception("the thread that talks with media workers failed")
            while not self.closed:
                self._end_all(EngineDeadError(f"the thread that talks with media workers failed: {error!r:.200}"))
                with self._lock:
                    self.closed = not self._new  # whoever was told may have sent more

    def _serve(self) -> None:
        while not self.closed:
            links = [one.link for one in self._workers if one.link is not None]
            waiting = any(link.lost for link in links) or any(one.waits_since is not None for one in self._workers)
            readable(
                (self._waker.fd, *(fd for link in links for fd in link.fds)), RECONNECT_SECONDS if waiting else None
            )
            self._waker.clear()
            if (addresses := self._addresses) != [one.address for one in self._workers]:
                self._replace_workers(addresses)
            with self._lock:  # so that `spare` counts each job
                new, self._new = self._new, []
                for number, job in new:
                    self._workers[number % len(self._workers)].jobs[job.number] = job
            for number, job in new:
                worker = self._workers[number % len(self._workers)]
                if worker.link is None:
                    worker.link = Link(worker.address, self._keys)
                worker.link.send(job.frames)
            for worker in self._workers:
                if worker.link is not None:
                    self._look_at(worker, worker.link)
        self._end_all(EngineDeadError("the engine was shut down"))

    def _end_all(self, error: EngineDeadError) -> None:
        for worker in self._workers:
            if worker.link is not None:
                worker.link.close(0)
            self._give_up(worker, error)
        with self._lock:
            new, self._new = self._new, []
        for _, job in new:
            job.failed(error)

    def _replace_workers(self, addresses: Sequence[str]) -> None:
        """Send to other workers what was not answered."""
        before, self._workers = self._workers, [_Worker(address) for address in addresses]
        for number, old in enumerate(before):
            self._workers[number % len(addresses)].jobs |= old.jobs
            if old.link is not None:
                old.link.close(0)
        for worker in self._workers:
            for job in worker.jobs.values():
                worker.link = worker.link or Link(worker.address, self._keys)
                worker.link.send(job.frames)

    def _look_at(self, worker: _Worker, link: Link) -> None:
        link.read_events()
        while (frames := link.receive()) is not None:
            try:
                answer = decode_answer(frames)
            except ProtocolError:
                logger.warning("a media worker sent what is no answer")
                continue
            if (job := worker.jobs.pop(answer.job, None)) is not None:
                with contextlib.suppress(EngineDeadError):  # it sends more, and the client is being closed
                    job.done(answer)
        link.read_events()
        now = time.monotonic()
        if link.lost and now - link.opened_at >= RECONNECT_SECONDS:
            self._send_again(worker, link)
        if link.reached or not worker.jobs:
            worker.waits_since = None
        elif worker.waits_since is None:
            worker.waits_since = now
        elif now - worker.waits_since > START_SECONDS:
            why = f": {link.trouble}" if link.trouble else ""
            self._give_up(worker, EngineDeadError(f"no media worker answers at {worker.address}{why}"))

    @staticmethod
    def _send_again(worker: _Worker, link: Link) -> None:
        """Reconnect. What a worker has got so often that it may be what workers die of is given up."""
        reached = link.reached
        link.open()
        for number, job in list(worker.jobs.items()):
            job.times += reached
            if job.times < MAX_SENDS:
                link.send(job.frames)
            else:
                del worker.jobs[number]
                job.failed(RequestFailedError(f"media workers died {MAX_SENDS} times while this was unanswered"))

    @staticmethod
    def _give_up(worker: _Worker, error: MainspringError) -> None:
        jobs = list(worker.jobs.values())
        worker.jobs.clear()
        for job in jobs:
            job.failed(error)


class RemoteMedia:
    """See `MediaClient`. `sent` takes the place of `deliver`: the connection to a core calls it with each request that
    it sends, also again to a further core.

    Args:
        addresses: of the workers.
        token: that embedded workers want.
        keys: for tcp, see `make_dealer`.
        failed: told of items that can't be delivered; their requests would wait for ever.
        largest: bytes of a frame that the workers take, see `most_bytes`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        token: bytes = b"",
        keys: tuple[str, str, str] | None = None,
        failed: Failed = lambda media, error: None,
        largest: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._token, self._count, self._failed, self._largest = token, len(addresses), failed, largest
        self._exchange = _Exchange(addresses, keys)
        self._numbers = itertools.count(1)
        self._asked = AskedFor()
        self._homes: OrderedDict[bytes, int] = OrderedDict()  # digest of an item → worker; the latest used is the last
        # deliveries that wait for earlier ones, and how many are under way; by worker and core
        self._waiting: defaultdict[tuple[int, int], deque[Sequence[MediaItem]]] = defaultdict(deque)
        self._delivering = Counter[tuple[int, int]]()
        self._lock = threading.RLock()  # guards all of these
        self._end = weakref.finalize(self, self._exchange.stop)

    def move(self, addresses: Sequence[str]) -> None:
        """Another daemon serves, whose workers are there."""
        self._count = len(addresses)
        self._exchange.move(addresses)

    def prepare(
        self,
        prompt: str | list[int],
        inputs: Sequence[MediaInput],
        kwargs: dict[str, Any],
        add_special_tokens: bool = True,
    ) -> Future[PreparedPrompt]:
        """See `MediaClient`."""
        asked = Asked(prompt, tuple(inputs), dict(kwargs), add_special_tokens)
        future: Future[PreparedPrompt] = Future()

        def done(prepared: PreparedPrompt) -> None:
            if future.set_running_or_notify_cancel():
                with self._lock:
                    self._asked.add(prepared, asked)
                future.set_result(prepared)

        def failed(error: MainspringError) -> None:
            if future.set_running_or_notify_cancel():
                future.set_exception(error)

        self._prepare(asked, self._worker_of(asked), done, failed)
        return future

    def _prepare(
        self, asked: Asked, worker: int, done: Callable[[PreparedPrompt], None], fail: Callable[[MainspringError], None]
    ) -> None:
        if len(asked.inputs) > MAX_MEDIA_ITEMS:
            return fail(InvalidRequestError(f"{len(asked.inputs)} media items; the limit is {MAX_MEDIA_ITEMS}"))
        contents, frames = [], list[Any]()
        for given in asked.inputs:
            content, dtype, shape = given.content, "", list[int]()
            if not isinstance(content, bytes | str):
                import numpy as np

                values = np.ascontiguousarray(content)
                dtype, shape = values.dtype.name, list(values.shape)
                content = values.tobytes()
            url = content if isinstance(content, str) else ""
            contents.append(Content(given.modality, url, dtype, shape, given.facts))
            frames += [] if isinstance(content, str) else [content]
        try:
            order = Prepare(next(self._numbers), asked.prompt, contents, asked.kwargs, asked.add_special_tokens)
            message = encode_order(self._token, order, frames)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            text = f"mm_processor_kwargs hold what can't go to another process: {error!s:.200}"
            return fail(InvalidRequestError(text))
        if (size := max(map(len, message))) > self._largest:
            text = f"a media item, or the prompt with its data: URLs, has {size} bytes; the limit is {self._largest}"
            return fail(InvalidRequestError(f"{text}, which follows from max_media_bytes and max_media_pixels"))

        def answered(answer: Answer) -> None:
            if answer.error:
                fail(from_wire(answer.error, answer.error_text))
            else:
                done(PreparedPrompt(answer.token_ids, answer.media, answer.windows))

        self._exchange.send(worker, _Job(order.job, message, answered, fail))

    def _worker_of(self, asked: Asked) -> int:
        """The worker that this client gave the first item before, because it may still have it; else one that other
        clients choose for it too, or one with less to do."""
        if self._count == 1 or not asked.inputs:
            return 0
        content = asked.inputs[0].content
        if not isinstance(content, bytes | str):
            content = content.tobytes()
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        digest = blake2b(data, digest_size=8).digest()
        with self._lock:
            worker = self._homes.pop(digest, None)
            if worker is None or worker >= self._count:
                worker = self._exchange.spare(int.from_bytes(digest, "little") % self._count)
            self._homes[digest] = worker
            if len(self._homes) > KEPT_HOMES:
                self._homes.popitem(last=False)
        return worker

    def deliver(self, prepared: PreparedPrompt, inputs: Sequence[MediaInput], core: int = 0) -> None:
        """Nothing to do: the connection calls `sent`."""

    def sent(self, media: Sequence[MediaItem], core: int) -> None:
        """Let a core have the items of a request that was sent to it."""
        with self._lock:
            asked = self._asked.get(media)
        if asked is None:
            error = RequestFailedError("the media of this request are not kept any more")
            threading.Thread(target=self._failed, args=(media, error), daemon=True).start()  # the caller holds a lock
            return
        way = self._worker_of(asked), core
        with self._lock:
            self._waiting[way].append(media)
        self._deliver_next(way)

    def _deliver_next(self, way: tuple[int, int]) -> None:
        """Begin with a delivery that waits, unless enough are under way."""
        asked: Asked | None = None
        with self._lock:
            while asked is None and self._waiting[way] and self._delivering[way] < DELIVERIES:
                media = self._waiting[way].popleft()
                asked = self._asked.get(media)  # None: its request has ended
            if asked is None:
                return
            self._delivering[way] += 1
        with contextlib.suppress(EngineDeadError):  # it is being closed
            self._deliver(media, asked, way, MAX_ATTEMPTS)

    def _deliver(self, media: Sequence[MediaItem], asked: Asked, way: tuple[int, int], attempts: int) -> None:
        worker, core = way

        def ended(error: MainspringError | None = None) -> None:
            with self._lock:
                self._delivering[way] -= 1
            if error is not None and not self._exchange.closed:
                self._failed(media, error)
            self._deliver_next(way)

        def again(prepared: PreparedPrompt) -> None:
            if digests_of(prepared.media) != digests_of(media):
                ended(RequestFailedError("a URL of this request has another content than before"))
            elif attempts <= 1:
                ended(RequestFailedError("the media of this request do not fit the workers' cache"))
            else:
                self._deliver(media, asked, way, attempts - 1)

        def answered(answer: Answer) -> None:
            if answer.lacks:
                self._prepare(asked, worker, again, ended)
            else:
                ended(from_wire(answer.error, answer.error_text) if answer.error else None)

        order = Deliver(next(self._numbers), core, list(dict.fromkeys(digests_of(media))))
        self._exchange.send(worker, _Job(order.job, encode_order(self._token, order), answered, ended))

    def forget(self, prepared: PreparedPrompt) -> None:
        """See `MediaClient`."""
        with self._lock:
            self._asked.forget(prepared.media)

    def reset_cache(self) -> Future[None]:
        """See `MediaClient`."""
        every, missing = Future[None](), self._count
        every.set_running_or_notify_cancel()  # so that it can't be cancelled

        def failed(error: MainspringError) -> None:
            if not every.done():
                every.set_exception(error)

        def answered(answer: Answer) -> None:
            nonlocal missing
            missing -= 1
            if answer.error:
                failed(from_wire(answer.error, answer.error_text))
            elif not missing and not every.done():
                every.set_result(None)

        for worker in range(self._count):
            order = ResetCache(next(self._numbers))
            job = _Job(order.job, encode_order(self._token, order), answered, failed)
            self._exchange.send(worker, job)
        return every

    def close(self) -> None:
        """See `MediaClient`."""
        self._end()
