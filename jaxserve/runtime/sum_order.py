"""The order of a step's sums, as far as optimised HLO shows it, and where two step shapes differ.

A row's number has the same bits in two steps only if both add its terms in the same order. XLA chooses the order for
each shape anew:

    one row               the product becomes a multiplication and a reduction
    GPU, Triton           the depth is cut into parts (split-K, a batch axis of the dot that the program has not), and
                          each part into tiles; warps and tile decide the instruction, and with it the order inside
    GPU, cuBLAS           the library chooses by the shape; the HLO does not say what
    TPU                   the emitter of the product, and the window of the depth that one turn takes
    reductions            on GPUs, where Triton makes them, tile and warps; else the emitter's own choice by the shape

Equal descriptions are taken as equal orders; what is not shown counts as another order for each shape. Attention is a
kernel and left out: it says itself what it keeps (`PagedAttention.row_invariant`). Pooled sums, which serve
embeddings and no tokens, are left out too.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping

from jaxserve.runtime.hlo import Instruction, Module, parse_hlo

_OTHERS = ("attend", "pool")  # scopes that are left out
_FLOAT = re.compile(r"^\(?(?:f|bf)\d+\[")
_DIMS = re.compile(r"\[([\d,]*)\]")
_LABELS = re.compile(r"dim_labels=(\w+)_(\w+)->(\w+)")
_LANES = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Sum:
    """A sum of the model's program.

    Attributes:
      place: its named scopes, 'layer_0/mlp'.
      kind: 'product' or 'sum'.
      depth: numbers that are added up.
    """

    place: str
    kind: str
    depth: int

    def __str__(self) -> str:
        return f"the {self.kind} over {self.depth} numbers in {self.place}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One sum in all steps that have it: `orders` holds the descriptions of its order by the step's name."""

    sum: Sum
    orders: Mapping[str, frozenset[str]]

    @property
    def differs(self) -> bool:
        """A row's bits may depend on the step that it is in, or, within one step, on which copy of the sum is read."""
        return len(frozenset[str]().union(*self.orders.values())) > 1

    def __str__(self) -> str:
        shown = (f"{' and '.join(sorted(orders))} in {step}" for step, orders in self.orders.items())
        return f"{self.sum}: {'; '.join(shown)}"


def compare_orders(steps: Mapping[str, str]) -> tuple[Finding, ...]:
    """The sums of the steps whose optimised HLO is given by name."""
    found: dict[Sum, dict[str, frozenset[str]]] = defaultdict(dict)
    for name, hlo in steps.items():
        for which, orders in read_orders(hlo).items():
            found[which][name] = orders
    return tuple(Finding(sum=which, orders=found[which]) for which in sorted(found))


def read_orders(hlo: str) -> Mapping[Sum, frozenset[str]]:
    """The order of each sum in one program. Several descriptions: the compiler has made several copies of the sum."""
    module = parse_hlo(hlo)
    callers = {called: i for body in module.computations.values() for i in body for called in i.called}
    found: dict[Sum, set[str]] = defaultdict(set)
    for name, body in module.computations.items():
        shapes = {i.name: i.shape for i in body}
        for instruction in body:
            if not _left_out(instruction):
                for which, order in _sums_of(instruction, name, shapes, module, callers):
                    found[which].add(order)
    return {which: frozenset(orders) for which, orders in found.items()}


def _left_out(i: Instruction) -> bool:
    return not i.scopes or any(scope in _OTHERS for scope in i.scopes)


def _sums_of(
    i: Instruction, computation: str, shapes: Mapping[str, str], module: Module, callers: Mapping[str, Instruction]
) -> Iterator[tuple[Sum, str]]:
    if i.op == "dot":
        parts, depth = _axes(i, shapes, "lhs_batch_dims"), _axes(i, shapes, "lhs_contracting_dims")
        yield (
            _sum(i, "product", parts * depth),
            _triton(i, computation, callers, f"split in {parts}, " if parts > 1 else "") or f"XLA's loop for {i.shape}",
        )
    elif i.op == "convolution":
        yield _sum(i, "product", _depth_of_convolution(i, shapes)), _window(i, computation, callers)
    elif i.op == "custom-call" and "__cublas" in i.text:
        axes = re.search(r'"lhs_contracting_dimensions":\[([\d",]*)\]', i.text)
        lhs = _dims(shapes[i.operands[0]])
        depth = math.prod(lhs[int(axis)] for axis in re.findall(r"\d+", axes.group(1) if axes else ""))
        yield _sum(i, "product", depth), f"cuBLAS's choice for {_without_layout(i.shape)}"
    elif i.op == "reduce" and _adds_floats(i, module) and "reduce_sub_computation" not in i.text:
        # Sums of the parts of a split product are of the kind left out: a chain whose length the dot has told.
        source = shapes[i.operands[0]]
        kind = "product" if i.scopes[-1] == "dot_general" else "sum"
        order = _triton(i, computation, callers, "") or f"a reduction as XLA makes it for {_without_layout(source)}"
        yield _sum(i, kind, _axes(i, shapes, "dimensions")), order


