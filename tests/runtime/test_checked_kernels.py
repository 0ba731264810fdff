"""Kernels that an earlier start has found right are taken for right: only the same ones, by the same source."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.config import load_config
from jaxserve.kernels.dispatch import Op
from jaxserve.kernels.matmul import MatmulUse
from jaxserve.kernels.ops import MATMUL
from jaxserve.runtime.checked_kernels import CheckedKernels
from jaxserve.runtime.resolve import choose

USES = tuple(MatmulUse(dtype=dtype, num_devices=1, adapters=False) for dtype in ("float32", "bfloat16"))


def found_by_start(folder: Path, caplog: pytest.LogCaptureFixture, op: Op[Any, Any] = MATMUL, uses: Any = USES) -> str:
    """The line of a start that says how right its kernels are."""
    caplog.clear()
    config = load_config(None, {"kernels.matmul": "numba_cpu"}, environ={}).config
    with caplog.at_level(logging.INFO):
        choose(op, config, uses, jax.local_devices()[0], CheckedKernels(folder=folder))
    [line] = [message for message in caplog.messages if "is right to" in message]
    return line


def test_the_next_start_takes_what_the_first_has_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = found_by_start(tmp_path, caplog)
    files = sorted(tmp_path.iterdir())
    assert len(files) == len(USES) and found_by_start(tmp_path, caplog) == first
    for path in files:
        path.write_text("0.125")
    assert "is right to 1.2e-01" in found_by_start(tmp_path, caplog), "nothing is computed"
    for path in files:
        path.write_text("")  # as after a disk that was full
    assert found_by_start(tmp_path, caplog) == first
    assert [float(path.read_text()) < 1e-2 for path in files] == [True] * len(files), "it is kept again"


@pytest.mark.parametrize(
    ("op", "uses"),
    [
        pytest.param(MATMUL, [dataclasses.replace(USES[0], adapters=True)], id="another use"),
        pytest.param(dataclasses.replace(MATMUL, error=lambda *_: 0.0), USES, id="a check of somebody else"),
    ],
)
def test_what_nobody_has_found_right_is_checked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, op: Any, uses: Any
) -> None:
    found_by_start(tmp_path, caplog)
    for path in tmp_path.iterdir():
        path.write_text("0.125")
    assert "1.2e-01" not in found_by_start(tmp_path, caplog, op, uses)


def test_a_folder_that_cannot_be_written_costs_a_check_and_no_more(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    assert "is right to" in found_by_start(tmp_path / "file" / "checked", caplog, uses=USES[:1])
