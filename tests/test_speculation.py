"""Speculation: the same tokens as without, with any other parameters, in fewer steps."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny
from daemons import Daemon, short_folder
from harness import Engine
from kills import kill_core
from late_device import LateDevice
from mainspring import LLM, EngineArgs, LLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from mainspring.core.features.speculation import MOST_GUESS_ROWS, REST, look_up
from mainspring.core.worker import draft, generation_worker, worker
from mainspring.core.worker import runner as model_runner
from mainspring.ipc.config import SpeculativeConfig
from mainspring.ipc.errors import InvalidArgumentError, MainspringError, ModelNotFoundError, NotSupportedError
from mainspring.ipc.messages import Stats
from plain import collect, make_engine
from test_late_device import GraphReference

GUARD = 120.0  # seconds
VOCAB = tiny.VOCAB_SIZE
NGRAM: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5}
REPEATS = "17 + 25 = 42. " * 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model unrelated to the first model."""
    return tiny.make("qwen2", tmp_path_factory.mktemp("other"), seed=5, num_hidden_layers=1)


def jobs() -> dict[str, tuple[list[int], SamplingParams]]:
    """Requests of all kinds, with long common prefixes and repetitive prompts."""
    numbers = random.Random(2)
    prefix = [numbers.randrange(2, VOCAB) for _ in range(40)]
    asked: dict[str, dict[str, Any]] = {
        "greedy": {},
        "other greedy": {"max_tokens": 7},
        "sampled": {"temperature": 0.8},
        "hot": {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
        "sharp": {"temperature": 0.05},
        "scored": {"logprobs": 3},
        "scored sampled": {"logprobs": 0, "temperature": 0.5, "prompt_logprobs": 2},
        "biased": {"logit_bias": {5: 4.0, 9: -1e9}, "temperature": 0.1},
        "allowed": {"allowed_token_ids": [3, 4, 5]},
        "allowed sampled": {"allowed_token_ids": [3, 4, 5], "temperature": 1.0},
        "unstoppable": {"min_tokens": 20, "stop_token_ids": [*range(2, 60)]},
        "stops": {"stop_token_ids": [*range(2, 20)], "allowed_token_ids": [*range(2, 40)], "temperature": 1.0},
        "one stop": {"stop_token_ids": [3], "allowed_token_ids": [3, 4, 5, 6], "temperature": 1.0},
        "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.2},
        "two bad words": {"bad_words": ["ring", "two"]},
        "grammar": {"structured_outputs": StructuredOutputsParams(regex="[ab]{40}"), "temperature": 1.0},
        "processed": {"logits_processors": [lambda output, logits: logits.roll(len(output))]},
    }
    found = {}
    for seed, (name, fields) in enumerate(asked.items()):
        prompt = prefix + [numbers.randrange(2, VOCAB) for _ in range(numbers.randrange(1, 40))]
        ignore = name != "grammar"
        found[name] = (
            prompt,
            SamplingParams(**{"max_tokens": 40, "seed": seed, "ignore_eos": ignore, "temperature": 0.0, **fields}),
        )
    return found


def outcome(output: RequestOutput) -> tuple[Any, ...]:
    one = output.outputs[0]
    return one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs, output.prompt_logprobs


def stats_of(engine: LLMEngine) -> Stats:
    stats: Stats = engine.engine_core.core.scheduler.stats()  # type: ignore[attr-defined]
    return stats


def run(engine: LLMEngine, twice: bool = False) -> dict[str, tuple[Any, ...]]:
    """The final outputs of all jobs. `twice`: run them again, with their prefixes cached."""
    for _ in range(1 + twice):
        for name, (prompt, params) in jobs().items():
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        found = {name: outcome(outputs[-1]) for name, outputs in collect(engine).items()}
    return found


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, tuple[Any, ...]]:
    with make_engine(model) as engine:
        return run(engine)


# ---------------------------------------------------------------------- n-gram lookup


@pytest.mark.parametrize(
    ("tokens", "count", "longest", "shortest", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 2, 4, 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 1, 4, 3, [9]),
        ([1, 2, 3, 9, 1, 2, 3], 2, 4, 4, []),
        ([2, 3, 8, 2, 3, 9, 2, 3], 3, 2, 2, [9, 2, 3]),  # the latest occurrence
        ([1, 2, 3, 8, 4, 2, 3, 9, 1, 2, 3], 1, 3, 1, [8]),  # a longer match wins over a later one
        ([7, 5, 5], 4, 3, 1, [5, 5, 5, 5]),  # the match overlaps the draft tokens
        ([7, 1, 2, 1, 2], 5, 2, 2, [1, 2, 1, 2, 1]),
        ([7, 1, 2], 5, 2, 1, []),
        ([7], 5, 2, 1, []),
    ],
)
def test_ngram_lookup_proposes_the_tokens_after_an_earlier_match(
    tokens: list[int], count: int, longest: int, shortest: int, expected: list[int]
) -> None:
    assert look_up(np.array(tokens, np.int32), count, longest, shortest).tolist() == expected


