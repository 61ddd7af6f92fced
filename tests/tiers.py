"""The part of a large test that runs in the fast tier (`make test`): some of its parameters, some of its random
examples."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest
from hypothesis import settings

import tiny


def examples(number: int) -> int:
    """Number of examples of a random test: `number`, a tenth of it in `make test`, ten times in `make test-random`.

    The factor comes from hypothesis's profile (conftest.py registers the three).
    """
    return max(3, number * settings().max_examples // 100)


def fast_only(fast: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Parameters of a test; only those in `fast` run in the fast tier."""
    return [pytest.param(value, marks=() if value in fast else pytest.mark.slow) for value in values]


# a plain decoder, one with windows and soft caps, one with experts
EACH_ARCHITECTURE = fast_only(("llama", "gemma2", "mixtral"), tiny.ARCHITECTURES)
