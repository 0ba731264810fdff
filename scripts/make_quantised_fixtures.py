"""Makes tests/fixtures/quantised: single weights as the tools that quantise write them, each with its float numbers.

    python3 -m venv oracle && oracle/bin/pip install torch transformers safetensors compressed-tensors
    git clone https://github.com/AutoGPTQ/AutoGPTQ; git clone https://github.com/casper-hansen/AutoAWQ
    oracle/bin/python scripts/make_quantised_fixtures.py --autogptq AutoGPTQ --autoawq AutoAWQ [--out DIRECTORY]

Nothing else here needs these: the tests read the files that are checked in. Weights are on the grid of their scales, so
that a tool packs exactly the codes that they are made of, and a reader must give the same numbers back. fp8 and gpt-oss
have no tool that packs: random bits, and what transformers makes of them.

AutoGPTQ and AutoAWQ no longer import under transformers 5. The one module of each that packs does.
"""

import argparse
import importlib
import sys
import types
from pathlib import Path

import torch
from compressed_tensors.compressors import (
    FloatQuantizationCompressor,
    IntQuantizationCompressor,
    MXFP4PackedCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

OUT, IN, GROUP = 64, 96, 32
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
Tensors = dict[str, torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--autogptq", type=Path, required=True)
    parser.add_argument("--autoawq", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("tests/fixtures/quantised"))
    options = parser.parse_args()
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    made = {
        "gptq": gptq(options.autogptq, act_order=False),
        "gptq_act_order": gptq(options.autogptq, act_order=True),
        "awq": awq(options.autoawq),
        "pack_quantized": packed(symmetric=True),
        "pack_quantized_zeros": packed(symmetric=False),
        "int_quantized": int_quantized(),
        "float_quantized": float_quantized(),
        "mxfp4_pack_quantized": mxfp4(),
        "nvfp4_pack_quantized": nvfp4(),
        "fp8": fp8(),
        "gpt_oss": gpt_oss(),
    }
    for name, tensors in made.items():
        whole = {key: tensor.detach().contiguous() for key, tensor in tensors.items()}
        save_file(whole, str(options.out / f"{name}.safetensors"))


def module_of(directory: Path, package: str, name: str) -> types.ModuleType:
    """A module below `directory`, without the code of the packages around it."""
    parts = name.split(".")[:-1]
    for depth in range(len(parts) + 1):
        stub = types.ModuleType(".".join([package, *parts[:depth]]))
        stub.__path__ = [str(directory.joinpath(package, *parts[:depth]))]
        sys.modules[stub.__name__] = stub
    return importlib.import_module(f"{package}.{name}")


def linear_of(weight: torch.Tensor) -> torch.nn.Linear:
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return linear


def on_grid(groups: torch.Tensor, low: int, high: int, zero_range: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Weights [out, in], scales and zeros [out, groups]; scales are float16 numbers."""
    scales = (torch.rand(OUT, IN // GROUP) * 0.01 + 0.002).half().float()
    zeros = torch.randint(*zero_range, scales.shape).float()
    codes = torch.randint(low, high, (OUT, IN)).float()
    return (codes - zeros[:, groups]) * scales[:, groups], scales, zeros


def gptq(directory: Path, *, act_order: bool) -> Tensors:
    """AutoGPTQ, 4 bits; zeros from 1 to 15, since it stores one less."""
    module = module_of(directory, "auto_gptq", "nn_modules.qlinear.qlinear_cuda")
    groups = torch.arange(IN) // GROUP
    groups = groups[torch.randperm(IN)] if act_order else groups
    weight, scales, zeros = on_grid(groups, 0, 16, (1, 16))
    layer = module.QuantLinear(4, GROUP, IN, OUT, bias=False)
    layer.pack(linear_of(weight), scales.clone(), zeros.clone(), groups.int())
    names = ("qweight", "qzeros", "scales", "g_idx")
    tensors = {f"X.{name}": getattr(layer, name) for name in names}
    tensors["X.scales"] = tensors["X.scales"].half()
    return tensors | {"expected": weight}


def awq(directory: Path) -> Tensors:
    """AutoAWQ's gemm."""
    module = module_of(directory, "awq", "modules.linear.gemm")
    weight, scales, zeros = on_grid(torch.arange(IN) // GROUP, 0, 16, (0, 16))
    made = module.WQLinear_GEMM.from_linear(linear_of(weight), 4, GROUP, scales=scales.T, zeros=zeros.T)
    return {f"X.{name}": getattr(made, name) for name in ("qweight", "qzeros", "scales")} | {"expected": weight}


def compressed(compressor: type, weights: QuantizationArgs, state: Tensors, expected: torch.Tensor) -> Tensors:
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    tensors = compressor.compress({"weight": expected.clone(), **state}, scheme)
    return {f"X.{name}": tensor for name, tensor in tensors.items()} | {"expected": expected}


def packed(*, symmetric: bool) -> Tensors:
    weight, scales, zeros = on_grid(torch.arange(IN) // GROUP, -8, 8, (0, 1) if symmetric else (-8, 8))
    args = QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=GROUP)
    state = {"weight_scale": scales, "weight_zero_point": zeros.to(torch.int8)}
    return compressed(PackedQuantizationCompressor, args, state, weight)


def int_quantized() -> Tensors:
    codes, scale = torch.randint(-128, 128, (OUT, IN)).float(), torch.rand(OUT, 1) * 0.01 + 0.002
    args = QuantizationArgs(num_bits=8, type="int", symmetric=True, strategy="channel")
    return compressed(IntQuantizationCompressor, args, {"weight_scale": scale}, codes * scale)


def some_fp8(*shape: int) -> torch.Tensor:
    octets = torch.randint(0, 256, shape, dtype=torch.uint8)
    return torch.where(octets & 0x7F == 0x7F, torch.zeros_like(octets), octets).view(torch.float8_e4m3fn)


def float_quantized() -> Tensors:
    scale = torch.rand(OUT, 1) * 0.01 + 0.002
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, strategy="channel")
    return compressed(FloatQuantizationCompressor, args, {"weight_scale": scale}, some_fp8(OUT, IN).float() * scale)


def some_fp4() -> torch.Tensor:
    return FP4[torch.randint(0, 8, (OUT, IN))] * (torch.randint(0, 2, (OUT, IN)) * 2 - 1)


def mxfp4() -> Tensors:
    scales = 2.0 ** torch.randint(-9, -5, (OUT, IN // 32)).float()
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="group", group_size=32)
    expected = some_fp4() * scales.repeat_interleave(32, 1)
    return compressed(MXFP4PackedCompressor, args, {"weight_scale": scales}, expected)


def nvfp4() -> Tensors:
    shared = torch.tensor([5000.0])
    scales = (torch.rand(OUT, IN // 16) * 400 + 16).to(torch.float8_e4m3fn).float()
    args = QuantizationArgs(num_bits=4, type="float", symmetric=True, strategy="tensor_group", group_size=16)
    expected = some_fp4() * (scales / shared).repeat_interleave(16, 1)
    state = {"weight_scale": scales, "weight_global_scale": shared}
    return compressed(NVFP4PackedCompressor, args, state, expected)


def fp8() -> Tensors:
    """Blocks of 32 x 64, ragged along inputs."""
    weight, scales = some_fp8(OUT, IN), torch.rand(2, 2) * 0.01
    expected = _dequantize_fp8_weight(weight, scales, [32, 64], torch.float32)
    return {"X.weight": weight, "X.weight_scale_inv": scales, "expected": expected}


def gpt_oss() -> Tensors:
    """Three experts; `expected` is [experts, in, out]."""
    blocks = torch.randint(0, 256, (3, OUT, IN // 32, 16), dtype=torch.uint8)
    scales = torch.randint(118, 124, (3, OUT, IN // 32), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    return {"X_blocks": blocks, "X_scales": scales, "expected": expected}


if __name__ == "__main__":
    main()
