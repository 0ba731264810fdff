"""The config.json of a draft head, in each of the layouts that are around, checked against its target.

    original EAGLE     fields of a Llama config; `draft_vocab_size` and tensors called midlayer.* in the third kind
    original Medusa    `medusa_num_heads`, `medusa_num_layers`; tensors called 0.0.linear.weight, 0.1.weight
    speculators        `speculators_model_type`, `transformer_layer_config`, `eagle_aux_hidden_state_layer_ids`
    MTP                tensors called mtp.*, in a directory of their own or beside the model's

A field that changes guesses and is not known is refused by name: a head that is read wrongly still runs, and guesses
badly without a word.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.config.model_path import CONFIG_NAME
from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import find_weights, read_json
from jaxserve.models.decoder_config import DecoderConfig, RopeConfig
from jaxserve.models.drafts.config import EagleConfig, HeadConfig, HeadKind, MedusaConfig
from jaxserve.models.families import llama
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.safetensors_files import TensorSource, open_tensors

NUM_TAPS = 3  # of EAGLE-3, where nothing says which

# Fields of heads that change no guess, beside those of any config: how a head was trained and is proposed.
_INERT = (
    *("speculators_config", "speculators_version", "speculators_model_type", "auto_map", "num_lookahead_tokens"),
    *("embed_requires_grad", "enable_sp_ulysses", "tie_word_embeddings", "max_window_layers", "rope_interleaved"),
    *("use_sliding_window", "sliding_window", "layer_types", "version", "base_model_name_or_path", "head_weight_decay"),
)
_FIELDS = {  # of EAGLE-3 in any layout, beside those of its layer
    *("draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "norm_output", "fc_norm"),
    *("eagle_aux_hidden_state_layer_ids", "eagle_config", "transformer_layer_config", "bias"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadFiles:
    """The files of a head: its directory, the parsed config.json, and its tensors, still unread."""

    path: Path
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorSource]

    @property
    def origin(self) -> str:
        """The path of config.json, for messages."""
        return str(self.path / CONFIG_NAME)


def open_head(path: str | Path) -> HeadFiles:
    """Opens the directory of a head. Raises CheckpointError."""
    directory = Path(path).expanduser()
    if not directory.is_dir():
        said = "is a file" if directory.exists() else "does not exist"
        raise CheckpointError(
            f"the draft head {directory} {said}, but must be a directory with config.json and safetensors files"
        )
    values = read_json(directory / CONFIG_NAME)
    pickled = sorted(f.name for pattern in ("*.bin", "*.pt", "*.pth") for f in directory.glob(pattern))
    try:
        find_weights(directory)
    except CheckpointError as error:
        if not pickled:
            raise
        raise CheckpointError(
            f"{directory} has its weights in {', '.join(pickled)}, which are pickled: opening such a file runs "
            "whatever program is in it, so only safetensors are read. Convert it where you trust it, with "
            "safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')"
        ) from error
    return HeadFiles(path=directory, values=values, tensors=open_tensors(directory))


def read_head_config(files: HeadFiles, target: DecoderConfig, architecture: str) -> HeadConfig:
    """The head's config, which fits its target. `architecture`: the target's name, for messages.

    Raises CheckpointError for a layout that is not known, a field that is not, and a head of another model.
    """
    kind = _kind(files)
    if kind is HeadKind.MEDUSA:
        return _read_medusa(files, target, architecture)
    return _read_eagle(files, kind, target, architecture)


def _kind(files: HeadFiles) -> HeadKind:
    stated = files.values.get("speculators_model_type")
    if stated is not None:
        if stated not in [kind.value for kind in HeadKind]:
            raise CheckpointError(
                f"{files.origin}: speculators_model_type is {stated!r}, which is not supported; known: "
                f"{', '.join(HeadKind)}"
            )
        return HeadKind(stated)
    names = files.tensors
    if any(name.startswith("mtp.") for name in names):
        return HeadKind.MTP
    if any(name.startswith("midlayer.") for name in names):
        return HeadKind.EAGLE3
    if "medusa_num_heads" in files.values or any(re.match(r"\d+\.\d+\.linear\.weight|blocks\.\d", n) for n in names):
        return HeadKind.MEDUSA
    if "fc.weight" in names and any(name.startswith("layers.0.") for name in names):
        return HeadKind.EAGLE3 if "layers.0.hidden_norm.weight" in names else HeadKind.EAGLE
    raise CheckpointError(
        f"{files.path} is no draft head of a known layout: neither EAGLE (fc.weight with midlayer.* or layers.0.*), "
        "nor Medusa (0.0.linear.weight or blocks.0.*), nor MTP (mtp.*), nor one of speculators (speculators_model_type)"
    )


def _read_eagle(files: HeadFiles, kind: HeadKind, target: DecoderConfig, architecture: str) -> EagleConfig:
    own = HfConfig(files.values, files.origin)
    nested = own.get("transformer_layer_config")
    layer_values = files.values if nested is None else nested
    if not isinstance(layer_values, Mapping):
        own.fail(f"transformer_layer_config is {layer_values!r:.80}, but must be an object")
    own.require("fc_norm", None, False)
    model_type = layer_values.get("model_type", "llama")
    if model_type != "llama":
        own.fail(
            f"the head's layer is of model_type {model_type!r}, which is not supported (only llama): its norms or "
            "windows would be others"
        )
    names = files.tensors
    # The sizes of MTP layers are the model's, and so is the config where they lie beside it.
    layer = _layer_config(layer_values, files.origin, one=nested is None and kind is not HeadKind.MTP)
    _check_size(own, "hidden_size", layer.hidden_size, target.hidden_size, architecture)
    _check_size(own, "vocab_size", layer.vocab_size, target.vocab_size, architecture)
    if own.get("target_hidden_size") not in (None, target.hidden_size):
        _check_size(own, "target_hidden_size", own.integer("target_hidden_size"), target.hidden_size, architecture)
    if not target.ropes or any(spec.rope is None for spec in target.layers):
        own.fail(
            f"the head turns queries and keys by their positions, but {architecture} knows positions in another way, "
            "so the two cannot belong together; take a head that was trained for this model"
        )
    rope = layer.ropes[0]
    if kind is HeadKind.MTP and rope not in target.ropes:
        own.fail(
            f"an MTP layer was trained with its model, but turns positions otherwise ({_rope(rope)}, and "
            f"{architecture} {_rope(target.ropes[0])}); take the head of this model"
        )
    draft_vocab_size = own.integer("draft_vocab_size", target.vocab_size) if kind is HeadKind.EAGLE3 else None
    if draft_vocab_size is not None and draft_vocab_size > target.vocab_size:
        own.fail(
            f"draft_vocab_size is {draft_vocab_size}, but {architecture} has {target.vocab_size} tokens; take a head "
            "that was trained for this model"
        )
    prefix = "mtp." if kind is HeadKind.MTP else ""
    return EagleConfig(
        kind=kind,
        decoder=layer,
        taps=_read_taps(own, target, architecture) if kind is HeadKind.EAGLE3 else (),
        draft_vocab_size=draft_vocab_size or target.vocab_size,
        is_mapped="d2t" in names or (draft_vocab_size or target.vocab_size) != target.vocab_size,
        own_embedding=f"{prefix}embed_tokens.weight" in names,
        own_lm_head=kind is HeadKind.EAGLE3,
        fc_bias=f"{prefix}fc.bias" in names,
        norm_before_fc=own.flag("norm_before_fc", False),
        norm_before_residual=own.flag("norm_before_residual", False),
        norm_output=own.flag("norm_output", False),
    )


def _layer_config(values: Mapping[str, Any], origin: str, *, one: bool) -> DecoderConfig:
    """The sizes of a head's one layer, which have the names of a Llama config. `one`: the number of layers is its."""
    config = HfConfig({**values, "num_hidden_layers": 1}, origin)
    stated = values.get("num_hidden_layers", 1)
    if one and stated != 1:
        config.fail(f"num_hidden_layers is {stated!r}, but a head of one layer alone is supported")
    found = llama.adapt(config)
    for name in _FIELDS:
        config.get(name)
    config.check_all_read("a draft head", _INERT)
    return dataclasses.replace(found, tied_embeddings=False)


