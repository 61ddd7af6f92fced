"""How Triton's kernels run in tests: compiled on a machine with CUDA, elsewhere in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from unittest import mock

import numpy as np
import pytest
import torch

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
in_interpreter = mock.patch.dict(os.environ, {} if CUDA else {"TRITON_INTERPRET": "1"})

if not CUDA and "triton" in sys.modules:
    pytest.skip("Triton is loaded already, and not to be interpreted: run this file by itself", allow_module_level=True)

with in_interpreter:
    triton = pytest.importorskip("triton", reason="Triton, which comes with torch's CUDA builds, is not installed")
    from mainspring.kernels.flashinfer import triton_kernels as kernels  # noqa: F401

multiplies_in_interpreter = pytest.mark.skipif(
    not CUDA and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7),
    reason="before Triton 3.7 its interpreter's loops fail with numpy 2.4 and later",
)
HALF = torch.bfloat16 if CUDA else torch.float16  # the interpreter can't multiply bf16


@pytest.fixture(autouse=True, scope="module")
def interpreted():  # type: ignore[no-untyped-def]
    with in_interpreter:
        yield


@pytest.fixture
def products_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter a tile's product is numpy's, whose bits depend on the position of a row; this replacement's do
    not."""

    def in_order(left: np.ndarray, right: np.ndarray, dtype: type) -> np.ndarray:
        total = np.zeros((len(left), right.shape[1]), dtype)
        for column, row in zip(left.T.astype(dtype), right.astype(dtype), strict=True):
            total += column[:, None] * row
        return total

    if not CUDA:
        monkeypatch.setattr(np, "matmul", in_order)
