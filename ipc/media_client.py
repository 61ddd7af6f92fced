"""The interface of frontends to what prepares media: `media/local.py` in this process, `RemoteMedia` in others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .messages import MediaItem

if TYPE_CHECKING:
    import numpy as np

TOKEN_KINDS = "mainspring_token_kinds"  # one more array of an item: tokens and the kinds that its processor gives them


class MediaInput(NamedTuple):
    """An item as the user gave it.

    `content` is a file's bytes, or a URL, or an array: an image is uint8 [height, width, 3], a video uint8 [frames,
    height, width, 3], a sound float [samples]. A text for an encoder is bytes of UTF-8, or int64 token ids [tokens]."""

    modality: str  # "image", "video", "audio", "text"
    content: bytes | str | np.ndarray
    # of an array: "sampling_rate"; "fps", "total_num_frames", "frames_indices"
    # of a sound that is all of an encoder's input: "window", the number of its part that is meant
    facts: dict[str, Any] = {}  # noqa: RUF012


class PreparedPrompt(NamedTuple):
    """A prompt whose placeholders are expanded."""

    token_ids: list[int]
    media: list[MediaItem]
    windows: Sequence[float] = ()  # of a sound with the fact "window": where each of its windows ends, in seconds


class MediaClient(Protocol):
    """Prepares prompts with media, and has the arrays of their items sent to cores. Thread-safe.

    The order of calls for a request: `prepare`, then `deliver` with the core that gets it (again for a further core, or
    a further epoch), and `forget` when it has ended."""

    def prepare(
        self,
        prompt: str | list[int],
        inputs: Sequence[MediaInput],
        kwargs: dict[str, Any],
        add_special_tokens: bool = True,
    ) -> Future[PreparedPrompt]:
        """Expand a prompt. Its placeholders stand for the items of each modality, in order. `kwargs` are arguments of
        the checkpoint's processor. The future raises:

            InvalidRequestError: an item can't be decoded, is over a limit or not allowed; the prompt has another number
                of placeholders.
            NotSupportedError: a decoder is not installed, or the checkpoint does not take such items.
        """

    def deliver(self, prepared: PreparedPrompt, inputs: Sequence[MediaInput], core: int = 0) -> None:
        """Let a core have the arrays of these items. Does not wait for it."""

    def forget(self, prepared: PreparedPrompt) -> None:
        """The request with these items has ended."""

    def reset_cache(self) -> Future[None]:
        """Forget all prepared items; those that requests need are prepared again. The future raises:

        NotPermittedError: other frontends use them, too, and this one may not change the engine for everyone.
        """

    def close(self) -> None: ...


class Asked(NamedTuple):
    """What prompts were prepared from. It is kept until the last request with these items has ended."""

    prompt: str | list[int]
    inputs: Sequence[MediaInput]
    kwargs: dict[str, Any]
    add_special_tokens: bool


class AskedFor:
    """What is needed to prepare items again, by their digests. Not thread-safe."""

    def __init__(self) -> None:
        self._asked: dict[tuple[bytes, ...], Asked] = {}
        self._users: Counter[tuple[bytes, ...]] = Counter()

    def add(self, prepared: PreparedPrompt, asked: Asked) -> None:
        digests = digests_of(prepared.media)
        self._asked.setdefault(digests, asked)
        self._users[digests] += 1

    def get(self, media: Sequence[MediaItem]) -> Asked | None:
        return self._asked.get(digests_of(media))

    def forget(self, media: Sequence[MediaItem]) -> None:
        digests = digests_of(media)
        self._users[digests] -= 1
        if self._users[digests] < 1:
            del self._users[digests]
            self._asked.pop(digests, None)


def digests_of(media: Sequence[MediaItem]) -> tuple[bytes, ...]:
    return tuple(item.digest for item in media)
