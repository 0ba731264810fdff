"""A directory that PEFT has written: `adapter_config.json` beside `adapter_model.safetensors`, read and checked.

The tensors say what the adapter is, and the config is checked against them. A field that could change the result is
honoured or refused by its name; one that is not known is refused where it has a value.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np

from jaxserve.errors import AdapterError, CheckpointError
from jaxserve.models.adapters.expressions import check_expression, matches
from jaxserve.models.checkpoint import read_json
from jaxserve.models.safetensors_files import FLOAT_DTYPES, TensorSource, open_file
from jaxserve.models.weights import fold_names

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 2**20
# Some 25,000 tensors, far more than models have matrices. The parser holds the interpreter meanwhile.
_MAX_HEADER_BYTES = 2**22

_HONOURED = {
    "peft_type",
    "r",
    "lora_alpha",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "init_lora_weights",
    "bias",
}
# They change the training, or say where the adapter comes from. `fan_in_fan_out` follows from the kind of the module,
# which PEFT looks at as well; A and B lie alike in both.
_IGNORED = {
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "fan_in_fan_out",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
}
# Fields that change what the adapter computes, with what they stand for.
_REFUSED = {
    "use_dora": "weights of DoRA, which scale each row of the model's",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal adapters",
    "lora_bias": "adapters with biases",
    "modules_to_save": "whole modules beside the adapter",
    "trainable_token_indices": "embeddings of tokens beside the adapter",
    "alora_invocation_tokens": "adapters that begin in the middle of a prompt",
    "layer_replication": "layers that are there several times",
    "target_parameters": "adapters of parameters, as those of experts",
    "arrow_config": "routing between adapters",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "modules of Megatron",
}
_MERGEABLE = {"use_dora", "lora_bias", "modules_to_save", "trainable_token_indices"}
# What holds embeddings and the output projection, in the families of transformers.
_OUTER = {"embed_in", "embed_out", "embed_tokens", "lm_head", "word_embeddings", "wte"}
_OF_OUTER = re.compile(r"(?P<module>.+)\.(base_layer\.weight|lora_embedding_[AB](\.default)?)")
# These take the adapter's first value out of the model's weights, so the adapter fits a changed model.
_CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

_MAX_NUMBER = 1e30  # more is beyond float32 with anything; whole numbers of JSON may be beyond float64
_LAYERS_NAME = re.compile(r"[\w.]+")
_PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LowRankFiles:
    """The two matrices of one module, in their file.

    Attributes:
      down: A [r, in].
      up: B [out, r].
      scale: of the product B A.
    """

    down: TensorSource
    up: TensorSource
    scale: float

    @property
    def rank(self) -> int:
        """r."""
        return self.down.shape[0]


def read_peft(
    directory: Path, max_rank: int, respell: Callable[[str], str], check: Callable[[Set[str]], None]
) -> dict[str, LowRankFiles]:
    """The matrices of each module by its name in the model, as `respell` spells it.

    `check` raises AdapterError for names that are none of the model's, before they are compared with the config's
    expressions: so these meet names that are as many and as long as the model's. Raises AdapterError for a directory
    that is not what PEFT writes, for a field or a tensor that is not implemented, for a rank above `max_rank` and for
    matrices that do not fit each other. Numbers are not read yet.
    """
    config = _read_config(directory)
    tensors = _open_weights(directory)
    _check_inner(tensors, directory)
    found = _by_module(tensors)
    if not found:
        raise AdapterError(f"{directory / WEIGHTS_NAME} has no tensors, so the adapter would change nothing")
    names = {module: respell(module) for module in found}
    check(set(names.values()))
    if len(set(names.values())) < len(names):
        raise AdapterError(f"{directory / WEIGHTS_NAME} names a module in two ways: {fold_names([*names]):.500}")
    modules = {module: _pair(module, sides, config, directory) for module, sides in found.items()}
    for module, files in modules.items():
        if files.rank > max_rank:
            raise AdapterError(
                f"{directory}: {module} has rank {files.rank}, and slots are made for {max_rank} at most; start with "
                f"adapters.max_rank: {files.rank} or more"
            )
    return {names[module]: files for module, files in modules.items()}


def read_floats(tensor: TensorSource) -> np.ndarray:
    """All of a tensor in float32. Raises AdapterError for numbers that are not finite: times zero they would be NaN,
    and so reach the tokens of other adapters."""
    try:
        array = tensor.read(tuple(slice(None) for _ in tensor.shape)).astype(np.float32)
    except CheckpointError as error:
        raise AdapterError(str(error)) from error
    if not np.isfinite(array).all():
        raise AdapterError(f"{tensor.file}: tensor {tensor.name} has numbers that are infinite or no numbers")
    return array


def _read_config(directory: Path) -> Mapping[str, Any]:
    file = directory / CONFIG_NAME
    try:
        if file.exists() and not file.is_file():
            raise AdapterError(f"{file} is no file")  # a pipe would be waited for
        if file.is_file() and file.stat().st_size > _MAX_CONFIG_BYTES:
            raise AdapterError(f"{file} has more than {_MAX_CONFIG_BYTES} bytes, so it is no config of an adapter")
        config = read_json(file)
    except (CheckpointError, OSError) as error:
        raise AdapterError(str(error)) from error
    _check_fields(config, directory)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
        raise AdapterError(f"{file}: r must be a whole number of 1 or more, got {rank!r:.80}")
    if not _is_number(alpha):
        raise AdapterError(f"{file}: lora_alpha must be a number, got {alpha!r:.80}")
    for name, check, kind in (
        ("rank_pattern", lambda value: _is_integer(value) and value >= 1, "whole numbers of 1 or more"),
        ("alpha_pattern", _is_number, "numbers"),
    ):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(check, pattern.values())):
            raise AdapterError(f"{file}: {name} must map names of modules to {kind}, got {pattern!r:.200}")
        for key in pattern:
            check_expression(_of_end(key), f"{file}: {name}")
    for name in ("target_modules", "exclude_modules"):
        value = config.get(name)
        if isinstance(value, str):
            check_expression(value, f"{file}: {name}")
        elif value is not None and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise AdapterError(f"{file}: {name} must be a list of names or a regular expression, got {value!r:.200}")
    layers, pattern = config.get("layers_to_transform"), config.get("layers_pattern") or []
    if layers is not None and not all(map(_is_integer, layers if isinstance(layers, list) else [layers])):
        raise AdapterError(f"{file}: layers_to_transform must be a number or a list of them, got {layers!r:.200}")
    names = pattern if isinstance(pattern, list) else [pattern]
    if not all(isinstance(name, str) and _LAYERS_NAME.fullmatch(name) for name in names):
        raise AdapterError(f"{file}: layers_pattern must be a name of lists of layers or several, got {pattern!r:.200}")
    return config


def _merged(directory: Path) -> str:
    """How an adapter is served whose kind is not implemented."""
    return (
        'merge it into its model, and serve that: python -c "from peft import AutoPeftModelForCausalLM as Model; '
        f"Model.from_pretrained({str(directory)!r}).merge_and_unload().save_pretrained('MERGED')\", with the "
        "tokenizer's files beside it"
    )


def _check_fields(config: Mapping[str, Any], directory: Path) -> None:
    file = directory / CONFIG_NAME
    if config.get("peft_type") != "LORA":
        raise AdapterError(f"{file}: peft_type is {config.get('peft_type')!r:.80}; only 'LORA' is implemented")
    if (bias := config.get("bias", "none")) != "none":
        raise AdapterError(f"{file}: bias is {bias!r:.80}, and biases of adapters are not implemented; train with none")
    start = config.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGED_BASE):
        raise AdapterError(
            f"{file}: init_lora_weights is {start!r:.80}, with which training changes the model's own weights, too; "
            "convert the adapter to plain LoRA when it is saved (path_initial_model_for_weight_conversion)"
        )
    if not isinstance(start, bool | str):
        raise AdapterError(f"{file}: init_lora_weights is {start!r:.80}, which is not known")
    if not isinstance(config.get("use_rslora", False), bool):
        raise AdapterError(f"{file}: use_rslora must be true or false, got {config['use_rslora']!r:.80}")
    for name, value in config.items():
        if name in _HONOURED or name in _IGNORED or not value:
            continue
        if name in _REFUSED:
            remedy = f"; {_merged(directory)}" if name in _MERGEABLE else ""
            raise AdapterError(f"{file}: {name} is {value!r:.80}, and {_REFUSED[name]} are not implemented{remedy}")
        raise AdapterError(f"{file}: the field {name!r:.80} is not known, and its value {value!r:.80} may matter")


def _open_weights(directory: Path) -> dict[str, TensorSource]:
    file = directory / WEIGHTS_NAME
    if not file.is_file():
        other = directory / "adapter_model.bin"
        hint = f"; {other.name} is pickled Python, which is never read: save it with safetensors" * other.is_file()
        raise AdapterError(f"{file} is missing{hint}")
    try:
        return open_file(file, _MAX_HEADER_BYTES)
    except CheckpointError as error:
        raise AdapterError(str(error)) from error


def _check_inner(tensors: Mapping[str, TensorSource], directory: Path) -> None:
    """Only modules of layers can have adapters. With those of others PEFT may save the whole module, too."""
    outer: set[str] = set()
    for name in tensors:
        bare = name.removeprefix(_PREFIX)
        match = _OF_OUTER.fullmatch(bare) or _TENSOR.fullmatch(bare)
        if match is not None and (match.re is _OF_OUTER or match["module"].rpartition(".")[2] in _OUTER):
            outer.add(match["module"])
    if outer:
        raise AdapterError(
            f"{directory}: adapters of the output projection and of embeddings are not implemented: it has one of "
            f"{fold_names([*sorted(outer)]):.500}; train without, or {_merged(directory)}"
        )


def _by_module(tensors: Mapping[str, TensorSource]) -> dict[str, dict[str, TensorSource]]:
    """The matrices "A" and "B" of each module."""
    modules: dict[str, dict[str, TensorSource]] = {}
    unknown = []
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name.removeprefix(_PREFIX))
        if match is None:
            unknown.append(name)
            continue
        if tensor.dtype not in FLOAT_DTYPES:
            raise AdapterError(
                f"{tensor.file}: tensor {name} has numbers of type {tensor.dtype}; adapters have "
                f"{', '.join(FLOAT_DTYPES)}"
            )
        if len(tensor.shape) != 2:
            raise AdapterError(f"{tensor.file}: tensor {name} has shape {list(tensor.shape)}, but must be a matrix")
        sides = modules.setdefault(match["module"], {})
        if match["side"] in sides:
            raise AdapterError(f"{tensor.file}: lora_{match['side']} of {match['module']:.200} is there twice")
        sides[match["side"]] = tensor
    if unknown:
        raise AdapterError(
            f"{next(iter(tensors.values())).file}: {len(unknown)} tensors are no matrices of LoRA: "
            f"{fold_names(unknown):.500}"
        )
    return modules


def _pair(module: str, sides: Mapping[str, TensorSource], config: Mapping[str, Any], directory: Path) -> LowRankFiles:
    if len(sides) < 2:
        (side,) = sides
        missing = "B" if side == "A" else "A"
        raise AdapterError(f"{directory / WEIGHTS_NAME}: {module} has lora_{side} without lora_{missing}")
    down, up = sides["A"], sides["B"]
    if down.shape[0] != up.shape[1]:
        raise AdapterError(
            f"{directory / WEIGHTS_NAME}: {module} has lora_A of rank {down.shape[0]} and lora_B of rank {up.shape[1]}"
        )
    rank = _by_pattern(config.get("rank_pattern"), module, config["r"])
    if down.shape[0] != rank:
        raise AdapterError(
            f"{directory}: {module} has rank {down.shape[0]} in {WEIGHTS_NAME}, and {rank} in {CONFIG_NAME}; do the "
            "two files belong together?"
        )
    _check_target(module, config, directory)
    alpha = _by_pattern(config.get("alpha_pattern"), module, config["lora_alpha"])
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    return LowRankFiles(down=down, up=up, scale=float(scale))


def _by_pattern(pattern: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first key that is the module's name, or the end of it behind a dot; keys are expressions."""
    for key, value in (pattern or {}).items():
        if matches(_of_end(key), module):
            return value
    return default


