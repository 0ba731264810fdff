"""The handshake: two processes prove to each other that they know one secret, and later frames carry a proof of it.

    other process                                     process 0
    HELLO number, processes, version, nonce   ---->
                                              <----   CHALLENGE nonce
    PROOF  MAC("other", all of the above)     ---->
                                              <----   ADMITTED MAC("process 0", all of the above)

Connections that have proved nothing yet are bounded in number and time (`Strangers`). A MAC is HMAC-SHA256 (RFC 2104);
keys are derived as in HKDF (RFC 5869). The nonces of both sides are in every MAC, so a recorded exchange is worthless
later; the connecting process proves first, so a stranger gets no MAC to guess the secret from. Nothing is encrypted
here: that is TLS.

Without a secret (all processes on one host) the key is empty: the seals then find damage, but prevent no forgery.
"""

import hmac
import re
import secrets
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from jaxserve.errors import HostMismatch, PlanCorrupt
from jaxserve.hosts.frames import MAX_GREETING_BYTES, Frame, Kind, decode, encode, make_frame

PROTOCOL = 3  # raised when frames or their order change
_NONCE_BYTES = 32
_SEAL_BYTES = 32
_HOST_NAME = re.compile(r"[A-Za-z0-9._:-]{1,128}")  # characters that a stranger may write into the log
_COUNTER = struct.Struct("<Q")


class Greeting(NamedTuple):
    """The claims of a process before it has proved anything."""

    process_id: int
    num_processes: int
    host: str
    raw: bytes


class Session:
    """The seals of one connection, in both directions. `seal` belongs to one thread, `open` to one."""

    def __init__(self, *, sending: bytes, receiving: bytes) -> None:
        self._sending, self._receiving = sending, receiving  # keys
        self._sent, self._received = 0, 0  # frames

    def seal(self, frame: Frame) -> bytes:
        """The bytes of the next frame to send, with its MAC."""
        raw = encode(frame)
        counter = _COUNTER.pack(self._sent)
        self._sent += 1
        return hmac.digest(self._sending, counter + raw, "sha256") + raw

    def open(self, sealed: bytes) -> Frame:
        """The next frame. Raises PlanCorrupt unless it is the one that the other side sent next, bit by bit."""
        raw = sealed[_SEAL_BYTES:]
        counter = _COUNTER.pack(self._received)
        if not hmac.compare_digest(hmac.digest(self._receiving, counter + raw, "sha256"), sealed[:_SEAL_BYTES]):
            raise PlanCorrupt(
                f"frame {self._received} of the connection arrived damaged, out of its order, or from somebody else "
                "(its MAC is wrong); the network or a memory is faulty, or somebody interferes"
            )
        self._received += 1
        return decode(raw)


class Asking:
    """The side of the other process. One object for each connection."""

    def __init__(self, secret: bytes, *, process_id: int, num_processes: int, host: str) -> None:
        fields = {
            "version": PROTOCOL,
            "processes": num_processes,
            "host": host if _HOST_NAME.fullmatch(host) else "unnamed",
            "nonce": secrets.token_hex(_NONCE_BYTES),
        }
        self._secret = secret
        self._transcript = b""
        self.hello = encode(make_frame(Kind.HELLO, fields, process_id))

    def prove(self, raw: bytes) -> bytes:
        """The answer to a CHALLENGE. Raises PlanCorrupt, or HostMismatch when process 0 refuses."""
        _expect(raw, Kind.CHALLENGE)
        self._transcript = _join(self.hello, raw)
        return encode(Frame(Kind.PROOF, 0, _mac(self._secret, b"proof of another process", self._transcript)))

    def check(self, raw: bytes) -> Session:
        """Takes ADMITTED. Raises HostMismatch when process 0 refuses, or has another secret."""
        frame = _expect(raw, Kind.ADMITTED)
        if not hmac.compare_digest(frame.payload, _mac(self._secret, b"proof of process 0", self._transcript)):
            raise HostMismatch(
                "it does not know the secret of this process: give all processes the same hosts.secret_file"
            )
        return Session(
            sending=_mac(self._secret, b"frames to process 0", self._transcript),
            receiving=_mac(self._secret, b"frames of process 0", self._transcript),
        )


