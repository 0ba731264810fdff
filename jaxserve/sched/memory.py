"""The pages of sequences: what an admission needs, growth, sharing, copy-on-write, release.

Page pool, prefix cache and block tables meet here. The scheduler decides which sequence gets pages and which gives them
up; it asks here whether a placement fits.

A sequence gets the pages of all its known tokens when it is admitted, and one page at a time as it grows. So a prompt
that has begun never stops half-way for want of pages, and only decode rows can run the pool dry.
"""

import dataclasses

from jaxserve.content import Blocks
from jaxserve.sched.pages import PagePool
from jaxserve.sched.plan import PageCopy
from jaxserve.sched.prefix import PageEntry, PrefixCache
from jaxserve.sched.state import NEVER, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A possible placement of a sequence. Valid until anything else changes.

    Attributes:
      start: tokens whose keys and values are there already.
      shared: pages of other sequences or of the cache that it would share.
      num_fresh: pages that it needs of its own.
      chain: the prefix-cache entries of the shared pages.
      copy_source: page that the first fresh page starts as a copy of; 0 for none.
    """

    start: int
    shared: tuple[int, ...]
    num_fresh: int
    chain: tuple[PageEntry, ...] = ()
    copy_source: int = 0


class SequenceMemory:
    """Mutated only by the scheduler that made it. It alone writes `page_ids`, `chain` and `blocks` of a sequence."""

    def __init__(self, num_pages: int, page_size: int, prefix_caching: bool, namespace: str = "") -> None:
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.prefix = PrefixCache(self.pool, page_size, namespace) if prefix_caching else None
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0

    def place(self, seq: Sequence, parent: Sequence | None) -> Placement:
        """The best way to place `seq` now: as a fork of `parent`, through the prefix cache, or from nothing."""
        num_pages = -(-len(seq.tokens) // self.page_size)
        if parent is not None:
            # The last prompt position is fed again, since the child draws its own first token from its logits.
            start = seq.prompt_len - 1
            num_shared, offset = divmod(start, self.page_size)
            return Placement(
                start=start,
                shared=tuple(parent.page_ids[:num_shared]),
                num_fresh=num_pages - num_shared,
                chain=tuple(parent.chain[:num_shared]),
                copy_source=parent.page_ids[num_shared] if offset else 0,
            )
        chain: list[PageEntry] = []
        if self.prefix is not None and not seq.needs_whole_prompt:
            chain = self.prefix.match(seq.request.cache_salt, self._blocks(self.prefix, seq))
        return Placement(
            start=len(chain) * self.page_size,
            shared=tuple(entry.page_id for entry in chain),
            num_fresh=num_pages - len(chain),
            chain=tuple(chain),
        )

    def num_taken(self, placement: Placement) -> int:
        """Available pages that the placement uses up: those of its own, and cached ones without a holder."""
        return placement.num_fresh + sum(self.pool.num_refs(page_id) == 0 for page_id in placement.shared)

    def fits(self, placement: Placement, reserve: float) -> bool:
        """Whether the pool has the pages, with `reserve` left over."""
        return self.num_taken(placement) + reserve <= self.pool.num_available

    def num_missing(self, seq: Sequence) -> int:
        """Pages that the pool lacks for `seq` to be placed now; 0 when it fits."""
        return max(0, self.num_taken(self.place(seq, None)) - self.pool.num_available)

    def num_own(self, seq: Sequence) -> int:
        """Pages that become available when `seq` gives its own back."""
        return sum(self.pool.num_refs(page_id) == 1 for page_id in seq.page_ids)

    def recompute_len(self, seq: Sequence, num_wanted: int) -> int:
        """Tokens of `seq` to compute again if it is preempted now and `num_wanted` pages are taken at once.

        What the prefix cache holds of it need not be computed, except for the pages that would be taken: free pages go
        first, and of its own the last ones.
        """
        refs, known = self.pool.num_refs, len(seq.chain)
        num_unknown = sum(refs(page_id) == 1 for page_id in seq.page_ids[known:])
        num_lost = max(0, num_wanted - self.pool.num_available - num_unknown)
        num_kept = known
        while num_lost and num_kept and refs(seq.page_ids[num_kept - 1]) == 1:
            num_kept -= 1
            num_lost -= 1
        return len(seq.tokens) - min(num_kept, (len(seq.tokens) - 1) // self.page_size) * self.page_size

    def take(self, seq: Sequence, placement: Placement) -> list[PageCopy]:
        """Gives `seq` its pages. Returns the copies that the plan must carry."""
        assert not seq.page_ids, seq
        for page_id in placement.shared:  # before allocating, which could evict them
            self.pool.retain(page_id)
        seq.page_ids = [*placement.shared, *(self.pool.allocate() for _ in range(placement.num_fresh))]
        seq.chain = list(placement.chain)
        seq.chain_open = self.prefix is not None and len(placement.chain) == len(placement.shared)
        seq.num_fed = placement.start
        seq.next_page_at = min(seq.max_fed, len(seq.page_ids) * self.page_size)
        if self.prefix is not None:
            blocks = self._blocks(self.prefix, seq)
            for entry in placement.chain[len(blocks.keys) :]:  # what it shares with the sequence that it is a fork of
                blocks.learn(entry.key, entry.content)
        if placement.copy_source:
            return [PageCopy(placement.copy_source, seq.page_ids[len(placement.shared)])]
        if self.prefix is not None:
            self.num_queried_tokens += len(seq.tokens)
            self.num_hit_tokens += placement.start
        return []

    def grow(self, seq: Sequence) -> int:
        """Takes one page more, for the position that is fed next."""
        page_id = self.pool.allocate()
        seq.page_ids.append(page_id)
        seq.next_page_at = min(seq.max_fed, len(seq.page_ids) * self.page_size)
        return page_id

    def publish(self, seq: Sequence, num_written: int) -> None:
        """Makes full pages of the first `num_written` positions findable.

        For a prompt that is as soon as the chunk is planned: the device runs steps in order, so a later plan may read
        what an earlier one writes. For output it is at commit, since only then the tokens are known.
        """
        size = self.page_size
        while seq.chain_open and (len(seq.chain) + 1) * size <= num_written:
            assert self.prefix is not None and seq.blocks is not None
            first = len(seq.chain)
            parent = seq.chain[-1] if first else self.prefix.root(seq.request.cache_salt)
            entry = self.prefix.record(parent, seq.blocks, first, seq.page_ids[first])
            if entry is None:
                seq.chain_open = False
            else:
                seq.chain.append(entry)

    def _blocks(self, prefix: PrefixCache, seq: Sequence) -> Blocks:
        """The contents of the pages of `seq`, computed once for as long as it lives."""
        if seq.blocks is None:
            seq.blocks = prefix.blocks(seq.request.cache_salt, seq.tokens, seq.request.content)
        return seq.blocks

    def next_publish(self, seq: Sequence) -> int:
        """Positions that must be written before `publish` has something to do."""
        return (len(seq.chain) + 1) * self.page_size if seq.chain_open else NEVER

    def release(self, seq: Sequence) -> None:
        """Takes all pages back. The last ones go first, so that eviction shortens prefixes from their end."""
        self.pool.release(reversed(seq.page_ids))
        seq.page_ids = []
        seq.chain = []
        seq.chain_open = False
