"""The statistics of the engine as Prometheus metrics.

Every number is read from `EngineStats` at the moment of a scrape, so that the loop pays nothing for metrics.

Names, labels and meanings are vLLM's with `jaxserve:` in place of `vllm:`, wherever vLLM has the figure; then a
dashboard moves over by changing the prefix.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from jaxserve.engine import AnyEngine, Engine
from jaxserve.engine.adapters import LoadedAdapters
from jaxserve.engine.histogram import HistogramSnapshot
from jaxserve.engine.stats import StepStats, Totals
from jaxserve.sched.counts import SchedulerCounts
from jaxserve.serve.counts import DoorCounts
from jaxserve.serve.handoff import HandoffCounts
from jaxserve.serve.metric_names import PREFIX, VllmNames

_LABELS = ("model_name", "engine")
_GRAMMAR = "grammar"  # the method of drafts that the host makes

# Name without the prefix -> its name in `Totals.histograms`, and its description.
HISTOGRAMS: dict[str, tuple[str, str]] = {
    "time_to_first_token_seconds": ("ttft", "From a request's arrival to its first token."),
    "inter_token_latency_seconds": ("itl", "Between two tokens of one sequence."),
    "request_time_per_output_token_seconds": ("tpot", "Of one request: (last token - first token) / (tokens - 1)."),
    "e2e_request_latency_seconds": ("e2e", "From a request's arrival to its end."),
    "request_queue_time_seconds": ("queue", "From a request's submission to its first step."),
    "request_prefill_time_seconds": ("prefill", "From a request's first step to its first token."),
    "request_decode_time_seconds": ("decode", "From a request's first token to its last."),
    "request_inference_time_seconds": ("inference", "From a request's first step to its last token."),
    "request_prompt_tokens": ("prompt_tokens", "Prompt tokens of a request."),
    "request_prefill_kv_computed_tokens": ("prefill_tokens", "Of these, tokens that were not in the prefix cache."),
    "request_generation_tokens": ("new_tokens", "Generated tokens of a request."),
    "request_max_num_generation_tokens": ("longest", "Tokens of the longest sequence of a request."),
    "request_params_n": ("n", "Sequences that a request asked for."),
    "request_params_max_tokens": ("max_tokens", "Tokens that each of its sequences might have."),
    "iteration_tokens_total": ("step_tokens", "Tokens of a step, padding left out."),
    "step_duration_seconds": ("step", "One turn of the loop: plan, launch, wait, hand out."),
}


class Shares(NamedTuple):
    """Shares of the latest steps. `host`: of the loop's time, without waits for the device. `padding`: of the slots."""

    host: float
    padding: float


def shares_of(steps: tuple[StepStats, ...], count: int = 128) -> Shares:
    """The shares of the last `count` steps; zeros when there were none."""
    recent = steps[-count:]
    waited_s = sum(s.wait_s for s in recent)
    worked_s = sum(s.schedule_s + s.dispatch_s + s.commit_s for s in recent)
    slots = sum(s.slots for s in recent)
    tokens = sum(s.decode_rows * s.width + s.prefill_tokens for s in recent)
    total_s = waited_s + worked_s
    return Shares(worked_s / total_s if total_s else 0.0, 1 - tokens / slots if slots else 0.0)


class Exposition(NamedTuple):
    """The answer to a scrape."""

    content: bytes
    content_type: str


def exposition(registry: CollectorRegistry, accept: str) -> Exposition:
    """Every figure, in the format that the header `accept` asks for.

    Names are written as they are, whatever escaping is asked for. All of them are legal in the oldest format, for which
    the escaping with underscores, the default of every Prometheus up to 2, changes nothing. prometheus_client would
    replace the colon, so that no dashboard would find anything (client_python, issue 1177).
    """
    choice: tuple[Any, str] = choose_encoder(accept)
    encode, content_type = choice
    return Exposition(encode(registry, escaping=ALLOWUTF8), content_type)


