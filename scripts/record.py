"""How a benchmark writes down what it measured: results with the machine, versions and commit they belong to."""

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path


def write_record(path: Path, results: object, **about: object) -> None:
    """Writes {"about": machine, versions, commit and what the caller adds, "results": results} as JSON."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    dirty = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=False).stdout
    machine = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "commit": commit + (" with changes" if dirty else ""),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": machine | about, "results": results}, indent=1) + "\n")


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
