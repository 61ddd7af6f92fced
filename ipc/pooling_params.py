"""The parameters of a request to a pooling model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from .errors import Accepted, InvalidArgumentError, check_accepted, shown, suggests_names
from .params import RequestOutputKind

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify"]
MOST = 2**31 - 1  # largest number of dimensions or tokens


@suggests_names
@dataclass(frozen=True)
class LateChunkingParams:
    """How a prompt is divided under late chunking.

    Raises:
        InvalidArgumentError: a value is out of range.
    """

    chunk_size: int  # tokens of each chunk but the last one, special tokens included

    def __post_init__(self) -> None:
        if isinstance(self.chunk_size, bool) or not isinstance(self.chunk_size, int) or self.chunk_size < 1:
            raise InvalidArgumentError(f"chunk_size is {shown(self.chunk_size)}; it must be an int of at least 1")


@suggests_names
@dataclass
class PoolingParams:
    """How a prompt's hidden states become the returned vector.

    `embed` returns one vector, pooled as the checkpoint says; `token_embed` the hidden state of each token; `classify`
    the probabilities of the model's labels; `token_classify` these probabilities for each token.

    Raises:
        InvalidArgumentError: a value is out of range. The message names it and the limit.
        UnknownArgumentError: no such field.
    """

    dimensions: int | None = None  # number of leading dimensions of an embedding (Matryoshka); none: all
    use_activation: bool | None = None  # softmax or sigmoid, or length 1 of embeddings; none: as the model has it
    normalize: bool | None = None  # the older name, for embeddings
    task: PoolingTask | None = None  # none: the first task of the model
    truncate_prompt_tokens: int | None = None  # first tokens to keep, the tokenizer's included; -1: as many as fit
    late_chunking_params: LateChunkingParams | None = None  # `token_embed`: a vector for each chunk, not each token

    _accepted: ClassVar[Accepted] = {  # fields of vLLM's
        "requires_token_ids": ((True, False), "hiding a prompt's tokens"),
        "skip_reading_prefix_cache": ((True, False), "cached prefixes"),
        "output_kind": ((RequestOutputKind.FINAL_ONLY,), "outputs before the last one"),
        "step_tag_id": ((), "rewards of marked steps"),
        "returned_token_ids": ((), "rewards of chosen tokens"),
        "late_interaction_params": ((), "late interaction in the core"),
        "extra_kwargs": ((), "arguments of plugins"),
        "activation": "use_activation",
        "softmax": "use_activation",
    }

    def __post_init__(self) -> None:
        self.validate()

    def clone(self) -> PoolingParams:
        return replace(self)

    @property
    def activate(self) -> bool | None:
        """The value of `use_activation`, or of its older name `normalize`."""
        return self.normalize if self.use_activation is None else self.use_activation

    def validate(self) -> None:
        """Check every field again: fields may have been assigned since construction."""
        check_accepted(vars(self), self._accepted)
        for name, least in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InvalidArgumentError(f"{name} is {shown(value)}; it must be an int")
            if value is not None and (not least <= value <= MOST or value == 0):
                instead = ", or -1 for as many as fit" if least < 0 else ""
                limit = f"at most {MOST}" if value > MOST else f"at least 1{instead}"
                raise InvalidArgumentError(f"{name} is {shown(value)}; it must be {limit}")
        for name in ("use_activation", "normalize"):
            if (flag := getattr(self, name)) is not None and not isinstance(flag, bool):
                raise InvalidArgumentError(f"{name} is {shown(flag)}; it must be True or False")
        if None not in (self.use_activation, self.normalize) and self.use_activation != self.normalize:
            raise InvalidArgumentError(
                f"normalize is {self.normalize} and use_activation is {self.use_activation}; give one of them"
            )
        tasks, task = get_args(PoolingTask), self.task
        if task is not None and not (isinstance(task, str) and task in tasks):
            raise InvalidArgumentError(f"task is {shown(task)}; it must be one of {', '.join(tasks)}")
        late: object = self.late_chunking_params
        if late is not None and not isinstance(late, LateChunkingParams):
            raise InvalidArgumentError(f"late_chunking_params is {shown(late)}; it must be a LateChunkingParams")
