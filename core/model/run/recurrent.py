"""Recurrent state of a model's own modules: where it lies, and how a step reaches it.

transformers hands every stateful mixer its state through the cache object that travels through the model
(`get_conv_state`, `update_conv_state`, `get_recurrent_state`, `update_recurrent_state`; MiniMax: `get_linear_cache`,
`set_linear_cache`). Here a `StepStates` takes the place of that cache. The states of all sequences lie in one tensor
``[state slots, *shape]`` for each state of each layer.

The rows of a step belong to several sequences, and a mixer of transformers knows only one row of tokens or a batch of
sequences. So a stateful module is called once for the first tokens of all sequences as a batch, then for their second
tokens, and so on (`one_token_each`). Each call takes the single step of its class. A row therefore has the same bits
however its text was cut and whatever else the step computes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from ....kernels import host_memory
from ....kernels.contract import Scans, SequenceOffsets
from ....kernels.reference.reference_scans import ReferenceScans
from ...memory.updates import Copies

Kind = Literal["conv", "recurrent"]


class StateKey(NamedTuple):
    """Which state of a model."""

    layer: int  # `layer_idx` of the module that keeps it
    kind: Kind
    number: int = 0  # `state_idx`


class StateSpec(NamedTuple):
    """One state of one sequence."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    follows_model: bool  # whether its dtype is that of the weights

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Lot(NamedTuple):
    """Rows that a stateful module computes in one call: at most one of each sequence."""

    rows: torch.Tensor  # int64 [n]
    slots: torch.Tensor  # int64 [n]: state slots
    fresh: torch.Tensor | None  # bool [n]: the sequence begins with this row; None: no sequence does


