"""Recognise modules by what they hold and what they compute, and compare two that should be equal.

Names play no part. The candidate's own forward, run in fp32 on small random weights, must give what the fused module
gives. That shows the formula; rounding in the model's dtype is then compared with the real weights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import permutations, product
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only
from transformers.pytorch_utils import Conv1D

from ....kernels.contract import CLAMPED, Backend
from ....kernels.decoder_contract import Routing
from ....kernels.lazy_weight import LazyWeight
from ..run.fused import FusedExperts, FusedMixture, FusedMLP, FusedRMSNorm, FusedRouter, join, linear_of
from .fuse_observe import SEED, is_plain_linear

TOLERANCE = {torch.float32: 2e-5, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
"""Largest difference allowed, as a part of the row's root mean square plus the element's own size. Half precision
rounds two or three times on the way in one order and once in the other; a row of an MLP then sums such differences."""

# Tiny random models of 104 architectures stay below 1e-4 in fp32. In half precision the library's own attention rounds
# scores, and a router may send a token to another expert, so the middle row is compared there.
LOGITS_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Largest difference of logits or final hidden states, see `deviations`."""

LARGE = 1 << 16  # elements of a matrix that is widened when it is used

ROW_COUNTS = (8, 16)  # both multiples of ROW_MULTIPLE: the only counts that are ever run

ACTIVATIONS = ("silu", "gelu_tanh", "gelu")

_OF_ANY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str)  # attributes that are compared by their values

_HIDDEN, _INNER = 16, 24  # sizes of the small random weights; different, so that a mix-up shows


class NotRecognisedError(Exception):
    """Why a candidate is not what it looked like."""


class NormOptions(NamedTuple):
    eps: float
    offset: float


class MLPOptions(NamedTuple):
    """Names of the linear layers; gate and up are one name where the checkpoint has them merged, gate first."""

    gate: str
    up: str
    down: str
    activation: str


class ExpertsOptions(NamedTuple):
    """Names of the parameters."""

    gate_up: str
    down: str
    activation: str
    gate_up_bias: str = ""
    down_bias: str = ""


def is_norm_candidate(module: nn.Module) -> bool:
    """One input, one vector and a small positive number: what an RMSNorm has."""
    if module._modules or module._buffers or len(module._parameters) != 1:
        return False
    (parameter,) = module._parameters.values()
    return parameter is not None and parameter.dim() == 1 and bool(_small_numbers(module)) and _takes_one_input(module)


def is_mlp_candidate(module: nn.Module) -> bool:
    """One input, linear layers of the shapes of (gate, up, down) or (gate_up, down), and no other parameter."""
    linears = _linears(module)
    if not linears or not any(_roles(linears)):
        return False
    held = sum(len(list(linear.parameters())) for linear in linears.values())
    return held == len(list(module.parameters())) and _takes_one_input(module)


def is_router_candidate(module: nn.Module) -> bool:
    """One input, one matrix, and the number of its rows: what a router has, perhaps with a bias or a correction of its
    scores. So have layers of torch's own, and Conv1D."""
    of_torch = isinstance(module, nn.Linear | nn.Embedding | Conv1D) or type(module).__module__.startswith("torch.")
    if of_torch or module._modules or len(module._buffers) > 1 or None in module._parameters.values():
        return False
    matrices = [len(p) for p in module.parameters() if p.dim() == 2]
    others = [tuple(x.shape) for x in (*module.parameters(), *module.buffers()) if x.dim() != 2]
    if len(matrices) != 1 or len(others) > 1 or any(shape != (matrices[0],) for shape in others):
        return False
    kept = len(_kept_buffers(module)) == len(module._buffers)
    return kept and matrices[0] in _integers(module) and _takes_one_input(module)


def router_names(router: nn.Module) -> tuple[str, str | None]:
    """Of the matrix and the bias."""
    names = {parameter.dim(): name for name, parameter in router.named_parameters()}
    return names[2], names.get(1)


def correction_of(router: nn.Module) -> torch.Tensor | None:
    """The only buffer, if the checkpoint has it."""
    return next(iter(_kept_buffers(router).values()), None)


