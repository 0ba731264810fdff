"""Searches the block sizes of the kernels, and writes the table that ships for a kind of device.

    PYTHONPATH=. python scripts/tune_kernels.py [--budget-s 1500] [--only mosaic_gpu/decode] [--dry-run]
    PYTHONPATH=. python scripts/tune_kernels.py --by-count --chips v5p v7x --only decode/ [--page-size 128] [--again]

The first way measures on the device at hand; the second counts (`jaxserve.lab.ledger`) for TPUs that are not here.
Counted sizes are kept apart in the table, and measured ones go before them. `scripts/tuning_by_count.py` has that way.

Every size is checked against the `xla` implementation before it is timed, so that a fast and wrong one is not taken. An
entry is a model's heads, page size and cache dtype (`tuning.entry_name`); decode is timed on 64 rows of 4k, prefill on
a prompt of 8k.

Each entry has a process of its own: inputs cost seconds and a candidate milliseconds. A candidate that crashes or hangs
takes its process along; the next one goes on with the rest.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import tuning_by_count
from kernel_pool import Channel, Pool, Result, Task, error_lines, heed_termination, serve
from kernel_runs import (
    Attention,
    Turns,
    commit,
    device_at_hand,
    find_implementation,
    layers_of,
    prepare,
    seconds_per_call,
    tolerance,
    versions,
    worker_environment,
    write_json,
)

from jaxserve.kernels.cases import REAL, Case, case, small
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.tuning import TunedTable, entry_name, file_name

FOLDER = Path(__file__).parents[1] / "jaxserve/kernels/tuned"
IMPLEMENTATIONS = {"gpu": ("mosaic_gpu",), "tpu": ("mosaic_tpu",), "cpu": ()}
MIXES = {"decode": "decode64", "prefill": "prefill8k"}
LIMITS_S = {"start": 120, "task": 30, "inputs": 200, "compile": 120, "wait": 600, "run": 40, "host": 120}
# Two implementations round their results each for itself, so that they may differ by more than each is off.
APART = 3.0
NOISE = 0.01  # how much faster than the implementation's own choice a size must be to replace it


def search_of(implementation: str, variant: str) -> tuple[Any, Any]:
    """(default_blocks, candidates) of a variant, both functions of a use."""
    if implementation == "mosaic_gpu":
        module = importlib.import_module(f"jaxserve.kernels.pallas.gpu_{variant}")
        return module.default_blocks, module.candidates
    path = (
        "jaxserve.kernels.pallas.tpu_attention" if implementation == "mosaic_tpu" else implementation.partition(":")[0]
    )
    module = importlib.import_module(path)
    return functools.partial(module.default_blocks, variant), functools.partial(module.candidates, variant)


def plan(implementations: Iterable[str], only: str, short: bool, page_size: int | None = None) -> list[Task]:
    """One task for each entry that the real cases ask for, the candidates in it. `page_size` replaces that of all."""
    tasks: dict[str, Task] = {}
    for name, real in REAL.items():
        real = real if page_size is None else dataclasses.replace(real, page_size=page_size)
        for implementation in implementations:
            for variant in MIXES:
                entry = entry_name(implementation, variant, real.use)
                if entry in tasks or not re.search(only, entry):
                    continue
                default, candidates = search_of(implementation, variant)
                first = dataclasses.asdict(default(real.use))
                others = [dataclasses.asdict(blocks) for blocks in candidates(real.use)]
                tasks[entry] = {
                    "id": entry,
                    "implementation": implementation,
                    "variant": variant,
                    "model": name.split("/")[0],
                    "use": [real.page_size, real.cache_dtype, real.query_dtype],
                    "short": short,
                    "candidates": [first, *(blocks for blocks in others if blocks != first)],
                }
    return list(tasks.values())


# --- a worker --------------------------------------------------------------------------------------------------------


class Worker:
    """Measures the candidates of one entry after the other."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def handle(self, task: Task, channel: Channel) -> Result:
        channel.stage("start")
        device, timed = device_at_hand(), case_of(task)
        channel.part({"device": dataclasses.asdict(device)})
        implementation = find_implementation(
            task["implementation"], device, TunedTable(device_kind=device.kind, entries={})
        )
        refusal = implementation.refuses(timed.use)
        if refusal is not None:
            return {"refused": refusal}
        channel.stage("wait")
        with self._turns.shared():
            channel.stage("inputs")
            wanted = self._reference(timed, device)
            inputs = prepare(timed, implementation)
            caches = layers_of(inputs.cache)
        inputs = dataclasses.replace(inputs, cache=None, keys=[], values=[])
        for blocks in task["candidates"]:
            channel.part({"trying": blocks})
            table = TunedTable(device_kind=device.kind, entries={task["id"]: blocks})
            implementation = find_implementation(task["implementation"], device, table)
            refusal = implementation.refuses(timed.use)
            if refusal is not None:
                channel.part({"blocks": blocks, "refused": refusal})
                continue
            channel.stage("compile")
            try:
                attention = Attention(timed, implementation, inputs, caches)
            except Exception as error:  # too many registers, too much memory: the next candidate may compile
                channel.part({"blocks": blocks, "failure": error_lines(error, 2)})
                continue
            channel.part({"blocks": blocks} | self._measure(timed, attention, wanted, channel))
            caches = attention.caches
        return {}

    def _reference(self, timed: Case, device: Device) -> np.ndarray:
        """What the `xla` implementation gives. Same seed, same queries, keys and values."""
        xla = find_implementation("xla", device)
        inputs = prepare(timed, xla)
        return np.asarray(Attention(timed, xla, inputs, [inputs.cache]).launch()[0]).astype(np.float32)

    def _measure(self, timed: Case, attention: Attention, wanted: np.ndarray, channel: Channel) -> Result:
        channel.stage("wait")
        with self._turns.shared():
            channel.stage("run")
            out = np.asarray(attention.launch()[0]).astype(np.float32)
        off = np.linalg.norm(out - wanted, axis=(1, 2)) / np.linalg.norm(wanted, axis=(1, 2))
        apart = float(np.sqrt(np.mean(np.square(off))))
        if not apart <= APART * tolerance(timed):
            return {"apart": apart, "failure": f"differs by {apart:.1e} from the xla implementation"}
        channel.stage("wait")
        with self._turns.alone():
            channel.stage("run")
            return {"apart": apart, "ms": seconds_per_call(attention.launch, attention.layers) * 1e3}


