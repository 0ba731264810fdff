"""The mixture-of-experts block: the formulas of four families, tokens of nobody, bits in a crowd, and many devices."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.ops import GROUPED_MATMUL, MATMUL
from jaxserve.lab.compiled.topology import absent_devices, device_of_topology
from jaxserve.models.decoder_config import ExpertSpec
from jaxserve.models.experts import Experts
from jaxserve.models.layers import total
from jaxserve.models.sharding import (
    EXPERT_AXIS,
    MESH_AXES,
    TENSOR_AXIS,
    WHOLE,
    Shards,
    shardings_for,
    specs_for,
)
from jaxserve.runtime.convert_weights import Forms
from jaxserve.runtime.hlo import parse_hlo, shape_bytes

CPU = Device(backend="cpu", kind="cpu")
HIDDEN = 40
MIXTRAL = ExpertSpec(count=8, per_token=2, size=24)
QWEN2 = ExpertSpec(count=12, per_token=4, size=20, renormalise=False, shared_size=28)
QWEN3 = ExpertSpec(count=16, per_token=8, size=12)
# The limit of the family is 7, which numbers of these sizes never reach.
GPT_OSS = ExpertSpec(count=8, per_token=4, size=24, router_bias=True, bias=True, limit=0.5)
SPECS = {
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gpt-oss": GPT_OSS,
    "all experts": dataclasses.replace(QWEN2, per_token=12),
    "one expert": ExpertSpec(count=1, per_token=1, size=24),
}
PACKED, PLAIN = ("numba_cpu", "numba_cpu"), ("xla", "xla")


def make_state(spec: ExpertSpec, dtype: str = "float32") -> tuple[Any, nnx.State]:
    """Random parameters, as they would be loaded."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Experts(spec, HIDDEN, dtype)))
    rng = np.random.default_rng(0)

    def fill(shape: jax.ShapeDtypeStruct) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape.shape, np.float32) / 4, shape.dtype)

    return graph, jax.tree.map(fill, state)


def block_of(graph: Any, state: nnx.State, x: jax.Array, is_real: jax.Array, devices: Shards = WHOLE) -> jax.Array:
    """What the block adds to the hidden states, over all devices."""
    return total((nnx.merge(graph, state)(x, is_real),), x.dtype, devices)


def converted(state: nnx.State, names: tuple[str, str]) -> nnx.State:
    forms = Forms(matmul=MATMUL.make(names[0], CPU), grouped_matmul=GROUPED_MATMUL.make(names[1], CPU))
    return nnx.map_state(lambda _, variable: forms.convert(variable), state)


@functools.cache
def run_of(spec: ExpertSpec, names: tuple[str, str], dtype: str = "float32") -> Any:
    graph, state = make_state(spec, dtype=dtype)
    state = converted(state, names)
    run = jax.jit(functools.partial(block_of, graph))
    return functools.partial(run, state)


def tokens(count: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(7).standard_normal((count, HIDDEN), np.float32), dtype)


def real(count: int) -> jax.Array:
    return jnp.ones(count, bool)


def arrays_of(spec: ExpertSpec) -> dict[str, np.ndarray]:
    _, state = make_state(spec)
    return {
        ".".join(map(str, path)): np.asarray(jax.tree.leaves(variable)[0], np.float64)
        for path, variable in nnx.to_flat_state(state)
    }


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def by_formula(spec: ExpertSpec, x: np.ndarray) -> np.ndarray:
    """Token by token and expert by expert in float64, as the families' own code has it."""
    p, out = arrays_of(spec), np.zeros(x.shape)
    for t, token in enumerate(x.astype(np.float64)):
        logits = p["router"] @ token + p.get("router_bias", 0.0)
        chosen = np.argsort(-logits, kind="stable")[: spec.per_token]
        if spec.limit is not None:  # gpt-oss: a softmax of the chosen
            weights = np.exp(logits[chosen]) / np.exp(logits[chosen]).sum()
        else:
            weights = (np.exp(logits) / np.exp(logits).sum())[chosen]
            weights = weights / weights.sum() if spec.renormalise else weights
        for expert, w in zip(chosen, weights, strict=True):
            gate, up = p["gate_up"][expert] @ token + (p["gate_up_bias"][expert] if spec.bias else 0.0)
            if spec.limit is None:
                hidden = gate * sigmoid(gate) * up
            else:
                gate, up = np.minimum(gate, spec.limit), np.clip(up, -spec.limit, spec.limit)
                hidden = (up + 1) * gate * sigmoid(1.702 * gate)
            out[t] += w * (p["down"][expert] @ hidden + (p["down_bias"][expert] if spec.bias else 0.0))
        if spec.shared_size:
            gate, up = p["shared.gate_up"] @ token
            shared = p["shared.down"] @ (gate * sigmoid(gate) * up)
            out[t] += sigmoid(p["shared.gate"] @ token) * shared
    return out


