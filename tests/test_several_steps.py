"""Plans of several decode steps: they bring what as many plans of one step would, and end when something is due."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

import tiny
from harness import Engine, result_of, run_core
from mainspring import EngineArgs
from mainspring.core.loop import EngineCore
from mainspring.core.plan import several_steps
from mainspring.core.plan.step import Scores, Step, StepPlan, StepResult
from mainspring.core.worker.runner import ModelRunner
from mainspring.ipc.inbox import Event, Inbox
from mainspring.ipc.messages import AddRequest, Outputs, Sampling
from native_here import why_not

native = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


def decode(most_steps: int, lengths: list[int], **fields: Any) -> Engine:
    """Run a request of each of these output lengths to its end."""
    engine, numbers = Engine(most_steps=most_steps, weights=(1.0, 2.0), **fields), random.Random(1)
    engine._luck.choice = lambda options: options[-1]  # type: ignore[method-assign]  # no plan is interrupted
    for i, length in enumerate(lengths):
        engine.add([numbers.randrange(50) for _ in range(5)], length, frontend=i % 2)
    engine.run()
    engine.check_outputs()
    return engine


def test_frontends_are_charged_and_steps_counted_as_one_by_one() -> None:
    one, several = (decode(most, [3, 17, 30, 30], num_blocks=200) for most in (1, 8))
    assert several.num_several > 3
    assert [f.served for f in one.scheduler.fair] == [f.served for f in several.scheduler.fair]
    assert one.stats.num_steps == several.stats.num_steps
    assert one.stats.generation_tokens == several.stats.generation_tokens == 80
    assert len(several.steps) < len(one.steps) / 2


def test_nothing_is_preempted_for_the_blocks_of_later_steps() -> None:
    one, several = (decode(most, [20] * 6, num_blocks=40, block_size=4) for most in (1, 8))
    assert several.num_several
    assert several.stats.num_preemptions == one.stats.num_preemptions == 0


def test_a_waiting_request_ends_plans_of_several_steps() -> None:
    engine = Engine(most_steps=8, max_num_seqs=1)
    engine.add([1, 2, 3], 30)
    engine.step(), engine.step()
    engine.add([4, 5, 6], 30)
    before = engine.num_several
    while engine.stats.num_waiting:
        engine.step()
    assert engine.num_several == before
    engine.run()
    assert engine.num_several > before


def test_a_plan_is_as_long_as_the_time_that_a_step_takes_allows() -> None:
    engine = Engine(most_steps=32)
    engine.add([1, 2, 3], 60)
    engine.step()
    for seconds, steps in ((several_steps.MOST_SECONDS, 1), (several_steps.MOST_SECONDS / 5.5, 5), (1e-9, 32)):
        engine.scheduler.state.step_seconds = seconds
        step = engine.launch()
        assert step is not None
        assert step.plan.num_steps == steps
        engine.retire()


def test_a_plan_lists_few_stop_tokens() -> None:
    for count, several in ((several_steps.MOST_STOPS, True), (several_steps.MOST_STOPS + 1, False)):
        engine = Engine(most_steps=8)
        engine.add([1, 2, 3], 30, stop=range(1000, 1000 + count))  # none of them comes
        engine.run()
        assert bool(engine.num_several) == several


def test_without_a_receiver_only_patient_requests_get_several_tokens_at_once() -> None:
    engine = Engine(most_steps=8)
    engine.scheduler.state.hands_out = False
    engine.add([1, 2, 3], 40)  # handle 0: not patient
    engine.run()
    assert not engine.num_several
    engine.add([1, 2, 4], 40)
    engine.run()
    assert engine.num_several


def test_scores_of_requests_that_have_ended_are_left_out() -> None:
    engine = Engine(most_steps=8)
    keys = [engine.add([1, 2, 3 + i], 60) for i in range(3)]
    engine.step(), engine.step()
    step = engine.launch()
    assert step is not None
    assert step.plan.num_steps >= 3
    engine.abort(keys[1])
    tokens = 100 + np.arange(9)  # three steps of three rows

    def scores(rows: list[int]) -> Scores:
        mine = tokens[rows].astype(np.int32)[:, None]
        return Scores(np.array(rows), mine, mine.astype(np.float32), np.ones(len(rows), np.int32))

    of_groups = [scores([0, 1, 3, 4, 6, 7]), scores([2, 5, 8])]
    out = engine.scheduler.update(step, result_of(step.plan, tokens, num_steps=3, logprobs=of_groups))[0]
    assert out.token_ids == [100, 102, 103, 105, 106, 108]
    assert [one.rows for one in out.logprobs] == [[0, 2, 4], [1, 3, 5]]
    for one in out.logprobs:
        assert np.frombuffer(one.token_ids, np.int32).tolist() == [out.token_ids[row] for row in one.rows]


# ------------------------------------------------------------------ with a model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints by architecture."""
    found = {}
    for name in ("llama", "gemma3", "qwen3", "qwen3_5", "mamba2"):
        found[name] = tmp_path_factory.mktemp(name)
        tiny.make(name, found[name])
    return found


