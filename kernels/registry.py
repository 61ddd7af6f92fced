"""The kernel backends by name.

A new backend is a file with its `Backend`, an entry in `BACKENDS`, and its name in `AttentionBackend` of ipc/config.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from . import BackendUnavailableError
from .contract import Backend


class Registration(NamedTuple):
    """How to get a backend. `make` imports what the backend needs, so that the others do not depend on it."""

    make: Callable[[torch.device, bool, str | None], Backend]
    """Given the device, whether a row's bits may depend on its request alone, and the folder of kernels that were
    compiled ahead (None: the default one). Raises BackendUnavailableError where the backend can't run; the message says
    what to install or set."""
    automatic_on: frozenset[str] = frozenset()  # types of devices, "cpu" or "cuda", on which `auto` means this backend


def _flashinfer(device: torch.device, deterministic: bool, kernels_dir: str | None) -> Backend:
    from .flashinfer.flashinfer_backend import FlashInferBackend

    return FlashInferBackend(device, deterministic, kernels_dir)


def _native(device: torch.device, deterministic: bool, kernels_dir: str | None) -> Backend:
    from .native.native_backend import NativeBackend

    if device.type != "cpu":
        raise BackendUnavailableError(f"attention_backend='native' is for CPUs, and the device is {device}")
    return NativeBackend()


def reference_on(device: torch.device, deterministic: bool = False, kernels_dir: str | None = None) -> Backend:
    """Runs on every device. On a GPU a row's bits depend on the other rows, whatever is asked for."""
    from .reference.reference_backend import ReferenceBackend

    return ReferenceBackend(deterministic=device.type != "cuda")


BACKENDS = {
    "flashinfer": Registration(_flashinfer, automatic_on=frozenset({"cuda"})),
    "native": Registration(_native, automatic_on=frozenset({"cpu"})),
    "reference": Registration(reference_on),
}


def automatic(device_type: str) -> str:
    """The name of the backend that `auto` means on this type of device."""
    return next((name for name, one in BACKENDS.items() if device_type in one.automatic_on), "reference")
