"""What `jaxserve plan` does with its options.

Owns the way from options to printed plans and the exit code. Refuses to parse a command line (`cli`).
"""

import dataclasses
import json
from collections.abc import Callable, Sequence

import jax

from jaxserve.config_schema import Config
from jaxserve.errors import ConfigError
from jaxserve.planner.make import PlanOptions, make_plan
from jaxserve.planner.report import Plan
from jaxserve.planner.show import compare_plans, make_console, show_plan

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
    one plan, or {"fits", "plans"} for several.
    """
    if not topologies:
        raise ConfigError("give --topology, such as --topology v5e:2x2; repeat it to plan for several")
    # Compilers for absent devices do not need a device, and must not look for one.
    jax.config.update("jax_platforms", "cpu")
    if compare and options.tensor is None:
        options = dataclasses.replace(options, tensor="auto")
    plans = [make_plan(config, name, options, say) for name in topologies]
    fits = any(plan.fits for plan in plans)
    if as_json:
        print(json.dumps(_as_json(plans, fits), indent=2))
    else:
        _print(plans, compare)
    return 0 if fits else DOES_NOT_FIT


def _as_json(plans: Sequence[Plan], fits: bool) -> object:
    if len(plans) == 1:
        return plans[0].as_json()
    return {"fits": fits, "plans": [plan.as_json() for plan in plans]}


def _print(plans: Sequence[Plan], compare: bool) -> None:
    console = make_console()
    if compare:
        compare_plans(plans, console)
        return
    for plan in plans:
        show_plan(plan, console)
