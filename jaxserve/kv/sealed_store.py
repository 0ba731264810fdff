"""`SealedStore`: a `KVStore` over `Blobs`. It names, seals and checks pages, and never waits beyond a deadline.

A thread that reads has a buffer of its own. It copies into the caller's under a lock, and only while the call is open:
a read that ends late can therefore never write into a slot that holds another page by then.
"""

import collections
import functools
import logging
import threading
import time
from collections.abc import Sequence

from jaxserve.errors import ConfigError
from jaxserve.kv.blobs import Blobs, BlobsError, BlobTooLarge
from jaxserve.kv.compression import Codec, CodecChoice, ShuffledZstd
from jaxserve.kv.names import BlobName, blob_name, scope_name
from jaxserve.kv.page_format import BadPage, PageLayout, UnknownCodec, layout_digest, max_sealed_bytes, seal, unseal
from jaxserve.kv.store import Outcome, StoreUnavailable
from jaxserve.kv.workers import Workers

logger = logging.getLogger(__name__)

_WORKERS = 4
_MAX_WAITING = 256  # jobs: pages of puts, which are refused beyond it; turns of gets, which are late beyond it
_ASK_S = 1.0  # for `contains`
_DELETE_S = 10.0
# A put is late at its deadline, but its write goes on. Where it ends on another machine is only known from its answer,
# and a deletion has to know that: a write that is given up here could still be done there, after the deletion.
_WRITE_S = 30.0
_CLOSE_S = 5.0
_AT_ONCE_S = 0.01  # two clocks of one deadline differ by less
_LOGGED = 5  # faults of a kind, before the rest is only counted
COMPRESSIONS = ("none", "zstd", "auto")
_Wanted = tuple[int, bytes, memoryview]  # place in the call, key, buffer


class _Call:
    """Outcomes of one call, filled by threads until it is closed."""

    def __init__(self, size: int, unanswered: Outcome) -> None:
        self.outcomes: list[Outcome] = [unanswered] * size
        self._condition = threading.Condition()
        self._left = size
        self._open = True

    def answer(self, place: int, outcome: Outcome, copy: tuple[memoryview, memoryview] | None = None) -> None:
        """`copy`: a buffer of the caller, and the page for it."""
        with self._condition:
            if not self._open:
                return
            if copy is not None:
                buffer, page = copy
                buffer.cast("B")[:] = page
            self.outcomes[place] = outcome
            self._left -= 1
            self._condition.notify_all()

    def wait(self, deadline: float) -> list[Outcome]:
        with self._condition:
            self._condition.wait_for(lambda: not self._left, max(0.0, deadline - time.monotonic()))
            self._open = False
            return self.outcomes


