"""Limits on requests and tokens in flight, for one frontend and for all; a request above a limit may be sent again
later."""

from __future__ import annotations

from collections import Counter, deque
from concurrent.futures import Future
from typing import Any

import pytest

from harness import Finished, make_core, message, run_core
from mainspring.core import loop
from mainspring.core.loop import MAX_CALLS, EngineCore
from mainspring.core.plan import request_limits
from mainspring.core.plan.control import PrepareGrammar
from mainspring.core.plan.fair_share import FairShare
from mainspring.core.plan.request import Request
from mainspring.core.plan.step import PROMPT_LOGITS
from mainspring.ipc import codec
from mainspring.ipc.config import SchedulerConfig
from mainspring.ipc.errors import OverloadedError
from mainspring.ipc.messages import AddRequest, Sampling

LIMITS = SchedulerConfig(max_requests_per_frontend=1)


def core_with(frontends: int = 2, **limits: Any) -> EngineCore:
    core = make_core(**limits)
    for frontend in range(frontends):
        core.connect(frontend)
    return core


def refused(core: EngineCore) -> list[Finished]:
    """The refused ones of the requests just added."""
    return [finished for out in core.scheduler.take_notices().values() for finished in out.finished]


@pytest.mark.parametrize(
    ("limit", "value", "by"),
    [
        ("max_requests_per_frontend", 2, [0, 0, 0]),
        ("max_tokens_per_frontend", 15, [0, 0, 0]),  # 3 + 4 tokens each
        ("max_requests_in_flight", 2, [0, 1, 1]),
        ("max_tokens_in_flight", 15, [0, 1, 1]),
    ],
)
def test_the_request_past_a_limit_is_refused_as_overload_that_names_limit_and_value(
    limit: str, value: int, by: list[int]
) -> None:
    core = core_with(**{limit: value})
    for handle, frontend in enumerate(by):
        core.add_request(frontend, message(handle))
    [finished] = refused(core)
    assert (finished.handle, finished.reason, finished.error) == (2, "error", "OverloadedError")
    assert f"{limit} is {value}" in finished.error_text
    assert len(run_core(core)) == 2


@pytest.mark.parametrize("limit", ["max_requests_per_frontend", "max_requests_in_flight"])
@pytest.mark.parametrize("end", ["finish", "abort", "disconnect"])
def test_ended_requests_do_not_count(limit: str, end: str) -> None:
    core = core_with(**{limit: 1}, max_tokens_in_flight=7, max_tokens_per_frontend=7)
    core.add_request(0, message(0))
    if end == "finish":
        run_core(core)
    elif end == "abort":
        core.abort(0, [0])
        run_core(core)
    else:
        core.disconnect(0)
        core.connect(0)
    core.add_request(0, message(1))
    assert not refused(core)


def test_a_limit_of_one_frontend_does_not_bind_another() -> None:
    core = core_with(max_requests_per_frontend=1)
    core.add_request(0, message(0))
    core.add_request(1, message(0))
    assert not refused(core)


@pytest.mark.parametrize(
    ("limit", "value", "binds"),
    [
        ("max_requests_in_flight", 1, False),
        ("max_tokens_in_flight", 8, False),
        ("max_requests_per_frontend", 1, True),
        ("max_tokens_per_frontend", 8, True),
    ],
)
def test_only_the_limits_of_its_own_frontend_bind_a_resumed_request(limit: str, value: int, binds: bool) -> None:
    core = core_with(**{limit: value})
    for handle in range(2):
        core.add_request(0, message(handle, resumed=True))
    assert [finished.handle for finished in refused(core)] == ([1] if binds else [])


def test_a_resumed_request_may_come_from_another_core_that_had_as_many() -> None:
    fair = FairShare(False, 8, 64, Counter())
    fair.register(0)

    def new(handle: int) -> Request:
        return Request(message(handle), 0, 0.0, 1024)

    for handle in range(3):
        request_limits.check(LIMITS, fair, new(handle), resumed=True, cores=3)
        fair.add(new(handle))
    with pytest.raises(OverloadedError, match="this frontend has 3 requests in flight"):
        request_limits.check(LIMITS, fair, new(3), resumed=True, cores=3)
    fair.end(fair.of(0).requests[0])
    with pytest.raises(OverloadedError, match="this frontend has 2 requests in flight"):
        request_limits.check(LIMITS, fair, new(3), resumed=False, cores=3)


