"""Runs the checkpoint's own processor on one item at a time, and expands the placeholders of a prompt.

What a processor does with a placeholder is found by execution: it is called with a probe, and the text that it hands to
its tokenizer is compared with the text that it was given. `Way.ALONE` processors put a text in the place of each
placeholder that depends on its item only; others (`Way.TOGETHER`) are called with the whole prompt and all its items.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..ipc.errors import InvalidRequestError, NotSupportedError, UnsupportedModelError
from ..ipc.media_client import TOKEN_KINDS
from .decode import Frames, facts_of, refusing

OF_TEXT = frozenset(
    {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"}
    | {"text_replacement_offsets", "labels"}
)
NOT_FOR_THE_MODEL = OF_TEXT | {"video_metadata", "num_crops", "rows", "cols"}
# arguments that would replace what the engine gives, or name files, hosts and devices
RESERVED = frozenset(
    "text images image videos video audio audios image_url return_tensors device tokenize chat_template suffix "
    "text_pair sampling_rate video_metadata do_sample_frames padding truncation max_length add_special_tokens "
    "load_audio_from_video audio_backend".split()
)
_BEFORE, _BETWEEN, _AFTER = "ab ", " cd ", " ef"  # the text of a probe
_COMMON = {
    "image": ("<image>", "<|image|>", "<|image_pad|>", "[IMG]", "<start_of_image>", "<image_soft_token>"),
    "video": ("<video>", "<|video|>", "<|video_pad|>"),
    "audio": ("<audio>", "<|audio|>", "<|AUDIO|>", "<|audio_pad|>", "[AUDIO]"),
}
KINDS = {"image": 1, "video": 2, "audio": 3}  # numbers in the `mm_token_type_ids` of transformers
DEFAULT_FRAMES = 32  # of a video, if its processor does not choose


class Expanded(NamedTuple):
    """What a processor made of one item."""

    text: str  # in the place of its placeholder
    arrays: dict[str, np.ndarray]  # as the model's forward names them
    kinds: frozenset[tuple[int, int]] = frozenset()  # see `_Heard`


class Way(Enum):
    ALONE = "alone"
    TOGETHER = "together"


class Place(NamedTuple):
    """How prompts name the items of a modality."""

    placeholder: str
    token_id: int  # of the tokens that an item's rows replace
    way: Way
    nested: bool  # items are given as one list for each prompt


class _Heard(NamedTuple):
    """A call of a processor."""

    text: str  # what its tokenizer was given
    ids: list[int]
    arrays: dict[str, np.ndarray]
    kinds: frozenset[tuple[int, int]]  # tokens that it says are of media, and their numbers (`KINDS`)


class Processor:
    """A checkpoint's processor. Thread-safe.

    Args:
        folder: with the checkpoint's small files.
        trust_remote_code: whether code in this folder may run.

    Raises:
        UnsupportedModelError: the folder has no processor that can be loaded.
    """

    def __init__(self, folder: Path, trust_remote_code: bool = False) -> None:
        self._processor = _load(folder, trust_remote_code)
        self._tokenizer = getattr(self._processor, "tokenizer", self._processor)
        # The kind of tensors that it gives, by modalities. The first call that succeeds decides: if a later one could
        # change it, the same item might get other bits.
        self._tensors: dict[frozenset[str], str] = {}
        self._heard: list[str] = []
        self._adds: list[bool] = []  # whether the tokenizer was told to add special tokens
        self.adds_special_tokens = True  # whether the processor lets the tokenizer add them to prompts
        _listen(self._tokenizer, self._heard, self._adds)
        config = folder / "config.json"
        self._config: dict[str, Any] = json.loads(config.read_text()) if config.is_file() else {}
        self.is_encoder_decoder = bool(self._config.get("is_encoder_decoder"))  # then items have no tokens in prompts
        self._places: dict[str, Place | str] = {}  # or why there is none
        self._makes_prompts: bool | None = None  # whether it makes a prompt of an image alone; None: not tried
        self._lock = threading.RLock()
        self.settings = _settings(self._processor)

    # ------------------------------------------------------------------ what the checkpoint takes

    @property
    def sampling_rate(self) -> int:
        """Samples per second that the model hears."""
        return int(getattr(getattr(self._processor, "feature_extractor", None), "sampling_rate", 16_000))

    @property
    def window(self) -> int | None:
        """Samples of the longest sound that is prepared whole; None: there is no such limit."""
        found = getattr(getattr(self._processor, "feature_extractor", None), "n_samples", None)
        return found if isinstance(found, int) else None

    def place(self, modality: str) -> Place:
        """How prompts name items of a modality.

        Raises:
            UnsupportedModelError: the checkpoint's processor does not take this modality.
        """
        with self._lock:
            if modality not in self._places:
                try:
                    self._places[modality] = self._find_place(modality)
                except UnsupportedModelError as error:
                    self._places[modality] = str(error)
            found = self._places[modality]
        if isinstance(found, str):
            raise UnsupportedModelError(found)  # a new one: an error keeps the frames through which it was raised
        return found

    def has_place(self, modality: str) -> bool:
        """Whether prompts can name items of a modality."""
        try:
            return bool(self.place(modality))
        except UnsupportedModelError:
            return False

    def _find_place(self, modality: str) -> Place:
        processor, why = self._processor, ""
        part = {"image": "image_processor", "video": "video_processor", "audio": "feature_extractor"}[modality]
        has = getattr(processor, part, None)
        if isinstance(has, _Missing):
            raise UnsupportedModelError(f"the checkpoint's processor can't take {modality} items here: {has.why}")
        if has is None:
            raise UnsupportedModelError(f"the checkpoint's processor takes no {modality} items")
        probes = [_probe(modality, number, self.sampling_rate) for number in range(2)]
        for placeholder in self._candidates(modality):
            one = f"{_BEFORE}{placeholder}{_BETWEEN}{_AFTER}"
            for nested in (False, True):
                try:
                    heard = self._call(one, {modality: probes[:1]}, {}, {modality: nested})
                except Exception as error:  # not how this processor is called
                    why = f"{type(error).__name__}: {error!s:.200}"
                    continue
                token_id = self._token_id(modality, heard.ids)
                if not heard.arrays or token_id is None:
                    continue
                two = f"{_BEFORE}{placeholder}{_BETWEEN}{placeholder}{_AFTER}"
                way = self._way(modality, placeholder, two, probes, nested)
                return Place(placeholder, token_id, way, nested)
        raise UnsupportedModelError(f"no placeholder for {modality} items was found for this checkpoint ({why})")

    def _candidates(self, modality: str) -> list[str]:
        processor, tokenizer = self._processor, self._tokenizer
        found = [getattr(owner, f"{modality}_token", None) for owner in (processor, tokenizer)]
        found += [getattr(processor, f"bo{modality[0]}_token", None)]
        found += [tokenizer.convert_ids_to_tokens(at) for at in self._configured(modality)]
        vocabulary = tokenizer.get_vocab()
        found += [text for text in _COMMON[modality] if text in vocabulary]
        return list(dict.fromkeys(str(text) for text in found if text))

    def _configured(self, modality: str) -> list[int]:
        names = (f"{modality}_token_id", f"{modality}_token_index")
        sections = (self._config, self._config.get("thinker_config") or {})
        return [section[name] for section in sections for name in names if isinstance(section.get(name), int)]

    def _token_id(self, modality: str, ids: Sequence[int]) -> int | None:
        """The token whose rows the model replaces, if it is among `ids`."""
        found = self._own_token_id(modality, ids)
        return self._own_token_id("image", ids) if found is None and modality == "video" else found  # frames are images

    def _own_token_id(self, modality: str, ids: Sequence[int]) -> int | None:
        named = self._configured(modality)
        own = getattr(self._processor, f"{modality}_token_ids", None)
        named += [at for at in own or () if isinstance(at, int)]
        named += [at for at in (getattr(self._processor, f"{modality}_token_id", None),) if isinstance(at, int)]
        text = getattr(self._processor, f"{modality}_token", None)
        named += [self._tokenizer.convert_tokens_to_ids(text)] if isinstance(text, str) else []
        return next((at for at in named if at in ids), None)

    def _way(self, modality: str, placeholder: str, text: str, probes: list[Any], nested: bool) -> Way:
        """Whether a call with two items gives what two calls give."""
        alone = [self._alone(modality, placeholder, probe, {}, nested) for probe in probes]
        if None in alone:
            return Way.TOGETHER
        try:
            heard = self._call(text, {modality: probes}, {}, {modality: nested})
        except Exception:  # it takes one item only
            return Way.TOGETHER
        pieces = [each.text for each in alone if each is not None]
        same = heard.text == f"{_BEFORE}{pieces[0]}{_BETWEEN}{pieces[1]}{_AFTER}"
        # the encoder sees an item alone, so its numbers must be the same; padding may differ
        parts = _split(heard.arrays, 2)
        same = same and parts is not None and all(_agree(a, b.arrays) for a, b in zip(parts, alone, strict=True) if b)
        return Way.ALONE if same else Way.TOGETHER

    # ------------------------------------------------------------------ calls

    def expand(self, modality: str, item: Any, kwargs: Mapping[str, Any]) -> Expanded:
        """Prepare one item of a modality whose way is `ALONE`.

        Raises:
            InvalidRequestError: the processor refuses the item or the arguments.
        """
        place = self.place(modality)
        with self._lock, _refusing(modality):
            if (found := self._alone(modality, place.placeholder, item, kwargs, place.nested)) is None:
                raise InvalidRequestError(f"the checkpoint's processor treats this {modality} item unlike its probe")
            return found._replace(arrays={**found.arrays, **self._token_kinds(found.kinds, modality)})

    def _alone(
        self, modality: str, placeholder: str, item: Any, kwargs: Mapping[str, Any], nested: bool
    ) -> Expanded | None:
        heard = self._call(f"{_BEFORE}{placeholder}{_BETWEEN}{_AFTER}", {modality: [item]}, kwargs, {modality: nested})
        head, tail = _BEFORE, f"{_BETWEEN}{_AFTER}"
        inner = heard.text[len(head) : -len(tail)]
        return Expanded(inner, heard.arrays, heard.kinds) if inner and heard.text == head + inner + tail else None

    def own_prompt(self, modality: str, item: Any, kwargs: Mapping[str, Any]) -> Expanded | None:
        """The prompt that the processor makes of an item alone, and its arrays; None: it makes no prompts of items.

        Raises:
            InvalidRequestError: the processor refuses the item or the arguments.
        """
        if modality != "image":
            return None
        with self._lock:
            if self._makes_prompts is None:
                try:
                    self._makes_prompts = bool(self._call_alone(_probe("image", 0, 0), {}).text)
                except Exception:  # it takes images with texts only
                    self._makes_prompts = False
            with _refusing(modality):
                return self._call_alone(item, kwargs) if self._makes_prompts else None

    def _call_alone(self, image: Any, kwargs: Mapping[str, Any]) -> Expanded:
        self._heard.clear()
        found = self._processor(images=[image], return_tensors="pt", **kwargs)
        arrays = {key: _array(value) for key, value in found.items() if key not in NOT_FOR_THE_MODEL}
        return Expanded("".join(self._heard), arrays)

    def span(self, modality: str, ids: Sequence[int]) -> tuple[int, int]:
        """The first of the tokens that stand for the item of a prompt of the processor's own, and the one behind the
        last.

        Raises:
            InvalidRequestError: there is none.
        """
        token = self._token_id(modality, ids)
        places = [at for at, one in enumerate(ids) if one == token]
        if not places:
            raise InvalidRequestError(f"the checkpoint's processor makes a prompt without this {modality}")
        return places[0], places[-1] + 1

    def features(self, modality: str, item: Any, kwargs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The arrays of an item that is all of an encoder's input, and has no tokens in the prompt.

        Raises:
            UnsupportedModelError: the checkpoint's processor does not take this modality.
            InvalidRequestError: the processor refuses the item or the arguments.
        """
        part = {"image": "image_processor", "audio": "feature_extractor"}.get(modality, "")
        if (extractor := getattr(self._processor, part, None)) is None:
            raise UnsupportedModelError(f"the checkpoint's processor takes no {modality} items")
        rate = {"sampling_rate": self.sampling_rate} if modality == "audio" else {}
        with self._lock, _refusing(modality):
            found = extractor(item, **rate, return_tensors="np", **kwargs)
            return {key: _array(value) for key, value in found.items() if key not in NOT_FOR_THE_MODEL}

    def encoder_ids(self, text: bytes | np.ndarray) -> dict[str, np.ndarray]:
        """The arrays of a text that is the input of an encoder: UTF-8, which gets the tokenizer's special tokens, or
        token ids ``[tokens]``.

        Raises:
            InvalidRequestError: it has no tokens.
        """
        ids = np.array(self.tokenize(text.decode(), True), np.int64) if isinstance(text, bytes) else text
        if ids.ndim != 1 or not ids.size or ids.dtype != np.int64:
            raise InvalidRequestError(
                f"the input of the encoder is {ids.dtype} {list(ids.shape)}; it must be token ids"
            )
        return {"input_ids": ids[None]}

    def decoder_ids(self, prompt: str | list[int]) -> list[int]:
        """The token ids of a decoder's prompt: without the tokenizer's special tokens, some of which end a text. The
        token that the checkpoint names as the decoder's first is put in front, unless the prompt has it: in prompts of
        Whisper, what was said before may come first."""
        ids = self.tokenize(prompt, add_special_tokens=False) if isinstance(prompt, str) else list(prompt)
        first = self._config.get("decoder_start_token_id")
        return [first, *ids] if isinstance(first, int) and first not in ids else ids

    def _token_kinds(self, said: frozenset[tuple[int, int]], modality: str) -> dict[str, np.ndarray]:
        """int64 [tokens, 2]: tokens of media and their kinds, as one more array of an item; nothing if they are as a
        core takes them. The token that its rows replace is of its modality's kind: in a whole prompt, tokens around a
        frame may tell it from an image."""
        token = self.place(modality).token_id
        kinds = {(one, KINDS[modality] if one == token else number) for one, number in said}
        usual = len(kinds) < 2 and self._own_token_id(modality, [token]) is not None
        return {TOKEN_KINDS: np.array(sorted(kinds), np.int64)} if kinds and not usual else {}

    def together(
        self, prompt: str, items: Sequence[tuple[str, Any]], kwargs: Mapping[str, Any], add_special_tokens: bool
    ) -> tuple[list[int], list[dict[str, np.ndarray]]]:
        """The token ids of a prompt, and the arrays of each of its items, of one call with all of them."""
        by_modality: dict[str, list[Any]] = {}
        for modality, item in items:
            by_modality.setdefault(modality, []).append(item)
        nested = {modality: self.place(modality).nested for modality in by_modality}
        with self._lock, _refusing(" and ".join(by_modality)):
            heard = self._call(prompt, by_modality, kwargs, nested)
        if len(by_modality) > 1:
            raise NotSupportedError("this checkpoint takes items of one modality in a prompt")
        parts = _split(heard.arrays, len(items))
        if parts is None:
            raise NotSupportedError("this checkpoint's processor takes one item in a prompt")
        kinds, ids = self._token_kinds(heard.kinds, modality), heard.ids
        if not add_special_tokens and ids == self.tokenize(heard.text, self.adds_special_tokens):
            ids = self.tokenize(heard.text, add_special_tokens=False)
        return ids, [{**part, **kinds} for part in parts]

    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        with self._lock:
            ids = [int(at) for at in self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]]
            self._heard.clear()
            return ids

    def sample(self, kwargs: Mapping[str, Any]) -> Any:
        """A `Sampler` of frames: the processor's own, if it chooses frames."""
        own = getattr(self._processor, "video_processor", None)
        chosen = {key: kwargs[key] for key in ("num_frames", "fps", "min_frames", "max_frames") if key in kwargs}

        def choose(total: int, fps: float | None, width: int, height: int) -> Sequence[int]:
            if getattr(own, "do_sample_frames", False):
                from transformers.video_utils import VideoMetadata

                facts = VideoMetadata(
                    total_num_frames=total, fps=fps or 24.0, duration=total / (fps or 24.0), width=width, height=height
                )
                return [int(at) for at in own.sample_frames(facts, **chosen)]  # type: ignore[union-attr]
            wanted = int(chosen.get("num_frames") or DEFAULT_FRAMES)
            if chosen.get("fps") and fps:
                wanted = max(1, int(total / fps * float(chosen["fps"])))
            return [round(at) for at in np.linspace(0, total - 1, min(wanted, total))]

        return choose

    def _call(
        self, text: str, items: Mapping[str, list[Any]], kwargs: Mapping[str, Any], nested: Mapping[str, bool]
    ) -> _Heard:
        given: dict[str, Any] = dict(kwargs)
        for modality, values in items.items():
            assert not any(isinstance(value, str) for value in values)  # a processor would take it for a URL or a path
            if modality == "video":
                given["video_metadata"] = [facts_of(value) for value in values]
                given["do_sample_frames"] = False
                values = [value.pixels for value in values]
            if modality == "audio":
                given["sampling_rate"] = self.sampling_rate
            name = {"image": "images", "video": "videos", "audio": "audio"}[modality]
            given[name] = [values] if nested[modality] else values
        self._heard.clear()
        tensors = self._tensors.get(frozenset(items))
        try:
            found = self._processor(text=[text], return_tensors=tensors or "np", **given)
        except (AttributeError, TypeError, ValueError):
            if tensors is not None:
                raise
            tensors = "pt"  # some processors give tensors of torch only
            self._heard.clear()
            found = self._processor(text=[text], return_tensors=tensors, **given)
        self._tensors[frozenset(items)] = tensors or "np"
        if len(self._heard) != 1:
            raise InvalidRequestError(f"the checkpoint's processor tokenizes {len(self._heard)} texts for one prompt")
        self.adds_special_tokens = all(self._adds)
        ids = [int(at) for at in np.asarray(found["input_ids"]).reshape(-1)]
        arrays = {key: _array(value) for key, value in found.items() if key not in NOT_FOR_THE_MODEL}
        numbers = np.asarray(found.get("mm_token_type_ids", [])).reshape(-1).tolist()
        kinds = frozenset((token, number) for token, number in zip(ids, numbers, strict=False) if number)
        return _Heard(self._heard[0], ids, arrays, kinds)