class SealedStore:
    """A `KVStore`.

    Attributes:
      counts: bytes_read, bytes_written (as stored), compressed pages, bad pages, faults.
    """

    def __init__(
        self,
        blobs: Blobs,
        layout: PageLayout,
        secret: bytes,
        *,
        place: str,
        compression: str = "none",
        workers: int = _WORKERS,
    ) -> None:
        """`place` names the store in logs. `workers`: threads that read at once, and as many that write.

        Raises ConfigError for an unknown compression, or without its library.
        """
        if compression not in COMPRESSIONS:
            raise ConfigError(f"the compression {compression!r:.40} is none of {', '.join(COMPRESSIONS)}")
        self.counts: collections.Counter[str] = collections.Counter()
        self._blobs = blobs
        self._layout = layout
        self._digest = layout_digest(layout)
        self._secret = secret
        self._place = place
        self._codec: Codec | None = None if compression == "none" else ShuffledZstd()
        self._choice = CodecChoice(self._codec) if self._codec is not None and compression == "auto" else None
        self._reader = self._codec or _installed_codec()
        self._num_workers = workers
        self._lock = threading.Lock()
        self._written = threading.Condition(self._lock)
        self._num_puts = 0
        self._writing: set[int] = set()  # numbers of puts that wait or run
        self._readers = Workers(f"kv-{place}-read", workers, _MAX_WAITING)
        self._writers = Workers(f"kv-{place}-write", workers, _MAX_WAITING)
        self._asking = Workers(f"kv-{place}-ask", 2, _MAX_WAITING)  # not behind pages, which may take long
        self._closed = False

    @property
    def secret(self) -> bytes:
        """By which pages are named and sealed: the one that was given, or the directory's own."""
        return self._secret

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        if self._closed or not keys:
            return [False] * len(keys)
        names = [self._name(key) for key in keys]
        call = _Call(1, Outcome.LATE)
        found: list[bool] = []

        def ask() -> None:
            try:
                found.extend(self._blobs.exists(names, _ASK_S))
                call.answer(0, Outcome.OK)
            except (OSError, BlobsError) as error:
                self._note_fault("ask", error)
                call.answer(0, Outcome.FAILED)

        (outcome,) = call.wait(time.monotonic() + _ASK_S) if self._asking.submit(ask) else [Outcome.LATE]
        if outcome is not Outcome.OK:
            raise StoreUnavailable(f"{self._place}: it does not say which pages it has ({outcome.value})")
        return found

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        assert len(keys) == len(into)
        deadline = time.monotonic() + deadline_s
        if self._closed:
            return [Outcome.MISS] * len(keys)
        call = _Call(len(keys), Outcome.LATE)
        left: collections.deque[_Wanted] = collections.deque()
        for place, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            if buffer.nbytes != self._layout.page_bytes:
                call.answer(place, Outcome.BAD)
            else:
                left.append((place, key, buffer))
        # A job for each thread, not for each page: what is bounded is the number of calls, however many pages one has.
        job = functools.partial(self._get_some, call, left, deadline)
        jobs = [self._readers.submit(job) for _ in range(min(self._num_workers, len(left)))]
        return call.wait(deadline if any(jobs) else 0.0)

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        assert len(keys) == len(pages)
        deadline = time.monotonic() + deadline_s
        call = _Call(len(keys), Outcome.LATE)
        for place, (key, page) in enumerate(zip(keys, pages, strict=True)):
            if self._closed or page.nbytes != self._layout.page_bytes:
                call.answer(place, Outcome.REFUSED)
            elif time.monotonic() < deadline:
                name = self._name(key)
                sealed = seal(self._layout, self._secret, name, page, self._next_codec(page))
                number = self._begin_write()
                job = functools.partial(self._put_one, call, place, name, sealed, number, deadline)
                if not self._writers.submit(job):
                    self._end_write(number)
                    call.answer(place, Outcome.REFUSED)
        return call.wait(deadline)

    def delete(self, keys: Sequence[bytes]) -> None:
        self._settle()
        try:
            self._blobs.delete([self._name(key) for key in keys], _DELETE_S)
        except (OSError, BlobsError) as error:
            raise StoreUnavailable(f"{self._place}: {len(keys)} pages may remain: {error}; delete again") from error

    def flush(self, scope: bytes | None) -> None:
        self._settle()
        try:
            self._blobs.flush(None if scope is None else scope_name(self._secret, scope), _DELETE_S)
        except (OSError, BlobsError) as error:
            raise StoreUnavailable(f"{self._place}: pages may remain: {error}; flush again") from error

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._asking.close(_CLOSE_S)
            self._readers.close(_CLOSE_S)
            self._writers.close(_CLOSE_S)
            self._blobs.close()

    def _settle(self) -> None:
        """A write that is under way would bring back what is deleted now."""
        with self._written:
            before = frozenset(self._writing)
            settled = self._written.wait_for(lambda: not before & self._writing, _DELETE_S)
        if not settled:
            raise StoreUnavailable(f"{self._place}: writes did not end within {_DELETE_S:.0f} s; delete again")

    def _get_some(self, call: _Call, left: "collections.deque[_Wanted]", deadline: float) -> None:
        """Reads pages of a call until none is left for this thread, or no time."""
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                place, key, buffer = left.popleft()
            except IndexError:
                return
            outcome, page = self._read(key, left_s)
            if outcome is Outcome.FAILED and deadline - time.monotonic() < _AT_ONCE_S:
                outcome = Outcome.LATE  # the place was given the same time as the call, and knows no other word for it
            call.answer(place, outcome, None if page is None else (buffer, page))

    def _put_one(self, call: _Call, place: int, name: BlobName, sealed: bytes, number: int, deadline: float) -> None:
        try:
            if time.monotonic() < deadline:
                call.answer(place, self._write(name, sealed))
        finally:
            self._end_write(number)

    def _begin_write(self) -> int:
        with self._written:
            self._num_puts += 1
            self._writing.add(self._num_puts)
            return self._num_puts

    def _end_write(self, number: int) -> None:
        with self._written:
            self._writing.discard(number)
            self._written.notify_all()

    def _name(self, key: bytes) -> BlobName:
        return blob_name(self._secret, self._digest, key)

    def _next_codec(self, page: memoryview) -> Codec | None:
        codec = self._codec if self._choice is None else self._choice.next_codec(page, self._layout.element_bytes)
        if codec is not None:
            self._count("compressed")
        return codec

    def _read(self, key: bytes, left_s: float) -> tuple[Outcome, memoryview | None]:
        name, start = self._name(key), time.perf_counter()
        try:
            sealed = self._blobs.read(name, max_sealed_bytes(self._layout), left_s)
            if sealed is None:
                return Outcome.MISS, None
            self._note_link(len(sealed), time.perf_counter() - start)
            self._count("bytes_read", len(sealed))
            return Outcome.OK, unseal(self._layout, self._secret, name, sealed, self._reader)
        except UnknownCodec as error:
            self._note_fault("unknown_codec", error)
            return Outcome.MISS, None
        except (BadPage, BlobTooLarge) as error:
            self._note_fault("bad", error)
            try:
                self._blobs.set_aside(name, str(error))
            except (OSError, BlobsError) as failure:
                self._note_fault("set_aside", failure)
            return Outcome.BAD, None
        except (OSError, BlobsError) as error:
            self._note_fault("read", error)
            return Outcome.FAILED, None

    def _write(self, name: BlobName, sealed: bytes) -> Outcome:
        start = time.perf_counter()
        try:
            if not self._blobs.write(name, sealed, _WRITE_S):
                return Outcome.REFUSED
        except (OSError, BlobsError) as error:
            self._note_fault("write", error)
            return Outcome.FAILED
        self._note_link(len(sealed), time.perf_counter() - start)
        self._count("bytes_written", len(sealed))
        return Outcome.OK

    def _note_link(self, num_bytes: int, seconds: float) -> None:
        if self._choice is not None:
            self._choice.note_link(num_bytes, seconds)

    def _note_fault(self, kind: str, error: Exception) -> None:
        self._count(kind)
        if self.counts[kind] <= _LOGGED:
            last = "; more of them are only counted" if self.counts[kind] == _LOGGED else ""
            logger.warning("%s: %s: %s%s", self._place, kind, error, last)

    def _count(self, kind: str, by: int = 1) -> None:
        with self._lock:
            self.counts[kind] += by


def _installed_codec() -> Codec | None:
    """Pages that another server compressed are readable wherever the library is."""
    try:
        return ShuffledZstd()
    except ConfigError:
        return None
