"""Whose a request is: the owner that every door puts to it.

An owner is a key: whoever presents the same key, at whichever door and however the header is spelled, is the same one.
Where a server has no keys, callers are told apart by their address, for what they share; an address proves nothing, so
that requests are found by their id alone there.

A router is the caller of its servers. It says whose request it passes on, in the metadata `jaxserve-owner`, and is
believed if its own key may say so.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from jaxserve.api import ID_END, RequestOptions, own_id
from jaxserve.errors import InvalidRequest
from jaxserve.serve.keys import KnownKeys, ListedKey, key_of

OWNER_METADATA = "jaxserve-owner"
_ID_CHARS = 16  # of 64 bits: owners are told apart, and nobody can choose a key for an id
_ID = re.compile(rf"[0-9a-f]{{{_ID_CHARS}}}")
_KEY, _ADDRESS = "key", "address"  # what an owner is known by, in metadata


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """Who calls.

    Attributes:
      id: a short hexadecimal digest of the key that was accepted, or of the address; "" is the process itself.
      weight: how many parts this owner has where others have one. Positive.
      salt: owners of different salts share no prefix pages; "": it shares them.
      scope: within which its request ids are its own; "": that of all callers without a key.
      digest: names what is stored for this owner: 32 bytes, of the key.
    """

    id: str
    weight: float = 1.0
    salt: str = ""
    scope: str = ""
    digest: bytes = b""

    def own(self, request_id: str) -> str:
        """The id by which the engine knows a request of this owner. Raises InvalidRequest for one that could name a
        request of another owner."""
        if ID_END in request_id:
            raise InvalidRequest(f"a request id must not hold the character {ID_END!r}, got {request_id!r:.80}")
        return own_id(self.scope, request_id)

    def sign(self, options: RequestOptions) -> RequestOptions:
        """The options of a request of this owner, with its id within this owner."""
        return dataclasses.replace(
            options,
            request_id=None if options.request_id is None else self.own(options.request_id),
            owner=self.id,
            owner_weight=self.weight,
            owner_salt=self.salt,
        )

    @classmethod
    def of(cls, options: RequestOptions) -> "Owner":
        """That by which options were signed, without what is stored for it."""
        scope, _, _ = (options.request_id or "").rpartition(ID_END)
        return cls(id=options.owner, weight=options.owner_weight, salt=options.owner_salt, scope=scope)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What tells a server whose request a router passes on."""
        if not self.id:
            return ()
        return ((OWNER_METADATA, f"{self.id} {self.weight!r} {_KEY if self.scope else _ADDRESS}"),)


PROCESS = Owner(id="")


class Call(Protocol):
    """The context of a call over gRPC."""

    def invocation_metadata(self) -> Any:
        """The names and values that came with the call, in pairs, or None."""
        ...

    def peer(self) -> str:
        """The address of the caller, as gRPC writes it."""
        ...


class Owners:
    """The callers of a door, told apart.

    Attributes:
      known: their keys, of which a call must have one; None: the door is open.
    """

    def __init__(self, keys: Sequence[ListedKey] | None, *, salt_by_key: bool) -> None:
        """`keys` None: the door is open. `salt_by_key`: as in `ServeConfig`."""
        self._salt_by_key = salt_by_key
        self._keys: dict[bytes, ListedKey] | None = None
        self._gone: set[bytes] = set()  # digests of keys that were known
        self.known = None if keys is None else KnownKeys(())
        if keys is not None:
            self.replace(keys)

    def replace(self, keys: Sequence[ListedKey]) -> None:
        """From now on these are the keys; of a door that had keys. Whose key stays is the same owner as before."""
        assert self.known is not None, "a door that is open stays so"
        # Headers are read as Latin-1, whatever their bytes are.
        before, named = self._keys or {}, [(key.secret.encode().decode("latin-1"), key) for key in keys]
        self._keys = {_digest_of_key(secret): key for secret, key in named}
        self._gone = (self._gone | before.keys()) - self._keys.keys()
        self.known.replace(key.secret for key in keys)

    def of_http(self, authorization: str, address: str) -> Owner:
        """Of a call with this header, "" for none, that has passed the check of keys."""
        key = key_of(authorization)
        digest = _digest_of_key(key) if key else hashlib.sha256(authorization.encode()).digest()
        # A key may go between the check and this.
        if self._keys is not None and (digest in self._keys or digest in self._gone):
            return self.of_digest(digest)
        return dataclasses.replace(_of_address(address), digest=digest)

    def of_call(self, call: Call | None) -> Owner:
        """Of a call over gRPC that has passed the check of tokens; None: the process itself calls.

        Raises InvalidRequest for metadata of a router that cannot be read.
        """
        if call is None:
            return PROCESS
        metadata = [(name, str(value)) for name, value in call.invocation_metadata() or ()]
        found = self.of_http(_only(metadata, "authorization"), _host_of(call.peer()))
        told = _only(metadata, OWNER_METADATA)
        if not told or not (self._keys is None or self._is_router(found)):
            return found
        return self._read(told)

    def _is_router(self, owner: Owner) -> bool:
        assert self._keys is not None, "an open door believes everybody"
        key = self._keys.get(owner.digest)
        return key is not None and key.is_router

    def of_digest(self, digest: bytes) -> Owner:
        """Of what was stored under this digest, in whose name something is done. The key may be no longer known."""
        owner_id = digest.hex()[:_ID_CHARS]
        if self._keys is None:
            return Owner(id=owner_id, digest=digest)
        key = self._keys.get(digest)
        return self._with_key(owner_id, 1.0 if key is None else key.weight, digest)

    def _with_key(self, owner_id: str, weight: float, digest: bytes = b"") -> Owner:
        return Owner(
            id=owner_id, weight=weight, salt=owner_id if self._salt_by_key else "", scope=owner_id, digest=digest
        )

    def _read(self, told: str) -> Owner:
        try:
            owner_id, number, kind = told.split(" ")
            weight = float(number)
            if _ID.fullmatch(owner_id) is None or not 0 < weight < math.inf or kind not in (_KEY, _ADDRESS):
                raise ValueError
        except ValueError as error:
            raise InvalidRequest(
                f"the metadata {OWNER_METADATA} is {told!r:.80}, but has {_ID_CHARS} hexadecimal digits, a positive "
                f"number and {_KEY} or {_ADDRESS}; it is for routers, others leave it out"
            ) from error
        return self._with_key(owner_id, weight) if kind == _KEY else Owner(id=owner_id, weight=weight)


def _digest_of_key(key: str) -> bytes:
    """Also names files on disk, so that it must stay as it is."""
    return hashlib.sha256(f"Bearer {key}".encode()).digest()


def _of_address(address: str) -> Owner:
    return Owner(id=hashlib.sha256(f"address {address}".encode()).hexdigest()[:_ID_CHARS])


def _only(metadata: Iterable[tuple[str, str]], name: str) -> str:
    """The one value of a name, or ""."""
    values = [value for key, value in metadata if key == name]
    return values[0] if len(values) == 1 else ""


def _host_of(peer: str) -> str:
    """The address without its port, of `ipv4:127.0.0.1:4711` and its kin."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0] if kind in ("ipv4", "ipv6") else rest
