"""Counts of the bytes that a compiled step moves through the memory of the device, read from its optimised HLO.

XLA's own `cost_analysis()["bytes accessed"]` does not do: it counts what XLA stages in the fast memory of a TPU three
times (read, written there, read there), a lookup in a table as the whole table, and an update in place as the whole
array. On decode, where bytes are time, that is more than twice the truth.
"""

import re
from collections.abc import Mapping

from jaxserve.kernels.pallas import gpu_matmul, tpu_expert_codes, tpu_matmul
from jaxserve.runtime.hlo import Instruction, Module, all_bytes, arrays_of, dims_of, main_bytes, parse_hlo

_FREE = frozenset(("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all"))
# Only the result is read of these operands, whatever their own size.
_PICKS = frozenset(("gather", "dynamic-slice", "slice"))
_UPDATES = frozenset(("scatter", "dynamic-update-slice"))
_GPU_PRODUCT = "multiply_tile"  # the kernel of `kernels.pallas.gpu_grouped_matmul`
_TPU_CODES = "grouped_codes"  # the kernel of `kernels.pallas.tpu_matmul`
_GPU_CODES = "multiply_codes"  # the kernel of `kernels.pallas.gpu_matmul`
_EXPERT_CODES = "expert_codes"  # the kernel of `kernels.pallas.tpu_expert_codes`
_PRODUCT_SCOPES = frozenset(("gate_up", "down"))  # of the products of `models.experts`


def memory_traffic(hlo: str | Module, computation: str | None = None, *, hit_share: float = 1.0) -> Mapping[str, int]:
    """Bytes read and written in the main memory by each instruction of a computation of an optimised HLO module.

    None is its entry. Kernels count what their cost estimate states; a conditional its most expensive branch; a loop
    one turn of its body.

    Grouped products read `hit_share` of the experts that the device stores, each once. A program cannot tell it: a
    product has rows of other devices' experts and of padding.
    """
    module = parse_hlo(hlo) if isinstance(hlo, str) else hlo
    return _Counter(module.computations, hit_share).count(computation or module.entry)


def grouped_products(module: Module) -> frozenset[str]:
    """Instructions of the entry that run a kernel of grouped products."""
    return frozenset(i.name for i in module.computations[module.entry] if is_grouped_product(i))


def weight_kernels(module: Module) -> frozenset[str]:
    """Instructions of the entry that run a kernel which reads weights; other kernels read pages."""
    return frozenset(i.name for i in module.computations[module.entry] if is_weight_kernel(i))


def is_weight_kernel(i: Instruction) -> bool:
    """Whether a kernel of products runs here, of experts or of codes."""
    return is_grouped_product(i) or i.kernel in (_TPU_CODES, _GPU_CODES)


def is_grouped_product(i: Instruction) -> bool:
    """Whether a kernel of grouped products runs here: XLA's for TPUs, or one of ours."""
    is_ours = i.kernel in (_GPU_PRODUCT, _EXPERT_CODES)
    return i.op == "custom-call" and (i.name.startswith("ragged-dot-none") or is_ours)


def kernel_calls(module: Module) -> Mapping[str, str]:
    """Instruction -> name of the Pallas kernel it runs, over the entry of a module."""
    return {i.name: kernel for i in module.computations[module.entry] if (kernel := i.kernel) is not None}


def names_in_scope(module: Module, scope: str) -> frozenset[str]:
    """Instructions of the entry that came from a named scope, such as 'sample'."""
    return frozenset(i.name for i in module.computations[module.entry] if scope in i.scopes)


def updates_in_place(i: Instruction, computations: Mapping[str, list[Instruction]]) -> bool:
    """Whether a fusion's result takes the place of one of its operands."""
    if i.op != "fusion":
        return False
    counter, (name,) = _Counter(computations, 1.0), i.called
    inner = computations[name]
    return any(counter.touched(inner, p.name)[1] for p in inner if p.op == "parameter")


