"""Names of pages outside the process: keys that can be deleted by tenant, and names that show neither salts nor keys.

    page key = scope (16 bytes) ‖ content key (32 bytes)

The scope is a keyed hash of the cache salt, so one tenant's pages can be found without their tokens. The content key is
a hash over the page's tokens and all before them, in the namespace, the salt (see `content`) and the layout of the
page: equal keys mean equal bytes, so nothing else has to be stored with a page to check it. It has no secret, so
whoever knows these can make the key of a prompt and compare: keys do not leave the process.

A store that others can reach sees names, which are hashes of page keys and of the pages' layout, keyed with the secret:
servers with other models, other page sizes or another secret share a directory without ever meeting a name of another.
Names hide salts and keys, and nothing more: the pages under them are not encrypted (see `page_format`).
"""

import hashlib
import hmac
from typing import NamedTuple

SCOPE_BYTES = 16
"""How long the scope of a tenant is, the beginning of each of its keys."""
CONTENT_KEY_BYTES = 32
"""How long the rest of a key is, which follows from the tokens."""


class BlobName(NamedTuple):
    """The name of a page in a store that others can reach: two hexadecimal hashes.

    Attributes:
      scope: 32 digits; all pages of one salt have it, whatever their layout.
      page: 48 digits.
    """

    scope: str
    page: str


def scope_of(secret: bytes, salt: str) -> bytes:
    """The scope of all requests with this cache salt. Salts that look alike in another Unicode form are others."""
    return _keyed(secret, b"scope", salt.encode("utf-8", "surrogatepass"), SCOPE_BYTES)


def page_key(scope: bytes, content_key: bytes) -> bytes:
    """The key of a page for every `KVStore`."""
    assert len(scope) == SCOPE_BYTES and len(content_key) == CONTENT_KEY_BYTES, (len(scope), len(content_key))
    return scope + content_key


def blob_name(secret: bytes, layout_digest: bytes, key: bytes) -> BlobName:
    """What a shared store calls the page of `key`."""
    return BlobName(scope_name(secret, key[:SCOPE_BYTES]), _keyed(secret, b"page", layout_digest + key, 24).hex())


def scope_name(secret: bytes, scope: bytes) -> str:
    """What a shared store calls a scope."""
    return _keyed(secret, b"shown scope", scope, 16).hex()


def namespace_name(secret: bytes, namespace: str) -> str:
    """What stands for a namespace in the header of a page."""
    return _keyed(secret, b"namespace", namespace.encode("utf-8", "surrogatepass"), 16).hex()


def is_shown_name(name: BlobName) -> bool:
    """Whether it is made of as many hexadecimal digits as names are: nothing else may become a path."""
    return is_hex(name.scope, 32) and is_hex(name.page, 48)


def is_hex(text: str, length: int) -> bool:
    """Whether a text is so many hexadecimal digits, in small letters."""
    return len(text) == length and not set(text) - set("0123456789abcdef")


def mac(secret: bytes, *parts: bytes | memoryview) -> bytes:
    """32 bytes that only an owner of the secret can make for these bytes, taken as one piece."""
    made = hashlib.blake2b(key=secret_key(secret), digest_size=32, person=b"jaxserve mac")
    for part in parts:
        made.update(part)
    return made.digest()


def is_mac(given: bytes | memoryview, wanted: bytes) -> bool:
    """Compares in a time that does not depend on the bytes."""
    return hmac.compare_digest(bytes(given), wanted)


def secret_key(secret: bytes) -> bytes:
    """The secret as a key of BLAKE2b, which takes 64 bytes at most."""
    return secret if len(secret) <= 64 else hashlib.blake2b(secret).digest()


def _keyed(secret: bytes, what: bytes, data: bytes, size: int) -> bytes:
    return hashlib.blake2b(data, key=secret_key(secret), digest_size=size, person=b"kv " + what[:13]).digest()
