"""From shapes to simulated requests: ids that share what the trace says, clients, one at a time."""

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.requests import ClientOptions, Trace, sim_requests, spell
from jaxserve.lab.simulation.simulate import FixedCost, SimRequest, StepCost, simulate
from jaxserve.lab.workloads.arrivals import ArrivalOptions
from jaxserve.lab.workloads.datasets import DatasetOptions
from jaxserve.lab.workloads.samples import Part, Shape
from jaxserve.routing import key_of_tokens
from jaxserve.sched import Bucket, Limits

LIMITS = Limits(
    max_rows=8,
    num_pages=4000,
    page_size=4,
    max_model_len=4096,
    buckets=(Bucket(8, 8, True), Bucket(64, 8, False), Bucket(256, 8, False)),
)
COST = FixedCost(cost=StepCost(0.0001, 0.001))


def common_prefix(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_equal_keys_are_equal_ids_as_far_as_the_shorter_goes() -> None:
    first, second = spell([Part(7, 10), Part(8, 4)]), spell([Part(7, 10), Part(8, 9), Part(9, 1)])
    assert len(first) == 14
    assert common_prefix(first, second) == 14
    assert common_prefix(first, spell([Part(7, 10), Part(11, 4)])) == 10
    assert len(set(spell([Part(5, 6, answer=True)]))) == 1


def test_different_keys_never_begin_alike_not_even_for_a_router() -> None:
    firsts = [spell([Part(key, 16)]) for key in range(20_000)]
    assert len({ids[0] for ids in firsts}) == 20_000
    assert len({key_of_tokens(ids) for ids in firsts}) == 20_000


def test_a_trace_is_the_same_each_time() -> None:
    trace = Trace(
        dataset=DatasetOptions(name="sharegpt", num_prompts=50),
        arrivals=ArrivalOptions(rate=4.0),
        clients=ClientOptions(tenants=3, priorities=2),
    )
    first = list(trace)
    assert first == list(trace)
    assert len(first) == 50
    assert first[-1].arrival_s == pytest.approx(12.5)
    assert len({request.request.request_id for request in first}) == 50


def test_a_million_requests_are_made_one_at_a_time() -> None:
    trace = Trace(dataset=DatasetOptions(name="sharegpt", num_prompts=10**6), arrivals=ArrivalOptions(rate=100.0))
    assert len(list(itertools.islice(trace, 20))) == 20


def test_blocks_of_a_mooncake_trace_are_found_cached(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 0, "input_length": 1200, "output_length": 5, "hash_ids": [0, 1, 2]},
        {"timestamp": 5000, "input_length": 1536, "output_length": 7, "hash_ids": [0, 1, 3]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = simulate("fcfs", Trace(dataset=DatasetOptions(name="mooncake", path=path)), COST, LIMITS)
    assert [(r.prompt_tokens, r.output_tokens, r.arrival_s) for r in result.requests] == [(1200, 5, 0), (1536, 7, 5.0)]
    assert [r.cached_tokens for r in result.requests] == [0, 1024]


def test_a_turn_finds_all_that_was_said_before() -> None:
    dataset = DatasetOptions(name="agent", num_prompts=60, session_rate=0.2, prefix_len=40, input_len=30, output_len=20)
    trace = list(Trace(dataset=dataset))
    shapes = {r.request.request_id: r for r in trace}
    result = simulate("fcfs", trace, COST, LIMITS)
    answers: dict[tuple[int, ...], int] = {}  # prompt -> tokens known when it was answered
    num_later = 0
    for request in sorted(result.requests, key=lambda r: int(r.request_id)):
        sim = shapes[request.request_id]
        prompt = sim.request.prompt_token_ids
        said = max((length for start, length in answers.items() if prompt[: len(start)] == start), default=40)
        if answers:
            # The last token of an answer is never fed, and only full pages of 4 are found.
            assert said - 1 - 4 < request.cached_tokens <= said, request
            num_later += said > 40
        answers[prompt] = len(prompt) + sim.output_len
    assert num_later > 20


def test_those_who_ask_for_more_stop_by_themselves() -> None:
    trace = Trace(
        dataset=DatasetOptions(num_prompts=30, input_len=20, output_len=40, range_ratio=0.5),
        clients=ClientOptions(max_tokens=50),
    )
    requests = list(trace)
    assert {r.request.max_tokens for r in requests} == {50}
    result = simulate("fcfs", requests, COST, LIMITS)
    asked = {r.request.request_id: r.output_len for r in requests}
    assert max(asked.values()) > 50
    for request in result.requests:
        length = asked[request.request_id]
        assert request.output_tokens == min(length, 50)
        assert request.finish_reason.value == ("stop" if length < 50 else "length")


def test_tenants_and_priorities() -> None:
    clients = ClientOptions(tenants=4, tenant_skew=1.0, priorities=3)
    shapes = [Shape(parts=(Part(n, 4),), output_len=1, arrival_s=float(n)) for n in range(8000)]
    requests = list(sim_requests(shapes, clients))
    counts = Counter(r.request.tenant for r in requests)
    total = 1 + 1 / 2 + 1 / 3 + 1 / 4
    for tenant in range(4):
        assert counts[f"tenant-{tenant}"] / 8000 == pytest.approx(1 / (tenant + 1) / total, rel=0.1)
    levels = Counter(r.request.priority for r in requests)
    assert set(levels) == {0, 1, 2}
    assert min(levels.values()) > 2400
    even = Counter(r.request.tenant for r in sim_requests(shapes, ClientOptions(tenants=2, tenant_skew=0.0)))
    assert even["tenant-0"] / 8000 == pytest.approx(0.5, rel=0.05)


def test_owners_have_shares_of_their_own_and_weights() -> None:
    shapes = [Shape(parts=(Part(n, 4),), output_len=1, arrival_s=float(n)) for n in range(8000)]
    requests = [r.request for r in sim_requests(shapes, ClientOptions(tenants=2, owner_weights=(1, 4), owner_skew=2.0))]
    assert {(r.owner, r.owner_weight) for r in requests} == {("owner-0", 1), ("owner-1", 4)}
    pairs = Counter((r.owner, r.tenant) for r in requests)
    for owner in range(2):
        for tenant in range(2):
            share = (0.8, 0.2)[owner] * (2 / 3, 1 / 3)[tenant]
            assert pairs[f"owner-{owner}", f"tenant-{tenant}"] / 8000 == pytest.approx(share, rel=0.1)
    assert {(r.request.owner, r.request.owner_weight) for r in sim_requests(shapes[:9])} == {("", 1.0)}


def test_a_session_has_one_owner() -> None:
    clients = ClientOptions(owner_weights=(1, 1, 1), owner_skew=0.0)
    trace = Trace(dataset=DatasetOptions(name="agent", num_prompts=200, turns=5.0), clients=clients)
    owners: dict[int, set[str]] = {}
    for request in trace:
        owners.setdefault(request.request.prompt_token_ids[256], set()).add(request.request.owner)
    assert all(len(names) == 1 for names in owners.values())
    assert set.union(*owners.values()) == {"owner-0", "owner-1", "owner-2"}


def test_a_session_has_one_tenant() -> None:
    trace = Trace(dataset=DatasetOptions(name="agent", num_prompts=200, turns=5.0), clients=ClientOptions(tenants=5))
    tenants: dict[int, set[str]] = {}
    for request in trace:
        tenants.setdefault(request.request.prompt_token_ids[256], set()).add(request.request.tenant)
    assert len(tenants) > 20
    assert all(len(names) == 1 for names in tenants.values())
    assert len(set.union(*tenants.values())) > 1


def test_a_deadline_is_a_time_after_arrival() -> None:
    [request] = sim_requests([Shape(parts=(Part(0, 4),), output_len=1, arrival_s=3.0)], ClientOptions(deadline_s=2.0))
    assert request.request.deadline_s == 5.0


def test_prompts_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [
        {"prompt": "you are kind and brief what is love", "arrival_s": 0},
        {"prompt": "you are kind and brief who is she", "arrival_s": 1, "max_tokens": 3},
        {"prompt": [5, 6, 7], "arrival_s": 2},
        {"messages": [{"role": "user", "content": "hello you"}], "arrival_s": 3},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    requests: list[SimRequest] = list(Trace(dataset=DatasetOptions(name="custom", path=path, output_len=9)))
    ids = [r.request.prompt_token_ids for r in requests]
    assert [len(i) for i in ids] == [8, 8, 3, 3]
    assert common_prefix(ids[0], ids[1]) == 5
    assert ids[2] == (5, 6, 7)
    assert [r.output_len for r in requests] == [9, 3, 9, 9]
    assert [r.arrival_s for r in requests] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"tenants": 0}, "tenants"),
        ({"priorities": 0}, "priorities"),
        ({"tenant_skew": -1.0}, "tenant_skew"),
        ({"owner_skew": math.nan}, "owner_skew"),
        ({"owner_weights": (1.0, 0.0)}, "owner_weights has 0.0"),
        ({"deadline_s": 0.0}, "deadline_s"),
    ],
)
def test_clients_that_cannot_be(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ClientOptions(**values)


def test_traces_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="--session-rate"):
        Trace(dataset=DatasetOptions(name="agent"), arrivals=ArrivalOptions(rate=math.inf))
    with pytest.raises(ConfigError, match="no dataset"):
        Trace(dataset=DatasetOptions(name="shakespeare"))
