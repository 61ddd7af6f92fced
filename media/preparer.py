"""Makes token ids and arrays of prompts with media, and keeps the arrays of the latest items."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..ipc.config import ENCODER_TEXT, MODALITIES, MOST_ITEMS, EngineConfig, MultiModalConfig
from ..ipc.errors import InvalidRequestError
from ..ipc.media_client import TOKEN_KINDS, MediaInput, PreparedPrompt
from ..ipc.messages import MAX_MEDIA_ITEMS, MediaItem
from ..ipc.tokenizer_files import checkpoint_folder
from .decode import (
    Frames,
    Limits,
    check_bytes,
    decode_image,
    decode_sound,
    decode_video,
    raw_pixels,
    raw_sound,
)
from .fetch import Fetcher
from .processor import Expanded, Place, Processor, Way, check_kwargs, occurrences
from .windows import window_ends

DIGEST_BYTES = 16
ITEM_BYTES = 1 << 10  # of memory that an item takes beside its arrays; short texts have fewer bytes than that
EXTRA_BYTES = 1 << 30  # that the items of the latest prompt may take beyond the cache while the next one is prepared
Guard = Callable[[bytes], contextlib.AbstractContextManager[None]]


class Prepared(NamedTuple):
    """An item that was prepared."""

    modality: str
    text: str  # in the place of its placeholder; empty if it was prepared together with others
    rows: int  # tokens that its rows replace
    arrays: dict[str, np.ndarray]
    windows: Sequence[float] = ()  # see `PreparedPrompt`

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values()) + len(self.text) + ITEM_BYTES


class _Kept:
    """The latest items by digest, up to a number of bytes. Those of the latest prompt stay even if they are more,
    because they are about to be delivered."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._bytes = most_bytes, 0
        self._latest: set[bytes] = set()
        self._items: OrderedDict[bytes, Prepared] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Another prompt begins."""
        with self._lock:
            self._latest.clear()
            self._evict(self._most + EXTRA_BYTES)

    def get(self, digest: bytes) -> Prepared | None:
        with self._lock:
            if digest in self._items:
                self._items.move_to_end(digest)
                self._latest.add(digest)
            return self._items.get(digest)

    def put(self, digest: bytes, item: Prepared) -> None:
        with self._lock:
            if (old := self._items.pop(digest, None)) is not None:
                self._bytes -= old.num_bytes
            self._items[digest] = item
            self._latest.add(digest)
            self._bytes += item.num_bytes
            self._evict(self._most)

    def _evict(self, most: int) -> None:
        while self._bytes > most and (oldest := next(iter(self._items))) not in self._latest:
            self._bytes -= self._items.pop(oldest).num_bytes

    def clear(self) -> None:
        with self._lock:
            self._items.clear()
            self._bytes = 0


class Preparer:
    """Args:
    config: of the engine.
    fetcher: what resolves URLs; None: a `Fetcher`.
    guard: entered with the digest of an item's content while that is decoded and prepared, because a library may crash
        or hang there.
    """

    def __init__(
        self,
        config: EngineConfig,
        fetcher: Fetcher | None = None,
        guard: Guard = lambda digest: contextlib.nullcontext(),
    ) -> None:
        self._model, self._config = config.model_config, config.multimodal_config
        self._download_dir = config.load_config.download_dir
        self._limits = Limits(self._config.max_media_pixels, self._config.max_media_bytes)
        self._fetcher, self._guard = fetcher or Fetcher(self._config), guard
        self.cache_bytes = int(self._config.mm_processor_cache_gb * 2**30)
        self._kept = _Kept(self.cache_bytes)
        self._processor: Processor | None = None
        self._lock = threading.Lock()

    @property
    def processor(self) -> Processor:
        with self._lock:
            if self._processor is None:
                folder = checkpoint_folder(str(self._model.model), self._model.revision, self._download_dir)
                self._processor = Processor(Path(folder), self._model.trust_remote_code)
            return self._processor

    def arrays(self, digest: bytes) -> Prepared | None:
        """An item, if it is still kept."""
        return self._kept.get(digest)

    def reset(self) -> None:
        self._kept.clear()

    def fetched(self, inputs: Sequence[MediaInput]) -> list[MediaInput]:
        """The items with what their URLs name."""
        check_inputs(inputs, self._config)
        return [
            given._replace(content=self._content(at, given)) if isinstance(given.content, str) else given
            for at, given in enumerate(inputs)
        ]

    # ------------------------------------------------------------------ prompts

    def prepare(
        self,
        prompt: str | list[int],
        inputs: Sequence[MediaInput],
        kwargs: Mapping[str, Any],
        add_special_tokens: bool = True,
    ) -> PreparedPrompt:
        """See `MediaClient.prepare`."""
        check_inputs(inputs, self._config)
        check_kwargs(kwargs)
        self._kept.begin()
        kwargs = {**self._config.mm_processor_kwargs, **kwargs}
        if self.processor.is_encoder_decoder:
            with self._guard(_hash(_bytes_of(prompt))):
                ids = self.processor.decoder_ids(prompt)
            return self._beside(ids, inputs, kwargs)
        if any(given.modality == ENCODER_TEXT for given in inputs):
            raise InvalidRequestError("a prompt has a text for an encoder, but this model is no encoder-decoder model")
        if not prompt and len(inputs) == 1 and not self.processor.has_place(inputs[0].modality):
            return self._beside(None, inputs, kwargs)
        by_modality: dict[str, list[MediaInput]] = {}
        for given in inputs:
            by_modality.setdefault(given.modality, []).append(given)
        places = {modality: self.processor.place(modality) for modality in by_modality}
        together = any(place.way is Way.TOGETHER for place in places.values())
        if together and len(inputs) == 1 and isinstance(prompt, str) and not self._found(prompt, places):
            with contextlib.suppress(InvalidRequestError):  # PaliGemma's processor writes the only placeholder itself
                return self._together(prompt, inputs, places, kwargs, add_special_tokens)
        order = self._order(prompt, by_modality, places)
        if together:
            return self._together(prompt, order, places, kwargs, add_special_tokens)
        items = [self._item(at, given, kwargs) for at, given in enumerate(order)]
        with self._guard(_hash(_bytes_of(prompt))):
            adds = add_special_tokens and self.processor.adds_special_tokens
            ids = self._expand(prompt, [item for _, item in items], places, adds)
        return PreparedPrompt(ids, locate(ids, items, places))

    def _beside(self, ids: list[int] | None, inputs: Sequence[MediaInput], kwargs: Mapping[str, Any]) -> PreparedPrompt:
        """Prepare a prompt of these tokens, and the input of an encoder, which counts as a part of the first one. None:
        the prompt is the item alone: the text that the processor writes for it, or one token that nothing reads."""
        if len(inputs) != 1:
            raise InvalidRequestError(f"a prompt of this model has one input for its encoder, not {len(inputs)}")
        given = inputs[0]
        content = self._content(0, given)
        digest = self._digest(given, content, kwargs)
        if (kept := self._kept.get(digest)) is None:
            with self._guard(digest):
                own = None
                windows: list[float] = []
                if given.modality == ENCODER_TEXT:
                    arrays = self.processor.encoder_ids(content)
                else:
                    if given.modality == "audio" and "window" in given.facts:
                        item, windows = self._window(given, content)
                    else:
                        item = self._decode(0, given, content, kwargs)
                    if ids is None and (own := self.processor.own_prompt(given.modality, item, kwargs)) is not None:
                        arrays = own.arrays
                    else:
                        arrays = self.processor.features(given.modality, item, kwargs)
            kept = Prepared(given.modality, "" if own is None else own.text, 0, arrays, windows)
            self._kept.put(digest, kept)
        first, end = 0, 1
        if kept.text:
            ids = self.processor.tokenize(kept.text, add_special_tokens=True)
            first, end = self.processor.span(given.modality, ids)
        media = [MediaItem(digest, given.modality, first, end - first)]
        return PreparedPrompt([0] if ids is None else ids, media, kept.windows)

    def _window(self, given: MediaInput, content: bytes | np.ndarray) -> tuple[np.ndarray, list[float]]:
        """The samples of a window of a sound, and where each of its windows ends, in seconds. The decoded sound is
        kept, because its other windows will be asked for."""
        number, facts = given.facts["window"], {key: given.facts[key] for key in given.facts if key != "window"}
        whole, rate = given._replace(facts=facts), self.processor.sampling_rate
        name = _hash(b"decoded", self._digest(whole, content, {}))
        if (kept := self._kept.get(name)) is None:
            kept = Prepared(given.modality, "", 0, {"samples": self._decode(0, whole, content, {})})
            self._kept.put(name, kept)
        samples = kept.arrays["samples"]
        ends = window_ends(samples, self.processor.window or len(samples), rate)
        if type(number) is not int or not 0 <= number < len(ends):
            raise InvalidRequestError(f"window is {number!r:.40}; it must be an int below {len(ends)} for this sound")
        return samples[ends[number - 1] if number else 0 : ends[number]], [end / rate for end in ends]

    def _order(
        self, prompt: str | list[int], by_modality: Mapping[str, list[MediaInput]], places: Mapping[str, Place]
    ) -> list[MediaInput]:
        """The items in the order of their placeholders.

        Raises:
            InvalidRequestError: the prompt has other placeholders than items.
        """
        found = [modality for _, modality in self._found(prompt, places)]
        for modality, given in by_modality.items():
            if (count := found.count(modality)) != len(given):
                placeholder = places[modality].placeholder
                raise InvalidRequestError(
                    f"the prompt has {count} placeholders for {len(given)} {modality} items: write {placeholder!r} "
                    f"where each one belongs, and nowhere else"
                )
        queues = {modality: iter(given) for modality, given in by_modality.items()}
        return [next(queues[modality]) for modality in found]

    def _found(self, prompt: str | list[int], places: Mapping[str, Place]) -> list[tuple[int, str]]:
        """Where placeholders begin in a prompt: characters, or tokens."""
        if isinstance(prompt, str):
            return occurrences(prompt, {modality: place.placeholder for modality, place in places.items()})
        found = []
        for modality, place in places.items():
            wanted = self.processor.tokenize(place.placeholder, add_special_tokens=False)
            found += [(at, modality) for at in _sequences(prompt, wanted)]
        return sorted(found)

    def _expand(
        self,
        prompt: str | list[int],
        items: Sequence[Prepared],
        places: Mapping[str, Place],
        add_special_tokens: bool,
    ) -> list[int]:
        """The prompt's token ids, with the text of an item in the place of each placeholder."""
        end, text, ids = 0, "", list[int]()
        for (at, modality), item in zip(self._found(prompt, places), items, strict=True):
            placeholder = places[modality].placeholder
            if isinstance(prompt, str):
                text += prompt[end:at] + item.text
                end = at + len(placeholder)
            else:
                ids += prompt[end:at] + self.processor.tokenize(item.text, add_special_tokens=False)
                end = at + len(self.processor.tokenize(placeholder, add_special_tokens=False))
        if isinstance(prompt, str):
            return self.processor.tokenize(text + prompt[end:], add_special_tokens)
        return ids + prompt[end:]

    def _together(
        self,
        prompt: str | list[int],
        order: Sequence[MediaInput],
        places: Mapping[str, Place],
        kwargs: Mapping[str, Any],
        add_special_tokens: bool,
    ) -> PreparedPrompt:
        """Prepare a prompt with one call for all its items. What becomes of an item depends on all of them."""
        if not isinstance(prompt, str):
            raise InvalidRequestError(
                "this checkpoint's processor needs the text of a prompt with media, not token ids"
            )
        contents = [self._content(at, given) for at, given in enumerate(order)]
        names = [self._digest(given, content, kwargs) for given, content in zip(order, contents, strict=True)]
        decoded, every = [], b"".join(names)
        for at, (given, content) in enumerate(zip(order, contents, strict=True)):
            with self._guard(names[at]):
                decoded.append((given.modality, self._decode(at, given, content, kwargs)))
        with self._guard(_hash(every)):
            ids, parts = self.processor.together(prompt, decoded, kwargs, add_special_tokens)
        token = next(iter(places.values())).token_id
        spans = _runs(ids, token, len(order))
        media = []
        for at, (given, arrays, (start, end)) in enumerate(zip(order, parts, spans, strict=True)):
            digest = names[0] if len(order) == 1 else _hash(every, str(at).encode())
            self._kept.put(digest, Prepared(given.modality, "", ids[start:end].count(token), arrays))
            media.append(MediaItem(digest, given.modality, start, end - start))
        return PreparedPrompt(ids, _widened(ids, media, [_tokens_of(arrays) for arrays in parts]))

    # ------------------------------------------------------------------ items

    def _item(self, at: int, given: MediaInput, kwargs: Mapping[str, Any]) -> tuple[bytes, Prepared]:
        content = self._content(at, given)
        digest = self._digest(given, content, kwargs)
        if (kept := self._kept.get(digest)) is None:
            with self._guard(digest):
                decoded = self._decode(at, given, content, kwargs)
                expanded: Expanded = self.processor.expand(given.modality, decoded, kwargs)
                token = self.processor.place(given.modality).token_id
                count = self.processor.tokenize(expanded.text, add_special_tokens=False).count(token)
            kept = Prepared(given.modality, expanded.text, count, expanded.arrays)
            self._kept.put(digest, kept)
        return digest, kept

    def _content(self, at: int, given: MediaInput) -> bytes | np.ndarray:
        what = f"{given.modality} {at}"
        if isinstance(given.content, str):
            return self._fetcher.get(what, given.content)
        if isinstance(given.content, bytes):
            check_bytes(what, len(given.content), self._limits)
            return given.content
        return np.ascontiguousarray(given.content)

    def _digest(self, given: MediaInput, content: bytes | np.ndarray, kwargs: Mapping[str, Any]) -> bytes:
        """The name of an item: of its content, and of all that its preparation depends on."""
        kind = f"{content.dtype} {content.shape}" if isinstance(content, np.ndarray) else "file"
        facts = json.dumps([given.modality, kind, given.facts, kwargs], sort_keys=True, default=repr).encode()
        data = content.data.cast("B") if isinstance(content, np.ndarray) and content.size else content
        return _hash(self.processor.settings, facts, data if not isinstance(data, np.ndarray) else b"")

    def _decode(self, at: int, given: MediaInput, content: bytes | np.ndarray, kwargs: Mapping[str, Any]) -> Any:
        what, limits, rate = f"{given.modality} {at}", self._limits, self.processor.sampling_rate
        if given.modality == "image":
            if isinstance(content, bytes):
                return decode_image(what, content, limits)
            from PIL import Image

            return Image.fromarray(raw_pixels(what, content, 3, limits))
        if given.modality == "audio":
            if isinstance(content, bytes):
                return decode_sound(what, content, rate, limits)
            return raw_sound(what, content, float(given.facts.get("sampling_rate", rate)), rate)
        if isinstance(content, bytes):
            return decode_video(what, content, self.processor.sample(kwargs), limits)
        frames = raw_pixels(what, content, 4, limits)
        return raw_video(what, frames, given.facts)


