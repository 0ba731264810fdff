"""Which files of the repository each test reaches: `pytest --reach FILE` records it, `make affected` reads the record.

A test reaches a file when it opens it, or runs a function of it: in the test or in a fixture that the test uses, in
this process or in one that it starts (`reach_site/sitecustomize.py`). A process that was started reaches every module
that it imports. The record is one of test functions: their parameters are not told apart.
"""

import dataclasses
import json
import os
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
CHILDREN = "JAXSERVE_TEST_REACH"  # the file to which started processes write
_SITE = Path(__file__).parent / "reach_site"


def short(path: str) -> str | None:
    """The path below the root of the repository, of a file that a change can touch."""
    prefix = f"{ROOT}{os.sep}"
    inside = path.startswith(prefix) and not path.startswith(f"{prefix}.")
    return path.removeprefix(prefix) if inside else None


class Tracer:
    """Collects the files that are opened and those whose functions are called. Costs a call of Python for each call."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        sys.addaudithook(self._opened)

    def _opened(self, event: str, arguments: tuple[object, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str | os.PathLike):
            self.files.add(os.path.abspath(os.fspath(arguments[0])))

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        self.files.add(frame.f_code.co_filename)

    def start(self) -> None:
        threading.settrace(self)
        sys.settrace(self)

    def take(self) -> set[str]:
        found, self.files = self.files, set()
        return {name for file in found if (name := short(file)) is not None and not name.endswith(".pyc")}


class Reach:
    """In each worker: what is reached, sent to the controller with the report of the test."""

    def __init__(self) -> None:
        self._tracer = Tracer()
        self._by_fixture: dict[Any, set[str]] = {}
        self._children = Path(tempfile.mkdtemp(prefix="jaxserve-reach-")) / "children"
        self._children.touch()
        self._read = 0
        os.environ[CHILDREN] = str(self._children)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_SITE), os.environ.get("PYTHONPATH")]))

    def _taken(self) -> set[str]:
        with self._children.open() as lines:
            lines.seek(self._read)
            started = lines.read()
            self._read = lines.tell()
        return self._tracer.take() | {name for line in started.splitlines() if (name := short(line)) is not None}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._tracer.start()
        self._taken()
        self._here: set[str] = {item.nodeid.partition("::")[0]}
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[Any]:
        self._here |= self._taken()
        self._tracer.start()
        result = yield
        self._by_fixture[fixturedef] = self._taken()
        self._here |= self._by_fixture[fixturedef]
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[Any]:
        if call.when == "teardown":
            self._here |= self._taken()
            definitions = getattr(item, "_fixtureinfo", None)
            for defs in definitions.name2fixturedefs.values() if definitions else ():
                for definition in defs:
                    self._here |= self._by_fixture.get(definition, set())
            item.user_properties.append(("reach", sorted(self._here)))
        self._tracer.start()
        return (yield)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """What a file of tests has traced would be found by the next one, and not be reached by it."""
        if "jax" in sys.modules and (nextitem is None or nextitem.path != item.path):
            sys.modules["jax"].clear_caches()


class Writer:
    """In the controller: the record of all tests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._reached: dict[str, set[str]] = defaultdict(set)
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.partition("[")[0]
        self._seconds[name] += report.duration
        for key, value in report.user_properties:
            if key == "reach":
                self._reached[name] |= set(value)  # type: ignore[arg-type]

    def pytest_sessionfinish(self) -> None:
        tests = {name: Reached(seconds=self._seconds[name], files=files) for name, files in self._reached.items()}
        write_record(self._path, tests)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """Of one test function with all its parameters. `seconds` are those of the recording, which is slower."""

    seconds: float
    files: set[str]


def write_record(path: Path, tests: dict[str, Reached]) -> None:
    """Files by number; the tests that reach the same ones together, under those numbers as bits of a hexadecimal one.

    Data of a folder of fixtures count as the folder, since a test that reads one of its files follows from all.
    """
    by_name = {name: {_data_folder(file) for file in test.files} for name, test in tests.items()}
    files = sorted({file for names in by_name.values() for file in names})
    numbers = {file: number for number, file in enumerate(files)}
    by_set: dict[str, dict[str, float]] = defaultdict(dict)
    for name, reached in sorted(by_name.items()):
        bits = f"{sum(1 << numbers[file] for file in reached):x}"
        by_set[bits][name] = round(tests[name].seconds, 2)
    path.write_text(json.dumps({"files": files, "tests": by_set}, indent=0) + "\n")


def _data_folder(file: str) -> str:
    path = Path(file)
    return str(path.parent) if path.suffix != ".py" and "fixtures" in path.parts else file


def read_record(path: Path) -> dict[str, Reached]:
    """By test function."""
    record = json.loads(path.read_text())
    return {
        test: Reached(
            seconds=seconds,
            files={file for number, file in enumerate(record["files"]) if int(bits, 16) >> number & 1},
        )
        for bits, tests in record["tests"].items()
        for test, seconds in tests.items()
    }


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--reach", metavar="FILE", help="record which files each test reaches; takes about twice as long")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--reach"):
        if "PYTEST_XDIST_WORKER" not in os.environ:
            config.pluginmanager.register(Writer(Path(path).absolute()), "reach-writer")
        if "PYTEST_XDIST_WORKER" in os.environ or not config.getoption("numprocesses", None):
            config.pluginmanager.register(Reach(), "reach")
