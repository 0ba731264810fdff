"""The share of the machine that other programs used while an engine ran, from Linux's /proc.

No figure is corrected: a run that was disturbed is repeated. On other systems than Linux nothing is known, and nothing
is repeated.
"""

import dataclasses
import os
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


def _ticks_of_group(group: int) -> int:
    ticks = 0
    for entry in os.listdir(_PROC):
        if entry.isdigit():
            try:
                fields = (_PROC / entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended since the list was made
                continue
            if int(fields[2]) == group:
                ticks += int(fields[11]) + int(fields[12])
    return ticks
