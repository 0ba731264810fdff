"""The weights of a draft head: which tensors of its files fill which parameters, and the arrays on their devices.

The tables are the families' (`family.Rule`), and reading is the decoder's: slice by slice, each device its share.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path as FilePath
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import Checkpoint, CheckpointKind
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.drafts.config import EagleConfig, HeadConfig, HeadKind, MedusaConfig
from jaxserve.models.drafts.eagle import EagleHead
from jaxserve.models.drafts.medusa import MedusaHead
from jaxserve.models.drafts.reading import HeadFiles, open_head, read_head_config
from jaxserve.models.families import llama
from jaxserve.models.family import Family
from jaxserve.models.partition import Partition
from jaxserve.models.shard_reading import block_reader, checked_tensors, shard_reader
from jaxserve.models.sharding import arrays_of, axes_of, shardings_for, with_leaves
from jaxserve.models.weight_rules import Rule
from jaxserve.models.weights import Path, Piece, plan_weights

IDS_PATH: Path = ("vocabulary", "ids")
_LAYER = "layers.0"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    """A head, ready for `nnx.merge(graphdef, state)` beside its target, inside a `shard_map` over the same mesh.

    Attributes:
      graphdef: with the sizes that one device sees.
      state: arrays in their shardings.
      config: as its files say.
      partition: of its layer; None for Medusa, which is whole on every device.
      path: of its directory.
    """

    graphdef: nnx.GraphDef
    state: nnx.State
    config: HeadConfig
    partition: Partition | None
    path: FilePath


def load_head(
    path: str | FilePath, target: DecoderConfig, architecture: str, *, partition: Partition, mesh: Mesh, dtype: np.dtype
) -> LoadedHead:
    """Reads the head in the directory `path` for a target of that config and name, cut over `mesh` as `partition`.

    Raises CheckpointError for files that are none, or not of a head of this target.
    """
    files = open_head(path)
    config = read_head_config(files, target, architecture)
    graphdef, padded = split_head(config, partition, dtype)
    _, whole = split_head(config, Partition.of(partition.model, 1), dtype)
    axes = axes_of(whole)
    shapes = {name: array.shape for name, array in arrays_of(whole).items()}
    layer = head_partition(config, partition)
    table = head_family(config, files)
    plan = _plan(table, config, target, shapes, axes)
    checkpoint = Checkpoint(path=files.path, kind=CheckpointKind.HUGGING_FACE, config=dict(files.values), generation={})
    described = config.decoder if isinstance(config, EagleConfig) else target
    tensors = checked_tensors(checkpoint, table, described, plan)
    ids = _read_ids(files, config, target, architecture)
    shardings = arrays_of(shardings_for(padded, mesh))
    arrays = {}
    for name, array in arrays_of(padded).items():
        if name == IDS_PATH:
            assert ids is not None
            arrays[name] = jax.make_array_from_callback(array.shape, shardings[name], ids.__getitem__)
            continue
        reader = shard_reader(plan[name], tensors, shapes[name], array.dtype)
        if array.shape != shapes[name]:
            assert layer is not None
            reader = block_reader(reader, layer.blocks(axes[name], shapes[name]), array.shape, array.dtype)
        arrays[name] = jax.make_array_from_callback(array.shape, shardings[name], reader)
    state = nnx.map_state(lambda name, param: with_leaves(param, [arrays[name]]), padded)
    return LoadedHead(graphdef=graphdef, state=state, config=config, partition=layer, path=files.path)


def head_partition(config: HeadConfig, target: Partition) -> Partition | None:
    """How the layer of a head is cut: as one of its target's."""
    return Partition.of(config.decoder, target.devices) if isinstance(config, EagleConfig) else None


def split_head(config: HeadConfig, target: Partition, dtype: np.dtype) -> tuple[nnx.GraphDef, nnx.State]:
    """The structure of a head as one device sees it, and the shapes over all devices. Nothing is allocated."""
    if isinstance(config, MedusaConfig):
        abstract = nnx.eval_shape(lambda: MedusaHead(config, dtype, placement=target.placement))
        return nnx.split(abstract)
    layer = Partition.of(config.decoder, target.devices)

    def of(sizes: DecoderConfig) -> tuple[nnx.GraphDef, nnx.State]:
        placed = dataclasses.replace(config, decoder=sizes)
        return nnx.split(nnx.eval_shape(lambda: EagleHead(placed, dtype, placement=layer.placement)))

    return of(layer.local)[0], of(layer.padded)[1]


