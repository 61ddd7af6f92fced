"""Streamed text: whole characters only, and in the end exactly what decoding everything at once gives.

Exactly means: for a prompt `p` and output `o`, the pieces joined are ``decode(p + o)`` without its beginning
``decode(p)``. The one exception is a run of byte-fallback tokens that is not UTF-8 as a whole: its complete characters
stay, but `decode` would replace the whole run by U+FFFD.
"""

from __future__ import annotations

import gc
import time
import weakref
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer

from mainspring.engine.text.detokenizer import WindowStream, text_stream
from mainspring.engine.text.stop_strings import StopStrings
from mainspring.engine.text.tokenizer import Tokenizer
from tiers import examples


def make(tokens: list[str], decoder: object, added: tuple[str, ...] = ()) -> Tokenizer:
    rust = RustTokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=[]))
    if decoder is not None:
        rust.decoder = decoder  # type: ignore[assignment]
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.add_tokens([AddedToken(token, special=False) for token in added])
    rust.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return Tokenizer(rust, {"bos_token": "<s>", "eos_token": "</s>"})


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["▁", "▁Hello", "▁▁x", "lo", "é", "▁a▁b", "<0x41"]
BYTE_LEVEL = make(sorted(pre_tokenizers.ByteLevel.alphabet()), decoders.ByteLevel(), ("é", "naïve added", "\U0001f642"))
PLAIN_BYTES = make(sorted(pre_tokenizers.ByteLevel.alphabet()), decoders.ByteLevel())
_GEMMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
GEMMA = make(BYTES + WORDS, decoders.Sequence(_GEMMA))
LLAMA = make(BYTES + WORDS, decoders.Sequence([*_GEMMA, decoders.Strip(" ", 1, 0)]))
METASPACE = make(WORDS, decoders.Metaspace())
WORDPIECE = make(["hello", "##lo", ".", "un", "##a", "'", "n"], decoders.WordPiece())
SUFFIX = make(["a</w>", "b", "c</w>", "d"], decoders.BPEDecoder())
NO_DECODER = make(["a", "b", "dé"], None)
ALL = {
    "byte level": BYTE_LEVEL, "gemma": GEMMA, "llama": LLAMA, "metaspace": METASPACE,
    "wordpiece": WORDPIECE, "suffix": SUFFIX, "no decoder": NO_DECODER,
}  # fmt: skip


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int], skip: bool = True) -> list[str]:
    stream = text_stream(tokenizer, prompt, skip_special_tokens=skip)
    return [*(stream.push(token) for token in ids), stream.flush()]


