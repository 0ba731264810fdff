"""The check whether weights, pages and the rest fit, before anything is compiled, and the search for a larger topology.

The sizing rule is the server's (`runtime.build.plan_stage_memory`), with the bytes of a data sheet in place of a
device's.
"""

import dataclasses

from jaxserve.config.schema import Config
from jaxserve.errors import CapacityError
from jaxserve.lab.compiled.ahead import AbsentModel, Keep, PlanTower, place_ahead
from jaxserve.lab.planner.report import MemoryUse, Suggestion
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.runtime.build import plan_stage_memory
from jaxserve.runtime.memory import MemoryPlan, held_tokens, memory_share, reserved_share
from jaxserve.values.chips import Chip, Topology

_GIB = 2**30
_NO_LIMIT = 2**62  # bytes of a device that holds everything


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The memory of a placed model. `plan` is None, and `problem` is the reason, when it does not fit."""

    needs: MemoryPlan
    plan: MemoryPlan | None
    problem: str | None
    total_bytes: int
    budget_bytes: int


def fit_memory(absent: AbsentModel, topology: Topology) -> Fit:
    """Sizes the pages of a placed model for the devices of a topology; never raises for one that is too large."""
    total = _total_bytes(absent.config, topology.chip)
    least = len(absent.sizes.page_groups.groups)
    needs = _size(with_settings(absent.config, "cache", num_pages=least, memory_bytes=None), absent, _NO_LIMIT)
    try:
        plan, problem = _size(absent.config, absent, total), None
    except CapacityError as error:
        plan, problem = None, str(error)
        if needs.weight_bytes > total:  # no setting of the cache or the scheduler could help
            problem = (
                f"the weights take {needs.weight_bytes / _GIB:.2f} GiB of each device, which has {total / _GIB:.2f}; "
                "raise parallel.tensor on a larger topology"
            )
    budget = int(total * memory_share(absent.config.cache, topology.chip.backend).fraction)
    return Fit(needs=needs, plan=plan, problem=problem, total_bytes=total, budget_bytes=budget)


def memory_use(fit: Fit, temporary_bytes: int | None) -> MemoryUse:
    """The breakdown to report. `temporary_bytes` None: nothing was compiled, the estimate stands."""
    sized = fit.plan or fit.needs
    temporaries = fit.needs.temporary_bytes if temporary_bytes is None else temporary_bytes
    num_pages = 0 if fit.plan is None else fit.plan.num_pages
    kv_bytes = 0 if fit.plan is None else fit.plan.cache_bytes
    available = fit.budget_bytes if fit.plan is None else fit.total_bytes  # in the first case for the fewest pages
    return MemoryUse(
        total_bytes=fit.total_bytes,
        budget_bytes=fit.budget_bytes,
        weight_bytes=sized.weight_bytes,
        kv_bytes=kv_bytes,
        state_bytes=sized.state_bytes - sized.adapter_bytes,
        adapter_bytes=sized.adapter_bytes,
        adapter_slots=sized.limits.adapter_slots,
        move_bytes=sized.move_bytes,
        temporary_bytes=temporaries,
        temporaries_compiled=temporary_bytes is not None,
        headroom_bytes=available - sized.held_bytes - temporaries,
        page_bytes=sized.page_bytes,
        page_size=sized.limits.page_size,
        num_pages=num_pages,
        kv_tokens=0 if fit.plan is None else held_tokens(fit.plan.limits, fit.plan.limits.max_model_len),
        page_groups=sized.page_groups.describe() if sized.has_windows else "",
        chosen_by="" if fit.plan is None else fit.plan.chosen_by,
    )


def smallest_fitting(
    config: Config,
    model: DecoderConfig,
    dtype: str,
    topology: Topology,
    weight_bytes: int,
    keep: Keep,
    plan_tower: PlanTower,
) -> Suggestion | None:
    """The smallest topology of the same chip, and the smallest parallel.tensor on it, that hold one replica.

    `weight_bytes`: of the whole model; `keep`, `plan_tower`: see `place_ahead`. Sizes that could not even hold the
    weights are skipped.
    """
    chip = topology.chip
    budget = _total_bytes(config, chip) * memory_share(config.cache, chip.backend).fraction
    tried = 0
    for shape in chip.shapes:
        candidate = chip.topology(shape)
        tensor = 1
        while tensor <= candidate.num_devices:
            if tensor > tried and weight_bytes / tensor < budget:
                changed = with_settings(config, "parallel", tensor=tensor, data=1, pipeline=1)
                absent = place_ahead(
                    changed,
                    model,
                    topology=candidate.name,
                    dtype=dtype,
                    to_compile=False,
                    keep=keep,
                    plan_tower=plan_tower,
                )
                if fit_memory(absent, candidate).plan is not None:
                    return Suggestion(topology=candidate.name, tensor=tensor)
            tensor *= 2
        tried = tensor // 2
    return None


def with_settings(config: Config, section: str, **values: object) -> Config:
    """The config with some values of one section changed."""
    old = getattr(config, section)
    return config.model_copy(update={section: old.model_copy(update=values)})


def _total_bytes(config: Config, chip: Chip) -> int:
    return int(chip.allocatable_bytes * reserved_share(config.cache, chip.backend))


def _size(config: Config, absent: AbsentModel, total_bytes: int) -> MemoryPlan:
    return plan_stage_memory(config, absent.sizes, absent.stages, absent.attention, total_bytes, absent.tower)
