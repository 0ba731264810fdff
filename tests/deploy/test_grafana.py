"""The dashboard: every query names a metric that the server exports, with labels that it has."""

import collections
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import make_dashboard
import pytest
from adapter_parts import byte_adapters
from prometheus_client.core import Metric
from serve_parts import IdleStore

from jaxserve.api import SamplingParams
from jaxserve.engine import Engine, ModelInfo
from jaxserve.sched import ContinuousScheduler, create_scheduler
from jaxserve.sched.page_watch import PageWatcher
from jaxserve.sched.plan import EncoderPool, HostSlots
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.handoff import HandoffCounts
from jaxserve.serve.metrics import make_registry
from jaxserve.serve.quarantine import Quarantine
from jaxserve.serve.route_metrics import RouteCollector
from jaxserve.testing import FakeRunner, make_limits

FILE = Path(__file__).parents[2] / "deploy" / "grafana" / "jaxserve.json"
NAME = re.compile(r"\b(?:jaxserve:|process_)[a-z0-9_]+")
SCRAPED = {"instance", "job"}  # labels that Prometheus adds
SELECTOR = re.compile(r"([a-z0-9_:]+)\{([^}]*)\}")


def _counted() -> DoorCounts:
    """Each kind of count once, so that its labels are there."""
    counts = DoorCounts()
    counts.note_http("GET", "/health", 200, 0.1)
    counts.note_grpc("Generate", "OK")
    one = collections.Counter({"one": 1})
    counts.read_handoff = lambda: HandoffCounts(prefills=one, leases=one, tokens=one, missed=one)
    return counts


def _router() -> RouteCollector:
    """Of one that has a server, and has had calls."""
    state = SimpleNamespace(address="a:1", healthy=True, num_running=1, num_requests=1)
    service: Any = SimpleNamespace(num_live=1, accepting=True, counts=SimpleNamespace(moves={"died": 1}))
    pool: Any = SimpleNamespace(states=[state])
    return RouteCollector(pool, service, Quarantine(1.0), _counted())


def _exported() -> dict[str, set[str]]:
    """Every name that a scrape has, with its labels: of a server with drafts, tiers, handoffs, events of pages and
    adapters, and of a router."""
    slots = HostSlots(num_slots=8, max_draining=8, max_loads=8)
    pool = EncoderPool(num_pages=4, max_patches=64, host_embeddings=64)
    limits = dataclasses.replace(make_limits(shapes=((2, 1),), slots=slots, encoder=pool), adapter_slots=1)
    scheduler = create_scheduler("fcfs", limits, store=IdleStore())
    assert isinstance(scheduler, ContinuousScheduler)
    watcher = PageWatcher()
    watcher.passes_on = True
    scheduler.watch_pages(watcher)
    engine = Engine(
        runner=FakeRunner(limits, accept=lambda request_id, index, position, count: count),
        scheduler=scheduler,
        tokenizer=None,
        model=ModelInfo(
            name="m", vocab_size=256, max_model_len=64, eos_token_ids=(), drafter="ngram", adapters=byte_adapters(1)
        ),
    )
    sampling = SamplingParams(max_tokens=4, detokenize=False)
    engine.submit(engine.prepare({"prompt_token_ids": [1, 2]}, sampling), lambda update: None)
    engine.run_until_idle()
    families: list[Metric] = [*make_registry(engine, _counted()).collect(), *_router().collect()]
    no_samples = {"jaxserve:adapter_sequences": {"model_name", "engine", "adapter", "state"}}  # no request has one
    assert no_samples.keys() <= {family.name for family in families}
    return no_samples | {sample.name: set(sample.labels) for family in families for sample in family.samples}


def _queries() -> list[str]:
    dashboard = json.loads(FILE.read_text())
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    return found + [v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query"]


def test_the_file_is_what_the_script_writes() -> None:
    assert FILE.read_text() == make_dashboard.render(), "run python scripts/make_dashboard.py"


def test_every_query_names_exported_metrics_and_labels() -> None:
    exported, queries = _exported(), _queries()
    assert len(queries) > 40
    for query in queries:
        names = NAME.findall(query)
        assert names, query
        assert not [name for name in names if name not in exported], query
        for name, labels in SELECTOR.findall(query):
            used = set(re.findall(r"([a-z_]+)\s*=~?", labels))
            assert used <= exported[name] | SCRAPED, f"{used - exported[name]} in {query}"
        for labels, name in re.findall(r"by \(([a-z_, ]+)\) \((?:rate\()?([a-z_0-9:]+)", query):
            assert set(labels.split(", ")) <= exported[name] | SCRAPED, query


def test_every_query_is_of_the_servers_that_are_chosen() -> None:
    """`engine` is 0 on each server, so without `instance` the figures of all would be mixed in one line."""
    dashboard = json.loads(FILE.read_text())
    assert {one["name"] for one in dashboard["templating"]["list"]} >= {"model", "engine", "instance"}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            selected = dict(SELECTOR.findall(target["expr"]))
            names = [name for name in NAME.findall(target["expr"]) if not name.startswith("process_")]
            assert names and all('instance=~"$instance"' in selected[name] for name in names), panel["title"]
            assert "process_" not in target["expr"] or "and on (instance, job)" in target["expr"]


def test_nearly_everything_exported_is_shown() -> None:
    shown = {name for query in _queries() for name in NAME.findall(query)}
    hidden = {n for n in _exported() if n.startswith("jaxserve:")} - shown
    # The gauges are the last steps' values of what the panels compute over their own interval, and two are for pickers.
    steps = {"jaxserve:host_share", "jaxserve:padding_waste"}
    # The number of calls is that of http_requests.
    steps.add("jaxserve:http_request_duration_seconds_count")
    assert hidden <= {*steps, "jaxserve:lora_requests_info", "jaxserve:cache_config_info"}, hidden


@pytest.mark.parametrize("query", _queries())
def test_queries_are_balanced(query: str) -> None:
    """No parser of PromQL is at hand; brackets are what breaks in a query put together of pieces."""
    stack = []
    for character in re.sub(r'"[^"]*"', '""', query):
        if character in "([{":
            stack.append({"(": ")", "[": "]", "{": "}"}[character])
        elif character in ")]}":
            assert stack and stack.pop() == character, query
    assert not stack, query
    assert "SELECT" not in query


def test_panels_do_not_overlap() -> None:
    taken = set()
    for panel in json.loads(FILE.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
