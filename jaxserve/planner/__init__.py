"""The planner: will this config fit those devices, and how fast could it be, asked on a machine that has none of them.

    config + config.json --place_ahead--> shapes with shardings --plan_stage_memory--> pages, or "does not fit"
                                               |
                                               +--compile_stage--> executables --> temporaries, kernels, collectives,
                                                                                   bytes moved --> a roofline

Why it has this shape. What fits is arithmetic on shapes, and it is the server's own arithmetic: the same functions
size the pages here and there, only the bytes of the device come from a data sheet (`jaxserve.chips`). So a model that
is too large is told in seconds, before anything is compiled. Everything else is read from the real step, compiled for
the real topology by the real compiler: whether Mosaic takes the kernels, what XLA needs beside weights and pages, what
the devices send each other. Only the last part, seconds, is a prediction, and each prediction travels with the
assumptions that it rests on.

`make_plan` is the door. `fit` knows memory, `steps` compiles, `predict` divides, `report` is what comes out, `show`
prints it.
"""

from jaxserve.planner.make import PlanOptions, make_plan
from jaxserve.planner.report import Plan

__all__ = ["Plan", "PlanOptions", "make_plan"]
