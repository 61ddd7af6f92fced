"""The bodies of requests that generate, and how their fields become parameters of a request to the core."""

from __future__ import annotations

import copy
import functools
import json as codec
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from ..engine.text.model_files import default_sampling_params
from ..ipc.params import RequestOutputKind, SamplingParams
from ..ipc.structured import StructuredOutputsParams
from .failures import HttpError

if TYPE_CHECKING:
    from ..engine.async_llm_engine import AsyncLLMEngine

_SAME = (  # fields of a body that `SamplingParams` has under the same name
    "n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop "
    "stop_token_ids bad_words include_stop_str_in_output ignore_eos min_tokens skip_special_tokens "
    "spaces_between_special_tokens truncate_prompt_tokens allowed_token_ids cache_salt use_beam_search "
    "length_penalty early_stopping prompt_logprobs"
).split()
_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # that a generation config may set
_CHECKED_ONCE = (int, float, bool, type(None), RequestOutputKind)  # types of values that are small and never change
MAX_CHOICES = 128  # of one prompt: OpenAI's limit of n
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerateBody(msgspec.Struct, kw_only=True):
    """The fields that all requests to generate have. Those that OpenAI's API does not have are vLLM's."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    cache_salt: str | None = None
    priority: int = 0
    request_id: Annotated[str, msgspec.Meta(max_length=256)] | None = None  # each event of a stream has it
    user: str | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    vllm_xargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # in log probabilities
    add_special_tokens: bool | None = None

    @property
    def num_choices(self) -> int:
        return self.n or 1

    @property
    def width(self) -> int:
        """Answers that are computed for a prompt."""
        return max(self.num_choices, self.best_of or 1)


class CompletionBody(GenerateBody, kw_only=True):
    prompt: str | list[str | int | list[int]] | None = None  # one or several, each text or token ids
    echo: bool | None = False
    logprobs: int | None = None
    suffix: str | None = None


class ChatBody(GenerateBody, kw_only=True):
    messages: list[dict[str, Any]]
    echo: bool | None = False
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


def sampling_params(engine: AsyncLLMEngine, body: GenerateBody, **more: Any) -> SamplingParams:
    """The parameters that a body asks for. What it leaves out is as the checkpoint's generation config has it.

    Args:
        more: fields that are not in the body under the same name; None: leave the default.

    Raises:
        InvalidArgumentError: a value is out of range.
        HttpError: the form of the answer is asked for in no known way.
    """
    if body.width > MAX_CHOICES:
        raise HttpError(400, f"n and best_of may be at most {MAX_CHOICES}", "n")
    given = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    given |= {name: value for name, value in more.items() if value is not None}
    if "structured_outputs" not in given and (form := form_of(body)) is not None:
        given["structured_outputs"] = form
    if body.logit_bias:
        given["logit_bias"] = {token: min(100.0, max(-100.0, bias)) for token, bias in body.logit_bias.items()}
    if body.vllm_xargs:
        given["extra_args"] = body.vllm_xargs
    whole = not body.stream or body.use_beam_search or (body.best_of or 0) > body.num_choices
    given["output_kind"] = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.DELTA
    given.setdefault("max_tokens", None)
    config = engine.generation_config
    usual = _usual(*((name, config[name]) for name in (*_DEFAULTS, "do_sample") if name in config))
    if body.use_beam_search:
        usual = {"temperature": 0.0}  # beams are ranked by the model's own probabilities
    values = {**usual, **given}
    if all(type(value) in _CHECKED_ONCE for value in values.values()):
        found = copy.copy(_checked(**values))  # to check them all takes as long as to encode a prompt
        found.stop, found.stop_token_ids = [], []  # lists of its own
        return found
    return SamplingParams(**values)


@functools.lru_cache(maxsize=64, typed=True)
def _checked(**values: Any) -> SamplingParams:
    return SamplingParams(**values)


@functools.lru_cache(maxsize=8)
def _usual(*config: tuple[str, Any]) -> dict[str, Any]:
    """The values of `_DEFAULTS` under these entries of a generation config."""
    found = default_sampling_params(dict(config))
    return {name: getattr(found, name) for name in _DEFAULTS}


def form_of(body: GenerateBody) -> StructuredOutputsParams | None:
    """The form that the answer must have."""
    given: dict[str, Any] = dict(body.structured_outputs or {})
    for name, ours in _GUIDED.items():
        if (value := getattr(body, name)) is not None:
            given[ours] = value
    asked = body.response_format
    if asked is not None:
        kind = asked.get("type")
        if kind == "json_object":
            given["json_object"] = True
        elif kind == "json_schema":
            described = asked.get("json_schema")
            schema = described.get("schema") if isinstance(described, dict) else None
            if not isinstance(schema, dict):
                raise HttpError(400, "response_format has no json_schema with a schema", "response_format")
            given["json"] = schema
        elif kind == "structural_tag":
            given["structural_tag"] = codec.dumps({name: asked[name] for name in asked if name != "type"})
        elif kind in ("grammar", "regex", "choice"):
            given[kind] = asked.get(kind)
        elif kind != "text":
            known = "text, json_object, json_schema, structural_tag, grammar, regex, choice"
            raise HttpError(
                400, f"the type of response_format is {kind!r}; it must be one of {known}", "response_format"
            )
    return StructuredOutputsParams(**given) if given else None


def listed_inputs(given: str | list[str | int | list[int]], field: str) -> list[str | list[int]]:
    """The entries of a field that holds one or several, each text or token ids.

    Raises:
        HttpError: there is none, or they are mixed up.
    """
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(one, int) for one in given):
        return [given]  # type: ignore[list-item]
    if not given or any(isinstance(one, int) for one in given):
        raise HttpError(400, f"{field} must be a text, a list of token ids, or a list of either", field)
    return given  # type: ignore[return-value]
