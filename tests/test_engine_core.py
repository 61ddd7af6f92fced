"""The core's loop over the stand-in model: the journal, permissions, and the status."""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from harness import StepPlan, expected_output, make_core, message, run_core
from mainspring.core import calls, loop, methods
from mainspring.core.__main__ import handle as take
from mainspring.core.calls import Method
from mainspring.core.loop import MAX_CALLS, EngineCore
from mainspring.ipc.codec import decode_value, encode_value
from mainspring.ipc.config import ServiceConfig
from mainspring.ipc.errors import (
    InvalidArgumentError,
    InvalidRequestError,
    NotPermittedError,
    NotSupportedError,
    OverloadedError,
)
from mainspring.ipc.inbox import Event
from mainspring.ipc.journal import Accused, Journal, request_key
from mainspring.ipc.messages import Latency, Tensor, UtilityCall, UtilityResult

SESSION = b"0123456789abcdef"


def call(core: EngineCore, method: str, *args: Any, frontend: int = 0) -> Any:
    return decode_value(core.call(method, encode_value(list(args)), frontend))


@pytest.fixture
def journal() -> Iterator[Journal]:
    journal = Journal.create(256)
    yield journal
    journal.close()


# ---------------------------------------------------------------------- the journal


def test_a_step_stands_in_the_journal_while_it_runs_and_not_when_it_has_succeeded(journal: Journal) -> None:
    seen: list[list[Accused]] = []
    core = make_core(lambda plan: seen.append(journal.accused()), journal=journal)
    core.connect(0, session=SESSION)
    core.add_request(0, message(7, max_tokens=3))
    run_core(core)
    key = request_key(SESSION, 7)
    assert seen == [[Accused(key, position, False)] for position in range(3)]
    assert journal.accused() == []


def test_a_step_that_fails_leaves_its_requests_in_the_journal(journal: Journal) -> None:
    def fail(plan: StepPlan) -> None:
        raise RuntimeError("broken")

    core = make_core(fail, journal=journal, max_num_batched_tokens=4, suspects={request_key(SESSION, 1): 0})
    core.connect(0, session=SESSION)
    core.add_request(0, message(1, prompt=range(9), output_token_ids=[5, 6], max_tokens=9))
    with pytest.raises(RuntimeError, match="broken"):
        core.step()
    assert journal.accused() == [Accused(request_key(SESSION, 1), 2, True)]


def test_the_suspects_that_are_left_stand_in_the_journal(journal: Journal) -> None:
    keys = {request_key(SESSION, handle) for handle in range(3)}
    core = make_core(journal=journal, suspects=dict.fromkeys(keys, 0))
    core.connect(0, session=SESSION)
    core.add_request(0, message(1))
    run_core(core)
    assert set(journal.suspects()) == keys - {request_key(SESSION, 1)}


# ---------------------------------------------------------------------- requests that come back


def test_a_resumed_request_gets_the_rest_of_its_tokens_and_is_not_started_again() -> None:
    whole, _ = expected_output(message(0, max_tokens=9), (None,), 64)
    core = make_core()
    core.connect(0)
    core.add_request(0, message(0, max_tokens=9, output_token_ids=whole[:4], resumed=True))
    outputs = [core.step()[0] for _ in range(5)]
    assert [out.token_ids for out in outputs] == [[token] for token in whole[4:]]
    assert not any(out.started for out in outputs)


def test_a_resumed_request_keeps_its_place() -> None:
    core = make_core(max_num_seqs=1)
    core.connect(0)
    core.add_request(0, message(0, max_tokens=2))
    core.step()
    core.add_request(0, message(1))
    core.add_request(0, message(2, age_s=100.0, resumed=True))
    assert [handle for _, handle in run_core(core)] == [0, 2, 1]


def test_a_quarantined_request_is_refused_with_the_reason_and_only_it() -> None:
    core = make_core(quarantined={request_key(SESSION, 1): "the core died twice"})
    core.connect(0, session=SESSION)
    core.connect(1, session=b"another")
    for frontend in (0, 1):
        for handle in (0, 1):
            core.add_request(frontend, message(handle))
    ended = {key: finished for key, (_, finished) in run_core(core).items()}
    assert (ended[0, 1].error, ended[0, 1].error_text) == ("RequestFailedError", "the core died twice")
    assert [ended[key].reason for key in ((0, 0), (1, 0), (1, 1))] == ["length"] * 3


