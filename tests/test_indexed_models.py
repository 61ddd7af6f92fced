"""Models whose attention sees keys that an indexer selects: exact in any batch, and which keys they see."""

from __future__ import annotations

import itertools
import os
import signal
import time
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import peft_folders
import pooled
import references
import tiny
from mainspring import EngineArgs, LLMEngine, LoRARequest, RequestOutput, SamplingParams
from mainspring.core.model.load import kept_decisions
from mainspring.core.model.load.loader import page
from mainspring.core.model.run import indexed
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.ipc.errors import UnsupportedModelError
from mainspring.kernels.contract import ROW_MULTIPLE, Backend, PagedBatch
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from plain import collect, make_engine
from test_exact import SETTINGS, requests
from test_latents import model_of
from tiers import fast_only

REQUESTS = requests(tiny.VOCAB_SIZE)
EACH = fast_only(("deepseek_v32",), tiny.INDEXED)


def serve(path: Path, reqs: list[tuple[list[int], int]], how: dict[str, Any] | None = None, **options: Any) -> Any:
    """Greedy tokens of all requests at once, and statistics."""
    with LLMEngine.from_engine_args(
        EngineArgs(str(path), **{**SETTINGS, **options}), enable_multiprocessing=False
    ) as engine:
        for i, (prompt, n) in enumerate(reqs):
            params = SamplingParams(
                **{"temperature": 0, "max_tokens": n, "ignore_eos": True, "detokenize": False, **(how or {})}
            )
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        return run(engine, len(reqs)), engine.engine_core.core.scheduler.stats()


def run(engine: LLMEngine, count: int) -> list[list[int]]:
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests():
        found |= {output.request_id: output for output in engine.step()}
    return [list(found[str(i)].outputs[0].token_ids) for i in range(count)]


@pytest.mark.parametrize("architecture", EACH)
def test_greedy_tokens_equal_generate(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path / "few")
    got, stats = serve(path, REQUESTS, num_gpu_blocks_override=20)
    assert got == references.greedy(path, REQUESTS)
    assert stats.prefix_hits > 0
    assert stats.chunked_prefills > 0
    assert stats.mixed_steps > 0
    assert stats.num_preemptions > 0
    every = tiny.make(architecture, tmp_path / "all", index_topk=128)
    different = sum(a != b for a, b in zip(got, references.greedy(every, REQUESTS), strict=True))
    assert different > len(REQUESTS) // 2, "too few keys were left out to show an error"


