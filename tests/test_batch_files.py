"""`mainspring batch`: files of requests, answered once each, also by a command that is killed and started again."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from openai.types.chat import ChatCompletion

from daemons import COMMAND, PATIENCE_S, Daemon, short_folder, until
from http_servers import running
from mainspring.cli import batch
from mainspring.ipc.errors import EngineDeadError, InvalidArgumentError

QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def request(custom_id: str, url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**QUESTION, **body}}


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# ---------------------------------------------------------------------- the files


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"custom_id": "a"}], "line 1 of .* is no request of a batch: Object missing required field `method`"),
        ([request("a"), {**request("b"), "method": "GET"}], "line 2 of .* asks for GET /v1/chat/completions; it must"),
        ([request("a", "/v1/files")], "asks for POST /v1/files"),
        ([request("a", stream=True)], "asks for a stream"),
    ],
)
def test_a_wrong_line_is_refused_before_anything_is_asked(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        list(batch.requests_of(write(tmp_path / "in", lines)))
    with pytest.raises(InvalidArgumentError, match="can't be read: No such file"):
        list(batch.requests_of(tmp_path / "none"))


def test_a_pipe_is_refused_because_it_can_be_read_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InvalidArgumentError, match="is no regular file"):
        next(batch.requests_of(tmp_path / "pipe"))


def test_a_torn_last_line_is_cut_off_and_the_others_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "out"
    whole = [{"custom_id": name, "response": {"status_code": status}} for name, status in (("a", 200), ("b", 400))]
    write(out, whole)
    size = out.stat().st_size
    with out.open("a") as file:
        file.write('{"custom_id": "c", "resp')
    assert batch._answered(out) == {"a": False, "b": True}
    assert out.stat().st_size == size
    out.write_text("A story.\n")
    with pytest.raises(InvalidArgumentError, match=r"line 1 of .* is no answer of a batch; name another"):
        batch._answered(out)
    assert out.read_text() == "A story.\n"
    for text in ("A story.", json.dumps(request("a"))):  # without a line break
        out.write_text(text)
        with pytest.raises(InvalidArgumentError, match=r"line 1 of .* is no answer of a batch; name another"):
            batch._answered(out)
        assert out.read_text() == text
    for text in ("", '{"i', '{"id":"batch_req_5","custom_id":"a","resp'):
        out.write_text(text)
        assert batch._answered(out) == {}
        assert out.read_text() == ""


def test_a_core_that_is_gone_ends_the_batch_with_its_own_error(tmp_path: Path) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})

    engine: Any = SimpleNamespace(dead_error=EngineDeadError("it is gone"))
    with (tmp_path / "out").open("wb") as out:
        found = batch._Batch(cast(Any, SimpleNamespace(app=app)), engine, out.fileno(), cast(Any, None), 0)
        lines = batch.requests_of(write(tmp_path / "in", [request("a"), request("b")]))
        with pytest.raises(EngineDeadError, match="it is gone"):
            asyncio.run(found.run(lines, 2))


def test_a_request_that_is_refused_for_ever_ends_with_that_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "PATIENCE_S", -1.0)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 429, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": "too many completions"}'})

    progress: Any = SimpleNamespace(set_postfix_str=lambda *text: None, update=lambda: None)
    with (tmp_path / "out").open("wb") as out:
        site, engine = cast(Any, SimpleNamespace(app=app)), cast(Any, SimpleNamespace(dead_error=None))
        found = batch._Batch(site, engine, out.fileno(), progress, 0)
        asyncio.run(found.run(batch.requests_of(write(tmp_path / "in", [request("a")])), 2))
    assert [one["response"]["status_code"] for one in answers(tmp_path / "out")] == [429]
    assert found.num_failed == 1


def test_a_file_is_written_by_one_batch_at_a_time(tmp_path: Path) -> None:
    with (
        batch._opened(tmp_path / "out"),
        pytest.raises(InvalidArgumentError, match="is being written by another batch"),
    ):
        batch._opened(tmp_path / "out")


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with short_folder() as folder:
        started = Daemon(folder)
        started.ready_line()
        yield started
        started.end()


def start(daemon: Daemon | None, source: Path, target: Path, *options: str) -> subprocess.Popen[str]:
    place = [] if daemon is None else ["--connect", daemon.address]
    return subprocess.Popen(
        [*COMMAND, "batch", *place, *options, str(source), str(target)], stderr=subprocess.PIPE, text=True
    )


def run(*arguments: Any) -> tuple[int, str]:
    process = start(*arguments)
    _, errors = process.communicate(timeout=PATIENCE_S)
    return process.returncode, errors


@pytest.mark.slow
def test_each_request_gets_its_answer_and_an_error_is_one(daemon: Daemon, tmp_path: Path) -> None:
    lines = [
        request("chat"),
        request("text", "/v1/completions", prompt="Once", max_tokens=4),
        request("none", model="gpt-0"),
        request("response", "/v1/responses", input="What is the capital of France?"),
    ]
    source = write(tmp_path / "in", lines)
    code, errors = run(daemon, source, tmp_path / "out")
    assert code == 1, errors  # one has failed
    found = {one["custom_id"]: one for one in answers(tmp_path / "out")}
    assert found.keys() == {"chat", "text", "none", "response"}
    assert all(one["error"] is None and one["id"].startswith("batch_req_") for one in found.values())
    chat = ChatCompletion.model_validate(found["chat"]["response"]["body"], strict=True)
    assert chat.choices[0].message.content == "Paris"
    assert (found["none"]["response"]["status_code"], found["chat"]["response"]["status_code"]) == (404, 200)
    assert found["none"]["response"]["body"]["error"]["code"] == "model_not_found"
    before = (tmp_path / "out").read_text()
    assert run(daemon, source, tmp_path / "out")[0] == 1  # all have answers: nothing is asked
    assert (tmp_path / "out").read_text() == before
    write(source, lines[1:])
    code, errors = run(daemon, source, tmp_path / "out")
    assert (code, "has an answer to 'chat', which is not in" in errors) == (2, True)
    write(source, [*lines, lines[0]])
    assert "has the custom_id 'chat' twice" in run(daemon, source, tmp_path / "out")[1]


@pytest.mark.slow
def test_a_batch_that_is_killed_again_and_again_loses_and_doubles_nothing(daemon: Daemon, tmp_path: Path) -> None:
    count = 120
    lines = [request(f"r{at}", max_tokens=40, ignore_eos=True, seed=at, temperature=1) for at in range(count)]
    source, out = write(tmp_path / "in", lines), tmp_path / "out"
    kills = 0
    for goal in (5, 30, 60):
        process = start(daemon, source, out, "--max-concurrent", "8")
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None and (not out.exists() or out.read_text().count("\n") < goal):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert kills >= 2
    code, errors = run(daemon, source, out)  # as before, to the end
    assert code == 0, errors
    found = answers(out)
    assert sorted(one["custom_id"] for one in found) == sorted(line["custom_id"] for line in lines)
    assert all(one["response"]["body"]["usage"]["completion_tokens"] == 40 for one in found)


@pytest.mark.slow
def test_one_interrupt_ends_a_batch(daemon: Daemon, tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request("short", max_tokens=2), request("long", max_tokens=3000, ignore_eos=True)])
    process = start(daemon, source, tmp_path / "out")
    until(lambda: len(answers(tmp_path / "out")) == 1 if (tmp_path / "out").exists() else False)
    until(lambda: running(daemon) == 1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    until(lambda: running(daemon) == 0)
    assert [one["custom_id"] for one in answers(tmp_path / "out")] == ["short"]


@pytest.mark.slow
def test_a_batch_has_a_chat_template(daemon: Daemon, tmp_path: Path) -> None:
    text = request("text", "/v1/completions", prompt="a fox", add_special_tokens=False, return_token_ids=True)
    source = write(tmp_path / "in", [request("chat", return_token_ids=True), text])
    options = ("--chat-template", "{{ what }}", "--default-chat-template-kwargs", '{"what": "a fox"}')
    code, errors = run(daemon, source, tmp_path / "out", *options)
    assert code == 0, errors
    bodies = {one["custom_id"]: one["response"]["body"] for one in answers(tmp_path / "out")}
    assert bodies["chat"]["prompt_token_ids"] == bodies["text"]["choices"][0]["prompt_token_ids"]


@pytest.mark.slow
def test_a_batch_with_a_core_of_its_own(tmp_path: Path) -> None:
    source = write(tmp_path / "in", [request(f"r{at}") for at in range(4)])
    code, errors = run(None, source, tmp_path / "out", "--reasoning-parser", "none")
    assert code == 0, errors
    assert [one["response"]["body"]["choices"][0]["message"]["content"] for one in answers(tmp_path / "out")] == [
        "Paris"
    ] * 4
