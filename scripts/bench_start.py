"""What a start costs: this checkout beside another one, in turns, with nothing configured.

    git worktree add --detach ../before COMMIT
    python scripts/bench_start.py --beside ../before --json benchmarks/start_cpu.json

`python -m jaxserve.run` serves the demo model on a free port. From its command to the line that says so: seconds, and
seconds of CPU, which another program on the machine changes less. Then, at rest: threads, and ports that are listened
on. Measured with gRPC alone and with HTTP beside it. The first start of each checkout fills its compile cache and that
of Python's bytecode, which an installed program has, whatever the environment says; it does not count.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
from record import write_record

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = {"runtime.token_buckets": [64], "runtime.row_buckets": [8], "sched.max_rows": 8, "cache.num_pages": 256}
DOORS = {"gRPC": {"serve.grpc.port": 0}, "gRPC and HTTP": {"serve.grpc.port": 0, "serve.http.port": 0}}
_REST_S = 0.5  # after which no thread of the start is left


class Start(NamedTuple):
    """One start of a server."""

    wall_s: float
    cpu_s: float
    threads: int
    ports: int


def main() -> int:
    args = _parse()
    trees = {"this": ROOT, "beside": args.beside.resolve()}
    starts: dict[str, dict[str, list[Start]]] = {doors: {name: [] for name in trees} for doors in DOORS}
    with tempfile.TemporaryDirectory(prefix="jaxserve-start-") as cache:
        for number in range(args.warm + 1):
            for doors, ports in DOORS.items():
                for name, tree in trees.items():
                    found = start(tree, Path(cache) / name, {**SETTINGS, **ports})
                    print(f"{doors}, {name}: {found}", flush=True)
                    if number:
                        starts[doors][name].append(found)
    results = {doors: {name: summary(one) for name, one in found.items()} for doors, found in starts.items()}
    print(json.dumps(results, indent=1))
    if args.json is not None:
        write_record(args.json, results, beside=commit_of(trees["beside"]), starts=args.warm, settings=SETTINGS)
    return 0


def start(tree: Path, cache: Path, settings: Mapping[str, object]) -> Start:
    """Starts a server of a checkout, and ends it."""
    command = [sys.executable, "-m", "jaxserve.run"]
    for name, value in settings.items():
        command += ["--set", f"{name}={json.dumps(value)}"]
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPATH": str(tree),
        "PYTHONPYCACHEPREFIX": str(cache / "bytecode"),
        "JAXSERVE_COMPILE_CACHE": str(cache / "compiled"),
    }
    begin_s = time.monotonic()
    process = subprocess.Popen(
        command, cwd=tree, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("serving "):
                break
        else:
            raise SystemExit(f"the server of {tree} ends with {process.wait()} before it serves")
        wall_s, seen = time.monotonic() - begin_s, psutil.Process(process.pid)
        times = seen.cpu_times()
        time.sleep(_REST_S)
        ports = sum(one.status == psutil.CONN_LISTEN for one in seen.net_connections())
        return Start(wall_s, times.user + times.system, seen.num_threads(), ports)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def summary(starts: list[Start]) -> dict[str, float | list[float]]:
    """Medians, and every time."""
    return {
        "wall_median_s": statistics.median(one.wall_s for one in starts),
        "cpu_median_s": statistics.median(one.cpu_s for one in starts),
        "threads": statistics.median(one.threads for one in starts),
        "ports": statistics.median(one.ports for one in starts),
        "wall_s": [round(one.wall_s, 3) for one in starts],
        "cpu_s": [round(one.cpu_s, 3) for one in starts],
    }


def commit_of(tree: Path) -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=tree, capture_output=True, text=True, check=True
    ).stdout.strip()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=Path, required=True, help="Another checkout of this repository.")
    parser.add_argument("--warm", type=int, default=7, help="Starts of each that count.")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
