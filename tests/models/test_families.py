"""Configs of published checkpoints, as their config.json states them, become the decoders that they describe."""

from typing import Any

import hf_oracle
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.decoder_config import (
    AlibiConfig,
    Block,
    DecoderConfig,
    EmbeddingSpec,
    ExpertSpec,
    MlpSpec,
    NormKind,
    NormPlace,
    NormSpec,
    QkNorm,
    RopeConfig,
    RopeScaling,
)
from jaxserve.models.family import FAMILIES, find_family
from jaxserve.models.loading import decoder_config
from jaxserve.models.vision_tower import TowerConfig

BLOOM_560M = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "pad_token_id": 3,
    "pretraining_tp": 1,
    "seq_length": 2048,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "unk_token_id": 0,
    "use_cache": True,
    "vocab_size": 250880,
}
FALCON_7B = {
    "alibi": False,
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["FalconForCausalLM"],
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_falcon.FalconConfig"},
    "bias": False,
    "bos_token_id": 11,
    "eos_token_id": 11,
    "hidden_dropout": 0.0,
    "hidden_size": 4544,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 65024,
}
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
FALCON_11B = FALCON_7B | {
    "activation": "gelu",
    "ff_factor": 4,
    "ffn_hidden_size": 16384,
    "hidden_size": 4096,
    "max_position_embeddings": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 32,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
    "num_ln_in_parallel_attn": 1,
    "rope_scaling": None,
    "rope_theta": 500042.0,
    "tie_word_embeddings": False,
}
FALCON_RW_1B = FALCON_7B | {
    "alibi": True,
    "bias": True,
    "hidden_size": 2048,
    "multi_query": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 24,
    "parallel_attn": False,
    "vocab_size": 50304,
}
GPT2 = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
MPT_7B_STORYWRITER = {
    "architectures": ["MPTForCausalLM"],
    "attn_config": {
        "alibi": True,
        "alibi_bias_max": 16,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "clip_qkv": 6,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    },
    "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"},
    "d_model": 4096,
    "emb_pdrop": 0,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "init_config": {"emb_init_std": None, "name": "kaiming_normal_", "verbose": 0},
    "init_device": "cpu",
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 65536,
    "model_type": "mpt",
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b",
    "torch_dtype": "bfloat16",
    "use_cache": False,
    "verbose": 0,
    "vocab_size": 50432,
}
OPT_125M = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "ffn_dim": 3072,
    "hidden_size": 768,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 50272,
    "word_embed_proj_dim": 768,
}
OPT_350M = OPT_125M | {
    "do_layer_norm_before": False,
    "ffn_dim": 4096,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "word_embed_proj_dim": 512,
}
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
OLMO2_7B = {
    "architectures": ["Olmo2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "eos_token_id": 100257,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "model_type": "olmo2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "pad_token_id": 100277,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "use_cache": True,
    "vocab_size": 100352,
}
GEMMA_2B = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA2_27B = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 128,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608,
    "initializer_range": 0.02,
    "intermediate_size": 36864,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 32,
    "num_hidden_layers": 46,
    "num_key_value_heads": 16,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 144,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
    "_attn_implementation": "eager",
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
PHI_2 = {
    "architectures": ["PhiForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 50256,
    "embd_pdrop": 0.0,
    "eos_token_id": 50256,
    "hidden_act": "gelu_new",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 10240,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "phi",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "partial_rotary_factor": 0.4,
    "qk_layernorm": False,
    "resid_pdrop": 0.1,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.37.0",
    "use_cache": True,
    "vocab_size": 51200,
}
PHI3_MINI_4K = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
    "bos_token_id": 1,
    "embd_pdrop": 0.0,
    "eos_token_id": 32000,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "pad_token_id": 32000,
    "resid_pdrop": 0.0,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.2",
    "use_cache": True,
    "vocab_size": 32064,
}
STARCODER2_3B = {
    "architectures": ["Starcoder2ForCausalLM"],
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "embedding_dropout": 0.1,
    "eos_token_id": 0,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "initializer_range": 0.018042,
    "intermediate_size": 12288,
    "layer_norm_epsilon": 1e-05,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "residual_dropout": 0.1,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.37.0.dev0",
    "use_bias": True,
    "use_cache": True,
    "vocab_size": 49152,
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48}


def adapt(config: dict[str, Any], **changes: Any) -> DecoderConfig:
    merged = config | changes
    return find_family(merged, "config.json").decoder_config(merged, "config.json")


def test_bloom() -> None:
    config = adapt(BLOOM_560M)
    (layer,) = set(config.layers)
    assert (config.hidden_size, config.num_query_heads, config.num_kv_heads, config.head_dim) == (1024, 16, 16, 64)
    assert (config.num_layers, config.max_position, config.tied_embeddings) == (24, 2048, True)
    assert (layer.alibi, layer.scale, layer.qkv_bias, layer.out_bias) == (AlibiConfig(), 0.125, True, True)
    assert layer.mlp == MlpSpec(size=4096, gated=False, activation="gelu_tanh", bias=True)
    assert config.norm == NormSpec(kind=NormKind.LAYER, eps=1e-5, bias=True)
    assert config.embedding == EmbeddingSpec(norm=True)
    assert adapt(BLOOM_560M, n_embed=None, hidden_size=1024) == config


def test_falcon_has_three_forms() -> None:
    config = adapt(FALCON_7B)
    (layer,) = set(config.layers)
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (71, 1, 64)
    assert (config.max_position, config.tied_embeddings) == (2048, True)
    assert (layer.block, layer.rope, layer.qkv_bias) == (Block.SHARED, RopeConfig(theta=1e4, rotary_dim=64), False)
    assert layer.mlp == MlpSpec(size=4 * 4544, gated=False, activation="gelu")
    assert adapt(FALCON_7B, num_kv_heads=71).num_kv_heads == 1, "counts in the new architecture alone"

    config = adapt(FALCON_40B)
    assert (config.num_query_heads, config.num_kv_heads, config.layers[0].block) == (128, 8, Block.PARALLEL)
    config = adapt(FALCON_11B)
    assert (config.num_kv_heads, config.layers[0].block, config.tied_embeddings) == (8, Block.SHARED, False)
    assert (config.ropes[0].theta, config.max_position) == (500042.0, 8192)

    config = adapt(FALCON_RW_1B, rope_theta=10000.0)
    (layer,) = set(config.layers)
    assert (config.num_kv_heads, layer.block, layer.qkv_bias, layer.mlp.bias) == (32, Block.SEQUENTIAL, True, True)
    assert layer.position == AlibiConfig(factor=0.125)


def test_gpt2_positions_and_scales() -> None:
    config = adapt(GPT2)
    (layer,) = set(config.layers)
    assert (config.num_query_heads, config.head_dim, config.max_position) == (12, 64, 1024)
    assert config.embedding == EmbeddingSpec(num_positions=1024)
    assert (layer.position, layer.scale, layer.qkv_bias, layer.out_bias) == (None, 0.125, True, True)
    assert layer.mlp == MlpSpec(size=3072, gated=False, activation="gelu_tanh", bias=True)
    scales = [layer.scale for layer in adapt(GPT2, scale_attn_by_inverse_layer_idx=True).layers]
    assert scales == [0.125 / (i + 1) for i in range(12)]
    assert adapt(GPT2, scale_attn_weights=False).layers[0].scale == 1.0


def test_mpt_clips_and_its_largest_bias() -> None:
    config = adapt(MPT_7B_STORYWRITER)
    (layer,) = set(config.layers)
    assert (layer.alibi, layer.qkv_clip, layer.scale) == (AlibiConfig(max_bias=16), 6.0, 128**-0.5)
    assert layer.mlp == MlpSpec(size=4 * 4096, gated=False, activation="gelu")
    assert (config.max_position, config.norm.bias, config.tied_embeddings) == (65536, False, True)
    plain = {k: v for k, v in MPT_7B_STORYWRITER.items() if k != "attn_config"}
    (layer,) = set(adapt(plain, architectures=["MptForCausalLM"]).layers)
    assert (layer.alibi, layer.qkv_clip) == (AlibiConfig(max_bias=8), None)


@pytest.mark.parametrize(
    ("name", "value"),
    [("alibi", False), ("qk_ln", True), ("prefix_lm", True), ("attn_type", "multiquery_attention"), ("kv_n_heads", 8)],
)
def test_mpt_attention_fields_that_are_not_implemented(name: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"attn_config: .*{name}"):
        adapt(MPT_7B_STORYWRITER, attn_config=MPT_7B_STORYWRITER["attn_config"] | {name: value})


def test_opt_norms_and_widths() -> None:
    config = adapt(OPT_125M)
    (layer,) = set(config.layers)
    assert config.embedding == EmbeddingSpec(num_positions=2048, position_offset=2)
    assert (layer.norms, config.final_norm, layer.qkv_bias) == ((NormPlace.BEFORE,), True, True)
    assert layer.mlp == MlpSpec(size=3072, gated=False, activation="relu", bias=True)
    assert not adapt(OPT_125M, _remove_final_layer_norm=True).final_norm
    config = adapt(OPT_350M)
    assert (config.layers[0].norms, config.final_norm, config.embedding.width) == ((NormPlace.SUM,), False, 512)


def test_llama_31() -> None:
    config = adapt(LLAMA_31_8B)
    (rope,) = config.ropes
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (rope.scaling, rope.theta, rope.rotary_dim) == (RopeScaling.LLAMA3, 5e5, 128)
    assert config.max_position == 131072
    assert set(config.windows) == {None}
    assert not any(layer.qkv_bias for layer in config.layers)


def test_llama_2_has_neither_kv_heads_nor_theta() -> None:
    old = {k: v for k, v in LLAMA_31_8B.items() if k not in ("num_key_value_heads", "rope_theta", "rope_scaling")}
    config = adapt(old)
    assert (config.num_kv_heads, config.ropes[0].theta, config.ropes[0].scaling) == (32, 1e4, RopeScaling.NONE)


def test_mistral_windows() -> None:
    assert set(adapt(MISTRAL_7B).windows) == {4096}
    assert set(adapt(MISTRAL_7B, sliding_window=None).windows) == {None}
    absent = {k: v for k, v in MISTRAL_7B.items() if k != "sliding_window"}
    assert set(adapt(absent).windows) == {4096}
    assert adapt(MISTRAL_7B, head_dim=160).head_dim == 160


def test_qwen2_biases_and_windows() -> None:
    config = adapt(QWEN25_7B)
    assert {(layer.qkv_bias, layer.out_bias) for layer in config.layers} == {(True, False)}
    assert set(config.windows) == {None}
    on = adapt(QWEN25_7B, use_sliding_window=True, max_window_layers=21)
    assert on.windows == (None,) * 21 + (131072,) * 7
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    assert adapt(QWEN25_7B, rope_scaling=yarn).max_position == 131072


@pytest.mark.parametrize("base", [QWEN25_7B, QWEN3_06B])
def test_an_absent_window_that_is_switched_on_is_that_of_transformers(base: dict) -> None:
    on = {k: v for k, v in base.items() if k != "sliding_window"} | {"use_sliding_window": True, "max_window_layers": 2}
    config = adapt(on)
    assert config.windows == (None,) * 2 + (4096,) * (config.num_layers - 2)
    assert set(adapt(on, sliding_window=None).windows) == {None}
    assert set(adapt(on, use_sliding_window=False, sliding_window=0).windows) == {None}  # as transformers 5 writes it


def test_qwen3_norms_heads_and_ties() -> None:
    config = adapt(QWEN3_06B)
    assert (config.layers[0].qk_norm, config.head_dim, config.tied_embeddings) == (QkNorm.HEAD, 128, True)
    assert config.head_dim * config.num_query_heads != config.hidden_size


def test_olmo2_norms_after_and_over_all_heads() -> None:
    config = adapt(OLMO2_7B)
    (layer,) = set(config.layers)
    assert (layer.norms, layer.qk_norm, layer.rope) == (
        (NormPlace.AFTER,),
        QkNorm.JOINT,
        RopeConfig(theta=5e5, rotary_dim=128),
    )
    assert config.norm == NormSpec(eps=1e-6, round_first=False)


def test_gemma_norms_embeddings_and_activation() -> None:
    config = adapt(GEMMA_2B)
    assert (config.head_dim, config.num_kv_heads, config.tied_embeddings) == (256, 1, True)
    assert config.norm == NormSpec(eps=1e-6, zero_centred=True, round_first=False)
    assert config.embedding.scale == 2048**0.5
    assert {(layer.mlp, layer.scale) for layer in config.layers} == {
        (MlpSpec(size=16384, activation="gelu_tanh"), 1 / 16)
    }
    assert adapt(GEMMA_2B, tie_word_embeddings=False).tied_embeddings is False


def test_gemma2_caps_scale_norms_and_windows() -> None:
    config = adapt(GEMMA2_27B)
    assert config.windows == (4096, None) * 23
    assert {(layer.soft_cap, layer.scale, layer.norms) for layer in config.layers} == {
        (50.0, 144**-0.5, (NormPlace.BEFORE, NormPlace.AFTER))
    }
    assert (config.logit_soft_cap, config.embedding.scale, config.tied_embeddings) == (30.0, 4608**0.5, True)
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    absent = adapt({name: value for name, value in GEMMA2_27B.items() if name not in caps})
    assert absent == config
    off = adapt(GEMMA2_27B, **dict.fromkeys(caps))
    assert (off.layers[0].soft_cap, off.logit_soft_cap) == (None, None)
    odd = adapt(GEMMA2_27B, num_hidden_layers=3, layer_types=["full_attention", "full_attention", "sliding_attention"])
    assert odd.windows == (None, None, 4096)


def test_gemma3_has_two_rotations_in_both_spellings() -> None:
    config = adapt(GEMMA3_1B)
    assert config.windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    assert {(layer.window, layer.rope) for layer in config.layers} == {
        (512, RopeConfig(theta=1e4, rotary_dim=256)),
        (None, RopeConfig(theta=1e6, rotary_dim=256)),
    }
    assert {(layer.qk_norm, layer.soft_cap) for layer in config.layers} == {(QkNorm.HEAD, None)}
    assert config.logit_soft_cap is None

    old = adapt(GEMMA3_1B, rope_scaling={"rope_type": "linear", "factor": 8.0})
    assert old.layers[5].rope == RopeConfig(
        theta=1e6, rotary_dim=256, scaling=RopeScaling.LINEAR, factor=8.0, original_max_position=32768
    )
    assert old.layers[0].rope == RopeConfig(theta=1e4, rotary_dim=256)
    nested = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    names = ("rope_theta", "rope_local_base_freq", "rope_scaling", "sliding_window_pattern")
    bare = {name: value for name, value in GEMMA3_1B.items() if name not in names}
    kinds = ["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(26)]
    assert adapt(bare, rope_parameters=nested, layer_types=kinds, _sliding_window_pattern=6) == old


def test_phi_is_parallel_behind_one_norm() -> None:
    config = adapt(PHI_2)
    (layer,) = set(config.layers)
    assert (layer.block, layer.rope, layer.qk_norm) == (Block.SHARED, RopeConfig(theta=1e4, rotary_dim=32), None)
    assert layer.mlp == MlpSpec(size=10240, gated=False, activation="gelu_tanh", bias=True)
    assert config.norm == NormSpec(kind=NormKind.LAYER, eps=1e-5, bias=True)
    assert config.lm_head_bias
    assert adapt(PHI_2, qk_layernorm=True).layers[0].qk_norm is QkNorm.HEAD
    absent = {name: value for name, value in PHI_2.items() if name != "partial_rotary_factor"}
    assert adapt(absent).ropes[0].rotary_dim == 40


def test_phi3_windows_and_part_of_a_head() -> None:
    config = adapt(PHI3_MINI_4K)
    assert set(config.windows) == {2047}
    assert config.norm == NormSpec(eps=1e-5, round_first=True)
    assert config.ropes == (RopeConfig(theta=1e4, rotary_dim=96),)
    assert set(adapt(PHI3_MINI_4K, sliding_window=None).windows) == {None}
    assert adapt(PHI3_MINI_4K, partial_rotary_factor=0.75).ropes[0].rotary_dim == 72


def test_starcoder2_biases_norms_and_window() -> None:
    config = adapt(STARCODER2_3B)
    (layer,) = set(config.layers)
    assert (layer.qkv_bias, layer.out_bias, layer.window) == (True, True, 4096)
    assert layer.mlp == MlpSpec(size=12288, gated=False, activation="gelu_tanh", bias=True)
    assert config.norm == NormSpec(kind=NormKind.LAYER, eps=1e-5, bias=True)
    assert config.tied_embeddings
    bare = adapt(STARCODER2_3B, use_bias=False)
    assert (bare.layers[0].qkv_bias, bare.layers[0].out_bias, bare.norm.bias) == (False, False, True)
    assert bare.layers[0].mlp == MlpSpec(size=12288, gated=False, activation="gelu_tanh")


@pytest.mark.parametrize(
    ("base", "changes", "name"),
    [
        (BLOOM_560M, {"apply_residual_connection_post_layernorm": True}, "apply_residual_connection_post_layernorm"),
        (BLOOM_560M, {"slow_but_exact": True, "pretraining_tp": 4}, "slow_but_exact"),
        (BLOOM_560M, {"n_inner": 1024}, "n_inner"),
        (BLOOM_560M, {"hidden_size": 64}, "n_embed"),
        (BLOOM_560M, {"n_head": 15, "num_attention_heads": None}, "15 attention heads"),
        (FALCON_40B, {"parallel_attn": False}, "parallel_attn"),
        (FALCON_40B, {"num_kv_heads": 7}, "num_kv_heads"),
        (FALCON_40B, {"num_ln_in_parallel_attn": 3}, "num_ln_in_parallel_attn"),
        (FALCON_7B, {"num_ln_in_parallel_attn": 2}, "num_ln_in_parallel_attn"),
        (FALCON_RW_1B, {"num_kv_heads": 8}, "num_kv_heads"),
        (FALCON_11B, {"ff_factor": 2}, "ff_factor"),
        (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
        (MPT_7B_STORYWRITER, {"logit_scale": 0.5}, "logit_scale"),
        (MPT_7B_STORYWRITER, {"no_bias": False}, "no_bias"),
        (MPT_7B_STORYWRITER, {"expansion_ratio": 2}, "expansion_ratio"),
        (MPT_7B_STORYWRITER, {"attn_config": [8]}, "attn_config"),
        (OPT_125M, {"layer_norm_elementwise_affine": False}, "layer_norm_elementwise_affine"),
        (OPT_125M, {"scale_embeddings": True}, "scale_embeddings"),
        (MISTRAL_7B, {"attention_bias": True}, "attention_bias"),
        (MISTRAL_7B, {"layer_types": ["full_attention"] * 32}, "layer_types"),
        (QWEN25_7B, {"layer_types": ["chunked_attention"] * 28}, "chunked_attention"),
        (QWEN25_7B, {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN25_7B, {"layer_types": ["sliding_attention"] * 28}, "use_sliding_window"),
        (QWEN25_7B, {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        (QWEN3_06B, {"mlp_bias": True}, "mlp_bias"),
        (OLMO2_7B, {"mlp_bias": True}, "mlp_bias"),
        (GEMMA_2B, {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (GEMMA_2B, {"hidden_activation": "relu"}, "hidden_activation"),
        (GEMMA2_27B, {"sliding_window_size": 1024}, "sliding_window_size"),
        (GEMMA2_27B, {"layer_types": ["chunked_attention"] * 46}, "chunked_attention"),
        (GEMMA3_1B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (GEMMA3_1B, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_parameters"),
        (GEMMA3_1B, {"rope_scaling": [8.0]}, r"\[8.0\]"),
        (PHI_2, {"partial_rotary_factor": 0.19}, "head_dim 80"),
        (PHI3_MINI_4K, {"rope_scaling": LONGROPE}, "longrope.*Phi-3-mini-4k-instruct"),
        (PHI3_MINI_4K, {"rope_scaling": LONGROPE | {"type": "su"}}, "'su'"),
        (PHI3_MINI_4K, {"rope_parameters": LONGROPE | {"type": None, "rope_type": "yarn"}}, "'yarn'"),
        (PHI3_MINI_4K, {"lm_head_bias": True}, "lm_head_bias"),
        (STARCODER2_3B, {"norm_type": "rms_norm"}, "norm_type"),
        (STARCODER2_3B, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
    ],
)
def test_fields_that_change_results_are_refused_by_name(base: dict, changes: dict, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        adapt(base, **changes)


@pytest.mark.parametrize("base", [LLAMA_31_8B, QWEN3_06B, STARCODER2_3B])
@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("is_llama_config", True, False),
        ("rope_interleaved", False, True),
        ("shared_expert_intermediate_size", 0, 64),
        ("use_mrope", False, True),
    ],
)
def test_a_switch_that_is_off_stops_no_start(base: dict, name: str, off: object, on: object) -> None:
    assert adapt(base, **{name: off}) == adapt(base)
    with pytest.raises(CheckpointError, match=f"{name} = {on}: no reader"):
        adapt(base, **{name: on})


@pytest.mark.parametrize("name", hf_oracle.NAMES)
def test_a_field_that_no_reader_knows_is_refused_by_name(name: str) -> None:
    """Every family has a fixture, as the next test says."""
    with pytest.raises(CheckpointError, match=r"scores_from_the_future = 7: no reader of .*may set it to null"):
        adapt(read_checkpoint(hf_oracle.FIXTURES / name).config, scores_from_the_future=7)


def test_every_registered_family_loads_and_has_a_fixture() -> None:
    files = hf_oracle.FIXTURES.glob("**/oracle.npz")
    directories = [file.parent for file in files if (file.parent / "config.json").exists()]  # adapters have none
    seen = {read_checkpoint(directory).config["architectures"][0] for directory in directories}
    assert seen == set(FAMILIES.names())
    for directory in directories:
        family, _ = decoder_config(read_checkpoint(directory))
        assert FAMILIES.get(family.architecture) is family


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("DeepseekV3ForCausalLM", "latent attention.*distilled"),
        ("Qwen3NextForCausalLM", "keep a state"),
        ("FalconMambaForCausalLM", "keep a state"),
        ("XLMRobertaModel", "is an encoder.*Qwen3-Embedding"),
        ("ModernBertForMaskedLM", "is an encoder"),
        ("Gemma3ForConditionalGeneration", "takes pictures.*text model"),
    ],
)
def test_what_is_known_not_to_run_is_refused_with_a_remedy(architecture: str, reason: str) -> None:
    with pytest.raises(CheckpointError, match=f"{architecture} is not supported: .*{reason}"):
        find_family({"architectures": [architecture]}, "config.json")


MIXTRAL_8X7B = MISTRAL_7B | {
    "architectures": ["MixtralForCausalLM"],
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1e6,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}
QWEN3_30B_A3B = QWEN3_06B | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
QWEN15_MOE = QWEN25_7B | {
    "architectures": ["Qwen2MoeForCausalLM"],
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 1408,
    "norm_topk_prob": False,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "shared_expert_intermediate_size": 5632,
}
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_experts_of_published_configs() -> None:
    mixtral, qwen3, qwen2 = adapt(MIXTRAL_8X7B), adapt(QWEN3_30B_A3B), adapt(QWEN15_MOE)
    assert set(mixtral.mlps) == {ExpertSpec(count=8, per_token=2, size=14336)}
    assert set(mixtral.windows) == {None}
    assert set(qwen3.mlps) == {ExpertSpec(count=128, per_token=8, size=768)}
    assert qwen3.layers[0].qk_norm is QkNorm.HEAD
    shared = ExpertSpec(count=60, per_token=4, size=1408, renormalise=False, shared_size=5632)
    assert set(qwen2.mlps) == {shared} and qwen2.layers[0].qkv_bias
    some = adapt(QWEN15_MOE, decoder_sparse_step=2, mlp_only_layers=[1])
    assert [isinstance(mlp, ExpertSpec) for mlp in some.mlps[:6]] == [False, False, False, True, False, True]
    assert some.mlps[0] == MlpSpec(size=18944)
    on = {k: v for k, v in QWEN3_30B_A3B.items() if k != "sliding_window"}
    assert set(adapt(on, use_sliding_window=True).windows) == {4096}
    absent = {k: v for k, v in MIXTRAL_8X7B.items() if k not in ("rope_theta", "rms_norm_eps")}
    assert (adapt(absent).ropes[0].theta, adapt(absent).norm.eps) == (1e6, 1e-5)


def test_gpt_oss() -> None:
    config = adapt(GPT_OSS_20B)
    assert config.windows == (128, None) * 12
    assert all(layer.sinks and layer.qkv_bias and layer.out_bias for layer in config.layers)
    assert set(config.mlps) == {ExpertSpec(count=32, per_token=4, size=2880, router_bias=True, bias=True, limit=7.0)}
    assert not config.norm.round_first and not config.ropes[0].truncate
    assert config.max_position == 131072
    absent = adapt({k: v for k, v in GPT_OSS_20B.items() if k not in ("rope_theta", "rms_norm_eps")})
    assert (absent.ropes[0].theta, absent.norm.eps) == (150_000.0, 1e-5)


@pytest.mark.parametrize(
    ("base", "changes", "name"),
    [
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, but a layer has 8"),
        (MIXTRAL_8X7B, {"num_local_experts": 0}, "num_local_experts"),
        (QWEN3_30B_A3B, {"topk_method": "group_limited_greedy"}, "topk_method = 'group_limited_greedy'"),
        (QWEN3_30B_A3B, {"mlp_only_layers": "first"}, "mlp_only_layers"),
        (QWEN15_MOE, {"use_sliding_window": True}, "layer_types is missing"),
        (GPT_OSS_20B, {"swiglu_alpha": 2.0}, "swiglu_alpha"),
        (GPT_OSS_20B, {"rope_scaling": None}, "rope_scaling is missing"),
    ],
)
def test_experts_that_cannot_run_are_refused_by_name(base: dict, changes: dict, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        adapt(base, **changes)


QWEN2_VL_2B = {
    "architectures": ["Qwen2VLForConditionalGeneration"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 1536,
    "image_token_id": 151655,
    "initializer_range": 0.02,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen2_vl",
    "num_attention_heads": 12,
    "num_hidden_layers": 28,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "video_token_id": 151656,
    "vision_config": {
        "depth": 32,
        "embed_dim": 1280,
        "hidden_size": 1536,
        "in_chans": 3,
        "mlp_ratio": 4,
        "num_heads": 16,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
    },
    "vision_end_token_id": 151653,
    "vision_start_token_id": 151652,
    "vision_token_id": 151654,
    "vocab_size": 151936,
}
QWEN2_5_VL_3B = QWEN2_VL_2B | {
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "model_type": "qwen2_5_vl",
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "vision_config": {
        "depth": 32,
        "fullatt_block_indexes": [7, 15, 23, 31],
        "hidden_act": "silu",
        "hidden_size": 1280,
        "in_chans": 3,
        "intermediate_size": 3420,
        "num_heads": 16,
        "out_hidden_size": 2048,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "spatial_patch_size": 14,
        "temporal_patch_size": 2,
        "tokens_per_second": 2,
        "window_size": 112,
    },
}
LLAVA_1_5_7B = {
    "architectures": ["LlavaForConditionalGeneration"],
    "ignore_index": -100,
    "image_token_index": 32000,
    "model_type": "llava",
    "pad_token_id": 32001,
    "projector_hidden_act": "gelu",
    "text_config": {
        "_name_or_path": "lmsys/vicuna-7b-v1.5",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "rms_norm_eps": 1e-05,
        "torch_dtype": "float16",
        "vocab_size": 32064,
    },
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.36.0.dev0",
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
    "vocab_size": 32064,
}


def tower(base: dict, **changes: Any) -> TowerConfig:
    config = base | changes
    found = find_family(config, "config.json").tower_config(config, "config.json")
    assert found is not None
    return found


def test_qwen2_vl_has_three_positions_and_full_attention() -> None:
    decoder, found = adapt(QWEN2_VL_2B), tower(QWEN2_VL_2B)
    assert decoder.tied_embeddings
    assert decoder.layers[0].qkv_bias
    assert decoder.ropes == (RopeConfig(theta=1e6, rotary_dim=128, sections=(16, 24, 24)),)
    assert (found.width, found.num_layers, found.mlp.size, found.out_size) == (1280, 32, 5120, 1536)
    assert found.mlp.activation == "quick_gelu"
    assert found.window is None
    yarn = adapt(QWEN2_VL_2B, rope_scaling={"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4.0})
    assert yarn.ropes[0].scaling is RopeScaling.YARN
    assert yarn.ropes[0].sections == (16, 24, 24)


def test_qwen2_5_vl_has_windows_but_for_some_layers() -> None:
    found = tower(QWEN2_5_VL_3B)
    assert (found.window, found.window_patches, found.full_layers) == (112, 64, (7, 15, 23, 31))
    assert found.mlp == MlpSpec(size=3420, bias=True)
    assert found.norm.kind is NormKind.RMS


def test_llava_leaves_the_last_block_out() -> None:
    decoder, found = adapt(LLAVA_1_5_7B), tower(LLAVA_1_5_7B)
    assert (decoder.hidden_size, decoder.num_layers, decoder.vocab_size) == (4096, 32, 32064)
    assert (found.num_layers, found.grid, found.out_size) == (23, (24, 24), 4096)


@pytest.mark.parametrize(
    ("base", "changes", "said"),
    [
        (QWEN2_VL_2B, {"rope_scaling": None}, "mrope_section is None"),
        (QWEN2_VL_2B, {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 23]}}, "add up to 64"),
        (QWEN2_VL_2B, {"vision_config": None}, "'vision_config' is missing"),
        (
            QWEN2_VL_2B,
            {"vision_config": QWEN2_VL_2B["vision_config"] | {"hidden_size": 768}},
            "embeddings have 768 numbers, but hidden_size is 1536",
        ),
        (QWEN2_5_VL_3B, {"vision_config": QWEN2_5_VL_3B["vision_config"] | {"window_size": 100}}, "window_size 100"),
        (LLAVA_1_5_7B, {"vision_feature_layer": [-2, -5]}, "vision_feature_layer"),
        (LLAVA_1_5_7B, {"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy is 'full'"),
        (LLAVA_1_5_7B, {"vision_config": {"model_type": "siglip_vision_model"}}, "only clip_vision_model"),
        (LLAVA_1_5_7B, {"text_config": {"model_type": "mistral"}}, "only llama"),
    ],
)
def test_vision_models_that_are_not_implemented_are_refused(base: dict, changes: dict, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        tower(base, **changes)
