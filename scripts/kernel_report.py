"""What is known of each case and kernel body: compiled for which device, interpreted with which error, measured where.

    python scripts/kernel_report.py --compile --interpret [--only llama3]     asks again, and writes both files
    python scripts/kernel_report.py                                           writes the table from what is known

Owns benchmarks/kernels.json (facts) and the table in docs/kernels.md between its two markers. Takes measurements from
benchmarks/gpu_check_*.json. Refuses to claim: what has no record is 'unproven'.

Why facts are kept one by one, with the commit: asking for all of them takes hours on two cores.
"""

import argparse
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
from kernel_runs import commit, find_case, tolerance, worker_environment, write_results

from jaxserve.kernels.cases import REAL

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- kernel table: made by scripts/kernel_report.py -->", "<!-- end of kernel table -->"
TOPOLOGIES = {"mosaic_tpu": ("v5e:2x2", "v6e:2x2"), "mosaic_gpu": ("h200:1",), "xla": ()}
LIMITS_S = {"start": 120, "task": 30, "compile": 400, "host": 900}
# JAX's CPU client has a thread a device, and the GPU interpreter waits for ever with fewer than its kernels have.
_HOST_DEVICES = "--xla_force_host_platform_device_count=8"

Facts = dict[str, dict[str, dict[str, Any]]]  # case, body, 'compiled v5e' or 'interpreted' -> what was found


def plan(args: argparse.Namespace, facts: Facts) -> list[Task]:
    """One task for each program: cases that differ only in name share it. With `args.missing`, what is not known."""
    tasks: dict[str, Task] = {}
    for name, case in REAL.items():
        for body in args.bodies:
            if not re.search(args.only, f"{name} {body}"):
                continue
            short = find_case(f"{name}/small")
            wanted = [("interpreted", short, "")] if args.interpret else []
            wanted += [(f"compiled {t.partition(':')[0]}", case, t) for t in TOPOLOGIES[body]] if args.compile else []
            known = facts.get(name, {}).get(body, {})
            for fact, asked, topology in wanted:
                if args.missing and "failure" not in known.get(fact, {"failure": "not tried"}):
                    continue
                key = f"{fact} {body} {dataclasses.replace(asked, name='')}"
                task = {"id": key, "fact": fact, "case": asked.name, "body": body, "topology": topology, "of": []}
                tasks.setdefault(key, task)["of"].append(name)
    return list(tasks.values())


def handle(task: Task, channel: Channel) -> Result:
    case = find_case(task["case"])
    if task["topology"]:
        channel.stage("compile")
        return compile_for(case, task["body"], task["topology"])
    channel.stage("host")
    return interpret(case, task["body"])


def ask(tasks: Sequence[Task], facts: Facts, path: Path, args: argparse.Namespace) -> None:
    """Works off the tasks and keeps each fact as it comes."""
    start, done, at = time.monotonic(), 0, commit()

    def keep(task: Task, result: Result) -> list[Task]:
        nonlocal done
        done += 1
        result = {k: v for k, v in result.items() if k not in ("parts", "crashed", "stage")} | {"commit": at}
        for name in task["of"]:
            facts.setdefault(name, {}).setdefault(task["body"], {})[task["fact"]] = result
        write_results(path, facts)
        said = {k: v for k, v in result.items() if k not in ("commit", "kernels")}
        waited = time.monotonic() - start
        print(f"[{waited:5.0f} s] {done}/{len(tasks)} {task['case']} {task['body']} {task['fact']}: {said}", flush=True)
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


# --- the table -------------------------------------------------------------------------------------------------------


def measurements(folder: Path) -> dict[tuple[str, str], str]:
    """(case, body) to a cell: what the newest record of each device says."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(folder.glob("gpu_check_*.json")):
        record = json.loads(path.read_text())
        device = (record["about"].get("device") or {}).get("kind", "unknown device")
        for check in record["results"]["checks"]:
            if not check["case"].endswith("/small"):
                found.setdefault((check["case"], check["body"]), []).append(f"{device}: {_measured(check)}")
    return {key: "<br>".join(cells) for key, cells in found.items()}


def _measured(check: Mapping[str, Any]) -> str:
    if "passed" not in check:
        return next((f"{k}" for k in ("refused", "skipped") if k in check), "**failed**")
    words = ["right" if check["passed"] else f"**wrong, {check['error']:.0e}**"]
    words += [f"{check['ms']:.3g} ms"] if "ms" in check else []
    words += [f"{check[key]:.0%} of {what}" for key, what in _SHARES.items() if key in check]
    words += [f"best peer {min(check['peers_ms'].values()):.3g} ms"] if check.get("peers_ms") else []
    return ", ".join(words)


_SHARES = {"share_of_copy": "copy bandwidth", "share_of_matmul": "matrix rate"}


def table(facts: Facts, measured: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Markdown lines: a row for each case, for each body what was compiled, interpreted and measured."""
    bodies = ("mosaic_tpu", "mosaic_gpu", "xla")
    heads = [f"`{b}` {what}" for b in bodies[:2] for what in ("compiled", "interpreted", "measured")]
    heads += ["`xla` run on a CPU", "`xla` measured"]
    yield f"| case | {' | '.join(heads)} |"
    yield "|---" * (len(heads) + 1) + "|"
    reasons: list[str] = []
    for name in REAL:
        cells = []
        for body in bodies:
            own = facts.get(name, {}).get(body, {})
            compiled = [f for f in own if f.startswith("compiled")]
            if body != "xla":
                cells.append("<br>".join(_compiled(f, own[f], reasons) for f in sorted(compiled)) or "unproven")
            cells.append(_interpreted(name, own.get("interpreted"), reasons))
            refused = any("refused" in own[f] for f in own)
            cells.append(measured.get((name, body), "-" if refused else "unproven"))
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
            f"{kernel.get('shared_bytes', 0) / 1024:.0f} KiB" + (f", **{spilled} B spilled**" if spilled else "")
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


def write_table(page: Path, lines: Sequence[str]) -> None:
    """Replaces what lies between the markers."""
    before, begin, rest = page.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{page} lacks a marker of the kernel table"
    page.write_text("\n".join([before + BEGIN, *lines, END + after]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compile", action="store_true", help="ahead of time, for devices that are not here")
    parser.add_argument("--interpret", action="store_true", help="short forms, with race detection, on this CPU")
    parser.add_argument("--only", default="", help="regular expression on 'case body'")
    parser.add_argument("--bodies", nargs="+", choices=tuple(TOPOLOGIES), default=tuple(TOPOLOGIES))
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
    write_table(args.page, list(table(facts, measurements(args.facts.parent))))


if __name__ == "__main__":
    main()