@pytest.mark.parametrize("architecture", EACH)
def test_rejected_guesses_leave_no_trace(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = [(prompt, 40) for prompt, _ in REQUESTS[5:9]]
    few = {"allowed_token_ids": [7, 8]}  # so few that some guesses are right
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    expected, _ = serve(path, reqs, few)
    got, stats = serve(path, reqs, few, speculative_config=guesses)
    assert got == expected
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize("architecture", tiny.INDEXED)
def test_requests_die_with_the_core_and_go_on(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = [(prompt, 40) for prompt, _ in REQUESTS[:8]]
    found: dict[str, RequestOutput] = {}
    with LLMEngine.from_engine_args(EngineArgs(str(path), **SETTINGS), enable_multiprocessing=True) as engine:
        for i, (prompt, n) in enumerate(reqs):
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        supervisor: Any = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
            first = found.get("0")
            if not supervisor.launch.restarts and first is not None and len(first.outputs[0].token_ids) > 5:
                os.kill(supervisor.core_pid, signal.SIGKILL)
                while not supervisor.launch.restarts:
                    time.sleep(0.01)
    assert supervisor.launch.restarts
    assert [list(found[str(i)].outputs[0].token_ids) for i in range(len(reqs))] == references.greedy(path, reqs)


def test_the_rows_of_a_long_step_are_computed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reqs = tiny.make("deepseek_v32", tmp_path), REQUESTS[4:7]
    monkeypatch.setattr(indexed, "MOST_SCORES", 300)
    got, _ = serve(path, reqs, max_num_batched_tokens=128)
    assert got == references.greedy(path, reqs)


@pytest.mark.parametrize("size", [1, 16, 64, 128])
def test_parts_cover_a_step(size: int) -> None:
    lengths, counts = [200, 3, 65], [130, 3, 1]
    columns = [-(-n // size) for n in lengths]
    starts = [0, *itertools.accumulate(columns)]
    batch = PagedBatch(
        torch.tensor([0, *itertools.accumulate(counts)]),
        torch.tensor(starts),
        torch.arange(starts[-1]) + 7,
        torch.tensor([(n - 1) % size + 1 for n in lengths]),
        size,
    )
    covered = []
    for part in indexed.parts_of(batch, torch.device("cpu")):
        keys, length = part.mask.shape[1], lengths[part.request]
        assert len(part.rows) % ROW_MULTIPLE == keys % indexed.KEY_MULTIPLE == 0
        assert len(part.blocks) * size == keys
        own = part.own.flatten()
        assert torch.equal(own[: part.num_rows], torch.arange(part.num_rows) + own[0])
        assert torch.equal(part.mask, torch.arange(keys) <= part.own)
        readable = -(-min(length, keys) // size)
        assert torch.equal(part.blocks[:readable], torch.arange(readable) + 7 + starts[part.request])
        covered += part.rows[: part.num_rows].tolist()
        assert int(own[-1]) < length
    assert covered == list(range(sum(counts)))


def test_equal_scores_are_taken_in_order_whatever_is_masked() -> None:
    scores = torch.tensor([1.0, 3.0, 1.0, 1.0, 0.0])
    with indexed._TopK(None):
        for masked in (0, 3, 4000):
            padded = torch.nn.functional.pad(scores, (0, masked), value=-torch.inf)
            assert padded.topk(3).indices.tolist() == [1, 0, 2]
            assert torch.topk(padded, 2, dim=-1)[0].tolist() == [3.0, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("architecture", EACH)
def test_verification_sees_which_keys_are_selected(
    architecture: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.make(architecture, tmp_path, dtype=dtype)

    def load() -> PagedModel:
        return page(AutoModelForCausalLM.from_pretrained(path, dtype=dtype))

    assert any("keys selected by an indexer (of" in line for line in load().explain())
    get = indexed._IndexKeys.update_indexer
    monkeypatch.setattr(indexed._IndexKeys, "update_indexer", lambda *args, **kwargs: get(*args, **kwargs).flip(-1))
    with pytest.raises(UnsupportedModelError, match="other logits"):
        load()


def test_attention_that_sees_all_keys_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.make("deepseek_v32", tmp_path)
    every = torch.arange(64, dtype=torch.int32)
    run_selected = ReferenceBackend.run_selected
    monkeypatch.setattr(
        ReferenceBackend,
        "run_selected",
        lambda self, plan, query, cache, selected, *sinks: run_selected(
            self, plan, query, cache, every.expand(len(selected), -1), *sinks
        ),
    )
    with pytest.raises(UnsupportedModelError, match="other logits"):
        page(model_of(path))


def test_a_selection_by_another_function_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.make("deepseek_v32", tmp_path)

    def topk(x: torch.Tensor, k: int, dim: int) -> Any:
        values, indices = x.sort(dim=dim, descending=True)
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    model = model_of(path)
    code = type(model.model.layers[0].self_attn.indexer)
    forward = code.forward

    @wraps(forward)
    def without(self: Any, *args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "topk", topk)
            return forward(self, *args, **kwargs)

    monkeypatch.setattr(code, "forward", without)
    with pytest.raises(UnsupportedModelError, match="another function than topk"):
        page(model)


def test_a_model_without_an_index_has_none(tmp_path: Path) -> None:
    model = page(model_of(tiny.make("deepseek_v3", tmp_path)))
    assert model.indexers is None
    assert not any(spec.selects or spec.index_dim for spec in model.layers)


@pytest.mark.slow
def test_adapters_change_all_but_the_indexer(tmp_path: Path) -> None:
    path = tiny.make("deepseek_v32", tmp_path / "model")
    modules = ["kv_b_proj", "q_b_proj", "o_proj"]
    adapter = peft_folders.make_lora(path, tmp_path / "lora", 1, r=4, target_modules=modules)
    refused = peft_folders.make_lora(path, tmp_path / "refused", 1, r=4, target_modules=["wq_b"])
    reqs = REQUESTS[:8]
    lora, other = LoRARequest("a", 1, str(adapter)), LoRARequest("b", 2, str(refused))
    with make_engine(path, **SETTINGS, enable_lora=True) as engine:
        for i, (prompt, n) in enumerate(reqs):
            params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            engine.add_request(str(i), {"prompt_token_ids": prompt}, params, lora_request=lora)
        got = run(engine, len(reqs))
        engine.add_request("b", {"prompt_token_ids": reqs[0][0]}, params, lora_request=other)
        (output,) = collect(engine)["b"]
    assert "no linear layer of this model that an adapter can change" in str(output.outputs[0].error)
    assert got == [peft_folders.generate(path, adapter, prompt, n) for prompt, n in reqs]


@pytest.mark.slow
def test_keys_and_values_may_be_cached_in_place_of_latents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reqs = tiny.make("glm_moe_dsa", tmp_path / "model"), REQUESTS[:8]
    monkeypatch.setattr(Backend, "caches_latents", lambda *_: False)
    monkeypatch.setattr(kept_decisions, "cache_folder", lambda: tmp_path / "native")  # another model was decided about
    assert serve(path, reqs)[0] == references.greedy(path, reqs)


@pytest.mark.slow
def test_a_narrow_cache_gives_the_same_tokens_again(tmp_path: Path) -> None:
    path, reqs = tiny.make("deepseek_v32", tmp_path), REQUESTS[:8]
    assert serve(path, reqs, kv_cache_dtype="fp8")[0] == serve(path, reqs, kv_cache_dtype="fp8", max_num_seqs=2)[0]


@pytest.mark.slow
def test_a_draft_model_may_have_an_index(tmp_path: Path) -> None:
    path = tiny.make("deepseek_v32", tmp_path)
    reqs = REQUESTS[:8]
    draft = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    got, stats = serve(path, reqs, speculative_config=draft)
    assert got == references.greedy(path, reqs)
    assert stats.accepted_tokens > 0.9 * stats.draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", tiny.INDEXED)
def test_embeddings_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    prompts = [prompt for prompt, _ in REQUESTS[:8]]
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with make_engine(path, runner="pooling", **SETTINGS) as engine:
        vectors = pooled.vectors(engine, [{"prompt_token_ids": prompt} for prompt in prompts])
    for prompt, vector in zip(prompts, vectors, strict=True):
        with torch.inference_mode():
            last = model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(vector, last / np.linalg.norm(last), atol=1e-4)
