"""The modules that take the place of what `fuse` recognised. Numerics are the backend's; shapes are the original's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ....kernels import host_memory
from ....kernels.contract import Backend
from ....kernels.decoder_contract import Experts, GatedMLP, Linear, Mixture, Routing


class FusedRMSNorm(nn.Module):
    """``x / rms(x) * (offset + weight)`` over the last dimension, in one kernel. Keeps the original's parameter."""

    def __init__(self, weight: nn.Parameter, eps: float, offset: float, backend: Backend) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps
        self.offset = offset
        self._rms_norm = backend.rms_norm

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[..., n]`` → the same shape and dtype. The input may be a strided view (a head norm after joined q/k/v)."""
        return self._rms_norm(hidden_states, self.weight, self.eps, self.offset)


class FusedMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` with gate and up in one product, gate first."""

    def __init__(self, gate_up: nn.Linear, down: nn.Linear, activation: str, backend: Backend) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.activation = activation
        self._act_and_mul = backend.act_and_mul

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` → ``[..., hidden]``."""
        gate_up = self.gate_up(hidden_states.reshape(-1, hidden_states.shape[-1]))
        out: torch.Tensor = self.down(self._act_and_mul(gate_up, self.activation))
        return out.view(*hidden_states.shape[:-1], out.shape[-1])

    def tensors(self) -> GatedMLP:
        gate_up, down = self.gate_up, self.down
        return GatedMLP(Linear(gate_up.weight, gate_up.bias), Linear(down.weight, down.bias), self.activation)


class FusedRouter(nn.Module):
    """Chooses the experts of each row by a product: see `Routing`. Keeps the original's tensors."""

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        correction: torch.Tensor | None,
        routing: Routing,
        backend: Backend,
    ) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias
        self.correction = nn.Buffer(correction) if correction is not None else None
        self.routing = routing
        self._linear = backend.linear
        self._route = backend.route

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``[..., hidden]`` → logits ``[rows, experts]``, shares and numbers of experts ``[rows, top_k]``."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        precise = self.routing.precise
        given = (rows.float(), self.weight.float()) if precise else (rows, self.weight, self.bias)
        logits = self._linear(*given)
        chosen, shares = self._route(logits, self.routing, self.correction)
        return logits, shares if self.routing.widened else shares.to(hidden_states.dtype), chosen


class FusedExperts(nn.Module):
    """The experts of a mixture, each a gated MLP: see `Backend.experts`. Keeps the original's parameters."""

    def __init__(
        self, gate_up: nn.Parameter, down: nn.Parameter, activation: str, backend: Backend, *biases: nn.Parameter
    ) -> None:
        super().__init__()
        self.gate_up = gate_up
        self.down = down
        self.gate_up_bias = biases[0] if biases else None
        self.down_bias = biases[1] if biases else None
        self.activation = activation
        self.num_experts = len(down)
        self._experts = backend.experts

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Rows ``[rows, hidden]``, the experts of each and their shares ``[rows, n]`` → ``[rows, hidden]``."""
        return self._experts(hidden_states, top_k_index, top_k_weights, self.tensors())

    def tensors(self) -> Experts:
        first, second = self.gate_up_bias, self.down_bias
        biases = None if first is None or second is None else (first, second)
        return Experts(self.gate_up, self.down, self.activation, biases)


class FusedMixture(nn.Module):
    """A router and the experts that it chooses; perhaps an expert that all rows share, and the gate of its output."""

    def __init__(
        self,
        router: FusedRouter,
        experts: FusedExperts,
        shared: FusedMLP | None = None,
        shared_gate: nn.Linear | None = None,
        gives_shares: bool = False,
    ) -> None:
        super().__init__()
        self.gives_shares = gives_shares  # beside the output, as the original does
        self.router = router
        self.experts = experts
        self.shared = shared
        self.shared_gate = shared_gate

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """``[..., hidden]`` → ``[..., hidden]``, perhaps with the shares ``[rows, top_k]``."""
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        _, shares, chosen = self.router(rows)
        out: torch.Tensor = self.experts(rows, chosen, shares)
        if self.shared is not None:
            more: torch.Tensor = self.shared(rows)
            out = out + (more if self.shared_gate is None else gate_rows(more, self.shared_gate(rows)))
        out = out.view(hidden_states.shape)
        return (out, shares) if self.gives_shares else out

    def tensors(self) -> Mixture:
        router, experts, shared, gate = self.router, self.experts, self.shared, self.shared_gate
        return Mixture(
            Linear(router.weight, router.bias),
            router.routing,
            router.correction,
            experts.tensors(),
            None if shared is None else shared.tensors(),
            None if gate is None else gate.weight,
        )


def gate_rows(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """``[rows, n]`` times the sigmoids of ``[rows, 1]``, which are computed alike wherever they are."""
    return (x.float() / (1 + torch.exp(-gate.float()))).to(x.dtype)


class JoinedProjections(nn.Module):
    """Several linear layers over the same input, as one product.

    The model calls them one after another (``self.q_proj(x)``, ``self.k_proj(x)``, ``self.v_proj(x)``). The first call
    computes all, and each of the others takes its part, once. Parts are handed over only for the tensor object that
    they are made of, which is held until the last is taken. A call with any other tensor computes anew.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, sizes: Sequence[int], backend: Backend) -> None:
        super().__init__()
        self._linear = backend.linear
        self.weight = nn.Parameter(weight, requires_grad=False)  # [sum(sizes), in]
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.sizes = list(sizes)
        # the input, and the parts of its product still to be taken; in a list, for setting a module's attribute is slow
        self._handoff: list[tuple[torch.Tensor, list[torch.Tensor | None]] | None] = [None]

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """``[..., in]`` → ``[..., sizes[index]]``, a strided view into the joint product."""
        pending = self._handoff[0]
        if pending is not None and pending[0] is x:
            parts = pending[1]
            part = parts[index]
            if part is not None:
                parts[index] = None
                if not any(p is not None for p in parts):
                    self._handoff[0] = None
                return part
        product: tuple[torch.Tensor, ...] = torch.split(self._linear(x, self.weight, self.bias), self.sizes, dim=-1)
        self._handoff[0] = (x, [None if i == index else p for i, p in enumerate(product)])
        return product[index]


class ProjectionPart(nn.Module):
    """One of several joined projections, under the name the model calls it by."""

    def __init__(self, joined: JoinedProjections, index: int, has_bias: bool) -> None:
        super().__init__()
        self._joined = (joined,)  # in a tuple: the parent registers it, once
        self.index = index
        self.has_bias = has_bias
        self.in_features = joined.weight.shape[1]
        self.out_features = joined.sizes[index]
        self._start = sum(joined.sizes[:index])

    @property
    def sizes(self) -> list[int]:
        """Outputs of all that are joined."""
        return self._joined[0].sizes

    @property
    def weight(self) -> torch.Tensor:
        return self._joined[0].weight.detach().narrow(0, self._start, self.out_features)

    @property
    def bias(self) -> torch.Tensor | None:
        bias = self._joined[0].bias
        return bias.detach().narrow(0, self._start, self.out_features) if bias is not None and self.has_bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._joined[0].part(self.index, x)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A linear layer around existing tensors, with nothing allocated or initialised."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear.eval()


def join(linears: Sequence[nn.Linear]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights ``[sum of outputs, in]`` and biases of several layers, one after another. Where only some have a bias,
    the others get zeros, which change nothing."""
    weight = host_memory.joined([linear.weight.detach() for linear in linears])
    if all(linear.bias is None for linear in linears):
        return weight, None
    biases = [weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
    return weight, torch.cat([bias.detach() for bias in biases])
