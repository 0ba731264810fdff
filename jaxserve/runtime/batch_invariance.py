"""Whether the bits of a request's tokens and log-probabilities can depend on the requests beside it.

`runtime.batch_invariant` asks for the promise that they cannot, and a start fails where it cannot be kept. Noise is
keyed by (seed, position) everywhere; what is left is the order in which a row's numbers are added up. On CPUs the
kernels of Numba fix it, and `kernels.row_sum` and a flag of `xla_flags` fix the rest. On GPUs and TPUs the compiler
fixes it for each step shape, and `sum_order` reads there what it chose.
"""

from collections.abc import Mapping

from jaxserve.errors import ConfigError
from jaxserve.kernels.grouped_matmul import GroupedMatmul
from jaxserve.kernels.matmul import Matmul
from jaxserve.kernels.paged_attention import PagedAttention
from jaxserve.runtime.sum_order import compare_orders

Products = Mapping[str, Matmul | GroupedMatmul]  # implementations by the name of their op


def check_kernels(backend: str, attention: PagedAttention, products: Products) -> None:
    """Raises ConfigError, naming each op, where kernels add up a row's numbers in an order that depends on its batch.

    Products of GPUs and TPUs are left to `check_steps`.
    """
    if reasons := _reasons(backend, attention, products):
        raise ConfigError(
            f"runtime.batch_invariant is true, but {' and '.join(reasons)}; on a CPU with Numba and parallel.tensor 1, "
            "kernels.paged_attention: numba_cpu and kernels.matmul: numba_cpu keep it, elsewhere leave it false"
        )


def check_steps(steps: Mapping[str, str]) -> None:
    """Raises ConfigError, naming the first sum, where two step shapes differ in a sum's order.

    `steps` holds the optimised HLO of each by its name.
    """
    broken = [finding for finding in compare_orders(steps) if finding.differs]
    if broken:
        raise ConfigError(
            f"runtime.batch_invariant is true, but XLA orders {len(broken)} sums of a step in more than one way. The "
            f"first is {broken[0]}. Give runtime.row_buckets and runtime.token_buckets the same one number above 1, so "
            "that all steps have one shape, or leave it false"
        )


def describe_invariance(backend: str, attention: PagedAttention, products: Products) -> str:
    """One line for the log of a start: what holds, whatever the config asks for."""
    if reasons := _reasons(backend, attention, products):
        return f"a request's last bits may depend on the requests beside it: {' and '.join(reasons)}"
    if backend == "cpu":
        return "a request's tokens and log-probabilities do not depend on the requests beside it, to the last bit"
    return "a request's last bits may depend on the requests beside it: XLA orders the sums of each step shape anew"


def _reasons(backend: str, attention: PagedAttention, products: Products) -> list[str]:
    ops = {"paged_attention": attention} | (dict(products) if backend == "cpu" else {})
    return [
        f"kernels.{op}: {found.name} adds up a row's numbers in an order that can depend on its step"
        for op, found in ops.items()
        if not found.row_invariant
    ]
