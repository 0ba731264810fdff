"""`Family`: an architecture name, an adapter of its config, and a table of its weights; and the lookup of families."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.vision_tower import TowerConfig, TowerFamily
from jaxserve.models.weight_rules import Rule
from jaxserve.values.registry import Registry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture.

    Attributes:
      architecture: as in `architectures[0]` of config.json.
      adapt: from its config to a `DecoderConfig`; raises CheckpointError for values that are not implemented.
      weights: the rules.
      ignored: regular expressions of tensor names that carry no weights, beside those of `weights.UNREAD`.
      spellings: regular expressions of how tensor names may begin, and the beginning that the table has for it.
      inert: fields of its config that change nothing, beside those of `hf_config.INERT`.
      tower: what makes embeddings of pictures; None: the model takes text alone.
    """

    architecture: str
    adapt: Callable[[HfConfig], DecoderConfig]
    weights: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    spellings: tuple[tuple[str, str], ...] = ()
    inert: tuple[str, ...] = ()
    tower: TowerFamily | None = None

    @property
    def prefix(self) -> str:
        """What tensor names of a base model leave out: the beginning that all rules but those of the head share."""
        first = {rule.source.partition(".")[0] for rule in self.weights if not rule.target.startswith("lm_head")}
        return f"{first.pop()}." if len(first) == 1 else ""

    def decoder_config(self, values: Mapping[str, Any], origin: str) -> DecoderConfig:
        """The decoder of a parsed config.json; `origin` is the file, for messages.

        Raises CheckpointError for a value that is not implemented, and for a field that nothing has read: it may change
        results.
        """
        return self._adapt_all(values, origin)[0]

    def tower_config(self, values: Mapping[str, Any], origin: str) -> TowerConfig | None:
        """The vision tower of a parsed config.json, of families that have one. Raises as `decoder_config`."""
        return self._adapt_all(values, origin)[1]

    def _adapt_all(self, values: Mapping[str, Any], origin: str) -> tuple[DecoderConfig, TowerConfig | None]:
        config = HfConfig(values, origin)
        decoder = self.adapt(config)
        tower = None if self.tower is None else self.tower.adapt(config)
        if tower is not None and tower.out_size != decoder.hidden_size:
            config.fail(
                f"the tower's embeddings have {tower.out_size} numbers, but hidden_size is {decoder.hidden_size}"
            )
        config.check_all_read(self.architecture, self.inert)
        return decoder, tower


FAMILIES: Registry[Family] = Registry(
    "model family",
    "jaxserve.models",
    {
        "BloomForCausalLM": "jaxserve.models.families.bloom:FAMILY",
        "FalconForCausalLM": "jaxserve.models.families.falcon:FAMILY",
        "GPT2LMHeadModel": "jaxserve.models.families.gpt2:FAMILY",
        "Gemma2ForCausalLM": "jaxserve.models.families.gemma2:FAMILY",
        "Gemma3ForCausalLM": "jaxserve.models.families.gemma3:FAMILY",
        "GemmaForCausalLM": "jaxserve.models.families.gemma:FAMILY",
        "GptOssForCausalLM": "jaxserve.models.families.gpt_oss:FAMILY",
        "LlamaForCausalLM": "jaxserve.models.families.llama:FAMILY",
        "LlavaForConditionalGeneration": "jaxserve.models.families.llava:FAMILY",
        "MistralForCausalLM": "jaxserve.models.families.mistral:FAMILY",
        "MixtralForCausalLM": "jaxserve.models.families.mixtral:FAMILY",
        "MptForCausalLM": "jaxserve.models.families.mpt:FAMILY",
        "MPTForCausalLM": "jaxserve.models.families.mpt:MOSAIC",
        "OPTForCausalLM": "jaxserve.models.families.opt:FAMILY",
        "Olmo2ForCausalLM": "jaxserve.models.families.olmo2:FAMILY",
        "Phi3ForCausalLM": "jaxserve.models.families.phi3:FAMILY",
        "PhiForCausalLM": "jaxserve.models.families.phi:FAMILY",
        "Qwen2ForCausalLM": "jaxserve.models.families.qwen2:FAMILY",
        "Qwen2MoeForCausalLM": "jaxserve.models.families.qwen2_moe:FAMILY",
        "Qwen2VLForConditionalGeneration": "jaxserve.models.families.qwen2_vl:FAMILY",
        "Qwen2_5_VLForConditionalGeneration": "jaxserve.models.families.qwen2_5_vl:FAMILY",
        "Qwen3ForCausalLM": "jaxserve.models.families.qwen3:FAMILY",
        "Qwen3MoeForCausalLM": "jaxserve.models.families.qwen3_moe:FAMILY",
        "Starcoder2ForCausalLM": "jaxserve.models.families.starcoder2:FAMILY",
    },
)