class StepStates(DynamicCache):
    """Travels through a model as its cache. Attention keeps nothing in it; stateful modules find their step in it."""

    def __init__(self, config: Any, specs: Mapping[StateKey, StateSpec]) -> None:
        super().__init__(config=config)
        self.specs = dict(specs)
        self.pool: dict[StateKey, torch.Tensor] = {}
        self.sequences = SequenceOffsets.of((), ())
        self._here: SequenceOffsets | None = None
        self._where: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        self.num_rows = 0
        self.lots: list[Lot] = []
        self.scans: Scans = ReferenceScans()
        self.modules: list[nn.Module] = []  # which keep the states
        self.looped: list[nn.Module] = []  # those that are called once for each token of a sequence
        self.tells_prompts = False  # whether a prompt's token is computed otherwise than a generated one
        self._at = StateKey(0, "conv")  # the layer whose mixer runs, and its convolution

    @property
    def state_bytes(self) -> int:
        """Of one sequence."""
        return sum(spec.num_bytes for spec in self.specs.values())

    def allocate(self, slots: int, dtype: torch.dtype, zeros: Callable[..., torch.Tensor]) -> None:
        """Make room for the states of `slots` state slots, in a model of this `dtype`. `zeros(shape, dtype)` makes a
        tensor."""
        self.pool = {
            key: zeros((slots, *spec.shape), dtype if spec.follows_model else spec.dtype)
            for key, spec in self.specs.items()
        }

    def give_back(self) -> None:
        """Return the memory of the states to the system; no step can run until `allocate`."""
        for tensor in self.pool.values():
            host_memory.give_back(tensor)
        self.pool = {}

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy states from slot to slot: int64 ``[copies]`` each. No slot is in both."""
        for tensor in self.pool.values():
            tensor.index_copy_(0, target, tensor.index_select(0, source))

    @property
    def slot_bytes(self) -> int:
        """Of one state slot, as allocated."""
        return sum(tensor[0].nbytes for tensor in self.pool.values())

    def copy_host(self, copies: Copies, host: torch.Tensor) -> None:
        """Launch `copies` between state slots and `host` memory, uint8 ``[host slots, slot_bytes]``. Allocates no
        device memory."""
        for slot, place in copies.saves:
            for held, state in self._parts(host[place], slot):
                held.copy_(state, non_blocking=True)
        for slot, place in copies.loads:
            for held, state in self._parts(host[place], slot):
                state.copy_(held, non_blocking=True)

    def _parts(self, host: torch.Tensor, slot: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The parts of a host slot, and the states of a state slot that they are for, as bytes."""
        first = 0
        for tensor in self.pool.values():
            state = tensor[slot].view(-1).view(torch.uint8)
            yield host[first : first + state.numel()], state
            first += state.numel()

    def begin(self, sequences: SequenceOffsets, num_rows: int) -> None:
        """The next forward pass computes these sequences, in `num_rows` rows, padding included."""
        self.sequences, self.num_rows = sequences, num_rows
        self._here = self._where = None
        self.lots = self._lots() if self.looped else []

    def _lots(self) -> list[Lot]:
        sequences, lots = self.sequences, []
        first = sequences.cu_seqlens[:-1].long()
        counts = sequences.cu_seqlens[1:].long() - first
        slots, fresh = sequences.slots.long() + 1, sequences.starts == 0
        device = next(iter(self.pool.values())).device
        for nth in range(int(counts.max()) if len(counts) else 0):
            there = counts > nth
            begins = fresh[there].to(device) if nth == 0 and bool(fresh.any()) else None
            lots.append(Lot((first[there] + nth).to(device), slots[there].to(device), begins))
        return lots

    # ------------------------------------------------------------------ mixers that run over all rows at once

    def where(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the step's sequences: row offsets int32 ``[sequences + 1]``, state slots int32 ``[sequences]``, and
        whether a state begins as zeros, bool ``[sequences]``."""
        if self._where is None:
            of = self._offsets()
            self._where = of.cu_seqlens, of.slots + 1, of.starts == 0
        return self._where

    @property
    def running_layer(self) -> int:
        """The layer whose mixer asked for a state last."""
        return self._at.layer

    def of_layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The pools of a layer with one convolution and one scan."""
        return self.pool[StateKey(layer, "conv")], self.pool[StateKey(layer, "recurrent")]

    def _offsets(self) -> SequenceOffsets:
        """Of the step's sequences, where the states are."""
        if self._here is None:
            device = next(iter(self.pool.values())).device
            of = self.sequences.on_device or self.sequences
            self._here = SequenceOffsets._make([*(x.to(device) for x in of[:4]), None])
        return self._here

    def current(self, kind: Kind) -> torch.Tensor:
        """The pool ``[state slots, ...]`` of the state that the running mixer asked for last."""
        return self.pool[StateKey(self._at.layer, kind, self._at.number)]

    def in_prompt(self) -> torch.Tensor:
        """Whether each row's token belongs to a prompt, bool ``[rows]``. Padding rows do."""
        of = self._offsets()
        rows = torch.arange(self.num_rows, dtype=torch.int32, device=of.slots.device)
        owner = torch.searchsorted(of.cu_seqlens[1:], rows, right=True)
        left = F.pad(of.prompt_lens - of.starts + of.cu_seqlens[:-1], (0, 1), value=self.num_rows)
        return rows < left[owner]

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._at = StateKey(layer_idx, "conv", state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self._at = StateKey(layer_idx, "recurrent", state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        self._at = StateKey(layer_idx, "conv", state_idx)
        return conv_states

    def update_recurrent_state(self, recurrent_states: Any, layer_idx: int, state_idx: int = 0, **_: Any) -> Any:
        return recurrent_states  # the scan has written it

    # ------------------------------------------------------------------ what attention and the model ask of a cache

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False


class _LotStates(Cache):
    """What a stateful module is given for one lot: the states of its layers, a batch of one for each row."""

    def __init__(self, step: StepStates, layers: set[int], lot: Lot) -> None:
        self._layers: dict[int, LinearAttentionLayer] = {}
        self.layers = self._layers  # type: ignore[assignment]  # by index, and not a list of all of them
        self.layer_class_to_replicate, self.offloading = None, False
        self._held: list[tuple[StateKey, dict[int, torch.Tensor | None]]] = []
        self._step, self._lot = step, lot
        for index in layers:
            keys = [key for key in step.pool if key.layer == index]
            layer = LinearAttentionLayer(number_of_states=1 + max(key.number for key in keys))
            for key in keys:
                state = step.pool[key][lot.slots]
                if lot.fresh is not None:
                    state[lot.fresh] = 0
                held = layer.conv_states if key.kind == "conv" else layer.recurrent_states
                held[key.number] = state
                if key.kind == "conv":
                    layer.is_conv_states_initialized[key.number] = True
                    layer.conv_kernel_size[key.number] = state.shape[-1]
                else:
                    layer.is_recurrent_states_initialized[key.number] = True
                layer.has_previous_state[key.number] = True
                self._held.append((key, held))
            self._layers[index] = layer

    def __len__(self) -> int:
        return 1 + max(self._layers)

    def get_linear_cache(self, layer_idx: int) -> Any:
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, state: torch.Tensor) -> None:
        self.update_recurrent_state(state, layer_idx)

    def commit(self) -> None:
        for key, held in self._held:
            state = held[key.number]
            assert state is not None
            self._step.pool[key][self._lot.slots] = state


def one_token_each(forward: Callable[..., Any], layers: set[int]) -> Callable[..., Any]:
    """The `forward` of a stateful module that keeps the states of `layers`, for the sequences of a step."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        step = next((x for x in (*args, *kwargs.values()) if isinstance(x, StepStates)), None)
        if step is None:
            return forward(*args, **kwargs)
        out = None
        for lot in step.lots:
            states = _LotStates(step, layers, lot)
            out = _paste(out, forward(*_cut(args, step, lot, states), **_cut(kwargs, step, lot, states)), step, lot)
            states.commit()
        return out

    return run


def _cut(value: Any, step: StepStates, lot: Lot, states: _LotStates) -> Any:
    """An argument for one lot: of tensors ``[1, rows, ...]`` its rows as a batch ``[n, 1, ...]``."""
    if value is step:
        return states
    if isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[:2] == (1, step.num_rows):
        return value[0, lot.rows].unsqueeze(1)
    if isinstance(value, tuple | list):
        return type(value)(_cut(x, step, lot, states) for x in value)
    if isinstance(value, dict):
        return {name: _cut(x, step, lot, states) for name, x in value.items()}
    return value


def _paste(whole: Any, part: Any, step: StepStates, lot: Lot) -> Any:
    """Outputs ``[1, rows, ...]`` with the lot's part in its place. What has no rows, such as a state, is left out."""
    if isinstance(part, tuple):
        return tuple(_paste(whole[i] if whole else None, x, step, lot) for i, x in enumerate(part))
    if not isinstance(part, torch.Tensor) or part.shape[:2] != (len(lot.rows), 1):
        return None
    if whole is None:
        whole = part.new_zeros(1, step.num_rows, *part.shape[2:])
    whole[0, lot.rows] = part[:, 0]
    return whole


# ---------------------------------------------------------------------- calls of a model


def cache_argument(model: nn.Module) -> str:
    """The name under which this model takes its cache."""
    names = inspect.signature(type(model).forward).parameters
    return "past_key_values" if "past_key_values" in names else "cache_params"


def states_of(model: nn.Module) -> StepStates | None:
    """The states of a model that is served with recurrent state; None for others."""
    return getattr(model, "mainspring_states", None)


def state_inputs(model: PreTrainedModel, sequences: SequenceOffsets | None, num_rows: int) -> dict[str, Any]:
    """The arguments of a forward pass beside tokens and positions: the states of `sequences`, if there are any."""
    inputs: dict[str, Any] = {"use_cache": False}
    states = states_of(model)
    if states is not None and sequences is not None:
        states.begin(sequences, num_rows)
        inputs[cache_argument(model)] = states
    return inputs


def separate_rows(model: nn.Module, num_rows: int) -> SequenceOffsets | None:
    """Sequences of one row each, for passes over rows that must not see each other; None without recurrent state.
    Allocates a pool for them."""
    states = states_of(model)
    if states is None:
        return None
    _allocate(model, states, 1 + num_rows)
    return SequenceOffsets.of([1] * num_rows, range(num_rows))


def _allocate(model: nn.Module, states: StepStates, slots: int) -> None:
    parameter = next(model.parameters())
    states.allocate(
        slots, parameter.dtype, lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=parameter.device)
    )


def one_sequence(model: nn.Module, num_rows: int) -> SequenceOffsets | None:
    """The same, with one sequence of all rows."""
    states = states_of(model)
    if states is None:
        return None
    _allocate(model, states, 2)
    return SequenceOffsets.of([num_rows], [0])


def stateful_parts(model: nn.Module) -> set[nn.Module]:
    """The modules of `model` that keep a state, and all within them."""
    states = states_of(model)
    return set() if states is None else {part for module in states.modules for part in module.modules()}
