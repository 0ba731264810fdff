"""The step log of a running engine: every time by hand, nothing lost in silence, and no file harmed."""

import logging
import math
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_parts import Fakes

from jaxserve import LLM
from jaxserve.api import SamplingParams
from jaxserve.engine import Engine, ModelInfo
from jaxserve.engine.observers import EndedStep, StepTimes
from jaxserve.engine.step_log import StepLogWriter, check_step_log, replica_path
from jaxserve.errors import ConfigError
from jaxserve.sched import InFlight, StepPlan, StepResult, create_scheduler
from jaxserve.sched.record import LogHeader, StepLog, read_header, read_records
from jaxserve.testing import ByteTokenizer, FakeRunner, ManualClock, make_limits

WAIT_S = 120.0  # for anything that must happen: far more than a busy machine takes
LIMITS = make_limits()
HEADER = LogHeader(limits=LIMITS, model="fake", policy="fcfs", vocab_size=259)
PATIENT = StepTimes(1.0, 1.0, 1.0, 1.0, 1.0, math.nan, 1.0)
ROOT = Path(__file__).parents[2]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Messages at WARNING or above. Another test may have set the package's logger up for a terminal."""
    monkeypatch.setattr(logging.getLogger("jaxserve"), "propagate", True)
    with caplog.at_level(logging.WARNING, "jaxserve"):
        yield caplog


def _plan(step_id: int) -> StepPlan:
    return StepPlan(step_id=step_id, decode_rows=(0, 1), decode_positions=(step_id, 4))


def _ended(plan: StepPlan) -> EndedStep:
    return EndedStep(plan, LIMITS, StepResult(token_ids=[7, 8]), PATIENT)


def _writer(path: Path, *, capacity: int = 8, patience_s: float = 0.05) -> StepLogWriter:
    return StepLogWriter(path, HEADER, start_s=0.0, capacity=capacity, patience_s=patience_s)


def _engine(runner, log: Path | StepLogWriter, clock: ManualClock | None = None, scheduler=None) -> Engine:
    clock = clock or ManualClock(100.0)
    writer = log if isinstance(log, StepLogWriter) else StepLogWriter(log, HEADER, start_s=clock())
    return Engine(
        runner=runner,
        scheduler=scheduler or create_scheduler("fcfs", runner.limits, clock=clock),
        tokenizer=ByteTokenizer(),
        model=ModelInfo(name="fake", vocab_size=259, max_model_len=64, eos_token_ids=(257,)),
        clock=clock,
        observers=[writer],
    )


class Device:
    """A device of its own: a step begins when it was launched and the one before has ended, and takes `step_s`."""

    def __init__(self, clock: ManualClock, launch_s: float, step_s: float) -> None:
        self.limits = LIMITS
        self.free_s = 0.0
        self.clock = clock
        self._inner = FakeRunner(LIMITS, vocab_size=259)
        self._launch_s = launch_s
        self._step_s = step_s

    def dispatch(self, plan: StepPlan) -> InFlight:
        handle = self._inner.dispatch(plan)
        self.clock.advance(self._launch_s)
        self.free_s = max(self.free_s, self.clock()) + self._step_s
        return _OnDevice(self.clock, handle, self.free_s)


class _OnDevice:
    def __init__(self, clock: ManualClock, handle: InFlight, ready_s: float) -> None:
        self._clock, self._handle, self._ready_s = clock, handle, ready_s

    def result(self) -> StepResult:
        self._clock.advance(max(0.0, self._ready_s - self._clock()))
        return self._handle.result()


class SlowScheduler:
    """Planning takes `plan_s`, taking in a result `commit_s`."""

    def __init__(self, clock: ManualClock, plan_s: float, commit_s: float) -> None:
        self._inner = create_scheduler("fcfs", LIMITS, clock=clock)
        self._clock, self._plan_s, self._commit_s = clock, plan_s, commit_s

    def __getattr__(self, name: str):
        return getattr(self._inner, name)

    def schedule(self):
        plan = self._inner.schedule()
        self._clock.advance(self._plan_s)
        return plan

    def commit(self, plan, result):
        self._clock.advance(self._commit_s)
        return self._inner.commit(plan, result)


def test_times_of_a_step_where_the_device_limits(tmp_path: Path) -> None:
    clock = ManualClock(100.0)
    engine = _engine(Device(clock, 0.25, 4.0), tmp_path / "log", clock, SlowScheduler(clock, 0.5, 0.125))
    engine.submit(engine.prepare("abc", SamplingParams(max_tokens=4, temperature=0.0)), lambda update: None)
    engine.run_until_idle()
    engine.stop()
    records = list(read_records(tmp_path / "log"))
    assert [r.plan.step_id for r in records] == [0, 1, 2, 3]
    assert {(r.schedule_ms, r.pack_ms, r.device_ms, r.commit_ms) for r in records} == {(500.0, 250.0, 4000.0, 125.0)}
    # The first is planned at 0, launched at 0.75 and read at 4.75; the next begins at 0.75, the one after it at 4.875.
    assert [r.start_s for r in records[:3]] == [0.0, 0.75, 4.875]
    assert [r.wait_ms for r in records[:2]] == [3250.0, 3125.0]


