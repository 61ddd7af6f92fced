"""Models with recurrent state: exact in any batch, with snapshots, preemption and guesses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModel

import pooled
import references
import tiny
from kills import kill_core
from mainspring import LLM, EngineArgs, LLMEngine, LoRARequest, RequestOutput, SamplingParams
from mainspring.ipc.messages import Stats
from plain import Job, collect, make_engine, run, serve
from test_exact import SETTINGS, requests
from tiers import fast_only

EACH = fast_only(("qwen3_next",), tiny.RECURRENT)
BLOCKS = dict.fromkeys(("mamba2", "falcon_mamba"))  # no attention, so no blocks


@pytest.mark.parametrize("architecture", EACH)
def test_greedy_tokens_equal_generate(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = requests(tiny.VOCAB_SIZE)
    got, stats = serve(path, reqs, num_gpu_blocks_override=BLOCKS.get(architecture, 20), **SETTINGS)
    assert got == references.greedy(path, reqs)
    assert len({token for tokens in got for token in tokens}) >= 20, "outputs too uniform to show an error"
    assert stats.prefix_hits > 0
    assert stats.chunked_prefills > 0
    assert stats.mixed_steps > 0
    if architecture not in BLOCKS:
        assert stats.num_preemptions > 0
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


@pytest.mark.parametrize("architecture", EACH)
def test_rejected_guesses_leave_no_trace_in_the_state(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = [(prompt, 40) for prompt, _ in requests(tiny.VOCAB_SIZE)[5:9]]
    few = {"allowed_token_ids": [7, 8]}  # so few that some guesses are right
    speculative = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    expected, _ = serve(path, reqs, few, **SETTINGS)
    got, stats = serve(path, reqs, few, speculative_config=speculative, **SETTINGS)
    assert got == expected
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("level", fast_only([], [1, 2]))
def test_requests_go_on_after_sleep(level: int, tmp_path: Path) -> None:
    path = tiny.make("qwen3_next", tmp_path)
    reqs = requests(tiny.VOCAB_SIZE)[:6]
    found: dict[str, RequestOutput] = {}
    with engine_of(path, reqs) as engine:
        for _ in range(12):
            found |= {output.request_id: output for output in engine.step()}
        engine.sleep(level, mode="keep")
        engine.wake_up()
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
    assert [list(found[str(i)].outputs[0].token_ids) for i in range(len(reqs))] == references.greedy(path, reqs)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_next", "nemotron_h"])
def test_requests_die_with_the_core_and_go_on(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    reqs = [(prompt, 40) for prompt, _ in requests(tiny.VOCAB_SIZE)[:8]]
    found: dict[str, RequestOutput] = {}
    with engine_of(path, reqs, enable_multiprocessing=True) as engine:
        supervisor: Any = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        while engine.has_unfinished_requests():
            found |= {output.request_id: output for output in engine.step()}
            first = found.get("0")
            if not supervisor.launch.restarts and first is not None and len(first.outputs[0].token_ids) > 5:
                kill_core(supervisor)
    assert supervisor.launch.restarts
    assert [list(found[str(i)].outputs[0].token_ids) for i in range(len(reqs))] == references.greedy(path, reqs)


def engine_of(path: Path, reqs: list[tuple[list[int], int]], enable_multiprocessing: bool = False) -> LLMEngine:
    """An engine that has been given these requests, named by their numbers."""
    args = EngineArgs(model=str(path), **SETTINGS)
    engine = LLMEngine.from_engine_args(args, enable_multiprocessing=enable_multiprocessing)
    for i, (prompt, n) in enumerate(reqs):
        params = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    return engine


@pytest.mark.slow
@pytest.mark.parametrize("architecture", tiny.RECURRENT)
def test_bits_depend_on_no_other_request(architecture: str, tmp_path: Path) -> None:
    dtype = torch.float32 if architecture == "minimax" else torch.bfloat16  # its decays are too coarse in bfloat16
    path = tiny.make(architecture, tmp_path, dtype=dtype)
    jobs: dict[str, Job] = {}
    for i, (prompt, _) in enumerate(requests(tiny.VOCAB_SIZE)[:12]):
        params = SamplingParams(temperature=1.0, seed=i, max_tokens=24, ignore_eos=True, detokenize=False, logprobs=2)
        jobs[str(i)] = ({"prompt_token_ids": prompt}, params)

    def bits(outputs: dict[str, RequestOutput]) -> dict[str, Any]:
        return {name: (one.outputs[0].token_ids, one.outputs[0].logprobs) for name, one in outputs.items()}

    alone: dict[str, Any] = {}
    with make_engine(path, **{**SETTINGS, "max_num_batched_tokens": 128}) as engine:
        for name, job in jobs.items():
            alone |= bits(run(engine, {name: job}))
    with make_engine(path, **SETTINGS, num_gpu_blocks_override=BLOCKS.get(architecture, 20)) as engine:
        assert bits(run(engine, jobs)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_next", "minimax"])
def test_adapters_give_what_peft_gives(architecture: str, tmp_path: Path) -> None:
    from peft_folders import generate, make_lora

    path = tiny.make(architecture, tmp_path / "model")
    folder = make_lora(path, tmp_path / "lora", 1, r=4, target_modules=["q_proj", "v_proj"])
    prompt = requests(tiny.VOCAB_SIZE)[6][0]
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    with make_engine(path, **SETTINGS, enable_lora=True) as engine:
        for name, lora in (("adapted", LoRARequest("a", 1, str(folder))), ("plain", None)):
            engine.add_request(name, {"prompt_token_ids": prompt}, params, lora_request=lora)
        found = {name: list(outputs[-1].outputs[0].token_ids) for name, outputs in collect(engine).items()}
    assert found == {"adapted": generate(path, folder, prompt, 16), "plain": generate(path, None, prompt, 16)}


@pytest.mark.slow
def test_embeddings_are_those_of_transformers(tmp_path: Path) -> None:
    path = tiny.make("qwen3_5", tmp_path)
    prompts = [prompt for prompt, _ in requests(tiny.VOCAB_SIZE)[:8]]
    model = AutoModel.from_pretrained(path, dtype=torch.float32).eval()
    with make_engine(path, runner="pooling", **SETTINGS) as engine:
        vectors = pooled.vectors(engine, [{"prompt_token_ids": prompt} for prompt in prompts])
    for prompt, vector in zip(prompts, vectors, strict=True):
        with torch.inference_mode():
            last = model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
        np.testing.assert_allclose(vector, last / np.linalg.norm(last), atol=1e-4)


def test_a_conversation_computes_little_more_than_its_new_tokens(tmp_path: Path) -> None:
    path = tiny.make("qwen3_next", tmp_path, max_position_embeddings=4096)
    r = random.Random(1)
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True, detokenize=False)
    text: list[int] = []
    with LLM(str(path), skip_tokenizer_init=True, max_model_len=2048, block_size=16, max_num_seqs=4) as llm:
        for _ in range(8):
            text += [r.randrange(tiny.VOCAB_SIZE) for _ in range(150)]
            text += llm.generate(text, params, use_tqdm=False)[0].outputs[0].token_ids
        stats = msgspec.convert(llm.llm_engine.engine_core.call("stats"), Stats)
    computed = stats.prefix_queries - stats.prefix_hits  # tokens of prompts
    assert computed <= 1.2 * len(text)
