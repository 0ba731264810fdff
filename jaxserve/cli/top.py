"""`jaxserve top`: a server's figures in a terminal, read from its /metrics.

Every server that can be scraped can be watched, from anywhere, with nothing of an engine loaded. Rates and percentiles
are those between two scrapes, so the first view shows them since the server's start, and says so.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jaxserve.cli.http_call import call, http_url
from jaxserve.errors import ConfigError

_PREFIX = "jaxserve:"
_PAIR_WIDTH = 26  # of a figure with its name, in characters
_LATENCIES = {
    "TTFT": "time_to_first_token_seconds",
    "ITL": "inter_token_latency_seconds",
    "TPOT": "request_time_per_output_token_seconds",
    "queue": "request_queue_time_seconds",
    "end to end": "e2e_request_latency_seconds",
}

_Key = tuple[str, frozenset[tuple[str, str]]]


class Scrape(NamedTuple):
    """All samples of one reading, by name without prefix and by labels; `time_s`: its time, on this machine's clock."""

    time_s: float
    samples: Mapping[_Key, float]

    def sum(self, name: str, **labels: str) -> float:
        """The sum over all replicas of the samples with these labels."""
        wanted = labels.items()
        return sum(value for (n, found), value in self.samples.items() if n == name and wanted <= found)

    def continues(self, before: "Scrape") -> bool:
        """False when a counter has become smaller: the server was restarted in between."""
        sums = ((key, value) for key, value in before.samples.items() if key[0].endswith(("_total", "_count")))
        return all(self.samples.get(key, 0.0) >= value for key, value in sums)

    def values(self, name: str, label: str) -> Mapping[str, float]:
        """Sums by one label, over all replicas."""
        found: dict[str, float] = {}
        for (n, labels), value in self.samples.items():
            key = dict(labels).get(label)
            if n == name and key is not None:
                found[key] = found.get(key, 0.0) + value
        return found


