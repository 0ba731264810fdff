"""A parser of libtpu's final bundles (`*-final_bundles.txt`): what a core issues, one bundle a cycle.

A line is a bundle, its operations separated by ';;':

       0xe2   : >> { %s5_s3 = sadd.s32 1, %s4_s2  ;;  %529 = sbr.rel (!%p526_p5) target = $region86 }

Names end in the register that holds the value (`_s3`); '>' counts the loops around the bundle; 'LB' and 'PF' mark the
bodies of loops and the ends of skipped regions. Comments carry the numbers of regions, which are the targets of
branches, and the names of a copy's arguments. The listing has no specification: this parser knows that of libtpu 0.0.42
and refuses what it does not know, by name, where a walk would depend on it.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence

from jaxserve.errors import JaxserveError

_OPENING = re.compile(r"^ *(?:0x[0-9a-f]+|\d+) +((?:(?:LH|LB|LE|PB|PF|CT)[, ]*)*): *((?:> ?)*)\{(.*)", re.DOTALL)
_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)
_REGION = re.compile(r"(?:Start|Start/End empty) region (\d+)")
_END = re.compile(r"(?<!Start/)End region \d+")
_ARGUMENT = re.compile(r"/\*(\w+)=\*/")
_OPERATION = re.compile(r"(?:%(\w+) = )?([a-z][\w.\-]*)(.*)", re.DOTALL)
_GUARD = re.compile(r"\((!?)%(\w+)\)")
_TARGET = re.compile(r"target = \$region(\d+)")
UNITS = ("MXU", "XLU", "VALU", "VPOP", "EUP", "VLOAD", "VLOAD:FILL", "VSTORE", "VSTORE:SPILL", "SALU")


class UnknownSchedule(JaxserveError):
    """A listing that this parser does not know, or an operation or a branch that a walk does not understand."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation of a bundle.

    Attributes:
      result: the name that it defines, without '%'; '' for none.
      opcode: such as 'sadd.s32'.
      operands: in order, the guard taken out; memory operands whole, such as '[smem:[#allocation4 + $0x1]]'.
      named: the operands of a copy by the names in its comments.
      guard: the predicate under which it acts and whether it is negated; None: always.
      remark: the text of its comments.
    """

    result: str
    opcode: str
    operands: tuple[str, ...]
    named: dict[str, str]
    guard: tuple[str, bool] | None
    remark: str

    @property
    def target(self) -> int | None:
        """The region that a branch goes to; None for all else."""
        found = _TARGET.search(self.operands[-1]) if self.operands else None
        return int(found.group(1)) if found else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """What is issued in one cycle.

    Attributes:
      labels: such as 'LB', the body of a loop.
      depth: loops around it.
      regions: that begin here.
      ends: whether a region ends here.
      operations, units: what is done, and how many of each unit (`UNITS`) are in use.
    """

    labels: str
    depth: int
    regions: tuple[int, ...]
    ends: bool
    operations: tuple[Operation, ...]
    units: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """The bundles of one kernel or fusion, in the order of issue."""

    bundles: tuple[Bundle, ...]


def parse_program(bundles: str, utilization: str) -> Program:
    """Parses the texts of `*-final_bundles.txt` and `*-final_hlo-static-per-bundle-utilization.txt`.

    Raises UnknownSchedule.
    """
    used = _parse_utilization(utilization)
    texts = list(_bundle_texts(bundles))
    if len(texts) != len(used):
        raise UnknownSchedule(f"libtpu printed {len(texts)} bundles, but the units of {len(used)}")
    return Program(bundles=tuple(_parse_bundle(text, units) for text, units in zip(texts, used, strict=True)))


def _parse_utilization(text: str) -> list[tuple[int, ...]]:
    """How many of each unit are in use, a line for each bundle, behind a head with their names and numbers."""
    head, _, body = text.partition("== UTILIZATION:\n")
    names = head.splitlines()[1] if "\n" in head else head
    if tuple(n.strip() for n in names.split(",")) != UNITS:
        raise UnknownSchedule(f"libtpu names other units of a core than {', '.join(UNITS)}: {names!r}")
    return [tuple(map(int, line.split())) for line in body.splitlines()]


def _bundle_texts(text: str) -> Iterator[str]:
    """The text of each bundle: a line, or several where a comment has line breaks."""
    current: list[str] = []
    for line in text.splitlines():
        if _OPENING.match(line):
            if current:
                yield "\n".join(current)
            current = [line]
        elif current:
            current.append(line)
    if current:
        yield "\n".join(current)


def _parse_bundle(text: str, units: tuple[int, ...]) -> Bundle:
    opening = _OPENING.match(text)
    assert opening is not None, text
    labels, arrows, rest = opening.groups()
    comments = _COMMENT.findall(rest)
    parts = [part for part in _plain(rest).split(";;") if part.strip(" \n}")]
    return Bundle(
        labels=labels.strip(),
        depth=arrows.count(">"),
        regions=tuple(int(n) for comment in comments for n in _REGION.findall(comment)),
        ends=any(_END.search(comment) for comment in comments),
        operations=tuple(_parse_operation(part) for part in parts),
        units=units,
    )


def _plain(rest: str) -> str:
    """The operations, with the comments that say what they do: names of arguments, kinds of copies, the core id."""

    def keep(match: re.Match[str]) -> str:
        inner = match.group(1)
        if inner.endswith(" core id "):  # libtpu of JAX 0.11: "megacore core id :: core id"
            return "/* core id */"
        return match.group(0) if re.fullmatch(r"\w+=| [\w\-]+-to-[\w\-]+ ", inner) else ""

    return _COMMENT.sub(keep, rest)


def _parse_operation(text: str) -> Operation:
    text = text.strip(" \n}")
    remark = " ".join(c.strip() for c in _COMMENT.findall(text) if not c.endswith("="))
    named_text = re.sub(r"/\* [^*]*\*/", "", text)
    found = _OPERATION.match(_ARGUMENT.sub("", named_text).strip())
    if found is None:
        raise UnknownSchedule(f"not an operation: {text}")
    result, opcode, rest = found.groups()
    guard = _GUARD.search(rest)
    if guard is not None:
        rest = rest[: guard.start()] + rest[guard.end() :]
    if opcode == "sst":  # no comma stands between the cell and the value
        rest = re.sub(r"^ *(\[smem:.*?\]{1,2}) +", r"\1, ", rest)
    if opcode.startswith("inlined_call_operand"):
        index = re.search(r"index: (\d+)", rest)
        assert index is not None, text
        rest = index.group(1)
    named = dict(re.findall(r"/\*(\w+)=\*/\s*(\[[^\]]*\]|[^,\s}]+)", named_text))
    return Operation(
        result=result or "",
        opcode=opcode,
        operands=tuple(_split(rest)),
        named=named,
        guard=(guard.group(2), bool(guard.group(1))) if guard else None,
        remark=remark,
    )


def _split(text: str) -> Sequence[str]:
    """The operands: separated by commas outside of brackets and parentheses, without notes such as [thread:$0]."""
    text = re.sub(r"\[(?:resolvable|thread|shape)[^\]]*\]", "", text)
    parts, depth, current = [], 0, ""
    for char in text:
        depth += (char in "[(") - (char in "])")
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    parts.append(current.strip())
    return [part for part in parts if part]
