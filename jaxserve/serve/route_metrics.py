"""The figures of a router, for Prometheus."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.metric_names import PREFIX
from jaxserve.serve.quarantine import Quarantine
from jaxserve.serve.route_pool import Pool
from jaxserve.serve.route_service import RouteService


class RouteCollector(Collector):
    """Reads the figures of a router at each scrape. On its event loop."""

    def __init__(self, pool: Pool, service: RouteService, quarantine: Quarantine, counts: DoorCounts) -> None:
        self._pool = pool
        self._service = service
        self._quarantine = quarantine
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of the documentation."""
        well = GaugeMetricFamily(PREFIX + "router_replica_well", "1 while it gets requests.", labels=("replica",))
        running = GaugeMetricFamily(
            PREFIX + "router_replica_requests_running", "Requests of this router there.", labels=("replica",)
        )
        sent = CounterMetricFamily(
            PREFIX + "router_replica_requests", "Requests that were sent to it.", labels=("replica",)
        )
        for state in self._pool.states:
            well.add_metric([state.address], float(state.healthy))
            running.add_metric([state.address], state.num_running)
            sent.add_metric([state.address], state.num_requests)
        yield from (well, running, sent)
        yield GaugeMetricFamily(PREFIX + "router_requests_running", "Calls that run.", value=self._service.num_live)
        yield GaugeMetricFamily(
            PREFIX + "router_accepting", "1 while new requests are taken.", value=float(self._service.accepting)
        )
        yield GaugeMetricFamily(
            PREFIX + "router_degraded",
            "1 while /health says degraded.",
            value=float(self._counts.degraded is not None),
        )
        moves = CounterMetricFamily(
            PREFIX + "router_moves",
            "Requests that went on at another replica, by why: it died, drained, was emptied.",
            labels=("reason",),
        )
        for reason, number in self._service.counts.moves.items():
            moves.add_metric([reason], number)
        yield moves
        yield GaugeMetricFamily(
            PREFIX + "router_quarantined", "Contents that are refused.", value=len(self._quarantine)
        )
        yield CounterMetricFamily(
            PREFIX + "router_convictions",
            "Contents that replicas were found to die of.",
            value=self._quarantine.num_convictions,
        )
        yield CounterMetricFamily(
            PREFIX + "router_quarantine_refusals",
            "Requests that were refused for their content.",
            value=self._quarantine.num_refused,
        )
        calls = CounterMetricFamily(
            PREFIX + "router_grpc_requests", "Calls of its methods that have ended.", labels=("method", "code")
        )
        for values, number in self._counts.grpc.items():
            calls.add_metric(values, number)
        yield calls
        answers = CounterMetricFamily(
            PREFIX + "router_http_requests", "Its HTTP calls that have ended.", labels=("method", "route", "status")
        )
        for values, number in self._counts.http.items():
            answers.add_metric(values, number)
        yield answers
        slow = CounterMetricFamily(
            PREFIX + "router_event_loop_slow_callbacks",
            "Times that the event loop was held up, by function.",
            labels=("where",),
        )
        for where, number in self._counts.slow.copy().items():
            slow.add_metric([where], number)
        yield slow
