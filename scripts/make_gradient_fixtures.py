"""Gradients of Hugging Face transformers, as `tests/fixtures/gradients.json`.

    python3 -m venv oracle && oracle/bin/pip install torch transformers safetensors
    oracle/bin/python scripts/make_gradient_fixtures.py

It needs torch and transformers, which nothing else here does: the tests read the file that is checked in. For each
model of NAMES in tests/fixtures and each tensor of its checkpoint there are two numbers of the gradient g of the mean
log-probability of the tokens of its longest prompt, in float64: |g|, and the inner product of g with `direction`.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM

NAMES = ("gemma2", "gpt_oss", "mixtral", "mpt", "qwen2_moe", "qwen3", "qwen3_moe")


def direction(size: int) -> np.ndarray:
    """float64 [size]: numbers in which no axis and no element looks like another."""
    return np.sin(1.0 + np.arange(size, dtype=np.float64) ** 1.5)


def gradients_of(directory: Path) -> dict[str, list[float]]:
    """|g| and <g, direction> of each tensor, by its name in the checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    with np.load(directory / "oracle.npz") as oracle:
        prompts = [oracle[name] for name in oracle.files if name.startswith("prompt_")]
    tokens = torch.tensor(max(prompts, key=len)[None], dtype=torch.long)
    scores = torch.log_softmax(model(tokens, use_cache=False).logits[0, :-1], -1)
    scores[torch.arange(tokens.shape[1] - 1), tokens[0, 1:]].mean().backward()
    with torch.no_grad():  # saved like weights: transformers then gives them the names and shapes of checkpoints
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        slopes = {name: slope for file in Path(folder).glob("*.safetensors") for name, slope in load_file(file).items()}
    return {
        name: [float(np.linalg.norm(slope)), float(slope.reshape(-1) @ direction(slope.size))]
        for name, slope in sorted(slopes.items())
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fixtures", type=Path, default=Path("tests/fixtures"))
    fixtures = parser.parse_args().fixtures
    found = {name: gradients_of(fixtures / name) for name in NAMES}
    (fixtures / "gradients.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
