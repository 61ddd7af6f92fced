"""A model as one call of its backend: ids in, logits out, and no module's forward in between.

This needs a backend that runs a stack of layers in one call (`Backend.decoder`), and a model that has nothing around
its layers but an embedding before and a product after. The backend then holds the weights, packed and perhaps
quantized, and the model's own forward can't run any more. So this is the last step of loading.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import nn

from ....ipc.errors import UnsupportedModelError
from ....kernels.contract import Backend
from ....kernels.decoder_contract import Decoder, GatedMLP, Linear, PackedWeight, QuantizedWeight
from ..learn.fuse_match import NotRecognisedError
from ..learn.fuse_observe import TEXT_ROWS, stand_in
from ..learn.row_invariant import RoutedProducts
from ..learn.verify import TOLERANCE, paged_logits, random_sequences, schedule
from ..load.quantized import JoinedWeights
from .attention import StepAttention
from .paged_model import PagedModel, position_ids
from .stack import Attend, LayerInputs, StackedDecoder, cos_sin, run_layers

FIRST_POSITIONS = 2048  # positions in a table of angles at first; the table doubles when a step has a later one

Function = Callable[[torch.Tensor], torch.Tensor]


class Head(NamedTuple):
    """Logits are ``cap * tanh(scale * product / cap)``."""

    linear: Linear
    scale: float = 1.0
    cap: float | None = None

    def finish(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits *= self.scale
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


class PackedProducts:
    """A backend whose linear layers read the weights that its `decoder` has packed."""

    def __init__(self, backend: Backend, decoder: Decoder) -> None:
        self._backend = backend
        self.linear = decoder.linear

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class WholeModel:
    """Takes the place of the forward of a `PagedModel`. One call of `backend` runs a step that it takes; another step
    goes through the layers one by one."""

    def __init__(
        self, stack: StackedDecoder, embedding: Function, head: Head, decoder: Decoder, backend: Backend
    ) -> None:
        self.embedding = embedding
        self.decoder = decoder
        self._backend = backend
        self._products = cast(Backend, PackedProducts(backend, decoder))
        self._stack = stack
        self._head = head
        self._angles = [torch.empty(0, 0)] * len(stack.rotaries)

    def forward(
        self,
        embeddings: torch.Tensor,
        positions: torch.Tensor,
        attention: Sequence[StepAttention],
        attend: Attend,
        wanted: torch.Tensor,
    ) -> torch.Tensor:
        """As `PagedModel.forward`, from embeddings, which may be overwritten. `attend`: the step's attention calls, one
        after another."""
        kinds = {id(step): step for step in attention}
        if len(positions) > 1 or any(step.backend is not self._backend for step in kinds.values()):
            return self._layer_by_layer(embeddings, positions, attend, wanted)
        index = {key: i for i, key in enumerate(kinds)}
        logits = self.decoder.run(
            self._stack.scaled(embeddings),
            positions[0],
            [(step.plan, step.blocks, step.rows) for step in kinds.values()],
            [index[id(step)] for step in attention],
            self._angles_to(int(positions.max())),
            wanted,
        )
        return self._head.finish(logits)

    def _layer_by_layer(
        self, embeddings: torch.Tensor, positions: torch.Tensor, attend: Attend, wanted: torch.Tensor
    ) -> torch.Tensor:
        stack = self._stack
        step = LayerInputs(self._products, cos_sin(stack.decoder, stack.rotaries, position_ids(positions)), attend)
        hidden = run_layers(step, stack.layers, stack.norm, stack.scaled(embeddings))
        return self._head.finish(self.decoder.linear(hidden[wanted], *self._head.linear))

    def _angles_to(self, position: int) -> list[torch.Tensor]:
        if self._angles and position >= len(self._angles[0]):
            length = max(FIRST_POSITIONS, 1 << position.bit_length())
            self._angles = cos_sin(self._stack.decoder, self._stack.rotaries, torch.arange(length)[None])
        return self._angles


def make_whole(
    model: PagedModel,
    backend: Backend,
    bits: int | None = None,
    quantized: Mapping[str, QuantizedWeight] | None = None,
) -> None:
    """Let `backend` run `model` in one call, if it can. bits and quantized: see `Backend.decoder`; `quantized` has the
    checkpoint's names.

    Raises:
        UnsupportedModelError: the backend can't, and weights are to be quantized; or its logits differ.
    """
    try:
        with RoutedProducts(backend.linear):
            if reason := next(filter(None, (backend.refuses(s, model.dtype, model.dtype) for s in model.layers)), None):
                raise NotRecognisedError(f"attention with {reason}")
            stack, head, embed_scale = _recognise(model)
            on, logits = model.verified or (None, None)
            # the model is as `verify` left it
            before = logits.float() if logits is not None and on is backend else _logits(model, backend)
        tensors = None if quantized is None else JoinedWeights(quantized, model.parameters)
        decoder = backend.decoder(stack.layers, stack.norm, head.linear, bits, tensors)
        if decoder is None:
            raise NotRecognisedError(f"the {backend.name} backend runs layers one by one")
    except NotRecognisedError as reason:
        if bits is not None or quantized is not None:
            name = type(model.model).__name__
            raise UnsupportedModelError(f"the weights of {name} can't be quantized: {reason}") from reason
        model.notes.append(f"layer by layer: {reason}")
        return
    output = decoder.weights[id(head.linear.weight)]
    embedding = stack.embedding if embed_scale is None else _rows_of(output, embed_scale)
    model.whole, model.row_multiple = WholeModel(stack, embedding, head, decoder, backend), 1
    model.parameters.packed = decoder.weights
    after = _logits(model, backend)
    error = float(((after - before).abs().amax(-1) / before.std().clamp_min(1e-12)).median())
    if bits is None and quantized is None and not error <= TOLERANCE[model.dtype]:
        raise UnsupportedModelError(
            f"the {backend.name} backend computes {type(model.model).__name__} wrongly as a whole (logits differ by "
            f"{error:.1e} standard deviations); this is a bug: attention_backend='reference' avoids it"
        )
    model.notes.append(f"as a whole: logits within {error:.1e} standard deviations of those layer by layer")


def _recognise(model: PagedModel) -> tuple[StackedDecoder, Head, float | None]:
    """The stack, the output layer, and, where the embeddings are rows of the output layer's weight, their factor."""
    stack = model.stack
    if stack is None:
        raise NotRecognisedError("its layers are of no form that is known")
    if not all(isinstance(layer.mlp, GatedMLP) for layer in stack.layers):
        raise NotRecognisedError("an MLP is not a gated one")
    if len(model.layers) != len(stack.layers):
        raise NotRecognisedError(f"{len(stack.layers)} layers make {len(model.layers)} attention calls")
    if any(module._forward_pre_hooks or module._forward_hooks for module in model.model.modules()):
        raise NotRecognisedError("a module has hooks, which want to be called")
    output: Any = model.model.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise NotRecognisedError("its output layer is no linear one")
    ids = torch.arange(TEXT_ROWS) % output.weight.shape[0]
    with torch.inference_mode(), stand_in(model.model):
        inputs: dict[str, Any] = {"input_ids": ids[None], "position_ids": torch.arange(TEXT_ROWS)[None]}
        hidden = stack.forward(**inputs).last_hidden_state[0]
        logits = model.model(**inputs, use_cache=False).logits[0].float()
        head = _head(model, Linear(output.weight, output.bias), hidden, logits)
        rows, embeddings = output.weight[ids], stack.embedding(ids)
    if stack.embedding.weight is not output.weight:
        return stack, head, None
    own = [*vars(stack.embedding).values(), *stack.embedding.buffers()]
    for scale in (1.0, *_numbers(own), *(float(torch.tensor(x, dtype=rows.dtype)) for x in _numbers(own))):
        if torch.equal(embeddings, rows * scale):
            return stack, head, scale
    raise NotRecognisedError("its embedding is no plain lookup in the output layer's weight")


