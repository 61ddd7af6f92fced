"""LoRA in the forward pass: to a row's product ``W x`` its adapter adds ``scale * B (A x)``.

All linear layers compute through `Backend.linear`, where `AdaptedBackend` looks up by the weight's identity what the
step's adapters add. Several checkpoint parameters may lie in one tensor; each adds to its own columns of the product.
It is done in fp32, as PEFT does, for each adapter over its own rows, padded to a multiple of `ROW_MULTIPLE`: so a row's
bits depend on no other row.

Quantized weights are in the backend's `Decoder`. Their products come from `Decoder.linear`, and the same is added to
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import nn

from ....kernels.contract import ROW_MULTIPLE, Backend
from ....kernels.decoder_contract import Decoder, LayeredDecoder
from ...parallel.cuts import Cut
from ...worker.device import device_for
from ..learn.fuse_observe import TEXT_ROWS, is_plain_linear, run_rows
from ..learn.row_invariant import routed
from .fused import JoinedProjections
from .paged_model import PagedModel


class Place(NamedTuple):
    """Where a linear layer of the checkpoint is computed."""

    weight: int  # `id` of the tensor that holds its weight; in a decoder, the number of the weight
    start: int  # of its columns in that tensor's product
    num_outputs: int
    num_inputs: int
    cut: Cut | None = None  # the part of the checkpoint's weight that it is, if this is one of several ranks


class Delta(NamedTuple):
    """What an adapter adds to one linear layer."""

    down: torch.Tensor  # A, fp32 [rank, inputs]
    up: torch.Tensor  # B, fp32 [outputs, rank]
    scale: float
    start: int


class LoRA(NamedTuple):
    """An adapter as it is computed."""

    digest: bytes  # of its files
    deltas: Mapping[int, Sequence[Delta]]  # by `Place.weight`

    def to(self, device: torch.device) -> LoRA:
        moved = {
            weight: [delta._replace(down=delta.down.to(device), up=delta.up.to(device)) for delta in deltas]
            for weight, deltas in self.deltas.items()
        }
        return self._replace(deltas=moved)


class _Share(NamedTuple):
    """The rows of a step that an adapter has."""

    lora: LoRA
    padded: torch.Tensor  # int64, a multiple of ROW_MULTIPLE of them, the last one repeated
    rows: torch.Tensor  # int64


class AdaptedBackend:
    """A backend with adapters: all is the `backend`'s own, but that `linear` adds what the step's rows ask for.

    Args:
        slots: of running requests.
        max_loras: adapters in one step.
    """

    def __init__(self, backend: Backend, slots: int, max_loras: int) -> None:
        self._backend = backend
        self._loras: list[LoRA | None] = [None] * (max_loras + 1)  # by place; at 0 there is none
        self._place_of = np.zeros(slots, np.int64)
        self._of_tokens: list[_Share] = []
        self._of_logits: list[_Share] = []
        self._head = 0  # id of the weight that sees only the rows that have logits
        self._device = device_for(torch.device("cpu"))
        self._note: Callable[[int, int], None] | None = None

    def caches_latents(self, *_: Any) -> bool:
        """No: an adapter of an expansion adds to its output, which attention over latents does not compute."""
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Backend.linear`."""
        out = self._backend.linear(x, weight, bias)
        if self._note is not None:
            self._note(id(weight), x.shape[:-1].numel())
        return self.add(out, x, id(weight))

    def decoder(self, *args: Any, **kwargs: Any) -> Decoder | None:
        """See `Backend.decoder`."""
        decoder = self._backend.decoder(*args, **kwargs)
        return None if decoder is None else cast(Decoder, AdaptedDecoder(decoder, self))

    def add(self, out: torch.Tensor, x: torch.Tensor, key: int) -> torch.Tensor:
        """Add to the product `out` of `x` what the step's adapters have for the weight `key` (see `Place`)."""
        for lora, padded, rows in self._of_logits if key == self._head else self._of_tokens:
            for down, up, scale, start in lora.deltas.get(key, ()):
                inner = self._backend.linear(x.reshape(-1, x.shape[-1])[padded].float(), down)
                added = self._backend.linear(inner, up)[: len(rows)].mul_(scale)
                part = out.view(-1, out.shape[-1]).narrow(1, start, len(up))
                part[rows] = (part[rows] + added).to(out.dtype)
        return out

    def attach(self, model: PagedModel, backend: Any = None) -> dict[str, Place]:
        """Compute the linear layers of `model`, which was loaded with this backend, here. Returns those that adapters
        may change, by module path: each that sees every row of a step once, in order, and the output layer. backend:
        the one of several ranks that this one is in."""
        linear = (backend or self).linear
        self._device = device_for(model.device)
        if model.whole is not None:
            keys = cast(AdaptedDecoder, model.whole.decoder).keys  # of several ranks' decoder, too
            self._head = keys[id(model.whole.head.linear.weight)]
            return _places(model, keys)
        for module in model.model.modules():
            if isinstance(module, nn.Linear) and is_plain_linear(module):
                module.forward = routed(module, linear)  # type: ignore[method-assign]
        seen: dict[int, set[int]] = {}
        self._note = lambda key, rows: seen.setdefault(key, set()).add(rows)
        run_rows(model.model, slice(TEXT_ROWS))
        self._note = None
        looped = [] if model.states is None else model.states.looped  # these see some rows of a step at a time
        indexers = [] if model.indexers is None else model.indexers.modules  # and these
        apart = {id(parameter) for module in [*looped, *indexers] for parameter in module.parameters()}
        able = {key for key, rows in seen.items() if rows == {TEXT_ROWS}} - apart
        head = model.model.get_output_embeddings()
        if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward:
            able.add(id(head.weight))
            self._head = id(head.weight) if model.selects_rows else 0
        return _places(model, {key: key for key in able})

    def admit(self, slot: int, place: int, lora: LoRA | None) -> None:
        """The request at `slot` has this adapter from now on, as one of at most `max_loras`; place 0: none."""
        self._place_of[slot] = place
        held = self._loras[place]
        if lora is not None and (held is None or held.digest != lora.digest):
            self._loras[place] = lora.to(self._device.torch)

    @contextmanager
    def without(self) -> Iterator[None]:
        """In this context, no request has an adapter."""
        places = self._place_of.copy()
        self._place_of[:] = 0
        try:
            yield
        finally:
            self._place_of[:] = places

    def forget(self) -> None:
        """Nobody runs, and no adapter takes memory of the device."""
        self._loras = [None] * len(self._loras)
        self._place_of[:] = 0
        self._of_tokens = self._of_logits = []

    def begin(self, slots: np.ndarray, counts: np.ndarray, wanted: np.ndarray) -> bool:
        """Say what the next forward pass computes, as in `Rows`. Whether any of it has an adapter."""
        places = self._place_of[slots]
        self._of_tokens = self._of_logits = []
        if places.any():
            places = np.repeat(places, counts)
            self._of_tokens, self._of_logits = self._shares(places), self._shares(places[wanted])
        return bool(self._of_tokens)

    def _shares(self, places: np.ndarray) -> list[_Share]:
        shares = []
        for place in np.unique(places[places > 0]).tolist():
            rows = np.flatnonzero(places == place)
            padded = np.pad(rows, (0, -len(rows) % ROW_MULTIPLE), mode="edge")
            on_device = self._device.bring(torch.from_numpy(padded))
            lora = self._loras[place]
            assert lora is not None
            shares.append(_Share(lora, on_device, on_device[: len(rows)]))
        return shares


