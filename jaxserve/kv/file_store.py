"""`DirectoryBlobs`: sealed pages as files of a directory, which survive the process.

    DIRECTORY/secret                    made at the first start, unless the fleet has one; 0600
    DIRECTORY/pages/<scope>/<page>      one file a page
    DIRECTORY/pages/<scope>/.<page>.<random>.partial
    DIRECTORY/bad/                      what was found in place of a page, for a person to look at; at most 100 entries

A file is written under another name, synchronised and renamed, so a process that is killed leaves no half page behind.
No link is followed: a page must be a plain file of this user in a folder, and a folder, a link or a pipe in its place
is moved aside like any other damage. Every name is made of hexadecimal digits. The directory must belong to this user
and be closed to all others, since with its secret they could write pages that a model would believe.

Several servers may use one directory, on a network file system as well. Each bounds what it knows of: what it wrote,
what it found at its start and at a look around now and then, and what it read. A start lists the directory and opens
nothing; a page is checked when it is read.
"""

import collections
import contextlib
import errno
import logging
import os
import secrets
import shutil
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxserve.config.secret_files import check_secret
from jaxserve.errors import ConfigError
from jaxserve.kv.blobs import BlobTooLarge
from jaxserve.kv.bounded_index import BoundedIndex
from jaxserve.kv.names import BlobName, is_hex
from jaxserve.kv.page_format import PageLayout, max_sealed_bytes
from jaxserve.kv.sealed_store import SealedStore
from jaxserve.kv.store import StoreOptions
from jaxserve.sched.tier_policy import TierOptions, create_tier_policy

logger = logging.getLogger(__name__)

