"""Structured outputs: computes which tokens may come next, so that the output matches a grammar.

The library is llguidance. It compiles a schema in milliseconds, because it does not preprocess the whole vocabulary. It
limits the work of lexer and parser, so that a hostile grammar ends in an error; grammar_text.py refuses input that the
limits do not cover. It releases the GIL while it compiles grammars and computes masks.

A `Matcher` may move between threads, but only one thread at a time may use it. A `Grammar` and a `GrammarCompiler` are
thread-safe.
"""

from __future__ import annotations

import base64
import functools
import json
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ...ipc.errors import InvalidRequestError
from .grammar_text import named_tokens, reason, to_lark
from .turns import TurnThread

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer
    from tokenizers import Tokenizer

MAX_CACHED = 256  # compiled grammars in the cache
MAX_CACHED_BYTES = 128 << 20  # estimated memory of the cached grammars
_STACK_BYTES = 256 << 20  # stack of the compiling thread: the library recurses along references; unused pages are free
_BYTES_PER_CHARACTER = 200  # memory of a compiled grammar per character of its text, the largest that was measured
# Without this option, text that the grammar forces may only be tokenized as the tokenizer would. For a long text the
# library would compute that tokenization for each mask.
_NO_FORCING = '\n%llguidance {"no_forcing": true}\n'


class _Vocabulary(NamedTuple):
    tokenizer: LLTokenizer
    tokenizer_size: int  # may be larger than the model's vocabulary
    size: int  # of the model's vocabulary
    text: np.ndarray  # bits of the text tokens and of the special tokens that the grammar names, int32 [words]
    eos: np.ndarray  # bits of the end-of-sequence tokens, int32 [words]
    eos_ids: frozenset[int]
    special: frozenset[int]  # tokens that come only where a grammar names them

    def naming(self, tokens: Collection[int]) -> _Vocabulary:
        """For a grammar that names these special tokens.

        Raises:
            InvalidRequestError: a token is not special, or ends an output.
        """
        for token in tokens:
            if token not in self.special:
                raise InvalidRequestError(f"it names the token <[{token}]>, which is not special, or ends an output")
        return self._replace(text=self.text | _bits(tokens, self.size)) if tokens else self


