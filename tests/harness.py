"""A scheduler over a stand-in model, for tests of what must hold for any schedule.

The stand-in's next token is a hash of all tokens that the model would see, *read back through the block tables*: where
a block is freed too early, shared wrongly or listed in the wrong place, the output is another one.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from invariants import check_host, check_pool
from mainspring.core.features.speculation import Speculation
from mainspring.core.loop import EngineCore
from mainspring.core.memory.block_pool import NULL_BLOCK
from mainspring.core.memory.kv_cache import KVCacheManager
from mainspring.core.plan.request import Request
from mainspring.core.plan.scheduler import PauseMode, Scheduler
from mainspring.core.plan.step import IN_FLIGHT, Step
from mainspring.core.work.kv_layout import KVGroup
from mainspring.ipc.config import EngineConfig, SchedulerConfig, ServiceConfig
from mainspring.ipc.errors import OutOfMemoryError
from mainspring.ipc.messages import AddRequest, Finished, ModelFacts, Outputs, Sampling, Started, Stats

VOCAB = 50
Windows = Sequence[int | None]
Key = tuple[int, int]  # frontend, handle


def next_token(seen: Sequence[Sequence[int]], banned: Collection[int] = ()) -> int:
    """What follows where each KV group sees these tokens."""
    digest = hashlib.blake2b(digest_size=8)
    for tokens in seen:
        digest.update(np.asarray(tokens, np.int32).tobytes() + b"|")
    token = int.from_bytes(digest.digest(), "little") % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def expected_output(message: AddRequest, windows: Windows, max_model_len: int) -> tuple[list[int], str]:
    """The output and the finish reason, computed without blocks, batches or steps."""
    tokens = message.prompt_token_ids + message.output_token_ids
    stops, sampling, prompt = message.sampling.stop_token_ids, message.sampling, len(message.prompt_token_ids)
    output: list[int] = []
    while True:
        seen = [tokens if w is None else tokens[max(0, len(tokens) - w) :] for w in windows]
        token = next_token(seen, stops if len(tokens) < prompt + sampling.min_tokens else ())
        output.append(token)
        tokens = [*tokens, token]
        if token in stops:
            return output, "stop"
        if len(tokens) >= min(prompt + sampling.max_tokens, max_model_len):
            return output, "length"


class StandInModel:
    """Runs steps as the model runner does: its own copy of the block tables, its own last tokens, by slot."""

    def __init__(
        self,
        windows: Windows,
        block_size: int,
        num_blocks: int,
        slots: int,
        max_model_len: int,
        host_blocks: int = 0,
    ) -> None:
        self._windows = windows
        self._size = block_size
        columns = -(-max_model_len // block_size)
        self._tables = np.zeros((len(windows), slots, columns), np.int64)
        self._tokens = np.full((len(windows), num_blocks, block_size), -7)
        self._positions = np.full((len(windows), num_blocks, block_size), -7)
        self._host_tokens = np.full((len(windows), host_blocks, block_size), -9)
        self._host_positions = np.full((len(windows), host_blocks, block_size), -9)
        self._copied = -1  # the last step whose copies were made
        self._last = np.zeros(slots, np.int64)
        self._requests: dict[int, Request] = {}
        self._in_flight: deque[tuple[int, dict[int, tuple[Request, frozenset[int]]]]] = deque()

    def begin(self, step: Step) -> None:
        """What happens before there can be a lack of memory."""
        if step.id != self._copied:
            self._copy(step)
        group, slot, column, block = step.tables
        self._tables[group, slot, column] = block
        for request in step.admitted:
            self._requests[request.slot] = request

    def _copy(self, step: Step) -> None:
        self._copied = step.id
        for block, slot in step.copies.saves:
            self._host_tokens[:, slot] = self._tokens[:, block]
            self._host_positions[:, slot] = self._positions[:, block]
        named = {block for _, others in self._in_flight for _, blocks in others.values() for block in blocks}
        for block, slot in step.copies.loads:
            assert block not in named, "a block is loaded while a step that names it is in flight"
            self._tokens[:, block] = self._host_tokens[:, slot]
            self._positions[:, block] = self._host_positions[:, slot]

    def execute(self, step: Step) -> np.ndarray:
        """The tokens that `step` samples."""
        self.begin(step)
        ends = np.cumsum(step.counts)
        rows = [
            (int(slot), int(start), step.token_ids[end - count : end].astype(np.int64))
            for slot, start, count, end in zip(step.slots, step.starts, step.counts, ends, strict=True)
        ]
        self._check_reuse(step.id, rows)
        for slot, start, tokens in rows:
            self._write(slot, start, tokens)
        which, back = step.choices()
        return np.array(
            [
                self._sample(slot, start, len(tokens) - before)
                for (slot, start, tokens), before in zip([rows[row] for row in which], back.tolist(), strict=True)
            ],
            np.int64,
        )

    def retire(self, step: Step) -> None:
        assert self._in_flight[0][0] == step.id
        self._in_flight.popleft()

    def _first_seen(self, window: int | None, position: int) -> int:
        return 0 if window is None else max(0, position - window + 1)

    def _write(self, slot: int, start: int, tokens: np.ndarray) -> None:
        tokens[tokens == IN_FLIGHT] = self._last[slot]
        positions = np.arange(start, start + len(tokens))
        for group in range(len(self._windows)):
            blocks = self._tables[group, slot, positions // self._size]
            assert (blocks != NULL_BLOCK).all(), "a token is written to the null block"
            self._tokens[group, blocks, positions % self._size] = tokens
            self._positions[group, blocks, positions % self._size] = positions

    def _sample(self, slot: int, start: int, count: int) -> int:
        end = start + count
        seen = []
        for group, window in enumerate(self._windows):
            positions = np.arange(self._first_seen(window, start), end)  # all that the queries up to this one see
            blocks = self._tables[group, slot, positions // self._size]
            read = self._positions[group, blocks, positions % self._size]
            assert (read == positions).all(), f"group {group} reads positions {read} for {positions}"
            tokens = self._tokens[group, blocks, positions % self._size]
            seen.append(tokens[self._first_seen(window, end - 1) - int(positions[0]) :])
        request = self._requests[slot]
        unstoppable = end < request.prompt_len + request.sampling.min_tokens
        self._last[slot] = next_token(seen, request.stop_tokens if unstoppable else ())
        return int(self._last[slot])

    def _check_reuse(self, step: int, rows: list[tuple[int, int, np.ndarray]]) -> None:
        """No slot or block that a step in flight names for one request is named for writing by another."""
        mine: dict[int, tuple[Request, frozenset[int]]] = {}
        for slot, start, tokens in rows:
            named, written = set(), set()
            for group, window in enumerate(self._windows):
                columns = np.arange(
                    self._first_seen(window, start) // self._size, (start + len(tokens) - 1) // self._size + 1
                )
                named |= set(self._tables[group, slot, columns].tolist())
                written |= set(self._tables[group, slot, columns[columns >= start // self._size]].tolist())
            request = self._requests[slot]
            for _, others in self._in_flight:
                for other_slot, (other, blocks) in others.items():
                    if other is not request:
                        assert other_slot != slot, "a slot is reused while a step that names it is in flight"
                        assert not blocks & written, "a block is reused while a step that names it is in flight"
            mine[slot] = request, frozenset(named)
        self._in_flight.append((step, mine))


class Sent(NamedTuple):
    """What a step computed, by frontend."""

    num_tokens: int
    by_frontend: Counter[int]
    requests: dict[Key, int]  # tokens computed of each


class Engine:
    """The loop of the engine core over the stand-in, with everything the frontends were told, and invariants 1 and 2
    checked at every step.

    Args:
        depth: steps in flight.
        weights: of the frontends.
        num_blocks: without the null block; none: what the longest request needs, and as much again.
        suspects: how many requests may be added as suspects.
        accused_at: output position of the token that they have to get past.
        host_blocks: in host memory.
        guesses: most at once of a request, if any.
        guessed_right: how often one of them is right.
        limits: fields of `SchedulerConfig`.
    """

    def __init__(
        self,
        *,
        block_size: int = 4,
        windows: Windows = (None,),
        max_model_len: int = 64,
        num_blocks: int | None = None,
        depth: int = 1,
        weights: Sequence[float] = (1.0,),
        prefix_caching: bool = True,
        suspects: int = 0,
        accused_at: int = 0,
        host_blocks: int = 0,
        guesses: int = 0,
        guessed_right: float = 0.7,
        **limits: Any,
    ) -> None:
        limits = {"max_num_batched_tokens": 32, "max_num_seqs": 8, **limits}
        self.budget = limits["max_num_batched_tokens"]
        self.windows, self.max_model_len, self.depth = windows, max_model_len, depth
        if num_blocks is None:
            num_blocks = 2 * blocks_for(windows, block_size, max_model_len, self.budget)
        groups = [KVGroup(window, ()) for window in windows]
        self.kv = KVCacheManager(groups, block_size, num_blocks + 1, prefix_caching, host_blocks)
        self.now = 0.0
        self.suspects = set(range(suspects))  # keys; those of all others are larger
        self.told_suspects = set(self.suspects)  # left, as the scheduler says
        self._accused_at = accused_at
        self._suspect_keys = iter(range(suspects))
        self.scheduler = Scheduler(
            SchedulerConfig(**limits),
            self.kv,
            max_model_len,
            clock=lambda: self.now,
            suspects=dict.fromkeys(self.suspects, accused_at),
            on_suspects=lambda keys: setattr(self, "told_suspects", set(keys)),
            speculation=Speculation(guesses, self._guess) if guesses else None,
        )
        seats = limits["max_num_seqs"]
        self._guessed_right, self._luck = guessed_right, random.Random(1)
        self.model = StandInModel(windows, block_size, num_blocks + 1, seats, max_model_len, host_blocks)
        for frontend, weight in enumerate(weights):
            self.scheduler.fair.register(frontend, weight)
        self.in_flight: deque[tuple[Step, np.ndarray]] = deque()
        self.lacks_memory: Callable[[Step], bool] = lambda step: False
        self.num_lacking = 0
        self.messages: dict[Key, AddRequest] = {}
        self.keys: dict[Key, int] = {}
        self.slow: set[int] = set()  # frontends without credit
        self.aborted: set[Key] = set()
        self.outputs: dict[Key, list[int]] = defaultdict(list)
        self.started: dict[Key, Started] = {}
        self.finished: dict[Key, Finished] = {}
        self.steps: list[Sent] = []

    def _guess(self, tokens: np.ndarray, count: int) -> np.ndarray:
        """Right ones now and then, of any number."""
        known = tokens.tolist()
        assert -1 not in known, "it is asked for a guess where not all tokens are known"
        for _ in range(self._luck.choice([count, count, self._luck.randint(0, count)])):
            right = next_token([known if w is None else known[max(0, len(known) - w) :] for w in self.windows])
            known.append(right if self._luck.random() < self._guessed_right else self._luck.randrange(VOCAB))
        return np.array(known[len(tokens) :], np.int32)

    # ------------------------------------------------------------------ what frontends do

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 4,
        *,
        frontend: int = 0,
        stop: Sequence[int] = (),
        min_tokens: int = 0,
        priority: int = 0,
        output: Sequence[int] = (),
        salt: str = "",
        suspect: bool = False,
    ) -> Key:
        handle = len(self.messages)
        sampling = Sampling(max_tokens, min_tokens=min_tokens, stop_token_ids=list(stop))
        message = AddRequest(handle, str(handle), list(prompt), sampling, priority, list(output), salt)
        self.now += 1.0
        key = self.keys[frontend, handle] = next(self._suspect_keys) if suspect else 1_000_000 + handle
        self.scheduler.add(Request(message, frontend, self.now, self.max_model_len, key=key))
        self.messages[frontend, handle] = message
        return frontend, handle

    def abort(self, *keys: Key) -> None:
        self.aborted.update(keys)
        for frontend, handle in keys:
            self._forget_suspect((frontend, handle))
            self.scheduler.abort(frontend, [handle])

    def set_credit(self, frontend: int, given: bool) -> None:
        (self.slow.discard if given else self.slow.add)(frontend)
        self.scheduler.set_credit(frontend, given)

    def pause(self, mode: PauseMode, clear_cache: bool = False) -> None:
        if mode == "abort":
            gone = set(self._requests())
            self.aborted |= gone
            for key in gone:
                self._forget_suspect(key)
        self.scheduler.pause(mode, clear_cache)

    # ------------------------------------------------------------------ the loop

    def launch(self) -> Step | None:
        """Schedule one step and run it; its tokens are not told yet."""
        ran = {key for key, r in self._requests().items() if r.admitted_at is not None}
        step = self.scheduler.schedule()
        if step is not None:
            self._check_step(step, ran)
            assert len(set(step.slots.tolist())) == len(step.slots), "a slot stands twice in a step"
            assert (step.counts > 0).all()
            assert step.num_tokens == step.counts.sum() <= self.budget, "the budget is exceeded"
            sent: Counter[Key] = Counter()
            for slot, count in zip(step.slots.tolist(), step.counts.tolist(), strict=True):
                request = self.scheduler._running[slot]
                sent[request.frontend, request.handle] += count
            by_frontend: Counter[int] = Counter()
            for (frontend, _), count in sent.items():
                by_frontend[frontend] += count
            self.steps.append(Sent(step.num_tokens, by_frontend, dict(sent)))
            if self.lacks_memory(step):
                self.model.begin(step)
                while self.in_flight:
                    self.retire()
                self.scheduler.undo(step, OutOfMemoryError("as ordered"))
            else:
                self.in_flight.append((step, self.model.execute(step)))
        self.check()
        return step

    def _requests(self) -> dict[Key, Request]:
        return {(f.id, handle): r for f in self.scheduler.fair for handle, r in f.requests.items()}

    def _check_step(self, step: Step, ran: set[Key]) -> None:
        """Suspects run alone, and nobody does who may not run."""
        requests = [self.scheduler._running[slot] for slot in step.slots.tolist()]
        assert step.keys.tolist() == [r.key for r in requests]
        assert not any(other.solo for other, _ in self.in_flight), "something was launched beside a suspect"
        assert step.solo == any(r.key in self.suspects for r in requests)
        if step.solo:
            assert len(requests) == 1, "a suspect runs with others"
            assert not self.in_flight, "a suspect runs beside a step in flight"
        assert not any(r.frontend in self.slow for r in requests), "something is computed for a frontend without credit"
        assert self.scheduler.paused in (None, "wait"), "something is computed during a pause"
        if self.scheduler.paused == "wait":
            began = ran | {key for key, message in self.messages.items() if message.output_token_ids}
            assert all((r.frontend, r.handle) in began for r in requests), "a request begins during a pause"
        if not self.in_flight:
            for request, position in zip(requests, step.positions.tolist(), strict=True):
                key = request.frontend, request.handle
                assert position == len(self.messages[key].output_token_ids) + len(self.outputs[key])

    def _forget_suspect(self, key: Key) -> None:
        if key in self._requests():
            self.suspects.discard(self.keys[key])

    def retire(self) -> None:
        """Take in the oldest step in flight."""
        step, sampled = self.in_flight.popleft()
        self.model.retire(step)
        self._tell(self.scheduler.update(step, sampled))
        self.check()

    def step(self) -> bool:
        """One round of the core's loop; False if it brought nothing and nothing is in flight."""
        self.now += 0.001
        launched = False
        while len(self.in_flight) < self.depth and self.launch() is not None:
            launched = True
        if self.in_flight:
            self.retire()
            return True
        notices = self.scheduler.take_notices()
        self._tell(notices)
        return bool(notices) or launched

    def run(self, steps: int = 5_000) -> None:
        """Until nothing is left to do."""
        while self.scheduler.has_work or self.in_flight:
            assert steps, "the scheduler is stuck"
            steps -= 1
            moved = self.step()
            assert moved or not self.scheduler.has_work, "there is work, and nothing moves"

    def _tell(self, outputs: dict[int, Outputs]) -> None:
        for frontend, out in outputs.items():
            for started in out.started:
                key = frontend, started.handle
                assert key not in self.started, "started twice"
                assert not self.outputs.get(key), "a token came before Started"
                assert started.handle in out.handles, "Started comes with the first token"
                self.started[key] = started
            for handle, token in zip(out.handles, out.token_ids, strict=True):
                resumed = self.messages[frontend, handle].output_token_ids
                assert (frontend, handle) in self.started or resumed, "a token without Started"
                assert (frontend, handle) not in self.finished, "a token after the end"
                if len(resumed) + len(self.outputs[frontend, handle]) >= self._accused_at:
                    self.suspects.discard(self.keys[frontend, handle])
                self.outputs[frontend, handle].append(token)
            for finished in out.finished:
                assert (frontend, finished.handle) not in self.finished, "ended twice"
                self.finished[frontend, finished.handle] = finished

    # ------------------------------------------------------------------ what must hold

    @property
    def stats(self) -> Stats:
        return self.scheduler.stats()

    def check(self) -> None:
        """Invariant 1, over the blocks of running requests and those that wait for a step to retire."""
        listed = Counter(b for r in self.scheduler._running.values() for table in r.tables for b in table)
        listed.update(block for _, blocks in self.kv._deferred for block in blocks)
        del listed[NULL_BLOCK]
        check_pool(self.kv.pool, listed)
        if self.kv.host is not None:
            check_host(self.kv.host)
        frontends = list(self.scheduler.fair)
        assert self.stats.num_waiting == sum(len(f.requests) - f.num_running for f in frontends), "miscounted"
        for frontend in frontends:
            queued = sum(len(r.tokens) for r in frontend.requests.values() if r.queued)
            assert frontend.waiting_tokens == queued, "the tokens that wait are miscounted"
        assert self.told_suspects == self.suspects
        held: Counter[int] = Counter()
        for request in self.scheduler._running.values():
            held[request.frontend] += sum(b != NULL_BLOCK for table in request.tables for b in table)
        assert +self.kv.held == held, "the blocks of a frontend are miscounted"

    def check_outputs(self) -> None:
        """Invariants 2 and 3: every request ended exactly once, with exactly the tokens it has without a scheduler.
        Those aborted may have ended earlier."""
        assert set(self.finished) == set(self.messages)
        for key, message in self.messages.items():
            output, reason = expected_output(message, self.windows, self.max_model_len)
            if key in self.aborted and self.finished[key].reason == "abort":
                assert self.outputs[key] == output[: len(self.outputs[key])]
            else:
                assert (self.outputs[key], self.finished[key].reason) == (output, reason)
        assert self.kv.pool.num_in_use == 0, "blocks are left behind"
        assert self.stats.num_running == self.stats.num_waiting == 0


