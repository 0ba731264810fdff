"""How a benchmark writes down what it measured: results with the machine, versions and commit they belong to."""

import json
from pathlib import Path

from jaxserve.lab.bench.about import about_machine
from jaxserve.lab.bench.rates import machine_rates


def write_record(path: Path, results: object, **about: object) -> None:
    """Writes {"about", "results"}: command, machine with its rates, versions, commit, what the caller adds; results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    about = about_machine() | {"rates": machine_rates()} | about
    path.write_text(json.dumps({"about": about, "results": results}, indent=1) + "\n")