def test_a_second_request_under_a_handle_in_use_is_dropped_and_the_first_goes_on() -> None:
    core = make_core()
    core.connect(0)
    core.add_request(0, message(0, max_tokens=5))
    core.step()
    core.add_request(0, message(0, prompt=[9]))
    [(tokens, finished)] = run_core(core).values()
    assert (len(tokens), finished.reason) == (4, "length")
    assert core.num_duplicates == 1


# ---------------------------------------------------------------------- draining


def test_a_draining_core_finishes_what_it_accepted_and_answers_nothing_else() -> None:
    core = make_core()
    core.connect(0)
    core.add_request(0, message(0))
    assert not core.drained
    core.drain()
    core.add_request(0, message(1))
    assert not core.drained
    assert set(run_core(core)) == {(0, 0)}
    assert core.drained


def test_an_idle_core_is_drained_at_once() -> None:
    core = make_core()
    core.drain()
    assert core.drained


def test_a_moved_request_that_is_aborted_is_not_kept() -> None:
    core = make_core()
    core.connect(0)
    core.add_request(0, message(0, moved_from=[1, 1]))
    assert core.step() == {}
    assert core.has_work, "it waits for news of the core that had it"
    core.abort(0, [0])
    [outputs] = core.step().values()
    assert [finished.reason for finished in outputs.finished] == ["abort"]
    core.step()
    assert not core.has_work
    assert core._moved._held == []


# ---------------------------------------------------------------------- who may do what


@pytest.mark.parametrize("method", ["reset_prefix_cache", "pause_generation", "resume_generation", "sleep", "wake_up"])
def test_what_changes_the_engine_for_everyone_needs_admin(method: str) -> None:
    core = make_core()
    core.connect(0, admin=False)
    core.connect(1, admin=True)
    with pytest.raises(NotPermittedError, match=f"{method} .*admin"):
        call(core, method, frontend=0)
    call(core, method, frontend=1)


def test_the_arrays_of_a_call_are_read_only_if_the_caller_may_call_its_method() -> None:
    core, answers = make_core(), list[UtilityResult]()
    core.connect(0, admin=False)
    core.connect(1, admin=True)
    server: Any = SimpleNamespace(send=lambda frontend, message: answers.append(message))
    args, unreadable = encode_value(["v", 0, ["a"], [0], True]), [Tensor(9, "float32", [1])]
    for frontend in (0, 1):
        take(core, server, Event(frontend, UtilityCall(frontend, "update_weights", args, unreadable)))
    take(core, server, Event(0, UtilityCall(2, "ping", encode_value([]), [Tensor(0, "uint8", [1])]), [b"a"]))
    assert [answer.error for answer in answers] == ["NotPermittedError", "ProtocolError", "InvalidRequestError"]


def test_anybody_may_ask() -> None:
    core = make_core()
    core.connect(0, admin=False)
    assert call(core, "ping") is None
    assert call(core, "is_paused") is False
    with pytest.raises(NotSupportedError, match="no method 'nap'"):
        call(core, "nap")


def test_pauses_and_their_end_are_reported_to_the_supervisor() -> None:
    told: list[bool] = []
    core = make_core()
    core.on_state = lambda state: told.append(state.paused)
    core.connect(0)
    call(core, "pause_generation", "keep", False)
    assert call(core, "is_paused") is True
    core.add_request(0, message(0))
    assert not run_core(core)
    assert not core.has_work
    call(core, "resume_generation")
    assert told == [True, False]
    assert len(run_core(core)) == 1


def test_a_pause_of_no_known_mode_is_refused() -> None:
    core = make_core()
    core.connect(0)
    with pytest.raises(InvalidArgumentError, match="mode is 'nap'; it must be one of abort, keep, wait"):
        call(core, "pause_generation", "nap", True)
    assert call(core, "is_paused") is False


# ---------------------------------------------------------------------- whose prefixes are whose


@pytest.mark.parametrize(("per_frontend", "hits"), [(False, 32), (True, 0)])
def test_two_frontends_share_cached_prefixes_unless_each_has_its_own_salt(per_frontend: bool, hits: int) -> None:
    core = make_core(service=ServiceConfig(salt_per_frontend=per_frontend))
    for frontend in (0, 1):
        core.connect(frontend, session=bytes([frontend]) * 16)
        core.add_request(frontend, message(0, prompt=range(40)))
        run_core(core)
    assert core.stats().prefix_hits == hits
    core.add_request(1, message(1, prompt=range(40)))
    run_core(core)
    assert core.stats().prefix_hits == hits + 32, "its own prefix is found all the same"


