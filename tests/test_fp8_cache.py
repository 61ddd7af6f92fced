"""An fp8 KV cache stores the nearest fp8 number; everything else is as with other dtypes.

So attention has the same bits as over a cache that holds the rounded numbers in the query's dtype, clockwork holds, and
a block takes half the memory of a bf16 block.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

import tiny
from mainspring import EngineArgs, LLMEngine, SamplingParams
from mainspring.core.worker.kv_layout import cache_dtype, plan_layout
from mainspring.ipc.errors import InvalidArgumentError
from mainspring.ipc.messages import Stats
from mainspring.kernels.contract import AttentionSpec, LayerCache, PagedBatch
from mainspring.kernels.reference.reference_backend import ReferenceBackend

FP8 = torch.float8_e4m3fn
CPU = torch.device("cpu")
BLOCK_SIZE = 16
SPECS = [AttentionSpec(4, 2, 16, 16, 0.25), AttentionSpec(6, 2, 24, 16, 0.2, 40), AttentionSpec(8, 1, 64, 64, 0.125)]


def make_cache(spec: AttentionSpec, blocks: int, dtype: torch.dtype) -> LayerCache:
    """The second of three layers in a pool, in the engine's layout."""
    layout = plan_layout([spec] * 3, [0, 1, 2], BLOCK_SIZE, dtype)
    return layout.caches(torch.zeros(blocks, layout.block_elements, dtype=dtype))[1]


