"""Pages of prompts that one engine computes for another: lent from slots on one side, expected in slots on the other.

To lend, the full pages of a prompt that has been computed are saved into slots of the host tier, as far as they are
not there, and the slots are held until they are given back: whoever fetches them may take any time, and holds no page
of the device. To receive, a prompt gets slots for the pages that it lacks, which something else than a plan fills; then
it is placed like any prompt whose pages are in host memory. So there is no second path: a page that is not lent, or
does not arrive, is computed.

Slots and tokens only: how bytes travel is in `serve.handoff_sender` and `serve.handoff_receiver`, how long slots are
lent in `kv.leases`.
"""

import collections
from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from jaxserve.sched.entry import NO_SLOT, PageEntry
from jaxserve.sched.host_tier import HostTier
from jaxserve.sched.memory import SequenceMemory
from jaxserve.values.content import Blocks, ContentSpan


class Prompt(NamedTuple):
    """What pages of a prompt follow from; see `Request` for the fields."""

    salt: str
    token_ids: tuple[int, ...]
    content: tuple[ContentSpan, ...] = ()


class Lent(NamedTuple):
    """Slots with the first full pages of a prompt.

    Attributes:
      num_blocks: of the prompt, from its beginning.
      firsts: of each page group, the block of the first slot; 0 but for groups with a window.
      slots: of each page group, those of the blocks from there to `num_blocks`.
    """

    num_blocks: int
    firsts: tuple[int, ...]
    slots: tuple[tuple[int, ...], ...]


class Place(NamedTuple):
    """Where a page belongs: the number of its block in the prompt, and its page group."""

    block: int
    at: int


class Wanted(NamedTuple):
    """Pages that a prompt lacks.

    Attributes:
      num_found: blocks from its beginning that are here already.
      num_blocks: blocks that it can have in all.
      slots: for what it lacks; fewer than that where slots are short.
      compute_s: seconds that computing what it lacks is expected to take; 0 while nothing is known.
    """

    num_found: int
    num_blocks: int
    slots: dict[Place, int]
    compute_s: float


class _Loan:
    """Slots for one prompt. Mutated by `PageExchange`.

    Attributes:
      places: in the order of blocks, of each group those that the token behind the last block sees.
      held: slots that were taken or found for them, with one hold each.
    """

    __slots__ = ("firsts", "held", "num_blocks", "on_ready", "places")

    def __init__(
        self,
        places: dict[Place, PageEntry],
        firsts: list[int],
        num_blocks: int,
        on_ready: Callable[[Lent], None],
    ) -> None:
        self.places = places
        self.firsts = firsts
        self.num_blocks = num_blocks
        self.on_ready = on_ready
        self.held: dict[Place, int] = {}


class _Receipt:
    """Slots that wait for pages, and slots that its prompt will load. Mutated by `PageExchange`."""

    __slots__ = ("filling", "held")

    def __init__(self, filling: dict[Place, int], held: list[int]) -> None:
        self.filling = filling
        self.held = held


