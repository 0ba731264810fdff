"""Beginnings of prompts as chained hashes, and `PrefixTable`, a bounded memory of those that a replica has seen.

The keys are those of pages (`content`), so a prompt has the same keys in a replica whose pages have as many tokens as a
block here. Equal sizes are not required: the table only has to guess where a beginning was computed last.
"""

import collections
from collections.abc import Sequence

from jaxserve.values.content import Blocks, ContentSpan, block_key, root_key

# One key per full block of the beginning; equal keys mean equal beginnings up to the end of that block.
PromptKey = tuple[bytes, ...]

BLOCK_TOKENS = 16
BLOCK_BYTES = 64  # of UTF-8, about as many as 16 tokens have
MAX_BLOCKS = 512  # 8192 tokens: beginnings that agree this far count as the same, and hashing stays under a millisecond


def key_of_tokens(
    token_ids: Sequence[int],
    *,
    namespace: str = "",
    cache_salt: str = "",
    content: tuple[ContentSpan, ...] = (),
    block_tokens: int = BLOCK_TOKENS,
) -> PromptKey:
    """The key of a prompt of token ids. Never equal to a key of text, of another salt or of another namespace."""
    blocks = Blocks(root_key(namespace, cache_salt, f"{block_tokens} tokens"), block_tokens, token_ids, content)
    for _ in range(min(len(token_ids) // block_tokens, MAX_BLOCKS)):
        blocks.extend()
    return tuple(blocks.keys)


def key_of_text(text: str, *, namespace: str = "", cache_salt: str = "") -> PromptKey:
    """The key of a prompt of text."""
    data = text[: MAX_BLOCKS * BLOCK_BYTES].encode("utf-8", "surrogatepass")  # no text has fewer bytes than characters
    key = root_key(namespace, cache_salt, f"{BLOCK_BYTES} bytes")
    keys: list[bytes] = []
    for start in range(0, min(len(data) - BLOCK_BYTES + 1, MAX_BLOCKS * BLOCK_BYTES), BLOCK_BYTES):
        key = block_key(key, data[start : start + BLOCK_BYTES])
        keys.append(key)
    return tuple(keys)


class PrefixTable:
    """The beginnings that one replica has seen, at most `max_blocks` of them. Mutated by its policy alone.

    Least recently used blocks go first. A block is always touched before those it follows, so a block is never older
    than one that continues it: the rest of a chain is its beginning, and a match can be found by bisection.
    """

    def __init__(self, max_blocks: int) -> None:
        assert max_blocks > 0, max_blocks
        self._max_blocks = max_blocks
        self._blocks: collections.OrderedDict[bytes, None] = collections.OrderedDict()

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
        """Number of blocks of `key`, from its start, that are in the table."""
        low, high = 0, len(key)
        while low < high:
            middle = (low + high + 1) // 2
            if key[middle - 1] in self._blocks:
                low = middle
            else:
                high = middle - 1
        return low