def is_experts_candidate(module: nn.Module) -> bool:
    """Rows, their experts and shares come in, and the parameters have the shapes of gate and up together, and down."""
    return _experts_names(module) is not None and len(inspect.signature(module.forward).parameters) == 3


def first_of(out: Any) -> Any:
    """What a module gives, of several results the first."""
    return out[0] if isinstance(out, tuple) else out


def recognise_mixture(module: nn.Module) -> tuple[str, ...]:
    """What the module gives beside its output: nothing, or the shares. Raises `NotRecognisedError` for more."""
    router = next(part for part in module.children() if isinstance(part, FusedRouter))
    rows = random_rows(ROW_COUNTS[0], router.weight.shape[1], -1, 1, router.weight)
    try:
        out, shares = module(rows), router(rows)[1]
    except Exception as error:  # any model's code
        raise NotRecognisedError(f"can't be run on random rows ({type(error).__name__}: {error})") from error
    if not isinstance(out, tuple):
        return ()
    if len(out) == 2 and isinstance(out[1], torch.Tensor) and torch.equal(out[1], shares):
        return ("shares",)
    raise NotRecognisedError("gives more than an output and shares")


def mixture_of(module: nn.Module, *beside: str) -> FusedMixture | None:
    """The fused router and experts of a module that takes one input, and has nothing else but a shared expert."""
    if isinstance(module, FusedMixture) or module._parameters or not _takes_one_input(module):
        return None
    held: list[Any] = [part for part in module.children() if [*part.parameters()]]
    parts = {type(part): part for part in held}
    router, experts = parts.pop(FusedRouter, None), parts.pop(FusedExperts, None)
    shared, gate = parts.pop(FusedMLP, None), parts.pop(nn.Linear, None)
    if parts or router is None or experts is None or len(held) != 2 + (shared is not None) + (gate is not None):
        return None
    if shared is not None and shared.activation != experts.activation:
        return None
    if gate is not None and (shared is None or gate.out_features != 1 or gate.bias is not None):
        return None
    return FusedMixture(router, experts, shared, gate, gives_shares=bool(beside))


def recognise_norm(module: nn.Module, backend: Backend) -> NormOptions:
    """eps and offset (0 or 1) of an RMSNorm. Raises `NotRecognisedError` for what is none."""
    ((name, parameter),) = module.named_parameters()
    weight = _random(torch.Generator().manual_seed(SEED), parameter.device, len(parameter))
    # small rows too: there eps matters
    agrees = _trial(module, {name: weight}, len(parameter), smallest=-3)
    for options in (NormOptions(eps, offset) for eps in _small_numbers(module) for offset in (0.0, 1.0)):
        if agrees(FusedRMSNorm(nn.Parameter(weight), *options, backend)):
            return options
    raise NotRecognisedError("computes something other than x / rms(x) * weight or x / rms(x) * (1 + weight)")


def recognise_mlp(module: nn.Module, backend: Backend) -> MLPOptions:
    """Which layer is gate, up and down, and the activation. Raises `NotRecognisedError` where no assignment fits."""
    linears = _linears(module)
    for gate, up, down in _roles(linears):
        random = partial(_random, torch.Generator().manual_seed(SEED), linears[down].weight.device)
        inner = _INNER if gate != up else 2 * _INNER
        sizes = {gate: (inner, _HIDDEN), up: (inner, _HIDDEN), down: (_HIDDEN, _INNER)}
        small = {
            name: linear_of(random(*size), None if linears[name].bias is None else random(size[0]))
            for name, size in sizes.items()
        }
        tensors = {f"{name}.{held}": p for name, linear in small.items() for held, p in linear.named_parameters()}
        agrees = _trial(module, tensors, _HIDDEN, smallest=-2)
        gate_up = linear_of(*join([small[name] for name in dict.fromkeys((gate, up))]))
        for activation in ACTIVATIONS:
            if agrees(FusedMLP(gate_up, small[down], activation, backend)):
                return MLPOptions(gate, up, down, activation)
    raise NotRecognisedError("computes something other than down(act(gate(x)) * up(x)) with silu or gelu")


