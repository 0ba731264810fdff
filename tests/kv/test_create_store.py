"""Stores by name, entry point, path or object; and stores of others that the conformance suite finds wanting."""

import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.kv.conformance import LAYOUT, conformance
from jaxserve.kv.memory_store import MemoryStore, memory_store
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.sealed_store import SealedStore
from jaxserve.kv.store import STORES, KVStore, Outcome, StoreOptions, create_store

OPTIONS = StoreOptions(max_bytes=1 << 20)


class Mine(MemoryStore):
    """A store of somebody else."""

    def __init__(self, layout: PageLayout, options: StoreOptions) -> None:
        assert options.max_bytes is not None
        super().__init__(layout.page_bytes, options.max_bytes)
        self._late: list[tuple[Sequence[bytes], Sequence[memoryview]]] = []


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert STORES.names() == ["memory", "file", "remote", "object"]
    assert isinstance(create_store("memory", LAYOUT, OPTIONS), MemoryStore)
    options = StoreOptions(max_bytes=1 << 20, location=str(tmp_path / "s"), policy="s3-fifo", admission="second_sight")
    assert isinstance(create_store("file", LAYOUT, options), SealedStore)
    assert isinstance(create_store(Mine, LAYOUT, OPTIONS), Mine)
    assert isinstance(create_store(memory_store, LAYOUT, OPTIONS), MemoryStore)
    assert isinstance(create_store("test_create_store:Mine", LAYOUT, OPTIONS), MemoryStore)
    finished = Mine(LAYOUT, OPTIONS)
    assert create_store(finished, LAYOUT, StoreOptions()) is finished
    point = importlib.metadata.EntryPoint("mine", "test_create_store:Mine", "jaxserve.kv_stores")
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [point])
    assert isinstance(create_store("mine", LAYOUT, OPTIONS), MemoryStore)


