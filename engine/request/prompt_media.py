"""Media of prompts on the frontend's side: checks them, has them prepared, and lets the core have them."""

from __future__ import annotations

import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ...ipc.config import ENCODER_TEXT, MOST_ITEMS, MultiModalConfig
from ...ipc.errors import EngineDeadError, InvalidRequestError, NotSupportedError, shown

if TYPE_CHECKING:
    from ...ipc.media_client import MediaClient, MediaInput, PreparedPrompt
    from .media_inputs import GivenItem, GivenMedia


A = TypeVar("A")
B = TypeVar("B")


def done(result: A) -> Future[A]:
    """A future that has this result."""
    made = Future[A]()
    made.set_result(result)
    return made


def following(asked: Future[A], make: Callable[[A], B]) -> Future[B]:
    """What `make` gives for the result of a future, as a future. To cancel it cancels the other one."""
    made = Future[B]()

    def follow(found: Future[A]) -> None:
        if found.cancelled():
            made.cancel()
            return
        error = found.exception()
        result = None if error is not None else make(found.result())
        if made.set_running_or_notify_cancel():
            if error is not None:
                made.set_exception(error)
            else:
                made.set_result(cast(B, result))

    asked_weakly = weakref.ref(asked)  # no circle, because what a future holds is to be freed when it is not needed

    def give_up(found: Future[B]) -> None:
        if found.cancelled() and (other := asked_weakly()) is not None:
            other.cancel()

    made.add_done_callback(give_up)
    asked.add_done_callback(follow)
    return made


class RequestMedia:
    """The prepared media of a request. When no request has it any more, its client is told to forget them.

    Args:
        ended: gets `prepared` then. The client is told later, because this may happen at any time and in any thread,
            also while the client holds its lock.
    """

    def __init__(self, prepared: PreparedPrompt, inputs: Sequence[MediaInput], ended: deque[PreparedPrompt]) -> None:
        self.prepared, self.inputs = prepared, inputs
        weakref.finalize(self, ended.append, prepared).atexit = False


class PromptMedia:
    """Thread-safe.

    Args:
        modalities: what the model takes beside text.
        open_client: makes the client, when the first item comes.
    """

    def __init__(self, config: MultiModalConfig, modalities: Sequence[str], open_client: Callable[[], MediaClient]):
        self._config, self.modalities, self._open = config, modalities, open_client
        self._client: MediaClient | None = None
        self._closed = False
        self._lock = threading.RLock()
        self._ended: deque[PreparedPrompt] = deque()
        self._known: OrderedDict[tuple[str, str], MediaInput] = OrderedDict()  # by modality and uuid
        self._known_bytes = 0

    def inputs(self, given: GivenMedia) -> list[MediaInput]:
        """The items of a prompt, as a client takes them.

        Raises:
            NotSupportedError: the model does not take them.
            InvalidRequestError: an item has no known form; there are more than allowed; or an item was left out, and
                its uuid is not known.
        """
        from .media_inputs import encoder_text, given_items

        if given.text is not None:
            if ENCODER_TEXT not in self.modalities:
                takes = ", ".join(self.modalities)
                raise NotSupportedError(f"encoder_prompt is a text; this model's encoder takes: {takes}")
            return [encoder_text(given.text)]
        items = given_items(given.data, given.uuids, self.modalities)
        for modality, count in Counter(item.modality for item in items).items():
            most = self._config.limit_mm_per_prompt.get(modality, MOST_ITEMS)
            if count > most:
                text = f"multi_modal_data has {count} {modality} items; limit_mm_per_prompt allows {most}"
                raise InvalidRequestError(text)
        return [self._input(item) for item in items]

    def _input(self, item: GivenItem) -> MediaInput:
        if item.uuid is None:
            assert item.input is not None
            return item.input
        key = (item.modality, item.uuid)
        with self._lock:
            if item.input is not None:
                self._remember(key, item.input)
                return item.input
            if key not in self._known:
                raise InvalidRequestError(
                    f"the {item.modality} with uuid {shown(item.uuid)} is not known (any more): give it again"
                )
            self._known.move_to_end(key)
            return self._known[key]

    def _remember(self, key: tuple[str, str], given: MediaInput) -> None:
        if (old := self._known.pop(key, None)) is not None:
            self._known_bytes -= _num_bytes(old)
        self._known[key] = given
        self._known_bytes += _num_bytes(given)
        while self._known_bytes > self._config.mm_processor_cache_gb * 2**30:
            self._known_bytes -= _num_bytes(self._known.popitem(last=False)[1])

    def prepare(
        self, prompt: str | list[int], inputs: Sequence[MediaInput], kwargs: dict[str, Any], add_special_tokens: bool
    ) -> Future[RequestMedia]:
        """Begin to prepare a prompt. To cancel the result gives it up."""
        asked = self._use().prepare(prompt, inputs, kwargs, add_special_tokens)
        return following(asked, lambda prepared: RequestMedia(prepared, inputs, self._ended))

    def deliver(self, media: RequestMedia, core: int = 0) -> None:
        """Let a core have the items of a request that is sent to it."""
        self._use().deliver(media.prepared, media.inputs, core)

    def reset(self) -> Future[None]:
        """Forget all items, and all uuids. See `MediaClient.reset_cache`."""
        with self._lock:
            self._known.clear()
            self._known_bytes = 0
        return self._use().reset_cache() if self.modalities else done(None)

    def close(self) -> None:
        with self._lock:
            client, self._client, self._closed = self._client, None, True
        if client is not None:
            client.close()

    def sweep(self) -> None:
        """Let the client forget the media of requests that have ended."""
        while self._ended and (client := self._client) is not None:
            try:
                client.forget(self._ended.popleft())
            except IndexError:  # another thread took it
                break

    def _use(self) -> MediaClient:
        """The client, which has forgotten what ended."""
        with self._lock:
            if self._closed:
                raise EngineDeadError("the engine was shut down")
            if self._client is None:
                self._client = self._open()
            client = self._client
        self.sweep()
        return client


def _num_bytes(given: MediaInput) -> int:
    """With what it takes to remember it."""
    content = given.content
    return 1024 + (len(content) if isinstance(content, (bytes, str)) else int(content.nbytes))
