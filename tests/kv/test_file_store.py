"""A directory of pages: what an operator, another server, a full disk and an attacker do to it."""

import errno
import logging
import os
import stat
import time
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.kv import file_store as module
from jaxserve.kv.conformance import AMPLE_S, LAYOUT, SCOPES, get, key_of, page_of, put
from jaxserve.kv.file_store import DirectoryBlobs, file_store
from jaxserve.kv.names import BlobName
from jaxserve.kv.page_format import PageLayout, max_sealed_bytes
from jaxserve.kv.sealed_store import SealedStore
from jaxserve.kv.store import Outcome, StoreOptions

ROOM = 8 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "pages of a server"


def opened(folder: Path, max_bytes: int = ROOM, layout: PageLayout = LAYOUT, **options: str) -> SealedStore:
    return file_store(layout, StoreOptions(location=str(folder), max_bytes=max_bytes, **options))


def files(folder: Path, part: str = "pages") -> list[Path]:
    return sorted(path for path in (folder / part).rglob("*") if not path.is_dir())


def directory(store: SealedStore) -> DirectoryBlobs:
    assert isinstance(store._blobs, DirectoryBlobs)
    return store._blobs


def test_nobody_else_can_read_or_guess(folder: Path) -> None:
    store = opened(folder)
    put(store, [key_of(1)])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in (*files(folder), folder / "secret"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    shown = " ".join(str(path) for path in files(folder))
    assert SCOPES[0].hex() not in shown and key_of(1)[16:].hex() not in shown


def test_a_directory_that_others_can_write_is_refused(folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="mode 755; it must belong .* mode 700"):
        opened(folder)
    folder.chmod(0o700)
    link = folder.parent / "link"
    link.symlink_to(folder)
    with pytest.raises(ConfigError, match="is a link or a file"):
        opened(link)
    opened(folder).close()
    (folder / "secret").chmod(0o644)
    with pytest.raises(ConfigError, match="must be a file of user"):
        opened(folder)
    with pytest.raises(ConfigError, match="cannot make the directory"):
        opened(Path("/proc/no such place"))


def test_a_directory_of_another_user_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match="must belong to user 12345"):
        opened(folder)


def test_settings_that_make_no_sense(folder: Path) -> None:
    with pytest.raises(ConfigError, match="holds no page of 1024"):
        opened(folder, max_bytes=max_sealed_bytes(LAYOUT) - 1)
    with pytest.raises(ConfigError, match="needs max_bytes"):
        file_store(LAYOUT, StoreOptions(location=str(folder)))
    with pytest.raises(ConfigError, match="needs location"):
        file_store(LAYOUT, StoreOptions(max_bytes=ROOM))
    with pytest.raises(ConfigError, match="no use for tls_ca"):
        file_store(LAYOUT, StoreOptions(location=str(folder), max_bytes=ROOM, tls_ca="x"))
    with pytest.raises(ConfigError, match="has 5 bytes, but a secret has 16"):
        file_store(LAYOUT, StoreOptions(location=str(folder), max_bytes=ROOM, secret=b"short"))
    with pytest.raises(ConfigError, match="compression 'gzip'"):
        opened(folder, compression="gzip")


def test_eviction_keeps_within_the_bound_and_a_restart_does_too(folder: Path) -> None:
    store = opened(folder, max_bytes=100_000)
    keys = [key_of(number) for number in range(120)]
    for key in keys:
        put(store, [key])
    size = sum(path.stat().st_size for path in files(folder))
    assert 90_000 < size <= 100_000
    assert directory(store).counts["evicted"] == 120 - len(files(folder))
    assert get(store, keys[-20:]) == [Outcome.OK] * 20
    store.close()
    smaller = opened(folder, max_bytes=70_000)
    assert 60_000 < sum(path.stat().st_size for path in files(folder)) <= 70_000
    assert get(smaller, keys[-20:]) == [Outcome.OK] * 20, "the oldest go"
    smaller.close()


