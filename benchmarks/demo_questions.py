"""The questions that the embedded model was trained on, for benchmarks. They are loaded by path, because demo/training
is not a package."""

from __future__ import annotations

import sys

from report import ROOT

sys.path.append(str(ROOT / "demo" / "training"))
from corpus import Question, heldout_other, heldout_sums, is_right
from facts import GIRLS
from stories import ANIMALS, long_story

__all__ = ["ANIMALS", "GIRLS", "Question", "heldout_other", "heldout_sums", "is_right", "long_story"]
