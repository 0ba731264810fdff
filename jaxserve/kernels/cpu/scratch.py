"""The scratch array that workers of one call share: sizes, known when XLA allocates it.

Owns the numbers that both sides need: Python's, which allocates, and the machine code's. Refuses to import Numba.
"""

# 64-bit words: some that `call` uses, then a kernel's own, then of each worker how much of its share is taken, and
# whose share it takes from.
MAX_WORKERS = 64
FIRST_WORD, SHARES, TURNS, WORDS = 20, 64, 64 + MAX_WORKERS, 64 + 2 * MAX_WORKERS
BYTES = 8 * WORDS

MAX_QUERIES = 64  # rows of a tile of attention: queries that share a key head, times tokens


def tile_tokens(group: int) -> int:
    """Tokens of one tile of attention, for `group` query heads of a key head."""
    return max(1, MAX_QUERIES // group)


def tile_floats(group: int, head_dim: int, page_size: int) -> int:
    """Numbers that a worker keeps of a tile: queries, scores, sums of values, largest scores and sums of weights."""
    return tile_tokens(group) * group * (2 * head_dim + page_size + 2)


def num_tiles(num_rows: int, num_tokens: int, group: int) -> int:
    """At most so many tiles have any rows of any lengths, of so many tokens together."""
    return num_rows + num_tokens // tile_tokens(group)


def attention_bytes(num_rows: int, num_tokens: int, group: int, head_dim: int, page_size: int, workers: int) -> int:
    """Bytes for one call of attention."""
    tiles = -(-num_tiles(num_rows, num_tokens, group) * 8 // 64) * 64
    return BYTES + tiles + workers * tile_floats(group, head_dim, page_size) * 4