def append(cache: LayerCache, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Append from the first row of block 1 on."""
    at = torch.arange(len(keys))
    ReferenceBackend().append(cache, keys, values, 1 + at // BLOCK_SIZE, at % BLOCK_SIZE)


def attend(spec: AttentionSpec, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, kv: torch.dtype):
    """Attention of the last rows of a single request, with keys and values in a cache of dtype `kv`."""
    blocks = -(-len(keys) // BLOCK_SIZE)
    cache = make_cache(spec, 1 + blocks, kv)
    append(cache, keys, values)
    batch = PagedBatch(
        torch.tensor([0, len(query)], dtype=torch.int32),
        torch.tensor([0, blocks], dtype=torch.int32),
        torch.arange(1, 1 + blocks, dtype=torch.int32),
        torch.tensor([(len(keys) - 1) % BLOCK_SIZE + 1], dtype=torch.int32),
        BLOCK_SIZE,
    )
    backend = ReferenceBackend()
    return backend.run(backend.plan(spec, batch, CPU), query, cache)


def draw(spec: AttentionSpec, length: int, rows: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values."""
    generator = torch.Generator().manual_seed(length)
    shapes = (
        (rows, spec.num_q_heads, spec.key_dim),
        (length, spec.num_kv_heads, spec.key_dim),
        (length, spec.num_kv_heads, spec.value_dim),
    )
    return [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_fp8_number_survives_the_cache(dtype: torch.dtype) -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8)
    numbers = numbers[~numbers.float().isnan()]
    numbers = torch.cat([numbers, numbers[:2]]).view(2, 1, 128)  # 254 of them
    spec = AttentionSpec(1, 1, 128, 128, 1.0)
    cache = make_cache(spec, 2, FP8)
    append(cache, numbers.to(dtype), numbers.to(dtype))
    for part in cache:
        assert torch.equal(part[1, :2].float(), numbers.float())
        assert not part[0].float().any(), "the null block was written to"


def test_what_is_beyond_fp8_becomes_its_largest_number() -> None:
    cache = make_cache(SPECS[0], 2, FP8)
    large = torch.tensor([449.0, 465.0, 1e4, float("inf")]).repeat(4).expand(2, 2, 16)
    append(cache, large, -large)
    assert (cache.keys[1, :2].float() == 448).all()
    assert (cache.values[1, :2].float() == -448).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("spec", SPECS, ids=["plain", "window, two dims", "one KV head"])
@pytest.mark.parametrize(("length", "rows"), [(1, 1), (100, 1), (100, 8), (200, 200)])
def test_attention_has_the_bits_of_one_over_the_rounded_numbers(
    spec: AttentionSpec, length: int, rows: int, dtype: torch.dtype
) -> None:
    query, keys, values = draw(spec, length, rows, dtype)
    rounded = [x.to(FP8).to(dtype) for x in (keys, values)]
    assert torch.equal(attend(spec, query, keys, values, FP8), attend(spec, query, *rounded, dtype))


@pytest.mark.parametrize("spec", SPECS, ids=["plain", "window, two dims", "one KV head"])
def test_attention_is_near_that_over_a_bf16_cache(spec: AttentionSpec) -> None:
    """The rounding error of a number is at most 1/16 of it, so the output, an average of values, changes by about
    1/30."""
    query, keys, values = draw(spec, 200, 200, torch.bfloat16)
    exact = attend(spec, query, keys, values, torch.bfloat16).float()
    error = (attend(spec, query, keys, values, FP8).float() - exact).abs()
    assert 0 < error.mean() < exact.std() / 16
    assert error.max() < exact.std()


def test_a_cache_of_another_dtype_than_the_model_is_read_too() -> None:
    query, keys, values = draw(SPECS[0], 70, 8, torch.float32)
    rounded = [x.bfloat16().float() for x in (keys, values)]
    assert torch.equal(
        attend(SPECS[0], query, keys, values, torch.bfloat16), attend(SPECS[0], query, *rounded, torch.float32)
    )


@pytest.mark.parametrize(
    ("option", "kept"),
    [
        ("auto", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("fp8", FP8),
        ("fp8_e4m3", FP8),
    ],
)
def test_the_option_names_what_vllm_names(option: str, kept: torch.dtype) -> None:
    config = EngineArgs(kv_cache_dtype=option).create_engine_config()
    assert cache_dtype(config.cache_config.kv_cache_dtype, torch.float32) == kept


def test_another_name_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="kv_cache_dtype is 'fp4'; it must be one of 'auto', 'bfloat16'"):
        EngineArgs(kv_cache_dtype="fp4").create_engine_config()


def make_engine(model: str | None = None, **settings: object) -> LLMEngine:
    args = EngineArgs(
        model=model, **{"max_model_len": 192, "kv_cache_dtype": "fp8", "skip_tokenizer_init": True, **settings}
    )
    return LLMEngine.from_engine_args(args, enable_multiprocessing=False)


def test_the_same_memory_holds_twice_the_blocks_of_bf16() -> None:
    spec = AttentionSpec(4, 2, 16, 16, 1.0)
    half, whole = (plan_layout([spec] * 4, [0, 1, 2, 3], BLOCK_SIZE, dtype) for dtype in (FP8, torch.bfloat16))
    assert half.block_bytes * 2 == whole.block_bytes
    counts = []
    for dtype in ("fp8", "auto"):
        engine = make_engine(kv_cache_dtype=dtype, kv_cache_memory_bytes=1 << 21)
        counts.append(engine.vllm_config.cache_config.num_gpu_blocks)
        engine.shutdown()
    assert counts[0] == 2 * counts[1]


@pytest.fixture(scope="module", params=["llama bf16", "gemma2 fp32"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    architecture, dtype = request.param.split()
    dtypes = {"bf16": torch.bfloat16, "fp32": torch.float32}
    return str(tiny.make(architecture, tmp_path_factory.mktemp(architecture), dtype=dtypes[dtype]))


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[list[list[int]]]:
    """Compute each request alone, its whole prompt in one step, nothing cached."""
    engine = make_engine(model, max_num_seqs=1, enable_prefix_caching=False)
    yield run(engine)
    engine.shutdown()


def run(engine: LLMEngine) -> list[list[int]]:
    """24 requests, half with a common beginning, half sampled."""
    r = random.Random(5)
    prefix = [r.randrange(tiny.VOCAB_SIZE) for _ in range(48)]
    for i in range(24):
        prompt = prefix * (i % 2) + [r.randrange(tiny.VOCAB_SIZE) for _ in range(r.randint(1, 80))]
        how = SamplingParams(temperature=0.9 * (i % 4 > 1), seed=i, max_tokens=24, ignore_eos=True, detokenize=False)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, how)
    tokens: dict[int, list[int]] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            tokens[int(output.request_id)] = list(output.outputs[0].token_ids)
    return [tokens[i] for i in range(24)]


def stats(engine: LLMEngine) -> Stats:
    return engine.engine_core.core.scheduler.stats()


def test_a_request_gives_the_same_tokens_in_a_batch_and_after_a_cache_hit(model: str, alone: list[list[int]]) -> None:
    engine = make_engine(model)
    assert run(engine) == alone
    assert run(engine) == alone
    assert stats(engine).prefix_hits > 0
    engine.shutdown()


def test_a_request_gives_the_same_tokens_in_chunks_and_after_preemption(model: str, alone: list[list[int]]) -> None:
    engine = make_engine(model, num_gpu_blocks_override=52, max_num_seqs=16, max_num_batched_tokens=29)
    assert run(engine) == alone
    assert stats(engine).num_preemptions > 0
    assert stats(engine).chunked_prefills > 0
    engine.shutdown()


def test_the_cache_is_really_in_fp8(model: str, alone: list[list[int]]) -> None:
    """With random weights the outputs change soon; if all were equal, the option would have no effect."""
    engine = make_engine(model, kv_cache_dtype="auto")
    assert run(engine) != alone
    engine.shutdown()
