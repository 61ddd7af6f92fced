"""Batching of output messages for requests whose caller does not stream."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

import msgspec

from ..ipc.messages import AddRequest, Outputs

HOLD_SECONDS = 0.2  # seconds that a token is kept back at most, so that frontends still see progress


class OutputBatcher:
    """Collects the tokens of frontends that have only patient requests, because each message costs both processes some
    time. The tokens are sent with the next first token or end of a request, or after `HOLD_SECONDS`."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[float, Outputs]] = {}  # by frontend, with the first token's time
        self._awaited: defaultdict[int, set[int]] = defaultdict(set)  # not patient, by frontend

    def added(self, frontend: int, request: AddRequest) -> None:
        if not request.patient:
            self._awaited[frontend].add(request.handle)

    def forget(self, frontend: int) -> None:
        self._held.pop(frontend, None)
        self._awaited.pop(frontend, None)

    def due(self, outputs: Mapping[int, Outputs], now: float, more: bool = True) -> Iterator[tuple[int, Outputs]]:
        """The messages to send after a step with these `outputs`. more: whether further steps follow."""
        for frontend, new in outputs.items():
            since, held = self._held.pop(frontend, (now, None))
            if held is not None and new.logprobs:  # these hold token indices into their own message: no merging
                yield frontend, held
            elif held is not None:
                tokens = {"handles": held.handles + new.handles, "token_ids": held.token_ids + new.token_ids}
                new = msgspec.structs.replace(new, **tokens, stats=new.stats or held.stats)
            if new.started or new.finished or new.logprobs or new.routed or self._awaited[frontend]:
                yield frontend, new
                self._awaited[frontend].difference_update(one.handle for one in new.finished)
            else:
                self._held[frontend] = since, new
        for frontend in [f for f, (since, _) in self._held.items() if not more or now - since >= HOLD_SECONDS]:
            yield frontend, self._held.pop(frontend)[1]
