"""Log probabilities equal transformers', have the same bits in any batch, and are each sent once, with their token."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import harness
import tiny
from harness import result_of
from kills import kill_core
from mainspring import EngineArgs, LLMEngine, RequestOutput, RequestOutputKind, SamplingParams
from mainspring.core.features import prompt_scores
from mainspring.core.plan.feature import Feature
from mainspring.core.plan.request import Request
from mainspring.core.plan.step import PROMPT_LOGITS, Scores, Step
from mainspring.core.worker.device import Device
from mainspring.core.worker.registry import Registry
from mainspring.core.worker.sampler import Sampler
from mainspring.engine.request.outputs import Logprob
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError
from mainspring.ipc.messages import AddRequest, Outputs, Sampling, Stats
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from plain import Job, Plain, make_engine, run, run_all
from tiers import fast_only

VOCAB = tiny.VOCAB_SIZE
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind
Entries = Sequence[dict[int, Logprob] | None]


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


def tokens(count: int, seed: int = 1) -> list[int]:
    r = random.Random(seed)
    return [r.randrange(3, VOCAB) for _ in range(count)]


GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}


# ------------------------------------------------------------------ what they are


def check(entries: Entries, own: Sequence[int], wanted: torch.Tensor, count: int) -> None:
    """Check the entries of tokens `own`, each with the `count` most likely, against fp32 ``[n, vocab]``."""
    assert len(entries) == len(own) == len(wanted)
    for entry, token, row in zip(entries, own, wanted, strict=True):
        assert entry is not None
        ids, scored = list(entry), list(entry.values())
        found = torch.tensor([one.logprob for one in scored])
        assert ids[0] == token, "the token itself stands first"
        torch.testing.assert_close(found, row[ids], rtol=0, atol=2e-4)
        torch.testing.assert_close(
            found.sort(descending=True).values[:count], row.topk(min(count, VOCAB)).values, rtol=0, atol=2e-4
        )
        assert (found[1:-1] >= found[2:]).all()
        fewest, most = ((row > row[ids].unsqueeze(1) + margin).sum(1) + 1 for margin in (1e-4, -1e-4))
        ranks = torch.tensor([one.rank for one in scored])
        assert ((fewest <= ranks) & (ranks <= most)).all()
        assert all(isinstance(one.decoded_token, str) for one in scored)
        assert count <= len(entry) <= count + 1 or len(entry) == VOCAB


@pytest.mark.parametrize("count", [0, 1, 5, VOCAB, 10_000, -1])
@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_of_tokens_they_are_transformers_own(engine: LLMEngine, plain: Plain, count: int, how: dict[str, Any]) -> None:
    """They are of the model's own distribution, before temperature, top-k, penalties and bias."""
    prompt = tokens(20)
    shaped = {"top_k": 30, "presence_penalty": 1.0, "logit_bias": {7: 3.0}} if how is SAMPLED else {}
    params = SamplingParams(logprobs=count, max_tokens=8, seed=5, **{**how, **shaped})  # type: ignore[arg-type]
    completion = run(engine, {"a": (prompt, params)})["a"].outputs[0]
    assert completion.logprobs is not None
    wanted = plain.logprobs([*prompt, *completion.token_ids])[len(prompt) - 1 : -1]
    check(completion.logprobs, completion.token_ids, wanted, VOCAB if count == -1 else count)
    total = sum(entry[token].logprob for token, entry in zip(completion.token_ids, completion.logprobs, strict=True))
    assert completion.cumulative_logprob == total
    if how is SAMPLED:
        assert any(next(iter(entry.values())).rank != 1 for entry in completion.logprobs)


def test_requests_that_do_not_ask_get_none(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=3, **GREEDY)
    asked = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=2, **GREEDY)
    output = run(engine, {"a": (tokens(9), params), "b": (tokens(9), asked)})["a"]
    assert (output.prompt_logprobs, output.outputs[0].logprobs, output.outputs[0].cumulative_logprob) == (None,) * 3


