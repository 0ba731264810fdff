"""Several policies on one trace and one world: the experiment that the command line and notebooks run most.

Owns the loop over policies, of schedulers and of routers. Refuses options and printing (`cli`), and everything of a
single run; failures and scaling too, for which `simulate_cluster` is called by itself.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from jaxserve.errors import ConfigError
from jaxserve.lab.cluster import simulate_cluster
from jaxserve.lab.cluster_values import ClusterResult
from jaxserve.lab.results import LabResult
from jaxserve.lab.world import World
from jaxserve.routing import Router
from jaxserve.sched import Policy
from jaxserve.sched.simulate import SimRequest, SimulationResult, simulate
from jaxserve.workloads.metrics import Goodput


def compare_policies(
    policies: Sequence[str | type[Policy]],
    trace: Iterable[SimRequest],
    world: World,
    *,
    replicas: int = 1,
    routers: Sequence[str | type[Router]] = ("prefix",),
    goodput: Goodput | None = None,
    percentiles: Sequence[float] = (90, 95, 99),
    keep_steps: bool = True,
    keep_token_times: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> list[LabResult]:
    """Simulates the trace once for each policy, and with 2 replicas or more for each router, by name or class.

    Args:
      trace: must give the same requests each time.
      keep_token_times: for ITLs; a cluster never keeps them.
      say: gets a line after each run.

    Raises ConfigError as `simulate`, `simulate_cluster` and `LabResult.of`, or for a trace that can be read only once.
    """
    if len(policies) * len(routers) > 1 and iter(trace) is trace:
        raise ConfigError("an iterator can be read once, and each policy needs all of it: give a Trace or a list")
    results = []
    for policy, router in itertools.product(policies, routers if replicas > 1 else routers[:1]):
        label = _name(policy) if replicas == 1 else f"{_name(policy)}, {_name(router)}"
        start_s = time.perf_counter()
        run: SimulationResult | ClusterResult
        if replicas == 1:
            run = simulate(
                policy,
                trace,
                world.cost_model,
                world.limits,
                options=world.options,
                keep_steps=keep_steps,
                keep_token_times=keep_token_times,
            )
        else:
            run = simulate_cluster(
                policy,
                trace,
                world.cost_model,
                world.limits,
                replicas=replicas,
                router=router,
                router_options=world.router_options,
                options=world.options,
                keep_steps=keep_steps,
            )
        result = LabResult.of(label, run, goodput=goodput, percentiles=percentiles, num_pages=world.limits.num_pages)
        results.append(result)
        num_requests = len(result.simulation.requests)
        say(f"{label}: {num_requests} requests simulated in {time.perf_counter() - start_s:.1f} s")
    return results


def _name(policy: str | type[Policy] | type[Router]) -> str:
    return policy if isinstance(policy, str) else policy.__name__
