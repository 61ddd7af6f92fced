"""Learn a model's attention from its own calls.

One forward pass over a few tokens, with an attention implementation that only writes down what it is called with, and
random numbers in the place of linear layers. Masks are built in that pass and carry the function they were made from;
asked about positions far beyond the few tokens of the pass, that function tells the window. So what is served is what
the model's own mask says, whatever its config or the other arguments of the call claim.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.masking_utils import eager_mask

from ....ipc.errors import UnsupportedModelError
from ....kernels.contract import AttentionSpec
from ..run.attention import attention_set
from ..run.indexed import indexers_of
from ..run.latents import Expansion
from ..run.positions import positions_given, receivers
from ..run.recurrent import one_sequence, state_inputs, stateful_parts
from .fuse_observe import RandomLayers

PROBE = "mainspring_dry_run"
TOKENS = 8
CPU = torch.device("cpu")
UNLIMITED = 1 << 20  # tokens of a sequence where nothing limits them: beyond any window in use

# Arguments of an attention call that change nothing here: the mask already says it, or they steer other kernels.
HARMLESS = frozenset(
    {"dropout", "position_ids", "sliding_window", "output_attentions", "use_cache", "cache", "logits_to_keep"}
)

MaskFunction = Callable[..., torch.Tensor]


class AttentionCall(NamedTuple):
    """One attention call of a forward pass."""

    module: nn.Module
    spec: AttentionSpec
    source: int  # index of the call whose keys and values it reads; its own for most
    repeats: int = 0  # where the module computes its attention itself: how often it repeats a head of keys and values
    expansion: Expansion | None = None  # of latents, if the cache holds these


def record_attention(model: PreTrainedModel, max_model_len: int | None) -> list[AttentionCall]:
    """The attention calls of one forward pass of `model`, in order, for sequences of at most `max_model_len` tokens.

    A mask that differs from a causal one only beyond that length is a causal one. Raises `UnsupportedModelError` for a
    call that a causal paged attention can't serve. Leaves the model's attention implementation as it was.
    """
    recorder = _Recorder(model, max_model_len or UNLIMITED)
    known = stateful_parts(model)
    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module not in known:
                stack.callback(module.register_forward_pre_hook(_refuse_convolution).remove)
        stack.enter_context(RandomLayers())
        dry_run(model, PROBE, recorder.attend, recorder.build_mask)
    return recorder.calls


@torch.inference_mode()
def dry_run(
    model: PreTrainedModel, name: str, attend: Callable[..., Any], build_mask: Callable[..., Any] | None
) -> None:
    """A forward pass over a few tokens. The functions are registered by `name`, see `attention_set`."""
    ids = torch.arange(1, TOKENS + 1, device=model.device)[None] % model.config.get_text_config().vocab_size
    positions = torch.arange(TOKENS, device=model.device)[None]
    with ExitStack() as stack:
        stack.enter_context(attention_set(model, name, attend, build_mask))
        inputs = stack.enter_context(positions_given(receivers(model), positions))
        model(input_ids=ids, **inputs, **state_inputs(model, one_sequence(model, TOKENS), TOKENS))


def _refuse_convolution(module: nn.Module, _: Any) -> None:
    # one that is not run, such as an image encoder's, does no harm
    raise UnsupportedModelError(
        f"a {type(module).__name__} runs over the tokens, so it mixes those of several requests"
    )


class _Recorder:
    def __init__(self, model: PreTrainedModel, longest: int) -> None:
        self.calls: list[AttentionCall] = []
        self._longest = longest
        self._indexers = indexers_of(model)
        if self._indexers is not None:
            self._indexers.take_width()  # an earlier pass may have left one
        self._cache = DynamicCache(config=model.config).layers  # what the library itself would keep for each layer
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []  # kept alive: equal addresses mean the same tensor
        self._masks: list[tuple[torch.Tensor, MaskFunction]] = []

    def build_mask(self, *, mask_function: MaskFunction, **kwargs: Any) -> torch.Tensor:
        mask = eager_mask(mask_function=mask_function, **kwargs)
        if mask is not None:  # a mask for cross-attention to nothing is none
            self._masks.append((mask, mask_function))
        return mask

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: torch.Tensor | None = None,
        indices: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        name = type(module).__name__
        for argument, given in kwargs.items():
            if given is not None and given is not False and argument not in HARMLESS:
                raise UnsupportedModelError(f"{name} passes {argument!r} to its attention, which no kernel here knows")
        if query.shape[2] != TOKENS or key.shape[2] != TOKENS:
            raise UnsupportedModelError(
                f"{name} attends from {query.shape[2]} to {key.shape[2]} positions where {TOKENS} tokens were given"
            )
        if attention_mask is not None:
            window = self._window(name, attention_mask)
        elif is_causal is False or not getattr(module, "is_causal", True):
            raise UnsupportedModelError(f"{name} is not causal: a token sees later ones")
        else:
            window = kwargs.get("sliding_window")
        self._check_cache(module, window)
        index_dim = self._index_dim(name, indices, window)
        spec = AttentionSpec(
            num_q_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_dim=key.shape[3],
            value_dim=value.shape[3],
            scale=float(scaling) if scaling is not None else query.shape[3] ** -0.5,
            window=window,
            softcap=softcap,
            selects=indices is not None,
            index_dim=index_dim,
        )
        self.calls.append(AttentionCall(module, spec, self._source(key, value)))
        self._seen.append((key, value))
        return query.new_zeros(1, TOKENS, query.shape[1], value.shape[3]), None

    def _index_dim(self, name: str, indices: torch.Tensor | None, window: int | None) -> int:
        """The width of the index keys that were made for a call; 0: none were."""
        width = 0 if self._indexers is None else self._indexers.take_width()
        if indices is None:
            if width:
                raise UnsupportedModelError(f"{name} does not tell its attention which keys its indexer selects")
        elif self._indexers is None or window is not None:
            raise UnsupportedModelError(f"{name} passes 'indices' to its attention, and no indexer gave them")
        return width

    def _check_cache(self, module: nn.Module, window: int | None) -> None:
        """Refuse a layer whose cache forgets keys that its mask shows: its output depends on how the text was cut."""
        index = getattr(module, "layer_idx", None)
        if index is None or index >= len(self._cache):
            return
        kept = getattr(self._cache[index], "sliding_window", None)
        if kept is not None and kept < self._longest and kept != window:
            raise UnsupportedModelError(
                f"{type(module).__name__} keeps the last {kept} keys in its cache but masks "
                + ("none" if window is None else f"all but {window}")
            )

    def _source(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """The earlier call that was given these very tensors (layers that share keys and values), or this call."""
        for index, earlier in enumerate(self._seen):
            if _same(key, earlier[0]) and _same(value, earlier[1]):
                return index
        return len(self.calls)

    def _window(self, name: str, mask: torch.Tensor) -> int | None:
        """The window of a mask the model passed, from the function it was built with."""
        functions = [function for built, function in self._masks if _same(built, mask)]
        if not functions:  # a copy or cast of a built mask is as good; anything else the model changed
            functions = [f for built, f in self._masks if built.shape == mask.shape and torch.equal(built, mask)]
        device = mask.device if mask.is_cuda else CPU
        windows = {window_of(function, name, self._longest, device) for function in functions}
        if len(windows) != 1:
            raise UnsupportedModelError(f"{name} adds a mask or bias of its own to the attention scores")
        return windows.pop()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def window_of(mask_function: MaskFunction, name: str, longest: int, device: torch.device = CPU) -> int | None:
    """The window ``w`` of a causal mask (a query at p sees p - w + 1 .. p), or None where all keys up to p are seen.
    `device`: where the tensors lie that the function may hold."""
    reach = _reach(mask_function, name, longest - 1, device)
    if reach == longest:
        return None
    # a window slides: an earlier query sees as many (if it has them); chunks, the other common form, do not
    for earlier in (longest - 1 - reach // 2, longest - 2, reach):
        if _reach(mask_function, name, earlier, device) != min(reach, earlier + 1):
            raise UnsupportedModelError(_not_causal(name, longest))
    return reach


def _reach(mask_function: MaskFunction, name: str, position: int, device: torch.device) -> int:
    """How many keys a query at `position` sees, itself included. They must be the nearest ones."""
    keys, zero = torch.arange(position + TOKENS, device=device), torch.zeros((), dtype=torch.long, device=device)
    try:
        seen = mask_function(zero, zero, torch.tensor(position, device=device), keys).expand_as(keys)
    except (IndexError, RuntimeError) as error:
        raise UnsupportedModelError(f"the mask of {name} depends on the tokens of the row ({error})") from error
    reach = int(seen.sum())
    if not torch.equal(seen, (keys > position - reach) & (keys <= position)):
        raise UnsupportedModelError(_not_causal(name, position + 1))
    return reach


def _not_causal(name: str, longest: int) -> str:
    return f"the mask of {name} is neither causal nor a sliding window for sequences of up to {longest} tokens"
