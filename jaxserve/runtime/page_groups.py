"""Groups of layers that share a block table, and the cache arrays that all groups share.

A layer with a window needs the last tokens of a sequence alone, so its pages can be given back while those of a layer
without window must stay. Layers that reach back equally far therefore form groups, each with a block table of its own
in every row. All groups take their pages from one pool: the cache is a number of arrays, the slots, and slot s of a
page holds the keys and values of layer s of whichever group owns the page. A page then has the same bytes in any group.

A model whose layers are all alike has one group, and a slot for each layer.
"""

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jaxserve.models.decoder import CachePlace
from jaxserve.sched.plan import PageGroup

_MAX_WASTE = 1 / 8  # bytes of slots without a layer, beside those of slots with one


@dataclasses.dataclass(frozen=True, slots=True)
class PageGroups:
    """The groups of a model, and how its layers are dealt to them.

    Attributes:
      groups: those without window first. Several may have the same window.
      windows: of each layer of the model; None where no sequence is longer than the window.
    """

    groups: tuple[PageGroup, ...]
    windows: tuple[int | None, ...]

    @classmethod
    def of(cls, windows: Sequence[int | None], max_model_len: int) -> "PageGroups":
        """The groups of a model with these windows, by layer, in sequences of at most `max_model_len` tokens.

        All slots of a page cost memory, but a group may have fewer layers than there are slots. So the number of slots
        is one that wastes little, both in short sequences (all groups hold equally many pages) and in long ones (those
        without window hold nearly all). Of these it is one with few groups, since each costs a block table, and pages
        that are filled to the end by one group alone.
        """
        own = tuple(None if window is None or window >= max_model_len else window for window in windows)
        counts = collections.Counter(own)
        num_slots = _choose_slots(counts)
        kinds = sorted(counts, key=lambda window: (window is not None, window or 0))
        groups = [PageGroup(window) for window in kinds for _ in range(_ceil(counts[window], num_slots))]
        return cls(tuple(groups), own)

    def of_layers(self, windows: Iterable[int | None]) -> "PageGroups":
        """The same groups, for a model with other numbers of the same layers."""
        return dataclasses.replace(self, windows=tuple(w if PageGroup(w) in self.groups else None for w in windows))

    def places(self, layers: range) -> tuple[CachePlace, ...]:
        """The places of `layers` of the model, where a device holds these and no others.

        All stages of a pipeline have the same groups, and each deals its own layers to them.
        """
        dealt: collections.Counter[int | None] = collections.Counter()
        places = []
        for layer in layers:
            window = self.windows[layer]
            numbers = [number for number, group in enumerate(self.groups) if group.window == window]
            slot, turn = divmod(dealt[window], len(numbers))
            places.append(CachePlace(group=numbers[turn], slot=slot))
            dealt[window] += 1
        return tuple(places)

    def num_slots(self, layers: range) -> int:
        """The cache arrays that a device with `layers` needs."""
        return 1 + max(place.slot for place in self.places(layers))

    def describe(self) -> str:
        """As in '7 groups of 5 layers, 6 of them with a window of 1024 tokens'."""
        number, layers = len(self.groups), self.num_slots(range(len(self.windows)))
        text = f"{number} group{'s' * (number > 1)} of {layers} layer{'s' * (layers > 1)}"
        windows = collections.Counter(group.window for group in self.groups if group.window is not None)
        for window, count in windows.items():
            text += f", {f'{count} of them ' if number > 1 else ''}with a window of {window} tokens"
        return text


def _choose_slots(counts: Mapping[int | None, int]) -> int:
    """The number of slots for so many layers of each window."""

    def num_groups(slots: int) -> int:
        return sum(_ceil(count, slots) for count in counts.values())

    def wastes_little(slots: int) -> bool:
        full = counts.get(None, 0)
        return all(
            groups * slots <= (1 + _MAX_WASTE) * layers
            for groups, layers in ((num_groups(slots), sum(counts.values())), (_ceil(full, slots), full))
        )

    fitting = [slots for slots in range(1, max(counts.values()) + 1) if wastes_little(slots)]
    return min(fitting, key=lambda slots: (num_groups(slots), num_groups(slots) * slots))


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
