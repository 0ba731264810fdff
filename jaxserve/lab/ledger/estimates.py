"""XLA's own estimate of its fusions, which it writes into the optimised HLO."""

import re
from collections.abc import Mapping

from jaxserve.runtime.hlo import Module

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(module: Module, computation: str | None = None) -> Mapping[str, int]:
    """Cycles of each instruction of a computation, None for the entry, that has an estimate: fusions and copies.

    Kernels have none. A fusion overlaps its copies with its products, so that the sum of a step is near its time.
    """
    return {
        i.name: int(found.group(1))
        for i in module.computations[computation or module.entry]
        if (found := _CYCLES.search(i.text)) is not None
    }
