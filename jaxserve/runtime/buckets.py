"""The step shapes that are compiled: few, since each costs seconds of start-up and megabytes of code.

The default sizes of each backend are here. The bucket of a plan is picked by `Limits.find_bucket`, since the scheduler
must see the same list.

The list is a sum, not a product: decode steps vary in rows, mixed steps in tokens.

    decode   (1, 1) (2, 2) (4, 4) ... (max_rows, max_rows)          one token per row
    mixed    (32, 32) (64, R) (128, R) ... (max_step_tokens, R)     R = min(tokens, max_rows)
    wide     (2, 1) (4, 1) (4, 2) (8, 2) ...                        several tokens per row, where drafts are made

Sizes double on accelerators. On a CPU they grow by four: there a shape costs about 4 CPU seconds to compile (demo
model, 2 cores), a decode step is bound by reading the weights whatever its rows, and the scheduler trims prompts to
the edges.
"""

import dataclasses
from collections.abc import Sequence

from jaxserve.errors import ConfigError
from jaxserve.sched.plan import Bucket

_SMALLEST_MIXED = 32  # below this a step costs the same: reading the weights dominates


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BackendDefaults:
    """Sizes used where the config leaves them open."""

    max_rows: int
    max_step_tokens: int
    max_mixed_tokens: int
    max_wide_tokens: int
    growth: int  # factor from one bucket to the next


# CPU: beyond 32 rows a decode step is bound by arithmetic, so more rows only raise latency; a chunk of 512 tokens
# keeps the step of a 100 M model near a quarter of a second. Accelerators: sizes that vLLM's
# users know. A mixed step is to take the rows that decode about twice as long as one of theirs: that is twice the
# tokens at which arithmetic costs as much as reading the weights, which are some 16 on a CPU and 200 to 300 on a chip.
DEFAULTS = {
    "cpu": BackendDefaults(max_rows=32, max_step_tokens=512, max_mixed_tokens=32, max_wide_tokens=64, growth=4),
    "gpu": BackendDefaults(max_rows=256, max_step_tokens=8192, max_mixed_tokens=512, max_wide_tokens=512, growth=2),
    "tpu": BackendDefaults(max_rows=256, max_step_tokens=2048, max_mixed_tokens=512, max_wide_tokens=512, growth=2),
}


def make_buckets(
    max_rows: int,
    max_step_tokens: int,
    token_buckets: list[int] | None,
    row_buckets: list[int] | None,
    growth: int = 2,
    widths: Sequence[int] = (1,),
    rounds: int = 1,
    max_wide_tokens: int = 0,
) -> tuple[Bucket, ...]:
    """The ascending list of buckets. Given lists are completed with the maximum, so that every legal step fits.

    `widths` and `rounds` add decode buckets of several tokens a row, or several rounds, up to `max_wide_tokens`
    tokens a round: beyond that arithmetic costs more than drafts can save.
    """
    rows = _edges("runtime.row_buckets", row_buckets, 1, max_rows, growth, "sched.max_rows")
    tokens = _edges(
        "runtime.token_buckets", token_buckets, _SMALLEST_MIXED, max_step_tokens, growth, "sched.max_step_tokens"
    )
    decode = [Bucket(r, r, True) for r in rows]
    mixed = [Bucket(t, min(t, max_rows), False) for t in tokens]
    wide = [
        Bucket(r * width, r, True, width, rounds)
        for width in widths
        for r in rows
        if width * rounds > 1 and (r * width <= max_wide_tokens or width == 1)
    ]
    return tuple(sorted(decode + mixed + wide))


def _edges(name: str, given: list[int] | None, smallest: int, largest: int, growth: int, limit_name: str) -> list[int]:
    if given is None:
        edges, edge = [], smallest
        while edge < largest:
            edges.append(edge)
            edge *= growth
        return [*edges, largest]
    bad = [e for e in given if not 1 <= e <= largest]
    if bad:
        raise ConfigError(f"{name} holds {bad[0]}; entries are 1..{largest} ({limit_name})")
    return sorted({*given, largest})
