"""Which checkpoint tensors fill which parameters: a family's rules, expanded and checked against what is there.

Owns the expansion over layers and the two full lists, of missing and of unknown names. Refuses reading.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxserve.errors import CheckpointError
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.family import Family, Part, axis_sizes, fused_parts
from jaxserve.models.layout import Pattern, parse

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
        complaints.append(f"{len(missing)} weights are missing: {', '.join(missing)}")
    if unknown:
        complaints.append(f"{len(unknown)} weights are unknown to {family.architecture}: {', '.join(unknown)}")
    if complaints:
        raise CheckpointError(f"{origin}: {'; '.join(complaints)}; do config.json and the weights belong together?")
