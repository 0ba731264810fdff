"""`DegradedReport`: whether a process that answers does so with less than it should have, and why.

Probes tell it with a green status, since a balancer that took such a process away would make things worse. What is
looked at: replicas (of a router: servers) that are not well, rungs of the ladder (`sched.ladder`), and prompts that
were to come from other servers and did not (`docs/apart.md`).
"""

import logging
from collections.abc import Callable, Sequence

from jaxserve.engine import AnyEngine
from jaxserve.sched.ladder import Rung
from jaxserve.serve.handoff import HandoffCounts

logger = logging.getLogger(__name__)

_AFTER_S = 2.0  # of a fault without a break, before it is reported
_CALM_S = 10.0  # without a fault, before the report ends
_MISSED_SHARE = 0.5  # of the tokens that were to come from elsewhere
_LEAST_TOKENS = 1024  # that say something about it
_MAX_REASON = 1000  # characters

# Why it is degraded; None: it is not.
Source = Callable[[], str | None]


class DegradedReport:
    """Mutated on one event loop.

    Attributes:
      reason: what is reported; None: nothing.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.reason: str | None = None
        self._sources = sources
        self._since_s: float | None = None  # when the state last began to differ from what is reported

    def look(self, now_s: float) -> str | None:
        """`reason`, after a look at the sources. Called again and again."""
        found = "; ".join(text for source in self._sources if (text := source()) is not None)[:_MAX_REASON] or None
        if (found is None) is (self.reason is None):
            self._since_s = None
            self.reason = found
            return found
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s >= (_AFTER_S if found is not None else _CALM_S):
            self._since_s = None
            self.reason = found
            if found is None:
                logger.info("this process is degraded no more")
            else:
                logger.warning("this process is degraded: %s", found)
        return self.reason


def replicas_of(engine: AnyEngine, least_share: float) -> Source:
    """Names the replicas that are not well, where fewer than `least_share` are."""

    def look() -> str | None:
        if not engine.accepting:  # it drains, or all are dead: readiness says so
            return None
        faults = [f"replica {number}" for number, replica in enumerate(engine.replicas) if not replica.ready]
        return missing(faults, len(engine.replicas), least_share)

    return look


def missing(faults: Sequence[str], total: int, least_share: float) -> str | None:
    """The reason, where `total` less the faulty ones are a smaller share than `least_share`."""
    num_well = total - len(faults)
    if not faults or num_well >= least_share * total:
        return None
    return f"{num_well} of {total} replicas are well (serve.degraded_below is {least_share:g}), without " + ", ".join(
        faults
    )


def rungs_of(engine: AnyEngine) -> Source:
    """Names the lowest rung on which a replica stands."""

    def look() -> str | None:
        rung = max((stats.degraded[0] for stats in engine.stats), default=Rung.NONE)
        return None if rung is Rung.NONE else f"pressure: {rung.label} (degrade.highest)"

    return look


def handoffs_of(read: Callable[[], HandoffCounts]) -> Source:
    """Says how much was computed here of what was to come from other servers, if that is much."""
    last: dict[str, int] = {}  # counts when they were last judged
    found: str | None = None

    def look() -> str | None:
        nonlocal last, found
        counts = read()
        now = {"pulled": counts.tokens["pulled"], **counts.missed}
        since = {name: number - last.get(name, 0) for name, number in now.items()}
        total = sum(since.values())
        if total >= _LEAST_TOKENS:
            missed = {name: number for name, number in since.items() if name != "pulled" and number}
            share = sum(missed.values()) / total
            found = None
            if share > _MISSED_SHARE:
                worst = max(missed, key=lambda name: missed[name])
                found = f"{share:.0%} of the tokens that other servers computed did not arrive, most of them: {worst}"
            last = now
        return found

    return look
