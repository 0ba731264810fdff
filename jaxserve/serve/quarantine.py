"""`Quarantine`: content of requests that end servers, which a router refuses for a while (`suspects` convicts)."""

import collections
import hashlib
import secrets
import time
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.errors import RequestQuarantined
from jaxserve.serve.gen import inference_pb2 as pb

MAX_QUARANTINED = 4096  # contents; the oldest go first
LISTED = 100  # unless a call says how many
_MAX_WHY = 1000  # characters

# Fields that say nothing about the content: a client that sends its request again may choose them anew.
_NOT_CONTENT = (
    *("request_id", "resume", "timeout_s", "tenant", "priority", "cache_salt", "chunk_tokens"),
    *("ttft_target_s", "tpot_target_s"),
)


class Quarantined(NamedTuple):
    """A content that is refused, as operators see it.

    Attributes:
      digest: 32 hexadecimal digits that say nothing about the content to anyone but this process.
      request_id: of the request that was convicted.
      why: the deaths that convicted it.
      since_s: when that was, in seconds since 1970.
      left_s: seconds for which it is still refused.
      num_refused: requests of this content that were refused since.
    """

    digest: str
    request_id: str
    why: str
    since_s: float
    left_s: float
    num_refused: int


class _Entry:
    """Mutated by `Quarantine`."""

    __slots__ = ("num_refused", "request_id", "since_s", "until_s", "why")

    def __init__(self, request_id: str, why: str, until_s: float) -> None:
        self.request_id = request_id
        self.why = why
        self.since_s = time.time()
        self.until_s = until_s
        self.num_refused = 0


class Quarantine:
    """Content of requests that end servers. Used on one event loop.

    Digests are keyed with a secret of this process, since they stand in the log, where a plain one would let a reader
    test guesses of a prompt.

    Attributes:
      num_convictions, num_refused: contents that were added and requests that were refused, since the start.
    """

    def __init__(self, last_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Content is refused for `last_s` seconds. `clock` in seconds."""
        self.num_convictions = self.num_refused = 0
        self._last_s = last_s
        self._clock = clock
        self._key = secrets.token_bytes(16)
        self._entries: collections.OrderedDict[bytes, _Entry] = collections.OrderedDict()  # by digest, oldest first

    def __len__(self) -> int:
        self._forget_old()
        return len(self._entries)

    def add(self, request: pb.GenerateRequest, why: str) -> str:
        """Refuses the content of `request` from now on. `why`: the deaths. Returns its name for the log."""
        digest = self._digest(request)
        self._entries.pop(digest, None)
        self._entries[digest] = _Entry(request.request_id, why[:_MAX_WHY], self._clock() + self._last_s)
        self.num_convictions += 1
        while len(self._entries) > MAX_QUARANTINED:
            self._entries.popitem(last=False)
        return digest.hex()

    def check(self, request: pb.GenerateRequest) -> None:
        """Raises RequestQuarantined. Costs nothing while the quarantine is empty."""
        self._forget_old()
        if self._entries and (entry := self._entries.get(self._digest(request))) is not None:
            entry.num_refused += 1
            self.num_refused += 1
            raise RequestQuarantined(
                f"every server that ran this request ended, also those that ran nothing else, so it is not run for "
                f"another {entry.until_s - self._clock():.0f} s (route.quarantine_s); change its prompt or its options"
            )

    def listed(self, limit: int) -> list[Quarantined]:
        """At most `limit` contents, the newest first."""
        self._forget_old()
        now_s, newest = self._clock(), reversed(self._entries.items())
        return [
            Quarantined(digest.hex(), e.request_id, e.why, e.since_s, e.until_s - now_s, e.num_refused)
            for (digest, e), _ in zip(newest, range(limit), strict=False)
        ]

    def remove(self, digest: str) -> bool:
        """Takes the content of this digest again. False: it is not refused."""
        try:
            key = bytes.fromhex(digest)
        except ValueError:
            return False
        return self._entries.pop(key, None) is not None

    def _forget_old(self) -> None:
        now_s = self._clock()
        while self._entries and next(iter(self._entries.values())).until_s <= now_s:  # all last equally long
            self._entries.popitem(last=False)

    def _digest(self, request: pb.GenerateRequest) -> bytes:
        content = pb.GenerateRequest()
        content.CopyFrom(request)
        for name in _NOT_CONTENT:
            content.ClearField(name)
        content.sampling.ClearField("seed")  # drawn for each call where the client has none
        data = content.SerializeToString(deterministic=True)
        return hashlib.blake2b(data, digest_size=16, key=self._key).digest()


def not_quarantined(digest: str) -> str:
    """The message for a digest that is not there."""
    return f"no content with the digest {digest[:64]!r} is quarantined, or not any more; list the contents that are"
