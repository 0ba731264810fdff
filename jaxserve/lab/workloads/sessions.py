"""Conversations of an agent: each turn's prompt is the whole conversation so far, and new text.

Shapes of sessions are made here, and their turns merged by time. Answers are not: a part of a later prompt names the
answer that it repeats, and the code that runs the shapes fills it in.

Turns come at times fixed beforehand: a session waits for an answer as long as it would take at `output_pace`, then
thinks. On an engine slower than that, turns overlap more than they would with a real agent.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.samples import Part, Shape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The behaviour of agents. Turns, new text, answers and think times are drawn around the means given here.

    Attributes:
      system_len: tokens at the start of every session, the same for all; 0: none.
      turns: mean of a geometric distribution, at least 1.
      input_len: new tokens of each turn, mean of an exponential distribution, at least 1.
      output_len: tokens of each answer, likewise.
      think_s: seconds between an answer and the next turn, mean of an exponential distribution.
      output_pace: tokens a second at which answers are supposed to come.
      max_len: tokens of a prompt and its answer; the session ends before a turn that would need more.
    """

    system_len: int = 512
    turns: float = 6.0
    input_len: int = 256
    output_len: int = 128
    think_s: float = 8.0
    output_pace: float = 40.0
    max_len: int = 32768

    def __post_init__(self) -> None:
        for name in ("input_len", "output_len", "max_len", "turns"):
            if not 1 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} of sessions is {getattr(self, name)}, but must be 1 or more")
        for name in ("system_len", "think_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} of sessions is {getattr(self, name)}, but must be 0 or more")
        if not 0 < self.output_pace < math.inf:
            raise ConfigError(f"output_pace of sessions is {self.output_pace}, but must be more than 0 tokens / s")
        if self.system_len + 2 > self.max_len:
            raise ConfigError(
                f"sessions of {self.max_len} tokens have no room after {self.system_len} tokens of system"
            )


def session_turns(options: SessionOptions, starts_s: Iterator[float], seed: int) -> Iterator[Shape]:
    """The turns of sessions that start at `starts_s`, which never falls, in the order of their times.

    Holds the sessions that are open and no others. Endless where `starts_s` is.
    """
    waiting: list[tuple[float, int, Iterator[Shape], Shape]] = []  # the number breaks ties, so no iterator is compared
    keys = itertools.count(1)  # 0 is the beginning that all share
    sessions = ((start_s, number) for number, start_s in enumerate(starts_s))
    upcoming = next(sessions, None)
    while waiting or upcoming is not None:
        while upcoming is not None and (not waiting or upcoming[0] <= waiting[0][0]):
            start_s, number = upcoming
            turns = _session(options, start_s, number, np.random.default_rng((seed, number)), keys)
            heapq.heappush(waiting, (start_s, number, turns, next(turns)))
            upcoming = next(sessions, None)
        _, number, turns, shape = waiting[0]
        yield shape
        following = next(turns, None)
        if following is None:
            heapq.heappop(waiting)
        else:
            assert following.arrival_s is not None
            heapq.heapreplace(waiting, (following.arrival_s, number, turns, following))


def _session(
    options: SessionOptions, start_s: float, number: int, rng: np.random.Generator, keys: Iterator[int]
) -> Iterator[Shape]:
    """One turn at least; the first has as much new text as there is room for."""
    said = [Part(0, options.system_len)] if options.system_len else []
    length, time_s = options.system_len, start_s
    for turn in range(int(rng.geometric(1.0 / options.turns))):
        new_len, output_len = _draw(options.input_len, rng), _draw(options.output_len, rng)
        if turn == 0:
            new_len = min(new_len, options.max_len - length - 1)
            output_len = min(output_len, options.max_len - length - new_len)
        if length + new_len + output_len > options.max_len:
            return
        said.append(Part(next(keys), new_len))
        answer = Part(next(keys), output_len, answer=True)
        yield Shape(parts=tuple(said), output_len=output_len, arrival_s=time_s, session=number, answer_key=answer.key)
        said.append(answer)
        length += new_len + output_len
        time_s += output_len / options.output_pace + float(rng.exponential(options.think_s))


def _draw(mean: int, rng: np.random.Generator) -> int:
    return max(1, round(float(rng.exponential(mean))))
