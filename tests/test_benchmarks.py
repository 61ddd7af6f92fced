"""What the CPU benchmarks make of what they measured."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import compare
import resume
from cpu import at_least
from growth import Point, cliffs
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
