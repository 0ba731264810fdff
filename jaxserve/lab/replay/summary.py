"""A step log as a table: the time of its steps by kind. Records are not kept: a log of a day is read in one pass."""

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from jaxserve.sched.draft_counts import DraftCounts
from jaxserve.sched.record import LogEnd, LogHeader, StepLog, StepRecord

_WIDTH = 160

# Fields of a record, with their names in the table.
_SHOWN = {"schedule_ms": "schedule", "pack_ms": "pack", "device_ms": "device", "commit_ms": "commit"}
_PARTS = (*_SHOWN, "wait_ms")


@dataclasses.dataclass(slots=True, kw_only=True)
class KindSums:
    """All steps of one kind. Mutated by `Summary.add` alone.

    Attributes:
      tokens, slots: computed, without and with padding.
      drawn: tokens that were sampled; `drawn_wide` those of `row_rounds`, the rounds of rows that may draw several.
      drafts: what became of drafts.
      context: tokens whose keys and values were read.
      ms: milliseconds by the name of the record's field.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    slots: int = 0
    drawn: int = 0
    drawn_wide: int = 0
    row_rounds: int = 0
    drafts: DraftCounts = dataclasses.field(default_factory=DraftCounts)
    context: int = 0
    ms: dict[str, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(_PARTS, 0.0))

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.rows += record.plan.num_rows
        self.tokens += record.num_tokens
        self.slots += record.bucket.tokens
        self.drawn += len(record.token_ids)
        self.context += record.context_tokens
        if record.counts is not None:
            self.drawn_wide += sum(record.counts)
            self.row_rounds += sum(record.counts) if record.drafts is None else sum(map(len, record.drafts))
        for rounds in record.drafts or ():
            self.drafts.add(rounds)
        for name in _PARTS:
            self.ms[name] += getattr(record, name)


@dataclasses.dataclass(slots=True, kw_only=True)
class Summary:
    """A whole log. Mutated by `add` alone.

    Attributes:
      kinds: sums by kind of step: "decode", "prefill" (prompts alone), "mixed".
      total: the same over all of them.
      wall_s: from the start of the first step to the end of the last.
      missing: steps that are not in the log, according to its records.
    """

    kinds: dict[str, KindSums] = dataclasses.field(default_factory=dict)
    total: KindSums = dataclasses.field(default_factory=KindSums)
    wall_s: float = 0.0
    missing: int = 0
    _first_s: float | None = None
    _ready_s: float = 0.0

    def add(self, record: StepRecord) -> None:
        kind = kind_of(record)
        for sums in (self.kinds.setdefault(kind, KindSums()), self.total):
            sums.add(record)
        if self._first_s is None:
            self._first_s = record.start_s
        launched_s = record.start_s + 1e-3 * (record.schedule_ms + record.pack_ms)
        self._ready_s = max(launched_s, self._ready_s) + 1e-3 * record.device_ms  # as `device_ms` is defined
        self.wall_s = self._ready_s + 1e-3 * record.commit_ms - self._first_s
        self.missing += record.missing


def kind_of(record: StepRecord) -> str:
    """ "decode", "prefill" or "mixed"."""
    if record.plan.decode_only:
        return "decode"
    return "mixed" if record.plan.decode_rows else "prefill"


def summarize(records: Iterable[StepRecord]) -> Summary:
    """Sums up all records, in one pass."""
    summary = Summary()
    for record in records:
        summary.add(record)
    return summary


def summarize_and_print(path: Path) -> None:
    """Reads a log and prints its table. Raises StepLogError."""
    with StepLog(path) as log:
        summary = summarize(log)
        # Where nothing is cut to a terminal's width, a line stays a line.
        width = None if sys.stdout.isatty() else _WIDTH
        show_summary(log.header, summary, log.end, Console(highlight=False, width=width))


def show_summary(header: LogHeader, summary: Summary, end: LogEnd | None, console: Console) -> None:
    """Prints the table, and above it the header of the log."""
    limits = header.limits
    console.print(
        f"{header.model}, policy {header.policy}, replica {header.replica}: {limits.max_rows} rows, "
        f"{limits.num_pages} pages of {limits.page_size} tokens, contexts up to {limits.max_model_len}"
    )
    total = summary.total
    if total.steps == 0:
        console.print("no steps")
    else:
        console.print(_table(summary))
        console.print(
            f"{summary.wall_s:.3f} s from first to last. Device at work: {_share(total, 'device_ms', summary)}, host "
            f"waiting for it: {_share(total, 'wait_ms', summary)}. {total.drawn:,} tokens drawn."
        )
        for line in _speculation(summary):
            console.print(line)
    if end is None:
        console.print("the log has no end: its engine was killed, or is still running")
    dropped = max(summary.missing, 0 if end is None else end.dropped)
    if dropped:
        console.print(f"{dropped} steps are missing: the disk was too slow")


def _speculation(summary: Summary) -> Iterator[str]:
    """What several tokens a step, and drafts, have brought; nothing of a log without."""
    total, decode = summary.total, summary.kinds.get("decode")
    if decode is None or not total.row_rounds:
        return
    yield (
        f"A row drew {decode.drawn / decode.rows:.2f} tokens in a decode step, and "
        f"{total.drawn_wide / total.row_rounds:.2f} in a round of a step of several."
    )
    drafts = total.drafts.totals()
    if drafts.drafted:
        places = ", ".join(f"{rate:.0%}" for rate in drafts.rates)
        yield (
            f"{drafts.drafted:,} drafts, {drafts.rate:.0%} accepted. By place, of drafts whose predecessors were "
            f"accepted: {places}."
        )


def _table(summary: Summary) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, caption_justify="left")
    table.add_column("step", no_wrap=True)
    for name in ("steps", "rows", "tokens", "padding", "context", *_SHOWN.values(), "share"):
        table.add_column(name, justify="right", no_wrap=True)
    order = [kind for kind in ("decode", "prefill", "mixed") if kind in summary.kinds]
    for kind in order:
        table.add_row(kind, *_cells(summary.kinds[kind], summary.total))
    if len(order) > 1:
        table.add_section()
        table.add_row("all", *_cells(summary.total, summary.total))
    table.caption = "a step on average, times in ms; padding: of the slots; share: of the device's time"
    return table


def _cells(sums: KindSums, total: KindSums) -> list[str]:
    n = sums.steps
    share = sums.ms["device_ms"] / total.ms["device_ms"] if total.ms["device_ms"] else 0.0
    return [
        f"{n:,}",
        f"{sums.rows / n:,.1f}",
        f"{sums.tokens / n:,.1f}",
        f"{1 - sums.tokens / sums.slots:.1%}",
        f"{sums.context / n:,.0f}",
        *(f"{sums.ms[name] / n:.3f}" for name in _SHOWN),
        f"{share:.1%}",
    ]


def _share(total: KindSums, part: str, summary: Summary) -> str:
    return f"{total.ms[part] / 1e3 / summary.wall_s:.0%}" if summary.wall_s else "0%"
