"""Make one stage's part of a model: layers of other stages are left out before any weight is read.

Each stage runs the model's own forward. A layer of another stage becomes one that gives back what it is given. Before
the first layer of its own a stage receives the hidden states, after the last one it sends them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ...ipc.errors import UnsupportedModelError
from .stages import Stages

TABLE_ROWS = 251  # of the table that stands for embeddings; few of the ids of a text have the same row
HEAD_ROWS = 64  # of the output layer that stands for another one


class StagePlan(NamedTuple):
    """What stages of a class have beside their layers."""

    embeddings: bool = False  # the model's embeddings on each stage, because more than the first layer reads them


class ForeignLayer(nn.Module):
    """A layer of another stage. The model may ask it for numbers and names that its own layers have, and call what
    they have besides `forward`.

    Args:
        outputs: of a layer; 0: one that is in no tuple.
    """

    def __init__(self, layer: nn.Module, outputs: int) -> None:
        super().__init__()
        for name in set(dir(type(layer))) - set(dir(nn.Module)):
            setattr(self, name, lambda *_, **__: None)
        for name, value in vars(layer).items():
            if isinstance(value, (str, int, float)) and not name.startswith("_") and name != "training":
                setattr(self, name, value)
        for name, child in layer.named_children():  # their buffers are set in some models
            setattr(self, name, shell := nn.Module())
            for its, buffer in child.named_buffers(recurse=False):
                shell.register_buffer(its, buffer, persistent=False)
        self._outputs = outputs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = hidden_of(args, kwargs)
        return (hidden, *[None] * (self._outputs - 1)) if self._outputs else hidden


class ForeignEmbedding(nn.Module):
    """Embeddings that another stage looks up. What runs at load has rows of a small random table in their place."""

    def __init__(self, width: int, like: torch.Tensor) -> None:
        super().__init__()
        table = torch.randn(TABLE_ROWS, width, generator=torch.Generator().manual_seed(0)).to(like)
        self.register_buffer("weight", table, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(ids % TABLE_ROWS, self.weight)  # type: ignore[arg-type]


class ForeignHead(nn.Linear):
    """An output layer that another stage has. What runs at load compares the products of a small random one."""

    def __init__(self, width: int, like: torch.Tensor) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = width, HEAD_ROWS
        self.register_parameter("bias", None)
        weight = torch.randn(HEAD_ROWS, width, generator=torch.Generator().manual_seed(1)) * width**-0.5
        self.register_buffer("weight", weight.to(like), persistent=False)


class StagePart:
    """A stage's part of one model that is loaded.

    Args:
        path: of the list of the decoder's layers.
        outputs: see `ForeignLayer`.
    """

    def __init__(self, stages: Stages, plan: StagePlan, path: str, outputs: int) -> None:
        self.stages, self._plan, self._path, self._outputs = stages, plan, path, outputs
        self.others: dict[str, torch.Size] = {}  # shapes of the parameters that only other stages have
        self.moved: dict[str, str] = {}  # such a parameter → one of this stage that is tied to it
        self.layers: range = range(0)
        self._embedding = self._head = (0, "")  # width and path of what is replaced

    def cut(self, model: PreTrainedModel) -> None:
        """Leave out what other stages have. The model may be on the meta device."""
        before = {name: tensor.shape for name, tensor in model.state_dict().items()}
        layers: Any = model.get_submodule(self._path)
        count = self.stages.count
        if len(layers) < count:
            name = type(model).__name__
            raise UnsupportedModelError(f"{name} has {len(layers)} layers, and pipeline_parallel_size is {count}")
        first, end = (len(layers) * at // count for at in (self.stages.index, self.stages.index + 1))
        self.layers = range(first, end)
        for index, layer in enumerate(list(layers)):
            if index not in self.layers:
                layers[index] = ForeignLayer(layer, self._outputs)
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not self.stages.is_first and not self._plan.embeddings:
            self._embedding = _leave_out(model, embedding)
        if not self.stages.is_last and head is not None:
            self._head = _leave_out(model, head)
        kept = model.state_dict()
        self.others = {name: shape for name, shape in before.items() if name not in kept}
        self._untie(model)
        self.others = {name: shape for name, shape in self.others.items() if name not in self.moved}

    def _untie(self, model: Any) -> None:
        tied: Mapping[str, str] = getattr(model, "all_tied_weights_keys", {})
        model.all_tied_weights_keys = {}
        for target, source in tied.items():
            if target in self.others:
                continue
            if source in self.others:  # the first of those here is read in its place
                source = self.moved.setdefault(source, target)
            if source != target:
                model.all_tied_weights_keys[target] = source

    def finish(self, model: PreTrainedModel) -> None:
        """Let the model, whose weights are read, exchange hidden states."""
        like = next(p for p in model.parameters() if p.is_floating_point())
        for (width, path), kind in ((self._embedding, ForeignEmbedding), (self._head, ForeignHead)):
            if path:
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, kind(width, like))
        layers: Any = model.get_submodule(self._path)
        layers[self.layers[0]].register_forward_pre_hook(self._enter, with_kwargs=True)
        layers[self.layers[-1]].register_forward_hook(self._leave)
        model.mainspring_stages = self.stages  # type: ignore[assignment]

    def describe(self) -> str:
        return f"stage {self.stages.index} of {self.stages.count}: layers {self.layers[0]} to {self.layers[-1]}"

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = hidden_of(args, kwargs)
        hidden = self.stages.enter(given)
        if hidden is given:
            return None
        if args:
            return (hidden, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): hidden}

    def _leave(self, _: nn.Module, __: Any, out: Any) -> None:
        self.stages.leave(out[0] if isinstance(out, (tuple, list)) else out)


def stages_of(model: nn.Module) -> Stages | None:
    """The pipeline that a model is a stage of."""
    return getattr(model, "mainspring_stages", None)


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The hidden states that a layer is called with."""
    hidden: torch.Tensor = args[0] if args else next(iter(kwargs.values()))
    return hidden


def _leave_out(model: nn.Module, module: Any) -> tuple[int, str]:
    """Take `module`, embeddings or an output layer, out of `model` → its width and its path."""
    path = next(path for path, each in model.named_modules() if each is module)
    parent, _, name = path.rpartition(".")
    place: Any = nn.Identity()
    place.weight, place.bias = module.weight.detach().to("meta"), None  # for the class's code that sets first values
    setattr(model.get_submodule(parent), name, place)
    return module.weight.shape[-1], path
