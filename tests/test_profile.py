"""A profile of a core's steps: a Chrome trace with what each step did, and refusals that say why."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mainspring import EngineArgs, LLMEngine, SamplingParams
from mainspring.core.worker import profiler
from mainspring.ipc.errors import InvalidRequestError


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LLMEngine]:
    monkeypatch.setenv(profiler.FOLDER, str(tmp_path / "traces"))
    with LLMEngine.from_engine_args(EngineArgs(), enable_multiprocessing=False) as engine:
        yield engine


def steps(engine: LLMEngine, tokens: int) -> None:
    engine.add_request("r", "Tell me", SamplingParams(max_tokens=tokens, ignore_eos=True))
    while engine.has_unfinished_requests():
        engine.step()


def spans(trace: str) -> list[str]:
    events = json.loads(Path(trace).read_text())["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def test_a_trace_has_what_each_step_did_between_start_and_stop(engine: LLMEngine, tmp_path: Path) -> None:
    steps(engine, 3)
    engine.start_profile("mine")
    engine.start_profile("other")  # a profile is in progress
    steps(engine, 5)
    trace = engine.stop_profile()
    steps(engine, 2)
    assert Path(trace).parent == tmp_path / "traces"
    assert Path(trace).name.startswith("mine-")
    for name in ("execute", "sample", "wait", "update"):
        assert spans(trace).count(name) == 5, name
    engine.start_profile()
    again = engine.stop_profile()
    assert again != trace
    assert spans(again) == []


def test_without_a_profile_there_is_nothing_to_stop(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="start_profile first"):
        engine.stop_profile()


@pytest.mark.parametrize("prefix", ["", "../up", "a/b", "x" * 101, 7, "a b"])
def test_a_prefix_is_a_name_and_no_path(engine: LLMEngine, prefix: str) -> None:
    with pytest.raises(InvalidRequestError, match="profile_prefix is"):
        engine.start_profile(prefix)


def test_a_profile_that_is_never_stopped_is_dropped(engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.start_profile()
    monkeypatch.setattr(profiler, "MAX_SECONDS", -1.0)
    steps(engine, 2)
    with pytest.raises(InvalidRequestError, match="no profile is under way"):
        engine.stop_profile()
