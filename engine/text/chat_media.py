"""Images, videos and sounds in the messages of a conversation."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from ...ipc.errors import InvalidRequestError, NotSupportedError, shown

Message = Mapping[str, Any]


class MediaPart(NamedTuple):
    """A part of a message that is media."""

    modality: str
    item: Any  # as `multi_modal_data` takes it; None: only its uuid is given
    uuid: str | None


_KEYS = {  # key of a part that holds an item → its modality; also the part's type
    **{f"{modality}{end}": modality for modality in ("image", "video", "audio") for end in ("", "_url")},
    "image_pil": "image",
    "input_audio": "audio",
}
_TYPES = {**{kind: (modality, kind) for kind, modality in _KEYS.items()}, "input_image": ("image", "image_url")}


def take_media(conversation: Any, modalities: Collection[str]) -> tuple[Any, list[MediaPart]]:
    """The conversation with ``{"type": MODALITY}`` in the place of each part that is media of these modalities, and
    these parts, in order. Whatever has another form stays as it is.

    Raises:
        InvalidRequestError: a part has no content, or none that can be read.
    """
    found: list[MediaPart] = []
    if not modalities or isinstance(conversation, str) or not isinstance(conversation, Sequence):
        return conversation, found
    messages = []
    for at, message in enumerate(conversation):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, Mapping):
            content = [content]
        if isinstance(content, (list, tuple)):
            parts = [_taken(part, modalities, at, found) for part in content]
            message = {**message, "content": parts if any(map(_is_taken, parts)) else message["content"]}
        messages.append(message)
    return messages, found


def _is_taken(part: Any) -> bool:
    return isinstance(part, _Taken)


class _Taken(dict[str, Any]):
    """Stands in a message for a part that was taken."""


def _taken(part: Any, modalities: Collection[str], at: int, found: list[MediaPart]) -> Any:
    if not isinstance(part, Mapping):
        return part
    kind = part.get("type")
    if kind is None:
        kind = next((key for key in part if key in _KEYS and part[key] is not None), None)
    modality, key = _TYPES.get(kind, (None, "")) if isinstance(kind, str) else (None, "")
    if modality not in modalities or modality is None:
        return part
    item = part.get(key) if part.get(key) is not None else part.get("url")
    if isinstance(item, Mapping):
        item = _sound_file(item, at) if kind == "input_audio" else item.get("url")
    found.append(MediaPart(modality, item, part.get("uuid")))
    return _Taken(type=modality)


def _sound_file(given: Mapping[str, Any], at: int) -> bytes:
    try:
        return base64.b64decode(given["data"], validate=True)
    except (KeyError, TypeError, ValueError, binascii.Error):
        said = shown(given.get("data"))
        raise InvalidRequestError(f"message {at} has an input_audio whose data is {said}; it must be base64") from None


def media_of(parts: Sequence[MediaPart]) -> dict[str, Any]:
    """`multi_modal_data` and `multi_modal_uuids` of a prompt with these parts.

    Raises:
        InvalidRequestError: a part has neither content nor a uuid.
    """
    data: dict[str, list[Any]] = {}
    uuids: dict[str, list[str | None]] = {}
    for modality, item, uuid in parts:
        if item is None and uuid is None:
            raise InvalidRequestError(f"the conversation has a part of type {modality!r} without content")
        data.setdefault(modality, []).append(item)
        uuids.setdefault(modality, []).append(uuid)
    named = any(uuid is not None for names in uuids.values() for uuid in names)
    return {"multi_modal_data": data, **({"multi_modal_uuids": uuids} if named else {})}


def plain_prompt(messages: Any, media: Mapping[str, str]) -> Any:
    """The prompt of messages that no template renders: the texts of their contents, each on a line of its own, and
    their media.

    Args:
        media: what the model takes beside text → the text that stands for it in a prompt; maybe empty.

    Raises:
        InvalidRequestError: a content is neither a text nor a list of parts.
        NotSupportedError: a part is no text, and no media that the model takes.
    """
    taken, found = take_media(messages, media)
    lines = []
    for message in taken:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, (str, list, tuple)):
            raise InvalidRequestError(f"the content of a message is {shown(content)}; it must be a text or a list")
        for part in [content] if isinstance(content, str) else content:
            text: Any = part
            if isinstance(part, _Taken):
                text = media[part["type"]]
            elif isinstance(part, Mapping):
                text = part.get("text") if part.get("type", "text") in ("text", "input_text") else None
            if not isinstance(text, str):
                kind = part.get("type") if isinstance(part, Mapping) else part
                takes = ", ".join(("text", *media))
                raise NotSupportedError(f"a message has a part of type {shown(kind)}; this model takes: {takes}")
            lines.append(text)
    prompt = "\n".join(filter(None, lines))
    return {"prompt": prompt, **media_of(found)} if found else prompt
