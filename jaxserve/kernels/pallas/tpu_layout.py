"""The layout of a page of keys and values in the memory of a TPU.

    cache [pages + 1, K, planes, rows, 128]     one page of one head, one plane below the other:

    heads up to 64, one plane                   of 128, two planes        of 256, four
      token 0   | key .... | value .... |         | key of token 0 .. |     | key 0 .. 127   |
      token 1   | key .... | value .... |         | key of token 1 .. |     | key 128 .. 255 |
      ...                                         | value of token 0  |     | value 0 .. 127 |
                                                  | value of token 1  |     | ...            |

A plane is a matrix as wide as a register. So its tiles follow one another, and it is the same bytes in every memory,
however many rows a tile has: on a TPU7x 8 in HBM and 16 in VMEM, which no copy has to reconcile as it would where tiles
stand side by side. The planes of a page are one contiguous piece, so one copy brings keys and values, and heads of 64
fill the 128 lanes instead of half of them. A page is whole tiles of the hardware (8, 16 or 32 rows by bytes of a
number): other page sizes work and waste the rest of the last tile. Heads come before tokens, so that the heads can be
split over devices and each plane is a plain matrix.
"""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.kernels.paged_attention import AttentionUse

LANES = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageShape:
    """Geometry of a page.

    Attributes:
      page_size: tokens.
      head_dim: H.
      tile_rows: lines that the hardware moves together.
      rows: lines of a plane, a multiple of it.
      half: lanes of a key, and of a value.
    """

    page_size: int
    head_dim: int
    tile_rows: int
    rows: int
    half: int

    @classmethod
    def make(cls, page_size: int, head_dim: int, dtype: np.dtype) -> "PageShape":
        tile = 32 // jnp.dtype(dtype).itemsize
        half = LANES // 2 if head_dim <= LANES // 2 else -(-head_dim // LANES) * LANES
        rows = -(-page_size // tile) * tile
        return cls(page_size=page_size, head_dim=head_dim, tile_rows=tile, rows=rows, half=half)

    @classmethod
    def of(cls, use: AttentionUse) -> "PageShape":
        return cls.make(use.page_size, use.spec.head_dim, jnp.dtype(use.cache_dtype))

    @property
    def planes(self) -> int:
        """Of a page of one head: those of its keys, then those of its values; one if a key fills half a line."""
        return max(1, 2 * self.half // LANES)

    @property
    def value_planes(self) -> slice:
        """The planes that hold values."""
        return slice(self.planes // 2, self.planes)

    @property
    def query_lanes(self) -> int:
        """Of a query and of an output. Where a key fills half a line, a query is a whole line with zeros behind."""
        return max(self.half, LANES)

    def split(self, planes: Sequence[Float[Array, "S 128"]]) -> tuple[Array, Array]:
        """Keys and values, both [S, query_lanes], of a block's planes.

        Half a line cannot be cut off for free, so there both are the line itself: the zeros of the query blank the
        values, and `values_of` picks the other half of the output.
        """
        first = self.value_planes.start
        return jnp.concatenate(planes[: max(first, 1)], axis=1), jnp.concatenate(planes[first:], axis=1)

    def pad_queries(self, q: Float[Array, "... H"]) -> Float[Array, "... query_lanes"]:
        return jnp.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, self.query_lanes - self.head_dim)])

    def values_of(self, out: Float[Array, "... query_lanes"]) -> Float[Array, "... H"]:
        first = self.half if self.half < LANES else 0
        return out[..., first : first + self.head_dim]

    def join(self, k: Float[Array, "... H"], v: Float[Array, "... H"]) -> Float[Array, "... planes 128"]:
        """Lines of the planes from keys and values."""
        pad = [(0, 0)] * (k.ndim - 1) + [(0, self.half - self.head_dim)]
        line = jnp.concatenate([jnp.pad(k, pad), jnp.pad(v, pad)], axis=-1)
        return line.reshape(*k.shape[:-1], self.planes, LANES)

    def slot_positions(self, pages: int) -> np.ndarray:
        """Where the token of each slot of `pages` pages is in their sequence; far beyond it for slots of padding."""
        slot = np.arange(self.rows)
        position = np.where(slot < self.page_size, slot, 2**30)
        return (np.arange(pages)[:, None] * self.page_size + position).reshape(-1).astype(np.int32)


def read_pages(leaves: Sequence[np.ndarray], page_size: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """`HostPages.read`."""
    (pages,) = leaves
    shape = PageShape.make(page_size, head_dim, pages.dtype)
    assert pages.shape[2:] == (shape.planes, shape.rows, LANES), (pages.shape, shape)
    lines = pages[:, :, :, :page_size].transpose(0, 3, 1, 2, 4)  # [S, page, K, planes, 128]
    joined = lines.reshape(*lines.shape[:3], 2 * shape.half)
    return joined[..., :head_dim], joined[..., shape.half : shape.half + head_dim]


def write_pages(keys: np.ndarray, values: np.ndarray) -> Sequence[np.ndarray]:
    """`HostPages.write`."""
    num_pages, page_size, heads, head_dim = keys.shape
    shape = PageShape.make(page_size, head_dim, keys.dtype)
    joined = np.zeros((num_pages, page_size, heads, 2 * shape.half), keys.dtype)
    joined[..., :head_dim] = keys
    joined[..., shape.half : shape.half + head_dim] = values
    lines = joined.reshape(num_pages, page_size, heads, shape.planes, LANES)
    out = np.zeros((num_pages, heads, shape.planes, shape.rows, LANES), keys.dtype)
    out[:, :, :, :page_size] = lines.transpose(0, 2, 3, 1, 4)
    return (out,)