def test_times_of_a_step_where_the_host_limits(tmp_path: Path) -> None:
    """The device is done long before the host looks: its time cannot be known better, and `wait_ms` says so."""
    clock = ManualClock(100.0)
    engine = _engine(Device(clock, 0.25, 0.125), tmp_path / "log", clock, SlowScheduler(clock, 0.5, 0.125))
    engine.submit(engine.prepare("abc", SamplingParams(max_tokens=4, temperature=0.0)), lambda update: None)
    engine.run_until_idle()
    engine.stop()
    records = list(read_records(tmp_path / "log"))
    assert {r.wait_ms for r in records[:3]} == {0.0}
    assert [r.device_ms for r in records[:3]] == [
        750.0,
        875.0,
        875.0,
    ]  # until the host had planned, launched, committed
    assert {(r.schedule_ms, r.pack_ms, r.commit_ms) for r in records} == {(500.0, 250.0, 125.0)}


def test_records_are_the_steps(tmp_path: Path) -> None:
    runner = FakeRunner(LIMITS, vocab_size=259, mode="context")
    engine = _engine(runner, tmp_path / "log")
    streamed: dict[str, list[int]] = {}
    for number in range(9):
        request = engine.prepare("x" * (3 * number), SamplingParams(max_tokens=5 + number, ignore_eos=True))
        tokens = streamed[request.request_id] = []
        engine.submit(request, lambda update, tokens=tokens: tokens.extend(update.token_ids))
    engine.run_until_idle()
    engine.stop()
    records = list(read_records(tmp_path / "log"))
    assert [r.plan for r in records] == runner.plans
    assert all(r.bucket == LIMITS.find_bucket(r.plan.num_tokens, r.plan.num_rows, r.plan.decode_only) for r in records)
    drawn = [token for r in records for token in r.token_ids]
    assert len(drawn) >= sum(map(len, streamed.values())) == sum(range(5, 14))
    with StepLog(tmp_path / "log") as log:
        assert len(list(log)) == len(records)
        assert log.end is not None and (log.end.records, log.end.dropped) == (len(records), 0)


@pytest.mark.parametrize("where", ["dispatch", "result"])
def test_an_engine_that_dies_leaves_a_whole_log(tmp_path: Path, where) -> None:
    runner = FakeRunner(LIMITS, vocab_size=259, fail_at=(3, where))
    engine = _engine(runner, tmp_path / "log")
    engine.submit(engine.prepare("abc", SamplingParams(max_tokens=20, ignore_eos=True)), lambda update: None)
    with pytest.raises(RuntimeError, match="injected"):
        engine.run_until_idle()
    with StepLog(tmp_path / "log") as log:
        # A device that fails at dispatch is not asked for the step before.
        assert [r.plan.step_id for r in log] == ([0, 1] if where == "dispatch" else [0, 1, 2])
        assert log.end is not None


