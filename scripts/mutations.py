"""Puts faults into the code, one at a time, and says which test catches each: a check of the suite itself.

    python scripts/mutations.py                         # all of scripts/mutation_faults.py, some minutes
    python scripts/mutations.py pages router --control  # these areas; their tests first without the fault
    python scripts/mutations.py --json benchmarks/mutations.json

A fault is put into a copy of the tracked files, as they are in the working tree. Its named tests run there first; if
none fails, all tests run that reach its file according to tests/reach.json (`pytest --reach`). Tests of tests/long.txt
are left out: a fault that only these would catch is not caught. The exit status is 1 if a fault is not caught.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mutation_faults import FAULTS, Fault
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
_REACH = ROOT / "tests" / "reach.json"
_LIMIT_S = 900.0  # of one run of tests: some faults would let a test wait for ever
_PASSED, _FAILED, _NO_TESTS = 0, 1, 5  # exit statuses of pytest
_CULPRIT = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)  # in the summary at the end


class Broken(Exception):
    """The tests did not run to their end, which tells nothing of the fault; the message has what pytest said."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a fault.

    Attributes:
      caught_by: the test that failed; None: all passed.
      seconds: of processors, until then: those of a clock would say what else the machine had to do.
    """

    fault: Fault
    caught_by: str | None
    seconds: float


def main() -> int:
    args = _parse()
    chosen = [fault for fault in FAULTS if not args.areas or fault.area in args.areas]
    reach = _read_reach(args.tests_of)
    outcomes = [_try_fault(fault, reach, control=args.control) for fault in chosen]
    _show(outcomes)
    if args.json is not None:
        args.json.write_text(
            json.dumps({"commit": _git("rev-parse", "HEAD").strip(), "faults": _rows(outcomes)}, indent=1) + "\n"
        )
    return int(any(outcome.caught_by is None for outcome in outcomes))


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(fault.area for fault in FAULTS)}")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the record here")
    parser.add_argument(
        "--tests-of", type=Path, metavar="REACH", help="which tests reach which files; tests/reach.json if it is there"
    )
    parser.add_argument("--control", action="store_true", help="the named tests must pass without the fault")
    args = parser.parse_args()
    if unknown := set(args.areas) - {fault.area for fault in FAULTS}:
        parser.error(f"no fault has the area {', '.join(sorted(unknown))}")
    return args


def _read_reach(path: Path | None) -> dict[str, set[str]]:
    """By test function: the files that it reaches. Nothing where no record was named and none is there."""
    if path is None and not _REACH.exists():
        print("tests/reach.json is not there: only the named tests run; `pytest --reach` writes it", file=sys.stderr)
        return {}
    sys.path.append(str(ROOT / "tests"))
    from suite.reach import read_record

    return read_record(path or _REACH)


def _try_fault(fault: Fault, reach: dict[str, set[str]], *, control: bool) -> Outcome:
    named = [test for test in fault.tests if is_there(test)]
    for test in set(fault.tests) - set(named):
        print(f"{fault.area}: {test} is not there any more", file=sys.stderr)
    others = [
        test for test, files in sorted(reach.items()) if fault.file in files and test not in named and is_there(test)
    ]
    with tempfile.TemporaryDirectory(prefix="jaxserve-fault-", ignore_cleanup_errors=True) as folder:
        copy = Path(folder)
        _copy_files(copy)
        if control and named and (culprit := _first_failure(copy, named)) is not None:
            raise SystemExit(f"error: {fault.area}: {culprit} fails without the fault")
        _edit(copy / fault.file, fault)
        begin_s = _child_seconds()
        caught_by = None
        try:
            for tests in filter(None, (named, others)):
                caught_by = caught_by or _first_failure(copy, tests)
        except Broken as error:
            print(f"{fault.area}: {error}", file=sys.stderr)
        seconds = _child_seconds() - begin_s
    print(f"{fault.area}: {caught_by or 'NOT CAUGHT'} ({seconds:.0f} s)", file=sys.stderr, flush=True)
    return Outcome(fault=fault, caught_by=caught_by, seconds=seconds)


def is_there(test: str) -> bool:
    """Whether a file of tests, or a function in it, still exists."""
    path, *names = test.partition("[")[0].split("::")
    file = ROOT / path
    return file.is_file() and all(re.search(rf"\b(def|class) {name}\b", file.read_text()) for name in names)


def _copy_files(to: Path) -> None:
    for name in _git("ls-files", "-z").split("\0"):
        if name and (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def _edit(path: Path, fault: Fault) -> None:
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.area}: the old text is {text.count(fault.old)} times in {fault.file}"
    path.write_text(text.replace(fault.old, fault.new))


def _first_failure(copy: Path, tests: Sequence[str]) -> str | None:
    """The first of these tests that fails in the copy. Raises Broken where they do not run."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(copy), "JAX_PLATFORMS": environment.get("JAX_PLATFORMS", "cpu")}
    imported = [sys.executable, "-c", "import jaxserve; print(jaxserve.__file__)"]
    found = subprocess.run(imported, cwd=copy, env=environment, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(copy.resolve()), f"the tests would run with {found.strip()}"
    listed = copy / "tests-of-fault.txt"  # there may be too many for a command line
    listed.write_text("\n".join(tests) + "\n")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-retry", "-p", "no:cacheprovider", "-m", "not long"]
    process = subprocess.Popen(
        [*command, f"@{listed}"],
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what the tests have started ends with them
    )
    try:
        output, _ = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise Broken(f"no end after {_LIMIT_S:.0f} s of {', '.join(tests[:3])}") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode in (_PASSED, _NO_TESTS):
        return None
    culprits = _CULPRIT.findall(output)
    if process.returncode != _FAILED or not culprits:
        raise Broken(f"pytest ended with {process.returncode}:\n{output[-4000:]}")
    return culprits[0]


def _child_seconds() -> float:
    """Seconds of processors that ended processes have taken."""
    times = os.times()
    return times.children_user + times.children_system


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def _rows(outcomes: Sequence[Outcome]) -> list[dict[str, object]]:
    return [
        {
            "area": outcome.fault.area,
            "file": outcome.fault.file,
            "wrong": outcome.fault.wrong,
            "caught_by": outcome.caught_by,
            "seconds": round(outcome.seconds, 1),
        }
        for outcome in outcomes
    ]


def _show(outcomes: Sequence[Outcome]) -> None:
    table = Table("area", "caught by", "seconds of processors")
    for outcome in outcomes:
        table.add_row(outcome.fault.area, outcome.caught_by or "[red]nothing[/]", f"{outcome.seconds:.0f}")
    Console().print(table)


if __name__ == "__main__":
    raise SystemExit(main())
