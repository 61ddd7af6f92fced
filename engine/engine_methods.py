"""The methods of an engine that are not about requests: profiles, caches, sleep, weights, adapters, metrics.

Each is written once, as a coroutine. `LLM` and `LLMEngine` have it as a method that waits for the core's answer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, TypeVar, cast

from ..compat.members import Device
from ..ipc.adapters import LoRARequest
from ..ipc.errors import InvalidArgumentError, InvalidRequestError, MainspringError
from .observe.metrics import Metric
from .request.weight_messages import info_of, init_info, plain_arguments, update_info, weight_messages
from .text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from .frontend import Frontend

P = ParamSpec("P")
R = TypeVar("R")
PauseMode = Literal["abort", "wait", "keep"]
_A_FUNCTION = "{} takes a function, which cannot go to another process"


def blocking(method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]) -> Callable[Concatenate[Any, P], R]:
    """The same coroutine as a plain method. It awaits `Frontend._call` and `_answer` only, and a blocking client has
    answered when they return, so the coroutine ends at its first step."""

    @functools.wraps(method)
    def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._engine._check_process()
        try:
            method(self, *args, **kwargs).send(None)
        except StopIteration as end:
            return cast(R, end.value)
        raise AssertionError(f"{method.__name__} waits for something else than its client")

    return run


def coroutine(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    """A method that does not wait for the core, as a coroutine."""

    @functools.wraps(method)
    async def run(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(self, *args, **kwargs)

    return run


class AsyncEngineMethods:
    """The methods of `AsyncLLMEngine`."""

    _engine: Frontend[Any]  # whose client is called

    async def start_profile(self, profile_prefix: str | None = None) -> None:
        """Begin to record what the core does, step by step, with torch's profiler. The core stands still for a second
        or two.

        Args:
            profile_prefix: of the trace's file name.

        Raises:
            InvalidRequestError: the prefix is not a name.
            NotPermittedError: this connection may not change the engine for everyone.
        """
        await self._engine._call("start_profile", profile_prefix)

    async def stop_profile(self) -> str:
        """End it and write a Chrome trace, into ``MAINSPRING_PROFILE_DIR`` of the core's environment or the system's
        place for temporary files.

        Returns:
            The file, on the core's machine. Those of other ranks lie beside it, with ``-rank-N`` in their names.

        Raises:
            InvalidRequestError: no profile is under way.
            NotPermittedError: as above.
        """
        return str(await self._engine._call("stop_profile"))

    async def reset_prefix_cache(
        self, reset_running_requests: bool | Device | None = False, reset_connector: bool = False
    ) -> bool:
        """Forget every cached block, in the pool and in host memory.

        Args:
            reset_running_requests: running requests compute all they have anew; their tokens are the same. Otherwise
                they go on with the keys and values they have. A `Device` (older form): forget only what lies there.
            reset_connector: without effect, for there is no connector.

        Returns:
            True.

        Raises:
            NotPermittedError: this connection may not change the engine for everyone.
        """
        of: list[Any] = [reset_running_requests is True]
        if isinstance(reset_running_requests, Device):
            of = [False, reset_running_requests.name.lower()]
        return bool(await self._engine._call("reset_prefix_cache", *of))

    async def reset_mm_cache(self) -> None:
        """Forget the names (`multi_modal_uuids`) of images, videos and sounds that this engine was given, and what was
        prepared of such items for any frontend. What unfinished requests need is prepared again.

        Raises:
            NotPermittedError: over tcp with keys, this connection may not change the engine for everyone. The names are
                forgotten.
        """
        self._engine._enter()
        await self._engine._answer(self._engine._media.reset())

    async def reset_encoder_cache(self) -> None:
        """Forget what encoders have made of images, videos and sounds. Running requests keep theirs.

        Raises:
            NotPermittedError: this connection may not change the engine for everyone.
        """
        await self._engine._call("reset_encoder_cache")

    async def pause_generation(
        self, mode: PauseMode = "abort", wait_for_inflight_requests: bool | None = None, clear_cache: bool = True
    ) -> None:
        """Compute nothing more until `resume_generation`, for all frontends of the core; new requests wait.

        Args:
            mode: what is in flight is aborted; or goes on to its end, which is waited for; or is kept for later.
            wait_for_inflight_requests: the older name of mode "wait".
            clear_cache: forget the prefix cache too; without effect under "keep".

        Raises:
            InvalidArgumentError: there is no such mode.
            NotPermittedError: this connection may not change the engine for everyone.
        """
        mode = "wait" if wait_for_inflight_requests else mode
        await self._engine._call("pause_generation", mode, clear_cache and mode != "keep")

    async def resume_generation(self) -> None:
        """End a pause."""
        await self._engine._call("resume_generation")

    async def is_paused(self) -> bool:
        """Whether somebody has paused the core."""
        return bool(await self._engine._call("is_paused"))

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """Let the core compute nothing, and need less memory, until `wake_up`; new requests wait. Returns when it
        sleeps. A core that dies in its sleep is followed by one that sleeps.

        Args:
            level: 0: it only stops. 1: the KV cache's memory is given back, and a GPU's for weights, which go to the
                host's (on a CPU they are there). 2: the weights are dropped; waking reads the checkpoint again.
            mode: as in `pause_generation`.

        Raises:
            InvalidArgumentError: there is no such level or mode.
            NotPermittedError: this connection may not change the engine for everyone.
        """
        await self._engine._call("sleep", level, mode)
        self._engine._take_stats(await self._engine._call("stats"))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """End `sleep`.

        Args:
            tags: what to wake, of ``scheduling``, ``weights`` and ``kv_cache``; None: all. Requests go on when weights
                and cache are there.

        Raises:
            InvalidArgumentError: there is no such tag.
            NotPermittedError: this connection may not change the engine for everyone.
        """
        await self._engine._call("wake_up", tags)
        self._engine._take_stats(await self._engine._call("stats"))

    async def is_sleeping(self) -> bool:
        """Whether any part of the core sleeps."""
        return bool(await self._engine._call("is_sleeping"))

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of the core's worker: one of `worker_extension_cls`, or of its own (core/worker/rpc.py).

        Args:
            method: its name; with the core in this process also a function, which is given the worker first.
            timeout: seconds to wait for the answer.
            args, kwargs: of plain types, if the core is in another process; the result too. With several ranks, what
                can be pickled.

        Returns:
            The result of each rank.

        Raises:
            NotSupportedError: a function, and the core is in another process.
            InvalidRequestError: there is no such method, or a value that can't travel.
            TimeoutError: there was no answer in time.
            NotPermittedError: this connection may not change the engine for everyone.
        """
        given = plain_arguments(args, kwargs, timeout)
        if self._engine.engine_core.in_process or callable(method):
            return self._engine._core_here(_A_FUNCTION.format("collective_rpc")).collective_rpc(method, *given)
        return list(await self._engine._call("collective_rpc", method, *given, timeout=timeout))

    async def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """``func(model)`` with the module of transformers, in the core; what it changes of the parameters is kept.

        Returns:
            The result of each rank.

        Raises:
            NotSupportedError: the core is in another process.
        """
        return self._engine._core_here(_A_FUNCTION.format("apply_model")).collective_rpc("apply_model", [func], {})

    async def update_weights(self, weights: Any, version: str = "") -> None:
        """Replace parameters by others, for all frontends: what a training loop needs between rollouts. Meanwhile
        nothing is computed; then cached prefixes are forgotten and running requests go on with the new weights.

        Args:
            weights: pairs of a name as in the checkpoint's ``state_dict`` and an array (numpy, torch, DLPack) of the
                parameter's shape; taken one by one, and sent in pieces. Or vLLM's request, between
                `start_weight_update` and `finish_weight_update`: an object with `update_info`, or that as a dict. Its
                ``names``, ``dtype_names`` and ``shapes`` say what the trainer broadcasts next; no names: the same as
                the last time. With ``ipc_handles``, a list of arrays, the values come along.
            version: a name for them. After a crash of the core they are gone: requests and this engine's outputs then
                end with `WeightsLostError`, which names it, until they are sent again. A request has none: give it to
                `finish_weight_update`.

        Raises:
            InvalidArgumentError: no pairs of a name and an array, or not the fields of a request.
            InvalidRequestError: a name or a shape that the model does not have; or the weights sleep, or are quantized.
                For a request: no update was started, or there is no trainer.
            ConnectError: the trainer has left. The started update and the trainer's group are given up.
            NotPermittedError: this connection may not change the engine for everyone.
        """
        if (info := info_of(weights, "update_info")) is not None:
            if version:
                raise InvalidArgumentError("version is given beside a request: give it to finish_weight_update")
            return await _hold(self._engine, info)
        try:
            for args, arrays in weight_messages(weights, version):
                await self._engine._call("update_weights", *args, arrays=arrays)
        except BaseException:
            with contextlib.suppress(MainspringError):  # tell the core that the update is broken off
                await self._engine._call("update_weights", version, -1, [], [], True)
            raise

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Say how weights will come. An update that is not finished is dropped.

        Args:
            request: an object with `init_info`, or that as a dict. With ``master_address`` and ``master_port`` the core
                joins a trainer's process group there, as rank ``rank_offset`` (1) of ``world_size`` (2), over TCP with
                gloo; this waits for the trainer. Whoever reaches that address could take part. Without them, arrays
                come with `update_weights`.

        Raises:
            InvalidArgumentError: no such form, or values out of range.
            NotSupportedError: ``packed``: several tensors sent as one.
            ConnectError: the trainer could not be reached within 5 minutes.
            NotPermittedError: this connection may not change the engine for everyone.
        """
        await self._engine._call("init_weight_transfer_engine", init_info(request))

    async def shutdown_weight_transfer_engine(self) -> None:
        """Leave the trainer's group. An update that is not finished is dropped."""
        await self._engine._call("shutdown_weight_transfer_engine")

    async def start_weight_update(self) -> None:
        """Begin an update: weights that `update_weights` brings by request are held in host memory, and requests go on
        with the present ones, until `finish_weight_update`. If this frontend leaves before, they are dropped.

        Raises:
            InvalidRequestError: another update is not finished; or the weights sleep, or are quantized.
            NotPermittedError: this connection may not change the engine for everyone.
        """
        await self._engine._call("start_weight_update")

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Replace the present weights by those that came since `start_weight_update`, all at once between two steps.
        Cached prefixes are forgotten, and running requests go on with the new weights. After a crash of the core it is
        as with `update_weights`.

        Args:
            weight_version: a name for the new weights; None: the present name stays.

        Raises:
            InvalidRequestError: no update was started, or nothing came; a name or a shape that the model does not have.
                The present weights stay.
            NotPermittedError: this connection may not change the engine for everyone.
        """
        await self._engine._call("finish_weight_update", weight_version)

    async def update_weight_version(self, new_version: str) -> None:
        """Name the weights that are served, without a change of them."""
        await self._engine._call("set_weight_version", new_version)

    async def get_weight_version(self) -> str:
        """The name of the weights that are served; ``default`` if nobody has named them."""
        return str(await self._engine._call("get_weight_version"))

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load a LoRA adapter before a request needs it, and let it be loaded again should the core die. Others go on
        meanwhile.

        Returns:
            True, once it is there.

        Raises:
            InvalidRequestError: its folder holds nothing that can be served; the message says why.
            NotSupportedError: the core serves no adapters.
        """
        self._engine.input_processor.check_adapters(lora_request)
        return bool(await self._engine._call("add_lora", lora_request.message))

    async def remove_lora(self, lora_id: int) -> bool:
        """Forget one of this engine's adapters; requests that have it go on. False if there is none of that number."""
        return bool(await self._engine._call("remove_lora", lora_id))

    async def list_loras(self) -> set[int]:
        """Numbers of this engine's adapters that are in memory."""
        return set(await self._engine._call("list_loras"))

    async def pin_lora(self, lora_id: int) -> bool:
        """Let an adapter stay in memory, whatever others need.

        Raises:
            InvalidArgumentError: it is not loaded, or no place would be left for others.
        """
        return bool(await self._engine._call("pin_lora", lora_id))


