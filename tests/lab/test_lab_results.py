"""Simulated runs as figures: definitions by hand, tables, data frames."""

import builtins
import dataclasses
import io
import json
import math
from typing import Any

import pytest
import rich.console

from jaxserve.api import FinishReason
from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.cluster import simulate_cluster
from jaxserve.lab.simulation.requests import Trace
from jaxserve.lab.simulation.results import LabResult, compare_frame, outcome_of, show_results
from jaxserve.lab.simulation.simulate import FixedCost, SimulatedRequest, SimulationResult, StepCost, simulate
from jaxserve.lab.workloads.arrivals import ArrivalOptions
from jaxserve.lab.workloads.datasets import DatasetOptions
from jaxserve.lab.workloads.metrics import Goodput
from jaxserve.sched import Bucket, Limits, SchedulerOptions
from jaxserve.sched.draft_counts import DraftTotals

LIMITS = Limits(
    max_rows=4, num_pages=200, page_size=4, max_model_len=256, buckets=(Bucket(4, 4, True), Bucket(32, 4, False))
)
COST = FixedCost(cost=StepCost(0.0, 0.010))


def ended(number: int, arrival_s: float, *times_s: float, **values: Any) -> SimulatedRequest:
    fields: dict[str, Any] = {
        "request_id": str(number),
        "tenant": "",
        "priority": 0,
        "arrival_s": arrival_s,
        "first_token_s": times_s[0],
        "last_token_s": times_s[-1],
        "prompt_tokens": 10,
        "asked_tokens": len(times_s),
        "output_tokens": len(times_s),
        "preemptions": 0,
        "cached_tokens": 4,
        "finish_reason": FinishReason.LENGTH,
        "token_times_s": times_s,
    }
    return SimulatedRequest(**(fields | values))


def refused(number: int) -> SimulatedRequest:
    error = {"first_token_s": None, "last_token_s": None, "output_tokens": 0, "token_times_s": (), "cached_tokens": 0}
    return ended(number, 0.5, 0.5, finish_reason=FinishReason.ERROR, error="too long", **error)


def simulated(*requests: SimulatedRequest, duration_s: float = 2.0) -> SimulationResult:
    return SimulationResult(
        requests=requests,
        steps=(),
        plans=(),
        duration_s=duration_s,
        num_steps=5,
        device_s=1.5,
        tokens=30,
        padded_tokens=40,
        row_steps=20,
        row_tokens=20,
        drafts=DraftTotals(),
    )


# Arrives at 0 s; tokens at 0.5, 0.7, 1.0 s. Arrives at 1.0 s; one token at 1.2 s.
BY_HAND = simulated(ended(0, 0.0, 0.5, 0.7, 1.0, admitted_s=0.3), ended(1, 1.0, 1.2, preemptions=2), refused(2))


def test_queueing_and_prefill_add_up_to_the_first_token() -> None:
    """Five prompts of one step each, on one row, all at once: who comes later queues longer, none computes longer."""
    limits = Limits(max_rows=1, num_pages=200, page_size=4, max_model_len=256, buckets=(Bucket(32, 1, False),))
    trace = Trace(dataset=DatasetOptions(num_prompts=5, input_len=20, output_len=1), arrivals=ArrivalOptions(rate=1e6))
    frame = LabResult.of("fcfs", simulate("fcfs", trace, COST, limits)).to_frame()
    assert (frame["queue_ms"] + frame["prefill_ms"]).tolist() == pytest.approx(frame["ttft_ms"].tolist())
    # Ends are known beforehand: the next in line gets the row while the step before still runs, and waits for it.
    assert frame["admitted_s"].is_monotonic_increasing and frame["queue_ms"][4] > frame["queue_ms"][0] + 25
    assert frame["prefill_ms"].max() - frame["prefill_ms"].min() < 11


def test_figures_are_those_of_a_measured_run() -> None:
    result = LabResult.of("fcfs", BY_HAND, goodput=Goodput(ttft_ms=300.0), percentiles=(50,))
    metrics = result.metrics
    assert (metrics.completed, metrics.failed, metrics.failures) == (2, 1, {"simulated error": 1})
    assert metrics.ttft_ms.mean == pytest.approx((500 + 200) / 2)
    assert metrics.tpot_ms.mean == pytest.approx(250.0)
    assert metrics.itl_ms.count == 2
    assert metrics.e2el_ms.percentiles[50] == pytest.approx((1000 + 200) / 2)
    assert metrics.request_throughput == pytest.approx(1.0)
    assert metrics.request_goodput == pytest.approx(0.5)
    assert metrics.output_throughput == pytest.approx(2.0)
    assert metrics.max_output_tokens_per_s == 2
    assert (result.num_preemptions, result.busy_share, result.padded_share) == (2, 0.75, 0.25)
    assert result.cached_share == pytest.approx(8 / 20)


