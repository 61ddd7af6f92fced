"""Encode media items one by one, by the model's own ``get_<modality>_features``.

Each item is encoded alone, so its bits do not depend on others. What the method returns is kept as a whole, because
models read different parts of it. Several items of a prompt are joined as if they had been encoded together.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedModel

from ....ipc.errors import InvalidRequestError
from ..run.float_products import fast_products
from .inner_encoder import add_methods

MODALITIES = ("image", "video", "audio")
SMALL_BYTES = 64 << 10  # size up to which any array (grids, lengths) is kept, because positions depend on such arrays
UNREAD = ("hidden_states", "attentions")  # parts of an output that no model merges into its prompt

Method = Callable[..., Any]


class EncodedItem(NamedTuple):
    modality: str  # of the method that encoded it
    output: Any  # of the model's method
    inputs: dict[str, torch.Tensor]  # a large one is one value, expanded to the shape that it had

    @property
    def num_bytes(self) -> int:
        """The memory it takes."""
        leaves = tree_leaves((_parts(self.output), list(self.inputs.values())))
        return sum(x.untyped_storage().nbytes() for x in leaves if isinstance(x, torch.Tensor))


def feature_methods(model: PreTrainedModel) -> dict[str, tuple[Any, str]]:
    """Of each modality that the model takes: the module with the method, and its name."""
    found = _methods(model)
    if not found:
        add_methods(model)
        found = _methods(model)
    return found


def _methods(model: PreTrainedModel) -> dict[str, tuple[Any, str]]:
    found = {}
    for modality in MODALITIES:
        name = f"get_{modality}_features"
        owner = next((part for part in (model.base_model, model) if hasattr(part, name)), None)
        if owner is not None:
            found[modality] = (owner, name)
    if "image" in found and "video" not in found:
        from transformers.models.auto import video_processing_auto

        names: Mapping[str, Any] = vars(video_processing_auto)["VIDEO_PROCESSOR_MAPPING_NAMES"]
        separate = "pixel_values_videos" in inspect.signature(model.base_model.forward).parameters
        if model.config.model_type in names and not separate:
            found["video"] = found["image"]  # a frame is an image to it
    return found


@torch.inference_mode()
def encode_item(model: PreTrainedModel, modality: str, arrays: Mapping[str, torch.Tensor]) -> EncodedItem:
    """Encode one item from what the checkpoint's processor made of it. The model's own errors come through."""
    owner, name = feature_methods(model)[modality]
    method: Method = getattr(owner, name)
    accepted = inspect.signature(method).parameters
    inputs = {key: x.to(model.device, model.dtype if x.is_floating_point() else None) for key, x in arrays.items()}
    lacks = [
        key
        for key, p in accepted.items()
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and key not in inputs
    ]
    if lacks:
        raise InvalidRequestError(f"the processor gave no {lacks[0]!r}, which {name} of the model needs")
    given = {key: x for key, x in inputs.items() if key in accepted}
    with fast_products(model.device, model.dtype):
        output = method(**given, return_dict=True)
    if isinstance(output, Mapping):
        output = type(output)(**{key: value for key, value in output.items() if key not in UNREAD})
    encoded_as = name.removeprefix("get_").removesuffix("_features")
    return EncodedItem(encoded_as, output, {key: _shape_of(x) for key, x in inputs.items()})


def _shape_of(x: torch.Tensor) -> torch.Tensor:
    """What positions depend on, or else zeros that take no memory. A mask of frames is long if the audio is."""
    kept = x.nbytes <= SMALL_BYTES or (x.dim() <= 2 and not x.is_floating_point())
    return x if kept else x.new_zeros(()).expand(x.shape)


def join_inputs(items: Sequence[EncodedItem]) -> dict[str, torch.Tensor]:
    """The inputs of items of one modality, as if the processor had made them together."""
    return {name: _stack([item.inputs[name] for item in items if name in item.inputs]) for name in items[0].inputs}


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    """Join tensors along their first dimension. Shorter ones are filled with zeros, as a processor does."""
    if len(parts) == 1:
        return parts[0]
    rest = [max(sizes) for sizes in zip(*(x.shape[1:] for x in parts), strict=True)]
    if any(x.untyped_storage().nbytes() < x.nbytes for x in parts):  # nothing reads it
        return parts[0].new_zeros(()).expand(sum(len(x) for x in parts), *rest)
    whole = parts[0].new_zeros(sum(len(x) for x in parts), *rest)
    start = 0
    for x in parts:
        whole[(slice(start, start + len(x)), *(slice(n) for n in x.shape[1:]))] = x
        start += len(x)
    return whole


def join_outputs(outputs: Sequence[Any]) -> Any:
    """Several items' outputs as one: tensors in a row, lists of an item's tensors one after another, and lists of
    layers' tensors (`deepstack_features`) layer by layer."""
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return _joined(outputs)
    if not isinstance(first, Mapping):
        return _in_a_row(outputs)
    parts: dict[str, Any] = {}
    for name, value in first.items():
        values = [output[name] for output in outputs]
        if isinstance(value, torch.Tensor):
            parts[name] = _joined(values)
        elif isinstance(value, list | tuple):
            parts[name] = _by_layer(values) if name.startswith("deepstack") else _in_a_row(values)
    return type(first)(**parts)


def _joined(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """Along the first dimension, or the second where items differ in it."""
    first = values[0]
    if not first.dim():
        return first
    along = int(first.dim() > 1 and len(first) == 1 and any(x.shape[1] != first.shape[1] for x in values))
    return torch.cat(list(values), along)


def _in_a_row(values: Sequence[Any]) -> Any:
    return type(values[0])(x for value in values for x in value)


def _by_layer(values: Sequence[Any]) -> Any:
    """Lists over layers, of tensors or of lists of each item's tensors."""
    return [
        torch.cat(list(each)) if isinstance(each[0], torch.Tensor) else [x for part in each for x in part]
        for each in zip(*values, strict=True)
    ]


def _parts(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output
