"""Structured outputs from prompt to text: in any batch, across preemption and crashes, and beside hostile grammars."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from harness import make_core, message, run_core
from kills import kill_core
from mainspring import (
    EngineArgs,
    LLMEngine,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from mainspring.core.loop import EngineCore
from mainspring.core.worker.generation_worker import _grammar_compiler
from mainspring.core.worker.registry import Registry
from mainspring.ipc.config import EngineConfig, ModelConfig
from mainspring.ipc.errors import InvalidArgumentError, InvalidRequestError
from mainspring.ipc.messages import AddRequest, Sampling
from tiers import fast_only

GUARD = 120.0  # seconds
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
HOSTILE = "(x+x+)+y" * 400


def params(form: dict[str, Any], **fields: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=StructuredOutputsParams(**form), **{"max_tokens": 200, **fields})


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    found, deadline = {}, time.monotonic() + GUARD
    while engine.has_unfinished_requests():
        assert time.monotonic() < deadline
        found.update({output.request_id: output for output in engine.step()})
    return found


def run(engine: LLMEngine, **requests: SamplingParams) -> dict[str, str]:
    for name, one in requests.items():
        engine.add_request(name, "Once upon a time", one)
    return {name: output.outputs[0].text for name, output in finish(engine).items()}


def in_process(**args: Any) -> LLMEngine:
    return LLMEngine.from_engine_args(EngineArgs(**args), enable_multiprocessing=False)


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    with in_process() as engine:
        yield engine


def test_each_form_gives_what_was_asked_for(engine: LLMEngine) -> None:
    found = run(
        engine,
        json=params({"json": PERSON}, temperature=1.0, seed=1),
        any=params({"json_object": True}, temperature=1.0, seed=2, max_tokens=500),
        regex=params({"regex": r"[0-9]{3}-[a-f]{4}"}, temperature=1.0, seed=3),
        choice=params({"choice": ["red", "green", "blue"]}, temperature=0.0),
        grammar=params({"grammar": 'root ::= "yes" | "no " [0-9]+ "!"'}, temperature=1.0, seed=4),
    )
    jsonschema.validate(json.loads(found["json"]), PERSON)
    assert re.fullmatch(r"[0-9]{3}-[a-f]{4}", found["regex"])
    assert found["choice"] in ("red", "green", "blue")
    assert re.fullmatch(r"yes|no [0-9]+!", found["grammar"])
    assert found["any"].lstrip().startswith("{")


def test_the_older_name_asks_for_the_same(engine: LLMEngine) -> None:
    form = StructuredOutputsParams(choice=["one", "two"])
    new, old = SamplingParams(structured_outputs=form, seed=1), SamplingParams(guided_decoding=form, seed=1)
    found = run(engine, new=new, old=old)
    assert found["new"] == found["old"] in ("one", "two")
    with pytest.raises(InvalidArgumentError, match="guided_decoding"):
        SamplingParams(structured_outputs=form, guided_decoding=form)
    with pytest.raises(InvalidArgumentError, match="structured_outputs is"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]


def test_a_document_ends_with_the_request_and_not_before_it_is_complete(engine: LLMEngine) -> None:
    engine.add_request("r", "x", params({"regex": "[a-z]{5}"}, min_tokens=0, temperature=1.0, seed=1))
    engine.add_request("long", "x", params({"regex": "[a-z]{5}"}, min_tokens=50, temperature=1.0, seed=1))
    found = finish(engine)
    for output in found.values():
        (completion,) = output.outputs
        assert completion.finish_reason == "stop"
        assert re.fullmatch("[a-z]{5}", completion.text)


def test_other_rules_hold_beside_the_grammar(engine: LLMEngine) -> None:
    tokenizer = engine.get_tokenizer()
    one, two = (tokenizer.encode(text, add_special_tokens=False)[0] for text in ("yes", "no"))
    asked = {"form": {"choice": ["yes", "no"]}, "temperature": 0.0}
    plain = run(engine, a=params(**asked))["a"]
    bias = {one if plain == "yes" else two: -1e9}
    other = run(engine, a=params(**asked, logit_bias=bias))["a"]
    assert {plain, other} == {"yes", "no"}


@pytest.mark.parametrize("rule", ["allowed_token_ids", "bad_words"])
def test_a_request_whose_other_rules_forbid_what_its_grammar_allows_brings_no_token(
    engine: LLMEngine, rule: str
) -> None:
    given: Any = {"allowed_token_ids": [engine.get_tokenizer().encode("z", add_special_tokens=False)[0]]}
    if rule == "bad_words":
        given = {"bad_words": ["y", "ye", "yes"]}
    engine.add_request("a", "x", params({"choice": ["yes"]}, max_tokens=1, **given))
    (completion,) = finish(engine)["a"].outputs
    assert (completion.token_ids, completion.finish_reason) == ([], "error")
    assert "no token is left" in str(completion.error)


@pytest.mark.parametrize("overlap", fast_only((True,), [False, True]))
def test_the_same_document_alone_among_others_chunked_and_preempted(overlap: bool) -> None:
    asked = {f"r{i}": params({"json": PERSON}, temperature=1.0, seed=i, logprobs=1) for i in range(6)}

    def outcome(engine: LLMEngine, names: list[str]) -> dict[str, Any]:
        for name in names:
            engine.add_request(name, f"{name}: a person, as JSON, please.", asked[name])
        engine.add_request("plain", "Tell me", SamplingParams(max_tokens=60, ignore_eos=True))
        found = finish(engine)
        return {name: (found[name].outputs[0].token_ids, found[name].outputs[0].logprobs) for name in names}

    with in_process() as engine:
        alone = {name: outcome(engine, [name])[name] for name in asked}
    with in_process(
        num_gpu_blocks_override=24, block_size=8, max_model_len=160, max_num_batched_tokens=24, async_scheduling=overlap
    ) as engine:
        assert outcome(engine, list(asked)) == alone
        assert engine.engine_core.core.scheduler.stats().num_preemptions > 0


def test_a_form_that_cannot_be_is_its_requests_error_alone(engine: LLMEngine) -> None:
    engine.add_request("good", "x", params({"choice": ["a", "b"]}))
    engine.add_request("bad", "x", params({"regex": "(?=a)b("}))
    engine.add_request("plain", "x", SamplingParams(max_tokens=5, ignore_eos=True))
    found = finish(engine)
    (bad,) = found["bad"].outputs
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, InvalidRequestError)
    assert "regex" in str(bad.error)
    assert found["good"].outputs[0].text in ("a", "b")
    assert len(found["plain"].outputs[0].token_ids) == 5


def test_while_a_hostile_grammar_compiles_others_go_on_and_it_can_be_aborted() -> None:
    with in_process() as engine:
        engine.add_request("hostile", "x", params({"regex": HOSTILE}))
        engine.add_request("plain", "x", SamplingParams(max_tokens=30, ignore_eos=True))
        engine.abort_request("hostile")
        found = finish(engine)
        assert found["hostile"].outputs[0].finish_reason == "abort"
        assert len(found["plain"].outputs[0].token_ids) == 30
        core = engine.engine_core.core
        deadline = time.monotonic() + GUARD
        while core.has_work:  # the compiler is not interrupted, but its grammar is no longer needed
            assert time.monotonic() < deadline
            core.step()
        assert run(engine, again=params({"choice": ["a", "b"]}))["again"] in ("a", "b")


def test_a_checkpoint_without_what_grammars_need_refuses_them_and_lives() -> None:
    core = make_core()
    config = EngineConfig(model_config=ModelConfig(model=None))
    model: Any = SimpleNamespace(vocab_size=50, eos_token_ids=(1,))
    registry = Registry(lambda: _grammar_compiler(config, model))

    def control(record: Any) -> Any:
        return registry.prepare_grammar(record.number, record.kind, record.text)

    core.worker.control = control  # type: ignore[method-assign]
    core.connect(0)
    core.add_request(0, message(0))
    core.add_request(0, AddRequest(1, "", [1, 2], Sampling(4, grammar=["json", "{}"])))
    ended = run_core(core)
    assert {handle: end.reason for (_, handle), (_, end) in ended.items()} == {0: "length", 1: "error"}
    assert ended[0, 1][1].error == "NotSupportedError"
    assert "tokenizer.json" in ended[0, 1][1].error_text


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY])
def test_an_answer_that_may_not_end_by_a_token_ends_without_one(engine: LLMEngine, kind: RequestOutputKind) -> None:
    asked = params({"choice": ["yes", "no"]}, ignore_eos=True, temperature=0.0, output_kind=kind)
    engine.add_request("a", "x", asked)
    (completion,) = finish(engine)["a"].outputs
    assert completion.text in ("yes", "no")
    assert completion.finish_reason == "stop"
    assert engine.get_tokenizer().decode(completion.token_ids) == completion.text


@pytest.mark.parametrize(
    "grammar", [["regex"], ["nonsense", "a"], ["json", "{"], ["regex", "("], ["", ""], ["x" * 10**6, ""]]
)
def test_requests_that_our_frontends_never_send_are_refused(engine: LLMEngine, grammar: list[str]) -> None:
    core: EngineCore = engine.engine_core.core
    core.add_request(0, AddRequest(10**6, "", [5, 6], Sampling(5, grammar=grammar)))
    deadline = time.monotonic() + GUARD
    ended: list[Any] = []
    while not ended:
        assert time.monotonic() < deadline
        ended = [finished for outputs in core.step().values() for finished in outputs.finished]
    assert [(one.handle, one.reason) for one in ended] == [(10**6, "error")]
    assert ended[0].error in ("InvalidRequestError", "InvalidArgumentError")


def test_output_that_does_not_fit_its_grammar_is_an_error(engine: LLMEngine) -> None:
    core: EngineCore = engine.engine_core.core
    letters = engine.get_tokenizer().encode("zz", add_special_tokens=False)
    sampling = Sampling(20, grammar=["regex", "[0-9]+"])
    core.add_request(0, AddRequest(10**6 + 1, "", [5, 6], sampling, output_token_ids=letters, resumed=True))
    ended: list[Any] = []
    for _ in range(1000):
        ended += [finished for outputs in core.step().values() for finished in outputs.finished]
        if ended:
            break
    assert [(one.reason, one.error) for one in ended] == [("error", "InvalidRequestError")]


@pytest.mark.slow
def test_a_document_goes_on_in_the_right_state_under_the_next_core() -> None:
    asked = {f"r{i}": params({"json": PERSON}, temperature=1.0, seed=i) for i in range(4)}
    asked["long"] = params({"regex": "[a-z]{400}"}, temperature=1.0, seed=9, max_tokens=450)
    with in_process() as engine:
        undisturbed = run(engine, **asked)
    with LLMEngine.from_engine_args(EngineArgs(), enable_multiprocessing=True) as engine:
        supervisor = engine.engine_core._connection._core.supervisor
        for name, one in asked.items():
            engine.add_request(name, "Once upon a time", one)
        found, kills, deadline = {}, 1, time.monotonic() + GUARD
        while engine.has_unfinished_requests():
            assert time.monotonic() < deadline
            for output in engine.step():
                found[output.request_id] = output.outputs[0].text
            if kills and len(found.get("long", "")) >= 50:
                kills = 0
                kill_core(supervisor)
        assert supervisor.launch.restarts == 1
    assert found == undisturbed


def a_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "number", "enum", "boolean", "null"]
    if depth < 3:
        kinds += ["object", "array", "anyOf"] * 2
    match rng.choice(kinds):
        case "string":
            length = {"type": "string", "maxLength": rng.randint(1, 12)}
            return rng.choice(
                [length, {"type": "string", "pattern": "^[a-z]{2,6}$"}, {"type": "string", "format": "date"}]
            )
        case "integer":
            return {"type": "integer", "minimum": rng.randint(-5, 5), "maximum": rng.randint(6, 999)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 10}
        case "enum":
            return {"enum": [rng.choice(["a", "b", 1, None, True, "a long one"]) for _ in range(3)]}
        case "array":
            inner = a_schema(rng, depth + 1)
            return {"type": "array", "items": inner, "minItems": rng.randint(0, 1), "maxItems": rng.randint(1, 3)}
        case "object":
            names = rng.sample(["name", "age", "x", "y", "list", "id", "é"], rng.randint(1, 4))
            return {
                "type": "object",
                "properties": {name: a_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
        case "anyOf":
            return {"anyOf": [a_schema(rng, depth + 1) for _ in range(2)]}
        case plain:
            return {"type": plain}


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.slow)])
def test_random_schemas_give_valid_documents(engine: LLMEngine, count: int) -> None:
    schemas = {str(seed): a_schema(random.Random(seed)) for seed in range(count)}
    for seed, schema in schemas.items():
        asked = params({"json": schema}, temperature=1.0, seed=int(seed), max_tokens=600)
        engine.add_request(seed, "Give me an example, as JSON.", asked)
    for name, output in finish(engine).items():
        (completion,) = output.outputs
        assert completion.finish_reason == "stop", schemas[name]
        jsonschema.validate(json.loads(completion.text), schemas[name])
