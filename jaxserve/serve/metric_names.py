"""Names of metrics: ours, and for readers that were made for vLLM those that it has for the same figures.

Names, types and labels are vLLM's of version 0.32; those that it has given up since, and that published dashboards and
scaling rules still ask for, are here as well. Metrics of its HTTP port have no prefix: a package for FastAPI writes
them (prometheus-fastapi-instrumentator), whose names and labels are the common ones for such servers.
"""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

PREFIX = "jaxserve:"
_VLLM = "vllm:"

# Figures under the same name behind either prefix.
_SAME = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "cache_config_info",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "mm_cache_queries",
        "mm_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_prefill_kv_computed_tokens",
        "request_generation_tokens",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "iteration_tokens_total",
        "lora_requests_info",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
    }
)
# Earlier names of some of them.
_FORMER: Mapping[str, str] = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "prefix_cache_queries": "gpu_prefix_cache_queries",
    "prefix_cache_hits": "gpu_prefix_cache_hits",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}
VLLM_NAMES: Mapping[str, tuple[str, ...]] = {
    name: (_VLLM + name, *([_VLLM + _FORMER[name]] if name in _FORMER else [])) for name in sorted(_SAME)
}
_ROUTES_LEFT_OUT = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
_UNKNOWN_ROUTE = "none"


class VllmNames(Collector):
    """Another collector's metrics, and behind those that vLLM has a copy under each of its names. Any thread."""

    def __init__(self, inner: Collector) -> None:
        self._inner = inner

    def collect(self) -> Iterator[Metric]:
        """All families of the inner collector, and the copies."""
        for family in self._inner.collect():
            yield family
            name = family.name.removeprefix(PREFIX)
            for other in VLLM_NAMES.get(name, ()):
                yield _renamed(family, other)
            if name == "http_requests":
                yield _http_requests(family)
            elif name == "http_request_duration_seconds":
                yield _http_durations(family)


def _renamed(family: Metric, name: str) -> Metric:
    copy = Metric(name, family.documentation, family.type, family.unit)
    copy.samples = [one._replace(name=name + one.name.removeprefix(family.name)) for one in family.samples]
    return copy


def _http_requests(family: Metric) -> Metric:
    """Counted by class of status, as 2xx."""
    sums: dict[tuple[str, str, str], float] = {}
    for one in family.samples:
        if (route := _handler(one)) is not None:
            key = (one.labels["method"], f"{one.labels['status'][0]}xx", route)
            sums[key] = sums.get(key, 0.0) + one.value
    copy = CounterMetricFamily("http_requests", family.documentation, labels=("method", "status", "handler"))
    for values, number in sums.items():
        copy.add_metric(values, number)
    return copy


def _http_durations(family: Metric) -> Metric:
    copy = HistogramMetricFamily(
        "http_request_duration_seconds", family.documentation, labels=("method", "handler", "le")
    )
    for one in family.samples:
        if (route := _handler(one)) is not None:
            labels = {"method": one.labels["method"], "handler": route}
            if "le" in one.labels:
                labels["le"] = one.labels["le"]
            copy.samples.append(one._replace(name=one.name.removeprefix(PREFIX), labels=labels))
    return copy


def _handler(sample: Sample) -> str | None:
    """The route of a sample as that package has it; None for a route that it leaves out."""
    route = sample.labels["route"]
    if route in _ROUTES_LEFT_OUT:
        return None
    return _UNKNOWN_ROUTE if route == "other" else route
