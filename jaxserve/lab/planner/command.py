"""The command `jaxserve plan` behind its options: it makes plans, prints them and returns the exit code."""

import dataclasses
import json
from collections.abc import Callable, Sequence

import jax

from jaxserve.config.schema import Config
from jaxserve.errors import ConfigError, MissingCompiler
from jaxserve.lab.planner.make import PlanOptions, make_plan
from jaxserve.lab.planner.report import Plan
from jaxserve.lab.planner.show import compare_plans, make_console, show_plan

DOES_NOT_FIT = 3


def plan_and_print(
    config: Config,
    topologies: Sequence[str],
    options: PlanOptions,
    *,
    compare: bool,
    as_json: bool,
    say: Callable[[str], None],
) -> int:
    """Plans for each topology, prints to stdout, and returns 0 when one of them fits, else 3.

    `compare` prints one table, and lets parallel.tensor follow the topology unless the options say otherwise. JSON is
    one plan, or {"fits", "plans", "not_planned"} for several. Of several topologies, those whose compiler is not
    installed are left out and named.
    """
    if not topologies:
        raise ConfigError("give --topology, such as --topology v5e:2x2; repeat it to plan for several")
    # Compilers for absent devices do not need a device, and must not look for one.
    jax.config.update("jax_platforms", "cpu")
    if compare and options.tensor is None:
        options = dataclasses.replace(options, tensor="auto")
    plans: list[Plan] = []
    missing: dict[str, str] = {}
    for name in topologies:
        try:
            plans.append(make_plan(config, name, options, say))
        except MissingCompiler as error:
            missing[name] = str(error)
            if len(missing) == len(topologies):
                raise
    fits = any(plan.fits for plan in plans)
    if as_json:
        several = {"fits": fits, "plans": [plan.as_json() for plan in plans], "not_planned": missing}
        print(json.dumps(plans[0].as_json() if len(topologies) == 1 else several, indent=2))
    else:
        _print(plans, compare)
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
