"""The HTTP port of a router: what its probes say, and figures of replicas, moves and calls."""

import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from route_parts import Routed, routed
from serve_parts import ONE_CALL, WAIT_S, serve_bytes, served, wait_until

from jaxserve.api import SamplingParams
from jaxserve.client import Client
from jaxserve.config.schema import HttpConfig
from jaxserve.serve import degraded

SHORT = SamplingParams(temperature=0.0, max_tokens=5)


def figures(router: Routed) -> dict[tuple[str, ...], float]:
    """Value by name, without the prefix, and labels."""
    text = httpx.get(f"{router.http_url}/metrics", timeout=WAIT_S).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(s.name.removeprefix("jaxserve:router_"), *s.labels.values()): s.value for s in samples}


def status(router: Routed, path: str) -> int:
    return httpx.get(router.http_url + path, timeout=WAIT_S).status_code


def health(router: Routed) -> dict[str, str]:
    return httpx.get(f"{router.http_url}/health", timeout=WAIT_S).json()


def test_figures_of_a_replica_that_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(degraded, "_AFTER_S", 0.0)
    monkeypatch.setattr(degraded, "_CALM_S", 0.0)
    with (
        served(serve_bytes(max_rows=1), drain_s=0.0) as one,
        served(serve_bytes(max_rows=1)) as two,
        routed(one.address, two.address, retries=0, http=HttpConfig(port=0)) as router,
        Client(router.address, retries=ONE_CALL) as client,
    ):
        wait_until(lambda: figures(router).get(("replica_well", two.address)) == 1.0, "the second is well")
        wait_until(lambda: figures(router)["replica_well", one.address] == 1.0, "so is the first")
        one.runner.hold()
        two.runner.hold()
        answers: list[str] = []
        asking = [
            threading.Thread(target=lambda: answers.append(client.complete("a", SHORT, timeout_s=WAIT_S).text))
            for _ in range(2)
        ]
        for thread in asking:
            thread.start()
        wait_until(lambda: one.runner.is_held and two.runner.is_held, "each has one of them")
        found = figures(router)
        assert [found["replica_requests_running", server.address] for server in (one, two)] == [1, 1]
        assert found["requests_running",] == 2 and found["accepting",] == 1
        wait_until(lambda: health(router) == {"status": "ok"}, "it has seen that both are well")
        assert figures(router)["degraded",] == 0
        assert [status(router, path) for path in ("/ready", "/health", "/ping", "/live", "/version")] == [200] * 5
        one.request_shutdown()
        wait_until(lambda: one.engine._stop_now.is_set(), "its time is over")
        one.runner.release()
        two.runner.release()
        for thread in asking:
            thread.join(WAIT_S)
        assert answers == ["bcdef"] * 2
        wait_until(lambda: health(router)["status"] == "degraded", "one of them is missing")
        assert (
            f"1 of 2 replicas are well (serve.degraded_below is 1), without {one.address}" in health(router)["reason"]
        )
        assert status(router, "/health") == 200 and router.is_healthy()
        found = figures(router)
        assert found["degraded",] == 1
        assert found["moves_total", "drained"] == 1 and found["moves_total", "died"] == 0
        assert found["replica_requests_total", two.address] == 2
        calls = {key[1:]: value for key, value in found.items() if key[0] == "grpc_requests_total"}
        assert sum(value for labels, value in calls.items() if "Generate" in labels) == 2
        assert found["quarantined",] == 0 and found["process_resident_memory_bytes",] > 0


def test_probes_without_a_replica_and_routes_that_are_not_there() -> None:
    with routed("127.0.0.1:1", wait=False, http=HttpConfig(port=0)) as router:
        wait_until(lambda: not router.is_healthy(), "it has looked")
        refusal = httpx.get(f"{router.http_url}/ready", timeout=WAIT_S)
        assert refusal.status_code == 503 and "127.0.0.1:1" in refusal.json()["reason"]
        assert status(router, "/live") == 200
        assert status(router, "/v1/models") == 404
        assert httpx.get(f"{router.http_url}/metrics", headers={"host": "evil.example"}).status_code == 403