def test_the_longest_match_is_found_wherever_it_is() -> None:
    numbers = random.Random(0)
    for _ in range(500):
        tokens = [numbers.randrange(3) for _ in range(numbers.randrange(1, 40))]
        longest = numbers.randrange(1, 6)
        shortest, count = numbers.randrange(1, longest + 1), numbers.randrange(1, 6)
        expected: list[int] = []
        for length in range(longest, shortest - 1, -1):
            tail = tokens[len(tokens) - length :]
            places = [i for i in range(length, len(tokens)) if tokens[i - length : i] == tail and length <= len(tokens)]
            if places:
                expected = list(tokens)
                for i in range(count):
                    expected.append(expected[places[-1] + i])
                expected = expected[len(tokens) :]
                break
        assert look_up(np.array(tokens, np.int32), count, longest, shortest).tolist() == expected, (tokens, longest)


# ---------------------------------------------------------------------- the same tokens


@pytest.mark.parametrize("drafts", ["ngram", "same", "other"])
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"max_num_seqs": 3, "async_scheduling": True}, marks=pytest.mark.slow),
        {"num_gpu_blocks_override": 36, "block_size": 8, "max_model_len": 160, "max_num_batched_tokens": 24},
    ],
    ids=["at rest", "two steps in flight", "chunked and preempted"],
)
def test_every_kind_of_request_gives_what_it_gives_without_guesses(
    model: Path, other: Path, expected: dict[str, tuple[Any, ...]], drafts: str, settings: dict[str, Any]
) -> None:
    how = NGRAM if drafts == "ngram" else {"model": str(model if drafts == "same" else other)}
    with make_engine(model, speculative_config=how, **settings) as engine:
        found = run(engine, twice=True)
        assert {name: one for name, one in found.items() if one != expected[name]} == {}
        stats = stats_of(engine)
        assert stats.draft_tokens > stats.accepted_tokens > 0
        assert stats.prefix_hits > 0
        assert (stats.num_preemptions > 0) == ("num_gpu_blocks_override" in settings)


def test_in_bfloat16_too(tmp_path: Path) -> None:
    path = tiny.make("llama", tmp_path, dtype=torch.bfloat16, tokenizer=True)
    with make_engine(path) as engine, make_engine(path, speculative_config=NGRAM) as guessing:
        assert run(guessing) == run(engine)
        assert stats_of(guessing).accepted_tokens > 0


def test_windows_are_given_up_behind_what_is_accepted_only(tmp_path: Path) -> None:
    path = tiny.make("gemma2", tmp_path, tokenizer=True)
    settings: dict[str, Any] = {"block_size": 8, "max_num_batched_tokens": 16}
    with make_engine(path) as engine, make_engine(path, speculative_config=NGRAM, **settings) as guessing:
        assert run(guessing, twice=True) == run(engine)
        assert stats_of(guessing).accepted_tokens > 0


@pytest.mark.slow
def test_requests_die_with_the_core_and_go_on(model: Path, expected: dict[str, tuple[Any, ...]]) -> None:
    args = EngineArgs(model=str(model), max_model_len=256, max_logprobs=-1, speculative_config=NGRAM)
    names = [name for name in expected if name != "processed"]
    found: dict[str, RequestOutput] = {}
    with LLMEngine.from_engine_args(args, enable_multiprocessing=True) as engine:
        for name in names:
            prompt, params = jobs()[name]
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        deadline = time.monotonic() + GUARD
        while engine.has_unfinished_requests():
            assert time.monotonic() < deadline
            found.update({output.request_id: output for output in engine.step()})
            first = found.get("greedy")
            if not supervisor.launch.restarts and first is not None and len(first.outputs[0].token_ids) > 5:
                kill_core(supervisor)
    assert {name: outcome(one)[:4] for name, one in found.items()} == {name: expected[name][:4] for name in names}


