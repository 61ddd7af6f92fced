"""A request in flight whose output is vectors instead of tokens."""

from __future__ import annotations

from ...ipc.messages import Pooled
from .outputs import PoolingOutput, PoolingRequestOutput
from .request_state import RequestState


class PoolingState(RequestState):
    """The state of a request to a pooling model."""

    vectors: Pooled | None = None

    def output(self) -> PoolingRequestOutput[PoolingOutput]:  # type: ignore[override]  # as vLLM's step() mixes them
        import numpy as np

        (completion,), data = self.completions, np.zeros(0, np.float32)
        if self.vectors is not None:
            data = np.frombuffer(self.vectors.values, "<f4").reshape(self.vectors.shape)
        return PoolingRequestOutput(
            self.source.request_id,
            PoolingOutput(data),
            self.source.prompt_token_ids,
            self.finished,
            self.num_cached_tokens or 0,
            completion.finish_reason,
            completion.error,
        )
