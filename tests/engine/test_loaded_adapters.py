"""Adapters in the memory of the host: what gives way, what is read again, and calls that meet each other."""

import concurrent.futures
import threading
from pathlib import Path

import pytest
from adapter_parts import MODEL, byte_adapters, read_bytes, write_bytes

from jaxserve.engine.adapters import LoadedAdapters
from jaxserve.errors import AdapterError, AdapterMemoryFull, ChangeUnderWay, InvalidRequest, Status, UnknownModel
from jaxserve.values.content import Adapter

WAIT_S = 60.0


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, Path]:
    return {name: write_bytes(tmp_path / name, f"weights of {name}") for name in "abcd"}


def test_what_was_wanted_longest_ago_gives_way_and_is_read_again(paths: dict[str, Path]) -> None:
    loaded = byte_adapters(2)
    for name in "ab":
        loaded.load(name, paths[name], MODEL)
    loaded.find("a", MODEL)
    loaded.load("c", paths["c"], MODEL)
    assert loaded.kept == {"a", "c"} and [info.name for info in loaded.all] == ["a", "b", "c"]
    assert loaded.check("b", MODEL).digest == loaded.find("b", MODEL).digest == read_bytes(paths["b"], "b").digest
    assert loaded.kept == {"c", "b"}
    memory = loaded.memory
    assert (memory.names, memory.kept) == (3, 2)
    assert memory.events == {"loaded": 3, "unloaded": 0, "evicted": 2, "reloaded": 1, "failed": 0}
    loaded.unload("a", MODEL)
    with pytest.raises(UnknownModel, match="'a' is not served here") as caught:
        loaded.find("a", MODEL)
    assert caught.value.status is Status.NOT_FOUND


def test_what_requests_have_stays_also_when_its_name_is_gone(paths: dict[str, Path]) -> None:
    loaded = byte_adapters(2)
    for name in "ab":
        loaded.load(name, paths[name], MODEL)
    requests = [loaded.find("a", MODEL), loaded.find("b", MODEL)]
    loaded.unload("b", MODEL)
    with pytest.raises(AdapterMemoryFull, match=r"room for 2 of 10 bytes, and requests have them all"):
        loaded.load("c", paths["c"], MODEL)
    assert [info.name for info in loaded.all] == ["a"] and requests[1].weights == b"weights of b"
    requests.pop()
    loaded.load("c", paths["c"], MODEL)
    assert loaded.kept == {"a", "c"} and loaded.find("a", MODEL) is requests[0]
    write_bytes(paths["d"], "other weights")
    loaded.load("a", paths["d"], MODEL, replace=True)
    assert loaded.kept == {"a"}, "the old weights of a have a request, so c gave way"
    assert loaded.find("a", MODEL).weights == b"other weights" and requests[0].weights == b"weights of a"


@pytest.mark.parametrize("change", ["other bytes", "gone"])
def test_a_directory_that_has_changed_is_not_taken_for_what_was_loaded(paths: dict[str, Path], change: str) -> None:
    loaded = byte_adapters(1)
    loaded.load("a", paths["a"], MODEL)
    loaded.load("b", paths["b"], MODEL)
    if change == "gone":
        (paths["a"] / "weights").unlink()
    else:
        write_bytes(paths["a"], "other weights")
    with pytest.raises(AdapterError, match="no weights|has other weights now than those that were loaded"):
        loaded.find("a", MODEL)
    assert loaded.memory.events["failed"] == 1
    write_bytes(paths["a"], "third weights")
    with pytest.raises(InvalidRequest, match="load_inplace"):
        loaded.load("a", paths["a"], MODEL)
    loaded.load("a", paths["a"], MODEL, replace=True)
    assert loaded.find("a", MODEL).weights == b"third weights"


class SlowFiles:
    """Reads that wait until they are let go, and say when they have begun."""

    def __init__(self) -> None:
        self.begun, self.go_on = threading.Semaphore(0), threading.Event()
        self.num_reads = 0
        self.held = False

    def read(self, directory: Path, name: str) -> Adapter:
        self.num_reads += 1
        if self.held:
            self.begun.release()
            assert self.go_on.wait(WAIT_S)
        return read_bytes(directory, name)


