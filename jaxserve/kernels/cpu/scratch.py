"""Sizes of what the workers of one call share: the words of its state, and scratch arrays, which XLA allocates.

Both sides need them: the Python code that allocates, and the machine code. So this module does not import Numba.
"""

import dataclasses

# 64-bit words of a state: some that `call` uses, then a kernel's own, then of each worker how much of its share is
# taken, whose share it takes from, and how many items it has taken.
MAX_WORKERS = 64
FIRST_WORD, SHARES, TURNS, TAKEN, WORDS = 20, *(80 + n * MAX_WORKERS for n in range(4))
GATING = 56  # the first word of `gating`; a kernel that gates has those before
LOW_RANK = 64  # the first word of `low_rank`, likewise

BYTES = 0  # of a scratch array, before what attention keeps there
RUN_BYTES = 3 * 8  # of the scratch array of the grouped product: expert, first row and rows of each expert hit

EXPERT_RUN_WORDS = 4  # the same of experts in codes: also the first work item
CALL_WORDS = 64  # of a state, before those of `low_rank` and those that workers count in

BLOCK = 128  # inputs of a row that are rounded with one scale

_MAX_QUERIES = 64  # of a tile of attention: query heads that share a key head, times tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionScratch:
    """Of a call of attention: the list of tiles, then buffers of each worker.

    Attributes:
      tile_tokens: tokens of one tile.
      buffers_begin: bytes before the first worker's buffers.
      buffer_bytes: of one worker, for queries [M, H], scores [M, page], sums of values [M, H], largest scores and sums
        of weights [M].
      workers: number of workers that have a part of it.
    """

    tile_tokens: int
    buffers_begin: int
    buffer_bytes: int
    workers: int

    @classmethod
    def of(
        cls, *, num_rows: int, num_tokens: int, group: int, head_dim: int, page_size: int, workers: int
    ) -> "AttentionScratch":
        """Sizes for `num_tokens` in rows of any lengths, and `group` query heads to a key head."""
        tile_tokens = max(1, _MAX_QUERIES // group)
        num_tiles = num_rows + num_tokens // tile_tokens  # at most
        return cls(
            tile_tokens=tile_tokens,
            buffers_begin=BYTES + -(-num_tiles * 8 // 64) * 64,
            buffer_bytes=4 * tile_tokens * group * (2 * head_dim + page_size + 2),
            workers=min(workers, MAX_WORKERS),
        )

    @property
    def num_bytes(self) -> int:
        """Size of the whole scratch array."""
        return self.buffers_begin + self.workers * self.buffer_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundedRows:
    """Of a product with codes whose rows are rounded to eight bits. All are bytes.

    Attributes:
      row_bytes: how far apart the codes of two rows are, int8 [in]; those of the first are at the beginning.
      scales_begin: of float32 [rows, blocks].
      sums_begin: of the sums of the codes of each run, int32 [rows, runs].
      num_bytes: size of the whole scratch array.
    """

    row_bytes: int
    scales_begin: int
    sums_begin: int
    num_bytes: int

    @classmethod
    def of(cls, *, num_rows: int, depth: int, run: int) -> "RoundedRows":
        """Sizes for rows of `depth` inputs, in runs of `run`."""
        row_bytes = -(-depth // 128) * 128 + 64  # an odd number of cache lines: no two of a block's rows share a set
        scales_begin = num_rows * row_bytes
        sums_begin = scales_begin + num_rows * -(-depth // BLOCK) * 4
        num_bytes = sums_begin + num_rows * -(-depth // run) * 4
        return cls(row_bytes=row_bytes, scales_begin=scales_begin, sums_begin=sums_begin, num_bytes=num_bytes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundedSpans:
    """Of a product with codes in blocks, whose rows are rounded in spans of 32 inputs. All are bytes of a row.

    Attributes:
      scales, starts, sums: where they begin, behind the codes (`rounding.round_spans`).
      row_bytes: how far apart rows are.
    """

    scales: int
    starts: int
    sums: int
    row_bytes: int

    @classmethod
    def of(cls, *, spans: int, groups: int) -> "RoundedSpans":
        """Sizes for rows of so many spans, of `groups` groups each."""
        scales = 32 * spans
        starts = scales + 4 * spans
        sums = starts + 4 * groups * spans
        lines = -(-(sums + 4 * spans) // 64) | 1  # odd: no two of a block's rows share a set of the cache
        return cls(scales=scales, starts=starts, sums=sums, row_bytes=64 * lines)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GatedRooms:
    """Of a product whose halves are multiplied with each other: each worker's products of one panel.

    Attributes:
      begin: bytes of the scratch array before them.
      workers: number of workers that have a room.
      num_bytes: size of the whole scratch array.
    """

    begin: int
    workers: int
    num_bytes: int

    @classmethod
    def of(cls, *, num_rows: int, width: int, workers: int, begin: int = 0) -> "GatedRooms":
        """Rooms for panels of `width`. Of a single row, an item of work is two panels."""
        begin, workers = -(-begin // 64) * 64, min(workers, MAX_WORKERS)
        return cls(begin=begin, workers=workers, num_bytes=begin + workers * max(num_rows, 2) * width * 4)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LowRankScratch:
    """Of a product with adapters. All are bytes; what A x gives, float32 [T, columns], is at the beginning.

    Attributes:
      tokens_begin: of the tokens that have an adapter, by their slots, int32 [T].
      blocks_begin: of the slot, the first and the number of these tokens, of each block of them: int32 [blocks, 3].
      num_bytes: size of the whole scratch array.
    """

    tokens_begin: int
    blocks_begin: int
    num_bytes: int

    @classmethod
    def of(cls, *, num_tokens: int, columns: int, num_slots: int, block: int) -> "LowRankScratch":
        """Sizes for `num_tokens`, of which `block` at most make a block."""
        tokens_begin = num_tokens * columns * 4
        blocks_begin = tokens_begin + num_tokens * 4
        blocks = num_tokens // block + min(num_tokens, num_slots)
        return cls(tokens_begin=tokens_begin, blocks_begin=blocks_begin, num_bytes=blocks_begin + blocks * 12)


def coded_experts_bytes(num_experts: int) -> int:
    """Of a grouped product with codes: the runs of rows, then words of each worker."""
    return 8 * (EXPERT_RUN_WORDS * num_experts + MAX_WORKERS * CALL_WORDS)
