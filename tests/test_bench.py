"""`mainspring bench`: workloads and figures by pure functions, then the three benchmarks as users run them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from daemons import Daemon, short_folder
from mainspring import AsyncLLMEngine, SamplingParams
from mainspring.cli.main import main
from mainspring.engine.request.outputs import CompletionOutput, RequestOutput
from mainspring.ipc.config import EngineConfig
from mainspring.ipc.errors import InvalidArgumentError, OverloadedError, RequestFailedError
from mainspring.tools import bench
from mainspring.tools.bench_runs import (
    Ask,
    Served,
    arrivals,
    random_asks,
    read_dataset,
    serve,
    serving_figures,
    summary,
    totals,
)

Capture = pytest.CaptureFixture[str]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def put_back_what_main_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MAINSPRING_LOG_LEVEL", "WARNING")


@pytest.fixture(scope="module")
def connect() -> Iterator[str]:
    with short_folder() as folder:
        daemon = Daemon(folder)
        try:
            daemon.ready_line()
            yield f"--connect={daemon.address}"
        finally:
            assert daemon.stop() == 0, daemon.log
            daemon.end()


# ---------------------------------------------------------------------- workloads


def test_random_requests_have_the_lengths_asked_for_and_are_the_same_for_the_same_seed() -> None:
    asked = random_asks(400, (3, 6), (1, 2), prefix_len=5, seed=1, vocab_size=50)
    prompts = [ask.prompt["prompt_token_ids"] for ask in asked]
    assert {len(prompt) - 5 for prompt in prompts} == {3, 4, 5, 6}
    assert {ask.output_tokens for ask in asked} == {1, 2}
    assert len({tuple(prompt[:5]) for prompt in prompts}) == 1
    assert len({tuple(prompt[5:8]) for prompt in prompts}) > 300
    assert {token for prompt in prompts for token in prompt} == set(range(50))
    assert asked == random_asks(400, (3, 6), (1, 2), 5, 1, 50)
    assert asked != random_asks(400, (3, 6), (1, 2), 5, 2, 50)


def test_a_dataset_is_json_lines_of_text_or_token_ids(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text(
        '{"prompt": "Hello", "output_tokens": 3, "category": "x"}\n\n'
        '{"prompt_token_ids": [1, 2], "max_tokens": 4}\n'
        '{"prompt": "shown", "prompt_token_ids": [5], "output_tokens": 6}\n'
    )
    asked = [Ask({"prompt": "Hello"}, 3), Ask({"prompt_token_ids": [1, 2]}, 4), Ask({"prompt_token_ids": [5]}, 6)]
    assert read_dataset(str(file), None) == asked
    assert read_dataset(str(file), 2) == asked[:2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"prompt": 3, "output_tokens": 3}', r"line 2: Expected `str \| null`, got `int` - at `\$.prompt`"),
        (b'{"prompt_token_ids": ["a"], "output_tokens": 3}', "prompt_token_ids"),
        (b'{"prompt": "x", "output_tokens": 0}', "line 2: .*>= 1"),
        (b'{"prompt": "x", "output_tokens": 2.5}', "output_tokens"),
        (b'{"prompt": "x"}', "line 2 does not say how many 'output_tokens'"),
        (b'{"output_tokens": 3}', "line 2 has no prompt"),
        (b'["x", 3]', "line 2"),
        (b'{"prompt": "x', "line 2"),
        (b'{"prompt": "\xff", "output_tokens": 3}', "line 2"),
    ],
)
def test_a_wrong_line_is_named(line: bytes, words: str, tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_bytes(b'{"prompt": "x", "output_tokens": 1}\n' + line)
    with pytest.raises(InvalidArgumentError, match=words):
        read_dataset(str(file), None)


def test_arrivals_are_a_gamma_process_of_the_rate_with_one_pattern_for_a_seed() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        times = arrivals(20_001, 5.0, burstiness, seed=3)
        gaps = np.diff(times)
        assert times[0] == 0
        assert gaps.mean() == pytest.approx(1 / 5, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
        assert arrivals(20_001, 10.0, burstiness, seed=3) == pytest.approx([time / 2 for time in times])
        assert arrivals(20_001, 5.0, burstiness, seed=4) != times
    assert arrivals(3, float("inf"), 1.0, seed=0) == [0, 0, 0]
    assert arrivals(1, 2.0, 1.0, seed=0) == [0]


# ---------------------------------------------------------------------- figures


def test_a_summary_has_mean_median_and_percentiles_in_milliseconds() -> None:
    samples = [at / 1000 for at in range(100)] + [1.1]
    found = {"mean_x_ms": 6050 / 101, "median_x_ms": 50, "p90_x_ms": 90, "p95_x_ms": 95, "p99_x_ms": 99}
    assert summary("x", samples[::-1]) == pytest.approx(found)
    assert summary("x", [0.001, 0.002])["p90_x_ms"] == pytest.approx(1.9)
    assert summary("x", []) == {}


def test_figures_of_requests_whose_times_are_known() -> None:
    served = [
        Served(1.0, prompt_tokens=10, cached_tokens=4, came=[(1.5, 1), (1.75, 2), (2.5, 1)]),
        Served(2.0, prompt_tokens=20, came=[(2.25, 1)]),  # no time after its first token
        Served(2.0, prompt_tokens=40, came=[(2.1, 9)], error=OverloadedError("full")),
    ]
    assert totals(served, seconds=2.0) == {
        "completed": 2,
        "failed": 1,
        "duration_s": 2.0,
        "total_input_tokens": 30,
        "total_cached_tokens": 4,
        "total_output_tokens": 5,
        "request_throughput": 1.0,
        "output_throughput": 2.5,
        "total_token_throughput": 17.5,
    }
    figures = serving_figures(served)
    assert figures["mean_ttft_ms"] == pytest.approx((500 + 250) / 2)
    assert figures["mean_tpot_ms"] == pytest.approx(1000 / 3)
    assert figures["mean_itl_ms"] == pytest.approx((250 + 750) / 2)
    assert figures["mean_e2el_ms"] == pytest.approx((1500 + 250) / 2)
    assert "median_tpot_ms" not in serving_figures(served[1:])
    with pytest.raises(RequestFailedError, match="1 of 1 requests failed; the first: full"):
        totals(served[2:], 1.0)


class _Engine:
    """Stands for an `AsyncLLMEngine`: the third request is refused, the others give one token and then two more."""

    tokenizer = None
    pause = 0.05

    def __init__(self) -> None:
        self.input_processor = self
        self.salts: set[str] = set()

    def process_inputs(self, *_: Any) -> None: ...

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str) -> AsyncIterator[RequestOutput]:
        self.salts.add(prompt["cache_salt"])
        assert params.ignore_eos
        for tokens in ([], [7], [7, 7]):
            await asyncio.sleep(self.pause)
            if request_id.endswith("2"):
                raise OverloadedError("full")
            completion = CompletionOutput(0, "", cast(list[int], tokens))
            yield RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [completion], len(tokens) == 2)


def test_serving_waits_for_each_arrival_and_counts_its_time_from_there() -> None:
    engine = _Engine()
    asked = [Ask({"prompt_token_ids": [1] * 4}, 3)] * 4
    figures = asyncio.run(serve(cast(AsyncLLMEngine, engine), asked, [0.0, 0.1, 0.2, 0.4], 0.0))
    assert (figures["completed"], figures["failed"]) == (3, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (12, 9)
    assert figures["duration_s"] > 0.4 + 3 * engine.pause
    assert figures["mean_ttft_ms"] > 2000 * engine.pause, "an output without tokens is not the first token"
    assert figures["mean_tpot_ms"] > 500 * engine.pause
    assert figures["mean_itl_ms"] == pytest.approx(2 * figures["mean_tpot_ms"])
    assert figures["mean_e2el_ms"] == pytest.approx(figures["mean_ttft_ms"] + figures["mean_itl_ms"])
    assert len(engine.salts) == 2, "of the warm-up, and of the run"
    asyncio.run(serve(cast(AsyncLLMEngine, engine), asked, [0.0] * 4, 0.0))
    assert len(engine.salts) == 4, "no round finds prefixes of another in the cache"


# ---------------------------------------------------------------------- as users run them


def _check_rates(figures: dict[str, Any]) -> None:
    seconds = figures["duration_s"]
    tokens = figures["total_input_tokens"] + figures["total_output_tokens"]
    assert figures["request_throughput"] == pytest.approx(figures["completed"] / seconds)
    assert figures["output_throughput"] == pytest.approx(figures["total_output_tokens"] / seconds)
    assert figures["total_token_throughput"] == pytest.approx(tokens / seconds)


def test_throughput_of_random_requests(connect: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "found.json"
    options = ["--num-prompts=5", "--input-len=4:9", "--output-len=2:6", "--prefix-len=20", "--seed=3"]
    assert main(["bench", "throughput", connect, *options, f"--output-json={file}"]) == 0
    found = json.loads(file.read_text())
    figures = found["results"][0]
    expected = random_asks(5, (4, 9), (2, 6), 20, 3, vocab_size=2)
    assert figures["completed"] == 5
    assert figures["total_input_tokens"] == sum(len(ask.prompt["prompt_token_ids"]) for ask in expected)
    assert figures["total_output_tokens"] == sum(ask.output_tokens for ask in expected)
    _check_rates(figures)
    assert found["benchmark"] == "throughput"
    assert found["connect"] == connect.partition("=")[2]
    assert found["options"]["input_len"] == "4:9"
    assert found["engine"]["scheduler_config"]["max_num_seqs"] == 16
    assert {"mainspring", "python", "torch"} <= found["versions"].keys()
    assert found["machine"]["processor"]
    assert f" {figures['total_output_tokens']}" in capsys.readouterr().out


def test_throughput_of_a_file(connect: str, tmp_path: Path) -> None:
    asked, file = tmp_path / "asked.jsonl", tmp_path / "found.json"
    asked.write_text(
        '{"prompt_token_ids": [300, 301, 302], "output_tokens": 4}\n{"prompt": "Count up:", "max_tokens": 5}\n'
    )
    assert main(["bench", "throughput", connect, f"--dataset-path={asked}", f"--output-json={file}"]) == 0
    figures = json.loads(file.read_text())["results"][0]
    assert (figures["completed"], figures["total_output_tokens"]) == (2, 9)
    assert figures["total_input_tokens"] > 4


def test_latency_of_batches_of_several_sizes_never_from_the_cache(connect: str, tmp_path: Path) -> None:
    file, picture = tmp_path / "found.json", tmp_path / "found.png"
    options = ["--batch-size=1,3", "--input-len=40", "--output-len=4", "--num-iters=3", "--num-iters-warmup=1"]
    files = [f"--output-json={file}", f"--output-png={picture}"]
    assert main(["bench", "latency", connect, *options, *files]) == 0
    for size, figures in zip((1, 3), json.loads(file.read_text())["results"], strict=True):
        assert (figures["batch_size"], figures["completed"]) == (size, 3 * size)
        assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (3 * 40 * size, 3 * 4 * size)
        assert figures["total_cached_tokens"] == 0
        assert 3 * figures["mean_latency_ms"] == pytest.approx(1000 * figures["duration_s"])
        assert figures["mean_latency_per_token_ms"] == pytest.approx(figures["mean_latency_ms"] / 4)
        _check_rates(figures)
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.slow
def test_serving_at_several_rates_with_a_core_of_its_own(tmp_path: Path, capsys: Capture) -> None:
    file, picture = tmp_path / "found.json", tmp_path / "found.png"
    options = ["--num-prompts=4", "--input-len=20", "--output-len=6", "--request-rate=50,inf", "--max-num-seqs=7"]
    files = [f"--output-json={file}", f"--output-png={picture}"]
    assert main(["bench", "serve", *options, *files]) == 0
    found = json.loads(file.read_text())
    assert [figures["request_rate"] for figures in found["results"]] == [50, "inf"]
    assert found["engine"]["scheduler_config"]["max_num_seqs"] == 7
    for figures in found["results"]:
        assert (figures["completed"], figures["failed"]) == (4, 0)
        assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (80, 24)
        assert figures["total_cached_tokens"] == 0
        assert 0 < figures["median_ttft_ms"] < figures["median_e2el_ms"] <= figures["p99_e2el_ms"]
        _check_rates(figures)
    assert picture.read_bytes().startswith(PNG)
    assert "p99_itl_ms" in capsys.readouterr().out


def test_serving_through_a_daemon(connect: str, capsys: Capture) -> None:
    assert main(["bench", "serve", connect, "--num-prompts=3", "--input-len=5", "--output-len=2"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["total_output_tokens", "6"] in lines
    assert ["request_rate", "inf"] in lines


def test_a_prompt_that_is_too_long_is_named_before_anything_is_sent(connect: str, capsys: Capture) -> None:
    assert main(["bench", "serve", connect, "--num-prompts=2", "--input-len=5000"]) == 1
    assert "prompt 0: " in capsys.readouterr().err


def test_failed_requests_are_a_status(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    options = bench.Throughput(output_json=str(tmp_path / "found.json"))
    for failed in (0, 1):
        found = bench.Document("throughput", "", {}, {}, options, None, EngineConfig(), [{"failed": failed}])
        monkeypatch.setattr(bench, "run", lambda *_, found=found: found)
        assert main(["bench", "throughput"]) == failed
        assert json.loads((tmp_path / "found.json").read_text())["results"] == [{"failed": failed}]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["throughput", "--input-len=9:3"], "input_len is '9:3'"),
        (["throughput", "--output-len=0"], "output_len is '0'"),
        (["latency", "--output-len=1:2:3"], "output_len is '1:2:3'"),
        (["latency", "--batch-size=2,x"], "batch_size is '2,x'"),
        (["latency", "--num-iters=0"], "num_iters is 0"),
        (["latency", "--prefix-len=-1"], "prefix_len is -1"),
        (["serve", "--request-rate=0"], "request_rate is '0'"),
        (["serve", "--request-rate=1,nan"], "request_rate is '1,nan'"),
        (["serve", "--burstiness=0"], "burstiness is 0.0"),
        (["serve", "--num-prompts=0"], "num_prompts is 0"),
        (["serve", "--dataset-path=/no/such"], "dataset_path is '/no/such'"),
        (["serve", "--dataset-path=/dev/null"], "which holds no request"),
        (["serve", "--output-png=/no/such/x.png"], "output_png is '/no/such/x.png'"),
        (["throughput", "--key=x"], "--key and --server-key are for --connect"),
    ],
)
def test_a_wrong_option_is_one_line_before_an_engine_is_started(
    arguments: list[str], words: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mainspring.engine.llm.LLM", None)
    monkeypatch.setattr(bench, "_async_engine", None)
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert words in said.err


@pytest.mark.slow
def test_without_matplotlib_the_extra_is_named(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert main(["bench", "serve", "--output-png=x.png"]) == 1
    assert "pip install 'mainspring[bench]'" in capsys.readouterr().err
