"""Recognise a recurrent mixer: its first product, short convolution, scan, gated norm and output layer.

The mixer runs over rows that belong to a sequence each. The outputs of its first product are replaced: a column has
another sign in each row, by the digits of its number. So what arrives at convolution, scan and norm tells which columns
it is made of. What the rest of the mixer does is tried by the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn

from ....kernels.contract import Scans
from ....kernels.decoder_contract import RecurrenceNames, RecurrentMixer
from ....kernels.reference.reference_scans import ReferenceScans
from ..run.recurrent import StepStates
from .fuse_match import NotRecognisedError

LEVEL = 4.0  # of a column, with either sign: far from 0, and small enough for a sigmoid
NAMES = ("A_log", "dt_bias", "D")  # of parameters, wherever transformers has such a mixer


class _Seen(NamedTuple):
    """A call of a scan: its form and arguments."""

    form: str
    heads: torch.Tensor  # [rows, heads, dim]
    keys: torch.Tensor  # [rows, groups, dim], or with a key for each head
    inputs: Sequence[torch.Tensor]  # [rows, heads]: greater, the greater their columns are
    scale: float = 1.0
    l2norm: bool = False


class _Noting(Scans):
    """Notes what scans are given, and computes them."""

    def __init__(self) -> None:
        self.scans: Any = ReferenceScans()
        self.convolved: list[tuple[torch.Tensor, bool]] = []
        self.seen: list[_Seen] = []

    def conv(self, x: torch.Tensor, weight: Any, bias: Any, activation: bool, *states: Any) -> torch.Tensor:
        self.convolved.append((x, activation))
        out: torch.Tensor = self.scans.conv(x, weight, bias, activation, *states)
        return out

    def gated_delta(self, q: Any, k: Any, v: Any, g: Any, beta: Any, *others: Any) -> torch.Tensor:
        self.seen.append(_Seen("gated_delta", v, q, (-g, beta), *others[-2:]))
        out: torch.Tensor = self.scans.gated_delta(q, k, v, g, beta, *others)
        return out

    def mamba2(self, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, *states: Any) -> torch.Tensor:
        self.seen.append(_Seen("mamba2", x, B, (dt,)))
        out: torch.Tensor = self.scans.mamba2(x, dt, A, B, C, D, *states)
        return out

    def mamba1(self, *_: Any) -> torch.Tensor:
        raise NotRecognisedError("its scan is Mamba 1's, which runs in the model's own code")


class MixerParts(NamedTuple):
    """What a mixer calls."""

    path: str  # of the mixer, in its layer
    products: Sequence[tuple[str, Any]]  # linear layers before its norm, by name
    norm: str


def mixer_candidates(
    module: nn.Module, parts: MixerParts, call: Callable[[], Any], states: StepStates
) -> list[RecurrenceNames]:
    """What the mixer `module` may be. `call` runs it over the rows of a step with `states`, each row a sequence of its
    own."""
    path, products, norm = parts
    sizes = [part.out_features for _, part in products]
    number = torch.arange(sum(sizes))
    rows = states.num_rows
    digits = int(number[-1]).bit_length()
    if digits >= rows:
        raise NotRecognisedError(f"a mixer whose projection has {len(number)} columns is too wide to be recognised")
    level = torch.zeros(rows, len(number))
    level[:digits] = (number >> torch.arange(digits)[:, None] & 1).float() * 2 * LEVEL - LEVEL
    gates: list[torch.Tensor] = []
    noting, scans = _Noting(), states.scans
    with ExitStack() as hooks:
        for (_, part), values in zip(products, level.split(sizes, dim=1), strict=True):
            hooks.callback(part.register_forward_hook(partial(_replace, values)).remove)

        def note_gate(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            gates.extend((*args, *kwargs.values())[1:2])

        handle = module.get_submodule(norm).register_forward_pre_hook(note_gate, with_kwargs=True)
        hooks.callback(handle.remove)
        hooks.callback(setattr, states, "scans", scans)
        states.scans = noting
        call()
    if states.tells_prompts:
        raise NotRecognisedError("its mixer has limits in prompts, which the rows tried here need not reach")
    if len(noting.convolved) != 1 or len(noting.seen) != 1 or len(gates) != 1:
        raise NotRecognisedError("its mixer is not one convolution, one scan and one gated norm")
    (channels, silu), seen = noting.convolved[0], noting.seen[0]
    if any(part.dim() != 2 for part in seen.inputs):
        raise NotRecognisedError("its decay is one for each key, which runs in the model's own code")
    arrived = [channels, gates[0].reshape(rows, -1), *seen.inputs]
    order = torch.cat([_numbers(part.float(), digits) for part in arrived])
    if not torch.equal(order.sort().values, number):
        raise NotRecognisedError("its projection's outputs do not reach convolution, gate and scan as they are")
    (_, heads, value_dim), key_dim = seen.heads.shape, seen.keys.shape[2]
    # Not the keys' own number: a model may repeat them for each head before the scan.
    groups, rest = divmod(channels.shape[1] - heads * value_dim, 2 * key_dim)
    if rest or groups <= 0 or heads % groups:
        raise NotRecognisedError("its convolution's channels are not queries, keys and values")
    held = {name: f"{path}.{name}" for name in NAMES if isinstance(getattr(module, name, None), nn.Parameter)}
    conv = [name for name, child in module.named_children() if isinstance(child, nn.Conv1d)]
    length = sum(p.numel() for p in module.get_submodule(norm).parameters())
    if {"A_log", "dt_bias"} - held.keys() or len(conv) != 1:
        raise NotRecognisedError(f"its mixer has no {', '.join(NAMES[:2])} or no convolution of its own")
    if value_dim * heads % length:
        raise NotRecognisedError("its norm is none over the scan's output")
    found = RecurrentMixer(
        form=seen.form,
        projection=f"{path}.{'+'.join(name for name, _ in products)}",
        columns=_runs(order),
        groups=groups,
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        conv=f"{path}.{conv[0]}",
        silu=silu,
        decay=held["A_log"],
        decay_bias=held["dt_bias"],
        skip=held.get("D"),
        norm=f"{path}.{norm}",
        norm_size=length,
        gate_first=False,
        gate="silu",
        scale=seen.scale,
        l2norm=seen.l2norm,
        layer=states.running_layer,
    )
    kinds = product((False, True), ("silu", "sigmoid"), dict.fromkeys((length, length // groups)))
    return [found._replace(gate_first=first, gate=gate, norm_size=size) for first, gate, size in kinds]


def _replace(values: torch.Tensor, _: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
    return values.to(out.dtype).expand_as(out)


def _numbers(part: torch.Tensor, digits: int) -> torch.Tensor:
    """The number of each column of `part`, ``[rows, n]``, by its signs. The last row is that of zeros."""
    return ((part[:digits] > part[-1]).long() << torch.arange(digits)[:, None]).sum(0)


def _runs(order: torch.Tensor) -> list[list[int]]:
    """``[first, length]`` of each piece that counts up by one."""
    runs: list[list[int]] = []
    for number in order.tolist():
        if runs and number == sum(runs[-1]):
            runs[-1][1] += 1
        else:
            runs.append([number, 1])
    return runs