_SECRET_FILE = "secret"
_PARTIAL = ".partial"
_STALE_S = 3600.0  # a partial file of this age has no writer any more
_LOOK_EVERY = 1000  # pages written between two lists of the directory
_MAX_BAD = 100
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG)  # the last: pages are larger than files may be
_GONE = (errno.ENOENT, errno.ESTALE)  # the second: another client of the network file system replaced it
# No file in the place of a page, or no folder in that of a scope.
_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # the last: a pipe would wait for its writer
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DirectoryBlobs:
    """`Blobs` in a directory. Used by several threads.

    Attributes:
      counts: evicted, bad (files moved aside), no_space, read_only.
      read_only: nothing can be written; pages that are there are read.
    """

    def __init__(self, directory: Path, max_bytes: int, *, policy: str = "lru", admission: str = "always") -> None:
        """Opens or creates the directory, and lists it. Raises ConfigError."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.read_only = False
        self._directory = directory
        self._pages, self._bad = directory / "pages", directory / "bad"
        self._lock = threading.Lock()
        self._index: BoundedIndex[str] = BoundedIndex(
            create_tier_policy(policy, TierOptions(admission=admission)), max_bytes
        )
        self._num_written = 0
        self._prepare()
        self._look()

    def secret(self) -> bytes:
        """The directory's own secret, made now if there is none. Raises ConfigError."""
        path = self._directory / _SECRET_FILE
        try:
            if not os.path.lexists(path):
                self._make_secret(path)
            with self._opened(os.open(path, _OPEN)) as (file, status):
                self._check_own(file, status, path)
                return check_secret(os.read(file, 4096).strip(), str(path))
        except OSError as error:
            raise ConfigError(f"cannot read or make {path}: {error}; give a secret, or a directory of yours") from error

    def exists(self, names: Sequence[BlobName], timeout_s: float) -> list[bool]:
        found = []
        for name in names:
            with self._lock:
                known = name.page.encode() in self._index
            found.append(known or self._find(name))
        return found

    def read(self, name: BlobName, max_bytes: int, timeout_s: float) -> bytes | bytearray | None:
        try:
            data = self._read(name, max_bytes)
        except OSError as error:
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise BlobTooLarge("it is a link, or what should be its folder is none") from error
            if error.errno not in _GONE:
                raise
            data = None
        with self._lock:
            if data is None:
                self._index.remove(name.page.encode())
            else:
                self._know(name, len(data))
                self._index.touch(name.page.encode())
        return data

    def write(self, name: BlobName, data: bytes, timeout_s: float) -> bool:
        if self.read_only:
            return False
        key = name.page.encode()
        with self._lock:
            if key not in self._index and not self._index.admit(key, len(data)):
                return False
            gone = [] if key in self._index else self._index.make_room(len(data), key)
        try:
            self._drop(gone)
            self._write(name, data)
        except OSError as error:
            if not self._mend(error, name, len(data)):
                return False
            try:
                self._write(name, data)
            except OSError as again:
                if again.errno in _NO_SPACE:
                    return False
                raise
        self._note_written(name, len(data))
        return True

    def delete(self, names: Sequence[BlobName], timeout_s: float) -> None:
        for name in names:
            with self._lock:
                self._index.remove(name.page.encode())
            self._remove_page(name.scope, name.page)

    def flush(self, scope: str | None, timeout_s: float) -> None:
        """What all writers left goes, what this process did not know of as well, and what was moved aside."""
        with self._lock:
            for key in self._index.names(scope):
                self._index.remove(key)
        for each in [name for name in os.listdir(self._pages) if is_hex(name, 32)] if scope is None else [scope]:
            try:
                with _folder(self._pages / each) as folder:
                    for name in os.listdir(folder):
                        _remove(name, folder)
                with contextlib.suppress(OSError):  # another server writes there again
                    (self._pages / each).rmdir()
            except FileNotFoundError:
                continue
            except NotADirectoryError:
                (self._pages / each).unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError), _folder(self._bad) as folder:
            for name in os.listdir(folder):
                if scope is None or name.startswith(f"{scope}."):
                    _remove(name, folder)

    def set_aside(self, name: BlobName, why: str) -> None:
        with self._lock:
            self._index.remove(name.page.encode())
            self.counts["bad"] += 1
        if self.read_only:
            return
        self._bad.mkdir(mode=0o700, exist_ok=True)
        place, entry = self._pages / name.scope, name.page
        with contextlib.suppress(FileNotFoundError):  # another server was faster
            if not stat.S_ISDIR(os.lstat(place).st_mode):
                place, entry = self._pages, name.scope
            with _folder(place) as folder, _folder(self._bad) as bad:
                if len(os.listdir(bad)) < _MAX_BAD:
                    kept = f"{name.scope}.{name.page}.{secrets.token_hex(4)}"
                    os.rename(entry, kept, src_dir_fd=folder, dst_dir_fd=bad)
                    done = f"moved to {self._bad / kept}"
                else:
                    _remove(entry, folder)
                    done = f"deleted, since {self._bad} is full"
            logger.warning("%s is not the page that belongs there (%s), and was %s", place / entry, why, done)

    def close(self) -> None:
        """Nothing is open between two calls."""

    def _prepare(self) -> None:
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = os.lstat(self._directory)
        except OSError as error:
            raise ConfigError(f"cannot make the directory of pages {self._directory}: {error}") from error
        if not stat.S_ISDIR(status.st_mode):
            raise ConfigError(f"{self._directory} is a link or a file; name the directory of pages itself")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(
                f"the directory of pages {self._directory} belongs to user {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):o}; it must belong to user {os.geteuid()} with mode 700, since whoever "
                "writes there decides what models attend to"
            )
        for path in (self._pages, self._bad):
            if path.is_symlink():
                raise ConfigError(f"{path} is a link, which would lead out of the directory of pages; remove it")
        try:
            self._pages.mkdir(mode=0o700, exist_ok=True)
            if not os.access(self._pages, os.W_OK):
                raise PermissionError(errno.EACCES, "not writable", str(self._pages))
        except OSError as error:
            if error.errno not in _READ_ONLY or not self._pages.is_dir():
                raise ConfigError(f"cannot write pages in {self._directory}: {error}") from error
            self._turn_read_only(error)

    def _turn_read_only(self, error: OSError) -> None:
        self.read_only = True
        logger.warning("%s cannot be written (%s): its pages are read, and none is added", self._directory, error)

    def _make_secret(self, path: Path) -> None:
        """Linked into place whole, so of two servers that start at once one wins and both read the same."""
        made = path.with_name(f".{_SECRET_FILE}.{secrets.token_hex(8)}{_PARTIAL}")
        file = os.open(made, _CREATE, 0o600)
        try:
            os.write(file, secrets.token_hex(32).encode())
            os.fsync(file)
        finally:
            os.close(file)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(made, path)
        finally:
            os.unlink(made)

    def _look(self) -> None:
        """Takes the files into the index that it lacks, oldest first, and removes partial files without a writer."""
        found: list[tuple[float, str, str, int]] = []
        partial: list[tuple[float, str]] = []
        newest = 0.0
        for folder in self._folders():
            with contextlib.suppress(OSError):
                for entry in os.scandir(folder):
                    with contextlib.suppress(OSError):
                        status = entry.stat(follow_symlinks=False)
                        newest = max(newest, status.st_mtime)
                        if entry.name.endswith(_PARTIAL):
                            partial.append((status.st_mtime, entry.path))
                        elif stat.S_ISREG(status.st_mode) and is_hex(entry.name, 48):
                            found.append((status.st_mtime, folder.name, entry.name, status.st_size))
        # Ages are compared with the newest file, not with a clock: that of a file server may be another one, and jump.
        if not self.read_only:
            for time_s, path in partial:
                if newest - time_s > _STALE_S:
                    with contextlib.suppress(OSError):
                        os.unlink(path)
        with self._lock:
            for _, scope, page, size in sorted(found):
                if page.encode() not in self._index:
                    self._index.insert(scope, page.encode(), size)
            gone = [] if self.read_only else self._index.make_room(0)
        self._drop(gone)

    def _folders(self) -> Iterator[Path]:
        for entry in os.scandir(self._pages):
            if entry.is_dir(follow_symlinks=False) and is_hex(entry.name, 32):
                yield Path(entry.path)

    def _find(self, name: BlobName) -> bool:
        """Whether another server has written it."""
        try:
            with _folder(self._pages / name.scope) as folder:
                status = os.stat(name.page, dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False
        if not stat.S_ISREG(status.st_mode):
            return False
        with self._lock:
            self._know(name, status.st_size)
        return True

    def _know(self, name: BlobName, size: int) -> None:
        if name.page.encode() not in self._index:
            self._index.insert(name.scope, name.page.encode(), size)

    def _read(self, name: BlobName, max_bytes: int) -> bytearray:
        with (
            _folder(self._pages / name.scope) as folder,
            self._opened(os.open(name.page, _OPEN, dir_fd=folder)) as (file, status),
        ):
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                raise BlobTooLarge("it is no plain file of this user")
            if status.st_size > max_bytes:
                raise BlobTooLarge(f"it has {status.st_size} bytes, of {max_bytes} at most")
            return _read_all(file, status.st_size)

    def _write(self, name: BlobName, data: bytes) -> None:
        folder_path = self._pages / name.scope
        folder_path.mkdir(mode=0o700, exist_ok=True)
        partial = f".{name.page}.{secrets.token_hex(8)}{_PARTIAL}"
        with _folder(folder_path) as folder:
            file = os.open(partial, _CREATE, 0o600, dir_fd=folder)
            try:
                try:
                    view = memoryview(data)
                    while view:
                        view = view[os.write(file, view) :]
                    os.fsync(file)
                finally:
                    os.close(file)
                self._rename(partial, name, folder, len(data))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=folder)
                raise

    def _rename(self, partial: str, name: BlobName, folder: int, size: int) -> None:
        try:
            os.rename(partial, name.page, src_dir_fd=folder, dst_dir_fd=folder)
        except FileNotFoundError:
            # A network file system that sends a rename twice reports the second, which finds the first one's work.
            if os.stat(name.page, dir_fd=folder, follow_symlinks=False).st_size != size:
                raise

    def _mend(self, error: OSError, name: BlobName, size: int) -> bool:
        """Whether a page whose write failed is to be written again: there is room now, and nothing in its way.

        A full disk makes the store smaller, to the room that there is; a disk that turned read only stays read.
        """
        if error.errno in _READ_ONLY:
            self.counts["read_only"] += 1
            self._turn_read_only(error)
            return False
        if error.errno in _IN_THE_WAY:
            self.set_aside(name, "a folder, a file or a link in its place")
            return True
        if error.errno not in _NO_SPACE:
            raise error
        with self._lock:
            self.counts["no_space"] += 1
            if self.counts["no_space"] == 1:
                logger.warning(
                    "%s: %s; the store shrinks to %d bytes", self._directory, error.strerror, self._index.num_bytes
                )
            self._index.max_bytes = min(self._index.max_bytes, self._index.num_bytes)
            gone = self._index.make_room(size, name.page.encode())
        self._drop(gone)
        return bool(gone)

    def _note_written(self, name: BlobName, size: int) -> None:
        with self._lock:
            self._index.insert(name.scope, name.page.encode(), size)
            gone = self._index.make_room(0)  # other threads wrote meanwhile
            self._num_written += 1
            look = self._num_written % _LOOK_EVERY == 0
        self._drop(gone)
        if look:
            self._look()

    def _drop(self, gone: Sequence[tuple[str, bytes]]) -> None:
        for scope, key in gone:
            self._remove_page(scope, key.decode())
        with self._lock:
            self.counts["evicted"] += len(gone)

    def _remove_page(self, scope: str, page: str) -> None:
        # Another server may have been faster; behind what is no folder there are no pages of this store.
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), _folder(self._pages / scope) as folder:
            _remove(page, folder)

    @contextlib.contextmanager
    def _opened(self, file: int) -> Iterator[tuple[int, os.stat_result]]:
        try:
            yield file, os.fstat(file)
        finally:
            os.close(file)

    def _check_own(self, file: int, status: os.stat_result, path: Path) -> None:
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ConfigError(f"{path} must be a file of user {os.geteuid()} with mode 600")