def test_a_start_opens_no_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(folder)
    put(store, [key_of(number) for number in range(20)])
    store.close()
    reads: list[object] = []
    monkeypatch.setattr(module, "_read_all", lambda file, size: reads.append(file))
    again = opened(folder)
    assert again.contains([key_of(number) for number in range(21)]) == [True] * 20 + [False]
    assert not reads
    again.close()


def test_bad_files_are_moved_aside_counted_and_replaced(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = opened(folder)
    put(store, [key_of(1)])
    (path,) = files(folder)
    path.write_bytes(b"foreign bytes")
    with caplog.at_level(logging.WARNING):
        assert get(store, [key_of(1)]) == [Outcome.BAD]
    assert "is not the page that belongs there" in caplog.text and "moved to" in caplog.text
    assert get(store, [key_of(1)]) == [Outcome.MISS]
    assert [bad.read_bytes() for bad in files(folder, "bad")] == [b"foreign bytes"]
    assert directory(store).counts["bad"] == 1
    put(store, [key_of(1)])
    assert get(store, [key_of(1)]) == [Outcome.OK]


@pytest.mark.parametrize("what", ["link", "link to a good page", "pipe", "folder", "giant", "linked folder", "empty"])
def test_strange_things_in_the_place_of_a_page(folder: Path, what: str) -> None:
    store = opened(folder)
    put(store, [key_of(1)])
    (path,) = files(folder)
    good = path.with_name("kept")
    if what == "linked folder":
        path.parent.rename(folder / "elsewhere")
        path.parent.symlink_to(folder / "elsewhere")
    else:
        path.rename(good)
    if what == "link":
        path.symlink_to("/etc/passwd")
    elif what == "link to a good page":
        path.symlink_to(good)
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "giant":
        with path.open("wb") as file:
            file.truncate(1 << 32)  # a hole
    elif what == "empty":
        path.touch()
    assert get(store, [key_of(1)]) == [Outcome.BAD]
    assert get(store, [key_of(1)]) == [Outcome.MISS] and len(os.listdir(folder / "bad")) == 1
    put(store, [key_of(1)])
    assert get(store, [key_of(1)]) == [Outcome.OK], "its place is free again"
    assert Path("/etc/passwd").exists() and (what != "linked folder" or len(files(folder, "elsewhere")) == 1)
    store.flush(None)
    assert files(folder) == files(folder, "bad") == []
    assert what != "linked folder" or len(files(folder, "elsewhere")) == 1


@pytest.mark.parametrize("what", ["folder", "folder in a full bad", "linked folder", "dangling link", "file"])
@pytest.mark.parametrize("then", ["put", "flush", "delete", "evict"])
def test_what_is_in_the_way_of_a_page_goes_and_no_link_is_followed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, what: str, then: str
) -> None:
    monkeypatch.setattr(module, "_MAX_BAD", 1)
    store = opened(folder)
    put(store, [key_of(1)])
    (path,) = files(folder)
    elsewhere = folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / path.name).write_text("of somebody")
    (elsewhere / "kept").write_text("of somebody")
    if what.startswith("folder"):
        path.unlink()
        path.mkdir()
        (path / "deep").mkdir()
        (path / "link").symlink_to(elsewhere)
        if "full" in what:
            (folder / "bad").mkdir()
            (folder / "bad" / "one").touch()
    else:
        path.unlink()
        path.parent.rmdir()
        if what == "file":
            path.parent.touch()
        else:
            path.parent.symlink_to(elsewhere if what == "linked folder" else folder / "nowhere")
    if then == "put":
        put(store, [key_of(1)])
        assert get(store, [key_of(1)]) == [Outcome.OK] and len(os.listdir(folder / "bad")) == 1
    elif then == "delete":
        store.delete([key_of(1)])
        assert what.startswith("folder") or path.parent.is_symlink() or path.parent.is_file()
    elif then == "evict":
        directory(store)._drop([(path.parent.name, path.name.encode())])
    assert not directory(store).exists([BlobName(path.parent.name, "0" * 48)], 1.0)[0]
    store.flush(None)
    assert os.listdir(folder / "pages") == [] and (not (folder / "bad").exists() or os.listdir(folder / "bad") == [])
    assert sorted(os.listdir(elsewhere)) == sorted([path.name, "kept"])
    store.close()


