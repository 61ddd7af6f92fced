"""The forms of a prompt, and the one form that the engine uses."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

from ...ipc.errors import InvalidRequestError, shown, unknown_argument
from ...ipc.params import is_text

if TYPE_CHECKING:
    from ...ipc.codec import Array  # imports numpy, which `import mainspring` must not
    from .media_inputs import GivenMedia
    from .prompt_media import RequestMedia


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]  # share cached prefixes only with prompts of the same salt
    multi_modal_data: NotRequired[dict[str, Any]]  # modality → an item or a list of them, see media_inputs.py
    multi_modal_uuids: NotRequired[dict[str, Any]]  # modality → names, under which items may be left out later
    mm_processor_kwargs: NotRequired[dict[str, Any]]  # arguments of the checkpoint's processor


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt`, if given, is only shown in outputs. `token_type_ids` are for pooling models that
    know types: zeros for the first of two texts, ones for the second."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[dict[str, Any]]  # this and the next as in `TextPrompt`
    multi_modal_uuids: NotRequired[dict[str, Any]]
    mm_processor_kwargs: NotRequired[dict[str, Any]]


class EmbedsPrompt(TypedDict):
    """A prompt as input embeddings, [tokens, hidden size]: a numpy array, a torch tensor or anything with DLPack."""

    prompt_embeds: Any
    cache_salt: NotRequired[str]


class ExplicitEncoderDecoderPrompt(TypedDict):
    """Of an encoder-decoder model.

    `encoder_prompt` is what its encoder gets: a text, token ids, or a dict with `multi_modal_data` and an empty prompt.
    `decoder_prompt` is how its output begins; None: with nothing."""

    encoder_prompt: Any
    decoder_prompt: Any
    mm_processor_kwargs: NotRequired[dict[str, Any]]


Prompt = str | TextPrompt | TokensPrompt | EmbedsPrompt | ExplicitEncoderDecoderPrompt | Sequence[int]


class ParsedPrompt(NamedTuple):
    """A prompt in its one form: `token_ids` or `embeds` is set, or `text` is still to be encoded."""

    text: str | None = None
    token_ids: list[int] | None = None
    embeds: Array | None = None  # [tokens, hidden size]
    cache_salt: str | None = None
    second: int = 0  # index of the second text's first token in a pair of texts; 0: one text
    given: GivenMedia | None = None  # its media as they were given
    media: RequestMedia | None = None  # its media, prepared
    explicit: bool = False  # it was given in two parts, for encoder and decoder


_MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs")
_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds", "cache_salt", "token_type_ids", *_MEDIA_KEYS)
_PARTS = ("encoder_prompt", "decoder_prompt")


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Recognise a prompt's form.

    Raises:
        InvalidRequestError: it has none of the known forms, or holds something that is no token id.
    """
    if isinstance(prompt, ParsedPrompt):
        return prompt
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _parse_mapping(prompt)
    if is_token_ids(prompt):
        return ParsedPrompt(token_ids=_token_ids(prompt))
    raise InvalidRequestError(
        f"a prompt is {shown(prompt)}; it must be a str, a list of token ids, or a dict with 'prompt', "
        "'prompt_token_ids' or 'prompt_embeds'"
    )


def is_token_ids(prompt: Any) -> bool:
    """Whether this is one prompt of token ids, rather than a list of prompts. An empty list is one."""
    if hasattr(prompt, "__array__"):
        return getattr(prompt, "ndim", 0) == 1
    return isinstance(prompt, Sequence) and not isinstance(prompt, (str, bytes)) and all(map(_is_int, prompt[:1]))


def listed_prompts(prompts: Any) -> list[Any]:
    """One prompt or several, as a list of them."""
    several = isinstance(prompts, (list, tuple)) and not (prompts and is_token_ids(prompts))
    return list(prompts) if several else [prompts]


