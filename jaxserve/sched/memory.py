"""The pages of sequences: what an admission needs, growth, sharing, copy-on-write, release.

Page pool, prefix cache and block tables meet here. The scheduler decides which sequence gets pages and which gives them
up; it asks here whether a placement fits.

Layers that see equally far back form a group (`PageGroup`), and a sequence has a block table for each. In a group that
sees everything it gets the pages of all its known tokens when it is admitted, and one page at a time as it grows: so a
prompt that has begun does not stop half-way for want of pages. In a group with a window it takes pages chunk by chunk,
and gives back those that no token to come can see. What a prompt will yet take so is promised to it: admissions leave
it alone. Decode rows do not, nor does a sharer that holds on to a page that was given back, so a chunk may still find
too few pages; then it is cut, or others give way.

Blocks that the host tier has are loaded into fresh pages. A sequence gets its row and all its pages when it is
admitted, and its slots are pinned; its first chunk is planned in the step of its last loads, or later.
"""

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Mapping

from jaxserve.api import Request
from jaxserve.sched.entry import PageEntry
from jaxserve.sched.host_tier import HostTier
from jaxserve.sched.pages import PagePool
from jaxserve.sched.plan import DUMMY_PAGE, Limits, PageCopy, PageGrant, PageLoad
from jaxserve.sched.prefix import PrefixCache
from jaxserve.sched.refill import Estimates, RefillCosts
from jaxserve.sched.state import NEVER, BlockTable, PendingLoad, Sequence
from jaxserve.values.content import Blocks, ContentSpan, salts_agree

logger = logging.getLogger(__name__)

