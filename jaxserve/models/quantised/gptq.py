"""GPTQ, as AutoGPTQ and GPTQModel write it: `quant_method: gptq`, layouts `gptq` and `gptq_v2`.

    X.qweight  int32 [in * bits / 32, out]   packed along inputs, the first in the lowest bits
    X.qzeros   int32 [groups, out * bits / 32]   packed along outputs
    X.scales   float16 [groups, out]
    X.g_idx    int32 [in]   the group of each input

Layout `gptq` stores each zero less one, so a stored 15 means 16: one is added after unpacking, not to the words, where
it would carry into the neighbour. Some files say `gptq` and store `gptq_v2`. With `sym` every zero is half the range,
so there the stored number itself tells the layout.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxserve.kernels.storage import Storage
from jaxserve.models.layout import Index
from jaxserve.models.quantised.bits import to_float32, unpack_words, words_of
from jaxserve.models.quantised.checks import check_scales, expect, fail
from jaxserve.models.quantised.groups import group_range, groups_of, listed_groups
from jaxserve.models.quantised.matching import matches
from jaxserve.models.quantised.scales import FLOATS
from jaxserve.models.quantised.scheme import Format, MethodConfig, Module, ModuleKind, Scheme, beside
from jaxserve.models.quantised.slices import QuantisedSlice
from jaxserve.models.safetensors_files import TensorSource

_BITS = (4, 8)
_STORED_LESS = {"gptq": 1, "gptq_v2": 0}
# How the tool searched for codes, and how others run them.
_INERT = """
    quant_method act_group_aware backend batch_size block_name_to_quantize cache_block_outputs damp_auto_increment
    damp_percent dataset disable_exllama exllama_config format is_marlin_format max_input_length meta
    model_file_base_name model_name_or_path model_seqlen module_name_preceding_first_block mse pack_dtype
    pad_token_id quantizer static_groups tokenizer true_sequential use_cuda_fp16 use_exllama
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gptq(Format):
    """Codes of one module. `group`: inputs of a scale, None: all; `stored_less`: what stored zeros lack."""

    bits: int
    group: int | None
    sym: bool
    desc_act: bool
    stored_less: int
    may_add_bias = True

    @property
    def storage(self) -> Storage | None:
        ordered = self.desc_act and self.group is not None
        return Storage(code=f"int{self.bits}", group=self.group, zeros=not self.sym, ordered=ordered)

    def required(self, name: str) -> tuple[str, ...]:
        suffixes = ("qweight", "qzeros", "scales", *(("g_idx",) if self.desc_act and self.group else ()))
        return tuple(beside(name, suffix) for suffix in suffixes)

    def optional(self, name: str) -> tuple[str, ...]:
        return (beside(name, "g_idx"),)

    def open(self, name: str, tensors: Mapping[str, TensorSource]) -> "GptqTensor":
        per_word = 32 // self.bits
        qweight = expect(tensors[beside(name, "qweight")], ("int32",))
        if len(qweight.shape) != 2:
            fail(qweight, f"its shape is {list(qweight.shape)}, but packed codes have two axes")
        inputs, outputs = qweight.shape[0] * per_word, qweight.shape[1]
        group = self.group or inputs
        groups, because = -(-inputs // group), f"{qweight.name} {list(qweight.shape)} with groups of {group}"
        if outputs % per_word:
            fail(qweight, f"it has {outputs} outputs, but zeros are packed {per_word} to a word")
        g_idx = tensors.get(beside(name, "g_idx"))
        qzeros, scales = tensors[beside(name, "qzeros")], tensors[beside(name, "scales")]
        return GptqTensor(
            name=name,
            shape=(outputs, inputs),
            format=self,
            group=group,
            qweight=qweight,
            qzeros=expect(qzeros, ("int32",), (groups, outputs // per_word), because=because),
            scales=expect(scales, FLOATS, (groups, outputs), because=because),
            g_idx=None if g_idx is None else expect(g_idx, ("int32",), (inputs,), because=because),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class GptqTensor:
    """A `QuantisedTensor`."""

    name: str
    shape: tuple[int, ...]
    format: Gptq
    group: int
    qweight: TensorSource
    qzeros: TensorSource
    scales: TensorSource
    g_idx: TensorSource | None
    outer_axis = 1

    def read(self, index: Index) -> QuantisedSlice:
        outputs, inputs = index
        bits = self.format.bits
        words, kept = words_of(inputs, 32 // bits)
        codes = unpack_words(self.qweight.read((words, outputs)).T, bits)[:, kept]
        if self.g_idx is None:
            groups, group_of = group_range(inputs, self.group), groups_of(inputs, self.group)
        else:
            groups, group_of = listed_groups(self.g_idx, inputs, self.scales.shape[0], self.scales.name)
        scales = to_float32(self.scales.read((groups, outputs)).T)
        check_scales(scales, self.scales, self.qweight.name, (outputs.start, groups.start))
        return QuantisedSlice(codes=codes, scales=scales, zeros=self._zeros(groups, outputs), group_of=group_of)

    def input_groups(self) -> np.ndarray:
        if self.g_idx is None:
            return np.arange(self.shape[1], dtype=np.int32) // self.group
        first, groups = listed_groups(self.g_idx, slice(0, self.shape[1]), self.scales.shape[0], self.scales.name)
        return groups + np.int32(first.start)

    def _zeros(self, groups: slice, outputs: slice) -> np.ndarray:
        bits = self.format.bits
        if self.format.sym:
            return np.full((outputs.stop - outputs.start, groups.stop - groups.start), self._symmetric_zero, np.int16)
        words, kept = words_of(outputs, 32 // bits)
        stored = unpack_words(self.qzeros.read((groups, words)), bits)[:, kept].T
        return stored.astype(np.int16) + np.int16(self.format.stored_less)

    @functools.cached_property
    def _symmetric_zero(self) -> int:
        """Half the range. Raises CheckpointError unless all stored zeros are that, in one of the two layouts."""
        whole = tuple(slice(0, size) for size in self.qzeros.shape)
        stored = unpack_words(self.qzeros.read(whole), self.format.bits)
        half = 2 ** (self.format.bits - 1)
        if stored.size and not ((stored == half - 1).all() or (stored == half).all()):
            fail(
                self.qzeros,
                f"sym is true, so all stored zeros must be {half - 1} (gptq) or all {half} (gptq_v2), but they are "
                f"from {stored.min()} to {stored.max()}",
                "where the codes are not symmetric, set sym to false in model.overrides.quantization_config",
            )
        return half


class GptqScheme(Scheme):
    """One format for all linear maps of the layers, and what `dynamic` says otherwise."""

    def __init__(self, config: MethodConfig) -> None:
        layout = config.get("checkpoint_format") or config.get("format") or "gptq"
        if layout not in _STORED_LESS:
            config.fail(
                f"checkpoint_format is {layout!r}, which is not supported; known: {', '.join(_STORED_LESS)}. Take the "
                "checkpoint in one of these, from which the other layouts are packed"
            )
        self._origin = config.origin
        self._stored_less = _STORED_LESS[layout]
        self._base = {
            "bits": config.integer("bits"),
            "group_size": config.group_size("group_size", 128),
            "sym": config.flag("sym", True),
            "desc_act": config.flag("desc_act", False),
        }
        self._head = config.flag("lm_head", False)
        self._named = _flat(config, "modules_in_block_to_quantize")
        self._default = self._format(config)
        self._dynamic = self._read_dynamic(config)
        config.check_all_read("GPTQ", _INERT.split())
        group = f"groups of {self._default.group}" if self._default.group else "one group for all inputs"
        super().__init__(f"GPTQ, codes of {self._default.bits} bits, {group}")

    @property
    def formats(self) -> tuple[Format, ...]:
        return tuple(dict.fromkeys([self._default, *(found for _, found in self._dynamic if found is not None)]))

    def format_of(self, module: Module) -> Format | None:
        is_head = module.kind is ModuleKind.OUTER and self._head and module.name.endswith("lm_head")
        if not is_head and module.kind not in (ModuleKind.LAYER, ModuleKind.ROUTER):
            return None
        for pattern, found in self._dynamic:
            if matches(pattern, module.name, self._origin):
                return found
        if not is_head and self._named and not any(module.name.endswith(f".{name}") for name in self._named):
            return None
        return self._default

    def _format(self, config: MethodConfig, changes: Mapping[str, Any] | None = None) -> Gptq:
        fields = {**self._base, **(changes or {})}
        if fields["bits"] not in _BITS:
            config.fail(
                f"bits is {fields['bits']}, which is not supported for GPTQ; known: 4, 8. Take the checkpoint with 4 "
                "or 8 bits"
            )
        return Gptq(
            bits=fields["bits"],
            group=fields["group_size"],
            sym=fields["sym"],
            desc_act=fields["desc_act"],
            stored_less=self._stored_less,
        )

    def _read_dynamic(self, config: MethodConfig) -> list[tuple[str, Gptq | None]]:
        """Patterns of modules with their formats, the first that matches counts; None: the module is float."""
        rules = config.get("dynamic", {})
        if not isinstance(rules, Mapping):
            config.fail(f"dynamic is {rules!r}, but must map patterns to settings")
        read: list[tuple[str, Gptq | None]] = []
        for pattern, values in rules.items():
            if pattern.startswith("-:"):
                read.append((pattern.removeprefix("-:"), None))
                continue
            table = MethodConfig(values or {}, f"{config.origin}: dynamic {pattern!r}")
            changes: dict[str, Any] = {}
            for name, reader in (("bits", table.integer), ("sym", table.flag), ("desc_act", table.flag)):
                if table.get(name) is not None:
                    changes[name] = reader(name, self._base[name])
            if table.get("group_size") is not None:
                changes["group_size"] = table.group_size("group_size", -1)
            table.check_all_read("GPTQ", _INERT.split())
            read.append((pattern.removeprefix("+:"), self._format(table, changes)))
        return read


def _flat(config: MethodConfig, name: str) -> tuple[str, ...]:
    """A list of names, or of lists of names."""
    value = config.get(name, [])
    flat = [item for entry in value for item in (entry if isinstance(entry, list) else [entry])]
    if not all(isinstance(item, str) for item in flat):
        config.fail(f"{name} is {value!r}, but must be a list of names")
    return tuple(flat)
