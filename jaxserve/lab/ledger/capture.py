"""The texts that libtpu prints of what it compiled.

libtpu reads its arguments once, when it is loaded: a process that captures sets them first
(`config.describe_absent_tpu`), and every program that it compiles from then on is printed.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

from jaxserve.lab.ledger.bundles import Program, parse_program

_FINAL = re.compile(r"^\d+-(?P<name>.+)-\d+-final_bundles\.txt$")


def dump_arguments(folder: Path) -> str:
    """Arguments for libtpu to print the last passes alone: all of them take minutes and gigabytes."""
    return " ".join(
        (
            f"--xla_jf_dump_to={folder}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_debug_level=1",
            "--xla_jf_dump_llo_pass_label_regex=^final",
        )
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """The texts of one kernel or fusion. `name` is that of its instruction in the optimised HLO."""

    name: str
    bundles: Path
    utilization: Path

    def program(self) -> Program:
        """Parses both."""
        return parse_program(self.bundles.read_text(), self.utilization.read_text())


def captured_kernels(folder: Path) -> Iterator[Captured]:
    """Everything that was printed into a folder, oldest first."""
    for path in sorted(folder.glob("*-final_bundles.txt")):
        found = _FINAL.match(path.name)
        if found is None or "schedule-analysis" in path.name:
            continue
        (prefix,) = re.findall(r"^\d+-.+-(?=\d+-final_bundles)", path.name)
        (utilization,) = (
            p for p in folder.iterdir() if p.name.startswith(prefix) and "final_hlo-static-per-bundle" in p.name
        )
        yield Captured(name=found["name"], bundles=path, utilization=utilization)
