"""The methods that frontends call by name, with the permission that each needs.

To add one, add a line to the table; frontends reach it through `engine/engine_methods.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from ..ipc.errors import InvalidArgumentError, InvalidRequestError, NotSupportedError
from ..ipc.messages import MAX_CORES
from ..ipc.processor_names import MAX_EXTRA_ARGS_BYTES
from ..ipc.structured import MAX_SPEC_BYTES
from ..ipc.tokenizer_files import read_files
from .calls import MAX_ARGUMENT_BYTES, Caller, Method
from .features.encoder_cache import EncoderCache
from .features.held_weights import rows_of
from .lifecycle import Lifecycle
from .plan.control import Explain, StartProfile, StopProfile

if TYPE_CHECKING:
    from .loop import EngineCore

MAX_CHECKED_BYTES = MAX_SPEC_BYTES + MAX_EXTRA_ARGS_BYTES + MAX_ARGUMENT_BYTES  # of a request for `check_request`
MAX_NAMES_BYTES = 8 << 20  # of the names and shapes that a trainer sends; a large model has 100,000 parameters
_READER = ThreadPoolExecutor(1, "mainspring-files")  # reads large files, so that no step waits for them

T = TypeVar("T")


def methods_of(core: EngineCore) -> dict[str, Method]:
    """The table of a core."""
    lifecycle, adapters, worker = core.lifecycle, core.adapters, core.worker
    weights, media = _Weights(lifecycle), _Media(core)
    model, folder = core.config.model_config, core.config.load_config.download_dir
    return {
        "ping": Method(lambda: None),
        "stats": Method(core.stats),
        "explain_model": Method(lambda: worker.control(Explain())),
        "tokenizer_files": Method(lambda: core.waits.bring(_READER.submit(read_files, model, folder))),
        "check_request": Method(core.check_request, gets_caller=True, max_bytes=MAX_CHECKED_BYTES),
        "is_paused": Method(lambda: lifecycle.state.paused),
        "is_sleeping": Method(lambda: lifecycle.sleeping),
        "reset_prefix_cache": Method(core.scheduler.reset_prefix_cache, admin=True),
        "reset_encoder_cache": Method(media.reset, admin=True),
        "offer_media": Method(media.offer, admin=True),
        "put_media": Method(media.put, admin=True, gets_arrays=True),
        "pause_generation": Method(lifecycle.pause, admin=True),
        "resume_generation": Method(lifecycle.resume, admin=True),
        "sleep": Method(lifecycle.sleep, admin=True),
        "wake_up": Method(lifecycle.wake_up, admin=True),
        "update_weights": Method(weights.update, admin=True, gets_caller=True, gets_arrays=True),
        "init_weight_transfer_engine": Method(lifecycle.held.join, admin=True),
        "shutdown_weight_transfer_engine": Method(lifecycle.held.end, admin=True),
        "start_weight_update": Method(weights.start, admin=True, gets_caller=True),
        "hold_weights": Method(weights.hold, admin=True, gets_caller=True, gets_arrays=True),
        "receive_weights": Method(weights.receive, admin=True, gets_caller=True, max_bytes=MAX_NAMES_BYTES),
        "finish_weight_update": Method(weights.finish, admin=True, gets_caller=True),
        "set_weight_version": Method(weights.set_version, admin=True),
        "get_weight_version": Method(lambda: lifecycle.state.weights_label),
        "scale": Method(lambda count: _scale(lifecycle, count), admin=True),
        "collective_rpc": Method(core.collective_rpc, admin=True),
        "start_profile": Method(lambda prefix=None: worker.control(StartProfile(prefix)), admin=True),
        "stop_profile": Method(lambda: worker.control(StopProfile()), admin=True),
        "add_lora": Method(adapters.add, gets_caller=True),
        "remove_lora": Method(lambda caller, number: adapters.remove(caller.owner, number), gets_caller=True),
        "list_loras": Method(lambda caller: adapters.numbers(caller.owner), gets_caller=True),
        "pin_lora": Method(lambda caller, number: adapters.pin(caller.owner, number), gets_caller=True),
    }


class _Weights:
    """Calls about new weights, with the types of their arguments."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    def update(self, caller: Caller, arrays: Sequence[np.ndarray], *args: Any) -> None:
        version, number, names, starts, last = _read(args, tuple[str, int, list[str], list[int], bool])
        self._lifecycle.update_weights(caller.frontend, version, number, rows_of(names, starts, arrays), last)

    def start(self, caller: Caller) -> None:
        self._lifecycle.held.start(caller.frontend)

    def hold(self, caller: Caller, arrays: Sequence[np.ndarray], *args: Any) -> None:
        self._lifecycle.held.hold(caller.frontend, *_read(args, tuple[list[str], list[int]]), arrays)

    def receive(self, caller: Caller, *args: Any) -> Future[None]:
        names, dtypes, shapes = _read(args, tuple[list[str], list[str], list[list[int]]])
        return self._lifecycle.held.receive(caller.frontend, names, dtypes, shapes)

    def finish(self, caller: Caller, version: Any = None, replace: Any = True) -> None:
        self._lifecycle.finish_update(caller.frontend, *_read((version, replace), tuple[str | None, bool]))

    def set_version(self, version: Any) -> None:
        self._lifecycle.set_weight_version(*_read((version,), tuple[str]))


class _Media:
    """Calls about media items."""

    def __init__(self, core: EngineCore) -> None:
        self._cache, self._waits = core.media, core.waits

    def reset(self) -> None:
        if self._cache is not None:
            self._cache.reset()

    def offer(self, digests: Any) -> list[bytes]:
        return self._served().items.offer(digests)

    def put(
        self, arrays: Sequence[np.ndarray], digest: Any, modality: Any, names: Any, shapes: Any = None
    ) -> Future[None]:
        kept = self._served().items.put(arrays, digest, modality, names, shapes)
        if not kept.done():
            self._waits.then(kept, lambda _: None)  # so that the loop looks for room
        return kept

    def _served(self) -> EncoderCache:
        if self._cache is None:
            raise NotSupportedError("this model takes text only: its prompts can have no media")
        return self._cache


def _scale(lifecycle: Lifecycle, count: Any) -> None:
    if type(count) is not int or not 1 <= count <= MAX_CORES:
        raise InvalidArgumentError(f"the number of cores is {count!r:.80}; it must be between 1 and {MAX_CORES}")
    lifecycle.set_num_cores(count)


def _read(args: Sequence[Any], kinds: type[T]) -> T:
    """The arguments of a call, if they are of these types."""
    try:
        return msgspec.convert(args, kinds)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the call's arguments are wrong: {error}") from None
