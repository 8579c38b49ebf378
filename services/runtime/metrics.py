"""Prometheus metrics of one process: an object, no module-level registry.

Names: headrace_<noun>_<unit>, counters end in _total. A gauge is computed when it is read, from the set it counts
(L11), so it cannot drift.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from socketserver import ThreadingMixIn
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from headrace.services.runtime import logs, peers
from headrace.services.runtime.errors import HeadraceError
from headrace.services.runtime.live import LiveSet, Outcome
from headrace.services.runtime.tls import Tls

NAMESPACE: Final = "headrace"
SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Default buckets of durations: one step of a small model up to a long generation."""

Labels = tuple[str, ...]
SCRAPE_TIMEOUT_S: Final = 10.0
"""Longest silence of a scraper, its handshake included."""
_log = logs.get(__name__)


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

    def counts(self, name: str, text: str, labels: Sequence[str], read: Callable[[], Mapping[Labels, int]]) -> None:
        """Counters headrace_NAME_total by label values, kept by `read`'s owner and read at each scrape."""
        full = f"{NAMESPACE}_{name}"

        def collect() -> Iterable[Metric]:
            family = CounterMetricFamily(full, text, labels=labels)
            for values, number in read().items():
                family.add_metric(values, number)
            yield family

        self.registry.register(_Collected(collect, (CounterMetricFamily(full, text, labels=labels),)))

    def live_set(self, name: str, text: str, live: LiveSet[Any]) -> None:
        """Three series of a live set: headrace_NAME_live, headrace_NAME_arrived_total, headrace_NAME_ended_total."""
        self.live_sets(name, text, (), lambda: {(): live})

    def live_sets(
        self, name: str, text: str, labels: Sequence[str], read: Callable[[], Mapping[Labels, LiveSet[Any]]]
    ) -> None:
        """The series of `live_set`, by label values."""
        full = f"{NAMESPACE}_{name}"

        def families() -> tuple[GaugeMetricFamily, CounterMetricFamily, CounterMetricFamily]:
            return (
                GaugeMetricFamily(f"{full}_live", f"{text}: in flight", labels=labels),
                CounterMetricFamily(f"{full}_arrived", f"{text}: arrived", labels=labels),
                CounterMetricFamily(f"{full}_ended", f"{text}: ended, by outcome", labels=[*labels, "outcome"]),
            )

        def collect() -> Iterable[Metric]:
            in_flight, arrived, ended = families()
            for values, live in read().items():
                in_flight.add_metric(values, len(live))
                arrived.add_metric(values, live.arrived)
                for outcome in Outcome:
                    ended.add_metric([*values, outcome.value], live.ended(outcome))
            yield from (in_flight, arrived, ended)

        self.registry.register(_Collected(collect, families()))

    def render(self) -> str:
        """The text that a scrape gets."""
        return generate_latest(self.registry).decode()

    def value(self, name: str, **labels: str) -> float | None:
        """One sample by its full name, None where absent; for status pages and tests."""
        return self.registry.get_sample_value(name, labels)


class MetricsServer:
    """The HTTP endpoint of a Metrics object; serves on threads of its own. With `tls` it is HTTPS, for certificates of
    the roles in peers.SCRAPERS."""

    def __init__(self, metrics: Metrics, host: str, port: int, tls: Tls | None = None) -> None:
        """Raises OSError when the address is taken."""

        class Server(_Server):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            material = tls

        self._server = make_server(host, port, make_wsgi_app(metrics.registry), Server, _Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()
        self.host = host
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    material: Tls | None = None

    def get_request(self) -> tuple[Any, Any]:
        """Handshakes are the connection's thread's: a silent caller holds nobody else up."""
        connection, address = super().get_request()
        connection.settimeout(SCRAPE_TIMEOUT_S)
        context = None if self.material is None else self.material.current().context
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address

    def finish_request(self, request: Any, client_address: Any) -> None:
        if isinstance(request, ssl.SSLSocket):
            request.do_handshake()
            if not _may_scrape(request):
                request.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                return
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a scrape failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """No line for each scrape."""


def _may_scrape(connection: ssl.SSLSocket) -> bool:
    names: Any = (connection.getpeercert() or {}).get("subjectAltName", ())
    try:
        return peers.peer_of(value for kind, value in names if kind == "URI").role in peers.SCRAPERS
    except HeadraceError:
        return False


class _Collected(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]], described: Iterable[Metric]) -> None:
        self._collect = collect
        self._described = tuple(described)

    def collect(self) -> Iterable[Metric]:
        return self._collect()

    def describe(self) -> Iterable[Metric]:
        return self._described