def file_store(layout: PageLayout, options: StoreOptions) -> SealedStore:
    """The factory of the name "file"."""
    options.only("file", "location", "max_bytes", "policy", "admission", "secret", "compression")
    directory = Path(options.needed("file", "location"))
    if options.max_bytes is None:
        raise ConfigError("the file store needs max_bytes")
    if options.max_bytes < max_sealed_bytes(layout):
        raise ConfigError(
            f"a file store of {options.max_bytes} bytes holds no page of {layout.page_bytes}; raise max_bytes"
        )
    blobs = DirectoryBlobs(
        directory, options.max_bytes, policy=options.policy or "lru", admission=options.admission or "always"
    )
    secret = blobs.secret() if options.secret is None else check_secret(options.secret, "the store's options")
    return SealedStore(
        blobs,
        layout,
        secret,
        place=f"pages in {directory.name}",
        compression=options.compression or "none",
    )


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[int]:
    """A folder, opened. Raises FileNotFoundError, and NotADirectoryError for anything else, a link to one as well."""
    try:
        folder = os.open(path, _OPEN | os.O_DIRECTORY)
    except OSError as error:
        if error.errno == errno.ELOOP:  # how some systems call a link
            raise NotADirectoryError(errno.ENOTDIR, "a link", str(path)) from error
        raise
    try:
        yield folder
    finally:
        os.close(folder)


def _remove(name: str, folder: int) -> None:
    """Removes an entry of a folder, whatever it is; a link, and not what it leads to."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder)
        else:
            os.unlink(name, dir_fd=folder)


def _read_all(file: int, size: int) -> bytearray:
    data = bytearray(size)
    filled = 0
    while filled < size and (count := os.readv(file, [memoryview(data)[filled:]])):
        filled += count
    return data[:filled]  # shorter when the file was cut meanwhile: its MAC will not fit
