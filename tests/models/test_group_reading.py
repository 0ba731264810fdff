"""Codes that are read beside their groups are those that are read as a record for each input."""

from collections.abc import Callable
from pathlib import Path

import gguf_models
import jax
import numpy as np
import pytest
import quantised_models

from jaxserve.kernels.storage import Storage
from jaxserve.models import loading
from jaxserve.models.loading import plan_model


def pair_of(name: str) -> Callable[[Path], Path]:
    table, make = quantised_models.SCHEMES[name]
    return lambda folder: quantised_models.llama_pair(folder, table, make).quantised


# What is read in groups: of a GGUF file with a type for each map of a layer, heads turned; and of safetensors.
CASES: dict[str, tuple[Callable[[Path], Path], bool]] = {
    "GGUF": (lambda folder: gguf_models.quantised_pair(folder).quantised, True),
    "pack-quantized": (pair_of("pack-quantized"), False),  # may list its groups in any order
    "mxfp4-pack-quantized": (pair_of("mxfp4-pack-quantized"), True),
    "int-quantized": (pair_of("int-quantized"), False),  # a scale for each row
    "gptq desc_act": (pair_of("gptq desc_act"), False),
    "awq": (pair_of("awq"), True),
}


@pytest.mark.parametrize("case", CASES)
def test_groups_and_records_are_the_same(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, in_groups = CASES[case]
    path = make(tmp_path)
    used: list[bool] = []

    def load(*, allowed: bool) -> list[np.ndarray]:
        original = loading.load_coded

        def load_coded(weight, placed, read, read_groups, order, storage: Storage, name: str):
            used.append(read_groups is not None)
            return original(weight, placed, read, read_groups if allowed else None, order, storage, name)

        with monkeypatch.context() as patched:
            patched.setattr(loading, "load_coded", load_coded)
            return [np.asarray(leaf) for leaf in jax.tree.leaves(plan_model(path).fill())]

    found, wanted = load(allowed=True), load(allowed=False)
    assert used and any(used) == in_groups
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))