_GENERATED = b"generated"  # beside the token ids of blocks with such tokens, where they lie apart


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A possible placement of a sequence. Valid until anything else changes.

    Attributes:
      start: tokens whose keys and values are there already.
      shared: of each group, pages of other sequences or of the cache that it would share, DUMMY_PAGE in the place of a
        page that must be loaded; the last of them holds the position before `start`, or before the page that is copied.
      num_columns: columns of its block tables beyond the shared ones, until its known tokens are fed.
      chain: the prefix-cache entries of the blocks before `start`.
      copy_sources: of each group, the page that its first page of its own starts as a copy of; empty for none.
      num_refused: tokens beyond `start` that were found, and are computed since that is faster than loading.
    """

    start: int
    shared: tuple[tuple[int, ...], ...]
    num_columns: int
    chain: tuple[PageEntry, ...] = ()
    copy_sources: tuple[int, ...] = ()
    num_refused: int = 0

    def num_loads(self, at: int) -> int:
        """Pages of a group that must be loaded."""
        return self.shared[at].count(DUMMY_PAGE)


class SequenceMemory:
    """Mutated only by the scheduler that made it. It alone writes `tables`, `chain` and `blocks` of a sequence.

    `max_chunk`: tokens of a prompt that a step may feed at most. `tier`: where pages go that the device gives up.
    `sparse`, `page_shares`: see `SchedulerOptions`.

    Attributes:
      num_queried_tokens, num_hit_tokens: of sequences that were placed, and those of them that were found.
      num_loaded_tokens: hit tokens of blocks that had to be loaded, in one group of layers at least.
      num_refused_tokens: tokens that were found in slots, and computed since that is faster.
      costs: of loading and of computing.
    """

    def __init__(
        self,
        limits: Limits,
        max_chunk: int,
        prefix_caching: bool,
        namespace: str = "",
        tier: HostTier | None = None,
        *,
        sparse: bool = False,
        page_shares: Mapping[str, float] | None = None,
    ) -> None:
        shares = page_shares or {}
        self.pool = PagePool(limits.num_pages, shares=[*shares.values()])
        self._owners = {tenant: at for at, tenant in enumerate(shares, start=1)}
        self.page_size = limits.page_size
        self.groups = limits.page_groups
        self.tier = tier if prefix_caching else None
        if tier is not None:
            tier.page_owner = self.pool.owner_of
        self.costs = RefillCosts(limits.slots.load_ms)
        self.prefix = (
            PrefixCache(self.pool, limits.page_size, namespace, self.groups, tier=self.tier) if prefix_caching else None
        )
        self.num_queried_tokens = 0
        self.num_hit_tokens = 0
        self.num_loaded_tokens = 0
        self.num_refused_tokens = 0
        self._max_chunk = max_chunk
        self._sparse = sparse
        self._windowed = [at for at, group in enumerate(self.groups) if group.window is not None]
        self._num_promised = 0

    # ---- what fits -------------------------------------------------------------------------------------------------

    @property
    def has_shares(self) -> bool:
        """Some tenants have shares of the pages."""
        return bool(self._owners)

    def owner_of(self, seq: Sequence) -> int:
        """To whom the pages of a sequence are counted."""
        return self._owners.get(seq.request.tenant, 0) if self._owners else 0

    def owner_of_tenant(self, tenant: str) -> int:
        """The owner that a tenant is; 0 without a share."""
        return self._owners.get(tenant, 0)

    def most_for(self, request: Request, num_grantable: int | None = None) -> int:
        """Pages that a request can have whatever other tenants have; see `PagePool.most_for`."""
        return self.pool.most_for(self.owner_of_tenant(request.tenant), num_grantable)

    def num_available(self, seq: Sequence) -> int:
        """Pages that a sequence which has begun may take."""
        return self.pool.num_available_to(self.owner_of(seq))

    def num_free(self, seq: Sequence) -> int:
        """Pages that its admission may take: available ones that are not promised to prompts that have begun."""
        return self.num_available(seq) - self._num_promised

    def may_give_way(self, seq: Sequence, victim: Sequence) -> bool:
        """Whether pages of `victim` may be taken for `seq`: not those of another tenant that has no more than its
        share."""
        owner = self.owner_of(victim)
        return owner == self.owner_of(seq) or not self.pool.is_within_share(owner)

    def place(self, seq: Sequence, parent: Sequence | None) -> Placement:
        """The best way to place `seq` now: as a fork of `parent`, through the prefix cache, or from nothing."""
        num_columns = -(-len(seq.tokens) // self.page_size)
        # The last prompt position is fed again, since a fork draws its own first token from its logits.
        if parent is not None and not self._sparse and self._can_share(parent, seq.prompt_len - 1):
            start = seq.prompt_len - 1
            end, offset = divmod(start, self.page_size)
            return Placement(
                start=start,
                shared=tuple(
                    tuple(table.page_ids[first:end])
                    for table, first in zip(parent.tables, self._first_columns(start), strict=True)
                ),
                num_columns=num_columns - end,
                chain=tuple(parent.chain[:end]),
                copy_sources=tuple(table.page_ids[end] for table in parent.tables) if offset else (),
            )
        chain: list[PageEntry] = []
        num_found = 0
        if self.prefix is not None and not seq.needs_whole_prompt:
            chain = self.prefix.match(seq.request.cache_salt, self.blocks_of(self.prefix, seq))
            num_found = len(chain)
            if self.tier is not None:
                chain = self._worth_loading(chain, len(seq.tokens))
        start = len(chain) * self.page_size
        return Placement(
            start=start,
            shared=tuple(
                tuple([entry.page_ids[at] for entry in chain[first:]])
                for at, first in enumerate(self._first_columns(start))
            ),
            num_columns=num_columns - len(chain),
            chain=tuple(chain),
            num_refused=(num_found - len(chain)) * self.page_size,
        )

    def _worth_loading(self, chain: list[PageEntry], num_tokens: int) -> list[PageEntry]:
        """The beginning of a matched chain with which `num_tokens` tokens are there soonest.

        Its end is left out where computing its tokens takes less time than loading its pages. A shorter chain must be
        usable: in a group with a window, the pages that it needs are others.
        """
        costs, size = self.costs, self.page_size
        if not costs.page_s or not costs.token_s or all(all(entry.page_ids) for entry in chain):
            return chain
        assert self.prefix is not None
        # Of each group, pages of the first blocks of the chain that are not on the device.
        missing = [
            list(itertools.accumulate((not entry.page_ids[at] for entry in chain), initial=0))
            for at in range(len(self.groups))
        ]

        def estimates(length: int) -> Estimates:
            firsts = self._first_columns(length * size)
            num_loads = sum(
                count[length] - count[min(first, length)] for count, first in zip(missing, firsts, strict=True)
            )
            return costs.estimate(num_loads, num_tokens - length * size)

        best = min(reversed(self.prefix.usable_lengths(chain)), key=lambda length: sum(estimates(length)))
        logger.debug(
            "of %d cached blocks %d are used: %s in all, against %s with all of them",
            len(chain), best, estimates(best), estimates(len(chain)),
        )  # fmt: skip
        return chain[:best]

    def num_taken(self, placement: Placement) -> int:
        """Available pages that the placement uses up at most: those of its own, and cached ones without a holder.

        In a group with a window the cached ones are given back while others are taken.
        """
        refs, num_taken = self.pool.num_refs, 0
        for at, pages in enumerate(placement.shared):
            num_cached = sum(refs(page_id) == 0 for page_id in pages)  # those to be loaded included
            num_taken += min(num_cached + placement.num_columns, self._most_columns(at))
        return num_taken

    def num_fresh(self, placement: Placement) -> int:
        """Pages of its own that the placement takes at most."""
        return sum(
            min(placement.num_columns + placement.num_loads(at), self._most_columns(at))
            for at in range(len(self.groups))
        )

    def fits(self, seq: Sequence, placement: Placement, reserve: float) -> bool:
        """Whether there are pages for `seq` there, with `reserve` left over."""
        return self.num_taken(placement) + reserve <= self.num_free(seq)

    def num_missing(self, seq: Sequence) -> int:
        """Pages that are missing for `seq` to be placed now; 0 when it fits."""
        return max(0, self.num_taken(self.place(seq, None)) - self.num_free(seq))

    def num_own(self, seq: Sequence) -> int:
        """Pages that become available when `seq` gives its own back."""
        return sum(self.pool.num_refs(page_id) == 1 for table in seq.tables for page_id in table.held)

    def refill_cost(self, seq: Sequence, num_wanted: int) -> float:
        """The cost, in tokens, of placing `seq` again if it is preempted now and `num_wanted` pages are taken at once.

        What the prefix cache holds of it need not be computed, except for the pages that would be taken: free pages go
        first, and of its own the last ones. With a host tier these are loaded, where that is cheaper.
        """
        refs, known = self.pool.num_refs, len(seq.chain)

        def own(first: int, end: int) -> int:
            return sum(refs(page_id) == 1 for table in seq.tables for page_id in table.page_ids[first:end])

        num_lost = max(0, num_wanted - self.pool.num_available - own(known, seq.num_columns))
        num_kept, load_cost = known, 0.0
        while num_lost > 0 and num_kept and (num_own := own(num_kept - 1, num_kept)):
            num_kept -= 1
            num_lost -= num_own
            if self.tier is not None:
                load_cost += min(self.page_size, num_own * self.costs.tokens_of_page(self.page_size))
        num_blocks = min(known if self.tier is not None else num_kept, (len(seq.tokens) - 1) // self.page_size)
        return len(seq.tokens) - num_blocks * self.page_size + load_cost

    def growth_of(self, seq: Sequence, num_tokens: float) -> tuple[int, float]:
        """How `seq` takes pages while it generates `num_tokens` more: (groups that take one a page_size, all others).

        Groups with a window take no more once it is full; what they take until then is the second number, in pages.
        """
        num_growing, rest = len(self.groups) - len(self._windowed), 0.0
        for at in self._windowed:
            room = max(0, self._most_columns(at, 1) - -(-len(seq.tokens) // self.page_size))
            if num_tokens <= room * self.page_size:
                num_growing += 1
            else:
                rest += room
        return num_growing, rest

    def num_ending(self, seq: Sequence) -> int:
        """Pages that surely become available when a running sequence ends, or are no longer promised.

        Those that it shared when it was admitted are not counted: others may hold them.
        """
        shared = seq.num_cached // self.page_size
        return seq.num_pages + seq.num_promised - sum(max(0, shared - table.first) for table in seq.tables)

    # ---- pages change hands ----------------------------------------------------------------------------------------

    def take(self, seq: Sequence, placement: Placement, end: int) -> list[PageCopy]:
        """Gives `seq`, which has a row, the pages to feed its known tokens before `end`, and those promised to it.

        Returns the copies that the plan must carry; `grants_of` are due with the setup of the row.
        """
        assert not seq.tables and self.num_available(seq) >= self.num_taken(placement), seq
        num_shared = placement.start // self.page_size
        # All that it shares is held before anything is allocated, which could evict pages, and slots in their turn.
        for pages in placement.shared:
            for page_id in pages:
                if page_id != DUMMY_PAGE:
                    self.pool.retain(page_id)
        absent = [
            (at, column)
            for at, pages in enumerate(placement.shared)
            for column, page_id in enumerate(pages, start=num_shared - len(pages))
            if page_id == DUMMY_PAGE
        ]
        slots: list[int] = []
        if absent:
            assert self.tier is not None, placement
            slots = [self.tier.pin(placement.chain[column], at) for at, column in absent]
            # The end of a chain is of no use without its beginning, so that is touched last.
            for at, column in reversed(absent):
                self.tier.touch(placement.chain[column], at)
        seq.tables = tuple(BlockTable(num_shared - len(pages), pages) for pages in placement.shared)
        seq.loads = [
            PendingLoad(placement.chain[column], at, slot, self._allocate_at(seq, at, column))
            for (at, column), slot in zip(absent, slots, strict=True)
        ]
        seq.num_columns = -(-len(seq.tokens) // self.page_size)
        seq.chain = list(placement.chain)
        seq.chain_open = self.prefix is not None and len(placement.chain) == num_shared
        seq.num_fed = placement.start
        seq.next_page_at = min(seq.max_fed, seq.num_columns * self.page_size)
        for at, table in enumerate(seq.tables):
            if self.groups[at].window is None:
                table.page_ids += [self.pool.allocate(self.owner_of(seq)) for _ in range(seq.num_columns - num_shared)]
        self._reach(seq, end)
        if self.prefix is not None:
            blocks = self.blocks_of(self.prefix, seq)
            for entry in placement.chain[len(blocks.keys) :]:  # what it shares with the sequence that it is a fork of
                blocks.learn(entry.key, entry.content)
        if placement.copy_sources:
            targets = [table.page_ids[num_shared] for table in seq.tables]
            return list(map(PageCopy, placement.copy_sources, targets))
        if self.prefix is not None:
            self.num_queried_tokens += len(seq.tokens)
            self.num_hit_tokens += placement.start
            self.num_loaded_tokens += len({column for _, column in absent}) * self.page_size
            if placement.num_refused:
                self.num_refused_tokens += placement.num_refused
                self.costs.note_refusal()
        return []

    def _allocate_at(self, seq: Sequence, at: int, column: int) -> int:
        page_id = seq.tables[at].page_ids[column] = self.pool.allocate(self.owner_of(seq))
        return page_id

    def grants_of(self, seq: Sequence) -> list[PageGrant]:
        """All that `seq` has, for a row that is set up."""
        return [PageGrant(seq.row, table.first, tuple(table.held), at) for at, table in enumerate(seq.tables)]

    def load(self, seq: Sequence, count: int) -> list[PageLoad]:
        """The next `count` loads of `seq`, which the plan carries. Later plans find the pages."""
        assert self.tier is not None and self.prefix is not None
        loads, seq.loads = seq.loads[:count], seq.loads[count:]
        for load in loads:
            self.prefix.keep(load.entry, load.at, load.page_id)
        self.tier.num_loaded += len(loads)
        return [PageLoad(load.slot, load.page_id) for load in loads]

    def num_wanted(self, seq: Sequence, end: int) -> int:
        """Pages that are needed beyond those it holds to feed the known tokens of `seq` before `end`.

        What it no longer sees is given back first.
        """
        if not self._windowed:
            return 0
        self.give_back(seq)
        num_columns = len(seq.tables[self._windowed[0]].page_ids)  # the same in each
        return max(0, -(-end // self.page_size) - num_columns) * len(self._windowed)

    def reachable(self, seq: Sequence, end: int) -> int:
        """The position, `end` at most, before which the known tokens of `seq` can be fed with the pages there are."""
        num_missing = self.num_wanted(seq, end) - self.num_available(seq)
        if num_missing <= 0:
            return end
        return (-(-end // self.page_size) - -(-num_missing // len(self._windowed))) * self.page_size

    def reach(self, seq: Sequence, end: int) -> list[PageGrant]:
        """Gives `seq` the pages to feed its known tokens before `end`, which are available."""
        firsts = [len(table.page_ids) for table in seq.tables]
        self._reach(seq, end)
        return [
            PageGrant(seq.row, firsts[at], tuple(seq.tables[at].page_ids[firsts[at] :]), at)
            for at in self._windowed
            if len(seq.tables[at].page_ids) > firsts[at]
        ]

    def grow(self, seq: Sequence) -> list[PageGrant]:
        """Takes one page more in each group, for the position that is fed next. They are available."""
        grants = []
        for at, table in enumerate(seq.tables):
            page_id = self.pool.allocate(self.owner_of(seq))
            grants.append(PageGrant(seq.row, len(table.page_ids), (page_id,), at))
            table.page_ids.append(page_id)
        seq.num_columns += 1
        seq.next_page_at = min(seq.max_fed, seq.num_columns * self.page_size)
        return grants

    def give_back(self, seq: Sequence) -> None:
        """Takes back the pages that no token to come can see.

        The step in flight may still read them: the device runs steps in order, so whoever gets one writes it later.
        Pages that may yet become findable stay: they are at most a step behind.
        """
        for at in self._windowed:
            table, first = seq.tables[at], self.groups[at].first_column(seq.num_fed - seq.num_unsure, self.page_size)
            if seq.chain_open:
                first = min(first, len(seq.chain))
            if first > table.first:
                self.pool.release(table.page_ids[table.first : first])
                table.page_ids[table.first : first] = [DUMMY_PAGE] * (first - table.first)
                table.first = first

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
            entry = self.prefix.record(parent, seq.blocks, first, [table.page_ids[first] for table in seq.tables])
            if entry is None:
                seq.chain_open = False
            else:
                seq.chain.append(entry)

    def next_publish(self, seq: Sequence) -> int:
        """Positions that must be written before `publish` has something to do."""
        return (len(seq.chain) + 1) * self.page_size if seq.chain_open else NEVER

    def release(self, seq: Sequence) -> None:
        """Takes all pages back. The last ones go first, so that eviction shortens prefixes from their end."""
        if len(seq.tables) == 1:
            self.pool.release(reversed(seq.tables[0].held))
        else:
            for column in reversed(range(seq.num_columns)):
                self.pool.release([t.page_ids[column] for t in seq.tables if t.first <= column < len(t.page_ids)])
        if seq.loads:
            assert self.tier is not None
            self.tier.unpin(load.slot for load in seq.loads)
            seq.loads = []
        self._promise(seq, 0)
        seq.tables = ()
        seq.num_columns = 0
        seq.chain = []
        seq.chain_open = False

    def flush(self, salt: str | None, holders: Iterable[Sequence]) -> tuple[int, int]:
        """Forgets what can be found under a salt, or all: the numbers of pages of the device and of slots.

        `holders`: sequences that hold pages. They keep these, and publish none of them any more.
        """
        for seq in holders:
            if salt is None or salts_agree(seq.request.cache_salt, salt):
                seq.chain, seq.chain_open = [], False
        return (0, 0) if self.prefix is None else self.prefix.flush(salt)

    def rename(self, namespace: str, sequences: Iterable[Sequence]) -> None:
        """As `flush` of all, and what `sequences`, all that there are, compute from now on has other keys."""
        sequences = list(sequences)
        self.flush(None, sequences)
        for seq in sequences:
            seq.blocks = None
        if self.prefix is not None:
            self.prefix.rename(namespace)

    def check(self, holders: Iterable[Sequence], loading: Iterable[PageLoad] = (), writing: Iterable[int] = ()) -> None:
        """Proves the counts, given all sequences that hold pages, the loads of plans in flight, and the slots that are
        being written to a store."""
        holders = list(holders)
        self.pool.check([seq.page_ids for seq in holders])
        assert self._num_promised == sum(seq.num_promised for seq in holders), self._num_promised
        if self.prefix is not None:
            self.prefix.check()
        if self.tier is not None:
            leased = [load.slot for seq in holders for load in seq.loads]
            self.tier.check([*leased, *writing], loading)

    # ---- arithmetic ------------------------------------------------------------------------------------------------

    def _first_columns(self, position: int) -> list[int]:
        return [group.first_column(position, self.page_size) for group in self.groups]

    def _most_columns(self, at: int, chunk: int | None = None) -> int:
        return self.groups[at].most_columns(chunk or self._max_chunk, self.page_size)

    def _can_share(self, parent: Sequence, position: int) -> bool:
        """Whether `parent` has all pages yet that a token at `position` sees."""
        return all(t.first <= f for t, f in zip(parent.tables, self._first_columns(position), strict=True))

    def _reach(self, seq: Sequence, end: int) -> None:
        columns, promised = -(-end // self.page_size), 0
        for at in self._windowed:
            table = seq.tables[at]
            table.page_ids += [self.pool.allocate(self.owner_of(seq)) for _ in range(columns - len(table.page_ids))]
            to_come = seq.num_columns - len(table.page_ids)
            promised += max(0, min(to_come, self._most_columns(at) - table.num_held))
        self._promise(seq, promised)

    def _promise(self, seq: Sequence, num_pages: int) -> None:
        self._num_promised += num_pages - seq.num_promised
        seq.num_promised = num_pages

    def blocks_of(self, prefix: PrefixCache, seq: Sequence) -> Blocks:
        """The contents of the pages of `seq`, computed once for as long as it lives."""
        if seq.blocks is None:
            content = seq.request.content
            if self._sparse:  # tokens from the end of the prompt on have other keys and values than a prompt's
                content = (*content, ContentSpan(seq.prompt_len, NEVER, _GENERATED))
            seq.blocks = prefix.blocks(seq.request.cache_salt, seq.tokens, content)
        return seq.blocks
