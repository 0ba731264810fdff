"""Executes the scalar operations of a program and keeps its clock.

The scalar unit decides what runs: grids, trip counts, which pages are copied, whether a block is masked. Its operations
are few and simple, so they are translated to Python, a function for each run of bundles without a label or a branch in
it, and executed with the integers that the kernel is called with. Everything else is time:

- a bundle takes a cycle, the bundles in the delay slots of a branch too;
- a copy from or to the main memory waits for those before it and moves at the bandwidth; other copies take no time;
- a wait for a copy lasts until its last byte is there;
- products take at least the cycles that their rows need on the matrix units, since a unit stalls the core when its
  results are not there yet.

Values that come from vectors, from semaphores or from operands that were not given are unknown. They spread through
arithmetic, and a branch on one is refused.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxserve.lab.ledger.bundles import UNITS, Bundle, Operation, Program, UnknownSchedule

_GRANULE = 32  # bytes; copies are counted in granules
_WORD = 4  # bytes of a cell of the scalar memory
_FAR = 1 << 50  # between the addresses of two allocations or operands
_LONGEST_DELAY = 12  # bundles
_MOST = 200_000_000  # bundles; a loop that does not end was walked wrongly
_PRODUCT = re.compile(r"vmatmul\.(?:(?:mubr|msk)\.)*([a-z]+\d+[a-z0-9]*)(?:\..*?)?(?:mxu(\d))?$")
_ALLOCATION = re.compile(r"\[#allocation(\w+)(?: \+ (\S+?))?\]$")
_NUMBER_IN = re.compile(r"^(\d+) \[#allocation\w+\]$")  # an offset, and what it is an offset in
_SCALAR_NAME = re.compile(r"[sp]\d+(?:_[sp]\d+)?$")
_BRANCH = "sbr.rel"
_RELATIONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_EXPRESSIONS = {
    "sadd.s32": "({0} + {1})",
    "ssub.s32": "({0} - {1})",
    "smul.u32": "({0} * {1})",
    "smul.s32": "({0} * {1})",
    "sand.u32": "({0} & {1})",
    "sor.u32": "({0} | {1})",
    "sxor.u32": "({0} ^ {1})",
    "sshll.u32": "({0} << {1})",
    "sshrl.u32": "(unsigned({0}) >> {1})",
    "sshra.s32": "({0} >> {1})",
    "smin.u32": "least(unsigned({0}), unsigned({1}))",
    "smax.u32": "most(unsigned({0}), unsigned({1}))",
    "smin.s32": "least({0}, {1})",
    "smax.s32": "most({0}, {1})",
    "pand": "both({0}, {1})",
    "por": "either({0}, {1})",
    "pnand": "unless(both({0}, {1}))",
    "pnor": "unless(either({0}, {1}))",
    "pneg": "unless({0})",
}


class _Unknown:
    """A value that the walk does not know. Arithmetic with it is unknown too; deciding by it is refused."""

    def _spread(self, *_: Any) -> "_Unknown":
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __and__ = __rand__ = __or__ = __ror__ = _spread
    __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __neg__ = _spread
    __lt__ = __le__ = __gt__ = __ge__ = _spread

    def __eq__(self, other: object) -> Any:
        return self

    def __ne__(self, other: object) -> Any:
        return self

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        raise UnknownSchedule(
            "a branch of this kernel depends on a value that is not known: give the walk every integer operand"
        )


UNKNOWN = _Unknown()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """One loop of a program, as it ran. Loops inside it count for themselves.

    Attributes:
      depth: 1 for an outermost loop.
      first: the index of its first bundle in the listing.
      turns: over the whole call.
      bundles: of all turns together; `matrix_cycles`, `waited_cycles` and `copied_bytes` likewise.
      units: uses of each unit by name (`UNITS`), all turns together.
    """

    depth: int
    first: int
    turns: int
    bundles: int
    matrix_cycles: float
    waited_cycles: float
    copies: int
    copied_bytes: int
    waits: int
    units: Mapping[str, int]

    @property
    def bundles_per_turn(self) -> float:
        return self.bundles / max(1, self.turns)

    @property
    def spills(self) -> int:
        """Registers stored and loaded again because there were too few, all turns together."""
        return self.units["VLOAD:FILL"] + self.units["VSTORE:SPILL"]

    @property
    def spills_per_turn(self) -> float:
        return self.spills / max(1, self.turns)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """A call from its first bundle to its last.

    Attributes:
      cycles: bundles, stalls of products and waits for copies together.
      bundles: that were issued.
      stalled_cycles: that products took beyond their bundles.
      waited_cycles: for copies.
      copied_bytes: from and to the main memory.
      loops: in the order of the listing; what stands outside of all loops is not among them.
    """

    cycles: float
    bundles: int
    stalled_cycles: float
    waited_cycles: float
    copied_bytes: int
    loops: tuple[Loop, ...]

    @property
    def inner_loops(self) -> tuple[Loop, ...]:
        """Those without a loop inside."""
        deeper = [*(loop.depth for loop in self.loops[1:]), 0]
        return tuple(loop for loop, next_depth in zip(self.loops, deeper, strict=True) if next_depth <= loop.depth)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What the clock goes by.

    Attributes:
      bytes_per_cycle: of the main memory.
      rows_per_cycle: that one matrix unit takes, by the dtype of a product; others take those of 'bf16'.
      matrix_units: of the core.
      delay_slots: bundles behind a branch that are issued before it acts; None: as many as its region has left.
      latency_cycles: from the start of a copy to its first byte.
    """

    bytes_per_cycle: float
    rows_per_cycle: Mapping[str, float]
    matrix_units: int
    delay_slots: int | None
    latency_cycles: float = 0.0


