"""Rows of the metrics. Each is read by name, so that a missing one is an error."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

from mainspring import LLMEngine, SamplingParams
from mainspring.ipc.errors import RequestFailedError

from .harness import CONNECTED, Place, row

STORY = "Once upon a time"


def grown(at: Place, name: str, prompt: Any = STORY, **labels: str) -> float:
    """The increase of a metric by one request of 8 tokens."""
    before = at.metric(name, **labels)
    at.run(prompt, ignore_eos=True)
    return at.metric(name, **labels) - before


def metric(*names: str, **more: Any) -> Any:
    return row(*(f"metrics.{name}" for name in names), **more)


@metric("num_requests_running", "kv_cache_usage_perc", "num_requests_waiting")
def running(at: Place) -> None:
    engine = at.engine(max_num_seqs=1)
    for _ in range(2):
        engine.add_request(at.id(), STORY, SamplingParams(max_tokens=200, ignore_eos=True))
    for _ in range(60):
        engine.step()
    assert at.metric("num_requests_running", engine) == 1
    assert at.metric("num_requests_waiting", engine) == 1
    assert 0 < at.metric("kv_cache_usage_perc", engine) < 1


@metric("prefix_cache_queries", "prefix_cache_hits")
def prefix_cache(at: Place) -> None:
    prompt = [300 + at_token for at_token in range(40)]
    at.run(prompt, ignore_eos=True)
    at.run(ignore_eos=True)
    assert grown(at, "prefix_cache_queries", prompt) >= 40
    at.run(ignore_eos=True)
    assert grown(at, "prefix_cache_hits", prompt) >= 32


@metric("num_preemptions")
def num_preemptions(at: Place) -> None:
    engine = at.engine(num_gpu_blocks_override=12, max_model_len=160)
    before = at.metric("num_preemptions", engine)
    for _ in range(3):
        engine.add_request(at.id(), STORY, SamplingParams(max_tokens=120, ignore_eos=True))
    at.outputs(engine)
    assert at.metric("num_preemptions", engine) > before


@metric("prompt_tokens")
def prompt_tokens(at: Place) -> None:
    assert grown(at, "prompt_tokens", [5, 6, 7]) == 3


@metric("generation_tokens")
def generation_tokens(at: Place) -> None:
    assert grown(at, "generation_tokens") == 8


@metric("iteration_tokens_total")
def iterations(at: Place) -> None:
    assert grown(at, "iteration_tokens_total") >= 8 if at.inside else grown(at, "iteration_tokens_total") >= 1


@metric("inter_token_latency_seconds")
def inter_token_latency(at: Place) -> None:
    assert 1 <= grown(at, "inter_token_latency_seconds") <= 7


@metric(
    "time_to_first_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
)
def once_a_request(at: Place) -> None:
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
    ):
        assert grown(at, name) == 1


@metric("request_success")
def request_success(at: Place) -> None:
    assert grown(at, "request_success", finished_reason="length") == 1
    assert grown(at, "request_success", finished_reason="abort") == 0


@metric("engine_sleep_state")
def engine_sleep_state(at: Place) -> None:
    at.run()
    assert at.metric("engine_sleep_state", sleep_state="awake") == 1
    at.engine().sleep(1)
    assert at.metric("engine_sleep_state", sleep_state="weights_offloaded") == 1
    assert at.metric("engine_sleep_state", sleep_state="awake") == 0


@metric("frontends_connected")
def frontends_connected(at: Place) -> None:
    at.run()
    before = at.metric("frontends_connected")
    assert before >= 1
    if at.mode == CONNECTED:
        at.fresh()
        at.run()
        assert at.metric("frontends_connected") == before + 1


@metric("requests_quarantined", says="Requests that are refused, for cores died of them.")
def requests_quarantined(at: Place) -> None:
    at.run()
    if at.inside:  # a core in this process dies alone
        assert at.metric("requests_quarantined") == 0
        return
    engine = at.fresh(worker_extension_cls="surface.deadly.Nothing", max_restarts=100)
    assert at.run(engine=engine).finished
    assert isinstance(at.run([77, 5, 6], engine).outputs[0].error, RequestFailedError)
    assert at.run(engine=engine).finished
    assert at.metric("requests_quarantined", engine) == 1


@metric("malformed_frames")
def malformed_frames(at: Place) -> None:
    at.run()
    before = at.metric("malformed_frames")
    if not at.inside:  # in-process there are no frames
        client: Any = at.engine().engine_core
        client._connection._link.send([b"?", b"!"])
    at.run()
    assert at.metric("malformed_frames") == before + (not at.inside)


@metric("requests_recovered", "core_epoch")
def requests_recovered(at: Place) -> None:
    at.run()
    if at.inside:  # a core in this process ends with it
        assert (at.metric("requests_recovered"), at.metric("core_epoch")) == (0, 1)
        return
    engine = at.fresh(max_model_len=1001)
    pid = core_pid(at, engine, max_model_len=1001)  # first, because the request may end while it is found out
    engine.add_request(at.id(), STORY, SamplingParams(max_tokens=900, ignore_eos=True))
    engine.step()
    os.kill(pid, signal.SIGKILL)
    at.outputs(engine)
    assert at.metric("requests_recovered", engine) == 1
    assert at.metric("core_epoch", engine) > 1


@metric("core_restarts", modes=(CONNECTED,), why="a daemon tells of it")
def core_restarts(at: Place) -> None:
    daemon = at.daemon(metrics_port=0)
    (port,) = re.findall(r"metrics at http://127\.0\.0\.1:(\d+)/", daemon.log)
    before = at.scrape(port)["core_restarts_total"]
    os.kill(daemon.status()[1]["core_pid"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while at.scrape(port)["core_restarts_total"] == before:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def core_pid(at: Place, engine: LLMEngine, **args: Any) -> int:
    client: Any = engine.engine_core
    own = None if at.mode == CONNECTED else client._connection._core.supervisor.core_pid
    return int(own or at.daemon(**args).status()[1]["core_pid"])


def kill_core(at: Place, engine: LLMEngine, **args: Any) -> None:
    os.kill(core_pid(at, engine, **args), signal.SIGKILL)
