"""Fusing by structure, the parameter map, and rows that do not depend on each other."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from mainspring.core.model.learn import fuse
from mainspring.core.model.learn.fuse import Fusion, fuse_model
from mainspring.core.model.learn.fuse_match import TOLERANCE, NotRecognisedError, compare, difference
from mainspring.core.model.learn.fuse_observe import stand_in
from mainspring.core.model.learn.row_invariant import (
    ELEMENTWISE,
    RowInvariant,
    is_row_invariant,
    isolate_rows,
    make_row_invariant,
    route_products,
    stray_products,
    turn_weights,
)
from mainspring.core.model.load.parameters import ParameterMap
from mainspring.core.model.run.fused import FusedMLP, FusedRMSNorm, JoinedProjections, ProjectionPart, join, linear_of
from mainspring.kernels.reference.reference_backend import ReferenceBackend

VOCAB = 128
DTYPES = [torch.float32, torch.bfloat16]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MOE = {"num_experts_per_tok": 2, "num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 48, "head_dim": 16}

# name → model type, config fields, and how many norms, gated MLPs and joined projections are fused in 2 layers
MODELS: dict[str, tuple[str, dict[str, Any], tuple[int, int, int]]] = {
    "llama": ("llama", {}, (5, 2, 2)),
    "llama_tied": ("llama", {"tie_word_embeddings": True}, (5, 2, 2)),
    "llama_biases": ("llama", {"attention_bias": True, "mlp_bias": True}, (5, 2, 2)),
    "mistral": ("mistral", {"sliding_window": 24}, (5, 2, 2)),
    "qwen2": ("qwen2", {}, (5, 2, 2)),
    "qwen3": ("qwen3", {"head_dim": 32}, (9, 2, 2)),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 16}, (9, 2, 2)),
    "gemma3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 16}, (13, 2, 2)),
    "phi3": ("phi3", {}, (5, 2, 0)),
    "olmo2": ("olmo2", {}, (9, 2, 2)),
    "granite": ("granite", {"logits_scaling": 2.0, "attention_multiplier": 0.2}, (5, 2, 2)),
    "starcoder2": ("starcoder2", {}, (0, 0, 2)),
    "gpt2": ("gpt2", {"n_inner": 96}, (0, 0, 0)),
    "gpt_neox": ("gpt_neox", {}, (0, 0, 0)),
    "mixtral": ("mixtral", MOE, (5, 0, 2)),
    "qwen3_moe": ("qwen3_moe", MOE, (9, 0, 2)),
}
OTHER_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt_oss": ("gpt_oss", {**MOE}),  # interleaved gate and up, biases, transposed
    "jetmoe": ("jetmoe", {**MOE, "kv_channels": 16}),  # experts without an interface in transformers
    "qwen2_moe": ("qwen2_moe", {**MOE, "shared_expert_intermediate_size": 96}),  # sigmoid in the code of the block
    # routers that are subclasses of nn.Linear and also choose the experts
    "phimoe": ("phimoe", MOE),
    "llama4": ("llama4_text", {**MOE, "intermediate_size_mlp": 96, "attention_chunk_size": 128}),
}


BACKEND = ReferenceBackend()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread, because these models are too small for more; tests of threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A tiny model with weights large enough that every part of it affects the logits."""
    model_type, fields = (MODELS[name][:2]) if name in MODELS else OTHER_MODELS[name]
    config = AutoConfig.for_model(model_type, **{**SIZES, **fields})
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 1.5 * parameter.shape[-1] ** -0.5)
        else:
            parameter.data.add_(torch.randn_like(parameter) * 0.1)
    built: PreTrainedModel = model.to(dtype).eval().requires_grad_(False)
    return built


def token_ids(count: int) -> torch.Tensor:
    return torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: torch.Tensor, first: int = 0) -> torch.Tensor:
    """``[rows, vocab]`` for tokens at positions from `first` on."""
    positions = torch.arange(first, first + len(ids))
    out: torch.Tensor = model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits[0]
    return out


