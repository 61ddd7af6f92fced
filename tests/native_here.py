"""Whether the native kernels can be built here."""

from __future__ import annotations

from mainspring.kernels import BackendUnavailableError
from mainspring.kernels.native import build as native_build


def why_not() -> str | None:
    """The reason why they can't be built; None: they probably can. Takes milliseconds."""
    try:
        native_build.choose_level()
        native_build.find_compiler()
        native_build.find_runtime()
    except BackendUnavailableError as error:
        return str(error)
    return None