def recognise_router(module: nn.Module, backend: Backend, dtype: torch.dtype) -> Routing:
    """How a router chooses, in a model of this dtype. Raises `NotRecognisedError` for what is none."""
    name, bias_name = router_names(module)
    parameter = module.get_parameter(name)
    if parameter.dtype != dtype:
        raise NotRecognisedError(f"is in {parameter.dtype}, where rows are in {dtype}")
    experts, width = parameter.shape
    # Logits are small, because the sigmoids of large ones are all 1. There are so many rows that each rule shows.
    generator = torch.Generator().manual_seed(SEED)
    shapes = (experts, width), (64, width), (experts,)
    weight, rows, numbers = (torch.randn(shape, generator=generator).to(parameter.device) for shape in shapes)
    weight, numbers = weight * width**-0.5, numbers * 0.2  # the numbers stand for a bias or a correction
    given = {name: weight, **dict.fromkeys(_kept_buffers(module), numbers)}
    if bias_name:
        given[bias_name] = numbers
    bias = nn.Parameter(numbers) if bias_name else None
    corrections = [None] if correction_of(module) is None else [numbers, None]
    agrees = _trial(module, given, width, -2, lambda _: (rows,), routes)
    logits, shares, chosen = module(rows.to(parameter.dtype))
    widened, precise = (x.dtype == torch.float32 for x in (shares, logits))
    precise = precise and parameter.dtype != torch.float32
    if precise and bias_name:
        raise NotRecognisedError("adds a bias to fp32 logits")
    sizes = [n for n in _integers(module) if n > 1]
    groups = [(n, kept) for n, kept in permutations((*sizes, 1), 2) if kept < n and experts % n == 0 and experts > n]
    scales = [1.0, *(float(x) for x in vars(module).values() if type(x) in (int, float) and x > 0)]
    for sigmoid, normalise, correction, (count, kept), scale in product(
        (False, True), (True, False), corrections, [(1, 1), *groups], dict.fromkeys(scales)
    ):
        corrected = correction is not None
        routing = Routing(chosen.shape[1], normalise, widened, sigmoid, precise, corrected, count, kept, scale)
        if agrees(FusedRouter(nn.Parameter(weight), bias, correction, routing, backend)):
            return routing
    raise NotRecognisedError("computes something other than the largest of a softmax or of sigmoids")


def routes(out: Any) -> torch.Tensor:
    """What a router gave: the shares and logits of the experts chosen, the likeliest first, ``[rows, 2 * n]``. So those
    that are equally likely may stand for one another, if nothing corrects them."""
    logits, shares, chosen = out
    logits, order = logits.gather(1, chosen).sort(1, descending=True)
    return torch.cat([shares.gather(1, order), logits.to(shares.dtype)], 1)


def recognise_experts(module: nn.Module, backend: Backend) -> ExpertsOptions:
    """Names and activation of a mixture's experts. Raises `NotRecognisedError` for what are none."""
    names = _experts_names(module)
    assert names is not None, "it is a candidate"
    first = module.get_parameter(names[0])
    random = partial(_random, torch.Generator().manual_seed(SEED), first.device)
    tensors = [random(*shape) for shape in _experts_shapes(len(first), _HIDDEN, _INNER, len(names) == 4)]
    given = partial(given_experts, len(first))
    agrees = _trial(module, dict(zip(names, tensors, strict=True)), _HIDDEN, -2, given)
    gate_up, down, *biases = map(nn.Parameter, tensors)
    for activation in (CLAMPED,) if biases else ACTIVATIONS:
        if agrees(FusedExperts(gate_up, down, activation, backend, *biases)):
            return ExpertsOptions(names[0], names[1], activation, *names[2:])
    raise NotRecognisedError("computes something other than a sum of down(act(gate(x)) * up(x)) with a known act")


def _experts_shapes(experts: int, hidden: int, inner: int, biased: bool) -> list[tuple[int, ...]]:
    """Of the parameters gate_up and down, and of their biases; see `Experts`."""
    if biased:
        return [(experts, hidden, 2 * inner), (experts, inner, hidden), (experts, 2 * inner), (experts, hidden)]
    return [(experts, 2 * inner, hidden), (experts, hidden, inner)]


