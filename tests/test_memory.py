"""The number of KV blocks: the limits from memory, from one request, and from all slots."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

import tiny
from mainspring.core.model.load.loader import load_model
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.core.worker import block_count
from mainspring.core.worker.block_count import count_blocks, run_largest_step
from mainspring.core.worker.kv_layout import KVLayout, plan_layout
from mainspring.ipc.config import CacheConfig, EngineConfig, LoadConfig, ModelConfig, SchedulerConfig
from mainspring.ipc.errors import InvalidArgumentError, OutOfMemoryError
from mainspring.kernels.reference.reference_backend import ReferenceBackend


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PagedModel:
    path = tiny.make("gemma2", tmp_path_factory.mktemp("gemma2"))
    return load_model(ModelConfig(model=str(path)), LoadConfig(), torch.device("cpu"))


@pytest.fixture(scope="module")
def layout(model: PagedModel) -> KVLayout:
    return plan_layout(model.layers, model.sources, 16, model.dtype)


def config(max_model_len: int | None = None, seqs: int = 4, **cache: int) -> EngineConfig:
    return EngineConfig(
        model_config=ModelConfig(max_model_len=max_model_len),
        cache_config=CacheConfig(**cache),
        scheduler_config=SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=seqs),
    )


def count(model: PagedModel, layout: KVLayout, engine: EngineConfig) -> tuple[int, int]:
    return count_blocks(engine, layout, model, ReferenceBackend())


def test_bytes_are_turned_into_blocks(model: PagedModel, layout: KVLayout) -> None:
    blocks, _ = count(model, layout, config(64, seqs=100, kv_cache_memory_bytes=30 * layout.block_bytes + 7))
    assert blocks == 30


def test_there_are_never_more_blocks_than_all_slots_can_fill(model: PagedModel, layout: KVLayout) -> None:
    blocks, length = count(model, layout, config(64, seqs=3))
    assert blocks == 1 + 3 * layout.blocks_for(64, 32)
    assert length == 64


def test_a_default_max_model_len_is_cut_to_the_size_of_the_cache(model: PagedModel, layout: KVLayout) -> None:
    blocks, length = count(model, layout, config(num_gpu_blocks_override=10))
    assert 1 + layout.blocks_for(length, 32) <= blocks == 10 < 1 + layout.blocks_for(length + 1, 32)


def test_a_wish_that_does_not_fit_is_an_error_that_names_both_numbers(model: PagedModel, layout: KVLayout) -> None:
    needed = 1 + layout.blocks_for(128, 32)
    with pytest.raises(OutOfMemoryError, match=f"128 needs {needed} KV blocks.*the cache has 5"):
        count(model, layout, config(128, num_gpu_blocks_override=5))


def test_no_memory_for_one_block_is_an_error(model: PagedModel, layout: KVLayout) -> None:
    with pytest.raises(OutOfMemoryError, match="the cache has 0"):
        count(model, layout, config(kv_cache_memory_bytes=layout.block_bytes - 1))


def test_a_length_beyond_the_models_own_is_refused(model: PagedModel, layout: KVLayout) -> None:
    assert model.max_position is not None
    with pytest.raises(InvalidArgumentError, match=f"the model's own limit is {model.max_position}"):
        count(model, layout, config(model.max_position + 1))


def test_a_length_beyond_it_may_be_asked_for_if_the_frequencies_are_chosen_for_it(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    path = tiny.make("llama", tmp_path, rope_parameters=rope, max_position_embeddings=64)
    model = load_model(ModelConfig(model=str(path)), LoadConfig(), torch.device("cpu"), 200)
    layout = model.lay_out(ReferenceBackend(), 16, model.dtype)
    assert count(model, layout, config(200))[1] == 200
    assert count(model, layout, config())[1] == 64
    with pytest.raises(InvalidArgumentError, match="the model's own limit is 256"):
        count(model, layout, config(257))


def test_the_largest_step_runs_over_a_pool_of_two_blocks(model: PagedModel, layout: KVLayout) -> None:
    logits = run_largest_step(model, layout, ReferenceBackend(), budget=100)
    assert logits.shape == (8, model.vocab_size)
    assert torch.isfinite(logits).all()


def test_a_configuration_survives_the_way_to_the_core_and_back() -> None:
    engine = config(64, num_gpu_blocks_override=9)
    assert msgspec.json.decode(msgspec.json.encode(engine), type=EngineConfig) == engine


def test_free_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files in memory count as free, as the machine's do."""
    monkeypatch.setattr(block_count, "CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.current").write_text("7000\n")
    (tmp_path / "memory.stat").write_text("anon 6500\nfile 500\nactive_file 300\ninactive_file 100\n")
    for limit, expected in (("9000", 2400), ("6000", 0)):
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        assert block_count.free_host_bytes() == expected
    (tmp_path / "memory.max").write_text("max\n")
    assert block_count.free_host_bytes() > 9000
