"""Every kind of step, result and control record can be written to a pipe and read again."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, get_args

import msgspec
import numpy as np
import pytest

from mainspring.core.memory.updates import Copies, LayerGroup, StateCopies, TableUpdate
from mainspring.core.plan import control
from mainspring.core.plan.codec import decode, encode
from mainspring.core.plan.control import Control, ParameterRows, SetParameters, WorkerFacts
from mainspring.core.plan.pooling_facts import PoolingFacts
from mainspring.core.plan.step import (
    IN_FLIGHT,
    Encoded,
    NewSequence,
    PromptPart,
    RowError,
    Scores,
    SequenceMedia,
    StepPlan,
    StepResult,
)
from mainspring.ipc.errors import NotSupportedError
from mainspring.ipc.messages import Adapter, ModelFacts, Pooling, Sampling


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


NO_TABLES = TableUpdate(*np.zeros((4, 0), np.int32))
PROMPT = NewSequence(3, ints(5, 6, 7), 3, Sampling(9))


def plan(**fields: Any) -> StepPlan:
    """A step of one decode."""
    base: dict[str, Any] = {
        "id": 7,
        "slots": ints(3),
        "starts": ints(3),
        "counts": ints(1),
        "token_ids": ints(IN_FLIGHT),
        "samples": np.array([True]),
        "guessed": ints(0),
        "admitted": [],
        "released": ints(),
        "tables": NO_TABLES,
        "scored": [],
    }
    return StepPlan(**(base | fields))


def admitting(sequence: NewSequence) -> StepPlan:
    return plan(starts=ints(0), counts=ints(3), token_ids=ints(5, 6, 7), admitted=[sequence])


def with_fields(sequence: NewSequence, **fields: Any) -> NewSequence:
    return msgspec.structs.replace(sequence, **fields)


RICH = Sampling(
    9,
    seed=-3,
    temperature=0.5,
    stop_token_ids=[2],
    repetition_penalty=1.2,
    logprobs=2,
    prompt_logprobs=0,
    logit_bias={4: -1.5},
    bad_words=[[1, 2], [3]],
)
STATE_COPIES = StateCopies(ints(0, 1).reshape(2, 1), ints(1, 9).reshape(2, 1), np.zeros((2, 0), np.int32))

PLANS = {
    "decode": plan(),
    "prompt": admitting(PROMPT),
    "chunk of a prompt": plan(starts=ints(0), counts=ints(2), token_ids=ints(5, 6), samples=np.array([False])),
    "mixed": plan(
        slots=ints(3, 0),
        starts=ints(3, 0),
        counts=ints(1, 2),
        token_ids=ints(9, 5, 6),
        samples=np.array([True, False]),
        guessed=ints(0, 0),
    ),
    "guesses": plan(counts=ints(3), token_ids=ints(4, 8, 9), guessed=ints(2)),
    "tables": plan(tables=TableUpdate(ints(0, 1), ints(3, 3), ints(0, 0), ints(17, 18))),
    "released slots": plan(released=ints(1, 2)),
    "rules": admitting(with_fields(PROMPT, sampling=RICH)),
    "grammar": admitting(with_fields(PROMPT, grammar=4, sampling=Sampling(9, grammar=["regex", "a+"]))),
    "adapter": admitting(with_fields(PROMPT, adapter=2, adapter_place=1)),
    "embeddings": admitting(with_fields(PROMPT, embeds=np.arange(12, dtype=np.float32).reshape(3, 4))),
    "bfloat16 embeddings": admitting(with_fields(PROMPT, embeds=np.arange(12, dtype=np.uint16).reshape(3, 4))),
    "virtual tokens": admitting(with_fields(PROMPT, num_virtual=2, embeds=np.ones((2, 4), np.float32))),
    "draft": admitting(with_fields(PROMPT, speculates=True)),
    "pooling": admitting(with_fields(PROMPT, pooling=Pooling("embed", 8, False, 1), keeps_rows=True)),
    "scored prompt": plan(scored=[PromptPart(3, 1, 2, 0)]),
    "copies": plan(copies=Copies([(1, 2)], [(3, 4), (5, 6)])),
    "recurrent state": plan(states=STATE_COPIES),
    "states in host memory": plan(states=STATE_COPIES._replace(host=Copies([(9, 0)], [(1, 2), (9, 1)]))),
    "several decode steps": plan(num_steps=4),
    "media": admitting(with_fields(PROMPT, media=(SequenceMedia(4, 1, 2),))),
    "items to encode": plan(encodes=ints(4, 5)),
}

SCORES = Scores(np.array([0, 2]), ints(1, 2, 3, 4).reshape(2, 2), np.zeros((2, 2), np.float32), ints(1, 7))
RESULTS = {
    "tokens": StepResult(7, ints(1, 1), np.array([4, 5])),
    "errors": StepResult(7, ints(1), np.array([4]), errors=[RowError(0, "InvalidRequestError", "why")]),
    "complete": StepResult(7, ints(1), np.array([4]), complete=[0]),
    "log probabilities": StepResult(7, ints(1), np.array([4]), logprobs=[SCORES], prompt_logprobs=[SCORES]),
    "vectors": StepResult(7, ints(3), np.zeros(1, np.int64), pooled=[np.ones((2, 3), np.float32)]),
    "experts": StepResult(7, ints(2), np.array([4]), experts=np.arange(8, dtype=np.uint8).reshape(2, 2, 2)),
    "many experts": StepResult(7, ints(1), np.array([4]), experts=np.full((1, 2, 2), 300, np.uint16)),
    "guesses": StepResult(7, ints(3), np.array([4, 5, 6]), guesses=ints(4, 5)),
    "encoded items": StepResult(
        7, ints(1), np.array([4]), encoded=[Encoded(4, 512), Encoded(5, 0, "InvalidRequestError", "why")]
    ),
    "lack of memory": StepResult(7, ints(0), np.zeros(0, np.int64), lack="out of memory"),
}

CONTROLS: dict[type, Control] = {
    control.PrepareAdapter: control.PrepareAdapter(1, Adapter(2, "name", "/folder")),
    control.DropAdapter: control.DropAdapter(1),
    control.PrepareGrammar: control.PrepareGrammar(1, "regex", "a+"),
    control.DropGrammar: control.DropGrammar(1),
    control.DropFunctions: control.DropFunctions((1, 2)),
    control.CheckSampling: control.CheckSampling(Sampling(3, extra_args=b"\x81\xa1a\x01")),
    control.KeepMedia: control.KeepMedia(
        2, "image", ["pixel_values", "mask"], [np.arange(6, dtype=np.float32).reshape(1, 2, 3), np.ones(3, bool)]
    ),
    control.DropMedia: control.DropMedia(2),
    control.Sleep: control.Sleep(2),
    control.Wake: control.Wake(True, False),
    control.SetParameters: SetParameters([ParameterRows("w", 3, np.arange(6, dtype=np.uint16).reshape(2, 3))]),
    control.JoinTrainer: control.JoinTrainer("127.0.0.1", 29500, 1, 2, 1),
    control.LeaveTrainer: control.LeaveTrainer(),
    control.ReceiveParameters: control.ReceiveParameters(["w"], ["bfloat16"], [[2, 3]]),
    control.ReleaseMemory: control.ReleaseMemory(),
    control.StartProfile: control.StartProfile("x"),
    control.StopProfile: control.StopProfile(),
    control.Explain: control.Explain(),
}


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal, types and dtypes included."""
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and bool((one == other).all())
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, msgspec.Struct):
        return all(same(getattr(one, name), getattr(other, name)) for name in one.__struct_fields__)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def through_a_pipe(message: Any, kind: Any) -> Any:
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as source, os.fdopen(writer, "wb") as target:
        target.write(encode(message))
        target.close()
        return decode(source.read(), kind)


