"""The cut of a plan into parts, the meshes, and which last tokens a part may start from."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config.schema import ParallelConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.mesh import layer_ranges, make_meshes
from jaxserve.runtime.pipeline import MIN_PIECE, split_plan
from jaxserve.runtime.runner import _LastTokens
from jaxserve.sched.plan import Chunk, PageGrant, PoolSpan, StepPlan


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    num_decode = draw(st.integers(0, 9))
    lens = draw(st.lists(st.integers(1, 300), min_size=0 if num_decode else 1, max_size=4))
    chunks = tuple(
        Chunk(
            num_decode + i,
            7 * i,
            tuple(range(1000 * i, 1000 * i + n)),
            draw(st.booleans()),
            i % 2 == 0,
            draw(st.sampled_from([None, PoolSpan(0, 7 * i + n), PoolSpan(7 * i + n - 1, 7 * i + n), PoolSpan(0, 1)])),
        )
        for i, n in enumerate(lens)
    )
    return StepPlan(
        step_id=5,
        decode_rows=tuple(range(num_decode)),
        decode_positions=tuple(10 + r for r in range(num_decode)),
        chunks=chunks,
        grants=(PageGrant(0, 0, (1, 2)),),
        freed_rows=(30,),
    )


@given(plans(), st.integers(1, 5))
def test_parts_are_the_plan_in_order(plan: StepPlan, num_parts: int) -> None:
    parts = split_plan(plan, num_parts)
    assert 1 <= len(parts) <= num_parts
    assert all(part.num_rows and part.step_id == plan.step_id for part in parts)
    fed = [pair for part in parts for pair in zip(part.decode_rows, part.decode_positions, strict=True)]
    assert sorted(fed) == list(zip(plan.decode_rows, plan.decode_positions, strict=True))
    assert [part.grants for part in parts] == [plan.grants, *[()] * (len(parts) - 1)]
    assert [part.freed_rows for part in parts] == [plan.freed_rows, *[()] * (len(parts) - 1)]
    for chunk in plan.chunks:
        pieces = [piece for part in parts for piece in part.chunks if piece.row == chunk.row]
        assert sum((piece.token_ids for piece in pieces), ()) == chunk.token_ids
        assert [piece.start for piece in pieces] == [
            chunk.start + sum(len(p.token_ids) for p in pieces[:i]) for i in range(len(pieces))
        ]
        assert [piece.sample for piece in pieces] == [False] * (len(pieces) - 1) + [chunk.sample]
        assert all(piece.prompt_logprobs == chunk.prompt_logprobs for piece in pieces)
        assert [at for piece in pieces for at in piece.pooled] == [*chunk.pooled]
        assert len(pieces) == 1 or min(len(piece.token_ids) for piece in pieces) >= MIN_PIECE
        assert all(len({piece.row for piece in part.chunks}) == len(part.chunks) for part in parts)
    assert sorted(row for part in parts for row in part.sampled_rows) == sorted(plan.sampled_rows)


def test_decode_rows_are_dealt_out_evenly() -> None:
    plan = StepPlan(step_id=0, decode_rows=tuple(range(8)), decode_positions=(3,) * 8)
    assert [part.decode_rows for part in split_plan(plan, 3)] == [(0, 3, 6), (1, 4, 7), (2, 5)]
    assert split_plan(plan, 1) == [plan]


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=40), st.integers(1, 4), st.data())
def test_a_part_starts_from_an_array_that_knows_its_rows(draws: list, num_parts: int, data: st.DataObject) -> None:
    """Each array holds all that was drawn so far; the one chosen must hold the newest token of each row asked for."""
    kept, now = _LastTokens(6, num_parts), np.zeros(7, np.int32)
    for number, rows in enumerate(draws, start=1):
        now = now.copy()
        now[list(rows)] = number
        kept.add(sorted(rows), now)
        asked = sorted(data.draw(st.sets(st.integers(0, 5))))
        chosen = kept.after(asked)
        np.testing.assert_array_equal(chosen[asked], now[asked])
    assert len(kept._arrays) <= num_parts + 1


def test_a_part_does_not_wait_for_the_parts_after_its_own() -> None:
    kept = _LastTokens(4, 2)
    first, second = np.array([1, 0, 0, 0, 0]), np.array([1, 2, 0, 0, 0])
    kept.add([0], first)
    kept.add([1], second)
    assert kept.after([0]) is first and kept.after([1]) is second and kept.after([0, 1]) is second


def test_meshes_are_cut_from_the_list_of_devices_in_order() -> None:
    devices = jax.devices()
    assert len(devices) == 8
    meshes = make_meshes(ParallelConfig(data=2, pipeline=2, tensor=2), devices)
    order = [[[device.id for device in stage.devices.flat] for stage in replica] for replica in meshes]
    assert order == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert meshes[0][0].shape == {"expert": 1, "model": 2}
    with pytest.raises(ConfigError, match="2 x 2 x 4 needs 16 devices, but there are 8"):
        make_meshes(ParallelConfig(data=2, pipeline=2, tensor=4), devices)
    with pytest.raises(ConfigError, match=r"expert is 4, but .* does not divide them; take one of 1, 2, 3, 6"):
        make_meshes(ParallelConfig(tensor=6, expert=4), devices)
    dealt = make_meshes(ParallelConfig(data=2, tensor=4, expert=2), devices)[1][0]
    assert dealt.shape == {"expert": 2, "model": 2} and dealt.devices.flat[0].id == 4
    with pytest.raises(ConfigError, match=r"parallel\.microbatches is 2, but parallel\.pipeline is 1"):
        make_meshes(ParallelConfig(microbatches=2), devices)


def test_layers_are_shared_out_evenly() -> None:
    assert layer_ranges(5, 3) == [range(2), range(2, 4), range(4, 5)]
    with pytest.raises(ConfigError, match=r"parallel\.pipeline is 3, but the model has 2 layers"):
        layer_ranges(2, 3)
