"""LoRA adapters for the fixtures, as PEFT writes them, and the models that they make, by PEFT's arithmetic.

W + s B A is what `PeftModel.merge_and_unload` leaves in the place of a weight W [out, in]; of a Conv1D, which GPT-2
has, it is the transpose of that.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

_MODULES = (
    r".*\.(q_proj|k_proj|v_proj|o_proj|out_proj|qkv_proj|gate_proj|up_proj|gate_up_proj|down_proj|fc1|fc2|c_attn|c_proj"
    r"|c_fc|query_key_value|dense|dense_h_to_4h|dense_4h_to_h|Wqkv)"
)


def weights_of(base: Path) -> dict[str, np.ndarray]:
    """The fixture's tensors, in float32."""
    files = map(load_file, sorted(base.glob("model*.safetensors")))
    return {name: array.astype(np.float32) for file in files for name, array in file.items()}


def modules_of(base: Path) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of all modules of attention and feed-forward blocks that are no experts."""
    found = {}
    for name, array in weights_of(base).items():
        module = name.removesuffix(".weight")
        if array.ndim == 2 and re.fullmatch(_MODULES, module) and "expert" not in module:
            found[module] = (array.shape[1], array.shape[0]) if _is_conv(base) else array.shape
    return found


def write_adapter(
    directory: Path,
    base: Path,
    *,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    size: float = 0.3,
    wanted: Callable[[str], bool] = lambda module: True,
    tensors: Callable[[dict[str, np.ndarray]], None] = lambda tensors: None,
    **fields: Any,
) -> Path:
    """A random adapter of the modules that are `wanted`; `fields` of its config, `tensors` changes its tensors."""
    rng, found = np.random.default_rng(seed), {}
    ranks = fields.get("rank_pattern", {})
    modules = {module: shape for module, shape in modules_of(base).items() if wanted(module)}
    for module, (num_out, num_in) in modules.items():
        own = next((r for key, r in ranks.items() if re.fullmatch(rf"(.*\.)?({key})", module)), rank)
        found[f"base_model.model.{module}.lora_A.weight"] = _random(rng, (own, num_in), num_in**-0.5)
        found[f"base_model.model.{module}.lora_B.weight"] = _random(rng, (num_out, own), size)
    tensors(found)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "bias": "none",
        "use_dora": False,
        "target_modules": sorted({module.rsplit(".", 1)[1] for module in modules}),
        "task_type": "CAUSAL_LM",
        **fields,
    }
    directory.mkdir(parents=True, exist_ok=True)
    save_file(found, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merge(directory: Path, base: Path, adapter: Path) -> Path:
    """The fixture with the adapter in its weights."""
    shutil.copytree(base, directory)
    config, tensors = json.loads((adapter / "adapter_config.json").read_text()), weights_of(base)
    lows = load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in lows if name.endswith("lora_A.weight")]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        down, up = lows[name].astype(np.float64), lows[name.replace("lora_A", "lora_B")].astype(np.float64)
        alpha = next(
            (a for key, a in config.get("alpha_pattern", {}).items() if re.fullmatch(rf"(.*\.)?({key})", module)),
            config["lora_alpha"],
        )
        scale = alpha / (len(down) ** 0.5 if config.get("use_rslora") else len(down))
        delta = scale * (up @ down)
        tensors[f"{module}.weight"] += (delta.T if _is_conv(base) else delta).astype(np.float32)
    for path in directory.glob("model*.safetensors*"):  # a fixture may have several, and an index of them
        path.unlink()
    save_file(tensors, directory / "model.safetensors")
    return directory


def _is_conv(base: Path) -> bool:
    return json.loads((base / "config.json").read_text())["architectures"] == ["GPT2LMHeadModel"]


def _random(rng: np.random.Generator, shape: tuple[int, ...], size: float) -> np.ndarray:
    return (rng.standard_normal(shape) * size).astype(np.float32)
