"""The workloads of `mainspring bench`, their runs, and the figures computed from them."""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from ..engine.async_llm_engine import AsyncLLMEngine
from ..engine.frontend import Frontend
from ..engine.llm import LLM
from ..engine.request.outputs import RequestOutput
from ..ipc.errors import InvalidArgumentError, InvalidRequestError, OverloadedError, RequestFailedError
from ..ipc.params import RequestOutputKind, SamplingParams

logger = logging.getLogger(__name__)

PERCENTILES = (90, 95, 99)
Figures = dict[str, Any]  # name → number


class Ask(NamedTuple):
    """One request of a workload."""

    prompt: dict[str, Any]  # a `TextPrompt` or a `TokensPrompt`
    output_tokens: int


class Served(NamedTuple):
    """The result of a request. Times are seconds on one clock. The arrival is the planned one."""

    arrival: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    came: Sequence[tuple[float, int]] = ()  # each output: when, and how many new tokens
    error: Exception | None = None

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.came)


# ---------------------------------------------------------------------- workloads


def random_asks(
    count: int, input_len: tuple[int, int], output_len: tuple[int, int], prefix_len: int, seed: int, vocab_size: int
) -> list[Ask]:
    """Prompts of random token ids, the same for the same seed. Lengths are drawn evenly from least to most."""
    rng = np.random.default_rng(seed)
    inputs, outputs = (rng.integers(*ends, size=count, endpoint=True).tolist() for ends in (input_len, output_len))
    prefix = rng.integers(vocab_size, size=prefix_len).tolist()
    return [
        Ask({"prompt_token_ids": prefix + rng.integers(vocab_size, size=tokens).tolist()}, output_tokens)
        for tokens, output_tokens in zip(inputs, outputs, strict=True)
    ]


_Count = Annotated[int, msgspec.Meta(ge=1)]


class _Line(msgspec.Struct):
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    output_tokens: _Count | None = None
    max_tokens: _Count | None = None


