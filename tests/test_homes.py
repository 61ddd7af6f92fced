"""Ranks that share the experts of a model while each has requests of its own: `data_parallel_size` with
`enable_expert_parallel`."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

import pooled
import references
import tiny
from harness import Engine, message
from mainspring import EngineArgs, LLMEngine, SamplingParams
from mainspring.core.memory.home_caches import HomeCaches
from mainspring.core.parallel.homes import part_of, places_of_wanted
from mainspring.core.plan.request import Request
from mainspring.core.worker.step_inputs import places_of_rows
from mainspring.ipc.errors import MainspringError
from plain import collect, make_engine
from test_exact import SETTINGS, requests
from test_ranks import extension, outcomes, ranks_of, same  # noqa: F401
from tiers import fast_only

MODELS = [("mixtral", 2), ("qwen3_moe", 2), ("deepseek_v3", 2), ("deepseek_v3", 4)]


def engine_of(path: Path, homes: int = 2, own_process: bool = False, **fields: Any) -> LLMEngine:
    args = EngineArgs(str(path), data_parallel_size=homes, enable_expert_parallel=True, **fields)
    return LLMEngine.from_engine_args(args, enable_multiprocessing=own_process)


def ask(engine: LLMEngine, **more: Any) -> None:
    for number, (prompt, length) in enumerate(requests(tiny.VOCAB_SIZE)):
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, **more)
        engine.add_request(str(number), {"prompt_token_ids": prompt}, params)


def tokens(found: dict[str, Any]) -> list[list[int]]:
    return [list(found[name][-1].outputs[0].token_ids) for name in sorted(found, key=int)]


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many requests got a slot at each home."""
    seen: Counter[int] = Counter()
    take = HomeCaches.take_prefix

    def counted(self: HomeCaches, request: Request, waited_for: bool = True) -> None:
        seen[request.home] += 1
        take(self, request, waited_for)

    monkeypatch.setattr(HomeCaches, "take_prefix", counted)
    return seen


@pytest.mark.parametrize("case", fast_only(MODELS[:1], MODELS), ids=str)
def test_tokens_equal_generate(case: tuple[str, int], tmp_path: Path, admitted: Counter[int]) -> None:
    architecture, homes = case
    path = tiny.make(architecture, tmp_path)
    with engine_of(path, homes, num_gpu_blocks_override=10, **SETTINGS) as engine:
        ask(engine)
        found = collect(engine)
        stats = engine.engine_core.core.stats()  # type: ignore[attr-defined]
        assert stats.num_preemptions > 0
        assert stats.prefix_hits > 0
        assert stats.chunked_prefills > 0
        assert stats.kv_cache_usage == 0.0
        assert len(ranks_of(os.getpid())) == homes - 1
    assert tokens(found) == references.greedy(path, requests(tiny.VOCAB_SIZE))
    assert len(admitted) == homes, "a home had no request"
    assert min(admitted.values()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("way", ["no guesses", "ngram", "async"])
def test_requests_of_every_kind_are_as_with_one_rank(tmp_path: Path, way: str) -> None:
    path = tiny.make("qwen3_moe", tmp_path, tokenizer=True)
    guesses = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    fields: dict[str, Any] = guesses if way == "ngram" else {"async_scheduling": True} if way == "async" else {}
    with make_engine(path) as engine:
        expected = outcomes(engine)
    with engine_of(path, max_model_len=256, max_logprobs=-1, **fields) as engine:
        same(outcomes(engine), expected)


@pytest.mark.slow
def test_a_request_has_the_same_bits_alone_and_beside_others(tmp_path: Path) -> None:
    path = tiny.make("qwen3_moe", tmp_path)

    def logprobs(found: dict[str, Any], name: str) -> list[float]:
        (output,) = found[name][-1].outputs
        return [one[token].logprob for token, one in zip(output.token_ids, output.logprobs, strict=True)]

    with engine_of(path, **SETTINGS, enable_prefix_caching=False) as engine:
        ask(engine, logprobs=0)
        together = collect(engine)
        for number, (prompt, length) in [*enumerate(requests(tiny.VOCAB_SIZE))][::4]:
            params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, detokenize=False, logprobs=0)
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
            assert logprobs(collect(engine), str(number)) == logprobs(together, str(number))


