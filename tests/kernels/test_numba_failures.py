"""What XLA or Numba refuse to the kernels for CPUs: a step or a start fails with the reason, and nothing hangs."""

import ctypes
import dataclasses
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numba import cfunc, types
from numba.core.errors import TypingError

import jaxserve.kernels.cpu.machine_code as machine_code
from jaxserve.config.schema import Config
from jaxserve.errors import KernelsUnavailable
from jaxserve.kernels.cpu.call import enter, join, launch, leave, take, words
from jaxserve.kernels.cpu.simd import address_of
from jaxserve.kernels.cpu.target import find_target
from jaxserve.kernels.matmul import MatmulUse
from jaxserve.kernels.ops import MATMUL
from jaxserve.kernels.packed_weight import pack
from jaxserve.runtime.resolve import choose

ITEMS = 8
_FUTURE, _TAKEN = 21, 30  # words of the frame; XLA's has not as many as the second
_REFUSAL = 0x5000  # the address of an error
_C_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_NAMES = {17: "schedule", 18: "num_threads", 19: "create_future", 20: "set_available", 21: "set_error"}

_KEPT: list[Any] = []  # functions that XLA knows by address as long as the process lives


def alone(frame_pointer):
    """One call as a kernel makes it: launches, then works until no item is free. Returns what the kernel would."""
    state = enter(frame_pointer)
    error = launch(frame_pointer, state, ITEMS, 4, 0)
    worker, taken = join(state), 0
    while take(state, worker) >= 0:
        taken += 1
    leave(state)
    words(address_of(frame_pointer), _TAKEN + 1)[_TAKEN] = taken
    return error


def late(state):
    """A worker of a call. Returns the items that it took."""
    worker, taken = join(state), 0
    while take(state, worker) >= 0:
        taken += 1
    leave(state)
    return taken


@functools.cache
def compiled(function: Callable, argument: Any) -> Any:
    """Compiled by the first test that calls it: every process of a run imports this file."""
    return cfunc(types.intp(argument))(function).ctypes


@dataclasses.dataclass
class Call:
    """What a call did: the items that the caller took, the error that it returned, its future, the functions of XLA
    that it called, the states of the workers that XLA has not run yet, and the errors that the future got."""

    taken: int
    error: int
    future: int
    called: list[str]
    states: list[int]
    reported: list[int]


def call_with(refused: str = "") -> Call:
    """A call in which one function of XLA returns an error."""
    called: list[str] = []
    states: list[int] = []
    reported: list[int] = []
    written = {"num_threads": (5, 4), "create_future": (2, 77)}

    def function(name: str) -> Any:
        def answer(arguments: int) -> int:
            called.append(name)
            given = (ctypes.c_int64 * 6).from_address(arguments)
            if name == refused:
                return _REFUSAL
            if name in written:
                word, value = written[name]
                given[word] = value
            if name == "schedule":
                states.append(given[4])
            if name == "set_error":
                reported.append(given[3])
            return 0

        return _C_FUNCTION(answer)

    functions = {index: function(name) for index, name in _NAMES.items()}
    frame, api = np.zeros(32, np.int64), np.zeros(32, np.int64)
    for index, entry in functions.items():
        api[index] = ctypes.cast(entry, ctypes.c_void_p).value
    frame[2] = api.ctypes.data
    error = compiled(alone, types.voidptr)(frame.ctypes.data)
    return Call(int(frame[_TAKEN]), error, int(frame[_FUTURE]), called, states, reported)


@pytest.mark.parametrize(("refused", "called"), [("num_threads", 1), ("create_future", 2)])
def test_without_a_future_the_caller_works_alone_and_returns_the_error(refused: str, called: int) -> None:
    found = call_with(refused)
    assert (found.taken, found.error, found.future, found.states) == (ITEMS, _REFUSAL, 0, [])
    assert found.called == ["num_threads", "create_future"][:called]


def test_items_of_workers_that_did_not_start_are_taken_and_the_error_is_reported() -> None:
    found = call_with("schedule")
    assert (found.taken, found.error, found.future, found.states) == (ITEMS, 0, 77, [])
    assert found.called == ["num_threads", "create_future", "schedule", "set_error"]
    assert found.reported == [_REFUSAL]


