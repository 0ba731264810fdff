"""Slices of weights as the codes that stay in memory: from a checkpoint's own, or rounded from floats as they are read.

What stands here for a number of a weight is a record of its code, its zero, its scale and its offset. Records are
rearranged, padded and cut as numbers are, by the same functions; of the scales, zeros and offsets of a group, one is
kept in the end.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.kernels.storage import Storage, encode_float4, largest_by_row, round_to_codes, scales_for
from jaxserve.models.layout import Index
from jaxserve.models.quantised.bits import to_float32
from jaxserve.models.quantised.slices import ListedGroups, QuantisedSlice, QuantisedTensor
from jaxserve.models.quantised.widening import check_range, turned

# float8 codes are there as their bits.
CODED = np.dtype([("code", np.int8), ("zero", np.int16), ("scale", np.float32), ("offset", np.float32)])
GROUP = np.dtype([("zero", np.int16), ("scale", np.float32), ("offset", np.float32)])
_BAND = 2**20  # records that are made at once
_REMEDY = "set model.quantization to none, which widens the weights"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedTensor:
    """A quantised weight of a checkpoint that reads as records (`safetensors_files.ReadableTensor`).

    `storage`: of the records; one that the format's own fits into. `bits`: of a code in the files. Where the storage is
    `ordered`, the records have the order of their groups: the n-th is that of input `order[n]`.
    """

    source: QuantisedTensor
    storage: Storage
    bits: int
    in_major: bool

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def dtype(self) -> str:
        return self.storage.code

    @property
    def shape(self) -> tuple[int, ...]:
        return turned(self.source.shape, self.in_major)

    @property
    def outer_axis(self) -> int:
        return turned(tuple(range(len(self.source.shape))), self.in_major).index(self.source.outer_axis)

    def read(self, index: Index) -> np.ndarray:
        """Records at `index`. Raises CheckpointError for values that cannot be, or that the storage cannot hold."""
        found = self._readable.read(turned(index, self.in_major))
        check_range(found, self.name)
        records = np.empty(found.codes.shape, CODED)
        codes, scales, zeros = _in_storage(found, self.storage, self.bits, self.name)
        records["code"] = codes
        records["scale"] = found.by_input(scales)
        records["zero"] = 0 if zeros is None else found.by_input(zeros)
        records["offset"] = 0 if found.offsets is None else found.by_input(found.offsets)
        return records.swapaxes(-1, -2) if self.in_major else records

    @property
    def in_runs(self) -> bool:
        """Whether the inputs of each group of the storage follow one another, so that `read_groups` can read them."""
        is_listed = isinstance(self.source, ListedGroups)
        return not (self.in_major or is_listed or self.storage.ordered or self.storage.group is None)

    def read_groups(self, index: Index) -> tuple[np.ndarray, np.ndarray]:
        """What `read` gives at `index`, which cuts no group of the storage: codes int8, and a `GROUP` for each group.

        Raises CheckpointError as `read`. It takes a tenth of the time.
        """
        assert self.in_runs and self.storage.group is not None, self.storage
        found = self.source.read(index)
        check_range(found, self.name)
        codes, scales, zeros = _in_storage(found, self.storage, self.bits, self.name)
        first = found.group_of[:: self.storage.group]

        def by_group(values: np.ndarray) -> np.ndarray:
            return values if values.shape[-1] == 1 else values[..., first]

        groups = np.zeros((*codes.shape[:-1], len(first)), GROUP)
        groups["scale"] = by_group(scales)
        if zeros is not None:
            groups["zero"] = by_group(zeros)
        if found.offsets is not None:
            groups["offset"] = by_group(found.offsets)
        return codes, groups

    @functools.cached_property
    def order(self) -> np.ndarray:
        """int32 [in]: inputs by their groups, those of a group as they come."""
        assert isinstance(self.source, ListedGroups), self.name
        groups = self.source.input_groups()
        return np.argsort(groups, kind="stable").astype(np.int32)

    @functools.cached_property
    def _readable(self) -> "QuantisedTensor | SortedTensor":
        return SortedTensor(source=self.source, order=self.order) if self.storage.ordered else self.source


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SortedTensor:
    """A weight whose inputs are read in another order."""

    source: QuantisedTensor
    order: np.ndarray

    def read(self, index: Index) -> QuantisedSlice:
        """See `QuantisedTensor`. What is read of the files reaches from the first input asked for to the last."""
        *outer, inputs = index
        wanted = self.order[inputs]
        first = int(wanted.min(initial=len(self.order)))
        found = self.source.read((*outer, slice(first, int(wanted.max(initial=first)) + 1)))
        return dataclasses.replace(
            found, codes=found.codes[..., wanted - first], group_of=found.group_of[wanted - first]
        )


def _in_storage(
    found: QuantisedSlice, storage: Storage, bits: int, name: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes as int8 (the bits of a float8), scales and zeros, of the same weights."""
    if storage.code == "float8_e4m3fn":
        assert found.codes.dtype == ml_dtypes.float8_e4m3fn and found.zeros is None, (name, found.codes.dtype)
        return found.codes.view(np.int8), found.scales, None
    if storage.code == "float4_e2m1fn":
        assert found.codes.dtype == ml_dtypes.float4_e2m1fn and found.zeros is None, (name, found.codes.dtype)
        return encode_float4(found.codes), found.scales / 2, None
    if found.codes.dtype == ml_dtypes.float4_e2m1fn:
        return (2 * found.codes.astype(np.float32)).astype(np.int8), found.scales / 2, None
    codes, zeros = found.codes, found.zeros
    if storage.offsets and found.offsets is not None:  # codes from 0 on, which four bits hold as -8 and more
        shift = np.int16(8 if storage.code == "int4" else 0)
        zeros = np.full(found.scales.shape, -shift, np.int16) if storage.zeros else None
        return (codes.astype(np.int16) - shift).astype(np.int8), found.scales, zeros
    if codes.dtype.kind == "u":  # codes of unsigned formats lie around half their range
        half = np.int16(2 ** (bits - 1))
        assert zeros is not None, name
        codes, zeros = (codes.astype(np.int16) - half).astype(np.int8), zeros - half
    if zeros is not None and not storage.zeros:
        if zeros.any():
            raise CheckpointError(
                f"{name}: the config calls its codes symmetric, but it has zeros other than half their range; set "
                "sym or symmetric to false in model.overrides.quantization_config"
            )
        zeros = None
    return codes, found.scales, zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundedParam:
    """A float parameter [*out, *in] that reads as records of its nearest codes, each group by its largest magnitude.

    Groups are of the whole parameter, so codes do not depend on how it is cut.

    Attributes:
      read_floats: any slice of it.
      shape: of the whole.
      num_in: axes of *in.
      storage: without groups, or with groups of the last axis.
    """

    read_floats: Callable[[Index], np.ndarray]
    shape: tuple[int, ...]
    num_in: int
    storage: Storage

    def read(self, index: Index | None) -> np.ndarray:
        """Records at `index`. Raises CheckpointError for numbers that are not finite."""
        assert index is not None, self.shape
        group, last = self.storage.group, index[-1]
        wide = last if group is None else slice(last.start // group * group, -(-last.stop // group) * group)
        wide = slice(wide.start, min(wide.stop, self.shape[-1]))
        floats = self._checked((*index[:-1], wide))
        if group is None:
            scales = self._row_scales[index[: -self.num_in]].reshape(*floats.shape[: -self.num_in], *(1,) * self.num_in)
            scales = np.broadcast_to(scales, floats.shape)
        else:
            padded = np.pad(np.abs(floats), [(0, 0)] * (floats.ndim - 1) + [(0, -floats.shape[-1] % group)])
            largest = padded.reshape(*floats.shape[:-1], -1, group).max(axis=-1)
            scales = np.repeat(scales_for(largest, self.storage), group, axis=-1)[..., : floats.shape[-1]]
        records = np.zeros(floats.shape, CODED)
        records["code"] = round_to_codes(floats, scales, self.storage).view(np.int8)
        records["scale"] = scales
        return records[..., last.start - wide.start : last.stop - wide.start]

    def read_numbers(self, index: Index | None, *, dtype: np.dtype) -> np.ndarray:
        """The rounded numbers at `index`."""
        records = self.read(index)
        codes = to_float32(records["code"].copy().view(self.storage.dtype("cpu")))
        return (codes * records["scale"]).astype(dtype)

    @functools.cached_property
    def _row_scales(self) -> np.ndarray:
        """float32 [*out]. Reads all of the parameter, a few megabytes at once."""
        out_shape = self.shape[: -self.num_in]
        largest = np.empty(out_shape, np.float32)
        for band in bands(out_shape, math.prod(self.shape[-self.num_in :])):
            floats = self._checked((*band, *(slice(0, size) for size in self.shape[-self.num_in :])))
            rows = floats.shape[: -self.num_in]
            largest[band] = largest_by_row(floats.reshape(math.prod(rows), -1)).reshape(rows)
        return scales_for(largest, self.storage)

    def _checked(self, index: Index) -> np.ndarray:
        floats = self.read_floats(index)
        if not np.isfinite(floats).all():
            raise CheckpointError(
                "a weight that model.quantization rounds has numbers that are NaN or infinite; the checkpoint is "
                "damaged: fetch it again"
            )
        return floats


def bands(out_shape: tuple[int, ...], depth: int) -> Iterator[Index]:
    """Slices of the outputs of a weight of `depth` inputs, of some megabytes each, that cover all of them.

    The first axis is cut first: experts, and the parts of a fused weight, are read one after the other.
    """
    if not out_shape:
        yield ()
        return
    size, inner = out_shape[0], math.prod(out_shape[1:]) * depth
    step = max(1, _BAND // max(1, inner))
    for low in range(0, size, step):
        rest = bands(out_shape[1:], depth) if step == 1 else [tuple(slice(0, length) for length in out_shape[1:])]
        for band in rest:
            yield (slice(low, min(low + step, size)), *band)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The arrays of a slice of a weight, as `CodedWeight` and `WithOffsets` of `jaxserve.kernels` have them."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    offsets: np.ndarray | None


def read_parts(
    read: Callable[[Index], np.ndarray], index: Index, num_in: int, storage: Storage, dtype: np.dtype, name: str
) -> Parts:
    """The slice `index` of a weight [*out, *in] that `read` gives as records. `dtype`: of the array of codes.

    Raises CheckpointError where the inputs of a group have different scales or zeros.
    """
    cuts = index[: len(index) - num_in]
    out_shape = tuple(cut.stop - cut.start for cut in cuts)
    in_shape = tuple(cut.stop - cut.start for cut in index[len(index) - num_in :])
    group = storage.group
    by_scale = (*out_shape, *((1,) * num_in if group is None else (*in_shape[:-1], in_shape[-1] // group)))
    codes = np.empty((*out_shape, *in_shape), dtype)
    scales = np.empty(by_scale, np.float32)
    zeros = np.empty(by_scale, np.int16) if storage.zeros else None
    offsets = np.empty(by_scale, np.float32) if storage.offsets else None
    for band in bands(out_shape, math.prod(in_shape)):
        place = tuple(slice(b.start + cut.start, b.stop + cut.start) for b, cut in zip(band, cuts, strict=True))
        records = read((*place, *index[len(index) - num_in :]))
        raw = records["code"]
        codes[band] = raw.view(dtype) if storage.code == "float8_e4m3fn" else raw.astype(dtype)
        # The first inputs of a weight are never padding, those of a device's share may be.
        of_scale = read((*place, *(slice(0, 1),) * num_in)) if group is None else _of_groups(records, group, name)
        scales[band] = of_scale["scale"]
        if zeros is not None:
            zeros[band] = of_scale["zero"]
        if offsets is not None:
            offsets[band] = of_scale["offset"]
    return Parts(codes=codes, scales=scales, zeros=zeros, offsets=offsets)


def parts_of(codes: np.ndarray, groups: np.ndarray, storage: Storage, dtype: np.dtype) -> Parts:
    """The arrays of codes int8 and of the groups beside them. `dtype`: of the array of codes."""
    return Parts(
        codes=codes.view(dtype) if storage.code == "float8_e4m3fn" else codes.astype(dtype, copy=False),
        scales=groups["scale"].copy(),
        zeros=groups["zero"].copy() if storage.zeros else None,
        offsets=groups["offset"].copy() if storage.offsets else None,
    )


def _of_groups(records: np.ndarray, group: int, name: str) -> np.ndarray:
    """One record for each group of the last axis."""
    grouped = records.reshape(*records.shape[:-1], -1, group)
    first = grouped[..., :1]
    if any((grouped[field] != first[field]).any() for field in ("scale", "zero", "offset")):
        raise CheckpointError(
            f"{name}: inputs of one group of {group} have different scales or zeros, so the groups do not follow one "
            f"another as the config says; set desc_act or actorder as the weights are, or {_REMEDY}"
        )
    return first[..., 0]
