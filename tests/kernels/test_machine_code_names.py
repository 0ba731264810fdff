"""Kernels that different processes compiled are in one process together: none calls a function of another."""

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from numba import njit
from numba.core.bytecode import FunctionIdentity

from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.cpu.machine_code import MachineCode
from jaxserve.kernels.cpu.simd import address_of

TIMES = 4


def make_kernel(amount: int) -> Callable[[Any], int]:
    """A kernel that returns `expected(amount)`, by way of a function that LLVM cannot put into it: it calls itself."""

    @njit
    def mix(times: int) -> int:
        return 0 if times == 0 else (3 * mix(times - 1)) ^ amount

    def kernel(frame: Any) -> int:
        return mix(address_of(frame))

    kernel.__qualname__ = f"kernel_{amount}"
    return kernel


def expected(amount: int) -> int:
    value = 0
    for _ in range(TIMES):
        value = 3 * value ^ amount
    return value


def compile_alone(amount: int) -> Any:
    """As a process does that compiles nothing else: Numba's numbers of functions begin where they begin in each."""
    FunctionIdentity._unique_ids = itertools.count(1_000_000)
    return machine_code._compile(make_kernel(amount))


@pytest.mark.parametrize("read", [False, True], ids=["compiled here", "read from a file"])
def test_a_kernel_calls_its_own_functions(read: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FunctionIdentity, "_unique_ids", FunctionIdentity._unique_ids)
    amounts = (30, 500) if read else (2, 7)
    held = [compile_alone(amount) for amount in amounts]
    addresses = [code.address for code in held]
    if read:
        states = [(code.native_name, code._library.serialize_using_object_code()) for code in held]
        held = [MachineCode.of(*state, read=True) for state in states]
        addresses = [code.address for code in held]
    call = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p)
    assert [call(address)(TIMES) for address in addresses] == [expected(amount) for amount in amounts]
