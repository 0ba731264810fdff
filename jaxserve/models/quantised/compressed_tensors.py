"""compressed-tensors: `quant_method: compressed-tensors`, groups of modules that each have a format.

A group has `targets`: names of modules, patterns (`re:`) or classes. Names count before patterns, and patterns before
classes; what `ignore` means is float, whatever the targets say.
"""

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxserve.models.quantised.float_quantized import FloatQuantized
from jaxserve.models.quantised.group_args import GroupArgs
from jaxserve.models.quantised.int_quantized import IntQuantized
from jaxserve.models.quantised.kv_scales import KV_SCALES
from jaxserve.models.quantised.matching import target_rank
from jaxserve.models.quantised.mxfp4_packed import Mxfp4Packed
from jaxserve.models.quantised.nvfp4_packed import Nvfp4Packed
from jaxserve.models.quantised.pack_quantized import PackQuantized
from jaxserve.models.quantised.scheme import Format, MethodConfig, Module, ModuleKind, Scheme

FORMATS: dict[str, Callable[[GroupArgs], Format]] = {
    "pack-quantized": PackQuantized.read,
    "int-quantized": IntQuantized.read,
    "float-quantized": FloatQuantized.read,
    "mxfp4-pack-quantized": Mxfp4Packed.read,
    "nvfp4-pack-quantized": Nvfp4Packed.read,
}
_MIXED = "mixed-precision"  # of a config whose groups state their formats
_INERT = ("quant_method", "version", "global_compression_ratio", "run_compressed")


class CompressedTensorsScheme(Scheme):
    """The groups of one config."""

    def __init__(self, config: MethodConfig) -> None:
        self._origin = config.origin
        config.one_of("quantization_status", "compressed", "compressed", "frozen")
        sparsity = config.get("sparsity_config") or {}
        if sparsity and sparsity.get("format", "dense") != "dense":
            config.fail(
                f"sparsity_config has format {sparsity.get('format')!r}, which is not supported; take the checkpoint "
                "that is not sparse"
            )
        if config.get("transform_config"):
            config.fail(
                "transform_config is set: weights are rotated, which is not supported; take a checkpoint without it"
            )
        self._ignore = config.strings("ignore")
        cache = config.get("kv_cache_scheme")
        self._groups, activations = self._read_groups(config, cache is not None)
        config.check_all_read("compressed-tensors", _INERT)
        notes = [f"activations of {a} are not quantised here, and their scales are not read" for a in activations]
        kv_dtype = None
        if cache is not None:
            kv_dtype, note = _read_cache_scheme(config, cache)
            notes.append(note)
        labels = dict.fromkeys(f"{name}, codes of {found.bits} bits" for name, _, found in self._groups)
        label = f"compressed-tensors: {', '.join(labels) or 'the KV cache alone'}"
        super().__init__(label, notes, [KV_SCALES] if cache is not None else [], kv_dtype)

    @property
    def formats(self) -> tuple[Format, ...]:
        return tuple(dict.fromkeys(found for _, _, found in self._groups))

    def format_of(self, module: Module) -> Format | None:
        if module.kind is ModuleKind.EXPERTS or any(self._rank(entry, module) is not None for entry in self._ignore):
            return None
        ranked = [
            (rank, found)
            for _, targets, found in self._groups
            for target in targets
            if (rank := self._rank(target, module)) is not None
        ]
        return min(ranked, key=lambda pair: pair[0])[1] if ranked else None

    def check_modules(self, modules: Iterable[Module]) -> None:
        modules = list(modules)
        names = [module.name for module in modules]
        for _, targets, _ in self._groups:
            for target in targets:
                if all(self._rank(target, module) is None for module in modules):
                    near = difflib.get_close_matches(target.removeprefix("re:"), [*names, "Linear"], n=3, cutoff=0.0)
                    self._fail(f"target {target!r} means none of the model's modules; near it are {', '.join(near)}")

    def _rank(self, target: str, module: Module) -> int | None:
        return target_rank(target, module.name, module.torch_class, self._origin)

    def _fail(self, message: str) -> None:
        MethodConfig({}, self._origin).fail(message)

    def _read_groups(
        self, config: MethodConfig, cache_alone: bool
    ) -> tuple[list[tuple[str, tuple[str, ...], Format]], list[str]]:
        """Format name, targets and format of each group; and what activations they would have, in words.

        `cache_alone`: there may be no group, where the KV cache alone is quantised.
        """
        tables = config.get("config_groups")
        stated = config.get("format")
        if cache_alone and tables in (None, {}):
            return [], []
        if not isinstance(tables, Mapping) or not tables or not all(isinstance(t, Mapping) for t in tables.values()):
            config.fail(f"config_groups is {tables!r}, but must map names to groups of modules")
        groups, activations = [], []
        for key, table in tables.items():
            group = MethodConfig(table, f"{config.origin}: config_groups {key!r}")
            name = group.get("format") or (None if stated == _MIXED else stated)
            if name not in FORMATS:
                group.fail(
                    f"format is {name!r}, which is not supported; known: {', '.join(FORMATS)}. Take the checkpoint in "
                    "one of these, or without quantisation"
                )
            weights, targets = group.get("weights"), group.strings("targets")
            if not isinstance(weights, Mapping) or not targets:
                group.fail("a group must have targets and weights")
            args = GroupArgs.read(MethodConfig(weights, f"{group.origin}: weights"), name)
            groups.append((name, targets, FORMATS[name](args)))
            for side in ("input_activations", "output_activations"):
                if said := _describe(group.get(side)):
                    activations.append(said)
            group.check_all_read("compressed-tensors", ())
        return groups, list(dict.fromkeys(activations))


def _read_cache_scheme(config: MethodConfig, table: Any) -> tuple[str | None, str]:
    """The type of cache that the scales of `kv_cache_scheme` are made for, if they are used; and a note about them."""
    if not isinstance(table, Mapping):
        config.fail(f"kv_cache_scheme is {table!r}, but must be an object with num_bits and type")
    bits, kind = table.get("num_bits"), table.get("type", "int")
    dtype = {"float": "float8_e4m3fn", "int": "int8"}.get(kind) if bits == 8 else None
    if dtype is None or table.get("symmetric", True) is False or table.get("dynamic"):
        return None, (
            f"scales of kv_cache_scheme (num_bits {bits}, type {kind}, symmetric {table.get('symmetric')}, dynamic "
            f"{table.get('dynamic')}) are not used: those of 8 bits, symmetric and static, would be"
        )
    return dtype, (
        f"kv_cache_scheme brings scales for keys and values in {dtype}: used where cache.dtype has eight bits, which "
        "it alone decides"
    )


def _describe(activations: Any) -> str:
    if not activations:
        return ""
    return (
        f"{activations.get('num_bits')} bits (type {activations.get('type')}, strategy {activations.get('strategy')})"
    )
