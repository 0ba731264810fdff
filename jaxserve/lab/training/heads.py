"""New heads for a target: their sizes, and weights to begin training from.

Medusa begins as the target's own next guess for each place (its blocks add nothing). EAGLE-3 begins from the last
tapped hidden state and the target's output projection, so that the layer has a correction to learn and no vocabulary.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.errors import ConfigError
from jaxserve.lab.training.answers import Example
from jaxserve.models.decoder_config import DecoderConfig, LayerSpec, MlpSpec, NormSpec, RopeConfig
from jaxserve.models.drafts.config import EagleConfig, HeadConfig, HeadKind, MedusaConfig
from jaxserve.models.drafts.eagle import EagleHead
from jaxserve.models.drafts.loading import IDS_PATH
from jaxserve.models.drafts.medusa import MedusaHead
from jaxserve.models.loading import LoadedModel
from jaxserve.models.sharding import arrays_of, with_leaves
from jaxserve.models.trainable import whole_graphdef, whole_placement
from jaxserve.models.weights import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadOptions:
    """Sizes of a new head.

    Attributes:
      kind: EAGLE3 or MEDUSA.
      num_places: guesses of a draft; as many blocks has Medusa.
      draft_vocab_size: of EAGLE-3; None: the target's vocabulary.
      ffn_size: columns of EAGLE-3's layer; None: as many as the target's have.
      taps: layers whose inputs EAGLE-3 reads; None: three over the depth.
    """

    kind: HeadKind
    num_places: int = 3
    draft_vocab_size: int | None = None
    ffn_size: int | None = None
    taps: tuple[int, ...] | None = None


def new_config(options: HeadOptions, target: DecoderConfig) -> HeadConfig:
    """Raises ConfigError for a target that such a head cannot read, or sizes that cannot be."""
    if options.kind is HeadKind.MEDUSA:
        return MedusaConfig(hidden_size=target.hidden_size, vocab_size=target.vocab_size, num_heads=options.num_places)
    if options.kind is not HeadKind.EAGLE3:
        raise ConfigError(f"heads of kind {options.kind} are read, but not trained; train medusa or eagle3")
    rope = target.layers[0].rope
    if rope is None:
        raise ConfigError(
            "an EAGLE head turns queries and keys by their positions, but this model knows positions in another way; "
            "train medusa"
        )
    taps = default_taps(target.num_layers) if options.taps is None else options.taps
    if outside := [tap for tap in taps if not 0 <= tap <= target.num_layers]:
        raise ConfigError(f"taps {list(taps)}: the model has {target.num_layers} layers, so {outside} are outside")
    if len(set(taps)) != len(taps) or not taps:
        raise ConfigError(f"taps {list(taps)}: list different layers")
    size = options.draft_vocab_size or target.vocab_size
    if size > target.vocab_size:
        raise ConfigError(f"a draft vocabulary of {size} tokens is asked for, but the model has {target.vocab_size}")
    mlp = target.mlps[-1]
    layer = LayerSpec(
        mlp=MlpSpec(size=options.ffn_size or (mlp.size if isinstance(mlp, MlpSpec) else 4 * target.hidden_size)),
        position=RopeConfig(theta=rope.theta, rotary_dim=target.head_dim),
        scale=target.head_dim**-0.5,
    )
    decoder = DecoderConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_query_heads=target.num_query_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_position=target.max_position,
        layers=(layer,),
        norm=NormSpec(eps=target.norm.eps, round_first=True),
    )
    return EagleConfig(
        kind=HeadKind.EAGLE3,
        decoder=decoder,
        taps=taps,
        draft_vocab_size=size,
        is_mapped=size != target.vocab_size,
        own_lm_head=True,
    )


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Inputs of layers {2, N/2, N-3} in deep models, as in EAGLE-3; over a shallow one, an early one, the middle and
    the output of the last."""
    deep = (2, num_layers // 2, num_layers - 3)
    if num_layers >= 9:
        return deep
    return tuple(sorted({min(1, num_layers), (num_layers + 1) // 2, num_layers}))


def new_head(
    options: HeadOptions, config: HeadConfig, model: LoadedModel, examples: Iterable[Example], seed: int
) -> tuple[nnx.GraphDef, nnx.State]:
    """A head of all devices' sizes, float32, whole on each device of the target's mesh."""
    placement = whole_placement(model)
    abstract = nnx.eval_shape(
        lambda: (
            EagleHead(config, np.dtype("float32"), placement=placement)
            if isinstance(config, EagleConfig)
            else MedusaHead(config, np.dtype("float32"), placement=placement)
        )
    )
    graphdef, state = nnx.split(abstract)
    rng = np.random.default_rng(seed)
    ids = _draft_ids(config, examples)
    table = None
    if isinstance(config, EagleConfig) and config.own_lm_head:
        table = output_table(model)[: model.config.vocab_size]
        table = table if ids is None else table[ids]

    def begin(path: Path, array: jax.ShapeDtypeStruct) -> Any:
        if path == IDS_PATH:
            assert ids is not None
            return ids
        if path[-1] == "weight":
            return np.ones(array.shape, np.float32)
        if path == ("lm_head",):
            return table
        if path[-1] == "bias" or isinstance(config, MedusaConfig):
            return np.zeros(array.shape, np.float32)
        if path == ("fc", "kernel"):  # the last tap as it is, and a little of the others
            hidden, num_in = array.shape
            noise = rng.normal(0.0, 0.1 * num_in**-0.5, array.shape)
            noise[:, num_in - hidden :] += np.eye(hidden)
            return noise.astype(np.float32)
        num_in = array.shape[-1] if path[-2] != "out" else array.shape[-1] * array.shape[-2]
        scale = 0.5 if path[-2] in ("out", "down") else 1.0
        return rng.normal(0.0, scale * num_in**-0.5, array.shape).astype(np.float32)

    arrays = {path: jnp.asarray(begin(path, array)) for path, array in arrays_of(state).items()}
    if isinstance(config, EagleConfig):
        # The output projection is the target's, so it is right behind the target's final norm.
        decoder = nnx.merge(whole_graphdef(model), model.state)
        if decoder.final_norm is not None:
            # A copy: the head's arrays are donated to its training, and the target's must live on.
            arrays["final_norm", "weight"] = jnp.array(decoder.final_norm.weight[...], jnp.float32, copy=True)
    return graphdef, nnx.map_state(lambda path, param: with_leaves(param, [arrays[path]]), state)


def output_table(model: LoadedModel) -> np.ndarray:
    """The target's output projection [V, D] in float32, padding included."""
    decoder = nnx.merge(whole_graphdef(model), model.state)
    head = decoder.embedding if decoder.lm_head is None else decoder.lm_head
    table = np.asarray(jax.tree.leaves(head.get_value())[0], np.float32)
    if decoder.embed_out is None:
        return table
    return table @ np.asarray(jax.tree.leaves(decoder.embed_out.kernel.get_value())[0], np.float32)


def _draft_ids(config: HeadConfig, examples: Iterable[Example]) -> np.ndarray | None:
    """The most frequent tokens of the answers, ascending; the first of those that never occur fill the rest."""
    if not isinstance(config, EagleConfig) or not config.is_mapped:
        return None
    seen = Counter(token for example in examples for token in example.answer)
    ranked = sorted(range(config.decoder.vocab_size), key=lambda token: (-seen[token], token))
    return np.asarray(sorted(ranked[: config.draft_vocab_size]), np.int32)
