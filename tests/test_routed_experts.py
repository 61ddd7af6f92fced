"""`routed_experts` are the experts that the forward pass used for each token, however the token was computed."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

import harness
import test_any_schedule
import tiny
from harness import expected_output, result_of
from kills import kill_core
from late_device import LateDevice
from mainspring import EngineArgs, LLMEngine, LoRARequest, PromptAdapterRequest, RequestOutputKind, SamplingParams
from mainspring.core.features import routed_experts
from mainspring.core.features.routed_experts import RoutedExperts
from mainspring.core.memory import block_rows
from mainspring.core.memory.block_rows import BlockRows
from mainspring.core.model.run.expert_recorder import ExpertRecorder
from mainspring.core.plan.step import IN_FLIGHT, Step
from mainspring.core.worker import generation_worker, worker
from mainspring.core.worker import runner as model_runner
from mainspring.engine.request.expert_rows import ExpertRows
from mainspring.ipc.errors import InvalidArgumentError, NotSupportedError
from mainspring.ipc.messages import Finished, Outputs, Routed
from native_here import why_not
from peft_folders import make_lora, make_prompt_adapter
from plain import Plain, collect, make_engine
from plain import run as run_jobs
from test_any_schedule import schedules
from test_exact import DEFAULT_BLOCKS, SETTINGS, requests
from test_late_device import GraphReference
from test_output import Frontend, ids
from tiers import examples, fast_only

GUARD = 120.0  # seconds
ON: dict[str, Any] = {"enable_return_routed_experts": True}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "detokenize": False}
SMALL_STEPS: dict[str, Any] = {"max_num_batched_tokens": 32}
EXPERTS, CHOSEN = 8, 3
FIELDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
    "mixtral": {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN},
}


def make(folder: Path, architecture: str = "qwen3_moe", **fields: Any) -> Path:
    return tiny.make(architecture, folder, **{**FIELDS.get(architecture, {}), **fields})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("experts"), tokenizer=True)


def check(plain: Plain, prompt: Sequence[int], tokens: Sequence[int], routed: np.ndarray | None) -> None:
    """Check the experts of a completion against the router logits of transformers."""
    assert routed is not None
    known = [*prompt, *tokens][:-1]
    layers = plain.model.config.num_hidden_layers
    assert (routed.shape, routed.dtype) == ((len(known), layers, CHOSEN), np.uint8)
    with torch.inference_mode():
        logits = plain.model(torch.tensor([known]), output_router_logits=True).router_logits
    check_rows(logits, routed)


def check_rows(logits: Sequence[torch.Tensor], routed: np.ndarray, first: int = 0) -> None:
    """Check the experts of tokens from index `first` on against the router logits of each layer."""
    assert len(logits) == routed.shape[1]
    for layer, scores in enumerate(each[first:] for each in logits):
        assert len(scores) == len(routed)
        chosen = scores.gather(1, torch.from_numpy(routed[:, layer].astype(np.int64)))
        torch.testing.assert_close(chosen, scores.topk(CHOSEN).values, rtol=0, atol=1e-3)
        assert all(len({*row}) == CHOSEN for row in routed[:, layer].tolist())


Found = dict[Any, tuple[list[int], np.ndarray]]


def run(engine: LLMEngine, jobs: Sequence[tuple[list[int], int]], **params: Any) -> Found:
    """Tokens and experts of each request."""
    asked = {str(i): (p, SamplingParams(max_tokens=n, **{**GREEDY, **params})) for i, (p, n) in enumerate(jobs)}
    found: Found = {}
    for name, output in run_jobs(engine, asked).items():
        experts = output.outputs[0].routed_experts
        assert experts is not None
        found[int(name)] = output.outputs[0].token_ids, experts
    return found


def same(one: Found, other: Found) -> bool:
    return one.keys() == other.keys() and all(
        one[i][0] == other[i][0] and np.array_equal(one[i][1], other[i][1]) for i in one
    )


# ------------------------------------------------------------------ what they are


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("architecture", FIELDS)
def test_they_are_the_top_k_of_transformers_router_logits(architecture: str, backend: str, tmp_path: Path) -> None:
    """With chunks, preemptions and cached prefixes, and the same as without."""
    if backend == "native" and why_not() is not None:
        pytest.skip(str(why_not()))
    made, jobs = make(tmp_path, architecture), requests(tiny.VOCAB_SIZE)
    plain = Plain(made)
    with make_engine(
        made, attention_backend=backend, num_gpu_blocks_override=DEFAULT_BLOCKS, **{**SETTINGS, **ON}
    ) as engine:
        found = run(engine, jobs)
        stats = engine.engine_core.core.scheduler.stats()
        assert min(stats.num_preemptions, stats.prefix_hits, stats.chunked_prefills, stats.mixed_steps) > 0
    for i, (prompt, _) in enumerate(jobs):
        check(plain, prompt, *found[i])
    assert len({row.tobytes() for _, experts in found.values() for row in experts}) > 300, "too uniform"
    with make_engine(
        made, attention_backend=backend, max_num_seqs=1, enable_prefix_caching=False, skip_tokenizer_init=True, **ON
    ) as engine:
        assert same(run(engine, jobs), found)


def test_a_cached_prefix_brings_its_experts_along(path: Path) -> None:
    prompt = list(range(3, 90))
    with make_engine(path, **ON) as engine:
        first = run(engine, [(prompt, 5)])
        hits = engine.engine_core.core.scheduler.stats().prefix_hits
        assert hits == 0
        assert same(run(engine, [(prompt, 5)]), first)
        assert engine.engine_core.core.scheduler.stats().prefix_hits - hits == 80
        longer = [*prompt, *first[0][0], 7, 8]  # hits blocks of the output, too
        check(Plain(path), longer, *run(engine, [(longer, 5)])[0])
        assert engine.engine_core.core.scheduler.stats().prefix_hits - hits == 80 + 80


def test_a_hit_is_as_long_as_what_is_known_of_its_experts(path: Path) -> None:
    prompt = list(range(3, 90))
    with make_engine(path, **ON) as engine:
        first = run(engine, [(prompt, 5)])
        scheduler = engine.engine_core.core.scheduler
        scheduler.state.kv.rows.clear()
        assert same(run(engine, [(prompt, 5)]), first)
        assert scheduler.stats().prefix_hits == 0
        scheduler.reset_prefix_cache()
        assert same(run(engine, [(prompt, 5)]), first)
        assert scheduler.stats().prefix_hits == 0


def test_new_weights_choose_anew(path: Path) -> None:
    prompt, name = list(range(3, 90)), "model.layers.0.mlp.gate.weight"
    plain = Plain(path)
    with make_engine(path, **ON) as engine:
        (_, before) = run(engine, [(prompt, 5)])[0]
        weight = plain.model.get_parameter(name)
        weight.data = weight.data.roll(1, 0).contiguous()
        kept = engine.engine_core.core.scheduler.state.kv.rows._rows
        assert kept
        engine.update_weights([(name, weight.data.numpy())], "new")
        assert not kept
        tokens, experts = run(engine, [(prompt, 5)])[0]
    check(plain, prompt, tokens, experts)
    assert np.array_equal(experts[: len(prompt), 0], (before[: len(prompt), 0] + 1) % EXPERTS)


def test_host_memory_counts_as_cached(path: Path) -> None:
    prompts = [([i, *range(3, 80)], 4) for i in range(8)]
    with make_engine(path, num_gpu_blocks_override=18, kv_offloading_size=0.01, **ON) as engine:
        first = run(engine, prompts)
        assert same(run(engine, prompts), first)
        assert engine.engine_core.core.scheduler.stats().host_hits > 0


@pytest.mark.parametrize("draft", ["ngram", "same", "other"])
def test_rejected_guesses_leave_no_rows(path: Path, draft: str, tmp_path: Path) -> None:
    jobs = [([*[5, 6, 7, 8] * 6, i], 40) for i in range(4)]
    with make_engine(path, **ON) as engine:
        plain = run(engine, jobs)
    how: dict[str, Any] = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 5}
    if draft != "ngram":
        how = {"model": str(path if draft == "same" else tiny.make("llama", tmp_path, num_hidden_layers=1))}
    with make_engine(path, speculative_config=how, **ON) as engine:
        assert same(run(engine, jobs), plain)
        stats = engine.engine_core.core.scheduler.stats()
        assert stats.accepted_tokens > 0 or draft == "other"
        assert (stats.draft_tokens > stats.accepted_tokens) == (draft != "same")


@pytest.mark.parametrize("eager", [False, True])
def test_with_steps_in_flight_and_graphs_they_are_the_same(
    path: Path, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs, plain = requests(tiny.VOCAB_SIZE), Plain(path)
    devices: list[LateDevice] = []

    def make_late(device: torch.device) -> LateDevice:
        devices.append(LateDevice(device))
        return devices[-1]

    monkeypatch.setattr(model_runner, "device_for", make_late)
    monkeypatch.setattr(generation_worker, "graph_sizes", lambda *_: [] if eager else [1, 3, 8, 16])
    monkeypatch.setattr(worker, "choose_backend", lambda *_: GraphReference())
    with make_engine(path, num_gpu_blocks_override=DEFAULT_BLOCKS, **{**SETTINGS, **ON}) as engine:
        found = run(engine, jobs)
        assert engine.engine_core.core._depth == 2
        assert (devices[-1].num_replays > 0) != eager
    for i, (prompt, _) in enumerate(jobs):
        check(plain, prompt, *found[i])


def test_a_step_in_flight_on_a_cpu_does_not_overwrite_them(path: Path) -> None:
    jobs = requests(tiny.VOCAB_SIZE)
    with make_engine(path, **{**SETTINGS, **ON}) as engine:
        plain = run(engine, jobs)
    with make_engine(path, async_scheduling=True, **{**SETTINGS, **ON}) as engine:
        assert engine.engine_core.core._depth == 2
        assert same(run(engine, jobs), plain)


def test_each_completion_has_its_own_up_to_where_its_text_ends(path: Path) -> None:
    """Also of a completion that a stop string or stop token ends, and streamed."""
    plain, prompt = Plain(path), list(range(40, 75))
    sampled: dict[str, Any] = {"temperature": 1.0, "seed": 4, "max_tokens": 30, "ignore_eos": True}
    with make_engine(path, **ON) as engine:
        (first, *_) = run_jobs(engine, {"a": (prompt, SamplingParams(**sampled))})["a"].outputs
        stop = next(first.text[at : at + 2] for at in range(8, len(first.text)))
        jobs = {
            "n": (prompt, SamplingParams(n=3, **sampled)),
            "stop": (prompt, SamplingParams(stop=[stop], **sampled)),
            "token": (prompt, SamplingParams(stop_token_ids=[first.token_ids[9]], **sampled)),
            "delta": (prompt, SamplingParams(output_kind=RequestOutputKind.DELTA, **sampled)),
        }
        tokens: dict[str, list[int]] = defaultdict(list)
        ends = {}
        for name, (ids, params) in jobs.items():
            engine.add_request(name, ids, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                for one in output.outputs:
                    assert (one.routed_experts is not None) == one.finished()
                    tokens[output.request_id] += one.token_ids
                ends[output.request_id] = output.outputs
    assert (tokens["delta"], len(ends["delta"])) == (first.token_ids, 1)
    check(plain, prompt, tokens["delta"], ends["delta"][0].routed_experts)
    for one in (*ends["n"], *ends["stop"], *ends["token"]):
        check(plain, prompt, one.token_ids, one.routed_experts)
    assert len({tuple(one.token_ids) for one in ends["n"]}) == 3
    assert ends["stop"][0].stop_reason == stop
    assert len(ends["stop"][0].token_ids) < 30
    assert ends["token"][0].stop_reason == first.token_ids[9]


@pytest.mark.slow
def test_virtual_tokens_have_no_rows_and_adapters_and_embeddings_change_nothing_else(
    path: Path, tmp_path: Path
) -> None:
    prompt, length = list(range(3, 60)), 21
    virtual = PromptAdapterRequest("v", 1, str(make_prompt_adapter(path, tmp_path / "v", 1, length)), length)
    lora = LoRARequest("l", 1, str(make_lora(path, tmp_path / "l", 1, r=4, target_modules=["q_proj", "v_proj"])))
    params = SamplingParams(max_tokens=9, **GREEDY)
    with make_engine(path, enable_prompt_adapter=True, enable_lora=True, **SMALL_STEPS, **ON) as engine:
        embeds = engine.engine_core.core.worker.model.embed(torch.tensor(prompt))
        found = []
        for _ in range(2):  # the second time from the prefix cache
            engine.add_request("v", prompt, params, prompt_adapter_request=virtual)
            engine.add_request("l", prompt, params, lora_request=lora)
            engine.add_request("e", {"prompt_embeds": embeds}, params)
            engine.add_request("p", prompt, params)
            ends = {output.request_id: output.outputs[0] for output in chain.from_iterable(collect(engine).values())}
            found.append({name: (one.token_ids, one.routed_experts) for name, one in ends.items()})
        assert engine.engine_core.core.scheduler.stats().prefix_hits >= 4 * 48
    first, second = found
    assert same(first, second)
    assert same({0: first["e"]}, {0: first["p"]})
    check(Plain(path), prompt, *first["p"])
    embeddings = load_file(tmp_path / "v" / "adapter_model.safetensors")["prompt_embeddings"]
    plain = Plain(path).model
    inputs = torch.cat([embeddings, plain.get_input_embeddings()(torch.tensor(prompt + first["v"][0][:-1]))])
    check_rows(plain(inputs_embeds=inputs[None], output_router_logits=True).router_logits, first["v"][1], length)
    adapted = PeftModel.from_pretrained(plain, tmp_path / "l")
    ids = torch.tensor([prompt + first["l"][0][:-1]])
    check_rows(adapted(input_ids=ids, output_router_logits=True).router_logits, first["l"][1])
    assert not np.array_equal(first["l"][1][:50], first["p"][1][:50])


def test_a_beam_search_has_none(path: Path) -> None:
    with make_engine(path, **ON) as engine:
        params = SamplingParams(use_beam_search=True, n=2, temperature=0.0, max_tokens=4)
        output = run_jobs(engine, {"a": (list(range(3, 40)), params)})["a"]
    assert [one.routed_experts for one in output.outputs] == [None, None]


def test_an_aborted_completion_has_those_of_the_tokens_that_it_computed(path: Path) -> None:
    prompt = list(range(3, 60))
    with make_engine(path, **ON) as engine:
        whole = run(engine, [(prompt, 30)])[0]
        engine.add_request("a", prompt, SamplingParams(max_tokens=30, **GREEDY))
        engine.add_request("b", prompt, SamplingParams(max_tokens=30, **GREEDY))
        for _ in range(5):
            engine.step()
        ended = {}
        engine.abort_request(["a"])
        while engine.has_unfinished_requests():
            ended.update({output.request_id: output.outputs[0] for output in engine.step()})
    assert np.array_equal(ended["b"].routed_experts, whole[1])
    computed = len(prompt) + len(ended["a"].token_ids) - 1
    assert len(prompt) <= computed < len(whole[1])
    assert np.array_equal(ended["a"].routed_experts, whole[1][:computed])


def test_layers_without_experts_have_zeros(tmp_path: Path) -> None:
    made = make(tmp_path, num_hidden_layers=3, mlp_only_layers=[1])
    with make_engine(made, skip_tokenizer_init=True, **ON) as engine:
        experts = run(engine, [(list(range(3, 40)), 6)])[0][1]
    assert experts.shape == (42, 3, CHOSEN)
    assert [bool(experts[:, layer].any()) for layer in range(3)] == [True, False, True]


def test_more_than_256_experts_take_two_bytes(tmp_path: Path) -> None:
    made = make(tmp_path, num_experts=300, moe_intermediate_size=8)
    with make_engine(made, skip_tokenizer_init=True, **ON) as engine:
        experts = run(engine, [(list(range(3, 150)), 6)])[0][1]
    assert experts.dtype == np.uint16
    assert 256 < experts.max() < 300


def test_nothing_is_recorded_unless_it_is_asked_for(path: Path) -> None:
    with make_engine(path) as engine:
        output = run_jobs(engine, {"a": ([5, 6, 7], SamplingParams(max_tokens=3, **GREEDY))})["a"]
        runner = engine.engine_core.core.worker.runner
        assert (output.outputs[0].routed_experts, runner._experts, runner.model.experts) == (None, None, None)
        assert not engine.engine_core.core.scheduler.state.features.routed
        assert not any(module._forward_pre_hooks for module in runner.model.model.modules())


def test_what_a_user_runs_of_the_model_is_not_recorded(path: Path) -> None:
    with make_engine(path, **{**SETTINGS, **ON}) as engine:
        run(engine, [([3, 4, 5], 2)])
        rows = engine.engine_core.core.worker.runner._experts
        before = rows.clone()
        assert len(rows) < 100
        with torch.inference_mode():
            for layer in engine.engine_core.core.worker.model.model.model.layers:
                layer.mlp(torch.randn(1, 100, 64))
        assert torch.equal(rows, before)


# ------------------------------------------------------------------ recovery


@pytest.mark.slow
def test_after_kills_they_are_as_if_nothing_had_happened(path: Path) -> None:
    jobs = {
        str(i): (list(range(3, 60 + i)), SamplingParams(max_tokens=90, temperature=0.7, seed=i, ignore_eos=True))
        for i in range(6)
    }
    with make_engine(path, max_num_seqs=4, **ON) as engine:
        plain = {name: output.outputs[0] for name, output in run_jobs(engine, jobs).items()}
    seen: dict[str, Any] = {}
    args = EngineArgs(model=str(path), max_model_len=256, max_num_seqs=4, **ON)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=True) as engine:
        for name, (prompt, params) in jobs.items():
            engine.add_request(name, prompt, params)
        supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        kill_at, deadline = [15, 50], time.monotonic() + GUARD
        while engine.has_unfinished_requests():
            assert time.monotonic() < deadline
            for output in engine.step():
                seen[output.request_id] = output.outputs[0]
            if kill_at and "0" in seen and len(seen["0"].token_ids) >= kill_at[0]:
                kill_at.pop(0)
                kill_core(supervisor)
        assert supervisor.launch.restarts == 2
    for name, one in plain.items():
        assert (seen[name] == one, np.array_equal(seen[name].routed_experts, one.routed_experts)) == (True, True)
        assert len(one.routed_experts) == len(jobs[name][0]) + 89


# ------------------------------------------------------------------ refused


@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_a_model_without_experts_is_refused(backend: str, tmp_path: Path) -> None:
    made = tiny.make("llama", tmp_path)
    with pytest.raises(NotSupportedError, match=r"^enable_return_routed_experts is True, but [^.]*: unset it$"):
        make_engine(made, attention_backend=backend, skip_tokenizer_init=True, **ON)


def test_a_model_that_pools_is_refused(path: Path) -> None:
    with pytest.raises(NotSupportedError, match=r"^enable_return_routed_experts is True, which is for models that gen"):
        make_engine(path, runner="pooling", **ON)


def test_steps_whose_experts_are_too_many_for_a_message_are_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation_worker, "MOST_EXPERT_BYTES", 100 * 2 * CHOSEN)
    make_engine(path, max_num_batched_tokens=100, **ON).shutdown()
    with pytest.raises(InvalidArgumentError, match=r"max_num_batched_tokens is 101; .* at most 100"):
        make_engine(path, max_num_batched_tokens=101, **ON)


def test_experts_that_are_not_given_their_numbers_are_refused() -> None:
    sizes = {**tiny._SIZES, "intermediate_size_mlp": 96, "head_dim": 16, "num_local_experts": 4}
    config = AutoConfig.for_model("llama4_text", **sizes)
    with pytest.raises(NotSupportedError, match="in Llama4ForCausalLM no layers were found"):
        ExpertRecorder(AutoModelForCausalLM.from_config(config))


# ------------------------------------------------------------------ the frontend


def test_rows_that_come_again_are_passed_over_and_the_last_token_has_none() -> None:
    rows = ExpertRows(Routed([], [], [], [1, 2], "uint8", b""))
    rows.add(0, memoryview(bytes([1, 2, 3, 4])))
    rows.add(0, memoryview(bytes([1, 2, 3, 4, 5, 6])))
    rows.add(1, memoryview(bytes([3, 4])))
    rows.add(3, memoryview(bytes([7, 8, 9, 10])))
    assert rows.array(4).tolist() == [[[1, 2]], [[3, 4]], [[5, 6]], [[7, 8]]]
    assert rows.array(4) is rows.array(4)


def test_rows_belong_to_their_requests_and_are_shown_at_the_end() -> None:
    frontend = Frontend()
    (mine,), (other,) = frontend.add("a", [5, 6, 7]), frontend.add("b", [5, 6])
    numbers = np.array([300, 1, 2, 3, 4], "<u2")
    first = Routed([mine, 99, other], [0, 0, 0], [2, 1, 2], [1, 1], "uint16", numbers.tobytes())
    frontend.output.process(Outputs([], [], routed=first), 0.0)
    second = Routed([mine], [2], [3], [1, 1], "uint16", numbers[:3].tobytes())
    ended = Outputs([mine, mine, mine], [8, 9, 10], finished=[Finished(mine, "length")], routed=second)
    (state,) = frontend.output.process(ended, 0.0).changed
    experts = state.output().outputs[0].routed_experts
    assert experts is not None
    assert (experts.ravel().tolist(), experts.shape) == ([300, 1, 300, 1, 2], (5, 1, 1))
    (state,) = frontend.output.process(Outputs([other], [8]), 0.0).changed
    assert state.output().outputs[0].routed_experts is None


def test_what_comes_behind_a_stop_string_has_no_rows() -> None:
    frontend, tokens = Frontend(), ids("seven eight nine ten")
    (handle,) = frontend.add("a", [5, 6], stop=[" nine"])
    rows = Routed([handle], [0], [len(tokens) + 1], [1, 1], "uint8", bytes(range(len(tokens) + 1)))
    (state,) = frontend.output.process(Outputs([handle] * len(tokens), tokens, routed=rows), 0.0).changed
    (completion,) = state.output().outputs
    assert (completion.text, completion.stop_reason) == ("seven eight", " nine")
    assert completion.routed_experts is not None
    assert completion.routed_experts.ravel().tolist() == list(range(2 + len(completion.token_ids) - 1))
    assert len(completion.token_ids) < len(tokens)


# ------------------------------------------------------------------ any schedule

WRONG = 77


def row_of(tokens: Sequence[int]) -> int:
    """What stands for the experts of the last of `tokens`, which depend on all of them."""
    return int.from_bytes(hashlib.blake2b(np.asarray(tokens, np.int32).tobytes(), digest_size=2).digest(), "little")


class RoutedEngine(harness.Engine):
    """The stand-in model gives each token a row that depends on the tokens up to it. Checks that each row is sent once,
    in order, and not after the token that follows."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.feature = RoutedExperts(self.kv)
        self.scheduler.attach(self.feature)
        self.told: defaultdict[harness.Key, list[int]] = defaultdict(list)
        self._rows: dict[int, np.ndarray] = {}  # by step
        self._truth: dict[harness.Key, list[int]] = {}
        self.most_bytes = 0  # in a message

    def truth(self, key: harness.Key) -> list[int]:
        """Prompt and output of a request."""
        if key not in self._truth:
            asked = self.messages[key]
            output, _ = expected_output(asked, self.windows, self.max_model_len)
            self._truth[key] = [*asked.prompt_token_ids, *asked.output_token_ids, *output]
        return self._truth[key]

    def launch(self) -> Step | None:
        step = super().launch()
        if step is not None and self.in_flight and self.in_flight[-1][0] is step:
            plan, rows, at = step.plan, [], 0
            for slot, start, count in zip(*(a.tolist() for a in (plan.slots, plan.starts, plan.counts)), strict=True):
                request = self.scheduler.state.running.requests[slot]
                truth, right = self.truth((request.frontend, request.handle)), True
                for place, token in enumerate(plan.token_ids[at : at + count].tolist(), start):
                    right &= token == IN_FLIGHT or (place < len(truth) and token == truth[place])
                    rows.append(row_of(truth[: place + 1]) if right else WRONG)
                at += count
            self._rows[plan.id] = np.array(rows, np.uint16).reshape(-1, 1, 1)
        return step

    def retire(self) -> None:
        step, sampled = self.in_flight.popleft()
        self.model.retire(step.plan)
        rows = self._rows.pop(step.plan.id)
        self._tell(self.scheduler.update(step, result_of(step.plan, sampled, experts=rows)))
        self.check()

    def _tell(self, outputs: dict[int, Outputs]) -> None:
        for frontend, out in outputs.items():
            if (routed := out.routed) is not None:
                assert (routed.shape, routed.dtype) == ([1, 1], "uint16")
                rows = np.frombuffer(routed.experts, "<u2").tolist()
                assert len(rows) == sum(routed.counts)
                self.most_bytes = max(self.most_bytes, len(routed.experts))
                for handle, start, count in zip(routed.handles, routed.starts, routed.counts, strict=True):
                    told = self.told[frontend, handle]
                    assert (frontend, handle) not in self.finished
                    assert start == len(told), "a row is lost or comes twice"
                    told += rows[:count]
                    del rows[:count]
            for handle, many in Counter(out.handles).items():
                key, asked = (frontend, handle), self.messages[frontend, handle]
                known = len(asked.prompt_token_ids) + len(asked.output_token_ids) + len(self.outputs[key]) + many
                assert len(self.told[key]) >= known - 1, "a token came before the experts of those before it"
        super()._tell(outputs)

    def check(self) -> None:
        super().check()
        running = self.scheduler.state.running.requests.keys()
        assert self.feature._tails.keys() | self.feature._hits.keys() <= self.feature._requests.keys() == running
        assert self.feature._hit_bytes == sum(rows.nbytes for hits in self.feature._hits.values() for rows in hits)

    def check_outputs(self) -> None:
        super().check_outputs()
        for key, finished in self.finished.items():
            known = self.truth(key)[:-1]
            told = self.told[key][: len(known)]
            assert told == [row_of(known[: at + 1]) for at in range(len(told))]
            assert len(told) == len(known) or finished.reason == "abort"


