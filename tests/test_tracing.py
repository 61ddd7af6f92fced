"""Traces: one span for each request, with its phases, as received by a collector, in all three modes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from daemons import Daemon, short_folder
from mainspring import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, RequestOutput, SamplingParams
from mainspring.engine.observe import tracing
from mainspring.ipc.errors import EngineDeadError, InvalidArgumentError, InvalidRequestError, NotSupportedError
from tiers import fast_only

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"Traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=opaque"}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)


class Span(NamedTuple):
    name: str
    trace: str
    id: str
    parent: str
    begin: float  # seconds since 1970
    end: float
    attributes: dict[str, Any]
    status: tuple[int, str]
    state: str  # of the trace


class Collector:
    """Receives OTLP over HTTP on loopback, as a real collector does, and keeps the spans."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.paths: set[str] = set()
        self.services: set[str] = set()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector.take(self.path, self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def take(self, path: str, body: bytes) -> None:
        self.paths.add(path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                one.value.string_value for one in resource.resource.attributes if one.key == "service.name"
            }
            for scope in resource.scope_spans:
                self.spans += map(_span, scope.spans)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def roots(self) -> dict[str, Span]:
        """The root spans by request id; checks that each exists once."""
        found = [span for span in self.spans if span.name == "llm_request"]
        by_id = {span.attributes["gen_ai.request.id"]: span for span in found}
        assert len(by_id) == len(found), "a request has two spans"
        return by_id

    def phases(self, root: Span) -> dict[str, Span]:
        return {span.name: span for span in self.spans if span.parent == root.id}


def _span(one: Any) -> Span:
    attributes = {each.key: _value(each.value) for each in one.attributes}
    ids = one.trace_id.hex(), one.span_id.hex(), one.parent_span_id.hex()
    times = one.start_time_unix_nano / 1e9, one.end_time_unix_nano / 1e9
    return Span(one.name, *ids, *times, attributes, (one.status.code, one.status.message), one.trace_state)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def drive(engine: LLMEngine, each: Callable[[RequestOutput], None] = lambda output: None) -> None:
    while engine.has_unfinished_requests():
        for output in engine.step():
            each(output)


def check_whole(collector: Collector, root: Span, began: float, ended: float) -> None:
    """Check that the times are right and that the phases fill the span without a gap."""
    assert began <= root.begin <= root.end <= ended
    phases = collector.phases(root)
    assert set(phases) == {"queue", "prefill", "decode"}
    assert {phase.trace for phase in phases.values()} == {root.trace}
    moments = [phases["queue"].begin, phases["prefill"].begin, phases["decode"].begin, phases["decode"].end]
    assert moments == sorted(moments)
    assert (moments[0], moments[-1]) == (root.begin, root.end)
    assert [phases[name].end for name in ("queue", "prefill")] == moments[1:3]
    found = root.attributes
    for name, seconds in (
        ("time_in_queue", moments[1] - moments[0]),
        ("time_to_first_token", moments[2] - moments[0]),
        ("time_in_model_prefill", moments[2] - moments[1]),
        ("time_in_model_decode", moments[3] - moments[2]),
        ("time_in_model_inference", moments[3] - moments[1]),
        ("e2e", moments[3] - moments[0]),
    ):
        assert found[f"gen_ai.latency.{name}"] == pytest.approx(seconds, abs=1e-5)


@pytest.mark.parametrize("multiprocess", fast_only([False], [False, True]))
def test_each_request_is_one_span_with_its_phases_and_what_it_asked_for(
    collector: Collector, multiprocess: bool
) -> None:
    args = EngineArgs(otlp_traces_endpoint=collector.endpoint, served_model_name="the-model")
    with LLMEngine.from_engine_args(args, enable_multiprocessing=multiprocess) as engine:
        began = time.time()
        engine.add_request("own", "Once upon a time", GREEDY)
        engine.add_request(
            "child", [5, 6, 7], SamplingParams(n=2, seed=1, max_tokens=4, top_p=0.9), trace_headers=HEADERS
        )
        drive(engine)
        ended = time.time()
    roots = collector.roots()
    assert set(roots) == {"own", "child"}
    own, child = roots["own"], roots["child"]
    assert own.parent == ""
    assert (child.trace, child.parent, child.state) == (TRACE, PARENT, "vendor=opaque")
    assert own.trace != TRACE
    for root in (own, child):
        check_whole(collector, root, began, ended)
        assert root.attributes["gen_ai.response.model"] == "the-model"
        assert root.status == (0, "")
    asked = {name: own.attributes[f"gen_ai.request.{name}"] for name in ("max_tokens", "temperature", "top_p", "n")}
    assert asked == {"max_tokens": 12, "temperature": 0.0, "top_p": 1.0, "n": 1}
    assert own.attributes["gen_ai.usage.completion_tokens"] == 12
    assert own.attributes["gen_ai.response.finish_reasons"] == ["length"]
    usage = {name: child.attributes[f"gen_ai.usage.{name}"] for name in ("prompt_tokens", "num_sequences")}
    assert usage == {"prompt_tokens": 3, "num_sequences": 2}
    assert child.attributes["gen_ai.request.top_p"] == 0.9
    assert collector.paths == {"/v1/traces"}
    assert collector.services == {"mainspring"}


def test_an_abort_and_an_error_are_spans_too(collector: Collector) -> None:
    args = EngineArgs(otlp_traces_endpoint=f"{collector.endpoint}/own/path", max_requests_in_flight=1)
    with LLMEngine.from_engine_args(args, enable_multiprocessing=False) as engine:
        engine.add_request("aborted", "Once upon a time", LONG)
        engine.add_request("refused", "Once upon a time", LONG)
        for _ in range(5):
            engine.step()
        engine.abort_request(["aborted"])
        drive(engine)
    roots = collector.roots()
    assert set(roots) == {"aborted", "refused"}
    assert roots["aborted"].attributes["gen_ai.response.finish_reasons"] == ["abort"]
    assert roots["aborted"].status == (0, "")
    code, text = roots["refused"].status
    assert code == 2
    assert "max_requests_in_flight" in text
    assert roots["refused"].attributes["error.type"] == "OverloadedError"
    assert not collector.phases(roots["refused"]), "nothing is known of them"
    assert collector.paths == {"/own/path"}


@pytest.mark.slow
def test_a_request_that_goes_on_after_its_core_was_killed_is_still_one_span(collector: Collector) -> None:
    args = EngineArgs(otlp_traces_endpoint=collector.endpoint, served_model_name="m")
    with LLMEngine.from_engine_args(args) as engine:
        began, kill = time.time(), [True]
        engine.add_request("r", "Once upon a time", LONG, trace_headers=HEADERS)

        def shoot(output: RequestOutput) -> None:
            if kill and len(output.outputs[0].token_ids) > 20:
                kill.clear()
                os.kill(engine.engine_core._connection._core.supervisor.core_pid, signal.SIGKILL)  # type: ignore[attr-defined]

        drive(engine, shoot)
        ended = time.time()
    root = collector.roots()["r"]
    check_whole(collector, root, began, ended)
    assert root.parent == PARENT
    assert root.attributes["gen_ai.usage.completion_tokens"] == 200


@pytest.mark.slow
def test_requests_of_a_core_that_is_gone_for_good_end_in_spans_with_the_error(collector: Collector) -> None:
    args = EngineArgs(otlp_traces_endpoint=collector.endpoint, max_restarts=0)
    with LLMEngine.from_engine_args(args) as engine:
        engine.add_request("lost", "Once upon a time", LONG)
        engine.step()
        os.kill(engine.engine_core._connection._core.supervisor.core_pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(EngineDeadError):
            drive(engine)
    root = collector.roots()["lost"]
    assert (root.status[0], root.attributes["error.type"]) == (2, "EngineDeadError")


@pytest.mark.slow
def test_the_async_engine_traces_its_streams(collector: Collector) -> None:
    async def main() -> tuple[float, float]:
        args = AsyncEngineArgs(otlp_traces_endpoint=collector.endpoint)
        began = time.time()
        async with AsyncLLMEngine.from_engine_args(args) as engine:
            streams = [
                engine.generate("Once upon a time", GREEDY, "newest", trace_headers=HEADERS),
                engine.generate("Once upon a time", GREEDY, "by position", None, HEADERS),
            ]
            async for _ in streams[0]:
                pass
            async for _ in streams[1]:
                pass
            left = engine.generate("Once upon a time", LONG, "left")
            await anext(left)
            await left.aclose()
        return began, time.time()

    times = asyncio.run(main())
    roots = collector.roots()
    assert set(roots) == {"newest", "by position", "left"}
    for name in ("newest", "by position"):
        check_whole(collector, roots[name], *times)
        assert roots[name].parent == PARENT
    assert roots["left"].attributes["gen_ai.response.finish_reasons"] == ["abort"]


@pytest.mark.slow
def test_a_connected_frontend_traces_to_the_daemons_collector_or_its_own_or_not_at_all() -> None:
    theirs, mine = Collector(), Collector()
    with short_folder() as folder:
        daemon = Daemon(folder, f"--otlp-traces-endpoint={theirs.endpoint}")
        try:
            daemon.ready_line()
            for name, endpoint in (("theirs", None), ("mine", mine.endpoint), ("nowhere", "")):
                with LLMEngine.connect(daemon.address, otlp_traces_endpoint=endpoint) as engine:
                    engine.add_request(name, "Once upon a time", GREEDY, trace_headers=HEADERS)
                    drive(engine)
        finally:
            daemon.end()
    assert set(theirs.roots()) == {"theirs"}
    assert set(mine.roots()) == {"mine"}
    assert mine.roots()["mine"].parent == PARENT
    theirs.close()
    mine.close()


# ------------------------------------------------------------------ what can be wrong


def test_headers_without_an_endpoint_are_said_to_have_no_effect_once(caplog: pytest.LogCaptureFixture) -> None:
    with LLMEngine.from_engine_args(EngineArgs(), enable_multiprocessing=False) as engine:
        for name in ("a", "b"):
            engine.add_request(name, "x", GREEDY, trace_headers=HEADERS)
        drive(engine)
    assert [record.getMessage().partition(",")[0] for record in caplog.records if "trace" in record.getMessage()] == [
        "trace_headers have no effect"
    ]


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{TRACE}-{PARENT}", f"ff-{TRACE}-{PARENT}-01"])
def test_a_parent_that_is_none_begins_a_trace_of_its_own(collector: Collector, parent: str) -> None:
    with LLMEngine.from_engine_args(EngineArgs(otlp_traces_endpoint=collector.endpoint), None, None, False) as engine:  # type: ignore[arg-type]
        engine.add_request("r", "x", GREEDY, trace_headers={"traceparent": parent})
        drive(engine)
    assert collector.roots()["r"].parent == ""


def test_a_parent_that_is_not_sampled_has_no_spans(collector: Collector) -> None:
    with LLMEngine.from_engine_args(EngineArgs(otlp_traces_endpoint=collector.endpoint), None, None, False) as engine:  # type: ignore[arg-type]
        engine.add_request("r", "x", GREEDY, trace_headers={"traceparent": f"00-{TRACE}-{PARENT}-00"})
        engine.add_request("s", "x", GREEDY, trace_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"})
        drive(engine)
    assert set(collector.roots()) == {"s"}


@pytest.mark.parametrize("headers", ["traceparent", {"traceparent": 1}, {1: "x"}, ["x"], {"traceparent": b"x"}])
def test_headers_that_are_no_dict_of_str_are_refused_by_name(headers: Any) -> None:
    with LLMEngine.from_engine_args(EngineArgs(), enable_multiprocessing=False) as engine:
        with pytest.raises(InvalidRequestError, match="trace_headers"):
            engine.add_request("r", "x", GREEDY, trace_headers=headers)
        assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("silent", [False, True], ids=["refuses", "never answers"])
def test_a_collector_that_cannot_be_reached_is_a_log_line_and_holds_nothing_up(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    monkeypatch.setattr(tracing, "SEND_SECONDS", 0.3)
    monkeypatch.setattr(tracing._quiet, "_said", -tracing.QUIET_SECONDS)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if silent:
            listener.listen()
        args = EngineArgs(otlp_traces_endpoint=f"http://127.0.0.1:{listener.getsockname()[1]}")
        engine = LLMEngine.from_engine_args(args, enable_multiprocessing=False)
        for i in range(3):
            engine.add_request(str(i), "x", GREEDY)
        ended: list[str] = []
        drive(engine, lambda output: ended.append(output.request_id) if output.finished else None)
        engine.shutdown()
    assert sorted(ended) == ["0", "1", "2"]
    lines = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(lines) == 1
    assert lines[0].levelno >= logging.WARNING


def test_an_error_in_tracing_affects_no_request(
    collector: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing.Tracer, "_attributes", lambda *_: 1 / 0)
    with LLMEngine.from_engine_args(EngineArgs(otlp_traces_endpoint=collector.endpoint), None, None, False) as engine:  # type: ignore[arg-type]
        engine.add_request("r", "x", GREEDY)
        drive(engine)
    assert "request r could not be traced" in caplog.text


@pytest.mark.parametrize("endpoint", ["localhost:4317", "grpc://localhost:4317", "http://", "http:///v1/traces", ""])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArgumentError, match="otlp_traces_endpoint"):
        EngineArgs(otlp_traces_endpoint=endpoint).create_engine_config()


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mainspring.engine.observe.tracing", None)
    with pytest.raises(NotSupportedError, match=r"pip install \"mainspring\[tracing\]\""):
        LLMEngine.from_engine_args(EngineArgs(otlp_traces_endpoint="http://127.0.0.1:1"), None, None, False)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_library_is_loaded_only_where_there_is_an_endpoint(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom mainspring import EngineArgs, LLMEngine, SamplingParams\n"
        "e = LLMEngine.from_engine_args(EngineArgs(), enable_multiprocessing=False)\n"
        "e.add_request('a', 'x', SamplingParams(max_tokens=2))\n"
        "while e.has_unfinished_requests(): e.step()\n"
        "print([m for m in sys.modules if m.startswith('opentelemetry')])"
    )
    import subprocess

    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