class _Missing:
    """Stands for a part of a processor that can't be loaded here."""

    model_input_names: tuple[str, ...] = ()
    merge_size = temporal_patch_size = 1

    def __init__(self, why: str) -> None:
        self.why = why


def _load(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoProcessor

    options = {"local_files_only": True, "trust_remote_code": trust_remote_code, "backend": "pil"}
    try:
        found = AutoProcessor.from_pretrained(folder, **options)
    except ImportError as error:  # of torchvision, mostly, which video processors need
        found = _load_parts(folder, options, error)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UnsupportedModelError(f"{folder} has no processor that can be loaded: {error!s:.300}") from None
    if getattr(found, "tokenizer", None) is None and not hasattr(found, "convert_tokens_to_ids"):
        raise UnsupportedModelError(f"{folder} has a {type(found).__name__}, which does not expand prompts")
    return found


def _load_parts(folder: Path, options: dict[str, Any], missing: ImportError) -> Any:
    """A processor without the parts that can't be loaded here."""
    import transformers
    from transformers.models.auto import processing_auto

    said: dict[str, Any] = {}
    for name in ("config.json", "preprocessor_config.json", "tokenizer_config.json", "processor_config.json"):
        with contextlib.suppress(OSError, ValueError):
            said |= json.loads((folder / name).read_text())
    name = said.get("processor_class") or processing_auto.PROCESSOR_MAPPING_NAMES.get(  # type: ignore[attr-defined]
        said.get("model_type", ""), ""
    )
    own = getattr(transformers, str(name), None)
    if own is None:
        raise UnsupportedModelError(f"{folder} has no processor that can be loaded: {missing!s:.300}") from None
    autos: dict[str, Any] = {
        "image_processor": transformers.AutoImageProcessor,
        "tokenizer": transformers.AutoTokenizer,
        "feature_extractor": transformers.AutoFeatureExtractor,
        "video_processor": transformers.AutoVideoProcessor,
    }
    parts: dict[str, Any] = {}
    for part in own.get_attributes():
        try:
            given = options if part == "image_processor" else {key: options[key] for key in options if key != "backend"}
            parts[part] = autos[part].from_pretrained(folder, **given)
        except (ImportError, AttributeError, OSError, ValueError) as error:
            why = "it needs torchvision: pip install 'mainspring[video]'" if part == "video_processor" else str(error)
            parts[part] = _Missing(why)
    loose = type(own.__name__, (own,), {"check_argument_for_proper_class": lambda self, name, value: type(value)})
    kept = {key: value for key, value in said.items() if key in _parameters(own) and key not in parts}
    return loose(**parts, **kept)


def _parameters(cls: Any) -> set[str]:
    import inspect

    return set(inspect.signature(cls.__init__).parameters) - {"self", "kwargs", "args"}


def _listen(tokenizer: Any, heard: list[str], adds: list[bool]) -> None:
    """Write down each text that the tokenizer is called with, and whether it is to add special tokens, if that is
    said."""
    own = type(tokenizer)

    def call(self: Any, text: Any = None, *args: Any, **kwargs: Any) -> Any:
        heard.extend([text] if isinstance(text, str) else text or [])
        adds[:] = [kwargs["add_special_tokens"]] if "add_special_tokens" in kwargs else []
        return own.__call__(self, text, *args, **kwargs)

    tokenizer.__class__ = type(own.__name__, (own,), {"__call__": call})


def _settings(processor: Any) -> bytes:
    """All that a processor's results depend on beside its input."""
    import transformers

    parts: dict[str, Any] = {"": {key: value for key, value in vars(processor).items() if _is_plain(value)}}
    for name in ("image_processor", "video_processor", "feature_extractor"):
        part = getattr(processor, name, None)
        if part is not None and not isinstance(part, _Missing):
            parts[name] = [type(part).__name__, part.to_dict()]
    return json.dumps([transformers.__version__, type(processor).__name__, parts], sort_keys=True, default=str).encode()


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float | list | dict)


