"""Packed weights: packing is exact, quantization errors are within bounds, and a row of a product has the same bits in
any batch."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mainspring.kernels.decoder_contract import INT8_ROWS, NF4, QuantizedWeight
from mainspring.kernels.native import build as native_build
from mainspring.kernels.native import weights as native_weights
from mainspring.kernels.native.weights import LONGEST_ROW, PanelWeight, linear, pack, pack_quantized
from native_here import why_not
from tiers import fast_only

REASON = why_not()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
LEVELS = [level.name for level in native_build._usable()]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = [(1, 1), (7, 3), (31, 32), (33, 65), (100, 301), (64, 128), (160, 96), (96, 4100)]  # [out, in]
# Error bounds relative to a row's inputs: one rounding and an fp32 sum. Quantized, x is also rounded to 8 bits in
# groups.
PRODUCT_ERROR = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(scope="module", params=fast_only(LEVELS[:1], LEVELS))
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return native_build.load(request.param)


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


KINDS = (None, 8, 4, INT8_ROWS)


def all_kinds(library: ctypes.CDLL, weight: torch.Tensor, gated: bool = False) -> list[PanelWeight]:
    return [pack(library, weight, gated, bits=bits) for bits in KINDS]


def coded(library: ctypes.CDLL, weight: torch.Tensor) -> list[PanelWeight]:
    return [] if weight.shape[1] % 64 else [pack(library, weight, bits=NF4)]


def gated_where_it_may_be(out: int) -> tuple[bool, ...]:
    return (False, True) if out % (2 * native_weights.GATE) == 0 else (False,)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_takes_no_more_memory_and_loses_no_bit(
    library: ctypes.CDLL, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = draw(*shape, dtype=dtype)
    weight[0, 0] = float("nan")
    if dtype == torch.bfloat16:
        weight[0, -1] = 1e-39  # treated as 0 by VDPBF16PS
    for gated in gated_where_it_may_be(shape[0]):
        packed = pack(library, weight.clone(), gated)
        assert packed.memory.nbytes == weight.nbytes
        assert packed.memory.data_ptr() % 64 == 0
        assert torch.equal(bits(packed.unpack()), bits(weight))
        ids = torch.arange(3 * shape[0]).flip(0) % shape[0]
        assert torch.equal(bits(packed.rows(ids)), bits(weight[ids]))
        other = draw(*shape, seed=1, dtype=dtype)
        packed.replace(other)
        assert torch.equal(packed.unpack(), other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("at", [0, 3, 40, 95])
def test_a_row_with_a_value_that_is_no_number_gives_none(library: ctypes.CDLL, dtype: torch.dtype, at: int) -> None:
    weight, x = draw(64, 96, dtype=dtype), draw(5, 96, seed=1, dtype=dtype)
    dirty = x.clone()
    dirty[2, at] = float("nan")
    for packed in all_kinds(library, weight):
        got, clean = linear(library, dirty, packed), linear(library, x, packed)
        assert bool(got[2].isnan().all())
        assert torch.equal(got[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_quantizing_is_off_by_half_a_step_of_each_group(
    library: ctypes.CDLL, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    out, width = shape
    weight = draw(*shape, dtype=dtype) * torch.arange(1, out + 1)[:, None].to(dtype)  # each row has its own scale
    for asked, gated in itertools.product((8, 4, INT8_ROWS), gated_where_it_may_be(out)):
        packed = pack(library, weight, gated, bits=asked)
        bits, group = packed.kind, packed.group
        assert asked != INT8_ROWS or group >= width
        assert packed.memory.nbytes <= -(-out // 32) * 32 * -(-width // group) * (
            group * bits // 8 + 2 + 2 * (bits == 4)
        )
        padded = torch.nn.functional.pad(weight.float(), (0, -width % group)).view(out, -1, group)
        low, high = padded.amin(-1, keepdim=True).clamp_max(0), padded.amax(-1, keepdim=True).clamp_min(0)
        step = torch.maximum(-low, high) / 127 if bits == 8 else (high - low) / 15
        error = (packed.unpack().float() - weight.float()).abs()
        padded_error = torch.nn.functional.pad(error, (0, -width % group)).view(out, -1, group)
        # 4 bits: the range may have been narrowed, so the bound is on the mean of the square
        limit = 0.51 * step + 2 ** (-8 if dtype == torch.bfloat16 else -10) * padded.abs()
        if bits == 8:
            assert bool((padded_error <= limit).all())
        else:
            assert bool((padded_error.square().mean(-1) <= limit.square().mean(-1)).all())
        assert torch.equal(packed.rows(torch.tensor([out - 1])), packed.unpack()[-1:])


def test_zeros_and_large_numbers_are_kept(library: ctypes.CDLL) -> None:
    weight = torch.zeros(40, 128)
    weight[3, 5] = 1e4
    for bits in (8, 4):
        back = pack(library, weight, bits=bits).unpack()
        assert torch.equal(back == 0, weight == 0)
        assert back[3, 5] == pytest.approx(1e4, rel=1e-3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 13, 40])
def test_products_are_torchs(library: ctypes.CDLL, dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    out, width = shape
    weight, bias = draw(*shape, dtype=dtype) / width**0.5, draw(out, seed=1, dtype=dtype)
    x = draw(rows, 2 * width, seed=2, dtype=dtype)[:, :width]  # strided
    for gated in gated_where_it_may_be(out):
        for kind, packed in zip(KINDS, all_kinds(library, weight, gated), strict=True):
            exact = packed.unpack() if packed.group else weight
            if packed.group and dtype != torch.float32:
                exact = pack(library, weight.float(), gated, bits=kind).unpack()
            want = x.double() @ exact.double().T + bias.double()
            got = linear(library, x, packed, bias)
            assert got.dtype == dtype
            size = (x.double().abs() @ exact.double().abs().T + bias.double().abs()).amax()
            assert (got.double() - want).abs().max() <= (1 / 127 if packed.group else 0) * size + PRODUCT_ERROR[
                dtype
            ] * size
    assert torch.equal(linear(library, x[None], packed), linear(library, x.contiguous(), packed)[None])
    assert linear(library, x[:0], packed).shape == (0, out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(100, 301), (224, 1024), (64, 6000)], ids=str)
def test_the_bits_of_a_row_depend_on_no_other_row_and_on_no_number_of_threads(
    library: ctypes.CDLL, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight = draw(*shape, dtype=dtype)
    x = draw(70, shape[1], seed=2, dtype=dtype)
    for packed in all_kinds(library, weight) + coded(library, weight):
        torch.set_num_threads(1)
        together = linear(library, x, packed)
        for threads, rows in itertools.product((1, 2, 3), (1, 2, 5, 14, 33, 70)):
            torch.set_num_threads(threads)
            assert torch.equal(bits(linear(library, x[-rows:], packed)), bits(together[-rows:])), (threads, rows)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (100, 301), (64, 6000)], ids=str)
def test_a_weight_gives_the_same_bits_whether_packed_before_or_as_it_is_used(
    library: ctypes.CDLL, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    weight, bias = draw(*shape, dtype=dtype), draw(shape[0], seed=1, dtype=dtype)
    packed, strided = pack(library, weight), weight.T.contiguous().T
    for threads, rows in itertools.product((1, 3), (0, 1, 2, 13, 40)):
        torch.set_num_threads(threads)
        x = draw(rows, shape[1], seed=2, dtype=dtype)
        for b in (None, bias):
            want = bits(linear(library, x, packed, b))
            assert torch.equal(bits(linear(library, x, weight, b)), want), (threads, rows)
            assert torch.equal(bits(linear(library, x, strided, b)), want), (threads, rows)


@pytest.mark.parametrize("group", [32, 64, 128, 384])
@pytest.mark.parametrize("gated", [False, True])
def test_given_numbers_scales_and_zeros_are_taken_as_they_are(library: ctypes.CDLL, group: int, gated: bool) -> None:
    generator = torch.Generator().manual_seed(group)
    q = torch.randint(0, 16, (96, 384), generator=generator, dtype=torch.uint8)
    scales = torch.rand(96, 384 // group, generator=generator).half().float()
    zeros = torch.randint(0, 16, (96, 384 // group), generator=generator).float()
    exact = (q.view(96, -1, group) - zeros[..., None]) * scales[..., None]
    packed = pack_quantized(library, QuantizedWeight(q, scales, zeros), torch.float32, gated)
    assert torch.equal(packed.unpack(), exact.view(96, 384))
    x = 127 * torch.eye(384)  # which rounding to 8 bits leaves as it is
    assert torch.equal(linear(library, x, packed), 127 * exact.view(96, 384).T)


@pytest.mark.parametrize("gated", [False, True])
def test_given_numbers_of_8_bits_have_their_zero_in_the_middle(library: ctypes.CDLL, gated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(0, 256, (96, 384), generator=generator, dtype=torch.uint8)
    scales = torch.rand(96, 3, generator=generator).half().float()
    exact = ((q.view(96, 3, -1).float() - 128) * scales[..., None]).view(96, 384)
    packed = pack_quantized(library, QuantizedWeight(q, scales, None), torch.float32, gated)
    assert packed.kind == 8
    assert torch.equal(packed.unpack(), exact)
    assert torch.equal(linear(library, 127 * torch.eye(384), packed), 127 * exact.T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("gated", [False, True])
def test_numbers_of_a_codebook_are_looked_up_and_inputs_are_not_rounded(
    library: ctypes.CDLL, dtype: torch.dtype, group: int, gated: bool
) -> None:
    generator = torch.Generator().manual_seed(group)
    for out in (96, 128) if gated else (1, 33, 96):
        q = torch.randint(0, 16, (out, 384), generator=generator, dtype=torch.uint8)
        scales, codebook = torch.rand(out, 384 // group, generator=generator), torch.randn(16, generator=generator)
        exact = (codebook[q.long()].view(out, -1, group) * scales[..., None]).view(out, 384)
        packed = pack_quantized(library, QuantizedWeight(q, scales, None, codebook), dtype, gated)
        assert torch.equal(packed.unpack(), exact.to(dtype))
        assert packed.memory.nbytes == -(-out // 32) * 32 * (384 // 2 + 384 // group * 4 + 2)
        bias = torch.randn(out, generator=generator).to(dtype)
        for rows in (1, 2, 3, 5, 13, 40):
            x = torch.randn(rows, 384, generator=generator).to(dtype)
            want = x.double() @ exact.double().T + bias.double()
            size = (x.double().abs() @ exact.double().abs().T + bias.double().abs()).amax()
            got = linear(library, x, packed, bias)
            assert (got.double() - want).abs().max() <= PRODUCT_ERROR[dtype] * size
        packed.replace(signs := torch.randn(out, 384, generator=generator).sign().to(dtype) * 2)
        assert torch.equal(packed.unpack(), signs), "NF4 has -1 and 1"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(96, 320), (97, 320), (160, 96), (35, 96), (640, 1056)], ids=str)
def test_nf4_is_the_nearest_code_of_64_values_over_the_largest(
    library: ctypes.CDLL, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    code = torch.tensor(
        [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
         -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634,
         0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
    )  # fmt: skip
    out, width = shape
    weight = draw(*shape, dtype=dtype) * torch.arange(1, out + 1)[:, None].to(dtype)
    weight.view(-1)[640:704] = 0
    blocks = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % 64)).view(-1, 64)
    absmax = blocks.abs().amax(1, keepdim=True)
    scaled = torch.where(absmax > 0, blocks * (1 / absmax), 0)
    distances, order = (scaled[..., None] - code).abs().sort(dim=-1)
    exact = (code[order[..., 0]] * absmax).flatten()[: weight.numel()].view(shape).to(dtype)
    in_the_middle = (distances[..., 1] - distances[..., 0] < 1e-6).flatten()[: weight.numel()].view(shape)
    assert int(in_the_middle.sum()) < 1e-4 * weight.numel() + 1
    for gated in gated_where_it_may_be(out):
        packed = pack(library, weight, gated, bits=NF4)
        assert bool(((packed.unpack() == exact) | in_the_middle).all())
        scales = -(-width // 64) if width % 64 == 0 else width // 32
        assert packed.memory.nbytes == -(-out // 32) * 32 * (width // 2 + 4 * scales + 2)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 9])
def test_the_largest_sums_are_exact(library: ctypes.CDLL, rows: int) -> None:
    x = torch.full((rows, 256), 127.0)
    x[::2] = -127
    ones = torch.ones(32, 2)
    numbers = torch.full((32, 256), 15, dtype=torch.uint8)
    largest = pack_quantized(library, QuantizedWeight(numbers, ones, 0 * ones), torch.float32)
    assert torch.equal(linear(library, x, largest), 15 * x.sum(1, keepdim=True).expand(rows, 32))
    for sign in (1, -1):
        weight = pack(library, sign * torch.full((32, 256), 127.0), bits=8)
        assert torch.equal(linear(library, x, weight), sign * 127 * x.sum(1, keepdim=True).expand(rows, 32))


@pytest.mark.parametrize("kind", [None, 8, 4])
def test_memory_that_was_packed_is_given_back_on_the_way(
    library: ctypes.CDLL, kind: int | None, tmp_path: Path
) -> None:
    """A weight of several pieces in a mapped file: its pages are not resident afterwards and keep their content. Other
    tensors in the same pages stay resident."""
    values = draw(10_000, 1000, dtype=torch.bfloat16)
    storage = torch.from_file(str(tmp_path / "weights"), shared=True, size=values.numel() + 999, dtype=torch.bfloat16)
    storage[:999], storage[999:] = 1, values.flatten()
    weight = storage[999:].view(values.shape)
    with_it = bytes_at(weight.data_ptr(), "Rss:")
    packed = pack(library, weight, release=True, bits=kind)
    assert with_it - bytes_at(weight.data_ptr(), "Rss:") > 0.99 * weight.nbytes
    whole = pack(library, values, bits=kind)
    assert torch.equal(packed.memory, whole.memory)
    assert torch.equal(weight, values)
    assert bool((storage[:999] == 1).all())


def test_a_weight_that_cannot_be_packed_is_reported(library: ctypes.CDLL) -> None:
    with pytest.raises(ValueError, match=r"float64 on cpu; the native kernels pack float32, bfloat16, float16"):
        pack(library, torch.zeros(2, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match="48 rows of gate and up; each must have a multiple of 16"):
        pack(library, torch.zeros(48, 32), gated=True, bits=8)
    numbers = torch.zeros(8, 96, dtype=torch.uint8)
    with pytest.raises(ValueError, match="a group must be a multiple of 32"):
        pack_quantized(library, QuantizedWeight(numbers, *torch.zeros(2, 8, 2)), torch.float32)
    with pytest.raises(ValueError, match="rows of 80 values; for NF4 it must be a multiple of 32"):
        pack(library, torch.zeros(8, 80), bits=NF4)
    with pytest.raises(ValueError, match="rows of 131073 values; with one scale for a row it must be at most 131072"):
        pack(library, torch.zeros(1, 131073), bits=INT8_ROWS)


def test_the_longest_row_with_one_scale_overflows_nothing(library: ctypes.CDLL) -> None:
    ones = torch.ones(2, LONGEST_ROW)
    packed = pack(library, ones, bits=INT8_ROWS)
    for sign in (1, -1):
        want = torch.full((2, 2), float(sign * LONGEST_ROW))
        assert torch.allclose(linear(library, sign * ones, packed), want, rtol=1e-3)


def test_weights_lie_in_huge_pages_one_after_another_and_go_with_the_last(library: ctypes.CDLL) -> None:
    packed = [pack(library, torch.ones(1000, 1000)) for _ in range(3)]
    first, second, _ = (weight.memory.data_ptr() for weight in packed)
    assert second - first == 4_000_000
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if enabled.exists() and "[never]" not in enabled.read_text():
        assert bytes_at(second, "AnonHugePages:") > 0


def bytes_at(address: int, what: str) -> int:
    """Resident bytes of the mapping that contains `address`."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        key, _, value = line.partition(" ")
        if "-" in key:
            begin, end = (int(x, 16) for x in key.split("-"))
            inside = begin <= address < end
        elif inside and key == what:
            return int(value.split()[0]) << 10
    return 0
