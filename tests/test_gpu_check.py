"""`make gpu-check` on a machine without a GPU: skipped with one sentence, and each part rehearsed with tiny models."""

from __future__ import annotations

import hashlib
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
def test_a_rehearsal_goes_on_in_another_process_and_leaves_all_results_in_a_folder_and_none_on_the_page(
    tmp_path: Path,
) -> None:
    before = gpu_check.PAGE.read_text()
    words = ["--rehearse", "--output", str(tmp_path), "--continue", str(tmp_path / "kept.json"), "--only"]
    assert run(*words, "kernels").returncode == 0
    done = run(*words, "kernels,llama-3.1-8b")
    assert done.returncode == 0, done.stderr
    assert "finished by earlier runs: kernels\n" in done.stdout
    result = json.loads((tmp_path / "gpu_check.json").read_text())
    assert list(result["parts"]) == ["kernels", "llama-3.1-8b"]
    assert result["gpu"] == "CPU rehearsal"
    assert result["rehearsal"]
    text = (tmp_path / "gpu_check.txt").read_text()
    assert text.startswith("REHEARSAL on a CPU: the numbers mean nothing.")
    for part in ("kernels", "llama-3.1-8b"):
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


def test_a_page_takes_the_sections_of_a_run_and_keeps_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [f"<!-- begin {section} -->\nold {section}\n<!-- end {section} -->\n" for section in gpu_check.SECTIONS]
    bars = [
        {"name": bar.name, "limit": bar.limit, "measured": "7 a|b", "passed": True} for bar in gpu_check.BARS["start"]
    ]
    parts = {"start": {"section": "start", "bars": bars}}
    path = tmp_path / "page.md"
    path.write_text("before\n" + "".join(blocks) + "after\n")
    monkeypatch.setattr(gpu_check, "PAGE", path)
    gpu_check.put_on_page({"parts": parts, "command": "C", "date": "D", "machine": "M", "rehearsal": False})
    page = path.read_text()
    assert page.count("old ") == len(gpu_check.SECTIONS) - 1
    assert page.startswith("before\n")
    assert "\n<!-- end start -->\n" in page
    assert page.endswith("after\n")
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