def check_kwargs(kwargs: Mapping[str, Any]) -> None:
    """Refuse arguments of a processor that are not about how it prepares items.

    Raises:
        InvalidRequestError: they hold such a name.
    """

    def walk(values: Mapping[str, Any]) -> None:
        for key, value in values.items():
            if key in RESERVED:
                raise InvalidRequestError(f"mm_processor_kwargs may not hold {key!r}, which the engine sets itself")
            if isinstance(value, Mapping):
                walk(value)

    walk(kwargs)


def _probe(modality: str, number: int, rate: int) -> Any:
    """A small item. Both probes have the same sizes, so that processors need not pad them."""
    random = np.random.default_rng(number)
    if modality == "image":
        from PIL import Image

        return Image.fromarray(random.integers(0, 255, (96, 128, 3), dtype=np.uint8))
    if modality == "video":
        return Frames(random.integers(0, 255, (4, 96, 128, 3), dtype=np.uint8), 2.0, 4, None)
    return random.standard_normal(rate).astype(np.float32) / 10


def _array(value: Any) -> np.ndarray:
    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    found = np.ascontiguousarray(value)
    if found.dtype.kind not in "biuf":
        raise InvalidRequestError(f"the checkpoint's processor gives an array of {found.dtype}")
    narrow = {"float64": "float32", "uint64": "int64", "uint32": "int64", "uint16": "int32", "int16": "int32"}
    narrow |= {"int8": "int32"}
    return found.astype(narrow[found.dtype.name]) if found.dtype.name in narrow else found


