"""Pages in a bucket, over the backends of the library that need none, and over one that does not answer."""

import socket
import time
from pathlib import Path

import pytest
from kv_servers import SECRET
from obstore.store import MemoryStore as MemoryBucket

from jaxserve.errors import ConfigError
from jaxserve.kv.conformance import LAYOUT, conformance, get, key_of, put
from jaxserve.kv.object_store import ObjectBlobs, object_store
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.sealed_store import SealedStore
from jaxserve.kv.store import KVStore, Outcome, StoreOptions, StoreUnavailable


def in_folder(layout: PageLayout, path: Path) -> KVStore:
    return object_store(layout, StoreOptions(location=f"file://{path}", secret=SECRET))


def in_memory(layout: PageLayout, path: Path) -> KVStore:
    return SealedStore(ObjectBlobs(MemoryBucket()), layout, SECRET, place="memory", compression="zstd")


def objects(path: Path) -> list[Path]:
    return sorted(file for file in path.rglob("*") if file.is_file())


def damage(path: Path) -> None:
    for number, file in enumerate(objects(path)):
        data = bytearray(file.read_bytes())
        data[number - 40] ^= 1
        file.write_bytes(data[: None if number % 2 else -1])


def exchange(path: Path) -> None:
    first, second = objects(path)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


TestFolder = conformance(in_folder, survives=True, damage=damage, exchange=exchange)
TestMemory = conformance(in_memory)


def test_an_object_that_is_too_large_is_not_loaded(tmp_path: Path) -> None:
    store = in_folder(LAYOUT, tmp_path)
    put(store, [key_of(1)])
    (file,) = objects(tmp_path)
    with file.open("wb") as opened:
        opened.truncate(1 << 32)  # a hole
    assert get(store, [key_of(1)]) == [Outcome.BAD]
    assert objects(tmp_path) == []
    store.close()


def test_a_bucket_that_does_not_answer_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint takes connections and says nothing, as a firewall or a dead machine does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for name, value in {
            "AWS_ENDPOINT": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_REGION": "nowhere",
        }.items():
            monkeypatch.setenv(name, value)
        store = object_store(LAYOUT, StoreOptions(location="s3://bucket/pages", secret=SECRET))
        start = time.monotonic()
        assert get(store, [key_of(1), key_of(2)], 0.1) == [Outcome.LATE] * 2
        assert time.monotonic() - start < 5.0
    # The endpoint is gone: connections are refused, and a deletion says that it cannot be sure.
    with pytest.raises(StoreUnavailable):
        store.delete([key_of(1)])
    store.close()


def test_what_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a secret"):
        object_store(LAYOUT, StoreOptions(location="memory:///"))
    with pytest.raises(ConfigError, match="needs location"):
        object_store(LAYOUT, StoreOptions(secret=SECRET))
    with pytest.raises(ConfigError, match="cannot use 'ftp://x'"):
        object_store(LAYOUT, StoreOptions(location="ftp://x", secret=SECRET))
    with pytest.raises(ConfigError, match="no use for max_bytes"):
        object_store(LAYOUT, StoreOptions(location="memory:///", secret=SECRET, max_bytes=5))
