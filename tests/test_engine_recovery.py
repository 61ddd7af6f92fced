"""An engine over real cores that die: its streams equal those of an undisturbed engine."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny
from kills import kill_core
from mainspring import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from mainspring.ipc.errors import RequestFailedError

GUARD = 120.0  # seconds
REQUESTS = {
    "greedy": ("Once upon a time", {"temperature": 0.0, "max_tokens": 250}),
    "seeded": ("The capital of France", {"temperature": 1.0, "seed": 7, "max_tokens": 250}),
    "several": ("One, two, three", {"temperature": 0.8, "seed": 3, "n": 2, "max_tokens": 150}),
    "stopped": ("What is two plus three?", {"temperature": 1.0, "seed": 5, "max_tokens": 250, "stop": ["\n\nQ"]}),
    **{f"waiting {i}": (f"Number {i} is", {"temperature": 0.0, "max_tokens": 40}) for i in range(8)},
}
UNSEEDED = ("Tell me", {"temperature": 1.0, "max_tokens": 250, "ignore_eos": True})


def args() -> EngineArgs:
    return EngineArgs(max_num_seqs=4)


def outcome(output: RequestOutput) -> list[tuple[str, list[int], str | None]]:
    return [(c.text, list(c.token_ids), c.finish_reason) for c in output.outputs]


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, list[tuple[str, list[int], str | None]]]:
    with LLMEngine.from_engine_args(args(), enable_multiprocessing=False) as engine:
        for name, (prompt, fields) in REQUESTS.items():
            engine.add_request(name, prompt, SamplingParams(ignore_eos=True, **fields))  # type: ignore[arg-type]
        found = {}
        while engine.has_unfinished_requests():
            found.update({output.request_id: outcome(output) for output in engine.step()})
    return found


@pytest.fixture
def engine() -> Iterator[LLMEngine]:
    with LLMEngine.from_engine_args(args(), enable_multiprocessing=True) as engine:
        yield engine


@pytest.mark.slow
def test_after_kills_every_stream_is_as_if_nothing_had_happened(
    engine: LLMEngine, undisturbed: dict[str, list[tuple[str, list[int], str | None]]]
) -> None:
    for name, (prompt, fields) in REQUESTS.items():
        engine.add_request(name, prompt, SamplingParams(ignore_eos=True, **fields))  # type: ignore[arg-type]
    engine.add_request("unseeded", UNSEEDED[0], SamplingParams(**UNSEEDED[1]))  # type: ignore[arg-type]
    supervisor = engine.engine_core._connection._core.supervisor
    seen: dict[str, list[tuple[str, list[int], str | None]]] = {}
    kill_at = [20, 120]  # tokens of the first request
    deadline = time.monotonic() + GUARD
    while engine.has_unfinished_requests():
        assert time.monotonic() < deadline
        for output in engine.step():
            now = outcome(output)
            for (text, tokens, _), (before, earlier, _) in zip(now, seen.get(output.request_id, now), strict=True):
                assert text.startswith(before), "nothing that was shown changes"
                assert tokens[: len(earlier)] == earlier
            seen[output.request_id] = now
        if kill_at and len(seen.get("greedy", [("", [], None)])[0][1]) >= kill_at[0]:
            kill_at.pop(0)
            kill_core(supervisor)
    assert supervisor.launch.restarts == 2
    [(_, unseeded, reason)] = seen.pop("unseeded")
    assert (len(unseeded), reason) == (250, "length")
    assert seen == undisturbed


POISON = [300, 301, 302]
CODE = f"""
import os, signal
import torch
from transformers import LlamaForCausalLM

def obey(module, args, kwargs):
    ids = kwargs["input_ids"]
    windows = ids[0].unfold(0, 3, 1) if ids.shape[1] >= 3 else ids[:0]
    if windows.numel() and (windows == torch.tensor({POISON})).all(1).any():
        os.kill(os.getpid(), int(os.environ["POISON_SIGNAL"]))

class PoisonedForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.register_forward_pre_hook(obey, with_kwargs=True)
"""


@pytest.fixture(scope="module")
def poisonable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose code kills the process that computes `POISON`."""
    path = tiny.make("llama", tmp_path_factory.mktemp("poisonable"))
    (path / "modeling_poisoned.py").write_text(CODE)
    facts = json.loads((path / "config.json").read_text())
    facts["architectures"] = ["PoisonedForCausalLM"]
    facts["auto_map"] = {"AutoModelForCausalLM": "modeling_poisoned.PoisonedForCausalLM"}
    (path / "config.json").write_text(json.dumps(facts))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("number", "crashes"), [(signal.SIGSEGV, 3), (signal.SIGKILL, 4)], ids=["segv", "kill"])
def test_a_request_that_kills_the_model_fails_alone_with_the_cause(
    poisonable: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, crashes: int
) -> None:
    monkeypatch.setenv("POISON_SIGNAL", str(int(number)))
    more = {"trust_remote_code": True, "skip_tokenizer_init": True, "max_model_len": 256}
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True, detokenize=False)
    with LLMEngine.from_engine_args(EngineArgs(model=str(poisonable), **more)) as engine:  # type: ignore[arg-type]
        for i in range(6):
            engine.add_request(f"good {i}", [10 + i, 20, 30], params)
        engine.add_request("bad", [5, *POISON, 6], params)
        ended: dict[str, RequestOutput] = {}
        deadline = time.monotonic() + 2 * GUARD
        while engine.has_unfinished_requests():
            assert time.monotonic() < deadline
            ended.update({output.request_id: output for output in engine.step() if output.finished})
        supervisor = engine.engine_core._connection._core.supervisor
        assert supervisor.launch.restarts <= crashes
    bad = ended.pop("bad").outputs[0]
    assert bad.finish_reason == "error"
    assert isinstance(bad.error, RequestFailedError)
    assert f"the last time by signal {number.name}" in str(bad.error)
    assert {name: output.outputs[0].finish_reason for name, output in ended.items()} == {
        f"good {i}": "length" for i in range(6)
    }
    assert {len(output.outputs[0].token_ids) for output in ended.values()} == {60}