class _Counter:
    def __init__(self, computations: Mapping[str, list[Instruction]], hit_share: float) -> None:
        self.computations = computations
        self.hit_share = hit_share

    def count(self, computation: str) -> dict[str, int]:
        instructions = self.computations[computation]
        shapes = {i.name: i.shape for i in instructions}
        return {i.name: total for i in instructions if (total := self._bytes(i, shapes)) > 0}

    def _bytes(self, i: Instruction, shapes: Mapping[str, str]) -> int:
        if i.op in _FREE or i.op.endswith(("-done", "-update")):
            return 0
        if i.op == "custom-call":
            if i.kernel in (_TPU_CODES, _GPU_CODES):
                return _codes_bytes(i, shapes)
            if i.kernel == _EXPERT_CODES:
                return _expert_codes_bytes(i, shapes, self.hit_share)
            return _product_bytes(i, shapes, self.hit_share) if is_grouped_product(i) else _kernel_bytes(i, shapes)
        if i.op == "fusion":
            return self._fusion_bytes(i, shapes)
        called = i.called
        if i.op in ("while", "conditional", "call") and called:
            return self._turns(i) * max(sum(self.count(name).values()) for name in called)
        if i.op.endswith("-start") or i.op in _PICKS:
            return _moved_bytes(i, shapes)
        if i.op in _UPDATES:
            return 2 * sum(main_bytes(shapes.get(o, "")) for o in i.operands[1:])
        return main_bytes(i.shape) + sum(main_bytes(shapes.get(o, "")) for o in i.operands)

    def _turns(self, i: Instruction) -> int:
        """Turns to count: of the loop over experts (`kernels.xla_grouped_matmul`), one for each that is hit."""
        if i.op != "while" or not _PRODUCT_SCOPES.intersection(i.scopes):
            return 1
        weight = max(arrays_of(i.shape), key=all_bytes)
        return max(1, round(self.hit_share * dims_of(weight)[0]))

    def _fusion_bytes(self, i: Instruction, shapes: Mapping[str, str]) -> int:
        (name,) = i.called
        inner = self.computations[name]
        parameters = {int(p.text.split("parameter(")[1].split(")")[0]): p.name for p in inner if p.op == "parameter"}
        total, updated = 0, False
        for number, operand in enumerate(i.operands):
            whole = main_bytes(shapes.get(operand, ""))
            touched, in_place = self.touched(inner, parameters[number])
            updated |= in_place and whole > 0
            total += whole if touched is None else min(whole, touched)
        # An update in place has counted what it wrote with its operand; its result is that operand.
        return total + (0 if updated else main_bytes(i.shape))

    def touched(self, inner: list[Instruction], parameter: str) -> tuple[int | None, bool]:
        """Bytes of a parameter that a fusion touches, None for all of it; and whether it is updated in place."""
        if next(j for j in inner if j.name == parameter).is_root:
            return None, False  # passed on whole
        shapes = {j.name: j.shape for j in inner}
        users = [j for j in inner if parameter in j.operands]
        total = 0
        for user in users:
            if user.op == "bitcast":
                touched, in_place = self.touched(inner, user.name)
                if touched is None or in_place:
                    return touched, in_place
                total += touched
            elif user.op in _PICKS and user.operands[0] == parameter:
                total += all_bytes(user.shape)
            elif user.op in _UPDATES and user.operands[0] == parameter:
                return 2 * sum(all_bytes(shapes[o]) for o in user.operands[1:]), True
            elif user.op == "fusion":
                (name,) = user.called
                nested = self.computations[name]
                number = user.operands.index(parameter)
                of = next(p.name for p in nested if p.op == "parameter" and f"parameter({number})" in p.text)
                touched, in_place = self.touched(nested, of)
                if touched is None or in_place:
                    return touched, in_place
                total += touched
            else:
                return None, False
        return total, False


def _kernel_bytes(i: Instruction, shapes: Mapping[str, str]) -> int:
    estimate = re.search(r'"cost_estimate":\{[^}]*"bytes_accessed":"?(\d+)', i.text)
    if estimate is not None:
        return int(estimate.group(1))
    if "AssumeGatherIndicesInBound" in i.text or "Bitcast" in i.text or "Bitpacked" in i.text:
        return 0  # notes to the compiler
    return main_bytes(i.shape) + sum(main_bytes(shapes.get(o, "")) for o in i.operands)


def _product_bytes(i: Instruction, shapes: Mapping[str, str], hit_share: float) -> int:
    """A grouped product: all of the rows and results, and of the experts [E, ...], the last operand, those hit."""
    *others, weight = i.operands
    moved = main_bytes(i.shape) + sum(main_bytes(shapes[o]) for o in others)
    return moved + int(hit_share * main_bytes(shapes[weight]))


def _codes_bytes(i: Instruction, shapes: Mapping[str, str]) -> int:
    """A product with codes: rows once, the codes and their scales once for each block of rows.

    A TPU kernel's cost estimate knows nothing of codes that were copied into fast memory before, which then counted
    twice; a GPU kernel has none.
    """
    weights = [shapes[operand] for operand in i.operands]
    if i.kernel == _TPU_CODES:
        rows, block = weights.pop(0), tpu_matmul.MAX_ROWS  # [G, T, g]
        num_rows = dims_of(rows)[1]
    else:
        rows = weights.pop(1)  # [T, K]
        num_rows = dims_of(rows)[0]
        block = gpu_matmul.tile_rows(num_rows)
    turns = -(-num_rows // block)
    return main_bytes(i.shape) + main_bytes(rows) + turns * sum(map(main_bytes, weights))


def _expert_codes_bytes(i: Instruction, shapes: Mapping[str, str], hit_share: float) -> int:
    """A grouped product with codes: rows once for each block of outputs, codes and scales of the experts hit once."""
    rows, *weights = (shapes[operand] for operand in i.operands[2:])
    blocks = -(-dims_of(weights[0])[-1] // tpu_expert_codes.COLUMNS)
    return main_bytes(i.shape) + blocks * main_bytes(rows) + int(hit_share * sum(map(main_bytes, weights)))


def _moved_bytes(i: Instruction, shapes: Mapping[str, str]) -> int:
    """Copies and slices: as much is read as the result holds, and written where that lies in main memory."""
    parts = arrays_of(i.shape)
    if i.op == "copy-start":
        result = parts[0]
    elif i.op.endswith("-start"):
        result = parts[1] if len(parts) > 1 else parts[0]
    else:
        result = parts[0]
    source = shapes.get(i.operands[0], "")
    reads = all_bytes(result) if main_bytes(source) else 0
    return reads + main_bytes(result)
