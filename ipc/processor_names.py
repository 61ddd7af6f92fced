"""How logits processors travel to the core: classes by their names, and the arguments that requests give them as plain
data. The bases of the classes are in logits_processors.py, which a frontend need not import.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .errors import InvalidArgumentError, InvalidRequestError, shown
from .messages import Sampling
from .params import SamplingParams

MAX_EXTRA_ARGS_BYTES = 64 << 10  # of a request's `extra_args`, because each waiting request keeps them
_plain = msgspec.msgpack.Decoder(dict[str, Any])

HERE = "__main__"  # the module whose classes no other process can import
only_here = False  # no other process can import any class: `python -m mainspring.compat.vllm` sets it


def names_of(given: Sequence[type | str] | None) -> list[str]:
    """Names under which a core imports the classes: ``module:Class``. Those that are given as names are not imported.

    Raises:
        InvalidArgumentError: one is neither a name nor a class at the top level of a module.
    """
    if isinstance(given, str) or not isinstance(given, Sequence | None):
        raise InvalidArgumentError(f"logits_processors is {shown(given)}; it must be a list of classes or their names")
    return [one if isinstance(one, str) else _name_of(one) for one in given or ()]


def _name_of(kind: Any) -> str:
    if not is_processor(kind):
        raise InvalidArgumentError(
            f"logits_processors holds {shown(kind)}; each must be a class with update_state and apply, or its name"
        )
    name = f"{kind.__module__}:{kind.__qualname__}"
    found = sys.modules.get(kind.__module__)
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind:
        raise InvalidArgumentError(
            f"logits_processors holds {shown(kind)}, which is not {name!r}: define the class at the top level of a "
            "module, because the core imports it by its name"
        )
    return name


def stay_here(names: Sequence[str]) -> bool:
    """Whether only a core in this process can import one of the classes: that of a script or notebook."""
    return any(only_here or parts_of(name)[0] == HERE for name in names)


def parts_of(name: str) -> tuple[str, str]:
    """The module and the class of a name, ``module:Class`` or ``module.Class``."""
    module, _, kind = name.partition(":") if ":" in name else name.rpartition(".")
    return module, kind


def is_processor(kind: Any) -> bool:
    """Whether a value is a class with the methods of `LogitsProcessor`, from which it need not be derived."""
    return isinstance(kind, type) and all(callable(getattr(kind, name, None)) for name in ("update_state", "apply"))


def packed(extra_args: Mapping[str, Any] | None) -> bytes:
    """``SamplingParams.extra_args`` as `Sampling.extra_args`.

    Raises:
        InvalidRequestError: they hold more than plain data.
    """
    if not extra_args:
        return b""
    try:
        return msgspec.msgpack.encode(extra_args)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"extra_args hold what can't go to the core: {error!s:.200}") from None


def unpacked(extra_args: bytes) -> dict[str, Any]:
    """The reverse of `packed`.

    Raises:
        InvalidRequestError: too long, or not a msgpack map with names as keys.
    """
    if len(extra_args) > MAX_EXTRA_ARGS_BYTES:
        raise InvalidRequestError(f"extra_args take {len(extra_args)} bytes; the limit is {MAX_EXTRA_ARGS_BYTES}")
    try:
        return _plain.decode(extra_args) if extra_args else {}
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"extra_args are not a map with names as keys: {error}") from None


def params_of(sampling: Sampling) -> SamplingParams:
    """The parameters that a processor sees: those that travel to the core. The number of completions, stop strings,
    bad words and the form of the output have their defaults; `stop_token_ids` hold the end-of-sequence tokens, too."""
    params = SamplingParams()
    for name in msgspec.structs.asdict(sampling).keys() & vars(params).keys() - {"bad_words"}:
        setattr(params, name, getattr(sampling, name))
    params.logprobs = None if sampling.logprobs < 0 else sampling.logprobs
    params.prompt_logprobs = None if sampling.prompt_logprobs < 0 else sampling.prompt_logprobs
    params.logit_bias, params.allowed_token_ids = sampling.logit_bias or None, sampling.allowed_token_ids or None
    params.extra_args = unpacked(sampling.extra_args) or None
    return params