def read_dataset(path: str, count: int | None) -> list[Ask]:
    """The first `count` requests of a file, or all: a JSON object in each line, with ``prompt`` or
    ``prompt_token_ids``, and ``output_tokens`` or ``max_tokens``. Other keys are passed over.

    Raises:
        InvalidArgumentError: the file can't be read or has no request; or a line is wrong, and which.
    """
    try:
        lines = Path(path).read_bytes().splitlines()
    except OSError as error:
        raise InvalidArgumentError(f"dataset_path is {path!r}, which can't be read: {error.strerror}") from None
    asked: list[Ask] = []
    for number, line in enumerate(lines, 1):
        if not line.strip() or len(asked) == count:
            continue
        try:
            found = msgspec.json.decode(line, type=_Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"{path}, line {number}: {error}") from None
        tokens = found.output_tokens or found.max_tokens
        form = "prompt" if found.prompt_token_ids is None else "prompt_token_ids"
        if (prompt := getattr(found, form)) is None:
            raise InvalidArgumentError(f"{path}, line {number} has no prompt; give 'prompt' or 'prompt_token_ids'")
        if tokens is None:
            raise InvalidArgumentError(f"{path}, line {number} does not say how many 'output_tokens' it asks for")
        asked.append(Ask({form: prompt}, tokens))
    if not asked:
        raise InvalidArgumentError(f"dataset_path is {path!r}, which holds no request")
    return asked


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds, from the first request on, when each arrives: `rate` a second on average, or all at once for inf.

    The gaps are gamma distributed with shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is more
    even. From one seed, every rate has the same pattern.
    """
    gaps = np.random.default_rng([seed, 1]).gamma(burstiness, 1 / burstiness, count - 1)
    return [0.0, *(gaps.cumsum() / rate).tolist()]


# ---------------------------------------------------------------------- figures


def summary(name: str, seconds: Sequence[float]) -> Figures:
    """Mean, median and percentiles, in ms; between two samples they are interpolated. Nothing without samples."""
    if not len(seconds):
        return {}
    ms = 1000 * np.asarray(seconds)
    figures = {f"mean_{name}_ms": float(ms.mean()), f"median_{name}_ms": float(np.median(ms))}
    return figures | {f"p{share}_{name}_ms": float(np.percentile(ms, share)) for share in PERCENTILES}


def totals(served: Sequence[Served], seconds: float) -> Figures:
    """Totals and throughput. Failed requests count only as failed.

    Raises:
        RequestFailedError: all failed.
    """
    done = [one for one in served if one.error is None]
    if len(done) < len(served):
        first = next(one.error for one in served if one.error is not None)
        text = f"{len(served) - len(done)} of {len(served)} requests failed; the first: {first}"
        if not done:
            raise RequestFailedError(text) from first
        logger.warning("%s", text)
    prompts, outputs = sum(one.prompt_tokens for one in done), sum(one.output_tokens for one in done)
    return {
        "completed": len(done),
        "failed": len(served) - len(done),
        "duration_s": seconds,
        "total_input_tokens": prompts,
        "total_cached_tokens": sum(one.cached_tokens for one in done),
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (prompts + outputs) / seconds,
    }


def serving_figures(served: Sequence[Served]) -> Figures:
    """Of the requests that were completed: time to first token, time per output token after the first, time from one
    output to the next, time to the end."""
    done = [(one, [when for when, _ in one.came]) for one in served if one.error is None]
    return {
        **summary("ttft", [t[0] - one.arrival for one, t in done]),
        **summary("tpot", [(t[-1] - t[0]) / (one.output_tokens - 1) for one, t in done if one.output_tokens > 1]),
        **summary("itl", [gap for _, t in done for gap in np.diff(t).tolist()]),
        **summary("e2el", [t[-1] - one.arrival for one, t in done]),
    }


# ---------------------------------------------------------------------- runs


def _round(engine: Frontend[Any], asked: Sequence[Ask], temperature: float) -> tuple[list[Any], list[SamplingParams]]:
    """Prompts and parameters. The salt keeps a round from hitting cached prefixes of another."""
    salt, text, kind = secrets.token_hex(8), engine.tokenizer is not None, RequestOutputKind.DELTA
    params = [
        SamplingParams(temperature=temperature, max_tokens=n, ignore_eos=True, detokenize=text, output_kind=kind)
        for _, n in asked
    ]
    return [{**ask.prompt, "cache_salt": salt} for ask in asked], params


def _served(output: RequestOutput, arrival: float, came: Sequence[tuple[float, int]]) -> Served:
    prompt_tokens = len(output.prompt_token_ids or ())
    return Served(arrival, prompt_tokens, output.num_cached_tokens or 0, came, output.outputs[0].error)


def _batch(llm: LLM, asked: Sequence[Ask], temperature: float, progress: bool = False) -> tuple[list[Served], float]:
    """All at once; what became of them, and the seconds that took."""
    prompts, params = _round(llm.llm_engine, asked, temperature)
    began = time.monotonic()
    outputs = llm.generate(prompts, params, progress, on_error="return")
    took = time.monotonic() - began
    return [_served(one, 0.0, [(took, len(one.outputs[0].token_ids))]) for one in outputs], took


def throughput(llm: LLM, asked: Sequence[Ask], temperature: float) -> Figures:
    """All requests at once, after two short ones as a warm-up."""
    _batch(llm, [Ask(ask.prompt, 2) for ask in asked[:2]], temperature)
    return totals(*_batch(llm, asked, temperature, progress=True))


def latency(llm: LLM, batch: Sequence[Ask], iterations: int, warm_up: int, temperature: float) -> Figures:
    """The same batch again and again; the first `warm_up` times don't count."""
    rounds = [_batch(llm, batch, temperature) for _ in range(warm_up + iterations)][warm_up:]
    times, longest = [took for _, took in rounds], max(ask.output_tokens for ask in batch)
    return {
        **totals([one for served, _ in rounds for one in served], math.fsum(times)),
        **summary("latency", times),
        **summary("latency_per_token", [took / longest for took in times]),
    }


async def serve(engine: AsyncLLMEngine, asked: Sequence[Ask], times: Sequence[float], temperature: float) -> Figures:
    """Each request at its time, after two short ones as a warm-up."""
    await _serve(engine, [Ask(ask.prompt, 2) for ask in asked[:2]], [0.0, 0.0], temperature)
    served, took = await _serve(engine, asked, times, temperature, progress=True)
    return totals(served, took) | serving_figures(served)


async def _serve(
    engine: AsyncLLMEngine, asked: Sequence[Ask], times: Sequence[float], temperature: float, progress: bool = False
) -> tuple[list[Served], float]:
    from tqdm.auto import tqdm  # type: ignore[import-untyped]

    prompts, params = _round(engine, asked, temperature)
    for at, prompt in enumerate(prompts):  # raise errors before the first request is sent
        try:
            engine.input_processor.process_inputs("", prompt, params[at])
        except InvalidRequestError as error:
            raise type(error)(f"prompt {at}: {error}") from None

    async def one(at: int, arrival: float) -> Served:
        await asyncio.sleep(began + arrival - time.monotonic())
        came: list[tuple[float, int]] = []
        try:
            async for output in engine.generate(prompts[at], params[at], f"bench-{at}"):
                came.append((time.monotonic() - began, len(output.outputs[0].token_ids)))
        except (OverloadedError, RequestFailedError) as error:
            return Served(arrival, error=error)
        finally:
            bar.update()
        return _served(output, arrival, [(when, tokens) for when, tokens in came if tokens])

    with tqdm(total=len(asked), desc="Served requests", disable=not progress) as bar:
        began = time.monotonic()
        served = await asyncio.gather(*(one(at, times[at]) for at in range(len(asked))))
        return served, time.monotonic() - began
