"""`Family`: an architecture name, an adapter of its config, and a table of its weights; and the lookup of families."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.hf_config import HfConfig
from jaxserve.registry import Registry


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Where one checkpoint tensor (or one per layer) goes. Positional, since it is a row of a table.

    Attributes:
      source: tensor name; `{layer}` stands for each layer's number.
      target: parameter path in the decoder, joined by dots, with the same `{layer}`. A rule whose target a decoder
        does not have (a bias, say) does not apply to it.
      pattern: einops-like string over the logical axes of the parameter, checkpoint side first. A checkpoint axis may
        be a product in parentheses; every name must be a logical axis, and 1 stands for a part of one index.
      part: name in `fused_parts` when the tensor fills only a slice of the target.
    """

    source: str
    target: str
    pattern: str
    part: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Indices [start, stop) of one axis of a fused parameter."""

    axis: int
    start: int
    stop: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
      architecture: as in `architectures[0]` of config.json.
      adapt: from its config to a `DecoderConfig`; raises CheckpointError for fields that are not implemented.
      weights: the rules.
      ignored: regular expressions of tensor names that carry no weights.
    """

    architecture: str
    adapt: Callable[[HfConfig], DecoderConfig]
    weights: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()


FAMILIES: Registry[Family] = Registry(
    "model family",
    "jaxserve.models",
    {
        "LlamaForCausalLM": "jaxserve.models.llama:FAMILY",
        "MistralForCausalLM": "jaxserve.models.mistral:FAMILY",
        "Qwen2ForCausalLM": "jaxserve.models.qwen2:FAMILY",
        "Qwen3ForCausalLM": "jaxserve.models.qwen3:FAMILY",
    },
)


def find_family(config: Mapping[str, Any], origin: str) -> Family:
    """The family of a parsed config.json. Raises CheckpointError when it is not known, listing those that are."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise CheckpointError(f"{origin}: 'architectures' must be a list with a name, got {names!r}")
    if names[0] not in FAMILIES.names():
        raise CheckpointError(
            f"{origin}: architecture {names[0]!r} is unknown; known: {', '.join(FAMILIES.names())}; an installed "
            "package can add one under the entry point group 'jaxserve.models'"
        )
    try:
        return FAMILIES.get(names[0])
    except ConfigError as error:
        raise CheckpointError(f"{origin}: {error}") from error


def axis_sizes(config: DecoderConfig) -> dict[str, int]:
    """Length of every logical axis that a rule's pattern may name."""
    return {
        "vocab": config.vocab_size,
        "embed": config.hidden_size,
        "mlp": config.ffn_size,
        "heads": config.num_query_heads,
        "kv_heads": config.num_kv_heads,
        "group": config.group_size,
        "head_dim": config.head_dim,
    }


def fused_parts(config: DecoderConfig) -> dict[str, Part]:
    """Slices of the fused kernels of `layers.py` and of their biases, by the name a rule uses."""
    group = config.group_size
    return {
        "q": Part(axis=1, start=0, stop=group),
        "k": Part(axis=1, start=group, stop=group + 1),
        "v": Part(axis=1, start=group + 1, stop=group + 2),
        "gate": Part(axis=0, start=0, stop=1),
        "up": Part(axis=0, start=1, stop=2),
    }
