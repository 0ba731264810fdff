"""The comparison itself: one workload after the other, in rounds, and in each round every engine once.

Disturbed runs are repeated. Engines that do not fit into the memory together come one after the other, each with all
its rounds. Processes are in `process`, tables in `report`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from peers.figures import OUTPUT, Agreement, Row, make_rows, measure
from peers.values import Answer, Ask
from peers.workloads import Sizes, make_again, make_asks, make_touch, make_warm_up

OURS = "jaxserve"
_STATIC = ("hf", "hf-compile")  # cannot take requests that come later
_MAX_TRIES = 3


class Peer(Protocol):
    """A loaded engine: see `process.PeerProcess`."""

    about: dict[str, Any]

    def run(self, asks: list[Ask], before: list[Ask]) -> tuple[list[Answer], float | None]: ...

    def most_memory(self) -> int | None: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is compared.

    Attributes:
      load: poisson's rate as a share of the requests a second that jaxserve did of "mixed".
      rate: the rate itself, in its place.
      max_noise: share of the cores that others may have used during a run.
      compare_tokens: all engines have the same weights.
    """

    rounds: int
    sizes: Sizes
    vocab: int
    load: float
    rate: float | None
    max_noise: float
    compare_tokens: bool


class Comparison:
    """What has been found so far. Mutated by `add`, `measure` and `remove` alone."""

    def __init__(self, plan: Plan, say: Callable[[str], None]) -> None:
        self._plan, self._say = plan, say
        self._peers: dict[str, Peer] = {}
        self._others: set[str] = set()  # engines with other weights
        self._runs: dict[str, dict[str, list[dict[str, float]]]] = {}
        self._noise: dict[str, dict[str, list[float | None]]] = {}
        self._answers: dict[str, dict[str, list[Answer]]] = {}
        self.notes: dict[str, dict[str, str]] = {}
        self.abouts: dict[str, dict[str, Any]] = {}
        self.memory: dict[str, int | None] = {}

    @property
    def reference(self) -> str:
        """The engine whose tokens the others' are compared with."""
        return "hf" if "hf" in self.abouts else OURS

    @property
    def agreements(self) -> dict[str, Agreement]:
        """For each engine with the weights of the reference, how far its tokens are the reference's."""
        if not self._plan.compare_tokens:
            return {}
        found = {name: Agreement() for name in self.abouts if name not in self._others and name != self.reference}
        for answers in self._answers.values():
            for name in found.keys() & answers.keys() if self.reference in answers else ():
                for answer, other in zip(answers[name], answers[self.reference], strict=True):
                    found[name].add(answer.tokens, other.tokens)
        return found

    def add(self, name: str, peer: Peer, *, same_weights: bool = True) -> None:
        self._peers[name] = peer
        self.abouts[name] = peer.about
        if not same_weights:
            self._others.add(name)

    def remove(self, name: str) -> None:
        """What it has done stays."""
        del self._peers[name]

    def measure(self, workload: str) -> None:
        """All rounds of one workload, by all engines that are there."""
        rate = self._rate() if workload == "poisson" else None
        engines = self._able(workload, rate)
        for found in (self._runs, self._noise, self._answers):
            found.setdefault(workload, {}).update({name: [] for name in engines})
        for name in engines:
            warm_up = make_warm_up(make_asks(workload, 0, self._plan.vocab, self._plan.sizes, rate))
            self._peers[name].run(warm_up, [])
        for number in range(1, self._plan.rounds + 1):
            asks = make_asks(workload, number, self._plan.vocab, self._plan.sizes, rate)
            for name in engines:
                self._answers[workload][name] += self._run(workload, number, name, asks)
        self.memory.update({name: peer.most_memory() for name, peer in self._peers.items()})

    def _run(self, workload: str, number: int, name: str, asks: list[Ask]) -> list[Answer]:
        """Measures the quietest of at most three tries, or the first one that is quiet enough.

        Each try asks in new tokens. The answers of the first are returned: all engines have had the same requests then.
        """
        first, noise = self._peers[name].run(asks, make_touch(self._plan.vocab))
        figures = measure(workload, asks, first)
        for attempt in range(1, _MAX_TRIES):
            if (noise or 0.0) <= self._plan.max_noise:
                break
            again = make_again(asks, attempt, self._plan.vocab)
            answers, later = self._peers[name].run(again, make_touch(self._plan.vocab))
            if (later or 0.0) < (noise or 0.0):
                noise, figures = later, measure(workload, again, answers)
        self._runs[workload][name].append(figures)
        self._noise[workload][name].append(noise)
        values = ", ".join(f"{figure} {value:.1f}" for figure, value in figures.items())
        others = "" if noise is None else f" (others used {noise:.0%} of the cores)"
        self._say(f"{workload}, round {number}, {name}: {values}{others}")
        return first

    def _rate(self) -> float:
        if self._plan.rate is not None:
            return self._plan.rate
        return self._plan.load * self._capacity(OURS)

    def _capacity(self, name: str) -> float:
        """Requests a second in "mixed"; infinite if that was not run."""
        if name not in self._runs.get("mixed", {}):
            return float("inf")
        medians = {row.figure: row.medians for row in make_rows("mixed", self._runs["mixed"], OURS)}
        asks = make_asks("mixed", 1, self._plan.vocab, self._plan.sizes)
        return medians[OUTPUT][name] / (sum(ask.num_tokens for ask in asks) / len(asks))

    def _able(self, workload: str, rate: float | None) -> list[str]:
        """Of "poisson", engines that take requests while they run, and can do as many a second."""
        if rate is None:
            return list(self._peers)
        notes = {name: "n/a: static batches" for name in self._peers if name in _STATIC}
        for name in self._peers:
            if name not in notes and self._capacity(name) < rate:
                notes[name] = f"over its capacity: {self._capacity(name):.2f} of {rate:.2f} requests/s"
        self.notes[workload] = {"rate": f"{rate:.3f} requests/s", **notes}
        self._say(f"{workload}: {self.notes[workload]}")
        return [name for name in self._peers if name not in notes]

    def rows(self) -> list[Row]:
        return [row for workload, runs in self._runs.items() for row in make_rows(workload, runs, OURS)]

    def as_json(self) -> dict[str, Any]:
        """Every value of every round, with medians, ratios, what others used meanwhile, and how tokens agree."""
        workloads: dict[str, Any] = {}
        for row in self.rows():
            found = workloads.setdefault(row.workload, {"others_share": self._noise[row.workload], "figures": {}})
            found["figures"][row.figure.name] = {
                "medians": row.medians,
                "ratios": row.ratios,
                "rounds": row.rounds,
            }
        for workload, notes in self.notes.items():
            workloads[workload]["notes"] = notes
        agreements = {
            name: dataclasses.asdict(found) | {"share_equal": found.share_equal, "share_same": found.share_same}
            for name, found in self.agreements.items()
        }
        return {
            "workloads": workloads,
            "tokens": {"reference": self.reference, "engines": agreements},
            "most_memory_bytes": self.memory,
        }
