"""Beginnings of prompts as chained hashes, and a bounded memory of who has seen which.

Owns the hashing and `PrefixTable`. Refuses to know the pages of a replica: a block here need not be a page there, the
table only has to guess where a beginning was computed last.
"""

import collections
import hashlib
import struct
from collections.abc import Iterator, Sequence

# One number per full block of the beginning; equal numbers mean equal beginnings up to the end of that block.
PromptKey = tuple[int, ...]

BLOCK_TOKENS = 16
BLOCK_BYTES = 64  # of UTF-8, about as many as 16 tokens have
MAX_BLOCKS = 512  # 8192 tokens: beginnings that agree so far count as the same, and hashing stays under a millisecond


def key_of_tokens(token_ids: Sequence[int], *, cache_salt: str = "", tenant: str = "") -> PromptKey:
    """The key of a prompt of token ids. Never equal to a key of text, of another salt or of another tenant.

    Ids take 32 bits each; larger ones wrap, since who sends such a request is refused later in any case.
    """
    count = min(len(token_ids) // BLOCK_TOKENS, MAX_BLOCKS) * BLOCK_TOKENS
    data = struct.pack(f"<{count}I", *(i & 0xFFFFFFFF for i in token_ids[:count]))
    return tuple(_chain(_root(b"ids", cache_salt, tenant), data, 4 * BLOCK_TOKENS))


def key_of_text(text: str, *, cache_salt: str = "", tenant: str = "") -> PromptKey:
    """The key of a prompt of text."""
    data = text[: MAX_BLOCKS * BLOCK_BYTES].encode("utf-8", "surrogatepass")  # no text has fewer bytes than characters
    return tuple(_chain(_root(b"text", cache_salt, tenant), data[: MAX_BLOCKS * BLOCK_BYTES], BLOCK_BYTES))


def _root(kind: bytes, cache_salt: str, tenant: str) -> bytes:
    parts = [kind, cache_salt.encode("utf-8", "surrogatepass"), tenant.encode("utf-8", "surrogatepass")]
    return _hash(b"".join(struct.pack("<I", len(part)) + part for part in parts))


def _chain(before: bytes, data: bytes, size: int) -> Iterator[int]:
    for start in range(0, len(data) - size + 1, size):
        before = _hash(before + data[start : start + size])
        yield int.from_bytes(before, "little")


def _hash(data: bytes) -> bytes:
    """Not Python's own: that of text differs from process to process, and routers should agree."""
    return hashlib.blake2b(data, digest_size=8).digest()


class PrefixTable:
    """The beginnings that one replica has seen, at most `max_blocks` of them. Mutated by its policy alone.

    Least recently used blocks go first. A block is always touched before those it follows, so a block is never older
    than one that continues it: what is left of a chain is its beginning, and a match can be found by bisection.
    """

    def __init__(self, max_blocks: int) -> None:
        assert max_blocks > 0, max_blocks
        self._max_blocks = max_blocks
        self._blocks: collections.OrderedDict[int, None] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def add(self, key: PromptKey) -> None:
        """Remembers every beginning in `key`; of one longer than the table, the first `max_blocks`."""
        for block in reversed(key[: self._max_blocks]):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._max_blocks:
            self._blocks.popitem(last=False)

    def match_len(self, key: PromptKey) -> int:
        """How many blocks of `key`, from its start, are here."""
        low, high = 0, len(key)
        while low < high:
            middle = (low + high + 1) // 2
            if key[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low
