"""Prometheus metrics of one process: an object, no module-level registry.

Names: headrace_<noun>_<unit>, counters end in _total. A gauge is computed when it is read, from the set it counts
(L11), so it cannot drift.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from headrace.services.runtime.live import LiveSet, Outcome

NAMESPACE: Final = "headrace"
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Default buckets of durations: one step of a small model up to a long generation."""

Labels = tuple[str, ...]


class Metrics:
    """The metrics of one process. `constant` labels (role, replica) stand on headrace_info, not on every series."""

    def __init__(self, **constant: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self.registry)
        if constant:
            keys, values = tuple(constant), tuple(constant.values())
            self.gauges("info", "Constant 1; its labels say what this process is", keys, lambda: {values: 1})

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        """A counter headrace_NAME_total."""
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS
    ) -> Histogram:
        """A histogram headrace_NAME, in seconds unless the name ends in another unit."""
        return Histogram(name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge headrace_NAME whose value is `read()` at each scrape; `read` may run on another thread."""
        self.gauges(name, text, (), lambda: {(): read()})

    def gauges(self, name: str, text: str, labels: Sequence[str], read: Callable[[], Mapping[Labels, float]]) -> None:
        """Gauges headrace_NAME by label values, read at each scrape."""
        full = f"{NAMESPACE}_{name}"

        def collect() -> Iterable[Metric]:
            family = GaugeMetricFamily(full, text, labels=labels)
            for values, number in read().items():
                family.add_metric(values, number)
            yield family

        self.registry.register(_Collected(collect, (GaugeMetricFamily(full, text, labels=labels),)))

    def live_set(self, name: str, text: str, live: LiveSet[Any]) -> None:
        """Three series of a live set: headrace_NAME_live, headrace_NAME_accepted_total, headrace_NAME_ended_total."""
        self.live_sets(name, text, (), lambda: {(): live})

    def live_sets(
        self, name: str, text: str, labels: Sequence[str], read: Callable[[], Mapping[Labels, LiveSet[Any]]]
    ) -> None:
        """The series of `live_set`, by label values."""
        full = f"{NAMESPACE}_{name}"

        def families() -> tuple[GaugeMetricFamily, CounterMetricFamily, CounterMetricFamily]:
            return (
                GaugeMetricFamily(f"{full}_live", f"{text}: in flight", labels=labels),
                CounterMetricFamily(f"{full}_accepted", f"{text}: accepted", labels=labels),
                CounterMetricFamily(f"{full}_ended", f"{text}: ended, by outcome", labels=[*labels, "outcome"]),
            )

        def collect() -> Iterable[Metric]:
            in_flight, accepted, ended = families()
            for values, live in read().items():
                in_flight.add_metric(values, len(live))
                accepted.add_metric(values, live.accepted)
                for outcome in Outcome:
                    ended.add_metric([*values, outcome.value], live.ended(outcome))
            yield from (in_flight, accepted, ended)

        self.registry.register(_Collected(collect, families()))

    def render(self) -> str:
        """The text that a scrape gets."""
        return generate_latest(self.registry).decode()

    def value(self, name: str, **labels: str) -> float | None:
        """One sample by its full name, None where absent; for status pages and tests."""
        return self.registry.get_sample_value(name, labels)


class MetricsServer:
    """The HTTP endpoint of a Metrics object; serves on a thread of its own."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        server, thread = start_http_server(port, addr=host, registry=metrics.registry)
        self._server: WSGIServer = server
        self._thread: threading.Thread = thread
        self.host = host
        self.port: int = server.server_port

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]], described: Iterable[Metric]) -> None:
        self._collect = collect
        self._described = tuple(described)

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        return self._described