async def _hold(engine: Frontend[Any], info: Any) -> None:
    """Bring the parameters of a started update: arrays that come along, or what a trainer broadcasts."""
    pairs: Iterable[tuple[str, Any]] | None = ()
    try:
        described, pairs = update_info(info)
        if pairs is None:
            await engine._call("receive_weights", *described)
            return
        for (_, _, names, starts, _), arrays in weight_messages(pairs, ""):
            await engine._call("hold_weights", names, starts, arrays=arrays)
    except BaseException as error:
        if pairs is not None or not isinstance(error, MainspringError):  # otherwise the core has dropped the update
            with contextlib.suppress(MainspringError):
                await engine._call("finish_weight_update", None, False)
        raise


class EngineMethods:
    """The methods of `LLM` and `LLMEngine`."""

    _engine: Frontend[Any]

    start_profile = blocking(AsyncEngineMethods.start_profile)
    stop_profile = blocking(AsyncEngineMethods.stop_profile)
    reset_prefix_cache = blocking(AsyncEngineMethods.reset_prefix_cache)
    reset_mm_cache = blocking(AsyncEngineMethods.reset_mm_cache)
    reset_encoder_cache = blocking(AsyncEngineMethods.reset_encoder_cache)
    pause_generation = blocking(AsyncEngineMethods.pause_generation)
    resume_generation = blocking(AsyncEngineMethods.resume_generation)
    is_paused = blocking(AsyncEngineMethods.is_paused)
    sleep = blocking(AsyncEngineMethods.sleep)
    wake_up = blocking(AsyncEngineMethods.wake_up)
    is_sleeping = blocking(AsyncEngineMethods.is_sleeping)
    collective_rpc = blocking(AsyncEngineMethods.collective_rpc)
    apply_model = blocking(AsyncEngineMethods.apply_model)
    update_weights = blocking(AsyncEngineMethods.update_weights)
    init_weight_transfer_engine = blocking(AsyncEngineMethods.init_weight_transfer_engine)
    shutdown_weight_transfer_engine = blocking(AsyncEngineMethods.shutdown_weight_transfer_engine)
    start_weight_update = blocking(AsyncEngineMethods.start_weight_update)
    finish_weight_update = blocking(AsyncEngineMethods.finish_weight_update)
    update_weight_version = blocking(AsyncEngineMethods.update_weight_version)
    get_weight_version = blocking(AsyncEngineMethods.get_weight_version)
    add_lora = blocking(AsyncEngineMethods.add_lora)
    remove_lora = blocking(AsyncEngineMethods.remove_lora)
    list_loras = blocking(AsyncEngineMethods.list_loras)
    pin_lora = blocking(AsyncEngineMethods.pin_lora)

    def get_tokenizer(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            InvalidRequestError: there is none, because of `skip_tokenizer_init`.
        """
        self._engine._check_process()
        if self._engine.tokenizer is None:
            raise InvalidRequestError("there is no tokenizer; this engine has skip_tokenizer_init=True")
        return self._engine.tokenizer

    def get_supported_tasks(self) -> tuple[str, ...]:
        """What the model can be asked for."""
        return tuple(self._engine.engine_core.model.tasks) or ("generate",)

    def get_metrics(self) -> list[Metric]:
        """Every metric: requests and latencies as this engine saw them, the core as it last told.

        Raises:
            InvalidArgumentError: there are none, because of `disable_log_stats`.
        """
        with self._engine._lock:
            return self._engine._statistics().metrics()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.shutdown()
