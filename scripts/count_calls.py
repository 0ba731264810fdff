"""What the loop does for a step, counted in calls: this checkout beside another one, with nothing configured.

    git worktree add --detach ../before COMMIT
    python scripts/count_calls.py --beside ../before --json benchmarks/calls.json

A step of rows that decode, on a device that computes nothing, is profiled with `sys.setprofile`: every call of a
function, of Python or of C, is counted by name. Counts do not depend on the machine or its load, so a difference of
one call a step is seen. The functions of which there are more or fewer calls than in the other checkout are listed.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
ROWS, WARM, STEPS = 8, 50, 200
_LEAST = 0.01  # calls a step that are worth a line


def main() -> int:
    args = _parse()
    if args.count:
        print(json.dumps(count()))
        return 0
    from record import write_record

    here, beside = _run(ROOT), _run(args.beside)
    table = Table("", "this checkout", "the other", "difference")
    for name in ("calls_of_python", "calls_of_c", "start_calls"):
        new, old = here[name], beside[name]
        table.add_row(name, f"{new:.2f}", f"{old:.2f}", f"{new - old:+.2f} ({new / old - 1:+.1%})")
    Console(width=120).print(table)
    calls, others = here.pop("calls"), beside.pop("calls")
    changed = {name: calls.get(name, 0.0) - others.get(name, 0.0) for name in {*calls, *others}}
    listed = sorted(((more, name) for name, more in changed.items() if abs(more) >= _LEAST), reverse=True)
    for more, name in listed:
        print(f"{more:+8.2f}  {name}")
    if args.json:
        results = [{"checkout": "this", **here}, {"checkout": "other", **beside}]
        write_record(args.json, results, rows=ROWS, steps=STEPS, changed={name: round(m, 3) for m, name in listed})
    return 0


def _run(root: Path) -> dict:
    """`count` of a checkout, in a process that imports it."""
    environment = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__).resolve()), "--count"]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{root}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def count() -> dict:
    """Calls of a step, and those of a start, in the checkout that is imported."""
    from jaxserve.engine import Engine, ModelInfo
    from jaxserve.sched import create_scheduler
    from jaxserve.testing import FakeRunner, make_limits, make_request

    limits = make_limits(max_rows=ROWS, num_pages=4096, page_size=16, max_model_len=8192, token_buckets=(16, 64))
    profile = _Profile()

    def make() -> Engine:
        model = ModelInfo(name="m", vocab_size=128, max_model_len=8192, eos_token_ids=())
        runner = FakeRunner(limits, vocab_size=128)
        return Engine(runner=runner, scheduler=create_scheduler("fcfs", limits), tokenizer=None, model=model)

    make()  # what is done once in a process, such as imports
    profile.begin()
    engine = make()
    start = profile.end()
    for row in range(ROWS):
        engine.submit(make_request(f"r{row}", [row + 1] * 8, 8000), lambda update: None)
    for _ in range(WARM):
        engine.step()
    profile.begin()
    for _ in range(STEPS):
        engine.step()
    calls = profile.end()
    return {
        "calls_of_python": sum(n for name, n in calls.items() if ":" in name) / STEPS,
        "calls_of_c": sum(n for name, n in calls.items() if ":" not in name) / STEPS,
        "start_calls": sum(start.values()),
        "calls": {name: n / STEPS for name, n in calls.items()},
    }


class _Profile:
    """Calls by name: file:function of Python, the name alone of C."""

    def __init__(self) -> None:
        self._calls: collections.Counter[str] = collections.Counter()

    def begin(self) -> None:
        self._calls.clear()
        sys.setprofile(self._note)

    def end(self) -> dict[str, int]:
        sys.setprofile(None)
        return dict(self._calls)

    def _note(self, frame, event: str, argument) -> None:
        if event == "call":
            code = frame.f_code
            path = code.co_filename.rpartition("jaxserve/")[2]
            self._calls[f"{path}:{code.co_qualname}"] += 1
        elif event == "c_call":
            self._calls[getattr(argument, "__qualname__", repr(argument))] += 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside", type=Path, help="root of another checkout")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--count", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.count and args.beside is None:
        parser.error("--beside is missing: the root of another checkout")
    return args


if __name__ == "__main__":
    sys.exit(main())
