"""The command line. Most commands run in this process, with one daemon; two run as separate processes."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from daemons import COMMAND, PATIENCE_S, Daemon, short_folder
from mainspring import LLM, __version__
from mainspring.cli import console
from mainspring.cli.main import _parser, _say, main
from mainspring.engine import llm_engine
from mainspring.ipc.keys import AllowedKey, default_allowed, load_allowed, load_keypair
from mainspring.ipc.logs import JsonLines
from mainspring.serve.daemon_options import DaemonOptions

DOCKER = Path(__file__).resolve().parent.parent / "docker"
QUESTIONS = ["What is two plus three?", "What is two plus four?"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def put_back_what_main_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_LOG_LEVEL", "WARNING")


@pytest.fixture(scope="module")
def connect() -> Iterator[str]:
    """The flag for a daemon's address, for tests that need no core of their own."""
    with short_folder() as folder:
        daemon = Daemon(folder)
        try:
            daemon.ready_line()
            yield f"--connect={daemon.address}"
        finally:
            assert daemon.stop() == 0, daemon.log
            daemon.end()


def test_version(capsys: Capture) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["generate"], 2, "there is no prompt"),
        (["generate", "--temperature=-1", "hi"], 2, "temperature is -1"),
        (["generate", "--max-num-seqs=0", "hi"], 2, "max_num_seqs is 0"),
        (["chat", "--min-tokens=9", "--max-tokens=3"], 2, "min_tokens is 9"),
        (["generate", "--model=/no/such/model", "hi"], 1, "'/no/such/model'"),
        (["generate", "--node-rank=1", "hi"], 1, "node_rank is 1"),
        (["generate", "--model=/no/such/model", "--image=/no/such.png", "hi"], 1, "/no/such.png"),
        (["batch", "--model=/no/such/model", "/no/such.jsonl", "/no/such/out"], 2, "/no/such.jsonl can't be read"),
        (["generate", "--key=x", "hi"], 2, "--key and --server-key are for --connect"),
        (["chat", "--server-key=x"], 2, "--key and --server-key are for --connect"),
        (["generate", "--connect=nonsense", "hi"], 2, "'nonsense' is no address"),
        (["generate", "--connect=ipc:///no/such", "--max-num-seqs=3", "hi"], 2, "max_num_seqs"),
        (["daemon", "--config=/no/such.toml"], 2, "/no/such.toml"),
        (["daemon", "--listen=tcp://127.0.0.1:5555"], 2, "--insecure"),
        (["daemon", "--listen=nonsense"], 4, "'nonsense' is no address"),
        (["daemon", "--listen=ipc:///dev/null/x.sock"], 4, "can't be written"),
        (["daemon", "--listen=ipc:///" + "x" * 200], 4, "the limit is 107"),
        (["daemon", "--listen=tcp://203.0.113.1:5555", "--insecure"], 4, "nobody can listen at tcp://203.0.113.1"),
        (["keys", "allow", "nonsense"], 2, "nonsense can't be read"),
        (["keys", "allow", "k" * 40], 2, "give --name"),
        (["keys", "list", "--allowed-keys=/no/such"], 2, "mainspring keys allow"),
    ],
)
def test_an_error_is_one_line_and_a_status(arguments: list[str], status: int, words: str, capsys: Capture) -> None:
    assert main(arguments) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mainspring: error: ")
    assert said.err.count("\n") == 1
    assert words in said.err


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["generat"],
        ["generate", "--no-such-flag", "x"],
        ["generate", "--block-size=7"],
        ["generate", "--hf-overrides={a"],
        ["generate", "--hf-overrides=" + "[" * 100_000],
    ],
)
def test_an_error_of_argparse_is_a_usage_error(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("usage:")
    assert said.count("\n") == 2, "not some thirty lines of options"


def test_what_a_daemon_says_may_have_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)  # as after `mainspring daemon >&-`
    _say("ready")


def test_debug_shows_where_an_error_came_from() -> None:
    with pytest.raises(OSError, match="no such folder"):
        main(["generate", "--debug", "--model=/no/such/model", "hi"])


def test_a_log_level_that_is_none_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_LOG_LEVEL", "loud")
    assert main(["version"]) == 2
    assert "MAINSPRING_LOG_LEVEL is 'LOUD'" in capsys.readouterr().err