@pytest.mark.parametrize(
    ("count", "length"), [(0, 2), (3, 63), (0, 64), (-1, 65), (3, 66), (0, 128), (3, 129), (0, 200), (-1, 255)]
)
def test_of_a_prompt_they_are_transformers_own(engine: LLMEngine, plain: Plain, count: int, length: int) -> None:
    """In chunks of `PROMPT_LOGITS` rows, and beside a request that decodes."""
    assert PROMPT_LOGITS == 64
    prompt = tokens(length, length)
    params = SamplingParams(prompt_logprobs=count, max_tokens=1, **GREEDY)
    beside = SamplingParams(logprobs=1, max_tokens=8, **GREEDY)
    output = run(engine, {"beside": (tokens(5), beside), "a": (prompt, params)})["a"]
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    check(output.prompt_logprobs[1:], prompt[1:], plain.logprobs(prompt)[:-1], VOCAB if count == -1 else count)
    assert output.outputs[0].logprobs is None


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
def test_a_prompt_of_one_token_has_only_the_place_without_one(engine: LLMEngine, kind: RequestOutputKind) -> None:
    params = SamplingParams(prompt_logprobs=2, max_tokens=2, output_kind=kind, **GREEDY)
    outputs = run_all(engine, {"a": ([7], params)})["a"]
    assert outputs[0].prompt_logprobs == [None]


def test_several_prompts_at_once_beside_others_that_decode(path: Path, plain: Plain) -> None:
    jobs: dict[str, Job] = {
        f"prompt {i}": (tokens(150 + 7 * i, i), SamplingParams(prompt_logprobs=i, logprobs=1, max_tokens=6, **GREEDY))
        for i in range(3)
    }
    jobs |= {
        f"other {i}": (tokens(10 + i, i), SamplingParams(max_tokens=40, logprobs=i - 1 if i else None, **GREEDY))
        for i in range(4)
    }
    with make_engine(path, max_num_batched_tokens=100, enable_prefix_caching=False) as engine:
        found = run(engine, jobs)
    for i in range(3):
        name = f"prompt {i}"
        prompt, output = jobs[name][0], found[name]
        assert output.prompt_logprobs is not None
        check(output.prompt_logprobs[1:], prompt[1:], plain.logprobs(prompt)[:-1], i)


def test_a_cached_prefix_is_computed_again_where_the_prompt_is_scored(path: Path, plain: Plain) -> None:
    prompt = tokens(180)
    params = SamplingParams(prompt_logprobs=1, max_tokens=4, **GREEDY)
    with make_engine(path) as engine:
        run(engine, {"before": (prompt, SamplingParams(max_tokens=4, **GREEDY))})
        again = run(engine, {"a": (prompt, SamplingParams(max_tokens=4, **GREEDY)), "b": (prompt, params)})
        hits = stats(engine).prefix_hits
    assert hits > 0
    found = again["b"].prompt_logprobs
    assert found is not None
    check(found[1:], prompt[1:], plain.logprobs(prompt)[:-1], 1)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("length", [6, 200])
def test_of_several_completions_each_has_its_own_and_the_prompt_is_scored_once(
    path: Path, plain: Plain, length: int, caching: bool
) -> None:
    prompt = tokens(length)
    params = SamplingParams(n=3, seed=2, prompt_logprobs=2, logprobs=1, max_tokens=5, **SAMPLED)
    with make_engine(path, enable_prefix_caching=caching) as engine:
        output = run(engine, {"a": (prompt, params)})["a"]
    assert output.prompt_logprobs is not None
    check(output.prompt_logprobs[1:], prompt[1:], plain.logprobs(prompt)[:-1], 2)
    for completion in output.outputs:
        assert completion.logprobs is not None
        wanted = plain.logprobs([*prompt, *completion.token_ids])[length - 1 : -1]
        check(completion.logprobs, completion.token_ids, wanted, 1)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