def test_a_flush_forgets_what_another_server_has_flushed_before(folder: Path) -> None:
    first = opened(folder)
    put(first, [key_of(1)])
    second = opened(folder)
    first.flush(None)
    second.flush(None)
    assert not second.contains([key_of(1)])[0] and not directory(second)._index.num_bytes
    first.close()
    second.close()


@pytest.mark.parametrize("name", ["pages", "bad"])
def test_a_link_out_of_the_directory_is_refused(folder: Path, name: str) -> None:
    folder.mkdir(mode=0o700)
    (folder / name).symlink_to(folder.parent)
    with pytest.raises(ConfigError, match=f"{name} is a link, which would lead out"):
        opened(folder)


def test_a_page_size_that_changed_between_runs(folder: Path) -> None:
    """Other names, so that neither run harms the other's pages; a flush by salt still reaches both."""
    other = PageLayout(namespace="conformance", dtype="float32", shape=(2, 8, 8), element_bytes=4, page_bytes=512)
    store = opened(folder)
    put(store, [key_of(1)])
    changed = opened(folder, layout=other)
    buffer = bytearray(512)
    assert changed.get([key_of(1)], [memoryview(buffer)], AMPLE_S) == [Outcome.MISS]
    assert changed.put([key_of(1)], [memoryview(b"x" * 512)], AMPLE_S) == [Outcome.OK]
    assert get(store, [key_of(1)]) == [Outcome.OK]
    assert directory(store).counts["bad"] == directory(changed).counts["bad"] == 0
    store.flush(SCOPES[0])
    assert files(folder) == []
    assert changed.get([key_of(1)], [memoryview(buffer)], AMPLE_S) == [Outcome.MISS]


def test_servers_with_other_secrets_do_not_meet(folder: Path) -> None:
    mine = file_store(LAYOUT, StoreOptions(location=str(folder), max_bytes=ROOM, secret=b"mine" * 8))
    theirs = file_store(LAYOUT, StoreOptions(location=str(folder), max_bytes=ROOM, secret=b"theirs" * 8))
    put(mine, [key_of(1)])
    assert get(theirs, [key_of(1)]) == [Outcome.MISS]
    put(theirs, [key_of(1)])
    assert get(mine, [key_of(1)]) == [Outcome.OK]
    assert len(files(folder)) == 2


def test_a_full_disk_makes_the_store_smaller(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(folder)
    free = [10]
    write = os.write

    def bounded(file: int, data: bytes) -> int:
        if len(files(folder)) > free[0]:  # the one that is written counts
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", bounded)
    with caplog.at_level(logging.WARNING):
        for number in range(30):
            put(store, [key_of(number)])
    assert directory(store).counts["no_space"] == 1, "afterwards the store knows its size"
    assert caplog.text.count("shrinks to") == 1
    assert len(files(folder)) == 10 and get(store, [key_of(29)]) == [Outcome.OK]
    free[0] = 0
    assert store.put([key_of(50)], [memoryview(page_of(key_of(50)))], AMPLE_S) == [Outcome.REFUSED]
    assert not [path for path in files(folder) if path.name.endswith(".partial")]


@pytest.mark.parametrize(
    ("code", "call"), [(errno.EROFS, "write"), (errno.EACCES, "write"), (errno.EROFS, "unlink"), (errno.EFBIG, "write")]
)
def test_a_disk_that_turns_read_only_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int, call: str
) -> None:
    store = opened(folder)
    put(store, [key_of(1)])
    if call == "unlink":  # of a page that has to go first
        directory(store)._index.max_bytes = directory(store)._index.num_bytes

    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(code, "cannot be written")

    monkeypatch.setattr(os, call, refuse)
    with caplog.at_level(logging.WARNING):
        for number in range(2, 5):
            page = memoryview(page_of(key_of(number)))
            assert store.put([key_of(number)], [page], AMPLE_S) == [Outcome.REFUSED]
    assert caplog.text.count("cannot be written (") == 1
    assert get(store, [key_of(1)]) == [Outcome.OK]


