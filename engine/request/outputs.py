"""The outputs of a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ...ipc.errors import MainspringError, RequestFailedError
from ...ipc.messages import FinishReason

if TYPE_CHECKING:
    import numpy as np

    from .late_chunking import LateChunkingMetadata


@dataclass(slots=True)
class Logprob:
    """The log probability of a token at a position, of the model's logits before penalties, biases and temperature."""

    logprob: float
    rank: int | None = None  # 1: the likeliest
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's `n` completions.

    `token_ids` holds every token, also the one that ended it; `text` leaves that one out, and the stop string too,
    unless `include_stop_str_in_output`. With output kind DELTA both hold only what is new.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None  # for each token: itself and the likeliest ones
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # stop token or string; none for the tokenizer's EOS token; an error's text
    lora_request: Any = None
    error: MainspringError | None = None  # behind finish reason "error"
    # With `enable_return_routed_experts`, at the end: which experts computed each token of prompt and output but the
    # last: uint8, or uint16 above 256 experts, [prompt and output tokens - 1, layers of the model, experts of a token].
    # Layers without experts have zeros. A completion that was aborted has those of the tokens computed so far.
    routed_experts: np.ndarray | None = field(default=None, compare=False)

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request: seconds on the clock of `time.monotonic`.

    `arrival_time` is as the caller gave it. The core measures `first_scheduled_time` and `first_token_time`, the
    frontend the others. With `n` > 1 first times are those of the first completion, last times those of the last one.
    """

    arrival_time: float
    last_token_time: float | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    time_in_queue: float | None = None  # seconds between the core taking the request and its first step
    finished_time: float | None = None
    num_preemptions: int = 0


@dataclass(slots=True)
class RequestOutput:
    """A request's completions so far, in order of their index."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[int, Logprob] | None] | None  # None for the first token; with DELTA shown once
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    num_cached_tokens: int | None = None  # prompt tokens found in the prefix cache


@dataclass(slots=True)
class PoolingOutput:
    """The result of a pooling model for a prompt, float32: ``[width]``, or ``[tokens, width]`` for the tasks that have
    a result for each token; empty if the request failed. Always numpy, because frontends have no torch."""

    data: np.ndarray


@dataclass(slots=True)
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each label, or logits without an activation."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """The similarity of two texts."""

    score: float


O = TypeVar("O")  # noqa: E741  # of output
P = TypeVar("P", bound="PoolingRequestOutput[Any]")


@dataclass
class PoolingRequestOutput(Generic[O]):
    """The one output of a request to a pooling model."""

    request_id: str
    outputs: O
    prompt_token_ids: list[int]
    finished: bool
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    finish_reason: FinishReason | None = None  # "stop", "abort" or "error"
    error: MainspringError | None = None  # behind finish reason "error"
    late_chunking: LateChunkingMetadata | None = None  # the chunks, under late chunking

    def with_outputs(self, kind: type[P], outputs: Any) -> P:
        """The same output, with other `outputs`."""
        return kind(**{**vars(self), "outputs": outputs})


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """Of `LLM.embed`."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """Of `LLM.classify`."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """Of `LLM.score`; prompt tokens are those of both texts."""


def num_tokens_of(output: RequestOutput | PoolingRequestOutput[Any]) -> int:
    """The number of tokens in an output."""
    return 0 if isinstance(output, PoolingRequestOutput) else sum(len(one.token_ids) for one in output.outputs)


def raise_first_failure(outputs: Sequence[Any]) -> None:
    """Raise the error of the first request that failed, under its own type and with the `outputs` of all requests."""
    failed = [(at, error) for at, output in enumerate(outputs) for error in _failures_of(output)[:1]]
    if failed:
        at, error = failed[0]
        more = f" ({len(failed)} of {len(outputs)} prompts failed)" if len(failed) > 1 else ""
        raised = type(error)(f"prompt {at}: {error}{more}" if len(outputs) > 1 else str(error))
        raised.outputs = outputs
        raise raised


def _failures_of(output: RequestOutput | PoolingRequestOutput[Any]) -> list[MainspringError]:
    """As `errors_of`. A pooling request that was aborted has failed too, because it has no data."""
    if isinstance(output, PoolingRequestOutput) and output.finish_reason == "abort":
        return [RequestFailedError("it was ended (abort) before its data came")]
    return errors_of(output)


def errors_of(output: RequestOutput | PoolingRequestOutput[Any]) -> list[MainspringError]:
    """The errors of a request, or of its completions."""
    if isinstance(output, PoolingRequestOutput):
        return [] if output.error is None else [output.error]
    return [one.error for one in output.outputs if one.error is not None]
