"""A scheduler over a stand-in model, for tests of invariants that hold for any schedule.

The stand-in's next token is a hash of all tokens that the model would see, *read back through the block tables*: if a
block is freed too early, shared wrongly or listed in the wrong place, the output changes. Its recurrent layers keep a
running hash in state slots, which each token updates in order: if a state is restored too late, or belongs to another
prefix, the output changes, too.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial, reduce
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from invariants import check_host, check_pool
from mainspring.core.features.encoder_cache import EncoderCache
from mainspring.core.features.pipeline import Pipeline
from mainspring.core.features.speculation import Speculation
from mainspring.core.loop import EngineCore
from mainspring.core.memory.block_pool import NULL_BLOCK
from mainspring.core.memory.cache_manager import CacheManager
from mainspring.core.memory.home_caches import HomeCaches
from mainspring.core.memory.updates import NO_COPIES, NO_TABLES, LayerGroup
from mainspring.core.plan.control import DropMedia, KeepMedia, MediaFacts, WorkerFacts
from mainspring.core.plan.need import cuts_are_ruled
from mainspring.core.plan.request import Request
from mainspring.core.plan.scheduler import Scheduler
from mainspring.core.plan.step import IN_FLIGHT, Encoded, NewSequence, Step, StepPlan, StepResult
from mainspring.ipc.config import EngineConfig, MultiModalConfig, SchedulerConfig, ServiceConfig
from mainspring.ipc.messages import AddRequest, Finished, MediaItem, ModelFacts, Outputs, Sampling, Started, Stats

VOCAB = 50
Windows = Sequence[int | LayerGroup | None]  # per group: a window size, None for full attention, or a recurrent group
Key = tuple[int, int]  # (frontend, handle)


def group_of(window: int | LayerGroup | None) -> LayerGroup:
    if isinstance(window, LayerGroup):
        return window
    return LayerGroup("full" if window is None else "windowed", window=window)


def advance(state: int, token: int) -> int:
    """The state of the stand-in's recurrent layers after one more token."""
    return ((state ^ token) * 6364136223846793005 + 1442695040888963407) % 2**64


def seen_by(window: int | LayerGroup | None, tokens: Sequence[int]) -> Sequence[int]:
    """The tokens or the state that a group's layers see when all of `tokens` are computed."""
    if isinstance(window, LayerGroup):
        return split(reduce(advance, tokens, 0))
    return tokens if window is None else tokens[max(0, len(tokens) - window) :]


def split(state: int) -> list[int]:
    """A state as a list of numbers for `next_token`."""
    return [state >> shift & 0xFFFF for shift in (0, 16, 32, 48)]


def next_token(seen: Sequence[Sequence[int]], banned: Collection[int] = ()) -> int:
    """The next token if each KV group sees these tokens."""
    digest = hashlib.blake2b(digest_size=8)
    for tokens in seen:
        digest.update(np.asarray(tokens, np.int32).tobytes() + b"|")
    token = int.from_bytes(digest.digest(), "little") % VOCAB
    while token in banned:
        token = (token + 1) % VOCAB
    return token


def row_of(seed: int, index: Any) -> Any:
    """What the stand-in's layers see of a media item in the place of its placeholder of this index."""
    return 1000 + 1000 * seed + index


def media_item(seed: int, offset: int, length: int) -> MediaItem:
    return MediaItem(seed.to_bytes(16, "little"), "image", offset, length)


def expected_output(message: AddRequest, windows: Windows, max_model_len: int) -> tuple[list[int], str]:
    """The output and the finish reason, computed without blocks, batches or steps."""
    tokens = message.prompt_token_ids + message.output_token_ids
    for one in message.media:
        rows = row_of(int.from_bytes(one.digest, "little"), np.arange(one.length)).tolist()
        tokens[one.offset : one.offset + one.length] = rows
    stops, sampling, prompt = message.sampling.stop_token_ids, message.sampling, len(message.prompt_token_ids)
    output: list[int] = []
    while True:
        seen = [seen_by(window, tokens) for window in windows]
        token = next_token(seen, stops if len(tokens) < prompt + sampling.min_tokens else ())
        output.append(token)
        tokens = [*tokens, token]
        if token in stops:
            return output, "stop"
        if len(tokens) >= min(prompt + sampling.max_tokens, max_model_len):
            return output, "length"


