"""Models: a served model computes what transformers computes, and others are refused with a reason."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM
from transformers.masking_utils import (
    and_masks,
    causal_mask_function,
    chunked_overlay,
    sliding_window_causal_mask_function,
)

import references
import tiny
from mainspring.benchmarks.architectures import drive
from mainspring.core.model.learn import fuse_match
from mainspring.core.model.learn.fuse_match import LOGITS_TOLERANCE
from mainspring.core.model.learn.probe import window_of
from mainspring.core.model.learn.verify import Chunk, paged_logits
from mainspring.core.model.load import loader
from mainspring.core.model.load.loader import load_model, page, read_config
from mainspring.core.model.run import attention
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.ipc.errors import MainspringError, ModelNotFoundError, UnsupportedModelError
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from tiers import EACH_ARCHITECTURE

CPU = torch.device("cpu")
LENGTHS = (1, 40, 17, 70)
MAX_TOKENS = 20


def load(path: Path, max_model_len: int | None = None, **fields: Any) -> PagedModel:
    load_config = LoadConfig(load_format=fields.pop("load_format", "auto"))
    return load_model(ModelConfig(model=str(path), **fields), load_config, CPU, max_model_len)


def random_model(model_type: str, **fields: Any) -> Any:
    """A tiny model of a type that tiny.py does not have."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields), dtype=torch.float32).eval()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Models this small gain nothing from a second thread; on a busy machine two threads wait for each other (20 times
    slower)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy_of_llama(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "copy"))


# --- Exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", EACH_ARCHITECTURE)
def test_greedy_tokens_of_requests_sharing_steps_equal_generate(architecture: str, tmp_path: Path) -> None:
    path = tiny.make(architecture, tmp_path)
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(2, tiny.VOCAB_SIZE, (length,), generator=generator).tolist() for length in LENGTHS]
    tokens = drive(load(path), prompts, MAX_TOKENS)
    assert tokens == references.greedy(path, [(prompt, MAX_TOKENS) for prompt in prompts])
    assert len({token for text in tokens for token in text}) >= 10, "outputs too uniform to show an error"


def test_layers_are_learned_from_the_calls(tmp_path: Path) -> None:
    model = load(tiny.make("gemma2", tmp_path))
    assert [spec.window for spec in model.layers] == [24, None, 24, None]
    assert {spec.softcap for spec in model.layers} == {50.0}
    assert {(s.num_q_heads, s.num_kv_heads, s.key_dim, s.value_dim, s.scale) for s in model.layers} == {
        (4, 2, 16, 16, 0.25)
    }


def test_a_window_the_model_does_not_use_is_not_applied(tmp_path: Path) -> None:
    model = load(tiny.make("qwen2", tmp_path, sliding_window=24, use_sliding_window=False))
    assert [spec.window for spec in model.layers] == [None, None]


def test_layers_that_share_keys_and_values_name_their_source() -> None:
    model = page(
        random_model(
            "gemma3n_text",
            **{**SIZES, "num_hidden_layers": 4, "head_dim": 16, "vocab_size_per_layer_input": 64, "laurel_rank": 8},
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            sliding_window=16,
            layer_types=["sliding_attention", "full_attention"] * 2,
            activation_sparsity_pattern=None,
        )
    )
    assert model.sources == [0, 1, 0, 1]


def test_chosen_rows_and_embeddings_give_the_logits_of_the_whole(llama: Path) -> None:
    model = load(llama)
    ids = torch.arange(2, 18)
    whole = paged_logits(model, [ids], [[Chunk(0, 0, 16)]], ReferenceBackend())[0]
    calls: list[torch.Tensor] = []
    forward = model.forward

    def with_embeddings(
        input_ids: torch.Tensor, positions: torch.Tensor, steps: Any, sequences: Any, rows: torch.Tensor, *_: None
    ) -> Any:
        some = positions, steps, sequences, torch.tensor([15] * 8)
        calls.append(forward(input_ids, *some, inputs_embeds=model.embed(input_ids)))
        return forward(input_ids, positions, steps, sequences, rows)

    model.forward = with_embeddings  # type: ignore[method-assign]
    paged_logits(model, [ids], [[Chunk(0, 0, 16)]], ReferenceBackend())
    assert calls[0].shape == (8, tiny.VOCAB_SIZE)
    torch.testing.assert_close(calls[0][0], whole[15])