def case_of(task: Task) -> Case:
    page_size, cache_dtype, query_dtype = task["use"]
    whole = case(task["model"], MIXES[task["variant"]], page_size, cache_dtype, query_dtype)
    return small(whole) if task["short"] else whole


# --- what was found --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(kw_only=True)
class Findings:
    """All measured candidates by entry. Changed by one thread at a time."""

    by_entry: dict[str, list[Result]]
    device: Device | None = None

    def keep(self, task: Task, result: Result) -> list[Task]:
        """Takes the parts of a result. After a failure, a task with the candidates that were not tried is returned."""
        parts = result.get("parts", [])
        found = self.by_entry.setdefault(task["id"], [])
        found += [part for part in parts if "blocks" in part]
        for part in parts:
            if "device" in part:
                self.device = Device(**part["device"])
        tried = [part["trying"] for part in parts if "trying" in part]
        left = task["candidates"][len(tried) :]
        said = result.get("refused") or result.get("failure", "").splitlines()[:1] or ""
        best = min((part["ms"] for part in found if "ms" in part), default=float("nan"))
        print(f"{task['id']}: {len(found)} candidates, best {best:.4g} ms {said}", flush=True)
        if "failure" in result and tried and left:
            return [task | {"candidates": left}]
        return []

    def entries(self) -> tuple[dict[str, dict[str, int]], dict[str, Result]]:
        """(the sizes to ship, what was measured). The default sizes, tried first, stay unless beaten clearly."""
        chosen, measured = {}, {}
        for entry, found in self.by_entry.items():
            right = [part for part in found if "ms" in part]
            if not right:
                continue
            best = min(right, key=lambda part: part["ms"])
            if right[0] is found[0] and right[0]["ms"] <= best["ms"] * (1 + NOISE):
                best = right[0]
            chosen[entry] = best["blocks"]
            default_ms = found[0].get("ms")
            measured[entry] = {"ms": best["ms"], "default_ms": default_ms, "tried": len(found), "right": len(right)}
        return chosen, measured


