"""Tokens of patient requests are sent for several steps at a time; those of other requests are not delayed."""

from __future__ import annotations

import msgspec
import pytest

from mainspring import EngineArgs, LLMEngine
from mainspring.core.batched_outputs import HOLD_SECONDS, OutputBatcher
from mainspring.engine.request.input_processor import core_message
from mainspring.ipc.messages import AddRequest, Finished, Logprobs, Outputs, Routed, Sampling, Started, Stats
from mainspring.ipc.params import RequestOutputKind, SamplingParams
from test_input import PROCESSOR

US, THEM = 0, 1


def request(handle: int, patient: bool = True) -> AddRequest:
    return AddRequest(handle, "", [1], Sampling(9), patient=patient)


@pytest.fixture
def held() -> OutputBatcher:
    held = OutputBatcher()
    held.added(US, request(1))
    held.added(US, request(2))
    return held


def told(held: OutputBatcher, now: float, **by_frontend: Outputs) -> list[tuple[int, Outputs]]:
    return list(held.due({US if name == "us" else THEM: outputs for name, outputs in by_frontend.items()}, now))


def test_tokens_wait_for_the_next_end_and_come_in_order(held: OutputBatcher) -> None:
    assert told(held, 0.0, us=Outputs([1, 2], [5, 6], stats=Stats(num_running=2))) == []
    assert told(held, 0.1, us=Outputs([1], [7])) == []
    last = Outputs([2, 1], [8, 9], finished=[Finished(2, "length")])
    everything = Outputs([1, 2, 1, 2, 1], [5, 6, 7, 8, 9], finished=last.finished, stats=Stats(num_running=2))
    assert told(held, 0.15, us=last) == [(US, everything)]
    assert list(held.due({}, 0.2, more=False)) == []


@pytest.mark.parametrize("now", [HOLD_SECONDS, 5.0])
def test_no_token_waits_for_long(held: OutputBatcher, now: float) -> None:
    assert told(held, 0.0, us=Outputs([1], [5])) == []
    assert told(held, now, us=Outputs([1], [6])) == [(US, Outputs([1, 1], [5, 6]))]
    assert told(held, now, us=Outputs([1], [7])) == [], "the time counts anew"


def test_nor_while_only_others_get_any(held: OutputBatcher) -> None:
    assert told(held, 0.0, us=Outputs([1], [5])) == []
    assert told(held, HOLD_SECONDS, them=Outputs([1], [6])) == [(US, Outputs([1], [5]))]


def test_a_first_token_is_told_at_once(held: OutputBatcher) -> None:
    first = Outputs([1], [5], [Started(1, 0.0, 0.1, 0)])
    assert told(held, 0.0, us=first) == [(US, first)]


def test_experts_are_told_at_once() -> None:
    held = OutputBatcher()
    routed = Outputs([1], [6], routed=Routed([1], [0], [1], [1, 1], "uint8", b"\1"))
    assert told(held, 0.0, us=Outputs([1], [5])) == []
    assert told(held, 0.1, us=routed) == [(US, msgspec.structs.replace(routed, handles=[1, 1], token_ids=[5, 6]))]


def test_log_probabilities_keep_the_message_whose_tokens_they_count(held: OutputBatcher) -> None:
    scored = Outputs([2], [6], logprobs=[Logprobs(1, b"", b"", b"", [0])])
    assert told(held, 0.0, us=Outputs([1], [5])) == []
    assert told(held, 0.1, us=scored) == [(US, Outputs([1], [5])), (US, scored)]


def test_a_frontend_with_a_request_that_is_awaited_gets_all_at_once(held: OutputBatcher) -> None:
    held.added(US, request(3, patient=False))
    assert told(held, 0.0, us=Outputs([1], [5])) == [(US, Outputs([1], [5]))]
    end = Outputs([1, 3], [6, 7], finished=[Finished(3, "stop")])
    assert told(held, 0.1, us=end) == [(US, end)]
    assert told(held, 0.2, us=Outputs([1], [8])) == []


def test_frontends_wait_each_for_itself(held: OutputBatcher) -> None:
    held.added(THEM, request(1, patient=False))
    assert told(held, 0.0, us=Outputs([1], [5]), them=Outputs([1], [6])) == [(THEM, Outputs([1], [6]))]
    assert list(held.due({}, 0.1, more=False)) == [(US, Outputs([1], [5]))]


def test_a_frontend_that_has_left_gets_no_outputs(held: OutputBatcher) -> None:
    held.added(US, request(3, patient=False))
    held.forget(US)
    held.added(US, request(1))  # another frontend's request with the same handle
    assert told(held, 0.0, us=Outputs([1], [5])) == []
    held.forget(US)
    assert list(held.due({}, 0.1, more=False)) == []


@pytest.mark.parametrize(
    ("params", "patient"),
    [
        ({}, False),
        ({"output_kind": RequestOutputKind.DELTA}, False),
        ({"output_kind": RequestOutputKind.FINAL_ONLY}, True),
        ({"output_kind": RequestOutputKind.FINAL_ONLY, "stop": "."}, False),
    ],
)
def test_a_request_is_patient_if_its_tokens_are_read_at_the_end(params: dict[str, object], patient: bool) -> None:
    asked = PROCESSOR.process_inputs("r", {"prompt_token_ids": [1]}, SamplingParams(max_tokens=2, **params))  # type: ignore[arg-type]
    assert core_message(asked, 0).patient is patient


@pytest.mark.slow
def test_a_core_process_delays_tokens_only_for_patient_requests() -> None:
    with LLMEngine.from_engine_args(EngineArgs(skip_tokenizer_init=True, max_model_len=256)) as engine:
        client, messages = engine.engine_core, []
        receive = client.get_outputs

        def noted(timeout: float | None = None) -> Outputs | None:
            outputs = receive(timeout)
            messages.append(0 if outputs is None else len(outputs.token_ids))
            return outputs

        client.get_outputs = noted  # type: ignore[method-assign]
        for kind in (RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY):
            messages.clear()
            params = SamplingParams(max_tokens=60, ignore_eos=True, detokenize=False, output_kind=kind)
            engine.add_request("r", {"prompt_token_ids": [5, 6]}, params)
            while engine.has_unfinished_requests():
                engine.step()
            assert sum(messages) == 60
            assert (max(messages) == 1) == (kind == RequestOutputKind.DELTA), messages
