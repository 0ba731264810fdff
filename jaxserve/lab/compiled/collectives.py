"""Counts of what the devices of a compiled step send each other, read from its optimised HLO.

Latency and bandwidth, and so times, are the caller's assumptions.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Mapping

from jaxserve.runtime.hlo import Instruction, Module, all_bytes

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
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
    return _listed(_count(module, module.entry, num_devices))


def collectives_by_instruction(
    module: Module, computation: str, num_devices: int
) -> Mapping[str, tuple[Collective, ...]]:
    """The exchanges of each instruction of a computation that has some, in itself or in what it calls."""
    shapes = {i.name: i.shape for i in module.computations[computation]}
    counted = {i.name: _of(module, i, shapes, num_devices) for i in module.computations[computation]}
    return {name: _listed(totals) for name, totals in counted.items() if totals[0]}


_Totals = tuple[Counter[tuple[str, int]], Counter[tuple[str, int]]]  # by (kind, group): how many, how many bytes


def _listed(totals: _Totals) -> tuple[Collective, ...]:
    counts, payload = totals
    return tuple(
        Collective(kind=kind, group=group, count=count, payload_bytes=payload[kind, group])
        for (kind, group), count in sorted(counts.items())
    )


def _count(module: Module, computation: str, num_devices: int) -> _Totals:
    shapes = {i.name: i.shape for i in module.computations[computation]}
    return _sum(_of(module, i, shapes, num_devices) for i in module.computations[computation])


def _of(module: Module, i: Instruction, shapes: Mapping[str, str], num_devices: int) -> _Totals:
    kind = i.op.removesuffix("-start")
    if kind in KINDS:
        key = (kind, _group(i, num_devices))
        sent = sum(all_bytes(shapes.get(o, "")) for o in i.operands)
        return Counter({key: 1}), Counter({key: sent * (key[1] if kind == "all-gather" else 1)})
    if i.op.endswith(("-done", "-update")):
        return Counter(), Counter()
    inner = [_count(module, name, num_devices) for name in i.called if name in module.computations]
    if i.op == "conditional" and inner:
        inner = [max(inner, key=lambda totals: sum(totals[1].values()))]
    return _sum(inner, i.turns or 1)


def _sum(parts: Iterable[_Totals], times: int = 1) -> _Totals:
    counts, payload = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for more, more_bytes in parts:
        for key, number in more.items():
            counts[key] += number * times
            payload[key] += more_bytes[key] * times
    return counts, payload


def _group(i: Instruction, num_devices: int) -> int:
    if found := _IOTA.search(i.text):
        return int(found.group(1))
    if (found := _LISTED.search(i.text)) and found.group(1):
        return len(found.group(1).split(","))
    return num_devices
