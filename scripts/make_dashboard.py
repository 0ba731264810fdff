"""Writes deploy/grafana/jaxserve.json: python scripts/make_dashboard.py

A test fails when the file differs from the output of this script, and when a query names a metric that the server does
not export.
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "deploy" / "grafana" / "jaxserve.json"
SELECT = '{model_name=~"$model", engine=~"$engine", instance=~"$instance"}'
DOOR = '{model_name=~"$model", instance=~"$instance"}'  # what all replicas of a server share
ROUTER = '{instance=~"$instance"}'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_ACCEPTING = '{__name__=~"jaxserve:engine_accepting|jaxserve:router_accepting"}'  # servers and routers
_WIDTH = 24  # of Grafana's grid


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One graph. `queries`: legend -> PromQL, in which SELECT stands where the labels go."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    text: str = ""
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    max: float | None = None
    colours: dict[str, str] = dataclasses.field(default_factory=dict)


def _rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(jaxserve:{name}SELECT[$__rate_interval]))"


def _door_rate(name: str, by: str) -> str:
    """Of a counter of the doors, which all replicas share."""
    return f"sum by ({by}) (rate(jaxserve:{name}{DOOR}[$__rate_interval]))"


def _router_rate(name: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(jaxserve:router_{name}{ROUTER}[$__rate_interval]))"


def _durations(part: str, by: str) -> str:
    return _door_rate(f"http_request_duration_seconds_{part}", by)


def _quantiles(name: str) -> dict[str, str]:
    buckets = _rate(f"{name}_bucket", "le")
    quantiles = {f"p{share}": f"histogram_quantile({share / 100:g}, {buckets})" for share in (50, 90, 99)}
    return {**quantiles, "mean": _mean(name)}


def _mean(name: str) -> str:
    return f"{_rate(f'{name}_sum')} / {_rate(f'{name}_count')}"


def _latency(title: str, name: str, text: str) -> Panel:
    return Panel(title=title, queries=_quantiles(name), unit="s", text=text)


ROWS: dict[str, list[Panel]] = {
    "Now": [
        Panel(title="Running", kind="stat", width=3, queries={"": "sum(jaxserve:num_requests_runningSELECT)"}),
        Panel(title="Waiting", kind="stat", width=3, queries={"": "sum(jaxserve:num_requests_waitingSELECT)"}),
        Panel(
            title="KV cache held",
            kind="stat",
            width=3,
            unit="percentunit",
            text="Of the replicas that live.",
            queries={"": "avg(jaxserve:kv_cache_usage_percSELECT and jaxserve:engine_aliveSELECT == 1)"},
        ),
        Panel(
            title="Dead",
            kind="stat",
            width=3,
            text="Servers of the last day that do not answer, and dead replicas of those that do.",
            queries={
                "servers": "count(up == 0 and on (instance, job) last_over_time(jaxserve:engine_aliveSELECT[1d])) "
                "or vector(0)",
                "replicas": "count(jaxserve:engine_aliveSELECT) - sum(jaxserve:engine_aliveSELECT)",
            },
            colours={"0": "green", "1": "red"},
        ),
        Panel(title="Generated tokens/s", kind="stat", width=4, queries={"": _rate("generation_tokens_total")}),
        Panel(
            title="Compiled after start",
            kind="stat",
            width=4,
            text="Must stay 0: a compilation stalls every stream.",
            queries={"": f"sum(jaxserve:compile_events_total{DOOR})"},
            colours={"0": "green", "1": "red"},
        ),
        Panel(
            title="Stalled for",
            kind="stat",
            width=4,
            unit="s",
            text="Time for which a loop has not come round although it has work.",
            queries={"": f"max(jaxserve:engine_stalled_seconds{DOOR})"},
            colours={"0": "green", "10": "red"},
        ),
        Panel(
            title="Replicas that hang and come back",
            text="Red now: a step is over its deadline. Given up and built again: in the last hour.",
            queries={
                "red": "sum(jaxserve:replica_redSELECT)",
                "given up": "sum(increase(jaxserve:replica_fenced_totalSELECT[1h]))",
                "built again": "sum(increase(jaxserve:replica_restarts_totalSELECT[1h]))",
            },
        ),
    ],
    "Latency": [
        _latency("Time to first token", "time_to_first_token_seconds", "From arrival to the first token."),
        _latency("Inter-token latency", "inter_token_latency_seconds", "Between two tokens of one sequence."),
        _latency("Time per output token", "request_time_per_output_token_seconds", "One value a request."),
        _latency("End to end", "e2e_request_latency_seconds", "From arrival to the end."),
        _latency("Queue", "request_queue_time_seconds", "From submission to the first step."),
        _latency("Prefill", "request_prefill_time_seconds", "From the first step to the first token."),
    ],
    "Load": [
        Panel(
            title="Requests",
            queries={
                "running": "sum(jaxserve:num_requests_runningSELECT)",
                "waiting": "sum(jaxserve:num_requests_waitingSELECT)",
                "without a token": f"sum(jaxserve:num_requests_unstarted{DOOR})",
            },
        ),
        Panel(
            title="Tokens per second",
            queries={"prompt": _rate("prompt_tokens_total"), "generated": _rate("generation_tokens_total")},
        ),
        Panel(
            title="Requests that ended, per second",
            stacked=True,
            queries={"{{finished_reason}}": _rate("request_success_total", "finished_reason")},
        ),
        _latency("Decode", "request_decode_time_seconds", "From the first token to the last."),
        Panel(title="Prompt lengths", unit="short", queries=_quantiles("request_prompt_tokens")),
        Panel(title="Answer lengths", unit="short", queries=_quantiles("request_generation_tokens")),
        _latency("On the device", "request_inference_time_seconds", "From the first step to the last token."),
        Panel(
            title="Prompt tokens computed",
            text="Of a request: those that were not in the prefix cache.",
            queries=_quantiles("request_prefill_kv_computed_tokens"),
        ),
        Panel(
            title="Longest sequence",
            text="Of a request, beside what it allowed each sequence (max_tokens).",
            queries={
                **_quantiles("request_max_num_generation_tokens"),
                "allowed, mean": _mean("request_params_max_tokens"),
                "allowed, p50": _quantiles("request_params_max_tokens")["p50"],
            },
        ),
        Panel(
            title="Sequences of a request",
            text="n of its sampling.",
            queries={"mean": _mean("request_params_n"), "p99": _quantiles("request_params_n")["p99"]},
        ),
    ],
    "Doors": [
        Panel(
            title="HTTP answers per second, by status",
            stacked=True,
            text="499: the client left before the answer began. Refusals are 4xx and 503.",
            queries={"{{status}}": _door_rate("http_requests_total", "status")},
        ),
        Panel(
            title="Refused per second, by reason",
            stacked=True,
            text="Through all doors. queue_full says that there is more load than this server takes.",
            queries={"{{reason}}": _door_rate("refused_total", "reason")},
        ),
        Panel(
            title="Streams that went on here, per second",
            text="They began at a server that died or drained, or were sent again by a client.",
            queries={"{{reason}}": _rate("resumed_total", "reason")},
        ),
        Panel(
            title="Tokens of streams that went on here, per second",
            queries={
                "known": _rate("resumed_known_tokens_total"),
                "computed again": _rate("resumed_recomputed_tokens_total"),
            },
        ),
        Panel(
            title="gRPC calls per second, by code",
            stacked=True,
            queries={"{{code}}": _door_rate("grpc_requests_total", "code")},
        ),
        Panel(
            title="HTTP calls per second, by route",
            stacked=True,
            queries={"{{route}}": _door_rate("http_requests_total", "route")},
        ),
        Panel(
            title="Time of HTTP calls, by route",
            unit="s",
            text="95 % are shorter; streams count to their end.",
            queries={"{{route}}": f"histogram_quantile(0.95, {_durations('bucket', 'le, route')})"},
        ),
        Panel(
            title="HTTP calls that run, by route",
            text="Little's law: the time of all calls in a second.",
            queries={"{{route}}": _durations("sum", "route")},
        ),
    ],
    "Cache": [
        Panel(
            title="Pages",
            stacked=True,
            queries={"{{state}}": "sum by (state) (jaxserve:kv_cache_pagesSELECT)"},
        ),
        Panel(
            title="Prefix hits",
            unit="percentunit",
            max=1.0,
            text="Of the prompt tokens looked up.",
            queries={"hits": f"{_rate('prefix_cache_hits_total')} / {_rate('prefix_cache_queries_total')}"},
        ),
        Panel(
            title="Pages that are given out",
            text="All, unless an operator has made the pool smaller.",
            queries={"grantable": "sum(jaxserve:kv_grantable_pagesSELECT)"},
        ),
        Panel(title="Preemptions per second", queries={"preemptions": _rate("num_preemptions_total")}),
        Panel(
            title="Pictures per second",
            text="Empty for models that take none.",
            queries={
                "encoded": _rate("mm_encodes_total"),
                "from host memory": _rate("mm_host_loads_total"),
                "found": _rate("mm_cache_hits_total"),
                "asked for": _rate("mm_cache_queries_total"),
            },
        ),
        Panel(
            title="Patches encoded per second",
            queries={"patches": _rate("mm_encoded_patches_total")},
        ),
        Panel(
            title="Pool of embeddings",
            unit="percentunit",
            max=1.0,
            queries={
                "used": "avg(jaxserve:mm_cache_usage_percSELECT)",
                "host memory": "avg(jaxserve:mm_host_usage_percSELECT)",
            },
        ),
    ],
    "Tiers of the cache": [
        Panel(
            title="Host slots",
            stacked=True,
            text="Pages that host memory holds. These panels are empty without cache.host_bytes.",
            queries={"{{state}}": "sum by (state) (jaxserve:kv_host_slotsSELECT)"},
        ),
        Panel(
            title="Pages to and from host memory, per second",
            queries={"{{event}}": _rate("kv_host_pages_total", "event")},
        ),
        Panel(
            title="Prompt tokens found per second, by tier",
            stacked=True,
            queries={"{{tier}}": _rate("kv_tier_hit_tokens_total", "tier")},
        ),
        Panel(
            title="Tokens found in host memory per second, by choice",
            stacked=True,
            text="compute: loading them was expected to take longer.",
            queries={"{{choice}}": _rate("kv_load_choice_tokens_total", "choice")},
        ),
        Panel(
            title="Expected time of a page",
            unit="s",
            queries={"{{way}}": "avg by (way) (jaxserve:kv_page_secondsSELECT)"},
        ),
        Panel(
            title="Pages of the store per second",
            text="Asked of it: filled, missed, late, bad, failed. Offered: written, write_*. Empty without store.kind.",
            queries={"{{event}}": _rate("kv_store_pages_total", "event")},
        ),
        Panel(
            title="Events of pages per second",
            text="lost: no room in the queue, so readers forget all that they knew. Empty without events.port.",
            queries={"{{state}}": _rate("kv_events_total", "state")},
        ),
        Panel(
            title="A store that is slow or gone, per second",
            text="No request fails for it: its pages are computed.",
            queries={
                "left alone": _rate("kv_store_breaks_total"),
                "sequences placed without their pages": _rate("kv_store_late_sequences_total"),
            },
        ),
        Panel(
            title="Prompt tokens that others computed, per second",
            stacked=True,
            text="Of requests that came with a ticket: pulled, cached here, computed here. Empty without handoffs.",
            queries={"{{way}}": _door_rate("handoff_tokens_total", "way")},
        ),
        Panel(
            title="Tokens that were not pulled, per second",
            text="They were computed instead.",
            queries={"{{reason}}": _door_rate("handoff_missed_tokens_total", "reason")},
        ),
        Panel(
            title="Prompts computed for others, per second",
            queries={
                "{{outcome}}": _door_rate("handoff_prefills_total", "outcome"),
                "lease {{how}}": _door_rate("handoff_ended_leases_total", "how"),
            },
        ),
        Panel(
            title="Pages that wait to be fetched",
            queries={
                "prompts": f"sum(jaxserve:handoff_leases{DOOR})",
                "slots": f"sum(jaxserve:handoff_lent_slots{DOOR})",
            },
        ),
        Panel(
            title="Bytes of pages between servers, per second",
            unit="Bps",
            queries={"{{way}}": _door_rate("handoff_bytes_total", "way")},
        ),
        Panel(
            title="Time for which a request waits for pages of others",
            unit="s",
            queries={
                "mean": f"{_door_rate('handoff_pull_seconds_total', 'model_name')} / "
                f"{_door_rate('handoff_pulls_total', 'model_name')}"
            },
        ),
    ],
    "Steps": [
        Panel(
            title="Padding",
            unit="percentunit",
            max=1.0,
            text="Of the token slots computed.",
            queries={"waste": f"1 - {_rate('step_tokens_total')} / {_rate('step_slots_total')}"},
        ),
        Panel(
            title="Where the loop's time goes",
            unit="percentunit",
            stacked=True,
            max=1.0,
            text="All but wait is the host's share.",
            queries={"{{part}}": f"{_rate('step_seconds_total', 'part')} / scalar({_rate('step_seconds_total')})"},
        ),
        _latency("Step duration", "step_duration_seconds", "Plan, launch, wait, hand out."),
        Panel(title="Steps per second", queries={"steps": _rate("steps_total")}),
        Panel(title="Tokens of a step", queries=_quantiles("iteration_tokens_total")),
        Panel(
            title="Compiled step shapes",
            unit="short",
            stacked=True,
            text="Pending ones are built in the background; steps of a failed one run in larger shapes.",
            queries={"{{state}}": "sum by (state) (jaxserve:step_shapesSELECT)"},
        ),
        Panel(
            title="Degradation",
            unit="short",
            text="The rung of each replica, and its pressure by signal; 1 is too much. How many servers say that they "
            "are degraded. See docs/degradation.md.",
            queries={
                "degraded": f"sum(jaxserve:degraded{DOOR})",
                "rung {{instance}} {{engine}}": "max by (instance, engine) (jaxserve:degradation_rungSELECT)",
                "{{signal}} {{instance}} {{engine}}": "max by (signal, instance, engine) "
                "(jaxserve:degradation_pressureSELECT)",
            },
        ),
        Panel(
            title="Tokens of a sequence in a step",
            text="1 without speculation; drafts and rounds bring more.",
            queries={"mean": f"{_rate('decode_tokens_total')} / {_rate('decode_rows_total')}"},
        ),
        Panel(
            title="Drafts accepted",
            unit="percentunit",
            max=1.0,
            text="Of the tokens drafted, by their source. Drafts that are not accepted cost time, and change no token.",
            queries={
                "{{method}}": f"{_rate('spec_decode_num_accepted_tokens_total', 'method')} / "
                f"{_rate('spec_decode_num_draft_tokens_total', 'method')}"
            },
        ),
        Panel(
            title="Drafts accepted, by place",
            unit="percentunit",
            max=1.0,
            text="Of the rounds that had drafts. Place 0 is the draft of the next token.",
            queries={
                "{{position}}": f"{_rate('spec_decode_num_accepted_tokens_per_pos_total', 'position')} / "
                f"scalar({_rate('spec_decode_num_drafts_total')})"
            },
        ),
        Panel(
            title="Process memory",
            unit="bytes",
            text="Of servers and routers.",
            queries={
                "{{instance}}": "process_resident_memory_bytes and on (instance, job) jaxserve:engine_aliveSELECT",
                "router {{instance}}": "process_resident_memory_bytes and on (instance, job) "
                f"jaxserve:router_accepting{ROUTER}",
            },
        ),
    ],
    "Servers": [
        Panel(
            title="Answers to Prometheus",
            max=1.0,
            text="Of the servers and routers of the last day: 0 where one does not answer.",
            queries={
                "{{instance}}": f"up and on (instance, job) last_over_time(jaxserve:engine_accepting{DOOR}[1d])",
                "router {{instance}}": "up and on (instance, job) "
                f"last_over_time(jaxserve:router_accepting{ROUTER}[1d])",
            },
        ),
        Panel(
            title="Takes new requests",
            max=1.0,
            text="0 while it starts, drains or is dead.",
            queries={
                "{{instance}}": f"min by (instance) (jaxserve:engine_accepting{DOOR})",
                "router {{instance}}": f"min by (instance) (jaxserve:router_accepting{ROUTER})",
            },
        ),
    ],
    "Routers": [
        Panel(
            title="Servers that get requests",
            max=1.0,
            text="As each router sees them. These panels are empty without `jaxserve route`.",
            queries={
                "{{replica}} by {{instance}}": f"min by (instance, replica) (jaxserve:router_replica_well{ROUTER})",
                "degraded {{instance}}": f"max by (instance) (jaxserve:router_degraded{ROUTER})",
            },
        ),
        Panel(
            title="Requests of routers",
            queries={
                "calls": f"sum(jaxserve:router_requests_running{ROUTER})",
                "at {{replica}}": f"sum by (replica) (jaxserve:router_replica_requests_running{ROUTER})",
            },
        ),
        Panel(
            title="Requests sent per second, by server",
            stacked=True,
            queries={"{{replica}}": _router_rate("replica_requests_total", "replica")},
        ),
        Panel(
            title="Requests that went on at another server, per second",
            stacked=True,
            queries={"{{reason}}": _router_rate("moves_total", "reason")},
        ),
        Panel(
            title="Quarantine",
            text="Contents that are refused since servers died of them; found guilty, and refused, in the last hour.",
            queries={
                "contents": f"sum(jaxserve:router_quarantined{ROUTER})",
                "found": f"sum(increase(jaxserve:router_convictions_total{ROUTER}[1h]))",
                "refused": f"sum(increase(jaxserve:router_quarantine_refusals_total{ROUTER}[1h]))",
            },
        ),
        Panel(
            title="Calls of routers per second",
            queries={
                "gRPC {{code}}": _router_rate("grpc_requests_total", "code"),
                "HTTP {{status}}": _router_rate("http_requests_total", "status"),
            },
        ),
    ],
    "Adapters": [
        Panel(
            title="Adapters",
            stacked=True,
            text="By where their weights are. These panels are empty without adapters.slots.",
            queries={"{{weights}}": f"sum by (weights) (jaxserve:adapters{DOOR})"},
        ),
        Panel(
            title="Sequences, by adapter",
            stacked=True,
            queries={"{{adapter}} {{state}}": "sum by (adapter, state) (jaxserve:adapter_sequencesSELECT)"},
        ),
        Panel(
            title="Loads of adapters per second",
            text="Into slots of the device, and the events of weights in the host's memory.",
            queries={
                "slots": _rate("adapter_slot_loads_total"),
                "{{event}}": _door_rate("adapter_events_total", "event"),
            },
        ),
    ],
}


def render() -> str:
    """The dashboard as JSON."""
    ids = itertools.count(1)
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(
            {
                "id": next(ids),
                "type": "row",
                "title": title,
                "collapsed": False,
                "panels": [],
                "gridPos": {"x": 0, "y": top, "w": _WIDTH, "h": 1},
            }
        )
        top += 1
        x, height = 0, 4 if row[0].kind == "stat" else 8
        for panel in row:
            if x + panel.width > _WIDTH:
                x, top = 0, top + height
            panels.append(_panel(panel, next(ids), {"x": x, "y": top, "w": panel.width, "h": height}))
            x += panel.width
        top += height
    return json.dumps(_dashboard(panels), indent=1) + "\n"


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.max is not None:
        defaults["max"] = panel.max
    if panel.colours:
        steps = [{"color": colour, "value": float(value) or None} for value, colour in panel.colours.items()]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none"}
        defaults["custom"] = {"fillOpacity": 30 if panel.stacked else 6, "showPoints": "never", "stacking": stacking}
        options = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": _SOURCE,
                "expr": query.replace("SELECT", SELECT),
                "legendFormat": name,
            }
            for i, (name, query) in enumerate(panel.queries.items())
        ],
    }


def _dashboard(panels: list[dict[str, Any]]) -> dict[str, Any]:
    def variable(name: str, label: str, metric: str = "jaxserve:steps_total") -> dict[str, Any]:
        query = f"label_values({metric}, {label})"
        return {
            "name": name,
            "type": "query",
            "datasource": _SOURCE,
            "query": {"query": query, "refId": name},
            "definition": query,
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }

    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    return {
        "uid": "jaxserve",
        "title": "jaxserve",
        "tags": ["jaxserve", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                source,
                variable("model", "model_name"),
                variable("engine", "engine"),
                variable("instance", "instance", _ACCEPTING),
            ]
        },
        "panels": panels,
    }


if __name__ == "__main__":
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET}")
