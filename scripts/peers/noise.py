"""What a group of processes used of the machine, and what others did meanwhile, from Linux's /proc.

No figure is corrected: a run that was disturbed is repeated. On other systems than Linux nothing is known, and nothing
is repeated.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")
_IDLE_FIELDS = (3, 4)  # of a line of /proc/stat: idle, and idle while waiting for a disk


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """Ticks since the start of the machine (all cores: passed, and busy) and of one group of processes."""

    passed: int
    busy: int
    group: int


def read_used(group: int) -> Used | None:
    """Now; `group` is the id of a process group. None where there is no /proc."""
    if not (_PROC / "stat").exists():
        return None
    fields = [int(field) for field in (_PROC / "stat").read_text().splitlines()[0].split()[1:9]]
    passed = sum(fields)
    return Used(passed=passed, busy=passed - sum(fields[i] for i in _IDLE_FIELDS), group=_ticks_of_group(group))


def others_share(before: Used | None, after: Used | None) -> float | None:
    """The share of all cores that neither idled nor worked for the group in between; None if not known."""
    if before is None or after is None or after.passed <= before.passed:
        return None
    others = (after.busy - before.busy) - (after.group - before.group)
    return max(0.0, others / (after.passed - before.passed))


def most_memory(group: int) -> int | None:
    """Bytes that a group of processes had in memory at most, each at its own time; None where there is no /proc.

    The pages of a file that is mapped count as those of its reader.
    """
    if not (_PROC / "stat").exists():
        return None
    return sum(int(line.split()[1]) for line in _lines_of_group(group, "status") if line.startswith("VmHWM:")) * 1024


def _ticks_of_group(group: int) -> int:
    fields = [line.rpartition(")")[2].split() for line in _lines_of_group(group, "stat")]
    return sum(int(line[11]) + int(line[12]) for line in fields)


def _lines_of_group(group: int, file: str) -> Iterator[str]:
    """The lines of this file of each process of the group."""
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            with contextlib.suppress(OSError):  # it has ended since the list was made
                if int((_PROC / entry / "stat").read_text().rpartition(")")[2].split()[2]) == group:
                    yield from (_PROC / entry / file).read_text().splitlines()
