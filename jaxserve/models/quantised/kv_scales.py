"""Scales of keys and values that a checkpoint brings along: `self_attn.k_scale` and its older names.

    X.self_attn.k_scale, v_scale        one number, or one for each key/value head; stored = x / scale
    X.self_attn.attn.k_scale            the same, as some exports nest it
    X.self_attn.k_proj.k_scale          AutoFP8; also k_proj.output_scale
    X.self_attn.kv_scale                one number for keys and values

They are made for one type of numbers, which the scheme knows: float8_e4m3fn, or int8 where `kv_cache_scheme` says so.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.quantised.bits import to_float32
from jaxserve.models.quantised.checks import expect, fail
from jaxserve.models.quantised.scales import FLOATS
from jaxserve.models.safetensors_files import TensorSource
from jaxserve.models.weights import fold_names

# What `_names` may be, of a layer with any name: accepted, and not read where the cache needs no scales.
KV_SCALES = r".*\.self_attn\.(attn\.)?([kv]_scale|[kv]_proj\.(output|[kv])_scale|kv_scale)"
CALIBRATE = "measure others: `jaxserve calibrate-cache`, then cache.scales"
_REMEDY = f"fetch the checkpoint again, or {CALIBRATE}"


class StoredScales(NamedTuple):
    """Float32 [L, K] of all layers and their key/value heads, as they are in the files."""

    keys: np.ndarray
    values: np.ndarray


def read_kv_scales(
    tensors: Mapping[str, TensorSource], modules: Sequence[Sequence[str]], num_heads: int
) -> StoredScales | None:
    """The scales of layers whose attention has these names, each with its alternatives; None: there are none at all.

    Raises CheckpointError for layers without, for other shapes, and for scales that are not finite or not above 0.
    """
    found = [[_find(tensors, names, side) for names in modules] for side in "kv"]
    missing = [
        _names(names[0], side)[0]
        for side, row in zip("kv", found, strict=True)
        for names, tensor in zip(modules, row, strict=True)
        if tensor is None
    ]
    if len(missing) == 2 * len(modules):
        return None
    if missing:
        file = next(tensor.file for row in found for tensor in row if tensor is not None)
        raise CheckpointError(
            f"{file.parent}: {len(missing)} of {2 * len(modules)} scales of the KV cache are missing: "
            f"{fold_names(missing)}; {_REMEDY}"
        )
    keys, values = (np.stack([_read(t, num_heads) for t in row if t is not None]) for row in found)
    return StoredScales(keys, values)


def _names(module: str, side: str) -> tuple[str, ...]:
    """Of the scale of keys ('k') or values ('v')."""
    suffixes = (f"{side}_scale", f"attn.{side}_scale", f"{side}_proj.output_scale", f"{side}_proj.{side}_scale")
    return tuple(f"{module}.{suffix}" for suffix in (*suffixes, "kv_scale"))


def _find(tensors: Mapping[str, TensorSource], modules: Sequence[str], side: str) -> TensorSource | None:
    candidates: Iterator[str] = (name for module in modules for name in _names(module, side))
    return next((tensors[name] for name in candidates if name in tensors), None)


def _read(tensor: TensorSource, num_heads: int) -> np.ndarray:
    """Float32 [K]."""
    expect(tensor, FLOATS)
    sizes = [size for size in tensor.shape if size != 1]
    if sizes not in ([], [num_heads]):
        fail(
            tensor,
            f"its shape is {list(tensor.shape)}, but a scale of the KV cache is one number, or one for each of "
            f"{num_heads} key/value heads",
            _REMEDY,
        )
    scales = to_float32(tensor.read(tuple(slice(0, size) for size in tensor.shape))).reshape(-1)
    bad = np.flatnonzero(~((scales > 0) & np.isfinite(scales)))
    if bad.size:
        at = f" of head {bad[0]}" if scales.size > 1 else ""
        fail(tensor, f"the scale{at} is {float(scales[bad[0]])}, but must be finite and above 0", _REMEDY)
    return np.broadcast_to(scales, num_heads).copy()