def test_a_parameter_that_a_function_replaces_stays_where_kernels_read_it(llama: Path) -> None:
    model = load(llama)
    norm = model.model.get_decoder().norm
    address, doubled = norm.weight.data_ptr(), 2 * norm.weight
    with model.unpacked():
        norm.weight.data = doubled.clone()
    assert norm.weight.data_ptr() == address
    assert torch.equal(norm.weight, doubled)


# --- Masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 24, 4095, 4096, 5000])
def test_the_window_is_read_off_the_mask(window: int) -> None:
    assert window_of(sliding_window_causal_mask_function(window), "it", 5000) == (window if window < 5000 else None)


def test_a_causal_mask_has_no_window() -> None:
    assert window_of(causal_mask_function, "it", 5000) is None


def test_chunks_are_refused_unless_one_chunk_holds_every_sequence() -> None:
    mask = and_masks(chunked_overlay(64, torch.zeros(1, dtype=torch.long)), causal_mask_function)
    assert window_of(mask, "it", 64) is None
    for longest in (65, 100, 128, 129, 1000):
        with pytest.raises(UnsupportedModelError, match=f"up to {longest} tokens"):
            window_of(mask, "it", longest)


@pytest.mark.parametrize(
    "visible",
    [
        lambda b, h, q, k: k == k,  # all keys, later ones too
        lambda b, h, q, k: (k <= q) & (k > 3),  # the first is masked
        lambda b, h, q, k: (k <= q) & ((q - k) % 7 != 5),  # holes
        lambda b, h, q, k: k < q,  # a token does not see itself
    ],
)
def test_other_masks_are_refused(visible: Callable[..., torch.Tensor]) -> None:
    with pytest.raises(UnsupportedModelError, match="neither causal nor a sliding window"):
        window_of(visible, "it", 1000)


# --- Refused --------------------------------------------------------------------------------------

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
BLOCK_INDEX = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "indexed_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("deepseek_v4", {}, "heavily_compressed_attention layers"),
        ("qwen4_exp_text", BLOCK_INDEX, "selects keys, but does not give the indices"),
        ("rwkv", {"attention_hidden_size": 32}, "recurrent state"),
        ("falcon", {"alibi": True, "max_position_embeddings": 512}, "more than the distance"),
        ("cpmant", {"dim_head": 16}, "weights go through masked_fill|scores are set to 0"),
        ("bert", {"is_decoder": False}, "not causal|neither causal"),
        ("t5", {"d_model": 32, "num_layers": 1}, "passes 'position_bias' to its cross attention"),
        ("bert-generation", {"is_decoder": False}, "not causal|neither causal"),
        ("clip", {}, "not a causal language model"),
    ],
)
def test_models_that_a_paged_cache_cannot_serve_are_refused(
    model_type: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    AutoConfig.for_model(model_type, **{**SIZES, **fields}).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path, load_format="dummy")


def test_a_quantized_checkpoint_is_refused(copy_of_llama: Path) -> None:
    edit_config(copy_of_llama, quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match="quantized"):
        load(copy_of_llama)


def test_a_cache_that_forgets_more_than_the_mask_is_refused() -> None:
    """Moshi has no window in its mask, but its cache keeps only a window, so its own output depends on how the prompt
    was cut."""
    fields = {**SIZES, "head_dim": 16, "ffn_dim": 64, "sliding_window": 20, "num_codebooks": 2}
    with pytest.raises(UnsupportedModelError, match="keeps the last 20 keys"):
        page(random_model("moshi", **fields))


