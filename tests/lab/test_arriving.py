"""Requests that wait for answers: clients in a closed loop, and sessions whose turns follow real answers."""

import collections
import dataclasses
import itertools
from typing import Any

import pytest

from jaxserve.cli import main
from jaxserve.errors import ConfigError, InvalidRequest
from jaxserve.lab.simulation.arriving import Chains
from jaxserve.lab.simulation.cluster import simulate_cluster
from jaxserve.lab.simulation.cluster_values import Failure
from jaxserve.lab.simulation.requests import ClientOptions, Trace
from jaxserve.lab.simulation.simulate import FixedCost, SimulationResult, StepCost, simulate
from jaxserve.lab.study.point import fleet_of, run_point
from jaxserve.lab.study.spec import Study
from jaxserve.lab.workloads.arrivals import ArrivalOptions
from jaxserve.lab.workloads.datasets import DatasetOptions
from jaxserve.testing import make_limits

COST = FixedCost(cost=StepCost(0.001, 0.01))
LIMITS = make_limits(max_rows=4, num_pages=2000, page_size=4, max_model_len=2048, token_buckets=(16, 256))


def closed_loop(clients: int, think_s: float = 0.0, count: int = 60, **more: Any) -> Chains:
    options = ClientOptions(clients=clients, client_think_s=think_s, **more)
    dataset = DatasetOptions(num_prompts=count, input_len=30, output_len=12, range_ratio=0.5)
    load = Trace(dataset=dataset, clients=options).load()
    assert isinstance(load, Chains)
    return load


def most_at_once(result: SimulationResult) -> int:
    edges = sorted(
        edge for r in result.requests for edge in ((r.arrival_s, 1), (r.last_token_s or r.arrival_s, -1))
    )  # at one moment an end comes before an arrival
    live = most = 0
    for _, change in edges:
        live += change
        most = max(most, live)
    return most


@pytest.mark.parametrize(("clients", "think_s"), [(1, 0.0), (7, 0.0), (7, 0.3)])
def test_each_client_sends_when_it_has_its_answer(clients: int, think_s: float) -> None:
    """And so the law of interactive systems holds: each client's time is the sum of its answers and its thoughts."""
    load = closed_loop(clients, think_s)
    result = simulate("fcfs", load, COST, LIMITS)
    found = {request.request_id: request for request in result.requests}
    assert len(found) == 60 and len(load.chains) == clients
    for chain in load.chains:
        end_s = 0.0
        for asked in chain:
            request = found[asked.request.request_id]
            assert request.arrival_s == end_s + asked.arrival_s
            assert request.last_token_s is not None
            end_s = request.last_token_s
        responses_s = [
            (found[a.request.request_id].last_token_s or 0) - found[a.request.request_id].arrival_s for a in chain
        ]
        assert end_s == pytest.approx(sum(responses_s) + sum(asked.arrival_s for asked in chain))
    assert most_at_once(result) <= clients
    assert most_at_once(result) == clients or think_s
    again = simulate("fcfs", load, COST, LIMITS)
    assert again.requests == result.requests, "a load can be run again"


def test_turns_wait_for_slow_answers() -> None:
    """At a step of 0.2 s answers come at 5 tokens a second, and not at the 40 that are assumed beforehand."""
    slow = FixedCost(cost=StepCost(0.0, 0.2))
    dataset = DatasetOptions(
        name="agent",
        num_prompts=40,
        input_len=20,
        output_len=20,
        prefix_len=16,
        turns=4,
        think_s=0.5,
        session_rate=5.0,
        max_session_len=1000,
    )
    fixed, waiting = (Trace(dataset=dataset, clients=ClientOptions(turns_wait=wait)) for wait in (False, True))
    assert fixed.load() is fixed
    load = waiting.load()
    assert isinstance(load, Chains)
    turns = [[one.request.request_id for one in chain] for chain in load.chains]
    assert max(map(len, turns)) > 2

    def num_early(result: SimulationResult) -> int:
        found = {request.request_id: request for request in result.requests}
        pairs = [pair for chain in turns for pair in itertools.pairwise(chain)]
        return sum(found[then].arrival_s < (found[first].last_token_s or 0.0) for first, then in pairs)

    assert num_early(simulate("fcfs", fixed, slow, LIMITS)) > 10
    result = simulate("fcfs", load, slow, LIMITS)
    assert num_early(result) == 0
    later = {name for chain in turns for name in chain[1:]}
    assert all(r.cached_tokens > 16 for r in result.requests if r.request_id in later), "the answer before is cached"


