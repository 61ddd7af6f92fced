"""Metrics of an engine and of a daemon: every metric of the list, the log line, and stat loggers."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from daemons import PATIENCE_S, Daemon, short_folder, until
from harness import make_core, message, run_core
from mainspring import AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams, StatLoggerBase
from mainspring.engine.observe import metrics
from mainspring.engine.observe.metrics import (
    HELP,
    PREFIX,
    Counter,
    Gauge,
    Histogram,
    IterationStats,
    Metric,
    StatLoggerManager,
)
from mainspring.engine.observe.prometheus import serve_metrics
from mainspring.ipc.async_client import AsyncClient
from mainspring.ipc.config import EngineConfig, ObservabilityConfig
from mainspring.ipc.connection import Connection, ask_status
from mainspring.ipc.errors import AddressInUseError, ConnectError, InvalidArgumentError
from mainspring.ipc.journal import request_key
from mainspring.ipc.keys import AllowedKey, append_allowed, new_keypair
from mainspring.ipc.messages import CoreStatus, Stats
from mainspring.ipc.meter import Ended, Meter
from mainspring.ipc.sync_client import SyncClient
from stand_in_core import StandInOwner, stand_in
from wire import PROMPTLY

DOCS = Path(__file__).resolve().parent.parent / "docs"
SURFACE = """
num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits num_preemptions
prompt_tokens generation_tokens iteration_tokens_total time_to_first_token_seconds inter_token_latency_seconds
e2e_request_latency_seconds request_queue_time_seconds request_prefill_time_seconds request_decode_time_seconds
request_prompt_tokens request_generation_tokens request_success lora_requests_info engine_sleep_state
frontends_connected core_epoch requests_recovered requests_quarantined malformed_frames prefix_cache_host_hits
spec_decode_num_draft_tokens spec_decode_num_accepted_tokens encoder_cache_bytes encoder_cache_queries
encoder_cache_hits encoded_items encoder_seconds
""".split()
TIMES = [name for name in SURFACE if name.endswith("_seconds") and not name.startswith("encoder")]
FIVE = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


class Listener(StatLoggerBase):
    """Records the statistics it gets."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.made_with = vllm_config, engine_index
        self.stats: list[Stats | None] = []
        self.iterations: list[IterationStats] = []
        self.initialized = self.logged = 0

    def record(
        self, scheduler_stats: Stats | None, iteration_stats: IterationStats | None, engine_idx: int = 0
    ) -> None:
        assert iteration_stats is not None
        self.stats.append(scheduler_stats)
        self.iterations.append(iteration_stats)

    def log_engine_initialized(self) -> None:
        self.initialized += 1

    def log(self) -> None:
        self.logged += 1


class Broken(Listener):
    def record(self, *_: Any) -> None:
        self.logged += 1
        raise ValueError("this logger is broken")


@pytest.fixture(scope="module")
def engine() -> Iterator[LLMEngine]:
    """An engine with the core in this process and a metrics port."""
    args = EngineArgs(device="cpu", num_gpu_blocks_override=300, max_num_seqs=4, metrics_port=0)
    made = LLMEngine.from_engine_args(args, stat_loggers={"mine": Listener()}, enable_multiprocessing=False)
    yield made
    made.shutdown()


def finish(engine: LLMEngine) -> None:
    while engine.has_unfinished_requests():
        engine.step()


def value(found: list[Metric], name: str, **labels: str) -> Any:
    """The value of a counter or gauge, or the count of a histogram."""
    (one,) = (m for m in found if m.name == PREFIX + name and labels.items() <= m.labels.items())
    assert isinstance(one, (Counter, Gauge, Histogram))
    return one.count if isinstance(one, Histogram) else one.value


def total(found: list[Metric], name: str) -> float:
    return sum(one.sum for one in found if isinstance(one, Histogram) and one.name == PREFIX + name)


