"""What vLLM's `LLM`, `LLMEngine` and `AsyncLLM` (0.11 to 0.33) have besides ours.

Members raise an error that says what to do instead. Arguments of methods have no effect, or are older names.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ..ipc.errors import Accepted, MissingNameError, check_accepted
from ..ipc.params import SamplingParams
from ..ipc.pooling_params import PoolingParams

# reason → members, as Class.member, which raise `MissingNameError`
MEMBERS = {
    "use sleep(level=1) and wake_up(tags=[...])": (
        "LLM.release_kv_cache_memory LLMEngine.release_kv_cache_memory AsyncLLM.release_kv_cache_memory"
    ),
    "mainspring scale changes the number of cores": (
        "AsyncLLM.scale_elastic_ep AsyncLLM.get_external_elastic_ep_status AsyncLLM.handle_fault"
    ),
    "set DO_VALIDATE_OUTPUT": "LLMEngine.validate_outputs",
    "a draft model keeps the weights of its checkpoint": (
        "LLM.start_draft_weight_update AsyncLLM.start_draft_weight_update"
    ),
    "use update_weight_version": "LLMEngine.set_weight_version",
    "get_weight_version names the weights": "AsyncLLM.compute_weight_checksums",
    "KV connectors and events are not supported": (
        "AsyncLLM.notify_kv_transfer_request_rejected AsyncLLM.get_kv_event_sources"
    ),
    "limits are fields of EngineArgs, and a request above them raises OverloadedError": "AsyncLLM.check_admission",
    "use is_running or errored": "AsyncLLM.get_status AsyncLLM.should_keep_api_server_alive",
    "it belongs to the inside of vLLM": (
        "LLM.request_counter LLM.runner_type AsyncLLM.get_input_preprocessor AsyncLLM.checkpoint_prepare "
        "AsyncLLM.checkpoint_restore"
    ),
    "validate() checks the fields, and an engine checks them for its model": (
        "SamplingParams.verify PoolingParams.verify"
    ),
    "it is set by vLLM's engine, not by its users": (
        "SamplingParams.update_from_tokenizer SamplingParams.sampling_type SamplingParams.eos_token_id "
        "SamplingParams.all_stop_token_ids SamplingParams.bad_words_token_ids SamplingParams.num_logprobs "
        "SamplingParams.for_sampler_warmup SamplingParams.output_text_buffer_length PoolingParams.all_parameters "
        "PoolingParams.valid_parameters"
    ),
}


class _Anything(tuple[Any, ...]):
    """Values of an argument without effect: all."""

    def __contains__(self, value: object) -> bool:
        return True


_STEPS: Accepted = dict.fromkeys(
    ("delay_iterations", "max_iterations", "profiler_kwargs"), ((0,), "choosing which steps are recorded")
)
_REQUEST: Accepted = {
    "session_id": ((), "sessions of several requests"),
    "kv_hints": ((), "hints to the KV cache"),
    "reasoning_ended": ((False,), "reasoning parsers"),
    "reasoning_parser_kwargs": ((), "reasoning parsers"),
}
_CLIENTS: Accepted = {
    "client_addresses": ((), "several clients of one core; use AsyncLLMEngine.connect"),
    "client_count": ((1,), "several clients of one core; use AsyncLLMEngine.connect"),
    "client_index": ((0,), "several clients of one core; use AsyncLLMEngine.connect"),
    "profiler": ((), "a profiler by argument; use start_profile"),
    "aggregate_engine_logging": ((True, False), "several devices"),
    "disable_log_requests": ((True, False), "an older flag; use enable_log_requests"),
}
_TRANSFER: Accepted = {"request": "weights"}  # which may be a request
_DEVICE: Accepted = {"device": "reset_running_requests"}  # whose argument may be a `Device`
# method → its arguments, see `check_accepted`
ARGUMENTS: dict[str, Accepted] = {
    "LLM.beam_search": {
        "concurrency_limit": (_Anything(), "no limit"),  # prompts are queued in any case
        "priority": ((), "priorities of beams"),
    },
    "LLM.reward": {"truncate_prompt_tokens": ((), "truncation by argument; set it in PoolingParams")},
    "LLM.update_weights": _TRANSFER,
    "LLM.start_profile": _STEPS,
    "LLM.reset_prefix_cache": _DEVICE,
    "LLMEngine.start_profile": _STEPS,
    "LLMEngine.abort_request": {"request_ids": "request_id"},
    "LLMEngine.add_request": _REQUEST,
    "LLMEngine.reset_prefix_cache": _DEVICE,
    "AsyncLLM.__init__": _CLIENTS,
    "AsyncLLM.from_vllm_config": _CLIENTS,
    "AsyncLLM.start_profile": _STEPS,
    "AsyncLLM.add_request": _REQUEST,
    "AsyncLLM.generate": _REQUEST,
    "AsyncLLM.encode": _REQUEST,
    "AsyncLLM.shutdown": {"timeout": (_Anything(), "a time limit")},
    "AsyncLLM.reset_prefix_cache": _DEVICE,
    "AsyncLLM.update_weights": _TRANSFER,
    "SamplingParams.update_from_generation_config": {"model_eos_token_id": "eos_token_id"},
}

MISSING: dict[str, dict[str, str]] = {}  # class of vLLM → member → reason
for _reason, _names in MEMBERS.items():
    for _owner, _, _member in (_name.partition(".") for _name in _names.split()):
        MISSING.setdefault(_owner, {})[_member] = _reason

T = TypeVar("T")


def knows_members(theirs: str) -> Callable[[type[T]], type[T]]:
    """Class decorator: the class stands for vLLM's class `theirs`, whose other members and arguments it knows."""

    def decorate(cls: Any) -> Any:
        reasons = MISSING[theirs]

        def __getattr__(self: Any, name: str) -> Any:
            if name in reasons:
                raise MissingNameError(f"{cls.__name__} has no {name}, which vLLM's {theirs} has: {reasons[name]}")
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)

        cls.__getattr__ = __getattr__
        for owner, _, method in (name.partition(".") for name in ARGUMENTS):
            if owner == theirs:
                found, accepted = inspect.getattr_static(cls, method), ARGUMENTS[f"{owner}.{method}"]
                if isinstance(found, classmethod):
                    setattr(cls, method, classmethod(_accepting(found.__func__, accepted)))
                else:
                    setattr(cls, method, _accepting(found, accepted))
        return cls

    return decorate


def _accepting(method: Callable[..., Any], accepted: Accepted) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **given: Any) -> Any:
        if given and given.keys() & accepted.keys():
            given = check_accepted(given, accepted)
        return method(*args, **given)

    return call


knows_members("SamplingParams")(SamplingParams)
knows_members("PoolingParams")(PoolingParams)