class Machine:
    """Replaces the GPU and git: each part takes exactly its time limit, on a simulated clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.commit, self.gpu, self.now = "abc", "NVIDIA H200", 1000.0
        self.ran: list[str] = []
        self.errors: dict[str, str] = {}
        self._words = ["--output", str(folder / "output"), "--continue", str(folder / "kept.json")]
        for name, fake in {
            "no_gpu": lambda: "",
            "commit": lambda: self.commit,
            "gpu_name": lambda rehearse: self.gpu,
            "run_in_process": self._run,
        }.items():
            monkeypatch.setattr(gpu_check, name, fake)
        monkeypatch.setattr(gpu_check.time, "monotonic", lambda: self.now)

    def _run(self, name: str, args: Any, seconds: float) -> dict[str, Any]:
        self.ran.append(name)
        self.now += seconds
        measured = f"{name} at {self.commit}"
        bars = [
            {**bar._asdict(), "measured": measured, "passed": True if bar.limit else None}
            for bar in gpu_check.BARS[name]
        ]
        section = gpu_check.PARTS[name].section
        error = self.errors.get(name, "")
        return {"section": section, "seconds": seconds, "error": error, "bars": bars, "machine": self.gpu}

    def check(self, *words: str) -> tuple[list[str], int]:
        """The parts started by this run, and its exit status."""
        self.ran = []
        status = gpu_check.main([*self._words, *words])
        return self.ran, status


def test_two_runs_measure_everything_and_a_third_has_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    machine, page = Machine(monkeypatch, tmp_path), tmp_path / "gpu.md"
    page.write_text(gpu_check.PAGE.read_text())
    monkeypatch.setattr(gpu_check, "PAGE", page)
    began = machine.now
    first, status = machine.check()
    assert machine.now - began <= 60 * 9 - gpu_check.OVERHEAD_SECONDS
    assert status == 1
    assert f"not finished: {', '.join(list(gpu_check.PARTS)[len(first) :])}; run the same" in capsys.readouterr().out
    began = machine.now
    second, status = machine.check("--write")
    assert machine.now - began <= 60 * 9 - gpu_check.OVERHEAD_SECONDS
    assert (first + second, status) == (list(gpu_check.PARTS), 0)
    assert first
    assert second
    for name in gpu_check.PARTS:
        assert page.read_text().count(f"{name} at abc") == len(gpu_check.BARS[name])
    assert gpu_check.UNKNOWN not in page.read_text()
    assert machine.check() == ([], 0)
    text = (tmp_path / "output" / "gpu_check.txt").read_text()
    assert f"{sum(part.seconds for part in gpu_check.PARTS.values()):.0f} s in all" in text


def test_another_commit_or_gpu_is_measured_anew_and_the_first_is_still_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    assert machine.check("--only", "half,start") == (["half", "start"], 0)
    assert machine.check("--only", "half,kernels") == (["kernels"], 0)
    machine.gpu = "NVIDIA A100"
    assert machine.check("--only", "half") == (["half"], 0)
    machine.gpu, machine.commit = "NVIDIA H200", "def"
    assert machine.check("--only", "half") == (["half"], 0)
    found = json.loads((tmp_path / "output" / "gpu_check.json").read_text())
    assert list(found["parts"]) == ["half"]
    assert found["parts"]["half"]["bars"][0]["measured"] == "half at def"
    machine.commit = "abc"
    assert machine.check("--only", "half,start,kernels") == ([], 0)


def test_no_part_begins_that_may_not_end_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, tmp_path)
    needed = gpu_check.OVERHEAD_SECONDS + gpu_check.PARTS["exact"].seconds + gpu_check.PARTS["half"].seconds
    words = ["--only", "exact,deterministic,half", "--minutes"]
    assert machine.check(*words, str((needed + 1) / 60)) == (["exact", "half"], 1)
    alone = gpu_check.OVERHEAD_SECONDS + gpu_check.PARTS["deterministic"].seconds
    assert machine.check(*words, str((alone - 1) / 60)) == ([], 1)
    assert machine.check(*words, "9") == (["deterministic"], 0)


def test_a_part_that_was_cut_off_runs_again_after_those_that_were_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, tmp_path)
    machine.errors["exact"] = "cut off after 80 s"
    assert machine.check("--only", "exact") == (["exact"], 1)
    machine.errors.clear()
    assert machine.check("--only", "exact,half") == (["half", "exact"], 0)


def test_changed_sources_are_no_longer_their_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"rev-parse": "abc\n", "status": ""}

    def git(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 0, said[command[1]], "")

    monkeypatch.setattr(gpu_check.subprocess, "run", git)
    assert gpu_check.commit() == "abc"
    said["status"] = " M core/loop.py\n"
    changed = gpu_check.commit()
    assert changed.startswith("abc, sources ")
    monkeypatch.setattr(gpu_check.resume, "hash_sources", lambda *_: hashlib.blake2b(b"other", digest_size=8))
    assert gpu_check.commit() not in ("abc", changed)


@pytest.mark.parametrize("words", [["--only", "speed"], ["--rehearse", "--write"]])
def test_what_makes_no_sense_is_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        gpu_check.parse(words)


def test_parts_are_chosen_by_section_and_by_name() -> None:
    assert gpu_check.parse(["--only", "kernels,start"]).names == ["kernels", "start"]
    assert gpu_check.parse(["--only", "half"]).names == ["half"]
    assert gpu_check.parse([]).names == list(gpu_check.PARTS)
    assert sum(part.section == "engine" for part in gpu_check.PARTS.values()) == len(SHAPES) + 1
    assert len(FAMILIES) == 8