@pytest.mark.slow
def test_a_daemon_speculates_for_all() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, allowed_token_ids=[300, 301])
    with LLM() as own:
        expected = own.generate(REPEATS, greedy, use_tqdm=False)[0].outputs[0].token_ids
    with short_folder() as place:
        daemon = Daemon(place, f"--speculative-config={json.dumps(NGRAM)}")
        try:
            daemon.ready_line()
            with LLM(connect=daemon.address) as llm:
                assert llm.generate(REPEATS, greedy, use_tqdm=False)[0].outputs[0].token_ids == expected
                values = {one.name: getattr(one, "value", None) for one in llm.get_metrics()}
            assert values["mainspring:spec_decode_num_draft_tokens"] > 0
            assert values["mainspring:spec_decode_num_accepted_tokens"] > 0
        finally:
            daemon.end()


# ---------------------------------------------------------------------- what it brings


def count_steps(engine: LLMEngine, prompt: list[int], **fields: Any) -> tuple[int, int, int]:
    """Numbers of steps, draft tokens and accepted tokens of one request of 48 tokens."""
    before = stats_of(engine)
    params = SamplingParams(**{"max_tokens": 48, "ignore_eos": True, "seed": 1, **fields})
    engine.add_request("r", {"prompt_token_ids": prompt}, params)
    (output,) = collect(engine).values()
    assert len(output[-1].outputs[0].token_ids) == 48
    after = stats_of(engine)
    assert after.generation_tokens - before.generation_tokens == 48
    return (
        after.num_steps - before.num_steps,
        after.draft_tokens - before.draft_tokens,
        after.accepted_tokens - before.accepted_tokens,
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_that_is_the_model_itself_is_always_right(model: Path, temperature: float) -> None:
    prompt = list(range(2, 60))
    with make_engine(model, speculative_config={"model": str(model)}, block_size=8) as engine:
        for cached in (0, 56):  # the draft finds its own keys and values in the blocks that were cached
            hits = stats_of(engine).prefix_hits
            steps, guessed, right = count_steps(engine, prompt, temperature=temperature)
            assert stats_of(engine).prefix_hits - hits == cached
            assert guessed == right
            assert steps <= 2 + 47 / 5 + 1


def test_lookup_is_right_where_text_repeats_itself(model: Path) -> None:
    with make_engine(model, speculative_config=NGRAM) as engine:
        steps, guessed, right = count_steps(engine, [8] * 20 + [7] * 20, temperature=0.0, allowed_token_ids=[7])
        assert guessed == right
        assert steps <= 12
        steps, guessed, right = count_steps(engine, [7, 8] * 20, temperature=1.0)
        assert steps > 36
        assert guessed < 48, "who guesses wrong stops guessing"


def test_guesses_that_are_always_wrong_are_soon_given_up() -> None:
    engine = Engine(max_model_len=2_000, num_blocks=600, guesses=8, guessed_right=0.0)
    engine.add([1, 2, 3], 1_500)
    engine.run()
    engine.check_outputs()
    assert engine.stats.accepted_tokens < 40
    assert engine.stats.draft_tokens < 3 * 1_500 / REST


def test_guesses_only_fill_small_steps_and_take_nothing_from_others() -> None:
    engine = Engine(
        max_model_len=200, num_blocks=2_000, max_num_seqs=64, max_num_batched_tokens=256, guesses=8, guessed_right=1.0
    )
    for i in range(40):
        engine.add([i, 1, 2, 3], 20 + 4 * i)
    guessed = []
    while engine.scheduler.has_work:
        step = engine.launch()
        assert step is not None
        guessed.append(int(step.plan.guessed.sum()))
        if guessed[-1]:
            assert step.plan.num_tokens <= MOST_GUESS_ROWS
            assert len(step.plan.slots) == engine.stats.num_running, "guesses keep nobody waiting"
        engine.retire()
    engine.check_outputs()
    assert 16 < max(guessed) <= MOST_GUESS_ROWS - 4, "four requests share the room"
    assert guessed[0] == guessed[1] == 0


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_requests_come_and_go_while_there_is_room_for_guesses_and_while_there_is_none(depth: int) -> None:
    numbers = random.Random(depth)
    engine = Engine(
        max_model_len=80, num_blocks=900, max_num_seqs=64, max_num_batched_tokens=256, depth=depth, guesses=6
    )
    for _ in range(12):
        for _ in range(numbers.choice([1, 30])):
            engine.add([numbers.randrange(50) for _ in range(4)], numbers.randrange(1, 40), stop=[7])
        for _ in range(numbers.randrange(12)):
            engine.step()
    engine.run()
    engine.check_outputs()
    assert engine.stats.draft_tokens > engine.stats.accepted_tokens > 50


def test_tokens_that_come_together_share_the_time_between_them(model: Path) -> None:
    with make_engine(model, speculative_config={"model": str(model)}) as engine:
        count_steps(engine, list(range(2, 20)), temperature=0.0)
        meter = engine.engine_core.core.scheduler.meter  # type: ignore[attr-defined]
        found = {one.name: one for one in meter.measured().distributions}
        between, decode = found["inter_token_latency_seconds"], found["request_decode_time_seconds"]
        assert sum(between.counts) == 47
        assert between.sum <= decode.sum * 1.01


# ---------------------------------------------------------------------- as on a GPU


@pytest.mark.parametrize("drafts", ["ngram", "same"])
def test_steps_with_guesses_are_replayed_as_graphs(
    model: Path, expected: dict[str, tuple[Any, ...]], drafts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices: list[LateDevice] = []

    def make(device: torch.device) -> LateDevice:
        devices.append(LateDevice(device))
        return devices[-1]

    monkeypatch.setattr(model_runner, "device_for", make)
    monkeypatch.setattr(generation_worker, "graph_sizes", lambda options, device, most: [1, 8, 32])
    for module in (worker, draft):
        monkeypatch.setattr(module, "choose_backend", lambda options, device: GraphReference())
    how = NGRAM if drafts == "ngram" else {"model": str(model)}
    with make_engine(model, speculative_config=how) as engine:
        found = run(engine)
        assert {name: one[:4] for name, one in found.items()} == {name: one[:4] for name, one in expected.items()}
        mine = devices[-1 if drafts == "ngram" else -2]  # called before the draft model's
        replays = mine.num_replays
        steps, _, right = count_steps(engine, [7, 8] * 20, temperature=0.0, allowed_token_ids=[7])
        assert right > 30
        assert mine.num_replays - replays == steps - 1, "all but the prompt"


# ---------------------------------------------------------------------- what can't be


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({}, InvalidArgumentError, "names no draft model"),
        ({"method": "draft_model"}, InvalidArgumentError, "names no draft model"),
        ({"method": "ngram", "model": "x/y"}, InvalidArgumentError, "'ngram' uses none"),
        ({"method": "ngram", "num_speculative_tokens": 0}, InvalidArgumentError, "num_speculative_tokens is 0"),
        ({"method": "ngram", "num_speculative_tokens": 17}, InvalidArgumentError, "in 1 to 16"),
        ({"method": "ngram", "prompt_lookup_min": 0}, InvalidArgumentError, "prompt_lookup_min is 0"),
        ({"method": "ngram", "prompt_lookup_min": 5}, InvalidArgumentError, "prompt_lookup_max 4"),
        ({"method": "eagle", "model": "x/y"}, InvalidArgumentError, "eagle"),
        ({"model": "/nowhere"}, ModelNotFoundError, "/nowhere"),
    ],
)
def test_what_can_not_be_asked_for_is_named(given: dict[str, Any], error: type[MainspringError], words: str) -> None:
    with pytest.raises(error, match=words):
        EngineArgs(speculative_config=given).create_engine_config()


