"""A store that delays, fails, raises and hangs as a test wants it."""

import threading
from collections.abc import Callable, Sequence

from jaxserve.kv.conformance import page_of
from jaxserve.kv.store import Outcome

WAIT_S = 30.0


class FakeStore:
    """Has every page of `conformance.page_of`, as long as the test lets it answer. `calls`: what was asked of it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[bytes, ...]]] = []
        self.outcome = Outcome.OK
        self.answer: Callable[[bytes], Outcome] = lambda key: self.outcome
        self.error: Exception | None = None
        self.stored: dict[bytes, bytes] = {}
        self.go = threading.Event()  # cleared: calls hang
        self.go.set()
        self.entered = threading.Semaphore(0)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self._enter("contains", keys)
        return [self.answer(key) is Outcome.OK for key in keys]

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        self._enter("get", keys)
        outcomes = [self.answer(key) for key in keys]
        for key, buffer, outcome in zip(keys, into, outcomes, strict=True):
            if outcome is Outcome.OK:
                buffer[:] = page_of(key)
        return outcomes

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        self._enter("put", keys)
        for key, page in zip(keys, pages, strict=True):
            if self.answer(key) is Outcome.OK:
                self.stored[key] = bytes(page)
        return [self.answer(key) for key in keys]

    def delete(self, keys: Sequence[bytes]) -> None:
        self._enter("delete", keys)
        for key in keys:
            self.stored.pop(key, None)

    def flush(self, scope: bytes | None) -> None:
        self._enter("flush", [scope or b""])
        for key in list(self.stored):
            if key.startswith(scope or b""):
                del self.stored[key]

    def close(self) -> None:
        self.calls.append(("close", ()))

    def _enter(self, what: str, keys: Sequence[bytes]) -> None:
        self.calls.append((what, tuple(keys)))
        self.entered.release()
        assert self.go.wait(WAIT_S)
        if self.error is not None:
            raise self.error
