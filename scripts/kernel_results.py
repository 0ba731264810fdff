"""The results of device_check: kept as they come, compared with the card, its targets and other kernels, and shown.

The targets are here, and the rule which results are failures.
"""

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_pool import Result, Task
from kernel_runs import mix_of
from rich.console import Console
from rich.table import Table

from jaxserve.values.chips import chip_of_kind

MAIN = "llama3-8b-tp1"
# What XLA and CUDA say when others have the memory; a process that starts then finds no device.
_NO_ROOM = re.compile("RESOURCE_EXHAUSTED|out of memory|no supported devices found")
GIVE_UP = 3  # crashes or hangs of one implementation on one mix, after which its others are skipped
TARGETS = (
    ("decode, batch 64, context 4k: share of the copy bandwidth", f"{MAIN}/decode64/64/bfloat16", 0.85),
    ("prefill of 8k: share of the bf16 matrix rate", f"{MAIN}/prefill8k/64/bfloat16", 0.65),
)


class Results:
    """All results so far, by task; each is appended to a file of lines as it comes. Used by one thread at a time."""

    def __init__(self, lines: Path, resume: bool) -> None:
        lines.parent.mkdir(parents=True, exist_ok=True)
        kept = lines.read_text().splitlines() if resume and lines.exists() else []
        self.found: dict[str, Result] = {r["id"]: r for r in map(json.loads, kept)}
        self._lines = lines
        lines.write_text("".join(f"{line}\n" for line in kept))
        self._no_device: str | None = None
        self._lost: Counter[tuple[str, str]] = Counter()
        self._start = time.monotonic()

    def add(self, task: Task, result: Result) -> list[Task]:
        """Keeps a result; a task that ran out of device memory is tried once more when the others are through."""
        if _NO_ROOM.search(result.get("failure", "")) and not task.get("again"):
            return [task | {"again": True}]
        for part in result.pop("parts", []):
            result = part | result
        if result.get("crashed"):
            self._lost[_sort(task)] += 1
        if task["kind"] == "rates" and result.get("stage") == "start":
            self._no_device = "no device: " + result["failure"].splitlines()[-1]
        self.found[task["id"]] = task | result
        with self._lines.open("a") as file:
            file.write(json.dumps(task | result) + "\n")
        said = _verdict(result)
        print(f"[{time.monotonic() - self._start:5.0f} s] {task['id']}: {said}", file=sys.stderr, flush=True)
        return []

    def skip(self, task: Task) -> str | None:
        """Why a task is not worth its time: the implementation crashed or hung on others like it."""
        if self._no_device is not None or self._lost[_sort(task)] < GIVE_UP:
            return self._no_device
        return (
            f"{task.get('implementation', task.get('peer'))} crashed or hung {GIVE_UP} times on {mix_of(task['case'])}"
        )

    def of(self, kind: str) -> Iterator[Result]:
        return (r for r in self.found.values() if r["kind"] == kind)


def _sort(task: Task) -> tuple[str, str]:
    name = task.get("implementation", task.get("peer", ""))
    return name, mix_of(task["case"]) + ("/small" if task["case"].endswith("/small") else "") if "case" in task else ""


def _verdict(result: Result) -> str:
    for key in ("skipped", "refused"):
        if key in result:
            return f"{key}: {result[key]}"
    if "failure" in result:
        return "FAILED: " + result["failure"].splitlines()[-1]
    words = [] if result.get("passed", True) else ["WRONG"]
    words += [f"{key} {result[key]:.3g}" for key in ("error", "ms", "gb_per_s", "tflop_per_s") if key in result]
    words += ["outputs of equal layers DIFFER"] if not result.get("repeats_alike", True) else []
    return ", ".join(words) or "done"


def summary(results: Results, unreached: Sequence[Task], ledger: Path | None = None) -> dict[str, Any]:
    """What is written: ceilings, every check with its shares and peers, targets, and what was not reached.

    `ledger`: the record of kernel_ledger, whose counted time of our kernel for a TPU stands beside the measured one.
    """
    ceilings = next(results.of("rates"), {})
    peers: dict[str, dict[str, float]] = {}
    for result in results.of("peer"):
        if "ms" in result:
            peers.setdefault(result["case"], {})[result["peer"]] = result["ms"]
    counted = _counted(ledger, (ceilings.get("device") or {}).get("kind"))
    checks = [
        r | _shares(r, ceilings) | {"peers_ms": peers.get(r["case"], {})} | _beside(r, counted)
        for r in results.of("check")
    ]
    return {
        "ceilings": ceilings,
        "checks": checks,
        "writes": list(results.of("write")),
        "products": [r | _shares(r, ceilings) for r in results.of("product")],
        "peers": list(results.of("peer")),
        "targets": [*_targets(checks)],
        "unreached": [task["id"] for task in unreached],
    }


