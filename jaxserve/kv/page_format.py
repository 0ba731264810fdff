"""The bytes of one page outside the process: a header, the page, and a MAC over all of it. Files and wires have them.

    magic (8) ‖ version (u16) ‖ header length (u32) ‖ header (JSON) ‖ payload ‖ MAC (32)

The header has the name of the page in the store and a keyed hash of the namespace, so neither a key nor the namespace
itself, and the dtype, the shape, the codec and the sizes. A reader trusts none of it: the total length is bounded by
the reader's own layout before anything is read, the MAC is checked before the JSON is parsed, and then every field must
be what the reader would have written. So bytes of another model, another page or another tenant are refused even where
they are genuine, and a decompressor never makes more than one page. Nothing is unpickled, ever.

A checksum would find decay, but whoever can write to a shared store could choose a model's attention: hence a MAC with
a secret of the fleet.

A page is authenticated, not encrypted. The payload is the keys and values as they are, so whoever can read a store can
read what prompts left in its pages; encrypting the volume or the bucket is the operator's part.
"""

import dataclasses
import hashlib
import json
import math
import struct
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.kv.compression import Codec, CompressionError
from jaxserve.kv.names import BlobName, is_mac, mac, namespace_name

MAGIC = b"jaxkv\x00\r\n"
"""The first bytes of a page. A transfer as text would change their end."""
VERSION = 2
"""Of the format. Pages of another version are not read."""
MAX_HEADER_BYTES = 1 << 16
"""A longer header is not read."""
MAC_BYTES = 32
"""How long the message authentication code is."""
_PREFIX = struct.Struct("<8sHI")


class BadPage(Exception):
    """The bytes are not the page that was asked for; the message says what is wrong. Never shown to a user's client."""


class UnknownCodec(Exception):
    """A genuine page, which was compressed with a library that is not installed here. It is good for others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """What a page of this process is. Two processes share pages if all of it is equal.

    Attributes:
      namespace: all that keys and values follow from beside tokens: checkpoint, adapter, kernel body, format of it.
      dtype: of the elements, such as "bfloat16".
      shape: of the page: layers, keys and values, tokens, heads, ... as the owner counts them.
      element_bytes: of one element; 1 where a page mixes types.
      page_bytes: of the whole page; not less than the elements of `shape` take, since scales may follow them.

    Raises ConfigError when the sizes contradict each other.
    """

    namespace: str
    dtype: str
    shape: tuple[int, ...]
    element_bytes: int
    page_bytes: int

    def __post_init__(self) -> None:
        least = math.prod(self.shape) * self.element_bytes
        if self.element_bytes < 1 or self.page_bytes < max(1, least) or any(size < 1 for size in self.shape):
            raise ConfigError(
                f"a page of shape {self.shape} with {self.element_bytes} bytes an element needs {least} bytes, "
                f"but has {self.page_bytes}"
            )

    def as_json(self) -> dict[str, Any]:
        """All fields, for the header of a page."""
        return {
            "namespace": self.namespace,
            "dtype": self.dtype,
            "shape": list(self.shape),
            "element_bytes": self.element_bytes,
            "page_bytes": self.page_bytes,
        }


def layout_digest(layout: PageLayout) -> bytes:
    """Equal for equal layouts alone."""
    return hashlib.blake2b(json.dumps(layout.as_json(), sort_keys=True).encode(), digest_size=16).digest()


def max_sealed_bytes(layout: PageLayout) -> int:
    """The longest that a sealed page can be: a payload is stored as it is unless the codec made it smaller."""
    return _PREFIX.size + MAX_HEADER_BYTES + layout.page_bytes + MAC_BYTES


def seal(layout: PageLayout, secret: bytes, name: BlobName, page: memoryview, codec: Codec | None = None) -> bytes:
    """The page as bytes for a store. `name`: see `names.blob_name`. `codec`: compresses where the page gets smaller."""
    assert page.nbytes == layout.page_bytes, (page.nbytes, layout.page_bytes)
    payload: bytes | memoryview = page.cast("B")
    codec_name = "none"
    if codec is not None:
        packed = codec.compress(payload, layout.element_bytes)
        if len(packed) < layout.page_bytes:
            payload, codec_name = packed, codec.name
    header = json.dumps({**_described(layout, secret, name, len(payload)), "codec": codec_name}).encode()
    assert len(header) <= MAX_HEADER_BYTES
    prefix = _PREFIX.pack(MAGIC, VERSION, len(header))
    return b"".join([prefix, header, payload, mac(secret, prefix, header, payload)])


def unseal(
    layout: PageLayout, secret: bytes, name: BlobName, sealed: bytes | bytearray, codec: Codec | None = None
) -> memoryview:
    """The page of `name`, of exactly `layout.page_bytes`. Raises BadPage for any other bytes, and UnknownCodec."""
    if not _PREFIX.size + MAC_BYTES <= len(sealed) <= max_sealed_bytes(layout):
        raise BadPage(f"{len(sealed)} bytes are not a page of {layout.page_bytes}")
    view = memoryview(sealed)
    magic, version, header_len = _PREFIX.unpack_from(view)
    if magic != MAGIC or version != VERSION:
        raise BadPage(f"it begins with {magic!r}, version {version}")
    if header_len > min(MAX_HEADER_BYTES, len(sealed) - _PREFIX.size - MAC_BYTES):
        raise BadPage(f"its header would be {header_len} bytes long")
    if not is_mac(view[-MAC_BYTES:], mac(secret, view[:-MAC_BYTES])):
        raise BadPage("its MAC is not one of this secret")
    payload = view[_PREFIX.size + header_len : -MAC_BYTES]
    try:
        header = json.loads(bytes(view[_PREFIX.size : _PREFIX.size + header_len]))
        codec_name = header.pop("codec")
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise BadPage(f"its header cannot be read: {error!r:.80}") from error
    wanted = _described(layout, secret, name, len(payload))
    if header != wanted:
        differing = sorted(field for field in wanted.keys() | header.keys() if header.get(field) != wanted.get(field))
        raise BadPage(f"it is genuine, but another page: {', '.join(map(str, differing))} differ")
    if codec_name == "none":
        page = payload
    elif codec is None or codec_name != codec.name:
        raise UnknownCodec(f"a page was compressed with {codec_name!r:.40}, which is not installed here")
    else:
        try:
            page = memoryview(codec.decompress(payload, layout.page_bytes, layout.element_bytes))
        except CompressionError as error:
            raise BadPage(str(error)) from error
    if page.nbytes != layout.page_bytes:
        raise BadPage(f"it has {page.nbytes} bytes instead of {layout.page_bytes}")
    return page


def _described(layout: PageLayout, secret: bytes, name: BlobName, stored: int) -> dict[str, Any]:
    """The fields of a header beside the codec. The key and the namespace are nobody's business who reads the store."""
    namespace = namespace_name(secret, layout.namespace)
    return {**layout.as_json(), "namespace": namespace, "page": name.page, "stored": stored}
