"""Clients of programs that run alike in several processes and share one core: one of them leads. It alone talks to the
core, and tells the others what comes back. As all do the same with it, they make the same calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import msgspec
import numpy as np

from .client import CoreClient
from .codec import Array
from .config import EngineConfig
from .errors import EngineDeadError, MainspringError, NotSupportedError, from_wire, wire_name, wire_text
from .messages import AddRequest, ModelFacts, Outputs
from .saving import SavesWeights

Channel = Callable[[bytes | None], bytes]  # the leader's bytes, in all processes; only the leader gives some


class Told(msgspec.Struct, array_like=True):
    """What a call of the leader has brought."""

    error: str = ""  # its name on the wire; empty: none
    text: str = ""
    outputs: Outputs | None = None  # of `get_outputs`
    answer: Any = None  # of `call`
    config: EngineConfig | None = None  # of the start
    model: ModelFacts | None = None


class _Alike(SavesWeights):
    """Of processes that do the same and share one core."""

    in_process = False

    def media(self) -> NoReturn:
        """Processes that prepare prompts on their own would not stay alike if one of them fails to."""
        raise NotSupportedError("external_launcher takes no media in prompts: use another distributed_executor_backend")


class LeadingClient(_Alike):
    """See `CoreClient`.

    Args:
        launch: starts the core, and connects to it.
        channel: to the others.
    """

    def __init__(self, launch: Callable[[], CoreClient], channel: Channel) -> None:
        self._channel = channel
        self._client: CoreClient = self._telling(launch, lambda client: Told(config=client.config, model=client.model))
        self.config, self.model = self._client.config, self._client.model

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = (), rank: int | None = None) -> None:
        self._telling(lambda: self._client.add_request(request, tensors, rank))

    def abort(self, handles: Sequence[int]) -> None:
        self._client.abort(handles)

    def get_outputs(self, timeout: float | None = None) -> Outputs | None:
        wait = lambda: self._client.get_outputs(timeout)  # noqa: E731
        outputs: Outputs | None = self._telling(wait, lambda outputs: Told(outputs=outputs))
        return outputs

    def call(self, method: str, *args: Any, arrays: Sequence[Array] = (), timeout: float | None = None) -> Any:
        ask = lambda: self._client.call(method, *args, arrays=arrays, timeout=timeout)  # noqa: E731
        return self._telling(ask, lambda answer: Told(answer=answer))

    def close(self) -> None:
        self._client.close()

    @property
    def error(self) -> EngineDeadError | None:
        return self._client.error

    def _telling(self, act: Callable[[], Any], told: Callable[[Any], Told] | None = None) -> Any:
        """The result of `act`. The others are told of it, if `told` says how, and of an error in any case."""
        try:
            result = act()
        except (MainspringError, TimeoutError) as error:
            self._channel(_encoder.encode(Told(wire_name(error), wire_text(error))))
            raise
        if told is not None:
            self._channel(_encoder.encode(told(result)))
        return result


class FollowingClient(_Alike):
    """See `CoreClient`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.error: EngineDeadError | None = None
        told = self._next()
        assert told.config is not None
        assert told.model is not None
        self.config, self.model = told.config, told.model

    def add_request(self, request: AddRequest, tensors: Sequence[np.ndarray] = (), rank: int | None = None) -> None:
        """The leader adds it. If that fails, the next call raises."""

    def abort(self, handles: Sequence[int]) -> None:
        """The leader does."""

    def get_outputs(self, timeout: float | None = None) -> Outputs | None:
        return self._next().outputs

    def call(self, method: str, *args: Any, arrays: Sequence[Array] = (), timeout: float | None = None) -> Any:
        return self._next().answer

    def close(self) -> None:
        self.error = self.error or EngineDeadError("the engine was shut down")

    def _next(self) -> Told:
        if self.error is not None:
            raise self.error
        try:
            told = _decoder.decode(self._channel(None))
        except RuntimeError as error:
            self._die(f"the process that leads is gone: {error}")
        if told.error:
            raised = from_wire(told.error, told.text)
            if isinstance(raised, EngineDeadError):
                self.error = raised
            raise raised
        return told

    def _die(self, why: str) -> NoReturn:
        self.error = EngineDeadError(why)
        raise self.error from None


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Told)
