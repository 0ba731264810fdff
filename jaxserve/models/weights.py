"""The plan of which checkpoint tensors fill which parameters: a family's rules, expanded and checked against the files.

Errors list all missing and all unknown names.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.decoder_config import Block, DecoderConfig
from jaxserve.models.family import Family
from jaxserve.models.layout import Pattern, pattern_of
from jaxserve.models.sharding import Axes
from jaxserve.models.weight_rules import PARTS, Part, Rule

_NUMBER = re.compile(r"\d+")
# Names that carry nothing a decoder computes with, in files of any family: tables of rotation and of positions, which
# follow from the config, and the value heads that trainers by reinforcement learning leave behind.
UNREAD = (
    r"(.*\.)?\w*rotary\w*\.(inv_freq|original_inv_freq)",
    r"(.*\.)?(cos|sin)_cached",
    r"(.*\.)?position_ids",
    r"(.*\.)?(v_head|value_head)\..*",
)
# What programs around a model put into its names, and how to save it without.
_WRAPPERS = {
    "_orig_mod.": "torch.compile puts that there; save model._orig_mod",
    "_fsdp_wrapped_module.": "FSDP puts that there; save the gathered weights of the model inside",
    "_checkpoint_wrapped_module.": "checkpointing of activations puts that there; save the model inside",
    "module.": "DistributedDataParallel and DeepSpeed put that there; save model.module",
    "base_model.model.": "PEFT puts that there; merge the adapter (merge_and_unload) and save the model",
}

Path = tuple[Any, ...]  # of a parameter in the state of `nnx.split`, such as ("layers", 0, "mlp", "down", "kernel")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One source tensor's share of one parameter.

    Attributes:
      source: tensor name.
      pattern: the layout of that share on disk and in memory.
      window: its indices of each axis of the parameter.
      first, rows: of what the tensor holds along its first axis, where the share begins, and how much there is.
      part: the slice of an axis of a fused parameter that it fills; None: all.
    """

    source: str
    pattern: Pattern
    window: tuple[range, ...]
    first: int
    rows: int
    part: Part | None = None

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""
        return (self.rows, *self.pattern.source_shape[1:])

    @property
    def in_major(self) -> bool:
        """The tensor's last axis is not the inputs, which are the last of every kernel in memory."""
        inputs = self.pattern.source[-1]
        return self.pattern.target[-len(inputs) :] != inputs


def path_of(target: str) -> Path:
    """'layers.0.mlp.down.kernel' as a path."""
    return tuple(int(step) if step.isdigit() else step for step in target.split("."))


def name_of(path: Path) -> str:
    """The inverse of `path_of`: the name of a parameter in trees of weights that come from elsewhere."""
    return ".".join(map(str, path))


def plan_weights(
    family: Family, config: DecoderConfig, params: Mapping[Path, tuple[int, ...]], axes: Mapping[Path, Axes]
) -> dict[Path, list[Piece]]:
    """Pieces of every parameter of `params` (path to shape); `axes` are their logical axes.

    A family that leaves a parameter without a rule, or fills it twice, is a bug in its table.
    """
    return plan_rules(family.weights, [layer.block for layer in config.layers], params, axes)


def plan_rules(
    rules: Iterable[Rule],
    layers: Sequence[Block | None],
    params: Mapping[Path, tuple[int, ...]],
    axes: Mapping[Path, Axes],
) -> dict[Path, list[Piece]]:
    """`plan_weights` of any table of rules. `layers`: the kind of each layer; None: all rules are its."""
    plan: dict[Path, list[Piece]] = {path: [] for path in params}
    for rule in rules:
        for layer in range(len(layers)) if "{layer}" in rule.target else range(1):
            path = path_of(rule.target.format(layer=layer))
            if path in plan and (layers[layer] is None or layers[layer] in rule.blocks):
                plan[path] += _pieces(rule, layer, axes[path], params[path])
    for path, shape in params.items():
        covered = sum(math.prod(map(len, piece.window)) for piece in plan[path])
        assert covered == math.prod(shape), (path, shape, plan[path])
    return plan


