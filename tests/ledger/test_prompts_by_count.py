"""Prompts on chips that are not here: the share of the matrix units' peak that the ledger counts must not fall."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/kernel_ledger.py"


@pytest.mark.slow
@pytest.mark.parametrize(("chip", "filled", "least"), [("v5e", 1.0, 0.80), ("v6e", 0.5, 0.65)])
def test_a_prompt_keeps_its_share_of_the_peak(chip: str, filled: float, least: float) -> None:
    """8192 tokens of Llama-3-8B, the write of their keys and values included; heads of 128 fill half a unit of v6e."""
    command = [sys.executable, str(SCRIPT), "--worker", chip, "--only", "prefill8k", "--no-peers"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    assert found["head_share"] >= least, found
    assert found["peak_share"] == pytest.approx(filled * found["head_share"], abs=1e-3)