def raw_video(what: str, frames: np.ndarray, facts: Mapping[str, Any]) -> Frames:
    """A video that came as an array."""
    fps, indices = facts.get("fps"), facts.get("frames_indices")
    total = facts.get("total_num_frames") or len(frames)
    fits = indices is None or (isinstance(indices, list) and len(indices) == len(frames))
    if not fits or not isinstance(total, int) or not (fps is None or (isinstance(fps, int | float) and fps > 0)):
        raise InvalidRequestError(f"{what} has facts that do not fit its {len(frames)} frames: {dict(facts)!r:.200}")
    return Frames(frames, fps, max(total, len(frames)), indices)


def check_inputs(inputs: Sequence[MediaInput], config: MultiModalConfig) -> None:
    """Check the numbers of items, before anything is read of them.

    Raises:
        InvalidRequestError: there are too many, or some of an unknown modality.
    """
    for modality in {given.modality for given in inputs}:
        if modality not in (*MODALITIES, ENCODER_TEXT):
            raise InvalidRequestError(f"{modality!r:.40} is no modality; there are {', '.join(MODALITIES)}")
        count, most = sum(given.modality == modality for given in inputs), MOST_ITEMS
        most = min(config.limit_mm_per_prompt.get(modality, most), MAX_MEDIA_ITEMS)
        if count > most:
            raise InvalidRequestError(
                f"the prompt has {count} {modality} items; the limit is limit_mm_per_prompt, {most}"
            )


