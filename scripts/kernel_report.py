"""How far each implementation of paged attention is proven: compiled for a device, interpreted, measured on it.

    python scripts/kernel_report.py --compile --interpret [--only llama3]     finds out, writes record and summary
    python scripts/kernel_report.py                                           writes the summary of the record
    python scripts/kernel_report.py --cases                                   and prints a line for each case

The record is benchmarks/kernels.json; measurements are read from benchmarks/device_check_*.json. The summary stands in
docs/kernels.md between two markers. A case without a record is 'unproven'.

Facts are kept one by one, with the commit: asking for all of them takes hours on two cores.
"""

import argparse
import collections
import dataclasses
import json
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_builds import ENVIRONMENT, compile_for, interpret
from kernel_pool import Channel, Pool, Result, Task, heed_termination, serve
from kernel_runs import commit, find_case, tolerance, worker_environment, write_between, write_results

from jaxserve.kernels.cases import REAL

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- summary: written by scripts/kernel_report.py -->", "<!-- end of summary -->"
TOPOLOGIES = {
    "mosaic_tpu": ("v5e:2x2", "v6e:2x2"),
    "mosaic_gpu": ("h200:1",),
    "xla_batched": ("a100:1", "l40s:1", "b200:1"),
    "xla": (),
}
PLAIN = ("xla_batched", "xla")  # run on any CPU, without an interpreter
_ON_CPU = {False: "interpreted on a CPU", True: "run on a CPU"}
LIMITS_S = {"start": 120, "task": 30, "compile": 400, "host": 900}
# JAX's CPU client has a thread a device, and the GPU interpreter waits for ever with fewer than its kernels have.
_HOST_DEVICES = "--xla_force_host_platform_device_count=8"

Facts = dict[str, dict[str, dict[str, Any]]]  # case, implementation, 'compiled v5e' or 'interpreted' -> what was found


def plan(args: argparse.Namespace, facts: Facts) -> list[Task]:
    """One task for each program: cases that differ only in name share it. With `args.missing`, what is not known."""
    tasks: dict[str, Task] = {}
    for name, case in REAL.items():
        for implementation in args.implementations:
            if not re.search(args.only, f"{name} {implementation}"):
                continue
            short = find_case(f"{name}/small")
            wanted = [("interpreted", short, "")] if args.interpret else []
            wanted += (
                [(f"compiled {t.partition(':')[0]}", case, t) for t in TOPOLOGIES[implementation]]
                if args.compile
                else []
            )
            known = facts.get(name, {}).get(implementation, {})
            for fact, asked, topology in wanted:
                if args.missing and "failure" not in known.get(fact, {"failure": "not tried"}):
                    continue
                key = f"{fact} {implementation} {dataclasses.replace(asked, name='')}"
                task = {
                    "id": key,
                    "fact": fact,
                    "case": asked.name,
                    "implementation": implementation,
                    "topology": topology,
                    "of": [],
                }
                tasks.setdefault(key, task)["of"].append(name)
    return list(tasks.values())


def handle(task: Task, channel: Channel) -> Result:
    case = find_case(task["case"])
    if task["topology"]:
        channel.stage("compile")
        return compile_for(case, task["implementation"], task["topology"])
    channel.stage("host")
    return interpret(case, task["implementation"])


def ask(tasks: Sequence[Task], facts: Facts, path: Path, args: argparse.Namespace) -> None:
    """Works off the tasks and keeps each fact as it comes."""
    start, done, at = time.monotonic(), 0, commit()

    def keep(task: Task, result: Result) -> list[Task]:
        nonlocal done
        done += 1
        result = {k: v for k, v in result.items() if k not in ("parts", "crashed", "stage")} | {"commit": at}
        for name in task["of"]:
            facts.setdefault(name, {}).setdefault(task["implementation"], {})[task["fact"]] = result
        write_results(path, facts)
        said = {k: v for k, v in result.items() if k not in ("commit", "kernels")}
        waited = time.monotonic() - start
        print(
            f"[{waited:5.0f} s] {done}/{len(tasks)} {task['case']} {task['implementation']} {task['fact']}: {said}",
            flush=True,
        )
        return []

    environment = worker_environment("cpu", args.processes) | ENVIRONMENT | {"XLA_FLAGS": _HOST_DEVICES}
    environment["PYTHONPATH"] = str(ROOT)  # the interpreters live beside the tests
    # A kernel that a process has compiled before is not compiled, nor reported on, again.
    pool = Pool([sys.executable, __file__, "--worker"], [""] * args.processes, environment, LIMITS_S, once=True)
    try:
        left = pool.run(tasks, time.monotonic() + args.budget_s, keep)
    finally:
        pool.close()
    if left:
        print(f"the budget did not reach {len(left)} of {len(tasks)} programs")