@pytest.mark.parametrize("part", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_verification_catches_an_attention_that_computes_something_else(
    part: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.make("qwen3", tmp_path, dtype=dtype)
    load(path)
    run = attention.AttentionCalls.run

    def broken(
        self: attention.AttentionCalls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any
    ) -> torch.Tensor:
        given = {"query": query, "key": key, "value": value}
        given[part] = given[part].flip(1)  # heads in the wrong order
        return run(self, *given.values(), sinks)

    monkeypatch.setattr(attention.AttentionCalls, "run", broken)
    with pytest.raises(UnsupportedModelError, match="other logits with a paged cache than alone"):
        load(path)


def llama4(floor_scale: int) -> Any:
    """One of whose layers has no rotary embedding."""
    fields = {**SIZES, "head_dim": 16, "intermediate_size_mlp": 64, "num_local_experts": 2, "num_experts_per_tok": 1}
    more = {"attention_chunk_size": 32, "floor_scale": floor_scale, "attn_scale": 5.0, "no_rope_layers": [0, 1]}
    return random_model("llama4_text", **fields, **more)


@torch.inference_mode()
def test_attention_that_is_scaled_by_position_does_not_take_rows_for_positions() -> None:
    model, ids = llama4(32), torch.arange(2, 33)
    alone = model(ids[None]).logits[0]
    found = paged_logits(page(model, 32), [ids] * 3, [[Chunk(each, 0, 31) for each in range(3)]], ReferenceBackend())
    for logits in found:
        torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-5)
    with pytest.raises(UnsupportedModelError, match="set max_model_len"):
        page(llama4(16), 32)


def test_a_convolution_over_the_tokens_is_refused(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    mlp = model.model.layers[1].mlp
    mlp.conv = torch.nn.Conv1d(64, 64, 3, padding=2)
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + mlp.conv(x.transpose(1, 2))[..., :-2].transpose(1, 2)
    with pytest.raises(UnsupportedModelError, match="Conv1d"):
        page(model)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("large", [1, fuse_match.LARGE])
def test_where_half_precision_rounds_too_much_fp32_decides(
    large: int, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny.make(family, tmp_path, dtype=torch.bfloat16)
    monkeypatch.setitem(LOGITS_TOLERANCE, torch.bfloat16, 1e-6)
    monkeypatch.setattr(fuse_match, "LARGE", large)
    model = load(path)
    assert any(line.startswith("verified") and line.endswith("in float32") for line in model.explain())
    for name, stored in AutoModelForCausalLM.from_pretrained(path).state_dict().items():
        held = model.parameters.get(name)
        assert held.dtype == torch.bfloat16
        assert torch.equal(held, stored), name


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_model_whose_logits_are_not_finite_in_its_dtype_is_refused(dtype: str, copy_of_llama: Path) -> None:
    """As of models that were trained in bfloat16 and whose hidden states float16 does not hold."""
    factor = {"float16": 100.0, "float32": float("inf")}[dtype]

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        for part in ("gate", "up", "down"):
            tensors[f"model.layers.0.mlp.{part}_proj.weight"].mul_(factor)

    change_weights(copy_of_llama, enlarge)
    assert dtype == "float32" or load(copy_of_llama, dtype="float32").dtype == torch.float32
    with pytest.raises(UnsupportedModelError, match=f"gives logits in torch.{dtype} that are not finite"):
        load(copy_of_llama, dtype=dtype)


def test_verification_catches_a_layer_that_mixes_the_rows_of_requests(llama: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama)
    mlp = model.model.layers[1].mlp
    forward = mlp.forward

    def shifted(x: torch.Tensor) -> torch.Tensor:
        return forward(x) + 0.1 * x.roll(1, dims=1)  # like a convolution: reads the previous row

    mlp.forward = shifted
    with pytest.raises(UnsupportedModelError, match="passes information between tokens"):
        page(model)


# --- Rotary embeddings that depend on length ------------------------------------------------------

ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + i for i in range(8)],
        "original_max_position_embeddings": 64,
        "rope_theta": 10000.0,
    },
}


def rope_checkpoint(kind: str, folder: Path) -> Path:
    limits = {"dynamic": 64, "longrope": 256}  # the two define max_position_embeddings differently
    return tiny.make("llama", folder, rope_parameters=ROPE[kind], max_position_embeddings=limits[kind])


