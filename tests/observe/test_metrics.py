"""/metrics of a served engine: the names, the values, the format."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open
from prometheus_client.parser import text_string_to_metric_families as parse_plain
from rich.console import Console
from serve_parts import IdleStore, Parts
from watched import ask, http, until, until_idle, watched

from jaxserve.api import RequestOptions, SamplingParams
from jaxserve.cli.top import fetch, render
from jaxserve.client import Client, RequestFailed
from jaxserve.engine import Engine, EngineGroup, ModelInfo
from jaxserve.engine.stats import StepStats
from jaxserve.routing import RouterOptions, create_router
from jaxserve.sched import create_scheduler
from jaxserve.sched.plan import HostSlots
from jaxserve.serve.http.live import LiveFeed, Seen
from jaxserve.serve.metrics import HISTOGRAMS, PREFIX, EngineCollector, shares_of
from jaxserve.testing import FakeRunner, make_limits

# vLLM's names and types, without the prefix: what its dashboards ask for; and those of earlier versions.
CONVENTIONAL = {
    **dict.fromkeys(("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"), "gauge"),
    **dict.fromkeys(("cache_config_info", "lora_requests_info"), "gauge"),
    **dict.fromkeys(("prefix_cache_queries", "prefix_cache_hits", "mm_cache_queries", "mm_cache_hits"), "counter"),
    **dict.fromkeys(("num_preemptions", "prompt_tokens", "generation_tokens", "request_success"), "counter"),
    **dict.fromkeys(("spec_decode_num_drafts", "spec_decode_num_draft_tokens"), "counter"),
    **dict.fromkeys(("spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos"), "counter"),
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "request_time_per_output_token_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
    "request_queue_time_seconds": "histogram",
    "request_inference_time_seconds": "histogram",
    "request_prefill_time_seconds": "histogram",
    "request_decode_time_seconds": "histogram",
    "request_prompt_tokens": "histogram",
    "request_prefill_kv_computed_tokens": "histogram",
    "request_generation_tokens": "histogram",
    "request_max_num_generation_tokens": "histogram",
    "request_params_n": "histogram",
    "request_params_max_tokens": "histogram",
    "iteration_tokens_total": "histogram",
}
FORMER = {
    "gpu_cache_usage_perc": "gauge",
    "gpu_prefix_cache_queries": "counter",
    "gpu_prefix_cache_hits": "counter",
    "time_per_output_token_seconds": "histogram",
}

ITL = "inter_token_latency_seconds"
PICKER = Path(__file__).parents[2] / "deploy/fleet/endpoint-picker.yaml"
_READ = ("queuedRequests", "runningRequests", "kvUsage", "cacheInfo")

_TELLING = ("finished_reason", "state", "part", "le", "method", "event", "tier", "choice", "way")


def _samples(text: str) -> dict[str, float]:
    """Sums over labels, but for the labels that tell something apart."""
    found: dict[str, float] = {}
    for family in parse_plain(text):
        for sample in family.samples:
            labels = [v for k, v in sample.labels.items() if k in _TELLING]
            name = "/".join([sample.name.removeprefix(PREFIX), *labels])
            found[name] = found.get(name, 0.0) + sample.value
    return found


def test_values_after_known_requests() -> None:
    with watched() as parts:
        for _ in range(5):
            ask(parts, "abcdefghijklmnop", max_tokens=8)
            until_idle(parts)
        answer = http.get(f"{parts.http_url}/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    found = _samples(answer.text)
    assert found["prompt_tokens_total"] == 5 * 17
    assert found["generation_tokens_total"] == 5 * 8
    assert found["request_success_total/length"] == 5
    assert found["prefix_cache_queries_total"] == 5 * 17
    assert found["prefix_cache_hits_total"] == 4 * 16  # two pages of eight, by all but the first
    assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 5
    assert found["inter_token_latency_seconds_count"] == 5 * 7
    assert found["request_time_per_output_token_seconds_count"] == 5
    assert found["request_prompt_tokens_sum"] == 85 and found["request_generation_tokens_sum"] == 40
    assert found["steps_total"] == 5 * 8 + 1  # the first prompt is cut at the edge of a bucket
    assert found["step_tokens_total"] == (17 + 4 * 1) + 35
    assert found["step_slots_total"] == (2 + 4) * 16 + 35  # the prompt's two chunks, the hits, single rows
    assert found["num_requests_running"] == found["num_requests_waiting"] == found["num_preemptions_total"] == 0
    assert sum(found[f"kv_cache_pages/{s}"] for s in ("free", "cached", "used", "shared")) == 256
    assert found["kv_cache_pages/cached"] == 3  # 24 of the 25 tokens were written, the same ones each time
    assert found["engine_accepting"] == 1
    assert found["compile_events_total"] == 0
    assert found["process_resident_memory_bytes"] > 0


def test_drafts_show_in_metrics_live_view_and_usage() -> None:
    """Of three drafts two are right. Ten tokens: one of the prompt's step, three, three, two of a step that has room
    for two, since it was planned before it was known that the one before it drew three of four, and one."""
    with watched(grpc=True, drafts=True) as parts:
        body = {"model": "fake", "prompt": "ab", "max_tokens": 10, "ignore_eos": True}
        usage = http.post(f"{parts.http_url}/v1/completions", json=body).json()["usage"]
        until_idle(parts)
        found = _samples(http.get(f"{parts.http_url}/metrics").text)
        with Client(parts.address) as client:
            completion = client.complete("ab", SamplingParams(max_tokens=10, ignore_eos=True))
        until_idle(parts)
        live = LiveFeed(parts.engine).message([Seen()])["replicas"][0]
        view = io.StringIO()
        top = render(fetch(parts.http_url, None), None, "here")
        Console(file=view, width=120).print(top)
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 2}
    assert (completion.num_accepted_tokens, completion.num_drafted_tokens) == (5, 7)
    assert found["spec_decode_num_drafts_total/ngram"] == 3
    assert found["spec_decode_num_draft_tokens_total/ngram"] == 3 + 3 + 1
    assert found["spec_decode_num_accepted_tokens_total/ngram"] == 2 + 2 + 1
    assert found["spec_decode_num_draft_tokens_total/grammar"] == 0, "no row had a grammar"
    assert found["decode_rows_total"] == 4 and found["decode_tokens_total"] == 9
    assert (live["decode_rows"], live["decode_tokens"], live["drafted"], live["accepted"]) == (8, 18, 14, 10)
    assert "tokens/step" in view.getvalue() and "2.25" in view.getvalue() and "71.4 %" in view.getvalue()


def test_host_slots_show_in_metrics_and_live_view() -> None:
    """A prompt of two full pages, evicted by another and asked for again."""
    slots = HostSlots(num_slots=8, max_draining=8, max_loads=8)
    with watched(num_pages=4, slots=slots) as parts:
        for text in ("abcdefghijklmnop", "ABCDEFGHIJKLMNOPQRSTUVWX", "abcdefghijklmnop"):
            ask(parts, text, max_tokens=2)
            until_idle(parts)
        found = _samples(http.get(f"{parts.http_url}/metrics").text)
        live = LiveFeed(parts.engine).message([Seen()])["replicas"][0]
        view = io.StringIO()
        Console(file=view, width=120).print(render(fetch(parts.http_url, None), None, "here"))
    assert found["kv_host_slots/used"] + found["kv_host_slots/free"] == 8
    assert found["kv_host_pages_total/loaded"] == 2 and found["kv_host_pages_total/saved"] >= 2
    assert found["kv_tier_hit_tokens_total/host"] == found["kv_load_choice_tokens_total/load"] == 16
    assert found["kv_tier_hit_tokens_total/device"] == found["kv_load_choice_tokens_total/compute"] == 0
    assert live["counts"]["loaded_tokens"] == 16 and "host slots" in view.getvalue() and "from host" in view.getvalue()


@pytest.mark.parametrize("store", [IdleStore(), None])
def test_a_store_shows_in_metrics_and_without_one_there_are_no_samples(store: IdleStore | None) -> None:
    limits = make_limits(slots=HostSlots(num_slots=8, max_draining=8, max_loads=8))
    engine = Engine(
        runner=FakeRunner(limits),
        scheduler=create_scheduler("fcfs", limits, store=store),
        tokenizer=None,
        model=ModelInfo(name="fake", vocab_size=256, max_model_len=64, eos_token_ids=()),
    )
    families = {family.name: family for family in EngineCollector(engine).collect()}
    found = {
        (sample.name.removeprefix(PREFIX), sample.labels.get("event")): sample.value
        for name in ("kv_store_pages", "kv_store_breaks", "kv_store_late_sequences")
        for sample in families[PREFIX + name].samples
    }
    expected = {
        ("kv_store_pages_total", "filled"): 5,
        ("kv_store_pages_total", "write_skipped"): 2,
        ("kv_store_breaks_total", None): 3,
        ("kv_store_late_sequences_total", None): 0,
    }
    assert found == ({} if store is None else expected)
    assert json.loads(json.dumps(LiveFeed(engine).message([Seen()])))["replicas"][0]["counts"]["slots"] == 8


def test_every_conventional_name_is_there_and_histograms_are_whole() -> None:
    with watched() as parts:
        ask(parts)
        until_idle(parts)
        families = {f.name.removeprefix(PREFIX): f for f in parse_plain(http.get(f"{parts.http_url}/metrics").text)}
    assert {name: families[name].type for name in CONVENTIONAL if name in families} == CONVENTIONAL
    for name in HISTOGRAMS:
        samples = families[name].samples
        buckets = [(float(s.labels["le"]), s.value) for s in samples if s.name.endswith("_bucket")]
        assert buckets == sorted(buckets) and buckets[-1][0] == math.inf, name
        assert [b for _, b in buckets] == sorted(b for _, b in buckets), f"{name} is not cumulative"
        assert next(s.value for s in samples if s.name.endswith("_count")) == buckets[-1][1]
    assert {f.documentation != "" for n, f in families.items() if not n.startswith("process")} == {True}


def test_vllm_names_are_the_same_figures_and_come_by_the_setting() -> None:
    with watched(vllm_metrics=True, drafts=True) as parts:
        body = {"prompt": "abcdefghijklmnop", "max_tokens": 4, "n": 2, "ignore_eos": True}
        for _ in range(2):
            assert http.post(f"{parts.http_url}/v1/completions", json=body).status_code == 200
            until_idle(parts)
        assert http.get(f"{parts.http_url}/nowhere").status_code == 404
        text = http.get(f"{parts.http_url}/metrics").text
    families = {family.name: family for family in parse_plain(text)}
    others = {name.removeprefix("vllm:"): one for name, one in families.items() if name.startswith("vllm:")}
    assert {name: one.type for name, one in others.items()} == CONVENTIONAL | FORMER
    former = {"gpu_cache_usage_perc": "kv_cache_usage_perc", "time_per_output_token_seconds": ITL}
    for name, one in others.items():
        ours = families[PREFIX + former.get(name, name.removeprefix("gpu_"))]
        suffixes = [sample.name.removeprefix(one.name) for sample in one.samples]
        assert suffixes == [sample.name.removeprefix(ours.name) for sample in ours.samples], name
        assert [s[1:] for s in one.samples] == [s[1:] for s in ours.samples], name
    found = _samples(text)
    assert found["request_params_n_sum"] == 4 and found["request_params_n_count"] == 2
    assert found["request_params_max_tokens_sum"] == 8
    assert found["request_max_num_generation_tokens_sum"] == 8 and found["request_generation_tokens_sum"] == 16
    assert found["request_prefill_kv_computed_tokens_sum"] == 17 + 1  # two pages were found
    assert found["request_inference_time_seconds_count"] == 2
    times = [found[f"request_{part}_time_seconds_sum"] for part in ("prefill", "decode", "inference")]
    assert times[0] + times[1] == pytest.approx(times[2])
    assert {name for name in others if name.startswith("spec")} and found["vllm:num_requests_running"] == 0

    keys = ("method", "handler", "status")
    calls = {tuple(s.labels[key] for key in keys): s.value for s in families["http_requests"].samples}
    assert calls["POST", "/v1/completions", "2xx"] == 2 and calls["GET", "none", "4xx"] == 1
    assert not [handler for _, handler, _ in calls if handler in ("/metrics", "/health", "/ping")]
    durations = families["http_request_duration_seconds"].samples
    counts = {(s.labels["method"], s.labels["handler"]): s.value for s in durations if s.name.endswith("_count")}
    assert counts == {("POST", "/v1/completions"): 2, ("GET", "none"): 1}
    assert all(s.value > 0 for s in durations if s.name.endswith("_sum"))


def test_open_metrics_on_request() -> None:
    with watched() as parts:
        ask(parts)
        until_idle(parts)
        accept = "application/openmetrics-text; version=1.0.0"
        answer = http.get(f"{parts.http_url}/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert any(family.name == f"{PREFIX}steps" for family in parse_open(answer.text))


def test_gauges_show_what_runs_and_waits() -> None:
    """Under load; and what an endpoint picker reads is all there, of the type and with the labels that it expects."""
    picker = next(d for d in yaml.safe_load_all(PICKER.read_text()) if d["kind"] == "ConfigMap")["data"]["picker.yaml"]
    metrics = next(p for p in yaml.safe_load(picker)["plugins"] if p["type"] == "core-metrics-extractor")
    (engine,) = metrics["parameters"]["engineConfigs"]
    with watched() as parts:
        parts.runner.hold()
        for _ in range(11):
            ask(parts, max_tokens=4)
        until(lambda: parts.runner.is_held and parts.scheduler.num_waiting == 3, "eight rows taken")
        text = http.get(f"{parts.http_url}/metrics").text
        found = _samples(text)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (8, 3)
        assert found["kv_cache_usage_perc"] == pytest.approx(8 / 256)
        gauges = {f.name: f.samples for f in parse_plain(text) if f.type == "gauge"}
        read = {key: [sample.value for sample in gauges[engine[f"{key}Spec"]]] for key in _READ}
        assert read == {"queuedRequests": [3], "runningRequests": [8], "kvUsage": [8 / 256], "cacheInfo": [1]}
        (info,) = gauges[engine["cacheInfoSpec"]]
        assert {key: info.labels[key] for key in ("block_size", "num_gpu_blocks")} == {
            "block_size": "8", "num_gpu_blocks": "256",
        }  # fmt: skip
        assert engine["loraSpec"] == "" and gauges["jaxserve:lora_requests_info"] == [], "no adapters are served"
        parts.runner.release()
        until_idle(parts)


def test_a_replica_that_died_shows_and_holds_nothing() -> None:
    parts = [Parts(), Parts()]
    group = EngineGroup(
        [p.engine for p in parts], create_router("least_load", RouterOptions(slack=8, table_blocks=16, seed=0))
    )
    for number in range(4):
        request = group.prepare([1, 2, 3], SamplingParams(max_tokens=9), RequestOptions(request_id=f"r{number}"))
        group.submit(request, lambda update: None)
    for _ in range(3):
        group.step()
    before = _by_engine(EngineCollector(group))
    assert [before["num_requests_running", k] for k in "01"] == [2, 2]
    parts[0].engine.fail(RuntimeError("the device is lost"))
    after = _by_engine(EngineCollector(group))
    assert [after["engine_alive", k] for k in "01"] == [0, 1]
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert [after[name, k] > 0 for k in "01"] == [False, before[name, "1"] > 0], name
    for name, engine in before:
        if name.endswith(("_total", "_count", "_sum")):
            assert after[name, engine] >= before[name, engine], f"{name} went back"


def _by_engine(collector: EngineCollector) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for family in collector.collect():
        for sample in family.samples:
            key = (sample.name.removeprefix(PREFIX), sample.labels.get("engine", ""))
            found[key] = found.get(key, 0.0) + sample.value
    return found


def test_labels_do_not_grow_with_what_clients_send() -> None:
    """Whatever ids, tenants and models are named, the number of series stays."""
    seen = []
    with watched() as parts:
        for number in range(5):
            body = {"prompt": "ab", "max_tokens": 2, "request_id": f"id-{number}", "user": f"user-{number}"}
            assert http.post(f"{parts.http_url}/v1/completions", json=body).status_code == 200
            http.post(f"{parts.http_url}/v1/completions", json={**body, "model": f"model-{number}"})
            http.get(f"{parts.http_url}/v1/models/model-{number}")
            http.get(f"{parts.http_url}/nowhere/{number}")
            http.request(f"METHOD{number}", f"{parts.http_url}/health")
            seen.append(_series(http.get(f"{parts.http_url}/metrics").text))
    assert seen[1] == seen[-1]
    routes = {
        labels["route"] for name, given in seen[-1] if name == "jaxserve:http_requests_total" if (labels := dict(given))
    }
    assert {"/v1/completions", "/v1/models/{model:path}", "/static/{name}", "/openapi.json", "other"} <= routes
    assert not [route for route in routes if "model-" in route or "nowhere" in route]


def _series(text: str) -> set[tuple[str, frozenset[tuple[str, str]]]]:
    """But for those of slow callbacks, which a busy machine adds: their labels are names of this package's own."""
    samples = [sample for family in parse_plain(text) for sample in family.samples]
    return {(s.name, frozenset(s.labels.items())) for s in samples if "slow_callbacks" not in s.name}