# --- the summary, and the table of all cases -------------------------------------------------------------------------

Measured = dict[
    tuple[str, str], dict[str, dict[str, Any]]
]  # (case, implementation), device -> a check of scripts/device_check.py


def measurements(folder: Path) -> Measured:
    """What the records of scripts/device_check.py say of the cases at full length."""
    found: Measured = {}
    for path in sorted(folder.glob("device_check_*.json")):
        record = json.loads(path.read_text())
        device = (record["about"].get("device") or {}).get("kind", "unknown device")
        for check in record["results"]["checks"]:
            if not check["case"].endswith("/small"):
                found.setdefault((check["case"], check["implementation"]), {})[device] = check
    return found


def summary(facts: Facts, measured: Measured) -> Iterator[str]:
    """Markdown lines: for each implementation and kind of proof, the number of cases with each verdict."""
    yield "| implementation | proof | right | refused | wrong | unproven | largest error |"
    yield "|---" * 7 + "|"
    for implementation, topologies in TOPOLOGIES.items():
        for chip in (topology.partition(":")[0] for topology in topologies):
            found = {name: facts.get(name, {}).get(implementation, {}).get(f"compiled {chip}") for name in REAL}
            yield _summary_line(implementation, f"compiled for {chip}", found)
        found = {name: facts.get(name, {}).get(implementation, {}).get("interpreted") for name in REAL}
        yield _summary_line(implementation, _ON_CPU[implementation in PLAIN], found)
        devices = sorted({d for (_, of), checks in measured.items() if of == implementation for d in checks})
        for device in devices:
            found = {name: measured.get((name, implementation), {}).get(device) for name in REAL}
            yield _summary_line(implementation, f"measured on {device}", found)
        if not devices:
            yield _summary_line(implementation, "measured on a GPU or TPU", dict.fromkeys(REAL))


def _summary_line(implementation: str, proof: str, found: Mapping[str, Mapping[str, Any] | None]) -> str:
    """One line of the summary. `found`: for each case its fact or check, None where there is none."""
    counts = collections.Counter(_verdict(name, fact) for name, fact in found.items())
    errors = [fact["error"] for fact in found.values() if fact is not None and "error" in fact]
    cells = [str(counts[verdict]) for verdict in ("right", "refused", "wrong", "unproven")]
    wrong = f"**{cells[2]}**" if counts["wrong"] else cells[2]
    largest = f"{max(errors):.1e}" if errors else "-"
    return f"| `{implementation}` | {proof} | {cells[0]} | {cells[1]} | {wrong} | {cells[3]} | {largest} |"


def _verdict(name: str, fact: Mapping[str, Any] | None) -> str:
    if fact is None or "skipped" in fact:
        return "unproven"
    if "refused" in fact:
        return "refused"
    if "failure" in fact or not fact.get("passed", True) or fact.get("races"):
        return "wrong"
    if any(kernel.get("spill_bytes", 0) or kernel.get("serialized") for kernel in fact.get("kernels", ())):
        return "wrong"
    return "wrong" if "passed" not in fact and fact.get("error", 0.0) > tolerance(REAL[name]) else "right"


def _measured(check: Mapping[str, Any]) -> str:
    if "passed" not in check:
        return next((f"{k}" for k in ("refused", "skipped") if k in check), "**failed**")
    words = ["right" if check["passed"] else f"**wrong, {check['error']:.0e}**"]
    words += [f"{check['ms']:.3g} ms"] if "ms" in check else []
    words += [f"{check[key]:.0%} of {what}" for key, what in _SHARES.items() if key in check]
    words += [f"best peer {min(check['peers_ms'].values()):.3g} ms"] if check.get("peers_ms") else []
    return ", ".join(words)


_SHARES = {"share_of_copy": "copy bandwidth", "share_of_matmul": "matrix rate"}


