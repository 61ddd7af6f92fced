"""Mistral's own formats: params.json, consolidated*.safetensors, and the tokenizers of mistral-common."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import mistral_folders
import plain
import tiny
from mainspring import LLM, SamplingParams, StructuredOutputsParams
from mainspring.core.model.load.mistral_weights import hf_name, rotate_half_rows
from mainspring.engine.text.tokenizer import Tokenizer, load_tokenizer
from mainspring.ipc.errors import InvalidRequestError, ModelNotFoundError, NotSupportedError, UnsupportedModelError
from mainspring.ipc.mistral_params import DEFAULT_LENGTH, hf_fields, read_params

PROMPTS = {"long": list(range(5, 45)), "short": [7, 8, 9]}
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
MISTRAL = {"config_format": "mistral", "load_format": "mistral"}
PLAIN = {
    "dim": 64,
    "n_layers": 4,
    "head_dim": 16,
    "hidden_dim": 96,
    "n_heads": 4,
    "n_kv_heads": 2,
    "norm_eps": 1e-5,
    "vocab_size": 384,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "wind",
            "description": "Wind the clock",
            "parameters": {"type": "object", "properties": {"turns": {"type": "integer"}}},
        },
    }
]


def complete(folder: Path, **settings: Any) -> dict[str, Any]:
    with plain.make_engine(folder, skip_tokenizer_init=True, **settings) as engine:
        jobs = {name: ({"prompt_token_ids": ids}, PARAMS) for name, ids in PROMPTS.items()}
        found = plain.run(engine, jobs)
    return {name: (output.outputs[0].token_ids, output.outputs[0].logprobs) for name, output in found.items()}


@pytest.mark.parametrize(
    ("architecture", "fields", "parts"),
    [
        ("mistral", {}, 1),
        ("mistral", {"tie_word_embeddings": True, "sliding_window": None}, 3),
        ("mixtral", {}, 2),
    ],
)
def test_a_folder_in_mistrals_format_computes_what_the_ordinary_one_does(
    architecture: str, fields: dict[str, Any], parts: int, tmp_path: Path
) -> None:
    ordinary = tiny.make(architecture, tmp_path / "ordinary", **fields)
    tied = fields.get("tie_word_embeddings")
    folder = mistral_folders.convert(ordinary, tmp_path / "mistral", parts, tied_embeddings=tied)
    expected = complete(ordinary)
    assert complete(folder) == expected  # recognised by its files
    assert complete(folder, **MISTRAL) == expected


def test_a_folder_with_both_formats_is_read_as_it_is_asked_for(tmp_path: Path) -> None:
    folder = tiny.make("mistral", tmp_path / "both", seed=1)
    other = tiny.make("mistral", tmp_path / "other", seed=2)
    mistral_folders.convert(other, folder)
    assert complete(folder) == complete(folder, config_format="hf") == complete(folder, config_format="mistral")
    assert complete(folder, **MISTRAL) == complete(other) != complete(folder)


def test_the_checkpoints_dtype_is_kept(tmp_path: Path) -> None:
    ordinary = tiny.make("mistral", tmp_path / "ordinary", dtype=torch.bfloat16)
    with plain.make_engine(mistral_folders.convert(ordinary, tmp_path / "m"), skip_tokenizer_init=True) as engine:
        assert engine.model_config.dtype == "bfloat16"


def test_rows_are_ordered_for_embeddings_that_rotate_halves() -> None:
    """Queries and keys of both conventions have the same products, at all distances."""
    torch.manual_seed(0)
    heads, size, hidden, length = 3, 8, 5, 7
    x = torch.randn(length, hidden, dtype=torch.float64)
    angles = torch.arange(length).double()[:, None] * 100.0 ** -(
        torch.arange(0, size, 2).double() / size
    )  # [length, size / 2]

    def interleaved(weight: torch.Tensor) -> torch.Tensor:
        pairs = (x @ weight.T).view(length, heads, size // 2, 2)
        turned = torch.view_as_complex(pairs) * torch.polar(torch.ones(()).double(), angles)[:, None]
        return torch.view_as_real(turned).flatten(2)

    def halves(weight: torch.Tensor) -> torch.Tensor:
        y = (x @ rotate_half_rows(weight, heads).T).view(length, heads, size)
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
        return y * cos + torch.cat([-y[..., size // 2 :], y[..., : size // 2]], -1) * sin

    one, two = torch.randn(2, heads * size, hidden, dtype=torch.float64)
    products = [torch.einsum("ihd,jhd->hij", rotate(one), rotate(two)) for rotate in (interleaved, halves)]
    torch.testing.assert_close(*products)


def test_keys_of_params_json() -> None:
    found = hf_fields({**PLAIN, "max_seq_len": 512, "tied_embeddings": True, "_sliding_window": [3], "moe": None})
    expected = {
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "sliding_window": None,
        "model_type": "mistral",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    assert expected.items() <= found.items()
    assert hf_fields({**PLAIN, "sliding_window": 8})["rope_parameters"]["rope_theta"] == 1e4
    mixed = hf_fields({**PLAIN, "sliding_window": [8, None], "rope_theta": 5.0})
    assert (mixed["model_type"], mixed["sliding_window"], mixed["rope_parameters"]["rope_theta"]) == ("ministral", 8, 5)
    assert mixed["layer_types"] == ["sliding_attention", "full_attention"] * 2
    yarn = {"factor": 4, "original_max_position_embeddings": 128, "beta": 32, "alpha": 1, "apply_scale": False}
    assert hf_fields({**PLAIN, "yarn": yarn})["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
    }


def test_a_pattern_of_windows_and_yarn_run(tmp_path: Path) -> None:
    ordinary = tiny.make("mistral", tmp_path / "ordinary", num_hidden_layers=4)
    expected = complete(ordinary)
    yarn = {"factor": 2, "original_max_position_embeddings": 16, "beta": 32, "alpha": 1}
    for at, params in enumerate(({"sliding_window": [4, None]}, {"yarn": yarn})):
        found = complete(mistral_folders.convert(ordinary, tmp_path / str(at), **params))
        assert found != expected


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"vision_encoder": {"dim": 3}}, "key 'vision_encoder' with .*, which is not supported"),
        ({"quantization": {"qformat_weight": "fp8_e4m3"}}, "'quantization'"),
        ({"activation": "gelu"}, "'activation' with 'gelu'"),
        ({"moe": {"num_experts": 2, "num_experts_per_tok": 1, "num_shared_experts": 1}}, "'num_shared_experts' in moe"),
        ({"moe": {"num_experts": 2}}, "lacks the key 'num_experts_per_tok' in moe"),
        ({"yarn": {"factor": 2.0}}, "lacks the key 'original_max_position_embeddings' in yarn"),
        ({"sliding_window": [8, None, None]}, "'sliding_window' with .* fits the layers"),
        ({"sliding_window": [8, 4]}, "'sliding_window'"),
        ({"hidden_dim": None}, "lacks the key 'hidden_dim'"),
    ],
)
def test_what_params_json_can_not_be_mapped_to_is_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        hf_fields({**PLAIN, **params})


def test_where_the_config_is_read_from(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"params\.json of .* can't be read"):
        read_params(str(tmp_path), "mistral")
    assert read_params(str(tmp_path), "auto") is None
    (tmp_path / "params.json").write_text(json.dumps(PLAIN))
    assert (read_params(str(tmp_path), "auto") or {})["max_position_embeddings"] == DEFAULT_LENGTH
    assert read_params(str(tmp_path), "hf") is None
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 77}')
    assert read_params(str(tmp_path), "auto") is None
    assert (read_params(str(tmp_path), "mistral") or {})["max_position_embeddings"] == 77


def test_weights_that_can_not_be_read_are_refused(tmp_path: Path) -> None:
    ordinary = tiny.make("mistral", tmp_path / "ordinary")
    with pytest.raises(ModelNotFoundError, match=r"load_format is 'mistral', but .* holds no file consolidated"):
        complete(ordinary, load_format="mistral")
    folder = mistral_folders.convert(ordinary, tmp_path / "m")
    weights = folder / "consolidated.safetensors"
    save_file({**load_file(weights), "layers.0.attention.wq.bias": torch.zeros(64)}, weights)
    with pytest.raises(UnsupportedModelError, match=r"a tensor 'layers\.0\.attention\.wq\.bias'"):
        complete(folder)
    llama = tiny.make("llama", tmp_path / "llama")
    shutil.copy(mistral_folders.convert(ordinary, tmp_path / "n") / weights.name, llama)
    with pytest.raises(UnsupportedModelError, match=r"is for models of type .*, and this one is a llama"):
        complete(llama, load_format="mistral")
    assert hf_name("layers.3.feed_forward.experts.1.w2.weight") == "model.layers.3.block_sparse_moe.experts.1.w2.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint that has only Mistral's files."""
    base = tmp_path_factory.mktemp("mistral")
    ordinary = tiny.make("mistral", base / "ordinary", tokenizer=True)
    found = mistral_folders.convert(ordinary, base / "m", sliding_window=None, max_seq_len=2048)
    assert mistral_folders.make_tekken(ordinary / "tokenizer.json", found) <= tiny.VOCAB_SIZE
    return found


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    pytest.importorskip("mistral_common")
    return load_tokenizer(folder)


