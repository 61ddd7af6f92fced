"""Prompts with media together with what else an engine can do: the tokens are those of transformers, or those without
the other feature."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from mainspring import BeamSearchParams, LLMEngine, LoRARequest, SamplingParams, StructuredOutputsParams
from mainspring.ipc.errors import InvalidRequestError
from mainspring.ipc.messages import Stats
from media_models import Reference
from native_here import why_not
from test_media import COUNT, GREEDY, Model, engine_of, ids, run
from tiers import fast_only

LANGUAGE = r".*language_model.*\.(q_proj|v_proj|down_proj)"
ENCODER = r".*(vision_tower|visual|audio_tower).*\.(q_proj|qkv|fc1)"


@pytest.fixture(scope="module", params=fast_only(["llava", "qwen2_vl"], ["llava", "qwen2_vl", "glmasr"]))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def prompts_of(model: Model) -> dict[str, Any]:
    return {case: model.prompt(case) for case in model.cases}


def tokens_of(outputs: dict[str, Any]) -> dict[str, list[int]]:
    assert not [output for output in outputs.values() if output.outputs[0].error is not None]
    return {name: ids(output) for name, output in outputs.items()}


def expected(model: Model) -> dict[str, list[int]]:
    return {case: model.tokens(case, COUNT) for case in model.cases}


def stats_of(engine: LLMEngine) -> Stats:
    return engine.engine_core.core.stats()


# ------------------------------------------------------------------ adapters


def make_adapter(model: Model, folder: Path, layers: str) -> PeftModel:
    """A random LoRA adapter of the layers whose names match, in a folder."""
    base = model.reference.load()
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=16, target_modules=layers))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.15, generator=generator)
    adapted.save_pretrained(folder)
    return adapted


def test_an_adapter_gives_the_tokens_of_the_merged_model(model: Model, tmp_path: Path) -> None:
    merged = make_adapter(model, tmp_path / "adapter", LANGUAGE).merge_and_unload()
    reference = Reference(model.name, model.folder, merged)
    adapter = LoRARequest("adapter", 1, str(tmp_path / "adapter"))
    with engine_of(model, enable_lora=True, max_num_batched_tokens=40) as engine:
        for case in model.cases:  # the same prompts with and without it, in the same steps
            engine.add_request(case, model.prompt(case), GREEDY)
            engine.add_request(f"adapted {case}", model.prompt(case), GREEDY, lora_request=adapter)
        found = tokens_of(run(engine, {}))
    assert {case: found[case] for case in model.cases} == expected(model)
    for case in model.cases:
        assert found[f"adapted {case}"] == reference.tokens(*model.case(case), COUNT), case
        assert found[f"adapted {case}"] != found[case]


def test_an_adapter_of_the_encoder_is_refused_alone(model: Model, tmp_path: Path) -> None:
    make_adapter(model, tmp_path / "adapter", ENCODER)
    with engine_of(model, enable_lora=True) as engine:
        engine.add_request(
            "bad", model.prompt("c:x"), GREEDY, lora_request=LoRARequest("a", 1, str(tmp_path / "adapter"))
        )
        found = run(engine, {"good": model.prompt("c:what is it?")})
    error = found["bad"].outputs[0].error
    assert isinstance(error, InvalidRequestError)
    assert "no linear layer of this model that an adapter can change" in str(error)
    assert ids(found["good"]) == model.tokens("c:what is it?", COUNT)


# ------------------------------------------------------------------ sleep


@pytest.mark.parametrize("level", [1, 2])
def test_requests_go_on_after_sleep_as_if_it_had_not_been(model: Model, level: int) -> None:
    prompts = prompts_of(model)
    begun, added = model.cases[0::2], model.cases[1::2]
    with engine_of(model, max_num_batched_tokens=32) as engine:
        for case in begun:
            engine.add_request(case, prompts[case], GREEDY)
        found: dict[str, Any] = {}
        while not found:  # some are in the middle of their prompts
            found |= {output.request_id: output for output in engine.step()}
        engine.sleep(level, mode="keep")
        for case in added:
            engine.add_request(case, prompts[case], GREEDY)
        assert stats_of(engine).encoder_bytes == 0
        engine.wake_up()
        assert tokens_of(found | run(engine, {})) == expected(model)
        engine.sleep(level)
        engine.wake_up()
        assert tokens_of(run(engine, prompts)) == expected(model)


# ------------------------------------------------------------------ other ways to generate


def test_guesses_of_ngrams_change_no_token(model: Model) -> None:
    guesses = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    with engine_of(model, speculative_config=guesses) as engine:
        assert tokens_of(run(engine, prompts_of(model))) == expected(model)
        assert stats_of(engine).draft_tokens > 0


def test_beams_are_those_of_transformers(model: Model) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True).sampling_params()
    with engine_of(model, max_num_batched_tokens=64) as engine:
        found = run(engine, prompts_of(model), params)
    for case in model.cases:
        beams = model.reference.generate(*model.case(case), 8, num_beams=3, num_return_sequences=3, length_penalty=0.0)
        assert [one.token_ids for one in found[case].outputs] == beams, case


def test_several_drawn_completions_do_not_depend_on_other_requests(model: Model) -> None:
    params = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=COUNT, ignore_eos=True)
    prompts = prompts_of(model)
    several = lambda outputs, case: [one.token_ids for one in outputs[case].outputs]  # noqa: E731
    with engine_of(model) as engine:
        alone = {case: several(run(engine, {case: prompts[case]}, params), case) for case in model.cases}
    with engine_of(model, max_num_batched_tokens=24) as engine:
        found = run(engine, prompts, params)
    for case in model.cases:
        assert several(found, case) == alone[case], case
        assert len(set(map(tuple, alone[case]))) == 3


def test_a_choice_is_the_one_that_transformers_makes(model: Model) -> None:
    choices = ["a cat", "a dog", "not this"]
    params = SamplingParams(
        temperature=0.0, max_tokens=COUNT, structured_outputs=StructuredOutputsParams(choice=choices)
    )
    with engine_of(model) as engine:
        tokenizer = engine.get_tokenizer()
        found = run(engine, prompts_of(model), params)
        spelled = [[*tokenizer.encode(choice, add_special_tokens=False), 257] for choice in choices]
    for case in model.cases:
        size = len(model.reference.prompt_ids(*model.case(case)))

        def next_ones(_: int, whole: torch.Tensor, size: int = size) -> list[int]:
            so_far = whole[size:].tolist()
            return [one[len(so_far)] for one in spelled if one[: len(so_far)] == so_far and len(one) > len(so_far)] or [
                257
            ]

        [wanted] = model.reference.generate(*model.case(case), COUNT, prefix_allowed_tokens_fn=next_ones)
        wanted = wanted[: wanted.index(257) + 1]
        assert ids(found[case]) == wanted, case
        assert found[case].outputs[0].text in choices


# ------------------------------------------------------------------ numbers


def first_logprobs(engine: LLMEngine, model: Model) -> dict[str, dict[int, float]]:
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, ignore_eos=True)
    outputs = run(engine, prompts_of(model), params)
    return {
        case: {token: one.logprob for token, one in output.outputs[0].logprobs[0].items()}
        for case, output in outputs.items()
    }


def distance(one: dict[int, float], other: dict[int, float]) -> float:
    """Mean difference of probabilities' logarithms, over the tokens that are likely."""
    likely = sorted(one, key=one.__getitem__)[-20:]
    return sum(abs(one[token] - other[token]) for token in likely) / len(likely)


