"""Layers whose weights are in host memory and are copied to the GPU each time, just before they run.

Two places of the GPU's memory, of a layer each, take turns: while the layer in one computes, a second stream copies the
next one into the other. Their addresses never change, so a CUDA graph holds the copies as well. Streamed layers lie
evenly between the others, whose computing hides part of the copying.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ....ipc.config import EngineConfig
from ....ipc.errors import NotSupportedError, UnsupportedModelError
from ...worker.device import Device

ALIGNMENT = 256  # bytes, of tensors in a place
PLACES = 2


class StreamedLayer:
    """Parameters that lie one after another in ``held`` (uint8, in host memory) and, for its run, in a place."""

    def __init__(self, parameters: Sequence[nn.Parameter], device: Device) -> None:
        self.parameters = parameters
        self._shapes = [one.shape for one in parameters]
        rooms = (-(-one.nbytes // ALIGNMENT) * ALIGNMENT for one in parameters)
        self._starts = list(accumulate(rooms, initial=0))
        self.held = device.host_blocks((self._starts.pop(),), torch.uint8)
        for one, room in zip(parameters, self.views(self.held), strict=True):
            room.copy_(one.data)
            one.data = torch.empty(0, dtype=one.dtype, device=device.torch)

    def views(self, memory: torch.Tensor) -> list[torch.Tensor]:
        """The parameters as they lie in `memory`, uint8."""
        parts = zip(self.parameters, self._shapes, self._starts, strict=True)
        return [
            memory[start : start + shape.numel() * one.dtype.itemsize].view(one.dtype).view(shape)
            for one, shape, start in parts
        ]


class HeldWeight:
    """One parameter of a streamed layer; see `Elsewhere`."""

    def __init__(self, layer: StreamedLayer, index: int, device: Device) -> None:
        self._layer, self._index, self._device = layer, index, device

    def unpack(self) -> torch.Tensor:
        """Where it lies in host memory; no copy out of it is under way."""
        self._device.mark().wait()
        return self._layer.views(self._layer.held)[self._index]

    def replace(self, weight: torch.Tensor) -> None:
        if weight.data_ptr() != (held := self.unpack()).data_ptr():
            held.copy_(weight)


class StreamedLayers:
    """The streamed layers of a model, whose own code runs them."""

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], device: Device) -> None:
        self._device = device
        self.weights: dict[int, HeldWeight] = {}  # by the id of a parameter
        uses = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
        # others, which layers share, stay on the GPU
        own = [[tensor for tensor in layer.parameters() if uses[id(tensor)] == 1] for layer in layers]
        self._layers = [StreamedLayer(parameters, device) for parameters in own]
        for layer in self._layers:
            for index, parameter in enumerate(layer.parameters):
                self.weights[id(parameter)] = HeldWeight(layer, index, device)
        self.unseen = set(range(len(layers)))  # layers that no forward has called
        self._places: list[torch.Tensor] = []
        self.wake()
        for number, module in enumerate(layers):
            module.register_forward_pre_hook(partial(self._before, number))
            module.register_forward_hook(partial(self._after, number))
        model.register_forward_pre_hook(self._begin)

    def sleep(self, drop: bool = False) -> None:
        """Give back the GPU's memory, and with `drop` what is in the host's."""
        self._places = []
        for layer in self._layers:
            for parameter in layer.parameters:
                parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device.torch)
            if drop:
                layer.held = torch.empty(0, dtype=torch.uint8)

    def wake(self, loaded: StreamedLayers | None = None) -> None:
        """Undo `sleep`; what was dropped is what `loaded` has, which then sleeps for good."""
        if loaded is not None:
            loaded.sleep()
            for mine, theirs in zip(self._layers, loaded._layers, strict=True):
                mine.held = theirs.held
        size = max(len(layer.held) for layer in self._layers)
        self._places = [self._device.zeros((size,), torch.uint8) for _ in self._layers[:PLACES]]
        self._holds: list[int | None] = [None] * PLACES  # which layer's weights are in a place, or on their way
        self._arrived: list[Callable[[], None]] = [lambda: None] * PLACES
        for number, layer in enumerate(self._layers):
            for parameter, room in zip(layer.parameters, layer.views(self._places[number % PLACES]), strict=True):
                parameter.data = room

    def _begin(self, *_: Any) -> None:
        for number in range(len(self._places)):
            self._fetch(number)

    def _before(self, number: int, *_: Any) -> None:
        if self._holds[number % PLACES] != number:  # layers run in another order than they stand
            self._fetch(number)
        self._arrived[number % PLACES]()
        self.unseen.discard(number)

    def _after(self, number: int, *_: Any) -> None:
        if number + PLACES < len(self._layers):
            self._fetch(number + PLACES)

    def _fetch(self, number: int) -> None:
        """Begin to copy a layer to its place, as soon as all that was launched so far is done."""
        self._holds[number % PLACES] = number
        self._arrived[number % PLACES] = self._device.beside(partial(self._copy, number))

    def _copy(self, number: int) -> None:
        held = self._layers[number].held
        self._places[number % PLACES][: len(held)].copy_(held, non_blocking=True)


def offloaded_bytes(config: EngineConfig, device: torch.device) -> int:
    """What ``cpu_offload_gb`` asks for.

    Raises:
        NotSupportedError: the device is no GPU.
    """
    size = config.cache_config.cpu_offload_gb
    if size and device.type != "cuda":
        raise NotSupportedError(f"cpu_offload_gb is {size}; it is for GPUs: a CPU has all weights in host memory")
    return int(size * 2**30)


def stream_layers(model: nn.Module, num_bytes: int, device: Device) -> tuple[StreamedLayers, str]:
    """Move a model that is in host memory to `device`, but for as many layers as save `num_bytes` there, or all;
    → these layers, and a line for ``--explain-model``.

    Raises:
        UnsupportedModelError: the model has no list of layers.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise UnsupportedModelError(f"cpu_offload_gb is set, and {type(model).__name__} has no list of layers")
    largest = max(lists, key=_size)
    layers = list(dict.fromkeys(largest))
    for count in range(1, len(layers) + 1):
        chosen = [layers[(2 * i + 1) * len(layers) // (2 * count)] for i in range(count)]
        saved = sum(map(_size, chosen)) - PLACES * max(map(_size, chosen))
        if saved >= num_bytes:
            break
    streamed = StreamedLayers(model, chosen, device)
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in streamed.weights:
            tensor.data = tensor.data.to(device.torch)
    return streamed, (
        f"streamed: {count} of {len(layers)} layers stay in host memory, which saves {max(0, saved) / 2**30:.2f} GiB"
        + (f" of the {num_bytes / 2**30:.2f} asked for" if saved < num_bytes else "")
    )


def _size(module: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in module.parameters())
