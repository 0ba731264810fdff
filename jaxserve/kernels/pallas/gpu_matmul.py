"""Products of Hopper GPUs with codes: the cost is reading the codes once, and widening them.

XLA would widen a weight with scales for groups in memory, or multiply group by group in a loop; and where a weight has
few outputs it cuts the depth in eight, whose partial sums weigh as much as the codes. Here codes go to shared memory as
they are stored, and are widened in the registers from which the tensor cores take them:

    out[t, n] = sum over runs r of  scale[r, n] * sum over k in r of x[t, k] * (code[k, n] - zero[r, n])

    program (columns, tile of rows, part of the depth)
      producer warpgroup:   for each 128 of the depth: wait until a slot of the ring is free -> copies (TMA) of
                            codes [128, 128], x [rows, 128], scales [runs, 128] and zeros
      compute warpgroups:   two, with 64 columns each:   codes -> bfloat16 in registers -> less zeros
                            run^T [64, rows] = codes [64, run] x^T [run, rows];   out^T += scale * run^T

Columns are the 64 rows of the wgmma, and rows of the batch its columns: with few rows, the other way round most of it
would be padding, and only its left operand may come from registers. The scale comes after the product and not into the
weight, for any number of rows: rounding scaled weights to bfloat16 would be another arithmetic. Without groups all the
depth is one run, and its scale is a factor of the result. Activations that are rounded to int8 meet int8 codes in the
tensor cores without any widening; their own scales are a factor of the result, too.

Gate and up have a warpgroup each, and meet in shared memory at the end: what leaves is activation(gate) * up.

Few columns leave most of the card idle: then a program has one warpgroup of 64 columns, and the depth is cut in parts,
whose sums XLA adds in their order. How many parts there are depends on the weight, and on the rows only beyond one tile
of them.
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.coded_weight import CodedWeight, round_activations
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.matmul import Axes, Matmul, MatmulUse, Weight
from jaxserve.kernels.pallas import gpu_layout as layout
from jaxserve.kernels.pallas.gpu_layout import LOG2E, Interpret

NAME = "mosaic_gpu"

_ACC, _BY_COLUMN, _BY_ROW = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)
_HALF = 64  # columns of a warpgroup
_DEPTH, _LEAST_DEPTH = 128, 64  # numbers of the depth in a slot: a line of 128 bytes of int8; the least for int4
_LEAST_RUN = 32  # numbers of the depth with one scale
_GROUP = 8  # rows that the pattern of shared memory keeps together
_MAX_ROWS = 128  # of a tile: sums of a run and of all runs take a register each for every 2 of its rows
_STORED = 32  # rows of the result that leave through shared memory at a time
# Programs wanted: most of the 132 multiprocessors of an H200. Not measured.
_PROGRAMS = 96
_MAX_PARTS = 4
_MAX_STAGES = 6
# Registers of a thread of the two warpgroups that compute, and of the producer, where a block of 384 threads would have
# 168 each: twice the first plus the second is at most 504, or the kernel waits for registers that never come.
_REGISTERS = (232, 40)
_SMALL_BYTES = 8192  # of shared memory: barriers, scales of rows, what Mosaic sets aside, and places between
# Activations x / (1 + exp(-f(x))), each by its f.
_EXPONENTS: dict[str, Callable[[Array], Array]] = {
    "silu": lambda x: x,
    "gelu_tanh": lambda x: (2 * math.sqrt(2 / math.pi)) * (x + 0.044715 * x * x * x),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperCodes(Weight):
    """A matrix [*out, *in] as codes. Outputs and inputs of no multiple of 64 on a device are padded in each call.

    Attributes:
      codes: as they are loaded.
      scales: float32 [*in, *out], the last axis of *in* in runs; without groups, *in* are axes of one.
      zeros: bfloat16, as scales are; None: codes are symmetric.
      num_in: how many axes a product sums over.
      run: successive inputs with one scale, which divide 128; None: all.
      in_integers: activations are rounded to int8, with a scale for each token.
      dtype: of rows that are looked up.
      cut_over: axes of the mesh over which devices have different inputs.
      interpret: stands in for the hardware; None: there is one.
    """

    codes: Array
    scales: Float[Array, "..."]
    zeros: Float[Array, "..."] | None
    num_in: int = dataclasses.field(metadata={"static": True})
    run: int | None = dataclasses.field(metadata={"static": True})
    in_integers: bool = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    cut_over: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    interpret: Interpret = dataclasses.field(default=None, metadata={"static": True})

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """`Weight.multiply`, in bfloat16 or int8 with float32 or exact sums."""
        return self._multiply(x, None).reshape(x.shape[0], *self.codes.shape[: self.codes.ndim - self.num_in])

    def multiply_gated(self, x: Float[Array, "T ..."], activation: str) -> Float[Array, "T F"]:
        """`Weight.multiply_gated`: where the products end, if gate and up have whole blocks of 64 columns."""
        if activation not in _EXPONENTS or self.codes.shape[1] % _HALF:
            return super().multiply_gated(x, activation)
        return self._multiply(x, activation).astype(x.dtype)

    def _multiply(self, x: Float[Array, "T ..."], activation: str | None) -> Float[Array, "T N"]:
        num_rows, num_out = x.shape[0], math.prod(self.codes.shape[: self.codes.ndim - self.num_in])
        rows, x_scales = x.reshape(num_rows, -1), None
        if self.in_integers:
            rows, x_scales = round_activations(rows, rows.shape[1], self.cut_over)
            x_scales = jnp.pad(x_scales[:, 0], (0, -num_rows % tile_rows(num_rows)))
        else:
            rows = rows.astype(jnp.bfloat16)
        flat = [leaf.reshape(-1, num_out) for leaf in (self.scales, self.zeros) if leaf is not None]
        codes, rows, *by_run = _padded(self.codes.reshape(num_out, -1), rows, flat, self.run)
        out = _multiply(codes, rows, by_run, x_scales, self.run, activation, self.interpret)
        return out[:num_rows] if activation is not None else out[:num_rows, :num_out]

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T D"]:
        """`Weight.take`."""
        assert self.run is None and self.zeros is None and self.codes.ndim == 2, "a table has a scale for each row"
        codes = self.codes.at[rows].get(mode="fill", fill_value=0).astype(jnp.float32)
        return (codes * self.scales[0].at[rows].get(mode="fill", fill_value=0)[:, None]).astype(self.dtype)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`."""
        num_out = len(axes) - self.num_in
        inputs = axes[num_out:] if self.run is not None else (None,) * self.num_in
        by_scale = (*inputs, *axes[:num_out])
        return (axes, by_scale) if self.zeros is None else (axes, by_scale, by_scale)