TEXTS = ["hello", "  two  spaces\n", "naïve café 東京 🙂", "<s>[INST]"]


def test_tekken_encodes_and_decodes(tokenizer: Any) -> None:
    vocabulary = tokenizer.chat.instruct_tokenizer.tokenizer
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert ids == vocabulary.encode(text, bos=True, eos=False)
        assert ids[1:] == tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        assert tokenizer.decode(ids) == "<s>" + text
        assert tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text)) == ids[1:]
        assert tokenizer.encode_first(text, True, 2) == ids[:2]
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<s>", 2, 11)
    assert len(tokenizer) == len(tokenizer.get_vocab()) == vocabulary.n_words
    assert tokenizer.skipped_ids == frozenset(range(mistral_folders.NUM_SPECIAL))
    rows = tokenizer(TEXTS[:2], padding=True)
    assert len({*map(len, rows["input_ids"]), *map(len, rows["attention_mask"])}) == 1
    assert rows["input_ids"][0][0] == tokenizer.pad_token_id
    assert rows["attention_mask"][0][0] == 0
    assert tokenizer("hello there", truncation=True, max_length=3)["input_ids"] == tokenizer.encode("hello there")[:3]
    with pytest.raises(NotSupportedError, match="no pair of texts"):
        tokenizer.encode_pair("one", "two")
    with pytest.raises(NotSupportedError, match="where their tokens are"):
        tokenizer("one", return_offsets_mapping=True)