def test_clusters_and_failures() -> None:
    load = closed_loop(6)
    alone = simulate("fcfs", load, COST, LIMITS)
    assert simulate_cluster("fcfs", load, COST, LIMITS, replicas=1).total.requests == alone.requests
    events = [Failure(at_s=0.5, replica=0, back_s=0.6)]
    for restart in (True, False):
        run = simulate_cluster(
            "fcfs", load, COST, LIMITS, replicas=2, router="round_robin", events=events, restart_lost=restart
        )
        ends = collections.Counter(bool(request.error) for request in run.total.requests)
        assert ends.total() == 60, "a chain goes on behind a request that failed"
        assert bool(ends[True]) is not restart
    dead = [Failure(at_s=0.2, replica=0)]
    run = simulate_cluster("fcfs", load, COST, LIMITS, replicas=1, events=dead, restart_lost=False)
    assert len(run.total.requests) == 60
    assert any("no replica was left" in request.error for request in run.total.requests)


def test_deadlines_count_from_the_arrival() -> None:
    load = closed_loop(3, deadline_s=0.1)
    result = simulate("fcfs", load, FixedCost(cost=StepCost(0.0, 0.05)), LIMITS)
    assert len(result.requests) == 60
    assert all(request.error for request in result.requests), "none has its answer in two steps"
    assert max(request.arrival_s for request in result.requests) > 1.0, "they were sent one after the other"


def test_the_command_and_a_study(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--num-prompts",
        "12",
        "--input-len",
        "30",
        "--output-len",
        "8",
        "--clients",
        "3",
        "--client-think",
        "0.1",
    ]
    assert main(["simulate", *arguments, "--policy", "fcfs"]) == 0
    assert "most requests at once" in capsys.readouterr().out
    base = {"load.num_prompts": 20, "load.input_len": 30, "load.output_len": 8, "load.clients": 2, "length_error": 1.0}
    [point] = Study(base=base, seeds=1, warmup=0.0).points()
    assert run_point(point, fleet_of(point), 0)["figures"]["max_concurrent_requests"] == 2


def test_what_cannot_be_is_refused() -> None:
    dataset = DatasetOptions(num_prompts=2)
    with pytest.raises(ConfigError, match="leave out --rate"):
        Trace(dataset=dataset, arrivals=ArrivalOptions(rate=1.0), clients=ClientOptions(clients=2))
    with pytest.raises(ConfigError, match="take another dataset than agent"):
        Trace(dataset=DatasetOptions(name="agent"), clients=ClientOptions(clients=2))
    with pytest.raises(ConfigError, match="random has no turns"):
        Trace(dataset=dataset, clients=ClientOptions(turns_wait=True))
    with pytest.raises(ConfigError, match="clients is 0"):
        ClientOptions(clients=0)
    with pytest.raises(ConfigError, match="client_think_s is 1"):
        ClientOptions(client_think_s=1.0)
    chain = closed_loop(1, count=2).chains[0]
    with pytest.raises(InvalidRequest, match="stands twice"):
        Chains(chains=(chain, chain))
    late = dataclasses.replace(chain[0].request, arrival_s=-1.0)
    with pytest.raises(InvalidRequest, match="waits for -1"):
        Chains(chains=((dataclasses.replace(chain[0], request=late, arrival_s=-1.0),),))