class PageExchange:
    """Mutated by the scheduler that made it, on its thread.

    Attributes:
      num_refused: pages that were not lent, since no slot could be had for them.
    """

    def __init__(self, memory: SequenceMemory, tier: HostTier) -> None:
        assert memory.prefix is not None
        self.num_refused = 0
        self._memory = memory
        self._prefix = memory.prefix
        self._tier = tier
        self._loans: dict[bytes, _Loan] = {}
        self._waiting: dict[bytes, None] = {}  # loans that are not ready
        self._receipts: dict[bytes, _Receipt] = {}

    @property
    def num_held(self) -> int:
        """Slots that are lent, or hold what has arrived for a prompt that has not begun."""
        held = {slot for loan in self._loans.values() for slot in loan.held.values()}
        return len(held.union(*(receipt.held for receipt in self._receipts.values())))

    @property
    def wants_step(self) -> bool:
        """Whether a step without tokens is of use: pages wait to be saved, and no other step may come."""
        return any(True for name in self._waiting for _ in self._unsaved(name))

    # ---- the engine that computes ----------------------------------------------------------------------------------

    def num_found(self, prompt: Prompt) -> int:
        """Blocks of the prompt that are here, on the device or in slots."""
        return len(self._prefix.match(prompt.salt, self._blocks(prompt)))

    def lend(self, name: bytes, prompt: Prompt, on_ready: Callable[[Lent], None]) -> None:
        """Saves what is here of the prompt, and holds it until `release`.

        `on_ready` is called on this thread, perhaps at once, when all slots have their pages.
        """
        assert name not in self._loans, "a name is used once"
        chain = self._prefix.match(prompt.salt, self._blocks(prompt))
        size = self._memory.page_size
        firsts = [group.first_column(len(chain) * size, size) for group in self._memory.groups]
        places = {
            Place(number, at): entry
            for number, entry in enumerate(chain)
            for at, first in enumerate(firsts)
            if number >= first
        }
        self._loans[name] = _Loan(places, firsts, len(chain), on_ready)
        self._waiting[name] = None
        self.poll()

    def save(self) -> None:
        """Has the plan that is being made save pages that are to be lent, as many as there is room for."""
        for name in self._waiting:
            loan = self._loans[name]
            for place, entry in [*self._unsaved(name)]:
                if entry.slots[place.at] != NO_SLOT:  # this plan saves it already, for another loan
                    self._lend_slot(loan, place, entry)
                    continue
                if not self._tier.has_room:
                    return
                is_full = 2 * len(self._tier.holds) >= self._tier.limits.num_slots  # saves and fills need slots, too
                if is_full or not self._tier.save_now(entry, place.at):
                    lacking = loan.places.keys() - loan.held.keys()
                    self.num_refused += len(lacking)
                    for left in lacking:
                        del loan.places[left]
                    break
                self._lend_slot(loan, place, entry)

    def poll(self) -> None:
        """Tells of the loans whose slots all have their pages by now. After each result, and before each plan."""
        for name in [*self._waiting]:
            loan = self._loans[name]
            for place, entry in loan.places.items():
                if place not in loan.held and entry.slots[place.at] != NO_SLOT:
                    self._lend_slot(loan, place, entry)
            if any(True for _ in self._unsaved(name)):
                continue
            if any(self._is_on_its_way(place, loan.places[place], slot) for place, slot in loan.held.items()):
                continue
            del self._waiting[name]
            loan.on_ready(self._cut(loan))

    def is_whole(self, name: bytes) -> bool:
        """Whether slots that are lent still have their pages: a flush takes them away."""
        loan = self._loans.get(name)
        return loan is not None and all(
            self._tier.owner(slot) == (loan.places[place], place.at) for place, slot in loan.held.items()
        )

    # ---- the engine that receives ----------------------------------------------------------------------------------

    def expect(self, name: bytes, prompt: Prompt, num_tokens: int, tenant: str = "") -> Wanted:
        """Takes slots, for `tenant`, for the pages that the prompt lacks of its first `num_tokens` tokens. Each is to
        be filled, and `arrive` called in any case."""
        assert name not in self._receipts, "a name is used once"
        prefix, size = self._prefix, self._memory.page_size
        blocks = self._blocks(prompt)
        chain = prefix.match(prompt.salt, blocks)
        parent = chain[-1] if chain else prefix.root(prompt.salt)
        num_blocks = min(len(prompt.token_ids) - 1, num_tokens) // size
        firsts = [group.first_column(num_blocks * size, size) for group in self._memory.groups]
        owner = self._memory.owner_of_tenant(tenant)
        receipt = self._receipts[name] = _Receipt({}, [])
        for entry in chain:
            for slot in entry.slots:
                if slot != NO_SLOT:
                    self._hold(receipt, slot)
        for number in range(len(chain), num_blocks):
            entry = prefix.expect(parent, blocks, number)
            if entry is None or not self._take(receipt, entry, number, firsts, owner):
                if entry is not None:
                    prefix.prune(entry)
                break
            parent = entry
        prefix.prune(parent)
        compute_s = self._memory.costs.token_s * (len(prompt.token_ids) - len(chain) * size)
        return Wanted(len(chain), num_blocks, dict(receipt.filling), compute_s)

    def arrive(self, name: bytes, places: Collection[Place]) -> None:
        """Of what was expected, the pages of these places are in their slots, and nobody fills the others any more.

        What has arrived stays until `release`.
        """
        receipt = self._receipts[name]
        filling, receipt.filling = receipt.filling, {}
        # From the end: an entry without content lives as long as those that follow it.
        for place, slot in reversed(filling.items()):
            if place not in places:
                receipt.held.remove(slot)
                self._tier.let_go((slot,))
            self._tier.end_fill(slot, place in places)

    # ---- both ------------------------------------------------------------------------------------------------------

    def release(self, name: bytes) -> None:
        """Gives the slots back, which then go or stay like all others. Unknown names are ignored."""
        self._waiting.pop(name, None)
        loan, receipt = self._loans.pop(name, None), self._receipts.get(name)
        if loan is not None:
            self._tier.let_go(loan.held.values())
        if receipt is not None:
            self.arrive(name, ())
            del self._receipts[name]
            self._tier.let_go(receipt.held)

    def check(self) -> None:
        """Proves that the tier counts the holds that are here."""
        holds = collections.Counter(slot for loan in self._loans.values() for slot in loan.held.values())
        for receipt in self._receipts.values():
            holds.update(receipt.held)
            assert set(receipt.filling.values()) <= set(receipt.held), receipt.filling
        assert holds == self._tier.holds, (holds, self._tier.holds)

    def _blocks(self, prompt: Prompt) -> Blocks:
        return self._prefix.blocks(prompt.salt, prompt.token_ids, prompt.content)

    def _unsaved(self, name: bytes) -> Iterator[tuple[Place, PageEntry]]:
        """Pages of a loan that the device alone has. Those that nothing has any more are left out."""
        loan = self._loans[name]
        return (
            (place, entry)
            for place, entry in loan.places.items()
            if place not in loan.held and entry.page_ids[place.at] and self._tier.enabled
        )

    def _lend_slot(self, loan: _Loan, place: Place, entry: PageEntry) -> None:
        slot = loan.held[place] = entry.slots[place.at]
        self._tier.hold(slot)

    def _is_on_its_way(self, place: Place, entry: PageEntry, slot: int) -> bool:
        return self._tier.owner(slot) == (entry, place.at) and not self._tier.has(entry, place.at)

    def _cut(self, loan: _Loan) -> Lent:
        """Gives back what nobody can use: pages behind one that could not be had, which were evicted meanwhile."""
        good = {place for place, slot in loan.held.items() if self._tier.owner(slot) == (loan.places[place], place.at)}
        end = loan.num_blocks
        for at, first in enumerate(loan.firsts):
            end = min(end, next((n for n in range(first, end) if Place(n, at) not in good), end))
        if end < loan.num_blocks and any(group.window is not None for group in self._memory.groups):
            end = 0  # a shorter beginning needs other pages of a group with a window than those that are held
        for place in [place for place in loan.held if place.block >= end]:
            self._tier.let_go((loan.held.pop(place),))
        loan.num_blocks = end
        slots = tuple(
            tuple(loan.held[Place(n, at)] for n in range(min(first, end), end)) for at, first in enumerate(loan.firsts)
        )
        return Lent(end, tuple(min(first, end) for first in loan.firsts), slots)

    def _hold(self, receipt: _Receipt, slot: int) -> None:
        self._tier.hold(slot)
        receipt.held.append(slot)

    def _take(self, receipt: _Receipt, entry: PageEntry, number: int, firsts: list[int], owner: int) -> bool:
        """Slots for the pages of a block. False: one is missing."""
        for at, first in enumerate(firsts):
            if entry.slots[at] == NO_SLOT:
                if number < first or entry.page_ids[at]:
                    continue
                if not self._tier.begin_fill(entry, at, may_evict=True, owner=owner):
                    return False
                receipt.filling[Place(number, at)] = entry.slots[at]
            self._hold(receipt, entry.slots[at])
        return True
