"""A failure is shown when it happens, and tried twice alone at the end: a test that then passes is flaky.

Flaky tests that `tests/flaky.txt` lists do not fail the run; a new one does, since nobody has decided about it. The
option `--no-retry` shows failures and tries none again.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).parents[1] / "flaky.txt"
_MOST = 10  # failures that are tried again: with more, something is broken
_LIMIT_S = 300.0


class Failures:
    """Of the process that hears of all tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._failed: dict[str, None] = {}
        self._broken = False
        self._flaky: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed[report.nodeid] = None
            self._show(f"FAILED {report.nodeid} ({report.when})", report.longreprtext)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._broken |= report.failed

    def pytest_internalerror(self) -> None:
        self._broken = True

    @property
    def _terminal(self) -> Any:
        return self._config.pluginmanager.get_plugin("terminalreporter")

    def _show(self, title: str, text: str) -> None:
        if self._terminal is not None:
            self._terminal.ensure_newline()
            self._terminal.section(title, "_", red=True)
            self._terminal.write_line(text)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Before the summary, which is written at the end of this hook."""
        if self._broken or not 0 < len(self._failed) <= _MOST or session.exitstatus != pytest.ExitCode.TESTS_FAILED:
            return
        if self._config.getoption("--no-retry"):
            return
        known = {line for line in LIST.read_text().splitlines() if line and not line.startswith("#")}
        self._flaky = [test for test in self._failed if self._passes_alone(test)]
        if len(self._flaky) == len(self._failed) and known.issuperset(self._flaky):
            session.exitstatus = pytest.ExitCode.OK

    def _passes_alone(self, test: str) -> bool:
        command = [sys.executable, "-m", "pytest", "-q", "--no-retry", "-p", "no:xdist", "-p", "no:cacheprovider", test]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        for attempt in (1, 2):
            self._terminal.write_line(f"alone, try {attempt} of 2: {test}")
            try:
                ended = subprocess.run(
                    command, cwd=self._config.rootpath, env=environment, capture_output=True, timeout=_LIMIT_S
                )
            except subprocess.TimeoutExpired:
                return False
            if ended.returncode != 0:
                return False
        return True

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._flaky:
            known = LIST.read_text().splitlines()
            terminalreporter.section("flaky: failed once, and passed twice alone")
            for test in self._flaky:
                terminalreporter.write_line(f"{'known' if test in known else 'NEW'}  {test}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-retry", action="store_true", help="do not run failed tests alone at the end")


def pytest_configure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Failures(config), "failures")