def test_first_and_last_tokens_are_enough_for_all_but_itl() -> None:
    light = simulated(*(r if r.error else _without_times(r) for r in BY_HAND.requests))
    with_all, without = (LabResult.of("x", run).metrics for run in (BY_HAND, light))
    assert without.itl_ms.count == 0
    assert without.max_output_tokens_per_s is None
    for name in ("ttft_ms", "tpot_ms", "e2el_ms", "output_throughput", "completed", "max_concurrency", "num_uncounted"):
        assert getattr(without, name) == getattr(with_all, name), name


def _without_times(request: SimulatedRequest) -> SimulatedRequest:
    assert request.first_token_s is not None
    assert request.last_token_s is not None
    times = (request.first_token_s, request.last_token_s)
    values = {"token_times_s": (), "output_tokens": request.output_tokens, "asked_tokens": request.asked_tokens}
    return ended(int(request.request_id), request.arrival_s, *times, **values)


def test_an_outcome_has_what_a_client_would_have_seen() -> None:
    outcome = outcome_of(BY_HAND.requests[0])
    assert (outcome.start_s, outcome.output_times_s, outcome.output_tokens) == (0.0, (0.5, 0.7, 1.0), 3)
    failed = outcome_of(BY_HAND.requests[2])
    assert (failed.failure, failed.detail) == ("simulated error", "too long")
    assert outcome_of(ended(0, 0.0, 1.0, finish_reason=FinishReason.ABORT)).failure == "abort"


def test_a_run_without_requests_says_so() -> None:
    with pytest.raises(ConfigError, match="no requests"):
        LabResult.of("empty", simulated())


