"""Whether the native kernels can be built here."""

from __future__ import annotations

from mainspring.kernels import BackendUnavailableError
from mainspring.kernels.native import build as native_build


def why_not() -> str | None:
    """Why they can't be, in a sentence; None: it seems they can. Takes milliseconds."""
    try:
        native_build.choose_level()
        native_build.find_compiler()
        native_build.find_runtime()
    except BackendUnavailableError as error:
        return str(error)
    return None
