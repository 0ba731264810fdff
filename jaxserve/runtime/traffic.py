"""How many bytes a compiled step moves through the memory of the device, read from its optimised HLO.

Owns the count. Refuses time: bytes over bandwidth is the caller's division.

Why not `cost_analysis()["bytes accessed"]`: it counts what XLA stages in the fast memory of a TPU three times (read,
written there, read there), a lookup in a table as the whole table, and an update in place as the whole array. On
decode, where bytes are time, that is more than twice the truth.
"""

import dataclasses
import math
import re
from collections.abc import Mapping

_BYTES = {"pred": 1, "s4": 0.5, "u4": 0.5, "c64": 8, "c128": 16}  # the others have their bits in their name
_FREE = frozenset(("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"))
# Only the result is read of these operands, whatever their own size.
_PICKS = frozenset(("gather", "dynamic-slice", "slice"))
_UPDATES = frozenset(("scatter", "dynamic-update-slice"))

_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](\{[^{}]*\})?")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([a-z][\w\-]*)\((.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Instruction:
    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    text: str
    is_root: bool


def memory_traffic(hlo: str) -> Mapping[str, int]:
    """Bytes read and written in the main memory by each instruction of the entry of an optimised HLO module.

    Kernels count what their cost estimate states; a conditional its dearest branch; a loop one turn of its body.
    """
    computations, entry = _parse(hlo)
    return _Counter(computations).count(entry)


class _Counter:
    def __init__(self, computations: Mapping[str, list[_Instruction]]) -> None:
        self.computations = computations

    def count(self, computation: str) -> dict[str, int]:
        instructions = self.computations[computation]
        shapes = {i.name: i.shape for i in instructions}
        return {i.name: total for i in instructions if (total := self._bytes(i, shapes)) > 0}

    def _bytes(self, i: _Instruction, shapes: Mapping[str, str]) -> int:
        if i.op in _FREE or i.op.endswith(("-done", "-update")):
            return 0
        if i.op == "custom-call":
            return _kernel_bytes(i, shapes)
        if i.op == "fusion":
            return self._fusion_bytes(i, shapes)
        called = _called(i)
        if i.op in ("while", "conditional", "call") and called:
            return max(sum(self.count(name).values()) for name in called)
        if i.op.endswith("-start") or i.op in _PICKS:
            return _moved_bytes(i, shapes)
        if i.op in _UPDATES:
            return 2 * sum(_main_bytes(shapes.get(o, "")) for o in i.operands[1:])
        return _main_bytes(i.shape) + sum(_main_bytes(shapes.get(o, "")) for o in i.operands)

    def _fusion_bytes(self, i: _Instruction, shapes: Mapping[str, str]) -> int:
        (name,) = _called(i)
        inner = self.computations[name]
        parameters = {int(p.text.split("parameter(")[1].split(")")[0]): p.name for p in inner if p.op == "parameter"}
        total, updated = 0, False
        for number, operand in enumerate(i.operands):
            whole = _main_bytes(shapes.get(operand, ""))
            touched, in_place = self._touched(inner, parameters[number])
            updated |= in_place and whole > 0
            total += whole if touched is None else min(whole, touched)
        # An update in place has counted what it wrote with its operand; its result is that operand.
        return total + (0 if updated else _main_bytes(i.shape))

    def _touched(self, inner: list[_Instruction], parameter: str) -> tuple[int | None, bool]:
        """Bytes of a parameter that a fusion touches, None for all of it; and whether it is updated in place."""
        if next(j for j in inner if j.name == parameter).is_root:
            return None, False  # handed on whole
        shapes = {j.name: j.shape for j in inner}
        users = [j for j in inner if parameter in j.operands]
        total = 0
        for user in users:
            if user.op == "bitcast":
                touched, in_place = self._touched(inner, user.name)
                if touched is None or in_place:
                    return touched, in_place
                total += touched
            elif user.op in _PICKS and user.operands[0] == parameter:
                total += _all_bytes(user.shape)
            elif user.op in _UPDATES and user.operands[0] == parameter:
                return 2 * sum(_all_bytes(shapes[o]) for o in user.operands[1:]), True
            elif user.op == "fusion":
                (name,) = _called(user)
                nested = self.computations[name]
                number = user.operands.index(parameter)
                of = next(p.name for p in nested if p.op == "parameter" and f"parameter({number})" in p.text)
                touched, in_place = self._touched(nested, of)
                if touched is None or in_place:
                    return touched, in_place
                total += touched
            else:
                return None, False
        return total, False


def _kernel_bytes(i: _Instruction, shapes: Mapping[str, str]) -> int:
    estimate = re.search(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)', i.text)
    if estimate is not None:
        return int(estimate.group(1))
    if "AssumeGatherIndicesInBound" in i.text or "Bitcast" in i.text or "Bitpacked" in i.text:
        return 0  # notes to the compiler
    return _main_bytes(i.shape) + sum(_main_bytes(shapes.get(o, "")) for o in i.operands)


def _moved_bytes(i: _Instruction, shapes: Mapping[str, str]) -> int:
    """Copies and slices: as much is read as the result holds, and written where that lies in main memory."""
    parts = [m.group(0) for m in _SHAPE.finditer(i.shape)]
    if i.op == "copy-start":
        result = parts[0]
    elif i.op.endswith("-start"):
        result = parts[1] if len(parts) > 1 else parts[0]
    else:
        result = parts[0]
    source = shapes.get(i.operands[0], "")
    reads = _all_bytes(result) if _main_bytes(source) else 0
    return reads + _main_bytes(result)


def _main_bytes(shape: str) -> int:
    """Bytes of the arrays of a shape that lie in the main memory (memory space 0)."""
    return sum(_size(m) for m in _SHAPE.finditer(shape) if not re.search(r"S\([1-9]\)", m.group(3) or ""))


def _all_bytes(shape: str) -> int:
    return sum(_size(m) for m in _SHAPE.finditer(shape))


def _size(match: re.Match[str]) -> int:
    dtype, dims = match.group(1), match.group(2)
    if dtype == "token":
        return 0
    bits = re.search(r"\d+", dtype)
    width = _BYTES[dtype] if dtype in _BYTES else int(bits.group()) / 8 if bits else 4
    return int(width * math.prod(int(d) for d in dims.split(",") if d))


def _called(i: _Instruction) -> list[str]:
    branches = _BRANCHES.search(i.text)
    if branches:
        return [name.strip().lstrip("%") for name in branches.group(1).split(",")]
    return _CALLED.findall(i.text)


def _parse(hlo: str) -> tuple[dict[str, list[_Instruction]], str]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", None
    for line in hlo.splitlines():
        opening = _COMPUTATION.match(line)
        if opening:
            current = computations.setdefault(opening.group(2), [])
            entry = opening.group(2) if opening.group(1) else entry
            continue
        found = _INSTRUCTION.match(line)
        if found and current is not None:
            root, name, shape, op, rest = found.groups()
            operands = tuple(re.findall(r"%([\w.\-]+)", _arguments(rest)))
            current.append(
                _Instruction(name=name, shape=shape, op=op, operands=operands, text=line, is_root=bool(root))
            )
    assert entry, "the text has no entry computation"
    return computations, entry


def _arguments(rest: str) -> str:
    """The operands, up to the parenthesis that closes them."""
    depth = 1
    for at, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return rest[:at]
    return rest