# ------------------------------------------------------------------ how they are told


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("kind", [DELTA, CUMULATIVE])
def test_prompt_logprobs_are_shown_complete_and_never_change(
    path: Path, kind: RequestOutputKind, n: int, caching: bool
) -> None:
    """With DELTA they come once, also if another completion has tokens before the prompt is scored."""
    prompt = tokens(200)
    params = SamplingParams(n=n, seed=1, prompt_logprobs=0, max_tokens=12, output_kind=kind, **SAMPLED)
    shown, last = [], None
    with make_engine(path, enable_prefix_caching=caching) as engine:
        engine.add_request("a", prompt, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                last = output.prompt_logprobs
                if last is not None:
                    shown.append((last, list(last)))
    for entries, then in shown:
        assert [None if entry is None else next(iter(entry)) for entry in then] == [None, *prompt[1:]]
        assert entries == then
    if kind == DELTA:
        assert len(shown) == 1
    else:
        assert last is not None


def test_deltas_carry_each_once_and_the_sum_of_all(engine: LLMEngine) -> None:
    params = {"logprobs": 2, "max_tokens": 9, "seed": 3, **SAMPLED}
    whole = run(engine, {"a": (tokens(6), SamplingParams(**params))})["a"].outputs[0]
    for interval in (1, 4):
        job = SamplingParams(output_kind=DELTA, stream_interval=interval, **params)
        outputs = [output.outputs[0] for output in run_all(engine, {"a": (tokens(6), job)})["a"]]
        assert [len(one.token_ids) for one in outputs] == [len(one.logprobs or ()) for one in outputs]
        assert len(outputs) == {1: 9, 4: 3}[interval]
        assert list(itertools.chain.from_iterable(one.logprobs or () for one in outputs)) == whole.logprobs
        assert outputs[-1].cumulative_logprob == whole.cumulative_logprob


@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA, FINAL_ONLY])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_cuts_them_with_the_tokens(engine: LLMEngine, kind: RequestOutputKind, include: bool) -> None:
    letters = [81, 82, 83, 90]
    base: dict[str, Any] = {"allowed_token_ids": letters, "seed": 11, "max_tokens": 40, "logprobs": 1, **SAMPLED}
    whole = run(engine, {"a": (tokens(6), SamplingParams(**base))})["a"].outputs[0]
    at = next(i for i in range(5, 30) if whole.text[i : i + 3] not in whole.text[: i + 2])
    stop = whole.text[at : at + 3]
    params = SamplingParams(stop=stop, include_stop_str_in_output=include, output_kind=kind, **base)
    outputs = [output.outputs[0] for output in run_all(engine, {"a": (tokens(6), params)})["a"]]
    last = outputs[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    shown = outputs if kind == DELTA else [last]
    assert [t for one in shown for t in one.token_ids] == whole.token_ids[: at + 3]
    assert whole.logprobs is not None
    assert [entry for one in shown for entry in one.logprobs or ()] == whole.logprobs[: at + 3]
    assert last.cumulative_logprob == sum(next(iter(entry.values())).logprob for entry in whole.logprobs[: at + 3])


def test_a_stop_token_has_one_too(engine: LLMEngine) -> None:
    whole = run(engine, {"a": (tokens(6), SamplingParams(max_tokens=8, logprobs=0, **GREEDY))})["a"].outputs[0]
    at = next(i for i in range(2, 8) if whole.token_ids[i] not in whole.token_ids[:i])
    params = SamplingParams(max_tokens=8, logprobs=0, stop_token_ids=[whole.token_ids[at]], **GREEDY)
    stopped = run(engine, {"a": (tokens(6), params)})["a"].outputs[0]
    assert whole.logprobs is not None
    assert stopped.logprobs == whole.logprobs[: at + 1]


def test_without_a_tokenizer_they_have_no_text(path: Path) -> None:
    with make_engine(path, skip_tokenizer_init=True) as engine:
        params = SamplingParams(max_tokens=2, logprobs=2, prompt_logprobs=1, **GREEDY)
        output = run(engine, {"a": (tokens(4), params)})["a"]
    entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
    assert len(entries) == 5
    assert {one.decoded_token for entry in entries for one in (entry or {}).values()} == {None}


def test_an_abort_keeps_those_of_the_tokens_that_came(engine: LLMEngine) -> None:
    engine.add_request("a", tokens(6), SamplingParams(max_tokens=50, logprobs=1, **GREEDY))
    outputs = [output for _ in range(4) for output in engine.step()]
    engine.abort_request("a")
    (last,) = engine.step()
    completion = last.outputs[0]
    assert completion.finish_reason == "abort"
    assert len(completion.token_ids) == len(completion.logprobs or ()) == len(outputs)


def test_embeddings_have_none(engine: LLMEngine) -> None:
    embeds = np.zeros((3, 64), np.float32)
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        engine.add_request("a", {"prompt_embeds": embeds}, SamplingParams(prompt_logprobs=1))
    found = run(engine, {"a": ({"prompt_embeds": embeds}, SamplingParams(logprobs=1, max_tokens=2, **GREEDY))})
    assert len(found["a"].outputs[0].logprobs or ()) == 2


# ------------------------------------------------------------------ the best of several


def test_the_best_of_several_are_those_of_the_largest_sum(engine: LLMEngine) -> None:
    how: dict[str, Any] = {"seed": 11, "max_tokens": 6, **SAMPLED}
    everyone = run(engine, {"a": (tokens(6), SamplingParams(n=6, logprobs=0, **how))})["a"].outputs
    ranked = sorted(everyone, key=lambda one: -(one.cumulative_logprob or 0.0))
    assert ranked[0].index > 1, "that they were chosen would not show"
    for n, count in ((1, None), (2, 1), (6, None)):
        for kind in (CUMULATIVE, FINAL_ONLY):
            params = SamplingParams(n=n, best_of=6, logprobs=count, output_kind=kind, **how)
            outputs = run_all(engine, {"a": (tokens(6), params)})["a"]
            best = outputs[-1].outputs
            if n < 6:
                assert [one.token_ids for one in best] == [one.token_ids for one in ranked[:n]]
                assert [one.cumulative_logprob for one in best] == [one.cumulative_logprob for one in ranked[:n]]
            else:
                assert [one.token_ids for one in best] == [one.token_ids for one in everyone]
            assert [one.index for one in best] == list(range(n))
            assert all((one.logprobs is None) == (count is None) for one in best)
            assert all(len(output.outputs) == n for output in outputs)
            assert {one.finish_reason for one in best} == {"length"}


def test_deltas_of_the_best_are_refused_for_they_are_known_at_the_end() -> None:
    with pytest.raises(InvalidArgumentError, match="DELTA"):
        SamplingParams(n=1, best_of=2, output_kind=DELTA)
    SamplingParams(n=2, best_of=2, output_kind=DELTA)


@pytest.mark.parametrize("best_of", [0, 1, -1])
def test_fewer_than_are_given_back_are_refused(best_of: int) -> None:
    with pytest.raises(InvalidArgumentError, match="best_of"):
        SamplingParams(n=2, best_of=best_of)


# ------------------------------------------------------------------ clockwork

LETTERS = [81, 82, 83, 90, 92, 76]
RULES: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.3},
    {"allowed_token_ids": LETTERS, "bad_words": ["qx", "z", "xjp"]},
    {},
    {"presence_penalty": 0.7, "frequency_penalty": 0.4, "logit_bias": {5: 2.0}},
    {"min_tokens": 12, "stop_token_ids": list(range(0, VOCAB, 7))},
    {"allowed_token_ids": LETTERS, "bad_words": ["pq", "oxz"], "frequency_penalty": 0.5, "logit_bias": {90: 1.0}},
]