def parse_scrape(text: str, time_s: float) -> Scrape:
    """Reads the text format of Prometheus. Raises ConfigError when it has no metric of jaxserve."""
    samples: dict[_Key, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith(_PREFIX):
                    samples[sample.name.removeprefix(_PREFIX), frozenset(sample.labels.items())] = sample.value
    except ValueError as error:
        raise ConfigError(f"the answer is no text of Prometheus: {error}") from error
    if not samples:
        raise ConfigError(f"the answer has no metric that begins with {_PREFIX}; is it the HTTP port of jaxserve?")
    return Scrape(time_s, samples)


def fetch(url: str, api_key: str | None, tls_ca: str | None = None) -> Scrape:
    """One scrape of `url`, a server's address with or without /metrics.

    `tls_ca`: PEM file of the authorities of an https server; without it those of the system. Raises ConfigError,
    saying what is wrong.
    """
    with call(metrics_url(url), api_key=api_key, tls_ca=tls_ca) as answer:
        return parse_scrape(answer.read().decode(), time.monotonic())


def metrics_url(given: str) -> str:
    """'localhost:8000' -> 'http://localhost:8000/metrics'. Raises ConfigError for anything but an address."""
    return http_url(given, "/metrics")


def percentile(now: Scrape, before: Scrape | None, name: str, share: float) -> float | None:
    """Of the values between two scrapes, as Prometheus' histogram_quantile: linear within a bucket. None without any.

    The upper end of the last bucket is open: for values there its lower end is returned.
    """
    counts = _differences(now, before, name)
    if not counts or counts[-1][1] <= 0:
        return None
    rank = share * counts[-1][1]
    low, below = 0.0, 0.0
    for bound, cumulative in counts:
        if cumulative >= rank and cumulative > below:
            return low if bound == float("inf") else low + (bound - low) * (rank - below) / (cumulative - below)
        low, below = bound, cumulative
    return low


def _differences(now: Scrape, before: Scrape | None, name: str) -> list[tuple[float, float]]:
    new = now.values(f"{name}_bucket", "le")
    old = {} if before is None else before.values(f"{name}_bucket", "le")
    return sorted((float(bound), count - old.get(bound, 0.0)) for bound, count in new.items())


def render(now: Scrape, before: Scrape | None, source: str, width: int = 80) -> Group:
    """The view, as an object that rich prints. `width`: of the terminal, in characters."""
    rates = _rates(now, before, max(1, width // _PAIR_WIDTH))
    return Group(_head(now, before, source), "", rates, "", *_pages(now), _latencies(now, before))


def _head(now: Scrape, before: Scrape | None, source: str) -> Text:
    model = ", ".join(now.values("engine_accepting", "model_name"))
    span = "since start" if before is None else f"over {now.time_s - before.time_s:.1f} s"
    text = Text.assemble(("jaxserve top", "bold"), f"  {source}  ", (model, "cyan"), f"  rates {span}")
    replicas = now.values("engine_alive", "engine")
    if dead := [engine for engine, alive in replicas.items() if not alive]:
        text.append(f"  {len(dead)} of {len(replicas)} replicas dead", "bold red")
    if not now.sum("engine_accepting"):
        text.append("  takes no new requests", "bold yellow")
    if (rung := max(now.values("degradation_rung", "engine").values(), default=0.0)) > 0:
        text.append(f"  degraded, rung {rung:.0f}", "bold yellow")
    if (stalled_s := now.sum("engine_stalled_seconds")) > 5:
        text.append(f"  no step for {stalled_s:.0f} s", "bold red")
    if compiles := now.sum("compile_events_total"):
        text.append(f"  {compiles:.0f} compiled after start", "bold red")
    return text


def _rates(now: Scrape, before: Scrape | None, columns: int) -> Table:
    def gain(name: str, **labels: str) -> float:
        return now.sum(name, **labels) - (before.sum(name, **labels) if before is not None else 0.0)

    def rate(name: str) -> str:
        return "-" if before is None else f"{gain(name) / max(1e-9, now.time_s - before.time_s):,.1f}/s"

    parts = {part: _part(now, before, part) for part in ("schedule", "dispatch", "wait", "commit")}
    queries, slots, total_s = gain("prefix_cache_queries_total"), gain("step_slots_total"), sum(parts.values())
    cells = {
        "running": f"{now.sum('num_requests_running'):.0f}",
        "waiting": f"{now.sum('num_requests_waiting'):.0f}",
        "generated": rate("generation_tokens_total"),
        "prompts": rate("prompt_tokens_total"),
        "steps": rate("steps_total"),
        "preempted": f"{gain('num_preemptions_total'):.0f}",
        "prefix hits": _share(gain("prefix_cache_hits_total"), queries),
        "padding": _share(slots - gain("step_tokens_total"), slots),
        "host": _share(total_s - parts["wait"], total_s),
    }
    if (more := gain("decode_tokens_total")) > gain("decode_rows_total") > 0:
        cells["tokens/step"] = f"{more / gain('decode_rows_total'):.2f}"
    if drafted := gain("spec_decode_num_draft_tokens_total"):
        cells["accepted"] = _share(gain("spec_decode_num_accepted_tokens_total"), drafted)
    if slots := now.sum("kv_host_slots"):
        cells["host slots"] = _share(now.sum("kv_host_slots", state="used"), slots)
        cells["from host"] = _share(gain("kv_tier_hit_tokens_total", tier="host"), queries)
    table = Table.grid(padding=(0, 1))
    for _ in range(columns):
        table.add_column(style="dim", no_wrap=True, min_width=11)
        table.add_column(justify="right", no_wrap=True, min_width=11)
    pairs = list(cells.items())
    for start in range(0, len(pairs), columns):
        table.add_row(*(text for pair in pairs[start : start + columns] for text in pair))
    return table


def _part(now: Scrape, before: Scrape | None, part: str) -> float:
    return now.sum("step_seconds_total", part=part) - (
        before.sum("step_seconds_total", part=part) if before is not None else 0.0
    )


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole > 0 else "-"


def _pages(now: Scrape) -> list[RenderableType]:
    states = now.values("kv_cache_pages", "state")
    total = sum(states.values())
    if not total:
        return []
    held = total - states.get("free", 0.0) - states.get("cached", 0.0)
    table = Table.grid(padding=(0, 2))
    table.add_row("pages", ProgressBar(total=total, completed=held, width=30), f"{100 * held / total:.1f} % held")
    numbers = "  ".join(f"{count:.0f} {state}" for state, count in states.items())
    return [table, Text(f"       {numbers}", "dim"), ""]


def _latencies(now: Scrape, before: Scrape | None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("latency", no_wrap=True)
    for name in ("count", "mean", "p50", "p90", "p99"):
        table.add_column(name, justify="right", no_wrap=True, min_width=7)
    for title, name in _LATENCIES.items():
        count, total = (
            now.sum(f"{name}_{kind}") - (before.sum(f"{name}_{kind}") if before is not None else 0.0)
            for kind in ("count", "sum")
        )
        shares = [percentile(now, before, name, share) for share in (0.5, 0.9, 0.99)]
        mean = total / count if count > 0 else None
        table.add_row(title, f"{count:,.0f}", *(_duration(seconds) for seconds in (mean, *shares)))
    return table


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{1000 * seconds:.{0 if seconds >= 0.1 else 1}f} ms"


def show(
    url: str,
    api_key: str | None,
    *,
    every_s: float,
    once: bool,
    tls_ca: str | None = None,
    console: Console | None = None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Prints one view, or keeps one up to date until it is interrupted; where there is no terminal, prints each.

    A server that goes away is asked until it comes back. Returns the exit code. Raises ConfigError when the first
    reading fails.
    """
    source, console = metrics_url(url), console or Console()
    if tls_ca is not None and not source.startswith("https://"):
        raise ConfigError(f"--tls-ca is given, but {source} is not https://")
    views = _views(source, lambda: fetch(source, api_key, tls_ca), lambda: console.width, lambda: sleep(every_s))
    try:
        if once:
            console.print(next(views))
        elif console.is_terminal:
            with Live(next(views), console=console, auto_refresh=False, screen=True) as live:
                for view in views:
                    live.update(view, refresh=True)
        else:
            for view in views:
                console.print(view)
    except KeyboardInterrupt:
        pass
    return 0


def _views(
    source: str, read: Callable[[], Scrape], width: Callable[[], int], wait: Callable[[], None]
) -> Iterator[RenderableType]:
    """A view for each reading, without end. Raises ConfigError when the first one fails."""
    now, before = read(), None
    while True:
        view = render(now, before, source, width())
        yield view
        before = now
        while True:
            wait()
            try:
                now = read()
                break
            except ConfigError as error:  # it may be restarting: the last view stays
                yield Group(Text(f"{error}; asking again", "bold red"), "", view)
        if not now.continues(before):
            before = None