def test_any_schedule_sends_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: Counter[str] = Counter()
    monkeypatch.setattr(test_any_schedule, "Engine", RoutedEngine)
    usable = BlockRows.usable

    def counted(rows: BlockRows, digests: Sequence[bytes], num_known: int, most: int) -> int:
        found = usable(rows, digests, num_known, most)
        seen["cut"] += found < most
        return found

    monkeypatch.setattr(BlockRows, "usable", counted)

    @settings(max_examples=examples(150))
    @given(schedules())
    def each_row_is_sent_once(schedule: test_any_schedule.Schedule) -> None:
        for most in (32 << 20, 12):  # rows of 2 bytes: hits of at most 6 tokens
            monkeypatch.setattr(block_rows, "MOST_HIT_BYTES", most)
            monkeypatch.setattr(routed_experts, "MOST_HIT_BYTES", most)
            stats = test_any_schedule.run(schedule).stats
            seen.update(
                preemptions=stats.num_preemptions,
                prefix_hits=stats.prefix_hits,
                host_hits=stats.host_hits,
                rejected=stats.draft_tokens - stats.accepted_tokens,
            )

    each_row_is_sent_once()
    if examples(150) >= 150:
        assert min(seen["cut"], seen["preemptions"], seen["prefix_hits"], seen["rejected"]) > 20, seen


