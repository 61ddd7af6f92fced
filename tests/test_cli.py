"""The command line. Most commands run here with the core in this process; two are run as users run them."""

from __future__ import annotations

import io
import logging
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from mainspring import __version__
from mainspring.engine import llm_engine
from mainspring.engine.cli import main
from mainspring.engine.clients import make_client

COMMAND = [sys.executable, "-P", "-m", "mainspring.engine.cli"]
QUESTIONS = ["What is two plus three?", "What is two plus four?"]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def core_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_LOG_LEVEL", "WARNING")  # put back afterwards what main() sets
    monkeypatch.setattr(llm_engine, "make_client", lambda config, multiprocess: make_client(config, False))


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
        (["generate", "--tensor-parallel-size=2", "hi"], 1, "tensor_parallel_size is 2"),
    ],
)
@pytest.mark.usefixtures("core_in_this_process")
def test_an_error_is_one_line_and_a_status(arguments: list[str], status: int, words: str, capsys: Capture) -> None:
    assert main(arguments) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mainspring: error: ")
    assert said.err.count("\n") == 1
    assert words in said.err


@pytest.mark.parametrize(
    "arguments", [[], ["generat"], ["generate", "--no-such-flag", "x"], ["generate", "--block-size=7"]]
)
def test_what_argparse_refuses_is_a_usage_error(arguments: list[str], capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


@pytest.mark.usefixtures("core_in_this_process")
def test_debug_shows_where_an_error_came_from() -> None:
    with pytest.raises(OSError, match="no such folder"):
        main(["generate", "--debug", "--model=/no/such/model", "hi"])


def test_help_explains_every_flag(capsys: Capture) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--model", "--max-num-batched-tokens", "--no-enable-prefix-caching", "--temperature", "--seed"):
        assert flag in text


@pytest.mark.usefixtures("core_in_this_process")
def test_one_prompt_is_streamed_and_several_are_a_batch_with_a_progress_bar(capsys: Capture) -> None:
    answers = []
    for question in QUESTIONS:
        assert main(["generate", "--temperature=0", "--max-tokens=24", question]) == 0
        answers.append(capsys.readouterr().out.strip())
    assert all(answers)
    assert main(["generate", "--temperature=0", "--max-tokens=24", *QUESTIONS]) == 0
    said = capsys.readouterr()
    assert said.out == "".join(f"> {q}\n{a}\n\n" for q, a in zip(QUESTIONS, answers, strict=True))
    assert "Processed prompts" in said.err
    assert "tokens/s" in said.err


@pytest.mark.usefixtures("core_in_this_process")
def test_sampling_flags_reach_the_request(capsys: Capture) -> None:
    story = ["generate", "--temperature=1.2", "--max-tokens=30", "--ignore-eos", "Tell me a long story."]
    texts = []
    for seed in ("5", "5", "6"):
        assert main([*story, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    stop = texts[0].strip()[8:12]
    assert main([*story, "--seed=5", "--stop", stop]) == 0
    assert capsys.readouterr().out.strip() == texts[0].strip().partition(stop)[0].strip()


@pytest.mark.usefixtures("core_in_this_process")
def test_explain_model_says_what_was_fused(capsys: Capture) -> None:
    assert main(["generate", "--explain-model"]) == 0
    assert "norm" in capsys.readouterr().out.lower()


@pytest.mark.usefixtures("core_in_this_process")
def test_a_conversation_grows_until_new_and_ends_with_exit(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[int] = []
    add_request = llm_engine.LLMEngine.add_request

    def seen(self: llm_engine.LLMEngine, request_id: str, prompt: dict[str, list[int]], params: object) -> str:
        prompts.append(len(prompt["prompt_token_ids"]))
        return add_request(self, request_id, prompt, params)  # type: ignore[arg-type]

    monkeypatch.setattr(llm_engine.LLMEngine, "add_request", seen)
    monkeypatch.setattr(
        sys, "stdin", io.StringIO(f"{QUESTIONS[0]}\n\n{QUESTIONS[0]}\n/new\n{QUESTIONS[0]}\n/exit\nno\n")
    )
    assert main(["chat", "--temperature=0"]) == 0
    first, second, third = prompts
    assert second > 2 * first - 2, "question, answer, question"
    assert third == first
    said = capsys.readouterr()
    answers = [line for line in said.out.replace("> ", "\n").split("\n") if line.strip()]
    assert len(answers) == 3
    assert answers[0] == answers[2]
    assert "/exit" in said.err
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert main(["chat"]) == 0, "the end of input ends it too"


@pytest.mark.usefixtures("core_in_this_process")
def test_a_conversation_that_grew_too_long_says_so_and_goes_on(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 60 + f"\n{QUESTIONS[0]}\n"))
    assert main(["chat", "--temperature=0", "--max-model-len=40"]) == 0
    said = capsys.readouterr()
    assert "max_model_len is 40" in said.err
    assert said.out.replace(">", "").strip()


@pytest.mark.usefixtures("core_in_this_process")
def test_the_demo_streams_answers_then_a_batch_and_its_speed(capsys: Capture) -> None:
    assert main(["demo"]) == 0
    text = capsys.readouterr().out
    assert text.count("\n> ") == 5
    assert "64 answers" in text
    assert text.rstrip().endswith("tokens/s")


@pytest.mark.usefixtures("core_in_this_process")
def test_no_prompt_text_is_logged_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert main(["generate", "--max-tokens=4", "--stop=qqq", "Some private words."]) == 0
    assert "private" not in caplog.text


def test_a_closed_pipe_is_no_traceback() -> None:
    command = " ".join(COMMAND)
    script = f"{command} generate --max-tokens 20 --ignore-eos 'Tell me a story.' | true"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=200, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on() -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", "--temperature=0", "--ignore-eos", "--max-tokens=3500"],
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
        time.sleep(0.2)
        os.write(controller, b"/exit\n")
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "Traceback" not in err
    finally:
        process.kill()
        os.close(controller)
        os.close(terminal)