REQUESTS = [
    Sampling(30),
    Sampling(25, seed=3, temperature=0.9),
    Sampling(30, seed=-4, temperature=1.3, top_p=0.8, stop_token_ids=[7, 8, 9]),
    Sampling(21, seed=5, temperature=0.7, top_k=9, min_p=0.02),
]


def tokens_of(
    core: EngineCore, monkeypatch: pytest.MonkeyPatch, seconds: float, stop: Sequence[int] = ()
) -> dict[Any, list[int]]:
    """The tokens of `REQUESTS`, in plans of at most so many seconds. stop: the first request's stop tokens."""
    monkeypatch.setattr(several_steps, "MOST_SECONDS", seconds)
    core.scheduler.reset_prefix_cache()
    core.connect(0)
    numbers = random.Random(2)
    for handle, sampling in enumerate([replace(REQUESTS[0], stop_token_ids=list(stop)), *REQUESTS[1:]]):
        prompt = [numbers.randrange(3, 60) for _ in range(3 + 11 * handle)]
        core.add_request(0, AddRequest(handle, "", prompt, sampling, patient=True))
    found = {key: tokens for key, (tokens, _) in run_core(core).items()}
    core.disconnect(0)
    return found


def core_of(folder: Path, **fields: Any) -> EngineCore:
    args = EngineArgs(model=str(folder), device="cpu", num_gpu_blocks_override=100, skip_tokenizer_init=True, **fields)
    return EngineCore(args.create_engine_config())


