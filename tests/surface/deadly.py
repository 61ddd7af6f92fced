"""A worker extension with which a core dies of every request whose prompt begins with the token 77."""

import os

from mainspring.core.work.executor import UniprocExecutor

execute = UniprocExecutor.execute


def poisoned(self, step):  # type: ignore[no-untyped-def]
    if any(request.tokens[0] == 77 for request in step.admitted):
        os._exit(1)
    return execute(self, step)


UniprocExecutor.execute = poisoned  # type: ignore[method-assign]


class Nothing:
    pass