def _pieces(rule: Rule, layer: int, axes: Axes, shape: tuple[int, ...]) -> Iterator[Piece]:
    """Of one rule for one layer: one, or one for each expert."""
    names = tuple(str(axis) for axis in axes)
    window = dict(zip(names, map(range, shape), strict=True))
    before = rows_beside = 0  # slices of the part's axis that the tensor holds before this part, and in all
    if rule.part is not None:
        part = PARTS[rule.part]
        slots = window[part.axis]
        lengths = {name: len(PARTS[name].bounds(len(slots))) for name in (rule.beside or (rule.part,))}
        window[part.axis] = part.bounds(len(slots))
        before = sum(lengths[name] for name in rule.beside[: rule.beside.index(rule.part)]) if rule.beside else 0
        rows_beside = sum(lengths.values())
    for expert in window["experts"] if "{expert}" in rule.source else range(1):
        if "{expert}" in rule.source:
            window["experts"] = range(expert, expert + 1)
        pattern = pattern_of(rule.axes, names, tuple(map(len, window.values())))
        rows, first = pattern.source_shape[0], 0
        if rule.beside and rule.part is not None:
            per_slot = rows // len(window[PARTS[rule.part].axis])
            rows, first = rows_beside * per_slot, before * per_slot
        source = rule.source.format(layer=layer, expert=expert)
        yield Piece(
            source=source,
            pattern=pattern,
            window=tuple(window.values()),
            first=first,
            rows=rows,
            part=None if rule.part is None else PARTS[rule.part],
        )


def fold_names(names: Iterable[str]) -> str:
    """All names, those that differ in numbers alone as one: model.layers.[0-79].mlp.up_proj.weight."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name in sorted(names):
        groups.setdefault(_NUMBER.sub("\0", name), []).append(tuple(map(int, _NUMBER.findall(name))))
    return ", ".join(_fold(text, numbers) for text, numbers in groups.items())


def _fold(text: str, numbers: list[tuple[int, ...]]) -> str:
    """One name, with the ranges of each of its numbers; with the number of names where not every combination exists."""
    columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
    folded = text
    for column in columns:
        folded = folded.replace("\0", str(column[0]) if len(column) == 1 else f"[{_ranges(column)}]", 1)
    return folded if math.prod(map(len, columns)) == len(numbers) else f"{folded} ({len(numbers)} of these)"


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers, as 0-3,7."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def check_names(
    family: Family,
    config: DecoderConfig,
    found: Iterable[str],
    origin: str,
    *,
    needed: Set[str],
    optional: Set[str] = frozenset(),
    ignored: Iterable[str] = (),
    hint: str = "",
) -> None:
    """Raises CheckpointError with the full lists of tensors that are missing and of those that nothing would read.

    An output projection beside tied embeddings is accepted: exporters write both. So are MTP layers, which a draft head
    is read from (`drafts`) and the model itself does without.

    Args:
      family: of the model.
      config: of the model.
      found: names in the files.
      origin: the file, or the directory of several, for the message.
      needed: names that must be there.
      optional: names that may be there.
      ignored: regular expressions of names that carry no weights, beside the family's.
      hint: the end of the message.
    """
    accepted = [*family.ignored, *ignored, r"mtp\..*"]
    if config.tied_embeddings:
        accepted += [re.escape(rule.source) for rule in family.weights if rule.target == "lm_head"]
    check_found(family.architecture, found, origin, needed=needed, optional=optional, ignored=accepted, hint=hint)


def check_found(
    architecture: str,
    found: Iterable[str],
    origin: str,
    *,
    needed: Set[str],
    optional: Set[str] = frozenset(),
    ignored: Iterable[str] = (),
    hint: str = "",
) -> None:
    """`check_names` of any table of rules: `ignored` has the patterns of names that may be there beside `UNREAD`."""
    found = set(found)
    accepted = [re.compile(pattern) for pattern in (*UNREAD, *ignored)]
    missing = sorted(needed - found)
    unknown = sorted(name for name in found - needed - optional if not any(p.fullmatch(name) for p in accepted))
    complaints = []
    if missing:
        complaints.append(f"{len(missing)} weights are missing: {fold_names(missing)}")
    if unknown:
        complaints.append(f"{len(unknown)} weights are unknown to {architecture}: {fold_names(unknown)}")
    if complaints:
        said = "; ".join(complaints)
        hint = _wrapper_hint(missing, unknown) or hint
        raise CheckpointError(f"{origin}: {said}; do config.json and the weights belong together?{hint}")


def _wrapper_hint(missing: Iterable[str], unknown: Iterable[str]) -> str:
    """A sentence for names that a program around the model has changed; empty where it has not."""
    missing = set(missing)
    for mark, remedy in _WRAPPERS.items():
        if any(mark in name and name.replace(mark, "") in missing for name in unknown):
            return f" The names have {mark!r} in them: {remedy}, or take it out of the names"
    return ""
