"""The ledger of three kernels against counts on paper, and of a product against XLA's own estimate."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TILES = 32
REGISTERS = 16384 * 128 // 1024  # of 8 x 128 numbers, in [16384, 128]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    script = Path(__file__).with_name("small_kernels.py")
    command = [sys.executable, str(script), str(tmp_path_factory.mktemp("dump") / "schedules")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_copy_takes_the_time_of_its_bytes(found: dict[str, dict[str, float]]) -> None:
    copy = found["copy_tiles"]
    assert copy["copied"] == 2 * 16384 * 128 * 4
    assert copy["VSTORE"] == REGISTERS
    assert copy["turns"] == [TILES + 2], "two more to fill and drain the pipeline"
    assert copy["byte_us"] == pytest.approx(2 * 16384 * 128 * 4 / 819e9 * 1e6)
    assert copy["byte_us"] <= copy["us"] <= 1.02 * copy["byte_us"]


def test_a_softmax_raises_each_number_once(found: dict[str, dict[str, float]]) -> None:
    softmax, copy = found["softmax_tiles"], found["copy_tiles"]
    assert softmax["EUP"] == 2 * REGISTERS, "a power and a reciprocal of a row's sum for each register"
    assert softmax["copied"] == copy["copied"]
    # Each register gives one maximum and one sum over its lanes, and a bundle has three units for those.
    assert softmax["bundles"] >= 2 * REGISTERS / 3
    assert softmax["bundles"] < softmax["cycles"], "it waits for its copies"
    assert softmax["us"] <= 1.02 * softmax["byte_us"]


def test_a_product_takes_the_cycles_of_its_rows_and_agrees_with_xla(found: dict[str, dict[str, float]]) -> None:
    product, xla = found["product_tiles"], found["xla_product"]
    least = 4096 * 1024 * 1024 / (4 * 128 * 128)
    first_copies = (512 * 1024 * 2 + 1024 * 1024 * 2) / (819e9 / 1.503e9)
    assert product["copied"] == 2 * (4096 * 1024 + 1024 * 1024 + 4096 * 1024)
    assert least + first_copies <= product["cycles"] <= 1.05 * (least + first_copies)
    assert product["cycles"] == pytest.approx(xla["cycles"], rel=0.2)
