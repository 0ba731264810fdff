"""Hugging Face's fp8: `quant_method: fp8`, as DeepSeek and Qwen publish it.

    X.weight            float8_e4m3fn [out, in]
    X.weight_scale_inv  float32 or bfloat16 [ceil(out / 128), ceil(in / 128)], with `weight_block_size`
    X.weight_scale      one number, without it; transformers calls this weight_scale_inv, too

All scales multiply, in spite of the name of the first. Blocks at the edges may be ragged.
"""

import dataclasses
from collections.abc import Mapping

from jaxserve.kernels.storage import Storage
from jaxserve.models.quantised.checks import fail
from jaxserve.models.quantised.kv_scales import KV_SCALES
from jaxserve.models.quantised.matching import is_named
from jaxserve.models.quantised.one_byte import OneByteTensor, open_one_byte
from jaxserve.models.quantised.scheme import Format, MethodConfig, Module, ModuleKind, Scheme, beside
from jaxserve.models.safetensors_files import TensorSource

_INERT = ("quant_method", "scale_fmt", "dequantize")
_SCALE, _BLOCK_SCALE = "weight_scale", "weight_scale_inv"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fp8(Format):
    """`block`: outputs and inputs of one scale; None: one scale for the weight."""

    block: tuple[int, int] | None
    bits: int = 8

    @property
    def storage(self) -> Storage | None:
        return Storage(code="float8_e4m3fn", group=None if self.block is None else self.block[1])

    def required(self, name: str) -> tuple[str, ...]:
        return (name, beside(name, _BLOCK_SCALE)) if self.block else (name,)

    def optional(self, name: str) -> tuple[str, ...]:
        scales = () if self.block else (_SCALE, _BLOCK_SCALE)
        return tuple(beside(name, suffix) for suffix in (*scales, "input_scale", "activation_scale"))

    def open(self, name: str, tensors: Mapping[str, TensorSource]) -> OneByteTensor:
        scale = _BLOCK_SCALE
        if self.block is None:
            found = [suffix for suffix in (_SCALE, _BLOCK_SCALE) if beside(name, suffix) in tensors]
            if len(found) != 1:
                fail(tensors[name], f"it needs one scale, {beside(name, _SCALE)} or {beside(name, _BLOCK_SCALE)}")
            scale = found[0]
        return open_one_byte(name, tensors, dtype="float8_e4m3fn", grid=self.block or (None, None), scale=scale)


class Fp8Scheme(Scheme):
    """One format for all linear maps of the layers that the lists do not name."""

    def __init__(self, config: MethodConfig) -> None:
        config.one_of("fmt", "e4m3", "e4m3", "float8_e4m3fn")
        config.require("modules_to_convert", None)
        config.require("expert_dtype", None, "fp8")
        block = config.get("weight_block_size")
        if block is not None:
            sizes = block if isinstance(block, list) else [block]
            if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
                config.fail(f"weight_block_size is {block!r}, but must be two whole numbers, such as [128, 128]")
            block = (sizes[0], sizes[1])
        activations = config.one_of("activation_scheme", "dynamic", "dynamic", "static")
        self._skipped = (*config.strings("modules_to_not_convert"), *config.strings("ignored_layers"))
        self._format = Fp8(block=block)
        config.check_all_read("fp8", _INERT)
        shape = f"blocks of {block[0]} x {block[1]}" if block else "one scale for a weight"
        super().__init__(
            f"fp8, codes of 8 bits, {shape}",
            [f"activation_scheme is {activations}: activations are not quantised here, and their scales are not read"],
            [KV_SCALES],
            kv_dtype="float8_e4m3fn",
        )

    @property
    def formats(self) -> tuple[Format, ...]:
        return (self._format,)

    def format_of(self, module: Module) -> Format | None:
        in_layers = module.kind in (ModuleKind.LAYER, ModuleKind.ROUTER)
        return self._format if in_layers and not is_named(module.name, self._skipped) else None
