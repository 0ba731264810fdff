"""The arguments that a program calls its kernels with, as far as they follow from the program's own integers.

A kernel's scalar operands (the bound of its grid, work lists, lengths) are computed by the program around it. They are
computed here too, from the traced program: every operation whose inputs are known runs, all others are passed over.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """One call of a Pallas kernel: its name, and its operands in order, None for those that are not known.

    A kernel that has no name is called as the compiled program calls it: by the jitted function around it.
    """

    name: str
    operands: tuple[np.ndarray | None, ...]


def kernel_calls(function: Callable[..., Any], *args: Any) -> tuple[KernelCall, ...]:
    """Calls of Pallas kernels in the order in which `function(*args)` makes them.

    Leaves of `args` that are `jax.ShapeDtypeStruct` are not known; the others are.
    """
    leaves = jax.tree.leaves(args)
    traced = jax.make_jaxpr(function)(*args)
    known = [None if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves]
    found: list[KernelCall] = []
    _run(traced.jaxpr, traced.consts, known, found, "")
    return tuple(found)


def _run(
    jaxpr: core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], found: list[KernelCall], around: str
) -> list[Any]:
    """The outputs of a program, None for those that depend on what is not known. `around`: the jitted function."""
    values: dict[core.Var, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else values.get(atom)

    for equation in jaxpr.eqns:
        arguments = [read(atom) for atom in equation.invars]
        name = equation.primitive.name
        if name == "pallas_call":
            known = tuple(None if x is None else np.asarray(x) for x in arguments)
            found.append(KernelCall(name=equation.params["name"] or around, operands=known))
            outputs: Sequence[Any] = [None] * len(equation.outvars)
        elif all(x is not None for x in arguments):
            outputs = equation.primitive.bind(*arguments, **equation.params)
            outputs = outputs if equation.primitive.multiple_results else [outputs]
        elif isinstance(inner := equation.params.get("jaxpr", equation.params.get("call_jaxpr")), core.ClosedJaxpr):
            jitted = equation.params["name"] if name in ("jit", "pjit") else around
            outputs = (
                _run(inner.jaxpr, inner.consts, arguments, found, jitted)
                if name in _CALLS
                else [None] * len(equation.outvars)
            )
        else:
            outputs = [None] * len(equation.outvars)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat")
