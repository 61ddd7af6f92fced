"""What the language model of a multi-modal model is given for a prompt with media.

The model's own forward runs over the whole prompt and is stopped at the door: where it calls its language model. What
it would have been called with is compared with what it is called with for the same token ids without media. The rows
that differ are what a step puts in (door.py); positions and masks are read there, too. No class of models is named.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import PreTrainedModel

from ....ipc.errors import UnsupportedModelError
from ....ipc.media_client import TOKEN_KINDS
from ..run.attention import attention_set
from ..run.cross_attention import CrossStates
from .features import MODALITIES, EncodedItem, encode_item, feature_methods, join_inputs, join_outputs
from .inner_encoder import InnerEncoder

ARRIVE = "mainspring_door"  # attention under this name is never called: the forward stops before it
TYPES = ("mm_token_type_ids", "token_type_ids", "moe_mm_token_type_ids")  # arguments that tell the kind of each token
NOT_READ = frozenset(
    {"attention_mask", "past_key_values", "use_cache", "return_dict", "input_ids", "cache_position", "labels"}
    | {"output_attentions", "output_hidden_states", "logits_to_keep", "position_ids"}
)
USUAL = NOT_READ | {"inputs_embeds", "self", "kwargs", "flash_attn_kwargs"}
DEEPSTACK = ("visual_pos_masks", "deepstack_visual_embeds")

MaskFunction = Callable[..., torch.Tensor]


class Puts(NamedTuple):
    """Rows of one argument of the language model that a prompt's media change."""

    places: np.ndarray  # int64 [n], ascending: the tokens' indices
    values: torch.Tensor  # [n, ...]


class MergedPrompt(NamedTuple):
    """A prompt with media as the language model sees it."""

    length: int  # tokens
    puts: dict[str, Puts]  # by the argument's name
    deepstack: Puts | None  # values [n, layers, hidden], which are added behind the first layers
    positions: np.ndarray | None  # int64 [axes, length]; None: the index of each token
    delta: np.ndarray | int  # int64 [axes, 1]: what the position of a token behind the prompt is more than its index
    reach: tuple[np.ndarray | None, np.ndarray | None]  # int32 [length] of layers without and with a window: the last
    # token that each one sees; None: itself
    cross: CrossStates | None = None  # what all tokens see beside the prompt


class _Arrived(NamedTuple):
    arguments: dict[str, Any]
    masks: dict[str, MaskFunction]  # by kind of layer


class _Stopped(Exception):
    pass