def test_a_conversation_with_tools_is_that_of_mistral_common(tokenizer: Any) -> None:
    from mistral_common.protocol.instruct.request import ChatCompletionRequest

    calls = [{"id": "call_123456789", "type": "function", "function": {"name": "wind", "arguments": '{"turns": 2}'}}]
    messages: list[Any] = [
        {"role": "system", "content": "You are a clock."},
        {"role": "user", "content": [{"type": "text", "text": "Wind it."}]},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_123456789", "content": "done"},
    ]
    short = json.loads(json.dumps(messages).replace("call_123456789", "123456789"))
    short[1]["content"] = "Wind it."
    request = ChatCompletionRequest.from_openai(short, tools=TOOLS)
    expected = tokenizer.chat.encode_chat_completion(request).tokens
    ids = tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True)
    assert ids == expected
    text = tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
    assert text.startswith("<s>")
    for part in ("[AVAILABLE_TOOLS]", '"turns"', "[INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "done"):
        assert part in text
    assert tokenizer.apply_chat_template([messages[:2], messages], tools=TOOLS)[1] == ids
    going_on = [messages[1], {"role": "assistant", "content": "Tick"}]
    assert tokenizer.apply_chat_template(going_on, tokenize=False, continue_final_message=True).endswith("Tick")


@pytest.mark.parametrize(
    ("messages", "options", "error", "message"),
    [
        ([], {}, InvalidRequestError, "the conversation is empty"),
        ([{"role": "cook", "content": "x"}], {}, InvalidRequestError, "refused the conversation"),
        ([{"role": "tool", "content": "x"}], {}, InvalidRequestError, "refused the conversation"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, NotSupportedError, "part of type 'image_url'"),
        ([{"role": "user", "content": "x"}], {"chat_template": "x"}, NotSupportedError, "chat_template is set"),
        ([{"role": "user", "content": "x"}], {"enable_thinking": True}, NotSupportedError, "enable_thinking is set"),
    ],
)
def test_conversations_that_can_not_be_encoded_are_refused(
    messages: list[Any], options: dict[str, Any], error: type[Exception], message: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(error, match=message):
        tokenizer.apply_chat_template(messages, **options)


@pytest.mark.slow
def test_chat_sends_the_ids_of_the_conversation(folder: Path, tokenizer: Any) -> None:
    with LLM(str(folder), tokenizer_mode="mistral", max_model_len=1024, **MISTRAL) as llm:
        messages = [{"role": "user", "content": "Hi"}]
        (output,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), tools=TOOLS)
        assert output.prompt_token_ids == tokenizer.apply_chat_template(messages, tools=TOOLS)
        assert output.prompt == tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False)
        said = output.outputs[0]
        assert said.text == tokenizer.decode(said.token_ids, skip_special_tokens=True) != ""
        with pytest.raises(NotSupportedError, match="chat_template is set"):
            llm.chat(messages, chat_template="{{ messages }}")


