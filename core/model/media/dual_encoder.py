"""Dual encoders, such as CLIP and SigLIP: a text and an item of media each become one vector of the same space.

A prompt is a text or an item. An item is encoded alone by the model's own ``get_<modality>_features``, and only its
vector is kept. Of texts, the layers are computed for those of a step in one row, in which each text attends to itself.
What comes before and after the layers is the model's own ``get_text_features`` of each text alone, which is stopped
before its layers, or run with our hidden states in the place of what the layers give. No class of models is named.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from ....ipc.errors import UnsupportedModelError
from ....kernels.contract import ROW_MULTIPLE, SequenceOffsets
from ..learn.fuse_match import LOGITS_TOLERANCE, deviations
from ..learn.random_texts import random_texts
from ..run.attention import attention_set
from ..run.encoder import EncoderModel
from ..run.float_products import fast_products
from .features import EncodedItem, encode_item, feature_methods

LENGTHS = (40, 13)  # tokens of the texts that are compared
NO_TENSORS = "gives the layers of its texts more than hidden states, so several texts can't share a row of them"


class _LayersCall(NamedTuple):
    """The call of a text's layers."""

    args: list[Any]
    kwargs: dict[str, Any]
    place: int | str  # of the hidden states among them

    @property
    def hidden(self) -> torch.Tensor:
        """``[1, tokens, hidden]``"""
        found: torch.Tensor = self.args[self.place] if isinstance(self.place, int) else self.kwargs[self.place]
        return found

    def of(self, layers: nn.Module, hidden: torch.Tensor) -> Any:
        """What `layers` give for other hidden states."""
        args, kwargs = list(self.args), dict(self.kwargs)
        (args if isinstance(self.place, int) else kwargs)[self.place] = hidden  # type: ignore[index]
        return layers(*args, **kwargs)


class _Stopped(Exception):
    pass


