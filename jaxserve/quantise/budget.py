"""A budget of bits: which weights of int4 become int8, so that the average reaches the budget where it helps most."""

import dataclasses
from collections.abc import Mapping, Sequence

from jaxserve.errors import ConfigError
from jaxserve.quantise.choice import RAISED, Choice, choice_of
from jaxserve.quantise.source import Target


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Weights that are one parameter of the decoder, and so get the same scheme.

    Attributes:
      layer, param: which.
      targets: its weights, all int4.
      error: of the layer's hidden states, squared, over the squares, with these weights alone rounded to int4.
    """

    layer: int
    param: str
    targets: tuple[Target, ...]
    error: float = 0.0

    @property
    def key(self) -> str:
        return f"{self.layer}.{self.param}"


def units_of(targets: Sequence[Target], choices: Mapping[str, Choice]) -> list[Unit]:
    """What a budget could raise."""
    found: dict[tuple[int, str], list[Target]] = {}
    for target in targets:
        if target.layer is not None and target.source in choices and choices[target.source].storage.code == "int4":
            found.setdefault((target.layer, target.param), []).append(target)
    return [Unit(layer=layer, param=param, targets=tuple(of)) for (layer, param), of in found.items()]


def raised(choice: Choice) -> Choice:
    return choice_of(RAISED, None, choice.scale_dtype)


def average_bits(targets: Mapping[str, Target], choices: Mapping[str, Choice]) -> float:
    """Of the rounded weights, scales counted."""
    total = sum(choice.bits(targets[name].shape) for name, choice in choices.items())
    return total / sum(targets[name].size for name in choices)


def check_budget(budget: float, targets: Mapping[str, Target], choices: Mapping[str, Choice]) -> None:
    """Raises ConfigError for a budget that no choice of int4 and int8 reaches."""
    least = average_bits(targets, choices)
    units = units_of(list(targets.values()), choices)
    names = {target.source for unit in units for target in unit.targets}
    most = average_bits(targets, {name: raised(c) if name in names else c for name, c in choices.items()})
    if not least <= budget <= most:
        too_low = "raise it, or take a larger --group"
        remedy = too_low if budget < least else f"lower it, or take --scheme {RAISED}"
        raise ConfigError(
            f"--budget-bits is {budget}, but rounded weights of this model have {least:.3f} bits in int4 and "
            f"{most:.3f} in {RAISED}, scales counted; {remedy}"
        )


def spend(
    budget: float, targets: Mapping[str, Target], choices: Mapping[str, Choice], units: Sequence[Unit]
) -> dict[str, Choice]:
    """The choices with the units raised whose error is the largest for each bit that it takes, as far as bits go."""
    chosen = dict(choices)
    size = sum(targets[name].size for name in choices)
    left = budget * size - sum(choice.bits(targets[name].shape) for name, choice in choices.items())

    def cost(unit: Unit) -> int:
        return sum(
            raised(choices[target.source]).bits(target.shape) - choices[target.source].bits(target.shape)
            for target in unit.targets
        )

    for unit in sorted(units, key=lambda unit: (-unit.error / cost(unit), unit.key)):
        if cost(unit) <= left:
            left -= cost(unit)
            chosen |= {target.source: raised(choices[target.source]) for target in unit.targets}
    return chosen
