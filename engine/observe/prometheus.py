"""Serves metrics over HTTP for Prometheus. Imported only if a metrics port is set, because it needs a library."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from ...ipc.errors import AddressInUseError
from .metrics import HELP, Counter, Gauge, Histogram, Metric

logger = logging.getLogger(__name__)

_FAMILIES: dict[type[Metric], Any] = {
    Counter: CounterMetricFamily,
    Gauge: GaugeMetricFamily,
    Histogram: HistogramMetricFamily,
}


class _EngineCollector(Collector):
    """Gets the metrics from the engine at each scrape."""

    def __init__(self, metrics: Callable[[], Iterable[Metric]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[prometheus_client.Metric]:
        families: dict[str, Any] = {}
        for one in self._metrics():
            if one.name not in families:
                kind, text = _FAMILIES[type(one)], HELP[one.name.rpartition(":")[2]]
                families[one.name] = kind(one.name, text, labels=[*one.labels])
            add, values = families[one.name].add_metric, [*one.labels.values()]
            if isinstance(one, Histogram):
                add(values, [*one.buckets.items()], one.sum)
            elif isinstance(one, (Counter, Gauge)):
                add(values, one.value)
        return families.values()


def serve_metrics(host: str, port: int, metrics: Callable[[], Iterable[Metric]]) -> tuple[int, Callable[[], None]]:
    """Answer GET /metrics. Returns the port, which for 0 is a free one, and a function that stops the server.

    Raises:
        AddressInUseError: the port can't be opened.
    """
    registry = prometheus_client.CollectorRegistry()
    registry.register(_EngineCollector(metrics))
    try:
        server, thread = prometheus_client.start_http_server(port, host, registry)
    except OSError as error:
        why = f"{error.strerror}; choose another"
        raise AddressInUseError(f"metrics_port is {port}, where nobody can listen on {host}: {why}") from None
    logger.info("metrics at http://%s:%d/metrics", host, server.server_port)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop


def exposition(metrics: Iterable[Metric]) -> bytes:
    """The text that a scrape gets."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(_EngineCollector(lambda: metrics))
    return prometheus_client.generate_latest(registry)
