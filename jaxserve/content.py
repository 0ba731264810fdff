"""Keys of blocks of tokens: the one definition that the prefix cache, the router and transfers of pages share.

    root key  = BLAKE2b(namespace, cache salt, size of a block)
    block key = BLAKE2b(key of the block before it, what the block holds)

So equal keys mean equal content from the first token on, in every process of every machine. The content of a block is
its token ids and, where these are placeholders (of a picture, say), the digest of the picture and which part of it lies
in the block. Pages are in `sched.prefix`, replicas in `routing`.

There is no secret in a key by itself: the cache verifies what it finds, so a collision costs a miss, and the salt
decides which requests may share pages. Where keys leave the service and must not be guessed from a prompt, a secret
belongs into the namespace.
"""

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

KEY_BYTES = 16
MAX_DIGEST_BYTES = 64

# Only ever copied: a copy takes half the time of a new one. The number is that of the format.
_ROOT = hashlib.blake2b(digest_size=KEY_BYTES, person=b"jaxserve root 1")
_BLOCK = hashlib.blake2b(digest_size=KEY_BYTES, person=b"jaxserve block 1")

HashBlock = Callable[[bytes, bytes], bytes]


class ContentSpan(NamedTuple):
    """Positions of a prompt whose token ids are placeholders.

    Attributes:
      start, length: the positions.
      digest: of what they stand for, 1..64 bytes; equal digests mean that all of it is equal.
    """

    start: int
    length: int
    digest: bytes


def root_key(namespace: str, cache_salt: str, block: str) -> bytes:
    """The key before the first block.

    Args:
      namespace: all that keys and values follow from beside the content: the checkpoint, the types of numbers.
      cache_salt: requests with different salts share nothing.
      block: what a block is, such as "16 tokens".
    """
    key = _ROOT.copy()
    for text in (namespace, cache_salt, block):
        data = text.encode("utf-8", "surrogatepass")
        key.update(struct.pack("<Q", len(data)) + data)
    return key.digest()


def block_key(parent: bytes, content: bytes) -> bytes:
    """The key of a block: `parent` is that of the block before it, or of the root."""
    key = _BLOCK.copy()
    key.update(parent + content)
    return key.digest()


class Blocks:
    """The first full blocks of a sequence, as many as were asked for. Each is packed and hashed once.

    Mutated by its owner alone. The token ids may grow at their end; a block that is known does not change any more.

    Attributes:
      keys: of the known blocks.
      contents: what each of them holds, as the key covers it.
    """

    __slots__ = ("_hash_block", "_pack", "_root", "_size", "_spans", "_token_ids", "contents", "keys")

    def __init__(
        self,
        root: bytes,
        size: int,
        token_ids: Sequence[int],
        spans: tuple[ContentSpan, ...] = (),
        hash_block: HashBlock = block_key,
    ) -> None:
        """`root`: a `root_key` of blocks of `size` tokens."""
        self.keys: list[bytes] = []
        self.contents: list[bytes] = []
        self._root = root
        self._size = size
        self._token_ids = token_ids
        self._spans = spans
        self._hash_block = hash_block
        self._pack = struct.Struct(f"<{size}q").pack  # 64 bits: ids of a simulation are of no vocabulary

    @property
    def num_tokens(self) -> int:
        """Tokens of the sequence so far."""
        return len(self._token_ids)

    def extend(self) -> None:
        """Makes the next block known, which must be full by now."""
        keys, start = self.keys, len(self.keys) * self._size
        content = self._pack(*self._token_ids[start : start + self._size])
        if self._spans:
            content += self._parts(start, start + self._size)
        keys.append(self._hash_block(keys[-1] if keys else self._root, content))
        self.contents.append(content)

    def learn(self, key: bytes, content: bytes) -> None:
        """Takes the next block from another sequence that begins like this one."""
        self.keys.append(key)
        self.contents.append(content)

    def _parts(self, start: int, end: int) -> bytes:
        """Of each span in the block: its start in the block, its length, and its start in the content."""
        parts: list[bytes] = []
        for span in self._spans:
            first, last = max(start, span.start), min(end, span.start + span.length)
            if first < last:
                place = struct.pack("<QQQQ", first - start, last - first, first - span.start, len(span.digest))
                parts += [place, span.digest]
        return b"".join(parts)
