"""The programs that stages of different processes launch together: each moves what one stage has left to where it is
needed.

A process may launch a program only where it has devices, and all processes of a program's devices must launch it, in
the same order as all others that they share (`pipeline.launch_order`). So the layers of a stage are programs of its own
processes, and two small ones lie between them:

    forward   hidden states [T, D], over the devices of a stage and of the one behind it: each device sends its copy to
              the one in its place
    share     the `StepOutput` of the last stage, over the devices of all: the first stage needs the last tokens,
              process 0 the answers, and each process the tokens for its digest

Both take an array with a slice for each stage. A stage gives what its own step has left as its slice, without a copy,
and zeros where it only receives.
"""

import dataclasses
import functools
import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.runtime.compile import Compiled, Job, OnCompiled, compile_all
from jaxserve.runtime.mesh import STAGE_AXIS, is_here, joined, on_mesh, replicated
from jaxserve.runtime.step_output import StepOutput
from jaxserve.sched.plan import Bucket

_BY_STAGE = PartitionSpec(STAGE_AXIS)


def _forward(left: jax.Array) -> jax.Array:
    return lax.ppermute(left, STAGE_AXIS, [(0, 1)])


def _share(output: StepOutput) -> StepOutput:
    # Not a sum with zeros: every type arrives bit by bit, infinities and numbers that are none included.
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, STAGE_AXIS)[-1], output)


def _forward_name(number: int, tokens: int) -> str:
    return f"forward {tokens} from {number + 1}"


def _share_name(bucket: Bucket) -> str:
    return f"share {'decode' if bucket.decode_only else 'mixed'} {bucket.tokens}x{bucket.rows}"


def link_bytes(token_counts: Collection[int], hidden_bytes: int) -> int:
    """Bytes on a device for hidden states beside those of a step: zeros of each size, for the stages that receive, and
    what two parts have left. `hidden_bytes`: of a token."""
    return (sum(token_counts) + 2 * max(token_counts)) * hidden_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbstractLinks:
    """The shapes of what moves between the stages.

    Attributes:
      meshes: of all stages.
      hidden: of a token, [D].
      outputs: what the last stage leaves of a step of each bucket.
    """

    meshes: Sequence[Mesh]
    hidden: jax.ShapeDtypeStruct
    outputs: Mapping[Bucket, StepOutput]

    @property
    def token_counts(self) -> list[int]:
        """T of all buckets."""
        return sorted({bucket.tokens for bucket in self.outputs})

    def pairs_here(self) -> dict[int, Mesh]:
        """Of each stage whose `forward` this process takes part in, the devices of that and of the next."""
        pairs = enumerate(itertools.pairwise(self.meshes))
        return {number: joined(pair) for number, pair in pairs if any(map(is_here, pair))}

    def jobs(self, options: Mapping[str, bool | str]) -> list[tuple[Mesh, list[Job]]]:
        """What this process has to compile, by the devices that it runs on."""

        def job(name: str, fn: Any, mesh: Mesh, given: Any, out: PartitionSpec) -> Job:
            sharding, count = NamedSharding(mesh, _BY_STAGE), mesh.shape[STAGE_AXIS]
            args = jax.tree.map(
                lambda one: jax.ShapeDtypeStruct((count * one.shape[0], *one.shape[1:]), one.dtype, sharding=sharding),
                given,
            )
            fn = on_mesh(fn, mesh, (_BY_STAGE,), out)
            return Job(name=name, fn=fn, args=(args,), donate=(), options=options)

        jobs: list[tuple[Mesh, list[Job]]] = []
        for number, mesh in self.pairs_here().items():
            hidden = {t: jax.ShapeDtypeStruct((t, *self.hidden.shape), self.hidden.dtype) for t in self.token_counts}
            names = {t: _forward_name(number, t) for t in hidden}
            jobs.append((mesh, [job(names[t], _forward, mesh, one, _BY_STAGE) for t, one in hidden.items()]))
        whole = joined(self.meshes)
        shares = [job(_share_name(b), _share, whole, out, PartitionSpec()) for b, out in self.outputs.items()]
        return [*jobs, (whole, shares)]

    def compile(
        self, options: Mapping[str, bool | str], threads: int | None, progress: OnCompiled
    ) -> Mapping[str, Compiled]:
        """The executables of `jobs`, by name."""
        compiled: dict[str, Compiled] = {}
        for mesh, jobs in self.jobs(options):
            compiled |= compile_all(jobs, threads, progress, mesh)
        return compiled


