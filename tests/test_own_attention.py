"""Attention that models compute themselves: what is learned of it, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tiny
from mainspring.core.model.learn.own_probe import learn_attention
from mainspring.core.model.learn.random_texts import random_texts
from mainspring.core.model.learn.verify import Chunk, paged_logits, schedule
from mainspring.core.model.load.loader import load_model
from mainspring.core.model.run.own_attention import OwnAttention, Terms
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.core.model.run.positions import positions_given, receivers
from mainspring.ipc.config import LoadConfig, ModelConfig
from mainspring.ipc.errors import UnsupportedModelError
from mainspring.kernels.contract import SlopeBias
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from native_here import why_not

TOKENS, HEADS, DIM = 6, 2, 4
CAUSAL = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
LEAST = torch.finfo(torch.float32).min


def load(path: Path, max_model_len: int | None = None, **fields: Any) -> PagedModel:
    return load_model(ModelConfig(model=str(path), **fields), LoadConfig(), torch.device("cpu"), max_model_len)


# What is learned of models


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gpt_neo", [{"window": None, "scale": 1.0}, {"window": 24, "scale": 1.0}]),
        ("gptj", [{"window": None, "scale": 0.25, "bias": None}] * 2),
        ("falcon", [{"num_q_heads": 4, "num_kv_heads": 2}] * 2),
        ("bloom", [{"bias": (0.25, 0.0625, 0.015625, 0.00390625)}] * 2),
        ("mpt", [{"bias": (0.25, 0.0625, 0.015625, 0.00390625)}] * 2),
    ],
)
def test_layers_are_learned_from_what_is_done_to_the_scores(
    name: str, expected: list[dict[str, Any]], tmp_path: Path
) -> None:
    model = load(tiny.make(name, tmp_path))
    assert len(model.layers) == len(expected)
    for spec, facts in zip(model.layers, expected, strict=True):
        for field, value in facts.items():
            found = getattr(spec, field)
            if isinstance(value, tuple):
                assert isinstance(found, SlopeBias)
                found = found.slopes
            assert found == (pytest.approx(value, rel=1e-6) if value is not None else None), field


@pytest.mark.parametrize("name", ["bloom", "gptj", "falcon"])
def test_half_precision_learns_the_same(name: str, tmp_path: Path) -> None:
    wide, narrow = load(tiny.make(name, tmp_path)), load(tmp_path, dtype="bfloat16")
    assert narrow.layers == wide.layers


def test_a_window_beyond_the_longest_sequence_is_none(tmp_path: Path) -> None:
    assert load(tiny.make("gpt_neo", tmp_path), max_model_len=24).layers[1].window is None


def test_the_model_s_own_attention_runs_outside_of_serving(tmp_path: Path) -> None:
    """The calls are those of the served model, and none of another."""
    path = tiny.make("gptj", tmp_path)
    served, other = load(path), load(path)
    with pytest.raises(IndexError):  # no cache is bound
        served.model(input_ids=torch.tensor([[1, 2]]), position_ids=torch.tensor([[0, 1]]))
    other.model.config._attn_implementation = "eager"
    logits = other.model(input_ids=torch.tensor([[1, 2]]), position_ids=torch.tensor([[0, 1]])).logits
    assert logits.isfinite().all()


def test_a_pass_that_lacks_a_call_is_an_error(tmp_path: Path) -> None:
    model = load(tiny.make("gptj", tmp_path))
    model.model.config._attn_implementation = "eager"  # as if something had set it back
    model._calls.begin([], model._calls.sequences)
    with pytest.raises(RuntimeError, match="0 attention calls in a forward pass that had 2"):
        model._calls.check()


def test_a_bias_that_does_not_depend_on_the_distance_alone_is_refused(tmp_path: Path) -> None:
    path = tiny.make("falcon", tmp_path, new_decoder_architecture=False, alibi=True)
    with pytest.raises(UnsupportedModelError, match="depends on more than the distance"):
        load(path)  # transformers rounds it to bfloat16, place by place


# What is done to scores


def attend(change: Callable[[torch.Tensor], torch.Tensor]) -> Terms:
    """What a model that does `change` to its scores tells."""
    seen: list[Terms] = []

    def note(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, terms: Terms | None) -> torch.Tensor:
        assert query.shape == key.shape == value.shape == (TOKENS, HEADS, DIM)
        assert terms is not None
        seen.append(terms)
        return value

    query, key, value = torch.randn(3, 1, HEADS, TOKENS, DIM)
    with OwnAttention(note, learn=True):
        out = change(query @ key.transpose(-1, -2)) @ value
    assert torch.equal(out, value)
    return seen[0]


def in_place(scores: torch.Tensor) -> torch.Tensor:
    scores /= 2
    scores.masked_fill_(~CAUSAL, LEAST)
    return scores.softmax(-1)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fill": lambda s: F.softmax((s / 2).masked_fill(~CAUSAL, LEAST), dim=-1),
    "where": lambda s: F.softmax(torch.where(CAUSAL, s * 0.5, torch.tensor(LEAST)), -1, dtype=torch.float32),
    "sum": lambda s: nn.Dropout(0.5).eval()(nn.Softmax(-1)(s.float() / 2 + torch.where(CAUSAL, 0.0, LEAST))),
    "view": lambda s: (s / 2).view(HEADS, TOKENS, -1).masked_fill(~CAUSAL, LEAST).view(s.shape).softmax(-1),
    "in place": in_place,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_scale_and_a_mask_are_noted(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    terms = attend(change)
    assert terms.scale == 0.5
    hidden = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    for each in (*terms.hidden, *(bias < -1e30 for bias in terms.biases)):
        hidden |= each
    assert torch.equal(hidden, ~CAUSAL)


def test_a_scale_after_a_bias_scales_both() -> None:
    bias = torch.arange(float(TOKENS))
    terms = attend(lambda s: ((s + bias) * 0.5).softmax(-1))
    assert terms.scale == 0.5
    assert torch.equal(terms.biases[0], bias * 0.5)


def test_scores_that_are_used_again_keep_their_terms() -> None:
    def change(scores: torch.Tensor) -> torch.Tensor:
        _ = scores * 3 + 1
        return scores.softmax(-1)

    assert attend(change).scale == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s, "weights|scores go through matmul"),
        (lambda s: s.softmax(-2), "scores go through softmax"),
        (lambda s: s.softmax(-1) * 2, "weights go through"),
        (lambda s: s.tanh().softmax(-1), "scores go through tanh"),
        (lambda s: (s * torch.randn(TOKENS)).softmax(-1), "multiplied by a tensor"),
        (lambda s: s.masked_fill(~CAUSAL, 0.0).softmax(-1), "scores are set to 0"),
        (lambda s: (s + s).softmax(-1), "combined with others"),
        (lambda s: (1 / s).softmax(-1), "scores go through"),
    ],
)
def test_what_no_kernel_does_is_refused(change: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        attend(change)


def test_products_of_rotary_embeddings_are_computed() -> None:
    frequencies, positions = torch.randn(1, TOKENS, 1), torch.randn(1, 1, TOKENS)
    with OwnAttention(lambda *_: pytest.fail("no attention")):
        assert torch.equal(frequencies @ positions, frequencies * positions)


def test_scaled_dot_product_attention_is_taken_over() -> None:
    seen: list[Terms] = []
    query, key, value = torch.randn(3, 1, HEADS, TOKENS, DIM)
    with OwnAttention(lambda q, k, v, terms: seen.append(terms) or v, learn=True):  # type: ignore[arg-type, func-returns-value]
        F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert seen[0].scale == 1 / math.sqrt(DIM)
    assert torch.equal(seen[0].hidden[0], ~CAUSAL)


# Positions


class Table(nn.Module):
    """As Bart has it."""

    def forward(self, ids: torch.Tensor, position_ids: torch.Tensor | None = None) -> torch.Tensor:
        return torch.arange(ids.shape[1]) if position_ids is None else position_ids


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.table(ids)
        return out


def test_a_model_that_counts_its_rows_gets_positions() -> None:
    model, ids, positions = Counting(), torch.zeros(1, 3), torch.tensor([[7, 0, 1]])
    to = receivers(model)
    assert to == [model.table]
    with positions_given(to, positions) as inputs:
        assert not inputs
        assert model(ids).tolist() == [7, 0, 1]
    assert model(ids).tolist() == [0, 1, 2]
    assert receivers(model.table) is None


def test_attention_is_learned_once_for_each_call(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.make("gptj", tmp_path), attn_implementation="eager").eval()
    calls = learn_attention(model, None)
    assert [call.module.layer_idx for call in calls] == [0, 1]
    assert model.config._attn_implementation == "eager"


# Clockwork


@pytest.mark.parametrize("name", tiny.OWN_ATTENTION)
def test_a_row_has_the_same_bits_in_any_step(name: str, tmp_path: Path) -> None:
    model = load(tiny.make(name, tmp_path), dtype="bfloat16")
    backend = ReferenceBackend() if why_not() else NativeBackend()
    lengths = [41, 30]
    sequences = random_texts(model.config, lengths)
    alone = [[Chunk(0, 0, 41)], [Chunk(1, 0, 30)]]
    whole = paged_logits(model, sequences, alone, backend)
    mixed = paged_logits(model, sequences, schedule(lengths), backend)
    assert all(torch.equal(one, other) for one, other in zip(whole, mixed, strict=True))
