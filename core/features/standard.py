"""The features that every scheduler has, in their order."""

from __future__ import annotations

from ..memory.cache_manager import CacheManager
from ..plan.feature import Feature
from .look_back import LookBack
from .prompt_scores import PromptScores
from .speculation import Guesses, Speculation


def standard_features(kv: CacheManager, chunked: bool, speculation: Speculation | None = None) -> list[Feature]:
    """Where prompts may be cut (`chunked`) or not, and with guesses or without. `PromptScores` is last, because it
    divides rows among the requests that the others let compute something."""
    guesses = [] if speculation is None else [Guesses(speculation, kv.roll_back)]
    return [LookBack(), *guesses, PromptScores(chunked, kv.least_cut)]
