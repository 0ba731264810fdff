"""`Guarded`: a store that may be dead, slow or wrong, behind a circuit breaker. It never raises for pages.

After some calls in a row that failed or were late, the store is left alone for a while: calls are answered FAILED at
once, so a dead store costs a request nothing but the pages. Then one call tries again; if it fails, the while doubles.
Both changes are logged once, everything is counted.

A store that is late at a short deadline may be a healthy one that is far away, so that says nothing about it. An answer
of the wrong length or type is a failure of all keys, which callers compute as they do after a miss.
"""

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from jaxserve.errors import JaxserveError
from jaxserve.kv.store import KVStore, Outcome, StoreUnavailable

logger = logging.getLogger(__name__)

_FAULTS_IN_A_ROW = 3
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_PATIENCE_S = 1.0  # a store that is late at a deadline of at least this does not do its work
_LOGGED = 5

T = TypeVar("T")


class Guarded:
    """A `KVStore` around another one.

    Attributes:
      counts: pages by outcome ("get ok", "put refused", ...), "skipped" pages, "opened" breaks, "raised" errors.
    """

    def __init__(self, store: KVStore, *, place: str = "store", clock: Callable[[], float] = time.monotonic) -> None:
        """`place` names the store in logs. `clock`: seconds that never run backwards."""
        self.counts: collections.Counter[str] = collections.Counter()
        self._store = store
        self._place = place
        self._clock = clock
        self._lock = threading.Lock()
        self._faults = 0  # calls in a row
        self._pause_s = _FIRST_PAUSE_S
        self._closed_until: float | None = None  # None: the store is in use
        self._trying = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """False for all when the store cannot say, or is left alone."""
        found = [False] * len(keys)

        def ask() -> list[Outcome]:
            found[:] = _checked(self._store.contains(keys), bool, len(keys))
            return [Outcome.OK if there else Outcome.MISS for there in found]

        self._guard("contains", len(keys), _PATIENCE_S, ask)
        return found

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        return self._guard("get", len(keys), deadline_s, lambda: self._store.get(keys, into, deadline_s))

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        return self._guard("put", len(keys), deadline_s, lambda: self._store.put(keys, pages, deadline_s))

    def delete(self, keys: Sequence[bytes]) -> None:
        self._surely("delete", lambda: self._store.delete(keys))

    def flush(self, scope: bytes | None) -> None:
        self._surely("flush", lambda: self._store.flush(scope))

    def close(self) -> None:
        try:
            self._store.close()
        except Exception as error:  # code of anybody; nothing is lost
            self._note_raised("close", error)

    def _guard(self, what: str, size: int, deadline_s: float, call: Callable[[], list[Outcome]]) -> list[Outcome]:
        tried = self._may_call()
        if tried is None:
            with self._lock:
                self.counts["skipped"] += size
            return [Outcome.FAILED] * size
        outcomes = [Outcome.FAILED] * size
        try:
            outcomes = _checked(call(), Outcome, size)
        except Exception as error:  # code of anybody
            self._note_raised(what, error)
        finally:  # a thread that somebody's code ends must not leave a try open
            self._note_call(what, outcomes, deadline_s, tried=tried)
        return outcomes

    def _may_call(self) -> bool | None:
        """Whether a call is a try of a store that was left alone; None: it may not be made."""
        with self._lock:
            if self._closed_until is None:
                return False
            if self._trying or self._clock() < self._closed_until:
                return None
            self._trying = True
            return True

    def _note_call(self, what: str, outcomes: Sequence[Outcome], deadline_s: float, *, tried: bool) -> None:
        telling = [outcome for outcome in outcomes if outcome is not Outcome.LATE or deadline_s >= _PATIENCE_S]
        with self._lock:
            for outcome in outcomes:
                self.counts[f"{what} {outcome.value}"] += 1
            if tried:
                self._trying = False
            if not telling:
                if tried:  # the next one that tries may have more time
                    self._closed_until = self._clock() + self._pause_s
                return
            if 2 * sum(outcome.is_fault for outcome in telling) <= len(telling):
                if tried or self._closed_until is None:
                    if self._closed_until is not None:
                        logger.warning("%s: works again", self._place)
                    self._faults, self._closed_until, self._pause_s = 0, None, _FIRST_PAUSE_S
                return
            self._faults += 1
            if tried:
                self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            elif self._closed_until is not None or self._faults < _FAULTS_IN_A_ROW:
                return
            else:
                self.counts["opened"] += 1
                logger.warning(
                    "%s: %d calls in a row failed or were late; it is left alone and tried again after %.0f s or more",
                    self._place,
                    self._faults,
                    self._pause_s,
                )
            self._closed_until = self._clock() + self._pause_s

    def _surely(self, what: str, call: Callable[[], None]) -> None:
        """Deletions are tried however the store is: a person waits for the answer."""
        try:
            call()
        except JaxserveError:
            raise
        except Exception as error:  # code of anybody
            self._note_raised(what, error)
            raise StoreUnavailable(f"{self._place}: pages may remain: {error!r:.200}; {what} again") from error

    def _note_raised(self, what: str, error: Exception) -> None:
        with self._lock:
            self.counts["raised"] += 1
            number = self.counts["raised"]
        if number <= _LOGGED:
            logger.warning("%s: %s raised %r", self._place, what, error)


def _checked(answer: object, kind: type[T], size: int) -> list[T]:
    """The answer of a store of anybody. Raises TypeError for what is not a list of `size` of this kind."""
    if not isinstance(answer, list) or len(answer) != size or not all(isinstance(each, kind) for each in answer):
        raise TypeError(f"it returned {answer!r:.80}, which is no list of {size} {kind.__name__}")
    return answer