def is_utf8_by_runs(ids: list[int], skipped: frozenset[int]) -> bool:
    """Whether every run of byte tokens (those below 256) is UTF-8, or has no complete character in it at all."""
    run = bytearray()
    for token in [*(token for token in ids if token not in skipped), 999]:
        if token < 256:
            run.append(token)
            continue
        text = run.decode(errors="ignore")
        if text and text.encode() != bytes(run):
            return False
        run.clear()
    return True


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_whole_decoded_at_once(name: str, data: st.DataObject) -> None:
    tokenizer = ALL[name]
    size = len(tokenizer)
    token = st.integers(0, size + 1) | st.integers(max(0, size - 12), size - 1)  # two beyond the vocabulary
    runs = st.text(max_size=3).map(lambda text: tokenizer.encode(text) if name == "byte level" else list(text.encode()))
    run = runs if name in ("byte level", "gemma", "llama") else st.just([])
    ids = data.draw(st.lists(token | run, max_size=10).map(lambda parts: [t for p in parts for t in _listed(p)]))
    letter = st.integers(0x20, 0x40) if size > 256 else st.integers(0, size - 1)  # ASCII in each of the alphabets
    prompt = data.draw(st.lists(letter | st.integers(max(0, size - 12), size - 1), max_size=3))
    skip = data.draw(st.booleans())
    skipped = (tokenizer.skipped_ids if skip else frozenset()) | {size, size + 1}
    whole = tokenizer.decode(prompt + ids, skip_special_tokens=skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    # prompts that end within a character or a byte run are tested below
    if "\ufffd" in before or not whole.startswith(before):
        return
    if name in ("gemma", "llama") and not is_utf8_by_runs(prompt + ids, skipped):
        return
    assert "".join(streamed(tokenizer, prompt, ids, skip)) == whole[len(before) :]


def _listed(part: int | list[int]) -> list[int]:
    return part if isinstance(part, list) else [part]


@settings(max_examples=examples(300), deadline=None)
@given(text=st.text().filter(lambda text: not text.startswith(" ")))  # at the start Llama's decoder drops a space
@pytest.mark.parametrize("tokenizer", [PLAIN_BYTES, LLAMA], ids=["byte level", "llama"])
def test_a_character_is_shown_with_its_last_byte_and_never_before(tokenizer: Tokenizer, text: str) -> None:
    ids = PLAIN_BYTES.encode(text) if tokenizer is PLAIN_BYTES else list(text.encode())  # one token for each byte
    stream, shown = text_stream(tokenizer, [], skip_special_tokens=True), ""
    for count, token in enumerate(ids, start=1):
        shown += stream.push(token)
        assert shown == text.encode()[:count].decode(errors="ignore")
    assert stream.flush() == ""


def test_an_emoji_cut_across_four_tokens() -> None:
    assert streamed(LLAMA, [256], list("🙂".encode())) == ["", "", "", "🙂", ""]
    assert streamed(PLAIN_BYTES, [], PLAIN_BYTES.encode("a🙃b"))[:6] == ["a", "", "", "", "🙃", "b"]


def test_text_already_sent_stays_if_the_byte_run_is_invalid() -> None:
    assert streamed(LLAMA, [256], [*"€".encode(), 0xFF, 0x41]) == ["", "", "€", "\ufffd", "A", ""]
    assert streamed(LLAMA, [256], [0xE2, 0x82]) == ["", "", "\ufffd\ufffd"]


def test_a_leading_space_is_kept_after_a_prompt_and_dropped_at_the_start_of_a_text() -> None:
    hello, bos = 257, len(LLAMA) - 2
    assert streamed(LLAMA, [], [hello, hello])[:2] == ["Hello", " Hello"]
    assert streamed(LLAMA, [bos], [hello, hello])[:2] == ["Hello", " Hello"]
    assert streamed(LLAMA, [bos, hello], [hello])[0] == " Hello"
    assert streamed(LLAMA, [hello, bos], [hello])[0] == " Hello"


def test_a_character_that_the_prompt_left_unfinished_is_finished() -> None:
    ids = PLAIN_BYTES.encode("é€")
    assert streamed(PLAIN_BYTES, ids[:4], ids[4:]) == ["€", ""]
    assert streamed(PLAIN_BYTES, ids[:1], [*ids[1:2], *ids[:1]]) == ["é", "", "\ufffd"]


@pytest.mark.parametrize("tokenizer", [PLAIN_BYTES, LLAMA], ids=["byte level", "llama"])
def test_a_character_that_stays_unfinished_is_replaced_in_the_prompt_alone(tokenizer: Tokenizer) -> None:
    """Byte-level BPE shows one U+FFFD for such a character, byte fallback one for each byte of it."""
    [*emoji, letter] = PLAIN_BYTES.encode("🙂a") if tokenizer is PLAIN_BYTES else [*"🙂".encode(), 259]
    prompt, (third, _) = [letter, *emoji[:2]], emoji[2:]
    for ids in ([], [letter], [third], [third, letter], [letter, third]):
        new = tokenizer.decode(prompt + ids).removeprefix(tokenizer.decode(prompt))
        assert "".join(streamed(tokenizer, prompt, ids)) == new


def test_special_tokens_are_left_out_or_written() -> None:
    eos = len(BYTE_LEVEL) - 1
    a = BYTE_LEVEL.encode("a")
    assert "".join(streamed(BYTE_LEVEL, a, [*a, eos, *a], skip=True)) == "aa"
    assert "".join(streamed(BYTE_LEVEL, a, [*a, eos, *a], skip=False)) == "a</s>a"


def test_spaces_between_special_tokens_can_be_left_out() -> None:
    bos, eos = len(NO_DECODER) - 2, len(NO_DECODER) - 1
    for spaces, text in ((True, " <s> </s> a"), (False, " <s></s> a")):
        stream = text_stream(NO_DECODER, [0], False, spaces)
        assert "".join(stream.push(token) for token in (bos, eos, 0)) + stream.flush() == text


def test_a_tokenizer_that_nobody_holds_any_more_is_freed_with_its_table() -> None:
    rust = RustTokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    rust.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(rust, {})
    assert text_stream(tokenizer, []).push(0) == "a"
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


def test_which_decoders_are_concatenations() -> None:
    kinds = {name: type(text_stream(tokenizer, [])) for name, tokenizer in ALL.items()}
    assert [name for name, kind in kinds.items() if kind is WindowStream] == ["wordpiece", "suffix", "no decoder"]


@pytest.mark.parametrize("name", ALL)
def test_a_token_costs_the_same_however_long_the_output(name: str) -> None:
    """The thousand pushes after 50,000 take at most 5 times the first thousand; a re-decoding stream takes 50 times."""
    tokenizer = ALL[name]
    for tokens in ([0], [len(tokenizer) + 5], [len(tokenizer) - 1], [min(255, len(tokenizer) - 3)]):
        stream = text_stream(tokenizer, [0], skip_special_tokens=True)

        def thousand(stream: object = stream, tokens: list[int] = tokens) -> float:
            began = time.process_time()
            for _ in range(1000):
                stream.push(tokens[0])  # type: ignore[attr-defined]
            return time.process_time() - began

        first = min(thousand() for _ in range(3))
        for _ in range(20_000 if tokenizer is not BYTE_LEVEL else 47_000):
            stream.push(tokens[0])
        assert min(thousand() for _ in range(3)) < 5 * first + 0.001


# ------------------------------------------------------------------ stop strings


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that is completed first, and of several the longest, checked character by
    character."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return (text[:end] if include else text[: end - len(stop)]), stop
    return text, None


letters = st.text("abc", max_size=12)


@settings(max_examples=examples(1000), deadline=None)
@given(
    chunks=st.lists(letters, max_size=8),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
)
def test_a_stop_string_is_found_wherever_tokens_cut_it(chunks: list[str], stops: list[str], include: bool) -> None:
    text, matched = expected("".join(chunks), stops, include)
    stop = StopStrings(stops, include)
    shown = ""
    for chunk in chunks:
        shown += stop.push(chunk)
        assert text.startswith(shown), "nothing shown is ever taken back"
        if stop.matched:
            break
    else:
        shown += stop.flush()
    assert (shown, stop.matched) == (text, matched)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stop = StopStrings(["STOP", "TO"], include=False)
    assert [stop.push(piece) for piece in ("a", "S", "T", "b", "ST", "A")] == ["a", "", "", "STb", "", "STA"]
    assert StopStrings(["STOP"], include=True).push("ST") == "ST"


def test_a_stop_string_does_not_count_before_min_tokens_but_may_begin_there() -> None:
    stop = StopStrings(["ab"], include=False)
    assert stop.push("ab", accept=False) + stop.push("a", accept=False) == "ab"
    assert stop.matched is None
    assert stop.push("b") == ""
    assert stop.matched == "ab"


def test_many_long_stop_strings_are_compared_once_for_each_character() -> None:
    compared = 0

    class Stop(str):
        def __getitem__(self, key: Any) -> str:
            nonlocal compared
            compared += 1
            return str.__getitem__(self, key)

        def startswith(self, *args: Any) -> bool:
            nonlocal compared
            compared += 1
            return str.startswith(self, *args)

    stops = [*(Stop(f"a{number}{'b' * 100}") for number in range(20)), Stop("a" * 100)]
    stop = StopStrings(stops, include=False)
    compared = 0
    assert "".join(stop.push(char) for char in "a" * 80 + "c") == "a" * 80 + "c"
    assert compared <= 2 * 81 * len(stops)