class Answering:
    """The side of process 0. One object for each connection."""

    def __init__(self, secret: bytes, hello: bytes) -> None:
        """Raises PlanCorrupt for a frame that is no greeting, HostMismatch for a greeting of another version."""
        frame = _expect(hello, Kind.HELLO)
        version, num_processes, host, nonce = frame.take(version=int, processes=int, host=str, nonce=str)
        if version != PROTOCOL:
            raise HostMismatch(
                f"process {frame.seq} speaks version {version} of the protocol, and process 0 version {PROTOCOL}; "
                "install the same jaxserve everywhere"
            )
        if len(nonce) != 2 * _NONCE_BYTES or not _HOST_NAME.fullmatch(host):
            raise PlanCorrupt("a greeting has a host or a nonce that no process sends")
        self.greeting = Greeting(frame.seq, num_processes, host, hello)
        self.challenge = encode(make_frame(Kind.CHALLENGE, {"nonce": secrets.token_hex(_NONCE_BYTES)}))
        self._secret = secret
        self._transcript = _join(hello, self.challenge)

    def check(self, raw: bytes) -> bool:
        """Whether this PROOF is one. Raises PlanCorrupt for another frame."""
        frame = _expect(raw, Kind.PROOF)
        proof = _mac(self._secret, b"proof of another process", self._transcript)
        return hmac.compare_digest(frame.payload, proof)

    @property
    def admitted(self) -> bytes:
        """The frame by which process 0 proves the same; only after the other process has."""
        return encode(Frame(Kind.ADMITTED, 0, _mac(self._secret, b"proof of process 0", self._transcript)))

    @property
    def session(self) -> Session:
        """The seals of the connection, once the other process has proved itself."""
        return Session(
            sending=_mac(self._secret, b"frames of process 0", self._transcript),
            receiving=_mac(self._secret, b"frames to process 0", self._transcript),
        )


class Strangers:
    """The connections that have proved nothing yet: few, and none for long. Safe for threads."""

    def __init__(self, *, limit: int, patience_s: float) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._timers: dict[int, threading.Timer] = {}
        self._ends: dict[int, Callable[[], object]] = {}  # in the order of their arrival
        self._next = 0

    def begin(self, end: Callable[[], object]) -> int:
        """Counts one, until `finish` of the number returned. `end` is called after `patience_s`, or if it is the oldest
        of too many."""
        too_many: list[Callable[[], object]] = []
        with self._lock:
            number, self._next = self._next, self._next + 1
            while len(self._ends) >= self._limit:
                too_many.append(self._take(next(iter(self._ends))))
            self._ends[number] = end
            timer = self._timers[number] = threading.Timer(self._patience_s, self._drop, [number])
        timer.daemon = True
        timer.start()
        for end_oldest in too_many:
            end_oldest()
        return number

    def finish(self, number: int) -> None:
        """The connection is no stranger any more. May be called twice."""
        with self._lock:
            if number in self._ends:
                self._take(number)

    def _drop(self, number: int) -> None:
        with self._lock:
            end = self._take(number) if number in self._ends else None
        if end is not None:
            end()

    def _take(self, number: int) -> Callable[[], object]:
        self._timers.pop(number).cancel()
        return self._ends.pop(number)


def _expect(raw: bytes, kind: Kind) -> Frame:
    if len(raw) > MAX_GREETING_BYTES:
        raise PlanCorrupt(f"a greeting of {len(raw)} bytes arrived; the limit is {MAX_GREETING_BYTES}")
    frame = decode(raw)
    if frame.kind is Kind.REFUSED:
        raise HostMismatch(frame.text)
    if frame.kind is not kind:
        raise PlanCorrupt(f"a frame of kind {frame.kind.name} arrived where {kind.name} was due")
    return frame


def refusal(text: str) -> bytes:
    """The frame for a process that is not admitted."""
    room = MAX_GREETING_BYTES - len(encode(Frame(Kind.REFUSED)))
    return encode(Frame(Kind.REFUSED, 0, text.encode()[:room]))


def _join(*parts: bytes) -> bytes:
    """Joins byte strings so that different lists give different results."""
    return b"".join(_COUNTER.pack(len(part)) + part for part in parts)


def _mac(secret: bytes, purpose: bytes, transcript: bytes) -> bytes:
    extracted = hmac.digest(b"jaxserve hosts", secret, "sha256")
    return hmac.digest(extracted, _join(purpose, transcript), "sha256")
