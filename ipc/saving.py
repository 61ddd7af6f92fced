"""The one call of vLLM's `engine_core` that scripts make."""

from __future__ import annotations

from typing import Any


class SavesWeights:
    """The part of a blocking client that saves weights."""

    call: Any

    def save_sharded_state(self, path: str, pattern: str | None = None, max_size: int | None = None) -> None:
        """Write the weights into a folder on the core's machine; see the worker's method (core/worker/rpc.py)."""
        self.call("collective_rpc", "save_sharded_state", [path, pattern, max_size], {})