def test_what_is_no_store() -> None:
    with pytest.raises(ConfigError, match="no store of pages is called 'memroy'.*'memory'"):
        create_store("memroy", LAYOUT, OPTIONS)
    with pytest.raises(ConfigError, match="give a class or an object"):
        create_store("jaxserve.kv.conformance:LAYOUT", LAYOUT, OPTIONS)
    with pytest.raises(ConfigError, match="gives a dict without contains"):
        create_store(lambda layout, options: {}, LAYOUT, OPTIONS)  # type: ignore[arg-type, return-value]
    with pytest.raises(ConfigError, match="the finished Mine store has no use for max_bytes; it takes no options"):
        create_store(Mine(LAYOUT, OPTIONS), LAYOUT, OPTIONS)
    with pytest.raises(ConfigError, match=r"takes \(layout\), but is called with \(PageLayout, StoreOptions\)"):
        create_store(lambda layout: Mine(layout, OPTIONS), LAYOUT, OPTIONS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs max_bytes"):
        create_store("memory", LAYOUT, StoreOptions())
    with pytest.raises(ConfigError, match="holds no page"):
        create_store("memory", LAYOUT, StoreOptions(max_bytes=1023))
    with pytest.raises(ConfigError, match="the memory store has no use for location, secret"):
        create_store("memory", LAYOUT, StoreOptions(max_bytes=1 << 20, location="x", secret=b"y"))
    with pytest.raises(ConfigError, match="no tier policy"):
        create_store("memory", LAYOUT, StoreOptions(max_bytes=1 << 20, policy="x"))
    with pytest.raises(ConfigError, match="none of second_sight, always"):
        create_store("memory", LAYOUT, StoreOptions(max_bytes=1 << 20, admission="x"))


class Keeps(Mine):
    """Reads a buffer after the call."""

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        self._pages.update(zip(keys, pages, strict=True))  # type: ignore[arg-type]
        return [Outcome.OK] * len(keys)


class WrongKey(Mine):
    """Forgets the scope."""

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        return super().put([key[16:] for key in keys], pages, deadline_s)

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        return super().get([key[16:] for key in keys], into, deadline_s)


class Late(Mine):
    """Writes into a buffer after it has said that it was late."""

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        if deadline_s > 1:
            return super().get(keys, into, deadline_s)
        self._late.append((keys, into))
        return [Outcome.LATE] * len(keys)

    def close(self) -> None:
        for keys, into in self._late:
            super().get(keys, into, 0.0)
        self._late.clear()
        super().close()


class Undeleted(Mine):
    """Deletes nothing."""

    def delete(self, keys: Sequence[bytes]) -> None:
        pass


class FlushesAll(Mine):
    """Takes other tenants with it."""

    def flush(self, scope: bytes | None) -> None:
        super().flush(None)


class Raises(Mine):
    """Where it should miss."""

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        if not all(self.contains(keys)):
            raise KeyError(keys)
        return super().get(keys, into, deadline_s)


class Unclosed(Mine):
    """Goes on after its end."""

    def close(self) -> None:
        pass


class Overlong(Mine):
    """Takes pages of any size."""

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        for key, buffer in zip(keys, into, strict=True):
            page = self._pages.get(key, b"")[: buffer.nbytes]
            buffer[: len(page)] = page
        return [Outcome.OK if key in self._pages else Outcome.MISS for key in keys]


@pytest.mark.parametrize(
    ("store", "tests"),
    [
        (Keeps, ["test_the_store_keeps_no_buffer"]),
        (WrongKey, ["test_a_scope_is_flushed_alone"]),
        (Late, ["test_no_deadline_is_too_short"]),
        (Undeleted, ["test_what_is_deleted_is_gone"]),
        (FlushesAll, ["test_a_scope_is_flushed_alone"]),
        (Raises, ["test_pages_come_back_as_they_were", "test_each_key_has_its_own_outcome"]),
        (Unclosed, ["test_closed_means_closed"]),
        (Overlong, ["test_a_buffer_of_another_size_is_refused"]),
    ],
)
def test_the_suite_finds_stores_that_are_wrong(
    store: Callable[[PageLayout, StoreOptions], KVStore], tests: list[str], tmp_path: Path
) -> None:
    suite = conformance(lambda layout, path: store(layout, OPTIONS))()
    for number, name in enumerate(tests):
        (tmp_path / str(number)).mkdir()
        with pytest.raises((AssertionError, KeyError)):
            getattr(suite, name)(tmp_path / str(number))


def test_the_suite_finds_damage_that_goes_unnoticed(tmp_path: Path) -> None:
    """A store of files without a check of its bytes."""

    class Bare:
        def __init__(self, layout: PageLayout, path: Path) -> None:
            self._path = path

        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            return [(self._path / key.hex()).exists() for key in keys]

        def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
            for key, buffer in zip(keys, into, strict=True):
                buffer[:] = (self._path / key.hex()).read_bytes()
            return [Outcome.OK] * len(keys)

        def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
            for key, page in zip(keys, pages, strict=True):
                (self._path / key.hex()).write_bytes(page)
            return [Outcome.OK] * len(keys)

        def delete(self, keys: Sequence[bytes]) -> None: ...

        def flush(self, scope: bytes | None) -> None: ...

        def close(self) -> None: ...

    def damage(path: Path) -> None:
        for file in path.iterdir():
            file.write_bytes(bytes(LAYOUT.page_bytes))

    def exchange(path: Path) -> None:
        first, second = path.iterdir()
        kept = first.read_bytes()
        first.write_bytes(second.read_bytes())
        second.write_bytes(kept)

    suite = conformance(Bare, survives=True, damage=damage, exchange=exchange)()
    for name in ("test_damaged_pages_are_not_used", "test_bytes_of_another_key_are_not_used"):
        (tmp_path / name).mkdir()
        with pytest.raises(AssertionError, match="wrong bytes"):
            getattr(suite, name)(tmp_path / name)