@pytest.mark.parametrize("kind", ROPE)
@pytest.mark.parametrize("max_model_len", [64, 200])
def test_a_longer_neighbour_changes_nothing(kind: str, max_model_len: int, tmp_path: Path) -> None:
    model = load(rope_checkpoint(kind, tmp_path), max_model_len)
    short, long = torch.arange(2, 12), torch.arange(2, 2 + max_model_len)
    backend = ReferenceBackend()
    alone = paged_logits(model, [short], [[Chunk(0, 0, 10)]], backend)[0]
    steps = [[Chunk(0, 0, 6), Chunk(1, 0, max_model_len)], [Chunk(0, 6, 10)]]
    beside = paged_logits(model, [short, long], steps, backend)[0]
    torch.testing.assert_close(beside, alone, rtol=0, atol=1e-5)


def test_verification_catches_frequencies_that_depend_on_the_positions_of_a_neighbour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "freeze_rope", lambda *_: [])
    with pytest.raises(UnsupportedModelError, match="passes information between tokens"):
        load(rope_checkpoint("longrope", tmp_path))


@pytest.mark.parametrize("kind", ROPE)
def test_frequencies_are_the_original_ones_up_to_the_original_length(kind: str, tmp_path: Path) -> None:
    path = rope_checkpoint(kind, tmp_path)
    prompts = [list(range(2, 32)), list(range(40, 45))]
    assert drive(load(path, 64), prompts, 20) == references.greedy(path, [(prompt, 20) for prompt in prompts])


@pytest.mark.parametrize("kind", ROPE)
def test_frequencies_are_those_of_the_longest_sequence_beyond_it(kind: str, tmp_path: Path) -> None:
    path = rope_checkpoint(kind, tmp_path)
    ids = torch.arange(2, 202) % tiny.VOCAB_SIZE
    with torch.inference_mode():
        expected = AutoModelForCausalLM.from_pretrained(path)(ids[None], use_cache=False).logits[0]
    logits = paged_logits(load(path, 200), [ids], [[Chunk(0, 0, 77)], [Chunk(0, 77, 200)]], ReferenceBackend())[0]
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)