def test_a_frontend_that_connects_anew_finds_its_prefixes_again() -> None:
    core = make_core(service=ServiceConfig(salt_per_frontend=True))
    for frontend in (0, 1):
        core.connect(frontend, session=SESSION)
        core.add_request(frontend, message(0, prompt=range(40)))
        run_core(core)
        core.disconnect(frontend)
    assert core.stats().prefix_hits == 32


@pytest.mark.parametrize("per_frontend", [False, True])
def test_requests_of_different_salts_never_share(per_frontend: bool) -> None:
    core = make_core(service=ServiceConfig(salt_per_frontend=per_frontend))
    core.connect(0, session=SESSION)
    for handle, salt in enumerate(("", "a", "b", "ab")):
        core.add_request(0, message(handle, prompt=range(40), cache_salt=salt))
        run_core(core)
    assert core.stats().prefix_hits == 0


def test_embeddings_of_the_same_bytes_and_another_dtype_are_another_prefix() -> None:
    core = make_core()
    core._checks = core._checks._replace(accepts_embeddings=True)
    core.connect(0)
    for handle, dtype in enumerate(("float16", "bfloat16", "float16")):
        embeds = message(handle, prompt=[0] * 40, prompt_embeds=Tensor(0, dtype, [40, 8]))
        core.add_request(0, embeds, [bytes(range(64)) * 10])
        run_core(core)
        assert core.stats().prefix_hits == (32 if handle == 2 else 0)


# ---------------------------------------------------------------------- how it is


def test_the_core_reports_the_load_of_each_frontend() -> None:
    core = make_core(max_num_seqs=1)
    core.connect(0, weight=2.5, name="notebook")
    core.connect(3)
    for handle in range(3):
        core.add_request(0, message(handle))
    core.set_credit(3, False)
    for _ in range(2):
        core.step()
    first, second = core.frontends()
    assert (first.id, first.name, first.weight) == (0, "notebook", 2.5)
    assert (first.num_running, first.num_waiting, first.tokens_in_flight) == (1, 2, 21)
    assert (first.generation_tokens, first.slow) == (2, False)
    assert (second.id, second.slow) == (3, True)


def test_latencies_are_of_recent_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core()
    assert core.latencies() == (Latency(), Latency())
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    core.connect(0)
    for handle in range(3):
        core.add_request(0, message(handle))
        while core.has_work:
            now += 0.5
            core.step()
        now += 100.0  # idle time must not count as latency
    first, between = core.latencies()
    assert (first.p50, between.p50, between.p99) == (0.5, 0.5, 0.5)


def test_an_unlikely_age_keeps_the_place_in_the_queue_and_counts_in_no_latency() -> None:
    core = make_core(max_num_seqs=1)
    core.connect(0)
    for handle, age in enumerate((0.0, -5.0, math.nan, 100.0, 1e300, math.inf, 4000.0)):
        core.add_request(0, message(handle, age_s=age))
    order = []
    while core.has_work:
        for out in core.step().values():
            order += [finished.handle for finished in out.finished]
            assert all(started.queued_s < 3700 for started in out.started)
    assert order == [4, 5, 6, 3, 0, 1, 2]
    assert 50 < core.latencies()[0].p99 < 100
    measured = core.meter.measured()
    by_name = {one.name: one for one in measured.distributions}
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert sum(by_name[f"{name}_seconds"].counts) == 4
        assert 100 < by_name[f"{name}_seconds"].sum < 200
    assert sum(by_name["request_prefill_time_seconds"].counts) == 7
    assert measured.ended == [0, 7, 0, 0]
    assert measured.prompt_tokens == 7 * 3


def test_embeddings_that_are_not_finite_end_their_request_only() -> None:
    core = make_core()
    core._checks = core._checks._replace(accepts_embeddings=True)
    core.connect(0)
    for handle, value in enumerate((1.0, math.nan, math.inf)):
        values = np.full((3, 8), value, np.float32)
        embeds = message(handle, prompt=(0, 0, 0), prompt_embeds=Tensor(0, "float32", [3, 8]))
        core.add_request(0, embeds, [values.tobytes()])
    ended = {handle: finished for (_, handle), (_, finished) in run_core(core).items()}
    assert (ended[0].reason, ended[0].error) == ("length", "")
    for handle in (1, 2):
        assert (ended[handle].reason, ended[handle].error) == ("error", "InvalidRequestError")
        assert "prompt_embeds has a NaN, or a value out of the range of float32" in ended[handle].error_text