def clockwork_jobs() -> dict[str, Job]:
    """Requests with and without rules, greedy and sampled, scored or not, half of them with a common prefix."""
    prefix, jobs = tokens(70, 99), {}
    for i in range(21):
        prompt = (prefix if i % 2 else []) + tokens(3 + 5 * i % 61, i)
        how = GREEDY if i % 3 == 0 else {**SAMPLED, "seed": i, "top_p": 0.95 if i % 4 else 1.0}
        params = SamplingParams(
            max_tokens=20,
            logprobs=[None, 0, 4, -1][i % 4] if i % 5 else 2,
            prompt_logprobs=[None, None, 1, None, 0][i % 5],
            n=2 if i == 7 else 1,
            **{**how, **RULES[i % 7]},
        )
        jobs[str(i)] = prompt, params
    return jobs


def outcome(output: RequestOutput) -> Any:
    return (
        [(one.token_ids, one.logprobs, one.cumulative_logprob, one.finish_reason) for one in output.outputs],
        output.prompt_logprobs,
    )


def stats(engine: LLMEngine) -> Stats:
    found: Stats = engine.engine_core.core.scheduler.stats()  # type: ignore[attr-defined]
    return found


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def either(request: pytest.FixtureRequest, path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "fp32":
        return path
    return tiny.make("llama", tmp_path_factory.mktemp("bf16"), dtype=torch.bfloat16, tokenizer=True)


@pytest.fixture(scope="module")
def alone(either: Path) -> dict[str, Any]:
    """Compute each request alone, nothing cached; a prompt that is not scored takes one step."""
    with make_engine(either, max_num_seqs=1, enable_prefix_caching=False, async_scheduling=False) as engine:
        return {name: outcome(run(engine, {name: job})[name]) for name, job in clockwork_jobs().items()}


def test_the_compared_outputs_are_diverse(alone: dict[str, Any]) -> None:
    assert len({tuple(completions[0][0]) for completions, _ in alone.values()}) == len(alone)
    assert sum(prompt is not None for _, prompt in alone.values()) >= 8


@pytest.mark.parametrize("overlapping", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        pytest.param({"enable_prefix_caching": False, "max_num_batched_tokens": 29}, marks=pytest.mark.slow),
        {"num_gpu_blocks_override": 24, "max_num_seqs": 12, "max_num_batched_tokens": 64},
        pytest.param({"enable_chunked_prefill": False, "max_num_batched_tokens": 256}, marks=pytest.mark.slow),
    ],
    ids=["batch", "chunked", "preempted", "whole prompts"],
)
def test_no_batch_chunk_or_preemption_shows_in_any_bit(
    either: Path, alone: dict[str, Any], settings: dict[str, Any], overlapping: bool
) -> None:
    with make_engine(either, async_scheduling=overlapping, **settings) as engine:
        found = {name: outcome(output) for name, output in run(engine, clockwork_jobs()).items()}
        if "num_gpu_blocks_override" in settings:
            assert stats(engine).num_preemptions > 0
        if settings.get("max_num_batched_tokens") == 29:
            assert stats(engine).chunked_prefills > 0
    assert found == alone


