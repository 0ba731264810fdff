"""Masks of rows on the device: who is written, what is left alone, and what a device keeps of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from sampling_cases import make_setup

from jaxserve.models.sharding import TENSOR_AXIS, Shards
from jaxserve.runtime.row_state import (
    Field,
    Flag,
    encode_row,
    init_sampling_state,
    mask_words,
    needs_row_state,
    write_masks,
)
from jaxserve.sched.plan import RowMask, StepPlan

V, R = 256, 5


def lines(*rows: int) -> tuple[np.ndarray, np.ndarray]:
    masks = np.random.default_rng(1).integers(-(2**31), 2**31, (len(rows), mask_words(V))).astype(np.int32)
    return np.array(rows, np.int32), masks


def test_rows_are_written_and_others_left_alone() -> None:
    state = init_sampling_state(R, V)
    rows, masks = lines(3, 0, R, R)
    written = jax.jit(write_masks)(state, rows, masks)
    allowed = np.asarray(written.allowed_mask)
    np.testing.assert_array_equal(allowed[[3, 0]], masks[:2])
    assert not allowed[[1, 2, 4]].any()
    for name in ("counts", "prompt_mask", "bias_ids", "last_token"):
        np.testing.assert_array_equal(getattr(written, name), getattr(state, name))


@pytest.mark.parametrize("count", [2, 4])
def test_each_device_keeps_its_part(count: int) -> None:
    mesh = Mesh(np.array(jax.devices()[:count]), (TENSOR_AXIS,))
    rows, masks = lines(2, 1)
    by_vocab = PartitionSpec(None, TENSOR_AXIS)

    def write(allowed: jax.Array) -> jax.Array:
        state = init_sampling_state(R, V // count)
        assert allowed.shape == state.allowed_mask.shape
        return write_masks(
            state, jnp.asarray(rows), jnp.asarray(masks), Shards(count=count, axis=TENSOR_AXIS)
        ).allowed_mask

    run = jax.jit(jax.shard_map(write, mesh=mesh, in_specs=by_vocab, out_specs=by_vocab, check_vma=False))
    found = np.asarray(run(jnp.zeros((R + 1, mask_words(V)), jnp.int32)))
    np.testing.assert_array_equal(found[[2, 1]], masks)


def test_a_row_with_a_grammar_looks_at_its_mask_and_needs_nothing_else() -> None:
    setup = make_setup(structured={"regex": "a"})
    assert encode_row(setup)[Field.FLAGS] & Flag.ALLOWED and not needs_row_state(setup)
    assert needs_row_state(make_setup(structured={"regex": "a"}, presence_penalty=0.5))
    assert needs_row_state(make_setup(allowed_token_ids=(1, 2)))


def test_masks_travel_as_text() -> None:
    plan = StepPlan(step_id=1, decode_rows=(3,), decode_positions=(9,), masks=(RowMask.of(3, bytes([1, 0, 128, 0])),))
    (mask,) = StepPlan.from_json(plan.to_json()).masks
    assert (mask.row, mask.mask) == (3, bytes([1, 0, 128, 0]))
    assert [i for i in range(99) if mask.allows(i)] == [0, 23]
