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
import contextlib
import dataclasses
import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Starcoder2Config,
)

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
TOKENS = {name: SIZES[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
HEAD_16 = {"head_dim": 16}  # 8 rotated pairs show more of a scaling than the 6 of hidden_size / heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fixture:
    """One checkpoint.

    Attributes:
      config: of transformers.
      dtype, max_shard_size: of the files.
      old_rope: rewrites config.json to the spelling before transformers 5.
      eos_token_ids: of generation_config.json.
      rewrite: makes the directory look as published ones do.
      formulas: by dotted name, functions of transformers that are replaced by our own, where it ignores a field or
        rounds.
      attention: implementation of transformers. Its eager one adds Falcon's ALiBi twice, to the scores and in the mask.
    """

    config: transformers.PretrainedConfig
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "5GB"
    old_rope: bool = False
    eos_token_ids: tuple[int, ...] = (2,)
    rewrite: Callable[[Path], None] | None = None
    formulas: Mapping[str, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    attention: str = "eager"


def llama(rope: dict[str, Any] | None = None, **changes: Any) -> LlamaConfig:
    """A tiny Llama; `rope` is the table of rope parameters."""
    parameters = {"rope_type": "default", "rope_theta": 10_000.0} | (rope or {})
    return LlamaConfig(**(SIZES | {"rms_norm_eps": 1e-5, "rope_parameters": parameters} | changes))


def falcon(**changes: Any) -> FalconConfig:
    """A tiny Falcon-7B, whose field for the feed-forward block has another name than the others'."""
    sizes = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
    return FalconConfig(**(sizes | {"ffn_hidden_size": 80} | changes))


def opt(**changes: Any) -> OPTConfig:
    """A tiny OPT."""
    sizes = {k: v for k, v in SIZES.items() if k not in ("intermediate_size", "num_key_value_heads")}
    return OPTConfig(**(sizes | {"ffn_dim": 80, "word_embed_proj_dim": 48} | changes))


def mpt(heads: int, **attention: Any) -> MptConfig:
    """A tiny MPT."""
    sizes = {"vocab_size": VOCAB, "d_model": 48, "n_layers": 2, "max_seq_len": 256}
    return MptConfig(n_heads=heads, attn_config=attention, **sizes, **TOKENS)


def slopes(num_heads: int, max_bias: float = 8.0) -> torch.Tensor:
    """ALiBi's, as its paper has them: of the power of two below, then every other of those of the power above."""
    power = 1
    while 2 * power <= num_heads:
        power *= 2
    below = [2.0 ** (-max_bias * (i + 1) / power) for i in range(power)]
    above = [2.0 ** (-max_bias * (i + 1) / (2 * power)) for i in range(0, 2 * power, 2)]
    return torch.tensor((below + above)[:num_heads], dtype=torch.float32)


def mpt_biases(max_bias: float, num_heads: int, length: int, *_: Any, **__: Any) -> torch.Tensor:
    """What MPT adds to scores, [N, 1, length], for a largest bias that transformers would not pass on."""
    return slopes(num_heads, max_bias)[:, None, None] * torch.arange(1 - length, 1)


def falcon_biases(mask: torch.Tensor, num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    """What Falcon adds to scores, [B * N, 1, length], in float32, which transformers rounds to bfloat16."""
    positions = (mask.cumsum(-1) - 1) * mask
    return (slopes(num_heads)[None, :, None] * positions[:, None]).flatten(0, 1)[:, None].to(dtype)


def published(directory: Path, *, dropped: tuple[str, ...] = (), **fields: Any) -> None:
    """Fields of config.json as the files of a model's makers have them."""
    file = directory / "config.json"
    config = {k: v for k, v in json.loads(file.read_text()).items() if k not in dropped} | fields
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def without_prefix(directory: Path) -> None:
    """GPT-2's files have no `transformer.`, and buffers of masks."""
    file = directory / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors |= {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8).tril() for layer in range(2)}
    save_file(tensors, file, metadata={"format": "pt"})


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
# Small caps, so that scores and logits come near them.
GEMMA2 = {"num_hidden_layers": 3, "sliding_window": 20, "query_pre_attn_scalar": 24}
GEMMA2 |= {"attn_logit_softcapping": 8.0, "final_logit_softcapping": 10.0}
GEMMA3 = {"num_hidden_layers": 3, "sliding_window": 20, "query_pre_attn_scalar": 20, "sliding_window_pattern": 2}
GEMMA3_ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "sliding_window": 20} | HEAD_16

FIXTURES = {
    "bloom": Fixture(
        config=BloomConfig(vocab_size=VOCAB, hidden_size=48, n_layer=2, n_head=6, **TOKENS),
        dtype=torch.bfloat16,
        rewrite=functools.partial(published, dropped=("hidden_size",), n_embed=48),
    ),
    "falcon_11b": Fixture(
        config=falcon(
            new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1, tie_word_embeddings=False
        )
    ),
    "falcon_71_heads": Fixture(
        config=falcon(hidden_size=142, num_attention_heads=71, ffn_hidden_size=40, alibi=True),
        dtype=torch.bfloat16,
        formulas={"transformers.models.falcon.modeling_falcon.build_alibi_tensor": falcon_biases},
        attention="sdpa",
    ),
    "falcon_mqa": Fixture(config=falcon()),
    "falcon_new": Fixture(config=falcon(new_decoder_architecture=True, num_kv_heads=2)),
    "falcon_rw": Fixture(
        config=falcon(num_attention_heads=6, alibi=True, multi_query=False, parallel_attn=False, bias=True),
        attention="sdpa",
    ),
    "gpt2": Fixture(
        config=GPT2Config(
            vocab_size=VOCAB,
            n_embd=48,
            n_head=4,
            n_layer=2,
            n_positions=256,
            n_inner=80,
            scale_attn_by_inverse_layer_idx=True,
            **TOKENS,
        ),
        rewrite=without_prefix,
    ),
    "gemma": Fixture(config=GemmaConfig(**(SIZES | HEAD_16 | {"num_key_value_heads": 1}))),
    "gemma2": Fixture(config=Gemma2Config(**(SIZES | HEAD_16 | GEMMA2)), dtype=torch.bfloat16),
    "gemma3": Fixture(
        config=Gemma3TextConfig(**(SIZES | HEAD_16 | GEMMA3 | {"rope_parameters": GEMMA3_ROPES})), dtype=torch.bfloat16
    ),
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
    "mixtral": Fixture(
        config=MixtralConfig(**(SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32}))
    ),
    "qwen2_moe": Fixture(  # a dense layer, layers that differ in the window, weights that do not add up to 1
        config=Qwen2MoeConfig(
            **(SIZES | EXPERTS | {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": False}),
            shared_expert_intermediate_size=40,
            use_sliding_window=True,
            sliding_window=20,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
        )
    ),
    "qwen3_moe": Fixture(  # as many experts as a token takes, in every other layer
        config=Qwen3MoeConfig(
            **(SIZES | EXPERTS | HEAD_16 | {"num_experts": 4, "num_experts_per_tok": 4, "decoder_sparse_step": 2})
        )
    ),
    "gpt_oss": Fixture(  # a limit that many numbers reach
        config=GptOssConfig(**(SIZES | GPT_OSS), swiglu_limit=0.7, rope_parameters=YARN | {"truncate": False})
    ),
    "mistral_full": Fixture(config=MistralConfig(**(SIZES | {"sliding_window": None, "hidden_act": "gelu"}))),
    "mpt": Fixture(config=mpt(6, clip_qkv=1.5), dtype=torch.bfloat16),
    "mpt_bias_max": Fixture(
        config=mpt(4, alibi_bias_max=16),
        dtype=torch.bfloat16,
        rewrite=functools.partial(published, architectures=["MPTForCausalLM"], init_config={"name": "kaiming_normal_"}),
        formulas={
            "transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor": functools.partial(mpt_biases, 16.0),
        },
    ),
    "opt": Fixture(config=opt()),
    "opt_350m": Fixture(config=opt(do_layer_norm_before=False, word_embed_proj_dim=32)),
    "olmo2": Fixture(config=Olmo2Config(**(SIZES | {"num_attention_heads": 6}))),
    "phi": Fixture(
        config=PhiConfig(**(SIZES | {"num_key_value_heads": 4, "partial_rotary_factor": 0.4, "qk_layernorm": True}))
    ),
    "phi_tied": Fixture(config=PhiConfig(**(SIZES | HEAD_16 | {"tie_word_embeddings": True}))),
    "phi3": Fixture(config=Phi3Config(**(SIZES | {"sliding_window": 20, "partial_rotary_factor": 0.5}))),
    "qwen2": Fixture(
        config=Qwen2Config(**(SIZES | {"tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}})),
        max_shard_size="60KB",
    ),
    "qwen2_window": Fixture(config=Qwen2Config(**(SIZES | WINDOWED))),
    "qwen3": Fixture(config=Qwen3Config(**(SIZES | {"head_dim": 20, "rope_parameters": {"rope_theta": 1e6}}))),
    "qwen3_window_yarn": Fixture(
        config=Qwen3Config(**(SIZES | WINDOWED | HEAD_16 | {"rope_parameters": YARN | {"rope_theta": 1e4}}))
    ),
    "starcoder2": Fixture(config=Starcoder2Config(**(SIZES | {"num_attention_heads": 6, "sliding_window": 20}))),
}


def fill(model: torch.nn.Module, seed: int) -> None:
    """Weights that make a model decide: peaked attention, varied norms and biases. All are bfloat16 values.

    What is 0 before it is filled (biases, norms whose weight is centred there) varies around 0, norms around 1.
    """
    generator = torch.Generator().manual_seed(seed)
    kinds = {f"{at}.{name}": m for at, m in model.named_modules() for name, _ in m.named_parameters(recurse=False)}
    for name, weight in model.named_parameters():
        draw = torch.randn(weight.shape, generator=generator)
        if "norm" in type(kinds[name]).__name__.lower():
            value = float(weight.detach().flatten()[0]) + 0.3 * draw
        elif name.endswith("bias"):
            value = 0.3 * draw
        elif name.endswith("sinks"):
            value = draw
        elif isinstance(kinds[name], torch.nn.Embedding):
            # Embeddings that are multiplied by sqrt(D), as in Gemma, would drown what the layers add.
            value = 0.5 * draw / getattr(kinds[name], "scalar_embed_scale", 1.0) ** 0.5
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
    if fixture.rewrite is not None:
        fixture.rewrite(directory)


@torch.no_grad()
def ask(directory: Path, prompt: np.ndarray, attention: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Logits of the prompt, greedy continuation, and the smallest margin of its choices.

    The model is loaded anew each time, as the dynamic rope scaling remembers the longest sequence it saw.
    """
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention).eval()
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
            with contextlib.ExitStack() as replaced:
                for function, formula in fixture.formulas.items():
                    replaced.enter_context(mock.patch(function, formula))
                logits, greedy, margin = ask(directory, prompt, fixture.attention)
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
