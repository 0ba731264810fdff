"""The process that compiles beside the engine: a real one, which gives way, tells what it has done, and always ends."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import carried_out
import psutil
import pytest

from jaxserve.runtime.apart import StepFailed, StepsApart, Unavailable

WAIT_S = 120.0  # for anything that must happen: far more than a busy machine takes


def _apart(module: str = "carried_out") -> StepsApart:
    orders: Any = carried_out.Names()
    return StepsApart(module, orders)


def _facts(apart: StepsApart) -> list[str]:
    with pytest.raises(StepFailed) as told:
        apart.wait("facts")
    return str(told.value).removeprefix("RuntimeError('").removesuffix("')").split()


def _gone(pid: int) -> bool:
    """Waits until there is no such process: one that nobody has waited for has still ended."""
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        threading.Event().wait(0.01)
    return False


def _wait_for(process: psutil.Process, *, stopped: bool) -> None:
    end_s = time.monotonic() + WAIT_S
    while (process.status() == psutil.STATUS_STOPPED) is not stopped:
        assert time.monotonic() < end_s, f"stopped is not {stopped}"
        threading.Event().wait(0.005)


def test_it_tells_of_each_step_and_gives_way() -> None:
    apart, user = _apart(), object()
    apart.begin(user, ["facts", "decode 1x1", "bad", "mixed 8x4", "exit", "never"])
    pid, group, niceness = _facts(apart)
    assert niceness == "19" and group == pid, "Ctrl-C in a terminal is not for it"
    assert apart.wait("decode 1x1") == 0.25
    with pytest.raises(StepFailed, match=r"^ValueError\('no such\\ninstruction'\)$"):
        apart.wait("bad")
    assert apart.wait("mixed 8x4") == 0.25
    with pytest.raises(Unavailable, match=r"status 3: a library prints this\sout of order$"):
        apart.wait("never")
    assert apart.wait("decode 1x1") == 0.25, "it is still in the store"
    assert _gone(int(pid))


@pytest.mark.parametrize("case", ["/nowhere/python", "no such module", "no program of its own"])
def test_one_that_cannot_start_says_why(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if case != "no such module":
        monkeypatch.setattr(sys, "executable", "" if case == "no program of its own" else case)
    apart = _apart("no_such_module" if case == "no such module" else "carried_out")
    apart.begin(object(), ["decode 1x1"])
    with pytest.raises(Unavailable, match=case.replace(" such ", ".such.")):
        apart.wait("decode 1x1")


def test_the_last_of_several_users_ends_it_and_another_life_may_follow() -> None:
    apart, first, second = _apart(), object(), object()
    for user in (first, second):
        apart.begin(user, ["facts", "hang"])
    pid = int(_facts(apart)[0])
    for _ in range(2):
        apart.end(first)
    assert psutil.Process(pid).is_running()
    apart.end(second)
    with pytest.raises(Unavailable):
        apart.wait("hang")
    assert _gone(pid)
    apart.begin(first, ["hang", "mixed 8x4"][::-1])
    assert apart.wait("mixed 8x4") == 0.25
    apart.end(first)


def test_it_stands_still_and_goes_on_by_turns_while_steps_are_in_flight() -> None:
    apart, user = _apart(), object()
    apart.begin(user, ["facts", "hang"])
    process = psutil.Process(int(_facts(apart)[0]))
    apart.note_work(user, True)
    for stopped in (True, False, True):
        _wait_for(process, stopped=stopped)
    apart.note_work(user, False)
    _wait_for(process, stopped=False)
    apart.note_work(user, True)
    _wait_for(process, stopped=True)
    apart.end(user)
    assert _gone(process.pid), "killed though it stands still"


# A program that has a process compile, tells its number, and then ends in some way while that has not ended.
_PROGRAM = """
import sys, threading
from carried_out import Names
from jaxserve.runtime.apart import StepFailed, StepsApart
apart = StepsApart("carried_out", Names())
apart.begin("me", ["facts", "hang"])
try:
    apart.wait("facts")
except StepFailed as told:
    print(told, flush=True)
apart.note_work("me", sys.argv[1] == "busy")
sys.stdin.read()
"""


@pytest.mark.parametrize(("end", "busy"), [(signal.SIGKILL, "busy"), (signal.SIGTERM, "idle")])
def test_it_ends_with_the_program(end: signal.Signals, busy: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _PROGRAM, busy], env=environment, **pipes) as program:
        assert program.stdout is not None
        process = psutil.Process(int(program.stdout.readline().split("'")[1].split()[0]))
        if busy == "busy":
            _wait_for(process, stopped=True)
        program.send_signal(end)
        program.wait(WAIT_S)
    assert _gone(process.pid)
