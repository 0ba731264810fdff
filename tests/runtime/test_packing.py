"""Weights packed at load: the tokens of unpacked ones, never two copies of all, and refusals with their reasons."""

import functools
import gc
import logging
import types
import weakref
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from whole import FIXTURES, Result, build, run

from jaxserve.api import SamplingParams
from jaxserve.config import load_config
from jaxserve.engine import AnyEngine
from jaxserve.errors import ConfigError
from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.cpu.target import find_target
from jaxserve.kernels.packed_weight import PackedWeight
from jaxserve.models.loading import MESH_AXES, one_device_mesh, plan_model
from jaxserve.models.sharding import shardings_for, specs_for
from jaxserve.runtime import packing
from jaxserve.runtime.packing import packed
from jaxserve.runtime.resolve import packing_width
from tests.models import hf_oracle

WIDTH = find_target().width


@functools.cache
def build_engine(name: str, matmul: str) -> AnyEngine:
    return build(
        FIXTURES / name,
        model__skip_tokenizer=True,
        model__max_len=256,
        cache__page_size=16,
        cache__num_pages=80,
        kernels__matmul=matmul,
        kernels__self_check=False,
    )


# --- tokens ---------------------------------------------------------------------------------------------------------


# Tied embeddings with biases; untied ones, and heads that the Numba body runs; norms of queries and keys.
@pytest.mark.parametrize("name", ["llama_mha_tied_bias", "llama_llama3", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_a_packed_model_says_what_transformers_said(name: str) -> None:
    """Prompts come in pieces, since a step has 40 tokens, and then rows of all four go on together."""
    truth = hf_oracle.answers(name)
    engine = build_engine(name, "numba_cpu")
    asked = [
        (a.prompt.tolist(), SamplingParams(max_tokens=len(a.greedy), temperature=0.0, ignore_eos=True)) for a in truth
    ]
    for answer, [result] in zip(truth, run(engine, asked), strict=True):
        assert result.token_ids == answer.greedy.tolist()


@pytest.mark.slow
def test_packed_and_unpacked_engines_agree() -> None:
    """Drawn tokens, too, and log-probabilities but for the last bits."""
    rng = np.random.default_rng(0)
    asked = [
        (
            rng.integers(0, 128, n).tolist(),
            SamplingParams(max_tokens=12, temperature=t, seed=n, logprobs=2, prompt_logprobs=1, ignore_eos=True),
        )
        for n, t in ((1, 0.0), (5, 1.0), (40, 0.8), (63, 1.2), (17, 0.0))
    ]
    of: dict[str, list[Result]] = {}
    for matmul in ("numba_cpu", "xla"):
        of[matmul] = [result for [result] in run(build_engine("llama_mha_tied_bias", matmul), asked)]
    for one, other in zip(of["numba_cpu"], of["xla"], strict=True):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.top_ids == b.top_ids
            assert (a.logprob, *a.top_logprobs) == pytest.approx((b.logprob, *b.top_logprobs), abs=1e-4)


# --- packing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_promised_are_shapes_filled(name: str, dtype: str) -> None:
    """Executables are compiled for the promise, on the device that the mesh has."""
    mesh = one_device_mesh(jax.devices()[-1])
    planned = plan_model(FIXTURES / name, dtype=dtype, mesh=mesh)
    made = packed(planned, WIDTH)
    filled = made.fill()
    assert jax.tree.structure(filled) == jax.tree.structure(made.shapes.state)
    leaves = jax.tree.leaves(filled)
    for found, promised in zip(leaves, jax.tree.leaves(made.shapes.state), strict=True):
        assert (found.shape, found.dtype) == (promised.shape, promised.dtype)
        assert found.devices() == {jax.devices()[-1]}
    placed = jax.tree.leaves(shardings_for(made.shapes.state, mesh))
    assert all(array.sharding.is_equivalent_to(s, array.ndim) for array, s in zip(leaves, placed, strict=True))
    specs = specs_for(made.shapes.state)
    is_spec = {"is_leaf": lambda x: isinstance(x, PartitionSpec)}
    assert jax.tree.structure(specs, **is_spec) == jax.tree.structure(made.shapes.state)


@pytest.mark.parametrize("name", ["qwen3", "qwen2"])
def test_what_is_multiplied_with_is_packed_and_nothing_else(name: str) -> None:
    """A table of tokens that is only looked up stays as it is; one that gives logits, too, is packed."""
    planned = plan_model(FIXTURES / name)
    plain, made = dict(nnx.to_flat_state(planned.fill())), dict(nnx.to_flat_state(packed(planned, WIDTH).fill()))
    assert plain.keys() == made.keys()
    names = {path[-2] if path[-1] == "kernel" else path[-1] for path, v in made.items() if is_packed(v)}
    table = "lm_head" if ("lm_head",) in plain else "embedding"
    assert table in names and ({"embedding", "lm_head"} - {table}).isdisjoint(names), names
    for path, variable in made.items():
        value, weight = variable.get_raw_value(), plain[path].get_raw_value()
        if not is_packed(variable):
            np.testing.assert_array_equal(value, weight)
            continue
        assert value.panels.shape[2] == WIDTH and (*value.out_shape, *value.in_shape) == weight.shape
        num_out, depth = int(np.prod(value.out_shape)), int(np.prod(value.in_shape))
        flat = np.asarray(value.panels).transpose(0, 2, 1).reshape(-1, depth)
        np.testing.assert_array_equal(flat[:num_out], np.asarray(weight).reshape(num_out, depth))
    kernels = {path for path in made if path[-1] == "kernel"}
    assert len(kernels) > 5 and all(is_packed(made[path]) for path in kernels)


def is_packed(variable: nnx.Variable) -> bool:
    return isinstance(variable.get_raw_value(), PackedWeight)


@pytest.fixture
def no_garbage_collector() -> Iterator[None]:
    """What waits for it is not free, and when it comes is chance."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_garbage_collector")
def test_each_weight_is_freed_once_it_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan_model(FIXTURES / "qwen2")  # all of its matrices are packed
    unpacked: list[weakref.ref] = []

    def fill() -> nnx.State:
        state = planned.fill()
        unpacked.extend(weakref.ref(leaf) for leaf in jax.tree.leaves(state) if leaf.size > 1000)  # no biases
        return state

    def held() -> int:
        arrays = [ref() for ref in unpacked]
        return sum(array is not None and not array.is_deleted() for array in arrays)

    alive: list[int] = []
    pack = packing.pack

    def spy(*args, **kwargs) -> PackedWeight:
        alive.append(held())
        return pack(*args, **kwargs)

    monkeypatch.setattr(packing, "pack", spy)
    monkeypatch.setattr(packing.os, "cpu_count", lambda: 1)  # as many are packed at once
    state = packed(types.SimpleNamespace(shapes=planned.shapes, fill=fill), WIDTH).fill()  # type: ignore[arg-type]
    count = sum(is_packed(variable) for _, variable in nnx.to_flat_state(state))
    assert count == len(unpacked) > 5
    assert alive == list(range(count, 0, -1)), "the one at hand, and those that are still to come"
    assert held() == 0


# --- whether to -----------------------------------------------------------------------------------------------------

ONE = one_device_mesh(jax.devices("cpu")[0])
TWO = Mesh(np.array(jax.devices("cpu")[:2]).reshape(1, 1, 2), MESH_AXES)
TPU = types.SimpleNamespace(local_devices=[types.SimpleNamespace(platform="tpu")], size=1)
FLOAT32 = np.dtype("float32")


def width_for(matmul: str, mesh=ONE, dtype=FLOAT32) -> int | None:
    config = load_config(None, {"model.path": str(FIXTURES / "qwen3"), "kernels.matmul": matmul})
    return packing_width(config.config, mesh, dtype)


@pytest.mark.parametrize("matmul", ["auto", "numba_cpu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_panels_are_as_wide_as_blocks(matmul: str, dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="jaxserve.runtime.resolve")
    assert width_for(matmul, dtype=np.dtype(dtype)) == WIDTH
    (record,) = caplog.records
    assert record.getMessage() == f"matmul on cpu: 'numba_cpu', weights packed in panels of {WIDTH} columns"


REFUSALS = [
    (TPU, FLOAT32, "it runs on CPUs alone, and this is a tpu"),
    (TWO, FLOAT32, "2 devices share each weight, and packed ones are never cut; set parallel.tensor to 1"),
    (ONE, np.dtype("float16"), "weights are float16"),
]


@pytest.mark.parametrize(("mesh", "dtype", "reason"), REFUSALS)
def test_auto_leaves_weights_as_they_are_and_says_why(mesh, dtype, reason, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="jaxserve.runtime.resolve")
    assert width_for("auto", mesh, dtype) is None
    (record,) = caplog.records
    assert f"'xla', since {reason}" in record.getMessage()


@pytest.mark.parametrize(("mesh", "dtype", "reason"), REFUSALS)
def test_packing_by_name_where_it_cannot_be_is_refused(mesh, dtype, reason) -> None:
    with pytest.raises(ConfigError, match=f"kernels.matmul names 'numba_cpu', but {reason}"):
        width_for("numba_cpu", mesh, dtype)


def test_xla_by_name_packs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="jaxserve.runtime.resolve")
    assert width_for("xla") is None
    (record,) = caplog.records
    assert record.getMessage() == "matmul on cpu: 'xla', since kernels.matmul names it"


def test_without_numba(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    remedy = "Numba is not installed; pip install 'jaxserve[cpu]'"
    monkeypatch.setattr(machine_code, "missing", lambda: remedy)
    caplog.set_level(logging.INFO, logger="jaxserve.runtime.resolve")
    assert width_for("auto") is None
    assert f"'xla', since {remedy}" in caplog.text
    with pytest.raises(ConfigError, match=r"but Numba is not installed; pip install 'jaxserve\[cpu\]'"):
        width_for("numba_cpu")


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="kernels.matmul"):
        width_for("numba")
