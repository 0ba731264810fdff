"""The files and batches of all keys, in a directory that outlives the server.

    files/ID.json, ID.jsonl      a file's description, and what is in it
    batches/ID.json              a batch

A description is replaced as a whole, so that an end of the process leaves the old one or the new one. An owner is the
digest of a key; for other keys a file or a batch does not exist.
"""

import collections
import contextlib
import errno
import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import pydantic

from jaxserve.engine.shared_room import SharedRoom
from jaxserve.errors import ConfigError
from jaxserve.serve.http.batches.bodies import ENDED, BatchObject, FileObject
from jaxserve.serve.http.errors import HttpRefusal

logger = logging.getLogger(__name__)

_Object = TypeVar("_Object", FileObject, BatchObject)
_ID = re.compile(r"(file-|batch_)[0-9a-f]{32}")
_CHUNK_BYTES = 2**20
_LEAST_BYTES = 4096  # that a file or a description takes of a disk, however short
_MAX_UNFINISHED = 100  # batches of a key
_MOST_KNOWN = 20_000  # descriptions of a folder that are kept in memory, some 2 kB each
_NOBODY = b""  # the owner of what has no description
_NO_ROOM = {  # of a write that failed: no defect of the server, and where the room is to be made
    errno.ENOSPC: "try again when there is room",
    errno.EDQUOT: "try again when the quota of its user has room",
    errno.EFBIG: "the server may write no larger files (ulimit -f, or the file system's own limit)",
    errno.EROFS: "its file system is mounted for reading alone",
}
_NO_FILES = (errno.EMFILE, errno.ENFILE)  # no file can be opened now, neither written nor read
_DAMAGED = (OSError, ValueError, KeyError, TypeError, RecursionError)  # what reading a description may end with


class _Known(NamedTuple):
    """A description as it was read. `state`: of its file, which is another one once it has been replaced."""

    state: tuple[int, int, int]
    owner: bytes
    value: Any


