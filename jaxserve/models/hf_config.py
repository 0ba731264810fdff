"""A reader of Hugging Face's `config.json`: typed fields, and the parts that several families spell the same way.

Errors name the file and the field. The shared parts are both spellings of rope settings, and windows; which fields
exist and what they mean for one architecture is written in the module of its family.

A field that changes results must never be ignored. So a config remembers which of its fields an adapter has read, and
refuses by name what neither the adapter nor a list of fields that change nothing knows.
"""

import math
import reprlib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from jaxserve.errors import CheckpointError
from jaxserve.kernels.activations import ACTIVATIONS
from jaxserve.models.decoder_config import NormKind, NormSpec, RopeConfig, RopeScaling

# From Hugging Face's names of activations to those of `kernels.activations`.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
assert set(_ACTIVATIONS.values()) <= set(ACTIVATIONS), _ACTIVATIONS

# Fields that change results wherever they appear, with the values that leave them unchanged.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "tie_encoder_decoder": (None, False),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
    "is_decoder": (None, False, True),
}

# Switches that published files of other families have, with the value at which they change nothing. A family that has
# such a switch reads it.
_OFF: dict[str, Any] = {
    "is_llama_config": True,  # rotation by halves, as in `rope_interleaved`
    "rope_interleaved": False,
    "shared_expert_intermediate_size": 0,
    "use_mrope": False,
}

# Fields of any config that change no logits: names and versions, training, ids and defaults of generation (read from
# generation_config.json), how Hugging Face runs a model, the marks of tools that wrote the file, the sizes of
# embeddings (read in `sentence_modules`), how weights are stored (read in `quantised`), and layers that draft.
_INERT_NAMES = """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path architectures
    auto_map dtype finetuning_task model_type name_or_path task_specific_params tokenizer_class torch_dtype
    transformers_version

    attention_dropout attn_pdrop classifier_dropout dropout embd_pdrop embedding_dropout gradient_checkpointing
    hidden_dropout initializer_range neftune_noise_alpha resid_pdrop residual_dropout tokenizer_padding_side

    bos_token_id decoder_start_token_id eos_token_id forced_bos_token_id forced_eos_token_id pad_token_id sep_token_id
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences prefix remove_invalid_values repetition_penalty suppress_tokens temperature top_k top_p
    typical_p

    chunk_size_feed_forward output_attentions output_hidden_states output_scores return_dict return_dict_in_generate
    tf_legacy_loss torchscript use_bfloat16 use_cache use_flash_attn use_return_dict

    is_matryoshka matryoshka_dimensions

    compression_config quantization_config

    mtp_num_hidden_layers num_nextn_predict_layers

    id2label label2id num_labels problem_type pretraining_tp transformers.js_config unsloth_fixed unsloth_version
"""
INERT = frozenset(_INERT_NAMES.split())

_ROPE_FIELD_NAMES = """
    rope_type type rope_theta factor original_max_position_embeddings low_freq_factor high_freq_factor beta_fast
    beta_slow truncate attention_factor mscale mscale_all_dim partial_rotary_factor finetuned factors
"""
_ROPE_FIELDS = frozenset(_ROPE_FIELD_NAMES.split())
_ROPE_KINDS = {"default": RopeScaling.NONE} | {kind.value: kind for kind in RopeScaling if kind is not RopeScaling.NONE}


