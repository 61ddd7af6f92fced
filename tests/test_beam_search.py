"""Beam search: equal to transformers' if no beam ends early, else to the formula of engine/request/beam_search.py."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import tiny
from kills import kill_core
from mainspring import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from mainspring.engine.request.outputs import CompletionOutput
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError
from mainspring.ipc.params import BeamSearchParams
from plain import Plain, collect, make_engine, run, run_all

VOCAB = tiny.VOCAB_SIZE


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("llama"), tokenizer=True)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[LLMEngine]:
    with make_engine(path) as engine:
        yield engine


@pytest.fixture(scope="module")
def plain(path: Path) -> Plain:
    return Plain(path)


@pytest.fixture(scope="module")
def llm(path: Path) -> Iterator[LLM]:
    """An LLM over a core in a separate process."""
    with LLM(str(path), max_model_len=256) as llm:
        yield llm


def tokens(count: int, seed: int = 1) -> list[int]:
    r = random.Random(seed)
    return [r.randrange(3, VOCAB) for _ in range(count)]


def beams(width: int, max_tokens: int, **fields: Any) -> SamplingParams:
    how = {"n": width, "use_beam_search": True, "temperature": 0.0, "ignore_eos": True, **fields}
    return SamplingParams(max_tokens=max_tokens, **how)


class Found(NamedTuple):
    token_ids: list[int]
    total: float
    stopped: bool


def reference(
    plain: Plain,
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    stops: Sequence[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool = False,
) -> list[Found]:
    """All continuations that a search of this width finds, best first."""
    live, complete = [Found([], 0.0, False)], []
    for _ in range(max_tokens):
        longer = []
        for beam in live:
            logprobs = plain.logprobs([*prompt, *beam.token_ids])[-1]
            for value, token in zip(*(x.tolist() for x in logprobs.topk(2 * width)), strict=True):
                longer.append(Found([*beam.token_ids, token], beam.total + value, token in stops))
        complete += [beam for beam in longer if beam.stopped]
        live = sorted((beam for beam in longer if not beam.stopped), key=lambda beam: -beam.total)[:width]
        if not live or (early_stopping and len(complete) >= width):
            break

    def score(beam: Found) -> float:
        return beam.total / (len(prompt) + len(beam.token_ids) - beam.stopped) ** length_penalty

    return sorted([*complete, *live], key=score, reverse=True)


def check(found: Sequence[CompletionOutput], wanted: Sequence[Found]) -> None:
    assert [one.token_ids for one in found] == [beam.token_ids for beam in wanted]
    for index, (one, beam) in enumerate(zip(found, wanted, strict=True)):
        assert one.index == index
        assert one.cumulative_logprob == pytest.approx(beam.total, abs=1e-3)
        assert one.finish_reason == ("stop" if beam.stopped else "length")
        assert one.stop_reason == (beam.token_ids[-1] if beam.stopped else None)


# ------------------------------------------------------------------ what is found


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(("width", "length"), [(1, 10), (2, 12), (4, 9), (7, 6)])
def test_beam_search_equals_transformers_if_no_beam_ends_early(
    engine: LLMEngine, plain: Plain, width: int, length: int, early_stopping: bool | str
) -> None:
    prompt = tokens(9, width)
    ids = torch.tensor([prompt])
    wanted = plain.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        num_beams=width,
        num_return_sequences=width,
        length_penalty=0.0,
        early_stopping=early_stopping,
        do_sample=False,
        pad_token_id=0,
    )
    params = beams(width, length, length_penalty=0.0, early_stopping=early_stopping)
    found = run(engine, {"a": (prompt, params)})["a"].outputs
    assert [one.token_ids for one in found] == wanted[:, len(prompt) :].tolist()
    greedy = plain.greedy(prompt, length, lambda output, logits: logits)
    assert (found[0].token_ids == greedy) == (width == 1), "a search that finds the greedy tokens shows nothing"


STOPS = list(range(0, VOCAB, 6))


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 3.0])
@pytest.mark.parametrize("width", [1, 3])
def test_beam_search_equals_the_formula_if_beams_end(
    engine: LLMEngine, plain: Plain, width: int, length_penalty: float, early_stopping: bool
) -> None:
    prompt = tokens(5, 7)
    how: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    wanted = reference(plain, prompt, width, 7, STOPS, **how)
    found = run(engine, {"a": (prompt, beams(width, 7, stop_token_ids=STOPS, **how))})["a"].outputs
    check(found, wanted[:width])
    assert any(beam.stopped for beam in wanted)


def test_lengths_and_early_stops_matter(plain: Plain) -> None:
    """Otherwise the tests above would not cover them."""
    found = {
        (penalty, early): [
            tuple(one.token_ids) for one in reference(plain, tokens(5, 7), 3, 7, STOPS, penalty, early)[:3]
        ]
        for penalty in (-1.0, 3.0)
        for early in (False, True)
    }
    assert len({tuple(beams) for beams in found.values()}) >= 3


def test_the_end_of_sequence_ends_a_beam_unless_it_is_ignored(path: Path, plain: Plain) -> None:
    prompt = tokens(5, 3)
    first = reference(plain, prompt, 2, 6)[0].token_ids
    eos = first[2]
    with make_engine(path) as engine:
        engine.input_processor.eos_token_ids = frozenset([eos])
        heeded = run(engine, {"a": (prompt, beams(2, 6, ignore_eos=False, early_stopping=True))})["a"].outputs
        ignored = run(engine, {"a": (prompt, beams(2, 6))})["a"].outputs
    assert ignored[0].token_ids == first
    check(heeded, reference(plain, prompt, 2, 6, [eos], early_stopping=True)[:2])


def test_fewer_are_given_back_than_are_looked_at(engine: LLMEngine, plain: Plain) -> None:
    prompt = tokens(6)
    found = run(engine, {"a": (prompt, beams(2, 5, best_of=5, length_penalty=0.0))})["a"].outputs
    check(found, reference(plain, prompt, 5, 5, length_penalty=0.0)[:2])


def test_each_token_has_its_log_probability_and_the_text_is_that_of_the_tokens(engine: LLMEngine) -> None:
    prompt = tokens(6)
    output = run(engine, {"a": (prompt, beams(3, 5, logprobs=0))})["a"]
    for one in output.outputs:
        assert one.logprobs is not None
        assert [next(iter(entry)) for entry in one.logprobs] == one.token_ids
        total = sum(entry[token].logprob for token, entry in zip(one.token_ids, one.logprobs, strict=True))
        assert one.cumulative_logprob == pytest.approx(total, abs=1e-6)
    assert any(one.text for one in output.outputs)
    without = run(engine, {"a": (prompt, beams(3, 5))})["a"].outputs
    assert [one.logprobs for one in without] == [None] * 3


def test_no_more_beams_than_there_are_and_no_more_tokens_than_fit(engine: LLMEngine, plain: Plain) -> None:
    prompt = tokens(253)
    output = run(engine, {"a": (prompt, beams(2, 50, length_penalty=0.0))})["a"]
    check(output.outputs, reference(plain, prompt, 2, 3, length_penalty=0.0)[:2])
    everything = run(engine, {"a": (tokens(4), beams(500, 1, length_penalty=0.0))})["a"].outputs
    assert len(everything) == VOCAB
    assert sum(np.exp([one.cumulative_logprob or 0.0 for one in everything])) == pytest.approx(1.0, abs=1e-4)
    ended = run(engine, {"a": (tokens(4), beams(2, 5, stop_token_ids=list(range(VOCAB))))})["a"].outputs
    assert [len(one.token_ids) for one in ended] == [1, 1]
    assert {one.finish_reason for one in ended} == {"stop"}


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_there_is_one_output_at_the_end(engine: LLMEngine, kind: RequestOutputKind) -> None:
    outputs = run_all(engine, {"a": (tokens(6), beams(3, 5, output_kind=kind, stream_interval=1))})["a"]
    assert [output.finished for output in outputs] == [True]
    assert outputs[0].prompt_token_ids == tokens(6)
    assert outputs[0].metrics is not None
    assert outputs[0].metrics.first_token_time is not None


# ------------------------------------------------------------------ several at once, and other engines


def jobs() -> dict[str, tuple[list[int], SamplingParams]]:
    return {
        "two": (tokens(30), beams(2, 12, length_penalty=0.0)),
        "five": (tokens(30), beams(5, 8, length_penalty=2.0, stop_token_ids=STOPS)),
        "greedy": (tokens(30), SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, logprobs=1)),
        "ruled": (tokens(9, 2), SamplingParams(seed=1, max_tokens=14, ignore_eos=True, repetition_penalty=1.3)),
        "three": (tokens(9, 3), beams(3, 10, early_stopping=True, stop_token_ids=STOPS)),
    }


def outcome(output: RequestOutput) -> Any:
    return [(one.token_ids, one.text, one.cumulative_logprob, one.finish_reason) for one in output.outputs]


@pytest.fixture(scope="module")
def alone(path: Path) -> dict[str, Any]:
    with make_engine(path, enable_prefix_caching=False) as engine:
        return {name: outcome(run(engine, {name: job})[name]) for name, job in jobs().items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"async_scheduling": True},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 17, "max_num_seqs": 16, "max_num_batched_tokens": 32},
    ],
    ids=["batch", "async", "chunked", "few blocks"],
)
def test_several_at_once_beside_others_are_as_each_alone(
    path: Path, alone: dict[str, Any], settings: dict[str, Any]
) -> None:
    with make_engine(path, **settings) as engine:
        found = {name: outcome(output) for name, output in run(engine, jobs()).items()}
        assert engine.engine_core.core.stats().num_running == 0  # type: ignore[attr-defined]
    assert found == alone


def test_llm_beam_search_gives_prompt_and_output(llm: LLM, plain: Plain) -> None:
    prompts: list[Any] = [tokens(8), {"prompt_token_ids": tokens(5, 2)}, "The clock strikes"]
    given = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True, length_penalty=0.0))
    tokenizer = llm.get_tokenizer()
    assert len(given) == 3
    for prompt, output in zip(prompts, given, strict=True):
        ids = (
            tokenizer.encode(prompt)
            if isinstance(prompt, str)
            else prompt
            if isinstance(prompt, list)
            else tokens(5, 2)
        )
        wanted = reference(plain, ids, 3, 6, length_penalty=0.0)[:3]
        assert [one.tokens for one in output.sequences] == [[*ids, *beam.token_ids] for beam in wanted]
        for one, beam in zip(output.sequences, wanted, strict=True):
            assert one.cum_logprob == pytest.approx(beam.total, abs=1e-3)
            assert len(one.logprobs) == 6
            assert all(token in entry for token, entry in zip(beam.token_ids, one.logprobs, strict=True))
            assert one.finish_reason == "length"
            before = prompt if isinstance(prompt, str) else tokenizer.decode(ids)
            assert one.text.startswith(before)
    assert given[2].sequences[0].text != given[2].sequences[1].text


def test_a_search_needs_no_tokenizer(path: Path, plain: Plain) -> None:
    prompt = tokens(8)
    search = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True, length_penalty=0.0)
    with LLM(str(path), max_model_len=256, skip_tokenizer_init=True) as llm:
        [found] = llm.beam_search([prompt], search)
    wanted = reference(plain, prompt, 3, 6, length_penalty=0.0)[:3]
    assert [one.tokens for one in found.sequences] == [[*prompt, *beam.token_ids] for beam in wanted]
    assert [one.text for one in found.sequences] == [""] * 3


def test_llm_generate_takes_beams_and_others_together(llm: LLM, alone: dict[str, Any]) -> None:
    prompts, params = zip(*jobs().values(), strict=True)
    found = llm.generate([list(prompt) for prompt in prompts], list(params), use_tqdm=False)
    assert [outcome(output) for output in found] == list(alone.values())


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 1.5}, "beam_width"),
        ({"beam_width": 10**9}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "a"}, "max_tokens"),
        ({"temperature": 0.5}, "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": float("inf")}, "length_penalty"),
        ({"ignore_eos": 3}, "ignore_eos"),
        ({"include_stop_str_in_output": "x"}, "include_stop_str_in_output"),
    ],
)
def test_a_wrong_search_is_refused_by_name(llm: LLM, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        llm.beam_search([tokens(4)], BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, **fields}))
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1.0),
        ("top_p", 0.9),
        ("top_k", 5),
        ("min_p", 0.1),
        ("stop", "a"),
        ("prompt_logprobs", 0),
        ("min_tokens", 2),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("repetition_penalty", 1.5),
        ("logit_bias", {5: 1.0}),
        ("allowed_token_ids", [5]),
        ("bad_words", ["a"]),
        ("logits_processors", [lambda output, logits: logits]),
    ],
)
def test_parameters_without_effect_on_beam_search_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{field} is .*use_beam_search"):
        beams(2, 5, **{field: value})
    with pytest.raises(InvalidArgumentError, match="DELTA"):
        beams(2, 5, output_kind=RequestOutputKind.DELTA)


def test_a_prompt_of_embeddings_is_refused(engine: LLMEngine) -> None:
    with pytest.raises(InvalidRequestError, match="use_beam_search"):
        engine.add_request("a", {"prompt_embeds": np.zeros((3, 64), np.float32)}, beams(2, 5))


# ------------------------------------------------------------------ ends from outside


def test_a_search_that_is_aborted_ends_once_with_what_it_had(engine: LLMEngine, alone: dict[str, Any]) -> None:
    for rounds in (0, 1, 2, 5):
        engine.add_request("gone", tokens(30), beams(4, 50))
        engine.add_request("two", *jobs()["two"])
        for _ in range(rounds):
            assert engine.step() == []
        engine.abort_request("gone")
        found = collect(engine)
        (last,) = found["gone"]
        assert last.finished
        assert {one.finish_reason for one in last.outputs} == {"abort"}
        assert {len(one.token_ids) for one in last.outputs} == {rounds}
        assert outcome(found["two"][-1]) == alone["two"]
        stats = engine.engine_core.core.stats()  # type: ignore[attr-defined]
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def test_where_a_round_is_refused_the_search_ends_with_the_error(path: Path) -> None:
    with make_engine(path, max_requests_per_frontend=2) as engine:
        output = run(engine, {"a": (tokens(5), beams(4, 5))})["a"]
        assert {one.finish_reason for one in output.outputs} == {"error"}
        assert {type(one.error).__name__ for one in output.outputs} == {"OverloadedError"}
        again = run(engine, {"a": (tokens(5), beams(2, 5))})["a"]
        assert {one.finish_reason for one in again.outputs} == {"length"}
        assert engine.engine_core.core.stats().num_running == 0  # type: ignore[attr-defined]


@pytest.mark.slow
def test_rounds_of_a_search_that_was_let_in_are_not_refused_as_too_many(path: Path, alone: dict[str, Any]) -> None:
    with make_engine(path, max_num_seqs=1, max_num_queued_requests=1) as engine:
        prompt, params = jobs()["three"]
        output = run(engine, {"three": (prompt, params)})["three"]
    assert outcome(output) == alone["three"]


async def searches(path: Path, alone: dict[str, Any]) -> None:
    async with AsyncLLMEngine.from_engine_args(EngineArgs(model=str(path), max_model_len=256)) as engine:

        async def whole(name: str) -> list[RequestOutput]:
            prompt, params = jobs()[name]
            return [output async for output in engine.generate(prompt, params, name)]

        async def left() -> None:
            async for _ in engine.generate(tokens(30), beams(4, 200), "left"):
                raise AssertionError("a search has no output before its end")

        async def ended() -> list[RequestOutput]:
            return [output async for output in engine.generate(tokens(30), beams(4, 200), "ended")]

        leaving, ending = asyncio.create_task(left()), asyncio.create_task(ended())
        found = await asyncio.gather(*map(whole, jobs()))
        assert [outcome(outputs[-1]) for outputs in found] == list(alone.values())
        assert [
            len(outputs) for outputs, (_, params) in zip(found, jobs().values(), strict=True) if params.use_beam_search
        ]
        leaving.cancel()
        await engine.abort("ended")
        (last,) = await ending
        assert {one.finish_reason for one in last.outputs} == {"abort"}
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(NotSupportedError, match="logits_processors"):
            await anext(engine.generate([5], SamplingParams(logits_processors=[lambda output, logits: logits]), "f"))
        await engine.wait_for_requests_to_drain(20)
        assert outcome((await whole("two"))[-1]) == alone["two"]


@pytest.mark.slow
def test_async_streams_end_with_the_result_and_can_be_left(path: Path, alone: dict[str, Any]) -> None:
    asyncio.run(asyncio.wait_for(searches(path, alone), 60))


@pytest.mark.slow
def test_a_core_killed_in_the_middle_of_a_search_does_not_show(llm: LLM, alone: dict[str, Any]) -> None:
    engine, deadline = llm.llm_engine, time.monotonic() + 120
    supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
    before = supervisor.launch.restarts
    for name, job in jobs().items():
        engine.add_request(name, *job)
    found = {output.request_id: output for _ in range(2) for output in engine.step()}
    assert engine.has_unfinished_requests()
    kill_core(supervisor)
    while engine.has_unfinished_requests():
        assert time.monotonic() < deadline
        found.update({output.request_id: output for output in engine.step()})
    assert supervisor.launch.restarts == before + 1
    assert {name: outcome(found[name]) for name in alone} == alone
