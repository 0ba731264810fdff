"""What each test costs: `pytest --costs FILE` writes a line of JSON a test, `scripts/test_costs.py` makes tables of them.

A line has seconds of the wall clock by phase, seconds of this process and of the processes it waited for, what JAX traced,
lowered and compiled, how many processes were started, and the seconds of each fixture that was set up for the test.
"""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

_JAX_EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace_s",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower_s",
    "/jax/core/compile/backend_compile_duration": "compile_s",
}
_STARTS = frozenset({"subprocess.Popen", "os.fork", "os.posix_spawn"})


class Costs:
    """Counts in the process that runs the tests, and writes in the one that hears of all their reports."""

    def __init__(self, path: str | None) -> None:
        self._file = open(path, "w", encoding="utf-8") if path else None  # noqa: SIM115: closed at the session's end
        self._now: Counter[str] = Counter()
        self._fixtures: dict[str, float] = {}
        self._hears_jax = False
        sys.addaudithook(self._started)

    def _started(self, event: str, _: tuple[object, ...], starts: frozenset[str] = _STARTS) -> None:
        if event in starts:  # an argument: a hook outlives the names of its module
            self._now["processes"] += 1

    def _jax_event(self, event: str, seconds: float, **_: object) -> None:
        if name := _JAX_EVENTS.get(event):
            self._now[name] += seconds  # type: ignore[assignment]
            self._now[name.replace("_s", "s")] += 1

    def _listen(self) -> None:
        """JAX is not imported for this: most tests of the scheduler do without it."""
        if not self._hears_jax and "jax" in sys.modules:
            monitoring = sys.modules.get("jax.monitoring")
            if monitoring is not None:
                monitoring.register_event_duration_secs_listener(self._jax_event)
                self._hears_jax = True

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._listen()
        self._now.clear()
        self._fixtures = {}
        before = os.times()
        item.user_properties.append(("slow", item.get_closest_marker("slow") is not None))

        def ended() -> dict[str, Any]:
            self._listen()
            after = os.times()
            own = after.user + after.system - before.user - before.system
            children = after.children_user + after.children_system - before.children_user - before.children_system
            counts = {name: round(value, 3) for name, value in self._now.items()}
            return counts | {"own_cpu_s": round(own, 3), "children_cpu_s": round(children, 3), "fixtures": self._fixtures}

        item._costs = ended  # type: ignore[attr-defined]
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        if call.when == "teardown":
            item.user_properties.append(("costs", item._costs()))  # type: ignore[attr-defined]
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[Any]:
        start = time.perf_counter()
        result = yield
        seconds = time.perf_counter() - start
        if seconds > 0.02:
            name = f"{fixturedef.baseid.removeprefix('tests/')}:{fixturedef.argname}:{fixturedef.scope}"
            self._fixtures[name] = round(self._fixtures.get(name, 0.0) + seconds, 3)
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._file is None:
            return
        properties = dict(report.user_properties)
        line = {"test": report.nodeid, "phase": report.when, "outcome": report.outcome, "seconds": round(report.duration, 3)}
        if report.when == "teardown":
            line |= {"slow": properties.get("slow"), **properties.get("costs", {})}  # type: ignore[dict-item]
            line["worker"] = getattr(report, "worker_id", None)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def pytest_sessionfinish(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write what each test costs to FILE, a line of JSON a phase")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--costs")
    if path:
        worker = "PYTEST_XDIST_WORKER" in os.environ
        config.pluginmanager.register(Costs(None if worker else path), "costs")
