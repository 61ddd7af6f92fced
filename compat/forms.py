"""The call forms of `add_request`, `generate` and the constructors in older versions of other engines.

They are recognised by the types of their positional arguments.

`add_request` takes `request_id, prompt, params`, then:

======  ================  ============  ===================  ======================  ======================  ===========
form    4                 5             6                    7                       8                       9
======  ================  ============  ===================  ======================  ======================  ===========
newest  arrival_time      lora_request  tokenization_kwargs  trace_headers           priority                prompt_text
newer   arrival_time      lora_request  tokenization_kwargs  trace_headers           prompt_adapter_request  priority
middle  arrival_time      lora_request  trace_headers        prompt_adapter_request  priority
oldest  prompt_token_ids  arrival_time  lora_request         prefix_pos
======  ================  ============  ===================  ======================  ======================  ===========

A call has the oldest form if 4 is a list, 5 a float, 6 a `LoRARequest` or 7 an int. It has the middle form if 6 is a
mapping of trace headers only, or 7 a `PromptAdapterRequest`. It has the newer form if 8 is a `PromptAdapterRequest`, or
None before an int. If 9 is an int in the newest form, it is `data_parallel_rank`, as in vLLM's `AsyncLLM`.

`generate` of the async engine is `prompt, sampling_params, request_id`, then keywords only, or by position:

=======  ==================  ==============  ======================  ==================
form     4                   5               6                       7
=======  ==================  ==============  ======================  ==================
newer    lora_request        trace_headers   priority
middle   lora_request        trace_headers   prompt_adapter_request  priority
oldest   prompt_token_ids    lora_request    prefix_pos
=======  ==================  ==============  ======================  ==================

Older constructors of both engines take the configuration in parts, as ``model_config, cache_config, parallel_config,
scheduler_config, …, log_stats``. That of the async engine may begin with two flags about Ray.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, NamedTuple, TypeVar, cast

from msgspec.structs import replace

from ..ipc.adapters import LoRARequest, PromptAdapterRequest
from ..ipc.config import SECTIONS, EngineConfig, ModelConfig, Section, StructuredOutputsConfig
from ..ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError, shown, unknown_argument
from ..ipc.params import is_text

T = TypeVar("T")


def takes_vllm_fields(cls: type[T]) -> type[T]:
    """Decorator of a dataclass: its constructor also takes the fields of engine_fields.py, as keywords."""
    construct: Callable[..., None] = cls.__init__
    ours = {field.name for field in dataclasses.fields(cast(Any, cls))}

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **given: Any) -> None:
        from .engine_fields import KNOWN, resolve_fields  # imported here, because a connected frontend needs no tables

        construct(self, *args, **resolve_fields(given, KNOWN - ours))

    cls.__init__ = __init__  # type: ignore[method-assign]
    return cls


_TRACE_HEADERS = frozenset(("traceparent", "tracestate"))
_KEYWORDS = (
    *("request_id", "prompt", "params", "arrival_time", "lora_request", "tokenization_kwargs", "trace_headers"),
    *("priority", "prompt_text"),
)
_OLDER_KEYWORDS = ("inputs", "sampling_params", "prompt_token_ids", "prefix_pos", "prompt_adapter_request")
_RANK = "data_parallel_rank"
_NONE_ONLY = ("executor_class", "vision_language_config", "prompt_adapter_config")
_ENGINE_KEYWORDS = (
    *("log_stats", "usage_context", "stat_loggers", "aggregate_engine_logging", "mm_registry", "input_registry"),
    *("use_cached_outputs", "worker_use_ray", "engine_use_ray", "placement_group", *_NONE_ONLY),
)
_FLAGS = ("log_stats", "aggregate_engine_logging", "use_cached_outputs")
_PARTS: dict[str, type[Section]] = {
    "vllm_config": EngineConfig,
    **SECTIONS,
    "decoding_config": StructuredOutputsConfig,
}
_NAMES = {kind: name for name, kind in SECTIONS.items()}


Slots = tuple[Any, Any, Any, Any, Any, Any]  # the arguments of `add_request` after the third, as they were given
Call = dict[str, Any]  # a call in the newest form: the keyword arguments of `InputProcessor.process_inputs`


def resolve_add_request(
    request_id: str | int,
    prompt: Any,
    params: Any,
    slots: Slots,
    older: Mapping[str, Any],
    method: str = "add_request",
) -> Call:
    """Convert any form to the newest one. `older` are the keywords that the newest form does not have.

    Raises:
        UnknownArgumentError: no form has this keyword.
        NotSupportedError: the feature of an argument does not exist yet.
        InvalidRequestError: the prompt or the id is missing.
    """
    for name in older:
        if name not in (*_OLDER_KEYWORDS, _RANK):
            raise unknown_argument(method, name, (*_KEYWORDS, *_OLDER_KEYWORDS))
    if isinstance(request_id, bool) or not isinstance(request_id, (str, int)) or _is_no_id(request_id):
        raise InvalidRequestError(f"request_id is {shown(request_id)}; it must be a str of whole characters")
    prompt_token_ids = older.get("prompt_token_ids")
    prefix_pos, adapter = older.get("prefix_pos"), older.get("prompt_adapter_request")

    fourth, fifth, sixth, seventh, priority, prompt_text = slots
    rank = older.get(_RANK)
    if isinstance(priority, PromptAdapterRequest) or (priority is None and type(prompt_text) is int):
        adapter = _given_once("prompt_adapter_request", priority, adapter)
        priority, prompt_text = prompt_text or 0, None
    elif type(prompt_text) is int:
        rank, prompt_text = _given_once(_RANK, prompt_text, rank), None
    oldest = isinstance(fourth, (list, tuple)) or isinstance(fifth, float) or isinstance(sixth, LoRARequest)
    headers = isinstance(sixth, Mapping) and sixth and sixth.keys() <= _TRACE_HEADERS
    if oldest or type(seventh) is int:
        prompt_token_ids = _given_once("prompt_token_ids", fourth, prompt_token_ids)
        arrival_time, lora, tokenization, trace = fifth, sixth, None, None
        prefix_pos = _given_once("prefix_pos", seventh, prefix_pos)
    elif headers or isinstance(seventh, PromptAdapterRequest):
        arrival_time, lora, tokenization, trace = fourth, fifth, None, sixth
        adapter = _given_once("prompt_adapter_request", seventh, adapter)
    else:
        arrival_time, lora, tokenization, trace = fourth, fifth, sixth, seventh

    if prefix_pos is not None and type(prefix_pos) is not int:
        raise InvalidRequestError(f"prefix_pos is {shown(prefix_pos)}; it must be an int")
    if arrival_time is not None and not (isinstance(arrival_time, (int, float)) and abs(arrival_time) < 1e300):
        raise InvalidRequestError(f"arrival_time is {shown(arrival_time)}; it must be a number of seconds")
    if trace is not None and not (isinstance(trace, Mapping) and all(is_text(x) for kv in trace.items() for x in kv)):
        raise InvalidRequestError(f"trace_headers is {shown(trace)}; it must be a dict of str to str")
    return {
        "request_id": str(request_id),
        "prompt": one_prompt(prompt, older.get("inputs"), prompt_token_ids),
        "params": older.get("sampling_params") if params is None else params,
        "arrival_time": arrival_time,
        "tokenization_kwargs": tokenization,
        "priority": priority,
        "prompt_text": prompt_text,
        "trace_headers": trace,
        "lora_request": lora,
        "prompt_adapter_request": adapter,
        _RANK: rank,
    }


def resolve_generate(
    prompt: Any,
    params: Any,
    request_id: Any,
    positional: tuple[Any, ...],
    slots: Slots,
    older: Mapping[str, Any],
) -> Call:
    """The same for `generate`: `positional` are its arguments after the third, `slots` its keyword arguments.

    Raises: as that, and
        InvalidArgumentError: too many arguments, or one by position and by keyword.
    """
    arrival_time, lora, tokenization, trace, priority, prompt_text = slots
    if len(positional) > 4:
        raise InvalidArgumentError(f"generate got {3 + len(positional)} arguments by position; it takes at most 7")
    fourth, fifth, sixth, seventh = (*positional, None, None, None, None)[:4]
    if isinstance(fourth, (list, tuple)):
        by_position = {"prompt_token_ids": fourth, "prefix_pos": sixth, _RANK: seventh}
        lora = _given_once("lora_request", fifth, lora)
    else:
        newer = type(sixth) is int
        rank, adapter = (seventh, None) if newer else (None, sixth)
        by_position = {"prompt_adapter_request": adapter, _RANK: rank}
        lora, trace = _given_once("lora_request", fourth, lora), _given_once("trace_headers", fifth, trace)
        if (given := sixth if newer else seventh) is not None:
            priority = _given_once("priority", given, None if type(priority) is int and not priority else priority)
    older = {**older, **{name: _given_once(name, value, older.get(name)) for name, value in by_position.items()}}
    slots = (arrival_time, lora, tokenization, trace, priority, prompt_text)
    return resolve_add_request(request_id, prompt, params, slots, older, "generate")


def _given_once(name: str, positional: Any, keyword: Any) -> Any:
    """The value, given by position or by keyword but not both."""
    if positional is not None and keyword is not None:
        raise InvalidArgumentError(f"{name} is given by position and by keyword: give it once")
    return keyword if positional is None else positional


class EngineCall(NamedTuple):
    """A constructor's call in the newest form."""

    vllm_config: EngineConfig
    log_stats: bool
    stat_loggers: Any
    placement_group: Any = None
    engine_use_ray: bool = False


