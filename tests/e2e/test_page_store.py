"""A store behind host memory: a server that starts anew finds the pages of the one before."""

from pathlib import Path
from typing import Any

import pytest
from shelf_connector import SHELVES
from whole import DEMO, always_loads, build, narrow, run, scheduler

from jaxserve.api import SamplingParams
from jaxserve.engine import CacheControl
from jaxserve.runtime.compile_events import CompileCounter

PAGE = DEMO["cache__page_size"]
HOST = {"cache__host_bytes": 32 << 20}
FEW = 16  # pages
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1)
# Together they have more pages than the device.
ASKED: list[tuple[Any, SamplingParams]] = [([3 + (i * k) % 400 for i in range(100 + k)], GREEDY) for k in range(3, 6)]


def ask(engine: Any) -> tuple[list[tuple], int]:
    """The answers one by one, and how many tokens of all prompts were found."""
    results = [run(engine, [one])[0][0] for one in ASKED]
    assert [result.error for result in results] == [None] * len(results)
    prompts = [result.prompt for result in results if result.prompt is not None]
    assert len(prompts) == len(results)
    found = sum(prompt.num_cached_tokens for prompt in prompts)
    return [(result.token_ids, result.logprobs) for result in results], found


def directory(path: Path) -> dict[str, Any]:
    """Settings of a store of files."""
    path.mkdir(mode=0o700)
    return {
        "store__kind": "file",
        "store__location": str(path),
        "store__wait_s": 60.0,
        "store__max_bytes": 1 << 28,
    }


def leave(engine: Any) -> None:
    """As a server ends: what the store lacks is brought there."""
    engine.start()
    engine.drain(60.0)
    engine.export(60.0)
    engine.stop()


def patient(**settings: Any) -> Any:
    """An engine with few pages, which loads whatever that takes."""
    engine = narrow(build("demo", **(DEMO | HOST | settings)), FEW)
    always_loads(engine)
    return engine


@pytest.mark.parametrize("layout", [{}, pytest.param({"parallel__tensor": 2}, marks=pytest.mark.slow)])
def test_a_restart_finds_the_pages_and_computes_those_that_are_damaged(tmp_path: Path, layout: Any) -> None:
    store = directory(tmp_path / "pages") | layout
    first = patient(**store)
    answers, found = ask(first)
    assert found == 0
    leave(first)
    second = patient(**store)
    again, found = ask(second)
    assert again == answers
    full = sum((len(ids) - 1) // PAGE * PAGE for ids, _ in ASKED)
    assert found == full
    assert scheduler(second).memory.num_loaded_tokens == found
    second.stop()
    files = [path for path in (tmp_path / "pages" / "pages").rglob("*") if path.is_file()]
    assert len(files) >= full // PAGE
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    third = patient(**store)
    again, found = ask(third)
    assert again == answers and found == 0
    third.stop()


@pytest.mark.slow
def test_pages_of_another_size_are_other_pages(tmp_path: Path) -> None:
    store = directory(tmp_path / "pages")
    first = patient(**store)
    answers, _ = ask(first)
    first.stop()
    other = patient(**store, cache__page_size=32)
    again, found = ask(other)
    assert found == 0 and [ids for ids, _ in again] == [ids for ids, _ in answers]
    other.stop()


@pytest.mark.slow
def test_two_builds_side_by_side_never_take_each_others_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = directory(tmp_path / "pages")
    found: list[int] = []
    for version in ("1", "2", "1"):
        monkeypatch.setattr("jaxserve.assemble.__version__", version)
        engine = patient(**store)
        found.append(ask(engine)[1])
        leave(engine)
    full = sum((len(ids) - 1) // PAGE * PAGE for ids, _ in ASKED)
    assert found == [0, 0, full]


@pytest.mark.slow
def test_a_connector_of_somebody_else_serves_two_engines_and_a_flush_reaches_it(tmp_path: Path) -> None:
    SHELVES.clear()
    (tmp_path / "fleet").write_text("0123456789abcdef")
    settings = {
        "store__connector": "shelf_connector:ShelfThatForgets",
        "store__connector_options": {"shelf": "e2e"},
        "store__secret_file": str(tmp_path / "fleet"),
        "store__wait_s": 60.0,
    }
    first = patient(**settings)
    answers, found = ask(first)
    assert found == 0
    leave(first)
    compiles = CompileCounter()
    second = patient(**settings)
    started = compiles.count
    again, found = ask(second)
    full = sum((len(ids) - 1) // PAGE * PAGE for ids, _ in ASKED)
    assert again == answers and found >= 0.95 * full, (found, full)
    second.start()
    control = CacheControl(second)
    assert control.flush(None).pages > 0 and not SHELVES["e2e"]
    [state] = control.resize(14)
    assert state.grantable == 14 and state.host and state.store
    second.stop()
    prefix = scheduler(second).memory.prefix
    assert prefix is not None and not prefix._by_page and compiles.count == started


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [2, 8], ids=["tensor 2", "tensor 8, heads copied"])
def test_canonical_pages_are_for_engines_with_other_devices_and_kernels(tmp_path: Path, tensor: int) -> None:
    store = directory(tmp_path / "pages") | {"store__pages": "canonical", "model__dtype": "float32"}
    first = patient(**store, parallel__tensor=tensor)
    answers, _ = ask(first)
    leave(first)
    other = patient(**store, kernels__paged_attention="xla_batched")
    again, found = ask(other)
    full = sum((len(ids) - 1) // PAGE * PAGE for ids, _ in ASKED)
    assert found >= 0.95 * full and scheduler(other).memory.num_loaded_tokens == found, (found, full)
    assert [ids for ids, _ in again] == [ids for ids, _ in answers]
    other.stop()