class BatchStore:
    """Any thread that may wait for the disk: all but `file`, `batch` and `change_batch` look at every description, and
    read those that are new to them.

    Everything raises OSError where the disk does not do what it should; `refusal_of` says what a client is told then.

    Args:
      most_bytes: of all that is in the directory, which keys share (`SharedRoom`): beyond it files and batches are
        taken only of keys that have little of a quarter more.
      most_ended: batches of a key that have ended; of more, the oldest are forgotten.

    Attributes:
      folder: the directory.
    """

    def __init__(self, folder: str, most_bytes: int, most_ended: int) -> None:
        """Makes the directory. Raises ConfigError where that cannot be done."""
        self.folder = Path(folder)
        self._most_bytes = most_bytes
        self._most_ended = most_ended
        self._known: dict[str, dict[str, _Known]] = {}  # by folder and name of the file; each is replaced, not changed
        self._changing = threading.Lock()  # between a look at what is there and what is changed because of it
        try:
            for name in ("files", "batches"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"serve.http.batch_dir: {folder!r} cannot be made or used: {error}") from error

    # ---- files -------------------------------------------------------------------------------------------------------

    def add_file(self, owner: bytes, name: str, source: BinaryIO) -> FileObject:
        """Keeps what a client sends. Raises HttpRefusal with 413 where there is no room."""
        self._check_room(owner, source.seek(0, os.SEEK_END))
        source.seek(0)
        file_id = new_file_id()
        partial = self._part(file_id, ".part")
        try:
            with partial.open("wb") as target:
                while chunk := source.read(_CHUNK_BYTES):
                    target.write(chunk)
            partial.replace(self.content_path(file_id))
            return self._describe(owner, file_id, name, "batch")
        except OSError:
            for path in (partial, self.content_path(file_id)):
                _discard(path)
            raise

    def add_output(self, owner: bytes, file_id: str, name: str) -> FileObject:
        """Describes a file whose content is complete."""
        return self._describe(owner, file_id, name, "batch_output")

    def _describe(self, owner: bytes, file_id: str, name: str, purpose: Any) -> FileObject:
        size = self.content_path(file_id).stat().st_size
        found = FileObject(id=file_id, bytes=size, created_at=int(time.time()), filename=name, purpose=purpose)
        self._write(self._part(file_id, ".json"), owner, found)
        return found

    def content_path(self, file_id: str) -> Path:
        """Where the content of a file is."""
        return self._part(file_id, ".jsonl")

    def file(self, owner: bytes, file_id: str) -> FileObject:
        """Raises HttpRefusal with 404."""
        return self._get("files", FileObject, owner, file_id)

    def files(self, owner: bytes) -> list[FileObject]:
        """The newest first."""
        return self._list("files", FileObject, owner)

    def remove_file(self, owner: bytes, file_id: str) -> None:
        """Raises HttpRefusal: with 404 for an unknown file, with 409 for one that a batch still reads."""
        with self._changing:
            self.file(owner, file_id)
            for _, batch in self.unfinished():
                if batch.input_file_id == file_id:
                    raise HttpRefusal(
                        409, f"the batch {batch.id} still reads {file_id}; cancel it, or wait for its end"
                    )
            self._part(file_id, ".json").unlink()
            self.content_path(file_id).unlink(missing_ok=True)

    def _part(self, file_id: str, suffix: str) -> Path:
        return self.folder / "files" / f"{file_id}{suffix}"

    # ---- batches -----------------------------------------------------------------------------------------------------

    def batch(self, owner: bytes, batch_id: str) -> BatchObject:
        """Raises HttpRefusal with 404."""
        return self._get("batches", BatchObject, owner, batch_id)

    def batches(self, owner: bytes) -> list[BatchObject]:
        """The newest first."""
        return self._list("batches", BatchObject, owner)

    def add_batch(self, owner: bytes, batch: BatchObject) -> None:
        """Writes down a new batch, and forgets ended ones of this key that are too many.

        Raises HttpRefusal: with 404 for an unknown file, 413 where there is no room, 429 for too many.
        """
        with self._changing:
            self.file(owner, batch.input_file_id)
            self._check_room(owner, 0)
            own = self.batches(owner)
            waiting = sum(each.status not in ENDED for each in own)
            if waiting >= _MAX_UNFINISHED:
                text = f"{waiting} batches of this key have not ended; it may have {_MAX_UNFINISHED}; try again later"
                raise HttpRefusal(429, text)
            self._write(self._described(batch.id), owner, batch)
            for old in [each for each in own if each.status in ENDED][self._most_ended :]:
                self._described(old.id).unlink(missing_ok=True)

    def change_batch(self, owner: bytes, batch_id: str, change: Callable[[BatchObject], None]) -> BatchObject:
        """Writes down what `change` does to a batch as it is then, so that no other change is lost. Returns it.

        Raises HttpRefusal with 404, and what `change` raises; then nothing is written.
        """
        with self._changing:
            batch = self.batch(owner, batch_id)
            change(batch)
            self._write(self._described(batch_id), owner, batch)
            return batch

    def remove_batch(self, owner: bytes, batch_id: str) -> None:
        """Forgets a batch, and none of its files. Raises HttpRefusal: with 404, or 409 for one that has not ended."""
        with self._changing:
            batch = self.batch(owner, batch_id)
            if batch.status not in ENDED:
                raise HttpRefusal(409, f"the batch {batch_id} is {batch.status}; cancel it, and wait for its end")
            self._described(batch_id).unlink(missing_ok=True)

    def _described(self, batch_id: str) -> Path:
        return self.folder / "batches" / f"{batch_id}.json"

    def unfinished(self) -> list[tuple[bytes, BatchObject]]:
        """All batches that have not ended, of all owners, the oldest first."""
        found = [(owner, batch) for owner, batch in self._all("batches", BatchObject) if batch.status not in ENDED]
        return sorted(found, key=lambda each: (each[1].created_at, each[1].id))

    # ---- both --------------------------------------------------------------------------------------------------------

    def _check_room(self, owner: bytes, num_bytes: int) -> None:
        """Whether a file of this size has room. Two at once may both find the last of it."""
        room: SharedRoom[bytes] = SharedRoom(self._most_bytes)
        for whose, taken in self._bytes_by_owner().items():
            room.enter(whose, taken, at_any_rate=True)
        if room.lacking(owner, max(num_bytes, _LEAST_BYTES)):
            text = (
                f"files and batches of all keys have {room.total} of {room.most} bytes (serve.http.batch_dir_bytes), "
                f"those of this key {room.held(owner)}, of which {room.part(owner)} always have room, and this one "
                f"needs {num_bytes}; delete files that are not needed any more"
            )
            raise HttpRefusal(413, text)

    def _bytes_by_owner(self) -> Mapping[bytes, int]:
        """What is in the directory. What is not described yet is its batch's, as results are, or nobody's."""
        owners = {each.id: owner for owner, each in self._all("files", FileObject)}
        taken: collections.Counter[bytes] = collections.Counter()
        for owner, batch in self._all("batches", BatchObject):
            taken[owner] += _LEAST_BYTES
            for file_id in (batch.output_file_id, batch.error_file_id):
                if file_id is not None:
                    owners.setdefault(file_id, owner)
        for entry in _entries(self.folder / "files"):
            taken[owners.get(entry.name.partition(".")[0], _NOBODY)] += _bytes_of(entry)
        return taken

    def _get(self, folder: str, kind: type[_Object], owner: bytes, name: str) -> _Object:
        if _ID.fullmatch(name):
            try:
                whose, found = _read(self.folder / folder / f"{name}.json", kind)
            except FileNotFoundError:
                pass
            except _DAMAGED as error:
                _check_is_damage(error)
                logger.error("%s cannot be read: %s", name, error)
                raise HttpRefusal(
                    500, f"the description of {name} is damaged; the server's log says where", kind="server_error"
                ) from error
            else:
                if whose == owner:
                    return found
        raise HttpRefusal(404, f"there is no {name!r:.80} among the {folder} of this key", kind="not_found")

    def _list(self, folder: str, kind: type[_Object], owner: bytes) -> list[_Object]:
        found = [each for whose, each in self._all(folder, kind) if whose == owner]
        return sorted(found, key=lambda each: (-each.created_at, each.id))

    def _all(self, folder: str, kind: type[_Object]) -> Iterator[tuple[bytes, _Object]]:
        """All that are described; their values are shared, and nobody changes them."""
        before, known = self._known.get(folder, {}), dict[str, _Known]()
        for entry in _entries(self.folder / folder):
            if not entry.name.endswith(".json"):
                continue
            try:
                status = entry.stat()
                state = status.st_ino, status.st_mtime_ns, status.st_size
                found = before.get(entry.name)
                if found is None or found.state != state:
                    found = _Known(state, *_read(Path(entry.path), kind))
            except FileNotFoundError:
                continue  # removed meanwhile
            except _DAMAGED as error:  # it must not hide those of others
                _check_is_damage(error)
                logger.error("%s is left out, since it cannot be read: %s", entry.path, error)
                continue
            if len(known) < _MOST_KNOWN:
                known[entry.name] = found
            yield found.owner, found.value
        self._known[folder] = known

    def _write(self, path: Path, owner: bytes, value: pydantic.BaseModel) -> None:
        partial = path.with_suffix(".tmp")
        try:
            with partial.open("w", encoding="utf-8") as target:
                json.dump({"owner": owner.hex(), "object": value.model_dump()}, target)
                target.flush()
                os.fsync(target.fileno())
            partial.replace(path)
        except OSError:
            _discard(partial)
            raise


