"""Weights in host memory: layers whose weights are copied to the GPU each time, just before they run.

Two layers' worth of the GPU's memory take turns. While the layer in one of them computes, a stream beside copies the
next one into the other. Their addresses never change, so a CUDA graph holds the copies as well. Streamed layers lie
evenly between the others, whose computing hides part of the copying; what is left is bound by the bus to the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ...ipc.config import EngineConfig
from ...ipc.errors import NotSupportedError, UnsupportedModelError
from ..device import Device

ALIGNMENT = 256  # bytes, of tensors in a place
PLACES = 2


class HeldWeight:
    """A parameter of a streamed layer; see `Elsewhere`."""

    def __init__(self, held: torch.Tensor, device: Device) -> None:
        self.held = held
        self._device = device

    def unpack(self) -> torch.Tensor:
        """The tensor in host memory itself; no copy out of it is under way."""
        self._device.mark().wait()
        return self.held

    def replace(self, weight: torch.Tensor) -> None:
        self.held.copy_(weight)


class StreamedLayers:
    """The streamed layers of a model, whose own code runs them.

    ``weights`` is by the `id` of a parameter, in a fixed order.
    """

    def __init__(self, model: nn.Module, layers: Sequence[nn.Module], device: Device) -> None:
        self._device = device
        self.weights: dict[int, HeldWeight] = {}
        self._layers: list[list[tuple[nn.Parameter, torch.Size, HeldWeight]]] = []
        uses = Counter(id(tensor) for _, tensor in model.named_parameters(remove_duplicate=False))
        for layer in layers:
            self._layers.append([])
            for tensor in layer.parameters():
                if uses[id(tensor)] == 1:  # others, which layers share, stay on the GPU
                    held = device.host_blocks(tuple(tensor.shape), tensor.dtype)
                    held.copy_(tensor.data)
                    self.weights[id(tensor)] = HeldWeight(held, device)
                    self._layers[-1].append((tensor, tensor.shape, self.weights[id(tensor)]))
                    tensor.data = torch.empty(0, dtype=tensor.dtype, device=device.torch)
        self._places: list[torch.Tensor] = []
        self.wake()
        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(partial(self._before, number))
            layer.register_forward_hook(partial(self._after, number))
        model.register_forward_pre_hook(self._begin)

    def sleep(self, drop: bool = False) -> None:
        """Give back the GPU's memory, and with `drop` what is in the host's."""
        self._places = []
        for layer in self._layers:
            for tensor, _, weight in layer:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
                if drop:
                    weight.held = torch.empty(0, dtype=tensor.dtype)

    def wake(self, loaded: StreamedLayers | None = None) -> None:
        """Undo `sleep`; what was dropped is what `loaded` has."""
        for mine, theirs in zip(self.weights.values(), loaded.weights.values() if loaded else (), strict=False):
            mine.held = theirs.held
        size = max(sum(_room(tensor, shape) for tensor, shape, _ in layer) for layer in self._layers)
        self._places = [self._device.zeros((size,), torch.uint8) for _ in self._layers[:PLACES]]
        self._holds: list[int | None] = [None] * PLACES  # which layer's weights are in a place, or on their way
        self._arrived: list[Callable[[], None]] = [_nothing] * PLACES
        for number, layer in enumerate(self._layers):
            first = 0
            for tensor, shape, _ in layer:
                room = self._places[number % PLACES][first : first + shape.numel() * tensor.dtype.itemsize]
                tensor.data = room.view(tensor.dtype).view(shape)
                first += _room(tensor, shape)

    def _begin(self, *_: Any) -> None:
        for number in range(len(self._places)):
            self._fetch(number)

    def _before(self, number: int, *_: Any) -> None:
        if self._holds[number % PLACES] != number:  # layers run in another order than they stand
            self._fetch(number)
        self._arrived[number % PLACES]()

    def _after(self, number: int, *_: Any) -> None:
        if number + PLACES < len(self._layers):
            self._fetch(number + PLACES)

    def _fetch(self, number: int) -> None:
        """Begin to copy a layer to its place, as soon as all that was launched so far is done."""
        self._holds[number % PLACES] = number
        self._arrived[number % PLACES] = self._device.beside(partial(self._copy, number))

    def _copy(self, number: int) -> None:
        for tensor, _, weight in self._layers[number]:
            tensor.data.copy_(weight.held, non_blocking=True)


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
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in module.parameters())


def _room(tensor: torch.Tensor, shape: torch.Size) -> int:
    return -(-shape.numel() * tensor.dtype.itemsize // ALIGNMENT) * ALIGNMENT


def _nothing() -> None:
    pass