def test_help_explains_every_flag(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--model", "--max-num-batched-tokens", "--no-enable-prefix-caching", "--temperature", "--seed"):
        assert flag in text


def test_one_prompt_is_streamed_and_several_are_a_batch_with_a_progress_bar(capsys: Capture, connect: str) -> None:
    answers = []
    for question in QUESTIONS:
        assert main(["generate", connect, "--temperature=0", "--max-tokens=24", question]) == 0
        answers.append(capsys.readouterr().out.strip())
    assert all(answers)
    assert main(["generate", connect, "--temperature=0", "--max-tokens=24", *QUESTIONS]) == 0
    said = capsys.readouterr()
    assert said.out == "".join(f"> {q}\n{a}\n\n" for q, a in zip(QUESTIONS, answers, strict=True))
    assert "Processed prompts" in said.err
    assert "tokens/s" in said.err


def test_sampling_flags_reach_the_request(capsys: Capture, connect: str) -> None:
    story = ["generate", connect, "--temperature=1.2", "--max-tokens=30", "--ignore-eos", "Tell me a long story."]
    texts = []
    for seed in ("5", "5", "6"):
        assert main([*story, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    stop = texts[0].strip()[8:12]
    assert main([*story, "--seed=5", "--stop", stop]) == 0
    assert capsys.readouterr().out.strip() == texts[0].strip().partition(stop)[0].strip()


def test_explain_model_says_what_was_fused(capsys: Capture, connect: str) -> None:
    assert main(["generate", connect, "--explain-model"]) == 0
    assert "norm" in capsys.readouterr().out.lower()


def test_a_conversation_grows_until_new_and_ends_with_exit(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, connect: str
) -> None:
    prompts: list[int] = []
    add_request = llm_engine.LLMEngine.add_request

    def seen(self: llm_engine.LLMEngine, request_id: str, prompt: str, params: Any, **options: Any) -> str:
        assert options == {"tokenization_kwargs": {"add_special_tokens": False}}
        prompts.append(len(prompt))
        return add_request(self, request_id, prompt, params, **options)

    monkeypatch.setattr(llm_engine.LLMEngine, "add_request", seen)
    monkeypatch.setattr(
        sys, "stdin", io.StringIO(f"{QUESTIONS[0]}\n\n{QUESTIONS[0]}\n/new\n{QUESTIONS[0]}\n/exit\nno\n")
    )
    assert main(["chat", connect, "--temperature=0"]) == 0
    first, second, third = prompts
    assert second > 2 * first - 2, "question, answer, question"
    assert third == first
    said = capsys.readouterr()
    answers = [line for line in said.out.replace("> ", "\n").split("\n") if line.strip()]
    assert len(answers) == 3
    assert answers[0] == answers[2]
    assert "/exit" in said.err
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat", connect]) == 0, "the end of input ends it too"


def test_a_conversation_that_grew_too_long_says_so_and_goes_on(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, connect: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 5000 + f"\n{QUESTIONS[0]}\n"))
    assert main(["chat", connect, "--temperature=0"]) == 0
    said = capsys.readouterr()
    assert "max_model_len is 4096" in said.err
    assert said.out.replace(">", "").strip()


def test_the_demo_streams_answers_then_a_batch_and_its_speed(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch, connect: str
) -> None:
    monkeypatch.setattr(console, "_DEMO_BATCH", 3)
    monkeypatch.setattr(console, "LLM", partial(LLM, connect=connect.partition("=")[2]))
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n> ") == 5
    assert "3 answers" in text
    assert text.rstrip().endswith("tokens/s")


def test_no_prompt_text_is_logged_above_debug(caplog: pytest.LogCaptureFixture, connect: str) -> None:
    with caplog.at_level(logging.INFO):
        assert main(["generate", connect, "--max-tokens=4", "--stop=qqq", "Some private words."]) == 0
    assert "private" not in caplog.text


def test_keys_are_made_allowed_and_listed(capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert main(["keys", "new"]) == 0
    assert load_keypair(tmp_path / "mainspring" / "mainspring.key").public in capsys.readouterr().out
    assert main(["keys", "new"]) == 2
    assert main(["keys", "new", "laptop", "--output", str(tmp_path / "elsewhere")]) == 0
    assert main(["keys", "allow", str(tmp_path / "elsewhere" / "laptop.pub"), "--weight=2.5"]) == 0
    assert main(["keys", "allow", "k" * 40, "--name=ops", "--admin"]) == 0
    capsys.readouterr()
    assert main(["keys", "list"]) == 0
    laptop = load_keypair(tmp_path / "elsewhere" / "laptop.key").public
    assert capsys.readouterr().out == f"{laptop} laptop weight=2.5\n{'k' * 40} ops weight=1 admin\n"
    assert load_allowed(default_allowed()) == {
        laptop: AllowedKey("laptop", 2.5),
        "k" * 40: AllowedKey("ops", admin=True),
    }


def test_json_log_lines_are_objects_with_what_a_text_line_says() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        record = logging.LogRecord("mainspring.x", logging.ERROR, "", 0, "lost %d", (3,), sys.exc_info())
    text = JsonLines("core").format(record)
    assert "\n" not in text
    line = json.loads(text)
    assert (line["level"], line["process"], line["pid"]) == ("ERROR", "core", os.getpid())
    assert (line["logger"], line["message"]) == ("mainspring.x", "lost 3")
    assert "ValueError: two\nlines" in line["exception"]
    assert datetime.fromisoformat(line["time"]).timestamp() == pytest.approx(record.created, abs=0.001)


@pytest.mark.slow
def test_commands_of_the_containers_are_commands_of_ours() -> None:
    parser = _parser()
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]
    assert {name for name, service in services.items() if "depends_on" in service} == {"ask", "talk"}
    socket = services["core"]["volumes"][0]
    for name, service in services.items():
        dockerfile = (DOCKER.parent / service["build"]["dockerfile"]).read_text()
        assert f" AS {service['build']['target']}\n" in dockerfile
        assert socket in service["volumes"]
        words = [*service.get("entrypoint", ["mainspring"]), *service["command"]]
        args = parser.parse_args(words[1:])
        address = args.listen if name == "core" else args.connect
        assert address == f"ipc://{socket.partition(':')[2]}/core.sock"
    for file in DOCKER.glob("Dockerfile.*"):
        instructions = file.read_text().replace("\\\n", " ")
        assert re.search(r"^USER mainspring$", instructions, re.MULTILINE), file
        commands = re.findall(r"^(?:HEALTHCHECK .*)?CMD (\[.*\])$", instructions, re.MULTILINE)
        health = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", instructions, re.MULTILINE)
        assert len(health) == 1, file
        for words in map(json.loads, [*commands, *health]):
            parser.parse_args(words[1:] if words[0] == "mainspring" else words)
        copied = re.findall(r"^COPY (?!--from)(.*) \S+$", instructions, re.MULTILINE)
        assert all((DOCKER.parent / source).exists() for line in copied for source in line.split()), file


@pytest.mark.slow
def test_the_systemd_unit_starts_a_daemon_and_waits_longer_than_it_drains() -> None:
    unit = (DOCKER.parent / "docs" / "mainspring.service").read_text()
    words = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)[0].split()
    args = _parser().parse_args(words[1:])
    assert args.command == "daemon"
    assert args.listen == "ipc:///run/" + re.findall(r"^RuntimeDirectory=(.*)$", unit, re.MULTILINE)[0] + "/core.sock"
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)[0]) > DaemonOptions().drain_timeout


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback(connect: str) -> None:
    command = " ".join(COMMAND)
    script = f"{command} generate {connect} --max-tokens 20 --ignore-eos 'Tell me a story.' | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


@pytest.mark.slow
def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(connect: str) -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", connect, "--temperature=0", "--ignore-eos", "--max-tokens=3500"],
        stdin=terminal,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "Ctrl-C" in process.stderr.readline()
        os.write(controller, b"Tell me a long story.\n")
        assert process.stdout.read(12)
        process.send_signal(signal.SIGINT)
        said = ""
        while not said.endswith("\n> "):  # the chat prompts for input again
            said += process.stdout.read(1)
        os.write(controller, b"/exit\n")
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        assert "Traceback" not in err
    finally:
        process.kill()
        os.close(controller)
        os.close(terminal)