def _experts_names(module: nn.Module) -> tuple[str, ...] | None:
    """Of the parameters with `_experts_shapes`, if it has just these. Those with biases only on a CPU: elsewhere the
    model's own are faster."""
    held = module._parameters
    if module._buffers or len(held) not in (2, 4) or len(list(module.parameters())) != len(held):
        return None
    shapes, biased = {name: tuple(p.shape) for name, p in module.named_parameters()}, len(held) == 4
    if biased and next(module.parameters()).device.type != "cpu":
        return None
    for names in permutations(shapes):
        found = [shapes[name] for name in names]
        if len(found[1]) == 3:
            experts, out, into = found[1]
            hidden, inner = (into, out) if biased else (out, into)
            if found == _experts_shapes(experts, hidden, inner, biased):
                return names
    return None


def given_experts(count: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows ``[1, rows, n]`` as experts are given them: ``[rows, n]``, and two random experts with shares for each."""
    generator, rows = torch.Generator().manual_seed(SEED), x.shape[1]
    shares, chosen = torch.rand(rows, count, generator=generator).topk(min(2, count))
    return x[0], chosen.to(x.device), shares.to(x)


def _trial(
    module: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    width: int,
    smallest: float,
    given: Callable[[torch.Tensor], tuple[torch.Tensor, ...]] = lambda x: (x,),
    read: Callable[[Any], Any] = lambda out: out,
) -> Callable[[nn.Module], bool]:
    """Run `module` with these for its parameters; → a test whether another gives the same. given: its arguments, made
    of random rows. read: the tensor to compare, of what it gives."""
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        raise NotRecognisedError("its forward is hooked or replaced")
    arguments = given(random_rows(ROW_COUNTS[-1], width, smallest, 2, next(iter(tensors.values()))))
    try:
        out = read(functional_call(module, dict(tensors), arguments))
    except Exception as error:  # any model's code
        raise NotRecognisedError(f"can't be run on random weights ({type(error).__name__}: {error})") from error
    if not isinstance(out, torch.Tensor):
        raise NotRecognisedError(f"returns a {type(out).__name__}")
    return lambda fused: difference(read(fused(*arguments)), out) <= TOLERANCE[torch.float32]


def code_of(module: nn.Module) -> Any:
    """What a module is but for the values of its parameters. It is equal for most layers' modules of one kind."""
    hooked = any((module._forward_hooks, module._forward_pre_hooks))
    own = {name: value for name, value in vars(module).items() if name not in _OF_ANY_MODULE}
    kept = _kept_buffers(module)
    own |= {name: x for name, x in module._buffers.items() if name not in kept}
    plain = {name: x if isinstance(x, _PLAIN) else id(x) for name, x in own.items()}
    shapes = {name: None if x is None else (x.shape, x.dtype) for name, x in (module._parameters | kept).items()}
    children = {name: None if child is None else code_of(child) for name, child in module._modules.items()}
    return type(module), id(module) if hooked else 0, *(tuple(part.items()) for part in (plain, shapes, children))


def compare(
    original: Callable[[torch.Tensor], Any],
    fused: Callable[[torch.Tensor], Any],
    like: torch.Tensor,
    row_counts: Sequence[int] = ROW_COUNTS,
) -> None:
    """Run both on fixed random rows of the width and dtype of `like`; raises `NotRecognisedError` if they differ."""
    limit = TOLERANCE[like.dtype]
    for rows in row_counts:
        x = random_rows(rows, like.shape[-1], -1, 1, like)
        own = original(x)
        if not isinstance(own, torch.Tensor):
            raise NotRecognisedError(f"returns a {type(own).__name__}")
        error = difference(own, fused(x))
        if not error <= limit:
            raise NotRecognisedError(
                f"fused and original differ by {error:.1e} on {rows} rows, the limit is {limit:.1e}"
            )


def difference(expected: torch.Tensor, got: torch.Tensor) -> float:
    """The largest difference of two ``[..., n]``, as a part of the row's root mean square plus the element's size."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return float("inf")
    return float(row_differences(expected, got).max())


def row_differences(expected: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    """The same of each row: ``[...]``."""
    a, b = expected.float(), got.float()
    scale = a.pow(2).mean(-1, keepdim=True).sqrt() + a.abs()
    return ((a - b).abs() / scale.clamp_min(1e-30)).amax(-1)


def deviations(got: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """The largest difference of each row of two ``[rows, n]``, in standard deviations of `own`: ``[rows]``."""
    own = own.float()
    return (got.float() - own).abs().amax(-1) / own.std().clamp_min(1e-12)


@contextmanager
def widened(module: nn.Module, backend: Backend, stack: Any = None) -> Iterator[None]:
    """Hold every half-precision tensor of `module`, and of its `StackedDecoder`, in fp32 for a while. In host memory,
    large weights are widened anew each time they are used, so that there are never two copies of all; but not where
    `backend` knows weights by their ids."""
    owned = [(m, *named) for m in module.modules() for named in m.named_parameters("", False, False)]
    large = [each for each in owned if _is_large(each[2]) and not backend.knows_ids]
    fp32 = {id(weight): nn.Parameter(LazyWeight.of(weight, torch.float32), False) for *_, weight in large}
    tensors = (*module.parameters(), *module.buffers())
    narrow = [(t, t.dtype) for t in tensors if t.dtype in LOGITS_TOLERANCE and id(t) not in fp32]
    layers = stack and stack.layers
    try:
        for owner, name, weight in large:
            setattr(owner, name, fp32[id(weight)])
        for tensor, _ in narrow:
            tensor.data = tensor.data.float()
        if stack:
            stack.layers = tree_map_only(torch.Tensor, lambda x: fp32.get(id(x), x), layers)
        yield
    finally:
        for owner, name, weight in large:
            setattr(owner, name, weight)
        for tensor, dtype in narrow:
            tensor.data = tensor.data.to(dtype)
        if stack:
            stack.layers = layers


def _is_large(weight: torch.Tensor) -> bool:
    is_matrix = weight.dim() in (2, 3) and math.prod(weight.shape[-2:]) >= LARGE
    return is_matrix and weight.dtype in LOGITS_TOLERANCE and weight.device.type == "cpu"


def _roles(linears: dict[str, nn.Linear]) -> Iterator[tuple[str, str, str]]:
    """Assignments of (gate, up, down) that the shapes allow; gate is up where they are merged."""
    for first, *middle, down in permutations(linears):
        inner, hidden = linears[first].weight.shape
        if len(middle) == 1 and linears[middle[0]].weight.shape == (inner, hidden):
            if linears[down].in_features == inner:
                yield first, middle[0], down
        elif not middle and inner % 2 == 0 and linears[down].in_features == inner // 2:
            yield first, first, down


def _linears(module: nn.Module) -> dict[str, nn.Linear]:
    linears = {name: m for name, m in module.named_children() if isinstance(m, nn.Linear) and is_plain_linear(m)}
    return linears if len(linears) in (2, 3) else {}


def _kept_buffers(module: nn.Module) -> dict[str, Any]:
    """Those that a checkpoint has."""
    return {name: x for name, x in module._buffers.items() if name not in module._non_persistent_buffers_set}


def _small_numbers(module: nn.Module) -> list[float]:
    return list(dict.fromkeys(v for v in vars(module).values() if isinstance(v, float) and 0.0 < v < 0.1))


def _integers(module: nn.Module) -> list[int]:
    return list(dict.fromkeys(v for v in vars(module).values() if type(v) is int))


def _takes_one_input(module: nn.Module) -> bool:
    return len(inspect.signature(module.forward).parameters) == 1


def _random(generator: torch.Generator, device: torch.device, *shape: int) -> torch.Tensor:
    """Weights of about the size that keeps a row's scale, off zero so that nothing looks like its absence."""
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 1.0
    return torch.randn(shape, generator=generator).mul_(scale).add_(0.1).to(device)


def random_rows(rows: int, width: int, smallest: float, largest: float, like: torch.Tensor) -> torch.Tensor:
    """``[1, rows, width]``, row scales from ``10**smallest`` to ``10**largest``, with a mean and a few outliers."""
    generator = torch.Generator().manual_seed(SEED + rows)
    x = torch.randn(rows, width, generator=generator) + 0.2
    x[:, :: max(1, width // 4)] *= 4
    return (x * torch.logspace(smallest, largest, rows)[:, None])[None].to(like)
