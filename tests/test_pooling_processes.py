"""Pooling across processes: a private core, many streams, a daemon, cores that die."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import pooled
from daemons import Daemon, short_folder
from kills import kill_core
from mainspring import LLM, AsyncLLMEngine, EngineArgs, LLMEngine, PoolingParams, SamplingParams
from mainspring.ipc.errors import InvalidRequestError
from plain import make_engine

PROMPTS = pooled.prompts(90, 33, 64, 1, 120, 17)
PATIENCE = 120.0  # seconds; a guard against hanging


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pooled.make("qwen3", tmp_path_factory.mktemp("checkpoint"), tokenizer=True)


@pytest.fixture(scope="module")
def expected(path: Path) -> list[np.ndarray]:
    with make_engine(path, runner="pooling") as engine:
        return pooled.vectors(engine, PROMPTS)


@pytest.fixture(scope="module")
def daemon(path: Path) -> Iterator[Daemon]:
    with short_folder() as folder:
        started = Daemon(folder, "--model", str(path))
        started.ready_line()
        yield started
        started.end()


def same(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.slow
def test_requests_end_once_with_the_same_vectors_though_the_core_dies(path: Path, expected: list[np.ndarray]) -> None:
    args = EngineArgs(model=str(path), max_model_len=256, max_num_batched_tokens=8, max_num_seqs=4)
    with LLMEngine.from_engine_args(args) as engine:
        supervisor = engine.engine_core._connection._core.supervisor  # type: ignore[attr-defined]
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(str(number), prompt, PoolingParams())
        found: dict[str, np.ndarray] = {}
        killed = False
        while engine.has_unfinished_requests():
            for output in engine.step():
                assert output.request_id not in found, "it ends once"
                found[output.request_id] = output.outputs.data  # type: ignore[attr-defined]
            if not killed and 0 < len(found) < len(PROMPTS):
                kill_core(supervisor)
                killed = True
        assert killed
        assert supervisor.launch.restarts == 1
        assert same([found[str(number)] for number in range(len(PROMPTS))], expected)
        assert same(pooled.vectors(engine, PROMPTS), expected), "and the next core serves as the first did"


def test_a_daemon_serves_vectors_to_all(daemon: Daemon, expected: list[np.ndarray]) -> None:
    with LLM(connect=daemon.address) as one, LLM(connect=daemon.address) as other:
        for llm in (one, other):
            assert llm.llm_engine.get_supported_tasks() == ("embed", "token_embed", "score")
            found = llm.encode(PROMPTS, PoolingParams(task="embed"), use_tqdm=False)
            assert same([output.outputs.data for output in found], expected)
            assert [output.request_id for output in found] == sorted(output.request_id for output in found)
        with pytest.raises(InvalidRequestError, match="this model can embed, token_embed, score"):
            one.generate("hello", SamplingParams(), use_tqdm=False)
        [rows] = one.encode(PROMPTS[1], pooling_task="token_embed", use_tqdm=False)
        assert rows.outputs.data.shape == (33, 64)
        [vector] = one.embed("hello", use_tqdm=False, pooling_params=PoolingParams(dimensions=8))
        assert vector.outputs.hidden_size == 8
        with pytest.raises(InvalidRequestError, match="prompt 1: dimensions is 65") as raised:
            one.embed(["hello"] * 2, use_tqdm=False, pooling_params=[PoolingParams(), PoolingParams(dimensions=65)])
        assert raised.value.outputs is None, "nothing was computed"


def test_vectors_can_be_written_to(daemon: Daemon, expected: list[np.ndarray]) -> None:
    with LLM(connect=daemon.address) as llm:
        for task in ("embed", "token_embed"):
            [found] = llm.encode(PROMPTS[0], pooling_task=task, use_tqdm=False)
            found.outputs.data[:] = 7.0
        [again] = llm.encode(PROMPTS[0], pooling_task="embed", use_tqdm=False)
    assert same([again.outputs.data], expected[:1])


def test_an_async_engine_yields_each_vector_once(daemon: Daemon, expected: list[np.ndarray]) -> None:
    async def one(engine: AsyncLLMEngine, number: int) -> np.ndarray:
        outputs = [output async for output in engine.encode(PROMPTS[number], PoolingParams(), f"r{number}")]
        assert [(output.request_id, output.finished) for output in outputs] == [(f"r{number}", True)]
        return outputs[0].outputs.data

    async def main() -> list[np.ndarray]:
        async with AsyncLLMEngine.connect(daemon.address) as engine:
            assert await engine.get_supported_tasks() == ("embed", "token_embed", "score")
            with pytest.raises(InvalidRequestError, match="dimensions is 65"):
                async for _ in engine.encode("hello", PoolingParams(dimensions=65), "wide"):
                    pass
            [short] = [output async for output in engine.encode([5] * 9, None, "short", truncate_prompt_tokens=3)]
            assert short.prompt_token_ids == [5] * 3
            return await asyncio.gather(*(one(engine, number) for number in range(len(PROMPTS))))

    assert same(asyncio.run(asyncio.wait_for(main(), PATIENCE)), expected)
