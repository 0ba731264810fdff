"""What the kernel scripts share: turns on a device, timing, and files that are never half written."""

import contextlib
import fcntl
import json
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import kernel_runs
import pytest
from kernel_runs import Turns, find_case, seconds_per_call, write_results

from jaxserve.kernels.cases import REAL, small
from jaxserve.testing import ManualClock

WAIT_S = 120.0


def test_turns_alone_excludes_all_and_comes_before_new_sharers(tmp_path, monkeypatch):
    events: list[str] = []
    wanting = threading.Semaphore(0)  # those who have said that they want it alone
    held = kernel_runs._held

    @contextlib.contextmanager
    def noted(path, mode):
        with held(path, mode):
            if path.name == "wanted" and mode == fcntl.LOCK_SH:
                wanting.release()
            yield

    monkeypatch.setattr(kernel_runs, "_held", noted)
    inside, go = threading.Event(), threading.Event()

    def first_sharer() -> None:
        with Turns(tmp_path).shared():
            inside.set()
            assert go.wait(WAIT_S)
            events.append("first sharer leaves")

    def alone(name: str) -> None:
        with Turns(tmp_path).alone():
            events.append(f"{name} enters")
            time.sleep(0.05)
            events.append(f"{name} leaves")

    def late_sharer() -> None:
        with Turns(tmp_path).shared():
            events.append("late sharer")

    def start(target, *args: str) -> threading.Thread:
        thread = threading.Thread(target=target, args=args)
        thread.start()
        if target is alone:
            assert wanting.acquire(timeout=WAIT_S)
        return thread

    threads = [start(first_sharer)]
    assert inside.wait(WAIT_S)
    threads += [start(alone, "a"), start(late_sharer), start(alone, "b")]
    assert events == []
    go.set()
    for thread in threads:
        thread.join(WAIT_S)
    assert events[0] == "first sharer leaves" and events[-1] == "late sharer"
    assert events[1:5] in (
        ["a enters", "a leaves", "b enters", "b leaves"],
        ["b enters", "b leaves", "a enters", "a leaves"],
    )


def test_sharers_are_inside_together(tmp_path):
    together = threading.Barrier(2, timeout=WAIT_S)

    def share() -> None:
        with Turns(tmp_path).shared():
            together.wait()

    threads = [threading.Thread(target=share) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not together.broken


def test_turns_are_given_back_after_an_error(tmp_path):
    turns = Turns(tmp_path)
    for turn in (turns.shared, turns.alone):
        with pytest.raises(ValueError, match="inside"), turn():
            raise ValueError("inside")
    with turns.alone():
        pass


def test_seconds_per_call_divides_by_the_calls_of_a_launch(monkeypatch):
    x, clock = jnp.ones(8), ManualClock()
    monkeypatch.setattr(kernel_runs, "time", SimpleNamespace(perf_counter=clock))

    def launch():
        clock.advance(0.02)
        return x

    assert seconds_per_call(launch, 4, rounds=3) == pytest.approx(0.005)


def test_case_names_lead_back_to_cases():
    name = "gpt-oss/busy/128/float8_e4m3fn"
    assert find_case(name) is REAL[name] and find_case(f"{name}/small") == small(REAL[name])


def test_results_are_written_as_a_whole(tmp_path):
    path = tmp_path / "folder" / "results.json"
    write_results(path, [1], commit="abc", device="a card")
    found = json.loads(path.read_text())
    assert found["results"] == [1] and found["about"]["device"] == "a card" and found["about"]["commit"] == "abc"
    with pytest.raises(TypeError):
        write_results(path, object())
    assert json.loads(path.read_text()) == found
