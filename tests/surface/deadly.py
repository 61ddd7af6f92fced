"""A worker extension that kills the core at every request whose prompt begins with token 77."""

import os

from mainspring.core.worker.generation_worker import GenerationWorker

launch = GenerationWorker.launch


def poisoned(self, plan):  # type: ignore[no-untyped-def]
    if any(sequence.tokens[0] == 77 for sequence in plan.admitted):
        os._exit(1)
    return launch(self, plan)


GenerationWorker.launch = poisoned  # type: ignore[method-assign]


class Nothing:
    pass
