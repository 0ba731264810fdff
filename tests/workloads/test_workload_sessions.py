"""Conversations: what turns share, when they come, where they end."""

import itertools

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.datasets import DatasetOptions, make_shapes
from jaxserve.lab.workloads.samples import Shape
from jaxserve.lab.workloads.sessions import SessionOptions, session_turns


def by_session(shapes: list[Shape]) -> dict[int, list[Shape]]:
    sessions: dict[int, list[Shape]] = {}
    for shape in shapes:
        assert shape.session is not None
        sessions.setdefault(shape.session, []).append(shape)
    return sessions


def turns(options: SessionOptions, count: int, seed: int = 0) -> list[Shape]:
    return list(session_turns(options, iter(range(count)), seed))


def test_a_turn_is_what_was_said_before_and_something_new() -> None:
    sessions = by_session(turns(SessionOptions(system_len=50, max_len=5000), 200))
    assert len(sessions) == 200
    for session in sessions.values():
        assert session[0].parts[0] == (0, 50, False)
        for before, after in itertools.pairwise(session):
            answer, new = after.parts[-2:]
            assert after.parts[:-2] == before.parts
            assert (answer.key, answer.length, answer.answer) == (before.answer_key, before.output_len, True)
            assert not new.answer
        assert all(shape.prompt_len + shape.output_len <= 5000 for shape in session)


def test_sessions_share_their_beginning_and_nothing_else() -> None:
    keys = [part.key for session in by_session(turns(SessionOptions(), 300)).values() for part in session[-1].parts]
    assert keys.count(0) == 300
    rest = [key for key in keys if key != 0]
    assert len(rest) == len(set(rest))
    assert all(shape.parts[0].key != 0 for shape in turns(SessionOptions(system_len=0), 20))


def test_turns_come_in_the_order_of_time_after_answer_and_thought() -> None:
    options = SessionOptions(think_s=5.0, output_pace=50.0, max_len=10**6)
    shapes = turns(options, 2000)
    times = [shape.arrival_s for shape in shapes]
    assert times == sorted(times)
    thoughts = [
        after.arrival_s - before.arrival_s - before.output_len / 50.0
        for session in by_session(shapes).values()
        for before, after in itertools.pairwise(session)
    ]
    assert min(thoughts) >= -1e-9
    assert np.mean(thoughts) == pytest.approx(5.0, rel=0.05)


def test_means_are_those_asked_for() -> None:
    options = SessionOptions(turns=4.0, input_len=100, output_len=60, max_len=10**6)
    sessions = by_session(turns(options, 4000))
    assert np.mean([len(session) for session in sessions.values()]) == pytest.approx(4.0, rel=0.05)
    assert np.mean([s.output_len for session in sessions.values() for s in session]) == pytest.approx(60, rel=0.05)
    assert np.mean([s.parts[-1].length for session in sessions.values() for s in session]) == pytest.approx(
        100, rel=0.05
    )


def test_a_session_ends_before_it_is_too_long() -> None:
    short = SessionOptions(system_len=90, input_len=50, output_len=50, turns=1000.0, max_len=120)
    sessions = by_session(turns(short, 50))
    assert len(sessions) == 50  # one turn at least, cut to what there is room for
    assert max(s.prompt_len + s.output_len for session in sessions.values() for s in session) <= 120


def test_equal_seeds_are_equal_and_endless_starts_are_read_as_needed() -> None:
    endless = session_turns(SessionOptions(), map(float, itertools.count()), 7)
    first = list(itertools.islice(endless, 100))
    assert first == list(itertools.islice(session_turns(SessionOptions(), map(float, itertools.count()), 7), 100))
    assert first != list(itertools.islice(session_turns(SessionOptions(), map(float, itertools.count()), 8), 100))


def test_the_dataset_agent() -> None:
    options = DatasetOptions(name="agent", num_prompts=400, prefix_len=64, session_rate=2.0, turns=3.0, seed=1)
    shapes = make_shapes(options)
    assert len(shapes) == 400
    assert all(shape.parts[0] == (0, 64, False) for shape in shapes)
    starts = [session[0].arrival_s for session in by_session(shapes).values()]
    assert np.mean(np.diff(starts)) == pytest.approx(0.5, rel=0.25)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"turns": 0.5}, "turns"),
        ({"output_len": 0}, "output_len"),
        ({"think_s": -1.0}, "think_s"),
        ({"output_pace": 0.0}, "output_pace"),
        ({"system_len": 99, "max_len": 100}, "no room"),
    ],
)
def test_sessions_that_cannot_be(values: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SessionOptions(**values)
