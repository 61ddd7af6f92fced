"""Stateful mixers that run once over all rows of a step.

Mixers of transformers share a few functions: a causal convolution and a scan (the gated delta rule, Kimi's delta
attention, Mamba 2's and Mamba 1's). Everything else in them works on each row alone. So a mixer runs over the step's
rows as over one prompt, and these functions, which are globals of its modelling file, are replaced by ones that know
where sequences begin and end. Outside of a step they are transformers' own.

The scans take the recurrent form always, with states in fp32. A row therefore has the same bits however its text was
cut and whatever else the step computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.activations import ACT2FN

from .recurrent import StateKey, StateSpec, StepStates

_step: ContextVar[StepStates | None] = ContextVar("step", default=None)


def is_ragged(module: nn.Module, specs: dict[StateKey, StateSpec]) -> bool:
    """Whether this module, which keeps these states, calls a convolution and at most one scan that are known."""
    named = _functions_of(module)
    scans_named = named - {"causal_conv1d_fn"}
    dims = {len(spec.shape) for key, spec in specs.items() if key.kind == "recurrent"}
    if "causal_conv1d_fn" not in named or len(scans_named) > 1 or bool(scans_named) != bool(dims):
        return False
    return all(dims == {_STATE_DIMS[name]} for name in scans_named)  # Zamba scans each head alone


def ragged_specs(module: nn.Module, specs: dict[StateKey, StateSpec]) -> dict[StateKey, StateSpec]:
    """The states as the scans keep them: fp32, and of a convolution only the inputs before the next one."""
    (width,) = {part.weight.shape[-1] for part in module.modules() if isinstance(part, nn.Conv1d)}
    return {
        key: StateSpec((width - 1, spec.shape[0]) if key.kind == "conv" else spec.shape, torch.float32, False)
        for key, spec in specs.items()
    }


def all_at_once(module: nn.Module) -> Callable[..., Any]:
    """The forward of a stateful module for which `is_ragged` holds, for the sequences of a step."""
    forward: Callable[..., Any] = module.forward
    space = _globals_of(module)
    for name in _functions_of(module):
        if not hasattr(space[name], "mainspring_own"):
            space[name] = _in_a_step(_RAGGED[name], space[name])

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        step = next((x for x in (*args, *kwargs.values()) if isinstance(x, StepStates)), None)
        if step is None:
            return forward(*args, **kwargs)
        with _within(step), _RowsFirst():
            return forward(*args, **kwargs)

    return run


@contextmanager
def _within(step: StepStates) -> Iterator[None]:
    token = _step.set(step)
    try:
        yield
    finally:
        _step.reset(token)


def _in_a_step(ragged: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(own)
    def run(*args: Any, **kwargs: Any) -> Any:
        step = _step.get()
        return own(*args, **kwargs) if step is None else ragged(step, *args, **kwargs)

    run.mainspring_own = own  # type: ignore[attr-defined]
    return run


def _globals_of(module: nn.Module) -> dict[str, Any]:
    space: dict[str, Any] = inspect.unwrap(type(module).forward).__globals__
    return space


def _functions_of(module: nn.Module) -> set[str]:
    return set(inspect.unwrap(type(module).forward).__code__.co_names) & _RAGGED.keys()


class _RowsFirst(TorchFunctionMode):
    """Computes ``weight @ rows``, with tokens as columns, as a product whose rows are tokens."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) and isinstance(args[0], nn.Parameter):
            return F.linear(args[1].transpose(-1, -2), args[0]).transpose(-1, -2)
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------- the functions, as transformers calls them


def _conv(
    step: StepStates,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """hidden_states ``[1, channels, rows]`` → the same."""
    silu = activation in ("silu", "swish")
    x = hidden_states[0].t().contiguous()
    out = step.scans.conv(x, weight, bias, silu, step.current("conv"), *step.where())
    out = out.t()[None]
    return out if activation is None or silu else ACT2FN[activation](out)


def _delta(
    step: StepStates,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, _Kept]:
    """query, key ``[1, rows, key heads, K]``, value ``[1, rows, heads, V]``, g and beta ``[1, rows, heads]``; Kimi's g
    ``[1, rows, heads, K]`` → like value."""
    q, k, v, decay, b = (x[0].contiguous() for x in (query, key, value, g, beta))
    state, scale = step.current("recurrent"), query.shape[-1] ** -0.5
    out = step.scans.gated_delta(q, k, v, decay, b, state, *step.where(), scale, use_qk_l2norm_in_kernel)
    return out[None].to(query.dtype), _Kept()


def _mamba2(
    step: StepStates,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> tuple[torch.Tensor, _Kept]:
    """hidden_states ``[1, rows, heads, P]``, dt ``[1, rows, heads]``, B and C ``[1, rows, groups, N]`` → fp32 ``[1,
    rows, heads, P]``.

    transformers limits dt in a prompt, but not in the single step of a generated token.
    """
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    if tuple(dt_limit) != (0.0, float("inf")):
        step.tells_prompts = True
        dt = torch.where(step.in_prompt()[None, :, None], dt.clamp(*dt_limit), dt)
    x, dt, B, C = (part[0].float().contiguous() for part in (hidden_states, dt, B, C))
    skip = None if D is None else D.float()
    out = step.scans.mamba2(x, dt, A.float(), B, C, skip, step.current("recurrent"), *step.where())
    return out[None], _Kept()


def _mamba1(
    step: StepStates,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, _Kept]:
    """hidden_states, dt and z ``[1, channels, rows]``, B and C ``[1, N, rows]`` → like hidden_states."""
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    x, dt, B, C = (part[0].t().float().contiguous() for part in (hidden_states, dt, B, C))
    out = step.scans.mamba1(x, dt, A.float(), B, C, D.float(), step.current("recurrent"), *step.where())
    out = out.t()[None]
    return (out if z is None else out * F.silu(z)).to(hidden_states.dtype), _Kept()


class _Kept:
    """Stands for a state that the scan has written to the pool. Mixers only give it back to their cache."""

    def to(self, *_: Any, **__: Any) -> _Kept:
        return self


_RAGGED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv,
    "torch_chunk_gated_delta_rule": _delta,
    "chunk_kimi_delta_attention": _delta,
    "mamba2_chunk_scan": _mamba2,
    "mamba_selective_scan": _mamba1,
}
_STATE_DIMS = {  # of one sequence
    "torch_chunk_gated_delta_rule": 3,
    "chunk_kimi_delta_attention": 3,
    "mamba2_chunk_scan": 3,
    "mamba_selective_scan": 2,
}
