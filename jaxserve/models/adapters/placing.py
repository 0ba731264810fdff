"""From the files of an adapter to the arrays of a slot, by the families' own rules of weights.

A rule says how a kernel [out, in] lies on disk. B [out, r] lies as its outputs do, and A [r, in] as its inputs; so the
rule of the kernel is the rule of both, with the rank in the place of the other axes.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Set
from pathlib import Path

import jax
import numpy as np

from jaxserve.errors import AdapterError
from jaxserve.kernels.low_rank import LowRank
from jaxserve.models.adapters.peft import LowRankFiles, read_floats, read_peft
from jaxserve.models.adapters.slots import ProjectionForm, by_layer, projection_forms, slot_shapes
from jaxserve.models.cache_scales import is_scale
from jaxserve.models.family import Family
from jaxserve.models.layout import Pattern, read_target
from jaxserve.models.loading import split_abstract
from jaxserve.models.partition import Block, Partition
from jaxserve.models.sharding import arrays_of, axes_of
from jaxserve.models.weights import Piece, fold_names, plan_weights
from jaxserve.values.content import Adapter


@dataclasses.dataclass(frozen=True, slots=True)
class _Share:
    """What a module of the checkpoint fills of a projection."""

    number: int  # of the form
    piece: Piece


class AdapterReader:
    """Reads adapters for one model. Immutable; any thread."""

    def __init__(self, family: Family, partition: Partition, dtype: np.dtype, max_rank: int) -> None:
        """`partition`: of the model over the devices that share its layers. `dtype`: of its activations."""
        whole = Partition.of(partition.model, 1)
        state = split_abstract(whole, np.dtype(np.float32), None)[1]
        shapes = {path: array.shape for path, array in arrays_of(state).items() if not is_scale(path)}
        axes = axes_of(state)
        plan = plan_weights(family, partition.model, shapes, {path: axes[path] for path in shapes})
        self._family = family
        self._partition = partition
        self._dtype = dtype
        self._max_rank = max_rank
        self._whole, self._forms = projection_forms(whole), projection_forms(partition)
        self._shares: dict[str, list[_Share]] = {}
        for number, form in enumerate(self._whole):
            for piece in plan[form.path]:
                self._shares.setdefault(piece.source.removesuffix(".weight"), []).append(_Share(number, piece))
        self._others = {
            piece.source.removesuffix(".weight") for pieces in plan.values() for piece in pieces
        } - self._shares.keys()
        slot = slot_shapes(self._forms, max_rank, dtype)
        self.num_bytes = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(slot))

    def read(self, directory: Path, name: str) -> Adapter:
        """The adapter in a directory. Raises AdapterError for what is not PEFT's, or does not fit this model."""
        modules = read_peft(
            directory, self._max_rank, self._respelled, lambda names: self._check_modules(names, directory)
        )
        whole = [self._empty(form, self._max_rank, np.dtype(np.float32)) for form in self._whole]
        for module, files in modules.items():
            shares = self._shares[module]
            self._check_shapes(module, files, shares)
            down, up = read_floats(files.down), read_floats(files.up) * np.float32(files.scale)
            for share in shares:
                self._fill(self._whole[share.number], whole[share.number], share.piece, down, up)
        placed = [self._placed(*both) for both in zip(self._whole, self._forms, whole, strict=True)]
        digest = hashlib.sha256()
        for one in placed:
            for array in (one.down, *one.up):
                if not np.isfinite(array.astype(np.float32)).all():
                    raise AdapterError(f"{directory}: its numbers are too large for {self._dtype}")
                digest.update(np.ascontiguousarray(array).tobytes())
        weights = by_layer(self._forms, placed)
        return Adapter(digest=digest.digest(), name=name, num_bytes=self.num_bytes, weights=weights)

    def _respelled(self, module: str) -> str:
        """The name in the table of rules of a module that a checkpoint may name otherwise."""
        for begin, known in self._family.spellings:
            if found := re.match(begin, module):
                module = known + module[found.end() :]
                break
        prefix = self._family.prefix
        if prefix and module not in self._shares and prefix + module in self._shares:
            return prefix + module
        return module

    def _check_modules(self, modules: Set[str], directory: Path) -> None:
        unknown = sorted(modules - self._shares.keys())
        if not unknown:
            return
        outside = [module for module in unknown if module in self._others or "expert" in module]
        if outside:
            raise AdapterError(
                f"{directory}: adapters of {fold_names(outside):.500} are not implemented; those of attention and of "
                "feed-forward blocks without experts are"
            )
        raise AdapterError(
            f"{directory}: {len(unknown)} modules are unknown to {self._family.architecture}: "
            f"{fold_names(unknown):.500}; is the adapter of this model?"
        )

    def _check_shapes(self, module: str, files: LowRankFiles, shares: list[_Share]) -> None:
        piece = shares[0].piece
        inputs, outputs = _sides(piece)
        sizes = piece.pattern.sizes
        num_in = math.prod(sizes[name] for name in inputs)
        num_out = math.prod(sizes[name] for name in outputs) if piece.in_major else piece.rows
        found, wanted = (files.up.shape[0], files.down.shape[1]), (num_out, num_in)
        if found != wanted:
            raise AdapterError(
                f"{files.down.file}: {module} is of {found[1]} inputs and {found[0]} outputs, and this model's of "
                f"{wanted[1]} and {wanted[0]}; is the adapter of this model?"
            )

    @staticmethod
    def _empty(form: ProjectionForm, rank: int, dtype: np.dtype) -> LowRank:
        """Zeros of the checkpoint's sizes: all outputs together, an A for each part."""
        return LowRank(
            down=np.zeros((len(form.parts), rank, *form.in_shape), dtype),
            up=(np.zeros((*form.out_shape, rank), dtype),),
            axis=form.part_axis,
        )

    @staticmethod
    def _fill(form: ProjectionForm, into: LowRank, piece: Piece, down: np.ndarray, up: np.ndarray) -> None:
        """A [r, in] and B [out, r], as they lie on disk, into the share of the piece; the rest of the rank is zero."""
        rank, sizes = down.shape[0], piece.pattern.sizes
        inputs, outputs = _sides(piece)
        in_axes, out_axes = tuple(map(str, form.in_axes)), tuple(map(str, form.out_axes))
        of_down = Pattern(
            source=(("rank",), inputs), target=("rank", *in_axes), shape=(rank, *(sizes[axis] for axis in in_axes))
        )
        of_up = Pattern(
            source=(outputs, ("rank",)), target=(*out_axes, "rank"), shape=(*(sizes[axis] for axis in out_axes), rank)
        )
        if not piece.in_major:  # a tensor may hold other parts beside this one
            up = up[piece.first : piece.first + of_up.source_shape[0]]
        read_down = read_target(lambda index: down[index], of_down, _all(of_down))
        read_up = read_target(lambda index: up[index], of_up, _all(of_up))
        for number, part in enumerate(form.parts):
            if piece.part is None or part == piece.part:
                into.down[number, :rank] = read_down
        window = tuple(slice(bounds.start, bounds.stop) for bounds in piece.window[: len(out_axes)])
        into.up[0][(*window, slice(0, rank))] = read_up

    def _placed(self, whole: ProjectionForm, padded: ProjectionForm, values: LowRank) -> LowRank:
        """With padding and copies of heads, and B cut into parts."""
        rank, num_parts = self._max_rank, len(whole.parts)
        blocks = self._partition.blocks
        down = _spread(
            values.down,
            [((0, 0, num_parts), (0, 0, rank), *block) for block in blocks(whole.in_axes, whole.in_shape)],
            (num_parts, rank, *padded.in_shape),
        )
        up = _spread(
            values.up[0],
            [(*block, (0, 0, rank)) for block in blocks(whole.out_axes, whole.out_shape)],
            (*padded.out_shape, rank),
        )
        return LowRank(
            down=down.astype(self._dtype),
            up=tuple(np.ascontiguousarray(up[window]).astype(self._dtype) for window in padded.windows()),
            axis=padded.part_axis,
        )


def _sides(piece: Piece) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes of the inputs and of the outputs of a kernel, as they lie on disk."""
    last = piece.pattern.target[-1]
    (inputs,) = [names for names in piece.pattern.source if last in names]
    (outputs,) = [names for names in piece.pattern.source if last not in names]
    return inputs, outputs


def _all(pattern: Pattern) -> tuple[slice, ...]:
    return tuple(slice(0, size) for size in pattern.shape)


def _spread(array: np.ndarray, blocks: list[Block], shape: tuple[int, ...]) -> np.ndarray:
    """`partition.spread` of an array of the host."""
    out = np.zeros(shape, array.dtype)
    for block in blocks:
        into = tuple(slice(to, to + size) for to, _, size in block)
        out[into] = array[tuple(slice(start, start + size) for _, start, size in block)]
    return out
