"""`make gpu-check` on a machine without a GPU: skipped with one sentence, and each part rehearsed on toys."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))

import gpu_check
from gpu_models import FAMILIES, SHAPES, Setup
from gpu_speed import Ceilings, Work, idle_shares
from tiers import fast_only

PROGRAM = gpu_check.__file__


def run(*options: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, PROGRAM, *options]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env})


def rehearse(part: str, folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    gpu_check.run_part(part, Setup(torch.device("cpu"), None, folder, True), found.append)
    return found


@pytest.mark.slow
def test_without_a_gpu_it_is_skipped_with_one_sentence() -> None:
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0
    assert done.stdout.startswith("gpu-check was skipped: ")
    assert len(done.stdout.splitlines()) == 1


@pytest.mark.parametrize("part", fast_only(["llama-3.1-8b"], gpu_check.PARTS))
def test_a_part_measures_every_bar_it_has(part: str, tmp_path: Path) -> None:
    found = rehearse(part, tmp_path)
    assert [each for each in found if "error" in each] == []
    assert {each["name"] for each in found} == {bar.name for bar in gpu_check.BARS[part]}
    assert [each for each in found if each["passed"] is False] == []
    for each in found:
        assert each["measured"], each


@pytest.mark.slow
def test_the_command_leaves_all_results_in_a_folder_and_none_on_the_page(tmp_path: Path) -> None:
    before = gpu_check.PAGE.read_text()
    done = run("--rehearse", "--only", "exact,kernels", "--output", str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(result["parts"]) == ["exact", "kernels"]
    assert result["rehearsal"]
    text = (tmp_path / "gpu_check.txt").read_text()
    assert text.startswith("REHEARSAL on a CPU: the numbers mean nothing.")
    for part in ("exact", "kernels"):
        for bar in gpu_check.BARS[part]:
            assert f"| {bar.name} |" in text
    with pytest.raises(SystemExit, match="not for the page"):
        gpu_check.put_on_page(result)
    assert gpu_check.PAGE.read_text() == before


@pytest.mark.slow
def test_a_part_that_takes_too_long_is_cut_off_and_its_bars_fail(tmp_path: Path) -> None:
    args = gpu_check.parse(["--rehearse", "--output", str(tmp_path)])
    part = gpu_check.run_in_process("exact", args, 1.0)
    assert part["error"] == "cut off after 1 s"
    assert {bar["measured"] for bar in part["bars"]} == {"not measured: cut off after 1 s"}
    assert not any(bar["passed"] for bar in part["bars"])


def test_what_ends_a_part_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(setup: Setup, say: Any) -> None:
        raise RuntimeError("no such kernel\nand more")

    monkeypatch.setitem(gpu_check.FUNCTIONS, "start", broken)
    assert rehearse("start", tmp_path) == [{"error": "RuntimeError: no such kernel"}]


def test_the_page_has_every_bar_of_every_section() -> None:
    page = gpu_check.PAGE.read_text()
    assert set(gpu_check.SECTIONS) == {part.section for part in gpu_check.PARTS.values()}
    for section in gpu_check.SECTIONS:
        rows = page.partition(f"<!-- begin {section} -->")[2].partition(f"<!-- end {section} -->")[0].splitlines()
        told = [row.split(" | ")[0].removeprefix("| ") for row in rows if row.startswith("| ")][2:]
        names = [
            bar.name
            for name, part in gpu_check.PARTS.items()
            if part.section == section
            for bar in gpu_check.BARS[name]
        ]
        assert told == names


def test_a_page_takes_the_sections_of_a_run_and_keeps_the_others() -> None:
    blocks = [f"<!-- begin {section} -->\nold {section}\n<!-- end {section} -->\n" for section in gpu_check.SECTIONS]
    bars = [
        {"name": bar.name, "limit": bar.limit, "measured": "7 a|b", "passed": True} for bar in gpu_check.BARS["start"]
    ]
    result = {"parts": {"start": {"section": "start", "bars": bars}}, "command": "C", "date": "D", "machine": "M"}
    page = gpu_check.fill("before\n" + "".join(blocks) + "after\n", result)
    assert page.count("old ") == 3
    assert page.startswith("before\n")
    assert page.endswith("\n<!-- end start -->\nafter\n")
    assert page.count("7 a\\|b | pass |") == len(bars)
    assert "`C`, D, M." in page


def test_gaps_between_steps_are_told_from_gaps_between_kernels() -> None:
    step = [(at * 1e4, at * 1e4 + 9e3) for at in range(10)]  # 1 µs after each of ten kernels
    spans = [(start + n * 109_000, stop + n * 109_000) for n in range(50) for start, stop in step]  # then 10 µs
    long, all_gaps = idle_shares(spans)
    assert long == pytest.approx(10 / 109, rel=0.03)
    assert all_gaps == pytest.approx((9 + 10) / 109, rel=0.03)
    assert idle_shares([(0, 10), (2, 4), (3, 20), (20, 30)] * 3) == (0, 0)


def test_the_work_of_a_shape_is_what_its_parameters_say() -> None:
    millions = {name: Work(shape) for name, shape in SHAPES.items()}
    parameters = {name: (work.always + work.experts * work.expert + work.head) / 1e9 for name, work in millions.items()}
    assert parameters["llama-3.1-8b"] == pytest.approx(8.03 - 0.525, abs=0.01)  # all but the input embeddings
    assert parameters["qwen3-0.6b"] == pytest.approx(0.596, abs=0.01)  # tied
    assert parameters["qwen3-30b-a3b"] == pytest.approx(30.53 - 0.311, abs=0.05)
    moe = millions["qwen3-30b-a3b"]
    assert moe.weight_bytes(1) == 2 * (moe.always + 8 * moe.expert + moe.head)
    assert moe.weight_bytes(4096) == pytest.approx(2 * (moe.always + 128 * moe.expert + moe.head))
    top = Ceilings(4.3e12, 7.8e14)
    least, want = millions["llama-3.1-8b"].step_seconds(1, 1024, top)
    assert (round(least * 1e3, 1), want) == (3.5, "bandwidth")
    assert millions["llama-3.1-8b"].flops(1, 1, 0) == pytest.approx(15.0e9, rel=0.01)


@pytest.mark.parametrize("words", [["--only", "speed"], ["--rehearse", "--write"]])
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.parse(words)


def test_parts_are_chosen_by_section_and_by_name() -> None:
    assert gpu_check.parse(["--only", "kernels,start"]).names == ["kernels", "start"]
    assert gpu_check.parse(["--only", "half"]).names == ["half"]
    assert gpu_check.parse([]).names == list(gpu_check.PARTS)
    assert sum(part.section == "engine" for part in gpu_check.PARTS.values()) == len(SHAPES) + 1
    assert len(FAMILIES) == 5
