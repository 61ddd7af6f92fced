"""Recurrent scans as Triton kernels: they compute what the reference says, and a row has the same bits however its text
was cut and whatever other sequences there are. Without CUDA they run in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from triton_here import DEVICE, HALF, in_interpreter, interpreted, multiplies_in_interpreter  # noqa: F401  (a fixture)

# isort: split
# What follows loads transformers, which loads Triton.
import references
import tiny
from late_device import LateDevice
from mainspring.core.worker import generation_worker
from mainspring.kernels.reference.reference_scans import ReferenceScans
from test_exact import SETTINGS, requests
from test_late_device import GraphReference, late, run  # noqa: F401  (a fixture)
from test_scans import CASES, FRESH, LENGTHS, SLOTS, Case
from tiers import fast_only

with in_interpreter:
    from mainspring.kernels.flashinfer.triton_scans import TritonScans

pytestmark = multiplies_in_interpreter


class OnDevice:
    """Scans whose arguments and results are moved to the GPU and back."""

    def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
        def call(*args):  # type: ignore[no-untyped-def]
            there = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in args]
            out = getattr(TritonScans(), name)(*there)
            for mine, theirs in zip(args, there, strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(theirs)
            return out.cpu()

        return call


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["fp32", "16 bits"])
@pytest.mark.parametrize("name", CASES)
def test_they_compute_what_the_reference_says(name: str, dtype: torch.dtype) -> None:
    case, rows, results = Case(name, dtype), None, []
    rows = torch.arange(case.rows)
    for scans in (OnDevice(), ReferenceScans()):
        state = case.state.clone()
        out = case.run(scans, state, rows, LENGTHS, SLOTS, FRESH)  # type: ignore[arg-type]
        assert out.dtype == dtype
        results.append((out.float(), state))
    (out, state), (their_out, their_state) = results
    close = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, their_out, rtol=close, atol=close)
    torch.testing.assert_close(state, their_state, rtol=2e-5, atol=2e-5)
    assert torch.equal(state[[0, 5]], case.state[[0, 5]]), "the state of another sequence changed"


@pytest.mark.parametrize("name", CASES)
def test_bits_depend_on_no_cut_and_no_neighbour(name: str) -> None:
    case, scans = Case(name, torch.float32), OnDevice()
    state = case.state.clone()
    whole = case.run(scans, state, torch.arange(case.rows), LENGTHS, SLOTS, FRESH)  # type: ignore[arg-type]
    first = 0
    for length, slot, fresh in zip(LENGTHS, SLOTS, FRESH, strict=True):
        for cut in {1, length // 3, length - 1} & set(range(1, length)) | {length}:
            alone, parts, at = case.state.clone(), [], 0
            for count in (cut, length - cut):
                if count:
                    rows = torch.arange(first + at, first + at + count)
                    parts.append(case.run(scans, alone, rows, (count,), (slot,), (fresh and not at,)))  # type: ignore[arg-type]
                    at += count
            assert torch.equal(torch.cat(parts), whole[first : first + length])
            assert torch.equal(alone[slot], state[slot])
        first += length


@pytest.mark.parametrize("name", CASES)
def test_rows_of_no_sequence_are_zeros(name: str) -> None:
    case, scans = Case(name, torch.float32), OnDevice()
    rows = torch.arange(case.rows)
    out = case.run(scans, case.state.clone(), rows, LENGTHS[:2], SLOTS[:2], FRESH[:2])  # type: ignore[arg-type]
    assert not out[sum(LENGTHS[:2]) :].any()
    assert out[: sum(LENGTHS[:2])].any()
    assert not case.run(scans, case.state.clone(), rows, (), (), ()).any()  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 33])
def test_a_row_of_a_convolution_finds_its_sequence_among_any_number(count: int) -> None:
    random = torch.Generator().manual_seed(count)
    starts = torch.cat([torch.zeros(1), torch.randint(1, 6, (count,), generator=random).cumsum(0)]).int()
    x = torch.randn(int(starts[-1]) + 5, 5, generator=random)
    weight, before = torch.randn(5, 4, generator=random), torch.randn(count + 2, 3, 5, generator=random)
    slots, fresh = torch.randperm(count, generator=random).int() + 1, torch.rand(count, generator=random) < 0.4
    results = []
    for scans in (OnDevice(), ReferenceScans()):
        state = before.clone()
        results.append((scans.conv(x, weight, None, True, state, starts, slots, fresh), state))
    (out, state), (their_out, their_state) = results
    torch.testing.assert_close(out, their_out, rtol=2e-5, atol=2e-5)
    assert torch.equal(state, their_state)


@pytest.mark.parametrize("architecture", fast_only([], ["qwen3_next", "nemotron_h", "falcon_mamba", "lfm2"]))
def test_models_give_the_tokens_of_generate(
    architecture: str,
    tmp_path: Path,
    late: list[LateDevice],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(GraphReference, "scans", OnDevice())
    monkeypatch.setattr(generation_worker, "graph_sizes", lambda *_: [1, 3])
    path = tiny.make(architecture, tmp_path)
    reqs = [(prompt[:16], min(n, 5)) for prompt, n in requests(tiny.VOCAB_SIZE)[:3]]
    blocks = None if architecture == "falcon_mamba" else 20
    got, _ = run(path, reqs, num_gpu_blocks_override=blocks, **{**SETTINGS, "max_num_seqs": 3, "device": "cpu"})
    assert got == references.greedy(path, reqs)
    assert late[-1].num_replays > 2