class Merger:
    """See the module. `spans` is what a planner must not cut (`MediaFacts.spans`), as far as the model tells it from
    the kinds of tokens alone."""

    def __init__(self, model: PreTrainedModel, front: PreTrainedModel | None = None) -> None:
        """front: what is run up to the language model; None: the part of `model` that merges."""
        name = type(model).__name__
        self.model = model
        self.modalities = list(feature_methods(model))
        self.decoder: Any = model.get_decoder()
        base = model.base_model
        if not self.modalities or self.decoder is model or self.decoder is base:
            raise UnsupportedModelError(f"{name} has no encoder of media that is apart from its language model")
        in_base = any(part is self.decoder for part in base.modules())
        self._inner: Any = base if in_base else model  # the part that merges
        self._front: Any = front or self._inner
        config = model.config
        self._token = {m: getattr(config, f"{m}_token_id", None) for m in MODALITIES}
        self.axes = _axes(self._inner, config.get_text_config())
        _fuse_attention(model, self.decoder)
        self._whole_prompt = False
        self.embed: Callable[[torch.Tensor], torch.Tensor] | None = None  # of a model whose embedding is packed
        self.spans = ""
        self.spans = self._find_spans()

    @property
    def layered(self) -> str:
        """Why the code of the language model's layers must stay; empty: it need not."""
        extra = [name for name in inspect.signature(self.decoder.forward).parameters if name not in USUAL]
        return f"{type(self.decoder).__name__} takes {extra[0]}" if extra else ""

    def encode(self, modality: str, arrays: Mapping[str, torch.Tensor]) -> EncodedItem:
        """See `encode_item`."""
        return encode_item(self.model, modality, arrays)

    # ------------------------------------------------------------------ a prompt

    @torch.inference_mode()
    def merge(self, ids: Sequence[int], items: Sequence[EncodedItem]) -> MergedPrompt:
        """The prompt of these token ids, whose placeholders stand for `items` in order."""
        given, text = self._arrive(ids, items), self._arrive(ids, ())
        length = len(ids)
        arguments, alone = given.arguments, text.arguments
        puts: dict[str, Puts] = {}
        for name, value in arguments.items():
            if value is None or name in NOT_READ or name in DEEPSTACK or isinstance(value, bool | int | float | str):
                continue
            if not isinstance(value, torch.Tensor) or value.dim() < 2 or value.shape[:2] != (1, length):
                raise UnsupportedModelError(f"the language model is given {name!r}, which is not one row per token")
            without = alone.get(name)
            changed = value[0] != (0 if without is None else without[0])
            index = changed.reshape(length, -1).any(-1).nonzero().flatten()
            if len(index):
                puts[name] = Puts(index.cpu().numpy(), value[0][index])
        positions, delta = self._positions(arguments.get("position_ids"), length)
        return MergedPrompt(length, puts, _deepstack(arguments, length), positions, delta, _reaches(given, length))

    def _positions(self, given: torch.Tensor | None, length: int) -> tuple[np.ndarray | None, np.ndarray | int]:
        if given is None:
            return None, 0
        positions = given.reshape(-1, length).cpu().numpy().astype(np.int64)
        if len(positions) == self.axes + 1:  # the first axis counts tokens, for masks
            positions = positions[1:]
        if len(positions) not in (1, self.axes):
            raise UnsupportedModelError(f"positions of a prompt with media have {len(positions)} axes")
        positions = np.broadcast_to(positions, (self.axes, length))
        if (positions == np.arange(length)).all():
            return None, 0
        # `generate` counts on from the last token, although frames of a video may have larger positions.
        return positions, positions[:, -1:] + 1 - length

    # ------------------------------------------------------------------ the model's own forward

    def inputs(
        self, ids: Sequence[int], items: Sequence[EncodedItem], module: Any, prompt_len: int | None = None
    ) -> dict[str, Any]:
        """Arguments of the forward of `module` for these token ids with `items`. Tokens behind the first `prompt_len`
        are generated ones."""
        tokens = torch.tensor([list(ids)], device=self.model.device)
        accepted = inspect.signature(module.forward).parameters
        anything = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        # the whole model may know arrays by older names, which the part inside of it takes without naming them
        inner = (
            {n for m in (self._inner, self.model) for n in inspect.signature(m.forward).parameters} if anything else ()
        )
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if not items and self.spans != "every":
            return inputs
        for modality in dict.fromkeys(item.modality for item in items):
            inputs |= join_inputs([item for item in items if item.modality == modality])
        told = [pair for item in items if TOKEN_KINDS in item.inputs for pair in item.inputs[TOKEN_KINDS].tolist()]
        kinds = self._kinds(tokens, prompt_len or len(ids), told)
        inputs |= dict.fromkeys(TYPES, kinds)
        inputs["attention_mask"] = torch.ones_like(tokens)
        return {name: x for name, x in inputs.items() if name in accepted or (anything and name in inner)}

    def _kinds(self, tokens: torch.Tensor, prompt_len: int, told: Sequence[Sequence[int]]) -> torch.Tensor:
        """told: tokens and their kinds, as the items' processor has them."""
        kinds = torch.zeros_like(tokens)
        if self._whole_prompt:
            kinds[:, prompt_len:] = 1
        else:
            for number, modality in enumerate(MODALITIES, 1):
                if self._token[modality] is not None:
                    kinds[tokens == self._token[modality]] = number
            for token, number in told:
                kinds[tokens == token] = number
        return kinds

    @contextmanager
    def encoded(self, items: Sequence[EncodedItem]) -> Iterator[None]:
        """In this context, the model's methods give what `items` are."""
        with ExitStack() as stack:
            for modality in dict.fromkeys(item.modality for item in items):
                kept = join_outputs([item.output for item in items if item.modality == modality])
                for owner in (self.model.base_model, self.model):
                    method = getattr(owner, name := f"get_{modality}_features", None)
                    if isinstance(method, InnerEncoder):
                        stack.enter_context(method.giving(kept))
                    elif method is not None:
                        vars(owner)[name] = _giving(kept)
                        stack.callback(vars(owner).pop, name, None)
            yield

    @contextmanager
    def _embedding(self) -> Iterator[None]:
        """In this context, the model's embedding is `self.embed`, if there is one."""
        module, embed = self.model.get_input_embeddings(), self.embed
        if embed is None:
            yield
            return
        vars(module)["forward"] = lambda ids: embed(ids.reshape(-1)).view(*ids.shape, -1)
        try:
            yield
        finally:
            del vars(module)["forward"]

    def _arrive(self, ids: Sequence[int], items: Sequence[EncodedItem], more: Mapping[str, Any] = {}) -> _Arrived:
        caught: dict[str, Any] = {}
        functions: list[tuple[torch.Tensor, MaskFunction]] = []

        def stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.update(zip(inspect.signature(module.forward).parameters, args, strict=False), **kwargs)
            raise _Stopped

        def build_mask(*, mask_function: MaskFunction, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
            mask = torch.zeros((), dtype=torch.bool, device=self.model.device).expand(1, 1, q_length, kv_length)
            functions.append((mask, mask_function))
            return mask

        hook = self.decoder.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with attention_set(self.model, ARRIVE, _never, build_mask), self.encoded(items), self._embedding():
                self._front(**{**self.inputs(ids, items, self._front), **more})
        except _Stopped:
            pass
        finally:
            hook.remove()
        if caught.get("inputs_embeds") is None:
            raise UnsupportedModelError(f"{type(self.model).__name__} gives its language model no embeddings")
        given = caught.get("attention_mask")
        by_kind = given if isinstance(given, Mapping) else {"full_attention": given}
        masks = {}
        for kind, mask in by_kind.items():
            if not isinstance(mask, torch.Tensor) or mask.dim() < 3:
                continue
            known = [function for built, function in functions if built.data_ptr() == mask.data_ptr()]
            if not known:
                raise UnsupportedModelError(f"{type(self.model).__name__} changes the masks of a prompt with media")
            masks[kind] = known[0]
        return _Arrived(caught, masks)

    # ------------------------------------------------------------------ at load

    @torch.inference_mode()
    def _find_spans(self) -> str:
        """Ask the masks of a text in which some tokens are said to be an image's."""
        accepted = inspect.signature(self._inner.forward).parameters
        names = [name for name in TYPES if name in accepted]
        if not names:
            return ""
        ids, device = [1] * 8, self.model.device
        for marked, answer in ((range(0), "prompt"), (range(2, 5), "item")):
            kinds = torch.zeros(1, 8, dtype=torch.long, device=device)
            kinds[0, list(marked)] = 1
            try:
                reach = _reaches(self._arrive(ids, (), dict.fromkeys(names, kinds)), 8)
            except Exception:  # it wants the items themselves; what a prompt then has is compared with `spans`
                return ""
            if any(last is not None for last in reach):
                self._whole_prompt = answer == "prompt"
                return answer
        return ""


def _fuse_attention(model: PreTrainedModel, decoder: PreTrainedModel) -> None:
    """Let encoders inside of `model` have torch's attention. The one that they were loaded with writes all scores to
    memory, which for an image of many patches are gigabytes."""
    seen = set(decoder.modules())
    for part in model.modules():
        if not isinstance(part, PreTrainedModel) or part in seen or decoder in set(part.modules()):
            continue
        seen.update(part.modules())
        if part._supports_sdpa and part._can_set_attn_implementation():
            part.set_attn_implementation("sdpa")


def merger_of(model: PreTrainedModel) -> tuple[Merger | None, list[str]]:
    """The merger of a model with encoders of media; and lines for ``--explain-model`` if it takes none.

    Raises:
        UnsupportedModelError: the model is of a class for media, and they can't be served.
    """
    if not feature_methods(model):
        return None, []
    try:
        return Merger(model), []
    except UnsupportedModelError as error:
        return None, [f"media: not served: {error}"]


def _axes(front: Any, config: Any) -> int:
    """Axes of positions."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    sections = [v for k, v in rope.items() if k in ("mrope_section", "xdrope_section") and v]
    if sections and len(sections[0]) > 1:
        return len(sections[0])
    return 3 if hasattr(front, "get_rope_index") else 1


def _giving(kept: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: kept


def _never(*args: Any, **kwargs: Any) -> Any:
    raise UnsupportedModelError("attention was called before the language model")


def _deepstack(arguments: Mapping[str, Any], length: int) -> Puts | None:
    where, layers = (arguments.get(name) for name in DEEPSTACK)
    if where is None or not layers:
        return None
    flat = where.reshape(-1, length)[0]
    return Puts(flat.nonzero().flatten().cpu().numpy(), torch.stack(list(layers), 1))


def _reaches(arrived: _Arrived, length: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    found: list[np.ndarray | None] = [None, None]
    for kind, function in arrived.masks.items():
        last = reach_of(function, length, arrived.arguments["inputs_embeds"].device)
        if last is not None:
            found[kind.startswith("sliding")] = last
    return found[0], found[1]


def reach_of(function: MaskFunction, length: int, device: torch.device) -> np.ndarray | None:
    """The last token that each token sees, int32 ``[length]``; None: no token sees a later one. Asks the mask only
    about neighbours, and then about the tokens of a run of such that see the next one."""
    zero, index = torch.zeros((), dtype=torch.long, device=device), torch.arange(length, device=device)
    seen = function(zero, zero, index[:-1], index[1:])
    ahead = torch.as_tensor(seen, device=device).expand(length - 1).cpu().numpy()
    if not ahead.any():
        return None
    last = np.arange(length, dtype=np.int32)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], ahead.astype(np.int8), [0]])))
    for start, end in edges.reshape(-1, 2).tolist():  # tokens start..end see each other, or some of them do
        part = index[start : end + 1]
        inside = function(zero, zero, part[:, None], part[None]).expand(len(part), len(part))
        last[start : end + 1] = np.maximum(last[start : end + 1], (inside * part).amax(-1).cpu().numpy())
    return last
