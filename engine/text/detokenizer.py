"""Token ids to text, one token at a time, never showing part of a character.

Most tokenizers only concatenate: a token stands for some bytes, whatever its neighbours. For these (byte-level BPE;
SentencePiece with byte fallback; Metaspace) a `PieceTable` maps a token to its bytes, and an incremental UTF-8 decoder
turns bytes into text: exact and O(1) a token. Where a decoder looks at neighbours (WordPiece, Python tokenizers), a
`WindowStream` decodes the last few tokens again at each step.

The text of an output is what it adds to the prompt's: ``decode(prompt + output)`` without ``decode(prompt)``. One
deliberate difference: within a run of byte-fallback tokens that turns out to be invalid, characters that were complete
stay and the rest becomes U+FFFD; `Tokenizer.decode` would replace the whole run, also what was already shown.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

from .tokenizer import SlowTokenizer, Tokenizer, byte_level_alphabet

_MAX_UNFINISHED = 3  # tokens an unfinished character can have: each holds a byte of at most 4


def text_stream(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> TextStream:
    """A stream for what follows this prompt. Without `spaces_between_special_tokens`, added tokens that follow one
    another are joined directly, also where the decoder would put a space.
    """
    skip = tokenizer.skipped_ids if skip_special_tokens else frozenset()
    table = piece_table(tokenizer)
    if table is not None:
        return PieceStream(table, prompt_token_ids, skip)
    joined = frozenset() if spaces_between_special_tokens else tokenizer.added_ids
    return WindowStream(tokenizer, prompt_token_ids, skip, joined)


class PieceTable(dict[int, bytes]):
    """The bytes of each token of one tokenizer, filled as they are met."""

    def __init__(self, tokenizer: Tokenizer, form: str, replace: dict[str, str], first_loses: int = 0) -> None:
        self._backend = tokenizer.backend  # not the tokenizer itself, with which the table is to go
        self.form = form  # "byte_level", "byte_fallback" or "text"
        self.replace = replace
        self.first_loses = first_loses  # spaces that the first token of a text loses; -1: all it has
        # transformers shows one U+FFFD for each byte of byte fallback, but one for each bad sequence of byte-level BPE
        self.errors = "mainspring.each_byte" if form == "byte_fallback" else "replace"

    def __missing__(self, token: int) -> bytes:
        piece = self[token] = self._make(token)
        return piece

    def _make(self, token: int) -> bytes:
        text = self._backend.id_to_token(token)
        if text is None:
            return b""
        if self.form == "byte_level":
            mapping = byte_level_alphabet()
            codes = [mapping.get(char) for char in text]
            known = [code for code in codes if code is not None]
            return bytes(known) if len(known) == len(codes) else text.encode()
        for old, new in self.replace.items():
            text = text.replace(old, new)
        if self.form == "byte_fallback" and _BYTE_TOKEN.fullmatch(text):
            return bytes([int(text[3:5], 16)])
        return text.encode()


class PieceStream:
    """For tokenizers that a `PieceTable` describes.

    `push` gives the text that a token completes, `flush` what remains at the end: U+FFFD for an unfinished character.
    """

    def __init__(self, table: PieceTable, prompt: Sequence[int], skip: frozenset[int]) -> None:
        self._table = table
        self._skip = skip
        self._utf8 = codecs.getincrementaldecoder("utf-8")(table.errors)
        self._first = bool(table.first_loses) and not any(table[token] for token in prompt if token not in skip)
        for token in [token for token in prompt[-16:] if token not in skip][-_MAX_UNFINISHED:]:
            self._utf8.decode(table[token])  # a character that the prompt leaves unfinished is ours to finish
        # the prompt's text shows these bytes as U+FFFD; if no character comes of them, the output must not repeat it
        self._of_prompt = self._utf8.buffer.decode("utf-8", table.errors)

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        piece = self._table[token]
        if self._first and piece:
            self._first = False
            piece = piece.replace(b" ", b"") if self._table.first_loses < 0 else piece.removeprefix(b" ")
        if piece.isascii() and not self._utf8.buffer:  # whole characters, in a third of the decoder's time
            return piece.decode()
        return self._new(self._utf8.decode(piece))

    def flush(self) -> str:
        return self._new(self._utf8.decode(b"", final=True))

    def _new(self, text: str) -> str:
        """The decoder's next text without what the prompt's text already has of it."""
        if self._of_prompt and text:
            text, self._of_prompt = text.removeprefix(self._of_prompt), ""
        return text


class WindowStream:
    """The same for any tokenizer: the last tokens shown are context, and later ones wait until they make whole
    characters."""

    _CONTEXT = 6

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], skip: frozenset[int], joined: frozenset[int]
    ) -> None:
        # cleaning up could change text that was shown
        self._decode = functools.partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        self._skip = skip
        self._joined = joined
        self._window = [token for token in prompt[-64:] if token not in skip][-self._CONTEXT :]
        self._shown = len(self._window)  # tokens of the window whose text is out
        self._last: int | None = None

    def push(self, token: int) -> str:
        if token in self._skip:
            return ""
        if token in self._joined and self._last in self._joined:
            text = self.flush() + self._decode([token])
            self._window, self._shown = [token], 1
            return text
        self._last = token
        self._window.append(token)
        text = self._pending()
        if (not text or text.endswith("\ufffd")) and len(self._window) - self._shown <= _MAX_UNFINISHED:
            return ""
        return self._take(text) if text else self._drop()

    def flush(self) -> str:
        return self._take(self._pending())

    def _pending(self) -> str:
        before = self._decode(self._window[: self._shown])
        return self._decode(self._window)[len(before) :]

    def _take(self, text: str) -> str:
        if len(self._window) > self._shown:
            self._window = self._window[self._shown :]
            self._shown = len(self._window)
        return text

    def _drop(self) -> str:
        del self._window[self._shown :]  # they stand for nothing: the context before them stays
        return ""


TextStream = PieceStream | WindowStream  # text of a growing sequence of token ids


_tables: WeakKeyDictionary[Tokenizer, PieceTable | None] = WeakKeyDictionary()


def piece_table(tokenizer: Tokenizer) -> PieceTable | None:
    """The tokenizer's table; None if its decoder is not of the concatenating kind."""
    if tokenizer not in _tables:
        _tables[tokenizer] = None if isinstance(tokenizer, SlowTokenizer) else _read_decoder(tokenizer)
    return _tables[tokenizer]


def _read_decoder(tokenizer: Tokenizer) -> PieceTable | None:
    decoder = tokenizer.backend.decoder
    if decoder is None:
        return None
    described: dict[str, Any] = json.loads(decoder.__getstate__())
    steps: list[dict[str, Any]] = described["decoders"] if described["type"] == "Sequence" else [described]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return PieceTable(tokenizer, "byte_level", {})
    if kinds == ["Metaspace"]:
        first_loses = 0 if steps[0]["prepend_scheme"] == "never" else -1
        return PieceTable(tokenizer, "text", {steps[0]["replacement"]: " "}, first_loses)
    replace: dict[str, str] = {}
    first_loses = 0
    for step in steps:
        if step["type"] == "Replace" and "String" in step["pattern"]:
            replace[step["pattern"]["String"]] = step["content"]
        elif step["type"] == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            first_loses = 1
        elif step["type"] not in ("ByteFallback", "Fuse"):
            return None
    if first_loses and kinds.index("Strip") < (kinds.index("Fuse") if "Fuse" in kinds else len(kinds)):
        return None  # it strips every token, not the text
    return PieceTable(tokenizer, "byte_fallback" if "ByteFallback" in kinds else "text", replace, first_loses)


_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("mainspring.each_byte", _each_byte)