def test_a_directory_that_is_read_only_from_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(folder)
    put(store, [key_of(1)])
    store.close()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    reader = opened(folder)
    assert directory(reader).read_only
    assert get(reader, [key_of(1)]) == [Outcome.OK]
    assert reader.put([key_of(2)], [memoryview(page_of(key_of(2)))], AMPLE_S) == [Outcome.REFUSED]


def test_other_faults_of_a_disk_are_logged_a_few_times(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(folder)

    def fail(*args: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            page = memoryview(page_of(key_of(number)))
            assert store.put([key_of(number)], [page], AMPLE_S) == [Outcome.FAILED]
    assert caplog.text.count("Input/output error") == 5
    assert store.counts["write"] == 20 and files(folder) == []


def test_a_rename_that_a_file_server_reports_twice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS sends a request again when the answer is lost; the second finds the name gone."""
    store = opened(folder)
    rename = os.rename

    def twice(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        for _ in range(2):
            rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", twice)
    put(store, [key_of(1)])
    assert get(store, [key_of(1)]) == [Outcome.OK]


def test_a_file_that_another_client_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(folder)
    put(store, [key_of(1)])

    def stale(file: int, size: int) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patch:
        patch.setattr(module, "_read_all", stale)
        assert get(store, [key_of(1)]) == [Outcome.MISS]
    assert get(store, [key_of(1)]) == [Outcome.OK]


def test_partial_files_of_dead_writers_are_removed_by_the_file_servers_own_time(folder: Path) -> None:
    store = opened(folder)
    put(store, [key_of(1)])
    (path,) = files(folder)
    old, fresh = (path.with_name(f".{path.name}.{name}.partial") for name in ("old", "fresh"))
    for partial, age in ((old, 7200), (fresh, 60)):
        partial.write_bytes(b"half")
        moment = path.stat().st_mtime - age
        os.utime(partial, (moment, moment))
    future = time.time() + 10 * 365 * 86400  # the clock of the file server is wrong by years, for all files alike
    shift = future - path.stat().st_mtime
    for each in (path, old, fresh):
        moment = each.stat().st_mtime + shift
        os.utime(each, (moment, moment))
    opened(folder).close()
    assert files(folder) == sorted([path, fresh])


def test_two_servers_that_start_at_once_have_one_secret(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exists = os.path.lexists
    monkeypatch.setattr(os.path, "lexists", lambda path: False if path == folder / "secret" else exists(path))
    first, second = opened(folder), opened(folder)
    put(first, [key_of(1)])
    assert get(second, [key_of(1)]) == [Outcome.OK]
    assert files(folder, ".")[-1].name == "secret"


def test_what_another_server_wrote_is_counted_in_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_EVERY", 10)
    one, other = opened(folder, max_bytes=100_000), opened(folder, max_bytes=100_000)
    for number in range(100):
        put(one, [key_of(number)])
        put(other, [key_of(1000 + number)])
    assert sum(path.stat().st_size for path in files(folder)) < 100_000 + 2 * 10 * 1500


def test_a_slow_disk_is_late_and_writes_into_no_slot_afterwards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = opened(folder)
    put(store, [key_of(1)])
    real = module._read_all

    def slowly(file: int, size: int) -> bytearray:
        time.sleep(0.2)
        return real(file, size)

    monkeypatch.setattr(module, "_read_all", slowly)
    buffer = bytearray(LAYOUT.page_bytes)
    assert store.get([key_of(1)], [memoryview(buffer)], 0.02) == [Outcome.LATE]
    time.sleep(0.4)
    assert not any(buffer)
    assert get(store, [key_of(1)]) == [Outcome.OK]


def test_names_cannot_lead_out_of_the_directory(folder: Path) -> None:
    """Names are made of hashes, so only a caller inside the process could try; a flush lists such folders alone."""
    store = opened(folder)
    (folder / "pages" / "not hex").mkdir()
    (folder / "pages" / "not hex" / "kept").touch()
    put(store, [key_of(1)])
    store.flush(None)
    assert [path.name for path in files(folder)] == ["kept"]
    assert directory(store).exists([BlobName("0" * 32, "0" * 48)], 1.0) == [False]