def test_answers_and_refusals_are_counted(tmp_path) -> None:
    """Through both doors, and of each layer: before the route, in it, within a stream."""
    with watched(tmp_path, grpc=True, max_body_bytes=1000) as parts:
        url, key = parts.http_url, {"authorization": "Bearer right-key"}
        ask = {"prompt": "ab", "max_tokens": 2}
        http.get(f"{url}/v1/models")
        for body in (ask, {**ask, "max_tokens": 0}, {**ask, "prompt": "a" * 600}, {**ask, "prompt": "a" * 2000}):
            http.post(f"{url}/v1/completions", json=body, headers=key)
        http.post(f"{url}/v1/completions", content="ab", headers=key)
        http.get(f"{url}/v1/completions", headers=key)
        http.get(f"{url}/nowhere", headers=key)
        with Client(parts.address) as client:
            list(client.generate("abc", SamplingParams(max_tokens=4)))
            with pytest.raises(RequestFailed):
                list(client.generate("abc", SamplingParams(max_tokens=100_000)))
        # A call is counted when the server has ended it, which its client may hear of first.
        until(lambda: 'code="INVALID_ARGUMENT"' in http.get(f"{url}/metrics", headers=key).text, "the refused call")
        text = http.get(f"{url}/metrics", headers=key).text
    found = {(s.name, *(s.labels[k] for k in sorted(s.labels) if k != "model_name")): s.value for s in _all(text)}
    path = "/v1/completions"
    answers = {
        k[1:]: v for k, v in found.items() if k[0] == "jaxserve:http_requests_total" and v and "/metrics" not in k
    }
    assert answers == {
        ("GET", "/v1/models", "401"): 1, ("POST", path, "200"): 1, ("POST", path, "400"): 2, ("POST", path, "413"): 1,
        ("POST", path, "415"): 1, ("GET", path, "405"): 1, ("GET", "other", "404"): 1,
    }  # fmt: skip
    refused = {k[1:]: v for k, v in found.items() if k[0] == "jaxserve:refused_total" and v}
    assert refused == {
        ("http", "unauthenticated"): 1, ("http", "invalid_request"): 1, ("http", "prompt_too_long"): 1,
        ("http", "body_too_large"): 1, ("http", "media_type"): 1, ("http", "method_not_allowed"): 1,
        ("http", "not_found"): 1, ("grpc", "invalid_request"): 1,
    }  # fmt: skip
    calls = {k[1:]: v for k, v in found.items() if k[0] == "jaxserve:grpc_requests_total" and v}
    assert calls == {("OK", "Generate"): 1, ("INVALID_ARGUMENT", "Generate"): 1}


def _all(text: str) -> list[Any]:
    return [sample for family in parse_plain(text) for sample in family.samples]


def test_metrics_need_a_key_where_keys_are_needed(tmp_path) -> None:
    with watched(tmp_path) as parts:
        url = f"{parts.http_url}/metrics"
        assert http.get(url).status_code == 401
        assert http.get(url, headers={"authorization": "Bearer right-key"}).status_code == 200


def test_shares() -> None:
    step = StepStats(
        step_id=0, time_s=0, decode_rows=3, chunks=1, prefill_tokens=5, slots=16, new_tokens=4, itl_s=0,
        schedule_s=0.1, dispatch_s=0.1, wait_s=0.7, commit_s=0.1, counts=None,
    )  # fmt: skip
    assert shares_of((step, step)) == pytest.approx((0.3, 0.5))
    assert shares_of(()) == (0.0, 0.0)
    assert shares_of((step._replace(width=4, slots=34),)).padding == pytest.approx(0.5)
    busy = step._replace(wait_s=0.0)
    assert shares_of((step, busy), count=1).host == 1.0
