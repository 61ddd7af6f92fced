"""Output messages to frontends: the tokens of a step, and the requests that began or ended."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ...ipc.messages import Finished, Logprobs, Outputs, Pooled, Routed, Started, Stats
from .step import Scores

MOST_POOLED = 64 << 20  # bytes of pooled vectors, to limit a message's size; the first request's vectors always fit
NO_TOKENS = np.zeros(0, np.int64)


class RoutedRows(NamedTuple):
    """The experts that computed consecutive tokens of a request."""

    frontend: int
    handle: int
    start: int  # index of the first token in prompt and output
    experts: np.ndarray  # uint8 or uint16 [tokens, layers, experts of a token]


class Outbox:
    """Collects what frontends are told, until `take` makes the messages of it."""

    def __init__(self) -> None:
        self._finished: dict[int, list[Finished]] = {}  # by frontend
        self._pooled: defaultdict[int, dict[int, Pooled]] = defaultdict(dict)  # by frontend and handle
        self._begin_step()

    def _begin_step(self) -> None:
        self._handles = self._owners = self._tokens = NO_TOKENS
        self._scores: Sequence[Scores] = ()
        self._started: defaultdict[int, list[Started]] = defaultdict(list)  # by frontend
        self._prompt_scores: defaultdict[int, list[Logprobs]] = defaultdict(list)  # by frontend
        self._routed: defaultdict[int, list[RoutedRows]] = defaultdict(list)  # by frontend

    def __bool__(self) -> bool:
        """Whether a request has ended that its frontend does not know of."""
        return bool(self._finished)

    def put(self, frontend: int, finished: Finished) -> None:
        self._finished.setdefault(frontend, []).append(finished)

    def put_tokens(
        self, handles: np.ndarray, owners: np.ndarray, tokens: np.ndarray, scores: Sequence[Scores] = ()
    ) -> None:
        """The tokens of a step: ``tokens[i]`` belongs to request ``handles[i]`` of frontend ``owners[i]`` (all int64).
        `scores` hold the log probabilities of some of them."""
        self._handles, self._owners, self._tokens, self._scores = handles, owners, tokens, scores

    def put_started(self, frontend: int, started: Started) -> None:
        self._started[frontend].append(started)

    def put_prompt_scores(self, frontend: int, scores: Logprobs) -> None:
        self._prompt_scores[frontend].append(scores)

    def put_routed(self, rows: RoutedRows) -> None:
        self._routed[rows.frontend].append(rows)

    def put_pooled(self, frontend: int, vectors: Pooled) -> None:
        """The vectors of a pooled request. They go into the message that carries the request's end."""
        self._pooled[frontend][vectors.handle] = vectors

    def forget(self, frontend: int) -> None:
        self._finished.pop(frontend, None)
        self._pooled.pop(frontend, None)

    def _due(self, frontend: int, finished: list[Finished]) -> tuple[list[Finished], list[Pooled]]:
        """The ends that fit in one message, and their vectors. The other ends wait for the next message."""
        sent: list[Pooled] = []
        vectors, room = self._pooled.get(frontend, {}), MOST_POOLED
        for count, one in enumerate(finished):
            found = vectors.get(one.handle)
            if found is not None and sent and len(found.values) > room:
                self._finished[frontend] = finished[count:]
                finished = finished[:count]
                break
            if found is not None:
                room -= len(found.values)
                sent.append(vectors.pop(one.handle))
        return finished, sent

    def take(self, stats: Stats | None) -> dict[int, Outputs]:
        """Make the messages, by frontend."""
        finished, self._finished = self._finished, {}
        outputs = {}
        for frontend in {*np.unique(self._owners).tolist(), *finished, *self._prompt_scores, *self._routed}:
            mine = self._owners == frontend
            logprobs = self._prompt_scores.get(frontend, [])
            for scores in self._scores:
                own = scores.only(mine[scores.rows])
                if len(own.rows):
                    logprobs.append(own.message((np.cumsum(mine) - 1)[own.rows].tolist()))
            ended, pooled = finished.get(frontend, []), list[Pooled]()
            if frontend in self._pooled:
                ended, pooled = self._due(frontend, ended)
            outputs[frontend] = Outputs(
                self._handles[mine].tolist(),
                self._tokens[mine].tolist(),
                self._started.get(frontend, []),
                ended,
                stats,
                logprobs,
                pooled,
                _message_of(self._routed[frontend]) if frontend in self._routed else None,
            )
        self._begin_step()
        return outputs


def _message_of(rows: Sequence[RoutedRows]) -> Routed:
    first = rows[0].experts
    return Routed(
        [one.handle for one in rows],
        [one.start for one in rows],
        [len(one.experts) for one in rows],
        list(first.shape[1:]),
        first.dtype.name,
        b"".join(one.experts.tobytes() for one in rows),
    )
