"""A reader of Hugging Face's `config.json`: typed fields, and the parts that several families spell the same way.

Errors name the file and the field. The shared parts are both spellings of rope settings, and windows; which fields
exist and what they mean for one architecture is written in the module of its family.

There is no schema: checkpoints carry arbitrary extra fields that change nothing. But a field that does change results
must never be ignored, so each family names such fields and refuses values that it does not implement.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, NoReturn

from jaxserve.errors import CheckpointError
from jaxserve.models.decoder_config import RopeConfig, RopeScaling
from jaxserve.models.layers import ACTIVATIONS

# From Hugging Face's names of activations to those of `layers.ACTIVATIONS`.
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
assert set(_ACTIVATIONS.values()) <= set(ACTIVATIONS), _ACTIVATIONS

# Fields that change results wherever they appear, with the values that leave them unchanged.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "compression_config": (None,),
    "partial_rotary_factor": (None, 1.0),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
}

_ROPE_KINDS = {"default": RopeScaling.NONE} | {kind.value: kind for kind in RopeScaling if kind is not RopeScaling.NONE}


class Heads(NamedTuple):
    """Numbers of query heads N and key/value heads K, and the head dimension H."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int


class HfConfig:
    """A parsed config.json. `origin` is the file, for messages. A field given as null counts as absent."""

    def __init__(self, values: Mapping[str, Any], origin: str) -> None:
        self.values = values
        self.origin = origin
        for name, allowed in _NEUTRAL.items():
            self.require(name, *allowed)

    def fail(self, message: str) -> NoReturn:
        raise CheckpointError(f"{self.origin}: {message}")

    def require(self, name: str, *allowed: Any) -> None:
        """Refuses a field that is present with a value that is not implemented."""
        value = self.values.get(name, allowed[0])
        if value not in allowed:
            known = " or ".join("null" if v is None else repr(v) for v in allowed)
            self.fail(f"{name} is {value!r}, which is not supported (only {known})")

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number of at least 1; without a default the field must be there."""
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            self.fail(f"field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.fail(f"{name} is {value!r}, but must be a whole number of at least 1")
        return value

    def number(self, name: str, default: float) -> float:
        """A finite positive number."""
        value = self.values.get(name)
        return default if value is None else self.check_number(name, value)

    def check_number(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
            self.fail(f"{name} is {value!r}, but must be a number above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.fail(f"{name} is {value!r}, but must be true or false")
        return value

    def activation(self, name: str = "hidden_act") -> str:
        value = self.values.get(name, "silu")
        if value not in _ACTIVATIONS:
            self.fail(f"{name} is {value!r}, which is not supported; known: {', '.join(_ACTIVATIONS)}")
        return _ACTIVATIONS[value]

    def heads(self, default_head_dim: int | None = None) -> Heads:
        """The shape of attention. Without a default, an absent `head_dim` is hidden_size over heads."""
        num_query_heads = self.integer("num_attention_heads")
        num_kv_heads = self.integer("num_key_value_heads", num_query_heads)
        head_dim = self.integer("head_dim", default_head_dim or self.integer("hidden_size") // num_query_heads)
        if num_query_heads % num_kv_heads:
            self.fail(f"num_attention_heads {num_query_heads} is no multiple of num_key_value_heads {num_kv_heads}")
        if head_dim % 2:
            self.fail(f"head_dim is {head_dim}, but rotary positions need an even one")
        return Heads(num_query_heads, num_kv_heads, head_dim)


def read_rope(config: HfConfig, head_dim: int, default_theta: float = 10_000.0) -> RopeConfig:
    """Rope settings from `rope_scaling` with a top-level `rope_theta` (old) or `rope_parameters` (transformers 5)."""
    scaling = config.values.get("rope_scaling") or config.values.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping) or any(isinstance(v, Mapping) for v in scaling.values()):
        config.fail(f"rope settings {scaling!r} are not supported: only one flat table for all layers is")
    if scaling.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        config.fail(f"partial_rotary_factor is {scaling['partial_rotary_factor']!r}, which is not supported")
    kind_name = scaling.get("rope_type", scaling.get("type", "default"))
    if kind_name not in _ROPE_KINDS:
        config.fail(f"rope_type is {kind_name!r}, which is not supported; known: {', '.join(_ROPE_KINDS)}")
    kind = _ROPE_KINDS[kind_name]
    theta = config.check_number("rope_theta", scaling.get("rope_theta", config.number("rope_theta", default_theta)))
    base = {"theta": theta, "rotary_dim": head_dim, "scaling": kind}
    if kind is RopeScaling.NONE:
        return RopeConfig(**base)

    max_position = config.integer("max_position_embeddings", 2048)
    original = max_position  # the dynamic scaling has no field of its own for the trained length
    if kind in (RopeScaling.LLAMA3, RopeScaling.YARN):
        original = config.values.get("original_max_position_embeddings") or scaling.get(
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


def read_layer_windows(config: HfConfig, num_layers: int) -> tuple[int | None, ...]:
    """Windows of families with `use_sliding_window`, `max_window_layers` and, newer, `layer_types` (Qwen)."""
    if not config.flag("use_sliding_window", False) or config.values.get("sliding_window") is None:
        window = None
    else:
        window = config.integer("sliding_window")
    kinds = config.values.get("layer_types")
    if kinds is None:
        first = config.values.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            config.fail(f"max_window_layers is {first!r}, but must be a whole number of at least 0")
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        config.fail(f"layer_types must be a list of {num_layers} names, got {kinds!r}")
    if unknown := sorted({str(k) for k in kinds} - {"full_attention", "sliding_attention"}):
        config.fail(f"layer_types has {unknown}, which are not supported; known: full_attention, sliding_attention")
    if window is None and "sliding_attention" in kinds:
        config.fail("layer_types has sliding_attention, but use_sliding_window or sliding_window is off")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