class StageLinks:
    """The links of one process to the stages of others. Belongs to the thread that dispatches."""

    def __init__(self, shapes: AbstractLinks, compiled: Mapping[str, Compiled]) -> None:
        """`compiled`: of `AbstractLinks.compile`."""
        self._whole = NamedSharding(joined(shapes.meshes), _BY_STAGE)
        self._stages = [replicated(mesh) for mesh in shapes.meshes]
        self._is_here = [is_here(mesh) for mesh in shapes.meshes]
        self._pairs = {number: NamedSharding(mesh, _BY_STAGE) for number, mesh in shapes.pairs_here().items()}
        self._forwards = {
            (number, tokens): compiled[_forward_name(number, tokens)].call
            for number, tokens in itertools.product(self._pairs, shapes.token_counts)
        }
        self._shares = {bucket: compiled[_share_name(bucket)].call for bucket in shapes.outputs}
        self._outputs = shapes.outputs
        self._hidden = shapes.hidden
        self._zeros = functools.cache(_zeros)

    def forward(self, number: int, tokens: int, hidden: jax.Array | None) -> jax.Array | None:
        """What stage `number` has left, `hidden` [T, D], for the stage behind it; each None where this process has not
        that stage."""
        if number not in self._pairs:
            return None
        shape = jax.ShapeDtypeStruct((tokens, *self._hidden.shape), self._hidden.dtype)
        moved = self._forwards[number, tokens](self._slices(self._pairs[number], shape, hidden))
        return _taken(moved, shape.shape, self._stages[number + 1]) if self._is_here[number + 1] else None

    def share(self, bucket: Bucket, output: StepOutput | None) -> StepOutput:
        """What the last stage has left, for all; None where this process has not that stage. `last_token` lies where
        the first stage takes it."""
        shapes, structure = jax.tree.flatten(self._outputs[bucket])
        leaves = [None] * len(shapes) if output is None else jax.tree.leaves(output)
        slices = [self._slices(self._whole, shape, leaf) for shape, leaf in zip(shapes, leaves, strict=True)]
        shared: StepOutput = self._shares[bucket](jax.tree.unflatten(structure, slices))
        tokens = shared.last_token
        assert tokens is not None, "the first of several stages takes the last tokens from the last"
        if self._is_here[0]:
            tokens = _taken(tokens, tokens.shape, self._stages[0])
        return dataclasses.replace(shared, last_token=tokens)

    def _slices(self, sharding: NamedSharding, shape: jax.ShapeDtypeStruct, own: jax.Array | None) -> jax.Array:
        """An array with a slice of `shape` for each stage of `sharding`: `own` where it lies, zeros elsewhere."""
        found = {} if own is None else {shard.device: shard.data for shard in own.addressable_shards}
        shards = [
            found[device] if device in found else self._zeros(device, shape.shape, shape.dtype)
            for device in sorted(sharding.addressable_devices, key=lambda device: device.id)
        ]
        count = sharding.mesh.shape[STAGE_AXIS]
        whole = (count * shape.shape[0], *shape.shape[1:])
        return jax.make_array_from_single_device_arrays(whole, sharding, shards)


def _taken(array: jax.Array, shape: tuple[int, ...], sharding: NamedSharding) -> jax.Array:
    """The slice of `array`, of this shape, that lies on the devices of `sharding`, as an array of these alone."""
    shards = [shard.data for shard in array.addressable_shards if shard.device in sharding.device_set]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _zeros(device: Any, shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    return jax.device_put(np.zeros(shape, dtype), device)
