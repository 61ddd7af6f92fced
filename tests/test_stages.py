"""Stages of a model: each reads its own layers only, and together they give the tokens of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import tiny
from mainspring.benchmarks.architectures import build
from mainspring.core.parallel.numbering import number_of, rank_of
from native_here import why_not
from rank_pool import RankPool
from stage_functions import generate, layouts, read, refusal
from test_parallel import alone
from tiers import fast_only


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(2, tmp_path_factory.mktemp("stages"))
    yield pool
    pool.stop()


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    pool = RankPool(4, tmp_path_factory.mktemp("stages"))
    yield pool
    pool.stop()


# ------------------------------------------------------------------ stages of a model


def test_the_process_that_leads_is_the_first_rank_of_the_last_stage() -> None:
    assert [rank_of(number, 3, 2) for number in range(6)] == [4, 5, 0, 1, 2, 3]
    assert all(number_of(rank_of(number, 3, 2), 3, 2) == number for number in range(6))


@pytest.mark.parametrize(
    "name", fast_only(["gemma3"], ["llama", "gpt2", "gemma3", "mixtral", "deepseek_v3", "lfm2", "qwen3_next"])
)
def test_two_stages_give_the_tokens_of_generate(two: RankPool, tmp_path: Path, name: str) -> None:
    path = tiny.make(name, tmp_path)
    found = two.run(generate, str(path))
    assert [tokens for tokens, _ in found] == [alone(path)] * 2
    assert [notes[0][:14] for _, notes in found] == ["stage 1 of 2: ", "stage 0 of 2: "]


@pytest.mark.slow
def test_two_stages_of_two_ranks_give_the_tokens_of_generate(four: RankPool, tmp_path: Path) -> None:
    path = tiny.make("gemma3", tmp_path)
    found = four.run(generate, str(path), 2)
    assert [tokens for tokens, _ in found] == [alone(path)] * 4
    assert all(notes[0].startswith("one of 2 ranks") and notes[1].startswith("stage ") for _, notes in found)


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_each_stage_computes_with_the_kernels_for_its_layers(two: RankPool, tmp_path: Path) -> None:
    path = tiny.make("llama", tmp_path)
    (last, last_notes), (first, first_notes) = two.run(generate, str(path), 1, "native")
    assert last == first == alone(path)
    assert any(note.startswith(("as a whole", "with packed weights")) for note in last_notes)
    assert any(note.startswith(("as a whole", "with packed weights")) for note in first_notes)


def test_a_stage_reads_and_holds_its_own_layers_only(two: RankPool, tmp_path: Path) -> None:
    (last_read, last, _), (first_read, first, _) = two.run(read, str(tiny.make("llama", tmp_path)))
    assert sorted(first) == first_read
    assert sorted(last) == last_read
    assert {name for name in first if ".layers." not in name} == {"model.embed_tokens.weight", "model.norm.weight"}
    assert {name for name in last if ".layers." not in name} == {"lm_head.weight", "model.norm.weight"}
    assert all(".layers.0." in name for name in first if ".layers." in name)
    assert all(".layers.1." in name for name in last if ".layers." in name)


def test_tied_embeddings_are_read_by_the_stage_with_the_output_layer_too(two: RankPool, tmp_path: Path) -> None:
    """And values that are set under their one name get there."""
    (last_read, last, is_set), (first_read, first, _) = two.run(read, str(tiny.make("gemma3", tmp_path)))
    assert "model.embed_tokens.weight" in last_read
    assert "model.embed_tokens.weight" in first_read
    assert "lm_head.weight" in last
    assert "model.embed_tokens.weight" not in last
    assert "lm_head.weight" not in first
    assert is_set


def test_tied_embeddings_in_pickled_files_are_read_by_both_stages(two: RankPool, tmp_path: Path) -> None:
    path = tiny.make("gemma3", tmp_path)
    torch.save(load_file(path / "model.safetensors"), path / "pytorch_model.bin")
    (path / "model.safetensors").unlink()
    assert [tokens for tokens, _ in two.run(generate, str(path))] == [alone(path)] * 2


def test_layers_that_read_keys_of_earlier_ones_are_not_separated(two: RankPool, tmp_path: Path) -> None:
    build("gemma3n_text", tmp_path, {}, (0.3, 1.5))
    assert all("2 stages do not give the model's own logits" in text for text in two.run(refusal, str(tmp_path)))


@pytest.mark.slow
def test_more_stages_than_layers_are_refused(four: RankPool, tmp_path: Path) -> None:
    for text in four.run(refusal, str(tiny.make("llama", tmp_path))):
        assert "has 2 layers, and pipeline_parallel_size is 4" in text


def test_stages_with_other_layers_have_the_same_groups_and_blocks(two: RankPool, tmp_path: Path) -> None:
    """Of four layers the first three have windows."""
    found = two.run(layouts, str(tiny.make("gemma3", tmp_path)))
    assert found[0] == found[1]
    groups, elements, most, _ = found[0]
    assert sorted(most.values()) == [1, 2]
    assert sorted(window or 0 for _, _, window in groups) in ([0, 24], [0, 24, 24])
    assert elements >= 16 * 2 * 2 * 16
