"""A whole step by count: XLA's estimates and bytes of its instructions, the kernels by their own schedules.

The entry of an optimised module is in the order in which the core runs it. Each instruction lasts for the longer of
two times: the cycles that XLA estimates, and its bytes at the published bandwidth, behind those that are under way.
Copies that XLA starts early (weights, fetched into the fast memory) move meanwhile, and an instruction that awaits one
lasts until it is there. So the sum can lie at, and not below, what all bytes need.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from jaxserve.lab.compiled.collectives import KINDS, Collective, collectives_by_instruction
from jaxserve.lab.compiled.traffic import is_weight_kernel, memory_traffic
from jaxserve.lab.ledger.estimates import estimated_cycles
from jaxserve.lab.ledger.predict import KernelTime
from jaxserve.runtime.hlo import Instruction, Module
from jaxserve.values.chips import Chip

# Where the time of a step goes: matrix products outside of kernels; attention, with what prepares its operands; the
# write of new keys and values; sampling; exchanges between devices; waits for copies that were started early; the rest.
PARTS = ("products", "attention", "write", "sampling", "collectives", "copies", "rest")
_PRODUCTS = ("convolution", "dot")
_CALLS = ("while", "conditional", "call")
_UNTIMED = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "partition-id")


@dataclasses.dataclass(slots=True, kw_only=True)
class StepTime:
    """One step, counted.

    Attributes:
      parts: seconds of each of `PARTS`.
      moved_bytes: through the main memory, by all instructions and kernels.
      instructions: that take time.
      unestimated: those of them without an estimate of XLA, which last as long as their bytes; kernels and copies
        that were started early are not among them.
      unestimated_seconds: their time.
      open_loops: loops of which the program does not tell the number of turns, counted as one turn.
    """

    parts: dict[str, float]
    moved_bytes: float = 0.0
    instructions: int = 0
    unestimated: int = 0
    unestimated_seconds: float = 0.0
    open_loops: int = 0

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def time_of_step(
    module: Module,
    chip: Chip,
    *,
    num_devices: int,
    kernel_time: Callable[[Instruction], KernelTime | None],
    collective_seconds: Callable[[Collective], float],
    hit_share: float = 1.0,
) -> StepTime:
    """The time of a compiled step on one device of `chip`.

    `kernel_time` tells that of an instruction that runs a Pallas kernel; None: of another, which takes the time of its
    bytes. `collective_seconds` tells that of the exchanges of one kind. `hit_share` is that of `memory_traffic`. A
    conditional takes its longest branch.
    """
    clock = _Clock(StepTime(parts=dict.fromkeys(PARTS, 0.0)))
    walk = _StepWalk(
        module=module,
        chip=chip,
        num_devices=num_devices,
        kernel_time=kernel_time,
        collective_seconds=collective_seconds,
        hit_share=hit_share,
    )
    walk.run(module.entry, clock, None)
    return clock.time


class _Clock:
    """The time in a step: `now`, when the memory has moved all that was asked of it, and when each copy arrives."""

    def __init__(self, time: StepTime) -> None:
        self.time = time
        self.now = 0.0
        self.memory_free = 0.0
        self.arrivals: dict[str, float] = {}

    def move(self, seconds: float) -> float:
        """Asks the memory for bytes that take it `seconds`; when they have moved."""
        if seconds:
            self.memory_free = max(self.now, self.memory_free) + seconds
        return self.memory_free if seconds else self.now

    def advance(self, until: float, part: str) -> float:
        """Goes on to `until`; the seconds that passed."""
        passed = max(0.0, until - self.now)
        self.time.parts[part] += passed
        self.now += passed
        return passed

    def copy(self) -> "_Clock":
        other = _Clock(dataclasses.replace(self.time, parts=dict(self.time.parts)))
        other.now, other.memory_free, other.arrivals = self.now, self.memory_free, dict(self.arrivals)
        return other

    def become(self, other: "_Clock") -> None:
        self.time, self.now, self.memory_free, self.arrivals = other.time, other.now, other.memory_free, other.arrivals

    def repeat(self, before: "_Clock", turns: int) -> None:
        """What passed since `before` was one turn of a loop, and there are `turns`."""
        more, old, new = turns - 1, before.time, self.time
        for part in PARTS:
            new.parts[part] += more * (new.parts[part] - old.parts[part])
        for name in ("moved_bytes", "instructions", "unestimated", "unestimated_seconds", "open_loops"):
            setattr(new, name, getattr(new, name) + more * (getattr(new, name) - getattr(old, name)))
        passed = more * (self.now - before.now)
        self.now += passed
        self.memory_free += passed


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _StepWalk:
    module: Module
    chip: Chip
    num_devices: int
    kernel_time: Callable[[Instruction], KernelTime | None]
    collective_seconds: Callable[[Collective], float]
    hit_share: float

    def run(self, computation: str, clock: _Clock, within: str | None) -> None:
        """One pass over a computation. `within`: the part that its instructions belong to, whatever they are."""
        cycles = estimated_cycles(self.module, computation)
        moved = memory_traffic(self.module, computation, hit_share=self.hit_share)
        exchanges = collectives_by_instruction(self.module, computation, self.num_devices)
        for i in self.module.computations[computation]:
            if i.op in _UNTIMED or i.op.endswith("-update"):
                continue
            part = within or self._part(i, exchanges.get(i.name, ()))
            if i.op.endswith("-done"):
                waits = "collectives" if i.op.removesuffix("-done") in KINDS else within or "copies"
                clock.advance(clock.arrivals.pop(i.operands[0], 0.0), waits)
            elif i.op in _CALLS:
                self._call(i, clock, "sampling" if part == "sampling" else None)
            elif i.op.endswith("-start"):
                self._start(i, clock, moved.get(i.name, 0), exchanges.get(i.name, ()))
            else:
                self._instruction(i, clock, part, cycles, moved, exchanges.get(i.name, ()))

    def _instruction(
        self,
        i: Instruction,
        clock: _Clock,
        part: str,
        cycles: Mapping[str, int],
        moved: Mapping[str, int],
        exchanges: Sequence[Collective],
    ) -> None:
        size = moved.get(i.name, 0)
        kernel = None if i.kernel is None else self.kernel_time(i)
        if kernel is not None:
            size, least = kernel.walk.copied_bytes, kernel.seconds
        else:
            least = cycles.get(i.name, 0) / self.chip.clock_hz
        if not size and not least and not exchanges:
            return
        least += sum(self.collective_seconds(exchange) for exchange in exchanges)
        clock.time.moved_bytes += size
        clock.time.instructions += 1
        passed = clock.advance(max(clock.now + least, clock.move(size / self.chip.memory_bandwidth)), part)
        if kernel is None and not exchanges and i.name not in cycles:
            clock.time.unestimated += 1
            clock.time.unestimated_seconds += passed

    def _start(self, i: Instruction, clock: _Clock, size: int, exchanges: Sequence[Collective]) -> None:
        """What runs beside the core: a copy, an exchange; another unit's computation lasts as long as its bytes."""
        end = clock.move(size / self.chip.memory_bandwidth)
        clock.time.moved_bytes += size
        if exchanges:
            end = max(end, clock.now + sum(self.collective_seconds(exchange) for exchange in exchanges))
        clock.arrivals[i.name] = end

    def _call(self, i: Instruction, clock: _Clock, within: str | None) -> None:
        called = [name for name in i.called if name in self.module.computations]
        if i.op == "conditional":
            branches = [clock.copy() for _ in called]
            for name, branch in zip(called, branches, strict=True):
                self.run(name, branch, within)
            clock.become(max(branches, key=lambda branch: branch.now))
            return
        before = clock.copy()
        for name in called:
            self.run(name, clock, within)
        clock.repeat(before, i.turns or 1)
        clock.time.open_loops += i.op == "while" and i.turns is None

    def _part(self, i: Instruction, exchanges: Sequence[Collective]) -> str:
        if is_weight_kernel(i):
            return "products"
        if i.kernel is not None:
            return "write" if i.kernel.endswith("write") else "attention"
        if exchanges and i.op not in _CALLS:
            return "collectives"
        if "sample" in i.scopes:
            return "sampling"
        if self._multiplies(i):
            return "products"
        return "attention" if "attend" in i.scopes else "rest"

    def _multiplies(self, i: Instruction) -> bool:
        return i.op in _PRODUCTS or (
            i.op == "fusion"
            and any(self._multiplies(inner) for name in i.called for inner in self.module.computations.get(name, ()))
        )