def _check_size(config: HfConfig, field: str, own: int, wanted: int, architecture: str) -> None:
    if own != wanted:
        config.fail(
            f"the head's {field} is {own}, but that of its target {architecture} is {wanted}; take a head that was "
            "trained for this model"
        )


def _rope(rope: RopeConfig) -> str:
    return f"theta {rope.theta:g}, scaling {rope.scaling}, {rope.rotary_dim} numbers"


def _read_taps(config: HfConfig, target: DecoderConfig, architecture: str) -> tuple[int, ...]:
    """The layers whose inputs the head reads: as stated, or those of the EAGLE-3 paper's code."""
    nested, num_layers = config.get("eagle_config"), target.num_layers
    if nested is not None:
        if not isinstance(nested, Mapping) or set(nested) - {
            "eagle_aux_hidden_state_layer_ids",
            "use_aux_hidden_state",
        }:
            config.fail(f"eagle_config is {nested!r:.120}, which has fields that are not known")
        if nested.get("use_aux_hidden_state", True) is not True:
            config.fail("eagle_config.use_aux_hidden_state is false, which is not supported for EAGLE-3")
    name = "eagle_aux_hidden_state_layer_ids"
    stated = config.get(name) if nested is None else nested.get(name, config.get(name))
    taps: Any = [2, num_layers // 2, num_layers - 3] if stated is None else stated
    said = f"{name} is {stated!r}" if stated is not None else f"no {name} is given, so the head reads {taps}"
    if not isinstance(taps, Sequence) or not taps or any(type(tap) is not int for tap in taps):
        config.fail(f"{said}, but must list numbers of layers")
    if outside := [tap for tap in taps if not 0 <= tap <= num_layers]:
        config.fail(
            f"{said}, but {architecture} has {num_layers} layers, so {outside} are outside 0 to {num_layers} (the last "
            "stands for the output of all layers)"
        )
    if len(set(taps)) != len(taps):
        config.fail(f"{said}, where a layer is repeated; list different layers, of 0 to {num_layers}")
    return tuple(taps)


def _read_medusa(files: HeadFiles, target: DecoderConfig, architecture: str) -> MedusaConfig:
    config = HfConfig(files.values, files.origin)
    heads = config.integer(config.spelled("medusa_num_heads", "num_heads"))
    layers = config.integer(config.spelled("medusa_num_layers", "num_hidden_layers"), 1)
    for field, wanted in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        name = config.spelled(f"medusa_{field}", field)
        if config.get(name) is not None:
            _check_size(config, name, config.integer(name), wanted, architecture)
    config.require("truncated_vocab_size", None, 0, target.vocab_size)
    config.require("logit_scale", None, 1.0)
    for name in ("original_lm_head", "medusa_fc_bias"):  # the tensors say both
        config.flag(name, False)
    config.check_all_read("a Medusa head", _INERT)
    names = files.tensors
    is_original = "0.0.linear.weight" in names
    own_lm_head = (f"0.{layers}.weight" if is_original else "lm_heads.0.weight") in names
    return MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=heads,
        num_layers=layers,
        bias=("0.0.linear.bias" if is_original else "blocks.0.layers.0.bias") in names,
        own_lm_head=own_lm_head,
    )
