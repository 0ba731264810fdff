"""How a benchmark writes down what it measured: results with the machine, versions and commit they belong to."""

import json
from pathlib import Path

from jaxserve.lab.bench.about import about_machine
from jaxserve.lab.bench.rates import machine_rates


def write_record(path: Path, results: object, **about: object) -> None:
    """Writes {"about", "results"}: command, machine with its rates, versions, commit, what the caller adds; results.

    The rates are measured here, unless the caller gives those that it has measured beside the results. Where the file
    cannot be written, the record is printed, since it may have taken hours, and the script ends.
    """
    if "rates" not in about:
        about["rates"] = machine_rates()
    about = about_machine() | about
    text = json.dumps({"about": about, "results": results}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        print(text)
        raise SystemExit(f"error: cannot write {path}, so the record is above: {error}") from error
