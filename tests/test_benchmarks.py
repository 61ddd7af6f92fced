"""How the CPU benchmarks evaluate their measurements."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tiers import fast_only

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import compare
import media_speed
import resume
import versus
from cpu import at_least
from growth import Point, cliffs
from mainspring.ipc.config import EngineConfig, ModelConfig
from mainspring.ipc.media_client import MediaInput
from mainspring.media.preparer import Preparer
from resume import Log


def points(*pairs: tuple[float, float]) -> list[Point]:
    return [Point(*pair) for pair in pairs]


def test_growth_in_proportion_or_flat_or_with_a_knee_is_no_cliff() -> None:
    assert cliffs(points((1, 1), (2, 2), (4, 4), (8, 8))) == []
    assert cliffs(points((1, 5), (2, 5), (4, 5), (8, 5))) == []
    assert cliffs(points((1, 5), (2, 5), (4, 5), (8, 8), (16, 16))) == []


def test_a_step_up_is_a_cliff_in_the_middle_and_at_the_end() -> None:
    assert cliffs(points((8, 10), (16, 20), (64, 22), (128, 24))) == [16]
    assert cliffs(points((8, 10), (16, 11), (32, 30))) == [32]


def test_ratios_are_of_rounds_that_have_both_engines() -> None:
    rounds = [
        {"mainspring": {"time_s": 2.0}, "vllm": {"time_s": 5.0}},
        {"mainspring": {"time_s": 1.0}},
        {"mainspring": {"time_s": 4.0}, "vllm": {"time_s": 4.0}},
    ]
    assert compare.ratios(rounds, "vllm") == [2.5, 1.0]


def test_a_bar_is_judged_by_the_digits_that_are_shown() -> None:
    assert at_least("speed", 1.25, [1.1, 1.246, 9.0]) == (
        "speed (1.25×)",
        "1.25× (1.10× to 9.00× in 3 rounds)",
        True,
    )
    assert at_least("speed", 1.25, [1.244]).passed is False
    assert at_least("share", 0.6, [0.61], "%") == ("share (60%)", "61%", True)
    assert at_least("speed", 1.0, []).passed is False


def test_a_log_goes_on_unless_the_sources_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    assert Log(path).once("answer", lambda: 42) == 42
    assert Log(path).once("answer", lambda: 43) == 42
    monkeypatch.setattr(resume, "source", lambda: "other")
    assert Log(path).once("answer", lambda: 43) == 43


def test_a_round_is_kept_once_all_engines_ran_and_one_that_failed_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def run(engine: str, workload: str) -> compare.Run | None:
        tried.append(engine)
        return None if engine == "broken" else {"time_s": 1.0}

    monkeypatch.setattr(compare, "run", run)
    log, plan = Log(tmp_path / "log"), {"some": ["ours", "broken"], "others": ["ours"]}
    played = compare.play(plan, 2, log)
    assert tried == ["ours", "broken", "ours", "ours", "ours"]
    assert [list(one) for one in played["some"]] == [["ours"], ["ours"]]
    tried.clear()
    compare.play(plan, 2, log)
    assert tried == ["ours", "broken", "ours"]


ENGINE = """
import time
from pathlib import Path
from types import SimpleNamespace as Named

class SamplingParams:
    def __init__(self, *, max_tokens, **_):
        self.max_tokens = max_tokens

class LLM:
    def __init__(self, **options):
        print("an engine's own words")
    def generate(self, prompts, params, **_):
        params = params if isinstance(params, list) else [params] * len(prompts)
        with Path({log!r}).open("a") as file:
            print({name!r}, len(prompts), *prompts[-1]["prompt_token_ids"][:3], file=file)
        time.sleep({seconds})
        return [Named(outputs=[Named(token_ids=[0] * (each.max_tokens - {missing}))]) for each in params]
"""


def checkout(folder: Path, name: str, seconds: float, missing: int = 0) -> str:
    """A Python in which ``mainspring`` is an engine that only sleeps and logs its calls to `folder`/log."""
    package = folder / name / "mainspring"
    package.mkdir(parents=True)
    engine = ENGINE.format(log=str(folder / "log"), name=name, seconds=seconds, missing=missing)
    (package / "__init__.py").write_text(engine)
    python = folder / name / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{package.parent}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versus, "MODELS", tmp_path)
    (tmp_path / "llama-110m").mkdir()
    (tmp_path / "llama-110m" / "config.json").write_text(json.dumps({"vocab_size": 1000}))


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize("workload", fast_only(("single-110m",), ["single-110m", "prefix-110m", "start"]))
def test_two_checkouts_are_asked_the_same_in_turn(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pythons = checkout(tmp_path, "here", 0.05), checkout(tmp_path, "there", 1.0)
    line = versus.compare(workload, pythons, 2)
    said = capsys.readouterr().out
    assert f"here: {tmp_path}/here/mainspring, there: {tmp_path}/there/mainspring" in said
    ratio = float(line.partition("median of 2 rounds: ")[2].split()[0])
    assert ratio > (1.5 if workload == "start" else 5)  # the former includes the start of Python itself
    log = [asked.split(" ", 1) for asked in (tmp_path / "log").read_text().splitlines()]
    assert [name for name, _ in log] == ["there", "here", "here", "there", "there", "here"]
    rounds = [{what for _, what in log[at : at + 2]} for at in (0, 2, 4)]
    assert [len(asked) for asked in rounds] == [1, 1, 1]
    if workload != "start":
        assert len(set.union(*rounds)) == 3  # no two rounds share prompts


@pytest.mark.usefixtures("models")
def test_an_engine_that_answers_too_little_is_no_measurement(tmp_path: Path) -> None:
    pythons = checkout(tmp_path, "here", 0), checkout(tmp_path, "there", 0, missing=1)
    with pytest.raises(SystemExit, match="an engine ended"):
        versus.compare("single-110m", pythons, 1)


def test_the_throughput_ratio_is_above_one_if_this_checkout_is_faster() -> None:
    pairs = [versus.Pair(2.0, 3.0), versus.Pair(2.0, 4.0), versus.Pair(2.0, 2.0)]
    assert versus.conclude("w", pairs) == (
        "w: 2.000 s here, 3.000 s there; throughput of here over there, median of 3 rounds: 1.500 (1.000 to 2.000)"
    )


IMAGE_TOKENS = {"smolvlm-tiny": 5 * 4, "smolvlm-500m": 13 * 64, "qwen2-vl-2b": 17 * 23}  # as docs/performance.md says


@pytest.mark.parametrize("name", fast_only(("smolvlm-tiny",), IMAGE_TOKENS))
def test_both_engines_get_the_same_tokens_of_an_image(name: str, tmp_path: Path) -> None:
    processor = media_speed.save_processor(name, tmp_path)
    asked = media_speed.questions(media_speed.SHAPES[name].before, 1, 0)[0]
    config = EngineConfig(model_config=ModelConfig(model=str(tmp_path)))
    ours = Preparer(config).prepare(asked.text, [MediaInput("image", asked.file)], {})
    theirs = processor(text=[asked.text], images=[[media_speed.decoded(asked.file)]])
    assert ours.token_ids == list(theirs["input_ids"][0])
    token = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>" if "qwen" in name else "<image>")
    assert ours.token_ids.count(token) == IMAGE_TOKENS[name]


def test_a_batch_has_so_many_images_and_shares_nothing_with_another() -> None:
    one, other = (media_speed.questions("<image>", 4, seed) for seed in (1, 2))
    assert len({each.file for each in one}) == 4
    assert len({each.text for each in one}) == len(one) == 16
    assert not {each.file for each in one} & {each.file for each in other}