def blocks_for(windows: Windows, block_size: int, num_tokens: int, budget: int) -> int:
    """Blocks that one request holds at most; written again here, not to trust the one under test."""
    most = 0
    for window in windows:
        full = -(-num_tokens // block_size)
        most += full if window is None else min(full, -(-(window - 1 + budget) // block_size) + 1)
    return most


def count_look_ups(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fills up with the requests whose prefix is looked up in the cache."""
    looks: list[Any] = []
    find = engine.kv.find_prefix

    def counted(request: Any) -> int:
        looks.append(request)
        return find(request)

    monkeypatch.setattr(engine.kv, "find_prefix", counted)
    return looks


class StandInExecutor:
    """The stand-in model as the executor of an `EngineCore`. `launched` is told each step before it is computed."""

    accepts_embeddings = False
    max_model_len = 64
    num_host_blocks = 0
    asynchronous = False

    def warm_up(self) -> None:
        pass

    def sleep(self, level: int) -> None:
        self.slept.append(level)

    def wake(self, weights: bool, kv_cache: bool) -> None:
        self.slept.append((weights, kv_cache))

    def release_memory(self) -> None:
        pass

    def __init__(self, config: EngineConfig, launched: Callable[[Step], None] = lambda step: None) -> None:
        self.slept: list[Any] = []
        cache, slots = config.cache_config, config.scheduler_config.max_num_seqs
        self.num_blocks = cache.num_gpu_blocks_override or 200
        self.layout = SimpleNamespace(groups=[KVGroup(None, ())])
        self._model = StandInModel((None,), cache.block_size, self.num_blocks, slots, self.max_model_len)
        self._launched = launched

    def facts(self) -> ModelFacts:
        return ModelFacts(VOCAB, 8, self.max_model_len, "float32")

    def explain(self) -> list[str]:
        return []

    def execute(self, step: Step) -> tuple[Step, np.ndarray]:
        self._model.begin(step)
        self._launched(step)
        return step, self._model.execute(step)

    def sample(self, launched: tuple[Step, np.ndarray]) -> tuple[Step, np.ndarray]:
        return launched

    def tokens(self, sampled: tuple[Step, np.ndarray]) -> np.ndarray:
        self._model.retire(sampled[0])
        return sampled[1]

    def logprobs(self, sampled: tuple[Step, np.ndarray]) -> tuple[list[Any], list[Any]]:
        return [], []


def make_core(
    launched: Callable[[Step], None] = lambda step: None, service: ServiceConfig | None = None, **rest: Any
) -> EngineCore:
    """An `EngineCore` over the stand-in model. `rest`: fields of `SchedulerConfig`, and what else it takes."""
    more = {name: rest.pop(name) for name in ("journal", "suspects", "quarantined") if name in rest}
    config = EngineConfig(scheduler_config=SchedulerConfig(**rest), service_config=service or ServiceConfig())
    return EngineCore(config, lambda config: StandInExecutor(config, launched), **more)


def message(handle: int, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, **fields: Any) -> AddRequest:
    return AddRequest(handle, str(handle), list(prompt), Sampling(max_tokens), **fields)


def run_core(core: EngineCore, steps: int = 1000) -> dict[Key, tuple[list[int], Finished]]:
    """Step until there is nothing to do; the tokens and the end of every request that ended."""
    tokens: dict[Key, list[int]] = defaultdict(list)
    ended: dict[Key, tuple[list[int], Finished]] = {}
    while core.has_work:
        assert steps, "the core is stuck"
        steps -= 1
        for frontend, out in core.step().items():
            for handle, token in zip(out.handles, out.token_ids, strict=True):
                tokens[frontend, handle].append(token)
            for finished in out.finished:
                key = frontend, finished.handle
                assert key not in ended, "ended twice"
                ended[key] = tokens[key], finished
    return ended
