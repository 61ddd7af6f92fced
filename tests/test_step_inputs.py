"""Inputs of a step beside its tokens: positions of several axes, offsets of its sequences, and rows that see later
tokens. Only the reference backend supports such rows, so their step runs on its kernels over the same cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from flashinfer_double import NUM_MULTIPROCESSORS, FlashInferDouble
from mainspring.core.model.learn.whole_match import make_whole
from mainspring.core.model.load.loader import page
from mainspring.core.model.run.attention import attention_set
from mainspring.core.model.run.paged_model import PagedModel
from mainspring.core.worker.device import device_for
from mainspring.core.worker.kv_layout import plan_layout
from mainspring.core.worker.runner import ModelRunner
from mainspring.core.worker.step_inputs import Rows, StepInputs
from mainspring.kernels.contract import AttentionSpec, Backend
from mainspring.kernels.flashinfer import flashinfer_backend as flashinfer
from mainspring.kernels.flashinfer.flashinfer_backend import FlashInferBackend, Gpu
from mainspring.kernels.native.decoder import NativeDecoder
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.reference.reference_backend import ReferenceBackend
from native_here import why_not
from test_stack import SIZES
from test_whole import build_one

CPU = torch.device("cpu")
BLOCK_SIZE, COLUMNS = 16, 4
LENGTHS = (45, 30)
SPANS = ([(5, 27)], [(0, 9), (12, 19)])  # for each sequence: spans of tokens that see each other in both directions
PREFILL = (33, 20)  # tokens of each sequence in the first step, including all spans
SEQUENCES = [
    torch.randint(2, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(length))
    for length in LENGTHS
]
needs_native = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def reach_of(length: int, spans: Sequence[tuple[int, int]]) -> torch.Tensor:
    reach = torch.arange(length)
    for first, end in spans:
        reach[first:end] = end - 1
    return reach


def additive(seen: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1, 1, *seen.shape).masked_fill(~seen, -torch.inf)


@torch.inference_mode()
def dense_logits(name: str) -> torch.Tensor:
    """Logits from the model's own code, with a mask for each kind of layer that includes the spans."""
    model = build_one(name)
    found = []
    for ids, spans in zip(SEQUENCES, SPANS, strict=True):
        index = torch.arange(len(ids))
        seen = index[None] <= reach_of(len(ids), spans)[:, None]
        window = seen & (index[None] > index[:, None] - (getattr(model.config, "sliding_window", None) or len(ids)))
        masks = [additive(mask) for mask in (seen, window)]
        mask: Any = dict(zip(("full_attention", "sliding_attention"), masks, strict=True))
        with attention_set(model, "eager"):
            own = model(
                input_ids=ids[None],
                attention_mask=mask if "gemma" in name else masks[1 if name == "mistral" else 0],
                use_cache=False,
            )
        found.append(own.logits[0])
    return torch.cat(found)


class Steps:
    """A model and a cache shared by two sequences."""

    def __init__(self, model: PagedModel, backend: Backend) -> None:
        layout = model.lay_out(backend, BLOCK_SIZE, model.dtype)
        tables = 1 + np.arange(len(layout.groups) * 2 * COLUMNS).reshape(COLUMNS, 2, len(layout.groups)).T
        self.runner = ModelRunner(model, layout, backend, tables.size + 1, 2, BLOCK_SIZE * COLUMNS, 128)
        self.runner.tables[:, :, :COLUMNS] = tables

    def compute(self, starts: Sequence[int], ends: Sequence[int], reach: bool = False) -> list[torch.Tensor]:
        """Logits of these tokens of each sequence."""
        counts = np.array(ends) - starts
        parts = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        ids = np.concatenate([ids[part].numpy() for ids, part in zip(SEQUENCES, parts, strict=True)])
        seen = [reach_of(n, spans)[part] for n, spans, part in zip(LENGTHS, SPANS, parts, strict=True)]
        logits = self.runner.forward(
            np.arange(2),
            np.array(starts),
            counts,
            ids,
            np.arange(len(ids)),
            reach=torch.stack([torch.cat(seen)] * 2).int().numpy() if reach else None,
        )
        return list(logits.float().clone().split(counts.tolist()))

    def logits(self) -> torch.Tensor:
        """Logits of all tokens: spans in the first step, then the rest in two ordinary steps."""
        middle = (PREFILL[0] + 1, PREFILL[1] + 4)
        steps = [self.compute((0, 0), PREFILL, reach=True), self.compute(PREFILL, middle)]
        steps.append(self.compute(middle, LENGTHS))
        return torch.cat([step[sequence] for sequence in range(2) for step in steps])


