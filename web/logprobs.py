"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

from ..engine.request.outputs import Logprob
from ..engine.text.detokenizer import PieceTable, piece_table
from ..engine.text.tokenizer import Tokenizer

_LEAST = -9999.0  # in place of minus infinity, which JSON does not have

Entry = dict[int, Logprob]


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry],
    num_top: int,
    tokenizer: Tokenizer | None = None,
    as_ids: bool = False,
) -> dict[str, Any]:
    """Of the tokens of a message. `tokenizer`: knows the bytes of tokens that are parts of a character. `as_ids`: name
    tokens by their ids."""
    content, table = [], None if tokenizer is None else piece_table(tokenizer)
    for token, entry in zip(token_ids, entries, strict=False):
        shown, *top = (_one(one, entry[one], table, as_ids) for one in (token, *_likeliest(entry, num_top)))
        content.append({**shown, "top_logprobs": top})
    return {"content": content, "refusal": None}


class TextLogprobs:
    """Log probabilities of an answer's tokens, to be taken with the parts of its text."""

    def __init__(self) -> None:
        self._tokens: list[tuple[bytes, dict[str, Any]]] = []  # that were not taken: bytes in the text, and entry

    def add(self, token_ids: Sequence[int], content: list[dict[str, Any]], tokenizer: Tokenizer | None) -> None:
        """More tokens, with their entries of `chat_logprobs`."""
        table = None if tokenizer is None else piece_table(tokenizer)
        for token, one in zip(token_ids, content, strict=False):
            self._tokens.append((bytes(one["bytes"]) if table is None else table[token], one))

    def take(self, text: str) -> list[dict[str, Any]]:
        """Those of the tokens that make up the next part of the text. Tokens before it, which are marks of the model's
        form, are dropped. All tokens are taken if their bytes do not contain the text, because it was rewritten."""
        tokens, part = self._tokens, text.encode()
        if not tokens or not part:
            return []
        ends = [*accumulate(len(own) for own, _ in tokens)]
        begin = b"".join(own for own, _ in tokens).find(part)
        first, last = bisect_right(ends, begin), bisect_left(ends, begin + len(part)) + 1
        if begin < 0:
            first, last = 0, len(tokens)
        self._tokens = tokens[last:]
        return [one for _, one in tokens[first:last]]


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry | None],
    num_top: int,
    offset: int,
    first: str = "",
    as_ids: bool = False,
) -> dict[str, Any]:
    """Of the tokens of a completion whose text begins after `offset` characters. `first`: the text of a prompt's first
    token, which has no log probability. `as_ids`: name tokens by their ids."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry in zip(token_ids, entries, strict=False):
        text, numbers = first, cast("tuple[Any, Any]", (None, None))
        if entry is not None:
            shown = (*_likeliest(entry, num_top), token)
            top = {_name(one, _text(entry[one]), as_ids): max(entry[one].logprob, _LEAST) for one in shown}
            text, numbers = _text(entry[token]), (max(entry[token].logprob, _LEAST), top)
        for column, value in zip(found.values(), (_name(token, text, as_ids), *numbers, offset), strict=True):
            column.append(value)
        offset += len(text)
    return found


def _likeliest(entry: Entry, num_top: int) -> list[int]:
    order = sorted(entry, key=lambda token: entry[token].rank or 1 << 30)
    return order if num_top < 0 else order[:num_top]


def _one(token: int, one: Logprob, table: PieceTable | None, as_ids: bool) -> dict[str, Any]:
    text = _text(one)
    own = text.encode() if table is None or "\ufffd" not in text else table[token]
    return {"token": _name(token, text, as_ids), "logprob": max(one.logprob, _LEAST), "bytes": [*own]}


def _name(token: int, text: str, as_id: bool) -> str:
    return f"token_id:{token}" if as_id else text


def _text(one: Logprob) -> str:
    return one.decoded_token or ""