def fused_places(report: Fusion, kind: str) -> list[str]:
    return [path for path, decision in report.decisions.items() if decision.kind == kind and decision.fused]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_expected_is_fused_and_logits_agree(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    before = logits_of(model, token_ids(24)).float()
    report = fuse_model(model, BACKEND)
    after = logits_of(model, token_ids(24)).float()
    counts = tuple(len(fused_places(report, kind)) for kind in ("rms_norm", "gated_mlp", "projections"))
    assert counts == MODELS[name][2]
    assert all(d.fused for d in report.decisions.values() if d.kind != fuse.STACK), report.lines()
    fused = [sum(isinstance(m, kind) for m in model.modules()) for kind in (FusedRMSNorm, FusedMLP, JoinedProjections)]
    assert tuple(fused) == counts
    if dtype == torch.float32:
        assert (after - before).abs().max() <= 1e-5 * before.std()
    else:  # a different order of rounding, in two layers
        assert (after - before).square().mean().sqrt() <= 0.05 * before.std()


def test_what_gives_more_than_rows_is_not_recognised() -> None:
    with pytest.raises(NotRecognisedError, match="returns a tuple"):
        compare(lambda x: (x, None), lambda x: x, torch.ones(4))


def test_a_module_that_differs_from_others_of_its_class_is_recognised_by_itself() -> None:
    model = build("llama")
    before = logits_of(model, token_ids(24))
    second: Any = model.get_submodule("model.layers.1")
    second.mlp.act_fn, second.input_layernorm.variance_epsilon = nn.GELU(), 0.05
    changed = logits_of(model, token_ids(24))
    report = fuse_model(model, BACKEND)
    options = {path: report.decisions[f"model.layers.{path}"].options for path in ("0.mlp", "1.mlp")}
    assert [each[-1] for each in options.values()] == ["silu", "gelu"]
    assert report.decisions["model.layers.1.input_layernorm"].options == [0.05, 0.0]
    assert report.decisions["model.layers.1.post_attention_layernorm"].options == [1e-6, 0.0]
    assert (logits_of(model, token_ids(24)) - changed).abs().max() <= 1e-5 * before.std()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*MODELS, *OTHER_MODELS])
