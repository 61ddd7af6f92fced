"""The features that every scheduler has, in their order."""

from __future__ import annotations

from ..plan.feature import Feature
from .look_back import LookBack
from .prompt_scores import PromptScores
from .speculation import Guesses, Speculation


def standard_features(chunked: bool, speculation: Speculation | None = None) -> list[Feature]:
    """Where prompts may be cut (`chunked`) or not, and with guesses or without. `PromptScores` is last, because it
    divides rows among the requests that the others let compute something."""
    return [LookBack(), *([] if speculation is None else [Guesses(speculation)]), PromptScores(chunked)]
