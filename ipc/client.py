"""The interface of clients: the same whether the core is in this process, in another one, or on another machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, Self

import numpy as np

from .codec import Array
from .config import EngineConfig
from .connection import Connection
from .errors import EngineDeadError
from .messages import AddRequest, ModelFacts, Outputs
from .supervisor import EmbeddedCore


class CoreClient(Protocol):
    """A connection of a frontend to a core. `InprocClient` and `SyncClient` implement it; `AsyncClient` has the same
    methods as coroutines. The caller chooses handles: small integers, never used twice on one client.
    """

    in_process: bool  # whether the core is in this process
    config: EngineConfig  # as the core filled it in
    model: ModelFacts

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = ()) -> None:
        """Send a request; `tensors` are the arrays its `Tensor` fields refer to by index.

        Raises:
            EngineDeadError: the core is gone for good. If it died and is restarted, the request goes on.
            WrongProcessError: called in a forked child.
        """

    @property
    def error(self) -> EngineDeadError | None:
        """Why the core is gone for good, if it is."""

    def abort(self, handles: Sequence[int]) -> None:
        """End these requests. Their last outputs (finish reason ``abort``) still arrive."""

    def get_outputs(self, timeout: float | None = None) -> Outputs | None:
        """The next outputs of this frontend. With the core in this process: run one step. Otherwise wait for the core,
        at most `timeout` seconds (then None), or without a limit.

        Raises:
            EngineDeadError: the core is gone.
        """

    def call(self, method: str, *args: Any, arrays: Sequence[Array] = (), timeout: float | None = None) -> Any:
        """Call a utility method of the core and wait for its result, which has plain msgpack types. `arrays` must not
        change until then.

        Raises:
            MainspringError: the error of the core, with its type.
        """

    def close(self) -> None:
        """Disconnect from the core; an embedded core ends. A second call does nothing."""


class ConnectedClient:
    """The base class of the clients of a core in another process."""

    in_process = False

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.config = connection.config
        self.model = connection.model

    @classmethod
    def launch(cls, config: EngineConfig) -> Self:
        """Start a core that belongs to this client. Blocks until it is ready.

        Raises:
            MainspringError: the core did not start.
        """
        core = EmbeddedCore(config)
        try:
            return cls(Connection(core))
        except BaseException:
            core.close()
            raise

    @property
    def error(self) -> EngineDeadError | None:
        """Why the core is gone for good, if it is."""
        return self._connection.error
