"""The combination of a decode row's splits (split-K) by their log-sum-exp: the second kernel of decode on Hopper.

The arrays that `gpu_decode` leaves for each split are declared here (`split_types`).

    row 0: splits 0 1 2 3 4    warpgroup 0 takes batches 0, 2, ..    each folds (values, largest score, sum) into its
           '-batch 0-' '-1-'   warpgroup 1 takes batches 1, 3, ..    own; then 0 takes what 1 has, and divides

Why not XLA's segment sum: on a GPU that is atomic additions in any order, so the same row would not give the same bits
twice. Here the order is fixed.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.pallas import gpu_layout as layout
from jaxserve.kernels.pallas.gpu_layout import Interpret

_ACC = plgpu.Layout.WGMMA  # [H, G]
_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # [G]: one number a head
_WARPGROUPS = 2
_STAGES = 2  # batches in flight of each

# Weighted values (not divided), the largest score in log2 units, the sum of weights.
_State = tuple[Float[Array, "H G"], Float[Array, " G"], Float[Array, " G"]]


def split_types(num_splits: int, kv_heads: int, lanes: int, group: int) -> tuple[Any, Any]:
    """The arrays that decode leaves: weighted values [W', K, H, G]; largest score and sum [W', K, 2, G].

    W' is more than the splits there are: the combination reads whole batches, past the last split too.
    """
    count = num_splits + _batch(lanes, group)
    return (
        jax.ShapeDtypeStruct((count, kv_heads, lanes, group), jnp.float32),
        jax.ShapeDtypeStruct((count, kv_heads, 2, group), jnp.float32),
    )


def combine(
    partials: Float[Array, "W K H G"],
    stats: Float[Array, "W K 2 G"],
    row_starts: Int[Array, " R"],
    row_counts: Int[Array, " R"],
    *,
    sinks: Float[Array, "K G"] | None,
    value_scales: Float[Array, " K"] | None,
    interpret: Interpret,
) -> Float[Array, "R K G H"]:
    """Output of each row, in bfloat16; zeros for a row without splits. A sink is a score without a value.

    Row r has `row_counts[r]` splits from `row_starts[r]` on. They come in batches, two in flight for each of two
    warpgroups: a row of 128k tokens has hundreds of splits, and loading them one after the other would cost the
    memory's latency for each.
    """
    _, kv_heads, lanes, group = partials.shape
    num_rows, batch = row_starts.shape[0], _batch(lanes, group)
    options = {"sinks": None if sinks is None else layout.copyable(sinks), "value_scales": value_scales}
    options = {name: x for name, x in options.items() if x is not None}

    def combine_splits(starts_ref, counts_ref, partials_ref, stats_ref, *refs) -> None:
        option_refs = dict(zip(options, refs, strict=False))
        out_ref, smem, barriers = refs[len(options) :]
        row, head, warpgroup = lax.axis_index("row"), lax.axis_index("head"), lax.axis_index("wg")
        start, count = starts_ref[row], counts_ref[row]
        batches = lax.div(count + (batch - 1), jnp.int32(batch))
        own = lax.div(jnp.maximum(batches - warpgroup, 0) + 1, jnp.int32(_WARPGROUPS))

        def slot_of(i: Array) -> Array:
            return warpgroup * _STAGES + lax.rem(i, jnp.int32(_STAGES))

        def first_of(i: Array) -> Array:  # split of the row with which this warpgroup's batch i begins
            return (i * _WARPGROUPS + warpgroup) * batch

        def issue(i: Array) -> None:
            slot, own_splits = slot_of(i), pl.ds(start + first_of(i), batch)
            plgpu.copy_gmem_to_smem(
                partials_ref.at[own_splits, head], smem["tiles"].at[slot], barriers["full"].at[slot]
            )
            plgpu.copy_gmem_to_smem(stats_ref.at[own_splits, head], smem["stats"].at[slot], barriers["full"].at[slot])

        def fold_batch(i: Array, state: _State) -> _State:
            slot = slot_of(i)
            plgpu.barrier_wait(barriers["full"].at[slot])
            others = []
            for j in range(batch):
                # Numbers past the row's own splits are another row's, or were never written.
                there = first_of(i) + j < count
                x, top, total = _load_state(smem["tiles"].at[slot, j], smem["stats"].at[slot, j], interpret)
                others.append(
                    (jnp.where(there, x, 0.0), jnp.where(there, top, layout.HIDDEN), jnp.where(there, total, 0.0))
                )
            state = _fold_states(state, others)

            @pl.when(i + _STAGES < own)
            def _() -> None:
                plgpu.commit_smem()  # plain loads have read the place, and a copy is another proxy
                issue(i + _STAGES)

            return state

        for i in range(_STAGES):
            pl.when(i < own)(functools.partial(issue, jnp.int32(i)))
        nothing = (
            layout.full((lanes, group), 0.0, _ACC, interpret),
            layout.full((group,), layout.LOWEST, _COLUMN, interpret),
            layout.full((group,), 0.0, _COLUMN, interpret),
        )
        state = lax.fori_loop(0, own, fold_batch, nothing)

        @pl.when(warpgroup > 0)
        def _() -> None:
            smem["half"][...] = state[0]
            smem["half_stats"].at[0][...] = state[1]
            smem["half_stats"].at[1][...] = state[2]
            plgpu.barrier_arrive(barriers["half"])

        @pl.when(warpgroup == 0)
        def _() -> None:
            if sinks is not None:
                plgpu.copy_gmem_to_smem(option_refs["sinks"].at[head], smem["sinks"], barriers["sinks"])
            plgpu.barrier_wait(barriers["half"])
            acc, top, total = _fold_states(state, [_load_state(smem["half"], smem["half_stats"], interpret)])
            if sinks is not None:
                plgpu.barrier_wait(barriers["sinks"])
                sink = layout.load(smem["sinks"].at[pl.ds(0, group)], _COLUMN, interpret)
                no_value = layout.full((lanes, group), 0.0, _ACC, interpret)
                one = layout.full((group,), 1.0, _COLUMN, interpret)
                acc, top, total = _fold_states((acc, top, total), [(no_value, sink, one)])
            share = 1.0 / jnp.maximum(total, 1e-30)  # a row of length 0 gives zeros
            if value_scales is not None:
                share = share * option_refs["value_scales"][head]
            out = (acc * lax.broadcast_in_dim(share, acc.shape, [1])).astype(jnp.bfloat16)
            layout.store_transposed(smem["out"], out, interpret)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem["out"], out_ref.at[row, head])
            plgpu.wait_smem_to_gmem(0)

    slots = _WARPGROUPS * _STAGES
    smem = {
        "tiles": layout.tile_type((slots, batch, lanes, group), jnp.float32),
        "stats": plgpu.SMEM((slots, batch, 2, group), jnp.float32),
        "half": layout.tile_type((lanes, group), jnp.float32),
        "half_stats": plgpu.SMEM((2, group), jnp.float32),
        "out": layout.tile_type((group, lanes), jnp.bfloat16),
    }
    barriers = {"full": plgpu.Barrier(num_arrivals=2, num_barriers=slots), "half": plgpu.Barrier()}
    if sinks is not None:
        smem["sinks"] = plgpu.SMEM(options["sinks"].shape[1:], jnp.float32)
        barriers["sinks"] = plgpu.Barrier()
    return layout.launch(
        combine_splits,
        out_type=jax.ShapeDtypeStruct((num_rows, kv_heads, group, lanes), jnp.bfloat16),
        grid={"row": num_rows, "head": kv_heads},
        scratch=(smem, barriers),
        warpgroups=_WARPGROUPS,
        interpret=interpret,
    )(row_starts, row_counts, partials, stats, *options.values())


def _load_state(values_ref: Any, stats_ref: Any, interpret: Interpret) -> _State:
    top, total = (layout.load(stats_ref.at[i], _COLUMN, interpret) for i in range(2))
    return layout.load(values_ref, _ACC, interpret), top, total


def _fold_states(state: _State, others: Sequence[_State]) -> _State:
    acc, top, total = state
    new_top = functools.reduce(jnp.maximum, [its_top for _, its_top, _ in others], top)
    shrink = jnp.exp2(top - new_top)
    acc, total = acc * lax.broadcast_in_dim(shrink, acc.shape, [1]), total * shrink
    for its_values, its_top, its_total in others:
        shrink = jnp.exp2(its_top - new_top)
        acc = acc + its_values * lax.broadcast_in_dim(shrink, acc.shape, [1])
        total = total + its_total * shrink
    return acc, new_top, total


def _batch(lanes: int, group: int) -> int:
    """Splits that one copy brings: 16 KB of them."""
    return max(1, 16384 // (lanes * group * 4))
