"""Recurrent scans: the native ones compute what the reference says, and a row has the same bits however its text was
cut, beside any other sequences, and by any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mainspring.kernels.contract import Scans
from mainspring.kernels.native.native_backend import NativeBackend
from mainspring.kernels.reference.reference_scans import ReferenceScans
from native_here import why_not

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))

Scan = Callable[[Scans, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
LENGTHS = (5, 1, 12, 1)
SLOTS = (3, 1, 4, 2)
FRESH = (True, False, False, True)


class Case:
    """A scan, its inputs by row, its weights, and the shape of a state."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        random = torch.Generator().manual_seed(1)
        self.dtype, self.rows = dtype, sum(LENGTHS)
        method, sizes = name.split(":")
        self.method, numbers = method, [int(size) for size in sizes.split(",")]

        def noise(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(shape, generator=random) * scale

        rows = self.rows
        self.after: tuple[Any, ...] = ()
        if method == "conv":
            channels, width, bias, silu = numbers
            self.by_row = [noise(rows, channels).to(dtype)]
            self.before = (noise(channels, width), noise(channels) if bias else None, bool(silu))
            self.state = noise(6, width - 1, channels)
        elif method == "gated_delta":
            key_heads, heads, keys, values, each_key, l2norm = numbers
            q, k = (noise(rows, key_heads, keys, scale=keys**-0.5).to(dtype) for _ in range(2))
            g = -noise(rows, heads, *([keys] if each_key else [])).abs()
            self.by_row = [q, k, noise(rows, heads, values).to(dtype), g, torch.rand(rows, heads, generator=random)]
            self.before, self.after = (), (keys**-0.5, bool(l2norm))
            self.state = noise(6, heads, keys, values)
        elif method == "mamba2":
            heads, groups, channels, numbers_each, skip = numbers
            parts = [noise(rows, heads, channels).to(dtype), noise(rows, heads).abs()]
            self.by_row = [*parts, noise(rows, groups, numbers_each), noise(rows, groups, numbers_each)]
            self.before = (-noise(heads).abs(), noise(heads) if skip else None)
            self.state = noise(6, heads, channels, numbers_each)
        else:
            channels, numbers_each = numbers
            parts = [noise(rows, channels).to(dtype), noise(rows, channels).abs()]
            self.by_row = [*parts, noise(rows, numbers_each), noise(rows, numbers_each)]
            self.before = (-noise(channels, numbers_each).abs(), noise(channels))
            self.state = noise(6, channels, numbers_each)

    def run(
        self,
        scans: Scans,
        state: torch.Tensor,
        rows: torch.Tensor,
        lengths: tuple[int, ...],
        slots: tuple[int, ...],
        fresh: tuple[bool, ...],
    ) -> torch.Tensor:
        """The scan over some of the rows, in sequences of these lengths."""
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        where = state, starts, torch.tensor(slots, dtype=torch.int32), torch.tensor(fresh)
        given = [part[rows] for part in self.by_row]
        if self.method in ("mamba1", "mamba2"):
            A, skip = self.before
            x, dt, B, C = given
            given = [x, dt, A, B, C, skip]
            return getattr(scans, self.method)(*given, *where)  # type: ignore[no-any-return]
        return getattr(scans, self.method)(*given, *self.before, *where, *self.after)  # type: ignore[no-any-return]


CASES = [
    "conv:40,4,1,1",
    "conv:3,2,0,0",
    "conv:16,3,0,1",
    "gated_delta:2,4,16,32,0,1",
    "gated_delta:1,1,128,128,0,0",
    "gated_delta:3,3,24,40,1,1",  # Kimi's
    "gated_delta:2,4,5,7,0,1",
    "mamba2:4,2,8,16,1",
    "mamba2:3,1,5,24,0",
    "mamba1:40,16",
    "mamba1:7,5",
]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def native() -> Scans:
    return NativeBackend().scans


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_native_scans_compute_what_the_reference_says(name: str, dtype: torch.dtype, native: Scans) -> None:
    case = Case(name, dtype)
    rows, results = torch.arange(case.rows), []
    for scans in (native, ReferenceScans()):
        state = case.state.clone()
        out = case.run(scans, state, rows, LENGTHS, SLOTS, FRESH)
        assert out.dtype == dtype
        results.append((out.float(), state))
    (out, state), (their_out, their_state) = results
    torch.testing.assert_close(out, their_out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    torch.testing.assert_close(state, their_state, rtol=2e-5, atol=2e-5)
    assert torch.equal(state[[0, 5]], case.state[[0, 5]]), "the state of another sequence changed"


@pytest.mark.parametrize("scans_of", ["native", "reference"])
def test_bits_depend_on_no_cut_no_neighbour_and_no_number_of_threads(name: str, scans_of: str, native: Scans) -> None:
    case = Case(name, torch.float32)
    scans = native if scans_of == "native" else ReferenceScans()
    torch.set_num_threads(2)
    state = case.state.clone()
    whole = case.run(scans, state, torch.arange(case.rows), LENGTHS, SLOTS, FRESH)
    torch.set_num_threads(1)
    first = 0
    for length, slot, fresh in zip(LENGTHS, SLOTS, FRESH, strict=True):
        alone, parts, at = case.state.clone(), [], 0
        for count in (length - length // 3, length // 3):
            if count:
                rows = torch.arange(first + at, first + at + count)
                parts.append(case.run(scans, alone, rows, (count,), (slot,), (fresh and not at,)))
                at += count
        assert torch.equal(torch.cat(parts), whole[first : first + length])
        assert torch.equal(alone[slot], state[slot])
        first += length
