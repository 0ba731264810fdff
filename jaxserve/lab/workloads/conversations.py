"""More requests of the shape of a recorded trace: its conversations, drawn again and again.

A trace of an hour says how long prompts and answers are, how turns follow each other and what they share. A longer one
of the same shape has these conversations at other times: each draw is a recorded conversation with its gaps and
lengths, and with tokens of its own, but for the beginning that all conversations share.
"""

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from jaxserve.errors import ConfigError
from jaxserve.lab.workloads.samples import Shape

_SPREAD = 0x9E3779B1  # an odd number near 2**32 over the golden ratio, so that the keys of draws are far apart
_PLACE = 0x85EBCA6B  # another such number
_KEY_BITS = 0xFFFF_FFFF


def conversations_of(shapes: Iterable[Shape]) -> list[list[Shape]]:
    """The requests of a trace by conversation, each in the order of time.

    All of a trace have their first part in common (a system prompt); those that have the second in common, too, are a
    conversation. Raises ConfigError for a trace whose requests do not begin alike, or that has no times.
    """
    found: dict[int, list[Shape]] = {}
    first: int | None = None
    for shape in shapes:
        if shape.arrival_s is None:
            raise ConfigError("a request of the trace has no time, so nothing says how turns follow each other")
        first = shape.parts[0].key if first is None else first
        if shape.parts[0].key != first:
            raise ConfigError(
                f"requests of the trace begin with the parts {first} and {shape.parts[0].key}; what they have in "
                "common beyond the first tells conversations apart, so all must have that"
            )
        found.setdefault(shape.parts[1].key if len(shape.parts) > 1 else first, []).append(shape)
    return list(found.values())


def drawn_again(conversations: Sequence[Sequence[Shape]], rate: float, seed: int) -> Iterator[Shape]:
    """Requests without end, in the order of time: conversations drawn evenly, `rate` of them begin in a second.

    Those that begin together share nothing but the first part, even where they are the same recording. Raises
    ConfigError for a rate that is none.
    """
    if not 0 < rate < math.inf:
        raise ConfigError(f"{rate} conversations are to begin in a second; give a number above 0")
    rng = np.random.default_rng(seed)
    first = conversations[0][0].parts[0].key
    open_turns: list[tuple[float, int, int, Sequence[Shape]]] = []  # (time, draw, turn, its conversation)
    start_s = 0.0
    for draw in itertools.count(1):
        start_s += float(rng.exponential(1 / rate))
        while open_turns and open_turns[0][0] <= start_s:
            yield _next_turn(open_turns, first)
        turns = conversations[int(rng.integers(len(conversations)))]
        heapq.heappush(open_turns, (start_s, draw, 0, turns))


def _next_turn(open_turns: list[tuple[float, int, int, Sequence[Shape]]], first: int) -> Shape:
    time_s, draw, turn, turns = open_turns[0]
    shape = turns[turn]
    if turn + 1 == len(turns):
        heapq.heappop(open_turns)
    else:
        gap_s = (turns[turn + 1].arrival_s or 0.0) - (shape.arrival_s or 0.0)
        heapq.heapreplace(open_turns, (time_s + gap_s, draw, turn + 1, turns))
    parts = tuple(part if part.key == first else part._replace(key=_own_key(draw, part.key)) for part in shape.parts)
    return Shape(parts=parts, output_len=shape.output_len, arrival_s=time_s, session=draw)


def _own_key(draw: int, key: int) -> int:
    """32 bits, the same for each turn of a draw."""
    return (draw * _SPREAD ^ key * _PLACE) & _KEY_BITS
