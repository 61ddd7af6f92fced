"""What frontends are to be told next: a step's tokens, and which requests have begun and ended."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..ipc.messages import Finished, Logprobs, Outputs, Started, Stats
from .logprobs import Scores

NO_TOKENS = np.zeros(0, np.int64)


class Outbox:
    """Keeps ends until they are told, with the tokens of the step or without."""

    def __init__(self) -> None:
        self._finished: dict[int, list[Finished]] = {}  # by frontend

    def __bool__(self) -> bool:
        return bool(self._finished)

    def put(self, frontend: int, finished: Finished) -> None:
        self._finished.setdefault(frontend, []).append(finished)

    def forget(self, frontend: int) -> None:
        self._finished.pop(frontend, None)

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
        """Outputs by frontend. Token ``tokens[i]`` is of request ``handles[i]`` of frontend ``owners[i]``, all int64;
        `scores` are of some of these tokens; `started` and `prompts` name the frontend of each."""
        finished, self._finished = self._finished, {}
        outputs = {}
        for frontend in {*np.unique(owners).tolist(), *finished, *(f for f, _ in prompts)}:
            mine = owners == frontend
            logprobs = [told for f, told in prompts if f == frontend]
            for one in scores:
                here = one.only(mine[one.rows])
                if len(here.rows):
                    logprobs.append(here.message((np.cumsum(mine) - 1)[here.rows].tolist()))
            outputs[frontend] = Outputs(
                handles[mine].tolist(),
                tokens[mine].tolist(),
                [s for f, s in started if f == frontend],
                finished.get(frontend, []),
                stats,
                logprobs,
            )
        return outputs