# By `model_type`, for a config.json without the name of its architecture, or with that of the model without a head.
_ARCHITECTURES = {
    "bloom": "BloomForCausalLM",
    "falcon": "FalconForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gpt_oss": "GptOssForCausalLM",
    "llama": "LlamaForCausalLM",
    "llava": "LlavaForConditionalGeneration",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "mpt": "MptForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "opt": "OPTForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
_HEADS = re.compile(r"(ForCausalLM|LMHeadModel|ForConditionalGeneration)\Z")


# Architectures that are known and do not run: a pattern of their names, and the reason with the remedy.
_REFUSED = (
    (
        r"Deepseek(V2|V3|V32)ForCausalLM|MiniCPM3ForCausalLM|KimiK2ForCausalLM|LongcatFlashForCausalLM",
        "it has latent attention, whose cache is not the keys and values of heads; take a model without it: "
        "DeepSeek's distilled ones are Llama and Qwen2",
    ),
    (
        r"(Falcon)?Mamba2?ForCausalLM|(Jamba|Bamba|Zamba2?|FalconH1|NemotronH|RecurrentGemma|Qwen3Next|KimiLinear)ForCausalLM"
        r"|(Lfm2|GraniteMoeHybrid|Rwkv)\w*ForCausalLM|MiniMax(Text01|M1)?ForCausalLM",
        "some of its layers keep a state in place of keys and values; take a model whose layers all have attention",
    ),
    (
        r"(XLM)?(Modern|Nomic|Distil|New)?(Bert|Roberta)\w*|(Albert|Electra|Deberta\w*|MPNet|Bart|T5|MT5|GteModel)\w*",
        "it is an encoder, whose tokens see what comes after them; for embeddings and scores take a causal model, such "
        "as Qwen3-Embedding or Qwen3-Reranker",
    ),
    (
        r"\w*(ForConditionalGeneration|VLChatModel)",
        "it takes pictures or sound; take its text model, where there is a checkpoint of that alone",
    ),
)


def find_family(config: Mapping[str, Any], origin: str, name: str | None = None) -> Family:
    """The family called `name` (`model.family`), or that of a parsed config.json.

    Raises ConfigError for a name that cannot be loaded, and CheckpointError for an architecture that is not known; both
    list those that are.
    """
    if name is not None:
        found = FAMILIES.get(name)
        if not isinstance(found, Family):
            raise ConfigError(f"model.family is {name!r}, which is a {type(found).__name__} and not a Family")
        return found
    architecture = _architecture_of(config, origin)
    if architecture not in FAMILIES:
        for pattern, reason in _REFUSED:
            if re.fullmatch(pattern, architecture):
                raise CheckpointError(f"{origin}: {architecture} is not supported: {reason}")
        raise CheckpointError(
            f"{origin}: architecture {architecture!r} is unknown; known: {', '.join(FAMILIES.names())}; an installed "
            "package can add one under the entry point group 'jaxserve.models', and model.family names one by its path"
        )
    try:
        return FAMILIES.get(architecture)
    except ConfigError as error:
        raise CheckpointError(f"{origin}: {error}") from error


def is_own_family(config: Mapping[str, Any], origin: str, name: str | None = None) -> bool:
    """Whether `find_family` gives one that this package defines."""
    return FAMILIES.is_own(_architecture_of(config, origin) if name is None else name)


def _architecture_of(config: Mapping[str, Any], origin: str) -> str:
    """The first name in `architectures`. Raises CheckpointError.

    Transformers looks at `model_type` alone. Here that decides where there is no name, and where the name is that of
    the model without its head, or spelled as before the name was settled; any other may be of code of its own.
    """
    names, model_type = config.get("architectures"), config.get("model_type")
    known = _ARCHITECTURES.get(model_type) if isinstance(model_type, str) else None
    if names is None or names == []:
        if known is None:
            raise CheckpointError(
                f"{origin}: there are no 'architectures', and model_type {model_type!r} is unknown; known: "
                f"{', '.join(_ARCHITECTURES)}; model.overrides.architectures may name the architecture"
            )
        return known
    if not isinstance(names, list) or not isinstance(names[0], str):
        raise CheckpointError(f"{origin}: 'architectures' must be a list with a name, got {names!r}")
    if names[0] in FAMILIES or known is None:
        return names[0]
    spellings = {known, *(_HEADS.sub(end, known) for end in ("Model", "TextModel"))}
    return known if names[0].lower() in {spelling.lower() for spelling in spellings} else names[0]
