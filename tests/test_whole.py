"""Models that run as one native call: which they are, and that they compute the same as their own code, in any step,
with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import tiny
from mainspring.core.model.learn.verify import Chunk, paged_logits, schedule
from mainspring.core.model.learn.whole_match import make_whole
from mainspring.core.model.load.loader import page
from mainspring.core.model.run import ragged_scans
from mainspring.core.model.run import whole_model as whole
from mainspring.core.model.run.attention import attention_set
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.ipc.errors import UnsupportedModelError
from mainspring.kernels.contract import ROW_MULTIPLE, Backend, SlopeBias
from mainspring.kernels.native.decoder import PHASES, NativeDecoder
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from native_here import why_not
from test_stack import EXPERTS, SIZES, TAKEN, build
from tiers import fast_only

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

DELTA = {
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 12,
    "mlp_only_layers": [0, 1, 2, 3],
    "num_experts": 0,
}
# name → what test_stack.py builds, and fields in which it differs
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in TAKEN},
    "tied": ("llama", {"tie_word_embeddings": True}),
    "many_experts": (
        "qwen3_moe",
        {"num_experts": 24, "num_local_experts": 24, "num_experts_per_tok": 5, "norm_topk_prob": True},
    ),
    "shared_expert": ("qwen2_moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "norm_topk_prob": False}),
    "qwen3_next_experts": ("qwen3_next", {**DELTA, **EXPERTS, "mlp_only_layers": [0, 2]}),
    "all_experts": ("mixtral", {"num_experts_per_tok": 4}),  # no rounding lets a router choose others
    "ungated_experts": ("mixtral", {"num_experts_per_tok": 4, "intermediate_size": 88}),
    "ungated": ("llama_biases", {"intermediate_size": 90}),  # gate and up don't share panels
    "scaled": ("granite", {"logits_scaling": 3.0, "tie_word_embeddings": True}),
    "hardly_scaled": ("granite", {"logits_scaling": 1.05}),
    "capped": ("gemma2", {"final_logit_softcapping": 3.0}),
    "scaled_rows": ("gemma3", {"hidden_size": 80}),  # scaled by a number that half precision rounds
    "qwen3_next": ("qwen3_next", DELTA),
    "qwen3_next_first": ("qwen3_next", {**DELTA, "layer_types": ["full_attention", *["linear_attention"] * 3]}),
    "qwen3_5": ("qwen3_5_text", DELTA),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "hidden_size": 64}),
}
# A norm makes a long query of a short one, and of its rounding, or a router chooses another expert: in half precision
# some tokens are far off in a correct computation, too.
SCATTERED = ("qwen3_next", "qwen3_next_first", "qwen3_5", "shared_expert", "qwen3_next_experts")
FAST_MODELS = ("llama", "gemma2", "granite", "many_experts", "ungated")  # models of the fast tier
LENGTHS = (37, 26)  # both longer than the windows
SEQUENCES = [
    torch.randint(2, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(length))
    for length in LENGTHS
]
IN_TURNS = schedule(list(LENGTHS))


@pytest.fixture(scope="module")
def native() -> NativeBackend:
    return NativeBackend()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def build_one(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    base, fields = MODELS[name]
    return build(base, dtype, **{**fields, **more})


def made(
    backend: Backend, name: str, dtype: torch.dtype = torch.float32, bits: int | None = None, **more: Any
) -> PagedModel:
    """A model that runs as one native call."""
    model = page(build_one(name, dtype, **more), backend=backend)
    make_whole(model, backend, bits)
    assert model.whole is not None, model.notes[-1]
    return model


def logits_of(model: PagedModel, backend: Backend, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.cat(paged_logits(model, SEQUENCES, IN_TURNS, backend, dtype)).float()


@torch.inference_mode()
def own_logits(model: PreTrainedModel) -> torch.Tensor:
    """Logits from the model's own code."""
    with attention_set(model, "eager"):
        return torch.cat([model(input_ids=ids[None], use_cache=False).logits[0] for ids in SEQUENCES]).float()


