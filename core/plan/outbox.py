"""Output messages to frontends: the tokens of a step, and the requests that began or ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from ...ipc.messages import Finished, Logprobs, Outputs, Pooled, Started, Stats
from .step import Scores

MOST_POOLED = 64 << 20  # bytes of pooled vectors, to limit a message's size; the first request's vectors always fit
NO_TOKENS = np.zeros(0, np.int64)


class Outbox:
    """Keeps the ends of requests until a message carries them, with or without tokens of a step."""

    def __init__(self) -> None:
        self._finished: dict[int, list[Finished]] = {}  # by frontend
        self._pooled: defaultdict[int, dict[int, Pooled]] = defaultdict(dict)  # by frontend and handle

    def __bool__(self) -> bool:
        return bool(self._finished)

    def put(self, frontend: int, finished: Finished) -> None:
        self._finished.setdefault(frontend, []).append(finished)

    def pooled(self, frontend: int, vectors: Pooled) -> None:
        """Keep the vectors of a pooled request. They go into the message that carries the request's end."""
        self._pooled[frontend][vectors.handle] = vectors

    def forget(self, frontend: int) -> None:
        self._finished.pop(frontend, None)
        self._pooled.pop(frontend, None)

    def _due(self, frontend: int, finished: list[Finished]) -> tuple[list[Finished], list[Pooled]]:
        """The ends that fit in one message, and their vectors. The other ends wait for the next message."""
        told: list[Pooled] = []
        vectors, room = self._pooled.get(frontend, {}), MOST_POOLED
        for count, one in enumerate(finished):
            found = vectors.get(one.handle)
            if found is not None and told and len(found.values) > room:
                self._finished[frontend] = finished[count:]
                finished = finished[:count]
                break
            if found is not None:
                room -= len(found.values)
                told.append(vectors.pop(one.handle))
        return finished, told

    def take(
        self,
        stats: Stats | None,
        handles: np.ndarray = NO_TOKENS,
        owners: np.ndarray = NO_TOKENS,
        tokens: np.ndarray = NO_TOKENS,
        started: Sequence[tuple[int, Started]] = (),
        scores: Sequence[Scores] = (),
        prompts: Sequence[tuple[int, Logprobs]] = (),
    ) -> dict[int, Outputs]:
        """Make the messages, by frontend. ``tokens[i]`` belongs to request ``handles[i]`` of frontend ``owners[i]``
        (all int64). `scores` hold the log probabilities of some of these tokens. In `started` and `prompts` each entry
        comes with its frontend."""
        finished, self._finished = self._finished, {}
        outputs = {}
        for frontend in {*np.unique(owners).tolist(), *finished, *(f for f, _ in prompts)}:
            mine = owners == frontend
            logprobs = [told for f, told in prompts if f == frontend]
            for one in scores:
                here = one.only(mine[one.rows])
                if len(here.rows):
                    logprobs.append(here.message((np.cumsum(mine) - 1)[here.rows].tolist()))
            ended, pooled = finished.get(frontend, []), list[Pooled]()
            if frontend in self._pooled:
                ended, pooled = self._due(frontend, ended)
            outputs[frontend] = Outputs(
                handles[mine].tolist(),
                tokens[mine].tolist(),
                [s for f, s in started if f == frontend],
                ended,
                stats,
                logprobs,
                pooled,
            )
        return outputs
