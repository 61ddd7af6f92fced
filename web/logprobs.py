"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.request.outputs import Logprob
from ..engine.text.detokenizer import PieceTable, piece_table
from ..engine.text.tokenizer import Tokenizer

_LEAST = -9999.0  # in place of minus infinity, which JSON does not have

Entry = dict[int, Logprob]


def chat_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry], num_top: int, tokenizer: Tokenizer | None = None
) -> dict[str, Any]:
    """Of the tokens of a message. `tokenizer`: knows the bytes of tokens that are parts of a character."""
    content, table = [], None if tokenizer is None else piece_table(tokenizer)
    for token, entry in zip(token_ids, entries, strict=False):
        shown, *top = (_one(one, entry[one], table) for one in (token, *_likeliest(entry, num_top)))
        content.append({**shown, "top_logprobs": top})
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry | None], num_top: int, offset: int, first: str = ""
) -> dict[str, Any]:
    """Of the tokens of a completion whose text begins after `offset` characters. `first`: the text of a prompt's first
    token, which has no log probability."""
    found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, entry in zip(token_ids, entries, strict=False):
        row: tuple[str, Any, Any] = (first, None, None)
        if entry is not None:
            shown = (entry[one] for one in (*_likeliest(entry, num_top), token))
            top = {_text(one): max(one.logprob, _LEAST) for one in shown}
            row = (_text(entry[token]), max(entry[token].logprob, _LEAST), top)
        for column, value in zip(found.values(), (*row, offset), strict=True):
            column.append(value)
        offset += len(row[0])
    return found


def _likeliest(entry: Entry, num_top: int) -> list[int]:
    order = sorted(entry, key=lambda token: entry[token].rank or 1 << 30)
    return order if num_top < 0 else order[:num_top]


def _one(token: int, one: Logprob, table: PieceTable | None) -> dict[str, Any]:
    text = _text(one)
    own = text.encode() if table is None or "\ufffd" not in text else table[token]
    return {"token": text, "logprob": max(one.logprob, _LEAST), "bytes": [*own]}


def _text(one: Logprob) -> str:
    return one.decoded_token or ""
