"""A parser of optimised HLO: computations, instructions, the sizes of shapes.

`sum_order` reads the order of sums in it; `lab.compiled` counts what a program moves and sends.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "c64": 8, "c128": 16}  # the others have their bits in their name
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^{}]*\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TURNS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_KERNEL_TARGETS = ('custom_call_target="tpu_custom_call"', 'custom_call_target="mosaic_gpu')
_OP_NAME = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One line of a computation. `text` is the whole of it."""

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    text: str
    is_root: bool

    @property
    def called(self) -> list[str]:
        """Names of the computations that it calls."""
        branches = _BRANCHES.search(self.text)
        if branches:
            return [name.strip().lstrip("%") for name in branches.group(1).split(",")]
        return _CALLED.findall(self.text)

    @property
    def turns(self) -> int | None:
        """How often a loop runs its body, where the compiler knows."""
        found = _TURNS.search(self.text)
        return int(found.group(1)) if found else None

    @property
    def scopes(self) -> list[str]:
        """The named scopes that it came from, outermost first; JAX's name of the operation is the last."""
        found = _OP_NAME.search(self.text)
        return found.group(1).split("/") if found else []

    @property
    def kernel(self) -> str | None:
        """The name of the Pallas kernel that this custom call runs; None for all else."""
        if self.op != "custom-call" or not any(target in self.text for target in _KERNEL_TARGETS):
            return None
        # The last scope is JAX's own name for any kernel, the one before it is the kernel's name.
        return self.scopes[-2] if len(self.scopes) > 1 else self.name


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A program. `computations` holds the instructions of each by name; `entry` is the one that runs."""

    computations: Mapping[str, list[Instruction]]
    entry: str


def parse_hlo(text: str) -> Module:
    """Parses the text of `Compiled.as_text()`."""
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", None
    for line in text.splitlines():
        opening = _COMPUTATION.match(line)
        if opening:
            current = computations.setdefault(opening.group(2), [])
            entry = opening.group(2) if opening.group(1) else entry
            continue
        found = _INSTRUCTION.match(line)
        if found and current is not None:
            root, name, shape, op, rest = found.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", _arguments(rest)))
            current.append(Instruction(name=name, shape=shape, op=op, operands=operands, text=line, is_root=bool(root)))
    assert entry, "the text has no entry computation"
    return Module(computations=computations, entry=entry)


def shape_bytes(shape: str) -> list[int]:
    """Bytes of each array of a shape, in order."""
    return [_size(match) for match in _SHAPE.finditer(shape)]


def all_bytes(shape: str) -> int:
    """Bytes of all arrays of a shape, in any memory."""
    return sum(shape_bytes(shape))


def main_bytes(shape: str) -> int:
    """Bytes of the arrays of a shape that lie in the main memory (memory space 0)."""
    return sum(_size(m) for m in _SHAPE.finditer(shape) if not re.search(r"S\([1-9]\)", m.group(3) or ""))


def arrays_of(shape: str) -> list[str]:
    """The arrays of a shape as texts of their own."""
    return [m.group(0) for m in _SHAPE.finditer(shape)]


def dims_of(shape: str) -> tuple[int, ...]:
    """The sizes of the first array of a shape; () for one that has none."""
    found = _SHAPE.search(shape)
    return tuple(int(d) for d in found.group(2).split(",") if d) if found else ()


def _size(match: re.Match[str]) -> int:
    dtype, dims = match.group(1), match.group(2)
    if dtype == "token":
        return 0
    bits = re.search(r"\d+", dtype)
    width = _BYTES[dtype] if dtype in _BYTES else int(bits.group()) / 8 if bits else 4
    return int(width * math.prod(int(d) for d in dims.split(",") if d))


def _arguments(rest: str) -> str:
    """The operands, up to the parenthesis that closes them."""
    depth = 1
    for at, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return rest[:at]
    return rest
