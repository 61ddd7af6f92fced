"""What a pooling model can give, as the planner must know it."""

from __future__ import annotations

import msgspec

from ...ipc.errors import InvalidRequestError
from ...ipc.messages import Pooling

MAX_POOLED_BYTES = 128 << 20  # of one request's vectors: half of what a message can carry


class PoolingFacts(msgspec.Struct, frozen=True, array_like=True):
    tasks: list[str]
    hidden_size: int
    width: int  # numbers of an embedding
    has_head: bool  # it classifies, with a head of its own
    last_row_alone: bool  # an embedding needs only the last token's hidden state

    def check(self, pooling: Pooling, num_tokens: int) -> None:
        """Raises `InvalidRequestError` for what this model can't give for a prompt of so many tokens."""
        if pooling.task not in self.tasks or pooling.task == "score":
            raise InvalidRequestError(f"the task is {pooling.task!r:.80}; this model can {', '.join(self.tasks)}")
        width = self.width if pooling.task == "embed" else self.hidden_size
        if not 0 <= pooling.dimensions <= (0 if self.has_head else width):
            limit = "none can be given for a classification" if self.has_head else f"the model's vectors have {width}"
            raise InvalidRequestError(f"dimensions is {pooling.dimensions}; {limit}")
        if not 0 <= pooling.second < num_tokens:
            raise InvalidRequestError(f"the second text begins at {pooling.second}, of {num_tokens} tokens")
        if pooling.task.startswith("token_") and num_tokens * width * 4 > MAX_POOLED_BYTES:
            raise InvalidRequestError(
                f"{num_tokens} vectors of {width} numbers are more than one request may bring, "
                f"{MAX_POOLED_BYTES >> 20} MiB"
            )

    def keeps_rows(self, pooling: Pooling) -> bool:
        """Whether the hidden states of all a prompt's tokens are needed, not the last one's alone."""
        return pooling.task != "embed" or not self.last_row_alone