def _sum(i: Instruction, kind: str, depth: int) -> Sum:
    """Without the names of JAX around the scopes: jit, branches of conditionals, bodies of loops, the operation."""
    scopes = [s for s in i.scopes[:-1] if not re.match(r"jit\(|cond$|branch_|while$|body$|closed_call$", s)]
    return Sum(place="/".join(scopes) or "the step", kind=kind, depth=depth)


def _adds_floats(i: Instruction, module: Module) -> bool:
    return bool(_FLOAT.match(i.shape)) and any(
        j.is_root and j.op == "add" for called in i.called for j in module.computations[called]
    )


def _axes(i: Instruction, shapes: Mapping[str, str], name: str) -> int:
    """Numbers along the axes of the first operand that the attribute names; 1 where it is missing."""
    axes = re.search(rf"\b{name}=\{{([\d,]*)\}}", i.text)
    dims = _dims(shapes[i.operands[0]])
    return math.prod(dims[int(axis)] for axis in axes.group(1).split(",")) if axes else 1


def _dims(shape: str) -> list[int]:
    found = _DIMS.search(shape)
    assert found, shape
    return [int(n) for n in found.group(1).split(",") if n]


def _without_layout(shape: str) -> str:
    return re.sub(r"\{[^}]*\}|[()]", "", shape).split(", ")[0]


def _fusion_config(computation: str, callers: Mapping[str, Instruction], key: str) -> str | None:
    """The text of the fusion that a computation is the body of, if it has a configuration with `key`."""
    caller = callers.get(computation)
    return caller.text if caller is not None and key in caller.text else None


def _triton(i: Instruction, computation: str, callers: Mapping[str, Instruction], parts: str) -> str | None:
    text = _fusion_config(computation, callers, '"block_level_fusion_config"')
    if text is None:
        return None
    warps = re.search(r'"num_warps":"(\d+)"', text)
    tiles = re.findall(r'"sizes":\[([\d",]*)\]', text)
    depth = re.search(r'"sizes":\[([\d",]*)\]', i.text)
    shown = " and ".join(tile.replace('"', "").replace(",", "x") for tile in tiles)
    depth_tile = f"{depth.group(1).replace(chr(34), '')} deep " if depth else ""
    return f"Triton {parts}in tiles {depth_tile}of {shown or 1}, {warps.group(1) if warps else '?'} warps"


def _depth_of_convolution(i: Instruction, shapes: Mapping[str, str]) -> int:
    """Everything of the left operand but its rows: the program's products have no other batch axis."""
    labels = _LABELS.search(i.text)
    assert labels, i.text
    dims = _dims(shapes[i.operands[0]])
    return math.prod(dims) // dims[labels.group(1).index("b")]


def _window(i: Instruction, computation: str, callers: Mapping[str, Instruction]) -> str:
    """The part of the depth that one turn takes, and the emitter. Windows along the output change no sum's order."""
    text = _fusion_config(computation, callers, '"window_config"') or i.text
    labels = _LABELS.search(i.text)
    bounds = re.search(r'"kernel_window_bounds":\[([\d",]*)\]', text)
    emitter = re.search(r'"emitter":"(\w+)"', text)
    if labels is None or bounds is None or emitter is None:
        return f"XLA's convolution for {_without_layout(i.shape)}"
    *spatial, _, depth = re.findall(r"\d+", bounds.group(1))  # space, output, depth
    return f"{emitter.group(1)} with {'x'.join([*spatial, str(int(depth) * _LANES)])} of the depth in a turn"
