"""Log probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.request.outputs import Logprob

_LEAST = -9999.0  # in place of minus infinity, which JSON does not have

Entry = dict[int, Logprob]


def chat_logprobs(token_ids: Sequence[int], entries: Sequence[Entry], num_top: int) -> dict[str, Any]:
    """Of the tokens of a message."""
    content = []
    for token, entry in zip(token_ids, entries, strict=False):
        likeliest = sorted(entry.values(), key=lambda one: one.rank or 1 << 30)[:num_top]
        content.append({**_one(entry[token]), "top_logprobs": [_one(one) for one in likeliest]})
    return {"content": content, "refusal": None}


def completion_logprobs(
    token_ids: Sequence[int], entries: Sequence[Entry | None], num_top: int, offset: int, first: str = ""
) -> dict[str, Any]:
    """Of the tokens of a completion whose text begins after `offset` characters. `first`: the text of a prompt's first
    token, which has no log probability."""
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token, entry in zip(token_ids, entries, strict=False):
        text = first if entry is None else _text(entry[token])
        tokens.append(text)
        values.append(None if entry is None else max(entry[token].logprob, _LEAST))
        top = None
        if entry is not None:
            likeliest = sorted(entry.values(), key=lambda one: one.rank or 1 << 30)[:num_top]
            top = {_text(one): max(one.logprob, _LEAST) for one in [*likeliest, entry[token]]}
        tops.append(top)
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _one(one: Logprob) -> dict[str, Any]:
    text = _text(one)
    return {"token": text, "logprob": max(one.logprob, _LEAST), "bytes": [*text.encode()]}


def _text(one: Logprob) -> str:
    return one.decoded_token or ""
