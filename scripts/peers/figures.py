"""From answers to figures: rates, latencies, ratios, and whether two engines chose the same tokens.

The definitions are the same for all engines. Times are those at which an engine's caller could have each token, from
the moment it had the token ids of all prompts.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from peers.values import Answer, Ask


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A kind of figure. `higher` says that more is better; ratios then are ours over theirs, else theirs over ours."""

    name: str
    higher: bool


DECODE = Figure(name="decode tokens/s", higher=True)
PREFILL = Figure(name="prompt tokens/s", higher=True)
OUTPUT = Figure(name="output tokens/s", higher=True)
TTFT = Figure(name="TTFT p50 (ms)", higher=False)
TTFT_99 = Figure(name="TTFT p99 (ms)", higher=False)
TPOT = Figure(name="TPOT p50 (ms)", higher=False)
TPOT_99 = Figure(name="TPOT p99 (ms)", higher=False)

FIGURES = {
    "one": (DECODE, TTFT),
    "streams": (DECODE,),
    "short_prefill": (PREFILL,),
    "prefill": (PREFILL,),
    "long_prefill": (PREFILL,),
    "mixed": (OUTPUT,),
    "poisson": (OUTPUT, TTFT, TTFT_99, TPOT, TPOT_99),
    "shared": (OUTPUT, TTFT),
}


def measure(name: str, asks: Sequence[Ask], answers: Sequence[Answer]) -> dict[str, float]:
    """The figures of one run of workload `name`, by their names."""
    for ask, answer in zip(asks, answers, strict=True):
        assert len(answer.tokens) == len(answer.times_s) == ask.num_tokens, (len(answer.tokens), ask.num_tokens)
    return {figure.name: _compute(figure, asks, answers) for figure in FIGURES[name]}


def _compute(figure: Figure, asks: Sequence[Ask], answers: Sequence[Answer]) -> float:
    end_s = max(answer.times_s[-1] for answer in answers)
    if figure is OUTPUT:
        return sum(ask.num_tokens for ask in asks) / end_s
    if figure is PREFILL:
        return sum(len(ask.prompt) for ask in asks) / end_s
    if figure is DECODE:  # of the time in which every stream decodes: from the moment when the last has its first token
        begin_s = max(answer.times_s[0] for answer in answers)
        return sum(time_s > begin_s for answer in answers for time_s in answer.times_s) / (end_s - begin_s)
    if figure in (TTFT, TTFT_99):
        values = [answer.times_s[0] - ask.due_s for ask, answer in zip(asks, answers, strict=True)]
    else:
        values = [
            (answer.times_s[-1] - answer.times_s[0]) / (len(answer.times_s) - 1)
            for answer in answers
            if len(answer.times_s) > 1
        ]
    return float(np.percentile(values, 99 if figure in (TTFT_99, TPOT_99) else 50)) * 1e3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of one workload over all rounds.

    Attributes:
      rounds: engine -> its value in each round.
      medians: engine -> the median.
      ratios: engine -> the median, over the rounds, of how many times as good `ours` was in the same round.
    """

    workload: str
    figure: Figure
    rounds: dict[str, list[float]]
    medians: dict[str, float]
    ratios: dict[str, float]


def make_rows(workload: str, runs: Mapping[str, Sequence[Mapping[str, float]]], ours: str) -> list[Row]:
    """A row for each figure; `runs` has what `measure` gave for each engine and round."""
    rows = []
    for figure in FIGURES[workload]:
        rounds = {engine: [found[figure.name] for found in values] for engine, values in runs.items()}
        rows.append(
            Row(
                workload=workload,
                figure=figure,
                rounds=rounds,
                medians={engine: statistics.median(values) for engine, values in rounds.items()},
                ratios={} if ours not in rounds else _ratios(rounds, ours, figure),
            )
        )
    return rows


def _ratios(rounds: Mapping[str, list[float]], ours: str, figure: Figure) -> dict[str, float]:
    def median(theirs: list[float]) -> float:
        pairs = zip(rounds[ours], theirs, strict=True)
        return statistics.median(our / their if figure.higher else their / our for our, their in pairs)

    return {engine: median(values) for engine, values in rounds.items() if engine != ours}


@dataclasses.dataclass(slots=True)
class Agreement:
    """How far one engine's tokens are another's. Added to by `add` alone.

    Attributes:
      tokens, equal: of all positions, and those with the same token.
      choices, same: choices made after the same tokens, and those that fell on the same one. From the first difference
        on a request says no more: what follows follows from other tokens.
    """

    tokens: int = 0
    equal: int = 0
    choices: int = 0
    same: int = 0

    def add(self, one: Sequence[int], other: Sequence[int]) -> None:
        pairs = [a == b for a, b in zip(one, other, strict=True)]
        first = pairs.index(False) if False in pairs else len(pairs)
        self.tokens += len(pairs)
        self.equal += sum(pairs)
        self.same += first
        self.choices += min(first + 1, len(pairs))

    @property
    def share_equal(self) -> float:
        return self.equal / max(self.tokens, 1)

    @property
    def share_same(self) -> float:
        return self.same / max(self.choices, 1)
