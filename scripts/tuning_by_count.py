"""The tuner's second way: block sizes of the TPU kernels by count, for chips that are not here.

`tune_kernels` has the command and the candidates. A process for each chip counts, since libtpu reads its arguments
once; each entry is written as soon as all its candidates are counted, and one that is in the table is passed over, so
that a run that was stopped goes on where it was.
"""

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_runs import versions, write_json

from jaxserve.kernels.tuning import TunedTable, file_name
from jaxserve.values.chips import parse_topology

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "v7x": "v7x:2x2x1"}
BEATEN = 0.02  # how much shorter than the heuristic's a counted time must be to replace its sizes


def run(
    tasks: Sequence[Mapping[str, Any]], chips: Sequence[str], folder: Path, at: str, *, again: bool, dry_run: bool
) -> None:
    """Counts the candidates of every task on every chip. `at`: the commit of the kernels."""
    for chip in chips:
        kind = parse_topology(CHIPS[chip]).chip.kind
        path = folder / file_name(kind)
        known = json.loads(path.read_text()).get("counted", {}) if path.exists() else {}
        left = [task for task in tasks if again or task["id"] not in known]
        if dry_run:
            print("\n".join(f"{chip} {task['id']}: {len(task['candidates'])} candidates" for task in left))
            continue
        command = [sys.executable, str(Path(__file__).with_name("tune_kernels.py")), "--count-worker", chip]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdin is not None and worker.stdout is not None
            for task in left:
                worker.stdin.write(json.dumps(task) + "\n")
                worker.stdin.flush()
                found = json.loads(_answer(worker.stdout, chip, task["id"]))
                about = chosen(found) | {"commit": at, "compiler": f"libtpu {importlib.metadata.version('libtpu')}"}
                keep(path, kind, task["id"], about)
                print(f"{chip} {task['id']}: {about}", flush=True)
            worker.stdin.close()


def _answer(lines: Any, chip: str, entry: str) -> str:
    """The next line of JSON; a compiler prints lines of its own."""
    for line in lines:
        if line.startswith("["):
            return line
    raise SystemExit(f"the process for {chip} ended at {entry}")


def chosen(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the table says of an entry. `found`: (blocks, us) of each candidate, that of the heuristic first.

    The blocks are None where the heuristic's were not beaten clearly; us is None for sizes that cannot be counted.
    """
    right = [part for part in found if part["us"] is not None]
    default_us = found[0]["us"]
    best = min(right, key=lambda part: part["us"], default=None)
    beats = best is not None and (default_us is None or best["us"] < default_us * (1 - BEATEN))
    return {
        "blocks": best["blocks"] if best is not None and beats else None,
        "us": best["us"] if best is not None else None,
        "default_us": default_us,
        "tried": len(found),
        "right": len(right),
    }


def keep(path: Path, kind: str, entry: str, about: Mapping[str, Any]) -> None:
    """Writes one counted entry into a table; measured ones stay as they are."""
    table = {"device_kind": kind, "commit": "", "versions": versions(), "entries": {}, "measured": {}, "counted": {}}
    table |= json.loads(path.read_text()) if path.exists() else {}
    table["counted"] = {**table["counted"], entry: dict(about)}
    write_json(path, table)


def serve(chip: str) -> None:
    """Answers each task on stdin with a line: [{"blocks", "us"} of each candidate]."""
    from tune_kernels import case_of

    # Here, since a machine with an accelerator, which measures, lacks the packages that the config needs.
    from jaxserve.lab.ledger import print_schedules

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "dump"
        print_schedules(folder)
        for line in sys.stdin:
            task = json.loads(line)
            print(json.dumps(list(_count(task, case_of(task), chip, folder))), flush=True)


def _count(task: Mapping[str, Any], case: Any, chip: str, folder: Path) -> Iterator[dict[str, Any]]:
    from jaxserve.lab.ledger import UnknownSchedule, count_attention

    kernel = f"paged_attention_{task['variant']}"
    for blocks in task["candidates"]:
        kind = parse_topology(CHIPS[chip]).chip.kind
        table = TunedTable(device_kind=kind, entries={task["id"]: blocks})
        try:
            times = dict(count_attention(case, CHIPS[chip], folder, table=table))
            us = round(times[kernel].seconds * 1e6, 2)
        except (UnknownSchedule, ValueError, RuntimeError) as error:  # the compiler's: too much VMEM, for one
            print(f"{chip} {task['id']} {blocks}: {error}"[:300], file=sys.stderr)
            us = None
        yield {"blocks": blocks, "us": us}
