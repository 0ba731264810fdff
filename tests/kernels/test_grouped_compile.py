"""Grouped products compiled for absent devices: only what belongs together is multiplied, and no weight is copied."""

import base64
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.ops import GROUPED_MATMUL
from jaxserve.kernels.xla_grouped_matmul import DenseExperts
from jaxserve.lab.compiled.topology import absent_devices, device_of_topology
from jaxserve.lab.compiled.traffic import memory_traffic
from jaxserve.runtime.hlo import Instruction, Module, parse_hlo, shape_bytes
from tests.kernels.gpu_compiler import needs_gpu_compiler

# Whole layers of real models: experts, [*out, in].
QWEN3_GATE_UP, QWEN3_DOWN = (128, 2, 768, 2048), (128, 2048, 768)
GPT_OSS_GATE_UP = (32, 2, 2880, 2880)
MIXTRAL_DOWN = (8, 4096, 14336)
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "while", "conditional")


def compile_product(name: str, topology: str, shape: tuple[int, ...], rows: int, dtype: str = "bfloat16") -> Any:
    """The product of a layer by an implementation, for a device of a topology."""
    sharding = jax.sharding.SingleDeviceSharding(absent_devices(topology)[0])
    there = lambda dims, dtype: jax.ShapeDtypeStruct(dims, jnp.dtype(dtype), sharding=sharding)  # noqa: E731
    device: Device = device_of_topology(topology)
    grouped = GROUPED_MATMUL.make(name, device)
    weight: Any = grouped.shapes(DenseExperts(array=there(shape, dtype)))  # pyright: ignore[reportArgumentType]
    weight = jax.tree.map(lambda leaf: there(leaf.shape, leaf.dtype), weight)
    args = weight, there((rows, shape[-1]), dtype), there(shape[:1], "int32")
    platform = "cuda" if device.backend == "gpu" else device.backend
    named = jax.named_scope("gate_up")(lambda weight, x, sizes: weight.multiply(x, sizes))
    traced = jax.jit(named).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).compile()


def largest(module: Module) -> int:
    """Bytes of the largest array that an instruction of any computation makes."""
    made = [i for body in module.computations.values() for i in body if i.op not in FREE]
    return max(max(shape_bytes(i.shape), default=0) for i in made)


def ragged_products(module: Module) -> list[Instruction]:
    return [i for i in module.computations[module.entry] if i.name.startswith("ragged-dot-none")]


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        (QWEN3_GATE_UP, 1),
        (QWEN3_DOWN, 8),
        pytest.param(QWEN3_GATE_UP, 100, marks=pytest.mark.slow),
        pytest.param(GPT_OSS_GATE_UP, 8, marks=pytest.mark.slow),
    ],
)
def test_a_tpu_multiplies_rows_with_their_own_experts_alone(shape, rows):
    compiled = compile_product("ragged_tpu", "v6e:2x2", shape, rows)
    module = parse_hlo(compiled.as_text())
    assert len(ragged_products(module)) == (2 if len(shape) == 4 else 1)
    padded = -(-rows // 8) * 8
    assert compiled.cost_analysis()["flops"] < 1.1 * 2 * padded * math.prod(shape[1:])
    assert largest(module) < 2 * math.prod(shape[1:]), "not even one expert of bfloat16 is copied"
    hit = shape[0] * (1 - (1 - 1 / shape[0]) ** padded)
    weights, activations = 2 * hit * math.prod(shape[1:]), 16 * padded * (shape[-1] + math.prod(shape[1:-1]))
    moved = sum(memory_traffic(module, hit_share=hit / shape[0]).values())
    assert weights * 0.99 < moved < weights * 1.01 + activations


def test_a_tpu_sums_over_a_large_depth_in_the_same_pieces_at_any_number_of_rows():
    """XLA would take smaller pieces of 14,336 for 512 rows than for 8. It takes all of smaller depths at once."""
    depths = set()
    for rows in (8, 512):
        (product,) = ragged_products(parse_hlo(compile_product("ragged_tpu", "v6e:2x2", MIXTRAL_DOWN, rows).as_text()))
        tiling = re.search(r'ragged_dot_tiling="(\d+),(\d+),(\d+)"', product.text)
        assert tiling is not None, product.text[:300]
        depths.add(int(tiling.group(2)))
    assert depths == {7168}


def test_a_tpu_multiplies_float32_in_float32():
    """Its units would round the operands to bfloat16."""
    text = compile_product("ragged_tpu", "v6e:2x2", (8, 512, 256), 8, "float32").as_text()
    kernels = [base64.b64decode(body) for body in re.findall(r'"body":"([^"]*)"', text)]
    assert any(b"contract_precision<fp32>" in kernel for kernel in kernels)
    assert not any(b"contract_precision<bf16>" in kernel for kernel in kernels)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("shape", "rows"), [(QWEN3_GATE_UP, 1), pytest.param(GPT_OSS_GATE_UP, 400, marks=pytest.mark.slow)]
)
def test_a_gpu_without_a_kernel_takes_one_expert_at_a_time(shape, rows):
    """A turn of the loop has tiles of one expert; nothing has the size of two."""
    module = parse_hlo(compile_product("xla", "h200:1", shape, rows).as_text())
    assert any(i.op == "while" for body in module.computations.values() for i in body)
    expert = 2 * math.prod(shape[1:])
    assert largest(module) < 1.1 * expert
    few, many = (sum(memory_traffic(module, hit_share=n / shape[0]).values()) for n in (2, 8))
    assert expert < (many - few) / 6 < 3.5 * expert, "a turn for each expert hit"