COARSE = [
    ({"dtype": "float16"}, 0.005),
    ({"dtype": "bfloat16"}, 0.05),
    ({"quantization": "int8"}, 0.05),
    ({"quantization": "int4"}, 0.5),
]


@pytest.mark.parametrize(("options", "most"), COARSE, ids=["float16", "bfloat16", "int8", "int4"])
def test_coarser_numbers_are_near_and_do_not_depend_on_the_steps(
    model: Model, options: dict[str, Any], most: float
) -> None:
    if "quantization" in options and (reason := why_not()) is not None:
        pytest.skip(reason)
    prompts = prompts_of(model)
    with engine_of(model, max_logprobs=-1) as engine:
        exact = first_logprobs(engine, model)
    with engine_of(model, max_logprobs=-1, **options) as engine:
        near = first_logprobs(engine, model)
        engine.reset_prefix_cache()
        together = tokens_of(run(engine, prompts))
    with engine_of(model, max_num_batched_tokens=16, enable_prefix_caching=False, **options) as engine:
        alone = {case: tokens_of(run(engine, {case: prompts[case]}))[case] for case in model.cases}
    assert together == alone
    for case in model.cases:
        assert distance(exact[case], near[case]) < most, case


def test_an_item_whose_features_are_not_finite_is_refused_and_no_other_one(model: Model) -> None:
    """Whichever comes first, though the first one is compared with the model alone."""
    case = next(iter(model.cases))
    prompt = model.prompt(case)
    bad = {**prompt, "mm_processor_kwargs": {"image_std": [0.0, 0.0, 0.0]}}
    if "audio" in prompt["multi_modal_data"]:
        bad = {**prompt, "multi_modal_data": {"audio": (np.full(8_000, 3e38, np.float32), 16_000)}}
    with engine_of(model) as engine:
        refused = run(engine, {"bad": bad})["bad"]
        assert isinstance(refused.outputs[0].error, InvalidRequestError)
        assert "not finite" in str(refused.outputs[0].error)
        assert tokens_of(run(engine, {case: prompt}))[case] == model.tokens(case, COUNT)
