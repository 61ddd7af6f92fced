"""The methods of `LLM` for pooling models: encode, embed, classify, score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from ..ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError, RequestFailedError, shown
from ..ipc.pooling_params import PoolingParams
from .request.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from .request.prompts import Prompt, TokensPrompt, listed_prompts

if TYPE_CHECKING:
    import numpy as np

    from .llm_engine import LLMEngine
    from .text.tokenizer import Tokenizer

Progress = bool | Callable[..., Any]  # False, True, or something like the class `tqdm`


class PoolingMethods:
    """`LLM`'s methods for pooling models."""

    llm_engine: LLMEngine
    generate: Callable[..., list[RequestOutput]]
    get_tokenizer: Callable[[], Tokenizer]

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        lora_request: None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model makes of each prompt's hidden states.

        Args:
            prompts: as of `generate`.
            pooling_params: one for all prompts or one each.
            truncate_prompt_tokens, pooling_task: defaults for parameters that do not set them.

        Returns:
            One output for each prompt, in order. One that failed has no data and its `error`.

        Raises:
            InvalidRequestError: a prompt or its parameters can't be served, or the model generates.
        """
        given = pooling_params if isinstance(pooling_params, Sequence) else [pooling_params or PoolingParams()]
        params = []
        for one in given:
            if not isinstance(one, PoolingParams):
                raise InvalidArgumentError(f"pooling_params is {shown(one)}; it must be a PoolingParams")
            if None not in (one.task, pooling_task) and one.task != pooling_task:
                raise InvalidArgumentError(
                    f"pooling_task is {shown(pooling_task)}, and the task of pooling_params {one.task!r}"
                )
            keep = one.truncate_prompt_tokens or truncate_prompt_tokens
            task = cast(Any, one.task or pooling_task)
            params.append(PoolingParams(one.dimensions, one.activate, None, task, keep))
        outputs = self.generate(
            prompts,
            params if isinstance(pooling_params, Sequence) else params[0],
            use_tqdm,
            lora_request,
            tokenization_kwargs=tokenization_kwargs,
        )
        return cast("list[PoolingRequestOutput[PoolingOutput]]", outputs)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One vector for each prompt. Arguments and errors as `encode`; that of a request that failed is raised."""
        more = (use_tqdm, pooling_params, lora_request, tokenization_kwargs, truncate_prompt_tokens)
        found = self._asked("embed", prompts, *more)
        return [one.with_outputs(EmbeddingRequestOutput, EmbeddingOutput(one.outputs.data.tolist())) for one in found]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each label for each prompt. Arguments and errors as `embed`."""
        more = (use_tqdm, pooling_params, lora_request, tokenization_kwargs, truncate_prompt_tokens)
        found = self._asked("classify", prompts, *more)
        make = ClassificationRequestOutput
        return [one.with_outputs(make, ClassificationOutput(one.outputs.data.tolist())) for one in found]

    def score(
        self,
        text_1: Prompt | Sequence[Prompt],
        text_2: Prompt | Sequence[Prompt],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well two texts go together: what a cross-encoder says of the pair, or the cosine of two embeddings.

        Args:
            text_1, text_2: one and one, one and many, or as many of both. Of a cross-encoder both are text.

        Returns:
            One output for each of `text_2`.

        Raises: as `embed`.
        """
        firsts, seconds = listed_prompts(text_1), listed_prompts(text_2)
        if len(firsts) not in (1, len(seconds)) or not seconds:
            raise InvalidArgumentError(
                f"text_1 has {len(firsts)} entries and text_2 {len(seconds)}: give one and one, one and many, or as "
                "many of both"
            )
        tasks = self.llm_engine.get_supported_tasks()
        if "score" not in tasks:
            raise InvalidRequestError(f"the task is score, and this model can {', '.join(tasks)}")
        more = (use_tqdm, pooling_params, lora_request, tokenization_kwargs, truncate_prompt_tokens)
        make = ScoringRequestOutput
        if "classify" in tasks:
            if (
                truncate_prompt_tokens is not None
                or getattr(pooling_params, "truncate_prompt_tokens", None) is not None
            ):
                raise NotSupportedError("truncate_prompt_tokens is not supported for pairs yet; leave it out")
            pairs = [
                self._pair(one, two) for one, two in zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)
            ]
            found = self._asked("classify", pairs, *more)
            return [one.with_outputs(make, ScoringOutput(float(one.outputs.data[0]))) for one in found]
        found = self._asked("embed", firsts + seconds, *more)
        ones, twos = found[: len(firsts)], found[len(firsts) :]
        scored = []
        for one, two in zip(ones * (len(twos) // len(ones)), twos, strict=True):
            score = ScoringOutput(_cosine(one.outputs.data, two.outputs.data))
            ids = [*one.prompt_token_ids, *two.prompt_token_ids]
            scored.append(make(two.request_id, score, ids, True, one.num_cached_tokens + two.num_cached_tokens, "stop"))
        return scored

    def _asked(
        self, task: str, prompts: Any, use_tqdm: Progress, params: Any, lora: None, kwargs: Any, keep: int | None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        found = self.encode(
            prompts,
            params,
            truncate_prompt_tokens=keep,
            use_tqdm=use_tqdm,
            lora_request=lora,
            pooling_task=task,
            tokenization_kwargs=kwargs,
        )
        for at, one in enumerate(found):
            if one.error is not None:
                raise type(one.error)(f"prompt {at}: {one.error}")
            if one.finish_reason != "stop":
                raise RequestFailedError(f"prompt {at}: it was ended ({one.finish_reason}) before its data came")
        return found

    def _pair(self, one: Any, two: Any) -> TokensPrompt:
        if not (isinstance(one, str) and isinstance(two, str)):
            raise InvalidRequestError("a cross-encoder scores pairs of text; one of a pair is something else")
        token_ids, types = self.get_tokenizer().encode_pair(one, two)
        return TokensPrompt(prompt_token_ids=token_ids, token_type_ids=types)


def _cosine(one: np.ndarray, two: np.ndarray) -> float:
    import numpy as np

    norms = float(np.linalg.norm(one)) * float(np.linalg.norm(two))
    return float(one @ two) / norms if norms else 0.0
