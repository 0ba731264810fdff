"""Counts of what the devices of a compiled step send each other, read from its optimised HLO.

Latency and bandwidth, and so times, are the caller's assumptions.
"""

import dataclasses
import re
from collections import Counter

from jaxserve.lab.compiled.hlo import Instruction, Module, all_bytes

_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of exchange between `group` devices, as often as a step does it.

    Attributes:
      count: exchanges in a step.
      payload_bytes: of one step, over all exchanges: the array that every device ends up with, or begins with where it
        ends up with a part.
    """

    kind: str
    group: int
    count: int
    payload_bytes: int

    @property
    def sent_bytes(self) -> float:
        """Bytes that each device sends in a step when the devices form a ring."""
        share = (self.group - 1) / self.group
        turns = {"all-reduce": 2 * share, "collective-permute": 1.0}.get(self.kind, share)
        return turns * self.payload_bytes


def count_collectives(module: Module, num_devices: int) -> tuple[Collective, ...]:
    """Every exchange of a step, by kind and group.

    A conditional counts its most expensive branch; a loop as many turns as the compiler knows, else one.
    """
    counts, payload = _count(module, module.entry, num_devices)
    return tuple(
        Collective(kind=kind, group=group, count=count, payload_bytes=payload[kind, group])
        for (kind, group), count in sorted(counts.items())
    )


_Totals = tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]  # by (kind, group): how many, how many bytes


def _count(module: Module, computation: str, num_devices: int) -> _Totals:
    counts: Counter[tuple[str, int]] = Counter()
    payload: Counter[tuple[str, int]] = Counter()
    shapes = {i.name: i.shape for i in module.computations[computation]}
    for i in module.computations[computation]:
        kind = i.op.removesuffix("-start")
        if kind in _KINDS:
            key = (kind, _group(i, num_devices))
            sent = sum(all_bytes(shapes.get(o, "")) for o in i.operands)
            counts[key] += 1
            payload[key] += sent * (key[1] if kind == "all-gather" else 1)
            continue
        if i.op.endswith(("-done", "-update")):
            continue
        inner = [_count(module, name, num_devices) for name in i.called if name in module.computations]
        if i.op == "conditional" and inner:
            inner = [max(inner, key=lambda totals: sum(totals[1].values()))]
        for more, more_bytes in inner:
            for key, number in more.items():
                counts[key] += number * i.turns
                payload[key] += more_bytes[key] * i.turns
    return counts, payload


def _group(i: Instruction, num_devices: int) -> int:
    if found := _IOTA.search(i.text):
        return int(found.group(1))
    if (found := _LISTED.search(i.text)) and found.group(1):
        return len(found.group(1).split(","))
    return num_devices
