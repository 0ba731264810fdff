"""XLA's own estimate of its fusions, which it writes into the optimised HLO."""

import re
from collections.abc import Mapping

from jaxserve.lab.compiled.hlo import Module

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')


def estimated_cycles(module: Module) -> Mapping[str, int]:
    """Cycles of each instruction of the entry that has an estimate: fusions with products, mostly, and copies.

    Kernels have none. A fusion overlaps its copies with its products, so that the sum of a step is near its time.
    """
    return {
        i.name: int(found.group(1))
        for i in module.computations[module.entry]
        if (found := _CYCLES.search(i.text)) is not None
    }