class Heads(NamedTuple):
    """Numbers of query heads N and key/value heads K, and the head dimension H."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int


class HfConfig:
    """A parsed config.json. `origin` is the file, for messages. A field given as null counts as absent."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self._values = {name: value for name, value in values.items() if value is not None}
        self._nulls = {name for name, value in values.items() if value is None}
        self._read: set[str] = set()
        self._tables: dict[str, tuple[HfConfig, tuple[str, ...]]] = {}
        self.origin = origin
        for name, allowed in _NEUTRAL.items():
            self.require(name, *allowed)

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self.origin}: {message}")

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field as it is, or the default where it is absent or null."""
        self._read.add(name)
        return self._values.get(name, default)

    def table(
        self, name: str, *, inert: tuple[str, ...] = (), defaults: Mapping[str, Any] = MappingProxyType({})
    ) -> "HfConfig | None":
        """A nested object as a config of its own, whose fields must all be read, too; None where it is absent.

        `inert`: fields of it that change nothing. `defaults`: of those that published files leave out.
        """
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            self.fail(f"{name} is {value!r:.80}, but must be an object")
        if name not in self._tables:
            given = {field: value.get(field, default) for field, default in defaults.items()}
            self._tables[name] = (HfConfig(dict(value) | given, f"{self.origin}: {name}"), inert)
        return self._tables[name][0]

    def spelled(self, *names: str) -> str:
        """The one of several names of a field that the config uses; the first where it has none of them."""
        found = [name for name in names if self.get(name) is not None]
        if len({repr(self.get(name)) for name in found}) > 1:
            said = " and ".join(f"{name} {self.get(name)!r}" for name in found)
            self.fail(f"{said} are names of the same field, but differ")
        return found[0] if found else names[0]

    def is_null(self, name: str) -> bool:
        """The field is there, with the value null, for families where that differs from its absence."""
        self._read.add(name)
        return name in self._nulls

    def check_all_read(self, architecture: str, inert: Iterable[str]) -> None:
        """Raises CheckpointError with the fields that neither `get` nor `INERT` nor `inert` has named."""
        for table, more in self._tables.values():
            table.check_all_read(architecture, more)
        off = {name for name, value in _OFF.items() if name in self._values and self._values[name] == value}
        unread = sorted(self._values.keys() - self._read - INERT - off - set(inert))
        if unread:
            said = ", ".join(f"{name} = {reprlib.repr(self._values[name])}" for name in unread)
            self.fail(
                f"{said}: no reader of {architecture} knows what this changes; if it changes nothing, model.overrides "
                "may set it to null"
            )

    def require(self, name: str, *allowed: Any) -> None:
        """Refuses a field that is present with a value that is not implemented."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            known = " or ".join("null" if v is None else repr(v) for v in allowed)
            self.fail(f"{name} is {value!r}, which is not supported (only {known})")

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default the field must be there."""
        value = self.get(name, default)
        if value is None:
            self.fail(f"field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(f"{name} is {value!r}, but must be a whole number of at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite positive number."""
        return self.check_number(name, self.get(name, default))

    def number_or_off(self, name: str, default: float) -> float | None:
        """A finite positive number; None where the field is null, which switches off what an absent field leaves on."""
        return None if self.is_null(name) else self.number(name, default)

    def check_number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            self.fail(f"{name} is {value!r}, but must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.fail(f"{name} is {value!r}, but must be true or false")
        return value

    def activation(self, name: str = "hidden_act", default: str = "silu") -> str:
        value = self.get(name, default)
        if value not in _ACTIVATIONS:
            self.fail(f"{name} is {value!r}, which is not supported; known: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def head_dim(self, hidden_size: int, num_heads: int) -> int:
        """That of families without a field for it; see `heads` for the others."""
        if hidden_size % num_heads:
            self.fail(f"the hidden size {hidden_size} is no multiple of the {num_heads} attention heads")
        return hidden_size // num_heads

    def heads(self, default_head_dim: int | None = None) -> Heads:
        """The shape of attention. Without a default, an absent `head_dim` is hidden_size over heads."""
        num_query_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_query_heads)
        head_dim = self.integer("head_dim", default_head_dim or self.integer("hidden_size") // num_query_heads)
        if num_query_heads % num_kv_heads:
            self.fail(f"num_attention_heads {num_query_heads} is no multiple of num_key_value_heads {num_kv_heads}")
        return Heads(num_query_heads, num_kv_heads, head_dim)


def read_layer_norm(config: HfConfig, *, bias: bool = True) -> NormSpec:
    """The norms of families with `layer_norm_epsilon`."""
    return NormSpec(kind=NormKind.LAYER, eps=config.number("layer_norm_epsilon", 1e-5), bias=bias)


def read_rope(
    config: HfConfig, head_dim: int, default_theta: float = 10_000.0, default_share: float | None = None
) -> RopeConfig:
    """Rope settings from `rope_scaling` with a top-level `rope_theta` (old) or `rope_parameters` (transformers 5).

    `default_share`: of a head that turns, in families that have `partial_rotary_factor`; None: they have not.
    """
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    return rope_of(config, old or new or {}, head_dim, default_theta, default_share)


def rope_of(
    config: HfConfig, scaling: Any, head_dim: int, default_theta: float, default_share: float | None = None
) -> RopeConfig:
    """Rope settings from the fields of one table, whatever the config calls that; see `read_rope`."""
    if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
        config.fail(f"rope settings {scaling!r} are not supported: only one flat table for all layers is")
    if unknown := sorted(scaling.keys() - _ROPE_FIELDS):
        config.fail(f"rope settings have {', '.join(unknown)}; known are {', '.join(sorted(_ROPE_FIELDS))}")
    # Newer files say these in the table and beside it; the table counts.
    shares = (scaling.get("partial_rotary_factor"), config.get("partial_rotary_factor"), default_share, 1.0)
    thetas = (scaling.get("rope_theta"), config.get("rope_theta"), default_theta)
    share = next(value for value in shares if value is not None)
    share = config.check_number("partial_rotary_factor", share)
    if default_share is None and share != 1.0:
        config.fail(f"partial_rotary_factor is {share!r}, which is not supported (only null or 1.0)")
    rotary_dim = int(head_dim * share)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        config.fail(f"{rotary_dim} of head_dim {head_dim} numbers turn, but rotary positions need an even count")
    kind_name = scaling.get("rope_type", scaling.get("type", "default"))
    if kind_name not in _ROPE_KINDS:
        config.fail(f"rope_type is {kind_name!r}, which is not supported; known: {', '.join(_ROPE_KINDS)}")
    kind = _ROPE_KINDS[kind_name]
    theta = config.check_number("rope_theta", next(value for value in thetas if value is not None))
    base = {"theta": theta, "rotary_dim": rotary_dim, "scaling": kind}
    if kind is RopeScaling.NONE:
        return RopeConfig(**base)
    if kind is RopeScaling.FACTORS:
        return RopeConfig(**base, factors=_rope_factors(config, scaling, rotary_dim))

    max_position = config.integer("max_position_embeddings", 2048)
    original = max_position  # the dynamic scaling has no field of its own for the trained length
    if kind in (RopeScaling.LLAMA3, RopeScaling.YARN):
        original = config.get("original_max_position_embeddings") or scaling.get(
            "original_max_position_embeddings", max_position
        )
        original = int(config.check_number("original_max_position_embeddings", original))
    factor = scaling.get("factor")
    if factor is None and kind is RopeScaling.YARN:
        factor = max_position / original
    base |= {"factor": config.check_number("rope factor", factor), "original_max_position": original}
    if kind is RopeScaling.LLAMA3:
        for name in ("low_freq_factor", "high_freq_factor"):
            base[name] = config.check_number(f"rope {name}", scaling.get(name))
        if base["low_freq_factor"] == base["high_freq_factor"]:
            config.fail("low_freq_factor equals high_freq_factor, so the llama3 blend is undefined")
    if kind is RopeScaling.YARN:
        base |= _yarn_fields(config, scaling, base["factor"])
    return RopeConfig(**base)


def _rope_factors(config: HfConfig, scaling: Mapping[str, Any], rotary_dim: int) -> tuple[float, ...]:
    """A list that divides each frequency, which GGUF has in place of llama3's fields."""
    factors = scaling.get("factors")
    if not isinstance(factors, list) or len(factors) != rotary_dim // 2:
        config.fail(f"rope factors are {factors!r:.80}, but must be a list of {rotary_dim // 2} numbers")
    return tuple(config.check_number("rope factors", factor) for factor in factors)


def _yarn_fields(config: HfConfig, scaling: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Yarn's own fields. The factor on cos and sin is given, or follows from mscale as in DeepSeek, or is YaRN's."""

    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if numerator and denominator:
            weights = [config.check_number("rope mscale", w) for w in (numerator, denominator)]
            attention_factor = mscale(weights[0]) / mscale(weights[1])
        else:
            attention_factor = mscale(1.0)
    truncate = scaling.get("truncate", True)
    if not isinstance(truncate, bool):
        config.fail(f"rope truncate is {truncate!r}, but must be true or false")
    return {
        "attention_factor": config.check_number("rope attention_factor", attention_factor),
        "beta_fast": config.check_number("rope beta_fast", scaling.get("beta_fast") or 32.0),
        "beta_slow": config.check_number("rope beta_slow", scaling.get("beta_slow") or 1.0),
        "truncate": truncate,
    }


def read_max_position(config: HfConfig, rope: RopeConfig) -> int:
    """Tokens of a sequence: the field of the config, stretched where the scaling stretches it at run time.

    Linear and llama3 checkpoints state the stretched length; dynamic and yarn ones often the trained one.
    """
    stated = config.integer("max_position_embeddings", 2048)
    if rope.scaling in (RopeScaling.DYNAMIC, RopeScaling.YARN):
        return max(stated, int(rope.original_max_position * rope.factor))
    return stated


def read_layer_types(config: HfConfig, num_layers: int) -> list[str] | None:
    """`layer_types`: 'full_attention' or 'sliding_attention' for each layer; None where it is absent."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        config.fail(f"layer_types must be a list of {num_layers} names, got {kinds!r}")
    if unknown := sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention"}):
        config.fail(f"layer_types has {unknown}, which are not supported; known: full_attention, sliding_attention")
    return kinds


def read_switched_window(config: HfConfig) -> int | None:
    """The window of families with `use_sliding_window`: an absent `sliding_window` means 4096, null means none."""
    is_on, is_null = config.flag("use_sliding_window", False), config.is_null("sliding_window")
    return config.integer("sliding_window", 4096) if is_on and not is_null else None


def read_layer_windows(config: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Windows of families with `use_sliding_window`, `max_window_layers` and, newer, `layer_types` (Qwen)."""
    window = read_switched_window(config)
    kinds, first = read_layer_types(config, num_layers), config.get("max_window_layers", 28)
    if kinds is None:
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            config.fail(f"max_window_layers is {first!r}, but must be a whole number of at least 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if window is None and "sliding_attention" in kinds:
        config.fail("layer_types has sliding_attention, but use_sliding_window or sliding_window is off")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
