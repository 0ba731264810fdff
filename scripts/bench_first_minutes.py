"""The first minutes of an engine: tokens a second while step shapes are still to be built, and how long the end takes.

    python scripts/bench_first_minutes.py --json benchmarks/first_minutes_cpu.json

Each round is a process that finds no executables. It answers requests of `--streams` prompts, one after the other,
until all shapes are there, and then for `--after` seconds more: the rate of those is the one to compare with. Another
process ends after its first answer, while shapes are still to be built. A round that does not count keeps the kernels.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record import write_record

_TOKENS = 64
_PROMPT = "Once upon a time"


def main() -> int:
    args = _parse()
    if args.inside is not None:
        return _answer(args)
    rounds: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="jaxserve-first-minutes-") as cache:
        _run(args, cache, "--first-only")
        for _ in range(args.rounds):
            shutil.rmtree(Path(cache) / "executables")
            ended = _run(args, cache, "--first-only")
            shutil.rmtree(Path(cache) / "executables")
            rounds.append({**_run(args, cache), "end_s": ended["end_s"]})
            print(json.dumps(rounds[-1]), flush=True)
    results = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    print(json.dumps(results, indent=1))
    if args.json is not None:
        write_record(args.json, {"medians": results, "rounds": rounds}, model=args.model, streams=args.streams)
    return 0


def _run(args: argparse.Namespace, cache: str, *more: str) -> dict[str, float]:
    """One process: what it measured, and the seconds from its last word to its end."""
    command = [sys.executable, __file__, "--inside", cache, "--model", args.model, "--streams", str(args.streams)]
    command += ["--after", str(args.after), "--most", str(args.most), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        said_s = time.monotonic()
        process.wait()
    if process.returncode:
        raise SystemExit(f"error: the process ended with status {process.returncode}")
    return {**found, "end_s": time.monotonic() - said_s}


def _answer(args: argparse.Namespace) -> int:
    from jaxserve import LLM, SamplingParams

    begin_s = time.monotonic()
    llm = LLM.from_config(None, [f"model.path={args.model}", f"runtime.compile_cache={args.inside}"])
    prompts = [_PROMPT] * args.streams
    sampling = SamplingParams(max_tokens=_TOKENS, temperature=0.0, ignore_eos=True)

    def rate() -> float:
        start_s = time.monotonic()
        llm.generate(prompts, sampling)
        return args.streams * _TOKENS / (time.monotonic() - start_s)

    before, after = [rate()], list[float]()
    answered_s = time.monotonic()
    found = {"first_answer_s": answered_s - begin_s}
    if not args.first_only:
        built = threading.Event()
        threading.Thread(target=lambda: (llm.wait_until_built(), built.set()), daemon=True).start()
        while not built.is_set() and time.monotonic() < answered_s + args.most:
            before.append(rate())
        found["built_s"] = time.monotonic() - answered_s
        llm.wait_until_built()
        end_s = time.monotonic() + args.after
        while time.monotonic() < end_s:
            after.append(rate())
        found |= {"first": before[0], "before": statistics.median(before), "after": statistics.median(after)}
        found |= {"share_first": found["first"] / found["after"], "share": found["before"] / found["after"]}
    print(json.dumps(found), flush=True)
    return 0


def _parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="as model.path")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--after", type=float, default=10.0, help="seconds of requests once all shapes are there")
    parser.add_argument("--most", type=float, default=300.0, help="seconds of requests before; then it only waits")
    parser.add_argument("--json", type=Path, help="file of the record")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--first-only", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
