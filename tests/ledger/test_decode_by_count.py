"""Decode on chips that are not here: what the ledger counts must not fall, and no loop may spill registers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/kernel_ledger.py"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "many_heads", "one_head"),
    [("v5e", 0.98, 0.97), ("v6e", 0.97, 0.96), ("v5p", 0.96, 0.92), ("v7x", 0.96, 0.95)],
)
def test_decode_keeps_its_share_of_the_bandwidth(chip: str, many_heads: float, one_head: float) -> None:
    """64 rows of 4096 tokens, the write of new keys and values included; one key head is Llama-3 at tensor 8."""
    command = [sys.executable, str(SCRIPT), "--worker", chip, "--only", "decode64", "--no-peers"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [f["case"].split("/")[0] for f in found] == [
        "llama3-8b-tp1",
        "llama3-8b-tp4",
        "llama3-8b-tp8",
        "llama3-70b-tp8",
    ]
    for result in found:
        least = one_head if "tp8" in result["case"] else many_heads
        assert result["bandwidth_share"] >= least, result
        assert all(kernel["spills"] == 0 for kernel in result["kernels"].values()), result
        assert result["kernels"]["paged_attention_decode"]["copied_bytes"] == pytest.approx(
            64 * 4096 * 2 * 128 * 2 * {"llama3-8b-tp1": 8, "llama3-8b-tp4": 2}.get(result["case"].split("/")[0], 1),
            rel=0.01,
        )