@pytest.mark.parametrize("overlapping", [False, True], ids=["sync", "async"])
def test_no_cached_prefix_shows_in_any_bit(either: Path, alone: dict[str, Any], overlapping: bool) -> None:
    with make_engine(either, async_scheduling=overlapping) as engine:
        for _ in range(2):
            before = stats(engine).prefix_hits
            found = {name: outcome(output) for name, output in run(engine, clockwork_jobs()).items()}
            assert found == alone
        assert stats(engine).prefix_hits - before > 300


@pytest.mark.parametrize("overlapping", [False, True], ids=["sync", "async"])
def test_a_prompt_that_is_preempted_in_the_middle_is_scored_to_its_end(
    path: Path, plain: Plain, overlapping: bool
) -> None:
    """Decoding requests need its blocks while the prompt is computed in small chunks."""
    prompts = [tokens(100, i) for i in range(3)]
    scored = SamplingParams(prompt_logprobs=1, max_tokens=3, **GREEDY)
    settings = {"num_gpu_blocks_override": 20, "max_num_batched_tokens": 8, "max_num_seqs": 8}
    with make_engine(path, async_scheduling=overlapping, **settings) as engine:
        preempted: list[int] = []

        class Partly(Feature):
            """Notes the requests that lose their slot with a part of their prompt scored."""

            def left_slot(self, request: Request) -> None:
                if 1 < request.num_scored < request.prompt_len:
                    preempted.append(request.num_scored)

        engine.engine_core.core.scheduler.attach(Partly())  # type: ignore[attr-defined]
        for i in range(4):
            engine.add_request(f"other {i}", tokens(4, i), SamplingParams(max_tokens=90, **GREEDY))
        for _ in range(30):
            engine.step()
        found = run(engine, {f"scored {i}": (prompt, scored) for i, prompt in enumerate(prompts)})
    assert preempted, "nothing was preempted between two chunks of its prompt"
    for i, prompt in enumerate(prompts):
        entries = found[f"scored {i}"].prompt_logprobs
        assert entries is not None
        check(entries[1:], prompt[1:], plain.logprobs(prompt)[:-1], 1)