def head_family(config: HeadConfig, files: HeadFiles | None = None) -> Family:
    """The table of a head's tensors: as its files call them, or as speculators does where there are none yet."""
    names: Mapping[str, Any] = {} if files is None else files.tensors
    ignored = ("d2t", "t2d", r"verifier_(lm_head|norm)\.weight")
    if isinstance(config, MedusaConfig):
        original = "0.0.linear.weight" in names
        rules = []
        for head in range(config.num_heads):
            for layer in range(config.num_layers):
                source = f"{head}.{layer}.linear" if original else f"blocks.{head}.layers.{layer}"
                target = f"blocks.{head}.{layer}"
                rules.append(Rule(f"{source}.weight", f"{target}.kernel", "embed features"))
                rules.append(Rule(f"{source}.bias", f"{target}.bias", "embed"))
            source = f"{head}.{config.num_layers}.weight" if original else f"lm_heads.{head}.weight"
            rules.append(Rule(source, f"lm_heads.{head}", "draft_vocab embed"))
        return _family("Medusa", rules, ())
    prefix = "mtp." if config.kind is HeadKind.MTP else ""
    layer = "midlayer" if any(name.startswith("midlayer.") for name in names) else f"{prefix}{_LAYER}"
    rules = [
        Rule(
            rule.source.replace("model.layers.{layer}", layer),
            rule.target.replace("layers.{layer}", _LAYER),
            rule.axes,
            rule.part,
        )
        for rule in (*llama.NORMS, *llama.ATTENTION, *llama.MLP)
    ]
    rules += [
        Rule(f"{layer}.hidden_norm.weight", f"{_LAYER}.hidden_norm.weight", "embed"),
        Rule(f"{prefix}fc.weight", "fc.kernel", "embed features"),
        Rule(f"{prefix}fc.bias", "fc.bias", "embed"),
        Rule("input_norm.weight", "input_norm.weight", "features"),
        Rule(f"{prefix}norm.weight", "final_norm.weight", "embed"),
        Rule(f"{prefix}pre_fc_norm_embedding.weight", "embedding_norm.weight", "embed"),
        Rule(f"{prefix}pre_fc_norm_hidden.weight", "feature_norm.weight", "embed"),
        Rule(f"{prefix}embed_tokens.weight", "embedding", "vocab embed"),
        Rule("lm_head.weight", "lm_head", "draft_vocab embed"),
    ]
    more = (r"model\..*", r"lm_head\.weight", r"embed_tokens\.weight") if config.kind is HeadKind.MTP else ()
    # The first kind's exports hold the target's output projection, and a first norm that nothing goes through.
    unused = (r"lm_head\.weight", r"layers\.0\.input_layernorm\.weight") if config.kind is HeadKind.EAGLE else ()
    return _family(config.kind.value, rules, (*ignored, *more, *unused))


def _family(name: str, rules: list[Rule], ignored: tuple[str, ...]) -> Family:
    return Family(architecture=f"a {name} head", adapt=llama.adapt, weights=tuple(rules), ignored=ignored)


def _plan(
    table: Family, config: HeadConfig, target: DecoderConfig, shapes: Mapping[Path, tuple[int, ...]], axes: Any
) -> dict[Path, list[Piece]]:
    described = config.decoder if isinstance(config, EagleConfig) else target
    from_files = {name: shape for name, shape in shapes.items() if name != IDS_PATH}
    return plan_weights(table, described, from_files, axes)


def head_plan(config: HeadConfig, target: Partition, dtype: np.dtype) -> dict[Path, list[Piece]]:
    """The tensors of speculators' layout that each parameter of a head is written to."""
    _, whole = split_head(config, Partition.of(target.model, 1), dtype)
    shapes = {name: array.shape for name, array in arrays_of(whole).items()}
    return _plan(head_family(config), config, target.model, shapes, axes_of(whole))


def _read_ids(files: HeadFiles, config: HeadConfig, target: DecoderConfig, architecture: str) -> np.ndarray | None:
    """The target's id of each draft id [W] int32, from `d2t` and `t2d`. Raises CheckpointError."""
    if not isinstance(config, EagleConfig) or not config.is_mapped:
        return None
    size, vocab_size = config.draft_vocab_size, target.vocab_size
    if "d2t" not in files.tensors:
        raise CheckpointError(
            f"{files.path} has a vocabulary of {size} tokens, fewer than the {vocab_size} of {architecture}, and no "
            "tensor d2t that says which; take the whole checkpoint"
        )
    offsets = _read_whole(files, "d2t", ("int64", "int32"), size)
    ids = np.arange(size, dtype=np.int64) + offsets
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        at = int(outside[0])
        raise CheckpointError(
            f"{files.path}: d2t turns draft id {at} into {int(ids[at])}, but {architecture} has the tokens 0 to "
            f"{vocab_size - 1} ({len(outside)} of {size} are outside); was the head trained for another model?"
        )
    kept, first = np.unique(ids, return_index=True)
    if len(kept) != size:
        at = int(np.setdiff1d(np.arange(size), first)[0])
        raise CheckpointError(
            f"{files.path}: d2t turns draft id {at} into token {int(ids[at])}, as another draft id already: {size} ids "
            f"stand for {len(kept)} tokens; the file is damaged"
        )
    if "t2d" in files.tensors:
        is_drafted = _read_whole(files, "t2d", ("bool", "uint8"), vocab_size) != 0
        if int(is_drafted.sum()) != size or not is_drafted[ids].all():
            raise CheckpointError(
                f"{files.path}: t2d marks {int(is_drafted.sum())} tokens as drafted, but d2t names {size}"
                + ("" if int(is_drafted.sum()) != size else " others")
                + "; the file is damaged, or put together from two heads"
            )
    return ids.astype(np.int32)


def _read_whole(files: HeadFiles, name: str, dtypes: tuple[str, ...], size: int) -> np.ndarray:
    tensor = files.tensors[name]
    if tensor.dtype not in dtypes or tensor.shape != (size,):
        raise CheckpointError(
            f"{files.path}: {name} is {tensor.dtype} {list(tensor.shape)}, but must be {dtypes[0]} [{size}]; do "
            "config.json and the weights belong together?"
        )
    return tensor.read((slice(None),))
