"""Runs the forward pass of a step over all its rows, either kernel by kernel or as a CUDA graph, and samples tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ...ipc.errors import MainspringError
from ...kernels import host_memory
from ...kernels.contract import AttentionSpec, Backend, LayerCache, PagedBatch
from ...kernels.decoder_contract import Decoder, DecodeSteps
from ...kernels.registry import reference_on
from ..memory.updates import Copies
from ..model.media.door import Door
from ..model.media.merge import MergedPrompt
from ..model.run.attention import StepAttention
from ..model.run.paged_model import PagedModel
from ..parallel.homes import Homes, part_of, places_of_wanted
from ..parallel.parallel_backend import ParallelBackend, adapters_of
from ..plan.step import IN_FLIGHT, MOST_GUESS_ROWS, NewSequence, Scores, StepPlan
from .backends import backends_for
from .device import TURNS, Mark, Tokens, device_for, tensor_of
from .kv_layout import KVLayout
from .registry import Registry
from .sampler import Launched, Sampled, Sampler
from .step_inputs import NOBODY, Rows, StepInputs, places_of_rows

if TYPE_CHECKING:
    from .media_items import MediaItems

logger = logging.getLogger(__name__)

CAPTURE_SECONDS = 30.0  # for all graphs, to keep a start short; sizes not captured by then run without a graph


class _Graph(NamedTuple):
    replay: Callable[[], None]
    logits: torch.Tensor  # [size, vocab], overwritten by each replay


class RepeatedSteps(NamedTuple):
    """The steps of a plan of several."""

    decoder: Decoder
    sampler: Sampler
    steps: DecodeSteps
    slots: np.ndarray  # int64 [rows]
    turn: int

    def make(self, most: int) -> tuple[np.ndarray, list[Scores], bool]:
        """Make at most so many further steps; see `Decoder.repeat`."""
        tokens, found, stopped = self.decoder.repeat(self.steps, most)
        self.sampler.made_steps(tokens, self.slots)
        firsts = np.arange(tokens.numel(), step=len(self.slots))[:, None]
        scores = [
            Scores((firsts + rows).ravel(), *(column.numpy() for column in one))
            for (rows, _), one in zip(self.steps.scored, found, strict=True)
        ]
        return tokens.numpy(), scores, stopped

    @torch.inference_mode()
    def make_ruled(self) -> tuple[Sampled, bool]:
        """Make one further step, whose tokens the host's rules choose. Returns also whether a request can't go on."""
        logits, stops = self.decoder.logits(self.steps), self.steps.stops
        launched = Launched(logits, self.slots, self.steps.positions.numpy().copy(), self.turn, [])
        sampled = self.sampler.sample(launched)
        tokens = sampled.tokens.wait()
        self.steps.ids.copy_(torch.from_numpy(tokens))
        self.sampler.follow(self.slots, tokens)
        stopped = bool((tokens[stops[:, 0]] == stops[:, 1]).any())
        return sampled, stopped or bool(sampled.errors or sampled.complete)


class ModelRunner:
    """Owns the device memory of forward passes: the block pool, input buffers, graphs, and each slot's last token.

    The reference kernels run the attention calls that `backend` refuses.
    """

    def __init__(
        self,
        model: PagedModel,
        layout: KVLayout,
        backend: Backend,
        num_blocks: int,
        max_num_seqs: int,
        max_model_len: int,
        max_tokens: int,
        host_blocks: int = 0,
        registry: Registry | None = None,
        num_states: int | None = None,
        host_states: int = 0,
        media: MediaItems | None = None,
    ) -> None:
        """num_states: state slots of a model with recurrent state; None: one for each request. host_states: slots for
        states in host memory."""
        self.model = model
        self.device = device = device_for(model.device)
        self.inputs = StepInputs(
            device,
            layout,
            max_num_seqs,
            max_model_len,
            max_tokens,
            model.row_multiple,
            model.position_axes,
            model.states is not None,
        )
        # Zeroed, because attention multiplies masked rows by 0, and 0 times NaN is NaN.
        self.pool = device.zeros((num_blocks, layout.block_elements), layout.dtype)
        self._host_blocks = device.host_blocks((host_blocks, layout.block_elements), layout.dtype)
        self._backends = backends_for(model.layers, backend, model.dtype, layout.dtype, model.device)
        self._fallbacks: dict[int, Backend] = {}  # by `id` of the backend
        self._layout = layout
        self.bind()
        model.allocate_states(num_states or 1 + max_num_seqs, backend.scans, device.zeros)
        state_bytes = model.states.slot_bytes if model.states is not None else 0
        self._host_states = device.host_blocks((host_states, state_bytes), torch.uint8)
        self._embeds: dict[int, torch.Tensor] = {}  # prompt embeddings by slot
        self._registry = registry or Registry()
        merger = model.merger
        self._door = Door(model.position_axes, merger is not None and bool(merger.spans))
        self._media = media
        self.failed: dict[int, Exception] = {}  # by slot: why the prompt of its request can't be computed
        self._adapted = adapters_of(backend)
        self._homes = backend.homes if isinstance(backend, ParallelBackend) else None
        self._home_of = np.zeros(max_num_seqs, np.int64)  # by slot, see `StepPlan.homes`
        most_rows = max(max_num_seqs, MOST_GUESS_ROWS)
        self._sampler = Sampler(max_num_seqs, model.vocab_size, device, backend, most_rows, self._registry)
        self._experts: torch.Tensor | None = None  # of the rows of the last forward pass, where they are recorded
        if model.experts is not None:
            rows = self.inputs.padded(max(max_tokens, max_num_seqs))
            self._experts = torch.zeros((rows, *model.experts.shape), dtype=model.experts.dtype, device=model.device)
        self._turn = 0
        self._marks: list[Mark] = [device.mark()] * TURNS
        self._every_row = torch.arange(max_num_seqs, device=model.device)  # graphs read it, so it must stay alive
        self._graphs: dict[int, _Graph] = {}  # by number of rows, smallest first
        # A step has one attention plan per group and distinct spec. All calls of that group and spec share it.
        self._plans: dict[tuple[int, AttentionSpec], list[int]] = {}
        group_of = {layer: g for g, group in enumerate(layout.groups) for layer in group.layers}
        for call, spec in enumerate(model.layers):
            self._plans.setdefault((group_of[layout.layer_of_call[call]], spec), []).append(call)
        limits = [b.graph_max_kv_len for b in self._backends]
        self._graph_max_len = min((limit for limit in limits if limit is not None), default=max_model_len)

    def bind(self) -> None:
        """Let the model read and write this runner's cache."""
        model, layout, caches = self.model, self._layout, self._layout.caches(self.pool)
        calls = zip(layout.layer_of_call, model.layers, self._backends, strict=True)
        index_keys = layout.index_keys(self.pool) if model.indexers is not None else []
        model.bind(
            [_seen_by(b, spec, caches[layer]) for layer, spec, b in calls],
            [index_keys[layer] for layer in layout.layer_of_call] if index_keys else [],
        )

    @property
    def graph_sizes(self) -> list[int]:
        return list(self._graphs)

    @property
    def tables(self) -> np.ndarray:
        """int32 ``[groups, slots, columns]``."""
        return self.inputs.tables[:, :-1]

    @property
    def last_tokens(self) -> torch.Tensor:
        """int64 ``[slots]``: the token that each slot sampled last."""
        return self._sampler.last_tokens

    def follow(self, other: ModelRunner) -> None:
        """Use the last sampled tokens of `other`, so that placeholders stand for the tokens that `other` sampled."""
        self._sampler.last_tokens = other._sampler.last_tokens

    def give_back(self) -> None:
        """Return the memory of the KV cache to the system. No step can run after this."""
        host_memory.give_back(self.pool)
        if self.model.states is not None:
            self.model.states.give_back()
        self.model.unbind()
        self._graphs.clear()
        for backend in self._backends:
            backend.forget_graphs()

    # ------------------------------------------------------------------ a step

    def copy(self, plan: StepPlan) -> None:
        """Launch the copies that come before a step's computation: to and from host memory, and of recurrent states.
        Must be called first, because the later parts of a step may fail for lack of memory, and the copies must not be
        lost."""
        copy_blocks(plan.copies, self.pool, self._host_blocks)
        if self.model.states is not None:
            self.model.states.copy_host(plan.states.host, self._host_states)
        self._copy_states(plan.states.restores)
        self._copy_states(plan.states.backups)

    def begin(self, plan: StepPlan) -> None:
        """Apply the changes of `plan`: block tables, released slots, and admitted sequences."""
        group, slot, column, block = plan.tables
        self.tables[group, slot, column] = block
        for free in plan.released.tolist():
            self._sampler.release(free)
            self._embeds.pop(free, None)
            self._door.release(free)
            self.failed.pop(free, None)
        for sequence in plan.admitted:
            self._admit(sequence)
        self._sampler.read(plan)

    def execute(self, plan: StepPlan) -> Launched:
        """Launch the forward pass of `plan`, up to the logits of the sampling rows."""
        self.begin(plan)
        slots, starts, counts = (a.astype(np.int64) for a in (plan.slots, plan.starts, plan.counts))
        row, back = plan.choices()
        last_rows = (np.cumsum(counts) - 1)[row] - back
        wanted = np.concatenate([last_rows, *(np.arange(p.row, p.row + p.num_rows) for p in plan.scored)])
        sampling, positions = slots[row], (starts + counts)[row] - back
        if len(row) == plan.num_tokens <= max(self._graphs, default=0) and self.model.states is None:
            # Treat each guess as a request of one token, so that a graph can be used. They share a cache, but no state.
            slots, starts, counts = sampling, positions - 1, np.ones_like(row)
        if self._homes is None:
            logits = self.forward(slots, starts, counts, plan.token_ids, wanted)
        else:
            self._home_of[plan.slots] = plan.homes
            logits = self._forward_at_home(self._homes, Rows(slots, starts, counts, plan.token_ids, wanted))
        self.snapshot(plan)
        return Launched(logits, sampling, positions, self._turn, plan.scored, self._experts_of(counts))

    def repeat(self, plan: StepPlan, interrupt: np.ndarray) -> RepeatedSteps:
        """Begin a plan of several steps, for a model that `WholeModel.repeats`. `interrupt`: see `DecodeSteps`."""
        self.begin(plan)  # not in inference mode: tensors that it makes change outside of it, too
        return self._repeat(plan, interrupt)

    @torch.inference_mode()
    def _repeat(self, plan: StepPlan, interrupt: np.ndarray) -> RepeatedSteps:
        whole = self.model.whole
        assert whole is not None, "only a model as a whole makes several steps"
        slots, starts = plan.slots.astype(np.int64), plan.starts.astype(np.int64)
        rows = np.arange(len(slots))
        self._turn = (self._turn + 1) % TURNS
        ones = np.ones_like(slots)
        positions = self._door.positions(slots, starts, ones) if self._door else None
        count, batches, _ = self.inputs.fill(Rows(slots, starts, ones, plan.token_ids, rows, positions), self._turn)
        attention = self._plan(batches, count)
        last = int(starts.max()) + plan.num_steps - 1
        kinds: list[tuple[Any, torch.Tensor]] = []
        kind_of_layer = [0] * len(attention)
        for (group, _), calls in self._plans.items():
            for call in calls:
                kind_of_layer[call] = len(kinds)
            columns = last // batches[group].block_size + 1
            tables = torch.from_numpy(self.inputs.tables[group, slots, :columns])
            kinds.append((attention[calls[0]].plan, tables))
        ids = self._with_last_tokens(self.inputs.ids.device[:count], count)
        choice, scored = self._sampler.begin_steps(slots, starts + 1, self._turn)
        first = self.inputs.positions(count)[0].clone()
        states = None if self.model.states is None else torch.from_numpy(1 + plan.slots.astype(np.int32))
        steps = whole.repeat(ids, first, kinds, kind_of_layer, choice, plan.stops, interrupt, states, plan.num_steps)
        return RepeatedSteps(whole.decoder, self._sampler, steps._replace(scored=scored), slots, self._turn)

    @property
    def repeats(self) -> bool:
        """Whether `repeat` may be called."""
        whole = self.model.whole
        return (
            whole is not None
            and whole.repeats
            and self.model.position_axes == 1
            and all(b is whole.backend for b in self._backends)
        )

    def snapshot(self, plan: StepPlan) -> None:
        """Launch the copies of recurrent states that come after a step's forward pass."""
        self._copy_states(plan.states.snapshots)

    def _copy_states(self, columns: np.ndarray) -> None:
        if columns.size and self.model.states is not None:
            source, target = self.device.bring(torch.from_numpy(columns.astype(np.int64)))
            self.model.states.copy(source, target)

    def _experts_of(self, counts: np.ndarray) -> Tokens | None:
        """The experts of the rows of the forward pass just launched, whose requests computed `counts` tokens."""
        if self._experts is None:
            return None
        places = places_of_rows(counts)
        if places is None:
            return self.device.download(self._experts[: int(counts.sum())].clone())  # the next pass overwrites them
        return self.device.download(self._experts[self.device.bring(torch.from_numpy(places))])

    @torch.inference_mode()
    def forward(
        self,
        slots: np.ndarray,
        starts: np.ndarray,
        counts: np.ndarray,
        token_ids: np.ndarray,
        rows: np.ndarray,
        positions: np.ndarray | None = None,
        reach: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Run a forward pass over `Rows`, and return the logits ``[len(rows), vocab]`` of the rows in `rows`."""
        if self._door:
            positions = self._door.positions(slots, starts, counts) if positions is None else positions
            reach = self._door.reach(slots, starts, counts) if reach is None else reach
        step = Rows(slots, starts, counts, token_ids, rows, positions, reach).singles_first()
        return self._run_step(step, self._graph_size(step, len(slots)))[: len(rows)]

    @torch.inference_mode()
    def _forward_at_home(self, homes: Homes, step: Rows) -> torch.Tensor:
        """As `forward`, where this rank computes only the requests that are at home here, and gets all logits."""
        rank, size, padded, home = homes.group.rank, homes.group.size, self.inputs.padded, self._home_of[step.slots]
        part = part_of(rank, size, home, step.counts, step.wanted)
        graph, mine = self._graph_size(step, max(part.num_tokens)), part.mine
        rows, wanted = ([padded(n) for n in numbers] for numbers in (part.num_tokens, part.num_wanted))
        if graph is not None:
            rows = wanted = [graph] * size
        own = Rows(step.slots[mine], step.starts[mine], step.counts[mine], step.token_ids[part.tokens], part.wanted)
        with homes.step(rows, wanted):
            logits = self._run_step(own.singles_first() if mine.any() else NOBODY, graph)
        for slot, end in zip(step.slots.tolist(), (step.starts + step.counts).tolist(), strict=True):
            if slot in self._embeds and end >= len(self._embeds[slot]):  # on every rank: all must choose the same graph
                del self._embeds[slot]
        places = places_of_wanted(home, step.counts, step.wanted, wanted)
        return logits[self.device.bring(torch.from_numpy(places))]

    def _run_step(self, step: Rows, graph: int | None) -> torch.Tensor:
        """The logits of the wanted rows, padded, without a graph or with the one of this size."""
        self._turn = (self._turn + 1) % TURNS
        self._marks[self._turn].wait()
        try:
            return self._launch(step) if graph is None else self._replay(step, graph)
        finally:
            self._marks[self._turn] = self.device.mark()

    @torch.inference_mode()
    def sample(self, launched: Launched) -> Sampled:
        """Choose the tokens of a launched step."""
        sampled = self._sampler.sample(launched)
        self._marks[launched.turn] = self.device.mark()
        return sampled

    def _launch(self, step: Rows) -> torch.Tensor:
        count, batches, sequences = self.inputs.fill(step, self._turn)
        ids = self.inputs.ids.device[:count]
        if self.device.asynchronous or (step.token_ids == IN_FLIGHT).any():
            ids = self._with_last_tokens(ids, count)
        embeds = self._mix_embeds(ids, step) if self._embeds else None
        wanted = self.inputs.wanted.device[: self.inputs.padded(len(step.wanted))]
        attention = self._plan(batches, count, reach=step.reach)
        media = self._door.rows(step.slots, step.starts, step.counts) if self._door else None
        if self.model.cross is not None:
            self.model.cross.begin(self._door.cross(step.slots), step.counts.tolist())
        return self._run(ids, self.inputs.positions(count), attention, sequences, wanted, embeds, media)

    def _run(self, *inputs: Any) -> torch.Tensor:
        """`PagedModel.forward`, with its experts recorded where that is wanted."""
        if self._experts is None or self.model.experts is None:
            return self.model.forward(*inputs)
        with self.model.experts.into(self._experts):
            return self.model.forward(*inputs)

    def _with_last_tokens(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        """Replace each `IN_FLIGHT` in `ids` by the last token that its slot sampled, which is only on the device."""
        return torch.where(ids == IN_FLIGHT, self._sampler.last_tokens[self.inputs.row_slots.device[:count]], ids)

    def _plan(
        self, batches: list[PagedBatch], count: int, graph: bool = False, reach: np.ndarray | None = None
    ) -> list[StepAttention]:
        attention: list[StepAttention | None] = [None] * len(self.model.layers)
        offsets = self.inputs.offsets.device[:count]
        for (group, spec), calls in self._plans.items():
            backend, batch = self._backends[calls[0]], batches[group]
            if reach is not None:
                batch = batch._replace(reach=torch.from_numpy(reach[int(spec.window is not None)]))
            if not backend.takes(batch):
                backend = self._fallback_for(backend)
            plan = backend.plan(spec, batch, self.model.device, self._turn, graph)
            shared = StepAttention(plan, self.inputs.places[group].device[:count], offsets, backend, batch)
            for call in calls:
                attention[call] = shared
        return attention  # type: ignore[return-value]  # every call has a plan

    def _fallback_for(self, backend: Backend) -> Backend:
        """The reference kernels for steps that `backend` does not take. They read the cache that `backend` writes."""
        if id(backend) not in self._fallbacks:
            logger.warning(
                "a step in which tokens see later ones is not for the %s kernels: the reference kernels run such "
                "steps, many times slower",
                backend.name,
            )
            fallback = self._fallbacks[id(backend)] = reference_on(self.model.device)
            fallback.append = backend.append  # type: ignore[method-assign]
        return self._fallbacks[id(backend)]

    # ------------------------------------------------------------------ graphs

    @torch.inference_mode()
    def warm_up(self, sizes: Sequence[int], agree: Callable[[bool], bool] = bool) -> None:
        """Run each kernel once, so that none has to be compiled while a request waits. Then capture a graph for each of
        `sizes`: a step in which that many requests compute one token each. The largest graph comes first, because the
        others reuse its memory. `agree` is whether something holds on all ranks, which capture the same graphs."""
        for counts in (np.ones(1, np.int64), np.array([1, 1, 5])[-len(self._every_row) :]):
            starts = np.zeros(len(counts), np.int64)
            logits = self.forward(np.arange(len(counts)), starts, counts, np.zeros(counts.sum(), np.int64), starts)
        if logits.shape[-1] == self.model.vocab_size:  # else this is an earlier stage of a pipeline
            self._sampler.warm_up(logits)
        began = time.monotonic()
        for size in sorted(sizes if self._graph_max_len else (), reverse=True):
            if not agree(time.monotonic() - began <= CAPTURE_SECONDS):
                logger.warning("no time left for graphs of %d rows and fewer: such steps run without a graph", size)
                break
            trouble = ""
            try:
                self._capture(size)
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # the model's forward waits for the device
                trouble = str(error).partition("\n")[0]
            if not agree(not trouble):
                logger.warning("no graph can be captured, all steps run without one: %s", trouble or "on another rank")
                self._graphs.clear()
                break
        self._graphs = dict(sorted(self._graphs.items()))
        if self._graphs:
            logger.info("captured %d graphs in %.1f s", len(self._graphs), time.monotonic() - began)

    @torch.inference_mode()
    def _capture(self, size: int) -> None:
        nothing = np.zeros(1, np.int64)
        step = Rows(nothing, nothing, np.ones(1, np.int64), nothing, np.zeros(size, np.int64))
        self._turn = (self._turn + 1) % TURNS
        self._marks[self._turn].wait()
        _, batches, sequences = self.inputs.fill(step, self._turn, size)
        attention = self._plan(batches, size, graph=True)
        every_row = self._every_row[:size]

        def run() -> torch.Tensor:
            ids = self._with_last_tokens(self.inputs.ids.device[:size], size)
            return self._run(ids, self.inputs.positions(size), attention, sequences, every_row)

        alike = [size] * (self._homes.group.size if self._homes is not None else 1)
        with nullcontext() if self._homes is None else self._homes.step(alike, alike):
            self._graphs[size] = _Graph(*self.device.capture(run))
        self._marks[self._turn] = self.device.mark()

    def _graph_size(self, step: Rows, rows: int) -> int | None:
        """The size of the smallest graph that this step fits in; None if it fits in none. rows: that a graph computes
        at least."""
        num = len(step.slots)
        adapted = self._adapted is not None and self._adapted.begin(step.slots, step.counts, step.wanted)
        eager = adapted or self._embeds or step.reach is not None or self._door.computes(step.slots, step.starts)
        if eager or len(step.token_ids) > num or not np.array_equal(step.wanted, np.arange(num)):
            return None
        if int(step.starts.max()) >= self._graph_max_len:
            return None
        return next((size for size in self._graphs if size >= rows), None)

    def _replay(self, step: Rows, size: int) -> torch.Tensor:
        self._plan(self.inputs.fill(step, self._turn, size).batches, size, graph=True)
        graph = self._graphs[size]
        graph.replay()
        return graph.logits

    # ------------------------------------------------------------------ requests

    def admit_prompt(self, slot: int, prompt: MergedPrompt) -> None:
        """The prompt at `slot` has media, or sees both ways."""
        self._door.admit(slot, prompt)

    def _admit(self, sequence: NewSequence) -> None:
        slot = sequence.slot
        self.inputs.prompt_lens[slot] = sequence.prompt_len
        self._sampler.admit(sequence)
        if self._adapted is not None:
            adapter = self._registry.adapters[sequence.adapter].result() if sequence.adapter else None
            self._adapted.admit(slot, sequence.adapter_place, adapter)
        self._embeds.pop(slot, None)
        self._door.release(slot)
        self.failed.pop(slot, None)
        if self._media is not None and self._media.merges(sequence):
            try:
                self.admit_prompt(slot, self._media.merged(sequence))
            except MainspringError as error:
                self.failed[slot] = error
        if sequence.embeds is not None:
            self._embeds[slot] = self.device.bring(tensor_of(sequence.embeds)).to(self.model.dtype)

    def _mix_embeds(self, ids: torch.Tensor, step: Rows) -> torch.Tensor | None:
        """Input embeddings of the step with prompt embeddings inserted; None if no request of the step has any."""
        rows = None
        firsts = np.cumsum(step.counts) - step.counts
        for row, slot in enumerate(step.slots.tolist()):
            embeds = self._embeds.get(slot)
            if embeds is None:
                continue
            start, end, first = int(step.starts[row]), int(step.starts[row] + step.counts[row]), int(firsts[row])
            if start < len(embeds):
                rows = self.model.embed(ids) if rows is None else rows
                part = embeds[start:end]
                rows[first : first + len(part)] = part
            if end >= len(embeds):
                del self._embeds[slot]
        return rows


def copy_blocks(copies: Copies, pool: torch.Tensor, host: torch.Tensor) -> None:
    """Launch `copies` between `pool` and `host` memory, ``[blocks, block_elements]``. Allocates no device memory."""
    for block, slot in copies.saves:
        host[slot].copy_(pool[block], non_blocking=True)
    for block, slot in copies.loads:
        pool[block].copy_(host[slot], non_blocking=True)


def _seen_by(backend: Backend, spec: AttentionSpec, cache: LayerCache) -> LayerCache:
    """A view of a layer's cache with the head dimensions that `backend` uses, which may be less than the layout's."""
    keys, values = backend.cache_dims(spec)
    return LayerCache(cache.keys[..., :keys], cache.values[..., :values])