class DualEncoder(EncoderModel):
    """See the module. `forward` gives what the layers make of texts, and `pool` the vector of one."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._whole: Any = model
        self.modalities = list(feature_methods(model))
        path, tower = _layers_of(model)
        self._layers: Any = model.get_submodule(path)
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        super().__init__(tower)  # which only texts run through
        self._form: Any = None  # type of what the layers give
        own, _ = self._own(torch.arange(2, 6, device=self.device))
        self.width: int = own.numel()

    @property
    def item_bytes(self) -> int:
        """The memory that an encoded item takes."""
        return self.width * self.dtype.itemsize

    def encode(self, modality: str, arrays: Mapping[str, torch.Tensor]) -> EncodedItem:
        """The vector ``[width]`` of an item. Errors as `encode_item`."""
        vector = _vector(encode_item(self._whole, modality, arrays).output, type(self._whole).__name__)
        if vector.numel() != self.width:
            raise UnsupportedModelError(
                f"the vector of this {modality} item has {vector.numel()} numbers, that of a text {self.width}"
            )
        return EncodedItem(modality, vector.clone(), {})

    @torch.inference_mode()
    def forward(self, token_ids: np.ndarray, sequences: SequenceOffsets, seconds: Sequence[int]) -> torch.Tensor:
        """What the layers make of `sequences`, given one after another: ``[tokens, hidden]``."""
        total, bounds = len(token_ids), list(pairwise(sequences.cu_seqlens.tolist()))
        ids = self._copies.bring(torch.from_numpy(token_ids.astype(np.int64)))
        calls = [self._before(ids[start:end]) for start, end in bounds]
        hidden = calls[0].hidden.new_zeros(1, -(-total // ROW_MULTIPLE) * ROW_MULTIPLE, self.hidden_size)
        hidden[0, :total] = torch.cat([call.hidden[0] for call in calls])
        self._step.sequences = sequences
        with fast_products(self.device, self.dtype):
            return _states(calls[0].of(self._layers, hidden))[0, :total]

    @torch.inference_mode()
    def pool(self, token_ids: np.ndarray, rows: torch.Tensor) -> torch.Tensor:
        """The vector of a text, fp32 ``[width]`` on the CPU, of the rows ``[tokens, hidden]`` that its layers made."""
        states = rows[None].to(self.device, self.dtype)

        def given(*_: Any, **__: Any) -> Any:
            if self._form is torch.Tensor:
                return states
            return self._form(last_hidden_state=states) if issubclass(self._form, Mapping) else (states,)

        own, ids = vars(self._layers).get("forward"), torch.from_numpy(token_ids.astype(np.int64)).to(self.device)
        self._layers.forward = given
        try:
            return self._features(ids).float().cpu()
        finally:
            del self._layers.forward
            if own is not None:
                self._layers.forward = own

    def _features(self, ids: torch.Tensor) -> torch.Tensor:
        """``[width]`` of the model's own method."""
        return _vector(self._whole.get_text_features(input_ids=ids[None]), type(self._whole).__name__)

    def _before(self, ids: torch.Tensor) -> _LayersCall:
        """What the model does to a text before its layers."""
        caught: list[_LayersCall] = []

        def stop(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append(self._call(list(args), kwargs))
            raise _Stopped

        hook = self._layers.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._features(ids)
        except _Stopped:
            pass
        finally:
            hook.remove()
        return caught[0]

    def _call(self, args: list[Any], kwargs: dict[str, Any]) -> _LayersCall:
        given: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        places = [place for place, value in given if isinstance(value, torch.Tensor)]
        if len(places) != 1:
            raise UnsupportedModelError(f"{type(self._whole).__name__} {NO_TENSORS}")
        return _LayersCall(args, kwargs, places[0])

    @torch.inference_mode()
    def _own(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The vector of a text and what the layers make of it, by the model alone with its own attention."""
        heard: list[torch.Tensor] = []

        def hear(_: Any, __: Any, output: Any) -> None:
            self._form = type(output)
            heard.append(_states(output)[0])

        hook = self._layers.register_forward_hook(hear)
        try:
            with attention_set(self.model, "eager"):
                return self._features(ids), heard[0]
        finally:
            hook.remove()

    def verify(self) -> str:
        """Compare texts in one row with the model alone; → a line for ``--explain-model``. Raises
        `UnsupportedModelError` when they differ."""
        counts = [min(length, self.max_position or length) for length in LENGTHS]
        texts = random_texts(self.config, counts)
        token_ids = torch.cat(texts).numpy()
        rows = self.forward(token_ids, SequenceOffsets.of(counts, range(len(counts))), [0] * len(counts)).split(counts)
        errors = []
        for ids, ours in zip(texts, rows, strict=True):
            vector, states = self._own(ids.to(self.device))
            pooled = self.pool(ids.numpy(), ours.float().cpu())
            errors += [deviations(ours, states), deviations(pooled[None], vector.cpu()[None])]
        found, limit = torch.cat([each.cpu() for each in errors]), LOGITS_TOLERANCE[self.dtype]
        error = float(found.amax() if self.dtype == torch.float32 else found.median())
        if not error <= limit:
            raise UnsupportedModelError(
                f"{type(self._whole).__name__} gives other vectors for several texts in a row than for each alone "
                f"(they differ by {error:.2g} standard deviations, the limit is {limit:g})"
            )
        return f"verified: vectors of texts in a row within {error:.1e} standard deviations of the model's own"


def is_dual_encoder(model: PreTrainedModel) -> bool:
    """Whether the model has a method for vectors of texts and one for vectors of media."""
    return hasattr(model, "get_text_features") and bool(feature_methods(model))


@torch.inference_mode()
def _layers_of(model: Any) -> tuple[str, PreTrainedModel]:
    """The path of the module that runs the layers of texts, and the model of texts that it is in."""
    called: list[str] = []
    with _noting_calls(model, called):
        model.get_text_features(input_ids=torch.arange(2, 6, device=model.device)[None])
    layers = [name for name in called if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList)]
    path = layers[0].rpartition(".")[0].rpartition(".")[0] if layers else ""
    outer = [path.rsplit(".", n)[0] for n in range(path.count(".") + 1)]
    towers = [part for name in outer if isinstance(part := model.get_submodule(name), PreTrainedModel)]
    if not layers or path not in called or not towers or towers[0] is model:
        raise UnsupportedModelError(f"the layers that {type(model).__name__} runs for texts were not found")
    return path, towers[0]


@contextmanager
def _noting_calls(model: nn.Module, called: list[str]) -> Iterator[None]:
    """In this context, the names of modules are written down as they are called."""

    def note(name: str) -> Any:
        return lambda *_: called.append(name)

    hooks = [module.register_forward_pre_hook(note(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _states(output: Any) -> torch.Tensor:
    found: torch.Tensor = output if isinstance(output, torch.Tensor) else output[0]
    return found


def _vector(output: Any, name: str) -> torch.Tensor:
    """The one vector ``[width]`` of what a model's method gives."""
    found = output if isinstance(output, torch.Tensor) else getattr(output, "pooler_output", None)
    if not isinstance(found, torch.Tensor) or found.dim() != 2 or len(found) != 1:
        raise UnsupportedModelError(f"{name} gives no vector for a text or an item")
    return found[0]
