"""Makes the tiny checkpoints of tests/fixtures and the answers of Hugging Face transformers to them.

    python3 -m venv oracle && oracle/bin/pip install torch transformers safetensors
    oracle/bin/python scripts/make_fixtures.py [--out tests/fixtures] [NAME ...]

It needs torch and transformers, which nothing else here does: the tests read the files that are checked in. Each
directory is a Hugging Face checkpoint plus `oracle.npz`:

    prompt_<i>  int32 [S]         token ids
    logits_<i>  float32 [S, V]    at every position, from one forward pass
    greedy_<i>  int32 [64]        what `generate` appends, the prompt left out (prompts of more than one token)
    versions    str               of torch and transformers

The margins: a greedy token is only a fact when the runner-up is further away than float32 noise, so a seed is
taken that keeps every choice at least MIN_MARGIN ahead.
"""

import argparse
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

PROMPT_LENS = (1, 5, 37, 150)
NUM_GREEDY = 64
MIN_MARGIN = 2e-3
VOCAB = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEAD_16 = {"head_dim": 16}  # 8 rotated pairs show more of a scaling than the 6 of hidden_size / heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixture:
    """One checkpoint. `old_rope` rewrites config.json to the spelling before transformers 5."""

    config: transformers.PretrainedConfig
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "5GB"
    old_rope: bool = False
    eos_token_ids: tuple[int, ...] = (2,)


def llama(rope: dict[str, Any] | None = None, **changes: Any) -> LlamaConfig:
    """A tiny Llama; `rope` is the table of rope parameters."""
    parameters = {"rope_type": "default", "rope_theta": 10_000.0} | (rope or {})
    return LlamaConfig(**(SIZES | {"rms_norm_eps": 1e-5, "rope_parameters": parameters} | changes))


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
YARN_MSCALE = YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}
WINDOWED = {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}

FIXTURES = {
    "llama": Fixture(config=llama(), eos_token_ids=(2, 5)),
    "llama_mha_tied_bias": Fixture(
        config=llama(num_key_value_heads=4, tie_word_embeddings=True, attention_bias=True, mlp_bias=True)
    ),
    "llama_linear": Fixture(config=llama({"rope_type": "linear", "factor": 4.0}, **HEAD_16), old_rope=True),
    "llama_dynamic": Fixture(
        config=llama({"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=64, **HEAD_16), old_rope=True
    ),
    "llama_llama3": Fixture(config=llama(LLAMA3, **HEAD_16), dtype=torch.bfloat16, old_rope=True),
    "llama_yarn": Fixture(config=llama(YARN, **HEAD_16), old_rope=True),
    "llama_yarn_mscale": Fixture(config=llama(YARN_MSCALE, **HEAD_16)),
    "mistral_window": Fixture(
        config=MistralConfig(**(SIZES | {"sliding_window": 24, "rope_parameters": {"rope_theta": 10_000.0}}))
    ),
    "mistral_full": Fixture(config=MistralConfig(**(SIZES | {"sliding_window": None, "hidden_act": "gelu"}))),
    "qwen2": Fixture(
        config=Qwen2Config(**(SIZES | {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}})),
        max_shard_size="60KB",
    ),
    "qwen2_window": Fixture(config=Qwen2Config(**(SIZES | WINDOWED))),
    "qwen3": Fixture(config=Qwen3Config(**(SIZES | {"head_dim": 20, "rope_parameters": {"rope_theta": 1e6}}))),
    "qwen3_window_yarn": Fixture(
        config=Qwen3Config(**(SIZES | WINDOWED | HEAD_16 | {"rope_parameters": YARN | {"rope_theta": 1e4}}))
    ),
}


def fill(model: torch.nn.Module, seed: int) -> None:
    """Weights that make a model decide: peaked attention, varied norms and biases. All are bfloat16 values."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        draw = torch.randn(weight.shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.3 * draw
        elif name.endswith("bias"):
            value = 0.3 * draw
        elif "embed_tokens" in name:
            value = 0.5 * draw
        else:
            value = 1.6 * draw / weight.shape[-1] ** 0.5
        weight.data.copy_(value.to(torch.bfloat16))


def write_checkpoint(fixture: Fixture, directory: Path, seed: int) -> None:
    """Saves the checkpoint alone."""
    shutil.rmtree(directory, ignore_errors=True)
    model = AutoModelForCausalLM.from_config(fixture.config, dtype=torch.float32)
    fill(model, seed)
    model.generation_config.eos_token_id = list(fixture.eos_token_ids)
    model.to(fixture.dtype).save_pretrained(directory, max_shard_size=fixture.max_shard_size)
    if fixture.old_rope:
        file = directory / "config.json"
        config = json.loads(file.read_text())
        rope = config.pop("rope_parameters")
        config["rope_theta"] = rope.pop("rope_theta")
        config["rope_scaling"] = rope
        config["torch_dtype"] = config.pop("dtype")
        file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


@torch.no_grad()
def ask(directory: Path, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Logits of the prompt, greedy continuation, and the smallest margin of its choices.

    The model is loaded anew each time, as the dynamic rope scaling remembers the longest sequence it saw.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    tokens = torch.from_numpy(prompt)[None].long()
    logits = model(tokens).logits[0].numpy()
    result = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=NUM_GREEDY,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    top = torch.stack(result.logits)[:, 0].topk(2).values
    greedy = result.sequences[0, len(prompt) :].numpy().astype(np.int32)
    return logits.astype(np.float32), greedy, float((top[:, 0] - top[:, 1]).min())


def make(name: str, out: Path) -> None:
    """Makes one fixture, trying seeds until every greedy choice is clear."""
    fixture, directory = FIXTURES[name], out / name
    for seed in range(100):
        write_checkpoint(fixture, directory, seed)
        rng = np.random.default_rng(seed)
        answers: dict[str, Any] = {"versions": f"torch {torch.__version__}, transformers {transformers.__version__}"}
        margins = []
        for i, length in enumerate(PROMPT_LENS):
            prompt = rng.integers(3, VOCAB, length).astype(np.int32)
            logits, greedy, margin = ask(directory, prompt)
            answers |= {f"prompt_{i}": prompt, f"logits_{i}": logits, f"greedy_{i}": greedy}
            margins.append(margin)
            if margin < MIN_MARGIN:
                break
        else:
            np.savez_compressed(directory / "oracle.npz", **answers)
            size = sum(f.stat().st_size for f in directory.iterdir())
            distinct = len({int(t) for i in range(len(PROMPT_LENS)) for t in answers[f"greedy_{i}"]})
            print(f"{name}: seed {seed}, margin {min(margins):.4f}, {distinct} distinct tokens, {size / 1e3:.0f} kB")
            return
    raise SystemExit(f"{name}: no seed keeps every greedy choice {MIN_MARGIN} ahead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(FIXTURES)}; default: all")
    parser.add_argument("--out", type=Path, default=Path("tests/fixtures"))
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in args.names or FIXTURES:
        make(name, args.out)


if __name__ == "__main__":
    main()
