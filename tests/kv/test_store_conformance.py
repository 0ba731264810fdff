"""The suite that every store passes, run over all that are here."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from kv_servers import KVServers, connect

from jaxserve.kv.conformance import conformance
from jaxserve.kv.file_store import file_store
from jaxserve.kv.memory_store import MemoryStore
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.store import KVStore, StoreOptions

SERVERS = KVServers()


@pytest.fixture(autouse=True)
def servers() -> Iterator[None]:
    yield
    SERVERS.stop()


def in_memory(layout: PageLayout, path: Path) -> KVStore:
    return MemoryStore(layout.page_bytes, 1 << 20)


def in_files(layout: PageLayout, path: Path) -> KVStore:
    return file_store(layout, StoreOptions(location=str(path), max_bytes=8 << 20))


def in_compressed_files(layout: PageLayout, path: Path) -> KVStore:
    return file_store(layout, StoreOptions(location=str(path), max_bytes=8 << 20, compression="zstd"))


def on_a_server(layout: PageLayout, path: Path) -> KVStore:
    return connect(SERVERS.of(path), layout)


def in_memory_of_a_server(layout: PageLayout, path: Path) -> KVStore:
    return connect(SERVERS.of(path, in_memory=True), layout, compression="auto")


def pages_in(path: Path) -> list[Path]:
    return sorted(file for file in (path / "pages").rglob("*") if file.is_file())


def flip_bits(path: Path) -> None:
    for number, page in enumerate(pages_in(path)):
        data = bytearray(page.read_bytes())
        data[[9, 100, -1, -600][number % 4]] ^= 0x40
        page.write_bytes(data)


def exchange(path: Path) -> None:
    first, second = pages_in(path)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


TestMemory = conformance(in_memory)
TestFiles = conformance(
    in_files, survives=True, damage=flip_bits, exchange=exchange, process="test_store_conformance:in_files"
)
TestCompressedFiles = conformance(in_compressed_files, survives=True, damage=flip_bits, exchange=exchange)
TestRemote = conformance(on_a_server, survives=True, damage=flip_bits, exchange=exchange)
TestRemoteMemory = conformance(in_memory_of_a_server, survives=True)
