"""The parameters of a request to a pooling model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from .errors import InvalidArgumentError, shown, suggests_names

PoolingTask = Literal["embed", "token_embed", "classify", "token_classify"]
MOST = 2**31 - 1  # dimensions or tokens


@suggests_names
@dataclass
class PoolingParams:
    """Which vector is computed from a prompt's hidden states.

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
        """The value of `use_activation`, or else of its older name `normalize`."""
        return self.normalize if self.use_activation is None else self.use_activation

    def validate(self) -> None:
        """Check every field again: fields may have been assigned since construction."""
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
