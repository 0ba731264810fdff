"""`bench startup`: how long it takes until the first token, cold and warm.

Each start has a process of its own, since a process keeps what it has loaded. Cold is with an empty cache of
executables, warm with the one that a start before has filled. The operating system's cache of files is beyond control,
and warm in both after the first start.
"""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.lab.bench.about import about_machine
from jaxserve.lab.bench.report import OfflineReport
from jaxserve.lab.workloads.metrics import Spread, spread_ms

# `build` holds the five before it. Weights are read while executables are made, so those two overlap.
PHASES = ("import", "config", "tokenizer", "plan", "weights", "executables", "build", "first_token")
_PERCENTILES = (50, 90)
_MARK = "JAXSERVE_STARTUP "


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartupOptions:
    """The model to start, and how often. `overrides` as for --set."""

    config: Path | None
    overrides: Sequence[str]
    cold: int
    warm: int
    timeout_s: float


def bench_startup(options: StartupOptions, say: Callable[[str], None]) -> OfflineReport:
    """Starts the model repeatedly. Raises ConfigError with the last lines of a start that failed or took too long."""
    if options.cold < 0 or options.warm < 0 or options.cold + options.warm < 1:
        raise ConfigError(f"at least one start, got --cold {options.cold} --warm {options.warm}")
    cold, warm = [], []
    with tempfile.TemporaryDirectory(prefix="jaxserve-startup-") as directory:
        for number in range(options.cold):
            say(f"cold start {number + 1} of {options.cold}")
            cold.append(_start(options, Path(directory) / f"cold-{number}"))
        cache = Path(directory) / ("cold-0" if options.cold else "warm")
        if options.warm and not options.cold:
            say("filling the cache of executables")
            _start(options, cache)
        for number in range(options.warm):
            say(f"warm start {number + 1} of {options.warm}")
            warm.append(_start(options, cache))
    starts = {"cold": cold, "warm": warm}
    device = (cold or warm)[0]["device"]
    spreads = {
        f"{kind} {phase} (ms)": _spread([start["seconds"][phase] for start in found])
        for kind, found in starts.items()
        if found
        for phase in (*PHASES, "total")
    }
    return OfflineReport(
        title="from the start of the process to the first token",
        about=about_machine() | {"device": device},
        load={"config": options.config, "set": list(options.overrides), "cold": options.cold, "warm": options.warm},
        figures={
            f"avg_{kind}_startup_s": sum(start["seconds"]["total"] for start in found) / len(found)
            for kind, found in starts.items()
            if found
        },
        spreads=spreads,
    )


def _spread(seconds: Sequence[float]) -> Spread:
    return spread_ms(seconds, _PERCENTILES)


def _start(options: StartupOptions, cache: Path) -> dict[str, Any]:
    """One process; `total` is measured from outside, until the first token is reported."""
    overrides = [*options.overrides, f"runtime.compile_cache={json.dumps(str(cache))}"]
    job = {"config": None if options.config is None else str(options.config), "overrides": overrides}
    command = [sys.executable, "-m", "jaxserve.lab.bench.startup", json.dumps(job)]
    start_s = time.time()  # the clock that two processes share on every system
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, complaints = process.communicate(timeout=options.timeout_s)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"a start took more than {options.timeout_s:g} s; --timeout allows more") from error
    finally:
        process.kill()
        process.wait()
    found = [line.removeprefix(_MARK) for line in output.splitlines() if line.startswith(_MARK)]
    if process.returncode != 0 or not found:
        last = " / ".join(complaints.strip().splitlines()[-3:])
        raise ConfigError(f"a start failed with exit code {process.returncode}: {last}")
    result = json.loads(found[0])
    result["seconds"]["total"] = result["end_s"] - start_s
    return result


def start_once(job: dict[str, Any]) -> int:
    """The body of the process that is measured: import, build, one token. Reports on stdout."""
    begin_s = time.perf_counter()
    from jaxserve.api import SamplingParams
    from jaxserve.lab.bench.about import about_device
    from jaxserve.offline.llm import LLM

    imported_s = time.perf_counter()
    llm = LLM.from_config(job["config"], job["overrides"])
    built_s = time.perf_counter()
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), use_tqdm=False)
    answered_s, end_s = time.perf_counter(), time.time()
    seconds = {"import": imported_s - begin_s, "build": built_s - imported_s, "first_token": answered_s - built_s}
    parts = dict(llm.start_seconds)
    seconds |= {"config": seconds["build"] - parts.pop("assemble"), **parts}
    print(_MARK + json.dumps({"seconds": seconds, "end_s": end_s, "device": about_device()}), flush=True)
    llm.wait_until_built()  # the next start shall find all of them
    return 0


if __name__ == "__main__":
    sys.exit(start_once(json.loads(sys.argv[1])))
