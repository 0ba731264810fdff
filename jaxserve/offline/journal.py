"""The journal of a batch: each finished result once, on disk, so that the same command goes on after a crash.

A journal is a file of lines, `CRC32 JSON`. The first line says which batch it belongs to; each following one has the
results of one entry. Lines are only ever appended, and those of a second share one fsync. An answer is written to the
output only when its line is on disk, and the output is written anew from the journal when the command runs again: so an
answer that anybody has seen never changes, and none is there twice.

What was running at a crash runs again from its beginning, since nobody has seen a part of it.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

from jaxserve.engine import AnyEngine
from jaxserve.errors import ConfigError, InvalidRequest, JaxserveError, Status
from jaxserve.offline.jsonl import BatchOptions, Entry, json_line, make_jobs, result_objects
from jaxserve.offline.loop import InOrder, run_jobs
from jaxserve.offline.results import Counts, Result

SYNC_S = 1.0  # between two fsyncs, each of which may hold the loop for some milliseconds
_FORMAT = 1
_CHUNK = 2**20


class BatchResult(NamedTuple):
    """How many entries a batch had, how many of them failed, and how many the journal had from an earlier run."""

    num_entries: int
    num_failed: int
    num_known: int


class Journal:
    """An open journal. Used on one thread; no other process has it open.

    Attributes:
      known: the numbers of the entries, from 0, that it had when it was opened.
    """

    def __init__(self, path: Path, facts: Mapping[str, str]) -> None:
        """Opens the journal, or makes a new one, that its owner alone may read.

        `facts` name the batch: what its answers depend on. Raises ConfigError for a journal of another batch, one that
        another process uses, and a file that is no journal.
        """
        self._path = path
        self._places: dict[int, tuple[int, int]] = {}  # start and length of each line
        self._unsynced: list[int] = []
        self._last_s = time.monotonic()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.fdopen(os.open(path, flags, 0o600), "r+b")
        except OSError as error:
            raise ConfigError(f"cannot open the journal {path}: {error.strerror}") from error
        with contextlib.ExitStack() as stack:
            stack.callback(self._file.close)
            self._lock()
            os.fchmod(self._file.fileno(), 0o600)
            self._size = self._read(dict(facts))
            self.known = frozenset(self._places)
            stack.pop_all()

    def close(self) -> None:
        """Closes the file. What has not been synced is lost."""
        self._file.close()

    def append(self, number: int, results: list[dict[str, Any]]) -> None:
        """Takes the results of an entry, as they stand in the output. They are on disk after the next `sync`."""
        assert number not in self._places, f"two results for entry {number}"
        line = _line({"entry": number, "results": results})
        self._file.write(line)
        self._places[number] = self._size, len(line)
        self._size += len(line)
        self._unsynced.append(number)

    def sync(self, *, at_once: bool = True) -> list[int]:
        """Brings lines to disk and returns their entries. Not `at_once`: nothing within a second of the last time."""
        now_s = time.monotonic()
        if not self._unsynced or not (at_once or now_s - self._last_s >= SYNC_S):
            return []
        self._file.flush()
        os.fsync(self._file.fileno())
        self._last_s = time.monotonic()
        synced, self._unsynced = self._unsynced, []
        return synced

    def results(self, number: int) -> list[dict[str, Any]]:
        """Those of an entry that is on disk."""
        start, length = self._places[number]
        value = _value(os.pread(self._file.fileno(), length, start))
        assert value is not None and value["entry"] == number, f"line of entry {number} has changed in {self._path}"
        return value["results"]

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"the journal {self._path} is in use by another process: {error.strerror}") from error

    def _read(self, facts: dict[str, str]) -> int:
        """Finds the lines, and cuts off what a crash left behind them. Returns the size."""
        head = self._file.readline()
        begin = _line({"journal": _FORMAT, "facts": facts})
        if begin.startswith(head) and head != begin:  # new, or a crash as it was made
            return self._begin(begin)
        header = _value(head)
        if header is None or header.get("journal") != _FORMAT:
            raise ConfigError(f"{self._path} is no journal of this version of jaxserve; name another file")
        if differing := sorted(n for n in {*facts, *header["facts"]} if facts.get(n) != header["facts"].get(n)):
            name = differing[0]
            raise ConfigError(
                f"the journal {self._path} is of another batch: {name} was {header['facts'].get(name)} and is "
                f"{facts.get(name)}; give that, or name another file"
            )
        size = len(head)
        for line in self._file:
            if (value := _value(line)) is None:
                break
            self._places[value["entry"]] = size, len(line)
            size += len(line)
        self._file.truncate(size)
        self._file.seek(size)
        return size

    def _begin(self, line: bytes) -> int:
        self._file.truncate(0)
        self._file.seek(0)
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())
        directory = os.open(self._path.parent, os.O_RDONLY)  # the name of a new file is on disk with its directory
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return len(line)


def input_fact(file: IO[bytes]) -> str:
    """A digest of the whole file, for the facts of a batch. Raises ConfigError for a pipe: it cannot be read twice."""
    if not file.seekable():
        raise ConfigError("--journal needs an --input that can be read again, not a pipe; save it to a file first")
    digest = hashlib.blake2b(digest_size=16)
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    file.seek(0)
    return digest.hexdigest()


def run_journaled(
    engine: AnyEngine,
    entries: Iterable[tuple[Entry, InvalidRequest | None]],
    options: BatchOptions,
    journal: Journal,
    target: IO[bytes],
    on_error: Callable[[Entry, JaxserveError], None],
    on_step: Callable[[Counts], None],
) -> BatchResult:
    """Runs the entries that the journal lacks, and writes the results of all to `target`, in the order of the entries.

    Errors of the entries themselves are results. Other errors, such as that of an engine that has stopped, are
    written, but not kept in the journal: these entries run again with the next run.
    """
    started: list[tuple[int, Entry]] = []
    unkept: dict[int, list[dict[str, Any]]] = {}
    num_entries = num_failed = 0

    def emit(number: int, _: None) -> None:
        nonlocal num_failed
        results = unkept.pop(number) if number in unkept else journal.results(number)
        num_failed += any("error" in value for value in results)
        target.writelines(map(json_line, results))
        target.flush()

    in_order = InOrder[None](emit)

    def missing() -> Iterator[tuple[Entry, InvalidRequest | None]]:
        nonlocal num_entries
        for number, (entry, problem) in enumerate(entries):
            num_entries += 1
            if number in journal.known:
                in_order(number, None)
            else:
                started.append((number, entry))
                yield entry, problem

    def take(index: int, result: Result) -> None:
        number, entry = started[index]
        started[index] = number, Entry()  # a file may be longer than memory
        results = result_objects(entry, result)
        if isinstance(result, JaxserveError):
            on_error(entry, result)
            if result.status is not Status.INVALID:
                unkept[number] = results
                in_order(number, None)
                return
        journal.append(number, results)

    def step(counts: Counts) -> None:
        for number in journal.sync(at_once=False):
            in_order(number, None)
        on_step(counts)

    try:
        run_jobs(engine, make_jobs(engine, missing(), options, lambda entry: None), take, step)
    finally:  # after an interrupt, too, what has ended is kept
        for number in journal.sync():
            in_order(number, None)
    return BatchResult(num_entries, num_failed, len(journal.known))


def _line(value: dict[str, Any]) -> bytes:
    body = json_line(value)
    return b"%08x %s" % (zlib.crc32(body), body)


def _value(line: bytes) -> dict[str, Any] | None:
    """None for a line that a crash has cut off or left unwritten."""
    checksum, _, body = line.partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(body):
        return None
    return json.loads(body)
