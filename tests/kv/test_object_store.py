"""Pages in a bucket, over the backends of the library that need none, and over one that does not answer."""

import http.server
import socket
import threading
from pathlib import Path

import pytest
from kv_servers import SECRET
from obstore.store import MemoryStore as MemoryBucket

from jaxserve.errors import ConfigError
from jaxserve.kv.blobs import BlobsError
from jaxserve.kv.conformance import LAYOUT, conformance, get, key_of, put
from jaxserve.kv.names import BlobName
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


def at_endpoint(port: int, monkeypatch: pytest.MonkeyPatch) -> SealedStore:
    for name, value in {
        "AWS_ENDPOINT": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "nowhere",
    }.items():
        monkeypatch.setenv(name, value)
    return object_store(LAYOUT, StoreOptions(location="s3://bucket/pages", secret=SECRET))


def test_a_bucket_that_does_not_answer_is_late_and_holds_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint takes connections and says nothing, as a firewall or a dead machine does."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = at_endpoint(silent.getsockname()[1], monkeypatch)
        assert get(store, [key_of(1), key_of(2)], 0.1) == [Outcome.LATE] * 2
        assert store._readers.wait_idle(20.0), "the library's own limit is 30 s"
        for call in (
            lambda: store._blobs.write(BlobName("0" * 32, "0" * 48), b"page", 0.1),
            lambda: store._blobs.exists([BlobName("0" * 32, "0" * 48)], 0.1),
            lambda: store._blobs.flush(None, 0.1),
        ):
            with pytest.raises(BlobsError, match="did not answer in time"):
                call()
    # The endpoint is gone: connections are refused, and a deletion says that it cannot be sure.
    with pytest.raises(StoreUnavailable):
        store.delete([key_of(1)])
    store.close()


def test_pages_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The endpoint answers when as many ask as there are pages."""
    together = threading.Barrier(6)

    class Bucket(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            place = together.wait(10.0)
            self.send_response(404 if place == 0 else 200)
            self.send_header("Content-Length", "9")
            self.send_header("Last-Modified", "Tue, 24 Nov 2026 00:00:00 GMT")
            self.send_header("ETag", "x")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Not to the terminal."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        store = at_endpoint(server.server_address[1], monkeypatch)
        names = [store._name(key_of(number)) for number in range(6)]
        assert sorted(store._blobs.exists(names, 30.0)) == [False] + [True] * 5
        store.close()
        server.shutdown()


def test_what_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="needs a secret"):
        object_store(LAYOUT, StoreOptions(location="memory:///"))
    with pytest.raises(ConfigError, match="needs location"):
        object_store(LAYOUT, StoreOptions(secret=SECRET))
    with pytest.raises(ConfigError, match="cannot use 'ftp://x'"):
        object_store(LAYOUT, StoreOptions(location="ftp://x", secret=SECRET))
    with pytest.raises(ConfigError, match="no use for max_bytes"):
        object_store(LAYOUT, StoreOptions(location="memory:///", secret=SECRET, max_bytes=5))