def error_of(got: torch.Tensor, want: torch.Tensor) -> float:
    """Error in standard deviations."""
    return float((got - want).square().mean().sqrt() / want.std())


def typical_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The median over tokens of the error in standard deviations."""
    return float((got - want).square().mean(1).sqrt().median() / want.std())


# ------------------------------------------------------------------ which, and what they compute


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_models_of_known_layers_run_as_a_whole(native: NativeBackend, architecture: str) -> None:
    model_type, fields = tiny.ARCHITECTURES[architecture]
    model = page(build(model_type, **fields), backend=native)
    make_whole(model, native)
    if architecture in ("gpt2", "gpt_neox", "opt", "starcoder2"):
        note = "layer by layer: its layers are of no form that is known"
    else:
        note = "as a whole: logits within "
    assert model.explain()[-1].startswith(note)
    assert (model.whole is None) == note.startswith("layer by layer")
    assert model.row_multiple == (1 if model.whole else ROW_MULTIPLE)


@pytest.mark.parametrize("name", fast_only(FAST_MODELS, MODELS))
def test_logits_are_the_model_s_own(native: NativeBackend, name: str) -> None:
    exact = build_one(name).double()
    exact.set_experts_implementation("eager")  # others take no float64
    own = own_logits(exact)
    got = logits_of(made(native, name), native)
    assert (got - own).abs().max() <= 1e-4 * own.std()


@pytest.mark.parametrize("tied", [False, True])
def test_multipliers_may_be_integers(native: NativeBackend, tied: bool) -> None:
    fields = {"embedding_multiplier": 6, "logits_scaling": 3, "tie_word_embeddings": tied}
    own = own_logits(build_one("scaled", **fields))
    got = logits_of(made(native, "scaled", **fields), native)
    assert (got - own).abs().max() <= 1e-4 * own.std()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *(pytest.param(name, torch.bfloat16, marks=() if name in FAST_MODELS else pytest.mark.slow) for name in MODELS),
        *((name, torch.float16) for name in ("ungated", "scaled_rows")),
    ],
    ids=str,
)
def test_in_half_precision_they_are_as_near_to_the_exact_ones(
    native: NativeBackend, name: str, dtype: torch.dtype
) -> None:
    exact = own_logits(build_one(name, dtype).float())
    got, own = logits_of(made(native, name, dtype), native), own_logits(build_one(name, dtype))
    error = typical_error if name in SCATTERED else error_of
    assert error(got, exact) <= error(own, exact)


@pytest.mark.parametrize(
    ("name", "scale", "cap"),
    [("llama", 1.0, None), ("scaled", 1 / 3, None), ("hardly_scaled", 1 / 1.05, None), ("capped", 1.0, 3.0)],
)
def test_rounding_does_not_hide_what_is_done_to_logits(
    native: NativeBackend, name: str, scale: float, cap: float | None
) -> None:
    model = made(native, name, torch.bfloat16)
    assert model.whole is not None
    head = model.whole.head
    assert head.scale == pytest.approx(scale, rel=1e-3)
    assert head.cap == cap


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks(native: NativeBackend, dtype: torch.dtype) -> None:
    """Among known models only mixtures of experts have sinks."""
    model = page(build_one("llama", dtype), backend=native)
    assert model.stack is not None
    without = logits_of(model, native)
    sinks = torch.randn(len(model.stack.layers), 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    model.stack.layers = [
        layer._replace(mixer=layer.mixer._replace(sinks=own))
        for layer, own in zip(model.stack.layers, sinks, strict=True)
    ]
    model.verified = None  # it was another model
    before = logits_of(model, native)
    make_whole(model, native)
    assert model.whole is not None
    assert error_of(without, before) > 0.1
    assert error_of(logits_of(model, native), before) < (1e-5 if dtype == torch.float32 else 0.05)


def test_a_cache_of_8_bits(native: NativeBackend) -> None:
    model = page(build_one("gemma2", torch.bfloat16), backend=native)
    before, wide = logits_of(model, native, torch.float8_e4m3fn), logits_of(model, native)
    make_whole(model, native)
    got = logits_of(model, native, torch.float8_e4m3fn)
    assert error_of(got, before) < error_of(wide, before)


def test_attention_with_a_bias_is_run_as_a_whole(native: NativeBackend) -> None:
    model = page(build_one("llama"), backend=native)
    without = logits_of(model, native)
    model.layers[1] = model.layers[1]._replace(bias=SlopeBias((0.5, 0.25, 0.125, 0.0625)))
    model.verified = None  # that was without the bias
    before = logits_of(model, native)
    make_whole(model, native)
    assert model.whole is not None
    assert error_of(without, before) > 0.1
    assert error_of(logits_of(model, native), before) < 1e-5


def test_attention_that_the_backend_refuses_is_not_run_as_a_whole(
    native: NativeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = page(build_one("llama"), backend=native)
    monkeypatch.setattr(native, "refuses", lambda *_: "heads of another size")
    make_whole(model, native)
    assert model.whole is None
    assert model.notes[-1].startswith("layer by layer: attention with heads of another size")
    with pytest.raises(UnsupportedModelError, match="can't be quantized: attention with heads of another size"):
        make_whole(model, native, 8)


# ------------------------------------------------------------------ steps


@pytest.mark.parametrize(
    ("name", "dtype", "bits"),
    [
        ("llama_biases", torch.bfloat16, None),
        ("ungated", torch.float32, None),
        ("olmo2", torch.bfloat16, None),
        ("gemma3", torch.float32, None),
        ("tied", torch.float16, None),
        ("ungated", torch.bfloat16, 8),
        ("qwen3", torch.float32, 4),
        ("qwen3_next", torch.bfloat16, None),
        ("qwen3_next_first", torch.float32, None),
        ("qwen3_5", torch.bfloat16, 8),
        ("mamba2", torch.bfloat16, None),
    ],
)
def test_a_row_has_the_same_bits_in_any_step(
    native: NativeBackend, name: str, dtype: torch.dtype, bits: int | None
) -> None:
    model = made(native, name, dtype, bits)
    ids, other = SEQUENCES
    want = paged_logits(model, [ids], [[Chunk(0, 0, len(ids))]], native)[0]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        assert torch.equal(paged_logits(model, [ids, other], IN_TURNS, native)[0], want)
        for size in (1, 2, 7, 8, 9, 33):
            steps = [[Chunk(0, at, min(at + size, len(ids)))] for at in range(0, len(ids), size)]
            assert torch.equal(paged_logits(model, [ids], steps, native)[0], want), (size, threads)


def first_call(model: PagedModel, backend: Backend) -> tuple[Any, Any, Any, Any, Any]:
    """Inputs of a forward of all of `SEQUENCES`, for reuse: ids, positions, attention, sequences, wanted rows."""
    calls = []
    forward = model.forward

    def noted(*given: Any) -> torch.Tensor:
        calls.append(given)
        return forward(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "forward", noted)
        paged_logits(model, SEQUENCES, [[Chunk(i, 0, length) for i, length in enumerate(LENGTHS)]], backend)
    ids, positions, attention, sequences, wanted, *_ = calls[0]
    return ids, positions, attention, sequences, wanted


def test_rows_are_not_padded(native: NativeBackend) -> None:
    counts = []
    for model in (page(build_one("llama"), backend=native), made(native, "llama")):
        ids, positions, attention, sequences, wanted = first_call(model, native)
        counts.append([len(ids), positions.shape[1], len(attention[0].blocks), len(wanted)])
        assert sequences.cu_seqlens.tolist() == [0, *accumulate(LENGTHS)]
    assert counts == [[64] * 4, [63] * 4]


@pytest.mark.parametrize(("threads", "bits"), [(1, None), (2, 8), (2, 4)])
@pytest.mark.parametrize("name", fast_only(FAST_MODELS, sorted(MODELS)))
def test_any_rows_have_logits_in_any_order(native: NativeBackend, name: str, threads: int, bits: int | None) -> None:
    """If only few rows need logits, the last layer skips the others."""
    torch.set_num_threads(threads)
    model = made(native, name, bits=bits)
    *inputs, every_row = first_call(model, native)
    want = model.forward(*inputs, every_row)
    for wanted in ([], [0], [62], [5, 4, 40], [*range(62, -1, -1)], [7] * 70):
        rows = torch.tensor(wanted, dtype=torch.int64)
        assert torch.equal(model.forward(*inputs, rows), want[rows]), wanted


@pytest.mark.parametrize("name", ["llama", "many_experts"])
def test_a_row_of_no_numbers_changes_no_other_sequence(native: NativeBackend, name: str) -> None:
    model = made(native, name)
    ids, *inputs = first_call(model, native)
    embeddings = model.embed(ids).clone()
    want = model.forward(ids, *inputs, embeddings.clone())
    embeddings[-1] = torch.nan
    got = model.forward(ids, *inputs, embeddings)
    assert got[-1].isnan().all()
    assert torch.equal(got[: LENGTHS[0]], want[: LENGTHS[0]])


@pytest.mark.parametrize("name", ["llama", "tied", "scaled", "gemma2", "scaled_rows"])
def test_embeddings_take_the_place_of_ids(native: NativeBackend, name: str) -> None:
    before = page(build_one(name), backend=native)
    model = made(native, name)
    ids, *inputs = first_call(model, native)
    assert torch.equal(model.embed(ids), before.embed(ids))
    got = model.forward(torch.zeros_like(ids), *inputs, model.embed(ids))
    assert torch.equal(got, model.forward(ids, *inputs))


def test_angles_are_made_as_far_as_positions_go(native: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    want = logits_of(made(native, "gemma3"), native)
    monkeypatch.setattr(whole, "FIRST_POSITIONS", 4)
    model = made(native, "gemma3")
    assert torch.equal(logits_of(model, native), want)
    assert model.whole is not None
    assert [len(table) for table in model.whole._angles] == [64, 64]


def test_the_time_of_every_phase_is_known(native: NativeBackend) -> None:
    model = made(native, "llama")
    assert model.whole is not None
    assert isinstance(model.whole.decoder, NativeDecoder)
    before = model.whole.decoder.seconds()
    logits_of(model, native)
    after = model.whole.decoder.seconds()
    assert [*after] == PHASES
    others = ("choice", "mixer", "experts")  # of `repeat` and of other models
    assert all(after[phase] > before[phase] for phase in PHASES if phase not in others)


# ------------------------------------------------------------------ parameters


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama_biases", torch.bfloat16),
        ("ungated", torch.float32),
        ("scaled", torch.float16),
        ("phi3", torch.float32),
        ("many_experts", torch.bfloat16),
        ("ungated_experts", torch.float32),
        ("shared_expert", torch.bfloat16),
        ("glm4_moe", torch.bfloat16),
        ("gpt_oss", torch.float32),
        ("qwen3_next", torch.bfloat16),
        ("mamba2", torch.float32),
    ],
    ids=str,
)
def test_parameters_are_read_and_written_by_their_names(native: NativeBackend, name: str, dtype: torch.dtype) -> None:
    other_model = build_one(name, dtype)
    torch.manual_seed(1)
    tiny.widen(other_model)
    for key, buffer in other_model.named_buffers():
        if key.endswith("correction_bias"):
            buffer.neg_()
    values = {key: value.clone() for key, value in other_model.state_dict().items()}
    other = page(other_model, backend=native)
    make_whole(other, native)
    assert list(other.parameters.names()) == list(values)
    for key, value in values.items():
        assert torch.equal(other.parameters.get(key), value), key

    model = made(native, name, dtype)
    logits = logits_of(model, native)
    for key, value in values.items():
        model.parameters.set(key, value)
        assert torch.equal(model.parameters.get(key), value), key
        before, logits = logits, logits_of(model, native)
        # a tied weight has two names, and the second changes nothing
        assert not torch.equal(logits, before) or (name, key) == ("scaled", "lm_head.weight"), key
    assert torch.equal(logits, logits_of(other, native))


@pytest.mark.parametrize("bits", [None, 8])
def test_memory_is_not_taken_twice(native: NativeBackend, bits: int | None) -> None:
    model = made(native, "tied", bits=bits)
    assert all(p.dim() == 1 or p.numel() == 0 for p in model.model.parameters())
    assert model.whole is not None
    assert len(model.whole.decoder.weights) == 4 * SIZES["num_hidden_layers"] + 1


def test_a_quantized_parameter_that_is_set_is_quantized_again(native: NativeBackend) -> None:
    model = made(native, "llama_biases", bits=8)
    name = "model.layers.1.mlp.up_proj.weight"
    value = torch.randn(96, 64, generator=torch.Generator().manual_seed(3))
    beside = model.parameters.get("model.layers.1.mlp.gate_proj.weight")
    model.parameters.set(name, value)
    assert 0 < error_of(model.parameters.get(name), value) < 0.01
    assert error_of(model.parameters.get("model.layers.1.mlp.gate_proj.weight"), beside) < 1e-3


# ------------------------------------------------------------------ quantized


@pytest.mark.parametrize(("bits", "most"), [(8, 0.01), (4, 0.1)])
@pytest.mark.parametrize(
    "name", fast_only(["ungated", "gemma3"], ["llama_biases", "ungated", "olmo2", "gemma3", "all_experts"])
)
def test_quantized_weights_are_near_and_logits_are_theirs(
    native: NativeBackend, name: str, bits: int, most: float
) -> None:
    model, plain = made(native, name, bits=bits), made(native, name)
    for key in plain.parameters.names():
        value = model.parameters.get(key)
        assert error_of(value, plain.parameters.get(key)) < most, key
        plain.parameters.set(key, value)
    assert error_of(logits_of(model, native), logits_of(plain, native)) < 0.1, "inputs are rounded to 8 bits"
    ids = torch.arange(20)
    assert torch.equal(model.embed(ids), plain.embed(ids))


def test_norms_may_be_in_fp32(native: NativeBackend) -> None:
    """transformers keeps those of gpt-oss so in a model of fp16."""
    model = build_one("gpt_oss", torch.float16)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    own = own_logits(model)
    paged = page(model, backend=native)
    make_whole(paged, native)
    assert paged.whole is not None, paged.notes[-1]
    assert typical_error(logits_of(paged, native), own) < 0.02


@pytest.mark.parametrize("bits", [8, 4])
def test_what_does_not_run_as_a_whole_is_not_quantized(native: NativeBackend, bits: int) -> None:
    mixture = page(build("hy_v3"), backend=native)  # its router is given a bias
    with pytest.raises(UnsupportedModelError, match="HYV3ForCausalLM can't be quantized: an MLP is neither"):
        make_whole(mixture, native, bits)
    reference = ReferenceBackend()
    model = page(build_one("llama"), backend=reference)
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM can't be quantized: the reference backend runs"):
        make_whole(model, reference, bits)


# ------------------------------------------------------------------ what is left alone, and what is refused


def shift_logits(model: Any) -> None:
    forward = model.lm_head.forward
    model.lm_head.forward = lambda x: forward(x) + torch.arange(SIZES["vocab_size"]) * 0.1


def shift_embeddings(model: Any) -> None:
    forward = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: forward(ids) + 1


def limit_steps(model: Any) -> None:
    for layer in model.backbone.layers:
        layer.mixer.time_step_limit = (1e-5, 100.0)


def hook(model: Any) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda *_: None)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)
        return out


def wrap_head(model: Any) -> None:
    model.lm_head = Wrapped(model.lm_head)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("llama", shift_logits, "its logits are not the output layer's product, scaled or capped"),
        ("tied", shift_embeddings, "its embedding is no plain lookup in the output layer's weight"),
        ("llama", wrap_head, "its output layer is no linear one"),
        ("mamba2", limit_steps, "its layers are of no form that is known"),
        ("llama", hook, "a module has hooks, which want to be called"),
    ],
)
def test_a_model_with_more_around_its_layers_runs_layer_by_layer(
    native: NativeBackend, name: str, change: Callable[[Any], None], reason: str
) -> None:
    built = build_one(name)
    change(built)
    own = own_logits(built)
    model = page(built, backend=native)
    make_whole(model, native)
    assert (model.whole, model.notes[-1]) == (None, f"layer by layer: {reason}")
    assert error_of(logits_of(model, native), own) < 1e-4


def test_an_embedding_of_its_own_may_do_more(native: NativeBackend) -> None:
    built = build_one("llama")
    shift_embeddings(built)
    own = own_logits(built)
    model = page(built, backend=native)
    make_whole(model, native)
    assert model.whole is not None
    assert error_of(logits_of(model, native), own) < 1e-4


def test_a_mixer_may_repeat_its_keys_for_each_head(native: NativeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch_chunk_gated_delta_rule"
    scan = ragged_scans._RAGGED[name]

    def repeating(step: Any, *keys_and_more: Any, **more: Any) -> Any:
        queries, keys, *others = keys_and_more
        return scan(step, queries.repeat_interleave(2, 2), keys.repeat_interleave(2, 2), *others, **more)

    monkeypatch.setitem(ragged_scans._RAGGED, name, repeating)
    built = build_one("qwen3_next")
    own = own_logits(built)
    model = page(built, backend=native)
    make_whole(model, native)
    assert model.whole is not None
    assert error_of(logits_of(model, native), own) < 1e-4


def test_a_backend_without_a_decoder_runs_layer_by_layer() -> None:
    backend = ReferenceBackend()
    model = page(build_one("llama"), backend=backend)
    before = logits_of(model, backend)
    make_whole(model, backend)
    assert (model.whole, model.notes[-1]) == (None, "layer by layer: the reference backend runs layers one by one")
    assert torch.equal(logits_of(model, backend), before)


@pytest.mark.parametrize(
    "wrong",
    [{"multiplier": 2.0}, {"mixer": {"interleaved": True}}, {"mixer": {"rotary": None}}, {"mlp_norm": None}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_decoder_that_computes_something_else_is_refused(
    native: NativeBackend, dtype: torch.dtype, wrong: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = native.decoder

    def changed(layer: Any) -> Any:
        others = {**wrong, "mixer": layer.mixer._replace(**wrong.get("mixer", {}))}
        return layer._replace(**others)

    monkeypatch.setattr(native, "decoder", lambda layers, *rest: decoder([*layers[:-1], changed(layers[-1])], *rest))
    model = page(build_one("qwen2", dtype), backend=native)
    with pytest.raises(UnsupportedModelError, match=r"computes Qwen2ForCausalLM wrongly as a whole .* this is a bug"):
        make_whole(model, native)


@pytest.mark.parametrize(("is_quantized", "rounding"), [(True, 0.0), (False, 9.0)])
def test_logits_of_integers_or_of_much_rounding_are_not_far_off(
    native: NativeBackend, is_quantized: bool, rounding: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = native.decoder
    monkeypatch.setattr(
        native, "decoder", lambda layers, *rest: decoder([layer._replace(multiplier=-1.0) for layer in layers], *rest)
    )
    model = page(build_one("qwen2"), backend=native)
    model.is_quantized, model.rounding = is_quantized, rounding
    with pytest.raises(UnsupportedModelError, match=r"computes Qwen2ForCausalLM wrongly as a whole"):
        make_whole(model, native)


@pytest.mark.parametrize(("bits", "is_quantized"), [(None, False), (None, True), (8, False), (4, False)])
def test_a_decoder_whose_logits_are_not_finite_is_refused(
    native: NativeBackend, bits: int | None, is_quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = native.decoder
    infinite = float("inf")
    monkeypatch.setattr(
        native,
        "decoder",
        lambda layers, *rest: decoder([*layers[:-1], layers[-1]._replace(multiplier=infinite)], *rest),
    )
    model = page(build_one("qwen2"), backend=native)
    model.is_quantized = is_quantized
    with pytest.raises(UnsupportedModelError, match=r"computes Qwen2ForCausalLM wrongly as a whole"):
        make_whole(model, native, bits)
