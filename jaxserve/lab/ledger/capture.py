"""The texts that libtpu prints of what it compiled.

libtpu reads its arguments once, when it is loaded: a process that captures sets them first (`print_schedules`), and
every program that it compiles from then on is printed.
"""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxserve.config import describe_absent_tpu
from jaxserve.lab.ledger.bundles import Program, UnknownSchedule, parse_program

# libtpu of JAX 0.11 writes numbers of operands behind the name: paged_kv_write.1.refs_13_
_FINAL = re.compile(r"^\d+-(?P<name>.+?)(\.refs_\d+_)*-\d+-final_bundles\.txt$")


def print_schedules(folder: Path) -> None:
    """Has libtpu, which must not be loaded yet, print what this process compiles; the last passes alone, for all of
    them take minutes and gigabytes. JAX looks for no device: plugins for devices that are not here would complain.
    """
    jax.config.update("jax_platforms", "cpu")
    describe_absent_tpu(
        " ".join(
            (
                f"--xla_jf_dump_to={folder}",
                "--xla_jf_dump_llo_text=true",
                "--xla_jf_debug_level=1",
                "--xla_jf_dump_llo_pass_label_regex=^final",
            )
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
    """Everything that was printed into a folder, oldest first. Raises UnknownSchedule."""
    for path in sorted(folder.glob("*-final_bundles.txt")):
        found = _FINAL.match(path.name)
        if found is None or "schedule-analysis" in path.name:
            continue
        (prefix,) = re.findall(r"^\d+-.+-(?=\d+-final_bundles)", path.name)
        used = [p for p in folder.iterdir() if p.name.startswith(prefix) and "final_hlo-static-per-bundle" in p.name]
        if len(used) != 1:
            raise UnknownSchedule(f"libtpu printed {len(used)} lists of units for {path.name}, and not one")
        yield Captured(name=found["name"], bundles=path, utilization=used[0])
