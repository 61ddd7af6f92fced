"""The token budget of a step, which is cut for a while when a device lacks memory."""

from __future__ import annotations

from ...ipc.config import SchedulerConfig

GROW_AFTER_STEPS = 64  # successful steps after which a budget that was cut is doubled


class Budget:
    """Most tokens that a step computes: `tokens` of all requests, `chunk` of one.

    Without chunked prefill, a prompt is computed in one step, whatever the budget is cut to.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.full = config.max_num_batched_tokens
        self.chunked = config.enable_chunked_prefill
        self._full_chunk = (config.long_prefill_token_threshold if self.chunked else 0) or self.full
        self.cut(self.full)

    def cut(self, tokens: int) -> None:
        """Let steps compute at most so many tokens, until enough of them succeeded."""
        self.tokens = min(tokens, self.full)
        self.chunk = min(self._full_chunk, self.tokens) if self.chunked else self.full
        self.steps_until_grown = GROW_AFTER_STEPS

    def step_succeeded(self) -> None:
        if self.tokens < self.full:
            self.steps_until_grown -= 1
            if self.steps_until_grown == 0:
                self.cut(2 * self.tokens)
