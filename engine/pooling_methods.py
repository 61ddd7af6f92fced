"""The methods of `LLM` for pooling models: encode, embed, classify, score."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast

from ..ipc.adapters import LoRARequest
from ..ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError, shown
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
from .request_queue import Progress
from .text.chat_media import plain_prompt

if TYPE_CHECKING:
    import numpy as np

    from .llm_engine import LLMEngine
    from .text.tokenizer import Tokenizer

OnError = Literal["raise", "return"]


class ScoreMultiModalParam(TypedDict):
    """An entry of a score: parts of a message, such as ``{"type": "image_url", "image_url": {"url": …}}``."""

    content: list[dict[str, Any]]


def check_on_error(given: object) -> None:
    if given not in ("raise", "return"):
        raise InvalidArgumentError(f"on_error is {shown(given)}; it must be 'raise' or 'return'")


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
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        pooling_task: str | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        on_error: OnError = "raise",
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model makes of each prompt's hidden states.

        Args:
            prompts: as of `generate`.
            pooling_params: one for all prompts or one each.
            lora_request: as of `generate`; for models that are not encoders.
            truncate_prompt_tokens, pooling_task: defaults for parameters that do not set them.
            on_error: ``"raise"``, or ``"return"``: the output of a request that failed has no data and its `error`.

        Returns:
            One output for each prompt, in order.

        Raises:
            InvalidRequestError: a prompt or its parameters can't be served, or the model generates.
            MainspringError: as `generate`, a request failed while it ran; its `outputs` are the outputs of all.
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
            params.append(replace(one, task=task, truncate_prompt_tokens=keep))
        outputs = self.generate(
            prompts,
            params if isinstance(pooling_params, Sequence) else params[0],
            use_tqdm,
            lora_request,
            tokenization_kwargs=tokenization_kwargs,
            on_error=on_error,
        )
        return cast("list[PoolingRequestOutput[PoolingOutput]]", outputs)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput] | list[PoolingRequestOutput[PoolingOutput]]:
        """One vector for each prompt, or, if `pooler_config` has the task token_embed, one for each token or chunk, as
        of `encode`. Arguments and errors as `encode`; `outputs` of an error are those of `encode`."""
        more = (use_tqdm, pooling_params, lora_request, tokenization_kwargs, truncate_prompt_tokens)
        if self._by_token:
            return self._asked("token_embed", prompts, *more)
        found = self._asked("embed", prompts, *more)
        return [one.with_outputs(EmbeddingRequestOutput, EmbeddingOutput(one.outputs.data.tolist())) for one in found]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """The probability of each label for each prompt. Arguments and errors as `embed`."""
        more = (use_tqdm, pooling_params, lora_request, tokenization_kwargs, truncate_prompt_tokens)
        found = self._asked("classify", prompts, *more)
        make = ClassificationRequestOutput
        return [one.with_outputs(make, ClassificationOutput(one.outputs.data.tolist())) for one in found]

    def reward(
        self,
        prompts: Prompt | Sequence[Prompt],
        /,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The scores of each token that a reward model gives. Arguments and errors as `embed`."""
        return self._asked("token_classify", prompts, use_tqdm, pooling_params, lora_request, tokenization_kwargs, None)

    def score(
        self,
        text_1: Prompt | ScoreMultiModalParam | Sequence[Prompt | ScoreMultiModalParam],
        text_2: Prompt | ScoreMultiModalParam | Sequence[Prompt | ScoreMultiModalParam],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well two texts go together: what a cross-encoder says of the pair, or the cosine of two embeddings.
        If `pooler_config` has the task token_embed, it is their late interaction: for each token of `text_1` the
        largest product with a token of `text_2`, summed.

        Args:
            text_1, text_2: one and one, one and many, or as many of both. Of a cross-encoder both are text. A dict with
                ``content`` has parts as those of a message. Alone, each of its parts is an entry; in a list it is one.
            chat_template: for cross-encoders: makes one text of the two, which are messages of the roles ``query`` and
                ``document``. None: the tokenizer makes a pair of them.

        Returns:
            One output for each of `text_2`.

        Raises: as `embed`. An index in a message counts the pairs, or all of `text_1` and then `text_2`.
        """
        firsts, seconds = score_entries(text_1), score_entries(text_2)
        if len(firsts) not in (1, len(seconds)) or not seconds:
            raise InvalidArgumentError(
                f"text_1 has {len(firsts)} entries and text_2 {len(seconds)}: give one and one, one and many, or as "
                "many of both"
            )
        tasks, tokenizer = self.llm_engine.get_supported_tasks(), self.llm_engine.tokenizer
        if "score" not in tasks:
            raise InvalidRequestError(f"the task is score, and this model can {', '.join(tasks)}")
        firsts, seconds = ([entry_prompt(tokenizer, one) for one in entries] for entries in (firsts, seconds))
        more = (use_tqdm, pooling_params, lora_request, tokenization_kwargs, truncate_prompt_tokens)
        make = ScoringRequestOutput
        if "classify" in tasks:
            if (truncate_prompt_tokens, getattr(pooling_params, "truncate_prompt_tokens", None)) != (None, None):
                raise NotSupportedError("truncate_prompt_tokens is not supported for pairs yet; leave it out")
            pairs = [
                pair_prompt(self.get_tokenizer(), one, two, chat_template)
                for one, two in zip(firsts * (len(seconds) // len(firsts)), seconds, strict=True)
            ]
            found = self._asked("classify", pairs, *more)
            return [one.with_outputs(make, ScoringOutput(float(one.outputs.data[0]))) for one in found]
        found = self._asked("token_embed" if self._by_token else "embed", firsts + seconds, *more)
        similarity = late_interaction if self._by_token else cosine
        ones, twos = found[: len(firsts)], found[len(firsts) :]
        scored = []
        for one, two in zip(ones * (len(twos) // len(ones)), twos, strict=True):
            score = ScoringOutput(similarity(one.outputs.data, two.outputs.data))
            ids = [*one.prompt_token_ids, *two.prompt_token_ids]
            scored.append(make(two.request_id, score, ids, True, one.num_cached_tokens + two.num_cached_tokens, "stop"))
        return scored

    def _asked(
        self, task: str, prompts: Any, use_tqdm: Progress, params: Any, lora: Any, kwargs: Any, keep: int | None
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        return self.encode(
            prompts,
            params,
            truncate_prompt_tokens=keep,
            use_tqdm=use_tqdm,
            lora_request=lora,
            pooling_task=task,
            tokenization_kwargs=kwargs,
        )

    @property
    def _by_token(self) -> bool:
        """Whether embeddings are those of tokens."""
        return self.llm_engine.get_supported_tasks()[0] == "token_embed"


def score_entries(given: Any) -> list[Any]:
    """One or several entries of a score, as a list. Of one dict with ``content`` each part is an entry."""
    if isinstance(given, Mapping) and isinstance(given.get("content"), (list, tuple)):
        return [{"content": [part]} for part in given["content"]]
    return listed_prompts(given)


def entry_prompt(tokenizer: Tokenizer | None, entry: Any) -> Any:
    """The prompt of an entry of a score. Raises: as `plain_prompt`."""
    if not isinstance(entry, Mapping) or "content" not in entry:
        return entry
    return plain_prompt([entry], {} if tokenizer is None else tokenizer.media)


def pair_prompt(tokenizer: Tokenizer, one: Any, two: Any, chat_template: str | None = None) -> TokensPrompt:
    """The prompt of two texts for a cross-encoder.

    Raises:
        InvalidRequestError: one of them is no text.
    """
    if not (isinstance(one, str) and isinstance(two, str)):
        raise InvalidRequestError("a cross-encoder scores pairs of text; one of a pair is something else")
    if chat_template is not None:
        messages = [{"role": "query", "content": one}, {"role": "document", "content": two}]
        text = cast(str, tokenizer.apply_chat_template(messages, chat_template=chat_template, tokenize=False))
        return TokensPrompt(prompt_token_ids=tokenizer.encode(text))
    token_ids, types = tokenizer.encode_pair(one, two)
    return TokensPrompt(prompt_token_ids=token_ids, token_type_ids=types)


def late_interaction(one: np.ndarray, two: np.ndarray) -> float:
    """For each token of the first text the largest product with a token of the second, summed."""
    import numpy as np

    return float((np.asarray(one) @ np.asarray(two).T).max(axis=1).sum())


def cosine(one: np.ndarray, two: np.ndarray) -> float:
    """The cosine of two embeddings; 0 if one of them is 0."""
    import numpy as np

    norms = float(np.linalg.norm(one)) * float(np.linalg.norm(two))
    return float(one @ two) / norms if norms else 0.0
