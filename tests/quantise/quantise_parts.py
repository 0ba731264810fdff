"""A tiny Llama with a tokenizer, texts for it, and a job on it without the command."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from jaxserve.assemble.quantise import quantise_checkpoint
from jaxserve.config import load_config
from jaxserve.progress import Quiet
from jaxserve.quantise.choice import Options

FIXTURES = Path(__file__).parents[1] / "fixtures"


def write_texts(file: Path, vocab: int, count: int = 24, seed: int = 0) -> Path:
    """Token ids that follow one another in a pattern."""
    rng = np.random.default_rng(seed)
    with file.open("w") as opened:
        for _ in range(count):
            ids = (int(rng.integers(vocab)) + np.cumsum(rng.integers(1, 4, 24))) % vocab
            opened.write(json.dumps({"prompt_token_ids": ids.tolist()}) + "\n")
    return file


def llama(directory: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """The fixture of Llama with the demo's tokenizer beside it, which no text of ids needs."""
    return model(directory, "llama", changes)


def model(directory: Path, fixture: str, changes: Mapping[str, Any] | None = None) -> Path:
    shutil.copytree(FIXTURES / fixture, directory)
    demo = Path(__file__).parents[2] / "jaxserve/demo_model"
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json"):
        if not (directory / name).exists():
            shutil.copyfile(demo / name, directory / name)
    if changes:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return directory


def run(source: Path | str, target: Path, data: Path, **options: Any) -> dict[str, Any]:
    judge, progress = options.pop("judge", None), options.pop("progress", Quiet())
    settings = [f"model.path={json.dumps(str(source))}", "model.dtype=float32", "kernels.paged_attention=xla"]
    config = load_config(None, settings).config
    wanted = Options(**({"scheme": "int8"} | options))
    return quantise_checkpoint(config, wanted, data, target, judge=judge, progress=progress)


def stored(directory: Path) -> dict[str, np.ndarray]:
    """All tensors of a directory."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found
