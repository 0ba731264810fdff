"""How a benchmark writes down what it measured: results with the machine, versions and commit they belong to."""

import json
from pathlib import Path

from jaxserve.bench.about import about_machine


def write_record(path: Path, results: object, **about: object) -> None:
    """Writes {"about": command, machine, versions, commit and what the caller adds, "results": results} as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"about": about_machine() | about, "results": results}, indent=1) + "\n")
