"""The cut of a plan into micro-batches, which a pipeline has in flight at once, and the order of their launches. Each
part is a plan like any other.

Two parts must not need each other's tokens. So decode rows are dealt out, and a chunk of a prompt is cut in the order
of its tokens, since a stage writes the keys of one piece before it sees the next.
"""

import dataclasses
from collections.abc import Iterator

from jaxserve.sched.plan import Chunk, Parts, StepPlan

MIN_PIECE = 32  # fewest tokens of a chunk that are worth a launch of their own


def split_plan(plan: StepPlan, num_parts: int) -> list[StepPlan]:
    """At most `num_parts` plans, in the order in which they must run; none is empty.

    How each field is split is declared with it (`sched.plan.Parts`).
    """
    if num_parts == 1:
        return [plan]
    chunks: list[list[Chunk]] = [[] for _ in range(num_parts)]
    for number, chunk in enumerate(plan.chunks):
        # Prompts start at different parts, so that several short ones do not all land in the first.
        pieces = _cut(chunk, num_parts)
        first = number % (num_parts - len(pieces) + 1)
        for at, piece in enumerate(pieces, start=first):
            chunks[at].append(piece)
    fields = dataclasses.fields(plan)
    dealt = [field.name for field in fields if Parts.of(field) is Parts.DEALT]
    rest = {field.name: field.default for field in fields if Parts.of(field) is Parts.FIRST}  # of parts after the first
    parts: list[StepPlan] = []
    for part in range(num_parts):
        if plan.decode_rows[part::num_parts] or chunks[part]:
            own = {name: getattr(plan, name)[part::num_parts] for name in dealt}
            parts.append(dataclasses.replace(plan, **own, **(rest if parts else {}), chunks=tuple(chunks[part])))
    return parts or [plan]


def launch_order(num_parts: int, num_stages: int) -> Iterator[list[tuple[int, int]]]:
    """(stage, part) of the launches in each tick: a part is one stage further in each.

    Everything that a tick leaves is handed on before the next one, also by the stages of other processes. So all
    processes launch the programs that they share in one order, and none waits for another that waits for it.
    """
    for tick in range(num_parts + num_stages - 1):
        yield [(stage, tick - stage) for stage in range(num_stages) if 0 <= tick - stage < num_parts]


def _cut(chunk: Chunk, num_parts: int) -> list[Chunk]:
    """The chunk in up to `num_parts` pieces of at least MIN_PIECE tokens; the last one samples if the chunk does."""
    total = len(chunk.token_ids)
    count = max(1, min(num_parts, total // MIN_PIECE))
    ends = [total * (i + 1) // count for i in range(count)]
    return [
        chunk._replace(
            start=chunk.start + begin,
            token_ids=chunk.token_ids[begin:end],
            sample=chunk.sample and end == total,
        )
        for begin, end in zip([0, *ends], ends, strict=False)
    ]
