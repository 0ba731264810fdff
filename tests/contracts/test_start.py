"""What a start must not import: a user who asks for help, or for the name of a class, waits for nothing else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jaxserve.cli import COMMANDS, load_command

HEAVY = {"jax", "jaxlib", "numpy", "flax", "orbax", "pydantic", "yaml", "grpc", "fastapi", "aiohttp", "rich"}


def _modules(code: str) -> set[str]:
    """What a fresh interpreter has loaded after `code`."""
    program = f"import sys\n{code}\nprint('LOADED', *sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    return set(output.rpartition("LOADED")[2].split())


@pytest.mark.parametrize(
    ("code", "allowed"),
    [
        ("import jaxserve", {"jaxserve"}),
        (
            "from jaxserve.cli import main; assert main(['--help']) == 0",
            {"jaxserve", "jaxserve.cli", "jaxserve.cli.options", "jaxserve.errors"},
        ),
    ],
)
def test_loads_nothing_heavy(code: str, allowed: set[str]) -> None:
    loaded = _modules(code)
    assert not HEAVY & {name.partition(".")[0] for name in loaded}
    assert {name for name in loaded if name.partition(".")[0] == "jaxserve"} == allowed


def test_a_model_without_orbax_weights_does_not_load_orbax() -> None:
    assert "orbax" not in {name.partition(".")[0] for name in _modules("import jaxserve.offline.llm")}


def test_doors_that_are_closed_are_not_loaded() -> None:
    assert "fastapi" not in _modules("import jaxserve.serve.service")
    assert "jaxserve.serve.http.batches" not in _modules("import jaxserve.serve.http")


@pytest.mark.parametrize("name", COMMANDS)
def test_the_list_says_what_the_command_says(name: str) -> None:
    command = load_command(name)
    assert " ".join((command.help or "").split()) == COMMANDS[name].about


_SCRIPT = "from {module} import {attribute}; raise SystemExit({attribute}())"  # as pip writes it


@pytest.mark.parametrize("start", ["module", "script"])
def test_an_interrupt_of_the_first_imports_is_one_line(start: str, tmp_path: Path) -> None:
    """The signal comes while Typer is imported: here a module of that name, which sends it."""
    (tmp_path / "typer.py").write_text(
        "import signal\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's background jobs begin without it
        "signal.raise_signal(signal.SIGINT)\n"
    )
    root = Path(__file__).parents[2]
    [entry] = re.findall(r'^jaxserve = "(.*)"$', (root / "pyproject.toml").read_text(), re.MULTILINE)
    module, attribute = entry.split(":")
    how = {"module": ["-m", "jaxserve"], "script": ["-c", _SCRIPT.format(module=module, attribute=attribute)]}
    path = os.pathsep.join([str(tmp_path), str(root)])
    done = subprocess.run(
        [sys.executable, *how[start], "--help"],
        capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": path}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
