"""The digest of what a process has computed, in sixteen bytes, and the book in which process 0 compares digests.

A step's digest covers every integer that went to the device and every token that came back, chained to the steps
before. Both are needed: where devices sample together all processes read the same tokens, even if one was fed a
damaged plan; and equal plans do not prove that a device computed right.
"""

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

from jaxserve.sched import StepResult

_SIZE = 16


class StepDigest:
    """The digest of one process. `observe` and `take_inputs` belong to the thread that dispatches, `chain` to the one
    that reads results."""

    def __init__(self) -> None:
        self._inputs = hashlib.blake2b(digest_size=_SIZE)
        self._chained = b""

    def observe(self, data: object) -> None:
        """Takes bytes on their way to the device: anything with the buffer protocol, contiguous."""
        self._inputs.update(memoryview(data).cast("B"))  # type: ignore[arg-type]

    def take_inputs(self) -> bytes:
        """The digest of all bytes observed since the last call."""
        taken, self._inputs = self._inputs.digest(), hashlib.blake2b(digest_size=_SIZE)
        return taken

    def chain(self, seq: int, inputs: bytes, result: StepResult) -> bytes:
        """The digest of all steps up to `seq`. Steps come in order."""
        step = hashlib.blake2b(self._chained, digest_size=_SIZE)
        step.update(inputs)
        step.update(repr((seq, result.token_ids)).encode())
        self._chained = step.digest()
        return self._chained


class Divergence(NamedTuple):
    """`process_id` differs from process 0 after step `seq`; after step `agreed` (-1: none) they were equal."""

    process_id: int
    seq: int
    agreed: int


class DigestBook:
    """The digests of process 0, held until all others have reported that far. Not safe for threads by itself."""

    def __init__(self, process_ids: Iterable[int]) -> None:
        self._own: dict[int, bytes] = {}
        self._oldest = 0  # steps before this one are forgotten
        self._reported = dict.fromkeys(process_ids, -1)
        self._agreed = dict(self._reported)
        self._early: dict[int, list[tuple[int, bytes]]] = {p: [] for p in self._reported}

    @property
    def confirmed(self) -> int:
        """The last step that every other process has finished; -1 before the first."""
        return min(self._reported.values(), default=-1)

    @property
    def agreed(self) -> int:
        """The last step after which all were found equal; -1 before the first."""
        return min(self._agreed.values(), default=-1)

    def add_own(self, seq: int, digest: bytes) -> Divergence | None:
        """Process 0 has finished step `seq`; earlier reports of other processes are compared now."""
        self._own[seq] = digest
        for process_id, early in self._early.items():
            while early and early[0][0] <= seq:
                if found := self._compare(process_id, *early.pop(0)):
                    return found
        self._forget()
        return None

    def add_report(self, process_id: int, seq: int, digest: bytes) -> Divergence | None:
        """Another process has finished step `seq`, perhaps before process 0 has."""
        self._reported[process_id] = max(seq, self._reported[process_id])
        if seq in self._own:
            if found := self._compare(process_id, seq, digest):
                return found
        elif seq >= self._oldest:
            self._early[process_id].append((seq, digest))
        self._forget()
        return None

    def _compare(self, process_id: int, seq: int, digest: bytes) -> Divergence | None:
        if self._own[seq] != digest:
            return Divergence(process_id, seq, self._agreed[process_id])
        self._agreed[process_id] = max(seq, self._agreed[process_id])
        return None

    def _forget(self) -> None:
        # A process reports a step at most twice, and never an older one than before.
        for seq in range(self._oldest, self.agreed):
            del self._own[seq]
            self._oldest = seq + 1
