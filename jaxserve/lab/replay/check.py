"""The check whether a plan from a file may be given to a device.

It covers the rules whose breach would make a device read or write where it must not. Breaches of the other rules of
`sched.plan` only make wrong tokens, and are found by comparing tokens.
"""

from jaxserve.errors import StepLogError
from jaxserve.sched import Limits, StepPlan


def check_plan(plan: StepPlan, limits: Limits, vocab_size: int) -> None:
    """Raises StepLogError when a row, a page, a host slot, a position or a token does not exist."""
    rows = [*plan.decode_rows, *plan.freed_rows, *(c.row for c in plan.chunks), *(s.row for s in plan.setups)]
    rows += [*(g.row for g in plan.grants), *(m.row for m in plan.masks), *(d.row for d in plan.drafts)]
    _check(plan, "row", rows, 0, limits.max_rows - 1)
    pages = [page_id for grant in plan.grants for page_id in grant.page_ids]
    pages += [page_id for copy in plan.copies for page_id in copy]
    pages += [*(save.page_id for save in plan.saves), *(load.page_id for load in plan.loads)]
    slots = [*(save.slot for save in plan.saves), *(load.slot for load in plan.loads)]
    _check(plan, "host slot", slots, 0, limits.slots.num_slots - 1)
    _check(plan, "page", pages, 1, limits.num_pages)
    _check(plan, "group of layers", [g.group for g in plan.grants], 0, len(limits.page_groups) - 1)
    columns = [c for g in plan.grants for c in (g.first, g.first + len(g.page_ids) - 1)]
    _check(plan, "column of the block table", columns, 0, -(-limits.max_model_len // limits.page_size) - 1)
    ends = [position for c in plan.chunks for position in (c.start, c.start + len(c.token_ids) - 1)]
    _check(plan, "position", [*plan.decode_positions, *ends], 0, limits.max_model_len - 1)
    places = [mask.place for mask in plan.masks] + [len(draft.token_ids) for draft in plan.drafts]
    _check(plan, "place of a draft", places, 0, plan.width - 1)
    for tokens in (*plan.chunks, *plan.drafts):
        _check(plan, "token", tokens.token_ids, 0, vocab_size - 1)
    for setup in plan.setups:
        _check(plan, "token", setup.token_ids, 0, vocab_size - 1)
        _check(plan, "number of known tokens", (setup.num_tokens,), 1, limits.max_model_len)
        if len(setup.token_ids) > setup.num_tokens:
            raise StepLogError(
                f"step {plan.step_id} has {len(setup.token_ids)} of {setup.num_tokens} known tokens; the log is damaged"
            )
    if len(plan.decode_rows) != len(plan.decode_positions):
        raise StepLogError(
            f"step {plan.step_id} has {len(plan.decode_positions)} positions of its decode rows; damaged"
        )
    batch = [*plan.decode_rows, *(c.row for c in plan.chunks)]
    if len(set(batch)) != len(batch):
        raise StepLogError(f"step {plan.step_id} computes a row twice; the log is damaged")
    if limits.bucket_of(plan) is None:
        raise StepLogError(
            f"step {plan.step_id} has {plan.num_tokens} tokens of {plan.num_rows} rows: no step holds that"
        )
    if len(plan.row_tokens) not in (0, len(plan.decode_rows)):
        raise StepLogError(
            f"step {plan.step_id} has {len(plan.row_tokens)} numbers of tokens of its decode rows; damaged"
        )
    _check(plan, "number of tokens", plan.row_tokens, 1, plan.width * plan.rounds)
    last = [position + most - 1 for position, most in zip(plan.decode_positions, plan.row_tokens, strict=False)]
    _check(plan, "position", last, 0, limits.max_model_len - 1)


def _check(plan: StepPlan, what: str, values: list[int] | tuple[int, ...], low: int, high: int) -> None:
    if not values:
        return
    worst = min(values) if min(values) < low else max(values)
    if not low <= worst <= high:
        raise StepLogError(f"step {plan.step_id} names {what} {worst}, but there are {low}..{high}; the log is damaged")
