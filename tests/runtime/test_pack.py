"""The packed buffer: what goes in comes out, and padding points nowhere."""

import jax
import numpy as np

from jaxserve.runtime.attention_batches import attention_batches
from jaxserve.runtime.pack import NO_TARGET, Layout, pack, split_grants, unpack
from jaxserve.runtime.row_state import FROM_DEVICE
from jaxserve.sched.plan import Bucket, Chunk, PageGrant, PageGroup, PoolSpan, StepPlan

MAX_ROWS = 6
PARAMS = np.arange((MAX_ROWS + 1) * 3, dtype=np.int32).reshape(MAX_ROWS + 1, 3)
STOPS = np.arange(4 * (MAX_ROWS + 1), dtype=np.int32).reshape(-1, 4) + 900


LENGTH = np.array([11, 3, 0, 30, 31, 7, 0], np.int32)  # of each device row, the one of padding included


def _roundtrip(plan: StepPlan, bucket: Bucket, row_tokens: dict[int, np.ndarray] | None = None, *, num_groups: int = 1):
    layout = Layout.of(bucket, max_rows=MAX_ROWS, num_params=3, page_size=4, num_groups=num_groups)
    fitting, rest = split_grants(plan.grants, layout.max_grants, MAX_ROWS)
    assert not rest
    buffer = pack(plan, layout, PARAMS, STOPS, row_tokens or {}, fitting)
    assert buffer.dtype == np.int32
    assert buffer.shape == (layout.size,)
    return jax.tree.map(np.asarray, unpack(jax.numpy.asarray(buffer), layout, jax.numpy.asarray(LENGTH)))


def test_decode_step() -> None:
    """How long a row is says the device: the positions of the plan are bounds."""
    plan = StepPlan(step_id=0, decode_rows=(5, 2), decode_positions=(9, 3), grants=(PageGrant(5, 1, (9,)),))
    inputs = _roundtrip(plan, Bucket(4, 4, True))
    assert inputs.rows.tolist() == [5, 2, MAX_ROWS, MAX_ROWS]
    assert inputs.context_lens.tolist() == [8, 1, 0, 0]
    assert inputs.positions.tolist() == [7, 0, 0, 0]
    assert inputs.token_rows.tolist() == [0, 1, 4, 4]
    assert inputs.q_starts.tolist() == [0, 1, 2, 2, 2]
    assert inputs.draws.tolist() == [1, 1, 0, 0]
    assert (inputs.tokens == FROM_DEVICE).all()
    assert inputs.params[0].tolist() == PARAMS[5].tolist()
    assert inputs.grants.tolist() == [[5, 1, 9]] + [[MAX_ROWS, 0, 0]] * 3


def test_mixed_step() -> None:
    plan = StepPlan(
        step_id=0,
        decode_rows=(1,),
        decode_positions=(3,),
        chunks=(Chunk(0, 2, (11, 12, 13), False), Chunk(4, 0, (21,), True, True)),
        grants=(PageGrant(0, 0, (1, 2)), PageGrant(4, 0, (3,))),
    )
    inputs = _roundtrip(plan, Bucket(8, 4, False), {4: np.array([21, 22, 23], np.int32)})
    assert inputs.rows.tolist() == [1, 0, 4, MAX_ROWS]
    assert inputs.context_lens.tolist() == [4, 5, 1, 0]
    assert inputs.tokens.tolist() == [FROM_DEVICE, 11, 12, 13, 21, 0, 0, 0]
    assert inputs.token_rows.tolist() == [0, 1, 1, 1, 2, 4, 4, 4]
    assert inputs.positions.tolist() == [3, 2, 3, 4, 0, 0, 0, 0]
    assert inputs.q_starts.tolist() == [0, 1, 4, 5, 5]
    assert inputs.draws.tolist() == [1, 0, 1, 0]
    assert inputs.targets.tolist() == [NO_TARGET] * 4 + [22] + [NO_TARGET] * 3
    assert inputs.grants[:3].tolist() == [[0, 0, 1], [0, 1, 2], [4, 0, 3]]