def locate(ids: Sequence[int], items: Sequence[tuple[bytes, Prepared]], places: Mapping[str, Place]) -> list[MediaItem]:
    """Where the items are in the expanded prompt.

    Raises:
        InvalidRequestError: the prompt has further tokens that only stand for items.
    """
    found: list[MediaItem] = []
    for token in {place.token_id for place in places.values()}:
        positions = [at for at, one in enumerate(ids) if one == token]
        mine = [(digest, item) for digest, item in items if places[item.modality].token_id == token]
        if len(positions) != sum(item.rows for _, item in mine):
            raise InvalidRequestError(
                f"the prompt has {len(positions)} tokens of the id {token}, which stand for parts of media items, but "
                f"its items have {sum(item.rows for _, item in mine)}"
            )
        start = 0
        for digest, item in mine:
            first, last = positions[start], positions[start + item.rows - 1]
            found.append(MediaItem(digest, item.modality, first, last + 1 - first))
            start += item.rows
    tokens = {digest: _tokens_of(item.arrays) for digest, item in items}
    found.sort(key=lambda item: item.offset)
    return _widened(ids, found, [tokens[item.digest] for item in found])


def _tokens_of(arrays: Mapping[str, np.ndarray]) -> set[int]:
    """The tokens that the processor counts as an item's, if these are more than those that its rows replace."""
    return set(arrays[TOKEN_KINDS][:, 0].tolist()) if TOKEN_KINDS in arrays else set()