def test_each_frontend_gets_logprobs_of_its_own_tokens(path: Path) -> None:
    """Three frontends whose requests share steps; some request log probabilities, and some are aborted while a step is
    in flight."""
    with make_engine(path, async_scheduling=True) as engine:
        core, r = engine.engine_core.core, random.Random(4)  # type: ignore[attr-defined]
        core.connect(1)
        core.connect(2)
        asked: dict[tuple[int, int], Sampling] = {}
        for handle in range(18):
            sampling = Sampling(r.randint(3, 12), r.randrange(99), r.choice([0.0, 1.0]), logprobs=r.choice([-1, 0, 3]))
            asked[handle % 3, handle] = sampling
            core.add_request(handle % 3, AddRequest(handle, "", tokens(5, handle), sampling))
        told: dict[tuple[int, int], int] = defaultdict(int)
        given: dict[tuple[int, int], int] = defaultdict(int)
        steps = 0
        while core.has_work:
            for frontend, out in core.step().items():
                for handle in out.handles:
                    given[frontend, handle] += 1
                for scores in out.logprobs:
                    first = np.frombuffer(scores.token_ids, "<i4").reshape(-1, scores.width)[:, 0]
                    assert first.tolist() == [out.token_ids[row] for row in scores.rows]
                    for row in scores.rows:
                        key = frontend, out.handles[row]
                        assert scores.width == 1 + asked[key].logprobs
                        told[key] += 1
            steps += 1
            if steps == 2:
                core.abort(1, [1, 4])
                core.abort(2, [5])
        assert told == {key: count for key, count in given.items() if asked[key].logprobs >= 0}
        assert given[1, 4] < asked[1, 4].max_tokens


# ------------------------------------------------------------------ any schedule


