"""`--resume`: a run of long tests says how far it is, and the next one goes on with those that have not passed.

Tests that passed are remembered for as long as the source is the same: the package, the tests, scripts and configs.
"""

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SOURCES = ("jaxserve", "tests", "scripts", "configs")


def source_digest() -> str:
    digest = hashlib.sha256()
    for folder in _SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in {".py", ".json", ".yaml", ".txt"} and path.is_file():
                digest.update(f"{path.relative_to(ROOT)}\0".encode())
                digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Resumed:
    """Passed tests are written one by one, so that a run may be ended at any time."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._file = config.rootpath / ".pytest_cache" / "passed_long.json"
        self._digest = source_digest()
        kept = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._passed: dict[str, float] = kept.get(self._digest, {})
        self._count = self._done = 0
        self._seconds: dict[str, float] = {}
        self._failed: set[str] = set()
        self._start_s = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = [item for item in items if item.nodeid in self._passed]
        config.hook.pytest_deselected(items=passed)
        items[:] = [item for item in items if item.nodeid not in self._passed]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        if not self._count:
            self._say(f"{len(ids)} tests, {len(self._passed)} have passed before")
        self._count = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid
        self._seconds[name] = self._seconds.get(name, 0.0) + report.duration
        if report.failed:
            self._failed.add(name)
        if report.when != "teardown" or "PYTEST_XDIST_WORKER" in os.environ:  # the controller hears of all
            return
        self._done += 1
        if name not in self._failed:
            self._passed[name] = round(self._seconds[name], 1)
            self._file.parent.mkdir(exist_ok=True)
            self._file.write_text(json.dumps({self._digest: self._passed}))
        minutes = (time.monotonic() - self._start_s) / 60
        outcome = "FAILED" if name in self._failed else "passed"
        self._say(
            f"[{self._done}/{self._count} after {minutes:.0f} min] {outcome}, {self._seconds[name]:.0f} s: {name}"
        )

    def _say(self, line: str) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(line)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--resume", action="store_true", help="leave out what has passed since the source was changed")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--resume"):
        plugin = Resumed(config)
        config.pluginmanager.register(plugin, "resumed")
