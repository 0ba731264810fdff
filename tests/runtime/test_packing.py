"""Weights packed at load: the tokens of unpacked ones, never two copies of all, and refusals with their reasons."""

import dataclasses
import gc
import logging
import weakref
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from whole import FIXTURES, POOL, Result, build, run

from jaxserve.api import SamplingParams
from jaxserve.config import load_config
from jaxserve.errors import ConfigError
from jaxserve.kernels import product_rates
from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.cpu.target import find_target
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.matmul import Matmul, MatmulUse, Weight
from jaxserve.kernels.numba_matmul import make_matmul
from jaxserve.kernels.ops import MATMUL
from jaxserve.kernels.packed_weight import PackedWeight
from jaxserve.kernels.storage import Storage
from jaxserve.kernels.xla_matmul import XLA_MATMUL, DenseWeight
from jaxserve.models.loading import one_device_mesh, plan_model
from jaxserve.models.sharding import shardings_for, specs_for
from jaxserve.runtime import convert_weights
from jaxserve.runtime.convert_weights import Forms, converted
from jaxserve.runtime.resolve import choose

WIDTH = find_target().width
PACKED = make_matmul(Device(backend="cpu", kind="cpu"))


# --- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_packed_and_unpacked_engines_agree() -> None:
    """Drawn tokens, too, and log-probabilities but for the last bits. Greedy ones are held to those of transformers by
    tests/e2e/test_engine_parity.py, whose engines pack their weights by default."""
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
        engine = build(FIXTURES / "llama_mha_tied_bias", **POOL, kernels__matmul=matmul)
        of[matmul] = [result for [result] in run(engine, asked)]
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
    made = converted(planned, Forms(matmul=PACKED))
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
    plain, made = (
        dict(nnx.to_flat_state(planned.fill())),
        dict(nnx.to_flat_state(converted(planned, Forms(matmul=PACKED)).fill())),
    )
    assert plain.keys() == made.keys()
    names = {path[-2] if path[-1] == "kernel" else path[-1] for path, v in made.items() if is_packed(v)}
    table = "lm_head" if ("lm_head",) in plain else "embedding"
    assert table in names and ({"embedding", "lm_head"} - {table}).isdisjoint(names), names
    for path, variable in made.items():
        value, (weight,) = variable.get_raw_value(), jax.tree.leaves(plain[path])
        if not is_packed(variable):
            np.testing.assert_array_equal(jax.tree.leaves(variable)[0], weight)
            continue
        assert value.panels.shape[2] == WIDTH and (*value.out_shape, *value.in_shape) == weight.shape
        num_out, depth = int(np.prod(value.out_shape)), int(np.prod(value.in_shape))
        flat = np.asarray(value.panels).transpose(0, 2, 1).reshape(-1, depth)
        if len(value.out_shape) == 2 and value.out_shape[0] == 2:  # gate and up lie side by side in each panel
            flat = flat.reshape(-1, 2, WIDTH // 2, depth).swapaxes(0, 1).reshape(2, -1, depth)
            flat = flat[:, : value.out_shape[1]].reshape(-1, depth)
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

    def spy(weight: DenseWeight) -> Weight:
        if weight.num_in:
            alive.append(held())
        return PACKED.convert(weight)

    monkeypatch.setattr(convert_weights.os, "cpu_count", lambda: 1)  # as many are packed at once
    counting = dataclasses.replace(PACKED, convert=spy)
    state = converted(dataclasses.replace(planned, fill=fill), Forms(matmul=counting)).fill()
    count = sum(is_packed(variable) for _, variable in nnx.to_flat_state(state))
    assert count == len(unpacked) > 5
    assert alive == list(range(count, 0, -1)), "the one at hand, and those that are still to come"
    assert held() == 0


# --- whether to -----------------------------------------------------------------------------------------------------

CPU = Device(backend="cpu", kind="cpu")
TPU = Device(backend="tpu", kind="TPU v5 lite")
FLOAT32 = MatmulUse(dtype="float32", num_devices=1)
BFLOAT16 = dataclasses.replace(FLOAT32, dtype="bfloat16")
REFUSALS = [
    (dataclasses.replace(FLOAT32, num_devices=2), "2 devices share each weight, and packed ones are never cut; set"),
    (dataclasses.replace(FLOAT32, dtype="float16"), "weights are float16, and can be read as float32 or bfloat16"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("choice", "use"), [("auto", BFLOAT16), ("numba_cpu", FLOAT32)])
def test_a_cpu_packs(
    choice: str, use: MatmulUse, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By a start, too, which checks the products, where XLA's are not faster."""

    def measure(matmul: Matmul, dtype: str) -> list[float]:
        return [2.0, 8.0] if matmul is XLA_MATMUL else [1.0, 4.0]

    monkeypatch.setattr(product_rates, "measure_products", measure)
    assert MATMUL.resolve(device=CPU, uses=[use], choice=choice).name == "numba_cpu"
    caplog.set_level(logging.INFO, logger="jaxserve")
    config = load_config(None, {"kernels.matmul": choice}, environ={}).config
    assert choose(MATMUL, config, (use,), jax.devices("cpu")[0]).name == "numba_cpu"
    assert "matmul: 'numba_cpu' is right to" in caplog.text


@pytest.mark.parametrize(("use", "reason"), REFUSALS)
def test_auto_leaves_weights_as_they_are_and_says_why(use, reason, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="jaxserve.kernels.dispatch")
    assert MATMUL.resolve(device=CPU, uses=[use]) is XLA_MATMUL
    (record,) = caplog.records
    assert f"'xla', since 'numba_cpu' cannot run this model ({reason}" in record.getMessage()


@pytest.mark.parametrize(
    ("device", "use", "reason"), [*((CPU, *rest) for rest in REFUSALS), (TPU, FLOAT32, "it runs on CPUs alone")]
)
def test_packing_by_name_where_it_cannot_be_is_refused(device, use, reason) -> None:
    with pytest.raises(ConfigError, match=f"kernels.matmul names 'numba_cpu', which cannot run this model: {reason}"):
        MATMUL.resolve(device=device, uses=[use], choice="numba_cpu")


def test_codes_that_cannot_be_packed_are_refused_by_name() -> None:
    for storage, said in (
        (Storage(code="float4_e2m1fn"), "no products with float4_e2m1fn"),
        (Storage(code="int8", group=24), "24 inputs share a scale, but groups must be a multiple of 16"),
    ):
        use = dataclasses.replace(FLOAT32, storage=storage)
        assert MATMUL.resolve(device=CPU, uses=[use]).name == "xla"
        with pytest.raises(ConfigError, match=said):
            MATMUL.resolve(device=CPU, uses=[use], choice="numba_cpu")


def test_an_accelerator_takes_weights_as_they_are() -> None:
    """XLA's products are the best there."""
    found, weight = MATMUL.resolve(device=TPU, uses=[BFLOAT16]), DenseWeight(array=jnp.ones((3, 5)), num_in=1)
    assert found.convert(weight) is weight and found.shapes(weight) is weight


def test_xla_by_name_packs_nothing() -> None:
    assert MATMUL.resolve(device=CPU, uses=[FLOAT32], choice="xla") is XLA_MATMUL
    planned = plan_model(FIXTURES / "qwen2")
    assert jax.tree.structure(converted(planned, Forms(matmul=XLA_MATMUL)).fill()) == jax.tree.structure(
        planned.shapes.state
    )


def test_without_numba(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(machine_code, "missing", lambda: "Numba is not installed; install it")
    caplog.set_level(logging.INFO, logger="jaxserve.kernels.dispatch")
    assert MATMUL.resolve(device=CPU, uses=[FLOAT32]) is XLA_MATMUL
    assert "Numba is not installed" in caplog.text
    with pytest.raises(ConfigError, match="Numba is not installed; install it"):
        MATMUL.resolve(device=CPU, uses=[FLOAT32], choice="numba_cpu")


@pytest.mark.parametrize(
    ("name", "choice"),
    [(name, "numba_cpu") for name in MATMUL.cases]
    + [(name, "xla") for name in MATMUL.cases if name.startswith("demo")],
)
def test_named_cases_are_right(name: str, choice: str) -> None:
    assert MATMUL.error(MATMUL.make(choice, CPU), MATMUL.cases[name]) < 1e-5
