"""Transcripts as OpenAI's own Python client sees them, and as `LLM` generates them of the same prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest

import media_models
from daemons import PATIENCE_S, Daemon, short_folder, until
from http_servers import HttpServer, running
from mainspring import LLM, SamplingParams
from mainspring.media.decode import Limits, decode_sound
from mainspring.media.windows import window_ends
from media_folders import tone, wav_of, whisper_ids

pytestmark = pytest.mark.slow

PATH = "/v1/audio/transcriptions"
SIZES = {"max_model_len": 200, "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "block_size": 16}
NEVER = [*range(60), 257]  # tokens, of single bytes, that the generation config does not allow
COUNT = 30
VARIED = {"repetition_penalty": 1.5}  # else all texts are much the same
SHORT = wav_of(tone(1.0))
OTHER = wav_of(tone(0.7, hertz=200.0))


def rising(seconds: float) -> bytes:
    """A sound whose parts differ."""
    at = np.arange(int(seconds * 16_000)) / 16_000
    return wav_of((np.sin(2 * np.pi * (200 + 150 * at) * at) / 2).astype(np.float32))


def windows_of(file: bytes) -> list[np.ndarray]:
    """The encoder hears two seconds."""
    samples = decode_sound("x", file, 16_000, Limits(1, 4 << 20))
    ends = window_ends(samples, 32_000, 16_000)
    return [samples[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


LONG = rising(5.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = media_models.make("speech", tmp_path_factory.mktemp("models") / "whisper")
    config = json.loads((made / "generation_config.json").read_text())
    config |= {"suppress_tokens": NEVER, "begin_suppress_tokens": [220, 257]}
    (made / "generation_config.json").write_text(json.dumps(config))
    return made


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with short_folder() as place:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
        started = Daemon(place, "--model", str(folder), *flags)
        started.ready_line()
        yield started
        started.end()


@pytest.fixture(scope="module")
def server(daemon: Daemon) -> Iterator[HttpServer]:
    with short_folder() as place:
        (place / "keys").write_text("sk-first first\n")
        flags = ("--api-key-file", str(place / "keys"), "--max-body-bytes", "2000000")
        started = HttpServer(place, "--connect", daemon.address, "--served-model-name", "tiny", *flags).wait_ready()
        yield started
        assert "Traceback" not in started.log, started.log[-5000:]
        started.end()


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(str(folder), **SIZES) as made:
        yield made


def generated(llm: LLM, sound: Any, prompt: list[int], **options: Any) -> Any:
    given = {"temperature": 0.0, **VARIED, "max_tokens": COUNT, "logit_bias": dict.fromkeys(NEVER, -1e30), **options}
    asked = {"prompt_token_ids": prompt, "multi_modal_data": {"audio": sound}}
    (output,) = llm.generate([asked], SamplingParams(**given), use_tqdm=False)
    assert output.prompt_token_ids == prompt
    return output.outputs[0]


def asked(language: str = "en", task: str = "transcribe") -> list[int]:
    return whisper_ids("startoftranscript", language, task, "notimestamps")


def create(server: HttpServer, file: bytes = SHORT, translate: bool = False, **options: Any) -> Any:
    audio = server.client("sk-first").audio
    call: Any = (audio.translations if translate else audio.transcriptions).create
    more = {**VARIED, "max_completion_tokens": COUNT, **options.pop("extra_body", {})}
    given = {"model": "tiny", **({} if translate else {"language": "en"}), **options}
    return call(file=("a.wav", file), extra_body=more, **given)


def test_a_transcript_is_what_the_model_writes_behind_the_prompt(server: HttpServer, llm: LLM) -> None:
    texts = {}
    for language in ("en", "de"):
        for name, file in (("short", SHORT), ("other", OTHER)):
            output = generated(llm, file, asked(language))
            assert not set(output.token_ids) & set(NEVER)
            assert create(server, file, language=language).text == output.text.lstrip()
            texts[name, language] = output.text
    assert len(set(texts.values())) == 4, "the sound or the language has no effect"
    free = generated(llm, SHORT, asked(), logit_bias={})
    assert set(free.token_ids) & set(NEVER), "the tokens that are not allowed would not come anyway"


def test_the_forms_of_an_answer(server: HttpServer, llm: LLM) -> None:
    text = generated(llm, SHORT, asked()).text.lstrip()
    found = create(server)
    assert (found.text, found.usage.type, found.usage.seconds) == (text, "duration", 1)
    assert create(server, response_format="text") == text
    verbose = create(server, OTHER, response_format="verbose_json")
    assert (verbose.language, verbose.duration, verbose.task) == ("en", pytest.approx(0.7), "transcribe")
    assert verbose.text == generated(llm, OTHER, asked()).text.lstrip()


def test_a_stream_brings_the_same_text(server: HttpServer) -> None:
    for file in (SHORT, LONG):
        whole = create(server, file)
        events = list(create(server, file, stream=True))
        *deltas, done = events
        assert len(deltas) > 1
        assert {event.type for event in deltas} == {"transcript.text.delta"}
        assert (done.type, done.text) == ("transcript.text.done", whole.text)
        assert "".join(event.delta for event in deltas) == whole.text
        windows = len(windows_of(file))
        usage = done.usage
        assert (usage.input_tokens, usage.output_tokens) == (4 * windows, COUNT * windows)
        assert usage.total_tokens == (4 + COUNT) * windows


def test_a_language_that_is_not_given_is_the_likeliest_one(server: HttpServer, llm: LLM) -> None:
    codes = dict(zip(whisper_ids("en", "de", "fr"), ("en", "de", "fr"), strict=True))
    for file in (SHORT, OTHER, LONG):
        first = windows_of(file)[0], 16_000
        choice = generated(
            llm,
            first,
            whisper_ids("startoftranscript"),
            allowed_token_ids=[*codes],
            max_tokens=1,
            repetition_penalty=1.0,
            logit_bias={},
        )
        code = codes[choice.token_ids[0]]
        answer = create(server, file, language=openai.omit, response_format="verbose_json")
        assert (answer.language, answer.text) == (code, create(server, file, language=code).text)
        assert code != "en", "the likeliest language is the first one"


def test_a_prompt_is_what_was_said_before(server: HttpServer, llm: LLM) -> None:
    said = [*whisper_ids("startofprev"), *llm.get_tokenizer().encode(" Hello", add_special_tokens=False)]
    text = create(server, prompt="Hello").text
    assert text == generated(llm, SHORT, [*said, *asked()]).text.lstrip()
    assert text != create(server).text
    create(server, prompt="Hello. " * 5000)


def test_a_translation(server: HttpServer, llm: LLM) -> None:
    text = generated(llm, SHORT, asked("de", "translate")).text.lstrip()
    assert create(server, translate=True, extra_body={"language": "de"}).text == text
    assert text != create(server, language="de").text
    verbose = create(server, translate=True, response_format="verbose_json", extra_body={"language": "de"})
    assert (verbose.text, verbose.language) == (text, "en")


def test_sampling_parameters(server: HttpServer, llm: LLM) -> None:
    drawn = {"top_k": 50, "seed": 5, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    text = generated(llm, SHORT, asked(), temperature=1.0, **drawn).text.lstrip()
    assert create(server, temperature=1.0, extra_body=drawn).text == text
    assert text != create(server, temperature=1.0, extra_body={**drawn, "seed": 6}).text
    fields = {"language": "en", "max_completion_tokens": f"{COUNT}"}
    text = generated(llm, SHORT, asked(), temperature=0.0, repetition_penalty=1.0).text.lstrip()
    assert post(server, files={"file": SHORT}, data=fields).json()["text"] == text


def test_a_long_sound_is_transcribed_in_windows(server: HttpServer, llm: LLM) -> None:
    texts = [generated(llm, (window, 16_000), asked()).text for window in windows_of(LONG)]
    assert len(set(texts)) == len(texts) > 2
    found = create(server, LONG, response_format="verbose_json")
    assert (found.text, found.duration) == ("".join(texts).lstrip(), 5.0)
    many = create(server, rising(41.0), extra_body={"max_completion_tokens": 3}, response_format="verbose_json")
    assert (many.duration, len(many.text) > 20) == (41.0, True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"language": "xx"}, "this model knows en, de, fr"),
        ({"response_format": "srt"}, "no timestamps"),
        ({"response_format": "vtt"}, "no timestamps"),
        ({"response_format": "xml"}, "must be one of json, text, verbose_json"),
        ({"timestamp_granularities": ["word"], "response_format": "verbose_json"}, "timestamp_granularities"),
        ({"include": ["logprobs"]}, "include"),
        ({"prompt": "<|fr|>"}, "special token"),
        ({"temperature": -1.0}, "temperature"),
        ({"extra_body": {"temperature": "hot"}}, "temperature"),
        ({"extra_body": {"top_p": 7}}, "top_p"),
        ({"extra_body": {"max_completion_tokens": 0}}, "max_tokens"),
        ({"file": b""}, "empty"),
        ({"file": b"no sound"}, "decoded"),
        ({"file": SHORT[:44]}, "audio 0 is empty"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_can_not_be_answered_is_refused(
    server: HttpServer, options: dict[str, Any], words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        create(server, stream=stream, **options)


def test_another_model_another_key_and_a_file_that_is_too_large(server: HttpServer) -> None:
    with pytest.raises(openai.NotFoundError, match="'whisper-1' does not exist"):
        create(server, model="whisper-1")
    with pytest.raises(openai.AuthenticationError):
        server.client("sk-none").audio.transcriptions.create(file=SHORT, model="tiny")
    with pytest.raises(openai.APIStatusError, match="longer than 2000000") as caught:
        create(server, b"\0" * 2_000_001)
    assert caught.value.status_code == 413


def post(server: HttpServer, path: str = PATH, **options: Any) -> httpx.Response:
    headers = {"authorization": "Bearer sk-first", **options.pop("headers", {})}
    return httpx.post(f"{server.url}{path}", headers=headers, timeout=PATIENCE_S, **options)


def test_malformed_forms_are_refused(server: HttpServer) -> None:
    typed = {"content-type": "multipart/form-data; boundary=x"}
    for options, words in (
        ({"json": {"file": "x"}}, "must be multipart/form-data"),
        ({"data": {"model": "tiny"}}, "must be multipart/form-data"),
        ({"content": b"--x\r\n", "headers": typed}, "last boundary"),
        ({"content": b"\xff" * 100_000, "headers": typed}, "no form"),
        ({"files": {"model": (None, "tiny")}}, "file"),
        ({"files": {"file": (None, "text")}}, "filename"),
        ({"files": [("file", SHORT), *[("x", (None, "y"))] * 200]}, "100 parts"),
    ):
        found = post(server, **options)
        error = found.json()["error"]
        assert (found.status_code, error["type"], words in error["message"]) == (400, "invalid_request_error", True), (
            error
        )


def test_a_form_may_come_in_small_pieces(server: HttpServer) -> None:
    fields = {name: str(value) for name, value in VARIED.items()}
    fields |= {"language": "en", "max_completion_tokens": f"{COUNT}", "response_format": "text"}
    whole = httpx.Request("POST", "http://x", files={"file": SHORT}, data=fields)
    whole.read()
    content, size = whole.content, 1000
    parts = (content[at : at + size] for at in range(0, len(content), size))
    found = post(server, content=parts, headers={"content-type": whole.headers["content-type"]})
    assert found.text == create(server).text


def test_a_client_that_leaves_ends_its_request(server: HttpServer, daemon: Daemon) -> None:
    stream = create(server, rising(60.0), stream=True, extra_body={"max_completion_tokens": 190})
    next(iter(stream))
    stream.close()
    until(lambda: running(daemon) == 0)
    until(lambda: '"status":499' in server.out)
    line = next(json.loads(one) for one in server.out.splitlines() if '"status":499' in one)
    assert (line["route"], line["tenant"]) == (PATH, "first")
    assert 0 < line["tokens"] < 30 * 190


def test_the_access_log_has_the_tokens(server: HttpServer) -> None:
    found = post(server, files={"file": LONG}, data={"language": "en", "max_completion_tokens": "7"})
    name = found.headers["x-request-id"]
    until(lambda: name in server.out)
    line = next(json.loads(one) for one in server.out.splitlines() if name in one)
    assert (line["status"], line["tokens"], line["bytes"] > len(LONG)) == (200, 7 * len(windows_of(LONG)), True)


def test_the_routes_are_described(server: HttpServer) -> None:
    found = httpx.get(f"{server.url}/openapi.json", headers={"authorization": "Bearer sk-first"}).json()
    for path in (PATH, "/v1/audio/translations"):
        (content,) = found["paths"][path]["post"]["requestBody"]["content"].items()
        assert content[0] == "multipart/form-data"
    schema = found["components"]["schemas"]["TranscriptionBody"]
    assert schema["properties"]["file"] == {"type": "string", "format": "binary"}
    assert schema["required"] == ["file"]


def test_a_model_that_hears_in_chats_says_so(tmp_path: Path) -> None:
    model = media_models.make("glmasr", tmp_path / "glmasr")
    with short_folder() as place:
        started = HttpServer(place, "--model", str(model)).wait_ready()
        try:
            with pytest.raises(openai.BadRequestError, match="takes sounds in chats"):
                started.client().audio.transcriptions.create(file=SHORT, model="glmasr")
        finally:
            started.end()


def test_a_model_without_whispers_tokens_begins_with_its_first_one(tmp_path: Path) -> None:
    model = media_models.make("whisper", tmp_path / "whisper")
    (model / "chat_template.jinja").unlink()
    with LLM(str(model), **SIZES) as llm:
        text = generated(llm, SHORT, [259], logit_bias={}, repetition_penalty=1.0).text
    with short_folder() as place:
        started = HttpServer(place, "--model", str(model), "--dtype", "float32").wait_ready()
        try:
            fields = {"max_completion_tokens": f"{COUNT}", "response_format": "verbose_json"}
            found, refused = (
                httpx.post(f"{started.url}{path}", files={"file": SHORT}, data=fields, timeout=PATIENCE_S)
                for path in (PATH, "/v1/audio/translations")
            )
        finally:
            started.end()
    assert found.status_code == 200, found.text
    assert (found.json()["text"], found.json()["language"]) == (text.lstrip(), "en")
    assert (refused.status_code, "does not translate" in refused.text) == (400, True)
