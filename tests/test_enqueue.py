"""`LLM.enqueue`, `enqueue_chat` and `wait_for_completion`: requests are sent now, and their outputs are read later."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import stand_in_core
from mainspring import (
    LLM,
    BeamSearchParams,
    PoolingRequestOutput,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from mainspring.demo import MODEL_PATH
from mainspring.engine.text.tokenizer import load_tokenizer
from mainspring.ipc import processor_names
from mainspring.ipc.config import EngineConfig, ModelConfig, SchedulerConfig
from mainspring.ipc.errors import (
    EngineDeadError,
    InvalidArgumentError,
    InvalidRequestError,
    RequestFailedError,
)
from mainspring.ipc.inproc_client import InprocClient
from mainspring.ipc.logits_processors import AdapterLogitsProcessor
from stand_in_core import StandInOwner

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
BAD = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="(a"))
QUIET: dict[str, Any] = {"use_tqdm": False}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as made:
        yield made


class Idle(AdapterLogitsProcessor):
    """Changes nothing."""

    def is_argmax_invariant(self) -> bool:
        return True

    def new_req_logits_processor(self, params: SamplingParams) -> None:
        return None


@pytest.fixture(scope="module")
def inside() -> Iterator[LLM]:
    with mock.patch.object(processor_names, "only_here", True), LLM(logits_processors=[Idle]) as made:
        assert isinstance(made.llm_engine.engine_core, InprocClient)
        yield made


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("where", ["llm", "inside"])
def test_outputs_come_later_in_the_order_of_the_requests(where: str, request: pytest.FixtureRequest) -> None:
    llm: LLM = request.getfixturevalue(where)
    prompts, lengths = [f"Count up from {at} to 9:" for at in range(6)], [9, 2, 7, 1, 5, 3]
    params = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in lengths]
    expected = texts(llm.generate(prompts, params, **QUIET))
    ids = llm.enqueue(prompts[:4], params[:4], **QUIET) + llm.enqueue(prompts[4:], params[4:], **QUIET)
    outputs = llm.wait_for_completion(**QUIET)
    assert [output.request_id for output in outputs] == ids
    assert len(set(ids)) == 6
    assert texts(outputs) == expected
    assert llm.wait_for_completion(**QUIET) == []
    assert not llm.llm_engine.has_unfinished_requests()


def test_a_batch_between_gives_only_its_own_outputs(llm: LLM) -> None:
    alone = texts(llm.generate(["What is 2 plus 3?", "Tell me a story."], GREEDY, **QUIET))
    (first,) = llm.enqueue("What is 2 plus 3?", GREEDY, **QUIET)
    assert texts(llm.generate("Tell me a story.", GREEDY, **QUIET)) == alone[1:]
    (beams,) = llm.beam_search("Tell me a story.", BeamSearchParams(beam_width=2, max_tokens=3))
    assert len(beams.sequences) == 2
    (output,) = llm.wait_for_completion(**QUIET)
    assert (output.request_id, output.outputs[0].text) == (first, alone[0])


def test_conversations_are_enqueued_through_the_template(llm: LLM) -> None:
    talks = [[{"role": "user", "content": f"What is {at} plus three?"}] for at in range(2)]
    replies = llm.chat(talks, GREEDY, **QUIET)
    assert len(llm.enqueue_chat(talks[0], GREEDY, **QUIET) + llm.enqueue_chat(talks[1:], GREEDY, **QUIET)) == 2
    found = llm.wait_for_completion(RequestOutput, **QUIET)
    assert [one.prompt for one in found] == [one.prompt for one in replies]
    assert texts(found) == texts(replies)


def test_nothing_is_sent_if_a_prompt_or_grammar_is_wrong(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="prompt 1: the prompt is empty"):
        llm.enqueue(["a", ""], GREEDY, **QUIET)
    with pytest.raises(InvalidRequestError, match="prompt 1: regex can't be used"):
        llm.enqueue(["a", "b"], [GREEDY, BAD], **QUIET)
    with pytest.raises(InvalidRequestError, match="prompt 1: a conversation is 5"):
        llm.enqueue_chat([[{"role": "user", "content": "a"}], [5]], GREEDY, **QUIET)  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match="on_error is 'no'"):
        llm.enqueue("a", on_error="no")  # type: ignore[arg-type]
    assert llm.wait_for_completion(**QUIET) == []


def test_a_request_that_fails_is_raised_at_the_end_or_returned(llm: LLM) -> None:
    for raises in (True, False):
        llm.enqueue("Once upon a time", GREEDY, **QUIET)
        llm.enqueue("a", BAD, on_error="return", **QUIET)
        if raises:
            with pytest.raises(InvalidRequestError, match="prompt 1: regex can't be used") as raised:
                llm.wait_for_completion(**QUIET)
            outputs: Any = raised.value.outputs
        else:
            outputs = llm.wait_for_completion(on_error="return", **QUIET)
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error"]


def test_outputs_of_another_type_are_refused_and_stay(llm: LLM) -> None:
    ids = llm.enqueue("Once upon a time", GREEDY, **QUIET)
    with pytest.raises(InvalidArgumentError, match=f"request {ids[0]} gives a RequestOutput"):
        llm.wait_for_completion(PoolingRequestOutput, **QUIET)
    assert [one.request_id for one in llm.wait_for_completion((PoolingRequestOutput, RequestOutput), **QUIET)] == ids


def test_both_calls_have_a_progress_bar(llm: LLM) -> None:
    class Bar:
        made: list[Bar] = []  # noqa: RUF012

        def __init__(self, total: int, desc: str, **options: Any) -> None:
            self.total, self.desc, self.done, self.closed = total, desc, 0, False
            self.made.append(self)

        def set_postfix_str(self, text: str, refresh: bool) -> None:
            self.text = text

        def update(self, count: int) -> None:
            self.done += count

        def close(self) -> None:
            self.closed = True

    llm.enqueue(["a", "b", "c"], GREEDY, use_tqdm=Bar)
    llm.generate("d", SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True), **QUIET)  # the others end first
    llm.wait_for_completion(use_tqdm=Bar)
    assert [(bar.total, bar.done, bar.closed) for bar in Bar.made] == [(3, 3, True)] * 2
    assert [bar.desc for bar in Bar.made] == ["Checking prompts", "Processed prompts"]
    assert "tokens/s" in Bar.made[1].text


def test_threads_share_the_queue(llm: LLM) -> None:
    found: dict[int, list[str]] = {}

    def ask(at: int) -> None:
        prompts = [f"What is {at} plus {other}?" for other in range(3)]
        llm.enqueue(f"Count from {at}:", GREEDY, **QUIET)
        found[at] = [str(output.prompt) for output in llm.generate(prompts, GREEDY, **QUIET)]

    threads = [threading.Thread(target=ask, args=(at,)) for at in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {at: [f"What is {at} plus {other}?" for other in range(3)] for at in range(4)}
    enqueued = [str(one.prompt) for one in llm.wait_for_completion(**QUIET)]
    assert sorted(enqueued) == [f"Count from {at}:" for at in range(4)]


def test_an_interrupt_while_waiting_aborts_what_was_enqueued(llm: LLM) -> None:
    llm.enqueue(["Tell me a long story."] * 3, SamplingParams(max_tokens=4000, ignore_eos=True), **QUIET)
    before = llm.llm_engine.get_num_unfinished_requests()
    step = llm.llm_engine.step
    llm.llm_engine.step = lambda: signal.raise_signal(signal.SIGINT) or []  # type: ignore[method-assign,func-returns-value]
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.wait_for_completion(**QUIET)
    finally:
        llm.llm_engine.step = step  # type: ignore[method-assign]
    assert (before, llm.llm_engine.get_num_unfinished_requests()) == (3, 0)
    assert llm.wait_for_completion(**QUIET) == []
    assert len(llm.generate("Once", GREEDY, **QUIET)) == 1


def test_an_output_that_somebody_else_took_is_an_error_and_not_waited_for(llm: LLM) -> None:
    llm.enqueue("Once upon a time", GREEDY, **QUIET)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()
    with pytest.raises(RequestFailedError, match="taken by a step of llm_engine"):
        llm.wait_for_completion(**QUIET)
    assert len(llm.generate("Once", GREEDY, **QUIET)) == 1


# ------------------------------------------------------------------ a daemon, and its limits


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInOwner]:
    limits = SchedulerConfig(max_requests_per_frontend=2)
    config = EngineConfig(model_config=ModelConfig(model=str(MODEL_PATH)), scheduler_config=limits)
    monkeypatch.setattr(stand_in_core, "EngineConfig", lambda: config)
    with stand_in_core.stand_in(address=f"ipc://{tmp_path}/core.sock") as owner:
        yield owner


def test_what_exceeds_the_limits_of_a_daemon_is_sent_while_waiting(daemon: StandInOwner) -> None:
    with LLM(connect=daemon.address, skip_tokenizer_init=True) as llm:
        params = SamplingParams(max_tokens=3)
        llm.enqueue([[3], [9], [20], [30], [40]], params, **QUIET)
        llm.llm_engine.engine_core.call("echo")  # after which the daemon has what was sent before
        assert len(daemon.core.added) == 2
        with pytest.raises(InvalidRequestError, match="3 enqueued requests are unsent"):
            llm.set_tokenizer(load_tokenizer(Path(MODEL_PATH)))
        found = llm.wait_for_completion(**QUIET)
        assert [one.outputs[0].token_ids for one in found] == [[t, t + 1, t + 2] for t in (3, 9, 20, 30, 40)]


def test_a_core_that_is_gone_ends_the_wait(daemon: StandInOwner) -> None:
    with LLM(connect=daemon.address, skip_tokenizer_init=True, reconnect_timeout=0) as llm:
        llm.enqueue([[3]] * 2, SamplingParams(max_tokens=1 << 19), **QUIET)
        daemon.kill()
        with pytest.raises(EngineDeadError):
            llm.generate([[4]], **QUIET)
        with pytest.raises(EngineDeadError):
            llm.wait_for_completion(**QUIET)
        assert llm.wait_for_completion(**QUIET) == []