def scrape(port: int) -> dict[str, float]:
    """Samples by name, with the labels that not every sample has."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        families = list(text_string_to_metric_families(answer.read().decode()))
    found = {}
    for family in families:
        assert family.documentation == HELP[family.name.removeprefix(PREFIX)]
        for sample in family.samples:
            labels = {name: text for name, text in sample.labels.items() if name not in ("model_name", "engine")}
            found[" ".join([sample.name.removeprefix(PREFIX), *labels.values()])] = sample.value
    return found


# ---------------------------------------------------------------------- an engine


def test_after_a_few_requests_every_metric_has_its_value(engine: LLMEngine) -> None:
    before = engine.get_metrics()
    for name in ("a", "b"):
        engine.add_request(name, list(range(5, 45)), FIVE)
        finish(engine)
    engine.add_request("c", [7, 8], SamplingParams(max_tokens=3, n=2, ignore_eos=True))
    engine.add_request("d", [9], FIVE)
    engine.step()
    during = engine.get_metrics()
    assert value(during, "num_requests_running") == 3
    assert 0 < value(during, "kv_cache_usage_perc") < 1
    engine.abort_request("d")
    finish(engine)
    after = engine.get_metrics()

    def grown(name: str, **labels: str) -> Any:
        return value(after, name, **labels) - value(before, name, **labels)

    assert {m.name for m in after} == {PREFIX + name for name in SURFACE}
    assert all(m.labels["model_name"] == engine.model_config.model for m in after)
    assert grown("prompt_tokens") == 40 + 40 + 2 + 1
    assert grown("generation_tokens") == 5 + 5 + 2 * 3 + 1
    assert grown("prefix_cache_queries") >= 80
    assert grown("prefix_cache_hits") == 32, "two blocks of the second prompt"
    assert [grown("request_success", finished_reason=reason) for reason in ("stop", "length", "abort", "error")] == [
        0, 3, 1, 0
    ]  # fmt: skip
    assert grown("iteration_tokens_total") >= 5 + 5 + 3
    assert total(after, "iteration_tokens_total") - total(before, "iteration_tokens_total") == 83 + 17
    assert total(after, "request_prompt_tokens") - total(before, "request_prompt_tokens") == 83
    assert total(after, "request_generation_tokens") - total(before, "request_generation_tokens") == 17
    assert grown("inter_token_latency_seconds") == 17 - 5, "all tokens but the first of each completion"
    for name in TIMES:
        assert grown(name) >= 4
        assert total(after, name) > 0
    assert value(after, "num_requests_running") == value(after, "num_requests_waiting") == 0
    assert value(after, "engine_sleep_state", sleep_state="awake") == 1
    assert value(after, "engine_sleep_state", sleep_state="weights_offloaded") == 0
    assert value(after, "lora_requests_info", max_lora="0") == 0
    assert value(after, "frontends_connected") == value(after, "core_epoch") == 1
    for name in ("requests_recovered", "requests_quarantined", "malformed_frames", "num_preemptions"):
        assert value(after, name) == 0


def test_metrics_of_media_are_those_of_the_core() -> None:
    stats = Stats(encoder_queries=5, encoder_hits=2, encoded_items=3, encoder_seconds=0.5, encoder_bytes=512)
    found = metrics.metrics_of(stats, Meter().measured(), "m")
    names = ("encoder_cache_queries", "encoder_cache_hits", "encoded_items", "encoder_seconds", "encoder_cache_bytes")
    assert [value(found, name) for name in names] == [5, 2, 3, 0.5, 512]


def test_a_histogram_counts_each_observation_in_its_bucket_and_all_above() -> None:
    meter = Meter()
    for seconds in (0.001, 0.3, 0.4, 1000.0):
        meter.ended(Ended("stop", seconds, 16, 0))
    found = {m.name: m for m in metrics.metrics_of(Stats(), meter.measured(), "m")}
    one = found[f"{PREFIX}e2e_request_latency_seconds"]
    assert isinstance(one, Histogram)
    assert (one.count, one.sum) == (4, pytest.approx(1000.701))
    assert [one.buckets[bound] for bound in ("0.001", "0.25", "0.5", "300.0", "+Inf")] == [1, 1, 3, 3, 4]
    one = found[f"{PREFIX}request_prompt_tokens"]
    assert isinstance(one, Histogram)
    assert (one.buckets["4.0"], one.buckets["16.0"]) == (0, 4), "a bound is in its bucket"


def test_the_times_of_a_request_follow_one_another_and_add_up(engine: LLMEngine) -> None:
    listener = engine.stat_loggers["mine"]
    assert isinstance(listener, Listener)
    engine.add_request("a", [5, 6, 7], FIVE)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    (ended,) = listener.iterations[-1].finished_requests
    assert ended[2:4] == (3, 5)
    assert ended.queued_time is not None
    assert ended.prefill_time is not None
    assert ended.decode_time is not None
    parts = ended.queued_time + ended.prefill_time + ended.decode_time
    assert 0 < parts <= ended.e2e_latency + 1e-6
    assert parts == pytest.approx(ended.e2e_latency, abs=0.05)
    seen = outputs[-1].metrics
    assert seen is not None
    assert seen.first_scheduled_time is not None
    assert seen.first_token_time is not None
    assert seen.last_token_time is not None
    assert seen.finished_time is not None
    assert seen.arrival_time <= seen.first_scheduled_time <= seen.first_token_time
    assert seen.first_token_time <= seen.last_token_time <= seen.finished_time
    assert (seen.num_preemptions, seen.time_in_queue) == (0, ended.queued_time)


def test_metrics_may_be_read_while_a_core_is_heard_of_for_the_first_time() -> None:
    manager = StatLoggerManager(EngineArgs().create_engine_config())

    class Read(dict[int, Meter]):
        """Meters that another thread reads just before there is one more."""

        def setdefault(self, core: int, meter: Any = None) -> Any:
            cores.append({metric.labels["engine"] for metric in manager.metrics()})
            return super().setdefault(core, meter)

    cores: list[set[str]] = []
    manager._meters = Read(manager._meters)
    manager.take(Stats(core=1))
    cores.append({metric.labels["engine"] for metric in manager.metrics()})
    assert cores == [{"0"}, {"0", "1"}]


def test_an_engines_port_serves_what_it_gives(engine: LLMEngine) -> None:
    engine.add_request("a", [5, 6, 7], FIVE)
    finish(engine)
    assert engine.metrics_port
    served, given = scrape(engine.metrics_port), engine.get_metrics()
    assert served["prompt_tokens_total"] == value(given, "prompt_tokens")
    assert served["request_success_total length"] == value(given, "request_success", finished_reason="length") > 0
    assert served["iteration_tokens_total_count"] == value(given, "iteration_tokens_total") > 0
    assert served["time_to_first_token_seconds_bucket +Inf"] == value(given, "time_to_first_token_seconds")
    assert served["engine_sleep_state awake"] == 1


def test_a_port_in_use_is_named_and_one_that_was_given_back_is_free() -> None:
    port, stop = serve_metrics("127.0.0.1", 0, list)
    with pytest.raises(AddressInUseError, match=f"metrics_port is {port}, .* in use; choose another"):
        serve_metrics("127.0.0.1", port, list)
    stop()
    serve_metrics("127.0.0.1", port, list)[1]()
    with pytest.raises(InvalidArgumentError, match="metrics_port is 70000"):
        EngineArgs(metrics_port=70000).create_engine_config()


# ---------------------------------------------------------------------- who listens


def connected(core: StandInOwner) -> LLMEngine:
    return LLMEngine.connect(core.address, skip_tokenizer_init=True)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[StandInOwner]:
    with stand_in(address=f"ipc://{tmp_path}/core.sock") as owner:
        yield owner


def test_loggers_are_told_of_every_iteration(engine: LLMEngine) -> None:
    listener = engine.stat_loggers["mine"]
    assert isinstance(listener, Listener)
    assert list(engine.stat_loggers) == ["logging", "mine"]
    assert engine.logger_manager is not None
    before = len(listener.iterations)
    engine.add_request("a", [5, 6, 7], FIVE)
    finish(engine)
    first, *_, last = told = listener.iterations[before:]
    assert (len(told), listener.initialized) == (5, 1)
    assert (first.num_prompt_tokens, len(first.time_to_first_tokens_iter)) == (3, 1)
    assert first.inter_token_latencies_iter == []
    assert [one.num_generation_tokens for one in told] == [1] * 5
    assert len(last.inter_token_latencies_iter) == 1
    assert [one.finish_reason for one in last.finished_requests] == ["length"]
    stats = listener.stats[before]
    assert stats is not None
    assert (stats.num_running, stats.frontends_connected) == (1, 1)
    logged = listener.logged
    engine.do_log_stats(None, [])
    assert listener.logged == logged + 1, "also when nothing is in flight"


def test_factories_make_loggers_and_one_that_fails_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineArgs().create_engine_config()
    manager = metrics.StatLoggerManager(config, [Listener, Broken])
    good, broken = manager.stat_loggers["0"], manager.stat_loggers["1"]
    assert isinstance(good, Listener)
    assert isinstance(broken, Broken)
    assert good.made_with == (config, 0)
    for _ in range(3):
        manager._tell("record", Stats(), IterationStats(0.0), 0)
    assert (len(good.iterations), broken.logged) == (3, 1)
    assert caplog.text.count("'1' failed") == 1
    assert list(manager.stat_loggers) == ["logging", "0"]
    with pytest.raises(InvalidArgumentError, match="'x' is 3; it must be a StatLoggerBase"):
        metrics.StatLoggerManager(config, {"x": 3})  # type: ignore[dict-item]


def test_a_log_line_comes_at_most_every_ten_seconds_and_never_of_an_idle_engine(
    core: StandInOwner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [1000.0]
    for module in ("observe.metrics", "llm_engine", "frontend"):
        monkeypatch.setattr(f"mainspring.engine.{module}.time", SimpleNamespace(monotonic=lambda: now[0]))
    caplog.set_level(logging.INFO)

    def lines() -> list[str]:
        return [text for record in caplog.records if (text := record.getMessage()).startswith("Engine 000")]

    with connected(core) as engine:
        now[0] += 50
        assert engine.step() == []
        assert lines() == [], "it is idle"
        engine.add_request("a", [5] * 10, SamplingParams(max_tokens=41))
        engine.step()
        assert lines() == [], "it was idle, and has only begun"
        for _ in range(40):
            now[0] += 0.5
            engine.step()
        assert len(lines()) == 2
        assert "prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.1 tokens/s, Running: " in lines()[0]
        assert "prompt throughput: 0.0 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: " in lines()[1]
        engine.do_log_stats_with_interval()
        assert len(lines()) == 2
        engine.do_log_stats()
        assert len(lines()) == 3, "it was asked to"
        now[0] += 10
        engine.do_log_stats_with_interval()
        assert len(lines()) == 4


def test_an_async_engine_tells_its_loggers_too(core: StandInOwner) -> None:
    async def main() -> None:
        async with AsyncLLMEngine.connect(core.address, skip_tokenizer_init=True) as engine:
            listener = engine.stat_loggers["mine"] = Listener()
            async for _ in engine.generate([5, 6], FIVE, "a"):
                pass
            assert sum(one.num_generation_tokens for one in listener.iterations) == 5
            await engine.do_log_stats()
            assert listener.logged == 1
            assert engine.logger_manager is not None
            assert value(engine.logger_manager.metrics(), "request_success", finished_reason="length") == 1

    asyncio.run(main())


def test_constructors_hand_loggers_on(monkeypatch: pytest.MonkeyPatch, core: StandInOwner) -> None:
    monkeypatch.setattr("mainspring.engine.llm_engine.make_client", lambda *_: SyncClient(Connection(core)))
    monkeypatch.setattr(AsyncClient, "launch", lambda _: AsyncClient(Connection(core)))
    args = EngineArgs(skip_tokenizer_init=True)
    config = args.create_engine_config()
    makers: list[Callable[[Any], LLMEngine | AsyncLLMEngine]] = [
        lambda loggers: LLMEngine(config, stat_loggers=loggers),
        lambda loggers: LLMEngine.from_engine_args(args, stat_loggers=loggers),
        lambda loggers: LLMEngine.from_vllm_config(config, stat_loggers=loggers),
        lambda loggers: AsyncLLMEngine(config, stat_loggers=loggers),
        lambda loggers: AsyncLLMEngine.from_engine_args(args, stat_loggers=loggers),
        lambda loggers: AsyncLLMEngine.from_vllm_config(config, stat_loggers=loggers),
    ]
    for make in makers:
        engine = make({"mine": (mine := Listener())})
        assert engine.stat_loggers["mine"] is mine
        assert mine.initialized == 1
        engine.shutdown()


def test_without_statistics_there_is_nothing_to_ask_for(core: StandInOwner) -> None:
    core.kill()
    core.load()
    core.core.config = EngineConfig(observability_config=ObservabilityConfig(disable_log_stats=True))
    core.announce()
    with connected(core) as engine:
        assert engine.stat_loggers == {}
        for asked in (engine.get_metrics, engine.do_log_stats, engine.do_log_stats_with_interval):
            with pytest.raises(InvalidArgumentError, match="disable_log_stats is True"):
                asked()


@pytest.mark.slow
def test_llm_gives_them_too_and_prometheus_is_loaded_only_where_they_are_served() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from mainspring import LLM, SamplingParams\n"
        "llm = LLM(num_gpu_blocks_override=300)\n"
        "llm.generate('2 + 3 =', SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)\n"
        "print(*[m.value for m in llm.get_metrics() if m.name == 'mainspring:generation_tokens'])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["3"], done.stderr


# ---------------------------------------------------------------------- a core


def test_a_core_counts_the_requests_of_all_frontends_and_how_they_ended() -> None:
    core = make_core(quarantined={request_key(b"s" * 16, 9): "it killed two cores"})
    for frontend in (0, 1):
        core.connect(frontend, session=b"s" * 16)
        core.add_request(frontend, message(1, prompt=range(8), max_tokens=4))
    core.add_request(0, message(2, prompt=range(5), output_token_ids=[7, 8], max_tokens=4, resumed=True, age_s=2.0))
    core.add_request(1, message(3, prompt=[], max_tokens=4))
    core.add_request(1, message(4))
    core.add_request(0, message(9))
    core.abort(1, [4])
    run_core(core)
    found = metrics.metrics_of(core.stats(), core.meter.measured(), "m")
    assert [value(found, "request_success", finished_reason=r) for r in ("length", "abort", "error")] == [3, 1, 2]
    assert value(found, "prompt_tokens") == 16, "not again those of a request that was resumed"
    assert value(found, "generation_tokens") == 4 + 4 + 2
    assert total(found, "request_generation_tokens") == 4 + 4 + 4
    assert total(found, "iteration_tokens_total") == 8 + 8 + 7 + 3 + 3 + 1
    assert value(found, "time_to_first_token_seconds") == value(found, "request_queue_time_seconds") == 2
    assert value(found, "inter_token_latency_seconds") == 10 - 2 - 1, "nothing came before the first step's tokens"
    assert 2 < total(found, "e2e_request_latency_seconds") < 60, "one was 2 s old when it came"
    assert [value(found, n) for n in ("frontends_connected", "requests_recovered", "requests_quarantined")] == [2, 1, 1]
    assert 0 < total(found, "request_decode_time_seconds") < total(found, "e2e_request_latency_seconds")


def test_a_daemon_may_ask_its_core_with_its_own_key(tmp_path: Path) -> None:
    server = new_keypair(tmp_path / "server.key")
    append_allowed(tmp_path / "allowed", new_keypair(tmp_path / "other.key").public, AllowedKey("other"))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with stand_in(address=address, secret_key=server.secret, allowed_keys=str(tmp_path / "allowed")) as owner:
        owner.core.meter.ends["stop"] = 7
        owner.server.publish(CoreStatus(owner.epoch, 1, 2, "serving"), owner.core.meter.measured())
        status = ask_status(address, PROMPTLY, key=str(tmp_path / "server.key"), server_key=server.public)
        assert status.measured.ended == [7, 0, 0, 0]
        assert [one.name for one in status.measured.distributions] == list(metrics.DISTRIBUTIONS)
        new_keypair(tmp_path / "stranger.key")
        with pytest.raises(ConnectError):
            ask_status(address, 0.3, key=str(tmp_path / "stranger.key"), server_key=server.public)


# ---------------------------------------------------------------------- a daemon


@pytest.mark.slow
def test_a_daemons_port_tells_of_all_frontends_and_outlives_the_core() -> None:
    with short_folder() as place:
        daemon = Daemon(place, "--metrics-port=0", "--num-gpu-blocks-override=300")
        try:
            daemon.ready_line()
            port = int(re.findall(r"metrics at http://127\.0\.0\.1:(\d+)/", daemon.log)[0])
            for _ in range(2):
                with LLMEngine.connect(daemon.address) as engine:
                    engine.add_request("a", "17 + 25 =", FIVE)
                    finish(engine)
                    until(lambda: scrape(port)["frontends_connected"] == 1)
            until(lambda: scrape(port)["generation_tokens_total"] == 10, lambda: daemon.log)
            found = scrape(port)
            names = {sample.split()[0] for sample in found}
            assert all({name, f"{name}_total", f"{name}_count"} & names for name in SURFACE)
            assert found["request_generation_tokens_sum"] == 10
            assert found["request_success_total length"] == found["request_queue_time_seconds_count"] == 2
            assert found["time_to_first_token_seconds_sum"] > 0
            assert found["iteration_tokens_total_count"] >= 10
            assert found["iteration_tokens_total_sum"] == found["prompt_tokens_total"] + 8
            assert (found["core_epoch"], found["core_restarts_total"]) == (1, 0)
            os.kill(daemon.status()[1]["core_pid"], signal.SIGKILL)
            until(lambda: scrape(port)["core_restarts_total"] == 1)
            found = scrape(port)
            assert found["requests_quarantined_total"] == 0
            until(lambda: scrape(port).get("frontends_connected") == 0, lambda: daemon.log)
            found = scrape(port)
            assert (found["core_epoch"], found["core_restarts_total"], found["generation_tokens_total"]) == (2, 1, 0)
            assert daemon.stop() == 0, daemon.log
        finally:
            daemon.end()


# ---------------------------------------------------------------------- documents


def test_the_dashboard_shows_every_metric_and_no_other() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    shown = re.findall(r"mainspring:(\w+)", json.dumps([panel["targets"] for panel in dashboard["panels"]]))
    served = {f"{name}_total" if name in metrics.COUNTERS else name: name for name in HELP}
    histograms = metrics.DISTRIBUTIONS.keys()
    found = {re.sub("_(bucket|count|sum)$", "", name) for name in shown}
    assert found == served.keys()
    for name in shown:
        assert (name in served and name not in histograms) or re.sub("_(bucket|count|sum)$", "", name) in histograms


def test_the_page_lists_every_metric_with_its_kind() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\w+) \| .", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    kinds = {"gauge": metrics.GAUGES, "counter": metrics.COUNTERS, "histogram": metrics.DISTRIBUTIONS}
    assert sorted(rows) == sorted((name, kind) for kind, names in kinds.items() for name in names)
    assert {*SURFACE, "core_restarts"} == HELP.keys()
