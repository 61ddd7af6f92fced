"""Late chunking: a prompt is computed as a whole, and each of its chunks gets the mean of its tokens' vectors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...ipc.errors import InvalidRequestError, NotSupportedError

if TYPE_CHECKING:
    import numpy as np

    from ..text.tokenizer import Tokenizer


@dataclass(frozen=True)
class LateChunk:
    """A chunk of a prompt."""

    token_range: tuple[int, int]
    char_range: tuple[int, int] | None  # None: only special tokens


@dataclass(frozen=True)
class LateChunkingMetadata:
    """The chunks of a prompt, as its vectors are ordered."""

    chunk_size: int
    input_tokens: int
    chunks: list[LateChunk]
    strategy: str = "fixed_tokens"


def chunks_of(
    text: Any, token_ids: Sequence[int], chunk_size: int, tokenizer: Tokenizer | None, special: bool
) -> LateChunkingMetadata:
    """The chunks of a prompt of this text and these token ids, by `chunk_size` tokens each.

    Raises:
        InvalidRequestError: the prompt is not text, or is truncated.
        NotSupportedError: the tokenizer does not say where its tokens are in the text.
    """
    if not text or not isinstance(text, str):
        raise InvalidRequestError("late_chunking_params needs a prompt that is text")
    backend = getattr(tokenizer, "backend", None)
    if backend is None:
        raise NotSupportedError("late_chunking_params needs a tokenizer.json, which this model does not have")
    encoding = backend.encode(text, add_special_tokens=special)
    if encoding.ids != list(token_ids):
        raise InvalidRequestError("late_chunking_params is given with truncate_prompt_tokens; give one of them")
    chunks = []
    for start in range(0, len(token_ids), chunk_size):
        end = min(start + chunk_size, len(token_ids))
        within = [(a, b) for a, b in encoding.offsets[start:end] if a < b]
        chars = (min(a for a, _ in within), max(b for _, b in within)) if within else None
        chunks.append(LateChunk((start, end), chars))
    return LateChunkingMetadata(chunk_size, len(token_ids), chunks)


def chunk_vectors(rows: np.ndarray, chunking: LateChunkingMetadata, normalize: bool) -> np.ndarray:
    """The vector of each chunk, float32 ``[chunks, width]``, from those of the tokens, ``[tokens, width]``."""
    import numpy as np

    means = np.stack([rows[start:end].mean(0) for start, end in (one.token_range for one in chunking.chunks)])
    return means / np.maximum(np.linalg.norm(means, axis=1, keepdims=True), 1e-12) if normalize else means
