"""Runs the tests that a change can break, within a few minutes, and says which it left out.

    python scripts/affected_tests.py [FILE ...] [--base REF] [--seconds N] [--all] [--list]
    make affected [BASE=REF]

Without files, those are meant that differ from --base: what is not committed, or else the last commit. A test is
affected if `tests/reach.json` says that it reaches a changed file (`make reach` records it anew), if it stands in a
changed file of tests, or, where the record does not know the test, if its file imports a changed one or names it.

When the affected tests take longer than --seconds, those that reach the fewest other files come first: they are the
ones about the changed file. Tests of a file whose name says that it is about the changed one are always run. Never used
by CI, which runs all.
"""

import argparse
import ast
import functools
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from suite.reach import Reached, read_record  # noqa: E402

RECORD = ROOT / "tests" / "reach.json"
_WORKERS = 2
_START_S = 15.0  # until the first test runs
_UNKNOWN_S = 1.0  # of a test that the record does not know


def changed_files(base: str | None) -> list[str]:
    """Of the working tree and the commits since `base`; of the last commit where nothing is uncommitted."""

    def git(*arguments: str) -> list[str]:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.splitlines()

    new = git("ls-files", "--others", "--exclude-standard")
    changed = git("diff", "--name-only", base or "HEAD")
    if base is None and not changed and not new:
        changed = git("diff", "--name-only", "HEAD~1")
    return sorted({*changed, *new})


def test_functions() -> dict[str, list[str]]:
    """By file of tests: the ids of its functions, without parameters."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = str(path.relative_to(ROOT))
        found[name] = []
        for node in ast.parse(path.read_text()).body:
            inner = node.body if isinstance(node, ast.ClassDef) else [node]
            prefix = f"{name}::{node.name}::" if isinstance(node, ast.ClassDef) else f"{name}::"
            found[name] += [
                f"{prefix}{one.name}"
                for one in inner
                if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) and one.name.startswith("test_")
            ]
    return found


_HELPER_FOLDERS = ("e2e", "models", "serve")  # as pytest has them: `pythonpath` in pyproject.toml


@functools.cache
def _modules() -> frozenset[str]:
    """All Python files of the repository, by their paths without the ending."""
    folders = ("jaxserve", "tests", "scripts")
    return frozenset(
        str(path.relative_to(ROOT).with_suffix("")) for name in folders for path in (ROOT / name).rglob("*.py")
    )


@functools.cache
def _imports(file: str) -> frozenset[str]:
    """Files of the repository that a file imports at any place, by their paths."""
    roots = ["", "scripts/", "tests/", f"{Path(file).parent}/", *(f"tests/{name}/" for name in _HELPER_FOLDERS)]
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update([node.module, *(f"{node.module}.{alias.name}" for alias in node.names)])
    paths = {f"{root}{name.replace('.', '/')}{end}" for name in names for root in roots for end in ("", "/__init__")}
    return frozenset(f"{path}.py" for path in paths & _modules())


def imported_by(file: str) -> set[str]:
    """All files that a file imports, and those import."""
    seen, waiting = {file}, [file]
    while waiting:
        for found in _imports(waiting.pop()):
            if found not in seen:
                seen.add(found)
                waiting.append(found)
    return seen


def affected(changed: Iterable[str], record: dict[str, Reached]) -> dict[str, Reached]:
    """The tests to run, by id. Those that the record does not know reach what their files import and name."""
    changed = set(changed)
    found: dict[str, Reached] = {}
    for file, tests in test_functions().items():
        unknown = [test for test in tests if test not in record]
        imported: set[str] = set()
        if unknown:
            imported = imported_by(file)
            text = (ROOT / file).read_text()
            imported |= {name for name in changed if name.rpartition("/")[2] in text}
        helpers = {name for name in changed if name.startswith("tests/") and name in (imported or imported_by(file))}
        for test in tests:
            known = record.get(test)
            reached = known.files if known is not None else imported
            folders = {folder for folder in reached if "." not in folder.rpartition("/")[2]}  # of fixtures
            if (
                file in changed
                or helpers
                or changed & reached
                or any(name.rpartition("/")[0] in folders for name in changed)
            ):
                found[test] = known or Reached(seconds=_UNKNOWN_S, files=imported)
    return found


def about(test: str, changed: Iterable[str]) -> bool:
    """Whether a test stands in a changed file, or in one that is named for it, as test_queue.py for queue.py."""
    file = test.partition("::")[0]
    stem = Path(file).stem.removeprefix("test_")
    return any(file == name or stem == Path(name).stem for name in changed)


def choose(tests: dict[str, Reached], changed: list[str], seconds: float) -> tuple[list[str], list[str]]:
    """The tests to run within the time, and those that are left out."""
    ranked = sorted(tests, key=lambda test: (not about(test, changed), len(tests[test].files), test))
    chosen: list[str] = []
    left_out: list[str] = []
    room = (seconds - _START_S) * _WORKERS
    for test in ranked:
        room -= tests[test].seconds
        fits = room >= 0 or about(test, changed)
        (chosen if fits else left_out).append(test)
        room += 0 if fits else tests[test].seconds
    return chosen, left_out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", help="changed files, instead of those that git names")
    parser.add_argument("--base", help="what the working tree is compared with")
    parser.add_argument("--seconds", type=float, default=150.0, help="of wall time on two cores; default 150")
    parser.add_argument("--all", action="store_true", help="run all affected tests, however long they take")
    parser.add_argument("--list", action="store_true", help="print the ids of the tests, run none")
    options = parser.parse_args()
    changed = options.files or changed_files(options.base)
    if not changed:
        print("nothing has changed")
        return 0
    record = read_record(RECORD) if RECORD.exists() else {}
    tests = affected(changed, record)
    chosen, left_out = choose(tests, changed, float("inf") if options.all else options.seconds)
    if options.list:
        print(*chosen, sep="\n")
        return 0
    print(f"changed: {', '.join(changed[:8])}{f' and {len(changed) - 8} more' if len(changed) > 8 else ''}")
    print(f"{len(tests)} test functions are affected; {len(chosen)} are run, {len(left_out)} are left out")
    by_file: Counter[str] = Counter(test.partition("::")[0] for test in left_out)
    seconds: defaultdict[str, float] = defaultdict(float)
    for test in left_out:
        seconds[test.partition("::")[0]] += tests[test].seconds
    for file, count in by_file.most_common():
        print(f"  left out: {count:3} of {file} ({seconds[file]:.0f} s)")
    if left_out:
        print("  make affected ALL=1 runs them, too")
    if not chosen:
        return 0
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(chosen))
        file.flush()
        options = ["-n", str(_WORKERS), "--dist", "worksteal", "-q", "--no-retry", "-m", "not long", f"@{file.name}"]
        return subprocess.run([sys.executable, "-m", "pytest", *options], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