def test_only_its_owner_reads_it_and_none_is_written_over(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    (tmp_path / "log.jsonl").write_text("mine")
    before = os.umask(0)
    try:
        writers = [_writer(tmp_path / "log.jsonl") for _ in range(2)]
    finally:
        os.umask(before)
    for writer in writers:
        writer.close()
    assert [w.path.name for w in writers] == ["log.2.jsonl", "log.3.jsonl"]
    assert {stat.S_IMODE(w.path.stat().st_mode) for w in writers} == {0o600}
    assert (tmp_path / "log.jsonl").read_text() == "mine"
    assert read_header(writers[1].path) == HEADER
    first, second = said.messages
    assert f"{tmp_path / 'log.jsonl'} exists, so the steps of this run are in {tmp_path / 'log.2.jsonl'}" in first
    assert str(tmp_path / "log.3.jsonl") in second


def test_what_cannot_be_written_is_told_before_anything_is_loaded(tmp_path: Path, monkeypatch) -> None:
    fakes = Fakes().install(monkeypatch.setattr)
    with pytest.raises(ConfigError, match=r"runtime.step_log is .*absent.* no directory"):
        LLM.from_config(None, overrides={"runtime.step_log": str(tmp_path / "absent" / "log")})
    assert fakes.config is None
    check_step_log(str(tmp_path / "log"))
    with pytest.raises(ConfigError, match="cannot write"):
        _writer(tmp_path / "absent" / "log")


class _Blocked:
    """A file on a disk that stands still until it is released; then it fails, if it shall."""

    def __init__(self, inner, error: OSError | None = None) -> None:
        self.released = threading.Event()
        self.entered = threading.Event()
        self._inner = inner
        self._error = error

    def write(self, line: bytes) -> int:
        self.entered.set()
        assert self.released.wait(WAIT_S)
        if self._error is not None:
            raise self._error
        return self._inner.write(line)

    def flush(self) -> None:
        self._inner.flush()

    def close(self) -> None:
        self._inner.close()


def _block(writer: StepLogWriter, error: OSError | None = None) -> _Blocked:
    blocked = _Blocked(writer._file, error)
    writer._file = blocked  # type: ignore[assignment]
    return blocked


def test_a_disk_that_stands_still_costs_one_wait_and_counted_steps(
    tmp_path: Path, said: pytest.LogCaptureFixture
) -> None:
    writer = _writer(tmp_path / "log", capacity=2)
    disk = _block(writer)
    writer.note(_ended(_plan(0)))
    assert disk.entered.wait(WAIT_S)
    for step_id in (1, 2, 3, 4, 5):  # two wait in the queue
        writer.note(_ended(_plan(step_id)))
    assert len(said.messages) == 1 and "steps are missing" in said.messages[0]
    disk.released.set()
    writer._queue.put(None)  # everything before it is written
    writer._thread.join(WAIT_S)
    found = list(read_records(tmp_path / "log"))
    assert [(r.plan.step_id, r.missing) for r in found] == [(0, 0), (1, 0), (2, 0)]
    with StepLog(tmp_path / "log") as log:
        list(log)
        assert log.end is not None and (log.end.records, log.end.dropped) == (3, 3)
    writer.close()
    assert "3 steps, and 3 are missing" in said.messages[-1]


def test_a_gap_is_in_the_record_after_it(tmp_path: Path) -> None:
    writer = _writer(tmp_path / "log", capacity=1)
    disk = _block(writer)
    writer.note(_ended(_plan(0)))
    assert disk.entered.wait(WAIT_S)
    for step_id in (1, 2, 3):
        writer.note(_ended(_plan(step_id)))
    disk.released.set()
    while not writer._queue.empty():  # the writing thread empties it
        pass
    writer.note(_ended(_plan(4)))
    writer.note(_ended(_plan(5)))
    writer.close()
    assert [(r.plan.step_id, r.missing) for r in read_records(tmp_path / "log")] == [(0, 0), (1, 0), (4, 2), (5, 0)]


def test_a_slow_disk_makes_the_loop_wait(tmp_path: Path) -> None:
    writer = _writer(tmp_path / "log", capacity=1, patience_s=WAIT_S)
    disk = _block(writer)
    writer.note(_ended(_plan(0)))
    assert disk.entered.wait(WAIT_S)
    threading.Timer(0.05, disk.released.set).start()
    for step_id in range(1, 50):
        writer.note(_ended(_plan(step_id)))
    writer.close()
    assert [r.plan.step_id for r in read_records(tmp_path / "log")] == list(range(50))


def test_a_full_disk_ends_the_log_and_not_the_engine(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner(LIMITS, vocab_size=259)
    engine = _engine(runner, writer := StepLogWriter(tmp_path / "log", HEADER, start_s=100.0))
    _block(writer, OSError(28, "No space left on device")).released.set()
    updates = []
    engine.submit(engine.prepare("abc", SamplingParams(max_tokens=9, ignore_eos=True)), updates.append)
    engine.run_until_idle()
    assert updates[-1].last and updates[-1].error is None
    engine.stop()
    assert len([m for m in said.messages if "No space left" in m]) == 1
    assert f"0 steps, and {runner.num_steps} are missing" in said.messages[-1]


def test_a_defect_of_the_log_does_not_end_the_engine(tmp_path: Path, said: pytest.LogCaptureFixture) -> None:
    writer = _writer(tmp_path / "log")
    writer.note(_ended(StepPlan(step_id=0, decode_rows=tuple(range(99)), decode_positions=(1,) * 99)))
    writer.note(_ended(_plan(1)))
    writer.close()
    assert "step 0 was run in no bucket" in said.messages[0]
    assert "0 steps, and 2 are missing" in said.messages[-1]


def test_a_file_for_each_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Fakes().install(monkeypatch.setattr)
    path = tmp_path / "steps.jsonl"
    overrides = {"runtime.step_log": str(path), "parallel.data": 2, "route.policy": "round_robin"}
    llm = LLM.from_config(None, overrides=overrides)
    llm.generate(["ab", "cd", "ef"], SamplingParams(max_tokens=4), use_tqdm=False)
    llm._engine.stop()
    files = [Path(replica_path(str(path), k, 2)) for k in range(2)]
    assert [f.name for f in files] == ["steps.replica0.jsonl", "steps.replica1.jsonl"]
    assert not path.exists()
    assert [read_header(f).replica for f in files] == [0, 1]
    assert [sum(len(r.plan.setups) for r in read_records(f)) for f in files] == [2, 1]


def test_the_end_of_the_program_ends_the_log(tmp_path: Path) -> None:
    """`jaxserve run` answers its prompts and leaves; nobody stops the engine."""
    path = tmp_path / "steps.jsonl"
    command = [sys.executable, str(ROOT / "tests" / "fake_parts.py"), "--set", f"runtime.step_log={path}"]
    done = subprocess.run(
        [*command, "--prompt", "abc", "--max-tokens", "5", "-v"],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"steps are written to {path}; it holds the prompts" in done.stderr
    with StepLog(path) as log:
        assert log.header.model and log.header.policy == "fcfs" and log.header.vocab_size == 259
        assert log.header.settings["model.dtype"] == '"auto"'
        assert len(list(log)) == 5
        assert log.end is not None
