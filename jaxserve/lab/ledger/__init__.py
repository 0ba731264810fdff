"""The ledger: the time of a TPU kernel, counted in the schedule that the compiler wrote for it.

A TPU core issues one *bundle*, a very long instruction, in each cycle and in the order of the compiler, and libtpu
prints the final bundles on a machine that has no TPU. So a kernel can be judged without the chip:

    capture     compiles with libtpu's dump on, and finds the text of each kernel
    bundles     parses a text into bundles: labels, depths of loops, operations, units in use
    calls       the integers that a kernel is called with (work lists, lengths), from the program around it
    walk        executes the scalar operations of the bundles, and keeps the clock: a cycle a bundle, copies at the
                bandwidth of the memory, waits for copies, products at the rate of the matrix units
    predict     the time of one call on one chip, beside the time that its bytes need
    attention   the kernels of one layer's attention: compiled alone, and counted, in a process of its own if need be
    estimates   XLA's own estimate of its fusions, from the optimised HLO
    step        the time of a whole step: XLA's estimates, the bytes of its instructions, and its kernels

Scalar code alone decides which bundles run, so a walk follows every branch and every turn of a loop exactly as a core
would, with the real lengths of a batch, and no turn has to be guessed. Vectors are not computed.

What the count cannot know: the latency of a copy from its start to its first byte (an assumption of the caller, 0
unless given), conflicts between banks of the memory, refills of instructions, and the real clock, which is taken from
the published peak. Counted times are not measured times.
"""

from jaxserve.lab.ledger.attention import count_attention, counting_process, times_of_calls
from jaxserve.lab.ledger.bundles import UnknownSchedule
from jaxserve.lab.ledger.calls import kernel_calls
from jaxserve.lab.ledger.capture import captured_kernels, print_schedules
from jaxserve.lab.ledger.estimates import estimated_cycles
from jaxserve.lab.ledger.predict import KernelTime, time_of_call
from jaxserve.lab.ledger.step import PARTS, StepTime, time_of_step

__all__ = [
    "PARTS",
    "KernelTime",
    "StepTime",
    "UnknownSchedule",
    "captured_kernels",
    "count_attention",
    "counting_process",
    "estimated_cycles",
    "kernel_calls",
    "print_schedules",
    "time_of_call",
    "time_of_step",
    "times_of_calls",
]
