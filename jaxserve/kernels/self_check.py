"""Does the chosen body work on this very device? One small batch, at start, against the XLA body.

Owns that batch and the verdict. Refuses to choose another body: a kernel that is wrong here is a fact to be told.

Why at every start: a kernel is proven for a device, a driver and a version of the compiler, and all three change
under a server. Wrong attention is not a crash; it is fluent nonsense.
"""

import jax
import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.kernels.cases import Case, make_inputs
from jaxserve.kernels.paged_attention import AttentionUse, Device, PagedAttention
from jaxserve.kernels.xla_attention import BODY as REFERENCE

# Both round to the dtype of queries, each in its own way.
_LIMIT = {"bfloat16": 1e-2, "float32": 1e-4}


def check_body(body: PagedAttention, use: AttentionUse, device: Device) -> float:
    """The relative difference between `body` and the XLA body, over decode rows, whole prompts and a later piece.

    Raises ConfigError where it is more than rounding explains.
    """
    page = use.page_size
    rows = ((1, 1), (1, page), (1, 2 * page + 3), (5, 5), (33, page + 40))
    case = Case(
        name="self check",
        spec=use.spec,
        rows=rows,
        page_size=page,
        query_dtype=use.query_dtype,
        cache_dtype=use.cache_dtype,
        padding_rows=1,
        padding_tokens=-sum(n for n, _ in rows) % 32,
    )
    found, wanted = (_outputs(case, b) for b in (body, REFERENCE))
    difference = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    limit = _LIMIT[use.query_dtype]
    if not difference <= limit:  # NaN is not at most anything
        raise ConfigError(
            f"the paged attention body {body.name!r} is wrong on {device.kind}: it differs from the reference by "
            f"{difference:.2g} of its size, where rounding explains {limit:.2g}; set kernels.paged_attention: xla, "
            "which is slower and right, and report this with the versions of jax and the driver"
        )
    return difference


def _outputs(case: Case, body: PagedAttention) -> np.ndarray:
    inputs = make_inputs(case, body)
    attend = jax.jit(body.attend, static_argnums=5, donate_argnums=3)
    out, _ = attend(inputs.q, inputs.k, inputs.v, inputs.cache, inputs.batch, case.spec, None, None, inputs.scales)
    return np.asarray(out[: sum(n for n, _ in case.rows)]).astype(np.float64)
