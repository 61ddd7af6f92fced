"""The tiny twin of a class as a pipeline: does it give the same logits in stages as whole?

Later layers may read more from earlier ones than hidden states: keys and values, indices of selected keys, residual
streams of their own. Then logits differ, or a stage lacks something, and the class is refused.
"""

from __future__ import annotations

import copy
import itertools
import logging
from functools import partial
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...ipc.errors import UnsupportedModelError
from ..model.learn.fuse_match import LOGITS_TOLERANCE, deviations
from .cuts import count_in
from .stage_model import StagePart, StagePlan
from .stages import Stages
from .twin import logits_of, make_twin

logger = logging.getLogger(__name__)

PLANS = {"embeddings on the first stage": StagePlan(), "embeddings on every stage": StagePlan(embeddings=True)}


def choose_part(config: PreTrainedConfig, name: str, stages: Stages) -> tuple[str, StagePart]:
    """A description of how stages share this checkpoint, and the part of this stage.

    Raises:
        UnsupportedModelError: no plan gave the twin's own logits.
    """
    twin = make_twin(_with_ends(config, stages.count), stages.world.size, layers=2 * stages.count)
    own, path, outputs = _observe(twin)
    tried = []
    for how, plan in PLANS.items():
        reason = _wrong(copy.deepcopy(twin), own, StagePart(stages, plan, path, outputs))
        if not reason:
            return how, StagePart(stages, plan, path, outputs)
        tried.append(f"{how}: {reason}")
        logger.debug("%s", tried[-1])
    why = "; ".join(tried)
    raise UnsupportedModelError(f"{name}: {stages.count} stages do not give the model's own logits ({why})")


def _with_ends(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """A config whose layers are the first and the last one of each stage, where it says something of each layer."""
    found = copy.deepcopy(config)
    text = found.get_text_config()
    layers = count_in(text, "num_hidden_layers")
    cuts = [layers * stage // count for stage in range(count + 1)]
    ends = [index for first, end in itertools.pairwise(cuts) for index in (first, max(first, end - 1))]
    try:
        for name, value in text.to_dict().items():
            if isinstance(value, list) and len(value) == layers > 1 and name not in ("layer_types", "mlp_layer_types"):
                setattr(text, name, [value[index] for index in ends])
        text.num_hidden_layers = len(ends)
    except Exception:  # the class wants something else
        return config
    return found


def _observe(twin: PreTrainedModel) -> tuple[torch.Tensor, str, int]:
    """The twin's logits, the path of its list of layers, and how many outputs a layer gives in a tuple; 0: in none. The
    list is the largest one whose modules are all called once."""
    calls: dict[str, list[int]] = {}
    hooks = []
    for path, each in twin.named_modules():
        if isinstance(each, nn.ModuleList) and len(each) > 1:
            for layer in each:
                note = partial(_note, calls.setdefault(path, []))
                hooks.append(layer.register_forward_hook(note))
    own = logits_of(twin)
    for hook in hooks:
        hook.remove()
    once = {path for path, seen in calls.items() if len(seen) == len(cast("nn.ModuleList", twin.get_submodule(path)))}
    sizes = {path: sum(each.numel() for each in twin.get_submodule(path).parameters()) for path in once}
    path = max(sizes, key=sizes.__getitem__, default="")
    if len(set(calls.get(path, ()))) != 1:
        raise UnsupportedModelError(f"{type(twin).__name__} has no list of layers that are each called once")
    return own, path, calls[path][0]


def _note(seen: list[int], _: nn.Module, __: object, out: object) -> None:
    seen.append(len(out) if isinstance(out, tuple | list) else 0)


def _wrong(model: PreTrainedModel, own: torch.Tensor, part: StagePart) -> str:
    """Why the part is not right; empty: it is. All ranks find the same."""
    stages, reason, right = part.stages, "", True
    stages.agree(torch.float32)
    try:
        part.cut(model)
        part.finish(model)
        with stages.silence():  # an error of one rank alone would leave the others waiting
            logits_of(model)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    if not all(stages.world.least([not reason])):
        return reason or "it fails on another stage"
    logits = logits_of(model)
    if stages.is_last:
        far = float(deviations(logits, own).max())
        right, reason = far <= LOGITS_TOLERANCE[torch.float32], f"logits differ by {far:.2g} standard deviations"
    return "" if all(stages.world.least([right])) else reason or "logits differ"
