"""Device code behind one interface: plan once a step, run once a layer, over a paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .interface import Backend


class BackendUnavailableError(RuntimeError):
    """These kernels can't run here. The message says what to install or set."""


def native_kernels(device: torch.device) -> Backend:
    """C++ kernels, compiled on first use.

    Raises:
        BackendUnavailableError: not a CPU, not one of those they are written for, or no compiler.
    """
    from .native_backend import NativeBackend

    if device.type != "cpu":
        raise BackendUnavailableError(f"attention_backend='native' is for CPUs, and the device is {device}")
    return NativeBackend()


def flashinfer_backend(device: torch.device, deterministic: bool, kernels_dir: str | None) -> Backend:
    """FlashInfer's kernels on a GPU.

    Raises:
        BackendUnavailableError: FlashInfer is missing or too old, or can't use this GPU.
    """
    from .flashinfer import FlashInferBackend

    return FlashInferBackend(device, deterministic=deterministic, kernels_dir=kernels_dir)
