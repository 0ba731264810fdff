"""Scales of keys and values for caches of eight bits: where they come from, and the file that calibration writes.

A file has ranges, not scales: the magnitude of each key/value head that becomes the largest number of the cache's type.
So one file serves int8 and both float8, and a type's scales are the ranges over its largest number. It is JSON:

    {"format": "jaxserve cache ranges", "version": 1, "keys": [[2.5, ...], ...], "values": [[0.7, ...], ...], ...}

with a list for each layer of a number for each head; what else it has is for readers.
"""

import dataclasses
import json
import zlib
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.kernels.paged_attention import LARGEST
from jaxserve.models.checkpoint import Checkpoint, CheckpointKind, read_json
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family
from jaxserve.models.quantised.kv_scales import CALIBRATE, read_kv_scales
from jaxserve.models.quantised.reading import read_scheme
from jaxserve.models.safetensors_files import open_tensors
from jaxserve.models.weights import Path

FILE_NAME = "cache_scales.json"  # beside config.json; read where cache.scales is null
_FORMAT, _VERSION = "jaxserve cache ranges", 1
_SIDES = {"k_scale": "keys", "v_scale": "values"}  # parameters of `layers.Attention`, and the lists here
_QKV = "layers.{layer}.attention.qkv.kernel"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheScales:
    """The scales of a model's cache.

    Attributes:
      keys, values: float32 [L, K], finite and above 0, of the checkpoint's layers and key/value heads.
      origin: where they come from, in a few words.
      is_one: nothing was found, and all are 1.
    """

    keys: np.ndarray
    values: np.ndarray
    origin: str
    is_one: bool = False

    def of(self, path: Path) -> np.ndarray:
        """Float32 [K]: the parameter at a path of the whole decoder."""
        return getattr(self, _SIDES[path[-1]])[path[1]]

    @property
    def digest(self) -> str:
        """Of the numbers: equal where stored numbers mean the same."""
        return f"{zlib.crc32(self.keys.tobytes() + self.values.tobytes()):08x}"

    def describe(self, dtype: str) -> str:
        """A sentence for the start of an engine."""
        if self.is_one:
            return (
                f"keys and values are kept in {dtype} without scales (1 for all heads), so large ones may be cut and "
                f"small ones coarse; to have scales, {CALIBRATE}"
            )
        return f"keys and values are kept in {dtype}, with scales from {self.origin}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CacheRanges:
    """What calibration has found: float32 [L, K], the magnitudes that must be kept."""

    keys: np.ndarray
    values: np.ndarray

    def scales(self, dtype: str, origin: str) -> CacheScales:
        """For a cache of that type."""
        keys, values = (np.float32(1 / LARGEST[dtype]) * x for x in (self.keys, self.values))
        return CacheScales(keys=keys, values=values, origin=origin)


def is_scale(path: Path) -> bool:
    """Whether a parameter is one of these, and no weight of a checkpoint."""
    return path[-1] in _SIDES


def with_cache(config: DecoderConfig, cache_dtype: str) -> DecoderConfig:
    """The decoder over a cache of that type: with scales where it has eight bits."""
    return dataclasses.replace(config, cache_scales=cache_dtype in LARGEST)


def find_scales(
    checkpoint: Checkpoint,
    family: Family,
    config: DecoderConfig,
    dtype: str,
    file: FilePath | None,
    *,
    random_weights: bool = False,
) -> CacheScales | None:
    """The scales of a cache of type `dtype`: of `file`, of `cache_scales.json` in the checkpoint's directory, or of the
    checkpoint's tensors, the first of these that is there. None for types without scales.

    Where there is none of them, float8 has 1, and so has any type with random weights, whose numbers mean nothing.

    Raises ConfigError for int8 without scales and for a file that would have no effect, CheckpointError for scales that
    do not fit the model.
    """
    if dtype not in LARGEST:
        if file is not None:
            raise ConfigError(
                f"cache.scales is {file}, but a cache in {dtype} has no scales; leave it out, or set cache.dtype to "
                f"one of {', '.join(LARGEST)}"
            )
        return None
    beside = checkpoint.path / FILE_NAME
    if file is None and beside.is_file():
        file = beside
    if file is not None:
        return read_ranges(file, config).scales(dtype, str(file))
    found = None if random_weights else _of_checkpoint(checkpoint, family, config, dtype)
    if found is not None:
        return found
    if dtype == "int8" and not random_weights:
        raise ConfigError(
            f"cache.dtype is int8, and {checkpoint.path} has no scales for keys and values, without which most of them "
            f"would be kept as 0; make some with `jaxserve calibrate-cache {checkpoint.path} OUT --data FILE` and set "
            "cache.scales to OUT, or set cache.dtype to float8_e4m3fn"
        )
    ones = np.ones((config.num_layers, config.num_kv_heads), np.float32)
    return CacheScales(keys=ones, values=ones, origin="no file", is_one=True)


