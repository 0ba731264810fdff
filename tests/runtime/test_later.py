"""Step shapes that are built in the background: in order, handed over between steps, and loud when they fail."""

import gc
import logging
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
from carried_out import Names

from jaxserve.errors import CapacityError
from jaxserve.runtime.apart import StepsApart
from jaxserve.runtime.compile import Compiled, Job
from jaxserve.runtime.later import THREAD_NAME, BackgroundBuckets
from jaxserve.sched import BucketCounts
from jaxserve.sched.plan import Bucket, Limits
from jaxserve.testing import make_limits

WAIT_S = 120.0  # for anything that must happen: far more than a busy machine takes
ALL = make_limits(max_rows=4, token_buckets=(8, 16))
FIRST = (Bucket(4, 4, True), Bucket(16, 4, False))
LATER = tuple(b for b in ALL.buckets if b not in FIRST)


class Compiler:
    """Builds what it is told to, one at a time; `go` holds it back."""

    def __init__(self, bad: str = "", held: tuple[str, ...] = (), lost: tuple[str, ...] = ()) -> None:
        """`held`: what its store has from the start; `lost`: what cannot be read from it."""
        self.looked = {*held}
        self.lost = lost
        self.go = threading.Event()
        self.begun = threading.Event()
        self.asked: list[str] = []
        self.threads: set[str] = set()
        self._bad = bad

    def build_one(self, job: Job) -> Compiled:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        self.asked.append(job.name)
        self.threads.add(threading.current_thread().name)
        if job.name == self._bad:
            raise RuntimeError("no such instruction")
        call: Any = job.fn
        return Compiled(name=job.name, call=call, seconds=0.5, stored=False, temporary_bytes=7, code_bytes=0)

    def load(self, job: Job) -> Compiled | None:
        """A process is asked to build what is not there at the first look."""
        there = job.name in self.looked and job.name not in self.lost
        self.looked.add(job.name)
        call: Any = job.fn
        found = Compiled(name=job.name, call=call, seconds=0.1, stored=True, temporary_bytes=7, code_bytes=0)
        return found if there else None


class Runner:
    def __init__(self) -> None:
        self.limits = ALL.with_buckets(FIRST)
        self.threads: set[str] = set()

    def admit(self, bucket: Bucket, compiled: Compiled) -> Limits:
        self.threads.add(threading.current_thread().name)
        self.limits = self.limits.with_buckets((*self.limits.buckets, bucket))
        return self.limits


def _later(
    compiler: Compiler,
    runner: Runner,
    check=lambda compiled: None,
    *,
    shown: bool = False,
    apart: StepsApart | None = None,
    names: tuple[str, ...] = tuple(map(str, LATER)),
) -> BackgroundBuckets:
    jobs = {b: Job(name=n, fn=lambda: None, args=(), donate=(), options={}) for b, n in zip(LATER, names, strict=True)}
    given: Any = {"jobs": jobs, "compiler": compiler, "check": check, "admit": runner.admit}
    return BackgroundBuckets(limits=runner.limits, shown=shown, apart=apart, **given)


def _apart() -> StepsApart:
    orders: Any = Names()
    return StepsApart("carried_out", orders)


def test_buckets_arrive_when_the_loop_takes_them() -> None:
    compiler, runner = Compiler(), Runner()
    later = _later(compiler, runner)
    assert later.all_limits == ALL
    later.start()
    assert later.take() is None and later.counts == BucketCounts(2, 3, 0)
    compiler.go.set()
    assert later.wait(WAIT_S)
    assert runner.limits.buckets == FIRST, "given to the runner from the wrong thread, or too early"
    assert later.take() == ALL == runner.limits
    assert later.take() is None
    assert later.counts == BucketCounts(5, 0, 0)
    assert compiler.asked == [str(b) for b in LATER], "smallest first: single streams are what waits"
    assert compiler.threads == {THREAD_NAME} and runner.threads == {threading.current_thread().name}


