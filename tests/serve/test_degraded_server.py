"""A server on the rungs of its ladder, or without some replicas, as its clients, operators and dashboards see it."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from serve_parts import LONG, ONE_CALL, WAIT_S, Served, serve_slowly, wait_until
from test_admin import ADMIN, KEY, _served

from jaxserve.cli.top import parse_scrape
from jaxserve.client import CallOptions, Client, RequestFailed
from jaxserve.engine.degrading import DegradeOptions
from jaxserve.errors import Status
from jaxserve.sched.ladder import LadderOptions, Rung
from jaxserve.serve import degraded
from jaxserve.serve.degraded import DegradedReport, handoffs_of, missing
from jaxserve.serve.gen import inference_pb2 as pb
from jaxserve.serve.handoff import HandoffCounts
from jaxserve.testing import ManualClock


def degrading(clock: ManualClock, highest: Rung) -> Served:
    """One row; a request that waits for 2 s is pressure, and each look takes a rung."""
    options = DegradeOptions(LadderOptions(highest=highest, up_s=0.0, down_s=0.0), queue_s=2.0, step_s=1e6)
    return serve_slowly(max_rows=1, clock=clock, degrade=options)


def two_requests(server: Served, client: Client) -> tuple[Iterator[pb.GenerateResponse], threading.Thread]:
    """One that runs, and one that waits for its row and is read on a thread."""
    running, waiting = (client.generate("a", LONG, CallOptions(request_id=name)) for name in ("runs", "waits"))
    next(running)
    reading = threading.Thread(target=lambda: [*waiting], daemon=True)
    reading.start()
    wait_until(lambda: server.engine.num_unstarted == 1, "the second waits")
    return running, reading


def climb(server: Served, clock: ManualClock, rung: Rung) -> None:
    while (now := server.engine.stats[0].degraded[0]) is not rung:
        clock.advance(3.0)
        wait_until(lambda now=now: server.engine.stats[0].degraded[0] is not now, "a rung is taken")


def test_a_report_begins_and_ends_with_what_lasts() -> None:
    now: list[str | None] = [None, None]
    report = DegradedReport([lambda: now[0], lambda: now[1]])
    assert report.look(0.0) is None
    now[0] = "a"
    assert report.look(10.0) is None and report.look(11.9) is None
    now[0] = None
    assert report.look(12.0) is None, "it did not last"
    now[:] = ["a", "b"]
    assert report.look(13.0) is None and report.look(15.0) == "a; b"
    now[:] = [None, "c"]
    assert report.look(15.1) == "c", "the reason is that of now"
    now[1] = None
    assert report.look(16.0) == "c" and report.look(25.9) == "c"
    now[0] = "a"
    assert report.look(26.0) == "a"
    now[0] = None
    assert report.look(27.0) == "a" and report.look(37.0) is None and report.reason is None


@pytest.mark.parametrize(
    ("num_faults", "share", "degraded"),
    [(0, 1.0, False), (1, 1.0, True), (1, 0.75, False), (2, 0.75, True), (4, 0.0, False), (4, 0.01, True)],
)
def test_the_share_of_replicas_that_is_stated(num_faults: int, share: float, degraded: bool) -> None:
    text = missing([f"replica {number}" for number in range(num_faults)], 4, share)
    assert (text is not None) is degraded
    if text is not None:
        assert text.startswith(f"{4 - num_faults} of 4 replicas are well") and "replica 0" in text


def test_prompts_that_do_not_arrive_are_a_reason() -> None:
    counts = HandoffCounts()
    look = handoffs_of(lambda: counts)
    counts.missed["stalled"] += 1000
    assert look() is None, "too few to say anything"
    counts.missed["died"] += 500
    counts.tokens["pulled"] += 500
    assert "75% of the tokens" in str(look()) and "stalled" in str(look())
    counts.tokens["pulled"] += 2000
    assert look() is None


def test_new_work_is_refused_while_others_wait(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(degraded, "_AFTER_S", 0.0)
    monkeypatch.setattr(degraded, "_CALM_S", 0.0)
    clock = ManualClock()
    with (
        _served(degrading(clock, Rung.REFUSE), tmp_path) as server,
        Client(server.address, token=KEY, retries=ONE_CALL) as client,
    ):
        running, waiting = two_requests(server, client)
        climb(server, clock, Rung.REFUSE)
        with pytest.raises(RequestFailed, match="overloaded") as caught:
            client.complete("a", LONG)
        assert caught.value.status is Status.OVERLOADED and (caught.value.retry_after_s or 0) >= 1
        headers = {"authorization": f"Bearer {KEY}"}
        body = {"model": "fake", "prompt": "a"}
        with httpx.Client(base_url=server.http_url, headers=headers, timeout=WAIT_S, trust_env=False) as http:
            refused = http.post("/v1/completions", json=body)
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            scrape = parse_scrape(http.get("/metrics").text, 0.0)
            assert scrape.sum("degradation_rung") == Rung.REFUSE
            assert scrape.sum("degradation_pressure", signal="queue") > 1
            state = http.get("/admin/cache", headers={"authorization": f"Bearer {ADMIN}"}).json()
            assert state["replicas"][0]["rung"] == "refuse"
            told = {"status": "degraded", "reason": "pressure: refuse (degrade.highest)"}
            wait_until(lambda: http.get("/health").json() == told, "probes say why")
            assert http.get("/health").status_code == 200 and client.is_serving(timeout_s=WAIT_S)
            assert parse_scrape(http.get("/metrics").text, 0.0).sum("degraded") == 1
            client.abort("waits")
            waiting.join(WAIT_S)
            while server.engine.stats[0].degraded[0] is not Rung.NONE:
                clock.advance(0.3)
            wait_until(lambda: http.get("/health").json() == {"status": "ok"}, "it is over")
        client.abort("runs")
        list(running)
    changes = [record.getMessage() for record in caplog.records if "degradation goes" in record.getMessage()]
    assert "from small_chunks to refuse" in changes[5], changes


def test_on_the_last_rung_the_server_drains(tmp_path: Path) -> None:
    clock = ManualClock()
    with (
        _served(degrading(clock, Rung.DRAIN), tmp_path) as server,
        Client(server.address, token=KEY, retries=ONE_CALL) as client,
    ):
        running, waiting = two_requests(server, client)
        climb(server, clock, Rung.DRAIN)
        wait_until(lambda: not server.engine.accepting, "it drains")
        client.abort("runs", "waits")
        assert list(running)
        waiting.join(WAIT_S)
        assert server.wait_for_exit() == 0
