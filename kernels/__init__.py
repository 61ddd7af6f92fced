"""Device code behind one interface: plan once a step, run once a layer, over a paged KV cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from .interface import Backend

BACKENDS = ("reference",)


def backend(name: str, device: torch.device) -> Backend:
    """The backend of this name; ``auto``: the fastest there is for `device`.

    Raises:
        ValueError: no such backend.
    """
    if name in ("auto", "reference"):
        from .reference import ReferenceBackend

        return ReferenceBackend()
    raise ValueError(f"attention_backend is {name!r}; it must be auto or one of {', '.join(BACKENDS)}")
