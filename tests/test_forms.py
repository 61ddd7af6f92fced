"""Forms of the type multipart/form-data, and what a speech model's decoder is told."""

from __future__ import annotations

import contextlib
import logging
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainspring.web import forms
from mainspring.web.failures import HttpError, http_error
from mainspring.web.forms import read_form
from mainspring.web.speech import Speech
from media_folders import WHISPER_TOKENS, byte_tokenizer, whisper_ids
from tiers import examples

TYPE = 'multipart/form-data; boundary="x"'


class Fields(msgspec.Struct):
    file: Any
    text: str = ""
    number: float = 0.0
    flag: bool = False
    names: list[str] = []


def part(name: str, value: bytes, filename: str | None = None) -> bytes:
    more = "" if filename is None else f'; filename="{filename}"'
    return f'--x\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n'.encode() + value + b"\r\n"


def form(*parts: bytes) -> bytes:
    return b"".join(parts) + b"--x--\r\n"


FILE = part("file", b"\x00\xff", "a.wav")


def test_fields_of_a_form_have_the_types_of_the_struct() -> None:
    body = form(FILE, part("text", "Grüße".encode()), part("number", b"0.5"), part("flag", b"true"))
    assert read_form(TYPE, body, Fields) == Fields(b"\x00\xff", "Grüße", 0.5, True)
    body = form(part("names[]", b"a"), FILE, part("names[]", b"b"), part("text", b"1"), part("text", b"2"))
    assert read_form(TYPE, body, Fields) == Fields(b"\x00\xff", "2", names=["a", "b"])
    assert read_form(TYPE, form(part("file", b"no file")), Fields).file == "no file"
    assert read_form(TYPE, form(FILE, part("unknown", b"x")), Fields) == Fields(b"\x00\xff")


@settings(max_examples=examples(200))
@given(st.binary(max_size=50) | st.text("\r\n-x", max_size=50).map(str.encode))
def test_a_file_comes_as_it_is(content: bytes) -> None:
    request = httpx.Request("POST", "http://x", files={"file": ("a", content)}, data={"text": "t"})
    request.read()
    found = read_form(request.headers["content-type"], request.content, Fields)
    assert (found.file, found.text) == (content, "t")


@pytest.mark.parametrize(
    ("content_type", "body", "words"),
    [
        ("application/json", b"{}", "must be multipart/form-data"),
        ("", b"", "must be multipart/form-data"),
        ("multipart/form-data", form(FILE), "must be multipart/form-data"),
        (f"multipart/form-data; boundary={'x' * 300}", form(FILE), "no form"),
        (TYPE, b"", "last boundary"),
        (TYPE, form(FILE)[:-5], "last boundary"),
        (TYPE, FILE[:60], "last boundary"),
        (TYPE, b"--y" + form(FILE), "no form"),
        (TYPE, b"\x00" * 100, "no form"),
        (TYPE, b"--x\r\n\r\nvalue\r\n--x--\r\n", "Field name"),
        (TYPE, b"--x\r\nContent-Disposition: form-data\r\n\r\nvalue\r\n--x--\r\n", "Field name"),
        (TYPE, form(FILE, part("text", b"\xff")), "utf-8"),
        (TYPE, form(FILE, *[part("names[]", b"a")] * forms.MAX_PARTS), "more than 100 parts"),
        (TYPE, form(part("file", b"\r\n--x" * forms.MAX_PARTS, "a.wav")), "more than 100 parts"),
        (TYPE, form(), "file"),
        (TYPE, form(part("text", b"x")), "file"),
        (TYPE, form(FILE, part("number", b"x")), "number"),
        (TYPE, form(FILE, part("flag", b"perhaps")), "flag"),
        (TYPE, form(FILE, part("text[]", b"x")), "text"),
        (TYPE, form(FILE, part("names", b"x")), "names"),
        (TYPE, form(FILE, part("text", b"x", "a.txt")), "text"),
    ],
)
def test_a_wrong_form_is_refused(content_type: str, body: bytes, words: str) -> None:
    with pytest.raises((HttpError, msgspec.ValidationError)) as caught:
        read_form(content_type, body, Fields)
    error = http_error(caught.value)
    assert (error.status, words in error.message) == (400, True), error.message


