"""Read a part of each tensor of a checkpoint: a rank of several loads its own shard, and nothing else.

transformers opens safetensors files, reads each tensor when its turn comes, converts what was read (other names,
tensors that are joined or split) and puts it in its place in the model. Two of these steps are replaced for the time of
a load: a tensor is read in part, and a parameter takes the shape that comes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel, core_model_loading

from ....ipc.errors import UnsupportedModelError

SlicesOf = Callable[[str, tuple[int, ...]], tuple[slice, ...] | None]
"""A tensor's name in the checkpoint and its shape there → the part to read, slices of step 1; None: all of it.

What is made of several tensors, or of one, has the shape that follows from the parts: it is for the caller to choose
parts that fit together, and to see that the model still computes what it should."""


class _Part:
    """A tensor that transformers is about to read, with ``tensor[...]``."""

    def __init__(self, tensor: Any, part: tuple[slice, ...]) -> None:
        self._tensor, self._part = tensor, part

    def __getitem__(self, _: Any) -> torch.Tensor:
        rows: torch.Tensor = self._tensor[self._part]
        return rows.contiguous()


@contextmanager
def reading(slices_of: SlicesOf) -> Iterator[None]:
    """Models that transformers loads in this context get the parts that `slices_of` names. The files must be
    safetensors: UnsupportedModelError."""
    load, set_parameter = PreTrainedModel._load_pretrained_model, core_model_loading.set_param_for_module

    def load_parts(model: Any, state_dict: Any, files: list[str] | None, *more: Any) -> Any:
        if not files or not all(file.endswith(".safetensors") for file in files):
            raise UnsupportedModelError("a part of a checkpoint is to be read, and its files are not safetensors")
        tensors: dict[str, Any] = {}
        with ExitStack() as stack:
            for path in files:
                file = stack.enter_context(safe_open(path, framework="pt"))
                for name in file.keys():  # noqa: SIM118  # it is no dict
                    tensor = file.get_slice(name)
                    part = slices_of(name, tuple(tensor.get_shape()))
                    tensors[name] = tensor if part is None else _Part(tensor, part)
            return load(model, tensors, None, *more)

    def set_any_shape(model: PreTrainedModel, name: str, value: torch.Tensor, *more: Any) -> None:
        path, _, attribute = name.rpartition(".")
        module = model.get_submodule(path)
        held = getattr(module, attribute)
        if isinstance(held, nn.Parameter) and held.shape != value.shape and held.dim() == value.dim():
            setattr(module, attribute, nn.Parameter(torch.empty_like(value, device="meta"), requires_grad=False))
            if isinstance(module, nn.Linear) and attribute == "weight":
                module.out_features, module.in_features = value.shape
        set_parameter(model, name, value, *more)

    with ExitStack() as stack:
        for owner, function, replacement in (
            (PreTrainedModel, "_load_pretrained_model", staticmethod(load_parts)),
            (core_model_loading, "set_param_for_module", set_any_shape),
        ):
            stack.callback(setattr, owner, function, vars(owner)[function])
            setattr(owner, function, replacement)
        yield