@pytest.mark.parametrize("name", PLANS)
def test_every_kind_of_step_goes_through_a_pipe(name: str) -> None:
    assert same(through_a_pipe(PLANS[name], StepPlan), PLANS[name])


@pytest.mark.parametrize("name", RESULTS)
def test_every_kind_of_result_goes_through_a_pipe(name: str) -> None:
    assert same(through_a_pipe(RESULTS[name], StepResult), RESULTS[name])


@pytest.mark.parametrize("kind", get_args(Control), ids=lambda kind: kind.__name__)
def test_every_control_record_goes_through_a_pipe(kind: type) -> None:
    assert same(through_a_pipe(CONTROLS[kind], Control), CONTROLS[kind])


def test_a_workers_facts_go_through_a_pipe() -> None:
    facts = WorkerFacts(
        ModelFacts(100, 8, 64, "float32", [2], tasks=["embed"]),
        [LayerGroup("full", (0, 2), 64), LayerGroup("windowed", (1,), 32, window=16)],
        10,
        64,
        pooling=PoolingFacts(["embed"], 8, 8, False, True),
    )
    assert same(through_a_pipe(facts, WorkerFacts), facts)


def test_the_comparison_sees_each_difference() -> None:
    for change in ({"id": 8}, {"starts": ints(4)}, {"starts": np.array([3])}, {"scored": [PromptPart(3, 1, 2, 0)]}):
        assert not same(plan(), plan(**change))
    assert not same(admitting(PROMPT), admitting(with_fields(PROMPT, grammar=1)))


def test_functions_of_the_user_do_not_leave_the_process() -> None:
    with pytest.raises(NotSupportedError, match="no worker elsewhere"):
        encode(admitting(with_fields(PROMPT, functions=(1,))))


@pytest.mark.parametrize(
    "spoil", [lambda b: b[:-1], lambda b: b"\xc1" + b, lambda b: b + b"\0"], ids=["cut", "bad", "more"]
)
def test_bytes_that_are_no_plan_are_an_error(spoil: Callable[[bytes], bytes]) -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode(spoil(encode(plan())), StepPlan)


def test_a_decode_step_of_many_requests_is_small() -> None:
    rows = 256
    many = plan(
        slots=np.arange(rows, dtype=np.int32),
        starts=np.zeros(rows, np.int32),
        counts=np.ones(rows, np.int32),
        token_ids=np.full(rows, IN_FLIGHT, np.int32),
        samples=np.ones(rows, bool),
        guessed=np.zeros(rows, np.int32),
    )
    assert len(encode(many)) < 6_000
