"""The interface of clients: the same whether the core is in this process, in another one, or on another machine."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from .codec import Array
from .config import EngineConfig
from .connection import Connection, CoreOwner
from .cores import Cores
from .errors import EngineDeadError, MainspringError
from .media_client import MediaClient
from .messages import AddRequest, MediaItem, ModelFacts, Outputs

if TYPE_CHECKING:
    import numpy as np

SIBLINGS_SECONDS = 1.0  # longest wait for the other cores of a group at the start


def connect(core: CoreOwner | str, **options: Any) -> Connection | Cores:
    """Connect to a core, and to the others of its group if there are any. Arguments and errors as for `Connection`."""
    connection = Connection(core, **options)
    if not connection.cores:
        return connection
    cores = Cores(connection)
    cores.wait(SIBLINGS_SECONDS)  # otherwise the first requests would all go to one core
    return cores


class CoreClient(Protocol):
    """A connection of a frontend to a core. `InprocClient` and `SyncClient` implement it; `AsyncClient` has the same
    methods as coroutines. The caller chooses handles: small integers, never used twice on one client.
    """

    in_process: bool  # whether the core is in this process
    config: EngineConfig  # as the core filled it in
    model: ModelFacts

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = (), rank: int | None = None) -> None:
        """Send a request; `tensors` are the arrays its `Tensor` fields refer to by index. Of several cores, `rank` is
        the number of the one that gets it; None: any.

        Raises:
            InvalidRequestError: there is no core of that number.
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

    def __init__(self, connection: Connection | Cores) -> None:
        self._connection = connection
        self.config = connection.config
        self.model = connection.model

    def media(self) -> MediaClient:
        """A client of the media workers beside the core.

        Raises:
            NotSupportedError: there are none.
        """
        mine = weakref.ref(self)

        def failed(media: Sequence[MediaItem], error: MainspringError) -> None:
            if (found := mine()) is not None:
                found._fail_media(media, error)

        return self._connection.open_media(failed)

    def _fail_media(self, media: Sequence[MediaItem], error: MainspringError) -> None:
        """Called in the thread of the media client: end the requests that wait for these items."""
        raise NotImplementedError

    def _receive(self) -> bool:
        """Receive what has arrived. Connects to further cores when the first one tells of them."""
        changed = self._connection.receive()
        if self._connection.cores:
            self._connection = Cores(cast(Connection, self._connection))
        return changed

    @classmethod
    def launch(cls, config: EngineConfig) -> Self:
        """Start a core that belongs to this client. Blocks until it is ready.

        Raises:
            MainspringError: the core did not start.
        """
        from .core_group import EmbeddedCores  # brings the supervisor and numpy, which a daemon's frontends don't need

        core = EmbeddedCores(config)
        try:
            return cls(connect(core))
        except BaseException:
            core.close()
            raise

    @property
    def error(self) -> EngineDeadError | None:
        """Why the core is gone for good, if it is."""
        return self._connection.error

    @property
    def lost_since(self) -> float | None:
        """Since when no core answers, on the monotonic clock; None: one does."""
        return self._connection.lost_since
