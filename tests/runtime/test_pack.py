"""The packed buffer: what goes in comes out, and padding points nowhere."""

import dataclasses

import jax
import numpy as np

from jaxserve.api import MAX_STOP_TOKEN_IDS
from jaxserve.runtime.pack import FROM_DEVICE, NO_TARGET, Layout, pack, split_grants, unpack
from jaxserve.sched.plan import Bucket, Chunk, PageGrant, StepPlan

MAX_ROWS = 6
PARAMS = np.arange((MAX_ROWS + 1) * 3, dtype=np.int32).reshape(MAX_ROWS + 1, 3)


STOPS = np.arange((MAX_ROWS + 1) * MAX_STOP_TOKEN_IDS, dtype=np.int32).reshape(MAX_ROWS + 1, MAX_STOP_TOKEN_IDS)


def _roundtrip(plan: StepPlan, bucket: Bucket, row_tokens: dict[int, np.ndarray] | None = None, max_burst: int = 1):
    layout = Layout.of(bucket, max_rows=MAX_ROWS, num_params=3, page_size=4, max_burst=max_burst)
    fitting, rest = split_grants(plan.grants, layout.max_grants)
    assert not rest
    buffer = pack(plan, layout, PARAMS, row_tokens or {}, fitting, STOPS)
    assert buffer.dtype == np.int32
    assert buffer.shape == (layout.size,)
    return jax.tree.map(np.asarray, unpack(jax.numpy.asarray(buffer), layout))


def test_decode_step() -> None:
    plan = StepPlan(step_id=0, decode_rows=(5, 2), decode_positions=(7, 0), grants=(PageGrant(5, 1, (9,)),))
    inputs = _roundtrip(plan, Bucket(4, 4, True))
    assert inputs.rows.tolist() == [5, 2, MAX_ROWS, MAX_ROWS]
    assert inputs.context_lens.tolist() == [8, 1, 0, 0]
    assert inputs.positions.tolist() == [7, 0, 0, 0]
    assert inputs.token_rows.tolist() == [0, 1, 4, 4]
    assert inputs.q_starts.tolist() == [0, 1, 2, 2, 2]
    assert inputs.wants.tolist() == [1, 1, 0, 0]
    assert (inputs.tokens == FROM_DEVICE).all()
    assert inputs.params[0].tolist() == PARAMS[5].tolist()
    assert inputs.grants.tolist() == [[5, 1, 9]] + [[MAX_ROWS, 0, 0]] * 3


def test_burst() -> None:
    plan = StepPlan(
        step_id=0, decode_rows=(5, 2), decode_positions=(7, 0), grants=(PageGrant(5, 2, (9, 8)),), num_steps=9
    )
    inputs = _roundtrip(plan, Bucket(4, 4, True), max_burst=9)
    assert inputs.row_steps.tolist() == [9, 9, 0, 0]
    assert inputs.stop_ids[:2].tolist() == [STOPS[5].tolist(), STOPS[2].tolist()]
    assert len(inputs.grants) == 12, "nine positions lie in three pages at most that are not there yet"
    assert inputs.context_lens.tolist() == [8, 1, 0, 0]
    cut = _roundtrip(dataclasses.replace(plan, row_steps=(2, 9)), Bucket(4, 4, True), max_burst=9)
    assert cut.row_steps.tolist() == [2, 9, 0, 0]


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
    assert inputs.wants.tolist() == [1, 0, 1, 0]
    assert inputs.targets.tolist() == [NO_TARGET] * 4 + [22] + [NO_TARGET] * 3
    assert inputs.grants[:3].tolist() == [[0, 0, 1], [0, 1, 2], [4, 0, 3]]


def test_the_last_prompt_token_has_no_target() -> None:
    plan = StepPlan(step_id=0, chunks=(Chunk(3, 1, (22, 23), True, True),))
    inputs = _roundtrip(plan, Bucket(4, 2, False), {3: np.array([21, 22, 23], np.int32)})
    assert inputs.targets.tolist() == [23, NO_TARGET, NO_TARGET, NO_TARGET]


def test_grants_beyond_the_room_go_one_by_one() -> None:
    grants = (PageGrant(0, 0, (1, 2)), PageGrant(1, 3, (4, 5, 6)), PageGrant(2, 0, (7,)))
    fitting, rest = split_grants(grants, 3)
    assert fitting == (grants[0], grants[2])
    assert rest == [(1, 3, 4), (1, 4, 5), (1, 5, 6)]