class StandInModel:
    """Runs steps as the model runner does, with its own copy of the block tables and of the last tokens, by slot."""

    def __init__(
        self,
        windows: Windows,
        block_size: int,
        num_blocks: int,
        slots: int,
        max_model_len: int,
        host_blocks: int = 0,
        homes: int = 1,
    ) -> None:
        self._blocks_of_home, self._homes = num_blocks, np.zeros(slots, np.int64)
        num_blocks *= homes
        self._windows = windows
        self._size = block_size
        columns = -(-max_model_len // block_size)
        self._tables = np.zeros((len(windows), slots, columns), np.int64)
        self._tokens = np.full((len(windows), num_blocks, block_size), -7)
        self._positions = np.full((len(windows), num_blocks, block_size), -7)
        self._host_tokens = np.full((len(windows), host_blocks, block_size), -9)
        self._host_positions = np.full((len(windows), host_blocks, block_size), -9)
        self._copied = -1  # id of the last step whose block copies were done
        self._states: dict[int, tuple[int, int]] = {0: (0, 0)}  # by state slot: tokens computed, and their hash
        self._host_states: dict[int, tuple[int, int]] = {}  # the same, by host slot
        self._row_states: dict[int, list[int]] = {}  # by slot: the state after each token of its row in this step
        self._last = np.zeros(slots, np.int64)
        self._sequences: dict[int, NewSequence] = {}
        self._arrays: dict[int, int] = {}  # by number of a media item: its seed
        self.encoded: dict[int, int] = {}  # the same, of those that a step has encoded
        self._in_flight: deque[tuple[int, dict[int, tuple[NewSequence, frozenset[int]]]]] = deque()

    def begin(self, step: StepPlan) -> None:
        """The part of a step that runs before memory can be lacking."""
        if step.id != self._copied:
            self._copy(step)
        group, slot, column, block = step.tables
        self._tables[group, slot, column] = block
        for sequence in step.admitted:
            self._sequences[sequence.slot] = sequence
            self._homes[sequence.slot] = -1
            assert all(one.number in self.encoded for one in sequence.media), "a slot is given before media are encoded"

    def control(self, record: Any) -> None:
        if isinstance(record, KeepMedia):
            assert record.number not in self._arrays, "a number is used twice"
            self._arrays[record.number] = int(record.arrays[0][0])
        elif isinstance(record, DropMedia):
            del self._arrays[record.number]
            self.encoded.pop(record.number, None)

    def encode(self, step: StepPlan) -> None:
        for number in step.encodes.tolist():
            assert number not in self.encoded, "an item is encoded twice"
            self.encoded[number] = self._arrays[number]

    def _copy(self, step: StepPlan) -> None:
        self._copied = step.id
        for block, slot in step.copies.saves:
            self._host_tokens[:, slot] = self._tokens[:, block]
            self._host_positions[:, slot] = self._positions[:, block]
        named = {block for _, others in self._in_flight for _, blocks in others.values() for block in blocks}
        for block, slot in step.copies.loads:
            assert block not in named, "a block is loaded while a step that names it is in flight"
            self._tokens[:, block] = self._host_tokens[:, slot]
            self._positions[:, block] = self._host_positions[:, slot]
        for state, slot in step.states.host.saves:
            self._host_states[slot] = self._states[state]
        for state, slot in step.states.host.loads:
            assert state > 0, "the initial state is written"
            self._states[state] = self._host_states[slot]
        self._copy_states(step.states.restores)
        self._copy_states(step.states.backups)

    def _copy_states(self, copies: np.ndarray) -> None:
        assert copies.dtype == np.int32
        assert copies.shape == (2, copies.shape[1])
        for source, target in copies.T.tolist():
            assert target > 0, "the initial state is written"
            self._states[target] = self._states[source]

    def execute(self, step: StepPlan) -> np.ndarray:
        """Run `step`; → the sampled tokens."""
        self.begin(step)
        self.encode(step)
        ends = np.cumsum(step.counts)
        rows = [
            (int(slot), int(start), step.token_ids[end - count : end].astype(np.int64))
            for slot, start, count, end in zip(step.slots, step.starts, step.counts, ends, strict=True)
        ]
        homes = step.homes if step.homes.size else np.zeros_like(step.slots)
        known = self._homes[step.slots]
        assert ((known == -1) | (known == homes)).all(), "a running request changed its home"
        self._homes[step.slots] = homes
        self._check_reuse(step.id, rows)
        for slot, start, tokens in rows:
            self._write(slot, start, tokens)
        self._copy_states(step.states.snapshots)
        which, back = step.choices()
        return np.array(
            [
                self._sample(slot, start, len(tokens) - before)
                for (slot, start, tokens), before in zip([rows[row] for row in which], back.tolist(), strict=True)
            ],
            np.int64,
        )

    def retire(self, step: StepPlan) -> None:
        assert self._in_flight[0][0] == step.id
        self._in_flight.popleft()

    def _blocks(self, group: int, slot: int, columns: np.ndarray) -> np.ndarray:
        """Blocks of a sequence's home, where each is another one."""
        blocks = self._tables[group, slot, columns]
        if not (home := self._homes[slot]):
            return blocks
        return np.where(blocks == NULL_BLOCK, NULL_BLOCK, blocks + home * self._blocks_of_home)

    def _first_seen(self, window: int | None, position: int) -> int:
        return 0 if window is None else max(0, position - window + 1)

    def _write(self, slot: int, start: int, tokens: np.ndarray) -> None:
        tokens[tokens == IN_FLIGHT] = self._last[slot]
        positions = np.arange(start, start + len(tokens))
        for one in self._sequences[slot].media:
            inside = (positions >= one.offset) & (positions < one.offset + one.length)
            assert not inside.any() or one.number in self.encoded, "a row of an item that is not encoded"
            tokens[inside] = row_of(self.encoded.get(one.number, 0), positions[inside] - one.offset)
        for group, window in enumerate(self._windows):
            if isinstance(window, LayerGroup):
                self._advance_state(slot, start, tokens)
                continue
            blocks = self._blocks(group, slot, positions // self._size)
            assert (blocks != NULL_BLOCK).all(), "a token is written to the null block"
            self._tokens[group, blocks, positions % self._size] = tokens
            self._positions[group, blocks, positions % self._size] = positions

    def _advance_state(self, slot: int, start: int, tokens: np.ndarray) -> None:
        position, state = self._states[1 + slot]
        assert position == start, f"the state has seen {position} tokens where the row begins at {start}"
        self._row_states[slot] = list(accumulate(tokens.tolist(), advance, initial=state))[1:]
        self._states[1 + slot] = start + len(tokens), self._row_states[slot][-1]

    def _sample(self, slot: int, start: int, count: int) -> int:
        end = start + count
        seen: list[Sequence[int]] = []
        for group, window in enumerate(self._windows):
            if isinstance(window, LayerGroup):
                seen.append(split(self._row_states[slot][count - 1]))
                continue
            positions = np.arange(self._first_seen(window, start), end)  # visible to queries up to this one
            blocks = self._blocks(group, slot, positions // self._size)
            read = self._positions[group, blocks, positions % self._size]
            assert (read == positions).all(), f"group {group} reads positions {read} for {positions}"
            tokens = self._tokens[group, blocks, positions % self._size]
            seen.append(tokens[self._first_seen(window, end - 1) - int(positions[0]) :])
        sequence = self._sequences[slot]
        unstoppable = end < sequence.prompt_len + sequence.sampling.min_tokens
        self._last[slot] = next_token(seen, sequence.sampling.stop_token_ids if unstoppable else ())
        return int(self._last[slot])

    def _check_reuse(self, step: int, rows: list[tuple[int, int, np.ndarray]]) -> None:
        """Check that a step writes to no slot or block that a step in flight uses for another request."""
        mine: dict[int, tuple[NewSequence, frozenset[int]]] = {}
        for slot, start, tokens in rows:
            named, written = set(), set()
            for group, window in enumerate(self._windows):
                if isinstance(window, LayerGroup):
                    continue  # states are copied in the order of steps, so several steps may name the same one
                first, end = self._first_seen(window, start) // self._size, (start + len(tokens) - 1) // self._size + 1
                listed = self._blocks(group, slot, np.arange(first, end)).tolist()
                named.update(listed)
                written.update(listed[start // self._size - first :])
            request = self._sequences[slot]
            for _, others in self._in_flight:
                for other_slot, (other, blocks) in others.items():
                    if other is not request:
                        assert other_slot != slot, "a slot is reused while a step that names it is in flight"
                        assert not blocks & written, "a block is reused while a step that names it is in flight"
            mine[slot] = request, frozenset(named)
        self._in_flight.append((step, mine))


class Sent(NamedTuple):
    """The outputs of a step, by frontend."""

    num_tokens: int
    by_frontend: Counter[int]
    requests: dict[Key, int]  # tokens computed for each request


class Engine:
    """The loop of the engine core over the stand-in. It records all outputs and checks invariants 1 and 2 at every
    step.

    Args:
        depth: steps in flight.
        weights: of the frontends.
        num_blocks: without the null block; none: twice the blocks of the longest request.
        suspects: how many requests may be added as suspects.
        accused_at: output position that a suspect must pass to be cleared.
        host_blocks: number of blocks in host memory.
        guesses: maximum draft tokens of a request in a step; 0: no speculation.
        guessed_right: probability that a draft token is right.
        most_steps: of one plan, which sometimes ends early; with one step in flight.
        stages: of a pipeline.
        media: facts of a model whose prompts may have media; each item is one array, with its seed.
        media_bytes: of the encoder's cache.
        homes: ranks that each keep requests of their own, in `num_blocks` blocks.
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
        most_steps: int = 1,
        stages: int = 1,
        media: MediaFacts | None = None,
        media_bytes: int = 1 << 30,
        homes: int = 1,
        **limits: Any,
    ) -> None:
        limits = {"max_num_batched_tokens": 32, "max_num_seqs": 8, **limits}
        self.budget = limits["max_num_batched_tokens"]
        self.windows, self.max_model_len, self.depth = windows, max_model_len, depth
        if num_blocks is None:
            num_blocks = 2 * blocks_for(windows, block_size, max_model_len, self.budget)
        groups = [group_of(window) for window in windows]
        make = partial(CacheManager, groups, block_size, num_blocks + 1, prefix_caching, host_blocks)
        self.kv: Any = make() if homes == 1 else HomeCaches(homes, make)
        self.caches: list[CacheManager] = [self.kv] if homes == 1 else self.kv._homes
        self.now = 0.0
        self.suspects = set(range(suspects))  # keys; all other requests have larger keys
        self.told_suspects = set(self.suspects)  # remaining suspects, as reported by the scheduler
        self._accused_at = accused_at
        self._suspect_keys = iter(range(suspects))
        config = SchedulerConfig(**limits)
        speculation = Speculation(guesses, self._guess) if guesses else None
        self.scheduler = Scheduler(
            config,
            self.kv,
            max_model_len,
            speculation,
            clock=lambda: self.now,
            suspects=dict.fromkeys(self.suspects, accused_at),
            on_suspects=lambda keys: setattr(self, "told_suspects", set(keys)),
        )
        if stages > 1:
            self.scheduler.attach(Pipeline(stages, self.scheduler.state.running, self.scheduler.fair))
        self.media: EncoderCache | None = None
        if media is not None:
            limit, suspected = (
                MultiModalConfig(mm_encoder_cache_gb=media_bytes / (1 << 30)),
                self.scheduler.state.suspects,
            )
            self.media = EncoderCache(
                media, limit, self.budget, suspected.keys, lambda record: self.model.control(record)
            )
            self.scheduler.serve_media(self.media)
        self.media_bytes = media_bytes
        self.coming: list[tuple[Request, list[MediaItem]]] = []  # requests that wait for arrays
        state = self.scheduler.state
        state.most_steps, state.hands_out, state.step_seconds = most_steps if depth == 1 else 1, True, 1e-3
        self.encoding: dict[int, int] = {}  # by number of an item: the step that encoded it last
        self.encodes: Callable[[int], Encoded] = lambda number: Encoded(number, 10)
        self.num_several = 0  # plans of several steps
        seats = limits["max_num_seqs"]
        self._guessed_right, self._luck = guessed_right, random.Random(1)
        self.model = StandInModel(windows, block_size, num_blocks + 1, seats, max_model_len, host_blocks, homes)
        for frontend, weight in enumerate(weights):
            self.scheduler.fair.register(frontend, weight)
        self.in_flight: deque[tuple[Step, np.ndarray]] = deque()
        self.lacks_memory: Callable[[StepPlan], bool] = lambda plan: False
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
        """Draft tokens, each right with probability `guessed_right`; sometimes fewer than `count`."""
        known = tokens.tolist()
        assert -1 not in known, "it is asked for a guess where not all tokens are known"
        for _ in range(self._luck.choice([count, count, self._luck.randint(0, count)])):
            right = next_token([seen_by(window, known) for window in self.windows])
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
        media: Sequence[MediaItem] = (),
    ) -> Key:
        handle = len(self.messages)
        sampling = Sampling(max_tokens, min_tokens=min_tokens, stop_token_ids=list(stop))
        message = AddRequest(
            handle,
            str(handle),
            list(prompt),
            sampling,
            priority,
            list(output),
            salt,
            patient=handle % 3 > 0,
            media=list(media),
        )
        self.now += 1.0
        key = self.keys[frontend, handle] = next(self._suspect_keys) if suspect else 1_000_000 + handle
        request = Request(message, frontend, self.now, self.max_model_len, key=key)
        waits = self.media.prepare(request, message.media) if self.media is not None else []
        self.scheduler.add(request, ready=not waits)
        if waits:
            self.coming.append((request, message.media))
        self.messages[frontend, handle] = message
        return frontend, handle

    def abort(self, *keys: Key) -> None:
        self.aborted.update(keys)
        for frontend, handle in keys:
            self._forget_suspect((frontend, handle))
            self.scheduler.abort(frontend, [handle])

    def bring(self) -> None:
        """A media worker brings the arrays that a request waits for."""
        assert self.media is not None
        request, media = self.coming.pop(0)
        for digest in self.media.items.offer([one.digest for one in media]):
            seed = np.array([int.from_bytes(digest, "little")])
            assert self.media.items.put([seed], digest, "image", ["pixel_values"]).done()
        self.scheduler.queue(request)

    def set_credit(self, frontend: int, given: bool) -> None:
        (self.slow.discard if given else self.slow.add)(frontend)
        self.scheduler.set_credit(frontend, given)

    def pause(self, mode: str, clear_cache: bool = False) -> None:
        if mode == "abort":
            gone = set(self._requests())
            self.aborted |= gone
            for key in gone:
                self._forget_suspect(key)
            self.scheduler.abort_all()
        self.scheduler.pause("wait" if mode == "wait" else "keep")
        if clear_cache:
            self.scheduler.reset_prefix_cache()

    # ------------------------------------------------------------------ the loop

    def launch(self) -> Step | None:
        """Schedule one step and run it; its tokens are not sent yet."""
        ran = {key for key, r in self._requests().items() if r.admitted_at is not None}
        step = self.scheduler.schedule()
        if step is not None:
            self._check_step(step, ran)
            plan = step.plan
            assert len(set(plan.slots.tolist())) == len(plan.slots), "a slot stands twice in a step"
            assert (plan.counts > 0).all()
            assert plan.num_tokens == plan.counts.sum() <= self.budget, "the budget is exceeded"
            if self.media is not None:
                self._check_media(plan)
            sent: Counter[Key] = Counter()
            for slot, count in zip(plan.slots.tolist(), plan.counts.tolist(), strict=True):
                request = self.scheduler.state.running.requests[slot]
                sent[request.frontend, request.handle] += count
            by_frontend: Counter[int] = Counter()
            for (frontend, _), count in sent.items():
                by_frontend[frontend] += count
            self.steps.append(Sent(plan.num_tokens, by_frontend, dict(sent)))
            self.encoding.update(dict.fromkeys(plan.encodes.tolist(), plan.id))
            if self.lacks_memory(plan):
                self.model.begin(plan)
                self.model.encode(plan)
                while self.in_flight:
                    self.retire()
                lacking = result_of(plan, [], lack="as ordered", encoded=self._encoded(plan))
                self._tell(self.scheduler.update(step, lacking))
            else:
                self.in_flight.append((step, self.model.execute(plan)))
        self.check()
        return step

    def _requests(self) -> dict[Key, Request]:
        return {(f.id, handle): r for f in self.scheduler.fair for handle, r in f.requests.items()}

    def _check_step(self, step: Step, ran: set[Key]) -> None:
        """Check that a suspect runs alone and that no request runs that may not."""
        requests = [self.scheduler.state.running.requests[slot] for slot in step.plan.slots.tolist()]
        waiting = self._waiting_for(step.plan) if self.media is not None else []
        assert step.keys.tolist() == [r.key for r in (*requests, *waiting)]
        assert not any(other.solo for other, _ in self.in_flight), "something was launched beside a suspect"
        assert step.solo == any(r.key in self.suspects for r in (*requests, *waiting))
        if step.solo:
            assert len(requests) + len(step.plan.encodes) == 1, "a suspect runs with others"
            assert not self.in_flight, "a suspect runs beside a step in flight"
        assert not any(r.frontend in self.slow for r in requests), "something is computed for a frontend without credit"
        assert self.scheduler.paused in (None, "wait"), "something is computed during a pause"
        if self.scheduler.paused == "wait":
            began = ran | {key for key, message in self.messages.items() if message.output_token_ids}
            assert all((r.frontend, r.handle) in began for r in requests), "a request begins during a pause"
        if cuts_are_ruled(self.scheduler.state):  # else no piece of the smallest size fits in a step
            chunk = max(w.chunk for w in self.windows if isinstance(w, LayerGroup))
            for request, end in zip(requests, (step.plan.starts + step.plan.counts).tolist(), strict=True):
                assert end >= request.prompt_len or end % chunk == 0, "a prompt is cut inside of a chunk"
        if not self.in_flight:
            for request, position in zip((*requests, *waiting), step.output_index.tolist(), strict=True):
                key = request.frontend, request.handle
                assert position == len(self.messages[key].output_token_ids) + len(self.outputs[key])

    def _waiting_for(self, plan: StepPlan) -> list[Request]:
        assert self.media is not None
        items = [self.media._numbers[number] for number in plan.encodes.tolist()]
        users = sorted((user for item in items for user in item.users), key=lambda r: r.key not in self.suspects)
        return list(dict.fromkeys(users))[: len(self.scheduler.state.rows.alive)]

    def _check_media(self, plan: StepPlan) -> None:
        """Check the budget of the encoder, and that no span is cut."""
        assert self.media is not None
        lengths = [self.media._numbers[number].length for number in plan.encodes.tolist()]
        assert sum(lengths) <= self.budget or len(lengths) == 1, "too much is encoded in a step"
        for slot, start, count in zip(plan.slots.tolist(), plan.starts.tolist(), plan.counts.tolist(), strict=True):
            for first, end in self.scheduler.state.running.requests[slot].spans:
                assert not first < start < end, "a step begins inside of a span"
                assert not first < start + count < end, "a step ends inside of a span"

    def _forget_suspect(self, key: Key) -> None:
        if key in self._requests():
            self.suspects.discard(self.keys[key])

    def retire(self) -> None:
        """Take in the oldest step in flight."""
        step, sampled = self.in_flight.popleft()
        self.model.retire(step.plan)
        if step.plan.num_steps > 1:
            return self._retire_several(step, sampled)
        self._tell(self.scheduler.update(step, result_of(step.plan, sampled, encoded=self._encoded(step.plan))))
        self.check()

    def _encoded(self, plan: StepPlan) -> list[Encoded]:
        encoded = [self.encodes(number) for number in plan.encodes.tolist()]
        for one in encoded:
            if one.error:
                self.model.encoded.pop(one.number, None)
        return encoded

    def _retire_several(self, step: Step, sampled: np.ndarray) -> None:
        plan, stops, wanted = step.plan, set(map(tuple, step.plan.stops.tolist())), self._luck.choice([1, 2, 99, 99])
        self.num_several += 1
        assert not plan.states.snapshots.size, "a state is kept in the middle of several steps"
        made = [sampled]
        while len(made) < min(plan.num_steps, wanted) and not stops & set(enumerate(made[-1].tolist())):
            starts, ids = plan.starts + len(made), np.full_like(plan.token_ids, IN_FLIGHT)
            later = replace(plan, starts=starts, token_ids=ids, admitted=[], tables=NO_TABLES, copies=NO_COPIES)
            made.append(self.model.execute(later))
            self.model.retire(later)
        for first in range(len(made)) if plan.apart else [0]:
            tokens = made[first] if plan.apart else np.concatenate(made)
            count = 1 if plan.apart else len(made)
            more = first + count < len(made)
            result = result_of(plan, tokens, first=first, num_steps=count, more=more)
            self._tell(self.scheduler.update(step, result))
            self.check()

    def step(self) -> bool:
        """One round of the core's loop; False if it produced nothing and no step is in flight."""
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
        """Step until no work is left."""
        while self.scheduler.has_work or self.in_flight or self.coming:
            assert steps, "the scheduler is stuck"
            steps -= 1
            if self.coming and not steps % 3:
                self.bring()
            moved = self.step() or bool(self.coming)
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
        """Check invariant 1 over the blocks of running requests and the blocks that are freed when a step retires."""
        for home, cache in enumerate(self.caches):
            there = [r for r in self.scheduler.state.running.requests.values() if r.home == home]
            listed = Counter(chain.from_iterable(table for r in there for table in r.tables))
            listed.update(chain.from_iterable(blocks for _, blocks in cache._deferred))
            del listed[NULL_BLOCK]
            check_pool(cache.pool, listed)
            if cache.host is not None:
                check_host(cache.host)
        if (state := self.kv.recurrent) is not None:
            running = set(self.scheduler.state.running.requests.values())
            assert state._taken.keys() | state._newest.keys() <= running, "a snapshot is kept for a request that left"
            snapshots = [*chain.from_iterable(state._taken.values()), *state._newest.values()]
            check_pool(state.snapshots, Counter([*(snapshot for _, snapshot in snapshots), *state._held]))
            if state.host is not None:
                check_host(state.host)
        frontends = list(self.scheduler.fair)
        assert self.stats.num_waiting == sum(len(f.requests) - f.num_running for f in frontends), "miscounted"
        for frontend in frontends:
            queued = sum(len(r.tokens) for r in frontend.requests.values() if r.queued)
            assert frontend.waiting_tokens == queued, "the tokens that wait are miscounted"
        assert self.told_suspects == self.suspects
        held: Counter[int] = Counter()
        for request in self.scheduler.state.running.requests.values():
            held[request.frontend] += sum(len(table) - table.count(NULL_BLOCK) for table in request.tables)
        assert +self.kv.blocks_used == held, "the blocks of a frontend are miscounted"
        if (media := self.media) is not None:
            items = list(media.items)
            assert media._num_bytes == sum(item.num_bytes for item in items), "bytes of encoded items are miscounted"
            row_bytes = media._facts.row_bytes
            largest = max((sum(one.length for one in m.media) for m in self.messages.values()), default=0) * row_bytes
            assert media._num_bytes <= max(self.media_bytes, largest), "the encoder's cache is too full"
            assert media.items._array_bytes == sum(item.array_bytes for item in items), "bytes of arrays are miscounted"
            assert set(media._numbers) == set(self.model._arrays), "the worker has other items"
            named = {digest for r in self._requests().values() for digest in (one.digest for one in r.media)}
            assert named == {item.digest for item in items if item.users}, "users are miscounted"

    def check_outputs(self) -> None:
        """Check invariants 2 and 3: every request ended exactly once, with the tokens of `expected_output`. Aborted
        requests may have ended earlier."""
        assert set(self.finished) == set(self.messages)
        for key, message in self.messages.items():
            output, reason = expected_output(message, self.windows, self.max_model_len)
            if key in self.aborted and self.finished[key].reason == "abort":
                assert self.outputs[key] == output[: len(self.outputs[key])]
            else:
                assert (self.outputs[key], self.finished[key].reason) == (output, reason)
        assert self.kv.num_in_use == 0, "blocks are left behind"
        assert self.kv.recurrent is None or self.kv.recurrent.snapshots.num_in_use == 0, "snapshots are left behind"
        assert self.stats.num_running == self.stats.num_waiting == 0
        if self.media is not None:
            assert not self.media._held, "a request that has ended holds media"
            for item in self.media.items:
                item.offers = 0
            self.media.reset()
            assert not list(self.media.items), "items are left behind"
            assert not self.model._arrays, "the worker keeps arrays"
            assert not self.model.encoded, "the worker keeps what it encoded"


def blocks_for(windows: Windows, block_size: int, num_tokens: int, budget: int) -> int:
    """Maximum number of blocks of one request; computed independently of the code under test."""
    most = 0
    for window in windows:
        if isinstance(window, LayerGroup):
            continue
        full = -(-num_tokens // block_size)
        most += full if window is None else min(full, -(-(window - 1 + budget) // block_size) + 1)
    return most


def count_look_ups(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that receives each request whose prefix is looked up in the cache."""
    looks: list[Any] = []
    find = engine.kv.find_prefix

    def counted(request: Any) -> int:
        looks.append(request)
        return find(request)

    monkeypatch.setattr(engine.kv, "find_prefix", counted)
    return looks


def result_of(plan: StepPlan, tokens: Sequence[int] | np.ndarray, **fields: Any) -> StepResult:
    """The result of a plan with these tokens, or of a plan that lacked memory."""
    computed = np.zeros_like(plan.counts) if fields.get("lack") else plan.counts
    return StepResult(plan.id, computed, np.asarray(tokens, np.int64), **fields)


class StandInPending(NamedTuple):
    model: StandInModel
    plan: StepPlan
    tokens: np.ndarray
    lack: str = ""

    @property
    def lacks_memory(self) -> bool:
        return bool(self.lack)

    def wait(self) -> StepResult:
        if not self.lack:
            self.model.retire(self.plan)
        encoded = [Encoded(number, 10) for number in self.plan.encodes.tolist()]
        return result_of(self.plan, self.tokens, lack=self.lack, encoded=encoded)


class StandInWorker:
    """The stand-in model as the worker of an `EngineCore`. `launched` is called with each plan before it is computed; a
    returned text is the reason why the device lacks memory for the plan."""

    def __init__(
        self,
        config: EngineConfig,
        launched: Callable[[StepPlan], str | None] = lambda plan: None,
        media: MediaFacts | None = None,
    ) -> None:
        self.decisions: dict[str, Any] = {}
        self.interrupt, self.beat = np.zeros(1, np.int32), lambda: None
        self.error = None
        self.controls: list[Any] = []
        cache, slots = config.cache_config, config.scheduler_config.max_num_seqs
        num_blocks, longest = cache.num_gpu_blocks_override or 200, 64
        self.facts = WorkerFacts(ModelFacts(VOCAB, 8, longest, "float32"), [group_of(None)], num_blocks, longest)
        self.facts = replace(self.facts, media=media)
        self._model = StandInModel((None,), cache.block_size, num_blocks, slots, longest)
        self._launched = launched

    def warm_up(self) -> None:
        pass

    def control(self, record: Any) -> Any:
        self.controls.append(record)
        self._model.control(record)

    def close(self) -> None:
        pass

    def lend_functions(self, functions: Sequence[Any]) -> tuple[int, ...]:
        return ()

    def run_method(self, method: Any, args: Sequence[Any], kwargs: Any) -> list[Any]:
        raise NotImplementedError

    def span(self, name: str) -> Any:
        return nullcontext()

    def launch(self, plan: StepPlan) -> StandInPending:
        self._model.begin(plan)
        lack = self._launched(plan)
        if lack:
            self._model.encode(plan)
        tokens = np.zeros(0, np.int64) if lack else self._model.execute(plan)
        return StandInPending(self._model, plan, tokens, lack or "")


def make_core(
    launched: Callable[[StepPlan], str | None] = lambda plan: None, service: ServiceConfig | None = None, **rest: Any
) -> EngineCore:
    """An `EngineCore` over the stand-in model. `rest`: fields of `SchedulerConfig` and other arguments of
    `EngineCore`."""
    more = {name: rest.pop(name) for name in ("journal", "suspects", "quarantined") if name in rest}
    media, limits = rest.pop("media", None), rest.pop("multimodal", MultiModalConfig())
    config = EngineConfig(
        scheduler_config=SchedulerConfig(**rest),
        service_config=service or ServiceConfig(),
        multimodal_config=limits,
    )
    return EngineCore(config, lambda config: StandInWorker(config, launched, media), **more)


def message(handle: int, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, **fields: Any) -> AddRequest:
    return AddRequest(handle, str(handle), list(prompt), Sampling(max_tokens), **fields)


def run_core(
    core: EngineCore, steps: int = 1000, until: Callable[[dict[Key, Any]], bool] = lambda ended: False
) -> dict[Key, tuple[list[int], Finished]]:
    """Step until no work is left, or until `until`; → the tokens and the `Finished` of every request that ended."""
    tokens: dict[Key, list[int]] = defaultdict(list)
    ended: dict[Key, tuple[list[int], Finished]] = {}
    while core.has_work and not until(ended):
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