def assert_near(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> None:
    assert (got - want).abs().max() <= tolerance * want.std()


@needs_native
@pytest.mark.parametrize("name", ["llama", "llama_biases", "ungated", "tied", "mistral", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "by layer"])
def test_a_step_with_a_reach_runs_natively(
    name: str, whole: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native, calls = NativeBackend(), []
    model = page(build_one(name), backend=native)
    if whole:
        make_whole(model, native)
        assert model.whole is not None

    def note(kind: type, method: str) -> None:
        own = getattr(kind, method)

        def noted(self: Any, *args: Any) -> Any:
            calls.append(kind.__name__)
            return own(self, *args)

        monkeypatch.setattr(kind, method, noted)

    assert not caplog.records
    note(NativeDecoder if whole else NativeBackend, "run")
    note(ReferenceBackend, "run")
    steps = Steps(model, native)
    got = steps.logits()
    layers = SIZES["num_hidden_layers"]
    assert calls == 3 * (["NativeDecoder"] if whole else ["NativeBackend"] * layers)
    assert not caplog.messages
    want = dense_logits(name)
    assert_near(got, want, 1e-4)
    assert torch.equal(got.argmax(1), want.argmax(1))
    without = torch.cat(steps.compute((0, 0), LENGTHS))
    assert (without - want).abs().max() > 0.05 * want.std()  # the spans change the result


@needs_native
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_serve_a_step_that_is_not_taken(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    native = NativeBackend()
    model = page(build_one("llama", torch.bfloat16), backend=native)
    make_whole(model, native, bits)
    steps = Steps(model, native)
    whole = torch.cat(steps.compute((0, 0), LENGTHS))
    monkeypatch.setattr(native, "takes", lambda batch: False)
    by_layer = torch.cat(steps.compute((0, 0), LENGTHS))
    assert float((by_layer - whole).square().mean().sqrt()) < 0.05 * float(whole.std())


def test_the_reference_reads_and_keeps_the_cache_of_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """There, heads of 16 elements are padded to 64 with zeros."""
    monkeypatch.setattr(flashinfer, "HALF", (*flashinfer.HALF, torch.float32))
    monkeypatch.setattr("flashinfer_double.HALF", (torch.float16, torch.bfloat16, torch.float32))
    backend = FlashInferBackend(CPU, library=FlashInferDouble(), gpu=Gpu((9, 0), NUM_MULTIPROCESSORS))
    model = page(build_one("gemma3"), backend=backend)
    steps = Steps(model, backend)
    assert_near(steps.logits(), dense_logits("gemma3"), 1e-3)
    cache = model._calls.caches[0]
    assert cache.keys.shape[-1] == 64
    assert cache.keys[..., :16].any()
    assert not cache.keys[..., 16:].any()


def test_positions_of_one_and_of_several_axes_reach_the_model() -> None:
    model = page(build_one("llama"))
    want = Steps(model, ReferenceBackend())
    ids = SEQUENCES[0].numpy()
    index = np.arange(len(ids))

    def logits(positions: np.ndarray | None) -> torch.Tensor:
        one = np.ones(1, np.int64)
        return want.runner.forward(0 * one, 0 * one, one * len(ids), ids, index, positions)

    with torch.inference_mode(), attention_set(model.model, "eager"):
        moved = torch.from_numpy(index * 3 + 7)[None]
        mask = additive(torch.ones(len(ids), len(ids)).tril().bool())  # otherwise gaps look like ends of sequences
        own = model.model(input_ids=SEQUENCES[0][None], position_ids=moved, attention_mask=mask).logits[0]
    assert_near(logits(moved.numpy()), own, 1e-4)
    assert (logits(None) - own).abs().max() > 0.01 * own.std()

    model.position_axes = 3
    steps = Steps(model, ReferenceBackend())
    given, of_one_axis = [], model.model.forward

    def forward(**inputs: Any) -> Any:
        given.append(inputs["position_ids"].clone())
        return of_one_axis(**{**inputs, "position_ids": inputs["position_ids"][0]})

    model.model.forward = forward  # type: ignore[method-assign]
    slots, starts, counts = np.array([0, 1]), np.array([4, 9]), np.array([3, 1])
    axes = np.arange(12).reshape(3, 4) * 10
    for positions in (axes, None):
        steps.runner.forward(slots, starts, counts, np.arange(4), np.arange(4), positions)
    assert [x.shape for x in given] == [(3, 1, 8)] * 2
    # the request of a single row comes first, and padding rows have the last position
    assert given[0][:, 0, :4].tolist() == axes[:, [3, 0, 1, 2]].tolist()
    assert given[1][:, 0, :4].tolist() == [[9, 4, 5, 6]] * 3
    assert (given[0][..., 4:] == BLOCK_SIZE * COLUMNS - 1).all()


@pytest.mark.parametrize("requests", [None, 4])
def test_a_step_says_where_its_sequences_end_and_whose_they_are(requests: int | None) -> None:
    cached = plan_layout([AttentionSpec(2, 2, 16, 16, 1.0)], [0], BLOCK_SIZE, torch.float32)
    for layout in (cached, cached._replace(groups=())):  # also of a model without a cache
        inputs = StepInputs(device_for(CPU), layout, 8, BLOCK_SIZE * COLUMNS, 64)
        if requests is None:
            slots, counts, ends = [5, 2, 7], [4, 1, 2], [0, 1, 5, 7]
            order = [2, 5, 7]
        else:
            slots, counts, ends, order = [5, 2], [1, 1], [0, 1, 2, 3, 4], [5, 2, -1, -1]
        total = sum(counts)
        columns = (np.array(x, np.int64) for x in (slots, [3] * len(slots), counts, range(total), range(total)))
        _, batches, sequences = inputs.fill(Rows(*columns).singles_first(), 0, requests)
        assert sequences.cu_seqlens.tolist() == ends
        assert sequences.slots.tolist() == order
        assert sequences.starts.tolist() == [3] * len(slots) + [0] * (len(order) - len(slots))
        assert [x.dtype for x in sequences[:4]] == [torch.int32] * 4
        assert len(batches) == len(layout.groups)


def test_a_step_with_a_reach_is_not_replayed_from_a_graph() -> None:
    runner = Steps(page(build_one("llama")), ReferenceBackend()).runner
    graph: Any = object()
    runner._graphs[2] = graph
    one = np.ones(2, np.int64)
    step = Rows(np.arange(2), 4 * one, one, one, np.arange(2), positions=one[None])
    runner._graph_max_len = 64
    assert runner._graph_size(step, 2) == 2
    assert runner._graph_size(step._replace(reach=4 * one), 2) is None


def test_sequence_offsets_reach_the_layers_of_a_model() -> None:
    model = page(build_one("llama"))
    steps, seen = Steps(model, ReferenceBackend()), []
    calls: Any = model._calls
    run = calls.run

    def noted(*args: Any) -> torch.Tensor:
        seen.append(calls.sequences)
        out: torch.Tensor = run(*args)
        return out

    calls.run = noted
    steps.compute((0, 0), (3, 5))
    assert [one.cu_seqlens.tolist() for one in seen] == [[0, 3, 8]] * SIZES["num_hidden_layers"]
    assert seen[0].slots.tolist() == [0, 1]
