"""Adapters when cores die and when frontends share a core: the tokens equal those of transformers with PEFT."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from daemons import Daemon, short_folder, until
from kills import kill_core
from mainspring import (
    AsyncEngineArgs,
    AsyncLLMEngine,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    PromptAdapterRequest,
    RequestOutput,
    SamplingParams,
)
from mainspring.ipc.errors import InvalidRequestError
from peft_folders import generate, make_lora, make_prompt_adapter

GUARD = 240.0  # seconds
LENGTH = 200
PROMPT = list(range(5, 40))
PARAMS = SamplingParams(temperature=0.0, max_tokens=LENGTH, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and its adapters."""
    place = tmp_path_factory.mktemp("adapters")
    model = tiny.make("llama", place / "model")
    for seed, name in enumerate("abc"):
        make_lora(model, place / name, seed, r=4, lora_alpha=12, target_modules=["q_proj", "up_proj", "lm_head"])
    make_prompt_adapter(model, place / "virtual", 7, 6)
    return place


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[int]]:
    names = {"a": "a", "b": "b", "c": "c", "virtual": "virtual", "none": None}
    return {
        name: generate(folder / "model", None if one is None else folder / one, PROMPT, LENGTH)
        for name, one in names.items()
    }


def arguments(folder: Path) -> dict[str, object]:
    return {
        "model": str(folder / "model"),
        "skip_tokenizer_init": True,
        "max_model_len": 256,
        "enable_lora": True,
        "max_loras": 2,
        "max_cpu_loras": 2,
        "enable_prompt_adapter": True,
        "max_num_seqs": 4,
    }


def lora(folder: Path, name: str, number: int) -> LoRARequest:
    return LoRARequest(name, number, str(folder / name))


def finish(engine: LLMEngine) -> Iterator[RequestOutput]:
    deadline = time.monotonic() + GUARD
    while engine.has_unfinished_requests():
        assert time.monotonic() < deadline
        yield from engine.step()


@pytest.mark.slow
def test_after_a_core_died_adapters_are_there_again(folder: Path, expected: dict[str, list[int]]) -> None:
    virtual = PromptAdapterRequest("virtual", 1, str(folder / "virtual"), 6)
    with LLMEngine.from_engine_args(EngineArgs(**arguments(folder))) as engine:  # type: ignore[arg-type]
        supervisor = engine.engine_core._connection._core.supervisor
        assert engine.add_lora(lora(folder, "c", 30))
        assert engine.pin_lora(30)
        for name, one in (("a", lora(folder, "a", 10)), ("b", lora(folder, "b", 20)), ("none", None)):
            engine.add_request(name, {"prompt_token_ids": PROMPT}, PARAMS, lora_request=one)
        engine.add_request("virtual", {"prompt_token_ids": PROMPT}, PARAMS, prompt_adapter_request=virtual)
        found: dict[str, list[int]] = {}
        kills = 2
        for output in finish(engine):
            found[output.request_id] = output.outputs[0].token_ids
            assert output.outputs[0].error is None
            if kills and len(found.get("none", ())) >= 60 * (3 - kills):
                kills -= 1
                kill_core(supervisor)
        assert supervisor.launch.restarts == 2
        assert found == {name: expected[name] for name in found}
        assert 30 in engine.list_loras()
        assert engine.add_lora(lora(folder, "a", 10))
        assert engine.add_lora(lora(folder, "b", 20))
        assert engine.list_loras() == {20, 30}, "it is still pinned"
        engine.add_request("c", {"prompt_token_ids": PROMPT}, PARAMS, lora_request=lora(folder, "c", 30))
        assert [output.outputs[0].token_ids for output in finish(engine)][-1] == expected["c"]


@pytest.mark.slow
def test_frontends_of_a_daemon_have_numbers_of_their_own(folder: Path, expected: dict[str, list[int]]) -> None:
    flags = [
        f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}")
        for name, value in arguments(folder).items()
    ]
    with short_folder() as place:
        daemon = Daemon(place, *flags)
        try:
            daemon.ready_line()
            with (
                LLMEngine.connect(daemon.address, skip_tokenizer_init=True) as one,
                LLMEngine.connect(daemon.address, skip_tokenizer_init=True) as two,
            ):
                for engine, name in ((one, "a"), (two, "b")):
                    engine.add_request(name, {"prompt_token_ids": PROMPT}, PARAMS, lora_request=lora(folder, name, 1))
                for engine, name in ((one, "a"), (two, "b")):
                    assert [output.outputs[0].token_ids for output in finish(engine)][-1] == expected[name]
                assert one.list_loras() == two.list_loras() == {1}
                assert two.add_lora(lora(folder, "a", 2)), "of which there is one copy"
                assert two.list_loras() == {1, 2}
                assert one.remove_lora(1)
                assert one.list_loras() == set()
                assert two.list_loras() == {1, 2}
                with pytest.raises(InvalidRequestError, match="can't be read"):
                    two.add_lora(LoRARequest("gone", 3, str(folder / "nowhere")))
                assert two.pin_lora(2)
                _, before = daemon.status()
                os.kill(before["core_pid"], signal.SIGKILL)
                until(lambda: daemon.status()[1].get("core_pid") not in (None, 0, before["core_pid"]))
                two.add_request("a", {"prompt_token_ids": PROMPT}, PARAMS, lora_request=lora(folder, "a", 2))
                assert [output.outputs[0].token_ids for output in finish(two)][-1] == expected["a"]
                assert two.list_loras() == {2}
        finally:
            daemon.end()


@pytest.mark.slow
def test_in_an_async_engine(folder: Path, expected: dict[str, list[int]]) -> None:
    async def run() -> dict[str, list[int]]:
        args = AsyncEngineArgs(**arguments(folder))  # type: ignore[arg-type]
        async with AsyncLLMEngine.from_engine_args(args) as engine:
            assert await engine.add_lora(lora(folder, "a", 1))
            assert await engine.list_loras() == {1}
            assert await engine.pin_lora(1)

            async def one(name: str, number: int) -> list[int]:
                request = lora(folder, name, number) if number else None
                tokens: list[int] = []
                async for output in engine.generate({"prompt_token_ids": PROMPT}, PARAMS, name, lora_request=request):
                    assert output.outputs[0].error is None
                    tokens = output.outputs[0].token_ids
                return tokens

            names = {"a": 1, "b": 2, "c": 3, "none": 0}
            found = await asyncio.gather(*(one(name, number) for name, number in names.items()))
            assert 1 in await engine.list_loras()
            assert await engine.remove_lora(1)
            return dict(zip(names, found, strict=True))

    assert asyncio.run(run()) == {name: expected[name] for name in ("a", "b", "c", "none")}
