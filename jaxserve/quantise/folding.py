"""Where the scales of AWQ go: products whose inputs are divided, and the norm or product before them that does it.

    query, key, value   the norm before attention
    gate, up            the norm before the feed-forward block (one norm for all of these, where they share it)
    out                 the rows of value; query heads that share a key/value head share its scales
    down                the rows of up, whose numbers reach it unchanged, or through ReLU, which does not mind

Everything else keeps its inputs: where a norm comes after a sub-block and not before it, where values are cut to a
range, where another activation than ReLU lies between, and experts, whose inputs are the router's, too.

Functions here work on the parameters of one layer in the decoder's layout, so all families are the same to them.
"""

import dataclasses
import enum

import numpy as np

from jaxserve.models.decoder_config import Block, DecoderConfig, LayerSpec, MlpSpec, NormPlace
from jaxserve.quantise.source import Arrays

_QKV, _OUT, _GATE_UP, _UP, _DOWN = (
    "attention.qkv.kernel",
    "attention.out.kernel",
    "mlp.gate_up.kernel",
    "mlp.up.kernel",
    "mlp.down.kernel",
)


class By(enum.Enum):
    """What divides the inputs."""

    NORM = enum.auto()
    VALUE = enum.auto()
    UP = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """Products [*out, *in] that share their inputs, and what divides those.

    Attributes:
      consumers: their parameters.
      by: the kind of what comes before.
      producer: its parameters' common beginning, as "attention_norm".
    """

    consumers: tuple[str, ...]
    by: By
    producer: str


def folds_of(layer: LayerSpec) -> tuple[Fold, ...]:
    """Those that a layer allows, in the order of computation."""
    mlp = layer.mlp if isinstance(layer.mlp, MlpSpec) else None
    up = None if mlp is None else _GATE_UP if mlp.gated else _UP
    found = []
    if NormPlace.BEFORE in layer.norms:
        if layer.block is not Block.SHARED:
            found.append(Fold(consumers=(_QKV,), by=By.NORM, producer="attention_norm"))
            if up is not None:
                found.append(Fold(consumers=(up,), by=By.NORM, producer="mlp_norm"))
        elif up is not None:
            found.append(Fold(consumers=(_QKV, up), by=By.NORM, producer="attention_norm"))
    if layer.qkv_clip is None:
        found.append(Fold(consumers=(_OUT,), by=By.VALUE, producer="attention.qkv"))
    if mlp is not None and (mlp.gated or mlp.activation == "relu"):
        found.append(Fold(consumers=(_DOWN,), by=By.UP, producer="mlp.gate_up" if mlp.gated else "mlp.up"))
    return tuple(found)


def shared_magnitude(fold: Fold, config: DecoderConfig, magnitude: np.ndarray) -> np.ndarray:
    """[K]: the magnitude of each input that may have a scale of its own, as one for each input."""
    if fold.by is not By.VALUE:
        return magnitude
    by_head = magnitude.reshape(config.num_kv_heads, config.group_size, config.head_dim)
    return np.broadcast_to(by_head.mean(axis=1, keepdims=True), by_head.shape).reshape(-1)


def apply(
    fold: Fold, config: DecoderConfig, arrays: Arrays, scales: np.ndarray, stored: np.dtype
) -> tuple[Arrays, np.ndarray]:
    """The parameters with their inputs divided by `scales` [K], and the scales as they have become.

    A norm is rounded to `stored`, its dtype in the files; the weights take up what that changes, so the product stays.
    """
    arrays = dict(arrays)
    if fold.by is By.NORM:
        scales = _divide_norm(arrays, fold.producer, config.norm.zero_centred, scales, stored)
    elif fold.by is By.VALUE:
        kept = scales.reshape(config.num_kv_heads, config.group_size, config.head_dim)[:, 0]  # [K, H]
        kernel = arrays[f"{fold.producer}.kernel"].copy()  # [K, G + 2, H, D]
        kernel[:, -1] /= kept[:, :, None]
        arrays[f"{fold.producer}.kernel"] = kernel
        _divide_bias(arrays, f"{fold.producer}.bias", (slice(None), -1), kept)
    else:
        kernel = arrays[f"{fold.producer}.kernel"].copy()  # [2, F, D] or [F, D]
        rows = (1,) if kernel.ndim == 3 else (slice(None),)
        kernel[rows] /= scales[:, None]
        arrays[f"{fold.producer}.kernel"] = kernel
        _divide_bias(arrays, f"{fold.producer}.bias", rows, scales)
    for name in fold.consumers:
        kernel = arrays[name]
        in_shape = kernel.shape[-2:] if fold.by is By.VALUE else kernel.shape[-1:]
        arrays[name] = kernel * scales.reshape(in_shape)
    return arrays, scales


def _divide_norm(arrays: Arrays, producer: str, zero_centred: bool, scales: np.ndarray, stored: np.dtype) -> np.ndarray:
    """The scales that the norm, in the dtype of the files, divides by."""
    shift = np.float32(1 if zero_centred else 0)
    old = arrays[f"{producer}.weight"]
    new = ((old + shift) / scales - shift).astype(stored).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        exact = (old + shift) / (new + shift)
    usable = np.isfinite(exact) & (exact > 0)
    arrays[f"{producer}.weight"] = np.where(usable, new, old)
    scales = np.where(usable, exact, np.float32(1)).astype(np.float32)
    _divide_bias(arrays, f"{producer}.bias", (slice(None),), scales)
    return scales


def _divide_bias(arrays: Arrays, name: str, rows: tuple[slice | int, ...], scales: np.ndarray) -> None:
    if name in arrays:
        bias = arrays[name].copy()
        bias[rows] /= scales
        arrays[name] = bias