def write_table(folder: Path, findings: Findings, at: str) -> Path | None:
    """Writes the table, entries of earlier runs kept; each entry has the commit that it was measured with."""
    chosen, measured = findings.entries()
    if findings.device is None or not chosen:
        return None
    path = folder / file_name(findings.device.kind)
    old: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"entries": {}, "measured": {}}
    measured = {entry: about | {"commit": at} for entry, about in measured.items()}
    table = old | {
        "device_kind": findings.device.kind,
        "commit": at,
        "versions": versions(),
        "entries": old["entries"] | chosen,
        "measured": old["measured"] | measured,
    }
    write_json(path, table)
    return path


def run(args: argparse.Namespace) -> None:
    """All entries within the budget."""
    tasks = plan(args.implementations or IMPLEMENTATIONS[args.backend], args.only, args.backend == "cpu")
    if args.dry_run:
        for task in tasks:
            print(f"{task['id']}: {len(task['candidates'])} candidates on {case_of(task).name}")
        return
    findings = Findings(by_entry={})
    with tempfile.TemporaryDirectory() as turns:
        command = [sys.executable, __file__, "--worker", turns]
        pool = Pool(command, [""] * args.workers, worker_environment(args.backend, args.workers), LIMITS_S, once=True)
        try:
            unreached = pool.run(tasks, time.monotonic() + args.budget_s, findings.keep)
            for task in unreached:
                findings.keep(task, {"parts": task.get("parts", []), "failure": "the budget ended"})
        finally:
            pool.close()
            print(f"written: {write_table(args.folder, findings, args.commit)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--implementations", nargs="+", help="names of the registry, or 'package.module:make_attention'"
    )
    parser.add_argument("--only", default="", help="regular expression on entries, e.g. 'decode/32x8x128'")
    parser.add_argument("--budget-s", type=float, default=1500)
    parser.add_argument(
        "--backend", choices=tuple(IMPLEMENTATIONS), default="gpu", help="cpu: short cases, to try the script"
    )
    parser.add_argument("--workers", type=int, default=6, help="processes that compile side by side")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the table goes")
    parser.add_argument("--commit", default=commit(), help="for a copy of the tree without git's folder")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be tried")
    parser.add_argument("--worker", metavar="FOLDER", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--by-count", action="store_true", help="count for TPUs that are not here, and measure nothing")
    parser.add_argument("--chips", nargs="+", choices=tuple(tuning_by_count.CHIPS), default=list(tuning_by_count.CHIPS))
    parser.add_argument("--page-size", type=int, help="with --by-count: in place of the page size of every case")
    parser.add_argument("--again", action="store_true", help="with --by-count: entries that are in the table, too")
    parser.add_argument("--count-worker", metavar="CHIP", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.count_worker is not None:
        tuning_by_count.serve(args.count_worker)
        return
    if args.by_count:
        tasks = plan(IMPLEMENTATIONS["tpu"], args.only, False, args.page_size)
        tuning_by_count.run(tasks, args.chips, args.folder, args.commit, again=args.again, dry_run=args.dry_run)
        return
    if args.worker is not None:
        serve(Worker(Turns(args.worker)).handle)
        return
    heed_termination()
    run(args)


if __name__ == "__main__":
    main()
