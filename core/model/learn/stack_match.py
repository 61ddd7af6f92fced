"""Recognise the decoder layers of a fused model: by what they call in one pass, verified by running them.

A pass over a few tokens tells which modules each layer calls, in which order, and on which side of its attention. The
kind of rotary embedding and a multiplier are tried: each layer and the stack's version of it run on random rows of
small and large scale, at positions up to the model's last one, with random weights in the norms. Query, key and value,
as they reach attention, and the layer's output must agree; in the end the logits must, with the model's own weights.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from ....kernels.contract import Backend
from ....kernels.decoder_contract import AttentionMixer, AttentionNames, DecoderLayer, LayerNames, RecurrentMixer
from ....kernels.reference.reference_backend import ReferenceBackend
from ...parallel.stage_model import ForeignLayer
from ..run.fused import FusedRMSNorm, ProjectionPart
from ..run.positions import positions_given, receivers
from ..run.recurrent import one_sequence, state_inputs, states_of
from ..run.stack import LayerInputs, RotaryOptions, StackedDecoder, StackOptions, build_layer, cos_sin, run_layer
from .fuse_match import (
    LOGITS_TOLERANCE,
    TOLERANCE,
    NotRecognisedError,
    deviations,
    random_rows,
    row_differences,
    widened,
)
from .fuse_observe import SEED, TEXT_ROWS, own_values, run_rows, stand_in
from .mixer_match import MixerParts, mixer_candidates
from .row_invariant import has_kernels_only

# What a layer calls, in order (N a norm, A its mixer, M the MLP) → the roles of its norms
FORMS = {
    "NA": ("input_norm",),
    "NANM": ("input_norm", "mlp_norm"),
    "NANNMN": ("input_norm", "mixer_norm", "mlp_norm", "output_norm"),
    "ANMN": ("mixer_norm", "output_norm"),
}

# An attention that calls one of these has limits which random rows need not reach.
_LIMITS = frozenset({"clamp", "clamp_", "clip", "clip_", "minimum", "maximum"})


class _Call(NamedTuple):
    path: str
    module: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}  # noqa: RUF012  # never changed
    output: Any = None


class _Recurrence(NamedTuple):
    """A call of a module that keeps a state."""

    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Attention(NamedTuple):
    path: str
    at: int  # how many calls had ended before
    sizes: list[int]  # of a token's query, key and value
    dims: list[int]  # of their heads
    sinks: torch.Tensor | None


class _Pass(TorchFunctionMode):
    """Notes what one pass over the model calls."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.calls: list[_Call] = []  # in the order of their ends
        self.mixers: list[_Attention | _Recurrence] = []
        self._stateful = set() if (states := states_of(model)) is None else set(states.modules) - set(states.looped)
        self.limited: set[str] = set()
        self._running: list[str] = []
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None) or TEXT_ROWS
        self.positions = torch.linspace(0, limit - 1, TEXT_ROWS, device=model.device).long()[None]
        with self:
            run_rows(model, slice(TEXT_ROWS), self._before, self._after, self._attend, self.positions[0])

    def _before(self, path: str, *_: Any) -> None:
        self._running.append(path)

    def _after(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self._running.pop()
        # of the others, tensors are not kept: they take memory
        keep = _name(path).isdigit() or isinstance(module, PreTrainedModel) or _is_pair(output)
        self.calls.append(_Call(path, module, args, kwargs, output) if keep else _Call(path, module))
        if module in self._stateful:
            self.mixers.append(_Recurrence(path, args, kwargs))

    def _attend(self, _: nn.Module, *states: torch.Tensor, **kwargs: Any) -> None:
        sizes, dims = [x.shape[1] * x.shape[3] for x in states[:3]], [x.shape[3] for x in states[:3]]
        self.mixers.append(_Attention(self._running[-1], len(self.calls), sizes, dims, kwargs.get("s_aux")))

    def __torch_function__(self, func: Any, types: Iterable[Any], args: Any = (), kwargs: Any = None) -> Any:
        if self._running and func.__name__ in _LIMITS:
            self.limited.add(self._running[-1])
        return func(*args, **(kwargs or {}))

    def children(self, path: str, calls: slice = slice(None)) -> list[_Call]:
        """Calls of modules right below `path` that hold weights."""
        below = (call for call in self.calls[calls] if _parent(call.path) == path)
        return [call for call in below if isinstance(call.module, ProjectionPart) or [*call.module.parameters()]]


def recognise_stack(model: PreTrainedModel, backend: Backend, thorough: bool = True) -> StackOptions:
    """What the layers of `model`, which is fused already, are. thorough: see `fuse_model`. Raises `NotRecognisedError`,
    saying why, where they are not what the stack can run."""
    try:
        return _Matching(model, backend).match(thorough)
    except (NotRecognisedError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # from any model's code
        raise NotRecognisedError(f"a trial run failed: {error!r}") from error


class _Matching:
    """One model."""

    def __init__(self, model: PreTrainedModel, backend: Backend) -> None:
        self.model = model
        self.backend = backend
        self.seen = _Pass(model)
        self.layers = self._layer_list()
        self.path = _parent(_parent(self.layers[0].path))
        self.decoder = cast("PreTrainedModel", model.get_submodule(self.path))
        self.rotaries: list[RotaryOptions] = []

    def match(self, thorough: bool) -> StackOptions:
        norms = [call for call in self.seen.children(self.path) if isinstance(call.module, FusedRMSNorm)]
        if len(norms) != 1:
            raise NotRecognisedError(f"{type(self.decoder).__name__} has {len(norms)} norms besides its layers, not 1")
        names = []
        for layer, mixer in zip(self.layers, self.seen.mixers, strict=True):
            try:
                if isinstance(mixer, _Attention):
                    names.append(self._settle(layer, self._attentions(layer, mixer)))
                else:
                    names.append(self._settle(layer, self._recurrences(layer, mixer)))
            except NotRecognisedError as reason:
                raise NotRecognisedError(f"{layer.path}: {reason}") from None
        attending = (mixer.path for mixer in self.seen.mixers if isinstance(mixer, _Attention))
        layers = _parent(self.layers[0].path)
        stack = StackOptions(
            decoder=self.path,
            layers=_name(layers),
            attention=next((path.removeprefix(f"{layers}.") for path in attending), None),
            norm=_name(norms[0].path),
            embed_scale=self._embed_scale(),
            rotaries=self.rotaries,
            names=names,
        )
        if thorough or not has_kernels_only(self.model, StackedDecoder(self.model, stack, self.backend)):
            self._compare_logits(stack)
        return stack

    def _layer_list(self) -> list[_Call]:
        """The calls of the layers: all of one list in a decoder, each with one mixer, in order."""
        mixing = [_parent(mixer.path) for mixer in self.seen.mixers]
        for path, module in self.model.named_modules():
            decoder = self.model.get_submodule(_parent(path))
            if isinstance(module, nn.ModuleList) and isinstance(decoder, PreTrainedModel):
                own = [f"{path}.{i}" for i, layer in enumerate(module) if not isinstance(layer, ForeignLayer)]
                layers = [call for call in self.seen.calls if _parent(call.path) == path and call.path in own]
                if [layer.path for layer in layers] == mixing == own:
                    return layers
        raise NotRecognisedError("there is no list of layers in which each has one attention or state of its own")

    def _attentions(self, layer: _Call, attention: _Attention) -> list[LayerNames]:
        """What a layer with attention may be, given what it calls."""
        seen, output = self._attention(layer, attention)
        rotary = self._rotary(layer)
        kinds = [] if rotary is None else [(rotary, False), (rotary, True)]
        names = self._around(layer, attention.path, output)
        return [
            names._replace(mixer=seen._replace(rotary=index, interleaved=interleaved), multiplier=factor)
            for (index, interleaved), factor in product([*kinds, (None, False)], _factors(layer.module))
        ]

    def _recurrences(self, layer: _Call, mixer: _Recurrence) -> Iterator[LayerNames]:
        """What a layer with a recurrent mixer may be."""
        module, states = self.model.get_submodule(mixer.path), states_of(self.model)
        assert states is not None, "the mixer keeps one"
        calls = self.seen.children(mixer.path)
        linear = [isinstance(call.module, nn.Linear | ProjectionPart) for call in calls]
        if linear[-2:] != [False, True] or linear[:-2] != [True] * max(len(linear) - 2, 1):
            called = ", ".join(_name(call.path) for call in calls)
            raise NotRecognisedError(f"its mixer calls {called}, not one product, a norm, output")
        *products, norm, output = calls
        if len(products) > 1 and not _is_one([call.module for call in products]):
            raise NotRecognisedError("the first linear layers of its mixer are not one product")
        names = self._around(layer, mixer.path, _name(output.path))
        inner = MixerParts(_name(mixer.path), [(_name(c.path), c.module) for c in products], _name(norm.path))
        with stand_in(self.model):
            found = mixer_candidates(module, inner, partial(module, *mixer.args, **mixer.kwargs), states)
        return (
            names._replace(mixer=each, multiplier=factor) for each, factor in product(found, _factors(layer.module))
        )

    def _around(self, layer: _Call, mixer: str, output: str) -> LayerNames:
        """The layer without what its mixer is; `output` is the name of the mixer's last product."""
        calls = self.seen.children(layer.path)
        form = "".join("A" if c.path == mixer else "N" if _is_norm(c) else "M" for c in calls)
        if form not in FORMS:
            raise NotRecognisedError(f"calls {', '.join(type(c.module).__name__ for c in calls)}, in this order")
        roles: dict[str, Any] = dict.fromkeys(("input_norm", "mixer_norm", "mlp_norm", "output_norm"))
        roles.update(zip(FORMS[form], (_name(c.path) for c in calls if _is_norm(c)), strict=True))
        mlp = _name(calls[form.index("M")].path) if "M" in form else None
        nothing: Any = None
        return DecoderLayer(**roles, mixer=nothing, output=f"{_name(mixer)}.{output}", mlp=mlp, multiplier=1.0)

    def _attention(self, layer: _Call, attention: _Attention) -> tuple[AttentionNames, str]:
        """What attention calls, and the name of its last product."""
        inner = _name(attention.path)
        before = self.seen.children(attention.path, slice(attention.at))
        after = self.seen.children(attention.path, slice(attention.at, None))
        norms = [f"{inner}.{_name(call.path)}" for call in before if _is_norm(call)]
        products = [call for call in before if not _is_norm(call)]
        usual = len(norms) in (0, 2) and [isinstance(c.module, nn.Linear | ProjectionPart) for c in after] == [True]
        query, key, value = attention.sizes
        modules_of = [call.module for call in products]
        gates = attention.dims[0] == attention.dims[2] and _gives(modules_of, [2 * query, key, value])
        if not usual or not (gates or _gives(modules_of, attention.sizes)):
            names = ", ".join(_name(call.path) for call in (*before, *after))
            raise NotRecognisedError(
                f"its attention calls {names}, not q/k/v in one product, two norms or none, output"
            )
        if self.seen.limited & {layer.path, attention.path}:
            raise NotRecognisedError("limits values where a norm would not")
        modules = layer.module, layer.module.get_submodule(inner)
        own = {n: t for m in modules for n, t in {**m._parameters, **m._buffers}.items() if t is not None}
        if any(tensor is not attention.sinks for tensor in own.values()):
            raise NotRecognisedError(f"has {', '.join(own)} besides its modules")
        query_norm, key_norm = norms or (None, None)
        seen = AttentionMixer(
            qkv=f"{inner}.{'+'.join(_name(call.path) for call in products)}",
            sizes=[2 * query, key, value] if gates else attention.sizes,
            key_dim=attention.dims[0],
            value_dim=attention.dims[2],
            query_norm=query_norm,
            key_norm=key_norm,
            rotary=None,
            interleaved=False,
            sinks=None if attention.sinks is None else f"{inner}.{next(iter(own))}",
            gates=gates,
        )
        return seen, _name(after[0].path)

    def _rotary(self, layer: _Call) -> int | None:
        """Which of `rotaries` made the cosines and sines that this layer is given; None where it is given none."""
        pair = next((x for x in (*layer.args, *layer.kwargs.values()) if _is_pair(x)), None)
        if pair is None:
            return None
        made = next((call for call in self.seen.calls if _is_pair(call.output) and call.output[0] is pair[0]), None)
        if made is None:
            raise NotRecognisedError("its position embeddings come from no module")
        _, (_, positions), *rest = (
            inspect.signature(made.module.forward).bind(*made.args, **made.kwargs).arguments.items()
        )
        if not torch.equal(positions, self.seen.positions.expand_as(positions)) or not all(
            isinstance(value, str) for _, value in rest
        ):
            raise NotRecognisedError(f"{made.path} is given other positions than the model, or more than those")
        halves = torch.equal(*pair[0].chunk(2, dim=-1))
        form = "halves" if halves else "pairs" if torch.equal(pair[0][..., ::2], pair[0][..., 1::2]) else "single"
        options = RotaryOptions(made.path.removeprefix(f"{self.path}."), dict(rest), form)
        if options not in self.rotaries:
            self.rotaries.append(options)
        return self.rotaries.index(options)

    def _settle(self, layer: _Call, candidates: Iterable[LayerNames]) -> LayerNames:
        """The first candidate that computes what the layer computes."""
        hidden = layer.args[0].to(self.model.dtype)  # some models add up their layers' outputs in fp32
        x = random_rows(TEXT_ROWS, hidden.shape[-1], -2, 1, hidden)
        expected: list[torch.Tensor] = []

        def note(_: nn.Module, *states: torch.Tensor, **kwargs: Any) -> None:
            expected.extend(part[0].transpose(0, 1).flatten(1) for part in states[:3])

        limit = TOLERANCE[x.dtype]
        nearest = (-1, 0.0)  # the part that differs, and by how much
        with _random_norms(layer.module):
            with stand_in(self.model, note):
                out = layer.module(x, *layer.args[1:], **layer.kwargs)
            expected.append((out[0] if isinstance(out, tuple) else out)[0].to(x.dtype))
            for names in candidates:
                errors = self._errors(layer.module, names, x[0].clone(), expected)
                wrong = [(part, error) for part, error in enumerate(errors) if not error <= limit]
                if not wrong:
                    return names
                nearest = max(nearest, wrong[0])
        part, error = ("query", "key", "value", "output")[nearest[0] + 4 - len(expected)], nearest[1]
        raise NotRecognisedError(f"its {part} differs by {error:.1e} from the stack's, the limit is {limit:.1e}")

    def _errors(
        self, module: nn.Module, names: LayerNames, x: torch.Tensor, expected: Sequence[torch.Tensor]
    ) -> list[float]:
        """How far query, key, value and output of one layer are from those expected."""
        got: list[torch.Tensor] = []

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: Any) -> torch.Tensor:
            got.extend(part.reshape(len(x), -1) for part in (query, key, value))
            return own_values(query, key, value)

        layer = build_layer(module, names)
        angles = cos_sin(self.decoder, self.rotaries, self.seen.positions)
        kernels = self.backend, self.backend.linear, self.backend.experts
        step = LayerInputs(*kernels, angles, attend, states_of(self.model))
        got.append(torch.add(*run_layer(step, layer, x, None)))
        *states, output = map(row_differences, expected, got)
        # of a row that was rounded otherwise, a router may choose another expert, and a short query becomes a long one
        amplifies = isinstance(layer.mlp, nn.Module) or isinstance(layer.mixer, RecurrentMixer)
        middle = amplifies and x.dtype != torch.float32
        return [*(float(rows.amax()) for rows in states), float(output.median() if middle else output.amax())]

    def _embed_scale(self) -> float:
        """What embeddings are multiplied by before the first layer."""
        given = next(call.kwargs for call in self.seen.calls if call.module is self.decoder)
        embeds: Any = given.get("inputs_embeds")
        if embeds is None:
            embeds = self.decoder.get_input_embeddings()(given["input_ids"])
        for scale in (1.0, *(float(v) for v in vars(self.decoder).values() if type(v) in (int, float))):
            if torch.equal(embeds * scale, self.layers[0].args[0]):
                return scale
        raise NotRecognisedError(f"{type(self.decoder).__name__} changes its embeddings before the first layer")

    def _compare_logits(self, options: StackOptions) -> None:
        """The model's logits with the stack and without. Where they differ in half precision, rounding alone may be
        the reason, and fp32 decides, as in `verify`."""
        error = self._error_of_logits(StackedDecoder(self.model, options, self.backend))
        limit = LOGITS_TOLERANCE[self.model.dtype]
        if not error <= limit and self.model.dtype != torch.float32:
            with widened(self.model, self.backend):
                error = self._error_of_logits(StackedDecoder(self.model, options, ReferenceBackend()))
            limit = LOGITS_TOLERANCE[torch.float32]
        if not error <= limit:
            raise NotRecognisedError(f"the logits differ by {error:.1e} standard deviations, the limit is {limit:.1e}")

    def _error_of_logits(self, stacked: StackedDecoder) -> float:
        embeddings: Any = self.model.get_input_embeddings()
        ids = torch.arange(TEXT_ROWS, device=self.model.device)[None] % embeddings.weight.shape[0]
        with stand_in(self.model), positions_given(receivers(self.model), self.seen.positions) as given:
            states = state_inputs(self.model, one_sequence(self.model, TEXT_ROWS), TEXT_ROWS)
            inputs = {"input_ids": ids, **given, **states}
            own = self.model(**inputs)[0][0]
            stacked.install()
            try:
                return float(deviations(self.model(**inputs)[0][0], own).median())
            finally:
                stacked.remove()


@contextmanager
def _random_norms(layer: nn.Module) -> Iterator[None]:
    """Ones, as in a model that is not trained, would hide on which side of a rotary embedding a norm is."""
    generator = torch.Generator().manual_seed(SEED)
    norms = [(module, module.weight.clone()) for module in layer.modules() if isinstance(module, FusedRMSNorm)]
    try:
        for norm, weight in norms:
            norm.weight.copy_(torch.randn(len(weight), generator=generator) * 0.3 + 1 - norm.offset)
        yield
    finally:
        for norm, weight in norms:
            norm.weight.copy_(weight)


def _gives(modules: Sequence[nn.Module], sizes: Sequence[int]) -> bool:
    """Whether these are one product whose rows are those of query, key and value."""
    if len(modules) == 1:
        return isinstance(modules[0], nn.Linear) and modules[0].out_features == sum(sizes)
    return _is_one(modules) and [part.out_features for part in modules] == list[Any](sizes)


def _is_one(modules: Sequence[nn.Module]) -> bool:
    """Whether these are all parts of one product, in order."""
    parts = [part for part in modules if isinstance(part, ProjectionPart)]
    return len(parts) == len(modules) and [part.index for part in parts] == list(range(len(parts[0].sizes)))


def _factors(layer: nn.Module) -> list[float]:
    """What a layer may multiply its outputs by."""
    return [1.0, *(value for value in vars(layer).values() if isinstance(value, float))]


def _is_norm(call: _Call) -> bool:
    return isinstance(call.module, FusedRMSNorm)


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and all(isinstance(part, torch.Tensor) for part in x)


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _name(path: str) -> str:
    return path.rpartition(".")[2]
