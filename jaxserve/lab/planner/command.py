"""The command `jaxserve plan` behind its options: plans are made, printed, and become an exit code."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax

from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError, MissingCompiler
from jaxserve.lab.planner.make import PlanOptions, make_plan
from jaxserve.lab.planner.report import Plan
from jaxserve.lab.planner.show import compare_plans, make_console, show_plan
from jaxserve.progress import Progress

DOES_NOT_FIT = 3


class Plans(NamedTuple):
    """`missing`: of the topologies whose compiler is not installed, the reason."""

    made: tuple[Plan, ...]
    missing: Mapping[str, str]


def make_plans(
    config: Config,
    topologies: Sequence[str],
    options: PlanOptions,
    *,
    compare: bool,
    say: Callable[[str], None],
    progress: Progress,
) -> Plans:
    """A plan for each topology; `say` gets what there is to note about the checkpoint.

    `compare` lets parallel.tensor follow the topology unless the options say otherwise. Of several topologies, those
    whose compiler is not installed are left out. Raises ConfigError without a topology, MissingCompiler when all of
    the compilers are missing.
    """
    if not topologies:
        raise ConfigError("give --topology, such as --topology v5e:2x2; repeat it to plan for several")
    # Compilers for absent devices do not need a device, and must not look for one.
    jax.config.update("jax_platforms", "cpu")
    if compare and options.tensor is None:
        options = dataclasses.replace(options, tensor="auto")
    plans: list[Plan] = []
    missing: dict[str, str] = {}
    names = dict.fromkeys(topologies)
    for name in names:
        progress.begin(f"planning for {name}")
        try:
            plans.append(make_plan(config, name, options, say, progress))
        except MissingCompiler as error:
            missing[name] = str(error)
            if len(missing) == len(names):
                raise
    return Plans(tuple(plans), missing)


def print_plans(plans: Plans, *, compare: bool, as_json: bool, say: Callable[[str], None]) -> int:
    """Prints to stdout, and returns 0 when one of them fits, else 3.

    `compare` prints one table. JSON is one plan, or {"fits", "plans", "not_planned"} for several. `say` gets the names
    of topologies that were left out.
    """
    made, missing = plans
    fits = any(plan.fits for plan in made)
    if as_json:
        several = {"fits": fits, "plans": [plan.as_json() for plan in made], "not_planned": missing}
        print(json.dumps(made[0].as_json() if len(made) + len(missing) == 1 else several, indent=2))
    else:
        _print(made, compare)
    for name, why in missing.items():
        say(f"{name} is not planned: {why}")
    return 0 if fits else DOES_NOT_FIT


def _print(plans: Sequence[Plan], compare: bool) -> None:
    console = make_console()
    if compare:
        compare_plans(plans, console)
        return
    for plan in plans:
        show_plan(plan, console)