def test_embeddings_are_read_while_steps_go_on_and_not_for_a_request_that_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readers, go_on = list[threading.Thread](), threading.Event()

    def read(*given: Any) -> None:
        readers.append(threading.current_thread())
        go_on.wait()

    monkeypatch.setattr(loop, "check_embeds_values", read)
    core = make_core()
    core._checks = core._checks._replace(accepts_embeddings=True)
    core.connect(0)

    def add(handle: int) -> None:
        embeds = message(handle, prompt=(0, 0, 0), prompt_embeds=Tensor(0, "float32", [3, 8]))
        core.add_request(0, embeds, [bytes(96)])

    go_on.set()
    add(0)
    assert len(run_core(core)) == 1
    assert readers != [threading.current_thread()]
    go_on.clear()
    for handle in (1, 2):
        add(handle)
    core.add_request(0, message(3))
    core.abort(0, [2])
    assert set(run_core(core, until=lambda ended: len(ended) == 2)) == {(0, 2), (0, 3)}
    go_on.set()
    assert set(run_core(core)) == {(0, 1)}
    assert len(readers) == 2


def test_a_frontend_has_a_limited_number_of_unanswered_calls_and_loses_them_when_it_leaves() -> None:
    core, made = make_core(), list[Future[Any]]()
    core.methods["wait"] = Method(lambda: made.append(Future()) or made[-1])
    for frontend in (1, 2):
        core.connect(frontend)
    for _ in range(MAX_CALLS):
        core.call("wait", encode_value([]), 1)
    with pytest.raises(OverloadedError, match=f"{MAX_CALLS} calls"):
        core.call("wait", encode_value([]), 1)
    core.call("wait", encode_value([]), 2)
    made[0].set_result(None)
    core.call("wait", encode_value([]), 1)
    core.disconnect(1)
    assert [one.cancelled() for one in made] == [False, *[True] * (MAX_CALLS - 1), False, True]


def test_calls_for_an_unknown_frontend_do_nothing() -> None:
    core = make_core()
    core.disconnect(5)
    core.set_credit(5, False)
    assert core.frontends() == []


def test_a_pause_is_answered_after_the_outputs_of_the_last_step() -> None:
    core = make_core(async_scheduling=True)
    core.connect(0)
    core.add_request(0, message(0, max_tokens=9))
    assert core.step()
    pausing = core.lifecycle.pause("keep")
    assert core.step(), "the step that was in flight"
    assert not pausing.done()
    assert core.has_work
    assert core.step() == {}
    assert pausing.done()


# ---------------------------------------------------------------------- calls that cost much


def test_files_are_read_while_steps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, files = threading.Event(), {"tokenizer.json": b"{}"}
    monkeypatch.setattr(methods, "read_files", lambda *where: files if go_on.wait() else {})
    core = make_core()
    core.connect(0)
    go_on.set()
    reading = core.call("tokenizer_files", encode_value([]))
    assert isinstance(reading, Future)
    while not reading.done():
        core.step()
    assert reading.result() == files
    go_on.clear()
    asked = [core.call("tokenizer_files", encode_value([])) for _ in range(MAX_CALLS)]
    with pytest.raises(OverloadedError):
        core.call("tokenizer_files", encode_value([]))
    core.add_request(0, message(0))
    assert len(run_core(core, until=bool)) == 1
    core.disconnect(0)
    go_on.set()
    assert all(isinstance(one, Future) and one.cancelled() for one in asked)
    run_core(core)


def test_a_call_that_fails_costs_no_trace_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[str] = []
    monkeypatch.setattr(traceback, "format_exc", lambda: traces.append("made"))
    core, answers = make_core(), list[UtilityResult]()
    core.connect(0)
    server: Any = SimpleNamespace(send=lambda frontend, message: answers.append(message))
    take(core, server, Event(0, UtilityCall(1, "nap")))
    assert (answers[0].error, traces) == ("NotSupportedError", [])


def test_a_result_that_no_client_would_decode_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_BODY_BYTES", 164, raising=False)
    core = make_core()
    core.methods["read"] = Method(lambda size: b"x" * size)
    assert call(core, "read", 90) == b"x" * 90
    with pytest.raises(InvalidRequestError, match="the result of read can't travel: it has 102 bytes"):
        call(core, "read", 100)