def _widened(ids: Sequence[int], media: Sequence[MediaItem], tokens: Sequence[set[int]]) -> list[MediaItem]:
    """The items, in order, with those of `tokens` that are beside them."""
    ends = [item.offset for item in media[1:]] + [len(ids)]
    found: list[MediaItem] = []
    for item, mine, most in zip(media, tokens, ends, strict=False):
        start, end = item.offset, item.offset + item.length
        least = found[-1].offset + found[-1].length if found else 0
        while start > least and ids[start - 1] in mine:
            start -= 1
        while end < most and ids[end] in mine:
            end += 1
        found.append(MediaItem(item.digest, item.modality, start, end - start))
    return found


def _runs(ids: Sequence[int], token: int, count: int) -> list[tuple[int, int]]:
    """The spans of `count` items: all tokens from the first to the last, or the runs of such tokens."""
    positions = [at for at, one in enumerate(ids) if one == token]
    if not positions:
        raise InvalidRequestError("the checkpoint's processor has put no item into the prompt")
    if count == 1:
        return [(positions[0], positions[-1] + 1)]
    ends = [at for at, after in zip(positions, [*positions[1:], -1], strict=True) if after != at + 1]
    starts = [at for before, at in zip([-1, *positions], positions, strict=False) if at != before + 1 or before == -1]
    if len(starts) == count:
        return [(start, end + 1) for start, end in zip(starts, ends, strict=True)]
    if len(positions) % count == 0:
        each = len(positions) // count
        groups = [positions[at : at + each] for at in range(0, len(positions), each)]
        return [(group[0], group[-1] + 1) for group in groups]
    raise InvalidRequestError("it can't be told which tokens of this prompt belong to which item: give one item")


def _sequences(ids: Sequence[int], wanted: Sequence[int]) -> list[int]:
    size = len(wanted)
    first = wanted[0] if wanted else None
    return [at for at, one in enumerate(ids) if one == first and list(ids[at : at + size]) == list(wanted)]


def _bytes_of(prompt: str | list[int]) -> bytes:
    return str(prompt).encode("utf-8", "surrogatepass")


def _hash(*parts: Any) -> bytes:
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()
