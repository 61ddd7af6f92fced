"""What the stages of the scheduler share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..core_meter import CoreMeter
from ..features.encoder_cache import EncoderCache
from ..features.suspects import Suspects
from ..memory.cache_manager import CacheManager
from ..memory.home_caches import HomeCaches
from .budget import Budget
from .columns import Columns
from .fair_share import FairShare
from .feature import NO_LIMIT, Features
from .outbox import Outbox
from .request import Request
from .running import Running


@dataclass
class SchedulerState:
    """The parts of the scheduler. A stage is a function of this state."""

    rows: Columns
    running: Running
    kv: CacheManager | HomeCaches
    fair: FairShare
    budget: Budget
    features: Features
    suspects: Suspects
    clock: Callable[[], float]  # monotonic seconds
    meter: CoreMeter = field(default_factory=CoreMeter)
    outbox: Outbox = field(default_factory=Outbox)
    on_end: Callable[[Request], None] = lambda request: None  # called with each request that ends
    stalled: bool = False  # nothing can be computed before something changes
    promised: Request | None = None  # the request that blocks on their way back to the pool are reserved for
    most_steps: int = 1  # that the worker makes of one plan
    hands_out: bool = False  # whether frontends get the tokens of such a plan as they are made
    step_seconds: float = 0.0  # that the last step took
    media: EncoderCache | None = None  # of a model whose prompts may have media
    starved: Request | None = None  # the next tokens of it have to be computed together, and no step had room for them
    alone: bool = False  # the step that is being made is for that request
    waits: tuple[Request, int] | None = None  # the oldest request, if it waits for blocks, and the step since when

    def may_run(self, request: Request, fetch: bool) -> bool:
        """Whether features let a waiting request have a slot in the next step, see `Feature.may_run`."""
        return all(may_run(request, self.running.next_step, fetch) for may_run in self.features.may_run)

    def most_tokens(self, request: Request, start: int) -> int:
        """Most tokens, from `start`, that features let a request compute in this step, see `Feature.most`."""
        return min((most(request, start) for most in self.features.most), default=NO_LIMIT)