# --- right ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_the_block_is_the_formula_of_its_family(name):
    """With packed experts; those of other forms are in the tests of bfloat16 and of devices."""
    spec, x = SPECS[name], tokens(19)
    out = np.asarray(run_of(spec, PACKED)(x, real(19)))
    np.testing.assert_allclose(out, by_formula(spec, np.asarray(x)), atol=1e-5)


@pytest.mark.slow
def test_bfloat16_is_the_same_but_for_its_rounding():
    x = tokens(19, "bfloat16")
    out = np.asarray(run_of(GPT_OSS, PACKED, "bfloat16")(x, real(19)), np.float32)
    exact = by_formula(GPT_OSS, np.asarray(x, np.float32))
    assert 1e-4 < np.abs(out - exact).max() < 0.05 * exact.std() * np.sqrt(HIDDEN)


def test_of_equal_logits_the_lower_expert_wins():
    graph, state = make_state(MIXTRAL)
    state["router"] = jax.tree.map(jnp.zeros_like, state["router"])
    run = jax.jit(functools.partial(block_of, graph))
    x, runs = tokens(3), []
    for poisoned in (slice(2, None), slice(0, 1)):
        spoilt = nnx.map_state(
            lambda path, v, cut=poisoned: jax.tree.map(lambda a: a.at[cut].set(jnp.nan), v) if path[0] == "down" else v,
            state,
        )
        runs.append(np.asarray(run(spoilt, x, real(3))))
    assert np.isfinite(runs[0]).all(), "experts 0 and 1 alone are taken"
    assert np.isnan(runs[1]).all()


def test_tokens_of_padding_read_no_expert():
    """Whatever they hold, and in whichever place: the others have the bits they have without them."""
    graph, state = make_state(MIXTRAL)
    x = tokens(6)
    _, ids = jax.lax.top_k(x @ jax.tree.leaves(state["router"])[0].T, 2)
    own = set(np.asarray(ids)[:4].ravel().tolist())
    others = jnp.asarray([e not in own for e in range(MIXTRAL.count)])
    assert others.any() and np.isin(ids[4:], np.flatnonzero(others)).any(), "the padding would choose one of them"
    spoilt = nnx.map_state(
        lambda path, v: (
            jax.tree.map(lambda a: jnp.where(others[:, None, None], jnp.nan, a), v) if path[0] == "down" else v
        ),
        state,
    )
    run = jax.jit(lambda state, x, is_real: block_of(graph, converted(state, PLAIN), x, is_real))
    out = np.asarray(run(spoilt, x, jnp.arange(6) < 4))
    assert np.isfinite(out).all()
    np.testing.assert_array_equal(out[:4], np.asarray(run(state, x, jnp.arange(6) < 4))[:4])
    assert np.isnan(np.asarray(run(spoilt, x, real(6)))).any(), "but real ones do"


# --- the same bits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2", pytest.param("gpt-oss", marks=pytest.mark.slow)])
def test_a_token_has_the_same_bits_alone_and_in_any_crowd(name):
    """With padding beside it, too."""
    run, x = run_of(SPECS[name], PACKED), tokens(37)
    crowd = np.asarray(run(x, real(37)))
    padded = np.asarray(run(x, jnp.arange(37) < 30))
    np.testing.assert_array_equal(padded[:30], crowd[:30])
    np.testing.assert_array_equal(np.asarray(run(x[5:14], real(9))), crowd[5:14])
    for token in range(37):
        np.testing.assert_array_equal(np.asarray(run(x[token : token + 1], real(1)))[0], crowd[token])


def test_a_token_of_nan_spoils_itself_alone():
    """A router's NaN chooses experts that exist, and their other tokens have the bits they have without it."""
    run, x = run_of(GPT_OSS, PACKED), tokens(9)
    out = np.asarray(run(x.at[4].set(jnp.nan), real(9)))
    others = np.arange(9) != 4
    assert np.isnan(out[4]).all()
    np.testing.assert_array_equal(out[others], np.asarray(run(x, real(9)))[others])


# --- devices --------------------------------------------------------------------------------------------------------


def mesh_of(experts: int, tensor: int, devices: Sequence[Any]) -> Mesh:
    return Mesh(np.array(devices).reshape(experts, tensor), MESH_AXES)