class AdaptedDecoder(LayeredDecoder):
    """A backend's decoder of whose products adapters may change each. It runs layer by layer, so that a row has the
    same bits with and without another row's adapter."""

    def __init__(self, decoder: Decoder, adapted: AdaptedBackend) -> None:
        super().__init__(decoder)
        self._adapted = adapted
        # Adapters outlive the tensors, which are other ones after the weights were dropped and loaded again.
        self.keys = {tensor: number for number, tensor in enumerate(decoder.weights)}

    def move(self, ids: Mapping[int, int]) -> None:
        self._decoder.move(ids)
        self.keys = {ids.get(key, key): number for key, number in self.keys.items()}

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `Decoder.linear`."""
        return self._adapted.add(self._decoder.linear(x, weight, bias), x, self.keys[id(weight)])


def _places(model: PagedModel, keys: Mapping[int, int]) -> dict[str, Place]:
    """The linear layers whose weight lies in a tensor of `keys`, ``id`` → `Place.weight`."""
    places = {}
    for name in model.parameters.names():
        owner, attribute, start, _ = slot = model.parameters.slot(name)
        key = keys.get(id(slot.tensor))
        if attribute == "weight" and isinstance(owner, nn.Linear | JoinedProjections) and key is not None:
            shape, cut = model.parameters.whole_shape(name), model.parameters.cuts.get(name)
            places[name.removesuffix(".weight")] = Place(key, start, shape[0], shape[1], cut)
    return places