def test_workers_that_start_late_delay_nothing() -> None:
    """The result is reported when all items are complete. Workers that come later find their state, and no item."""
    found = call_with()
    assert (found.taken, found.error, found.future) == (ITEMS, 0, 77)
    assert found.called == ["num_threads", "create_future", *["schedule"] * 3, "set_available"]
    assert len(found.states) == 3
    assert [compiled(late, types.intp)(state) for state in found.states] == [0, 0, 0]
    assert found.called[-2:] == ["schedule", "set_available"], "and it is reported once"


@pytest.mark.parametrize("refused", ["schedule", "num_threads", "create_future"])
def test_a_step_in_which_xla_refuses_fails_by_name(refused: str) -> None:
    """XLA itself runs it: the error comes out of the executable, and the next call is right."""
    if os.cpu_count() == 1 and refused != "num_threads":
        pytest.skip("a pool of one thread is asked for nothing else")
    _, product = machine_code._register("matmul", "float32")
    kept: list[Any] = []

    def kernel(frame_address: int) -> int:
        frame = (ctypes.c_int64 * 22).from_address(frame_address)
        if frame[1]:  # XLA asks for the version
            return _C_FUNCTION(product.address)(frame_address)
        whole = frame[2]
        api = (ctypes.c_int64 * 24)(*(ctypes.c_int64 * 24).from_address(whole))
        create = _C_FUNCTION(api[6])

        def refuse(arguments: int) -> int:
            del arguments
            message = ctypes.create_string_buffer(b"refused by the test")
            given = (ctypes.c_int64 * 4)(32, 0, ctypes.addressof(message), 8)
            return create(ctypes.addressof(given))

        entry = _C_FUNCTION(refuse)
        kept.extend([entry, api])
        (index,) = [index for index, name in _NAMES.items() if name == refused]
        api[index] = ctypes.cast(entry, ctypes.c_void_p).value or 0
        frame[2] = ctypes.addressof(api)
        try:
            return _C_FUNCTION(product.address)(frame_address)
        finally:
            frame[2] = whole

    handler = _C_FUNCTION(kernel)
    kept.append(handler)
    _KEPT.append(kept)
    name = f"jaxserve_test_{refused}"
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(ctypes.cast(handler, ctypes.c_void_p)), platform="cpu")
    weight, x = jnp.ones((8 * find_target().width, 16)), jnp.ones((3, 16))
    packed = pack(weight, 1, find_target().width)
    result = jax.ShapeDtypeStruct((3, len(weight)), jnp.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="refused by the test"):
        jax.block_until_ready(jax.ffi.ffi_call(name, result)(x, packed.panels, jnp.zeros(0, jnp.int32)))
    np.testing.assert_array_equal(packed.multiply(x), np.full((3, len(weight)), 16))


def test_a_numba_without_the_parts_that_are_used_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jaxserve.kernels.cpu.simd", None)
    assert "install that of constraints.txt" in (machine_code.missing() or "")


def test_a_numba_that_cannot_compile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise TypingError("\x1b[1mno such thing\x1b[0m")

    monkeypatch.setattr("numba.cfunc", refuse)
    with pytest.raises(KernelsUnavailable, match="cannot compile the kernels for CPUs: no such thing.* to xla"):
        machine_code._compile(lambda frame: 0)


def test_auto_takes_xla_where_numba_cannot_compile(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """LLVM's own errors are no errors of Numba's. Whoever names the kernels gets the error."""

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("LLVM knows no such instruction")

    monkeypatch.setattr("numba.cfunc", refuse)
    monkeypatch.setattr(machine_code, "_register", machine_code._register.__wrapped__)
    monkeypatch.setattr(machine_code, "_KEPT", machine_code._Kept())
    use, device = MatmulUse(dtype="float32", num_devices=1), jax.devices("cpu")[0]
    assert choose(MATMUL, Config(), (use,), device).name == "xla"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "'numba_cpu' is passed over" in warning and "LLVM knows no such instruction" in warning
    named = Config.model_validate({"kernels": {"matmul": "numba_cpu"}})
    with pytest.raises(KernelsUnavailable, match="no such instruction"):
        choose(MATMUL, named, (use,), device)