def walk(program: Program, operands: Sequence[np.ndarray | None], rates: Rates) -> Walk:
    """Runs a program with the operands of one call, in their order; None for those that are not known.

    Raises UnknownSchedule for what it does not understand.
    """
    blocks = _blocks(program, rates)
    clock = _Clock(rates)
    machine = _Machine(clock, operands)
    counts = [0] * len(blocks)
    waited = [0.0] * len(blocks)
    stalled, issued, at = 0.0, 0, 0
    while at < len(blocks):
        block = blocks[at]
        before = clock.waited
        clock.block = number = at
        at = block.run(machine)
        counts[number] += 1
        waited[number] += clock.waited - before
        stall = max(0.0, block.matrix_cycles - block.size)
        clock.now += stall
        stalled += stall
        issued += block.size
        if issued > _MOST:
            raise UnknownSchedule(f"the kernel did not end within {_MOST} bundles")
    return Walk(
        cycles=clock.now,
        bundles=issued,
        stalled_cycles=stalled,
        waited_cycles=clock.waited,
        copied_bytes=sum(clock.copied.values()),
        loops=_loops(program, blocks, counts, waited, clock),
    )


# --- the machine ------------------------------------------------------------------------------------------------------


class _Clock:
    """The time in cycles, and the copies under way. Changed by the blocks as they run."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self._free_at = 0.0  # when the memory has moved all that was asked of it
        self._arrivals: dict[Any, collections.deque[tuple[int, float]]] = collections.defaultdict(collections.deque)
        self.now = 0.0
        self.waited = 0.0
        self.block = 0
        self.copied: collections.Counter[int] = collections.Counter()  # bytes by block
        self.copies: collections.Counter[int] = collections.Counter()
        self.waits: collections.Counter[int] = collections.Counter()

    def start(self, granules: int, flag: Any, main_memory: bool) -> None:
        """A copy begins; `flag` counts its granules when it has ended."""
        end = self.now
        if main_memory:
            size = granules * _GRANULE
            self._free_at = max(self.now, self._free_at) + size / self._rates.bytes_per_cycle
            end = self._free_at + self._rates.latency_cycles
            self.copied[self.block] += size
            self.copies[self.block] += 1
        self._arrivals_of(flag).append((granules, end))

    def signal(self, flag: Any, granules: int) -> None:
        """The core itself counts up a flag, as after copying with loads and stores.

        It also takes off what a wait has waited for, which is known.
        """
        if granules > 0:
            self._arrivals_of(flag).append((granules, self.now))

    def wait(self, flag: Any, granules: int) -> None:
        """Until the next `granules` of a flag have arrived."""
        self.waits[self.block] += 1
        left, until, arrivals = granules, self.now, self._arrivals_of(flag)
        while left > 0:
            if not arrivals:
                raise UnknownSchedule(f"the kernel waits for {left} granules of a copy that it never started")
            size, end = arrivals.popleft()
            until = max(until, end)
            if size > left:
                arrivals.appendleft((size - left, end))
            left -= size
        self.waited += until - self.now
        self.now = until

    def _arrivals_of(self, flag: Any) -> collections.deque[tuple[int, float]]:
        if flag is UNKNOWN:
            raise UnknownSchedule("a copy of this kernel counts on a flag whose address is not known")
        return self._arrivals[flag]


class _Machine:
    """Values by name, registers where a phi may read them, and the scalar memory."""

    def __init__(self, clock: _Clock, operands: Sequence[np.ndarray | None]) -> None:
        self.clock = clock
        self.values: dict[str, Any] = {}
        self.registers: dict[str, Any] = {}
        self._memory: dict[Any, Any] = {}
        self._operands = [None if x is None else _in_memory(np.asarray(x)) for x in operands]

    def operand(self, index: int, is_value: bool) -> Any:
        """The number itself, or an address that `copy` understands."""
        if not is_value:
            return -(64 * (index + 1) + 1) * _FAR  # a multiple that shows whether it was shifted
        given = self._operands[index] if index < len(self._operands) else None
        return UNKNOWN if given is None or given.dtype.kind not in "iub" else int(given[0])

    def load(self, address: Any) -> Any:
        return UNKNOWN if address is UNKNOWN else self._memory.get(address, UNKNOWN)

    def store(self, address: Any, value: Any) -> None:
        if address is not UNKNOWN:
            self._memory[address] = value

    def copy(self, source: Any, granules: int, target: Any) -> None:
        """Into the scalar memory. Sources are addresses in granules, targets in words."""
        if target is UNKNOWN:
            return
        words = granules * _GRANULE // _WORD
        given, first = None, 0
        if source is not UNKNOWN and source < 0:
            # An operand's address is in lines of 512 bytes, or shifted to granules.
            multiple = -(source // _FAR)
            scale = 16 if multiple % 64 == 1 else 1
            index = multiple // (64 if scale == 16 else 1024) - 1
            first = (source + multiple * _FAR) * scale * _GRANULE // _WORD
            given = self._operands[index] if index < len(self._operands) else None
        if given is None or given.dtype.kind not in "iub":
            self._memory.update((target + i, UNKNOWN) for i in range(words))
            return
        copied = given[first : first + words].tolist()
        copied += [0] * (words - len(copied))  # behind the end of an array its last tile is filled up
        self._memory.update((target + i, value) for i, value in enumerate(copied))


def _in_memory(x: np.ndarray) -> np.ndarray:
    """An array of 32 bits as it lies in the main memory: rows and columns in tiles of up to 8 by 128, filled with 0."""
    if x.ndim < 2 or x.dtype.itemsize != _WORD:
        return x.reshape(-1)
    *_, rows, columns = x.shape
    tile = min(8, 1 << max(0, rows - 1).bit_length())
    x = np.pad(x.reshape(-1, rows, columns), ((0, 0), (0, -rows % tile), (0, -columns % 128)))
    return x.reshape(len(x), -1, tile, x.shape[-1] // 128, 128).swapaxes(2, 3).reshape(-1)


# --- translation ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(slots=True, kw_only=True)
class _Block:
    """Bundles [first, first + size) that run one after the other. `run` gives the number of the block that follows."""

    first: int
    size: int
    matrix_cycles: float
    run: Callable[[_Machine], int]


def _blocks(program: Program, rates: Rates) -> list[_Block]:
    bundles = program.bundles
    branches = [i for i, b in enumerate(bundles) if any(op.opcode == _BRANCH for op in b.operations)]
    targets = {op.target for b in bundles for op in b.operations if op.opcode == _BRANCH and op.target is not None}
    place = {region: i for i, b in enumerate(bundles) for region in b.regions if region in targets}
    if missing := targets - set(place):  # the end of the program has no number
        assert "PF" in bundles[-1].labels, f"no bundle begins the regions {missing}"
        place |= dict.fromkeys(missing, len(bundles) - 1)
    starts = sorted({0, *place.values(), *(i + _delay(bundles, i, rates) + 1 for i in branches)} - {len(bundles)})
    number = {start: n for n, start in enumerate(starts)}
    translator = _Translator(
        block_of={region: number[i] for region, i in place.items()},
        phi_registers=frozenset(_register(op.result) for b in bundles for op in b.operations if _is_phi(op)),
        allocations={},
    )
    return [
        _Block(
            first=start,
            size=stop - start,
            matrix_cycles=_matrix_cycles(bundles[start:stop], rates),
            run=translator.function(bundles[start:stop], n + 1),
        )
        for n, (start, stop) in enumerate(zip(starts, [*starts[1:], len(bundles)], strict=True))
    ]


def _delay(bundles: Sequence[Bundle], branch: int, rates: Rates) -> int:
    """Bundles behind a branch that are issued before it acts.

    Where their number is not the same for all branches (TPU7x), a branch acts at the next border of a region, which is
    at most a few bundles away; where the listing shows none, after one.
    """
    if rates.delay_slots is not None:
        return rates.delay_slots
    for i in range(branch + 1, min(branch + _LONGEST_DELAY, len(bundles) - 1)):
        if bundles[i].ends or bundles[i + 1].regions:
            return i - branch
    return 1


def _matrix_cycles(bundles: Sequence[Bundle], rates: Rates) -> float:
    """Cycles that the busiest matrix unit needs for the rows of a block. A register has 8 rows of 32 bits."""
    by_unit: dict[str, float] = collections.defaultdict(float)
    for bundle in bundles:
        for op in bundle.operations:
            if found := _PRODUCT.match(op.opcode):
                dtype, unit = found.groups()
                bits = re.findall(r"\d+", dtype)[0]
                by_unit[unit or ""] += (
                    8 * 32 / int(bits) / rates.rows_per_cycle.get(dtype, rates.rows_per_cycle["bf16"])
                )
    anywhere = by_unit.pop("", 0.0) / rates.matrix_units
    return anywhere + max(by_unit.values(), default=0.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Translator:
    """Writes the functions of a program's blocks.

    Attributes:
      block_of: the number of the block that a region begins.
      phi_registers: those that a phi reads: the values that are put there are kept by register, too.
      allocations: the numbers of named allocations, given as they are met.
    """

    block_of: Mapping[int, int]
    phi_registers: frozenset[str]
    allocations: dict[str, int]

    def function(self, bundles: Sequence[Bundle], following: int) -> Callable[[_Machine], int]:
        """Executes the scalar operations of a block, advances the clock, and gives the block that comes next."""
        phis = [op for b in bundles for op in b.operations if _is_phi(op)]
        lines = [f"V[{op.result!r}] = R.get({_register(op.result)!r}, UNKNOWN)" for op in phis]
        for op in phis:  # all are read before any is written
            lines.append(f"R[{_register(op.result)!r}] = V[{op.result!r}]")
        for passed, bundle in enumerate(bundles):
            for op in bundle.operations:
                lines += self._statement(op, passed)
        source = "\n  ".join(
            (
                "def run(machine):",
                "V, R, clock = machine.values, machine.registers, machine.clock",
                "begin, branch = clock.now - clock.waited, None",
                *lines,
                f"clock.now = begin + clock.waited + {len(bundles)}",
                f"return {following} if branch is None else branch",
            )
        )
        scope: dict[str, Any] = dict(_HELPERS)
        exec(compile(source, "<bundles>", "exec"), scope)
        return scope["run"]

    def _statement(self, op: Operation, passed: int) -> list[str]:
        """Python lines of one operation, `passed` bundles after the beginning of its block."""
        body = self._effect(op, passed)
        if not body:
            return []
        if body[0].startswith("V[") and _register(op.result) in self.phi_registers:
            body = [*body, f"R[{_register(op.result)!r}] = V[{op.result!r}]"]
        if op.guard is None:
            return body
        name, negated = op.guard
        return [f"if {'not ' if negated else ''}{self._value('%' + name)}:", *(f"  {line}" for line in body)]

    def _effect(self, op: Operation, passed: int) -> list[str]:
        code, args = op.opcode, op.operands
        here = f"clock.now = begin + clock.waited + {passed}"
        if code == _BRANCH:
            assert op.target is not None
            return [f"branch = {self.block_of[op.target]}"]
        if code == "dma.done.wait":
            return [here, f"clock.wait({self._value(args[0])}, {self._value(args[1])})"]
        if code == "vsyncadd":
            return [here, f"clock.signal({self._value(args[0])}, {self._value(args[1])})"]
        if code.startswith("dma."):
            return [here, *self._copy(op)]
        if code == "sst":
            return [f"machine.store({self._address(args[0])}, {self._value(args[1])})"]
        if code.startswith("inlined_call_operand"):
            return [f"V[{op.result!r}] = machine.operand({int(args[0])}, {code == 'inlined_call_operand.'})"]
        if not _SCALAR_NAME.match(op.result) or _is_phi(op):
            return []
        return [f"V[{op.result!r}] = {self._scalar(op)}"]

    def _scalar(self, op: Operation) -> str:
        """The expression of an operation of the scalar unit; of one that is not known, the unknown value."""
        code, args = op.opcode, [self._value(a) for a in op.operands]
        if code in ("smov", "pmov"):
            return self._choice(op) if len(args) == 2 else args[0]
        if code == "scalar_select":
            return f"select({', '.join(args)})"
        if code == "sld" and op.remark == "core id":
            return "0"
        if code == "sld":
            return f"machine.load({self._address(op.operands[0])})"
        if code.startswith("int_to_ptr"):
            return args[-1]
        if code.startswith("scalar_lea"):
            return f"({args[0]} + {args[1]})"
        if code.startswith("scmp."):
            _, relation, dtype = code.split(".")[:3]
            left, right = (f"unsigned({a})" if dtype == "u32" else a for a in args)
            return f"({left} {_RELATIONS[relation]} {right})" if dtype[0] in "su" else "UNKNOWN"
        if code in _EXPRESSIONS:
            return _EXPRESSIONS[code].format(*args)
        return "UNKNOWN"

    def _choice(self, op: Operation) -> str:
        """'smov (%p1, %s2), %s3': the third where the predicate holds, else the second, which the register holds."""
        predicate, held = op.operands[0].strip("()").split(",")
        test = self._value(predicate.lstrip("!"))
        test = f"unless({test})" if predicate[0] == "!" else test
        return f"select({test}, {self._value(op.operands[1])}, {self._value(held)})"

    def _copy(self, op: Operation) -> list[str]:
        """A copy: its bytes, the flags that count them at its end, and the numbers that reach the scalar memory."""
        named, kind = op.named, op.opcode.removeprefix("dma.").replace("_", "-")
        if kind == "general":  # of the windows of a grid, where no remark names the memories
            kind = op.remark or "hbm-to-vmem"
        granules = self._value(named["size_in_granules"])
        lines = [f"clock.start({granules}, {self._value(named['dst_syncflagno'])}, {'hbm' in kind})"]
        if kind.endswith("to-smem"):
            source, target = next(iter(named.values())), named.get("smem", named.get("dst", ""))
            lines.append(f"machine.copy({self._value(source)}, {granules}, {self._value(target)})")
        return lines

    def _address(self, text: str) -> str:
        """A cell of the scalar memory: '[smem:[#allocation4 + $0x1]]', '[smem:[%s6_s8 + %s7_s2]]'."""
        assert text.startswith("[smem:"), text
        parts = text.removeprefix("[smem:").strip("[]").split(" + ")
        return "(" + " + ".join(self._value(f"[{part}]" if part.startswith("#") else part) for part in parts) + ")"

    def _value(self, text: str) -> str:
        """The expression of an operand: a name, a number, an allocation."""
        text = _NUMBER_IN.sub(r"\1", text.strip())
        if text.startswith("%"):
            return f"V.get({text[1:]!r}, UNKNOWN)"
        if found := _ALLOCATION.match(text):
            name, offset = found.groups()
            base = self.allocations.setdefault(name, (len(self.allocations) + 1) * _FAR)
            return str(base + int((offset or "0").lstrip("$"), 0))
        try:
            number = int(text.lstrip("$"), 0)
        except ValueError:
            return "UNKNOWN"
        return str(number - 2**32 if 2**31 <= number < 2**32 else number)


def _is_phi(op: Operation) -> bool:
    return op.opcode in ("sphi", "pphi")


def _register(name: str) -> str:
    """'s30561_s11' is held by 's11'."""
    return name.rpartition("_")[2]


def _unsigned(x: Any) -> Any:
    return x & 0xFFFFFFFF if x is UNKNOWN or -(2**31) <= x < 0 else x


def _select(condition: Any, one: Any, other: Any) -> Any:
    return UNKNOWN if condition is UNKNOWN else one if condition else other


def _unless(x: Any) -> Any:
    return UNKNOWN if x is UNKNOWN else not x


def _both(x: Any, y: Any) -> Any:
    known = [bool(v) for v in (x, y) if v is not UNKNOWN]
    return False if not all(known) else UNKNOWN if len(known) < 2 else True


def _either(x: Any, y: Any) -> Any:
    return _unless(_both(_unless(x), _unless(y)))


def _least(x: Any, y: Any) -> Any:
    return UNKNOWN if x is UNKNOWN or y is UNKNOWN else min(x, y)


def _most(x: Any, y: Any) -> Any:
    return UNKNOWN if x is UNKNOWN or y is UNKNOWN else max(x, y)


_HELPERS = {
    "UNKNOWN": UNKNOWN,
    "unsigned": _unsigned,
    "select": _select,
    "unless": _unless,
    "both": _both,
    "either": _either,
    "least": _least,
    "most": _most,
}


# --- loops ------------------------------------------------------------------------------------------------------------


def _loops(
    program: Program, blocks: Sequence[_Block], counts: Sequence[int], waited: Sequence[float], clock: _Clock
) -> tuple[Loop, ...]:
    """Each loop with what ran in it and in no loop inside it: the bundles of one depth from its label to the next."""
    bundles = program.bundles
    inside: list[list[int]] = []  # the loops around each block, by the block that a loop begins with
    open_loops: list[int] = []
    for n, block in enumerate(blocks):
        depth = max(b.depth for b in bundles[block.first : block.first + block.size])
        if "LB" in bundles[block.first].labels:
            open_loops = [*open_loops[: depth - 1], n]
        # The delay slots of a loop's last branch are printed outside of it; they hold nothing of weight.
        open_loops = open_loops[:depth] if depth else []
        inside.append(list(open_loops))
    found = []
    for first in sorted({loops[-1] for loops in inside if loops}):
        own = [n for n, loops in enumerate(inside) if loops and loops[-1] == first]
        units: collections.Counter[str] = collections.Counter()
        for n in own:
            block = blocks[n]
            for bundle in bundles[block.first : block.first + block.size]:
                for unit, used in zip(UNITS, bundle.units, strict=True):
                    units[unit] += used * counts[n]
        found.append(
            Loop(
                depth=len(inside[first]),
                first=blocks[first].first,
                turns=counts[first],
                bundles=sum(blocks[n].size * counts[n] for n in own),
                matrix_cycles=sum(blocks[n].matrix_cycles * counts[n] for n in own),
                waited_cycles=sum(waited[n] for n in own),
                copies=sum(clock.copies[n] for n in own),
                copied_bytes=sum(clock.copied[n] for n in own),
                waits=sum(clock.waits[n] for n in own),
                units=dict(units),
            )
        )
    return tuple(found)