def is_for_good(error: OSError) -> bool:
    """Whether a write fails again whenever it is tried: the file would be larger than the server may write."""
    return error.errno == errno.EFBIG


def refusal_of(error: OSError) -> Exception:
    """What a client is told when the disk failed: 507 where there is no room, 503 where there are no descriptors; else
    it is a defect, the error itself."""
    if error.errno in _NO_FILES:
        text = f"no file of serve.http.batch_dir can be opened now ({error.strerror}); try again later"
        return HttpRefusal(503, text)
    if error.errno not in _NO_ROOM:
        return error
    text = f"the disk of serve.http.batch_dir has no room for it ({error.strerror}); {_NO_ROOM[error.errno]}"
    return HttpRefusal(507, text)


def _check_is_damage(error: Exception) -> None:
    """Raises OSError where nothing can be opened: what is not read now is not damaged, and must not be left out."""
    if isinstance(error, OSError) and error.errno in _NO_FILES:
        raise error


def _discard(path: Path) -> None:
    """Removes what was not written whole, where that can be done."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def _entries(folder: Path) -> Iterator[os.DirEntry[str]]:
    """What is in a folder, a look at a time."""
    with os.scandir(folder) as entries:
        yield from entries


def _bytes_of(entry: os.DirEntry[str]) -> int:
    try:
        return max(entry.stat().st_size, _LEAST_BYTES)
    except FileNotFoundError:  # removed or renamed meanwhile
        return 0


def _read(path: Path, kind: type[_Object]) -> tuple[bytes, _Object]:
    fields = json.loads(path.read_text(encoding="utf-8"))
    return bytes.fromhex(fields["owner"]), kind.model_validate(fields["object"])


def new_file_id() -> str:
    """A name that no other file has."""
    return f"file-{uuid.uuid4().hex}"


def new_batch_id() -> str:
    """A name that no other batch has."""
    return f"batch_{uuid.uuid4().hex}"


def read_results(path: Path, on_id: Callable[[str], None]) -> None:
    """The ids of all results in a file. A last line that was cut by the end of the process is removed."""
    if not path.exists():
        return
    whole = 0
    with path.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            on_id(json.loads(line)["custom_id"])
            whole += len(line)
        file.truncate(whole)