def _shares(result: Result, ceilings: Result) -> Result:
    shares = {}
    if "gb_per_s" in result and "copy_gb_per_s" in ceilings:
        shares["share_of_copy"] = result["gb_per_s"] / ceilings["copy_gb_per_s"]
    if "tflop_per_s" in result and "matmul_tflop_per_s" in ceilings:
        shares["share_of_matmul"] = result["tflop_per_s"] / ceilings["matmul_tflop_per_s"]
    return shares


def _counted(ledger: Path | None, kind: str | None) -> dict[str, float]:
    """Milliseconds by case that the ledger has for our kernels on a kind of TPU."""
    chip = None if kind is None else chip_of_kind(kind)
    if ledger is None or chip is None or not ledger.exists():
        return {}
    record = json.loads(ledger.read_text())["results"]
    return {r["case"]: r["us"] / 1e3 for r in record if (r["chip"], r["by"]) == (chip.name, "jaxserve")}


def _beside(result: Result, counted: Mapping[str, float]) -> Result:
    """The counted time of the kernel that was timed, and the measured time over it."""
    if result["implementation"] != "mosaic_tpu" or "ms" not in result or result["case"] not in counted:
        return {}
    return {"counted_ms": counted[result["case"]], "over_counted": result["ms"] / counted[result["case"]]}


def _targets(checks: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Each with what was reached by implementations that were right; `reached` is None where it was not measured."""
    for what, name, wanted in TARGETS:
        key = "share_of_copy" if "decode64" in name else "share_of_matmul"
        own = [
            c for c in checks if c["case"] == name and c["implementation"] != "xla" and "ms" in c and c.get("passed")
        ]
        share = max((c[key] for c in own if key in c), default=None)
        yield {"target": what, "case": name, "wanted": wanted, "value": share, "reached": share and share >= wanted}
        ratios = [min(c["peers_ms"].values()) / c["ms"] for c in own if c["peers_ms"]]
        ratio = max(ratios, default=None)
        yield {
            "target": "no slower than the best peer: its time over ours",
            "case": name,
            "wanted": 1.0,
            "value": ratio,
            "reached": ratio and ratio >= 1.0,
        }


def show(found: dict[str, Any], console: Console) -> None:
    """The table, short enough for the end of a log: what is wrong, what was timed, the targets."""
    ceilings = found["ceilings"]
    ran = [c for c in found["checks"] if "passed" in c]
    for result in [*found["checks"], *found["writes"], *found["products"], *found["peers"]]:
        if "failure" in result or not result.get("passed", True) or not result.get("repeats_alike", True):
            console.print(f"{result['id']}: {_verdict(result)}", markup=False, soft_wrap=True)
    table = Table(title="ms of one layer; share: of copy bandwidth (decode) or matrix rate", padding=(0, 0))
    columns = ("case", "implementation", "error", "ms", "GB/s", "TFLOP/s", "share", "best peer", "its ms", "counted ms")
    for column in columns:
        table.add_column(column, justify="left" if column in ("case", "implementation", "best peer") else "right")
    for c in (c for c in ran if "ms" in c):
        peer = min(c["peers_ms"], key=c["peers_ms"].__getitem__, default=None)
        share = c.get("share_of_matmul", c.get("share_of_copy"))
        peer_ms = peer and c["peers_ms"][peer]
        figures = (c["ms"], c["gb_per_s"], c.get("tflop_per_s"), share, peer_ms, c.get("counted_ms"))
        *own, beside, counted = ("" if x is None else f"{x:.3g}" for x in figures)
        table.add_row(c["case"], c["implementation"], f"{c['error']:.1e}", *own, peer or "", beside, counted)
    console.print(table)
    for kind, those in (("write", found["writes"]), ("product", found["products"])):
        for w in those:
            console.print(f"{kind} {w['case']} {w['implementation']}: {_verdict(w)}", markup=False)
    console.print({k: round(v, 1) for k, v in ceilings.items() if isinstance(v, float)})
    for target in found["targets"]:
        value = "not measured" if target["value"] is None else f"{target['value']:.3f}"
        answer = {None: "UNPROVEN", True: "reached", False: "MISSED"}[target["reached"]]
        console.print(
            f"{answer}: {target['target']} ({target['case']}): {value}, wanted {target['wanted']}", markup=False
        )
    for implementation in sorted({c["implementation"] for c in found["checks"]}):
        own = [c for c in found["checks"] if c["implementation"] == implementation]
        right = sum(c.get("passed", False) for c in own)
        counts = Counter(next((k for k in ("refused", "skipped", "failure") if k in c), "ran") for c in own)
        console.print(f"{implementation}: {right} right of {counts['ran']} that ran; {dict(counts)}", markup=False)
    console.print(f"not reached: {len(found['unreached'])} {' '.join(found['unreached'])[:1500]}", markup=False)