@pytest.mark.parametrize("by_memory", [False, True])
def test_one_that_fails_is_loud_and_the_others_come(
    by_memory: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(compiled: Compiled) -> None:
        if by_memory and compiled.name == str(LATER[1]):
            raise CapacityError("temporaries need 7 bytes")

    monkeypatch.setattr(logging.getLogger("jaxserve"), "propagate", True)
    compiler, runner = Compiler(bad="" if by_memory else str(LATER[1])), Runner()
    later = _later(compiler, runner, check)
    compiler.go.set()
    with caplog.at_level(logging.ERROR, "jaxserve"):
        later.start()
        assert later.wait(WAIT_S)
    assert later.counts == BucketCounts(4, 0, 1)
    assert later.take() == ALL.with_buckets(set(ALL.buckets) - {LATER[1]})
    (said,) = [record.getMessage() for record in caplog.records if record.name == "jaxserve.runtime.later"]
    assert str(LATER[1]) in said and ("7 bytes" if by_memory else "no such instruction") in said


def test_no_thread_keeps_the_arrays_until_the_interpreter_ends() -> None:
    """A daemon that freed them then would be killed inside of JAX, and the process with it."""
    compiler, runner = Compiler(), Runner()
    later = _later(compiler, runner, shown=True)
    compiler.go.set()
    later.start()
    assert later.wait(WAIT_S)
    assert later._thread is not None
    later._thread.join(WAIT_S)
    kept = weakref.ref(later)
    del later
    gc.collect()
    assert kept() is None


def test_after_close_nothing_is_begun() -> None:
    compiler, runner = Compiler(), Runner()
    later = _later(compiler, runner)
    later.start()
    assert compiler.begun.wait(WAIT_S)
    later.close()
    compiler.go.set()
    assert later.wait(WAIT_S)
    assert compiler.asked == [str(LATER[0])], "what is being compiled cannot be interrupted"
    assert later.counts == BucketCounts(3, 2, 0)


@pytest.mark.parametrize(
    ("names", "held", "lost", "ready", "by_thread", "said"),
    [
        (("one", "two", "three"), (), (), (0, 1, 2), (), ()),
        (("hang", "hang 2", "hang 3"), ("hang", "hang 2", "hang 3"), (), (0, 1, 2), (), ()),
        (("one", "bad", "three"), ("one",), (), (0, 2), (), ("bad cannot be built", "no such")),
        (("one", "exit", "three"), (), (), (0, 1, 2), ("exit", "three"), ("a thread compiles exit, three", "status 3")),
        (("one", "two", "three"), (), ("two",), (0, 1, 2), ("two", "three"), ("two, which it has built, cannot be",)),
    ],
)
def test_another_process_builds_and_a_thread_what_it_cannot(
    names: tuple[str, ...],
    held: tuple[str, ...],
    lost: tuple[str, ...],
    ready: tuple[int, ...],
    by_thread: tuple[str, ...],
    said: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("jaxserve"), "propagate", True)
    compiler, runner = Compiler(held=held, lost=lost), Runner()
    compiler.go.set()
    later = _later(compiler, runner, apart=_apart(), names=names)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        later.start()
        assert later.wait(WAIT_S)
    assert tuple(compiler.asked) == by_thread
    assert later.counts == BucketCounts(len(FIRST) + len(ready), 0, len(LATER) - len(ready))
    assert later.take() == ALL.with_buckets((*FIRST, *(LATER[i] for i in ready)))
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxserve.runtime.later"]
    assert len(lines) == bool(said) and all(part in line for part in said for line in lines)


def test_close_does_not_wait_for_another_process() -> None:
    compiler, runner = Compiler(), Runner()
    later = _later(compiler, runner, apart=_apart(), names=("one", "hang", "three"))
    later.start()
    later.note_work(True)
    while later.counts.pending > 2:
        threading.Event().wait(0.01)
    later.close()
    assert later.wait(WAIT_S) and not compiler.asked
    assert later.counts == BucketCounts(3, 2, 0)


# Builds that last until the main thread has ended, by two threads, one of which may speak; or for ever, by a process.
_ENDING = """
import threading
from jaxserve.runtime import later
from test_later import Compiler, Runner, _apart, _later

said = threading.Event()
plain_lines = later.plain_lines
later.plain_lines = lambda: said.set() or plain_lines()
later._PATIENCE_S = 0.0

class Slow(Compiler):
    def build_one(self, job):
        threading.main_thread().join()
        assert said.wait(120), "nobody says why the program does not end"
        self.go.set()
        return super().build_one(job)

for shown in (True, False):
    _later(Slow(), Runner(), shown=shown).start()
_later(Compiler(), Runner(), apart=_apart(), names=("hang", "two", "three")).start()
print("the main thread ends", flush=True)
"""


def test_a_program_that_ends_waits_for_a_thread_and_says_so_but_not_for_a_process() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", _ENDING]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0 and done.stdout == "the main thread ends\n", done.stderr
    assert done.stderr.count("a compile cannot be interrupted") == 1, done.stderr
