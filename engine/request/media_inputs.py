"""The forms of images, videos and sounds in a prompt, and the one form that media workers take.

Nothing is decoded here. Objects of PIL and torch are recognised by what they can do: a frontend imports neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...ipc.config import ENCODER_TEXT, MODALITIES
from ...ipc.errors import InvalidRequestError, NotSupportedError, shown, unknown_argument
from ...ipc.media_client import MediaInput

if TYPE_CHECKING:
    import numpy as np

MultiModalDataDict = Mapping[str, Any]  # types of the arguments of `given_items`
MultiModalUUIDDict = Mapping[str, Any]
MAX_UUID = 256  # characters
_URL = re.compile(r"(data|https?|file):", re.IGNORECASE)
_VIDEO_FACTS = ("fps", "total_num_frames", "frames_indices")
_MOST_CHANNELS = 8  # of a sound


class GivenMedia(NamedTuple):
    """The media of a prompt as the user gave them."""

    data: Any
    uuids: Any
    kwargs: dict[str, Any]  # arguments of the checkpoint's processor
    text: str | list[int] | None = None  # in place of media: what an encoder reads, or its token ids


class GivenItem(NamedTuple):
    """An item of a prompt: what it is, or the name under which it was given before, or both."""

    modality: str
    input: MediaInput | None
    uuid: str | None = None


def given_items(data: Any, uuids: Any = None, takes: Sequence[str] = MODALITIES) -> list[GivenItem]:
    """The items of a prompt's `multi_modal_data`.

    Args:
        takes: the modalities that the model takes.
        data: modality → an item, or a list of them. An item is a file's bytes, a URL (``data:``, ``http:``, ``https:``,
            ``file:``), or the content itself. An image: of PIL, or an array [height, width, 3] of uint8. A video: an
            array [frames, height, width, 3], or a list of images, or such a thing and its metadata. A sound: an array
            [samples] of floats, or such a thing and its sampling rate. In a list it may be a `MediaInput`. None: the
            item with the same uuid of before.
        uuids: modality → a name for each item, or None.

    Raises:
        InvalidRequestError: something is none of these.
        NotSupportedError: the model does not take items of this modality, or an item is embeddings.
    """
    data, uuids = _named("multi_modal_data", data), _named("multi_modal_uuids", uuids)
    for modality in (*data, *uuids):
        if modality not in takes:
            known = ", ".join(("text", *takes))
            raise NotSupportedError(f"a prompt has multi_modal_data of {modality!r}; this model takes: {known}")
    found = []
    for modality in MODALITIES:
        items = _listed(modality, data.get(modality))
        names = uuids.get(modality)
        if names is not None and not isinstance(names, (str, list, tuple)):
            raise InvalidRequestError(f"multi_modal_uuids is {shown(names)} for {modality}; it must be a str or a list")
        if data.get(modality) is None and names is not None:
            items = [None] * (1 if isinstance(names, str) else len(names))
        names = [names] * len(items) if names is None or isinstance(names, str) else list(names)
        if len(names) != len(items):
            raise InvalidRequestError(
                f"multi_modal_uuids has {len(names)} names for {len(items)} {modality} items; give one or None for each"
            )
        for at, (item, name) in enumerate(zip(items, names, strict=True)):
            found.append(given_item(modality, item, name, f"{modality} {at} of multi_modal_data"))
    return found


def encoder_text(text: str | list[int]) -> MediaInput:
    """A text, or its token ids, for an encoder."""
    import numpy as np

    content = text.encode() if isinstance(text, str) else np.array(text, np.int64)
    return MediaInput(ENCODER_TEXT, content)


def given_item(modality: str, item: Any, uuid: Any = None, what: str = "an item") -> GivenItem:
    """One item, which errors call `what`. Raises: as `given_items`."""
    if uuid is not None and (not isinstance(uuid, str) or not uuid):
        raise InvalidRequestError(f"the uuid of {what} is {shown(uuid)}; it must be a non-empty str")
    if uuid is not None and len(uuid) > MAX_UUID:
        raise InvalidRequestError(f"the uuid of {what} has {len(uuid)} characters; the limit is {MAX_UUID}")
    if item is None:
        if uuid is None:
            raise InvalidRequestError(f"{what} is None; only an item whose uuid was given before may be left out")
        return GivenItem(modality, None, uuid)
    if isinstance(item, MediaInput):
        return GivenItem(modality, item, uuid)
    if isinstance(item, (bytes, bytearray, memoryview)):
        return GivenItem(modality, MediaInput(modality, bytes(item)), uuid)
    if isinstance(item, str):
        if not _URL.match(item):
            raise InvalidRequestError(f"{what} is {shown(item)}; a str must be a URL: data:, https:, http: or file:")
        return GivenItem(modality, MediaInput(modality, item), uuid)
    if isinstance(item, Mapping):
        raise NotSupportedError(f"{what} is a dict; embeddings of media are not supported, give the media themselves")
    return GivenItem(modality, _READ[modality](item, what), uuid)


def _named(name: str, given: Any) -> Mapping[str, Any]:
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"{name} is {shown(given)}; it must be a dict of {', '.join(MODALITIES)}")
    for key in given:
        if key not in MODALITIES:
            raise InvalidRequestError(str(unknown_argument(name, key, MODALITIES)))
    return given


def _listed(modality: str, given: Any) -> list[Any]:
    """The items that are given as one, as a list, or as an array with one axis more."""
    if given is None:
        return []
    axes = {"image": 3, "video": 4, "audio": 1}[modality]
    if (own := getattr(given, "ndim", None)) is not None:
        return list(given) if own == axes + 1 else [given]
    if not isinstance(given, (list, tuple)):
        return [given]
    pair = isinstance(given, tuple) and len(given) == 2 and modality != "image" and _is_pair(given[1])
    frames = modality == "video" and bool(given) and all(_is_frame(one) for one in given)
    samples = modality == "audio" and bool(given) and all(isinstance(one, (int, float)) for one in given)
    return [given] if pair or frames or samples else list(given)


def _is_pair(second: Any) -> bool:
    return isinstance(second, (int, float, Mapping)) or hasattr(second, "fps")


def _is_frame(one: Any) -> bool:
    return _is_pil(one) or getattr(one, "ndim", None) == 3


def _is_pil(value: Any) -> bool:
    return all(hasattr(value, name) for name in ("convert", "tobytes", "size", "mode"))


def _image(value: Any, what: str) -> MediaInput:
    return MediaInput("image", _pixels(value, what).copy())  # here and below, because the caller may change its array


def _video(value: Any, what: str) -> MediaInput:
    import numpy as np

    metadata: Any = {}
    if isinstance(value, tuple) and len(value) == 2 and _is_pair(value[1]):
        value, metadata = value
        metadata = {"fps": metadata} if isinstance(metadata, (int, float)) else metadata
    if isinstance(value, (list, tuple)):
        frames = [_pixels(frame, f"a frame of {what}") for frame in value]
        if len({frame.shape for frame in frames}) != 1:
            raise InvalidRequestError(f"the frames of {what} must be some, all of one size")
        pixels = np.stack(frames)
    else:
        pixels = _pixels(value, what, 4).copy()
    told = metadata if isinstance(metadata, Mapping) else {key: getattr(metadata, key, None) for key in _VIDEO_FACTS}
    facts = {key: _plain(told[key]) for key in _VIDEO_FACTS if told.get(key) is not None}
    return MediaInput("video", pixels, facts)


def _sound(value: Any, what: str) -> MediaInput:
    import numpy as np

    facts: dict[str, Any] = {}
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], (int, float)):
        value, facts["sampling_rate"] = value
    samples = _array(value, what)
    if samples.dtype in (np.int16, np.int32):  # PCM
        samples = samples / -float(np.iinfo(samples.dtype).min)
    if samples.ndim == 2 and min(samples.shape) <= _MOST_CHANNELS:
        samples = samples.mean(axis=int(samples.shape[1] < samples.shape[0]))
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise InvalidRequestError(f"{what} is {samples.dtype} {list(samples.shape)}; it must be floats [samples]")
    return MediaInput("audio", np.array(samples, np.float32), facts)


def _pixels(value: Any, what: str, axes: int = 3) -> np.ndarray:
    """Pixels as uint8 […, height, width, 3], perhaps in the caller's memory."""
    import numpy as np

    if axes == 3 and _is_pil(value):
        width, height = value.size
        return np.frombuffer(value.convert("RGB").tobytes(), np.uint8).reshape(height, width, 3)
    pixels = _array(value, what)
    if pixels.ndim == axes and pixels.shape[-1] != 3 and pixels.shape[-3] == 3:
        pixels = np.moveaxis(pixels, -3, -1)  # channels first, as of torch
    if pixels.dtype != np.uint8 or pixels.ndim != axes or pixels.shape[-1] != 3:
        shape = ["height", "width", "3"] if axes == 3 else ["frames", "height", "width", "3"]
        text = f"{what} is {pixels.dtype} {list(pixels.shape)}; an array must be uint8 [{', '.join(shape)}]"
        raise InvalidRequestError(text)
    return pixels


def _array(value: Any, what: str) -> np.ndarray:
    import numpy as np

    if hasattr(value, "detach"):  # a tensor
        value = value.detach().cpu().numpy()
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidRequestError(f"{what} can't be read as an array: {error}") from None
    if found.dtype.kind not in "uif":
        raise InvalidRequestError(f"{what} is {shown(value)}; give bytes, a URL, an image of PIL or an array")
    return found


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, Sequence) else value


_READ: dict[str, Callable[[Any, str], MediaInput]] = {"image": _image, "video": _video, "audio": _sound}