class Matcher:
    """The state of one output in its grammar. Token ids are those of the model's vocabulary."""

    def __init__(self, matcher: LLMatcher, vocabulary: _Vocabulary) -> None:
        self._matcher, self._vocabulary = matcher, vocabulary
        self._num_text = 0  # text tokens accepted
        self._num_followed = 0  # tokens of the output that `follow` accepted
        self._ended = False

    def fill(self, row: np.ndarray) -> None:
        """Write the mask of tokens that may come next: bit ``i % 32`` of word ``i // 32`` for token ``i``. Releases the
        GIL.

        Args:
            row: int32 ``[ceil(vocab_size / 32)]``, contiguous.

        Raises:
            InvalidRequestError: the grammar exceeds a limit, or allows no token here. Later calls raise it, too.
        """
        matcher, vocabulary = self._matcher, self._vocabulary
        if self.finished:
            row[:] = vocabulary.eos
            return
        words = (vocabulary.tokenizer_size + 31) // 32
        mask = row if words == row.size else np.empty(words, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        np.bitwise_and(mask[: row.size], vocabulary.text, out=row)
        if matcher.is_accepting():
            np.bitwise_or(row, vocabulary.eos, out=row)
        elif not row.any():
            raise InvalidRequestError(f"the grammar allows no token after {self._num_text} output tokens")

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, without a change, if the token is not allowed. Keeps the GIL: for
        microseconds, or a few milliseconds in an ambiguous grammar.

        Raises:
            InvalidRequestError: the grammar exceeds a limit. Later calls raise it, too.
        """
        vocabulary = self._vocabulary
        if token in vocabulary.eos_ids:
            self._ended = self._ended or self._matcher.is_accepting()
            return self._ended
        if self._ended or not _has(vocabulary, token):
            return False
        allowed = self._matcher.try_consume_tokens([token]) == 1
        self._num_text += allowed
        self._check()
        return allowed

    def follow(self, output: list[int], row: np.ndarray) -> None:
        """Advance by the tokens added to `output` since the previous call, then `fill` the row."""
        for token in output[self._num_followed :]:
            if not self.accept(token):
                raise InvalidRequestError(
                    f"output token {self._num_followed} is {token}: the grammar does not allow it"
                )
            self._num_followed += 1
        self.fill(row)

    @property
    def finished(self) -> bool:
        """Whether only an end-of-sequence token may come next."""
        return self._ended or (self._matcher.is_stopped() and not self._matcher.is_error())

    def _check(self) -> None:
        if self._matcher.is_error():
            why = reason(self._matcher.get_error())
            raise InvalidRequestError(f"the grammar can't be followed after {self._num_text} output tokens: {why}")


class Replay:
    """In the place of a `Matcher`: the output is these tokens, whether or not they end other outputs."""

    finished = False  # the request ends by its number of tokens

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids

    def follow(self, output: list[int], row: np.ndarray) -> None:
        """See `Matcher.follow`."""
        token = self._token_ids[len(output)]
        row[:] = 0
        row.view(np.uint32)[token >> 5] = 1 << (token & 31)


class Grammar(NamedTuple):
    """A compiled grammar."""

    start: LLMatcher
    vocabulary: _Vocabulary
    num_bytes: int  # estimated memory

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an output. Takes some microseconds."""
        return Matcher(self.start.deep_copy(), self.vocabulary)


class GrammarCompiler:
    """Compiles grammars for one tokenizer in a thread of its own, and caches the most recently used ones.

    Args:
        tokenizer: the content of a tokenizer.json or a tekken.json, or a tokenizer read from the former, with all added
            tokens.
        vocab_size: size of the model's vocabulary. Ids that the tokenizer does not know are never allowed.
        eos_token_ids: the tokens that end an output.
    """

    def __init__(self, tokenizer: str | Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._source, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, frozenset(eos_token_ids)
        self._lock = threading.Lock()
        self._cached: OrderedDict[tuple[str, str], Grammar | InvalidRequestError] = OrderedDict()
        self._cached_bytes = 0
        self._thread = TurnThread("grammars", _STACK_BYTES)

    def compile(self, kind: str, text: str) -> Grammar:
        """Compile a grammar, and wait for it. See `submit`.

        Raises:
            InvalidRequestError: there is no such kind, or the text is wrong, not supported, or exceeds a limit.
        """
        return self.submit(kind, text).result()

    def submit(self, kind: str, text: str, frontend: int = 0) -> Future[Grammar]:
        """Compile the grammar of a `StructuredOutputsParams.spec`. The future gets the grammar or the error that
        `compile` raises; it can be cancelled until its turn comes. Frontends take turns. Calls for the same grammar
        share the work."""
        if (known := self._known((kind, text))) is None:
            return self._thread.submit(frontend, self._compiled, (kind, text))
        future = Future[Grammar]()
        if isinstance(known, Grammar):
            future.set_result(known)
        else:
            future.set_exception(_again(known))
        return future

    def _known(self, key: tuple[str, str]) -> Grammar | InvalidRequestError | None:
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
            return self._cached.get(key)

    def _compiled(self, key: tuple[str, str]) -> Grammar:
        if (found := self._known(key)) is None:
            try:
                found = _compile(self._vocabulary, *key)
            except InvalidRequestError as error:
                found = error.with_traceback(None)
            except BaseException as error:  # a panic of the library is no Exception
                found = InvalidRequestError(f"{key[0]:.20} can't be compiled: {type(error).__name__}: {error!s:.200}")
            with self._lock:
                self._keep(key, found)
        if isinstance(found, InvalidRequestError):
            raise _again(found)
        return found

    def _keep(self, key: tuple[str, str], found: Grammar | InvalidRequestError) -> None:
        self._cached[key] = found
        self._cached_bytes += _num_bytes(key, found)
        while len(self._cached) > MAX_CACHED or (self._cached_bytes > MAX_CACHED_BYTES and len(self._cached) > 1):
            self._cached_bytes -= _num_bytes(*self._cached.popitem(last=False))

    @functools.cached_property
    def _vocabulary(self) -> _Vocabulary:
        """Made for the first grammar, because it takes seconds for a large vocabulary."""
        from llguidance import LLTokenizer

        source = json.loads(self._source if isinstance(self._source, str) else self._source.to_str())
        is_tekken = "model" not in source
        known = set(range(source["config"]["default_vocab_size"])) if is_tekken else _token_ids(source)
        special = _special_ids(source)
        eos = sorted(token for token in self._eos_token_ids if 0 <= token < self._vocab_size)
        ends = [token for token in eos if token in known] or special[:1] or [0]  # the library needs one; ours are `eos`
        size = max(self._vocab_size, max(known, default=-1) + 1)
        if is_tekken:
            tokenizer = _of_tekken(source, size, ends)
        else:
            source.update(post_processor=None, truncation=None, padding=None)
            tokenizer = LLTokenizer(json.dumps(source), n_vocab=size, eos_token=ends)
        usable = {token for token in known if token < self._vocab_size}.difference(eos)
        return _Vocabulary(
            tokenizer,
            size,
            self._vocab_size,
            _bits(usable.difference(special), self._vocab_size),
            _bits(eos, self._vocab_size),
            frozenset(eos),
            frozenset(usable.intersection(special)),
        )


def _compile(vocabulary: _Vocabulary, kind: str, text: str) -> Grammar:
    from llguidance import LLMatcher

    lark = to_lark(kind, text)
    try:
        vocabulary = vocabulary.naming(named_tokens(lark) if kind == "grammar" else ())
        start = LLMatcher(vocabulary.tokenizer, lark + _NO_FORCING, log_level=0, limits=_limits(kind))
        if start.is_error():
            raise InvalidRequestError(reason(start.get_error()))
        # compute the first mask: it detects many unusable grammars, and all copies of `start` reuse it
        Matcher(start, vocabulary).fill(np.empty_like(vocabulary.text))
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{kind} can't be used: {error}") from None
    return Grammar(start, vocabulary, (64 << 10) + len(text.encode(errors="replace")) * _BYTES_PER_CHARACTER)


@functools.cache
def _limits(kind: str) -> LLParserLimits:
    """Limits on the work for one mask and on a matcher's memory, which is about 50 MB at 50,000 states. In an ambiguous
    grammar the time per token grows with the items in a row. Schemas are not ambiguous, but need four items for each
    property that may come next, so their limit is higher."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=500 if kind == "grammar" else 2000,
        step_lexer_fuel=50_000,
        step_max_items=5_000 if kind == "grammar" else 20_000,
        max_lexer_states=50_000,
        verbose_errors=False,
    )


def _token_ids(source: dict[str, Any]) -> set[int]:
    vocabulary = source["model"]["vocab"]
    ids = set(vocabulary.values()) if isinstance(vocabulary, dict) else set(range(len(vocabulary)))
    return ids | {token["id"] for token in source["added_tokens"]}


def _special_ids(source: dict[str, Any]) -> list[int]:
    if "model" not in source:  # tekken's come first
        return list(range(source["config"]["default_num_special_tokens"]))
    return [token["id"] for token in source["added_tokens"] if token["special"]]


def _of_tekken(source: dict[str, Any], size: int, ends: list[int]) -> LLTokenizer:
    """The tokenizer of a tekken.json. Its special tokens are never allowed, so their names do not matter."""
    from llguidance import LLTokenizer

    special = _special_ids(source)
    count = source["config"]["default_vocab_size"] - len(special)
    ids = {base64.b64decode(entry["token_bytes"]): len(special) + entry["rank"] for entry in source["vocab"][:count]}
    return LLTokenizer.from_tiktoken(  # type: ignore[attr-defined,no-any-return]
        encoder=ids,
        special_tokens={f"<SPECIAL_{token}>": token for token in special},
        pattern=source["config"]["pattern"],
        eos_token=ends,
        n_vocab=size,
        slices=None,
    )


def _bits(tokens: Collection[int], size: int) -> np.ndarray:
    """int32 ``[ceil(size / 32)]`` with a bit for each token."""
    flags = np.zeros((size + 31) // 32 * 32, bool)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)


def _has(vocabulary: _Vocabulary, token: int) -> bool:
    return 0 <= token < vocabulary.size and bool(int(vocabulary.text[token >> 5]) >> (token & 31) & 1)


def _num_bytes(key: tuple[str, str], found: Grammar | InvalidRequestError) -> int:
    return 2 * sum(map(len, key)) + (found.num_bytes if isinstance(found, Grammar) else 1 << 10)


def _again(error: InvalidRequestError) -> InvalidRequestError:
    return type(error)(*error.args)
