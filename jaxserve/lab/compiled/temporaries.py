"""The largest temporaries of a compiled step, read from its optimised HLO.

XLA tells how many bytes all temporaries take together, not what they are.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from jaxserve.lab.compiled.traffic import updates_in_place
from jaxserve.runtime.hlo import Instruction, Module, arrays_of, dims_of, main_bytes

# Instructions whose result is no memory of its own: what a caller or an operand has, or what the computations that
# they run make, which are visited by themselves.
_NO_MEMORY = frozenset(
    ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "while", "conditional", "call")
)
_IN_PLACE = frozenset(("scatter", "dynamic-update-slice"))
_RUNS = frozenset(("while", "conditional", "call"))
_TILE = re.compile(r":T\((\d+)(?:,(\d+))?\)")
_ORDER = re.compile(r"\{([\d,]+)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Temporary:
    """One array that a step makes. `size`: bytes in memory, with what tiles add; `scope`: where it comes from."""

    size: int
    shape: str
    scope: str


def largest_temporaries(module: Module, at_least: int = 0) -> tuple[Temporary, ...]:
    """The arrays that a step makes in the main memory, the largest first; of those alike, one.

    Results that take the place of an operand are none: pages and the state of sampling.
    """
    found: dict[tuple[str, str], Temporary] = {}
    for instruction, computation in _executed(module):
        if instruction.op in _NO_MEMORY or instruction.op.endswith("-done"):
            continue
        if instruction.op in _IN_PLACE or updates_in_place(instruction, module.computations):
            continue
        aliased = _operand_shapes(instruction, module.computations[computation]) if _shares(instruction) else []
        for shape in arrays_of(instruction.shape):
            if shape not in aliased:
                scope = "/".join(instruction.scopes[1:])
                made = Temporary(size=padded_bytes(shape), shape=shape, scope=scope)
                found.setdefault((shape, scope), made)
    return tuple(sorted((t for t in found.values() if t.size >= at_least), key=lambda t: -t.size))


def padded_bytes(shape: str) -> int:
    """Bytes of one array in the main memory; on TPUs with the rest of its last tiles (`T(8,128)` of the layout)."""
    size, tile, order = main_bytes(shape), _TILE.search(shape), _ORDER.search(shape)
    dims = dims_of(shape)
    if not size or tile is None or order is None or not dims:
        return size
    minor = [int(d) for d in order.group(1).split(",")]
    tiles = [int(n) for n in tile.groups() if n is not None]
    for of_tile, axis in zip(reversed(tiles), minor, strict=False):
        size = size // dims[axis] * (-(-dims[axis] // of_tile) * of_tile)
    return size


def _executed(module: Module) -> Iterator[tuple[Instruction, str]]:
    """Instructions of the entry and of all computations that run as its loops and branches."""
    seen, left = {module.entry}, [module.entry]
    while left:
        name = left.pop()
        for instruction in module.computations[name]:
            yield instruction, name
            if instruction.op in _RUNS:
                new = [n for n in instruction.called if n not in seen]
                seen.update(new)
                left += new


def _shares(i: Instruction) -> bool:
    """Whether some of the results are operands: of a kernel that writes in place, of a copy that has been started."""
    return i.op.endswith("-start") or (i.op == "custom-call" and "output_to_operand_aliasing" in i.text)


def _operand_shapes(i: Instruction, computation: Sequence[Instruction]) -> list[str]:
    shapes = {other.name: other.shape for other in computation}
    return [array for name in i.operands for array in arrays_of(shapes.get(name, ""))]
