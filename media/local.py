"""Prepares media in the engine's own process, for an engine that has its core there, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from ..ipc.codec import Array
from ..ipc.config import EngineConfig
from ..ipc.errors import RequestFailedError
from ..ipc.media_client import Asked, AskedFor, MediaInput, PreparedPrompt, digests_of
from .preparer import Preparer

OFFERED = 1000  # most digests in a call
PART_BYTES = 200 << 20  # of an array that is sent in parts, because a frame has at most 256 MiB
Call = Callable[..., Any]  # `CoreClient.call`


def deliver(call: Call, preparer: Preparer, digests: Sequence[bytes]) -> list[bytes]:
    """Send to a core the arrays of the items that it lacks. Returns those items that are not kept any more."""
    gone = []
    for start in range(0, len(digests), OFFERED):
        kept = {digest: preparer.arrays(digest) for digest in digests[start : start + OFFERED]}  # until sent
        for digest in call("offer_media", list(kept)):
            if (item := kept[digest]) is None:
                gone.append(digest)
                continue
            parts = [(name, part) for name, values in item.arrays.items() for part in _parts(values)]
            shapes = {name: list(values.shape) for name, values in item.arrays.items() if values.nbytes > PART_BYTES}
            arrays = [Array(part, part.dtype.name) for _, part in parts]
            call("put_media", digest, item.modality, [name for name, _ in parts], shapes, arrays=arrays)
    return gone


def _parts(values: np.ndarray) -> list[np.ndarray]:
    if values.nbytes <= PART_BYTES:
        return [values]
    flat, step = values.reshape(-1), PART_BYTES // values.itemsize
    return [flat[start : start + step] for start in range(0, len(flat), step)]


class LocalMedia:
    """See `MediaClient`.

    Args:
        call: a method of the core, as `CoreClient.call`.
    """

    def __init__(self, config: EngineConfig, call: Call) -> None:
        self._preparer, self._call, self._asked = Preparer(config), call, AskedFor()

    def prepare(
        self,
        prompt: str | list[int],
        inputs: Sequence[MediaInput],
        kwargs: dict[str, Any],
        add_special_tokens: bool = True,
    ) -> Future[PreparedPrompt]:
        done: Future[PreparedPrompt] = Future()
        try:
            prepared = self._preparer.prepare(prompt, inputs, kwargs, add_special_tokens)
            self._asked.add(prepared, Asked(prompt, inputs, kwargs, add_special_tokens))
            done.set_result(prepared)
        except Exception as error:
            done.set_exception(error)
        return done

    def deliver(self, prepared: PreparedPrompt, inputs: Sequence[MediaInput], core: int = 0) -> None:
        digests = list(dict.fromkeys(digests_of(prepared.media)))
        asked = self._asked.get(prepared.media)
        if (gone := deliver(self._call, self._preparer, digests)) and asked is not None:
            self._preparer.prepare(*asked)  # others have come since it was prepared
            gone = deliver(self._call, self._preparer, digests)
        if gone:
            raise RequestFailedError("a media item of this request has changed, or is not kept any more")

    def forget(self, prepared: PreparedPrompt) -> None:
        self._asked.forget(prepared.media)

    def reset_cache(self) -> Future[None]:
        self._preparer.reset()
        done = Future[None]()
        done.set_result(None)
        return done

    def close(self) -> None:
        """Nothing runs."""
