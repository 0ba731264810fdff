"""The plan of which checkpoint tensors fill which parameters: a family's rules, expanded and checked against the files.

Errors list all missing and all unknown names.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family, Part, axis_sizes, fused_parts
from jaxserve.models.layout import Pattern, parse

_NUMBER = re.compile(r"\d+")

Path = tuple[Any, ...]  # of a parameter in the state of `nnx.split`, such as ("layers", 0, "mlp", "down", "kernel")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One source tensor's share of one parameter; `part` is None when it fills it all."""

    source: str
    pattern: Pattern
    part: Part | None


def path_of(target: str) -> Path:
    """'layers.0.mlp.down.kernel' as a path."""
    return tuple(int(step) if step.isdigit() else step for step in target.split("."))


def plan_weights(
    family: Family, config: DecoderConfig, params: Mapping[Path, tuple[int, ...]]
) -> dict[Path, list[Piece]]:
    """Pieces of every parameter of `params` (path to shape).

    A family that leaves a parameter without a rule, or fills it with wrong sizes, is a bug in its table.
    """
    parts, sizes = fused_parts(config), axis_sizes(config)
    plan: dict[Path, list[Piece]] = {path: [] for path in params}
    for rule in family.weights:
        layers = range(config.num_layers) if "{layer}" in rule.source else range(1)
        for layer in layers:
            path = path_of(rule.target.format(layer=layer))
            if path in plan:
                part = parts[rule.part] if rule.part is not None else None
                plan[path].append(Piece(source=rule.source.format(layer=layer), pattern=parse(rule.pattern), part=part))
    for path, shape in params.items():
        covered = 0
        for piece in plan[path]:
            expected = list(shape)
            if piece.part is not None:
                expected[piece.part.axis] = piece.part.stop - piece.part.start
                covered += expected[piece.part.axis]
            assert _fits(piece.pattern, sizes, expected), (path, piece, expected)
        fused = bool(plan[path]) and plan[path][0].part is not None
        full = shape[plan[path][0].part.axis] if fused else len(plan[path]) - 1  # type: ignore[union-attr]
        assert plan[path] and covered == full, (path, shape, plan[path])
    return plan


def _fits(pattern: Pattern, sizes: Mapping[str, int], expected: list[int]) -> bool:
    return pattern.target_shape(sizes) == tuple(expected)


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
    family: Family, config: DecoderConfig, plan: Mapping[Path, list[Piece]], found: Iterable[str], origin: str
) -> None:
    """Raises CheckpointError with the full lists of tensors that are missing and of those that nothing would read.

    An output projection beside tied embeddings is accepted: exporters write both.
    """
    found = set(found)
    needed = {piece.source for pieces in plan.values() for piece in pieces}
    accepted = [re.compile(pattern) for pattern in family.ignored]
    if config.tied_embeddings:
        accepted += [re.compile(re.escape(rule.source)) for rule in family.weights if rule.target == "lm_head"]
    missing = sorted(needed - found)
    unknown = sorted(name for name in found - needed if not any(p.fullmatch(name) for p in accepted))
    complaints = []
    if missing:
        complaints.append(f"{len(missing)} weights are missing: {fold_names(missing)}")
    if unknown:
        complaints.append(f"{len(unknown)} weights are unknown to {family.architecture}: {fold_names(unknown)}")
    if complaints:
        raise CheckpointError(f"{origin}: {'; '.join(complaints)}; do config.json and the weights belong together?")
