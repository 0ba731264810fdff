"""Rounded weights as compressed-tensors has them: the tensors of each, and `quantization_config`.

The readers are in `models.quantised`; `read_back` uses them, so that a job goes on with what is in its files.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxserve.kernels.storage import CODES
from jaxserve.models.quantised.compressed_tensors import FORMATS
from jaxserve.models.quantised.group_args import GroupArgs
from jaxserve.models.quantised.scheme import Format, MethodConfig, beside
from jaxserve.models.safetensors_files import TensorSource
from jaxserve.quantise.choice import Choice
from jaxserve.quantise.rounding import Rounded
from jaxserve.quantise.source import Target

_MIXED = "mixed-precision"


def tensors_of_weight(name: str, rounded: Rounded, choice: Choice) -> dict[str, np.ndarray]:
    """The tensors in place of the float weight `name`."""
    scales = rounded.scales.astype(np.dtype(choice.scale_dtype))
    if choice.how.format != "pack-quantized":
        return {name: rounded.codes, beside(name, "weight_scale"): scales}
    return {
        beside(name, "weight_packed"): packed(rounded.codes, CODES[choice.storage.code][0]),
        beside(name, "weight_scale"): scales,
        beside(name, "weight_shape"): np.array(rounded.codes.shape, np.int64),
    }


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """int8 codes [N, K] as int32 [N, ceil(K * bits / 32)], plus 2^(bits - 1), the first in the lowest bits."""
    per_word = 32 // bits
    stored = (codes.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint32)
    words = np.pad(stored, ((0, 0), (0, -codes.shape[1] % per_word))).reshape(len(codes), -1, per_word)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(bits)
    return np.bitwise_or.reduce(words << shifts, axis=2).view(np.int32)


def read_back(name: str, choice: Choice, tensors: Mapping[str, TensorSource]) -> np.ndarray:
    """float32 [out, in]: the weight that the files hold, as a server reads it. Raises CheckpointError."""
    opened = _format_of(choice).open(name, tensors)
    return opened.read(tuple(slice(0, size) for size in opened.shape)).dequantise(np.float32)


def _format_of(choice: Choice) -> Format:
    config = MethodConfig(weights_table(choice), "weights")
    return FORMATS[choice.how.format](GroupArgs.read(config, choice.how.format))


def weights_table(choice: Choice) -> dict[str, Any]:
    """`weights` of a group of the config."""
    group = choice.storage.group
    return {
        "num_bits": CODES[choice.storage.code][0],
        "type": "float" if choice.storage.code.startswith("float") else "int",
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }


def quantization_config(
    targets: Iterable[Target], choices: Mapping[str, Choice], *, cache_scales: bool
) -> dict[str, Any]:
    """The table of config.json."""
    targets = list(targets)
    kinds: dict[Choice, list[Target]] = {}
    for target in targets:
        if target.source in choices:
            kinds.setdefault(_without_dtype(choices[target.source]), []).append(target)
    ignored = [t.module.name for t in targets if t.source not in choices and t.module.torch_class == "Linear"]
    if all(target.param != "lm_head" for target in targets):
        ignored.append("lm_head")  # of tied embeddings, where it is a module all the same
    groups: dict[str, Any] = {}
    for number, (choice, members) in enumerate(kinds.items()):
        simple = len(kinds) == 1 and all(member.module.torch_class == "Linear" for member in members)
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if simple else [member.module.name for member in members],
            "weights": weights_table(choice),
            "input_activations": _rounded_inputs() if choice.how.rounds_inputs else None,
            "output_activations": None,
            "format": choice.how.format,
        }
    formats = {choice.how.format for choice in kinds}
    cache = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": ignored,
        "kv_cache_scheme": cache if cache_scales else None,
    }


def _without_dtype(choice: Choice) -> Choice:
    """Choices that differ in the dtype of their scales are one group of the config."""
    return Choice(scheme=choice.scheme, storage=choice.storage, scale_dtype="float32")


def _rounded_inputs() -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
