"""Classes that a core imports: those of `worker_extension_cls` and `logits_processors`."""

from __future__ import annotations

from typing import Any

from mainspring.ipc.logits_processors import AdapterLogitsProcessor


class Extension:
    def greet(self, name: str) -> str:
        return f"hello {name}"


class Only(AdapterLogitsProcessor):
    """Leaves the token that a request names."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        token = (params.extra_args or {}).get("token")

        def only(output: list[int], logits: Any) -> Any:
            kept = logits[token].item()
            logits[:] = -float("inf")
            logits[token] = kept
            return logits

        return None if token is None else only