def test_the_last_prompt_token_has_no_target() -> None:
    plan = StepPlan(step_id=0, chunks=(Chunk(3, 1, (22, 23), True, True),))
    inputs = _roundtrip(plan, Bucket(4, 2, False), {3: np.array([21, 22, 23], np.int32)})
    assert inputs.targets.tolist() == [23, NO_TARGET, NO_TARGET, NO_TARGET]


def test_tokens_that_are_pooled() -> None:
    """A span that begins before the chunk, ends after it, lies within, and is elsewhere."""
    spans = (PoolSpan(0, 9), PoolSpan(4, 5), PoolSpan(0, 1))
    plan = StepPlan(
        step_id=0,
        decode_rows=(5,),
        decode_positions=(3,),
        chunks=tuple(Chunk(row, 3, (11, 12, 13), False, False, span) for row, span in enumerate(spans)),
    )
    inputs = _roundtrip(plan, Bucket(12, 5, False))
    assert inputs.pooled.tolist() == [[0, 0], [1, 4], [5, 6], [0, 0], [0, 0]]


def test_grants_beyond_the_room_go_one_by_one() -> None:
    grants = (PageGrant(0, 0, (1, 2)), PageGrant(1, 3, (4, 5, 6)), PageGrant(2, 0, (7,)))
    fitting, rest = split_grants(grants, 3, MAX_ROWS)
    assert fitting == (grants[0], grants[2])
    assert rest == [(1, 3, 4), (1, 4, 5), (1, 5, 6)]


def test_each_group_has_lines_of_its_own() -> None:
    grants = (PageGrant(5, 1, (9,), 0), PageGrant(5, 1, (8,), 1), PageGrant(2, 0, (7,), 1))
    plan = StepPlan(step_id=0, decode_rows=(5, 2), decode_positions=(9, 3), grants=grants)
    inputs = _roundtrip(plan, Bucket(4, 4, True), num_groups=2)
    second = MAX_ROWS + 1
    assert inputs.grants.tolist() == [[5, 1, 9], [second + 5, 1, 8], [second + 2, 0, 7]] + [[MAX_ROWS, 0, 0]] * 5
    assert split_grants(grants, 0, MAX_ROWS)[1] == [(5, 1, 9), (second + 5, 1, 8), (second + 2, 0, 7)]


def test_groups_read_their_own_tables_from_where_their_windows_begin() -> None:
    """A column before is the dummy page: one that no token of the row in this step sees any token of."""
    groups, columns = (PageGroup(), PageGroup(3), PageGroup(10)), 9
    tables = np.random.default_rng(0).integers(1, 99, (len(groups) * (MAX_ROWS + 1), columns)).astype(np.int32)
    chunks = (Chunk(0, 9, (1, 2, 3), False), Chunk(2, 0, (1,), False))
    decode = StepPlan(step_id=0, decode_rows=(4, 3), decode_positions=(31, 30))
    mixed = StepPlan(step_id=1, decode_rows=(4, 3), decode_positions=(31, 30), chunks=chunks)
    firsts = {4: 31, 3: 30, 0: 9, 2: 0}  # the position of each row's first token in this step
    for plan, bucket in ((decode, Bucket(4, 4, True)), (mixed, Bucket(8, 5, False))):
        inputs = _roundtrip(plan, bucket, num_groups=len(groups))
        layout = Layout.of(bucket, max_rows=MAX_ROWS, num_params=3, page_size=4, num_groups=len(groups))
        batches = attention_batches(inputs, jax.numpy.asarray(tables), layout, 4, groups, None)
        for number, (group, batch) in enumerate(zip(groups, batches, strict=True)):
            for line, row in enumerate(inputs.rows.tolist()[: plan.num_rows]):
                lasts = 4 * np.arange(columns) + 3  # the position of the last token of each column
                seen = lasts >= firsts[row] - (group.window or 99) + 1
                expected = np.where(seen, tables[number * (MAX_ROWS + 1) + row], 0)
                assert np.asarray(batch.block_tables)[line].tolist() == expected.tolist(), (group, row)
