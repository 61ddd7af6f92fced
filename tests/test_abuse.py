"""Invalid values for every parameter and every call that the core answers give a typed error that names the parameter,
or have a documented effect. They never cause another exception or a hang, and never affect other requests.

The tables are built from the dataclasses, signatures and the core's own table, so new parameters and calls are covered
automatically.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny
from daemons import PATIENCE_S, Daemon, short_folder
from mainspring import (
    BeamSearchParams,
    EngineArgs,
    LLMEngine,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from mainspring.ipc.codec import NO_INSTANCE, encode
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError, MainspringError, NotPermittedError
from plain import make_engine, run

HUGE = 10**5000  # more digits than Python converts to a string


def deep() -> list[Any]:
    made: list[Any] = []
    for _ in range(5000):
        made = [made]
    return made


def cyclic() -> dict[str, Any]:
    made: dict[str, Any] = {"type": "object"}
    made["properties"] = made
    return made


NUMBERS: list[Any] = [0, -1, 1, -(2**31), 2**31, 2**63, -(2**63) - 1, 2**64, 10**400, HUGE, -HUGE]
NUMBERS += [math.nan, math.inf, -math.inf, 1e308, -1e308, 5e-324, 0.5, -0.0, 1j]
TEXTS: list[Any] = ["", " ", "x", "\0", "\ud800", "1", "-1", "x" * 100_000, "~nobody", b"x", b"\xff"]
LISTS: list[Any] = [
    [],
    [None],
    [[]],
    ["a"],
    [""],
    ["\ud800"],
    [-1],
    [0],
    [0.5],
    [HUGE],
    [math.nan],
    (),
    {1, 2},
    range(3),
]
DICTS: list[Any] = [
    {},
    {"a": 1},
    {1: "a"},
    {"x": 1.0},
    {-1: 1.0},
    {HUGE: 1.0},
    {1: math.nan},
    {1: HUGE},
    {1: 2**70},
    {None: None},
]
OBJECTS: list[Any] = [None, True, False, object(), object, len, lambda *_: None, threading.Lock(), iter([1]), deep()]
VALUES = [*NUMBERS, *TEXTS, *LISTS, *DICTS, *OBJECTS, cyclic(), [lambda *_: 1 / 0], NotImplemented, Exception("x")]

SAMPLING = [field.name for field in dataclasses.fields(SamplingParams)]
ARGS = [field.name for field in dataclasses.fields(EngineArgs)]
ADD = [*inspect.signature(LLMEngine.add_request).parameters][1:-1]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make("llama", tmp_path_factory.mktemp("tiny"), tokenizer=True)


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[LLMEngine]:
    with make_engine(path) as made:
        send = made.engine_core.add_request

        def as_over_a_wire(message: Any, *more: Any, **named: Any) -> None:
            encode(message, NO_INSTANCE, 0)
            send(message, *more, **named)

        made.engine_core.add_request = as_over_a_wire  # type: ignore[method-assign]
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left(engine: LLMEngine) -> Iterator[None]:
    yield
    engine.abort_request([*engine.output_processor._requests])
    to_the_end(engine)


def tried(name: str, value: Any, act: Any) -> bool:
    """Whether the value was accepted; if not, check that the error is a `MainspringError` that names the parameter."""
    try:
        act()
    except MainspringError as error:
        said = str(error)
    else:
        return True
    assert name in said, f"the error does not say {name}: {said:.200}"
    assert len(said) < 2000, "a sentence is no dump"
    return False


def to_the_end(engine: LLMEngine) -> dict[str, RequestOutput]:
    found, steps = {}, 0
    while engine.has_unfinished_requests():
        steps += 1
        assert steps < 20_000, "the engine is stuck"
        found.update({output.request_id: output for output in engine.step()})
    return found


@pytest.mark.parametrize("field", SAMPLING)
def test_any_value_of_a_sampling_parameter_is_taken_or_refused_by_name(engine: LLMEngine, field: str) -> None:
    accepted = 0
    for at, value in enumerate(VALUES):
        tried(field, value, lambda value=value: SamplingParams(**{field: value}))
        params = SamplingParams(temperature=0.0)
        setattr(params, field, value)  # not checked here, so that the engine must check it
        if params.max_tokens is None or field != "max_tokens":
            params.max_tokens = 3
        accepted += tried(
            field if field != "guided_decoding" else "", value,
            lambda at=at, params=params: engine.add_request(str(at), [5, 6, 7], params),
        )  # fmt: skip
    ended = to_the_end(engine)
    assert len(ended) == accepted
    assert all(output.finished for output in ended.values())
    for wrong in (object(), 1j):
        with pytest.raises(InvalidArgumentError, match=field):
            SamplingParams(**{field: wrong})


@pytest.mark.parametrize("argument", ADD)
def test_any_value_of_an_argument_of_add_request_is_taken_or_refused(engine: LLMEngine, argument: str) -> None:
    accepted = 0
    for at, value in enumerate(VALUES):
        call = {"request_id": str(at), "prompt": [5, 6, 7], "params": SamplingParams(max_tokens=2), argument: value}
        accepted += tried("", value, lambda call=call: engine.add_request(**call))
    assert len(to_the_end(engine)) == accepted


@pytest.mark.parametrize("field", [one.name for one in dataclasses.fields(StructuredOutputsParams)])
def test_any_value_of_a_structured_output_is_taken_or_refused_by_name(engine: LLMEngine, field: str) -> None:
    accepted = 0
    for at, value in enumerate(VALUES):
        given: dict[str, Any] = (
            {field: value}
            if field in ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
            else {"json": {}, field: value}
        )

        def act(at: int = at, given: dict[str, Any] = given) -> None:
            params = SamplingParams(temperature=0.0, max_tokens=3, structured_outputs=StructuredOutputsParams(**given))
            engine.add_request(str(at), [5, 6, 7], params)

        accepted += tried("json" if (field, value) == ("whitespace_pattern", "\ud800") else field, value, act)
    ended = to_the_end(engine)
    assert len(ended) == accepted
    for output in ended.values():
        error = output.outputs[0].error
        assert error is None or type(error) is not MainspringError, f"another exception in the core: {error}"


@pytest.mark.parametrize("field", [one.name for one in dataclasses.fields(BeamSearchParams)])
def test_any_value_of_a_beam_search_is_taken_or_refused_by_name(engine: LLMEngine, field: str) -> None:
    for value in VALUES:
        given = {"beam_width": 2, "max_tokens": 2, field: value}
        tried(
            field,
            value,
            lambda given=given: BeamSearchParams(**given).sampling_params(),
        )


@pytest.mark.parametrize("field", ARGS)
def test_any_value_of_an_engine_argument_is_taken_or_refused_by_name(field: str) -> None:
    for value in VALUES:
        tried(field, value, lambda value=value: EngineArgs(**{field: value}).create_engine_config())
    with pytest.raises(InvalidArgumentError, match=field):
        EngineArgs(**{field: object()}).create_engine_config()  # type: ignore[arg-type]


NUMERIC = [
    field.name
    for field in dataclasses.fields(EngineArgs)
    if any(kind in str(field.type) for kind in ("int", "float")) and "Literal" not in str(field.type)
]


@pytest.mark.slow
@pytest.mark.parametrize("field", NUMERIC)
def test_the_largest_and_smallest_engine_arguments_start_an_engine_or_say_why_not(path: Path, field: str) -> None:
    for value in (1, 2**62, 1e300):
        try:
            with make_engine(path, **{field: value}) as engine:
                output = run(engine, {"a": ([5, 6, 7], SamplingParams(max_tokens=2))})["a"]
                assert output.finished
        except MainspringError as error:
            said = str(error)
        else:
            said = ""
        assert len(said) < 2000


# ------------------------------------------------------------------ what tokens are left


def test_a_bias_may_name_tokens_as_json_does(engine: LLMEngine) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, logit_bias={"123": 1e4})  # type: ignore[dict-item]
    assert params.logit_bias == {123: 1e4}
    assert run(engine, {"a": ([5, 6], params)})["a"].outputs[0].token_ids == [123, 123]
    for wrong in ({"x": 1.0}, {"-1": 1.0}, {"1.0": 1.0}, {"": 1.0}, {"1" * 5000: 1.0}, {"5": 1.0, 5: 2.0}):
        with pytest.raises(InvalidArgumentError, match="logit_bias"):
            SamplingParams(logit_bias=wrong)  # type: ignore[arg-type]


def test_a_request_that_is_left_no_token_fails_alone(engine: LLMEngine) -> None:
    tokenizer = engine.get_tokenizer()
    one, two = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("a", "b"))
    jobs = {
        "none later": ([5, 6], SamplingParams(max_tokens=3, allowed_token_ids=[one], bad_words=["aa"])),
        "one": ([5, 6], SamplingParams(max_tokens=3, allowed_token_ids=[one, two], bad_words=["a"], ignore_eos=True)),
    }
    ended = run(engine, jobs)
    (completion,) = ended["none later"].outputs
    assert completion.finish_reason == "error"
    assert "is left" in str(completion.error)
    assert completion.token_ids == [one]
    with pytest.raises(InvalidRequestError, match="is left"):
        engine.add_request("none", "x", SamplingParams(max_tokens=3, allowed_token_ids=[one], bad_words=["a"]))
    assert ended["one"].outputs[0].token_ids == [two] * 3


# ------------------------------------------------------------------ the core's calls

WIRE = [None, True, 0, -1, 2**63, 1.5, math.nan, "", "x", "abort" * 9, b"\xff", [], [[1]], {}, {"a": {}}, "x" * 100_000]
CALLS = [(), *((value,) for value in WIRE), (1, "x"), (None,) * 4, ("x",) * 50, ([[]] * 1000,)]


@pytest.fixture(scope="module")
def methods(engine: LLMEngine) -> list[str]:
    return sorted(engine.engine_core.core.methods)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def admin_methods(engine: LLMEngine) -> set[str]:
    table = engine.engine_core.core.methods  # type: ignore[attr-defined]
    return {name for name, method in table.items() if method.admin}


def answer(engine: LLMEngine, method: str, arguments: tuple[Any, ...]) -> Any:
    """The result or the error: a `MainspringError`, or a `TimeoutError` if the core hangs, which fails the test."""
    found: Any
    try:
        found = engine.engine_core.call(method, *arguments, timeout=PATIENCE_S)
    except MainspringError as error:
        found = error
    assert type(found) is not MainspringError, f"{method}{arguments!r:.60}: another exception in the core: {found}"
    return found


@pytest.mark.slow
def test_garbage_for_every_call_of_the_core_is_answered_and_affects_no_other_frontend(
    methods: list[str], admin_methods: set[str]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    with short_folder() as folder:
        daemon = Daemon(folder, MAINSPRING_PROFILE_DIR=str(folder))
        try:
            daemon.ready_line()
            with LLMEngine.connect(daemon.address) as mine, LLMEngine.connect(daemon.address) as theirs:
                expected = run(theirs, {"r": ("Once upon a time", params)})["r"].outputs[0].token_ids
                epoch = daemon.status()[1]["epoch"]
                streamed: list[list[int]] = []
                going = threading.Event()

                def stream() -> None:
                    while not going.is_set() or not streamed:
                        streamed.append(run(theirs, {"r": ("Once upon a time", params)})["r"].outputs[0].token_ids)

                thread = threading.Thread(target=stream, daemon=True)
                thread.start()
                for method in methods:
                    for arguments in CALLS:
                        found = answer(mine, method, arguments)
                        too_large = isinstance(found, InvalidRequestError) and "has a body of" in str(found)
                        assert isinstance(found, NotPermittedError) or too_large or method not in admin_methods
                going.set()
                thread.join(PATIENCE_S)
                assert not thread.is_alive()
                assert all(tokens == expected for tokens in streamed)
            with LLMEngine.connect(f"{daemon.address}.admin") as admin:
                for method in methods:
                    for arguments in CALLS:
                        answer(admin, method, arguments)
                    for undo in ("wake_up", "resume_generation"):
                        if undo in methods:
                            answer(admin, undo, ())
                assert run(admin, {"r": ("Once upon a time", params)})["r"].outputs[0].token_ids == expected
            assert daemon.status()[1]["epoch"] == epoch
        finally:
            daemon.end()


def test_the_table_is_not_empty(methods: list[str], admin_methods: set[str]) -> None:
    assert admin_methods
    assert set(methods) >= admin_methods
    assert len(methods) > 5
    assert json.dumps(methods)
