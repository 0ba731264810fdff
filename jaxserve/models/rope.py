"""Rotary positions: frequencies for every scaling, and the rotation itself.

`hf_config` reads the settings. Tables are not cached: they are functions of the positions in the step, computed once
per step and shared by all layers.

Frequencies are numpy arrays: they depend on the config alone, so they are constants of the compiled step; float32 in
the order of operations of the reference implementation, since positions multiply every rounding error.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.models.decoder_config import RopeConfig, RopeScaling

RopeTable = tuple[Float[Array, "T C"], Float[Array, "T C"]]  # cos and sin, C = rotary_dim / 2


def inverse_frequencies(rope: RopeConfig) -> np.ndarray:
    """Radians per position of each rotated pair, float32 [rotary_dim / 2].

    The dynamic scaling leaves them as they are up to the trained length, so this returns the unscaled ones for it.
    """
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    powers = np.float32(rope.theta) ** exponents
    base = np.float32(1.0) / powers
    if rope.scaling is RopeScaling.LINEAR:
        return base / np.float32(rope.factor)
    if rope.scaling is RopeScaling.FACTORS:
        return base / np.asarray(rope.factors, np.float32)
    if rope.scaling is RopeScaling.LLAMA3:
        return _llama3(base, rope)
    if rope.scaling is RopeScaling.YARN:
        return _yarn(powers, rope)
    return base


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Llama 3.1: long wavelengths are divided by the factor, short ones kept, a linear blend between."""
    wavelengths = 2 * math.pi / base
    longest, shortest = (rope.original_max_position / f for f in (rope.low_freq_factor, rope.high_freq_factor))
    blend = rope.original_max_position / wavelengths - rope.low_freq_factor
    blend = blend / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * base / rope.factor + blend * base
    scaled = np.where(wavelengths > longest, base / rope.factor, np.where(wavelengths < shortest, base, blended))
    return scaled.astype(np.float32)


def _yarn(powers: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """YaRN (Peng et al., 2023, section 3.2): interpolate slow dimensions, keep fast ones, a ramp between."""

    def dimension_of(turns: float) -> float:
        """The (fractional) pair that makes this many turns over the trained length."""
        length = rope.original_max_position
        return rope.rotary_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    width = high - low if high != low else 0.001
    ramp = np.clip((np.arange(rope.rotary_dim // 2, dtype=np.float32) - low) / width, 0, 1).astype(np.float32)
    keep = 1 - ramp
    scaled = (1 / (np.float32(rope.factor) * powers)) * (1 - keep) + (1 / powers) * keep
    return scaled.astype(np.float32)


def rope_table(
    rope: RopeConfig, positions: Int[Array, " T"] | Int[Array, "3 T"], lengths: Int[Array, " T"]
) -> RopeTable:
    """cos and sin of every token's angles, float32.

    `positions` are three of a token (frame, row, column) where it may lie in a picture: each pair turns by that of its
    section. One position stands for three equal ones.

    `lengths` matters to the dynamic scaling alone: the sequence length that the token's rotation is stretched for
    (at least the trained length), see `Decoder.__call__`.
    """
    if rope.scaling is RopeScaling.DYNAMIC:
        frequencies = _dynamic(rope, lengths)
    else:
        frequencies = jnp.asarray(inverse_frequencies(rope))[None]
    if positions.ndim == 2:
        assert len(rope.sections) == positions.shape[0], (rope.sections, positions.shape)
        axis_of_pair = np.repeat(np.arange(len(rope.sections)), rope.sections)  # [C]
        angles = positions[axis_of_pair].T.astype(jnp.float32) * frequencies  # [T, C]
    else:
        angles = positions.astype(jnp.float32)[:, None] * frequencies  # [T, C]
    table = jnp.cos(angles) * rope.attention_factor, jnp.sin(angles) * rope.attention_factor
    # Without this XLA:CPU computes cos and sin again in every layer, for every head.
    return jax.lax.optimization_barrier(table)


def _dynamic(rope: RopeConfig, lengths: Int[Array, " T"]) -> Float[Array, "T C"]:
    """Dynamic NTK: theta grows with the length beyond the trained one.

    theta(s) = theta * (factor * s / S0 - (factor - 1)) ** (d / (d - 2)), hence with i the pair and d the rotary_dim
    frequency_i(s) = frequency_i * growth(s) ** (-2 i / (d - 2)).
    """
    dim, original = rope.rotary_dim, rope.original_max_position
    seen = jnp.maximum(lengths, original).astype(jnp.float32)
    growth = rope.factor * seen / original - (rope.factor - 1)
    exponents = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim - 2)
    stretched = inverse_frequencies(rope)[None] * growth[:, None] ** -exponents[None]
    # The power is inexact even at growth 1, and a short sequence must not feel that a scaling exists.
    return jnp.where((lengths <= original)[:, None], inverse_frequencies(rope)[None], stretched)


def rotate(x: Float[Array, "T M H"], table: RopeTable) -> Float[Array, "T M H"]:
    """Turns each head of M heads: pair i is (x[i], x[i + rotary_dim / 2]); dimensions past rotary_dim pass through.

    Computed in float32, returned in x's dtype.
    """
    cos, sin = (t[:, None, None, :] for t in table)  # [T, 1, 1, C]
    half = cos.shape[-1]
    pairs = x[..., : 2 * half].astype(jnp.float32).reshape(*x.shape[:-1], 2, half)
    # A roll and not a concatenation of halves: it is one loop over all cores, a concatenation two loops on one core.
    signs = jnp.asarray([[-1.0], [1.0]])
    turned = (pairs * cos + pairs[..., ::-1, :] * (sin * signs)).reshape(*x.shape[:-1], 2 * half).astype(x.dtype)
    return turned if 2 * half == x.shape[-1] else jnp.concatenate([turned, x[..., 2 * half :]], axis=-1)