def part_of(spec: ExpertSpec, mesh: Mesh, hidden: int = HIDDEN, dtype: str = "float32") -> tuple[Any, ExpertSpec]:
    """The block of one device of a mesh, and the sizes of the arrays over all: experts over one axis, columns over
    another."""
    experts, tensor = mesh.shape[EXPERT_AXIS], mesh.shape[TENSOR_AXIS]
    held = -(-spec.count // experts)
    local = dataclasses.replace(
        spec, held=held, size=spec.size // tensor, shared_size=spec.shared_size // (experts * tensor)
    )
    block = lambda: Experts(  # noqa: E731
        local,
        hidden,
        dtype,
        experts=Shards(count=experts, axis=EXPERT_AXIS),
    )
    return nnx.split(nnx.eval_shape(block))[0], dataclasses.replace(spec, held=held * experts)


def sharded(graph: Any, state: nnx.State, mesh: Mesh) -> Any:
    def run(state: nnx.State, x: jax.Array) -> jax.Array:
        return block_of(graph, state, x, real(len(x)), Shards(count=mesh.size, axis=MESH_AXES))

    specs = specs_for(state), PartitionSpec()
    return jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=PartitionSpec(), check_vma=False))


def padded(state: nnx.State, held: int) -> nnx.State:
    """With experts that no token goes to, of NaN, up to a number that divides."""

    def pad(variable: Any) -> Any:
        (axes,) = variable.leaf_axes()
        if axes[0] != "experts":
            return variable
        return jax.tree.map(
            lambda a: jnp.pad(a, ((0, held - len(a)), *((0, 0),) * (a.ndim - 1)), constant_values=jnp.nan), variable
        )

    return nnx.map_state(lambda _, variable: pad(variable), state)


SIXTY = ExpertSpec(count=60, per_token=4, size=8, shared_size=16)


@pytest.mark.parametrize(
    ("name", "experts", "tensor"),
    [("sixty", 8, 1), ("gpt-oss", 4, 2), pytest.param("gpt-oss", 1, 8, marks=pytest.mark.slow)],
)
def test_any_cut_over_eight_devices_gives_the_same(name, experts, tensor):
    spec = {"sixty": SIXTY, **SPECS}[name]
    mesh, x = mesh_of(experts, tensor, jax.devices()[:8]), tokens(19)
    graph, whole = part_of(spec, mesh)
    state = padded(make_state(spec)[1], whole.num_held)
    out = np.asarray(sharded(graph, state, mesh)(state, x))
    np.testing.assert_allclose(out, by_formula(spec, np.asarray(x)), atol=1e-5)


def test_packed_experts_are_dealt_out_too():
    """Devices of a CPU each have whole experts."""
    mesh, x = mesh_of(2, 1, jax.devices()[:2]), tokens(9)
    graph, _ = part_of(MIXTRAL, mesh)
    state = converted(make_state(MIXTRAL)[1], PACKED)
    placed = jax.device_put(state, shardings_for(state, mesh))
    out = np.asarray(sharded(graph, placed, mesh)(placed, x))
    np.testing.assert_allclose(out, by_formula(MIXTRAL, np.asarray(x)), atol=1e-5)


@pytest.mark.parametrize(("experts", "tensor", "count"), [(4, 1, 1), pytest.param(2, 2, 100, marks=pytest.mark.slow)])
def test_a_block_compiled_for_a_tpu_has_one_sum_and_copies_no_expert(experts, tensor, count):
    """A layer of Qwen3-30B-A3B: its three products are ragged ones, at any number of rows."""
    spec, hidden = ExpertSpec(count=128, per_token=8, size=768), 2048
    mesh = mesh_of(experts, tensor, absent_devices("v6e:2x2"))
    graph, whole = part_of(spec, mesh, hidden, "bfloat16")
    state = nnx.split(nnx.eval_shape(lambda: Experts(whole, hidden, "bfloat16")))[1]
    device = device_of_topology("v6e:2x2")
    forms = Forms(matmul=MATMUL.resolve(device=device), grouped_matmul=GROUPED_MATMUL.make("ragged_tpu", device))
    state = nnx.map_state(lambda _, variable: forms.shapes(variable), state)
    state, x = jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        (state, jax.ShapeDtypeStruct((count, hidden), jnp.bfloat16)),
        (shardings_for(state, mesh), NamedSharding(mesh, PartitionSpec())),
    )
    compiled = sharded(graph, state, mesh).trace(state, x).lower(lowering_platforms=("tpu",)).compile()
    module = parse_hlo(compiled.as_text())
    instructions = [i for body in module.computations.values() for i in body]
    assert sum(i.name.startswith("ragged-dot-none") for i in instructions) == 3
    assert sum(i.op in ("all-reduce", "all-reduce-start") for i in instructions) == 1
    assert not any("all-gather" in i.op or "all-to-all" in i.op for i in instructions)
    one_matrix = 2 * hidden * spec.size // tensor
    copied = [i.name for i in instructions if i.op.startswith("copy") and max(shape_bytes(i.shape)) >= one_matrix]
    assert not copied
    assert compiled.memory_analysis().temp_size_in_bytes < max(2 * one_matrix, 60 * count * hidden * spec.per_token)