class ScoredEngine(harness.Engine):
    """Also scores prompts: each log probability is the index of its token, so that lost or moved entries are
    detected."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.told: dict[harness.Key, dict[int, int]] = defaultdict(dict)  # index in the prompt → token
        self.scored: set[harness.Key] = set()
        seats = self.scheduler.state.rows.tokens.shape[0]
        self.sampler = Sampler(seats, harness.VOCAB, Device(torch.device("cpu")), ReferenceBackend(), seats, Registry())
        self.most_too_many = 0  # rows of one step beyond the memory reserved for logits

    def add_scored(
        self, prompt: list[int], max_tokens: int, prompt_logprobs: int, looks_back: bool, frontend: int
    ) -> harness.Key:
        handle = len(self.messages)
        bad_words = [[harness.VOCAB + 1, 1]] if looks_back else []  # is never met
        sampling = Sampling(max_tokens, prompt_logprobs=prompt_logprobs, bad_words=bad_words)
        asked = AddRequest(handle, str(handle), prompt, sampling)
        key = frontend, handle
        self.now += 1.0
        self.keys[key] = 1_000_000 + handle
        self.scheduler.add(Request(asked, frontend, self.now, self.max_model_len, key=1_000_000 + handle))
        self.messages[key] = asked
        if prompt_logprobs >= 0:
            self.scored.add(key)
        return key

    def launch(self) -> Step | None:
        step = super().launch()
        if step is not None:
            plan = step.plan
            rows = int(plan.samples.sum()) + sum(part.num_rows for part in plan.scored)
            self.most_too_many = max(self.most_too_many, rows - prompt_scores.PROMPT_LOGITS - len(plan.slots))
            for sequence in plan.admitted:
                self.sampler.admit(sequence)
            for slot in plan.released.tolist():
                self.sampler.release(slot)
            self.sampler.read(plan)
            for slot in plan.slots[plan.samples].tolist():
                request = self.scheduler.state.running.requests.get(slot)
                if request is not None and request.looks_back:
                    key = request.frontend, request.handle
                    known = [*self.messages[key].prompt_token_ids, *self.outputs[key]]
                    read = self.sampler._known[slot]
                    assert read == known, "a rule would look at other tokens than there are"
        return step

    def retire(self) -> None:
        step, sampled = self.in_flight.popleft()
        self.model.retire(step.plan)
        scores = []
        for part in step.plan.scored:
            places = np.arange(part.start, part.start + part.num_rows)
            own = self.model._sequences[part.slot].tokens[places][:, None].astype(np.int32)
            ranks = np.ones(part.num_rows, np.int32)
            at = places[:, None].astype(np.float32)
            scores.append(Scores(np.arange(part.num_rows), own, at, ranks))
        self._tell(self.scheduler.update(step, result_of(step.plan, sampled, prompt_logprobs=scores)))
        self.check()

    def _tell(self, outputs: dict[int, Outputs]) -> None:
        for frontend, out in outputs.items():
            for one in out.logprobs:
                key = frontend, one.handle
                own, at = np.frombuffer(one.token_ids, "<i4"), np.frombuffer(one.logprobs, "<f4")
                assert at.tolist() == list(range(one.start, one.start + len(at)))
                assert key not in self.finished
                self.told[key].update(zip(at.astype(int).tolist(), own.tolist(), strict=True))
            for handle in out.handles:
                if (frontend, handle) in self.scored:
                    self.check_prompt((frontend, handle))
        super()._tell(outputs)

    def check_prompt(self, key: harness.Key) -> None:
        prompt = self.messages[key].prompt_token_ids
        assert self.told[key] == {at: token for at, token in enumerate(prompt) if at}, "a token came before its prompt"


def run_schedule(seed: int, monkeypatch: pytest.MonkeyPatch) -> ScoredEngine:
    r = random.Random(seed)
    monkeypatch.setattr(prompt_scores, "PROMPT_LOGITS", r.choice([1, 2, 5, 16]))
    max_model_len, chunked, block_size = 64, r.random() < 0.85, r.choice([1, 4])
    windows = r.choice([(None,), (None, 7)])
    budget = r.randint(3, 40) if chunked else max_model_len + r.randint(0, 20)
    weights = r.choice([[1.0], [1.0, 2.0], [0.5, 1.0, 1.0]])
    one = harness.blocks_for(windows, block_size, max_model_len, budget)
    engine = ScoredEngine(
        max_model_len=max_model_len,
        block_size=block_size,
        windows=windows,
        num_blocks=one + r.choice([0, 0, one // 4, one]),
        depth=r.choice([1, 2, 2, 3]),
        weights=weights,
        prefix_caching=r.random() < 0.7,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=budget,
        max_num_seqs=r.randint(1, 6),
    )
    lack = r.random() < 0.3
    engine.lacks_memory = lambda step: lack and len(step.slots) > 1 and r.random() < 0.1
    common = [r.randrange(harness.VOCAB) for _ in range(max_model_len)]
    keys = []
    for _ in range(r.randint(3, 20)):
        for _ in range(r.choice([0, 0, 1, 4])):
            engine.step()
        length = r.randint(1, 45)
        shared = r.choice([0, length // 2, length])
        prompt = common[:shared] + [r.randrange(harness.VOCAB) for _ in range(length - shared)]
        logprobs, frontend = r.choice([-1, 0, 0, 3]), r.randrange(len(weights))
        keys.append(engine.add_scored(prompt, r.randint(1, 15), logprobs, r.random() < 0.4, frontend))
        if r.random() < 0.1:
            engine.abort(r.choice(keys))
    engine.run()
    engine.check_outputs()
    return engine


@pytest.mark.parametrize(
    "seed", fast_only([*range(8), 6005], [*range(40), 6005])
)  # 6005: preempted twice while an earlier step is still in flight
def test_any_schedule_scores_every_prompt_and_hides_no_token_from_rules(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = run_schedule(seed, monkeypatch)
    for key in engine.scored - engine.aborted:
        engine.check_prompt(key)


@pytest.mark.parametrize("seed", [0, 30, 38, 41, *range(100, 104)])
def test_no_step_has_more_logits_than_memory_was_kept_for(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only if prompts may be cut. With these seeds scored prompts share steps."""
    engine = run_schedule(seed, monkeypatch)
    assert engine.most_too_many == 0 or not engine.scheduler.state.budget.chunked


