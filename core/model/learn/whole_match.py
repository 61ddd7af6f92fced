"""Recognise a model that its backend can run in one call, hand its weights over, and compare the logits.

This needs a backend with such a call (`Backend.decoder`), and a model that has nothing around its layers but an
embedding before and a product after. The backend then holds the weights, packed and perhaps quantized, and the model's
own forward can't run any more. So this is the last step of loading.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

from ....ipc.errors import UnsupportedModelError
from ....kernels.contract import ROW_MULTIPLE, Backend
from ....kernels.decoder_contract import AttentionMixer, Decoder, Embedding, GatedMLP, Linear
from ...parallel.parallel_backend import ParallelBackend
from ...parallel.stage_model import StagePart
from ..load.quantized import EXPANDED, settle_weights
from ..run.fused import FusedMixture
from ..run.paged_model import PagedModel
from ..run.positions import positions_given, receivers
from ..run.recurrent import one_sequence, state_inputs
from ..run.stack import StackedDecoder
from ..run.whole_model import Head, WholeModel
from .fuse_match import LOGITS_TOLERANCE, NotRecognisedError, deviations
from .fuse_observe import stand_in
from .row_invariant import RoutedProducts
from .verify import final_logits

logger = logging.getLogger(__name__)

MOST_ROUNDING = 1.0  # most that logits may differ by from rounding, in standard deviations; wrong ones differ by more


def make_whole(model: PagedModel, backend: Backend, bits: int | None = None) -> None:
    """Let `backend` run `model` in one call, if it can. bits: see `Backend.decoder`.

    Raises:
        UnsupportedModelError: the backend can't, and weights are to be quantized; or its logits differ.
    """
    quantized = bits is not None or model.is_quantized
    try:
        with RoutedProducts(backend.linear):
            if reason := next(filter(None, (backend.refuses(s, model.dtype, model.dtype) for s in model.layers)), None):
                raise NotRecognisedError(f"attention with {reason}")
            stack, head, embed_scale, is_plain = _recognise(model)
            on, logits = model.verified or (None, None)
            # the model is as `verify` left it
            known = logits is not None and on is backend
            before = logits if known or not model.verdict else final_logits(model, backend)
        decoder = _decoder(backend, stack, head, bits, quantized)
        if decoder is None:
            raise NotRecognisedError(f"the {backend.name} backend runs layers one by one")
    except NotRecognisedError as reason:
        if bits is not None:
            name = type(model.model).__name__
            raise UnsupportedModelError(f"the weights of {name} can't be quantized: {reason}") from reason
        if model.is_quantized:
            logger.warning("%s: %s", EXPANDED, reason)
            _settle(model, backend)
            model.is_quantized = False
        model.notes.append(f"layer by layer: {reason}")
        return
    head = _settle(model, backend, decoder)(head)
    output = decoder.weights[id(head.linear.weight)]
    embedding: Callable[[torch.Tensor], torch.Tensor] = stack.embedding
    if embed_scale is not None:
        embedding = Embedding(output, () if embed_scale == 1.0 else (embed_scale,))
    elif is_plain:
        embedding = Embedding(stack.embedding.weight)
    model.whole, model.row_multiple = WholeModel(stack, embedding, head, decoder, backend, model.states), 1
    model.parameters.packed = decoder.weights
    logits = final_logits(model, backend)
    model.verified = backend, logits
    if before is None:  # as for an earlier start; the caller compares the logits
        return
    error = float(deviations(logits, before).median())
    limit = max(LOGITS_TOLERANCE[model.dtype], min(2 * model.rounding, MOST_ROUNDING))
    if quantized:  # rounding weights at load may change logits by any amount; of a checkpoint, only inputs are rounded
        limit = MOST_ROUNDING if bits is None else float("inf")
    if not (bool(logits.isfinite().all()) and error <= limit):
        instead = "attention_backend='reference'" if bits is None else "a model without quantization"
        raise UnsupportedModelError(
            f"the {backend.name} backend computes {type(model.model).__name__} wrongly as a whole (logits differ by "
            f"{error:.1e} standard deviations); this is a bug: {instead} avoids it"
        )
    how = "as a whole" if decoder.runs_steps else "with packed weights"
    model.verdict.append(f"{how}: logits within {error:.1e} standard deviations of those layer by layer")
    model.notes.append(model.verdict[-1])


def _settle(model: PagedModel, backend: Backend, decoder: Decoder | None = None) -> Callable[[Any], Any]:
    """Let usual tensors take the places of lazy weights: see `settle_weights`. → What replaces them in a structure."""
    pairs = settle_weights(model.model)  # it holds the old ones, so that an id means one tensor
    new = {key: tensor for key, (_, tensor) in pairs.items()}

    def settled(tensors: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda x: new.get(id(x), x), tensors)

    if new and model.stack is not None:
        model.stack.layers = settled(model.stack.layers)
    if new and isinstance(backend, ParallelBackend):
        backend.move(new)
    if new and decoder is not None:
        decoder.move({key: id(tensor) for key, tensor in new.items()})
    return settled


def _decoder(backend: Backend, stack: StackedDecoder, head: Head, bits: int | None, quantized: bool) -> Decoder | None:
    mixtures = (layer.mlp.tensors() if isinstance(layer.mlp, FusedMixture) else layer.mlp for layer in stack.layers)
    layers = [layer._replace(mlp=mlp) for layer, mlp in zip(stack.layers, mixtures, strict=True)]
    try:
        decoder = backend.decoder(layers, stack.norm, head.linear, bits)
    except ValueError as error:
        if not quantized:
            raise
        raise UnsupportedModelError(f"the weights can't be quantized: {error}") from error
    if decoder is not None:
        stack.layers = layers
    return decoder


def _recognise(model: PagedModel) -> tuple[StackedDecoder, Head, float | None, bool]:
    """The stack, the output layer, and, where the embeddings are rows of the output layer's weight, their factor; else
    whether they are rows of a weight of their own."""
    stack = model.stack
    if stack is None:
        raise NotRecognisedError("its layers are of no form that is known")
    if not all(layer.mlp is None or isinstance(layer.mlp, GatedMLP | FusedMixture) for layer in stack.layers):
        raise NotRecognisedError("an MLP is neither a gated one nor experts with their router")
    if any(p.dim() > 1 and p.is_floating_point() and p.dtype != model.dtype for p in stack.decoder.parameters()):
        raise NotRecognisedError("its weights have several dtypes")
    attending = sum(isinstance(layer.mixer, AttentionMixer) for layer in stack.layers)
    if len(model.layers) != attending:
        raise NotRecognisedError(f"{attending} layers with attention make {len(model.layers)} attention calls")
    modules = model.model.modules()
    hooks = [hook for m in modules for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]
    if any(not isinstance(getattr(hook, "__self__", None), StagePart) for hook in hooks):
        raise NotRecognisedError("a module has hooks, which want to be called")
    output: Any = model.model.get_output_embeddings()
    if not isinstance(output, nn.Linear):
        raise NotRecognisedError("its output layer is no linear one")
    rows = torch.arange(ROW_MULTIPLE, device=model.device)
    ids, positions = rows % output.weight.shape[0], rows[None]
    seen: list[Any] = []
    hook = stack.decoder.register_forward_hook(lambda module, args, out: seen.append(out))
    try:
        with torch.inference_mode(), stand_in(model.model), positions_given(receivers(model.model), positions) as given:
            states = state_inputs(model.model, one_sequence(model.model, len(rows)), len(rows))
            logits = model.model(ids[None], **given, **states).logits[0].float()
            head = _head(model, Linear(output.weight, output.bias), seen[0].last_hidden_state[0], logits)
            weights, embeddings = output.weight[ids], stack.embedding(ids)
    finally:
        hook.remove()
    if stack.embedding.weight is not output.weight:
        plain = isinstance(stack.embedding, nn.Embedding) and torch.equal(embeddings, stack.embedding.weight[ids])
        return stack, head, None, plain
    own = [*vars(stack.embedding).values(), *stack.embedding.buffers()]
    for scale in (1.0, *_numbers(own), *(float(torch.tensor(x, dtype=weights.dtype)) for x in _numbers(own))):
        if torch.equal(embeddings, weights * scale):
            return stack, head, scale, False
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
    if not errors[best] <= LOGITS_TOLERANCE[model.dtype] * float(logits.std()):
        raise NotRecognisedError("its logits are not the output layer's product, scaled or capped")
    return heads[best]


def _numbers(values: Iterable[Any]) -> list[float]:
    single = (x.item() if isinstance(x, torch.Tensor) and x.numel() == 1 else x for x in values)
    return [float(x) for x in single if type(x) in (int, float)]
