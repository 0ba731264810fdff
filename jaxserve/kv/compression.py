"""Compression of pages without loss, and the choice whether it is worth its time.

Numbers of a cache look alike in their high bytes, so the bytes of all elements are sorted by their place first, and
zstd compresses the rest. On a link that is faster than the codec, compressing only loses time, so `CodecChoice`
compares rates that were measured on the way.

The library is `backports.zstd` (extra `kv`), the standard library's own `compression.zstd` of Python 3.14 for older
versions: no other dependency outlives that release. zlib, which every Python has, is no alternative: it is slower than
most links that are slow enough to need a codec.
"""

import sys
import threading
import time
from typing import Any, Protocol

import numpy as np

from jaxserve.errors import ConfigError, how_to_install

_LEVEL = 1  # noise of numbers does not shrink at higher levels either, which only take longer
_TRY_EVERY = 64  # pages; each of these is compressed to keep the codec's rates current
_WEIGHT = 0.2  # of a new measurement


class CompressionError(Exception):
    """Bytes that no page was compressed to."""


class Codec(Protocol):
    """Bytes to fewer bytes and back. Used by several threads at once."""

    @property
    def name(self) -> str:
        """In the header of a page."""
        ...

    def compress(self, page: memoryview, element_bytes: int) -> bytes: ...

    def decompress(self, packed: memoryview, page_bytes: int, element_bytes: int) -> bytes:
        """Exactly `page_bytes`, and memory for a few pages at most on the way. Raises CompressionError."""
        ...


class ShuffledZstd:
    """Bytes of elements sorted by place, then zstd."""

    name = "shuffle+zstd"

    def __init__(self) -> None:
        """Raises ConfigError when the library is not installed."""
        self._zstd = _load_zstd()

    def compress(self, page: memoryview, element_bytes: int) -> bytes:
        return self._zstd.compress(shuffle(page, element_bytes), level=_LEVEL)

    def decompress(self, packed: memoryview, page_bytes: int, element_bytes: int) -> bytes:
        # The sender chooses the window, which the decompressor holds in memory beside what it gives out. A page was
        # compressed as a whole, so its window is never longer than itself, rounded up to a power of two.
        window_log = self._zstd.DecompressionParameter.window_log_max
        least, most = window_log.bounds()
        try:
            decompressor = self._zstd.ZstdDecompressor(
                options={window_log: min(most, max(least, (page_bytes - 1).bit_length()))}
            )
            # One byte more than wanted, so that a bomb shows itself before it is as large as it likes to be.
            page = decompressor.decompress(packed, max_length=page_bytes + 1)
        except (self._zstd.ZstdError, EOFError, MemoryError) as error:
            raise CompressionError(f"zstd cannot read it: {error}") from error
        if len(page) != page_bytes or not decompressor.eof or decompressor.unused_data:
            raise CompressionError(f"it decompresses to something else than {page_bytes} bytes")
        return unshuffle(page, element_bytes)


def shuffle(page: memoryview, element_bytes: int) -> bytes:
    """The first bytes of all elements, then the second bytes, ...; bytes that fill no element come last."""
    flat = np.frombuffer(page, np.uint8)
    whole = len(flat) // element_bytes * element_bytes
    return flat[:whole].reshape(-1, element_bytes).T.tobytes() + flat[whole:].tobytes()


def unshuffle(shuffled: bytes, element_bytes: int) -> bytes:
    """The inverse of `shuffle`."""
    flat = np.frombuffer(shuffled, np.uint8)
    whole = len(flat) // element_bytes * element_bytes
    return flat[:whole].reshape(element_bytes, -1).T.tobytes() + flat[whole:].tobytes()


class CodecChoice:
    """Compresses while the link is slower than the codec. Used by several threads.

    A page is written once and, if it was worth it, read once. Compressing it saves 2 n (1 - 1/r) / link seconds of the
    link, where r is the ratio, and costs n / c + n / d for compressing and decompressing n bytes. All four are means of
    what was measured, weighted towards the last pages. Until the link and the codec were both measured, pages are
    written as they are.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = codec
        self._lock = threading.Lock()
        self._num_pages = 0
        self._link_s: float | None = None  # seconds a byte
        self._codec_s: float | None = None  # seconds a byte, both ways
        self._ratio = 1.0  # compressed bytes of a byte

    @property
    def pays(self) -> bool:
        """Whether compression saves time, as far as is known."""
        if self._link_s is None or self._codec_s is None:
            return False
        return 2 * (1 - self._ratio) * self._link_s > self._codec_s

    def next_codec(self, page: memoryview, element_bytes: int) -> Codec | None:
        """The codec for this page, or None to store it as it is. Now and then the page is a measurement, too."""
        with self._lock:
            self._num_pages += 1
            measured = self._num_pages % _TRY_EVERY == 1
        if measured:
            start = time.perf_counter()
            packed = self.codec.compress(page, element_bytes)
            self.codec.decompress(memoryview(packed), page.nbytes, element_bytes)
            self.note_codec(page.nbytes, len(packed), time.perf_counter() - start)
        return self.codec if self.pays else None

    def note_codec(self, num_bytes: int, packed_bytes: int, seconds: float) -> None:
        """`num_bytes` were compressed and decompressed in so many seconds."""
        with self._lock:
            self._codec_s = _mean(self._codec_s, seconds / num_bytes)
            self._ratio = packed_bytes / num_bytes

    def note_link(self, num_bytes: int, seconds: float) -> None:
        """The store moved so many bytes, in either direction."""
        with self._lock:
            self._link_s = _mean(self._link_s, seconds / num_bytes)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else old + _WEIGHT * (new - old)


def _load_zstd() -> Any:  # a module with the interface of the standard library's compression.zstd
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd  # pyright: ignore[reportMissingImports]
        else:
            from backports import zstd
    except ImportError as error:
        raise ConfigError(
            f"compression of pages needs the library backports.zstd: {how_to_install('kv')}; or set compression to none"
        ) from error
    return zstd