def test_text_and_grammars_with_tekken(folder: Path, tokenizer: Any) -> None:
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 60}
    choice = StructuredOutputsParams(choice=["naïve 東京 🙂", "café"])
    with plain.make_engine(folder) as engine:
        found = plain.run(
            engine,
            {
                "choice": ("x", SamplingParams(**greedy, structured_outputs=choice)),
                "regex": (
                    "x",
                    SamplingParams(**greedy, structured_outputs=StructuredOutputsParams(regex="[0-9]{3} é")),
                ),
                "text": ("the clock", SamplingParams(**greedy, ignore_eos=True)),
            },
        )
    assert found["choice"].outputs[0].text in choice.choice
    assert found["choice"].outputs[0].finish_reason == "stop"
    assert re.fullmatch("[0-9]{3} é", found["regex"].outputs[0].text)
    said = found["text"].outputs[0]
    assert said.text == tokenizer.decode(said.token_ids, skip_special_tokens=True) != ""
    assert found["text"].prompt_token_ids == tokenizer.encode("the clock")


def test_grammars_need_a_vocabulary_that_the_core_reads(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tekken.json"))
    params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["a"]))
    with plain.make_engine(tmp_path, skip_tokenizer_init=True) as engine:
        failed = plain.run(engine, {"a": ({"prompt_token_ids": [5]}, params)})["a"].outputs[0]
    assert (failed.finish_reason, "need a tokenizer.json or tekken.json" in str(failed.stop_reason)) == ("error", True)


def test_sentencepiece_encodes_decodes_and_streams(tmp_path: Path) -> None:
    pytest.importorskip("mistral_common")
    sentencepiece = pytest.importorskip("sentencepiece")
    from mainspring.engine.text.detokenizer import PieceStream, text_stream

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("The clock on the wall strikes twelve, and the spring is wound again.\n" * 50)
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=330,
        model_type="bpe",
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols="[INST] [/INST] [TOOL_CALLS]".split(),
    )
    (tmp_path / "spm.model").rename(tmp_path / "tokenizer.model.v3")
    found: Any = load_tokenizer(tmp_path)
    for text in ("the clock  strikes", "naïve 東京 🙂"):
        ids = found.encode(text)
        assert ids == found.chat.instruct_tokenizer.tokenizer.encode(text, bos=True, eos=False)
        assert found.decode(ids, skip_special_tokens=True) == text
        stream = text_stream(found, ids[:1])
        assert isinstance(stream, PieceStream)
        assert "".join(map(stream.push, ids[1:])) + stream.flush() == text
    assert found.decode(found.apply_chat_template([{"role": "user", "content": "the wall"}])).startswith("<s>[INST]")
    assert (found.bos_token_id, found.eos_token_id, found.pad_token) == (1, 2, None)


def test_folders_without_mistrals_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"holds no tekken\.json"):
        load_tokenizer(tmp_path, "mistral")
    with pytest.raises(ModelNotFoundError, match="holds no tokenizer"):
        load_tokenizer(tmp_path / "none")
    pytest.importorskip("mistral_common")
    (tmp_path / "tekken.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"tekken\.json can't be read"):
        load_tokenizer(tmp_path)


def test_a_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mistral_common.tokens.tokenizers.mistral", None)
    with pytest.raises(NotSupportedError, match=r"tekken\.json needs mistral-common: .*mainspring\[mistral\]"):
        load_tokenizer(folder)


def test_mistrals_tokenizer_needs_no_torch(folder: Path, tokenizer: Tokenizer) -> None:
    code = (
        "import sys, pathlib; from mainspring.engine.text.tokenizer import load_tokenizer; "
        f"load_tokenizer(pathlib.Path({str(folder)!r})).encode('x'); "
        "assert not {'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
