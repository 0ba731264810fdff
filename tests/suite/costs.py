"""What each test costs: `pytest --costs FILE` writes lines of JSON, of which `scripts/test_costs.py` makes tables.

A line is one phase of a test with its seconds. That of the teardown also has seconds of processors, of this process and
of those that it waited for; what JAX traced, lowered and compiled, and Numba compiled; how many processes were started;
and the seconds of each fixture that was set up for the test.
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
        self._file = open(path, "w", encoding="utf-8") if path else None  # noqa: SIM115
        self._now: Counter[str] = Counter()
        self._fixtures: dict[str, float] = {}
        self._hears_jax = False
        self._numba: Any = None
        sys.addaudithook(self._started)

    def _started(self, event: str, _: tuple[object, ...], starts: frozenset[str] = _STARTS) -> None:
        if event in starts:  # an argument: a hook outlives the names of its module
            self._now["processes"] += 1

    def _jax_event(self, event: str, seconds: float, **_: object) -> None:
        if name := _JAX_EVENTS.get(event):
            self._now[name] += seconds  # type: ignore[assignment]
            self._now[name.replace("_s", "s")] += 1

    def _listen(self) -> None:
        """Neither JAX nor Numba is imported for this: most tests of the scheduler do without them."""
        monitoring = sys.modules.get("jax.monitoring")
        if not self._hears_jax and monitoring is not None:
            monitoring.register_event_duration_secs_listener(self._jax_event)
            self._hears_jax = True
        events = sys.modules.get("numba.core.event")
        if self._numba is None and events is not None:
            self._numba = events.TimingListener()
            events.register("numba:compile", self._numba)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._listen()
        self._now.clear()
        self._fixtures = {}
        before = os.times()
        numba_s = self._numba.duration if self._numba is not None and self._numba.done else 0.0
        item.user_properties.append(("slow", item.get_closest_marker("slow") is not None))

        def ended() -> dict[str, Any]:
            self._listen()
            after = os.times()
            own = after.user + after.system - before.user - before.system
            children = after.children_user + after.children_system - before.children_user - before.children_system
            if self._numba is not None and self._numba.done:
                self._now["numba_s"] += self._numba.duration - numba_s  # type: ignore[assignment]
            counts = {name: round(value, 3) for name, value in self._now.items()}
            return counts | {
                "own_cpu_s": round(own, 3),
                "children_cpu_s": round(children, 3),
                "fixtures": self._fixtures,
            }

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
        line = {
            "test": report.nodeid,
            "phase": report.when,
            "outcome": report.outcome,
            "seconds": round(report.duration, 3),
        }
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
