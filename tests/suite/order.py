"""Files that failed lately run first, then those of quick tests, then the others from the longest test to the shortest.

So a fault is met early, and the last tests of a run are short enough for two workers to end together. The seconds are
those of `benchmarks/test_costs.json`, which `scripts/test_costs.py` writes; failures are those of earlier runs on this
machine. Tests of a file stay together, since they share fixtures.
"""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from suite.kept import kept_folder

RECORD = Path(__file__).parents[2] / "benchmarks" / "test_costs.json"
_QUICK_S = 0.2  # of a test, on average over its file
_REMEMBERED = 20  # failures of a file that passes one run in twenty of them are forgotten


def _failures() -> dict[str, int]:
    """By file: what earlier runs on this machine saw fail, the newest counting most."""
    folder = kept_folder()
    try:
        return json.loads((folder / "failures.json").read_text()) if folder else {}
    except (OSError, ValueError):  # none yet, or two runs wrote at once
        return {}


class Order:
    """Sorts in each process alike: workers have what the controller read."""

    def __init__(self, failures: dict[str, int]) -> None:
        self._failures = failures
        self._failed: Counter[str] = Counter()
        self._ran: set[str] = set()

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["failures"] = self._failures

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """After tests were chosen. Each worker begins with a share of the list of its own, so each share is sorted."""
        files: dict[str, list[pytest.Item]] = {}
        for item in items:
            files.setdefault(item.nodeid.partition("::")[0], []).append(item)
        seconds = json.loads(RECORD.read_text())["files"] if RECORD.exists() else {}

        def rank(file: str) -> tuple[int, float, str]:
            cost = seconds.get(file)
            if self._failures.get(file):
                return (0, -self._failures[file], file)
            if cost is None:
                return (2, 0.0, file)  # nobody knows how long it takes
            if cost["seconds"] < _QUICK_S * cost["tests"]:
                return (1, cost["seconds"] / cost["tests"], file)
            return (3, -cost["longest_s"], file)

        shares: list[list[pytest.Item]] = [[] for _ in range(int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))]
        for file in sorted(files, key=rank):
            min(shares, key=len).extend(files[file])
        items[:] = [item for share in shares for item in share]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._ran.add(file)
        self._failed[file] += report.failed

    def pytest_sessionfinish(self) -> None:
        folder = kept_folder()
        if "PYTEST_XDIST_WORKER" in os.environ or folder is None or not self._ran:
            return
        counts = {
            file: _REMEMBERED if self._failed[file] else self._failures.get(file, 0) - (file in self._ran)
            for file in {*self._failures, *self._failed}
        }
        part = folder / f"failures.{os.getpid()}"
        part.write_text(json.dumps({file: count for file, count in sorted(counts.items()) if count > 0}, indent=1))
        part.replace(folder / "failures.json")


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", None)
    config.pluginmanager.register(Order(_failures() if given is None else given["failures"]), "order")