@pytest.mark.parametrize("frontend", [0, 1])
def test_a_long_prompt_that_is_scored_does_not_delay_others(frontend: int) -> None:
    engine = ScoredEngine(
        max_model_len=1200,
        block_size=16,
        num_blocks=400,
        weights=[1.0, 1.0],
        max_num_batched_tokens=256,
        max_num_seqs=8,
    )
    long = engine.add_scored([1] * 1000, 2, 0, False, 0)
    for _ in range(2):
        engine.step()
    others = [engine.add_scored([2] * 20, 4, logprobs, False, frontend) for logprobs in (0, -1)]
    for _ in range(6):
        engine.step()
    assert all(engine.outputs[key] for key in others)
    engine.run()
    for key in (long, others[0]):
        engine.check_prompt(key)


# ------------------------------------------------------------------ recovery

GUARD = 120.0  # seconds


def recovery_jobs() -> dict[str, Job]:
    long: dict[str, Any] = {"max_tokens": 90, "logprobs": 2}
    return {
        "penalties": (tokens(8), SamplingParams(presence_penalty=0.5, frequency_penalty=0.3, **long, **GREEDY)),
        "repetition": (tokens(8, 2), SamplingParams(repetition_penalty=1.2, seed=3, **long, **SAMPLED)),
        "words": (
            tokens(8, 3),
            SamplingParams(allowed_token_ids=LETTERS, bad_words=["qx", "zo", "xjp"], seed=4, **{**long, **SAMPLED}),
        ),
        "minimum": (
            tokens(8, 4),
            SamplingParams(min_tokens=80, stop_token_ids=list(range(2, VOCAB, 3)), output_kind=DELTA, **long, **GREEDY),
        ),
        "best": (tokens(8, 5), SamplingParams(n=1, best_of=2, seed=5, **long, **SAMPLED)),
    }


def scored_job() -> Job:
    return tokens(240, 6), SamplingParams(max_tokens=4, logprobs=0, prompt_logprobs=1, **GREEDY)


def joined(outputs: Sequence[RequestOutput]) -> Any:
    """The joined content of all outputs of a request, for any kind of output."""
    last = outputs[-1]
    if last.request_id != "minimum":
        return outcome(last)
    parts = [output.outputs[0] for output in outputs if output.outputs]
    token_ids = [token for part in parts for token in part.token_ids]
    entries = [entry for part in parts for entry in part.logprobs or ()]
    return token_ids, entries, parts[-1].cumulative_logprob, parts[-1].finish_reason


@pytest.mark.slow
def test_after_kills_rules_and_log_probabilities_go_on_as_if_nothing_had_happened(path: Path) -> None:
    with make_engine(path) as engine:
        undisturbed = {name: joined(outputs) for name, outputs in run_all(engine, recovery_jobs()).items()}
        undisturbed["scored"] = outcome(run(engine, {"scored": scored_job()})["scored"])
    seen: dict[str, list[RequestOutput]] = defaultdict(list)
    with LLMEngine.from_engine_args(EngineArgs(model=str(path), max_model_len=256, max_logprobs=-1)) as engine:
        for name, (prompt, params) in recovery_jobs().items():
            engine.add_request(name, prompt, params)
        supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        kill_at, deadline = [15, 50], time.monotonic() + GUARD
        while engine.has_unfinished_requests():
            assert time.monotonic() < deadline
            for output in engine.step():
                seen[output.request_id].append(output)
            if kill_at and seen["penalties"] and len(seen["penalties"][-1].outputs[0].token_ids) >= kill_at[0]:
                if kill_at.pop(0) == 15:
                    engine.add_request("scored", *scored_job())
                kill_core(supervisor)
        assert supervisor.launch.restarts == 2
    assert {name: joined(outputs) for name, outputs in seen.items()} == undisturbed
    assert math.isfinite(undisturbed["penalties"][0][0][2])
