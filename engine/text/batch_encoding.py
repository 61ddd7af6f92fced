"""The result of calling a tokenizer, in the form of transformers: truncated, padded, as lists or arrays.

The Rust library truncates and pads only after a setting of the tokenizer, which all engines of a process share. So the
texts are encoded whole, and each row selects tokens from its encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ...ipc.errors import InvalidArgumentError, NotSupportedError, shown

if TYPE_CHECKING:
    from tokenizers import Encoding

_PADDING = -1  # in `Row.kept`: a token of padding
_PAD_VALUES = {"type_ids": 0, "attention_mask": 0, "special_tokens_mask": 1, "offsets": (0, 0)}
_STRATEGIES = ("longest_first", "only_first", "only_second")


class Row(NamedTuple):
    """One text: its encoding, and the indices of the tokens that are kept."""

    encoding: Encoding
    kept: list[int]
    pad_token: str | None
    pad_id: int | None

    def column(self, name: str) -> list[Any]:
        values = getattr(self.encoding, name)
        pad = {**_PAD_VALUES, "ids": self.pad_id, "tokens": self.pad_token}.get(name)
        return [pad if at == _PADDING else values[at] for at in self.kept]


class BatchEncoding(dict[str, Any]):
    """Columns under the names of transformers, which are attributes too: `input_ids`, `attention_mask` …"""

    def __init__(self, columns: dict[str, Any], rows: Sequence[Row]) -> None:
        super().__init__(columns)
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"there is no {name!r}; the columns are {', '.join(self)}")

    def tokens(self, batch_index: int = 0) -> list[str]:
        """The spelling of each token in the vocabulary."""
        return self._rows[batch_index].column("tokens")

    def word_ids(self, batch_index: int = 0) -> list[int | None]:
        """The number of the word that each token belongs to; None for special tokens."""
        return self._rows[batch_index].column("word_ids")

    def sequence_ids(self, batch_index: int = 0) -> list[int | None]:
        """Which text of a pair each token belongs to; None for special tokens."""
        return self._rows[batch_index].column("sequence_ids")


def truncated(encoding: Encoding, limit: int, strategy: str | bool, side: str) -> list[int]:
    """The indices of at most `limit` tokens. Special tokens of the post-processor are always kept."""
    strategy = _STRATEGIES[0] if strategy is True else strategy
    _check("truncation", strategy, _STRATEGIES)
    sequences = encoding.sequence_ids
    texts = [[at for at, sequence in enumerate(sequences) if sequence == which] for which in (0, 1)]
    lengths = [len(text) for text in texts]
    excess = len(sequences) - limit
    if excess <= 0:
        return list(range(len(sequences)))
    if (room := sum(lengths) - excess) < 0:
        raise InvalidArgumentError(f"max_length is {limit}, but there are {limit - room} special tokens")
    if strategy == "longest_first":
        shorter = min(*lengths, room // 2)
        lengths = [room - shorter, shorter] if lengths[0] > lengths[1] else [shorter, room - shorter]
    else:
        which = _STRATEGIES.index(strategy) - 1
        if excess >= lengths[which]:
            raise InvalidArgumentError(
                f"truncation={strategy!r} can't remove {excess} tokens of a text of {lengths[which]}"
            )
        lengths[which] -= excess
    both = zip(texts, lengths, strict=True)
    dropped = {at for text, length in both for at in (text[length:] if side == "right" else text[: len(text) - length])}
    return [at for at in range(len(sequences)) if at not in dropped]


def pad(rows: Iterable[Row], width: int, side: str) -> list[Row]:
    """The rows with padding up to `width` tokens."""
    _check("padding_side", side, ("right", "left"))
    padded = []
    for row in rows:
        if row.pad_id is None:
            raise InvalidArgumentError("padding needs a pad token; set one, such as tokenizer.pad_token = '</s>'")
        padding = [_PADDING] * (width - len(row.kept))
        padded.append(row._replace(kept=padding + row.kept if side == "left" else row.kept + padding))
    return padded


def width_of(rows: Sequence[Row], padding: str | bool, limit: int | None, multiple: int | None) -> int | None:
    """The number of tokens to pad to; None: no padding."""
    padding = ("do_not_pad", "longest")[padding] if isinstance(padding, bool) else padding
    _check("padding", padding, ("longest", "max_length", "do_not_pad"))
    width = {"longest": max((len(row.kept) for row in rows), default=0), "max_length": limit}.get(padding)
    return width if width is None or not multiple else -(-width // multiple) * multiple


def as_arrays(columns: dict[str, Any], form: str) -> dict[str, Any]:
    """The columns as numpy arrays."""
    import numpy as np

    if form != "np":
        raise NotSupportedError(f"return_tensors is {shown(form)}; a frontend has no torch, so only 'np' is supported")
    if len({len(ids) for ids in columns["input_ids"]}) > 1:
        raise InvalidArgumentError("texts of different lengths make no array; set padding=True")
    return {name: np.asarray(values) for name, values in columns.items()}


def _check(name: str, value: Any, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidArgumentError(f"{name} is {shown(value)}; it must be one of {', '.join(known)}")
