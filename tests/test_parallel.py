"""Several ranks compute one model: sums, cuts, plans, and tokens as of one rank. Gloo on this machine's processor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import tiny
from mainspring.benchmarks.architectures import MAX_TOKENS
from mainspring.core.parallel.cuts import Cut, sharding_of
from mainspring.core.parallel.group import OneRank, added
from mainspring.core.parallel.parallel_backend import ParallelBackend
from mainspring.core.parallel.plans import plans_of
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from native_here import why_not
from quantized_folders import make_awq
from rank_functions import (
    PROMPTS,
    dummy,
    exchanged,
    generate,
    in_parts,
    library_sums,
    quantized,
    read_bytes,
    set_rows,
    sums,
    whole_experts,
    with_wrong_plans,
)
from rank_pool import RankPool

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(2, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(4, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.stop()


# ------------------------------------------------------------------ sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_has_the_same_bits_everywhere(four: RankPool, dtype: torch.dtype) -> None:
    of_ranks = four.run(sums, dtype, 4000)
    parts = []
    for rank in range(4):
        torch.manual_seed(rank)
        parts.append(torch.randn(64).to(dtype))
    expected = added(parts).to(dtype).float().tolist()
    assert all(row == expected for rows in of_ranks for row in rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_library_may_add_in_its_own_order(four: RankPool, dtype: torch.dtype) -> None:
    of_ranks = four.run(library_sums, dtype)
    parts = []
    for rank in range(4):
        torch.manual_seed(rank)
        parts.append(torch.randn(64).to(dtype))
    assert of_ranks == [of_ranks[0]] * 4
    torch.testing.assert_close(torch.tensor(of_ranks[0]), added(parts), atol=4 * torch.finfo(dtype).eps * 4, rtol=0)


def test_ranks_exchange_columns_minima_and_messages(four: RankPool) -> None:
    expected = ([[0, 10, 1, 11, 2, 12, 3, 13]], [0, 0], b"decided", b"", [0, 7])
    assert four.run(exchanged) == [expected] * 4


# ------------------------------------------------------------------ cuts


def test_rows_of_a_parameter_reach_the_rank_that_holds_them() -> None:
    """Whatever rows are sent together, the rank then has its part."""
    whole = torch.arange(24.0).view(12, 2)
    cut = Cut(0, ((2, 4), (8, 10)), 12)
    for step in (1, 3, 5, 12):
        held = torch.full((4, 2), -1.0)
        for start in range(0, 12, step):
            for rows, first in cut.rows_of(whole[start : start + step], start):
                held[first : first + len(rows)] = rows
        assert torch.equal(held, cut.of(whole))


def test_what_cannot_be_cut_evenly_stays_whole_with_what_belongs_to_it() -> None:
    config = AutoConfig.for_model("llama", **{**tiny._SIZES, "intermediate_size": 99})
    model = AutoModelForCausalLM.from_config(config)
    found = sharding_of(model, model.tp_plan, 0, 2)
    assert not any(".mlp." in name for name in (*found.cuts, *found.sums))
    assert "model.layers.1.self_attn.o_proj" in found.sums
    assert found.cuts["model.layers.0.self_attn.q_proj.weight"] == Cut(0, ((0, 32),), 64)


def test_ranks_share_a_head_of_keys_if_there_are_fewer_heads() -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **tiny._SIZES))
    found = [sharding_of(model, model.tp_plan, rank, 4).cuts for rank in range(4)]
    name = "model.layers.0.self_attn.k_proj.weight"
    assert [cuts[name].ranges for cuts in found] == [((0, 16),), ((0, 16),), ((16, 32),), ((16, 32),)]


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "deepseek_v3"])
def test_an_attention_whose_query_heads_cannot_be_divided_stays_whole(name: str) -> None:
    """Even if its rows can: the rows of six heads are four parts of one and a half heads each."""
    kind, fields = {**tiny.ARCHITECTURES, **tiny.LATENT}[name]
    heads = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 2 if name == "llama" else 6}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**tiny._SIZES, **fields, **heads}))
    _, plan = next(plans_of(model, False, False))
    found = sharding_of(model, plan, 0, 4)
    assert not any("att" in name for name in (*found.cuts, *found.sums, *found.counts))
    assert any(".mlp." in name for name in found.sums)
    assert any("att" in name for name in sharding_of(model, plan, 0, 2).sums)


# ------------------------------------------------------------------ models


def alone(path: Path) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    found = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
        found.append(out[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("name", ["llama", "gemma2", "phi3", "opt", "mixtral", "qwen3_moe", "deepseek_v3"])
def test_two_ranks_give_the_tokens_of_generate(two: RankPool, tmp_path: Path, name: str) -> None:
    path = tiny.make(name, tmp_path)
    found = two.run(generate, str(path))
    assert [tokens for tokens, _, _ in found] == [alone(path)] * 2
    assert all(share < 0.8 for _, share, _ in found)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_four_ranks_give_the_tokens_of_generate(four: RankPool, tmp_path: Path, name: str) -> None:
    path = tiny.make(name, tmp_path)
    assert [tokens for tokens, _, _ in four.run(generate, str(path))] == [alone(path)] * 4


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_each_expert_is_on_one_rank(two: RankPool, tmp_path: Path, name: str) -> None:
    path = tiny.make(name, tmp_path)
    found = two.run(whole_experts, str(path))
    assert [tokens for tokens, _, _ in found] == [alone(path)] * 2


def test_copies_of_parts_of_a_weight_that_changes_stay_where_they_are() -> None:
    backend, weight = ParallelBackend(ReferenceBackend(), OneRank(), 2), torch.nn.Parameter(torch.randn(8, 16))
    backend.add_up(weight, whole_input=False)
    rows = torch.randn(3, 16)
    backend.linear(rows, weight)
    [(_, before)] = backend.pieces.values()
    addresses = [piece.data_ptr() for piece in before]
    with torch.no_grad():
        weight.copy_(torch.randn(8, 16))
    torch.testing.assert_close(backend.linear(rows, weight), torch.nn.functional.linear(rows, weight))
    for view, unseen in ((weight.detach(), False), (weight.data, True)):  # CUDA graphs make no product here
        changed = torch.randn(8, 16)
        view.copy_(changed)
        backend.renew(unseen)
        [(_, after)] = backend.pieces.values()
        assert torch.equal(torch.cat(after, 1), changed)
        assert [piece.data_ptr() for piece in after] == addresses


def test_copies_of_parts_of_a_weight_have_its_dtype() -> None:
    backend = ParallelBackend(ReferenceBackend(), OneRank(), 2)
    weight = torch.nn.Parameter(torch.randint(-2, 3, (8, 16)).bfloat16())  # sums of whole numbers are exact
    backend.add_up(weight, whole_input=False)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        weight.data = weight.data.to(dtype)
        rows = torch.randint(-2, 3, (3, 16)).to(dtype)
        assert torch.equal(backend.linear(rows, weight), torch.nn.functional.linear(rows, weight))


def test_sums_of_as_many_parts_have_the_bits_of_any_number_of_ranks(
    two: RankPool, four: RankPool, tmp_path: Path
) -> None:
    path = str(tiny.make("qwen3", tmp_path))
    one = in_parts(OneRank(), path)
    assert two.run(in_parts, path) == [one] * 2
    assert four.run(in_parts, path) == [one] * 4


@pytest.mark.parametrize(("kind", "whole_experts"), [("llama", False), ("qwen3_moe", False), ("qwen3_moe", True)])
def test_a_rank_reads_its_own_part_of_the_checkpoint(
    two: RankPool, tmp_path: Path, kind: str, whole_experts: bool
) -> None:
    for read, whole in two.run(read_bytes, str(tiny.make(kind, tmp_path)), whole_experts):
        assert read == whole / 2 > 0


def test_dummy_weights_are_made_in_part(two: RankPool, tmp_path: Path) -> None:
    (_, one, shapes), (_, other, _) = two.run(dummy, str(tiny.make("llama", tmp_path)))
    assert one == other
    assert len(set(one.values())) > 1
    assert shapes["model.layers.0.mlp.gate_proj.weight"] == (48, 64)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_native_kernels_with_packed_weights(two: RankPool, tmp_path: Path, name: str) -> None:
    path = tiny.make(name, tmp_path)
    found = two.run(generate, str(path), "native")
    assert [tokens for tokens, _, _ in found] == [alone(path)] * 2


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_ranks_hold_parts_of_quantized_weights(two: RankPool, tmp_path: Path) -> None:
    path = str(make_awq(tmp_path, fields={"intermediate_size": 128})[0])
    (first, kinds), (second, others) = two.run(quantized, path)
    one, of_one = quantized(OneRank(), path)
    assert kinds == others == of_one
    assert kinds.count(4) == 2 * 4
    assert first == second
    torch.testing.assert_close(torch.tensor(first), torch.tensor(one), atol=0.02, rtol=0.02)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_products_in_parts_have_the_values_of_quantized_weights(tmp_path: Path) -> None:
    quantized_path, plain, _ = make_awq(tmp_path)
    group: Any = OneRank()
    found = [generate(group, str(path), "native", parts=4)[0] for path in (quantized_path, plain)]
    assert found[0] == found[1]


def test_rows_of_a_whole_parameter_are_set_where_they_are_held(two: RankPool, tmp_path: Path) -> None:
    found = two.run(set_rows, str(tiny.make("llama", tmp_path)))
    assert found == [[float(x) for x in range(48)], [float(x) for x in range(48, 96)]]


# ------------------------------------------------------------------ plans


def test_a_wrong_plan_is_not_used(two: RankPool, tmp_path: Path) -> None:
    path = str(tiny.make("llama", tmp_path))
    for text in two.run(with_wrong_plans, path, False):
        assert "no plan for 2 ranks gives the model's own logits" in text
        assert "nothing is cut in the layers" in text
    assert two.run(with_wrong_plans, path, True) == ["one of 2 ranks, by transformers' plan"] * 2