def printed(*results: LabResult) -> str:
    console = rich.console.Console(file=io.StringIO(), width=110)
    show_results(results, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_one_run_is_a_table_as_of_bench_and_several_are_a_line_each() -> None:
    one, two = LabResult.of("fcfs", BY_HAND, goodput=Goodput(ttft_ms=300.0)), LabResult.of("sjf", BY_HAND)
    text = printed(one)
    for word in ("answered, failed", "TTFT (ms)", "TPOT (ms)", "ITL (ms)", "preempted", "busy", "75%", "too long"):
        assert word in text
    text = printed(one, two)
    assert [line.split()[0] for line in text.splitlines() if line.strip().startswith(("fcfs ", "sjf "))] == [
        "fcfs",
        "sjf",
        "fcfs",
        "sjf",
    ]
    assert "goodput/s" in text
    assert "40%" in text


def test_data_frames() -> None:
    result = LabResult.of("fcfs", BY_HAND)
    frame = result.to_frame()
    assert list(frame["request_id"]) == ["0", "1", "2"]
    assert frame["ttft_ms"][0] == pytest.approx(500.0)
    assert (frame["queue_ms"][0], frame["prefill_ms"][0]) == (pytest.approx(300.0), pytest.approx(200.0))
    assert frame["tpot_ms"][0] == pytest.approx(250.0)
    assert math.isnan(frame["tpot_ms"][1])
    assert math.isnan(frame["ttft_ms"][2])
    assert frame["finish_reason"][2] == "error"
    assert "token_times_s" not in frame
    table = compare_frame([result, LabResult.of("sjf", BY_HAND)])
    assert list(table.index) == ["fcfs", "sjf"]
    assert table["mean_ttft_ms"]["sjf"] == pytest.approx(350.0)
    with pytest.raises(ConfigError, match="keep_steps"):
        result.steps_frame()


def test_steps_are_a_data_frame() -> None:
    trace = Trace(dataset=DatasetOptions(num_prompts=10, input_len=20, output_len=8))
    simulation = simulate("fcfs", trace, COST, LIMITS, keep_steps=True)
    frame = LabResult.of("fcfs", simulation).steps_frame()
    assert len(frame) == simulation.num_steps
    assert frame["tokens"].sum() == simulation.tokens
    assert set(frame["bucket"]) == {"4x4", "32x4"}
    assert (frame["device_start_s"].diff().dropna() >= 0).all()


def test_the_time_without_a_row_is_that_between_two_rows() -> None:
    """Few pages, so that sequences lose their rows: what the plans say of rows adds up to the times of the requests."""
    limits = dataclasses.replace(LIMITS, num_pages=24)
    trace = Trace(
        dataset=DatasetOptions(num_prompts=12, input_len=20, output_len=30), arrivals=ArrivalOptions(rate=200.0)
    )
    options = SchedulerOptions(watermark=0.0, growth=0.0)
    run = simulate("fcfs", trace, COST, limits, options=options, keep_steps=True, keep_plans=True)
    owners: dict[int, str] = {}
    left_s: dict[str, float] = {}
    expected_s = dict.fromkeys((request.request_id for request in run.requests), 0.0)
    for plan, step in zip(run.plans, run.steps, strict=True):
        for row in plan.freed_rows:
            left_s[owners[row]] = step.start_s
        for setup in plan.setups:
            owners[setup.row] = setup.request_id
            expected_s[setup.request_id] += step.start_s - left_s.pop(setup.request_id, step.start_s)
    assert {request.request_id: request.preempted_s for request in run.requests} == expected_s
    assert [request.preempted_s > 0 for request in run.requests] == [r.preemptions > 0 for r in run.requests]
    assert 0 < sum(request.preemptions > 0 for request in run.requests) < 12, "some, and not all"
    frame = LabResult.of("fcfs", run).to_frame()
    assert frame["preempted_ms"].sum() == pytest.approx(1e3 * sum(expected_s.values()))


def test_tenants_have_metrics_service_and_an_index() -> None:
    first = ended(0, 0.0, 0.5, 0.7, 1.0, tenant="a")
    second = ended(1, 1.0, 1.2, tenant="b", cached_tokens=0)
    result = LabResult.of("fair", simulated(first, second), goodput=Goodput(ttft_ms=300.0))
    assert {name: metrics.ttft_ms.mean for name, metrics in result.tenants.items()} == {
        "a": pytest.approx(500.0),
        "b": pytest.approx(200.0),
    }
    assert [metrics.request_goodput for metrics in result.tenants.values()] == [0.0, 0.5]
    assert result.jain == pytest.approx((1 / 3 + 0.2) ** 2 / (2 * (1 / 9 + 0.04)))
    # A prompt of 10 tokens, 4 of them cached, and three outputs of weight 2; a prompt of 10 and one output.
    assert result.service_frame(0.6).to_dict("list") == {"a": [6.0 + 2.0, 2.0 + 2.0, 0.0], "b": [0.0, 0.0, 10.0 + 2.0]}
    tokens = result.tokens_frame()
    assert list(tokens["time_s"]) == [0.5, 0.7, 1.0, 1.2]
    assert list(tokens["gap_ms"].fillna(-1)) == pytest.approx([-1, 200, 300, -1])
    assert [line["token_times_s"] for line in result.requests_json()] == [[0.5, 0.7, 1.0], [1.2]]
    assert json.loads(json.dumps(result.as_json()))["tenants"]["b"]["mean_ttft_ms"] == pytest.approx(200.0)
    text = printed(result)
    assert "fair, by tenant" in text and "Jain" in text
    alone = LabResult.of("fair", simulated(first))
    assert (alone.tenants, alone.jain) == ({}, None)
    assert "by tenant" not in printed(alone)
    with pytest.raises(ConfigError, match="keep_token_times"):
        LabResult.of("light", simulated(_without_times(first))).service_frame()
    with pytest.raises(ConfigError, match="window_s is 0"):
        result.service_frame(0)


def test_owners_have_metrics() -> None:
    first, second = ended(0, 0.0, 0.5, 0.7, owner="a", tenant="x"), ended(1, 1.0, 1.2, owner="b", tenant="x")
    result = LabResult.of("fair", simulated(first, second))
    assert {name: metrics.output_tokens for name, metrics in result.owners.items()} == {"a": 2, "b": 1}
    assert json.loads(json.dumps(result.as_json()))["owners"]["b"]["mean_ttft_ms"] == pytest.approx(200.0)
    assert list(result.to_frame()["owner"]) == ["a", "b"]
    assert "fair, by owner" in printed(result) and "by tenant" not in printed(result)
    assert LabResult.of("fair", simulated(first)).owners == {}


def test_a_cluster_is_judged_as_a_whole() -> None:
    trace = Trace(
        dataset=DatasetOptions(num_prompts=40, input_len=20, output_len=8), arrivals=ArrivalOptions(rate=50.0)
    )
    run = simulate_cluster("fcfs", trace, COST, LIMITS, replicas=3, router="round_robin", keep_steps=True)
    result = LabResult.of("fcfs", run, num_pages=LIMITS.num_pages)
    assert result.metrics.completed == 40
    assert result.num_replicas == 3
    assert result.replica_s == pytest.approx(3 * run.total.duration_s)
    assert result.busy_share == pytest.approx(run.total.device_s / result.replica_s)
    assert len(result.simulation.steps) == run.total.num_steps
    starts = [step.start_s for step in result.simulation.steps]
    assert starts == sorted(starts)


def test_without_pandas_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def no_pandas(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_pandas)
    with pytest.raises(ConfigError, match=r"\[lab\]"):
        LabResult.of("fcfs", BY_HAND).to_frame()