def watch(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Returns a list that receives, for each plan, the steps that it allows and those that are made."""
    found: list[tuple[int, int]] = []
    update = core.scheduler.update

    def noted(step: Step, result: StepResult) -> dict[int, Outputs]:
        found.append((step.plan.num_steps, result.num_steps))
        return update(step, result)

    monkeypatch.setattr(core.scheduler, "update", noted)
    return found


@native
@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("llama", {}),
        ("gemma3", {}),  # windows, scaled embeddings, tied
        ("qwen3", {"dtype": "bfloat16"}),
        ("llama", {"quantization": "int8"}),
        ("qwen3_5", {"block_size": 32}),  # plans end at blocks, where states are kept
        ("mamba2", {"block_size": 32, "dtype": "bfloat16"}),
        ("mamba2", {"enable_prefix_caching": False}),
    ],
)
def test_tokens_are_those_of_single_steps(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str, fields: dict[str, Any]
) -> None:
    core = core_of(folders[name], **fields)
    one = tokens_of(core, monkeypatch, 0.0)
    steps = core.stats().num_steps
    plans = watch(core, monkeypatch)
    assert tokens_of(core, monkeypatch, 1e9) == one
    assert core.stats().num_steps == 2 * steps
    assert max(made for _, made in plans) > 5, "no plan had several steps"
    tokens = one[0, 0]
    stop = next(i for i in range(10, 30) if tokens[i] not in tokens[:i])
    plans.clear()
    ended = tokens_of(core, monkeypatch, 1e9, [tokens[stop], tokens[stop] + 1])
    assert ended == {**one, (0, 0): tokens[: stop + 1]}
    assert any(made < most for most, made in plans), "no stop token ended a plan"


RULED = [
    Sampling(30, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2),
    Sampling(25, seed=3, temperature=0.9, logprobs=3),
    Sampling(30, seed=4, temperature=1.0, grammar=["regex", "[a-z]{3,9} [0-9]{2}"], stop_token_ids=[2]),
    Sampling(40, min_tokens=12, stop_token_ids=[13, 14, 15], logit_bias={13: 6.0}, bad_words=[[32, 101], [97]]),
    Sampling(30, seed=5, temperature=1.2, logprobs=0, top_k=40),
]


@native
@pytest.mark.parametrize(
    ("requests", "patient"),
    [((0, 1, 2, 3, 4), (0, 1, 2)), ((0, 1, 4), (0, 1, 4)), ((0, 1, 4), (0, 4))],
    ids=("rules of the host too", "all patient", "handed out one by one"),
)
def test_rules_and_scores_are_those_of_single_steps(
    monkeypatch: pytest.MonkeyPatch, requests: tuple[int, ...], patient: tuple[int, ...]
) -> None:
    core, handed = core_of(Path(__file__).parents[1] / "demo" / "model"), list[dict[int, Outputs]]()
    core.hand_out(handed.append)
    plans = watch(core, monkeypatch)

    def told(seconds: float) -> dict[int, tuple[list[int], list[list[float]], list[Any]]]:
        """What the frontend is told of each request: tokens, log probabilities, and the end."""
        monkeypatch.setattr(several_steps, "MOST_SECONDS", seconds)
        core.scheduler.reset_prefix_cache()
        core.connect(0)
        for handle in requests:
            prompt = list(range(70, 75 + 9 * handle))
            core.add_request(0, AddRequest(handle, "", prompt, RULED[handle], patient=handle in patient))
        while core.has_work:
            handed.append(core.step())
        core.disconnect(0)
        found: dict[int, Any] = {handle: ([], [], []) for handle in requests}
        for out in (outputs[0] for outputs in handed if outputs):
            for handle, token in zip(out.handles, out.token_ids, strict=True):
                found[handle][0].append(token)
            for scores in out.logprobs:
                rows = np.frombuffer(scores.logprobs, np.float32).reshape(len(scores.rows), -1)
                for row, logprobs in zip(scores.rows, rows.tolist(), strict=True):
                    found[out.handles[row]][1].append(logprobs)
            for finished in out.finished:
                found[finished.handle][2].append((finished.reason, finished.stop_token))
        handed.clear()
        return found

    one = told(0.0)
    plans.clear()
    assert told(1e9) == one
    assert max(most for most, _ in plans) > 20, "no plan had several steps"
    assert (max(made for _, made in plans) > 10) == (requests == patient), "one result of several steps"
    assert 2 not in one or one[2][2][0][0] == "stop", "the grammar ended no request"
    assert one[0][1:] == ([], [("length", None)])
    assert [len(one[handle][0]) for handle in (0, 1, 4)] == [30, 25, 30]
    assert [list(map(len, one[handle][1])) for handle in (1, 4)] == [[4] * 25, [1] * 30]


@native
def test_requests_are_admitted_outside_of_inference_mode(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tensor made in that mode, as the counts of a penalised request, can't change in a step that begins outside."""
    core, modes = core_of(folders["llama"]), list[bool]()
    begin = ModelRunner.begin

    def noted(runner: ModelRunner, plan: StepPlan) -> None:
        modes.append(torch.is_inference_mode_enabled())
        begin(runner, plan)

    monkeypatch.setattr(ModelRunner, "begin", noted)
    plans = watch(core, monkeypatch)
    tokens_of(core, monkeypatch, 1e9)
    assert max(most for most, _ in plans) > 5
    assert not any(modes)


@native
def test_no_step_follows_while_a_message_waits(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    core = core_of(folders["llama"])
    one = tokens_of(core, monkeypatch, 0.0)
    plans = watch(core, monkeypatch)
    inbox = Inbox()
    core.worker.interrupt = inbox.waits
    inbox.put(Event(0, None))
    assert tokens_of(core, monkeypatch, 1e9) == one
    assert max(most for most, _ in plans) > 5
    assert all(made == 1 for _, made in plans)
    inbox.take(False)
    tokens_of(core, monkeypatch, 1e9)
    assert max(made for _, made in plans) > 5


@native
def test_plans_have_one_step_while_a_grammar_is_compiled(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_steps, "MOST_SECONDS", 1e9)
    core, compiled, ready = core_of(folders["llama"]), Future[None](), list[Future[None]]()
    plans = watch(core, monkeypatch)
    core.connect(0)
    core.add_request(0, AddRequest(0, "", [5, 6, 7], Sampling(40), patient=True))
    core.waits.then(compiled, ready.append)
    for _ in range(8):
        core.step()
    assert plans == [(1, 1)] * 8, "a request whose grammar is ready would wait for the end of a plan"
    compiled.set_result(None)
    while core.has_work:
        core.step()
    assert ready == [compiled]
    assert max(plans) > (5, 5)


@native
def test_tokens_are_handed_out_one_by_one_unless_all_are_patient(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(several_steps, "MOST_SECONDS", 1e9)
    core, handed = core_of(folders["llama"]), list[dict[int, Outputs]]()
    core.hand_out(handed.append)
    core.connect(0)
    for handle, patient in enumerate((True, False)):
        core.add_request(
            0, AddRequest(handle, "", [5, 6, 7], Sampling(30, seed=handle, temperature=1.0), patient=patient)
        )
    steps = [core.step() for _ in range(4)]
    assert len(handed) > 20
    told = [outputs[0].handles for outputs in (*handed, *steps) if outputs]
    assert sum(map(len, told)) == 60
    assert all(len(set(handles)) == len(handles) for handles in told), "two tokens of a request in one message"
