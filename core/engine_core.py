"""The core's one loop: schedule, execute, sample, update. It knows frontends by number and text not at all."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from ..ipc.codec import Frame, decode_value, encode_value, read_tensor
from ..ipc.config import EngineConfig
from ..ipc.errors import InvalidArgumentError, InvalidRequestError, MainspringError, NotSupportedError
from ..ipc.messages import AddRequest, ModelFacts, Outputs
from ..ipc.params import MAX_SEED
from .executor import Executor, UniprocExecutor
from .kv_cache import KVCacheManager
from .request import Request
from .scheduler import Scheduler
from .step import Step

logger = logging.getLogger(__name__)


class EngineCore:
    """A loaded model, its scheduler and its frontends. Not thread-safe: one thread drives it.

    Raises:
        MainspringError: the model can't be loaded or served.
    """

    def __init__(
        self, config: EngineConfig, make_executor: Callable[[EngineConfig], Executor] = UniprocExecutor
    ) -> None:
        started = time.monotonic()
        self.executor = make_executor(config)
        self.config = _filled_in(config, self.executor)
        self.model: ModelFacts = self.executor.facts()
        cache = config.cache_config
        kv = KVCacheManager(
            self.executor.layout.groups, cache.block_size, self.executor.num_blocks, cache.enable_prefix_caching
        )
        budget, longest = config.scheduler_config.max_num_batched_tokens, self.executor.max_model_len
        if not config.scheduler_config.enable_chunked_prefill and budget < longest:
            raise InvalidArgumentError(
                f"max_num_batched_tokens is {budget}, less than max_model_len, {longest}: without chunked prefill a "
                "prompt must fit in one step"
            )
        self.scheduler = Scheduler(
            config.scheduler_config,
            kv,
            self.executor.max_model_len,
            log_stats=not config.observability_config.disable_log_stats,
        )
        self._depth = 1  # steps in flight
        self._in_flight: deque[tuple[Step, Any]] = deque()
        self._methods: dict[str, Callable[..., Any]] = {
            "ping": lambda: None,
            "reset_prefix_cache": self.scheduler.reset_prefix_cache,
            "explain_model": self.executor.explain,
            "stats": self.scheduler.stats,
        }
        logger.info(
            "ready in %.1f s: %d KV blocks of %d tokens", time.monotonic() - started, kv.pool.num_blocks, kv.block_size
        )

    # ------------------------------------------------------------------ frontends

    def connect(self, frontend: int, weight: float = 1.0) -> None:
        self.scheduler.fair.register(frontend, weight)

    def disconnect(self, frontend: int) -> None:
        """Abort whatever the frontend has left."""
        if frontend in self.scheduler.fair:
            self.scheduler.remove_frontend(frontend)

    def add_request(self, frontend: int, message: AddRequest, tensors: Sequence[Frame] = ()) -> None:
        """Queue a request. One that can't be served ends at once, with an error."""
        try:
            embeds = None if message.prompt_embeds is None else read_tensor(message.prompt_embeds, tensors)
            self._check(frontend, message, embeds)
        except MainspringError as error:
            self.scheduler.refuse(frontend, message.handle, error)
            return
        self.scheduler.add(Request(message, frontend, time.monotonic(), self.executor.max_model_len, embeds))

    def abort(self, frontend: int, handles: Sequence[int]) -> None:
        self.scheduler.abort(frontend, handles)

    def call(self, method: str, args: msgspec.Raw) -> msgspec.Raw:
        """A utility call, from the fixed table.

        Raises:
            MainspringError: no such method, or what it raised.
        """
        function = self._methods.get(method)
        if function is None:
            raise NotSupportedError(f"the core has no method {method!r}; it has {', '.join(sorted(self._methods))}")
        return encode_value(function(*decode_value(args, list)))

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> dict[int, Outputs]:
        """Launch what can be launched, take in the oldest step, and return what each frontend is to be told."""
        while len(self._in_flight) < self._depth and (step := self.scheduler.schedule()) is not None:
            self._in_flight.append((step, self.executor.sample(self.executor.execute(step))))
        if not self._in_flight:
            return self.scheduler.take_notices()
        step, sampled = self._in_flight.popleft()
        return self.scheduler.update(step, self.executor.tokens(sampled))

    def _check(self, frontend: int, message: AddRequest, embeds: np.ndarray | None) -> None:
        """What a well-behaved frontend has checked before."""
        ids, sampling, limit = message.prompt_token_ids, message.sampling, self.executor.max_model_len
        if message.handle in self.scheduler.fair.of(frontend).requests:
            raise InvalidRequestError(f"handle {message.handle} is in use")
        if not ids:
            raise InvalidRequestError("the prompt is empty")
        if len(ids) + len(message.output_token_ids) >= limit:
            raise InvalidRequestError(f"the prompt has {len(ids)} tokens; max_model_len is {limit}, output included")
        for tokens in (ids, message.output_token_ids, sampling.stop_token_ids):
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.model.vocab_size:
                token = min(tokens) if min(tokens) < 0 else max(tokens)
                raise InvalidRequestError(f"token id {token} is outside the vocabulary of {self.model.vocab_size}")
        if not (0 <= sampling.temperature < float("inf") and 0 < sampling.top_p <= 1 and 0 <= sampling.min_p <= 1):
            raise InvalidRequestError(f"sampling parameters are out of range: {sampling}")
        integers = (sampling.max_tokens - 1, sampling.top_k, sampling.min_tokens)
        if not all(0 <= value < 2**62 for value in integers) or not -MAX_SEED - 1 <= sampling.seed <= MAX_SEED:
            raise InvalidRequestError(f"sampling parameters are out of range: {sampling}")
        if len(message.output_token_ids) >= sampling.max_tokens:
            raise InvalidRequestError(
                f"{len(message.output_token_ids)} output tokens are there already; max_tokens is {sampling.max_tokens}"
            )
        if embeds is not None and not self.executor.accepts_embeddings:
            raise NotSupportedError(
                "this model needs more of a prompt than its embeddings: prompt_embeds can't be used"
            )
        if embeds is not None and embeds.shape != (len(ids), self.model.hidden_size):
            raise InvalidRequestError(
                f"prompt_embeds has shape {list(embeds.shape)}; it must be [{len(ids)}, {self.model.hidden_size}]"
            )


def _filled_in(config: EngineConfig, executor: Executor) -> EngineConfig:
    """The configuration with what only the core knows."""
    replace = msgspec.structs.replace
    facts = executor.facts()
    return replace(
        config,
        model_config=replace(config.model_config, max_model_len=executor.max_model_len, dtype=facts.dtype),
        cache_config=replace(config.cache_config, num_gpu_blocks=executor.num_blocks, num_cpu_blocks=0),
    )
