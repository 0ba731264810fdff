"""`SchedulerCounts`: the sequences and pages of a `ContinuousScheduler` at this moment, for metrics and observers.

Nothing is known of other classes of schedulers. The functions may be called from any thread: each number is one read
of a counter that the scheduler keeps anyway, so the numbers may be of two neighbouring steps.
"""

from typing import NamedTuple

from jaxserve.sched.base import Scheduler
from jaxserve.sched.core import ContinuousScheduler


class SchedulerCounts(NamedTuple):
    """Sequences, pages, and what has happened since the start.

    Attributes:
      waiting: sequences without a row, the preempted ones included.
      running: sequences with a row.
      pages: all there are; each is free, cached (content, no holder) or held.
      free_pages, cached_pages, held_pages: the pages in each of these states.
      shared_pages: held ones with two holders or more.
      queried_tokens, hit_tokens: of prompts, looked up in the prefix cache and found there.
      preemptions: rows taken from sequences that had not ended.
    """

    waiting: int
    running: int
    pages: int
    free_pages: int
    cached_pages: int
    held_pages: int
    shared_pages: int
    queried_tokens: int
    hit_tokens: int
    preemptions: int


def counts_of(scheduler: Scheduler) -> SchedulerCounts | None:
    """The counts now; None for a scheduler that is no `ContinuousScheduler`."""
    if not isinstance(scheduler, ContinuousScheduler):
        return None
    memory = scheduler.memory
    pool = memory.pool
    available, cached = pool.num_available, pool.num_idle
    return SchedulerCounts(
        scheduler.num_waiting,
        scheduler.num_running,
        pool.num_pages,
        available - cached,
        cached,
        pool.num_pages - available,
        pool.num_shared,
        memory.num_queried_tokens,
        memory.num_hit_tokens,
        scheduler.num_preemptions,
    )


def page_states_of(scheduler: Scheduler) -> bytes:
    """One letter a page, in the order of their ids: f free, c cached, u used by one, s shared. Empty when unknown."""
    return scheduler.memory.pool.states() if isinstance(scheduler, ContinuousScheduler) else b""
