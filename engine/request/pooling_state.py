"""A request in flight whose output is vectors instead of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ...ipc.messages import Pooled
from .outputs import PoolingOutput, PoolingRequestOutput
from .request_state import RequestState

if TYPE_CHECKING:
    import numpy as np


class PoolingState(RequestState):
    """The state of a request to a pooling model."""

    vectors: Pooled | None = None
    data_of: Callable[[np.ndarray], Any] = staticmethod(lambda array: array)  # its result is what the user sees

    def output(self) -> PoolingRequestOutput[PoolingOutput]:  # type: ignore[override]  # as vLLM's step() mixes them
        import numpy as np

        (completion,), data = self.completions, np.zeros(0, np.float32)
        if self.vectors is not None:
            data = np.frombuffer(self.vectors.values, "<f4").reshape(self.vectors.shape).copy()  # may be written to
        source, chunking = self.source, None
        if data.size and source.pooling is not None and source.chunking is not None:
            from .late_chunking import chunk_vectors

            chunking = source.chunking
            data = chunk_vectors(data, chunking, source.pooling.activate is not False)
        return PoolingRequestOutput(
            self.source.request_id,
            PoolingOutput(self.data_of(data)),
            self.source.prompt_token_ids,
            self.finished,
            self.num_cached_tokens or 0,
            completion.finish_reason,
            completion.error,
            chunking,
        )
