"""Implementations that misbehave, built on the `xla` implementation, for the scripts that must survive them."""

import dataclasses
import os
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.paged_attention import AttentionUse, PagedAttention
from jaxserve.kernels.tuning import TunedTable, entry_name
from jaxserve.kernels.xla_attention import XLA_ATTENTION

NAME = "fake_implementations:make_attention"


def _crash(*args):
    os._exit(7)


def _hang(*args):
    q, k, v, cache, *rest = args
    never = jax.pure_callback(lambda x: (time.sleep(1000), x)[1], jax.ShapeDtypeStruct(q.shape, q.dtype), q)
    return XLA_ATTENTION.attend(never, k, v, cache, *rest)


def _wrong(*args):
    out, cache = XLA_ATTENTION.attend(*args)
    return out * 1.01, cache


def _lossy_write(k, v, cache, batch, scales=None):
    return XLA_ATTENTION.write(k.at[0].set(0), v, cache, batch, scales)


CRASH = dataclasses.replace(XLA_ATTENTION, name="crash", attend=_crash)
HANG = dataclasses.replace(XLA_ATTENTION, name="hang", attend=_hang)
WRONG = dataclasses.replace(XLA_ATTENTION, name="wrong", attend=_wrong)
LOSSY = dataclasses.replace(XLA_ATTENTION, name="lossy", write=_lossy_write)


# --- sizes to tune --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """`size` 1 is slow, 2 wrong, 3 kills its process, 4 refused, 5 fails to compile, 6 right and quick."""

    size: int


def default_blocks(variant: str, use: AttentionUse) -> Blocks:
    return Blocks(size=1)


def candidates(variant: str, use: AttentionUse) -> Iterator[Blocks]:
    return (Blocks(size=size) for size in range(1, 7))


def make_attention(device: Device, table: TunedTable | None = None) -> PagedAttention:
    entries = {} if table is None else table.entries
    size = Blocks(**next(iter(entries.values()), {"size": 1})).size

    def attend(*args):
        out, cache = XLA_ATTENTION.attend(*args)
        if size == 1:
            slow = jnp.ones((600, 600))
            for _ in range(20):
                slow = jnp.tanh(slow @ slow)
            out = out + (0 * slow.sum()).astype(out.dtype)
        if size == 2:
            out = out * 1.1
        if size == 3:
            _crash()
        if size == 5:
            raise ValueError("too many registers")
        return out, cache

    def refuses(use: AttentionUse) -> str | None:
        return "no room" if size == 4 else None

    return dataclasses.replace(XLA_ATTENTION, name="fake", attend=attend, refuses=refuses)


def entry(variant: str, use: AttentionUse) -> str:
    return entry_name(NAME, variant, use)
