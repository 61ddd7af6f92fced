"""Helpers for tests of sampling: an in-process engine, run to the end, and a plain loop over transformers for
comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mainspring import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from mainspring.ipc.messages import Stats

Job = tuple[Any, SamplingParams]  # a prompt and its sampling parameters
GUARD_S = 240.0  # longest wait for streams that go on after a death


def make_engine(path: Path | None, **settings: Any) -> LLMEngine:
    model = None if path is None else str(path)
    args = EngineArgs(model=model, **{"max_model_len": 256, "max_logprobs": -1, **settings})
    return LLMEngine.from_engine_args(args, enable_multiprocessing=False)


def run(engine: LLMEngine, jobs: Mapping[str, Job]) -> dict[str, RequestOutput]:
    """The last output of each request."""
    return {name: outputs[-1] for name, outputs in run_all(engine, jobs).items()}


def run_all(engine: LLMEngine, jobs: Mapping[str, Job]) -> dict[str, list[RequestOutput]]:
    """All outputs of each request, in order."""
    for name, (prompt, params) in jobs.items():
        engine.add_request(name, prompt, params)
    return collect(engine)


def collect(engine: LLMEngine, steps: int = 5000) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_unfinished_requests():
        assert steps, "the engine is stuck"
        steps -= 1
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def serve(
    path: Path, requests: Sequence[tuple[list[int], int]], how: Mapping[str, Any] | None = None, **settings: Any
) -> tuple[list[list[int]], Stats]:
    """The greedy tokens of all requests (prompt, number of tokens) at once, and the statistics of the core.

    Args:
        how: further sampling parameters.
    """
    more = {"temperature": 0.0, "ignore_eos": True, "detokenize": False, **(how or {})}
    jobs: dict[str, Job] = {
        str(number): ({"prompt_token_ids": prompt}, SamplingParams(max_tokens=length, **more))
        for number, (prompt, length) in enumerate(requests)
    }
    with make_engine(path, **settings) as engine:
        outputs = run(engine, jobs)
        stats = engine.engine_core.core.stats()  # type: ignore[attr-defined]
    return [list(outputs[name].outputs[0].token_ids) for name in jobs], stats


class Plain:
    """A checkpoint in fp32 as transformers runs it: no cache, no batch."""

    def __init__(self, path: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """fp32 ``[tokens, vocab]``."""
        return self.model(torch.tensor([list(tokens)])).logits[0].float()

    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """fp32 ``[tokens, vocab]``: the distribution of the token after each token."""
        return self.logits(tokens).log_softmax(-1)

    def greedy(
        self, prompt: Sequence[int], length: int, rules: Callable[[list[int], torch.Tensor], torch.Tensor]
    ) -> list[int]:
        """`length` tokens, each the argmax of `rules(output so far, logits)`; logits are ``[vocab]``."""
        output: list[int] = []
        for _ in range(length):
            logits = rules(output, self.logits([*prompt, *output])[-1])
            output.append(int(logits.argmax()))
        return output


def tokens_through(engine: LLMEngine, kill: Callable[[], None], after: int = 40) -> dict[str, list[int]]:
    """The tokens of all requests, of which `kill` ends a process after `after` tokens. No stream may repeat or change
    what it had."""
    seen: dict[str, list[int]] = {}
    killed, deadline = False, time.monotonic() + GUARD_S
    while engine.has_unfinished_requests():
        assert time.monotonic() < deadline
        for output in engine.step():
            tokens = list(output.outputs[0].token_ids)
            assert tokens[: len(seen.get(output.request_id, []))] == seen.get(output.request_id, [])
            seen[output.request_id] = tokens
        if not killed and sum(map(len, seen.values())) > after:
            killed = True
            kill()
    return seen
