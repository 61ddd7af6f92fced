"""Traces of requests, sent to an OpenTelemetry collector over HTTP. Imported only if an endpoint is set.

A request is one span, ``llm_request``, made when the request has ended, with the children ``queue``, ``prefill`` and
``decode``. Attributes have the names of OpenTelemetry's conventions for generative AI, or else of vLLM. Sampling,
headers, certificates and the service's name are set by OpenTelemetry's environment variables.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http import trace_exporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from ..request.request_state import RequestState

logger = logging.getLogger(__name__)

SEND_SECONDS = 3.0  # to send a batch of spans, retries included; a shutdown waits for two batches at most
QUEUED_SPANS = 16_384  # default of OTEL_BSP_MAX_QUEUE_SIZE; further spans are dropped, which is logged
QUIET_SECONDS = 60.0  # least time between two log lines about a collector that can't be reached
_PARAMETERS = ("max_tokens", "temperature", "top_p", "n")


class Tracer:
    """Makes spans of the requests that end. Only `close` waits for the collector.

    Args:
        endpoint: ``http://HOST:PORT``, to which ``/v1/traces`` is added, or a whole URL.
        model: the model's name in spans.
    """

    def __init__(self, endpoint: str, model: str) -> None:
        url = urlsplit(endpoint)
        whole = endpoint if url.path.strip("/") else f"{url.scheme}://{url.netloc}/v1/traces"
        trace_exporter._logger.addFilter(_quiet)
        self._exporter = _Exporter(whole, timeout=SEND_SECONDS)
        resource = Resource({"service.name": "mainspring"}).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        queued = int(os.environ.get("OTEL_BSP_MAX_QUEUE_SIZE", QUEUED_SPANS))
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, max_queue_size=queued))
        self._tracer = self._provider.get_tracer("mainspring")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def ended(self, request: RequestState, now: float, error: Exception | None = None) -> None:
        """The request is over.

        Args:
            now: on the clock of `time.monotonic`, as all of the request's times.
            error: why the request ended, if the core did not end it.
        """
        try:
            self._trace(request, now, error)
        except Exception:  # a request must not fail because of its trace
            logger.exception("request %s could not be traced", request.source.request_id)

    def close(self) -> None:
        """Send the queued spans. Later spans are dropped."""
        self._exporter.closing = True
        self._provider.shutdown()

    def _trace(self, request: RequestState, now: float, error: Exception | None) -> None:
        to_epoch = time.time() - time.monotonic()

        def nanoseconds(moment: float) -> int:
            return int((min(moment, now) + to_epoch) * 1e9)

        completions = request.completions
        error = error or next((one.error for one in completions if one.error is not None), None)
        headers = {name.lower(): value for name, value in (request.source.trace_headers or {}).items()}
        span = self._tracer.start_span(
            "llm_request",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            self._attributes(request, now),
            start_time=nanoseconds(request.added),
        )
        if error is not None:
            span.set_attribute("error.type", type(error).__name__)
            span.set_status(Status(StatusCode.ERROR, str(error)))
        metrics, inside = request.metrics, set_span_in_context(span)
        moments = (request.added, metrics.first_scheduled_time, metrics.first_token_time, now)
        for name, begin, end in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
            if begin is None or end is None:  # the request ended before this phase
                break
            phase = self._tracer.start_span(name, inside, start_time=nanoseconds(begin))
            phase.end(nanoseconds(end))
        span.end(nanoseconds(now))

    def _attributes(self, request: RequestState, now: float) -> dict[str, Any]:
        source, metrics, completions = request.source, request.metrics, request.completions
        found: dict[str, Any] = {f"gen_ai.request.{name}": getattr(source.params, name, None) for name in _PARAMETERS}
        found |= {
            "gen_ai.request.id": source.request_id,
            "gen_ai.response.model": self._model,
            "gen_ai.response.finish_reasons": [one.finish_reason for one in completions if one.finish_reason],
            "gen_ai.usage.prompt_tokens": len(source.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(len(one.token_ids) for one in completions),
            "gen_ai.usage.num_sequences": len(completions),
            "gen_ai.latency.e2e": now - request.added,
        }
        begun, first = metrics.first_scheduled_time, metrics.first_token_time
        if begun is not None and first is not None:
            found |= {
                "gen_ai.latency.time_in_queue": begun - request.added,
                "gen_ai.latency.time_to_first_token": first - request.added,
                "gen_ai.latency.time_in_model_prefill": first - begun,
                "gen_ai.latency.time_in_model_decode": max(0.0, now - first),
                "gen_ai.latency.time_in_model_inference": max(0.0, now - begun),
            }
        return {name: value for name, value in found.items() if value is not None}


class _Exporter(trace_exporter.OTLPSpanExporter):
    """OpenTelemetry's exporter, except that it gives up at a shutdown if the collector can't be reached."""

    failed = closing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self.closing and self.failed:
            return SpanExportResult.FAILURE
        result = super().export(spans)
        self.failed = result is not SpanExportResult.SUCCESS
        return result


class _Quiet(logging.Filter):
    """Limits the exporter's log lines: it writes several for each batch that it cannot send."""

    _said = -QUIET_SECONDS

    def filter(self, record: logging.LogRecord) -> bool:
        if time.monotonic() - self._said < QUIET_SECONDS:
            return False
        self._said = time.monotonic()
        return True


_quiet = _Quiet()