@pytest.mark.parametrize("limit", ["max_tokens_per_frontend", "max_tokens_in_flight"])
def test_a_request_that_exceeds_a_limit_by_itself_is_an_invalid_request(limit: str) -> None:
    core = core_with(**{limit: 6})
    core.add_request(0, message(0))
    [finished] = refused(core)
    assert finished.error == "InvalidRequestError"
    assert f"7 tokens; {limit} is 6" in finished.error_text


def test_tokens_past_the_models_length_do_not_count() -> None:
    core = core_with(max_tokens_per_frontend=64)
    core.add_request(0, message(0, max_tokens=10_000))
    assert not refused(core)
    assert core.frontends()[0].tokens_in_flight == 64


def test_max_num_queued_requests_counts_requests_beyond_max_num_seqs() -> None:
    core = core_with(max_num_seqs=2, max_num_queued_requests=1)
    for handle in range(3):
        core.add_request(handle % 2, message(handle))
    assert not refused(core)
    core.add_request(1, message(3))
    [finished] = refused(core)
    assert (finished.handle, finished.error) == (3, "OverloadedError")
    assert "max_num_queued_requests is 1" in finished.error_text
    core.add_request(1, message(4, resumed=True))
    assert not refused(core)


def test_checks_of_requests_that_wait_are_limited_for_each_frontend(monkeypatch: pytest.MonkeyPatch) -> None:
    core, compiling = core_with(), deque[Future[None]]()

    def control(record: Any) -> Any:
        if isinstance(record, PrepareGrammar):
            compiling.append(Future())
            return compiling[-1]

    monkeypatch.setattr(core.worker, "control", control)

    def check(frontend: int, text: str) -> Any:
        request = AddRequest(0, "", [0], Sampling(1, grammar=["regex", text]))
        return core.call("check_request", codec.encode_value([request]), frontend)

    waiting = [check(0, f"a{at}") for at in range(MAX_CALLS)]
    with pytest.raises(OverloadedError, match=f"{MAX_CALLS} calls of this frontend"):
        check(0, "b")
    assert len(compiling) == MAX_CALLS, "the refused one is not begun"
    assert not check(1, "c").done(), "another frontend has its own limit"
    compiling[7].set_result(None)
    core.step()
    assert [call.done() for call in waiting].count(True) == 1
    assert not check(0, "d").done()
    with pytest.raises(OverloadedError):
        check(0, "e")
    core.disconnect(0)
    core.connect(0)
    assert not check(0, "f").done()


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"bad_words": [[1, 2]] * 4097}, "bad_words has 4097 entries"),
        ({"allowed_token_ids": [1] * 2000}, "allowed_token_ids has 2000 entries"),
        ({"stop_token_ids": [1] * 2000}, "stop_token_ids has 2000 entries"),
        ({"logprobs": 513}, "max_logprobs, 512"),
        ({"prompt_logprobs": 2**31 - 1}, "max_logprobs, 512"),
    ],
)
def test_the_size_of_one_request_is_bounded(fields: dict[str, Any], names: str) -> None:
    core = core_with()
    core.add_request(0, AddRequest(0, "", [1, 2], Sampling(4, **fields)))
    core.add_request(0, message(1))
    [finished] = refused(core)
    assert (finished.handle, finished.error) == (0, "InvalidRequestError")
    assert names in finished.error_text
    assert len(run_core(core)) == 1


def test_requests_whose_outputs_exceed_a_message_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "MAX_LOGPROBS", 10 * (8 + PROMPT_LOGITS))
    core = core_with(max_num_seqs=8)
    for handle, logprobs in enumerate((10, 11)):
        core.add_request(0, AddRequest(handle, "", [1, 2], Sampling(4, logprobs=logprobs)))
    [finished] = refused(core)
    assert finished.handle == 1
    assert "max_num_seqs, 8" in finished.error_text
