"""What XLA or Numba refuse to the kernels for CPUs: it costs time, or a start with its reason; no step hangs."""

import ctypes
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numba import cfunc, types
from numba.core.errors import TypingError

import jaxserve.kernels.cpu.machine_code as machine_code
from jaxserve.errors import ConfigError
from jaxserve.kernels.cpu.call import enter, join, launch, leave, take

ITEMS = 8
_FUTURE = 21  # word of the frame
_C_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


@cfunc(types.intp(types.voidptr))
def alone(frame_pointer):
    """One call as a kernel makes it: launches, then works until no item is free. Returns the items that it took."""
    state = enter(frame_pointer)
    launch(frame_pointer, state, ITEMS, 4, 0)
    worker, taken = join(state), 0
    while take(state, worker) >= 0:
        taken += 1
    leave(state)
    return taken


@cfunc(types.intp(types.intp))
def late(state):
    """A worker of a call. Returns the items that it took."""
    worker, taken = join(state), 0
    while take(state, worker) >= 0:
        taken += 1
    leave(state)
    return taken


def call_with(*, future: int, schedule: int) -> tuple[int, int, list[str], list[int]]:
    """(items taken by the caller, the future it returned, XLA's functions that were called, states of the workers that
    XLA has not run yet) where those two functions return these values: anything but 0 is an error."""
    called: list[str] = []
    states: list[int] = []

    def function(name: str, result: int, word: int = 0, value: int = 0) -> Any:
        def answer(arguments: int) -> int:
            called.append(name)
            given = (ctypes.c_int64 * 6).from_address(arguments)
            if word:
                given[word] = value
            if name == "schedule" and result == 0:
                states.append(given[4])
            return result

        return _C_FUNCTION(answer)

    functions = {
        17: function("schedule", schedule),
        18: function("num_threads", 0, 5, 4),
        19: function("create_future", future, 2, 77),
        20: function("set_available", 0),
    }
    frame, api = np.zeros(32, np.int64), np.zeros(32, np.int64)
    for index, entry in functions.items():
        api[index] = ctypes.cast(entry, ctypes.c_void_p).value
    frame[2] = api.ctypes.data
    taken = alone.ctypes(frame.ctypes.data)
    return taken, int(frame[_FUTURE]), called, states


def test_without_a_future_the_caller_works_alone() -> None:
    assert call_with(future=1, schedule=0) == (ITEMS, 0, ["num_threads", "create_future"], [])


def test_items_of_workers_that_did_not_start_are_taken_and_the_result_is_reported() -> None:
    taken, future, called, states = call_with(future=0, schedule=1)
    assert (taken, future, states) == (ITEMS, 77, [])
    assert called == ["num_threads", "create_future", *["schedule"] * 3, "set_available"]


def test_workers_that_start_late_delay_nothing() -> None:
    """The result is reported when all items are complete. Workers that come later find their state, and no item."""
    taken, future, called, states = call_with(future=0, schedule=0)
    assert (taken, future) == (ITEMS, 77)
    assert called == ["num_threads", "create_future", *["schedule"] * 3, "set_available"]
    assert len(states) == 3
    assert [late.ctypes(state) for state in states] == [0, 0, 0]
    assert called[-2:] == ["schedule", "set_available"], "and it is reported once"


def test_a_numba_without_the_parts_that_are_used_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxserve.kernels.cpu.simd", None)
    assert "install that of constraints.txt" in (machine_code.missing() or "")


def test_a_numba_that_cannot_compile_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypingError("\x1b[1mno such thing\x1b[0m")

    monkeypatch.setattr("numba.cfunc", refuse)
    (tmp_path / "kept").touch()
    for compile_it in (machine_code._compile, lambda f, keep: machine_code._compile_kept(f, str(tmp_path))):
        with pytest.raises(ConfigError, match="cannot compile the kernels for CPUs: no such thing.*matmul to xla"):
            compile_it(lambda frame: 0, keep=True)
    assert (tmp_path / "kept").exists(), "machine code of other kernels stays"
