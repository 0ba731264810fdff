"""Shapes that are built while the engine answers, on a real checkpoint: the same tokens, cold and warm."""

import logging
from pathlib import Path

import pytest
from whole import FIXTURES, POOL, build, run

from jaxserve.api import SamplingParams
from jaxserve.engine import Engine
from jaxserve.runtime.compile import Compiler
from jaxserve.runtime.compile_events import CompileCounter
from jaxserve.sched import BucketCounts

pytestmark = pytest.mark.usefixtures("store_alone")

SHAPES = {
    "model__skip_tokenizer": True,
    "model__dtype": "float32",
    "model__max_len": 64,
    "cache__num_pages": 24,
    "runtime__token_buckets": [8, 40],
    "runtime__row_buckets": [1, 8],
}
ASKED = [
    ([3 + i, 7, 11 + i, 2] * (1 + 2 * i), SamplingParams(max_tokens=10, ignore_eos=True, temperature=t, seed=5))
    for i, t in enumerate((0.0, 1.0, 0.7))
]


def _build(**more) -> Engine:
    engine = build(FIXTURES / "llama", **{**SHAPES, **more})
    assert isinstance(engine, Engine)
    return engine


def _tokens(engine: Engine, stagger: int = 0) -> list[list[int]]:
    return [one.token_ids for request in run(engine, ASKED, stagger=stagger) for one in request]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """Of the steps of other tests, which have one shape of each kind."""
    return _tokens(build(FIXTURES / "llama", **POOL))


@pytest.mark.slow
def test_the_same_tokens_before_and_after_and_meanwhile(expected: list[list[int]], tmp_path: Path) -> None:
    engine = _build(runtime__compile_cache=str(tmp_path))
    later = engine._later
    assert later is not None and len(engine._runner.limits.buckets) == 3, "one stream, many streams, long prompts"
    counter = CompileCounter()
    assert later.wait(900), "a process of the lowest priority, on a machine that is busy"
    assert engine.stats[0].bucket_counts == BucketCounts(4, 0, 0)
    assert counter.count == 0, "the background's own compiles are no stalls"
    take, later.take = later.take, lambda: None  # the loop does not get them yet
    first = _tokens(engine)
    later.take = take  # in the middle of a run
    assert _tokens(engine, stagger=3) == expected == first
    assert len(engine._runner.limits.buckets) == 4
    assert {step.slots for step in engine.stats[0].steps()} == {1, 8, 40}
    assert counter.count == 0


@pytest.mark.slow
def test_a_warm_start_lowers_nothing_and_a_damaged_file_is_told(
    expected: list[list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"runtime__compile_cache": str(tmp_path), "runtime__background_buckets": False}
    _build(**settings)
    files = sorted(path for path in (tmp_path / "executables").iterdir() if not path.name.startswith("program-"))
    assert len(files) == 9 and not [f for f in files if f.suffix == ".part"]
    lowered: list[str] = []
    trace = Compiler._trace

    def note(self: Compiler, job):
        lowered.append(job.name)
        return trace(self, job)

    monkeypatch.setattr(Compiler, "_trace", note)
    assert _tokens(_build(**settings)) == expected
    assert lowered == []
    _build(**settings, cache__num_pages=25)
    assert len(lowered) == 9, "another program must not find these files"

    damaged = next(f for f in files if f.name.startswith("decode-1x1"))
    damaged.write_bytes(damaged.read_bytes()[:-50])
    monkeypatch.setattr(logging.getLogger("jaxserve"), "propagate", True)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        assert _tokens(_build(**settings)) == expected
    assert "decode-1x1" in caplog.text and "compiled anew" in caplog.text