def resolve_engine(owner: str, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> EngineCall:
    """A constructor's call, with a whole configuration or its parts. Positional arguments are recognised by their type:
    parts of the configuration, `log_stats` (the first bool), `stat_loggers` (a dict or list).

    Raises:
        UnknownArgumentError: a keyword that no form has.
        NotSupportedError: an argument whose feature does not exist yet.
        InvalidArgumentError: there is no configuration, or a part of it twice, or an argument of an unknown type.
    """
    for name, value in keywords.items():
        if name in _PARTS and not isinstance(value, (_PARTS[name], NoneType)):
            raise InvalidArgumentError(f"{name} is {shown(value)}; it must be a {_PARTS[name].__name__} or None")
        if name not in (known := (*_ENGINE_KEYWORDS, *_PARTS)):
            raise unknown_argument(owner, name, known)
    worker_use_ray, engine_use_ray = (bool(keywords.get(name)) for name in ("worker_use_ray", "engine_use_ray"))
    if args and isinstance(args[0], bool):
        worker_use_ray, engine_use_ray, args = args[0], bool(args[1:] and args[1]), args[2:]
    parts: dict[type, Any] = {}
    for part in (*args, *keywords.values()):
        if isinstance(part, Section):
            if type(part) in parts:
                raise InvalidArgumentError(f"{shown(part)} is given beside another {type(part).__name__}; give one")
            parts[type(part)] = part
    if EngineConfig in parts and len(parts) > 1:
        named = ", ".join(_NAMES[kind] for kind in parts if kind in _NAMES)
        raise InvalidArgumentError(f"{named} is given beside a vllm_config, which holds one: give one of them")
    if EngineConfig not in parts and ModelConfig not in parts:
        raise InvalidArgumentError("there is no vllm_config; give EngineArgs(...).create_engine_config()")
    log_stats, stat_loggers = keywords.get("log_stats"), keywords.get("stat_loggers")
    placement_group = keywords.get("placement_group")
    flags, registries = 0, 0
    for value in args:
        if isinstance(value, bool):
            log_stats = log_stats if flags else _given_once("log_stats", value, log_stats)
            flags += 1
        elif isinstance(value, (Mapping, list, tuple)):
            stat_loggers = _given_once("stat_loggers", value, stat_loggers)
        elif isinstance(value, type) and not flags:
            refuse_unsupported(executor_class=value)
        elif not isinstance(value, (Section, str)) and not flags:  # a str is the usage context, which has no effect
            placement_group = _given_once("placement_group", value, placement_group)
        elif not isinstance(value, (Section, str, NoneType)):
            registries += 1  # an input registry, which has no effect
            if registries > 1 or isinstance(value, (int, float, type)):
                raise InvalidArgumentError(f"{owner} got {shown(value)} by position, where it has no such argument")
    if flags > len(_FLAGS):
        raise InvalidArgumentError(f"{owner} got {flags} flags by position; it takes {', '.join(_FLAGS)}")
    refuse_unsupported(**{name: keywords.get(name) for name in _NONE_ONLY})
    whole = parts.pop(EngineConfig, None) or EngineConfig(**{_NAMES[kind]: part for kind, part in parts.items()})
    if worker_use_ray:
        parallel = replace(whole.parallel_config, distributed_executor_backend="ray")
        whole = replace(whole, parallel_config=parallel)
    return EngineCall(whole, True if log_stats is None else log_stats, stat_loggers, placement_group, engine_use_ray)


Constructor = TypeVar("Constructor", bound=Callable[..., None])


def takes_older_forms(construct: Constructor) -> Constructor:
    """Decorator of `LLMEngine.__init__`: it accepts the older forms, and raises `UnknownArgumentError` for a keyword
    that no form has."""
    newest = [*inspect.signature(construct).parameters][1:]

    @functools.wraps(construct)
    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        whole = isinstance(args[0] if args else keywords.get("vllm_config"), EngineConfig)
        if not whole or not keywords.keys() <= set(newest):
            multiprocess = keywords.pop("multiprocess_mode", True)
            call = resolve_engine(type(self).__name__, args, keywords)
            args, keywords = (), {**call._asdict(), "multiprocess_mode": multiprocess}
        construct(self, *args, **keywords)

    return cast(Constructor, __init__)


def _is_no_id(request_id: str | int) -> bool:
    return not (is_text(request_id) if isinstance(request_id, str) else -(2**63) <= request_id < 2**63)


def one_prompt(prompt: Any, inputs: Any, prompt_token_ids: Any) -> Any:
    """The prompt, which older forms give as `inputs` or as text and `prompt_token_ids`."""
    prompt = inputs if prompt is None else prompt
    if prompt_token_ids is None:
        if prompt is None:
            raise InvalidRequestError("there is no prompt; give prompt or prompt_token_ids")
        return prompt
    if prompt is None or isinstance(prompt, str):
        return {"prompt": prompt, "prompt_token_ids": prompt_token_ids}
    raise InvalidRequestError("prompt_token_ids is given beside a prompt that is not text; give one of them")


def refuse_unsupported(**arguments: Any) -> None:
    """Raise `NotSupportedError`, which names it, for the first argument that is not None."""
    for name, value in arguments.items():
        if value is not None:
            raise NotSupportedError(f"{name} is not supported yet; leave it out")
