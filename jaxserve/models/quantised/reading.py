"""The scheme of a checkpoint, from `quantization_config` or from the file that older tools write beside config.json."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.kernels.storage import FLOAT
from jaxserve.models.checkpoint import Checkpoint, CheckpointKind, read_json
from jaxserve.models.quantised.awq import AwqScheme
from jaxserve.models.quantised.compressed_tensors import CompressedTensorsScheme
from jaxserve.models.quantised.fp8 import Fp8Scheme
from jaxserve.models.quantised.gptq import GptqScheme
from jaxserve.models.quantised.mxfp4 import Mxfp4Scheme
from jaxserve.models.quantised.scheme import MethodConfig, Scheme
from jaxserve.models.quantised.storing import Kept
from jaxserve.models.weights import Path

_FIELDS = {"quantization_config": None, "compression_config": "compressed-tensors"}  # with the method that it implies
_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_SCHEMES: dict[str, Callable[[MethodConfig], Scheme]] = {
    "gptq": GptqScheme,
    "awq": AwqScheme,
    "compressed-tensors": CompressedTensorsScheme,
    "fp8": Fp8Scheme,
    "mxfp4": Mxfp4Scheme,
}
_TAKE_ANOTHER = "take the checkpoint in one of the known methods, or without quantisation"
# Methods that are known and not read, with the remedy.
_REFUSED = {
    "auto-round": "export it again in the format auto_gptq or auto_awq",
    "bitsandbytes": _TAKE_ANOTHER,
    "fbgemm_fp8": "take the checkpoint as fp8 or compressed-tensors (float-quantized)",
    "gguf": "set model.path to the GGUF file itself",
    "modelopt": "take the checkpoint as compressed-tensors (float-quantized, nvfp4-pack-quantized)",
    "torchao": _TAKE_ANOTHER,
}


def read_scheme(checkpoint: Checkpoint) -> Scheme | None:
    """How a checkpoint is quantised; None: it is not.

    Raises CheckpointError for a method, a format or a field that is not known.
    """
    if checkpoint.kind is CheckpointKind.GGUF:
        from jaxserve.models.gguf.tensors import gguf_scheme  # its formats are those of this package

        return gguf_scheme(checkpoint)
    found = _find_table(checkpoint)
    if found is None:
        return None
    table, origin, implied = found
    if checkpoint.kind is CheckpointKind.ORBAX:
        raise CheckpointError(
            f"{origin} is set, but an Orbax directory holds float weights; remove it, or set model.overrides."
            "quantization_config to null"
        )
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{origin} is {table!r}, but must be an object with a quant_method")
    config = MethodConfig(table, origin)
    method = str(config.get("quant_method", implied)).replace("_", "-").lower()
    if method in _SCHEMES:
        return _SCHEMES[method](config)
    remedy = _REFUSED.get(method, _REFUSED.get(str(config.get("quant_method")), _TAKE_ANOTHER))
    raise CheckpointError(
        f"{origin}: quant_method {config.get('quant_method')!r} is not supported; known: {', '.join(_SCHEMES)}; "
        f"{remedy}"
    )


def _find_table(checkpoint: Checkpoint) -> tuple[Any, str, str | None] | None:
    """The settings as they are, where they stand, and the method if they do not name one."""
    for field, implied in _FIELDS.items():
        if checkpoint.config.get(field) is not None:
            return checkpoint.config[field], f"{checkpoint.config_file}: {field}", implied
    if "quantization_config" in checkpoint.config:
        return None  # null says that there is none, whatever files lie beside it
    for name, implied in _FILES.items():
        file = checkpoint.path / name
        if checkpoint.kind is CheckpointKind.HUGGING_FACE and file.is_file():
            return read_json(file), str(file), implied
    return None


def describe_quantisation(checkpoint: Checkpoint, dtype: np.dtype, kept: Mapping[Path, Kept]) -> tuple[str, ...]:
    """Sentences for the log of a start: what weights are kept as, and what of the checkpoint is not used.

    `kept`: all parameters of the model that are codes.
    """
    scheme = read_scheme(checkpoint)
    if scheme is None and not kept:
        return ()
    counts: dict[str, int] = {}
    for found in (part for whole in kept.values() for part in whole.each):
        rounded = ", times activations rounded to int8" if found.arithmetic != FLOAT else ""
        name = f"rounded to {found.rounded}, as floats" if found.storage is None else f"{found.storage}{rounded}"
        counts[name] = counts.get(name, 0) + 1
    if scheme is not None and not scheme.formats:
        return scheme.notes
    label = "rounded at load" if scheme is None else scheme.label
    said = [f"{label}: kept as codes: {'; '.join(f'{count} weights ({name})' for name, count in counts.items())}"]
    if scheme is not None and not kept:
        bits = " and ".join(str(bits) for bits in sorted({found.bits for found in scheme.formats}))
        said = [
            f"{scheme.label}: codes of {bits} bits are widened to {dtype.name} at load; the model takes the memory and "
            f"the time of {dtype.name} weights"
        ]
    return (*said, *(() if scheme is None else scheme.notes))