def table(facts: Facts, measured: Measured) -> Iterator[str]:
    """Markdown lines: a row for each case with the proofs of each implementation. Bold is wrong."""
    heads = []
    for implementation, topologies in TOPOLOGIES.items():
        proofs = [*(["compiled"] if topologies else []), _ON_CPU[implementation in PLAIN], "measured"]
        heads += [f"`{implementation}` {proof}" for proof in proofs]
    yield f"| case | {' | '.join(heads)} |"
    yield "|---" * (len(heads) + 1) + "|"
    reasons: list[str] = []
    for name in REAL:
        cells = []
        for implementation, topologies in TOPOLOGIES.items():
            own = facts.get(name, {}).get(implementation, {})
            compiled = [f for f in own if f.startswith("compiled")]
            if topologies:
                cells.append("<br>".join(_compiled(f, own[f], reasons) for f in sorted(compiled)) or "unproven")
            cells.append(_interpreted(name, own.get("interpreted"), reasons))
            refused = any("refused" in own[f] for f in own)
            on_devices = [
                f"{device}: {_measured(check)}" for device, check in measured.get((name, implementation), {}).items()
            ]
            cells.append("<br>".join(on_devices) or ("-" if refused else "unproven"))
        yield f"| {name} | {' | '.join(cells)} |"
    if reasons:
        yield ""
        yield "Refused: " + " ".join(f"({i}) {reason}." for i, reason in enumerate(reasons, 1))


def _compiled(fact: str, found: Mapping[str, Any], reasons: list[str]) -> str:
    where = fact.partition(" ")[2]
    if "seconds" not in found or "failure" in found or "refused" in found:
        return f"{where}: {_not_run(found, reasons)}"
    words = [f"{where}: {found['seconds']:.0f} s"]
    for kernel in found.get("kernels", ()):
        spilled = kernel.get("spill_bytes", 0)
        words.append(
            f"{kernel.get('registers', '?')} registers x {kernel.get('threads', '?')}, "
            f"{kernel.get('shared_bytes', 0) / 1024:.0f} KiB"
            + (f", **{spilled} B spilled**" if spilled else "")
            + (", **wgmma serialized**" if kernel.get("serialized") else "")
        )
    return "; ".join(words)


def _interpreted(name: str, found: Mapping[str, Any] | None, reasons: list[str]) -> str:
    if found is None:
        return "unproven"
    if "error" not in found:
        return _not_run(found, reasons)
    right = found["error"] <= tolerance(REAL[name]) and not found["races"]
    text = f"{found['error']:.1e}" + (", race" if found["races"] else "")
    return text if right else f"**{text}**"


def _not_run(found: Mapping[str, Any], reasons: list[str]) -> str:
    if "refused" not in found:
        return "**failed**"
    if found["refused"] not in reasons:
        reasons.append(found["refused"])
    return f"refused ({reasons.index(found['refused']) + 1})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="ahead of time, for devices that are not here")
    parser.add_argument("--interpret", action="store_true", help="short forms, with race detection, on this CPU")
    parser.add_argument("--only", default="", help="regular expression on 'case implementation'")
    parser.add_argument("--implementations", nargs="+", choices=tuple(TOPOLOGIES), default=tuple(TOPOLOGIES))
    parser.add_argument("--cases", action="store_true", help="print what is known of each case")
    parser.add_argument("--missing", action="store_true", help="ask only for what failed or was not tried yet")
    parser.add_argument("--processes", type=int, default=2, help="each takes up to 2 GB")
    parser.add_argument("--budget-s", type=float, default=3600)
    parser.add_argument("--facts", type=Path, default=ROOT / "benchmarks/kernels.json")
    parser.add_argument("--page", type=Path, default=ROOT / "docs/kernels.md")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(handle)
        return
    facts: Facts = json.loads(args.facts.read_text())["results"] if args.facts.exists() else {}
    facts = {name: facts[name] for name in REAL if name in facts}
    heed_termination()
    if tasks := plan(args, facts):
        ask(tasks, facts, args.facts, args)
    measured = measurements(args.facts.parent)
    write_between(args.page, BEGIN, END, summary(facts, measured))
    if args.cases:
        print("\n".join(table(facts, measured)))


if __name__ == "__main__":
    main()