def test_a_model_alone_means_a_draft_model(model: Path) -> None:
    config = EngineArgs(speculative_config=SpeculativeConfig(model=str(model))).create_engine_config()
    assert config.speculative_config is not None
    assert config.speculative_config.method == "draft_model"


def test_a_draft_that_does_not_fit_is_refused(model: Path, tmp_path: Path) -> None:
    small = tiny.make("llama", tmp_path / "small", vocab_size=300)
    short = tiny.make("llama", tmp_path / "short", max_position_embeddings=128)
    mixed = tiny.make("gemma2", tmp_path / "mixed")
    windowed = tiny.make("mistral", tmp_path / "windowed")
    for guesser, target, error, words in (
        (small, model, InvalidArgumentError, "a vocabulary of 300 tokens, and the model one of 384"),
        (short, model, InvalidArgumentError, "128"),
        (mixed, model, NotSupportedError, "2 kinds of layers"),
        (model, windowed, NotSupportedError, "none without a window"),
    ):
        with pytest.raises(error, match=words):
            make_engine(target, speculative_config={"model": str(guesser)}, skip_tokenizer_init=True)


def test_the_drafts_cache_counts_in_memory(model: Path) -> None:
    def blocks(speculative: dict[str, Any] | None) -> int:
        with make_engine(model, speculative_config=speculative, kv_cache_memory_bytes=1 << 20) as engine:
            return engine.get_cache_config().num_gpu_blocks or 0

    assert blocks({"model": str(model)}) == blocks(None) // 2 == blocks(NGRAM) // 2
