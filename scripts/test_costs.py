"""Where the time of the tests goes: tables of what `pytest --costs FILE` recorded, and the record of benchmarks/.

    JAXSERVE_TEST_CACHE=off make test-all TESTS=--costs=costs.jsonl
    python scripts/test_costs.py costs.jsonl [--top 30] [--write benchmarks/test_costs.json]

Seconds of JAX are those of tracing, lowering and compiling; several threads compile at once, so that they may exceed
the seconds of a test. `own` and `child` are seconds of processors: of the worker, and of processes that it waited for.
"""

import argparse
import json
import platform
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

_COUNTS = ("trace_s", "lower_s", "compile_s", "compiles", "numba_s", "processes", "own_cpu_s", "children_cpu_s")


def read(path: Path) -> tuple[dict[str, dict[str, Any]], Counter[str]]:
    """Sums by test, and seconds by fixture."""
    tests: dict[str, dict[str, Any]] = defaultdict(lambda: {"seconds": 0.0, "slow": False})
    fixtures: Counter[str] = Counter()
    for line in path.read_text().splitlines():
        phase = json.loads(line)
        test = tests[phase["test"]]
        test["seconds"] += phase["seconds"]
        if phase["phase"] == "teardown":
            test.update({name: phase.get(name) or 0 for name in _COUNTS}, slow=bool(phase["slow"]))
            fixtures.update(phase.get("fixtures") or {})
    return dict(tests), fixtures


def summed(tests: dict[str, dict[str, Any]], key: Any) -> dict[str, dict[str, float]]:
    """By `key` of a test's id: number of tests, seconds, the longest one's, and the counts."""
    sums: dict[str, dict[str, float]] = {}
    for name, test in tests.items():
        row = sums.setdefault(key(name, test), dict.fromkeys(("tests", "seconds", "longest_s", *_COUNTS), 0.0))
        row["tests"] += 1
        row["seconds"] += test["seconds"]
        row["longest_s"] = max(row["longest_s"], test["seconds"])
        for count in _COUNTS:
            row[count] += test.get(count, 0)
    return dict(sorted(sums.items(), key=lambda item: -item[1]["seconds"]))


def _folder(name: str, _: object) -> str:
    parts = name.partition("::")[0].split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else "tests"


def _print(title: str, rows: dict[str, dict[str, float]], top: int) -> None:
    print(
        f"\n{title:<56}{'tests':>6}{'s':>8}{'trace':>7}{'lower':>7}{'compile':>8}{'numba':>7}{'starts':>7}{'own':>7}{'child':>7}"
    )
    for name, row in [*rows.items()][:top]:
        print(
            f"{name[-56:]:<56}{row['tests']:6.0f}{row['seconds']:8.1f}{row['trace_s']:7.1f}{row['lower_s']:7.1f}"
            f"{row['compile_s']:8.1f}{row['numba_s']:7.1f}{row['processes']:7.0f}{row['own_cpu_s']:7.0f}"
            f"{row['children_cpu_s']:7.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("costs", type=Path)
    parser.add_argument("--top", type=int, default=30)
    parser.add_argument("--write", type=Path, help="the record by file, by which tests are ordered")
    options = parser.parse_args()
    tests, fixtures = read(options.costs)
    by_file = summed(tests, lambda name, _: name.partition("::")[0])
    _print("all", summed(tests, lambda _, test: "slow" if test["slow"] else "quick"), 2)
    _print("folder", summed(tests, _folder), options.top)
    _print("file", by_file, options.top)
    _print("test", summed(tests, lambda name, _: name), options.top)
    print(f"\n{'fixture':<90}{'s':>8}")
    for name, seconds in fixtures.most_common(options.top):
        print(f"{name[-90:]:<90}{seconds:8.1f}")
    if options.write:
        rows = {file: {name: round(value, 2) for name, value in row.items()} for file, row in sorted(by_file.items())}
        record = {"machine": platform.processor() or platform.machine(), "python": platform.python_version()}
        options.write.write_text(json.dumps({**record, "files": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
