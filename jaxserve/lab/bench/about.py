"""Facts that a result is kept with: command, machine, versions, commit. An unknown fact is None."""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jaxserve

_PACKAGE = Path(jaxserve.__file__).parent
_GIT_S = 10.0


def about_machine() -> dict[str, Any]:
    """The facts of the process that measures."""
    return {
        "command": shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "platform": platform.platform(),
        "versions": {
            "python": platform.python_version(),
            "jaxserve": jaxserve.__version__,
            **{name: _version(name) for name in ("jax", "jaxlib", "numpy", "aiohttp", "uvloop", "grpcio")},
        },
        "commit": _commit(),
    }


def about_device() -> dict[str, Any]:
    """The devices of JAX in this process."""
    import jax  # only where a model runs in this process

    devices = jax.devices()
    return {"kind": devices[0].device_kind, "platform": devices[0].platform, "count": len(devices)}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the checkout that has this package; None for an installed package, even inside a repository."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "-uno")
    return f"{commit} with changes" if commit and changes else commit


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(_PACKAGE), *arguments], capture_output=True, text=True, check=False, timeout=_GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
