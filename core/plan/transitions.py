"""The transitions of a request: it waits, takes a slot, leaves it, is preempted, ends."""

from __future__ import annotations

from ...ipc.errors import wire_name, wire_text
from ...ipc.messages import Finished, FinishReason
from .request import Request
from .state import SchedulerState


def enqueue(state: SchedulerState, request: Request) -> None:
    """Let a request wait: in its frontend's queue, or in the queue of a feature."""
    if not any(keeps(request) for keeps in state.features.keeps):
        state.fair.push(request)


def take_slot(state: SchedulerState, request: Request, cached: int) -> None:
    """Give a request a slot, and the `cached` tokens that `find_prefix` has just found for it."""
    kv, rows, counts = state.kv, state.rows, state.meter.counts
    state.running.add(request)
    rows.fill(request, cached)
    for got_slot in state.features.got_slot:
        got_slot(request)
    state.fair.of(request.frontend).running[request.slot] = request
    if request.admitted_at is None:
        request.admitted_at = state.clock()
        request.num_cached_tokens = cached
        counts["prefix_queries"] += len(request.tokens)
        counts["prefix_hits"] += cached
        counts["host_hits"] += kv.num_on_host(request)
    before = kv.coming_from(request, request.num_cached_blocks)
    # If `before` has published the next block and the cache does not have it, the cache can't keep it, so that another
    # request would wait for it in vain.
    kv.take_prefix(request, waited_for=before is None or rows.num_published[before.slot] <= cached)
    kv.show(request)


def leave_slot(state: SchedulerState, request: Request) -> None:
    """Take back a request's slot and blocks."""
    slot, rows = request.slot, state.rows
    state.kv.free(request)
    del state.fair.of(request.frontend).running[slot]
    rows.alive[slot] = False
    rows.granted[slot] = 0
    for left_slot in state.features.left_slot:
        left_slot(request)
    state.running.remove(request)
    if not state.running.requests:
        state.meter.idle()


def preempt(state: SchedulerState, request: Request) -> None:
    """Take a running request's slot and blocks. It keeps its tokens, waits, and computes their keys and values again
    later; its tokens are not sent again."""
    request.tokens = state.rows.tokens[request.slot, : state.rows.num_known(request.slot)].copy()
    request.num_preemptions += 1
    state.meter.counts["num_preemptions"] += 1
    request.room = request.hold = 0
    leave_slot(state, request)
    enqueue(state, request)


def fail(state: SchedulerState, request: Request, error: Exception) -> None:
    """End a request with `error`."""
    state.suspects.clear(request)
    finish(state, request, "error", error=(wire_name(error), wire_text(error)))


def finish(
    state: SchedulerState,
    request: Request,
    reason: FinishReason,
    stop_token: int | None = None,
    error: tuple[str, str] = ("", ""),
) -> None:
    """End a request: take back what it has, count it, and tell its frontend. `error`: its name on the wire, and the
    text."""
    state.stalled = False
    num_tokens = len(request.tokens)
    if request.slot >= 0:
        num_tokens = state.rows.num_known(request.slot)
        leave_slot(state, request)
    state.meter.request_ended(request, reason, num_tokens, state.clock())
    state.fair.end(request)
    for ended in state.features.ended:
        ended(request)
    state.outbox.put(request.frontend, Finished(request.handle, reason, stop_token, request.num_preemptions, *error))
    state.on_end(request)