@settings(max_examples=examples(500))
@given(st.lists(st.sampled_from([b"--x", b"\r\n", b"--", b"\r", b"\n", b":", b"a", FILE, form(FILE)]), max_size=12))
def test_any_other_bytes_are_a_form_or_refused(pieces: list[bytes]) -> None:
    with contextlib.suppress(HttpError, msgspec.ValidationError):
        read_form(TYPE, b"".join(pieces), Fields)


def test_a_form_may_have_as_many_parts_as_the_limit() -> None:
    found = read_form(TYPE, form(FILE, *[part("names[]", b"a")] * (forms.MAX_PARTS - 1)), Fields)
    assert len(found.names) == forms.MAX_PARTS - 1


def test_wrong_forms_leave_no_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(HttpError):
        read_form(TYPE, b"--xx", Fields)
    assert not caplog.records


# ---------------------------------------------------------------------- prompts


def speech(tokens: list[str] = WHISPER_TOKENS, config: Any = None, template: Any = None, **model: Any) -> Speech:
    own = byte_tokenizer(tokens)
    tokenizer = SimpleNamespace(encode=own.encode, get_added_vocab=own.get_added_vocab, chat_template=template)
    facts = {"encoder_input": True, "media": ["audio"], "max_model_len": 20, **model}
    engine: Any = SimpleNamespace(
        engine_core=SimpleNamespace(model=SimpleNamespace(**facts)),
        tokenizer=tokenizer,
        generation_config=config or {},
        input_processor=SimpleNamespace(eos_token_ids=frozenset([257])),
    )
    return Speech(engine)


def test_prompts_have_whispers_form() -> None:
    several = speech()
    assert set(several.languages) == {"en", "de", "fr"}
    assert several.prompt("transcribe", "de", "") == whisper_ids(
        "startoftranscript", "de", "transcribe", "notimestamps"
    )
    assert several.prompt("translate", "fr", " ") == whisper_ids("startoftranscript", "fr", "translate", "notimestamps")
    named = speech(config={"lang_to_id": {"<|de|>": 7}})
    assert named.prompt("transcribe", "de", "")[1] == 7
    one = speech(config={"is_multilingual": False})
    assert one.prompt("transcribe", "en", "") == whisper_ids("startoftranscript", "notimestamps")
    with pytest.raises(HttpError, match="does not translate"):
        one.prompt("translate", "en", "")
    nothing = speech([])
    assert (nothing.start, nothing.prompt("transcribe", "en", "")) == ([], [])
    with pytest.raises(HttpError, match="prompt must have"):
        nothing.prompt("transcribe", "en", "before")


def test_what_was_said_before_comes_first_and_its_end_counts() -> None:
    (before,) = whisper_ids("startofprev")
    asked = whisper_ids("startoftranscript", "en", "transcribe", "notimestamps")
    encode = byte_tokenizer([]).encode
    text = encode(" Hi.", add_special_tokens=False)
    assert speech().prompt("transcribe", "en", " Hi. ") == [before, *text, *asked]
    end = encode("efghijklm", add_special_tokens=False)  # half the decoder's length, less one for the token in front
    assert speech().prompt("transcribe", "en", "abcdefghijklm") == [before, *end, *asked]
    with pytest.raises(HttpError, match="special token"):
        speech().prompt("transcribe", "en", "<|fr|>")


def test_the_generation_config_says_what_must_not_come() -> None:
    found = speech(config={"suppress_tokens": [-1, 3, 4], "begin_suppress_tokens": [220, 257]})
    assert (found.never, found.never_empty) == ([3, 4], True)
    found = speech(config={"suppress_tokens": None, "begin_suppress_tokens": [220]})
    assert (found.never, found.never_empty) == ([], False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"media": ["text"]}, "no encoder-decoder model"),
        ({"encoder_input": False}, "input_audio"),
        ({"encoder_input": False, "media": []}, "no encoder-decoder model"),
        ({"tokens": WHISPER_TOKENS[:-1]}, "Whisper's form"),
        ({"tokens": [], "template": "{{ messages }}"}, "Whisper's form"),
    ],
)
def test_models_that_are_told_otherwise_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(HttpError, match=words) as caught:
        speech(**options)
    assert caught.value.status == 400
