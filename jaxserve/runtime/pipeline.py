"""One plan as several that may be in flight at once: the micro-batches of a pipeline.

Owns the cut. Refuses devices and buckets: parts are plans like any other.

Why rows and pieces of chunks: two parts must not need each other's tokens. Decode rows are dealt out; a chunk of a
prompt is cut in the order of its tokens, since a stage writes the keys of one piece before it sees the next.
"""

import dataclasses

from jaxserve.sched.plan import Chunk, StepPlan

MIN_PIECE = 32  # tokens of a chunk that are worth a launch of their own


def split_plan(plan: StepPlan, num_parts: int) -> list[StepPlan]:
    """At most `num_parts` plans, in the order in which they must run; none is empty.

    What concerns the whole step (setups, grants, copies, freed rows) stays with the first.
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
    parts = []
    for part in range(num_parts):
        rows = plan.decode_rows[part::num_parts]
        if not rows and not chunks[part]:
            continue
        parts.append(
            StepPlan(
                step_id=plan.step_id,
                decode_rows=rows,
                decode_positions=plan.decode_positions[part::num_parts],
                chunks=tuple(chunks[part]),
            )
        )
    if not parts:
        return [plan]
    parts[0] = dataclasses.replace(
        parts[0], setups=plan.setups, grants=plan.grants, copies=plan.copies, freed_rows=plan.freed_rows
    )
    return parts


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