@pytest.mark.parametrize("length", [9, 25])
def test_hits_together_and_each_alone_fit_in_a_message(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (block_rows, routed_experts):
        monkeypatch.setattr(module, "MOST_HIT_BYTES", 16)
    engine = RoutedEngine(max_num_batched_tokens=8)
    for _ in range(2):
        for _ in range(6):
            engine.add(range(length), 2)
        engine.run()
    engine.check_outputs()
    assert engine.stats.prefix_hits >= 6 * 8
    assert engine.most_bytes <= 8 * 2 + 2 * 16


def test_rows_of_blocks_are_bounded_and_the_least_recently_used_go_first() -> None:
    rows, block = BlockRows(2, 3), np.zeros((2, 1), np.uint8)
    names = [bytes([i]) for i in range(5)]
    for name in names[:3]:
        rows.put(name, block)
    assert rows.usable(names, 0, 5) == 3
    assert rows.usable(names, 0, 2) == 2
    assert rows.usable(names[3:], 0, 2) == 0
    assert rows.usable(names[3:], 4, 2) == 2, "none is needed of tokens that are known"
    rows.get(names[:1])
    rows.put(names[3], block)
    assert [name in rows for name in names] == [True, False, True, True, False]


@pytest.mark.parametrize("architecture", fast_only((), ("mixtral", "qwen3_moe")))
def test_bfloat16_gives_the_same_alone_and_in_a_batch(architecture: str, tmp_path: Path) -> None:
    made, jobs = make(tmp_path, architecture, dtype=torch.bfloat16), requests(tiny.VOCAB_SIZE, seed=3)
    with make_engine(made, **{**SETTINGS, **ON, "max_num_seqs": 1, "max_num_batched_tokens": 128}) as engine:
        alone = run(engine, jobs)
    with make_engine(made, **{**SETTINGS, **ON}) as engine:
        assert same(run(engine, jobs), alone)
