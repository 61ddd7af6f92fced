"""What a user asks of one request to a pooling model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from .errors import InvalidArgumentError, suggests_names

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify"]


@suggests_names
@dataclass
class PoolingParams:
    """Which vector is made of a prompt's hidden states.

    `embed` is one vector, as the checkpoint pools; `token_embed` the hidden state of each token; `classify` the
    probabilities of the model's labels, `token_classify` those of each token.

    Raises:
        InvalidArgumentError: a value is out of range. The message names it and the limit.
        UnknownArgumentError: no such field.
    """

    dimensions: int | None = None  # of an embedding, the first ones (Matryoshka); none: all
    use_activation: bool | None = (
        None  # softmax or sigmoid of scores, length 1 of embeddings; none: as the model has it
    )
    normalize: bool | None = None  # the older name, for embeddings
    task: PoolingTask | None = None  # none: the model's first
    truncate_prompt_tokens: int | None = (
        None  # keep the first so many, with what the tokenizer adds; -1: as many as fit
    )

    def __post_init__(self) -> None:
        self.validate()

    def clone(self) -> PoolingParams:
        return replace(self)

    @property
    def activate(self) -> bool | None:
        """Either name's value."""
        return self.normalize if self.use_activation is None else self.use_activation

    def validate(self) -> None:
        """Check every field again: fields may have been assigned since construction."""
        for name, least in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
                raise InvalidArgumentError(f"{name} is {value!r}; it must be an int")
            if value is not None and (value < least or value == 0):
                instead = ", or -1 for as many as fit" if least < 0 else ""
                raise InvalidArgumentError(f"{name} is {value}; it must be at least 1{instead}")
        for name in ("use_activation", "normalize"):
            if getattr(self, name) not in (None, True, False):
                raise InvalidArgumentError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        if None not in (self.use_activation, self.normalize) and self.use_activation != self.normalize:
            raise InvalidArgumentError(
                f"normalize is {self.normalize} and use_activation is {self.use_activation}; give one of them"
            )
        if self.task is not None and self.task not in get_args(PoolingTask):
            raise InvalidArgumentError(f"task is {self.task!r}; it must be one of {', '.join(get_args(PoolingTask))}")