def test_a_row_has_the_same_bits_whatever_other_rows_there_are(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    fuse_model(model, BACKEND)
    make_row_invariant(model)
    assert is_row_invariant(model)
    ids = token_ids(64)
    with stand_in(model):
        together = logits_of(model, ids)
        for start, end in ((0, 8), (8, 16), (40, 56), (24, 64)):
            assert torch.equal(logits_of(model, ids[start:end], first=start), together[start:end])


@pytest.mark.parametrize("name", MODELS)
def test_the_map_is_the_state_dict_and_setting_all_of_it_makes_another_model(name: str) -> None:
    model, other = build(name), build(name, seed=7)
    before, state = ({key: value.clone() for key, value in m.state_dict().items()} for m in (model, other))
    report = fuse_model(model, BACKEND)
    parameters = report.parameters
    assert list(parameters.names()) == list(before)
    for key, value in before.items():
        assert torch.equal(parameters.get(key), value), key
    fuse_model(other, BACKEND, decisions=report.decisions)
    assert not torch.equal(logits_of(model, token_ids(8)), logits_of(other, token_ids(8)))
    for key in parameters.names():
        parameters.set(key, state[key])
    assert torch.equal(logits_of(model, token_ids(8)), logits_of(other, token_ids(8)))


def test_a_parameter_of_the_wrong_shape_dtype_or_name_is_refused_with_a_sentence() -> None:
    parameters = fuse_model(build("llama"), BACKEND).parameters
    name = "model.layers.0.self_attn.k_proj.weight"
    with pytest.raises(ValueError, match=rf"'{name}' has shape \(32, 64\), but got \(64, 64\)"):
        parameters.set(name, torch.zeros(64, 64))
    with pytest.raises(ValueError, match="dtype"):
        parameters.set(name, torch.zeros(32, 64, dtype=torch.bfloat16))
    with pytest.raises(KeyError, match=r"no parameter 'lm_head\.bias'"):
        parameters.get("lm_head.bias")


def test_the_map_of_an_unfused_model_is_the_identity() -> None:
    model = build("llama")
    parameters = ParameterMap.of(model)
    assert list(parameters.names()) == list(model.state_dict())
    assert parameters.slot("lm_head.weight").tensor is model.lm_head.weight


def test_decisions_followed_at_a_restart_run_nothing_and_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = build("qwen3", torch.bfloat16), build("qwen3", torch.bfloat16)
    report = fuse_model(first, BACKEND)

    def never(*args: Any) -> None:
        raise AssertionError("nothing is to be run")

    for check in ("compare", "recognise_norm", "recognise_mlp", "shared_inputs", "recognise_stack"):
        monkeypatch.setattr(fuse, check, never)
    again = fuse_model(second, BACKEND, decisions=json.loads(json.dumps(report.decisions)))
    assert again.lines() == report.lines()
    assert json.dumps(again.decisions) == json.dumps(report.decisions)
    assert torch.equal(logits_of(first, token_ids(16)), logits_of(second, token_ids(16)))
    with pytest.raises(ValueError, match="does not fit the model"):
        fuse_model(build("gpt2"), BACKEND, decisions=report.decisions)


class PlusNorm(nn.Module):
    """Has the parameters of an RMSNorm and adds a small constant."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps).to(x.dtype) * self.weight + 1e-3


class ScaledInputNorm(PlusNorm):
    """Equals an RMSNorm while its weight is zero, but has another formula."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.float() * (1 + self.weight.float())
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("liar", [PlusNorm, ScaledInputNorm])
def test_a_module_that_only_looks_like_an_rms_norm_is_left_alone(liar: type[PlusNorm], dtype: torch.dtype) -> None:
    model = build("llama", dtype)
    weight = nn.Parameter(torch.zeros(64, dtype=dtype), requires_grad=False)
    model.model.norm = liar(weight)
    report = fuse_model(model, BACKEND)
    assert type(model.model.norm) is liar
    assert len(fused_places(report, "rms_norm")) == 4
    assert any("1 not fused, such as model.norm: computes something other" in line for line in report.lines())


class ClampedMLP(nn.Module):
    """A gated MLP with a clamp."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(64, 96), nn.Linear(64, 96)
        self.down_proj = nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x).clamp(max=7.0)) * self.up_proj(x))
        return down


def test_a_gated_mlp_with_a_clamp_only_has_its_projections_joined() -> None:
    model = build("llama")
    model.model.layers[1].mlp = ClampedMLP().eval().requires_grad_(False)
    before = logits_of(model, token_ids(16))
    report = fuse_model(model, BACKEND)
    assert not report.decisions["model.layers.1.mlp"].fused
    assert report.decisions["model.layers.1.mlp:gate_proj+up_proj"].fused
    assert (logits_of(model, token_ids(16)) - before).abs().max() <= 1e-5 * before.std()


class UpFirstMLP(nn.Module):
    """A gated MLP that defines its layers in another order than it runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up, self.gate = nn.Linear(96, 64), nn.Linear(64, 96), nn.Linear(64, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return down


def test_gate_and_up_are_told_apart_in_any_order() -> None:
    model = build("llama")
    model.model.layers[1].mlp = UpFirstMLP().eval().requires_grad_(False)
    report = fuse_model(model, BACKEND)
    assert report.decisions["model.layers.1.mlp"].options == ["gate", "up", "down", "silu"], report.lines()


class TwoInputs(nn.Module):
    """Two layers side by side, over two tensors; or over one that changes in between."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
        self.in_place = in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        first: torch.Tensor = self.a(x)
        second: torch.Tensor = self.b(x.add_(1.0) if self.in_place else x + 1.0)
        return first + second


@pytest.mark.parametrize("in_place", [False, True])
def test_layers_that_are_not_given_the_same_values_are_not_joined(in_place: bool) -> None:
    model = build("llama")
    model.model.layers[0].mlp = TwoInputs(in_place).eval().requires_grad_(False)
    report = fuse_model(model, BACKEND)
    assert fused_places(report, "projections") == [f"model.layers.{i}.self_attn:q_proj+k_proj+v_proj" for i in (0, 1)]


class OddLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_a_linear_layer_with_a_forward_of_its_own_is_left_out() -> None:
    model = build("llama")
    odd = OddLinear(64, 32, bias=False)
    model.model.layers[0].self_attn.k_proj = odd.eval().requires_grad_(False)
    before = logits_of(model, token_ids(16))
    report = fuse_model(model, BACKEND)
    assert report.decisions["model.layers.0.self_attn:q_proj+v_proj"].fused
    assert (logits_of(model, token_ids(16)) - before).abs().max() <= 1e-5 * before.std()


def test_shared_parameters_are_not_fused_and_stay_shared() -> None:
    model = build("llama")
    layers = model.model.layers
    layers[1].self_attn.k_proj.weight = layers[0].self_attn.k_proj.weight
    report = fuse_model(model, BACKEND)
    assert not fused_places(report, "projections")
    assert any("is also used elsewhere" in line for line in report.lines())
    assert layers[1].self_attn.k_proj.weight is layers[0].self_attn.k_proj.weight


def test_tied_embeddings_stay_tied() -> None:
    model = build("llama_tied")
    parameters = fuse_model(model, BACKEND).parameters
    parameters.set("lm_head.weight", torch.zeros(VOCAB, 64))
    assert not parameters.get("model.embed_tokens.weight").any()


def test_the_original_weights_do_not_stay_in_memory() -> None:
    model = build("llama")
    names = [f"model.layers.0.{n}_proj.weight" for n in ("self_attn.q", "self_attn.v", "mlp.gate", "mlp.up")]
    originals = [weakref.ref(model.get_parameter(name)) for name in names]
    report = fuse_model(model, BACKEND)
    gc.collect()
    assert report.decisions
    assert all(original() is None for original in originals)


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="eval mode"):
        fuse_model(build("llama").train(), BACKEND)


class TestJoin:
    def test_weights_in_a_row_are_not_copied(self, tmp_path: Path) -> None:
        torch.manual_seed(3)
        saved = {
            "a": torch.randn(6, 4),
            "b": torch.randn(2, 4),
            "c": torch.randn(3, 4).bfloat16(),
            "d": torch.randn(1, 4),
        }
        save_file(saved, tmp_path / "weights.safetensors")
        found = load_file(tmp_path / "weights.safetensors")
        starts = {name: tensor.data_ptr() for name, tensor in found.items()}
        a, b, c, d = (linear_of(found.pop(name), None) for name in "abcd")
        assert starts["a"] + 6 * 4 * 4 == starts["b"]
        whole, bias = join([a, b])
        assert bias is None
        assert (whole.data_ptr(), whole.shape) == (starts["a"], (8, 4))
        turned, _ = join([b, a])
        assert turned.data_ptr() not in starts.values()
        del a, b  # the memory stays
        gc.collect()
        assert torch.equal(whole, torch.cat([saved["a"], saved["b"]]))
        assert torch.equal(turned, torch.cat([saved["b"], saved["a"]]))
        for one in (c, d):
            assert join([one])[0].data_ptr() == one.weight.data_ptr()

    def test_memory_is_held_by_what_was_made_of_it(self) -> None:
        both = torch.arange(12.0).view(6, 2)
        seen = weakref.ref(both)
        whole, _ = join([linear_of(both[:2], None), linear_of(both[2:], None)])
        assert whole.data_ptr() == both.data_ptr()
        expected, address = both.clone(), whole.data_ptr()
        del both
        gc.collect()
        assert seen() is None
        others = [torch.full((6, 2), -1.0) for _ in range(1000)]
        assert address not in [one.data_ptr() for one in others]
        assert torch.equal(whole, expected)


class TestJoinedProjections:
    def make(self) -> tuple[JoinedProjections, list[ProjectionPart]]:
        torch.manual_seed(3)
        joined = JoinedProjections(torch.randn(12, 4), torch.randn(12), [6, 4, 2], BACKEND)
        return joined, [ProjectionPart(joined, i, True) for i in range(3)]

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 1, 0), (0, 0, 0)])
    @torch.inference_mode()
    def test_any_order_of_calls_gives_each_its_part(self, order: tuple[int, ...]) -> None:
        _, parts = self.make()
        x = torch.randn(1, 8, 4)
        for i in order:
            expected = nn.functional.linear(x, parts[i].weight, parts[i].bias)
            torch.testing.assert_close(parts[i](x), expected)

    @torch.inference_mode()
    def test_parts_are_never_given_for_another_tensor(self) -> None:
        _, parts = self.make()
        x, y = torch.randn(1, 8, 4), torch.randn(1, 8, 4)
        parts[0](x)
        torch.testing.assert_close(parts[1](y), nn.functional.linear(y, parts[1].weight, parts[1].bias))

    @torch.inference_mode()
    def test_nothing_is_kept_once_all_parts_are_taken(self) -> None:
        joined, parts = self.make()
        x = torch.randn(1, 8, 4)
        for part in parts:
            part(x)
        assert joined._handoff == [None]


class DroppingMLP(nn.Module):
    """Only a limited number of tokens of a pass get through, as with an expert capacity."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.arange(x.shape[-2]) < 12)[:, None]


def test_a_module_that_drops_tokens_is_reported() -> None:
    model = build("llama")
    model.model.layers[1].mlp = DroppingMLP()
    make_row_invariant(model)
    assert not is_row_invariant(model)


class OwnProducts(ReferenceBackend):
    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        out = (x.unsqueeze(-2) * weight).sum(-1)
        return out if bias is None else out + bias


@pytest.mark.parametrize(
    ("name", "stray"),
    [
        ("llama", set()),
        ("qwen3_moe", set()),
        ("gpt_oss", set()),
        ("gemma2", set()),
        ("phimoe", set()),
        ("llama4", {"Llama4TextExperts"}),
    ],
)
def test_products_that_do_not_go_through_the_backend_are_seen(name: str, stray: set[str]) -> None:
    model, backend = build(name), OwnProducts()
    before = logits_of(model, token_ids(24))
    assert stray_products(model) > stray
    fuse_model(model, backend)
    route_products(model.modules(), backend.linear)
    assert stray_products(model) == stray
    assert (logits_of(model, token_ids(24)) - before).abs().max() <= 1e-5 * before.std()


@pytest.mark.parametrize("name", ["gpt_neox", "gpt2"])
def test_on_a_cpu_layers_that_fusing_left_alone_are_computed_by_the_backend(name: str) -> None:
    """torch's own product may be many times slower: that of 16-bit numbers without instructions for them."""
    model, weights = build(name), set()
    shapes = {path: tensor.shape for path, tensor in model.named_parameters()}

    class Seen(ReferenceBackend):
        def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            assert weight.is_contiguous()
            weights.add(weight.data_ptr())
            return super().linear(x, weight, bias)

    before = logits_of(model, token_ids(24))
    turn_weights(model.modules())
    isolate_rows(model, Seen())
    weights.clear()
    after = logits_of(model, token_ids(24))
    layers = [module for module in model.modules() if isinstance(module, nn.Linear | Conv1D)]
    assert len(layers) > 8
    assert weights == {module.weight.data_ptr() for module in layers}
    assert {path: tensor.shape for path, tensor in model.named_parameters()} == shapes
    torch.testing.assert_close(after, before)


def test_on_a_cpu_experts_are_computed_by_the_backend() -> None:
    """torch's own product may have other bits with another number of rows."""
    model, shapes = build("qwen3_moe"), set()

    class Seen(ReferenceBackend):
        def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            assert weight.is_contiguous()
            shapes.add(weight.shape)
            return super().linear(x, weight, bias)

    before = logits_of(model, token_ids(24))
    isolate_rows(model, Seen())
    torch.testing.assert_close(logits_of(model, token_ids(24)), before)
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    assert experts
    assert shapes >= {parameter.shape[1:] for parameter in experts}


class Router(nn.Linear):
    def forward(self, input: torch.Tensor) -> Any:
        return super().forward(input).topk(2)


def test_a_subclass_of_a_linear_layer_keeps_its_own_forward_and_its_product_is_routed() -> None:
    model = build("llama")
    router = Router(64, 8)
    model.add_module("router", router)
    x = torch.randn(16, 64)
    expected = router(x)
    shapes: list[torch.Size] = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        shapes.append(weight.shape)
        return OwnProducts().linear(x, weight, bias)

    route_products(model.modules(), linear)
    found = router(x)
    assert shapes == [(8, 64)]
    assert torch.equal(found.indices, expected.indices)
    torch.testing.assert_close(found.values, expected.values)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_give_a_token_the_same_bits_alone_and_in_a_batch(name: str, dtype: torch.dtype) -> None:
    model = build(name, dtype)
    eager = build(name, dtype)
    lines = make_row_invariant(model)
    assert any("2 x " in line and "products over some of the rows" in line for line in lines)
    experts, own = (m.get_submodule("model.layers.0.mlp.experts") for m in (model, eager))
    eager.set_experts_implementation("eager")
    torch.manual_seed(5)
    x, scores = torch.randn(64, 64).to(dtype), torch.rand(64, 4).topk(2)
    weights = scores.values.to(dtype)
    with torch.inference_mode():
        together = experts(x, scores.indices, weights)
        assert difference(own(x, scores.indices, weights), together) <= TOLERANCE[dtype]
        for start in range(0, 64, 8):
            rows = slice(start, start + 8)
            assert torch.equal(experts(x[rows], scores.indices[rows], weights[rows]), together[rows])


def test_experts_are_not_clockwork_on_their_own_which_is_why_they_are_padded() -> None:
    model = build("mixtral")
    model.set_experts_implementation("eager")
    assert not is_row_invariant(model)
    make_row_invariant(model)
    assert is_row_invariant(model)


def test_experts_of_another_make_run_padded() -> None:
    model = build("jetmoe")
    before = logits_of(model, token_ids(24))
    lines = make_row_invariant(model)
    assert any("JetMoeParallelExperts runs row-invariant" in line for line in lines)
    assert (logits_of(model, token_ids(24)) - before).abs().max() <= 1e-5 * before.std()
    assert make_row_invariant(model) == []


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [30, 4100])
def test_elementwise_functions_do_not_depend_on_the_place_in_the_tensor(
    width: int, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(6)
    x = (torch.randn(104, width) * 3).to(dtype)
    for function in ELEMENTWISE:
        options = {"approximate": "tanh"} if function is nn.functional.gelu else {}
        with RowInvariant():
            together, alone = function(x, **options), function(x[40:48].clone(), **options)
        assert torch.equal(together[40:48], alone), function
        assert difference(function(x, **options), together) <= TOLERANCE[dtype], function


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_over_any_number_of_rows_give_each_row_the_same_bits(dtype: torch.dtype, threads: int) -> None:
    torch.set_num_threads(threads)
    torch.manual_seed(6)
    x, weight, stack = (torch.randn(*shape).to(dtype) for shape in ((24, 96), (40, 96), (3, 96, 40)))
    products: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "linear": lambda rows: nn.functional.linear(rows, weight),
        "matmul": lambda rows: rows @ weight.T,
        "addmm": lambda rows: torch.addmm(weight[0, :40], rows, weight.T),
        "bmm": lambda rows: torch.bmm(rows.expand(3, -1, -1), stack).transpose(0, 1),
    }
    with RowInvariant():
        for name, product in products.items():
            together = product(x)
            for rows in range(1, 24):
                assert torch.equal(product(x[:rows]), together[:rows]), (name, rows)