def _split(arrays: Mapping[str, np.ndarray], count: int) -> list[dict[str, np.ndarray]] | None:
    """The arrays of each of `count` items of one call; None if these can't be told."""
    if count == 1:
        return [dict(arrays)]
    grids = [value for name, value in arrays.items() if name.endswith("grid_thw") and len(value) == count]
    patches = np.cumsum(np.prod(grids[0], axis=1)) if grids else None
    parts: list[dict[str, np.ndarray]] = [{} for _ in range(count)]
    for name, value in arrays.items():
        if value.ndim and len(value) == count:
            pieces: Sequence[np.ndarray] = np.split(value, count)
        elif patches is not None and value.ndim and len(value) == patches[-1]:
            pieces = np.split(value, patches[:-1])
        elif value.ndim > 1 and len(value) == 1 and value.shape[1] % count == 0:
            pieces = np.split(value, count, axis=1)  # of equal numbers of tiles
        elif value.ndim and len(value) % count == 0:
            pieces = np.split(value, count)
        else:
            return None
        for part, piece in zip(parts, pieces, strict=True):
            part[name] = np.ascontiguousarray(piece)
    return parts


def _agree(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].shape == other[name].shape and np.array_equal(one[name], other[name]) for name in one
    )


def _refusing(what: str) -> contextlib.AbstractContextManager[None]:
    return refusing(f"processing {what}", f"the checkpoint's processor refuses the {what} items")


def occurrences(text: str, placeholders: Mapping[str, str]) -> list[tuple[int, str]]:
    """Where placeholders (modality → its placeholder) begin in a text, and of which modality they are."""
    names = {placeholder: modality for modality, placeholder in placeholders.items()}
    if not names:
        return []
    pattern = "|".join(re.escape(placeholder) for placeholder in sorted(names, key=len, reverse=True))
    return [(match.start(), names[match[0]]) for match in re.finditer(pattern, text)]