def has_media(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and any(prompt.get(key) for key in (*_MEDIA_KEYS[:2], "encoder_prompt"))


def with_processor_kwargs(prompts: Sequence[Any], kwargs: Mapping[str, Any] | None) -> list[Any]:
    """The prompts, with these arguments of the checkpoint's processor for those that have media. Own ones of a prompt
    win."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise InvalidRequestError(f"mm_processor_kwargs is {shown(kwargs)}; it must be a dict")
    if not kwargs:
        return list(prompts)
    return [
        {**prompt, "mm_processor_kwargs": {**kwargs, **_processor_kwargs(prompt)}} if has_media(prompt) else prompt
        for prompt in prompts
    ]


def _processor_kwargs(prompt: Mapping[str, Any]) -> Mapping[str, Any]:
    kwargs = prompt.get("mm_processor_kwargs") or {}
    if not isinstance(kwargs, Mapping):
        raise InvalidRequestError(f"mm_processor_kwargs is {shown(kwargs)}; it must be a dict")
    return kwargs


def _parse_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    for key in prompt:
        if key not in _KEYS and key not in _PARTS:
            raise InvalidRequestError(str(unknown_argument("a prompt", key, _KEYS)))
    if any(prompt.get(key) is not None for key in _PARTS):
        return _parse_parts(prompt)
    text, salt = prompt.get("prompt"), prompt.get("cache_salt")
    if text is not None and not isinstance(text, str):
        raise InvalidRequestError(f"prompt is {shown(text)}; it must be a str")
    if salt is not None and (not is_text(salt) or not salt):
        raise InvalidRequestError(f"cache_salt is {shown(salt)}; it must be a non-empty str")
    if prompt.get("token_type_ids") is not None and prompt.get("prompt_token_ids") is None:
        raise InvalidRequestError("token_type_ids are given without prompt_token_ids; give both")
    if has_media(prompt):
        return _with_media(prompt)
    if prompt.get("prompt_embeds") is not None:
        if prompt.get("prompt_token_ids") is not None:
            raise InvalidRequestError("a prompt has both prompt_token_ids and prompt_embeds; give one")
        return ParsedPrompt(text=text, embeds=_read_embeds(prompt["prompt_embeds"]), cache_salt=salt)
    if prompt.get("prompt_token_ids") is not None:
        token_ids = _token_ids(prompt["prompt_token_ids"])
        return ParsedPrompt(text, token_ids, cache_salt=salt, second=_second(token_ids, prompt.get("token_type_ids")))
    if text is None:
        raise InvalidRequestError("a prompt dict must have 'prompt', 'prompt_token_ids' or 'prompt_embeds'")
    return ParsedPrompt(text=text, cache_salt=salt)


def _parse_parts(prompt: Mapping[str, Any]) -> ParsedPrompt:
    from .media_inputs import GivenMedia

    for key in prompt:
        if key not in (*_PARTS, "mm_processor_kwargs") and prompt[key] is not None:
            raise InvalidRequestError(f"a prompt has both encoder_prompt and {key}; give one")
    parts = [prompt.get(key) for key in _PARTS]
    if parts[0] is None:
        raise InvalidRequestError("a prompt has decoder_prompt without encoder_prompt; give both")
    encoder, decoder = (parse_prompt("" if part is None else part) for part in parts)
    for name, part in zip(_PARTS, (encoder, decoder), strict=True):
        if part.explicit or part.embeds is not None:
            raise InvalidRequestError(f"{name} must be a text, token ids, or a dict with one of them")
    if decoder.given is not None:
        raise InvalidRequestError("decoder_prompt has multi_modal_data, which belong into encoder_prompt")
    if encoder.given is None:
        given = GivenMedia(None, None, {}, encoder.text if encoder.token_ids is None else encoder.token_ids)
    elif encoder.text or encoder.token_ids:
        raise InvalidRequestError("encoder_prompt has multi_modal_data and a text, which belongs into decoder_prompt")
    else:
        given = encoder.given._replace(kwargs={**_processor_kwargs(prompt), **encoder.given.kwargs})
    return decoder._replace(given=given, explicit=True, cache_salt=decoder.cache_salt or encoder.cache_salt)


def _with_media(prompt: Mapping[str, Any]) -> ParsedPrompt:
    from .media_inputs import GivenMedia

    for key in ("prompt_embeds", "token_type_ids"):
        if prompt.get(key) is not None:
            raise InvalidRequestError(f"a prompt has both {key} and multi_modal_data; give one")
    parsed = _parse_mapping({key: value for key, value in prompt.items() if key not in _MEDIA_KEYS})
    given = GivenMedia(prompt.get("multi_modal_data"), prompt.get("multi_modal_uuids"), dict(_processor_kwargs(prompt)))
    return parsed._replace(given=given)


def _token_ids(value: Any) -> list[int]:
    ids: Any = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise InvalidRequestError(f"prompt_token_ids is {shown(value)}; it must be a list of ints")
    for at, token in enumerate(ids):
        if not _is_int(token):
            raise InvalidRequestError(f"prompt_token_ids[{at}] is {shown(token)}; it must be an int")
    return [int(token) for token in ids]


def _second(token_ids: list[int], given: Any) -> int:
    if given is None:
        return 0
    types = given.tolist() if hasattr(given, "tolist") else given
    zeros = types.count(0) if isinstance(types, (list, tuple)) and all(map(_is_int, types)) else 0
    if not zeros or list(types) != [0] * zeros + [1] * (len(token_ids) - zeros):
        raise InvalidRequestError(
            f"token_type_ids is {shown(given)}; it must be a list of a 0 or 1 for each token, zeros first, at least one"
        )
    return zeros if zeros < len(token_ids) else 0


def _is_int(value: Any) -> bool:
    return type(value) is int or (
        hasattr(value, "__index__") and not isinstance(value, bool) and getattr(value, "ndim", 0) == 0
    )


def _read_embeds(value: Any) -> Array:
    embeds = read_array("prompt_embeds", value)
    if embeds.values.ndim != 2:
        raise InvalidRequestError(f"prompt_embeds has shape {list(embeds.values.shape)}; it must be [tokens, hidden]")
    return embeds._replace(values=embeds.values.copy())  # the caller may change its array


def read_array(name: str, value: Any) -> Array:
    """An array from numpy, torch, or anything with `__array__` or DLPack.

    Raises:
        InvalidRequestError: `name` is none, or not of a float dtype.
    """
    import numpy as np

    from ...ipc.codec import Array

    torch, dtype = sys.modules.get("torch"), ""  # a tensor can only come from a process that has torch
    try:
        if torch is not None and isinstance(value, torch.Tensor):
            value = value.detach().to("cpu").contiguous()
            if value.dtype == torch.bfloat16:
                value, dtype = value.view(torch.uint16), "bfloat16"
        array = np.asarray(value) if hasattr(value, "__array__") else np.from_dlpack(value)
    except (TypeError, ValueError, RuntimeError, BufferError, AttributeError) as error:
        raise InvalidRequestError(f"{name} can't be read as an array: {error}") from error
    if array.dtype.name == "bfloat16":  # as ml_dtypes registers it
        array, dtype = np.ascontiguousarray(array).view(np.uint16), "bfloat16"
    if not dtype:
        if array.dtype.kind != "f":
            raise InvalidRequestError(f"{name} has dtype {array.dtype}; it must be float32, float16 or bfloat16")
        dtype = "float16" if array.dtype.itemsize == 2 else "float32"
        array = np.asarray(array, dtype=dtype, order="C")
    return Array(array, dtype)