def make_registry(engine: AnyEngine, counts: DoorCounts, *, vllm_names: bool = False) -> CollectorRegistry:
    """A registry of one server: the engine, its doors, and the process (memory, descriptors, CPU time).

    `vllm_names`: the figures that vLLM has, too, are there a second time, under its names.
    """
    registry = CollectorRegistry(auto_describe=False)
    for collector in (EngineCollector(engine), DoorCollector(engine.model.name, counts)):
        registry.register(VllmNames(collector) if vllm_names else collector)
    ProcessCollector(registry=registry)
    return registry


class DoorCollector(Collector):
    """Reads the counts of the doors. Any thread."""

    def __init__(self, model_name: str, counts: DoorCounts) -> None:
        self._model_name = model_name
        self._counts = counts

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of the documentation."""
        counts = self._counts
        for name, text, labels, found in (
            ("http_requests", "HTTP calls that have ended.", ("method", "route", "status"), counts.http.copy()),
            (
                "grpc_requests",
                "Calls of jaxserve's gRPC methods that have ended.",
                ("method", "code"),
                counts.grpc.copy(),
            ),
            ("refused", "Calls that ended with an error, by reason.", ("door", "reason"), counts.refused.copy()),
            ("ignored_fields", "Fields without effect here.", ("route", "place", "name"), counts.ignored.copy()),
            (
                "event_loop_slow_callbacks",
                "Times that the event loop of the doors was held up, by function.",
                ("where",),
                {(where,): number for where, number in counts.slow.copy().items()},
            ),
        ):
            family = CounterMetricFamily(PREFIX + name, text, labels=(_LABELS[0], *labels))
            for values, number in found.items():
                family.add_metric([self._model_name, *values], number)
            yield family
        durations = HistogramMetricFamily(
            PREFIX + "http_request_duration_seconds",
            "From the headers of an HTTP call to the end of its answer, by method and route.",
            labels=(_LABELS[0], "method", "route"),
        )
        for values, histogram in counts.http_seconds.copy().items():
            snapshot = histogram.snapshot()
            durations.add_metric([self._model_name, *values], buckets_of(snapshot), snapshot.total)
        yield durations
        degraded = GaugeMetricFamily(PREFIX + "degraded", "1 while /health says degraded.", labels=_LABELS[:1])
        degraded.add_metric([self._model_name], float(counts.degraded is not None))
        yield degraded
        yield from _handoff_metrics(self._model_name, counts.read_handoff)


def _handoff_metrics(model_name: str, read: Callable[[], HandoffCounts] | None) -> Iterator[Metric]:
    """Families of a server without handoffs have no samples."""
    counts = HandoffCounts() if read is None else read()
    sent = {"sent": counts.bytes_sent, "pulled": counts.bytes_pulled}
    for name, text, label, found in (
        ("handoff_prefills", "Prompts computed for others: lent, short, refused, failed.", "outcome", counts.prefills),
        ("handoff_ended_leases", "Leases of pages that ended: released, expired.", "how", counts.leases),
        ("handoff_tokens", "Prompt tokens of requests with tickets: cached, pulled, computed.", "way", counts.tokens),
        ("handoff_missed_tokens", "Tokens that were to be pulled and were not, by reason.", "reason", counts.missed),
        ("handoff_bytes", "Bytes of pages: sent, pulled.", "way", sent),
    ):
        family = CounterMetricFamily(PREFIX + name, text, labels=(_LABELS[0], label))
        if read is not None:
            for value, number in found.items():
                family.add_metric([model_name, value], number)
        yield family
    for name, text, kind, number in (
        ("handoff_pulls", "Requests that came with tickets.", CounterMetricFamily, counts.num_pulls),
        ("handoff_pull_seconds", "Time for which these waited for pages.", CounterMetricFamily, counts.pull_s),
        ("handoff_leases", "Prompts whose pages wait to be fetched.", GaugeMetricFamily, counts.live_leases),
        ("handoff_lent_slots", "Slots of host memory with these pages.", GaugeMetricFamily, counts.lent_slots),
    ):
        family = kind(PREFIX + name, text, labels=_LABELS[:1])
        if read is not None:
            family.add_metric([model_name], number)
        yield family


class EngineCollector(Collector):
    """Reads the statistics of every replica at each scrape. Any thread."""

    def __init__(self, engine: AnyEngine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """All families, in the order of the documentation."""
        name = self._engine.model.name
        readings = [_Reading.of(name, number, engine) for number, engine in enumerate(self._engine.replicas)]
        yield from _request_metrics(readings)
        yield from _page_metrics(readings)
        yield from _step_metrics(readings)
        yield from _draft_metrics(readings, self._engine.model.drafter)
        yield from _histograms(readings)
        yield _alive(readings)
        yield from _watched(readings)
        yield self._bucket_metrics(name)
        yield from self._degradation_metrics(name)
        yield from self._engine_metrics(name)
        yield from self._adapter_metrics(name)

    def _bucket_metrics(self, name: str) -> Metric:
        family = GaugeMetricFamily(
            PREFIX + "step_shapes",
            "Compiled step shapes: ready, pending in the background, failed.",
            labels=(*_LABELS, "state"),
        )
        for number, stats in enumerate(self._engine.stats):
            for state, count in stats.bucket_counts._asdict().items():
                family.add_metric([name, str(number), state], count)
        return family

    def _degradation_metrics(self, name: str) -> Iterator[Metric]:
        rungs = GaugeMetricFamily(
            PREFIX + "degradation_rung",
            "What the engine does without under pressure; 0: nothing.",
            labels=_LABELS,
        )
        pressures = GaugeMetricFamily(
            PREFIX + "degradation_pressure",
            "Measured over meant to be at most: queue, steps, tiers; 0 without degrade.highest.",
            labels=(*_LABELS, "signal"),
        )
        for number, stats in enumerate(self._engine.stats):
            rung, pressure = stats.degraded
            rungs.add_metric([name, str(number)], rung)
            for signal, value in pressure._asdict().items():
                pressures.add_metric([name, str(number), signal], value)
        yield from (rungs, pressures)

    def _adapter_metrics(self, name: str) -> Iterator[Metric]:
        """Families of a server without adapters have no samples."""
        info = GaugeMetricFamily(
            PREFIX + "lora_requests_info",
            "Slots for adapters, and the adapters of sequences that run or wait, as labels; its value is the time.",
            labels=(_LABELS[0], "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        sequences = GaugeMetricFamily(
            PREFIX + "adapter_sequences",
            "Sequences with an adapter, by its name and state: running, waiting.",
            labels=(*_LABELS, "adapter", "state"),
        )
        loads = CounterMetricFamily(PREFIX + "adapter_slot_loads", "Adapters put into a slot.", labels=_LABELS)
        found = [counts for stats in self._engine.stats if (counts := stats.adapter_counts) is not None]
        for number, counts in enumerate(found):
            labels = [name, str(number)]
            loads.add_metric(labels, counts.loads)
            for state, by_name in (("running", counts.running), ("waiting", counts.waiting)):
                for adapter, num_sequences in by_name.items():
                    sequences.add_metric([*labels, adapter, state], num_sequences)
        if found:
            sets = [{*counts.running} for counts in found], [{*counts.waiting} for counts in found]
            running, waiting = (",".join(sorted(set().union(*names))) for names in sets)
            info.add_metric([name, str(found[0].slots), running, waiting], time.time())
        yield from (info, sequences, loads)
        yield from _adapter_memory_metrics(name, self._engine.model.adapters)

    def _engine_metrics(self, name: str) -> Iterator[Metric]:
        engine = self._engine
        for text, help_text, value in (
            ("engine_accepting", "1 while new requests are taken.", float(engine.accepting)),
            ("engine_stalled_seconds", "For which a loop has not come round although it has work.", engine.stalled_s),
            ("num_requests_unstarted", "Requests without a token yet, the inbox included.", engine.num_unstarted),
        ):
            family = GaugeMetricFamily(PREFIX + text, help_text, labels=_LABELS[:1])
            family.add_metric([name], value)
            yield family
        compiles = max([stats.num_compiles for stats in engine.stats], default=0)
        family = CounterMetricFamily(
            PREFIX + "compile_events", "Programs that JAX compiled after start; must stay 0.", labels=_LABELS[:1]
        )
        family.add_metric([name], compiles)
        yield family


class _Reading(NamedTuple):
    """The values of one replica in one scrape."""

    labels: list[str]
    totals: Totals
    counts: SchedulerCounts | None
    shares: Shares
    alive: bool
    red: bool
    restarts: int
    fences: int

    @classmethod
    def of(cls, model_name: str, number: int, engine: Engine) -> "_Reading":
        [stats] = engine.stats
        return cls(
            [model_name, str(number)],
            stats.totals(),
            stats.counts,
            shares_of(stats.steps()),
            stats.alive,
            engine.red,
            stats.num_restarts,
            stats.num_fences,
        )


def _request_metrics(readings: list[_Reading]) -> Iterator[Metric]:
    running = GaugeMetricFamily(PREFIX + "num_requests_running", "Sequences that have a row.", labels=_LABELS)
    waiting = GaugeMetricFamily(PREFIX + "num_requests_waiting", "Sequences that wait for a row.", labels=_LABELS)
    preempted = CounterMetricFamily(PREFIX + "num_preemptions", "Rows taken from sequences.", labels=_LABELS)
    prompt = CounterMetricFamily(PREFIX + "prompt_tokens", "Prompt tokens of requests that began.", labels=_LABELS)
    new = CounterMetricFamily(PREFIX + "generation_tokens", "Generated tokens.", labels=_LABELS)
    ended = CounterMetricFamily(
        PREFIX + "request_success", "Requests that ended, by reason.", labels=(*_LABELS, "finished_reason")
    )
    resumed = CounterMetricFamily(
        PREFIX + "resumed",
        "Requests that began elsewhere, by why they moved: client, died, drained.",
        labels=(*_LABELS, "reason"),
    )
    known = CounterMetricFamily(
        PREFIX + "resumed_known_tokens", "Generated tokens with which they came.", labels=_LABELS
    )
    again = CounterMetricFamily(
        PREFIX + "resumed_recomputed_tokens", "Of their prompts and these, tokens in no cache here.", labels=_LABELS
    )
    for labels, totals, counts, *_ in readings:
        for reason, number in totals.resumed.items():
            resumed.add_metric([*labels, reason.value], number)
        known.add_metric(labels, totals.known_tokens)
        again.add_metric(labels, totals.recomputed_tokens)
        prompt.add_metric(labels, totals.prompt_tokens)
        new.add_metric(labels, totals.new_tokens)
        for reason, number in totals.ended.items():
            ended.add_metric([*labels, reason.value], number)
        if counts is not None:
            running.add_metric(labels, counts.running)
            waiting.add_metric(labels, counts.waiting)
            preempted.add_metric(labels, counts.preemptions)
    yield from (running, waiting, preempted, prompt, new, ended, resumed, known, again)


def _page_metrics(readings: list[_Reading]) -> Iterator[Metric]:
    usage = GaugeMetricFamily(PREFIX + "kv_cache_usage_perc", "Share of grantable pages held.", labels=_LABELS)
    pages = GaugeMetricFamily(
        PREFIX + "kv_cache_pages",
        "Pages by state: free, cached, used by one, shared, withheld.",
        labels=(*_LABELS, "state"),
    )
    grantable = GaugeMetricFamily(
        PREFIX + "kv_grantable_pages", "Pages that sequences may hold; all but for an operator's order.", labels=_LABELS
    )
    layout = GaugeMetricFamily(
        PREFIX + "cache_config_info",
        "Tokens of a page and number of pages, as labels; always 1.",
        labels=(*_LABELS, "block_size", "num_gpu_blocks"),
    )
    events = CounterMetricFamily(
        PREFIX + "kv_events", "Events of pages: noted to be sent, lost for want of room.", labels=(*_LABELS, "state")
    )
    queries = CounterMetricFamily(
        PREFIX + "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", labels=_LABELS
    )
    hits = CounterMetricFamily(PREFIX + "prefix_cache_hits", "Prompt tokens found there.", labels=_LABELS)
    for labels, _, counts, *_ in readings:
        if counts is None:
            continue
        usage.add_metric(labels, counts.held_pages / counts.grantable_pages)
        grantable.add_metric(labels, counts.grantable_pages)
        layout.add_metric([*labels, str(counts.page_size), str(counts.pages)], 1)
        if counts.noted_pages is not None and counts.lost_pages is not None:
            events.add_metric([*labels, "noted"], counts.noted_pages)
            events.add_metric([*labels, "lost"], counts.lost_pages)
        for state, number in (
            ("free", counts.free_pages),
            ("cached", counts.cached_pages),
            ("used", counts.held_pages - counts.shared_pages),
            ("shared", counts.shared_pages),
            ("withheld", counts.withheld_pages),
        ):
            pages.add_metric([*labels, state], number)
        queries.add_metric(labels, counts.queried_tokens)
        hits.add_metric(labels, counts.hit_tokens)
    yield from (usage, pages, grantable, layout, events, queries, hits)
    yield from _host_metrics([(labels, counts) for labels, _, counts, *_ in readings if counts and counts.slots])
    pictures = [(labels, counts) for labels, _, counts, *_ in readings if counts and counts.encoder_pages]
    yield from _picture_metrics(pictures)


def _picture_metrics(readings: list[tuple[Any, SchedulerCounts]]) -> Iterator[Metric]:
    """Families of a model that takes no pictures have no samples."""
    queries = CounterMetricFamily(PREFIX + "mm_cache_queries", "Pictures that prompts came to.", labels=_LABELS)
    hits = CounterMetricFamily(PREFIX + "mm_cache_hits", "Those whose embeddings were there.", labels=_LABELS)
    encodes = CounterMetricFamily(PREFIX + "mm_encodes", "Pictures that the vision tower encoded.", labels=_LABELS)
    patches = CounterMetricFamily(PREFIX + "mm_encoded_patches", "Their patches.", labels=_LABELS)
    usage = GaugeMetricFamily(
        PREFIX + "mm_cache_usage_perc", "Share of the pool of embeddings that pictures have.", labels=_LABELS
    )
    loads = CounterMetricFamily(
        PREFIX + "mm_host_loads", "Pictures whose embeddings came from host memory.", labels=_LABELS
    )
    kept = GaugeMetricFamily(
        PREFIX + "mm_host_usage_perc", "Share of host memory for embeddings that is used.", labels=_LABELS
    )
    for labels, counts in readings:
        if counts.host_embeddings:
            loads.add_metric(labels, counts.picture_loads)
            kept.add_metric(labels, counts.kept_embeddings / counts.host_embeddings)
        queries.add_metric(labels, counts.picture_queries)
        hits.add_metric(labels, counts.picture_hits)
        encodes.add_metric(labels, counts.encodes)
        patches.add_metric(labels, counts.encoded_patches)
        usage.add_metric(labels, counts.used_encoder_pages / counts.encoder_pages)
    yield from (queries, hits, encodes, patches, usage, loads, kept)


def _host_metrics(readings: list[tuple[Any, SchedulerCounts]]) -> Iterator[Metric]:
    """Families of a server without host slots have no samples."""
    slots = GaugeMetricFamily(
        PREFIX + "kv_host_slots", "Slots of host memory by state: free, used.", labels=(*_LABELS, "state")
    )
    pages = CounterMetricFamily(
        PREFIX + "kv_host_pages",
        "Pages saved to and loaded from host memory, skipped for want of room, declined by its policy.",
        labels=(*_LABELS, "event"),
    )
    hits = CounterMetricFamily(
        PREFIX + "kv_tier_hit_tokens", "Prompt tokens found, by tier: device, host.", labels=(*_LABELS, "tier")
    )
    choices = CounterMetricFamily(
        PREFIX + "kv_load_choice_tokens",
        "Tokens found in host memory, by what was expected to be faster: load, compute.",
        labels=(*_LABELS, "choice"),
    )
    expected = GaugeMetricFamily(
        PREFIX + "kv_page_seconds", "Expected time of a page, by way: load, compute.", labels=(*_LABELS, "way")
    )
    for labels, counts in readings:
        slots.add_metric([*labels, "free"], counts.slots - counts.used_slots)
        slots.add_metric([*labels, "used"], counts.used_slots)
        for event in ("saved", "loaded", "skipped", "declined"):
            pages.add_metric([*labels, event], getattr(counts, f"{event}_pages"))
        hits.add_metric([*labels, "device"], counts.hit_tokens - counts.loaded_tokens)
        hits.add_metric([*labels, "host"], counts.loaded_tokens)
        choices.add_metric([*labels, "load"], counts.loaded_tokens)
        choices.add_metric([*labels, "compute"], counts.refused_tokens)
        expected.add_metric([*labels, "load"], counts.load_page_ms / 1000)
        expected.add_metric([*labels, "compute"], counts.compute_page_ms / 1000)
    yield from (slots, pages, hits, choices, expected)
    yield from _store_metrics([(labels, counts) for labels, counts in readings if counts.store_pages])


def _store_metrics(readings: list[tuple[Any, SchedulerCounts]]) -> Iterator[Metric]:
    """Families of a server without a store have no samples."""
    pages = CounterMetricFamily(
        PREFIX + "kv_store_pages",
        "Pages asked of the store: filled, missed, late, bad, failed; of them, those that were prefetched: "
        "prefetch_used, prefetch_late, prefetch_wasted; and those offered to it: written, write_late, write_refused, "
        "write_failed, write_skipped.",
        labels=(*_LABELS, "event"),
    )
    breaks = CounterMetricFamily(
        PREFIX + "kv_store_breaks", "Times that the store was left alone, since it failed or was slow.", labels=_LABELS
    )
    late = CounterMetricFamily(
        PREFIX + "kv_store_late_sequences", "Sequences placed before all their pages had come.", labels=_LABELS
    )
    for labels, counts in readings:
        for event, number in counts.store_pages.items():
            pages.add_metric([*labels, event], number)
        breaks.add_metric(labels, counts.store_breaks)
        late.add_metric(labels, counts.store_late)
    yield from (pages, breaks, late)


def _adapter_memory_metrics(model_name: str, adapters: LoadedAdapters | None) -> Iterator[Metric]:
    held = GaugeMetricFamily(
        PREFIX + "adapters",
        "Adapters that requests may name, by where their weights are: memory, directory.",
        labels=(_LABELS[0], "weights"),
    )
    events = CounterMetricFamily(
        PREFIX + "adapter_events",
        "Adapters loaded, unloaded, evicted from the host's memory, reloaded into it, failed to be read.",
        labels=(_LABELS[0], "event"),
    )
    if adapters is not None:
        memory = adapters.memory
        held.add_metric([model_name, "memory"], memory.kept)
        held.add_metric([model_name, "directory"], memory.names - memory.kept)
        for event, number in memory.events.items():
            events.add_metric([model_name, event], number)
    yield from (held, events)


def _step_metrics(readings: list[_Reading]) -> Iterator[Metric]:
    steps = CounterMetricFamily(PREFIX + "steps", "Steps of the loop.", labels=_LABELS)
    tokens = CounterMetricFamily(PREFIX + "step_tokens", "Tokens computed in steps.", labels=_LABELS)
    slots = CounterMetricFamily(PREFIX + "step_slots", "The same with padding.", labels=_LABELS)
    seconds = CounterMetricFamily(
        PREFIX + "step_seconds", "Time of the loop: schedule, dispatch, wait, commit.", labels=(*_LABELS, "part")
    )
    host = GaugeMetricFamily(PREFIX + "host_share", "Of the loop's time, not waiting; latest steps.", labels=_LABELS)
    padding = GaugeMetricFamily(PREFIX + "padding_waste", "Padding in the slots; latest steps.", labels=_LABELS)
    rows = CounterMetricFamily(
        PREFIX + "decode_rows", "Rows that fed tokens of their own, over all steps.", labels=_LABELS
    )
    drawn = CounterMetricFamily(PREFIX + "decode_tokens", "Tokens that these drew.", labels=_LABELS)
    for labels, totals, _, shares, *_ in readings:
        rows.add_metric(labels, totals.decode_rows)
        drawn.add_metric(labels, totals.decode_tokens)
        steps.add_metric(labels, totals.steps)
        tokens.add_metric(labels, totals.computed_tokens)
        slots.add_metric(labels, totals.slots)
        for part, value in totals.part_s.items():
            seconds.add_metric([*labels, part], value)
        host.add_metric(labels, shares.host)
        padding.add_metric(labels, shares.padding)
    yield from (steps, tokens, slots, rows, drawn, seconds, host, padding)


def _draft_metrics(readings: list[_Reading], method: str) -> Iterator[Metric]:
    """Families of a server without drafts have no samples."""
    labels = (*_LABELS, "method")
    rounds = CounterMetricFamily(PREFIX + "spec_decode_num_drafts", "Rounds of rows that fed drafts.", labels=labels)
    drafted = CounterMetricFamily(PREFIX + "spec_decode_num_draft_tokens", "Drafts that were fed.", labels=labels)
    accepted = CounterMetricFamily(
        PREFIX + "spec_decode_num_accepted_tokens", "Drafts that the model drew as well.", labels=labels
    )
    by_place = CounterMetricFamily(
        PREFIX + "spec_decode_num_accepted_tokens_per_pos",
        "The same by place in the round, from 0.",
        labels=(*labels, "position"),
    )
    found = [
        (reading, source, drafts)
        for reading in readings
        if method != "none"
        for source, drafts in (
            *([] if method == _GRAMMAR else [(method, reading.totals.drafts)]),
            (_GRAMMAR, reading.totals.grammar_drafts),
        )
    ]
    for reading, source, drafts in found:
        values = [*reading.labels, source]
        rounds.add_metric(values, drafts.rounds)
        drafted.add_metric(values, drafts.drafted)
        accepted.add_metric(values, drafts.accepted)
        for place, number in enumerate(drafts.drawn):
            by_place.add_metric([*values, str(place)], number)
    yield from (rounds, drafted, accepted, by_place)


def _histograms(readings: list[_Reading]) -> Iterator[Metric]:
    for name, (key, text) in HISTOGRAMS.items():
        family = HistogramMetricFamily(PREFIX + name, text, labels=_LABELS)
        for labels, totals, *_ in readings:
            snapshot = totals.histograms[key]
            family.add_metric(labels, buckets_of(snapshot), snapshot.total)
        yield family


def _alive(readings: list[_Reading]) -> Metric:
    family = GaugeMetricFamily(PREFIX + "engine_alive", "0 once this replica has died.", labels=_LABELS)
    for reading in readings:
        family.add_metric(reading.labels, float(reading.alive))
    return family


def _watched(readings: list[_Reading]) -> Iterator[Metric]:
    red = GaugeMetricFamily(PREFIX + "replica_red", "1 while a step is over its deadline.", labels=_LABELS)
    fenced = CounterMetricFamily(
        PREFIX + "replica_fenced", "Times that this replica was given up, since a step did not end.", labels=_LABELS
    )
    restarts = CounterMetricFamily(
        PREFIX + "replica_restarts", "Times that this replica was built again after a death.", labels=_LABELS
    )
    for reading in readings:
        red.add_metric(reading.labels, float(reading.red))
        fenced.add_metric(reading.labels, reading.fences)
        restarts.add_metric(reading.labels, reading.restarts)
    yield from (red, fenced, restarts)


def buckets_of(snapshot: HistogramSnapshot) -> list[tuple[str, float]]:
    """The buckets, cumulative as Prometheus has them."""
    ends = [*(f"{bound:g}" for bound in snapshot.bounds), "+Inf"]
    return [(end, float(count)) for end, count in zip(ends, itertools.accumulate(snapshot.counts), strict=True)]
