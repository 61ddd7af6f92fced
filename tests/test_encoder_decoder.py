"""Encoder-decoder models: the tokens are those that transformers generates, in each engine, whatever the steps are and
whatever dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from mainspring import (
    LLM,
    AsyncEngineArgs,
    AsyncLLMEngine,
    BeamSearchParams,
    EngineArgs,
    ExplicitEncoderDecoderPrompt,
    LLMEngine,
    SamplingParams,
    StructuredOutputsParams,
)
from mainspring.benchmarks import architectures_media
from mainspring.core.model.load.loader import page
from mainspring.core.model.media import encoder_decoder
from mainspring.core.model.media.encoder_decoder import cross_states
from mainspring.core.model.run.cross_attention import CrossStates
from mainspring.ipc.errors import InvalidRequestError, NotSupportedError, UnsupportedModelError
from mainspring.ipc.messages import Stats
from media_folders import make_processor, tone
from media_models import COUNT, ENCODER_DECODER, GREEDY, READERS, ids, make, run

SIZES = {"max_model_len": 200, "dtype": "float32", "kv_cache_memory_bytes": 8 << 20, "block_size": 16}
SOUNDS = {"a": tone(1.0), "b": tone(0.6, hertz=200.0), "c": tone(1.5, hertz=900.0)}
LONG = "what was said before, at some length, as context; "
CASES = ["a:", "b:", "c:", "a:hello", "b:hello", f"a:{LONG}", f"b:{LONG}"]


READ = {"a": "a fox", "b": "the old bear sleeps", "c": "?"}


class Model:
    """A checkpoint, and what transformers makes of it. A case is a letter for the encoder's input, and what the decoder
    begins with."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, make(name, folder)
        self.hears = name == "whisper"
        processor = make_processor(name)
        self.tokenizer, self._features = processor.tokenizer, getattr(processor, "feature_extractor", None)
        self._model: Any = ENCODER_DECODER[name].from_pretrained(self.folder, dtype=torch.float32).eval()
        self.start = self._model.config.decoder_start_token_id
        self.tokens = cache(self._tokens)

    def prompt_ids(self, case: str) -> list[int]:
        text = case.partition(":")[2]
        return [self.start, *self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def prompt(self, case: str) -> Any:
        name, _, text = case.partition(":")
        if self.hears:
            return {"prompt": text, "multi_modal_data": {"audio": (SOUNDS[name], 16_000)}}
        return {"encoder_prompt": READ[name], "decoder_prompt": text}

    @torch.inference_mode()
    def _tokens(self, case: str, count: int = COUNT) -> list[int]:
        """The first output tokens, greedily, step by step with transformers' own cache."""
        name, ids = case.partition(":")[0], self.prompt_ids(case)
        if self.hears:
            read = self._features(SOUNDS[name], sampling_rate=16_000, return_tensors="pt").input_features
        else:
            read = self.tokenizer(READ[name], return_tensors="pt")["input_ids"]
        found = transformers.GenerationMixin.generate(
            self._model,
            read,
            decoder_input_ids=torch.tensor([ids]),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            num_beams=1,
            eos_token_id=None,
        )
        return found[0, len(ids) :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module", params=["whisper", "bart"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(request.param, tmp_path_factory.mktemp("models") / request.param)


def engine_of(model: Model, **options: Any) -> LLMEngine:
    args = EngineArgs(str(model.folder), **{**SIZES, **options})
    return LLMEngine.from_engine_args(args, enable_multiprocessing=False)


@pytest.mark.parametrize("budget", [200, 16], ids=["whole", "chunked"])
def test_a_batch_has_the_tokens_of_transformers(model: Model, budget: int) -> None:
    with engine_of(model, max_num_batched_tokens=budget) as engine:
        found = run(engine, {case: model.prompt(case) for case in CASES})
        for case in CASES:
            assert ids(found[case]) == model.tokens(case), case
            assert found[case].prompt_token_ids == model.prompt_ids(case)
        assert set(engine.get_tokenizer().media) == {"audio" if model.hears else "text"}
    for text in ("", "hello"):
        assert len({tuple(model.tokens(f"{name}:{text}")) for name in "ab"}) == 2, "the encoder's input has no effect"


@pytest.mark.parametrize("name", READERS[1:])
def test_relatives_have_the_tokens_of_transformers(name: str, tmp_path: Path) -> None:
    model = Model(name, tmp_path / name)
    with engine_of(model, max_num_batched_tokens=16) as engine:
        found = run(engine, {case: model.prompt(case) for case in CASES})
    for case in CASES:
        assert ids(found[case]) == model.tokens(case), case
    assert model.tokens("a:") != model.tokens("b:"), "the encoder's input has no effect"


def test_of_two_vocabularies_tokens_are_chosen_from_the_decoders() -> None:
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    sizes |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    words = {"vocab_size": 64, "decoder_vocab_size": 96, "share_encoder_decoder_embeddings": False}
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0}
    model = transformers.MarianMTModel(transformers.MarianConfig(**sizes, **words, **tokens)).eval()
    assert page(model, 64).vocab_size == 96


@pytest.mark.parametrize("name", ["moonshine", "canary"])
def test_an_encoder_with_a_mask_in_its_output_or_a_config_of_its_own_is_served(name: str) -> None:
    assert architectures_media.judge(name).outcome == "exact"


def test_steps_that_preempt_requests_give_the_same_tokens(model: Model) -> None:
    """The pool holds a part of what the requests need, so some lose their blocks and catch up."""
    cases = [f"{name}:{LONG}{at}" for name in "abc" for at in range(3)]
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    with engine_of(model, num_gpu_blocks_override=14, enable_prefix_caching=False) as engine:
        found = run(engine, {case: model.prompt(case) for case in cases}, params)
        assert msgspec.convert(engine.engine_core.call("stats"), Stats).num_preemptions > 0
    for case in cases:
        assert ids(found[case]) == model.tokens(case, 60), case


def test_drawn_tokens_do_not_depend_on_other_requests_or_on_chunks(model: Model) -> None:
    params = SamplingParams(temperature=1.0, seed=7, max_tokens=COUNT, ignore_eos=True, logprobs=1)

    def drawn(output: Any) -> list[tuple[int, float]]:
        logprobs = output.outputs[0].logprobs
        return [(token, at[token].logprob) for token, at in zip(ids(output), logprobs, strict=True)]

    with engine_of(model, enable_prefix_caching=False) as engine:
        alone = {case: drawn(run(engine, {case: model.prompt(case)}, params)[case]) for case in CASES}
    with engine_of(model, max_num_batched_tokens=16) as engine:
        found = run(engine, {case: model.prompt(case) for case in CASES}, params)
    assert {case: drawn(output) for case, output in found.items()} == alone


def test_a_prefix_is_found_for_the_same_input_only(model: Model) -> None:
    with engine_of(model) as engine:
        first = run(engine, {"1": model.prompt(f"a:{LONG}")})["1"]
        again = run(engine, {"2": model.prompt(f"a:{LONG}")})["2"]
        other = run(engine, {"3": model.prompt(f"b:{LONG}")})["3"]
        assert [one.num_cached_tokens for one in (first, other)] == [0, 0]
        assert again.num_cached_tokens >= 16
        assert ids(again) == ids(first) == model.tokens(f"a:{LONG}")
        assert ids(other) == model.tokens(f"b:{LONG}")
        engine.reset_mm_cache()
        engine.reset_encoder_cache()
        assert ids(run(engine, {"4": model.prompt(f"a:{LONG}")})["4"]) == ids(first)


def test_each_form_of_a_prompt(model: Model) -> None:
    case = "a:hello"
    asked = model.prompt_ids(case)
    if model.hears:
        sound = {"multi_modal_data": {"audio": (SOUNDS["a"], 16_000)}}
        forms: list[Any] = [{"encoder_prompt": {"prompt": "", **sound}, "decoder_prompt": "hello"}]
        forms += [{"prompt_token_ids": ids, **sound} for ids in (asked, asked[1:])]
    else:
        text = READ["a"]
        token_ids = model.tokenizer(text)["input_ids"]
        forms = [
            ExplicitEncoderDecoderPrompt(encoder_prompt=read, decoder_prompt=begun)
            for read in (text, token_ids, {"prompt": text}, {"prompt_token_ids": token_ids})
            for begun in ("hello", asked, {"prompt_token_ids": asked[1:]})
        ]
    with engine_of(model) as engine:
        found = run(engine, {str(at): form for at, form in enumerate(forms)})
        for output in found.values():
            assert (ids(output), output.prompt_token_ids) == (model.tokens(case), asked)
        if not model.hears:
            plain = run(engine, {"a": text, "b": token_ids, "c": {"encoder_prompt": text, "decoder_prompt": None}})
            assert [ids(output) for output in plain.values()] == [model.tokens("a:")] * 3


def test_a_prompt_that_has_the_first_token_behind_others_stays_as_it_is(tmp_path: Path) -> None:
    """Of Whisper: what was said before comes first."""
    model = Model("whisper", tmp_path / "whisper")
    said = model.tokenizer(LONG, add_special_tokens=False)["input_ids"]
    asked = [*said, *model.prompt_ids("a:")]
    sound = {"multi_modal_data": {"audio": (SOUNDS["a"], 16_000)}}
    with engine_of(model) as engine:
        (found,) = run(engine, {"a": {"prompt_token_ids": asked, **sound}}).values()
    assert found.prompt_token_ids == asked


def test_wrong_prompts_are_refused_and_others_go_on(model: Model) -> None:
    sound = {"audio": (SOUNDS["a"], 16_000)}
    wrong: list[tuple[Any, str]] = [
        ({"decoder_prompt": "x"}, "without encoder_prompt"),
        ({"encoder_prompt": "x", "decoder_prompt": "y", "prompt": "z"}, "both encoder_prompt and prompt"),
        ({"encoder_prompt": "x", "decoder_prompt": {"prompt": "y", "multi_modal_data": sound}}, "belong into"),
        ({"encoder_prompt": {"encoder_prompt": "x"}}, "must be a text"),
    ]
    if model.hears:
        wrong += [
            ("no sound", "0 inputs for this model's encoder"),
            ({"prompt": "x", "multi_modal_data": {"audio": [sound["audio"]] * 2}}, "not 2"),
            ({"encoder_prompt": "x", "decoder_prompt": "y"}, "this model's encoder takes: audio"),
            ({"encoder_prompt": {"prompt": "x", "multi_modal_data": sound}}, "belongs into decoder_prompt"),
        ]
    else:
        wrong += [
            ({"prompt": "x", "multi_modal_data": sound}, "this model takes: text"),
            ({"encoder_prompt": "", "decoder_prompt": "y"} | {"encoder_prompt": []}, "must be token ids"),
        ]
    with engine_of(model) as engine:
        engine.add_request("good", model.prompt("a:hello"), GREEDY)
        for prompt, words in wrong:
            with pytest.raises((InvalidRequestError, NotSupportedError), match=words):
                engine.add_request("bad", prompt, GREEDY)
        if not model.hears:
            engine.add_request("long", {"encoder_prompt": [5] * 300, "decoder_prompt": ""}, GREEDY)
            engine.add_request("id", {"encoder_prompt": [5, 100_000], "decoder_prompt": ""}, GREEDY)
        found = run(engine, {})
        assert ids(found["good"]) == model.tokens("a:hello")
        for name in found.keys() - {"good"}:
            assert found[name].outputs[0].finish_reason == "error"


@pytest.mark.slow
def test_an_async_engine_refuses_and_aborts_prompts_and_takes_prepared_requests(model: Model) -> None:
    async def last(stream: Any) -> Any:
        async for output in stream:
            found = output
        return found

    async def test() -> None:
        async with AsyncLLMEngine.from_engine_args(AsyncEngineArgs(str(model.folder), **SIZES)) as engine:
            if model.hears:
                with pytest.raises(InvalidRequestError, match="0 inputs for this model"):
                    await last(engine.generate("no sound", GREEDY, "bad"))
            for form in (model.prompt("a:hello"), *(() if model.hears else ("hello",))):
                stream = asyncio.create_task(last(engine.generate(form, GREEDY, "aborted")))
                while not engine._reader.num_preparing:
                    await asyncio.sleep(0)
                await engine.abort("aborted")
                assert (await stream).outputs[0].finish_reason == "abort"
            made = await asyncio.to_thread(
                engine.input_processor.process_inputs, "made", model.prompt("a:hello"), GREEDY
            )
            assert ids(await last(engine.generate(made, GREEDY, "made"))) == model.tokens("a:hello")

    asyncio.run(asyncio.wait_for(test(), 300))


@pytest.mark.slow
def test_a_core_of_its_own_that_dies_costs_no_request(model: Model) -> None:
    async def streamed(engine: AsyncLLMEngine, case: str, params: SamplingParams) -> list[int]:
        tokens: list[int] = []
        async for output in engine.generate(model.prompt(case), params, case):
            tokens = ids(output)
        return tokens

    async def test() -> None:
        count = 100
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        async with AsyncLLMEngine.from_engine_args(AsyncEngineArgs(str(model.folder), **SIZES)) as engine:
            streams = [asyncio.create_task(streamed(engine, case, params)) for case in CASES]
            seen = engine.generate(model.prompt("a:first"), params, "first")
            for _ in range(3):
                await anext(seen)
            supervisor: Any = engine.engine_core._connection._core.supervisor  # type: ignore[union-attr]
            os.kill(supervisor.core_pid, signal.SIGKILL)
            tokens: list[int] = []
            async for output in seen:
                tokens = ids(output)
            found = await asyncio.gather(*streams)
        assert tokens == model.tokens("a:first", count)
        assert found == [model.tokens(case, count) for case in CASES]

    asyncio.run(asyncio.wait_for(test(), 300))


@pytest.fixture(scope="module")
def llm(model: Model) -> Iterator[LLM]:
    with LLM(str(model.folder), **SIZES) as made:
        yield made


def test_an_llm_takes_a_batch_and_searches_beams(llm: LLM, model: Model) -> None:
    outputs = llm.generate([model.prompt(case) for case in CASES], GREEDY, use_tqdm=False)
    assert [ids(output) for output in outputs] == [model.tokens(case) for case in CASES]
    params = BeamSearchParams(beam_width=1, max_tokens=COUNT, ignore_eos=True)
    (found,) = llm.beam_search([model.prompt("a:hello")], params)
    asked = model.prompt_ids("a:hello")
    assert found.sequences[0].tokens == [*asked, *model.tokens("a:hello")]


@pytest.mark.parametrize(
    ("options", "words"), [({"enable_lora": True}, "enable_lora"), ({"tensor_parallel_size": 2}, "several ranks")]
)
def test_options_that_leave_out_the_encoder_are_refused(model: Model, options: dict[str, Any], words: str) -> None:
    with pytest.raises((NotSupportedError, UnsupportedModelError), match=words):
        engine_of(model, **options)


def test_an_item_whose_keys_are_wrong_is_refused(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt is compared with the model's own forward."""
    with engine_of(model) as engine:

        def wrong(*args: Any) -> CrossStates:
            found = cross_states(*args)
            return found._replace(keys=tuple(x.flip(1) for x in found.keys))

        monkeypatch.setattr(encoder_decoder, "cross_states", wrong)
        (output,) = run(engine, {"a": model.prompt("a:hello")}).values()
        assert output.outputs[0].finish_reason == "error"
        assert "gives other logits" in str(output.outputs[0].error)


def test_answers_in_a_form_are_checked_before_they_are_asked_for(llm: LLM, model: Model) -> None:
    """The core is asked whether it can have requests of this form, without what the encoder reads."""
    form = StructuredOutputsParams(choice=["yes", "no"])
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=form)
    found = llm.generate([model.prompt("a:"), model.prompt("b:")], params, use_tqdm=False)
    assert {one.outputs[0].text for one in found} <= {"yes", "no"}
