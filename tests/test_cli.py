"""The command line, run as users run it."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from mainspring import __version__
from mainspring.engine.cli import main

COMMAND = [sys.executable, "-P", "-m", "mainspring.engine.cli"]


def mainspring(*arguments: str, said: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], input=said, capture_output=True, text=True, timeout=120, check=False)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
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
def test_an_error_is_one_line_and_a_status(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == status
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mainspring: error: ")
    assert said.err.count("\n") == 1
    assert words in said.err


@pytest.mark.parametrize(
    "arguments", [[], ["generat"], ["generate", "--no-such-flag", "x"], ["generate", "--block-size=7"]]
)
def test_what_argparse_refuses_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_debug_shows_the_traceback() -> None:
    done = mainspring("generate", "--debug", "--model=/no/such/model", "hi")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_help_explains_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["generate", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--model", "--max-num-batched-tokens", "--no-enable-prefix-caching", "--temperature", "--seed"):
        assert flag in text


def test_one_prompt_is_completed_on_standard_output_alone() -> None:
    done = mainspring("generate", "--max-tokens=24", "What is two plus three?")
    assert (done.returncode, done.stdout) == (0, "five\n"), done.stderr


def test_several_prompts_are_a_batch_with_a_progress_bar() -> None:
    done = mainspring("generate", "--temperature=0", "What is two plus three?", "What is two plus four?")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "> What is two plus three?\nfive\n\n> What is two plus four?\nsix\n\n"
    assert "Processed prompts" in done.stderr
    assert "tokens/s" in done.stderr


def test_a_seed_repeats_a_sampled_story() -> None:
    arguments = ("generate", "--temperature=1.2", "--seed=5", "--max-tokens=30", "Tell me a long story.")
    assert mainspring(*arguments).stdout == mainspring(*arguments).stdout != ""


def test_explain_model_says_what_was_fused() -> None:
    done = mainspring("generate", "--explain-model")
    assert done.returncode == 0, done.stderr
    assert "norm" in done.stdout.lower()


def test_a_conversation_remembers_until_new_and_ends_with_exit() -> None:
    said = "What is two plus three?\n\n/new\nWhat is two plus four?\n/exit\nnever\n"
    done = mainspring("chat", "--temperature=0", said=said)
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace("> ", "").split() == ["five", "six"]
    assert "/exit" in done.stderr
    assert mainspring("chat", said="").returncode == 0, "the end of input ends it too"


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on() -> None:
    controller, terminal = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "chat", "--temperature=0", "--ignore-eos", "--max-tokens=3500"],
        stdin=terminal, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        assert "Ctrl-C" in process.stderr.readline()
        os.write(controller, b"Tell me a long story.\n")
        time.sleep(1.5)
        process.send_signal(signal.SIGINT)
        os.write(controller, b"/exit\n")
        out, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert len(out) < 20_000
    finally:
        process.kill()
        os.close(controller)
        os.close(terminal)


def test_the_demo_streams_answers_then_a_batch_and_its_speed() -> None:
    done = mainspring("demo")
    assert done.returncode == 0, done.stderr
    assert "eighty-five" in done.stdout
    assert "Paris" in done.stdout
    assert "64 answers" in done.stdout
    assert "tokens/s" in done.stdout


def test_a_closed_pipe_is_no_traceback() -> None:
    script = (
        f"{sys.executable} -P -m mainspring.engine.cli generate --max-tokens 50 --ignore-eos 'Tell me a story.' | true"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "Traceback" not in done.stderr


def test_no_prompt_text_is_logged_above_debug() -> None:
    os.environ["MAINSPRING_LOG_LEVEL"] = "INFO"
    try:
        done = mainspring("generate", "--max-tokens=4", "--stop=qqq", "Some private words.")
    finally:
        del os.environ["MAINSPRING_LOG_LEVEL"]
    assert done.returncode == 0
    assert "private" not in done.stderr