@pytest.mark.slow
def test_a_rank_that_is_killed_costs_no_stream(tmp_path: Path) -> None:
    path = tiny.make("deepseek_v3", tmp_path)
    with engine_of(path, own_process=True, **SETTINGS) as engine:
        ask(engine)
        supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        found, deadline = {}, time.monotonic() + 200
        while len(found) < 3:
            found |= {output.request_id: [output] for output in engine.step()}
        before = supervisor.launch.restarts
        (other,) = ranks_of(supervisor.core_pid)
        other.kill()
        while engine.has_unfinished_requests() or supervisor.launch.restarts == before:
            assert time.monotonic() < deadline
            found |= {output.request_id: [output] for output in engine.step()}
    assert tokens(found) == references.greedy(path, requests(tiny.VOCAB_SIZE))


@pytest.mark.slow
def test_a_rank_has_its_experts_and_all_of_attention(
    tmp_path: Path,
    extension: str,  # noqa: F811
) -> None:
    path = tiny.make("qwen3_moe", tmp_path)
    names = [f"model.layers.0.{name}" for name in ("mlp.experts.down_proj", "self_attn.o_proj.weight")]
    whole = [list(AutoModelForCausalLM.from_pretrained(path).get_parameter(name).shape) for name in names]
    with engine_of(path, max_model_len=128, skip_tokenizer_init=True, worker_extension_cls=extension) as engine:
        experts, attention = (engine.collective_rpc("shape", args=[name]) for name in names)
    assert experts == [[whole[0][0] // 2, *whole[0][1:]]] * 2
    assert attention == [whole[1]] * 2


@pytest.mark.parametrize(
    ("architecture", "fields", "what"),
    [
        ("llama", {}, "no experts to divide"),
        ("qwen3_moe", {"enable_lora": True}, "enable_lora"),
        ("qwen3_moe", {"kv_offloading_size": 0.01}, "kv_offloading_size"),
        ("qwen3_next", {}, "recurrent state"),
        ("qwen3", {}, "models that generate"),
    ],
)
@pytest.mark.slow
def test_what_is_not_supported_says_so(architecture: str, fields: dict[str, Any], what: str, tmp_path: Path) -> None:
    make = pooled.make if what == "models that generate" else tiny.make
    with pytest.raises(MainspringError, match=what):
        engine_of(make(architecture, tmp_path), max_model_len=128, skip_tokenizer_init=True, **fields)


def test_several_ranks_for_each_copy_are_cores_of_their_own() -> None:
    def parallel(**fields: Any) -> Any:
        return EngineArgs(data_parallel_size=2, **fields).create_engine_config().parallel_config

    joined, apart, dense = (
        parallel(enable_expert_parallel=True),
        parallel(enable_expert_parallel=True, tensor_parallel_size=2),
        parallel(),
    )
    assert [(p.homes, p.num_cores, p.num_ranks) for p in (joined, apart, dense)] == [(2, 1, 2), (1, 2, 2), (1, 2, 1)]


@given(st.data())
def test_rows_come_back_in_the_order_of_the_step(data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 4))
    requests = data.draw(st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, 4)), min_size=1, max_size=9))
    homes, counts = (np.array(column, np.int64) for column in zip(*requests, strict=True))
    total = int(counts.sum())
    wanted = np.array(data.draw(st.lists(st.integers(0, total - 1), max_size=12)), np.int64)
    more = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    rows, collected, padded = np.arange(total), [], []
    for rank in range(size):
        part = part_of(rank, size, homes, counts, wanted)
        mine, own = rows[part.tokens], counts[part.mine]
        assert len(mine) == part.num_tokens[rank] == own.sum()
        moved = places_of_rows(own)
        if moved is not None:  # as the forward pass orders them
            ordered = np.empty_like(mine)
            ordered[moved] = mine
            picked = ordered[moved[part.wanted]]
        else:
            picked = mine[part.wanted]
        assert len(picked) == part.num_wanted[rank]
        collected += [*picked.tolist(), *[-1] * more[rank]]
        padded.append(len(picked) + more[rank])
    found = np.array(collected, np.int64)[places_of_wanted(homes, counts, wanted, padded)]
    assert found.tolist() == wanted.tolist()


def test_a_slot_that_changes_homes_in_a_step_has_the_blocks_of_its_new_request_only() -> None:
    kv = Engine(homes=2, block_size=4, num_blocks=16).kv
    old, new = (Request(message(handle), 0, 0.0, 64) for handle in range(2))
    for request, home in ((old, 1), (new, 0)):
        kv.find_prefix(request)
        request.home, request.slot = home, 3
        kv.take_prefix(request)
        assert kv.extend(request, 0, 12)
        if request is old:
            kv.free(old)
    found = kv.take_updates()
    assert [list(column) for column in found] == [[0] * 3, [3] * 3, [0, 1, 2], new.tables[0]]
