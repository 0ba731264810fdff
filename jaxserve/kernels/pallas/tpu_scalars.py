"""What the scalar unit of a TPU core computes for a kernel: short loops, divisions, powers of two."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

_TURNS = 8  # turns of a short loop that are laid out one after the other


def short_turns(begin, end, body: Callable[[Array, int], None]) -> None:
    """A loop of short turns, several of which are laid out one after the other. A turn gets its number in two parts:
    what is added to the first alone is added once for all of them, and a static number is part of an address.
    """
    turns = div(end - begin, _TURNS)

    def some(turn, _) -> None:
        for k in range(_TURNS):
            body(begin + turn * _TURNS, k)

    lax.fori_loop(0, turns, some, None)
    lax.fori_loop(begin + turns * _TURNS, end, lambda j, _: body(j, 0), None)


def div(x, n: int):
    """Of numbers that are not negative: a shift where n is a power of two, which a scalar unit does in one step."""
    return lax.shift_right_logical(x, jnp.int32(n.bit_length() - 1)) if n & (n - 1) == 0 else lax.div(x, jnp.int32(n))


def div_up(x, n: int):
    return div(x + (n - 1), n)


def power_of_two(x: int) -> int:
    """The largest that is not above x, and at least 1."""
    return 2 ** (max(x, 1).bit_length() - 1)


def power_of_two_above(x: int) -> int:
    """The smallest that is not below x."""
    return 2 ** max(0, (x - 1).bit_length())
