"""The checker of the public surface (`make surface-check` runs it whole): every row has a test, the page lists every
row, and a test that can't fail is detected.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import mainspring
from mainspring import EngineArgs, LLMEngine, SamplingParams
from mainspring.engine.args import FIELDS
from mainspring.engine.observe import metrics
from mainspring.engine.request import outputs
from surface import harness, page
from surface.harness import IN, NEXT, ROWS, Place, Row, check, existing, nothing, row, without
from surface.reasons import ELSEWHERE, WITHOUT_EFFECT
from surface.written import WRITTEN

page.load_rows()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(IN, tmp_path)
    yield made
    made.close()


class Toy:
    FLAG = True

    def __init__(self) -> None:
        self.attribute = 3

    def method(self) -> int:
        return 1

    @property
    def value(self) -> int:
        return 2

    @classmethod
    def make(cls) -> Toy:
        return cls()

    async def later(self) -> int:
        return 4

    async def stream(self) -> AsyncIterator[int]:
        yield 5


# ---------------------------------------------------------------------- nothing is forgotten


def test_every_member_field_metric_and_name_has_a_test() -> None:
    rest = existing().keys() - page.tested() - WITHOUT_EFFECT.keys() - ELSEWHERE.keys()
    assert sorted(rest) == []


def test_what_is_there_is_found_by_looking() -> None:
    found = existing()
    assert {"LLMEngine.step", "LLMEngine.connect", "LLMEngine.vllm_config", "LLMEngine.tokenizer"} <= found.keys()
    assert {"AsyncLLMEngine.dead_error", "LLM.llm_engine", "LLMEngine.__enter__"} <= found.keys()
    assert {f"SamplingParams.{field.name}" for field in dataclasses.fields(SamplingParams)} <= found.keys()
    assert {f"EngineArgs.{name}" for name in FIELDS} <= found.keys()
    assert {f"metrics.{name}" for name in metrics.HELP} <= found.keys()
    assert "RequestOutput.num_cached_tokens" in found
    assert not [name for name in found if "._" in name and not name.endswith("__")]


def test_a_new_member_and_one_that_goes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(page.incomplete())
    monkeypatch.setattr(LLMEngine, "brand_new", lambda self: None, raising=False)
    monkeypatch.delattr(LLMEngine, "has_unfinished_requests")
    assert set(page.incomplete()) - before == {
        "LLMEngine.brand_new: no test",
        "LLMEngine.has_unfinished_requests: missing",
    }


def test_the_written_list_and_the_tests_know_the_same_names() -> None:
    tests, listed = page.tested(), {*WITHOUT_EFFECT, *ELSEWHERE}
    assert sorted(set(WRITTEN) - tests - listed) == []
    assert not listed & {one.of for one in ROWS.values()}


def test_every_row_says_what_it_does() -> None:
    there = existing()
    assert [name for name in there if name in ROWS and not page.says(name, there)] == []


def test_modes_that_are_left_out_have_a_reason() -> None:
    assert [one.name for one in ROWS.values() if one.modes != harness.MODES and not one.why] == []


# ---------------------------------------------------------------------- a member that does nothing


def test_a_member_is_replaced_by_one_of_its_kind() -> None:
    for name in ("method", "make", "value", "attribute", "FLAG", "later", "stream"):
        kind = type("Other", (Toy,), {name: nothing(Toy, name)})
        toy = kind()
        given = getattr(toy, name)
        if name in ("method", "make"):
            given = given()
        if name == "later":
            given = asyncio.run(given())
        if name == "stream":
            given = asyncio.run(collected(given())) or None
        assert given is None, name


async def collected(stream: AsyncIterator[int]) -> list[int]:
    return [one async for one in stream]


@pytest.mark.parametrize(
    ("member", "test"),
    [
        ("method", lambda at: Toy().method()),
        ("value", lambda at: Toy().value),
        ("make", lambda at: Toy.make()),
        ("attribute", lambda at: isinstance(Toy(), Toy)),
    ],
)
def test_a_test_that_only_calls_is_found_out(
    place: Place, monkeypatch: pytest.MonkeyPatch, member: str, test: Any
) -> None:
    monkeypatch.setitem(harness.ENGINES, "Toy", Toy)
    assert "still passes" in check(Row(f"Toy.{member}", test), place).wrong


def test_a_test_that_checks_its_member_passes_and_one_that_fails_is_reported(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(harness.ENGINES, "Toy", Toy)

    def looks(at: Place) -> None:
        assert Toy().method() == 1

    def fails(at: Place) -> None:
        raise ValueError("as it happens")

    async def awaits(at: Place) -> None:
        assert await Toy().later() == 4

    async def forgets(at: Place) -> None:
        await Toy().later()

    assert check(Row("Toy.method", looks), place).wrong == ""
    assert "ValueError" in check(Row("Toy.method", fails), place).wrong
    assert check(Row("Toy.later", awaits), place).wrong == ""
    assert "still passes" in check(Row("Toy.later", forgets), place).wrong
    assert Toy().method() == 1, "it is put back"


def test_fields_outputs_metrics_and_names_are_taken_away(place: Place) -> None:
    with without("SamplingParams.max_tokens", place):
        assert SamplingParams(max_tokens=3).max_tokens == 16
    with without("SamplingParams.stop", place):
        assert SamplingParams(stop="x").stop == []
    with without("EngineArgs.block_size", place):
        assert EngineArgs(block_size=32).block_size == 16
        assert place._arguments({"block_size": 32, "max_num_seqs": 3})["max_num_seqs"] == 3
        assert "block_size" not in place._arguments({"block_size": 32})
    output = outputs.RequestOutput("a", "x", [1], None, [outputs.CompletionOutput(0, "y", [2])], True)
    with without("CompletionOutput.text", place):
        assert place.seen([output])[0].outputs[0].text is None
    with without("mainspring.SamplingParams", place):
        assert mainspring.SamplingParams is None
    assert mainspring.SamplingParams is SamplingParams
    with without("metrics.core_epoch", place):
        manager = metrics.StatLoggerManager(EngineArgs().create_engine_config())
        assert "mainspring:core_epoch" not in {one.name for one in manager.metrics()}
    assert "mainspring:core_epoch" in {one.name for one in manager.metrics()}
    assert SamplingParams(max_tokens=3).max_tokens == 3


def test_what_is_to_come_must_be_refused_by_name(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "NEXT", {})
    table: dict[str, Row] = {}
    monkeypatch.setattr(harness, "row", lambda name, **more: row(name, modes=(IN,), into=table))

    def silent(at: Place) -> None: ...

    def other(at: Place) -> None:
        raise mainspring.NotSupportedError("something else")

    def named(at: Place) -> None:
        raise mainspring.NotSupportedError("the feature is not there")

    for test in (silent, other, named):
        harness.comes(f"{test.__name__} feature")(test)
    told = {one.name: check(one, place, take_away=False).wrong for one in table.values()}
    assert "DID NOT RAISE" in told["silent feature"]
    assert told["other feature"]
    assert told["named feature"] == ""


@pytest.mark.parametrize("name", ["LLMEngine.step", "SamplingParams.n", "RequestOutput.finished", "metrics.core_epoch"])
def test_a_row_passes_and_can_fail(place: Place, name: str) -> None:
    assert check(ROWS[name], place).wrong == ""


# ---------------------------------------------------------------------- the page


def test_the_page_names_every_row() -> None:
    text = page.text(page.expected())
    for name in existing():
        shown = page._shown(name)
        assert f"`{shown}`" in text or any(f"`{name}" in line for line in text.splitlines()), name
    assert all(name in text for name in NEXT)
    failed = [one._replace(wrong="x") if one.row == "LLMEngine.step" else one for one in page.expected()]
    assert page.text(failed) != text
