"""Configs of published checkpoints, as their config.json states them, become the decoders that they describe."""

from typing import Any

import hf_oracle
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.decoder_config import DecoderConfig, RopeScaling
from jaxserve.models.family import FAMILIES, find_family
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.loading import decoder_config

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


def adapt(config: dict[str, Any], **changes: Any) -> DecoderConfig:
    merged = config | changes
    return find_family(merged, "config.json").adapt(HfConfig(merged, "config.json"))


def test_llama_31() -> None:
    config = adapt(LLAMA_31_8B)
    assert (config.num_query_heads, config.num_kv_heads, config.head_dim) == (32, 8, 128)
    assert (config.rope.scaling, config.rope.theta, config.rope.rotary_dim) == (RopeScaling.LLAMA3, 5e5, 128)
    assert config.max_position == 131072
    assert set(config.windows) == {None}
    assert not config.qkv_bias


def test_llama_2_has_neither_kv_heads_nor_theta() -> None:
    old = {k: v for k, v in LLAMA_31_8B.items() if k not in ("num_key_value_heads", "rope_theta", "rope_scaling")}
    config = adapt(old)
    assert (config.num_kv_heads, config.rope.theta, config.rope.scaling) == (32, 1e4, RopeScaling.NONE)


def test_mistral_windows() -> None:
    assert set(adapt(MISTRAL_7B).windows) == {4096}
    assert set(adapt(MISTRAL_7B, sliding_window=None).windows) == {None}
    absent = {k: v for k, v in MISTRAL_7B.items() if k != "sliding_window"}
    assert set(adapt(absent).windows) == {4096}
    assert adapt(MISTRAL_7B, head_dim=160).head_dim == 160


def test_qwen2_biases_and_windows() -> None:
    config = adapt(QWEN25_7B)
    assert (config.qkv_bias, config.out_bias) == (True, False)
    assert set(config.windows) == {None}
    on = adapt(QWEN25_7B, use_sliding_window=True, max_window_layers=21)
    assert on.windows == (None,) * 21 + (131072,) * 7
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    assert adapt(QWEN25_7B, rope_scaling=yarn).max_position == 131072


def test_qwen3_norms_heads_and_ties() -> None:
    config = adapt(QWEN3_06B)
    assert (config.qk_norm, config.head_dim, config.tied_embeddings) == (True, 128, True)
    assert config.head_dim * config.num_query_heads != config.hidden_size


@pytest.mark.parametrize(
    ("base", "changes", "name"),
    [
        (MISTRAL_7B, {"attention_bias": True}, "attention_bias"),
        (MISTRAL_7B, {"layer_types": ["full_attention"] * 32}, "layer_types"),
        (QWEN25_7B, {"layer_types": ["chunked_attention"] * 28}, "chunked_attention"),
        (QWEN25_7B, {"layer_types": ["full_attention"]}, "layer_types"),
        (QWEN25_7B, {"layer_types": ["sliding_attention"] * 28}, "use_sliding_window"),
        (QWEN25_7B, {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        (QWEN3_06B, {"mlp_bias": True}, "mlp_bias"),
    ],
)
def test_fields_that_change_results_are_refused_by_name(base: dict, changes: dict, name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        adapt(base, **changes)


def test_every_registered_family_loads_and_has_a_fixture() -> None:
    seen = {read_checkpoint(hf_oracle.FIXTURES / name).config["architectures"][0] for name in hf_oracle.NAMES}
    assert seen == set(FAMILIES.names())
    for name in hf_oracle.NAMES:
        family, _ = decoder_config(read_checkpoint(hf_oracle.FIXTURES / name))
        assert FAMILIES.get(family.architecture) is family