def _head(model: PagedModel, linear: Linear, hidden: torch.Tensor, logits: torch.Tensor) -> Head:
    """The head that comes nearest to `logits`. Its scale is a number of the config, or one over it."""
    product = F.linear(hidden, linear.weight, linear.bias).float()
    fitted = float((product * logits).sum() / (product * product).sum().clamp_min(1e-12))
    named = [x for number in _numbers(vars(model.config).values()) if number for x in (number, 1 / number)]
    scale = min((1.0, *named), key=lambda x: abs(x - fitted))
    cap = getattr(model.config, "final_logit_softcapping", None)
    heads = [Head(linear), Head(linear, scale), Head(linear, 1.0, cap)]
    errors = [float((head.finish(product.clone()) - logits).square().mean().sqrt()) for head in heads]
    best = min(range(len(heads)), key=errors.__getitem__)
    if not errors[best] <= TOLERANCE[model.dtype] * float(logits.std()):
        raise NotRecognisedError("its logits are not the output layer's product, scaled or capped")
    return heads[best]


def _numbers(values: Iterable[Any]) -> list[float]:
    single = (x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x for x in values)
    return [float(x) for x in single if isinstance(x, float)]


def _rows_of(weight: PackedWeight, scale: float) -> Function:
    return lambda ids: weight.rows(ids) if scale == 1.0 else weight.rows(ids) * scale


def _logits(model: PagedModel, backend: Backend) -> torch.Tensor:
    sequences = random_sequences(model)
    return torch.cat(paged_logits(model, sequences, schedule([len(s) for s in sequences]), backend)).float()