def _of_end(key: str) -> str:
    return rf"(.*\.)?({key})"


def _check_target(module: str, config: Mapping[str, Any], directory: Path) -> None:
    """PEFT would leave the tensors of a module that is no target unread, and so compute something else."""
    targets, excluded = config.get("target_modules"), config.get("exclude_modules")
    is_target = targets is None or targets == "all-linear" or _names(targets, module)
    layers = config.get("layers_to_transform")
    if is_target and layers is not None:
        chosen = layers if isinstance(layers, list) else [layers]
        pattern = config.get("layers_pattern") or []
        names = [pattern] if isinstance(pattern, str) else pattern
        found = [re.match(rf".*\.{name}\.(\d+)\.", module) for name in names] or [
            re.match(r".*?\.[^.]*\.(\d+)\.", module)
        ]
        is_target = any(match is not None and int(match[1]) in chosen for match in found)
    if not is_target or (excluded and _names(excluded, module)):
        raise AdapterError(
            f"{directory}: {WEIGHTS_NAME} has matrices of {module}, which is none of the modules that {CONFIG_NAME} "
            "names; do the two files belong together?"
        )


def _names(wanted: str | list[str], module: str) -> bool:
    if isinstance(wanted, str):
        return matches(wanted, module)
    return any(module == name or module.endswith(f".{name}") for name in wanted)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_NUMBER
