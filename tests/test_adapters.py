"""LoRA and prompt adapters: the tokens equal those of transformers with PEFT in any batch and on any schedule."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from mainspring import LLMEngine, LoRARequest, PromptAdapterRequest, RequestOutput, SamplingParams
from mainspring.core.loop import EngineCore
from mainspring.core.model.load.parameters import ParameterMap
from mainspring.core.worker import adapter_files
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError
from mainspring.ipc.messages import Adapter, AddRequest, Sampling
from peft_folders import generate, make_lora, make_prompt_adapter
from plain import make_engine

LENGTH = 24
GUARD = 120.0  # seconds
GREEDY = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
ATTENTION = ["q_proj", "v_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
PROMPTS = {name: list(range(5 + i, 45 + 3 * i)) for i, name in enumerate(("small", "large", "scaled", "none"))}


class Adapters(NamedTuple):
    model: Path
    folders: dict[str, Path]
    expected: dict[str, list[int]]  # expected output of the prompt with the same name

    def lora(self, name: str, number: int = 0) -> LoRARequest | None:
        number = number or 1 + list(PROMPTS).index(name)
        return LoRARequest(name, number, str(self.folders[name])) if name in self.folders else None


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    folder = tmp_path_factory.mktemp("adapters")
    model = tiny.make("llama", folder / "model")
    folders = {
        "small": make_lora(model, folder / "small", 1, r=4, lora_alpha=16, target_modules=ATTENTION),
        "large": make_lora(
            model, folder / "large", 2, r=8, lora_alpha=8, target_modules=ALL,
            rank_pattern={"q_proj": 2, "layers.1.mlp.up_proj": 16}, alpha_pattern={r"layers\.\d.self_attn.k_proj": 24},
        ),
        "scaled": make_lora(
            model, folder / "scaled", 3, r=3, lora_alpha=4, use_rslora=True, target_modules=["down_proj", "k_proj"]
        ),
    }  # fmt: skip
    expected = {name: generate(model, folders.get(name), prompt, LENGTH) for name, prompt in PROMPTS.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(PROMPTS)
    return Adapters(model, folders, expected)


def engine_for(made: Adapters, **settings: Any) -> LLMEngine:
    return make_engine(made.model, **{"skip_tokenizer_init": True, "enable_lora": True, "max_loras": 4, **settings})


@pytest.fixture
def engine(made: Adapters) -> Iterator[LLMEngine]:
    with engine_for(made) as engine:
        yield engine


def add(engine: LLMEngine, name: str, prompt: list[int], lora: Any = None, **more: Any) -> None:
    engine.add_request(name, {"prompt_token_ids": prompt}, more.pop("params", GREEDY), lora_request=lora, **more)


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    found, deadline = {}, time.monotonic() + GUARD
    while engine.has_unfinished_requests():
        assert time.monotonic() < deadline
        found.update({output.request_id: output for output in engine.step()})
    return found


def tokens(outputs: dict[str, RequestOutput]) -> dict[str, list[int]]:
    for output in outputs.values():
        assert output.outputs[0].error is None
    return {name: output.outputs[0].token_ids for name, output in outputs.items()}


# ------------------------------------------------------------------ what is computed


def test_several_adapters_and_none_in_one_batch_give_what_peft_gives(made: Adapters, engine: LLMEngine) -> None:
    for name, prompt in PROMPTS.items():
        add(engine, name, prompt, made.lora(name))
    found = finish(engine)
    assert tokens(found) == made.expected
    assert found["large"].lora_request == found["large"].outputs[0].lora_request == made.lora("large")
    assert found["none"].lora_request is None


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"max_num_batched_tokens": 16, "block_size": 8}, marks=pytest.mark.slow),
        {"num_gpu_blocks_override": 24, "block_size": 8, "max_model_len": 96, "max_num_batched_tokens": 24},
        {"max_loras": 1},
        pytest.param({"max_loras": 1, "max_cpu_loras": 2, "max_num_seqs": 2}, marks=pytest.mark.slow),
        {"async_scheduling": True},
        pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.slow),
        pytest.param({"attention_backend": "reference"}, marks=pytest.mark.slow),
    ],
    ids=["chunked", "preempted", "one place", "two in memory", "two steps in flight", "no cache", "reference"],
)
def test_tokens_do_not_depend_on_the_schedule(made: Adapters, settings: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=LENGTH, ignore_eos=True, detokenize=False)
    with engine_for(made) as engine:
        alone = {}
        for name, prompt in PROMPTS.items():
            add(engine, name, prompt, made.lora(name), params=params)
            alone |= tokens(finish(engine))
    with engine_for(made, **settings) as engine:
        for again in range(3):
            for name, prompt in PROMPTS.items():
                add(engine, f"{name} {again}", prompt, made.lora(name))
                add(engine, f"{name} seeded {again}", prompt, made.lora(name), params=params)
        found = tokens(finish(engine))
        if "num_gpu_blocks_override" in settings:
            assert engine.engine_core.core.stats().num_preemptions > 0
    for name in PROMPTS:
        for again in range(3):
            assert found[f"{name} {again}"] == made.expected[name]
            assert found[f"{name} seeded {again}"] == alone[name], "bit for bit"


@pytest.mark.parametrize(
    ("architecture", "more", "config"),
    [
        pytest.param(
            "qwen3",
            {"tie_word_embeddings": True},
            {"target_modules": ["q_proj", "k_proj", "v_proj", "lm_head"]},
            marks=pytest.mark.slow,
        ),
        ("phi3", {}, {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
        ("gemma2", {}, {"target_modules": "all-linear"}),
        pytest.param("granite", {}, {"target_modules": "all-linear"}, marks=pytest.mark.slow),
        ("gpt_neox", {}, {"target_modules": ["query_key_value", "dense", "embed_out"]}),
        pytest.param("opt", {}, {"target_modules": "all-linear"}, marks=pytest.mark.slow),
        pytest.param("mixtral", {}, {"target_modules": ["q_proj", "v_proj", "o_proj"]}, marks=pytest.mark.slow),
    ],
)
def test_of_other_architectures_too(
    tmp_path: Path, architecture: str, more: dict[str, Any], config: dict[str, Any]
) -> None:
    model = tiny.make(architecture, tmp_path / "model", **more)
    adapter = make_lora(model, tmp_path / "adapter", 4, r=4, lora_alpha=8, **config)
    prompt = list(range(5, 40))
    expected = {name: generate(model, folder, prompt, LENGTH) for name, folder in (("a", adapter), ("none", None))}
    assert expected["a"] != expected["none"]
    with make_engine(model, skip_tokenizer_init=True, enable_lora=True) as engine:
        add(engine, "a", prompt, LoRARequest("a", 1, str(adapter)))
        add(engine, "none", prompt)
        assert tokens(finish(engine)) == expected


def test_in_bf16_a_row_has_the_same_bits_alone_and_among_others(made: Adapters) -> None:
    with engine_for(made, dtype="bfloat16") as engine:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False, logprobs=2)
        alone = {}
        for name, prompt in PROMPTS.items():
            add(engine, name, prompt, made.lora(name), params=params)
            alone |= finish(engine)
    with engine_for(made, dtype="bfloat16", max_num_batched_tokens=24) as engine:
        for name, prompt in PROMPTS.items():
            add(engine, name, prompt, made.lora(name), params=params)
        for name, output in finish(engine).items():
            assert output.outputs[0].logprobs == alone[name].outputs[0].logprobs


def test_cached_prefixes_go_by_the_adapters_content(made: Adapters, engine: LLMEngine, tmp_path: Path) -> None:
    prompt, copy = list(range(5, 105)), tmp_path / "copy"
    os.system(f"cp -r {made.folders['small']} {copy}")
    order = [
        ("none", None),
        ("small", made.lora("small")),
        ("again", made.lora("small")),
        ("large", made.lora("large")),
    ]
    order += [("copy", LoRARequest("another name", 77, str(copy))), ("none again", None)]
    found: dict[str, RequestOutput] = {}
    for name, lora in order:
        add(engine, name, prompt, lora)
        found |= finish(engine)
    cached = {name: output.num_cached_tokens for name, output in found.items()}
    assert cached["none"] == cached["small"] == cached["large"] == 0
    assert min(cached["again"] or 0, cached["copy"] or 0, cached["none again"] or 0) > 80
    got = tokens(found)
    assert got["small"] == got["again"] == got["copy"] == generate(made.model, made.folders["small"], prompt, LENGTH)
    assert got["large"] == generate(made.model, made.folders["large"], prompt, LENGTH)
    assert got["none"] == got["none again"] == generate(made.model, None, prompt, LENGTH)


def test_beams_and_several_completions_have_the_adapter_too(made: Adapters, engine: LLMEngine) -> None:
    prompt = PROMPTS["small"]
    several = SamplingParams(n=2, best_of=2, temperature=0.0, max_tokens=8, ignore_eos=True, detokenize=False)
    beam = SamplingParams(n=1, best_of=1, use_beam_search=True, temperature=0.0, max_tokens=8, ignore_eos=True)
    add(engine, "several", prompt, made.lora("small"), params=several)
    add(engine, "beam", prompt, made.lora("small"), params=beam)
    found = finish(engine)
    for completion in (*found["several"].outputs, *found["beam"].outputs):
        assert completion.token_ids == made.expected["small"][:8]


# ------------------------------------------------------------------ prompt adapters


@pytest.fixture(scope="module")
def virtual(made: Adapters, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PromptAdapterRequest]:
    folder = tmp_path_factory.mktemp("virtual")
    return {
        name: PromptAdapterRequest(name, i, str(make_prompt_adapter(made.model, folder / name, i, length)), length)
        for i, (name, length) in enumerate((("five", 5), ("twenty", 20)), 1)
    }


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enable_lora": False},
        {"max_num_batched_tokens": 16, "block_size": 8},
        {"num_gpu_blocks_override": 20, "block_size": 8, "max_model_len": 96, "max_num_batched_tokens": 24},
        {"max_prompt_adapters": 2, "async_scheduling": True},
    ],
    ids=["layer by layer", "as a whole", "chunked", "preempted", "two steps in flight"],
)
def test_virtual_tokens_give_what_peft_gives(
    made: Adapters, virtual: dict[str, PromptAdapterRequest], settings: dict[str, Any]
) -> None:
    prompt = PROMPTS["none"]
    expected = {
        name: generate(made.model, Path(one.prompt_adapter_local_path), prompt, LENGTH) for name, one in virtual.items()
    }
    expected["none"] = made.expected["none"]
    with engine_for(made, enable_prompt_adapter=True, **settings) as engine:
        for again in range(3):
            for name in expected:
                add(engine, f"{name} {again}", prompt, prompt_adapter_request=virtual.get(name))
        found = finish(engine)
        assert tokens(found) == {f"{name} {again}": expected[name] for name in expected for again in range(3)}
        for output in found.values():
            assert output.prompt_token_ids == prompt
        if "num_gpu_blocks_override" not in settings:
            for _ in range(2):
                add(engine, "cached", prompt, prompt_adapter_request=virtual["twenty"])
                again = finish(engine)
            assert tokens(again)["cached"] == expected["twenty"]
            size = engine.get_cache_config().block_size
            most = (len(prompt) + 20 - 1) // size * size - 20
            assert again["cached"].num_cached_tokens == most, "virtual ones are not counted"


def test_a_request_may_have_both_kinds(made: Adapters, virtual: dict[str, PromptAdapterRequest]) -> None:
    lora, prompt = made.lora("small"), PROMPTS["none"]
    with engine_for(made, enable_prompt_adapter=True) as engine:
        for name, one, more in (("a", lora, "five"), ("b", lora, "twenty"), ("c", None, "five"), ("d", lora, "")):
            add(engine, name, prompt, one, prompt_adapter_request=virtual.get(more))
        first = tokens(finish(engine))
        assert len({tuple(one) for one in first.values()}) == 4
        for name, one, more in (("a", lora, "five"), ("b", lora, "twenty"), ("c", None, "five"), ("d", lora, "")):
            add(engine, name, prompt, one, prompt_adapter_request=virtual.get(more))
            assert tokens(finish(engine)) == {name: first[name]}


def test_virtual_tokens_count_in_max_model_len_and_nowhere_else(
    made: Adapters, virtual: dict[str, PromptAdapterRequest]
) -> None:
    params = SamplingParams(
        temperature=0.0, prompt_logprobs=0, ignore_eos=True, detokenize=False, max_tokens=100, repetition_penalty=1.5
    )
    with engine_for(made, enable_prompt_adapter=True, max_model_len=64) as engine:
        add(engine, "a", list(range(30)), prompt_adapter_request=virtual["twenty"], params=params)
        output = finish(engine)["a"]
        assert len(output.outputs[0].token_ids) == 64 - 30 - 20
        assert output.prompt_logprobs is not None
        assert output.prompt_logprobs[0] is None
        assert [next(iter(entry)) for entry in output.prompt_logprobs[1:] if entry] == list(range(1, 30))
        with pytest.raises(InvalidRequestError, match="at most 43"):
            add(engine, "b", list(range(44)), prompt_adapter_request=virtual["twenty"])


def test_the_log_probabilities_of_a_prompt_are_those_after_the_virtual_tokens(
    made: Adapters, virtual: dict[str, PromptAdapterRequest]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    prompt, where = PROMPTS["none"], virtual["five"].prompt_adapter_local_path
    base = AutoModelForCausalLM.from_pretrained(made.model, dtype=torch.float32).eval()
    with torch.inference_mode():
        logits = PeftModel.from_pretrained(base, where).eval()(input_ids=torch.tensor([prompt])).logits[0, 5:]
    expected = logits.log_softmax(-1)[torch.arange(len(prompt) - 1), prompt[1:]]
    params = SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=1, detokenize=False)
    with engine_for(made, enable_prompt_adapter=True, max_num_batched_tokens=16) as engine:
        add(engine, "a", prompt, prompt_adapter_request=virtual["five"], params=params)
        told = finish(engine)["a"].prompt_logprobs
    assert told is not None
    got = torch.tensor([entry[token].logprob for entry, token in zip(told[1:], prompt[1:], strict=True) if entry])
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


# ------------------------------------------------------------------ numbers, memory and places


def test_an_engine_adds_lists_and_pins_adapters(made: Adapters) -> None:
    with engine_for(made, max_loras=2, max_cpu_loras=2) as engine:
        small, large, scaled = (made.lora(name) for name in ("small", "large", "scaled"))
        assert small
        assert large
        assert scaled
        assert engine.add_lora(small)
        assert engine.add_lora(small), "twice is once"
        assert engine.add_lora(large)
        assert engine.list_loras() == {1, 2}
        assert engine.pin_lora(1)
        assert engine.add_lora(scaled)
        assert engine.list_loras() == {1, 3}, "the least recently used gave way, not the pinned one"
        with pytest.raises(InvalidArgumentError, match="max_cpu_loras is 2"):
            engine.pin_lora(3)
        with pytest.raises(InvalidArgumentError, match="lora_int_id 2 is not loaded"):
            engine.pin_lora(2)
        with pytest.raises(InvalidRequestError, match="lora_int_id 1 is the adapter"):
            engine.add_lora(LoRARequest("other", 1, str(made.folders["large"])))
        assert engine.remove_lora(1)
        assert not engine.remove_lora(1)
        assert engine.list_loras() == {3}
        assert engine.add_lora(LoRARequest("other", 1, str(made.folders["large"])))
        add(engine, "a", PROMPTS["large"], LoRARequest("other", 1, str(made.folders["large"])))
        assert tokens(finish(engine)) == {"a": made.expected["large"]}


def test_an_adapter_in_use_keeps_its_owner(made: Adapters) -> None:
    with engine_for(made, max_loras=1, max_cpu_loras=1) as engine:
        for name in ("small", "large", "scaled"):
            add(engine, name, PROMPTS[name], made.lora(name))
        for _ in range(10):
            engine.step()
        engine.remove_lora(1)
        found = tokens(finish(engine))
        assert found == {name: made.expected[name] for name in found}
        assert engine.list_loras() in ({2}, {3}), "the one that ran last"


def test_no_more_adapters_run_at_once_than_there_are_places(made: Adapters) -> None:
    with engine_for(made, max_loras=2, max_num_seqs=8) as engine:
        core: EngineCore = engine.engine_core.core
        for again in range(4):
            for name, prompt in PROMPTS.items():
                add(engine, f"{name} {again}", prompt, made.lora(name))
        most, found, deadline = 0, {}, time.monotonic() + GUARD
        while engine.has_unfinished_requests():
            assert time.monotonic() < deadline
            found.update({output.request_id: output for output in engine.step()})
            stats = core.stats()
            most = max(most, len(stats.running_loras))
            assert len(stats.running_loras) <= 2
            if len(stats.running_loras) == 2 and stats.num_waiting > 8:
                assert stats.waiting_loras
        assert most == 2
        assert tokens(found) == {f"{name} {again}": made.expected[name] for name in PROMPTS for again in range(4)}
        assert core.stats().running_loras == core.stats().waiting_loras == []


def test_a_request_that_waits_for_an_adapter_slot_gets_one_though_others_keep_coming(made: Adapters) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    with engine_for(made, max_loras=1, max_cpu_loras=2, max_num_seqs=2) as engine:
        number, done, deadline = 0, False, time.monotonic() + GUARD
        for _ in range(2):
            add(engine, f"small {number}", PROMPTS["small"], made.lora("small"), params=params)
            number += 1
            engine.step()
        add(engine, "large", PROMPTS["large"], made.lora("large"), params=params)
        while not done:
            assert time.monotonic() < deadline
            for output in engine.step():
                if output.finished and output.request_id == "large":
                    done = True
                elif output.finished:
                    add(engine, f"small {number}", PROMPTS["small"], made.lora("small"), params=params)
                    number += 1
        assert number < 40
        engine.abort_request([f"small {i}" for i in range(number)])
        finish(engine)


def test_adapters_load_while_others_stream(made: Adapters, engine: LLMEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    from mainspring.core.worker import registry

    read, go_on = registry.read_lora, threading.Event()

    def slow(*args: Any) -> Any:
        assert go_on.wait(GUARD)
        return read(*args)

    monkeypatch.setattr(registry, "read_lora", slow)
    add(engine, "small", PROMPTS["small"], made.lora("small"))
    add(engine, "gone", PROMPTS["small"], made.lora("large"))
    add(engine, "none", PROMPTS["none"])
    found: dict[str, RequestOutput] = {}
    while "none" not in found or not found["none"].finished:
        found.update({output.request_id: output for output in engine.step()})
    assert set(found) == {"none"}
    engine.abort_request("gone")
    go_on.set()
    found |= finish(engine)
    assert found.pop("gone").outputs[0].finish_reason == "abort"
    assert tokens(found) == {name: made.expected[name] for name in ("none", "small")}


# ------------------------------------------------------------------ what is refused


def test_an_engine_without_adapters_says_so(made: Adapters, virtual: dict[str, PromptAdapterRequest]) -> None:
    with engine_for(made, enable_lora=False) as engine:
        lora = made.lora("small")
        assert lora
        for call in (
            lambda: add(engine, "a", [5, 6], lora),
            lambda: engine.add_lora(lora),
            engine.list_loras,
            lambda: add(engine, "a", [5, 6], prompt_adapter_request=virtual["five"]),
        ):
            with pytest.raises(NotSupportedError, match="start it with enable_"):
                call()
        core: EngineCore = engine.engine_core.core
        core.add_request(0, AddRequest(1, "", [5, 6], Sampling(4), lora=lora.message))
        core.add_request(0, AddRequest(2, "", [5, 6], Sampling(4), prompt_adapter=virtual["five"].message))
        ended = [one for outputs in core.step().values() for one in outputs.finished]
        assert [(one.handle, one.error) for one in ended] == [(1, "NotSupportedError"), (2, "NotSupportedError")]


@pytest.mark.parametrize(
    "fields",
    [("", 1, "a"), ("a", 0, "a"), ("a", True, "a"), ("a", "1", "a"), ("a", 1, ""), ("a", 1, "x" * 5000), (1, 1, "a")],
)
def test_a_request_for_an_adapter_is_checked(fields: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="lora_"):
        LoRARequest(*fields)
    with pytest.raises(InvalidArgumentError, match="prompt_adapter_"):
        PromptAdapterRequest(*fields, 5)


def changed_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(config | fields))

    return change


def changed_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        tensors = load_file(folder / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, folder / "adapter_model.safetensors")

    return write


FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
EMBEDDING = "base_model.model.model.embed_tokens.lora_embedding_A"
OTHER = "base_model.model.model.layers.7.self_attn.q_proj.lora_"


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "can't be read: No such file"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "can't be read: No such file"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "is damaged"),
        (lambda folder: (folder / "adapter_config.json").write_text("[" * 100_000), "is damaged"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "peft_type"),
        (lambda folder: (folder / "adapter_config.json").write_text(" " * (2 << 20)), "more than 1048576 bytes"),
        (lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 100), "is damaged"),
        (lambda folder: os.truncate(folder / "adapter_model.safetensors", 1 << 34), "more than"),
        (
            lambda folder: ((folder / "adapter_config.json").unlink(), os.mkfifo(folder / "adapter_config.json")),
            "is no file",
        ),
        (changed_config(peft_type="LOHA"), "peft_type 'LOHA'"),
        (changed_config(use_dora=True), "use_dora is True"),
        (changed_config(bias="all"), "bias is 'all'"),
        (changed_config(modules_to_save=["lm_head"]), "modules_to_save"),
        (changed_config(something_new={"a": 1}), "something_new"),
        (changed_config(init_lora_weights="pissa_niter_4"), "init_lora_weights"),
        (changed_config(lora_alpha="much"), "much"),
        (changed_config(lora_alpha=float("nan")), "lora_alpha"),
        (changed_config(alpha_pattern={"(a+)+x": 3}), "alpha_pattern"),
        (changed_config(alpha_pattern={"(": 3}), "alpha_pattern"),
        (changed_tensors(lambda t: t.update({FIRST: torch.ones(40, 64)})), "rank 40; max_lora_rank is 16"),
        (changed_tensors(lambda t: t.update({FIRST: torch.ones(4, 63)})), "they must be"),
        (changed_tensors(lambda t: t.update({FIRST: torch.ones(64)})), "rank 0"),
        (changed_tensors(lambda t: t.update({FIRST: torch.ones(0, 64)})), "rank 0"),
        (changed_tensors(lambda t: t.update({FIRST: torch.full((4, 64), torch.nan)})), "not finite"),
        (changed_tensors(lambda t: t.update({FIRST: torch.ones(4, 64, dtype=torch.int64)})), "int64"),
        (changed_tensors(lambda t: t.pop(FIRST)), "lora_B alone"),
        (
            changed_tensors(
                lambda t: t.update({OTHER + "A.weight": torch.ones(4, 64), OTHER + "B.weight": torch.ones(64, 4)})
            ),
            "is no linear layer",
        ),
        (changed_tensors(lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(384, 64)})), "no part of"),
        (changed_tensors(lambda t: t.update({EMBEDDING: torch.ones(4, 384)})), "no part of"),
    ],
)  # fmt: skip
def test_an_adapter_that_cannot_be_served_fails_only_its_request(
    made: Adapters, tmp_path: Path, shared: LLMEngine, spoil: Callable[[Path], Any], why: str
) -> None:
    folder = tmp_path / "spoilt"
    os.system(f"cp -r {made.folders['small']} {folder}")
    spoil(folder)
    add(shared, "bad", PROMPTS["none"], LoRARequest("bad", 9, str(folder)))
    add(shared, "good", PROMPTS["small"], made.lora("small"))
    add(shared, "none", PROMPTS["none"])
    found = finish(shared)
    bad = found.pop("bad").outputs[0]
    assert (bad.finish_reason, bad.token_ids) == ("error", [])
    assert isinstance(bad.error, InvalidRequestError)
    assert why in str(bad.error)
    assert tokens(found) == {"good": made.expected["small"], "none": made.expected["none"]}
    with pytest.raises(InvalidRequestError, match="adapter"):
        shared.add_lora(LoRARequest("bad", 9, str(folder)))


@pytest.fixture(scope="module")
def shared(made: Adapters) -> Iterator[LLMEngine]:
    with engine_for(made) as engine:
        yield engine


def test_a_folder_that_is_none_and_layers_that_are_not_linear(
    made: Adapters, shared: LLMEngine, tmp_path: Path
) -> None:
    for where in ("/", str(tmp_path / "nowhere"), "\0", str(made.model / "config.json"), "/dev/zero"):
        add(shared, "bad", PROMPTS["none"], LoRARequest("bad", 9, where))
        bad = finish(shared)["bad"].outputs[0]
        assert isinstance(bad.error, InvalidRequestError)
    model = tiny.make("gpt2", tmp_path / "model")
    adapter = make_lora(model, tmp_path / "adapter", 1, r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    with make_engine(model, skip_tokenizer_init=True, enable_lora=True) as engine:
        add(engine, "bad", PROMPTS["none"], LoRARequest("bad", 9, str(adapter)))
        assert "is no linear layer" in str(finish(engine)["bad"].outputs[0].error)


def test_prompt_adapters_that_do_not_fit(made: Adapters, virtual: dict[str, PromptAdapterRequest]) -> None:
    five = virtual["five"].prompt_adapter_local_path
    with engine_for(made, enable_prompt_adapter=True, max_prompt_adapter_token=10) as engine:
        for name, request, why in (
            ("length", PromptAdapterRequest("a", 1, five, 6), "shape [6, 64]"),
            ("kind", PromptAdapterRequest("a", 2, str(made.folders["small"]), 5), "peft_type"),
        ):
            add(engine, name, PROMPTS["none"], prompt_adapter_request=request)
            assert why in str(finish(engine)[name].outputs[0].error)
        with pytest.raises(InvalidRequestError, match="max_prompt_adapter_token is 10"):
            add(engine, "long", PROMPTS["none"], prompt_adapter_request=virtual["twenty"])
        add(engine, "lora", PROMPTS["none"], LoRARequest("a", 3, five))
        assert "peft_type" in str(finish(engine)["lora"].outputs[0].error)


def test_requests_that_our_frontends_never_send_are_refused(made: Adapters, shared: LLMEngine) -> None:
    core: EngineCore = shared.engine_core.core
    path = str(made.folders["small"])
    wrong = [
        Adapter(-1, "a", path),
        Adapter(1 << 62, "a", ""),
        Adapter(5, "a" * 10**5, path),
        Adapter(5, "a", "b" * 10**5),
    ]
    for i, adapter in enumerate(wrong):
        core.add_request(0, AddRequest(10**6 + i, "", [5, 6], Sampling(5), lora=adapter))
        core.add_request(0, AddRequest(2 * 10**6 + i, "", [5, 6], Sampling(5), prompt_adapter=adapter))
    ended: list[Any] = []
    for _ in range(100):
        ended += [one for outputs in core.step().values() for one in outputs.finished]
    assert len(ended) == 2 * len(wrong)
    assert all(one.reason == "error" for one in ended)
    for method, argument in (
        ("check_request", "x"),
        ("add_lora", [1]),
        ("add_lora", "x"),
        ("remove_lora", [1]),
        ("pin_lora", None),
    ):
        with pytest.raises(Exception, match=r".") as error:
            shared.engine_core.call(method, argument)
        assert not isinstance(error.value, AssertionError)


def test_an_adapter_with_full_weights_can_not_be_checked_while_the_model_sleeps() -> None:
    model = torch.nn.Linear(4, 4)
    parameters, weight = ParameterMap.of(model), model.weight.detach().clone()
    assert adapter_files._is_own("weight", weight, parameters)
    assert not adapter_files._is_own("weight", weight + 1, parameters)
    assert not adapter_files._is_own("height", weight, parameters)
    model.weight.data = torch.empty(0)
    with pytest.raises(InvalidRequestError, match="call wake_up first"):
        adapter_files._is_own("weight", weight, parameters)
