"""The decoder stack: the models it recognises, the equality of its results with theirs, and the models it must not
change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import tiny
from mainspring.core.model.learn.fuse import ROUTER, STACK, Fusion, fuse_model
from mainspring.core.model.learn.fuse_observe import stand_in
from mainspring.core.model.run.stack import StackedDecoder, StackOptions
from mainspring.kernels.decoder_contract import DecoderLayer, GatedMLP
from mainspring.kernels.reference.reference_backend import ReferenceBackend

BACKEND = ReferenceBackend()
DTYPES = [torch.float32, torch.bfloat16]
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 48}
ALTERNATING = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}

TAKEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 24}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", ALTERNATING),
    "gemma3": ("gemma3_text", ALTERNATING),
    "phi3": ("phi3", {}),
    "phi3_partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"residual_multiplier": 0.5, "embedding_multiplier": 6.0, "attention_multiplier": 0.2}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}),
    "glm": ("glm", {"head_dim": 16}),
    "glm4": ("glm4", {"head_dim": 16}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 16}),
    "glm4_moe": (
        "glm4_moe",
        {
            **EXPERTS,
            "head_dim": 16,
            "n_routed_experts": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "gpt_oss": ("gpt_oss", {**EXPERTS, "head_dim": 16}),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {"hunyuan_v1_dense": ("hunyuan_v1_dense", {"head_dim": 16})}
LEFT = {
    "gpt2": "GPT2Model has 0 norms besides its layers",
    "gpt_neox": "GPTNeoXModel has 0 norms besides its layers",
    "cohere": "CohereModel has 0 norms besides its layers",
    "hunyuan_v1_dense": "its query differs",  # its head norms come after the rotary embedding
    "deepseek_v3": "its attention calls q_a_proj",
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    model_type, fields = {**TAKEN, **OTHERS}.get(name, (name, {}))
    config = AutoConfig.for_model(model_type, **{**SIZES, **fields, **more})
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    tiny.widen(model.requires_grad_(False))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_(0, 0.3)
    built: PreTrainedModel = model.to(dtype).eval()
    return built


def fuse(model: PreTrainedModel) -> tuple[Fusion, list[DecoderLayer]]:
    """→ the report, and the layers of the stack if there is one."""
    report = fuse_model(model, BACKEND)
    stacked = getattr(vars(model.base_model).get("forward"), "__self__", None)
    assert isinstance(stacked, StackedDecoder) == report.decisions[STACK].fused
    return report, stacked.layers if isinstance(stacked, StackedDecoder) else []


@torch.inference_mode()
def logits_of(model: PreTrainedModel, **inputs: Any) -> torch.Tensor:
    """Logits of 24 tokens at positions up to the model's limit; each token attends only to itself."""
    inputs = inputs or {"input_ids": torch.arange(24)[None]}
    positions = torch.linspace(0, SIZES["max_position_embeddings"] - 1, 24).long()[None]
    with stand_in(model):
        out: torch.Tensor = model(**inputs, position_ids=positions, use_cache=False).logits[0].float()
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_logits_are_those_of_the_model_s_own_code(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    before = logits_of(model)
    report, layers = fuse(model)
    assert len(layers) == 4, report.lines()
    assert "decoder_stack: 1 fused (4 layers)" in report.lines()
    difference = (logits_of(model) - before).abs().amax(-1) / before.std()
    assert difference.max() <= 1e-4 if dtype == torch.float32 else difference.median() <= 0.1


def test_a_router_that_is_kept_in_fp32_is_left_alone() -> None:
    model = build("flint", torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            parameter.data = parameter.data.float()
    report, _ = fuse(model)
    reasons = {decision.reason for decision in report.decisions.values() if decision.kind == ROUTER}
    assert reasons == {"is in torch.float32, where rows are in torch.bfloat16"}


@pytest.mark.parametrize(("name", "reason"), LEFT.items())
def test_other_models_keep_their_own_code(name: str, reason: str) -> None:
    model = build(name)
    before = logits_of(model)
    report, _ = fuse(model)
    assert reason in report.decisions[STACK].reason
    torch.testing.assert_close(logits_of(model), before, rtol=0, atol=1e-4 * float(before.std()))


# --- What is recognised ---------------------------------------------------------------------------


def test_layers_hold_the_parameters_themselves() -> None:
    model = build("qwen3")
    report, layers = fuse(model)
    held = {id(p) for p in model.parameters()}
    for layer in layers:
        assert isinstance(layer.mlp, GatedMLP)
        assert {id(layer.mixer.qkv.weight), id(layer.output.weight), id(layer.mlp.gate_up.weight)} <= held
        assert layer.mixer.sizes == [128, 64, 64]
    before = logits_of(model)
    for parameter in report.parameters.names():
        report.parameters.set(parameter, report.parameters.get(parameter) * 0.5)
    assert not torch.allclose(logits_of(model), before, atol=0.1)
    taken = logits_of(model)
    del model.base_model.forward
    torch.testing.assert_close(taken, logits_of(model))


@pytest.mark.parametrize(
    ("name", "rotary", "interleaved"),
    [
        ("llama", [0, 0, 0, 0], False),
        ("gemma3", [0, 1, 0, 1], False),  # layers with a window have another base frequency
        ("smollm3", [0, 0, 0, None], False),
        ("glm", [0, 0, 0, 0], True),
    ],
)
def test_the_kind_of_rotary_embedding(name: str, rotary: list[int | None], interleaved: bool) -> None:
    _, layers = fuse(build(name))
    assert [layer.mixer.rotary for layer in layers] == rotary
    assert layers[0].mixer.interleaved is interleaved


def test_sinks_multipliers_and_experts() -> None:
    layers = {name: fuse(build(name))[1][0] for name in ("gpt_oss", "granite")}
    assert layers["gpt_oss"].mixer.sinks is not None
    assert isinstance(layers["gpt_oss"].mlp, nn.Module)
    assert (layers["granite"].mixer.sinks, layers["granite"].multiplier) == (None, 0.5)


def test_decisions_are_plain_and_enough() -> None:
    report, _ = fuse(build("gemma3"))
    model = build("gemma3")
    again = fuse_model(model, BACKEND, decisions=json.loads(json.dumps(report.decisions)))
    assert StackOptions.of(again.decisions[STACK].options) == StackOptions.of(report.decisions[STACK].options)
    other = build("gemma3")
    fuse(other)
    assert torch.equal(logits_of(model), logits_of(other))


def test_embeddings_take_the_place_of_ids_and_are_not_overwritten() -> None:
    model = build("granite")
    fuse(model)
    ids = torch.arange(24)[None]
    embeds = model.get_input_embeddings()(ids)
    copy = embeds.clone()
    assert torch.equal(logits_of(model, inputs_embeds=embeds), logits_of(model, input_ids=ids))
    assert torch.equal(embeds, copy)


DEEPSTACK = {"deepstack_visual_embeds": [torch.ones(24, 64)]}


@pytest.mark.parametrize(
    "extra",
    [
        DEEPSTACK,
        {"attention_mask": torch.ones(1, 1, 24, 24)},
        {"attention_mask": {"full_attention": torch.ones(1, 1, 24, 24), "sliding_attention": None}},
        {"use_cache": True},
        {"output_hidden_states": False},
    ],
    ids=lambda extra: next(iter(extra)),
)
def test_an_argument_that_the_stack_does_not_know_is_refused_by_its_name(extra: dict[str, Any]) -> None:
    model = build("llama")
    fuse(model)
    ids, positions = torch.arange(24)[None], torch.arange(24)[None]
    with stand_in(model), pytest.raises(TypeError, match=f"LlamaModel .* takes no {next(iter(extra))}"):
        model.base_model(input_ids=ids, position_ids=positions, **extra)


def test_arguments_that_change_nothing_are_taken() -> None:
    model = build("llama")
    fuse(model)
    ids = torch.arange(24)[None]
    masks = {"full_attention": None, "sliding_attention": None}
    assert torch.equal(
        logits_of(model, input_ids=ids, attention_mask=masks, return_dict=True, deepstack_visual_embeds=None),
        logits_of(model, input_ids=ids),
    )


def test_a_second_argument_without_its_name_is_refused() -> None:
    model = build("llama")
    fuse(model)
    with stand_in(model), pytest.raises(TypeError, match="positional argument"):
        model.base_model.forward(torch.arange(24)[None], torch.ones(1, 24))


# --- What only looks alike ------------------------------------------------------------------------


def clamp_queries(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def clamped(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return forward(hidden_states.clamp(-1e4, 1e4), **kwargs)

    attention.forward = clamped


def add_at_far_positions(model: Any) -> None:
    attention = model.model.layers[1].self_attn
    forward = attention.forward

    def shifted(hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        return forward(hidden_states * (1 + (kwargs["position_ids"] > 400)[..., None]), **kwargs)

    attention.forward = shifted


def scale_by_a_parameter(model: Any) -> None:
    layer = model.model.layers[1]
    layer.scale = nn.Parameter(torch.ones(1), requires_grad=False)
    forward = layer.forward
    layer.forward = lambda hidden_states, **kwargs: forward(hidden_states, **kwargs) * layer.scale


def negate_between_layers(model: Any) -> None:
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda hidden_states, **kwargs: -forward(hidden_states, **kwargs)


def change_embeddings(model: Any) -> None:
    forward = model.model.forward

    def changed(input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return forward(inputs_embeds=model.model.embed_tokens(input_ids) * 1.1, **kwargs)

    model.model.forward = changed


def reverse_after_layers(model: Any) -> None:
    forward = model.model.forward

    def reversed_(**kwargs: Any) -> Any:
        out = forward(**kwargs)
        out.last_hidden_state = -out.last_hidden_state
        return out

    model.model.forward = reversed_


def pass_an_argument(model: Any) -> None:
    forward = model.forward
    model.forward = lambda **kwargs: forward(**kwargs, **DEEPSTACK)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (clamp_queries, "limits values"),
        (add_at_far_positions, "its query differs"),
        (scale_by_a_parameter, "has scale besides its modules"),
        (negate_between_layers, "its output differs"),
        (change_embeddings, "changes its embeddings"),
        (reverse_after_layers, "logits differ"),
        (pass_an_argument, "takes no deepstack_visual_embeds"),
    ],
)
def test_a_layer_that_does_something_else_is_found(change: Callable[[Any], None], reason: str) -> None:
    model = build("llama")
    change(model)
    report, layers = fuse(model)
    assert not layers
    assert reason in report.decisions[STACK].reason


def test_a_multiplier_that_no_attribute_tells_is_not_guessed() -> None:
    model = build("granite")
    for layer in model.model.layers:
        layer.residual_multiplier = torch.tensor(0.3)
    assert "its output differs" in fuse(model)[0].decisions[STACK].reason


def test_norms_have_their_weights_again_and_ones_hide_nothing() -> None:
    model = build("hunyuan_v1_dense")
    for layer in model.model.layers:
        layer.self_attn.query_layernorm.weight.fill_(1.0)
        layer.self_attn.key_layernorm.weight.fill_(1.0)
    assert "its query differs" in fuse(model)[0].decisions[STACK].reason
    assert torch.equal(model.model.layers[0].self_attn.query_layernorm.weight, torch.ones(16))