def _padded(codes: Array, x: Array, by_run: list[Array], run: int | None) -> tuple[Array, ...]:
    """Codes [N, K], rows [T, K] and scales [runs, N] with zeros behind: whole slots, columns and tiles of rows."""
    more_out, more_in = -codes.shape[0] % _HALF, -codes.shape[1] % _LEAST_DEPTH
    size = tile_rows(x.shape[0])
    pad = lambda array, first, second: jnp.pad(array, ((0, first), (0, second)))  # noqa: E731
    runs = 0 if run is None else (codes.shape[1] + more_in) // run - by_run[0].shape[0]
    return (
        pad(codes, more_out, more_in),
        pad(x, -x.shape[0] % size, more_in),
        *(pad(array, runs, more_out) for array in by_run),
    )


def tile_rows(num_rows: int) -> int:
    """Rows of a tile: all of them, or of several tiles as few as do, in groups of 8, beyond 32 of 16: the integer
    wgmma has no other widths."""
    tiles = -(-num_rows // _MAX_ROWS)
    group = _GROUP if num_rows <= 4 * _GROUP else 2 * _GROUP
    return -(-num_rows // (tiles * group)) * group


def num_parts(num_programs: int, steps: int) -> int:
    """Parts of the depth of so many steps, for programs enough."""
    return max(1, min(_MAX_PARTS, steps, -(-_PROGRAMS // num_programs)))


@functools.partial(jax.jit, static_argnames=("run", "activation", "interpret"))
def _multiply(
    codes: Array,
    x: Array,
    by_run: Sequence[Float[Array, "R N"]],
    x_scales: Float[Array, " T"] | None,
    run: int | None,
    activation: str | None,
    interpret: Interpret,
) -> Float[Array, "T N"]:
    """Rows [T, K] times codes [N, K]; `by_run` are scales and, perhaps, zeros. Gated, [T, N / 2] in bfloat16."""
    all_columns, all_inputs = codes.shape
    num_rows, gated, has_zeros = x.shape[0], activation is not None, len(by_run) > 1
    size = tile_rows(num_rows)
    depth = _DEPTH if all_inputs % _DEPTH == 0 else _LEAST_DEPTH
    num_out, steps, tiles = all_columns // (2 if gated else 1), all_inputs // depth, num_rows // size
    # Wide programs read rows half as often; where they would be few, narrow ones leave fewer partial sums.
    halves = 2 if gated or (all_columns % (2 * _HALF) == 0 and all_columns // (2 * _HALF) * tiles >= _PROGRAMS) else 1
    width = _HALF if gated else halves * _HALF  # columns of the result of a program
    parts = 1 if gated else num_parts(num_out // width * tiles, steps)
    runs = 1 if run is None else depth // run  # of a slot
    of_one = depth // runs  # numbers of the depth of a run in a slot
    stored = math.gcd(size, _STORED)
    sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    exact_parts = sums == jnp.int32 and parts > 1  # so that integers are added before anything is rounded
    out_dtype = jnp.int32 if exact_parts else jnp.bfloat16 if gated else jnp.float32
    by_row = () if x_scales is None else (layout.copyable(x_scales.reshape(tiles, size)),)
    many_sums = run is not None and halves == 2 and size > _HALF

    def multiply_codes(codes_ref, x_ref, *refs) -> None:
        by_run_refs, by_row_refs = refs[: len(by_run)], refs[len(by_run) : len(by_run) + len(by_row)]
        out_ref, smem, barriers = refs[len(by_run) + len(by_row) :]
        warpgroup = lax.axis_index("wg")
        column, row = lax.axis_index("column") * width, lax.axis_index("tile") * size
        part = lax.axis_index("part")
        begin = lax.div(part * steps, jnp.int32(parts))
        count = lax.div((part + 1) * steps, jnp.int32(parts)) - begin
        stages = smem["codes"].shape[0]
        # Where the columns of a slot come from: one piece, or those of gate and of up.
        pieces = [(column, 0), (num_out + column, _HALF)] if gated else [(column, 0)]

        def copy_runs(first: Any, slot: Any, barrier: Any) -> None:
            for source, target in zip(by_run_refs, smem["by_run"], strict=True):
                for which, (at, _) in enumerate(pieces):
                    piece = source.at[pl.ds(first, runs), pl.ds(at, width)]
                    plgpu.copy_gmem_to_smem(piece, target.at[slot, which], barrier)

        def produce() -> None:
            if run is None:
                copy_runs(0, 0, barriers["once"])
            for source, target in zip(by_row_refs, smem["by_row"], strict=True):
                plgpu.copy_gmem_to_smem(source.at[lax.axis_index("tile")], target, barriers["once"])

            def step(i: Array, _: None) -> None:
                slot, inputs = lax.rem(i, jnp.int32(stages)), pl.ds((begin + i) * depth, depth)
                pl.when(i >= stages)(lambda: plgpu.barrier_wait(barriers["free"].at[slot]))
                full = barriers["full"].at[slot]
                for at, to in pieces:
                    piece = codes_ref.at[pl.ds(at, width), inputs]
                    plgpu.copy_gmem_to_smem(piece, smem["codes"].at[slot, pl.ds(to, width)], full)
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, size), inputs], smem["x"].at[slot], full)
                if run is not None:
                    copy_runs((begin + i) * runs, slot, full)

            lax.fori_loop(0, count, step, None)

        def compute(half: int) -> None:
            own = pl.ds(half * _HALF, _HALF)

            def of_run(which: int, slot: Any, at: int) -> Array:
                piece, columns = (half, pl.ds(0, _HALF)) if gated else (0, own)
                return layout.load(smem["by_run"][which].at[slot, piece, at, columns], _BY_COLUMN, interpret)

            def less_zeros(wide: Array, slot: Any, at: int) -> Array:
                if not has_zeros:
                    return wide
                return wide - lax.broadcast_in_dim(of_run(1, slot, at), wide.shape, (0,))

            def whole(slot: Array, acc: Array) -> Array:
                part = smem["codes"].at[slot, own]
                if x.dtype != jnp.int8:
                    part = less_zeros(layout.widened_codes(part, interpret), 0, 0)
                return layout.accumulate(acc, part, smem["x"].at[slot], interpret, transpose_b=True)

            def by_runs(slot: Array, acc: Array) -> Array:
                wide = layout.widened_codes(smem["codes"].at[slot, own], interpret)
                for at in range(runs):
                    one = less_zeros(wide[:, at * of_one : (at + 1) * of_one], slot, at)
                    rows = smem["x"].at[slot, :, pl.ds(at * of_one, of_one)]
                    found = layout.product(one, rows, interpret, transpose_b=True)
                    acc = acc + found * lax.broadcast_in_dim(of_run(0, slot, at), found.shape, (0,))
                return acc

            def step(i: Array, acc: Array) -> Array:
                slot = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(barriers["full"].at[slot])
                acc = (whole if run is None else by_runs)(slot, acc)
                pl.when(i + stages < count)(lambda: plgpu.barrier_arrive(barriers["free"].at[slot]))
                return acc

            if run is None:
                plgpu.barrier_wait(barriers["once"])
            acc = lax.fori_loop(0, count, step, layout.full((_HALF, size), 0, _ACC, interpret, sums))
            if run is None and not exact_parts:
                factors = lax.broadcast_in_dim(of_run(0, 0, 0), acc.shape, (0,))
                for ref in smem["by_row"]:
                    of_rows = layout.load(ref.at[pl.ds(0, size)], _BY_ROW, interpret)
                    factors = factors * lax.broadcast_in_dim(of_rows, acc.shape, (1,))
                acc = acc.astype(jnp.float32) * factors
            if not gated:
                store(half, acc)
            elif half == 1:
                smem["up"][...] = acc
                plgpu.barrier_arrive(barriers["up"])
            else:
                plgpu.barrier_wait(barriers["up"])
                store(0, _gate(acc, layout.load(smem["up"], _ACC, interpret), activation).astype(out_dtype))

        def store(half: int, acc: Array) -> None:
            for first in range(0, size, stored):
                plgpu.wait_smem_to_gmem(0)  # the piece before
                layout.store_transposed(smem["out"].at[half], acc[:, first : first + stored], interpret)
                plgpu.commit_smem()
                target = out_ref.at[part, pl.ds(row + first, stored), pl.ds(column + half * _HALF, _HALF)]
                plgpu.copy_smem_to_gmem(smem["out"].at[half], target)
            plgpu.wait_smem_to_gmem(0)

        def with_registers(number: int, action: Literal["increase", "decrease"], body: Callable[[], None]) -> None:
            if many_sums:
                plgpu.set_max_registers(number, action=action)
            body()

        for half in range(halves):
            body = functools.partial(compute, half)
            pl.when(warpgroup == half)(functools.partial(with_registers, _REGISTERS[0], "increase", body))
        pl.when(warpgroup == halves)(functools.partial(with_registers, _REGISTERS[1], "decrease", produce))

    out_shape = (1 if gated else halves, stored, _HALF)
    smem: dict[str, Any] = {"out": layout.tile_type(out_shape, out_dtype)}
    others = layout.tile_bytes(out_shape, out_dtype) + _SMALL_BYTES
    if gated:
        smem["up"] = layout.tile_type((_HALF, size), jnp.float32)
        others += layout.tile_bytes((_HALF, size), "float32")
    slot_columns = halves * _HALF
    slot_bytes = layout.tile_bytes((slot_columns, depth), codes.dtype) + layout.tile_bytes((size, depth), x.dtype)
    slot_bytes += runs * slot_columns * sum(array.dtype.itemsize for array in by_run)
    # Few rows leave registers for two programs on a multiprocessor.
    room = layout.SHARED_MEMORY_BYTES // (2 if size <= _STORED else 1) - others
    stages = max(2, min(_MAX_STAGES, room // slot_bytes))
    of_slots = (1 if run is None else stages, slot_columns // width, runs, width)
    smem |= {
        "codes": layout.tile_type((stages, slot_columns, depth), codes.dtype),
        "x": layout.tile_type((stages, size, depth), x.dtype, 128 if run is None else min(128, 2 * run)),
        "by_run": [plgpu.SMEM(of_slots, array.dtype) for array in by_run],
        "by_row": [plgpu.SMEM(array.shape[1:], array.dtype) for array in by_row],
    }
    copies = (2 if gated else 1) * len(by_run)
    barriers = {
        "full": plgpu.Barrier(num_arrivals=(3 if gated else 2) + (0 if run is None else copies), num_barriers=stages),
        "free": plgpu.Barrier(num_arrivals=halves, num_barriers=stages),
        "once": plgpu.Barrier(num_arrivals=copies + len(by_row)),
        "up": plgpu.Barrier(num_arrivals=1),
    }
    out = layout.launch(
        multiply_codes,
        out_type=jax.ShapeDtypeStruct((parts, num_rows, num_out), out_dtype),
        grid={"part": parts, "column": num_out // width, "tile": tiles},
        scratch=(smem, barriers),
        warpgroups=halves + 1,
        own_barriers=True,
        interpret=interpret,
    )(codes, x, *by_run, *by_row)
    total = functools.reduce(operator.add, [out[part] for part in range(parts)])
    if exact_parts:
        assert x_scales is not None
        return total.astype(jnp.float32) * (by_run[0] * x_scales[:, None])
    return total


def _gate(gate: Array, up: Array, activation: str | None) -> Array:
    """activation(gate) * up of float32 products, each rounded to bfloat16 as `Weight.multiply_gated` has it."""
    assert activation is not None
    gate, up = (x.astype(jnp.bfloat16).astype(jnp.float32) for x in (gate, up))
    grown = jnp.exp2(_EXPONENTS[activation](gate) * -LOG2E)
    return (gate / (1.0 + grown)).astype(jnp.bfloat16).astype(jnp.float32) * up


def make_matmul(device: Device, interpret: Interpret = None) -> Matmul:
    """The implementation for a device; it refuses all that are no Hopper GPUs. `interpret` runs it on a CPU.

    Weights of numbers are XLA's, and so are int4 codes or zeros that meet rounded activations.
    """

    def refuses(use: MatmulUse) -> str | None:
        remedy = "kernels.matmul: xla runs it"
        if reason := layout.refuses_device(device):
            return f"{reason}; {remedy}"
        if use.storage is None:
            return None
        if use.dtype != "bfloat16":
            return f"activations are {use.dtype}, but the GPU kernel takes bfloat16; set model.dtype to it, or {remedy}"
        if use.storage.group is not None and use.storage.group % _LEAST_RUN:
            return (
                f"{use.storage.group} inputs share a scale on one device, but the GPU kernel takes multiples of "
                f"{_LEAST_RUN}; lower parallel.tensor, or {remedy}"
            )
        return None

    def convert(weight: Weight) -> Weight:
        return _convert(weight, interpret) if isinstance(weight, CodedWeight) and _takes(weight) else weight

    return Matmul(
        name=NAME,
        convert=convert,
        shapes=lambda weight: jax.eval_shape(convert, weight),
        refuses=refuses,
    )


def _takes(weight: CodedWeight) -> bool:
    """Whether the kernel multiplies with a weight; one that is only looked up stays as it is."""
    if weight.arithmetic.activations == "float":
        return weight.num_in > 0
    only_codes = weight.storage.code == "int8" and weight.storage.group is None and not weight.storage.zeros
    return weight.num_in > 0 and only_codes and weight.arithmetic.block is None


def _convert(weight: CodedWeight, interpret: Interpret) -> HopperCodes:
    """Scales by input, then output; codes as they are."""
    group = weight.storage.group
    run = None if group is None else math.gcd(group, _DEPTH)
    num_out = len(weight.out_shape)
    repeats = 1 if group is None or run is None else group // run

    @jax.jit
    def by_run(array: Array) -> Array:
        array = jnp.repeat(array, repeats, axis=-1)
        return jnp.transpose(array, (*range(num_out, array.ndim), *range(num_out)))

    return HopperCodes(
        codes=weight.codes,
        scales=by_run(weight.scales),
        zeros=None if weight.zeros is None else by_run(weight.zeros.astype(jnp.bfloat16)),
        num_in=weight.num_in,
        run=run,
        in_integers=weight.arithmetic.activations == "int8",
        dtype=weight.dtype,
        cut_over=weight.cut_over,
        interpret=interpret,
    )
