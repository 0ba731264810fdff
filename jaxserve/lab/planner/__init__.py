"""The planner: whether a config fits given devices, and how fast it could be, on a machine that has none of them.

    config + config.json --place_ahead--> shapes with shardings --plan_stage_memory--> pages, or "does not fit"
                                               |
                                               +--compile_stage--> executables --> temporaries, kernels, collectives,
                                                                                   bytes moved --> a roofline

Whether a model fits is arithmetic on shapes, and it is the server's own arithmetic: the same functions size the pages,
only the bytes of the device come from a data sheet (`jaxserve.values.chips`). So a model that is too large is reported
in seconds, before anything is compiled. Everything else is read from the real step, compiled for the real topology by
the real compiler: whether Mosaic compiles the kernels, the memory that XLA needs beside weights and pages, the bytes
that devices send each other. Only the last part, seconds, is a prediction, and each prediction comes with its
assumptions.

`make_plan` is the entry. `fit` sizes memory, `steps` compiles, `experts` reads what a step does with experts, `count`
guesses times of steps by the schedules of their kernels, `predict` estimates times by a roofline, `report` has the
values of a plan, `show` prints it.
"""

from jaxserve.lab.planner.make import PlanOptions, make_plan
from jaxserve.lab.planner.report import Plan

__all__ = ["Plan", "PlanOptions", "make_plan"]