def test_of_two_loads_of_one_name_one_wins_and_the_other_is_refused(paths: dict[str, Path]) -> None:
    files = SlowFiles()
    loaded = LoadedAdapters(files.read, num_bytes=10, limit_bytes=20)
    files.held = True
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(loaded.load, "a", paths["a"], MODEL)
        assert files.begun.acquire(timeout=WAIT_S)
        for replace in (False, True):
            with pytest.raises(ChangeUnderWay, match="an adapter 'a' is being loaded"):
                loaded.load("a", paths["b"], MODEL, replace=replace)
        with pytest.raises(ChangeUnderWay, match="being loaded"):
            loaded.unload("a", MODEL)
        with pytest.raises(UnknownModel):
            loaded.find("a", MODEL)
        files.go_on.set()
        first.result(WAIT_S)
    assert files.num_reads == 1 and loaded.find("a", MODEL).weights == b"weights of a"
    loaded.unload("a", MODEL)
    assert loaded.memory.names == loaded.memory.kept == 0


def test_requests_that_need_one_adapter_share_its_read(paths: dict[str, Path]) -> None:
    """And a name that is unloaded meanwhile is not brought back by it."""
    files = SlowFiles()
    loaded = LoadedAdapters(files.read, num_bytes=10, limit_bytes=10)
    loaded.load("a", paths["a"], MODEL)
    loaded.load("b", paths["b"], MODEL)
    files.held = True
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(loaded.find, "a", MODEL) for _ in range(4)]
        assert files.begun.acquire(timeout=WAIT_S)
        with pytest.raises(AdapterMemoryFull):
            loaded.load("c", paths["c"], MODEL)
        loaded.unload("a", MODEL)
        files.go_on.set()
        found = []
        for one in asked:
            try:
                found.append(one.result(WAIT_S))
            except UnknownModel:  # a thread that began after the unload
                continue
    assert found and {adapter.weights for adapter in found} == {b"weights of a"}
    assert files.num_reads == 3 and loaded.kept == frozenset()


def test_a_name_that_is_loaded_anew_does_not_get_the_weights_that_are_being_read_for_another(
    paths: dict[str, Path],
) -> None:
    files = SlowFiles()
    loaded = LoadedAdapters(files.read, num_bytes=10, limit_bytes=20)
    for name in "abc":
        loaded.load(name, paths[name], MODEL)
    files.held = True
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        before = pool.submit(loaded.find, "a", MODEL)
        assert files.begun.acquire(timeout=WAIT_S)
        files.held = False
        loaded.load("a", paths["d"], MODEL, replace=True)
        loaded.find("b", MODEL)  # there is room for it and what is being read, so the new weights give way
        assert loaded.kept == {"b"}
        files.held = True
        after = pool.submit(loaded.find, "a", MODEL)
        concurrent.futures.wait([after], 0.1)  # it has looked whether somebody reads already, or will read by itself
        files.go_on.set()
        assert before.result(WAIT_S).weights == b"weights of a"
        assert after.result(WAIT_S).weights == b"weights of d"


def test_a_read_that_fails_changes_nothing_and_its_room_is_given_back(paths: dict[str, Path], tmp_path: Path) -> None:
    loaded = byte_adapters(1)
    loaded.load("a", paths["a"], MODEL)
    (tmp_path / "empty").mkdir()
    for _ in range(3):
        with pytest.raises(AdapterError):
            loaded.load("a", tmp_path / "empty", MODEL, replace=True)
    assert loaded.find("a", MODEL).weights == b"weights of a"
    with pytest.raises(AdapterError, match="is no directory"):
        loaded.load("b", tmp_path / "absent", MODEL)
    loaded.load("b", paths["b"], MODEL)


def test_ten_thousand_loads_leave_nothing(paths: dict[str, Path]) -> None:
    loaded = byte_adapters(3)
    for number in range(10_000):
        loaded.load("many", paths["abcd"[number % 4]], MODEL, replace=number > 0)
        if number % 7 == 0:
            loaded.find("many", MODEL)
    assert len(loaded._held) <= 3 and len(loaded._kept) == len(loaded._known) == 1
    assert not loaded._loading and not loaded._reloads
