"""Streams about images while cores and media workers are killed: the tokens are those of an undisturbed run."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Any

import psutil
import pytest

from mainspring import AsyncEngineArgs, AsyncLLMEngine, LLMEngine, SamplingParams
from media_folders import file_of, picture
from media_models import make
from test_media import SIZES

pytestmark = pytest.mark.slow
KILLS = 10  # of cores, and as many of media workers
STREAMS = 3  # at once
COUNT = 60
PARAMS = SamplingParams(temperature=0.8, seed=5, max_tokens=COUNT, ignore_eos=True)
PATIENCE_S = 280


def running(kind: str) -> list[psutil.Process]:
    """Processes below this one that run a module."""
    found = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it ends meanwhile
            if kind in one.cmdline():
                found.append(one)
    return found


def prompt(number: int) -> Any:
    """One or two images; some are those of earlier prompts."""
    images = [file_of(picture(number % 7)), file_of(picture(100 + number, 64, 80))][: 1 + number % 2]
    return {"prompt": "<image>" * len(images) + f"{number}?", "multi_modal_data": {"image": images}}


@pytest.mark.parametrize("cores", [1, 2])
def test_streams_are_exact_over_kills_of_cores_and_media_workers(cores: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    choose = random.Random(seed)
    folder = make("llava", tmp_path / "llava")
    args = AsyncEngineArgs(
        str(folder), max_restarts=100, data_parallel_size=cores, media_workers=2, **{**SIZES, "max_num_seqs": 4}
    )
    killed = {"mainspring.core": 0, "mainspring.media": 0}
    found: dict[int, list[int]] = {}

    async def stream(engine: AsyncLLMEngine, numbers: Any) -> None:
        while min(killed.values()) < KILLS:
            number = next(numbers)
            async for output in engine.generate(prompt(number), PARAMS, str(number)):
                found[number] = list(output.outputs[0].token_ids)
                if output.finished:
                    assert output.outputs[0].finish_reason == "length"

    async def kill() -> None:
        while min(killed.values()) < KILLS:
            await asyncio.sleep(choose.uniform(0.2, 1.5))
            kind = min(killed, key=lambda kind: killed[kind])
            if alive := running(kind):
                choose.choice(alive).kill()
                killed[kind] += 1

    async def disturbed() -> None:
        async with AsyncLLMEngine.from_engine_args(args) as engine:
            numbers = iter(range(1 << 20))
            await asyncio.gather(kill(), *(stream(engine, numbers) for _ in range(STREAMS)))

    asyncio.run(asyncio.wait_for(disturbed(), PATIENCE_S))
    assert len(found) >= STREAMS
    calm = AsyncEngineArgs(str(folder), **SIZES)
    with LLMEngine.from_engine_args(calm, enable_multiprocessing=False) as engine:
        for number, tokens in found.items():
            engine.add_request(str(number), prompt(number), PARAMS)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    expected = list(output.outputs[0].token_ids)
            assert tokens == expected, number