def test_yarn_makes_the_longest_sequence_longer(llama: Path) -> None:
    """Whether the config names the length before it was extended or after."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    for named in (256, 1024):
        overrides = {"rope_scaling": yarn, "max_position_embeddings": named}
        assert load(llama, hf_overrides=overrides).max_position == 1024


# --- Loading --------------------------------------------------------------------------------------


def edit_config(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


def test_dummy_weights_need_only_a_config_and_follow_the_seed(llama: Path, tmp_path: Path) -> None:
    shutil.copy(llama / "config.json", tmp_path)
    one, same, other = (load(tmp_path, load_format="dummy", seed=seed) for seed in (7, 7, 8))
    ids = torch.arange(4)
    assert torch.equal(one.embed(ids), same.embed(ids))
    assert not torch.equal(one.embed(ids), other.embed(ids))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_dtype_is_the_one_asked_for(dtype: str, llama: Path) -> None:
    assert load(llama, dtype=dtype).dtype == getattr(torch, dtype)


def test_auto_dtype_is_the_checkpoint_s(tmp_path: Path) -> None:
    assert load(tiny.make("llama", tmp_path, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_facts_of_the_model(llama: Path) -> None:
    model = load(llama)
    assert (model.vocab_size, model.hidden_size, model.max_position) == (tiny.VOCAB_SIZE, 64, tiny.MAX_POSITION)
    assert model.eos_token_ids == (tiny.EOS,)
    assert any("verified" in line for line in model.explain())


def test_hf_overrides_replace_fields_of_the_config(llama: Path) -> None:
    assert load(llama, hf_overrides={"max_position_embeddings": 99}).max_position == 99
    assert load(llama, hf_overrides={"num_hidden_layers": 1}).layers == load(llama).layers[:1]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"rope_theta": 3e6}, {"rope_theta": 3e6, "rope_type": "default"}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        ),
        ({"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 3e6}, {"rope_theta": 7.0, "rope_type": "default"}),
    ],
)
def test_older_names_of_rotary_fields_override_those_in_rope_parameters(
    overrides: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    """The other fields of `rope_parameters` stay, such as its base."""
    path = tiny.make("llama", tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    wanted = ModelConfig(model=str(path), hf_overrides=overrides)
    assert read_config(wanted, LoadConfig()).rope_parameters == expected  # type: ignore[attr-defined]
    assert wanted.hf_config.rope_parameters == expected


def break_nothing(folder: Path) -> None:
    shutil.rmtree(folder)


def drop_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def garble_config(folder: Path) -> None:
    (folder / "config.json").write_text("{ not json")


def drop_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def lose_parameter(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.__delitem__("model.layers.1.mlp.up_proj.weight"))


def quantize_untold(folder: Path) -> None:
    def round_weights(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[f"{name}_scale"] = tensors[name].abs().amax() / 448
            tensors[name] = (tensors[name] / tensors[f"{name}_scale"]).to(torch.float8_e4m3fn)

    change_weights(folder, round_weights)


def pickle_instead(folder: Path, content: bytes) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)


def point_to_lfs(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 9\n")


@pytest.mark.parametrize(
    ("damage", "error", "words"),
    [
        (break_nothing, ModelNotFoundError, "there is no folder"),
        (drop_config, ModelNotFoundError, r"no config\.json"),
        (garble_config, ModelNotFoundError, r"config\.json of .* can't be read"),
        (drop_weights, ModelNotFoundError, "no weights"),
        (cut_weights, UnsupportedModelError, r"damaged: model\.safetensors: "),
        (point_to_lfs, UnsupportedModelError, r"model\.safetensors is a pointer of Git LFS"),
        (lambda folder: pickle_instead(folder, b""), UnsupportedModelError, r"damaged: pytorch_model\.bin: "),
        (
            lambda folder: pickle_instead(folder, b"version https://git-lfs"),
            UnsupportedModelError,
            "pointer of Git LFS",
        ),
        (lambda folder: pickle_instead(folder, b"\x80\x02"), UnsupportedModelError, r"damaged: pytorch_model\.bin: "),
        (quantize_untold, UnsupportedModelError, r"mlp\.down_proj\.weight_scale', so it is quantized"),
        (lose_parameter, UnsupportedModelError, r"lacks the parameter 'model\.layers\.1\.mlp\.up_proj\.weight'"),
        (lambda folder: edit_config(folder, model_type="no_such"), UnsupportedModelError, "does not know .*'no_such'"),
        (
            lambda folder: edit_config(folder, vocab_size=400),
            UnsupportedModelError,
            r"could not be loaded: 'lm_head\.weight' has shape \[384, 64\], and by its config it has \[400, 64\]",
        ),
    ],
)
def test_a_checkpoint_that_is_not_right_is_one_clear_sentence(
    damage: Callable[[Path], None], error: type[MainspringError], words: str, copy_of_llama: Path
) -> None:
    damage(copy_of_llama)
    with pytest.raises(error, match=words) as raised:
        load(copy_of_llama)
    assert "\n" not in str(raised.value)
    assert str(copy_of_llama) in str(raised.value)


def test_a_file_in_place_of_a_folder_is_named_as_one(llama: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"model\.safetensors' is a file; give the folder"):
        load(llama / "model.safetensors")


def test_an_unknown_hub_id_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="'no-such/model' is neither a folder here nor") as raised:
        load_model(ModelConfig(model="no-such/model"), LoadConfig(download_dir=str(tmp_path)), CPU)
    assert "\n" not in str(raised.value)


def test_safetensors_only_does_not_read_other_files(copy_of_llama: Path) -> None:
    torch.save(load_file(copy_of_llama / "model.safetensors"), copy_of_llama / "pytorch_model.bin")
    (copy_of_llama / "model.safetensors").unlink()
    assert load(copy_of_llama).dtype == torch.float32
    with pytest.raises(ModelNotFoundError, match="safetensors"):
        load(copy_of_llama, load_format="safetensors")


@pytest.mark.parametrize(
    ("owner", "error", "message"),
    [
        pytest.param(AutoModelForCausalLM, AttributeError, "^no such name$", id="a fault of ours"),
        pytest.param(LlamaForCausalLM, UnsupportedModelError, "by code of its own", id="a class with its own loading"),
    ],
)
def test_a_missing_attribute_is_the_fault_of_a_class_only_if_that_loads_weights_in_its_own_way(
    owner: Any, error: type[Exception], message: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise AttributeError("no such name")

    monkeypatch.setattr(owner, "from_pretrained", classmethod(broken))
    with pytest.raises(error, match=message):
        load(llama)
