"""Codes of a few bits out of packed words, and numbers of eight and fewer bits as float32."""

import functools

import numpy as np
from ml_dtypes import float4_e2m1fn


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [..., W] as uint8 [..., W * 32 / bits], 4 or 8 bits each, the lowest bits of a word first."""
    assert bits in (4, 8) and words.dtype.itemsize == 4, (bits, words.dtype)
    octets = np.ascontiguousarray(words).astype("<i4", copy=False).view(np.uint8)
    return octets if bits == 8 else unpack_nibbles(octets)


def unpack_nibbles(octets: np.ndarray) -> np.ndarray:
    """uint8 [..., B] as uint8 [..., 2 * B], the low half of a byte first."""
    out = np.empty((*octets.shape[:-1], 2 * octets.shape[-1]), np.uint8)
    np.bitwise_and(octets, 15, out=out[..., 0::2])
    np.right_shift(octets, 4, out=out[..., 1::2])
    return out


def unpack_fp4(octets: np.ndarray) -> np.ndarray:
    """uint8 [..., B] as float4_e2m1fn [..., 2 * B], the low half of a byte first."""
    return unpack_nibbles(octets).view(float4_e2m1fn)


def to_float32(values: np.ndarray) -> np.ndarray:
    """A fresh float32 array, exact for every type of codes and scales."""
    if values.dtype.itemsize == 1 and values.dtype.kind not in "iu":
        # A table: NumPy converts the types of ml_dtypes one by one, at a twentieth of the speed.
        return np.take(_table(values.dtype), values.view(np.uint8))
    return values.astype(np.float32)


@functools.cache
def _table(dtype: np.dtype) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def words_of(cut: slice, per_word: int) -> tuple[slice, slice]:
    """The words that hold elements `cut`, and where the elements lie in what those words hold."""
    first = cut.start // per_word
    words = slice(first, -(-cut.stop // per_word))
    return words, slice(cut.start - first * per_word, cut.stop - first * per_word)
