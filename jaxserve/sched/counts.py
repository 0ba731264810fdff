"""`SchedulerCounts`: the sequences and pages of a `ContinuousScheduler` at this moment, for metrics and observers.

Nothing is known of other classes of schedulers. The functions may be called from any thread: each number is one read
of a counter that the scheduler keeps anyway, so the numbers may be of two neighbouring steps.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jaxserve.sched.adapter_slots import AdapterCounts
from jaxserve.sched.base import Scheduler
from jaxserve.sched.core import ContinuousScheduler
from jaxserve.sched.loading_scheduler import LoadingScheduler


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
      page_size: tokens of a page.
      noted_pages, lost_pages: see `PageWatcher`; None where nobody watches.
      slots, used_slots: of host memory, and those of them that hold a page; 0 without such memory, as all below.
      saved_pages, loaded_pages: to and from slots.
      skipped_pages: lost since no slot was free, or too many pages were on their way to one.
      declined_pages: lost since the policy of the slots did not take them in.
      loaded_tokens: of `hit_tokens`, those that came from slots.
      refused_tokens: found in slots, and computed since that was expected to be faster.
      load_page_ms, compute_page_ms: the two expectations, of one page; 0 while nothing is known.
      store_pages: pages by what a store behind the slots did with them; empty without such a store.
      store_breaks: how often it was left alone for a while, since it failed or was slow.
      store_late: sequences that were placed before all that they had asked of it had come.
      encoder_pages, used_encoder_pages: of the encoder's pool, and those that hold embeddings of pictures; 0 for models
        that take no pictures, as the next four.
      picture_queries, picture_hits: pictures that prompts came to, and those that had their embeddings.
      encodes, encoded_patches: pictures that the tower encoded, and their patches.
      host_embeddings, kept_embeddings, picture_loads: that host memory has room for and keeps, and pictures that came
        from there.
      grantable_pages: that may be held at once, see `PagePool.resize`; `withheld_pages` are not given out.
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
    page_size: int = 0
    noted_pages: int | None = None
    lost_pages: int | None = None
    slots: int = 0
    used_slots: int = 0
    saved_pages: int = 0
    loaded_pages: int = 0
    skipped_pages: int = 0
    declined_pages: int = 0
    loaded_tokens: int = 0
    refused_tokens: int = 0
    load_page_ms: float = 0.0
    compute_page_ms: float = 0.0
    store_pages: Mapping[str, int] = {}
    store_breaks: int = 0
    store_late: int = 0
    grantable_pages: int = 0
    withheld_pages: int = 0
    encoder_pages: int = 0
    used_encoder_pages: int = 0
    picture_queries: int = 0
    picture_hits: int = 0
    encodes: int = 0
    encoded_patches: int = 0
    host_embeddings: int = 0
    kept_embeddings: int = 0
    picture_loads: int = 0


def counts_of(scheduler: Scheduler) -> SchedulerCounts | None:
    """The counts now; None for a scheduler that is no `ContinuousScheduler`."""
    if not isinstance(scheduler, ContinuousScheduler):
        return None
    memory, encoder = scheduler.memory, scheduler.encoder
    pool = memory.pool
    available, cached = pool.num_available, pool.num_idle
    counts = SchedulerCounts(
        scheduler.num_waiting,
        scheduler.num_running,
        pool.num_pages,
        available - cached,
        cached,
        pool.num_held,
        pool.num_shared,
        memory.num_queried_tokens,
        memory.num_hit_tokens,
        scheduler.num_preemptions,
        page_size=memory.page_size,
        grantable_pages=pool.num_grantable,
        withheld_pages=pool.num_withheld,
        encoder_pages=encoder.pool.num_pages,
        used_encoder_pages=encoder.num_used,
        picture_queries=encoder.num_queries,
        picture_hits=encoder.num_hits,
        encodes=encoder.num_encodes,
        encoded_patches=encoder.num_encoded_patches,
        host_embeddings=encoder.pool.host_embeddings,
        kept_embeddings=encoder.num_kept,
        picture_loads=encoder.num_loads,
    )
    if memory.prefix is not None and memory.prefix.watcher.passes_on:
        watcher = memory.prefix.watcher
        counts = counts._replace(noted_pages=watcher.num_noted, lost_pages=watcher.num_lost)
    tier = memory.tier
    if tier is None:
        return counts
    counts = counts._replace(
        slots=tier.limits.num_slots,
        used_slots=tier.num_used,
        saved_pages=tier.num_saved,
        loaded_pages=tier.num_loaded,
        skipped_pages=tier.num_skipped,
        declined_pages=tier.num_declined,
        loaded_tokens=memory.num_loaded_tokens,
        refused_tokens=memory.num_refused_tokens,
        load_page_ms=memory.costs.page_s * 1000,
        compute_page_ms=memory.costs.token_s * memory.page_size * 1000,
    )
    if not isinstance(scheduler, LoadingScheduler):
        return counts
    store = scheduler.loader.store.counts
    return counts._replace(store_pages=store.pages, store_breaks=store.breaks, store_late=scheduler.loader.num_late)


def adapter_counts_of(scheduler: Scheduler) -> AdapterCounts | None:
    """What it has of LoRA adapters; None for one without slots for them, or that is no `ContinuousScheduler`."""
    if not isinstance(scheduler, ContinuousScheduler) or not scheduler.adapters.num_slots:
        return None
    return scheduler.adapters.counts


def page_states_of(scheduler: Scheduler) -> bytes:
    """One letter a page, in the order of their ids, see `PagePool.states`. Empty when unknown."""
    return scheduler.memory.pool.states() if isinstance(scheduler, ContinuousScheduler) else b""
