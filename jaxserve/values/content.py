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

import dataclasses
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A picture as a vision tower reads it. Made by `vision`; equal where the digests are.

    The scheduler knows the numbers alone; `runtime.towers` reads the pixels.

    Attributes:
      digest: SHA-256 of how pixels are read, of the grid, and of the pixels: 32 bytes.
      grid: (frames, rows, columns) of patches, before the tower merges any.
      num_tokens: placeholders of the picture in a prompt, and embeddings that the tower makes of it.
      pixels: unsigned bytes, [num_patches, channels * height * width of a patch] in the order of the tower's patches.
    """

    digest: bytes
    grid: tuple[int, int, int] = dataclasses.field(compare=False)
    num_tokens: int = dataclasses.field(compare=False)
    pixels: bytes = dataclasses.field(compare=False, repr=False)

    @property
    def num_patches(self) -> int:
        """Rows of `pixels`."""
        frames, rows, columns = self.grid
        return frames * rows * columns


@dataclasses.dataclass(frozen=True, slots=True, weakref_slot=True, kw_only=True)
class Adapter:
    """A LoRA adapter that is loaded, as requests hold it: they end with these weights, whatever becomes of its name.

    The scheduler knows the digest alone; `runtime.adapters` reads the weights.

    Attributes:
      digest: SHA-256 of `weights`; adapters are equal where it is.
      name: by which requests ask for it.
      num_bytes: of `weights`, in the memory of the host.
      weights: in the form of a slot of the device (`models.adapters.placing`).
    """

    digest: bytes
    name: str = dataclasses.field(compare=False)
    num_bytes: int = dataclasses.field(compare=False)
    weights: object = dataclasses.field(compare=False, repr=False)


class PlacedPicture(NamedTuple):
    """A picture in a prompt: its embeddings take the place of the tokens from `start` on."""

    picture: Picture
    start: int

    @property
    def end(self) -> int:
        """The position behind its last token."""
        return self.start + self.picture.num_tokens

    @property
    def span(self) -> ContentSpan:
        """The positions, for keys of blocks."""
        return ContentSpan(self.start, self.picture.num_tokens, self.picture.digest)


SALT_END = "\x1f"  # ends a caller's own salt, where more follows: no caller may send it


def private_salt(cache_salt: str, *reasons: str) -> str:
    """The salt of a request whose pages follow from more than its tokens: from each of `reasons`. Equal for equal
    arguments alone, since a caller's salt and the reasons hold no SALT_END."""
    return SALT_END.join((cache_salt, *reasons))


def salts_agree(cache_salt: str, asked: str) -> bool:
    """Whether `asked`, a caller's salt, is that of the request which was given `cache_salt` for its own."""
    return cache_salt == asked or cache_salt.startswith(asked + SALT_END)


def callers_salt(cache_salt: str) -> str:
    """The caller's own salt, of which that of a request was made: by it callers and operators name pages."""
    return cache_salt.partition(SALT_END)[0]


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