def _of_checkpoint(checkpoint: Checkpoint, family: Family, config: DecoderConfig, dtype: str) -> CacheScales | None:
    scheme = read_scheme(checkpoint)
    if scheme is None or scheme.kv_dtype is None or checkpoint.kind is not CheckpointKind.HUGGING_FACE:
        return None
    names = attention_modules(family, config)
    modules = [(name, name.removeprefix(family.prefix)) for name in names]
    stored = read_kv_scales(open_tensors(checkpoint.path), modules, config.num_kv_heads)
    if stored is None:
        return None
    factor = np.float32(LARGEST[scheme.kv_dtype] / LARGEST[dtype])  # the same numbers are the largest that are kept
    made_for = "" if scheme.kv_dtype == dtype else f", which are made for {scheme.kv_dtype}"
    return CacheScales(
        keys=stored.keys * factor, values=stored.values * factor, origin=f"the checkpoint's tensors{made_for}"
    )


def attention_modules(family: Family, config: DecoderConfig) -> list[str]:
    """The name of each layer's attention in the files, beside which its scales are."""
    module = next(rule.source for rule in family.weights if rule.target == _QKV).rsplit(".", 2)[0]
    return [module.format(layer=layer) for layer in range(config.num_layers)]


def read_ranges(file: FilePath, config: DecoderConfig) -> CacheRanges:
    """The ranges of a file, for a decoder of these sizes. Raises CheckpointError."""
    if not file.is_file():
        raise CheckpointError(f"cache.scales: {file} is no file; `jaxserve calibrate-cache` makes one")
    table = read_json(file)
    if (table.get("format"), table.get("version")) != (_FORMAT, _VERSION):
        raise CheckpointError(
            f"{file} has format {table.get('format')!r} and version {table.get('version')!r}, but must have "
            f"{_FORMAT!r} and {_VERSION}; `jaxserve calibrate-cache` makes such a file"
        )
    return CacheRanges(keys=_ranges(table, "keys", file, config), values=_ranges(table, "values", file, config))


def _ranges(table: Mapping[str, Any], side: str, file: FilePath, config: DecoderConfig) -> np.ndarray:
    shape = (config.num_layers, config.num_kv_heads)
    try:
        ranges = np.asarray(table.get(side), np.float32)
    except (ValueError, TypeError):
        ranges = np.zeros(0, np.float32)
    if ranges.shape != shape:
        raise CheckpointError(
            f"{file}: {side} must be {shape[0]} lists of {shape[1]} numbers, one for each layer and key/value head; it "
            "is of another model, or damaged: run `jaxserve calibrate-cache` for this one"
        )
    bad = np.argwhere(~((ranges > 0) & np.isfinite(ranges)))
    if len(bad):
        layer, head = (int(i) for i in bad[0])
        raise CheckpointError(
            f"{file}: {side} of layer {layer}, head {head} are {float(ranges[layer, head])}, but a range must be "
            "finite and above 0; run `jaxserve calibrate-cache` again"
        )
    return ranges


def write_ranges(file: FilePath, ranges: CacheRanges, about: Mapping[str, Any]) -> None:
    """Writes a new file. `about`: how the ranges were found. Raises ConfigError where that cannot be."""
    table = ranges_table(ranges, about)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in table.items() if name not in _SIDES.values()]
    for side in _SIDES.values():
        rows = ",\n  ".join(json.dumps(row) for row in table[side])
        lines.append(f'"{side}": [\n  {rows}\n ]')
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write("{\n " + ",\n ".join(lines) + "\n}\n")
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; give the name of a new file") from error


def ranges_table(ranges: CacheRanges, about: Mapping[str, Any]) -> dict[str, Any]:
    """What a file of ranges holds."""
    lists = {side: [[float(f"{x:.6g}") for x in row] for row in getattr(ranges, side)] for side in _SIDES.values()}
    return {"format": _FORMAT, "version": _VERSION, **about, **lists}
