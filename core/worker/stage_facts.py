"""What the stages of a pipeline tell each other of their layers, so that one planner fits all."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple

import msgspec

from ...kernels.contract import Backend
from ..model.run.paged_model import PagedModel
from ..parallel.stages import Stages
from .kv_layout import LayerShape, shapes_of


class _Facts(msgspec.Struct, array_like=True):
    layers: list[tuple[int, int, int, int, int | None]]  # their `LayerShape`s
    state_bytes: int
    tells_prompts: bool
    weights: str


class StageFacts(NamedTuple):
    """The same on all ranks."""

    most: dict[LayerShape, int]  # see `plan_layout`
    state_bytes: int  # of recurrent state, of the stage that has most; 0: no stage has any
    tells_prompts: bool  # see `StepStates`
    fingerprint: str  # of the weights of all stages


def facts_of_stages(stages: Stages, model: PagedModel, backend: Backend, weights: str) -> StageFacts:
    """All ranks call this together. weights: the fingerprint of this one's."""
    states = model.states
    mine = _Facts(
        list(shapes_of(model.layers, model.sources, backend.cache_dims)),
        0 if states is None else states.state_bytes,
        states is not None and states.tells_prompts,
        weights,
    )
    given = stages.world.from_all(msgspec.msgpack.encode(mine))
    all_of_them = [msgspec.msgpack.decode(each, type=_Facts) for each in given]
    most: Counter[LayerShape] = Counter()
    for each in all_of_them:
        most |= Counter(LayerShape(*shape) for shape in each.layers)
    return StageFacts(
        dict(most),
        max(each.state_bytes for each in all_of_them),
        any(each.tells_prompts for each in all_of_them),
        hashlib.blake2b("".join(each.weights for each in all_of_them).encode(), digest_size=16).hexdigest(),
    )
