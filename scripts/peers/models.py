"""The models of comparisons on a CPU, as values: a config in Hugging Face's form, and how much is asked of it.

`checkpoint` gives them random weights; published files have their own, and no config here. The expert model reads as
many bytes for one token as the dense one of 125 M parameters does (two of its experts are as wide as that one's
feed-forward block), so both are measured in one run.
"""

import dataclasses
from typing import Any

from peers.workloads import TINY, WORKLOADS, Sizes

DENSE = "cpu-125m"
_FAMILY_WORKLOADS = "one,streams,prefill"

# A step may hold whole prompts beside rows that decode, as in the other engines. By default jaxserve's server on a CPU
# gives prompts 32 tokens a step then, so that gaps between tokens stay even; the first of 16 requests that come at once
# have then ended before the last one begins, and no 16 streams would ever decode together.
_WHOLE_PROMPTS = {"sched.max_mixed_tokens": 0}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PeerModel:
    """One model.

    Attributes:
      config: of its config.json; None: `fetch_real_models.py` has a GGUF file of this name, whose weights are used as
        they are.
      embedding_std: of the table of embeddings; all other matrices have 0.02.
      sizes: of the requests.
      rounds: so many that the command ends within ten minutes on two quiet cores.
      engines, workloads: comma-separated, where the command names none. No `engines`: those of the device.
      one_at_a_time: no two engines fit into the memory together, so each one does all rounds before the next is loaded.
      dense: the dense model beside an expert model.
      overrides: of jaxserve's config. It compiles a step for each size of a batch, so few sizes make a short start.
    """

    config: dict[str, Any] | None
    embedding_std: float = 0.02
    sizes: Sizes = dataclasses.field(default_factory=Sizes)
    rounds: int = 5
    engines: str | None = None
    workloads: str = ",".join(WORKLOADS)
    one_at_a_time: bool = False
    dense: str | None = None
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)


def _config(architecture: str, model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **more,
    }


def _llama(*, hidden: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> dict[str, Any]:
    return _config(
        "LlamaForCausalLM",
        "llama",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        hidden_act="silu",
        tie_word_embeddings=False,
    )


def _mixtral(*, experts: int, **sizes: int) -> dict[str, Any]:
    """Two experts a token, of `ffn` each."""
    return _llama(**sizes) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": experts,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }


def _bloom(*, hidden: int, layers: int, heads: int, vocab: int) -> dict[str, Any]:
    return _config(
        "BloomForCausalLM",
        "bloom",
        hidden_size=hidden,
        n_layer=layers,
        n_head=heads,
        vocab_size=vocab,
        layer_norm_epsilon=1e-5,
        apply_residual_connection_post_layernorm=False,
        pretraining_tp=1,
        slow_but_exact=False,
        tie_word_embeddings=True,
    )


def _gemma2(
    *, hidden: int, layers: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int
) -> dict[str, Any]:
    return _config(
        "Gemma2ForCausalLM",
        "gemma2",
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=ffn,
        vocab_size=vocab,
        max_position_embeddings=8192,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=head_dim,
        sliding_window=4096,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        attention_bias=False,
        tie_word_embeddings=True,
        pad_token_id=0,
    )


# Gemma multiplies embeddings with sqrt(hidden), and its table is that of the logits too. With 0.02 the token that came
# last would almost always be chosen again, and equal tokens would prove nothing. BLOOM's norm of embeddings does that
# whatever the table; `checkpoint` gives it small weights.
_GEMMA_STD = 0.005

_PUBLISHED = PeerModel(
    config=None,
    sizes=Sizes(requests=16, long_prefill=2048),
    engines="jaxserve,llamacpp",
    workloads="one,streams,short_prefill,prefill,long_prefill",
    overrides=_WHOLE_PROMPTS,
)

MODELS = {
    "gemma3-270m": _PUBLISHED,
    "qwen2.5-coder-0.5b": _PUBLISHED,
    DENSE: PeerModel(
        config=_llama(hidden=768, layers=12, heads=12, kv_heads=4, ffn=2048, vocab=32000), overrides=_WHOLE_PROMPTS
    ),
    "experts": PeerModel(
        config=_mixtral(hidden=768, layers=12, heads=12, kv_heads=4, ffn=1024, experts=16, vocab=32000),
        sizes=Sizes(requests=16),
        engines="jaxserve,jaxserve-dense,hf,hf-grouped,llamacpp",
        workloads=_FAMILY_WORKLOADS,
        dense=DENSE,
        overrides=_WHOLE_PROMPTS,
    ),
    "bloom-560m": PeerModel(
        config=_bloom(hidden=1024, layers=24, heads=16, vocab=250880),
        sizes=Sizes(output=32, requests=16),
        engines="jaxserve,hf,llamacpp",
        workloads=_FAMILY_WORKLOADS,
        overrides=_WHOLE_PROMPTS,
    ),
    "gemma-2-2b": PeerModel(
        config=_gemma2(hidden=2304, layers=26, heads=8, kv_heads=4, head_dim=256, ffn=9216, vocab=256000),
        embedding_std=_GEMMA_STD,
        sizes=Sizes(prompt=16, output=12, requests=16),
        rounds=3,
        engines="jaxserve,hf,llamacpp",
        workloads=_FAMILY_WORKLOADS,
        one_at_a_time=True,
        overrides=_WHOLE_PROMPTS,
    ),
    "tiny": PeerModel(config=_llama(hidden=64, layers=2, heads=4, kv_heads=2, ffn=128, vocab=512), sizes=TINY),
    "tiny-experts": PeerModel(
        config=_mixtral(hidden=64, layers=2, heads=4, kv_heads=2, ffn=64, experts=4, vocab=512),
        sizes=TINY,
        engines="jaxserve,jaxserve-dense,hf,hf-grouped,llamacpp",
        workloads=_FAMILY_WORKLOADS,
        dense="tiny",
    ),
    "tiny-bloom": PeerModel(
        config=_bloom(hidden=64, layers=2, heads=4, vocab=512),
        sizes=TINY,
        engines="jaxserve,hf,llamacpp",
        workloads=_FAMILY_WORKLOADS,
    ),
    "tiny-gemma2": PeerModel(
        config=_gemma2(hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, ffn=128, vocab=512),
        sizes=TINY,
        engines="jaxserve,hf,llamacpp",
        workloads=_FAMILY_WORKLOADS,
        one_at_a_time=True,
    ),
}
