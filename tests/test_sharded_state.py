"""Weights that a core wrote with `save_sharded_state`, read again with ``load_format="sharded_state"``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import plain
import tiny
from mainspring import LLMEngine, SamplingParams
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, MainspringError, ModelNotFoundError

PROMPT = {"prompt_token_ids": list(range(5, 45))}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)


def complete(engine: LLMEngine) -> tuple[object, ...]:
    engine.add_request("r", PROMPT, PARAMS)
    output = plain.collect(engine)["r"][-1].outputs[0]
    return output.token_ids, output.logprobs


@pytest.mark.parametrize("tied", [False, True])
def test_saved_weights_give_the_same_bits(tied: bool, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    model = tiny.make("llama", tmp_path / "model", tie_word_embeddings=tied)
    with plain.make_engine(model, skip_tokenizer_init=True) as engine:
        expected = complete(engine)
        engine.engine_core.save_sharded_state(str(saved), max_size=60_000)
        with pytest.raises(InvalidArgumentError, match="pattern is 'x'"):
            engine.collective_rpc("save_sharded_state", None, [str(saved), "x"])
        assert complete(engine) == expected
    assert len(list(saved.glob("model-rank-0-part-*.safetensors"))) > 2
    shutil.copy(model / "config.json", saved)
    with plain.make_engine(saved, skip_tokenizer_init=True, load_format="sharded_state") as engine:
        assert complete(engine) == expected
    next(saved.glob("*.safetensors")).unlink()
    with pytest.raises(MainspringError, match="lacks the parameter"):
        plain.make_engine(saved, skip_tokenizer_init=True, load_format="sharded_state")


def test_what_can_not_be_saved_or_loaded_is_refused(tmp_path: Path) -> None:
    model = tiny.make("llama", tmp_path / "model")
    with pytest.raises(ModelNotFoundError, match=r"holds no file model-rank-0-part-0\.safetensors"):
        plain.make_engine(model, skip_tokenizer_init=True, load_format="sharded_state")
    settings = {"skip_tokenizer_init": True, "attention_backend": "native", "quantization": "int8"}
    with (
        plain.make_engine(model, **settings) as engine,
        pytest.raises(InvalidRequestError, match="the weights are quantized"),
    ):
        engine.engine_core.save_sharded_state(str(tmp_path / "saved"))
