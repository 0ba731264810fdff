"""Several policies, of schedulers and of routers, on one trace and one world: the experiment that is run most.

Failures and scaling are not part of it: call `simulate_cluster` for those.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.cluster import simulate_cluster
from jaxserve.lab.simulation.cluster_values import ClusterResult
from jaxserve.lab.simulation.results import LabResult
from jaxserve.lab.simulation.simulate import SimRequest, SimulationResult, simulate
from jaxserve.lab.simulation.world import World
from jaxserve.lab.workloads.metrics import Goodput
from jaxserve.progress import Progress, Quiet
from jaxserve.routing import Router
from jaxserve.sched import Policy


def compare_policies(
    policies: Sequence[str | type[Policy]],
    trace: Iterable[SimRequest],
    world: World,
    *,
    replicas: int | None = None,
    routers: Sequence[str | type[Router]] = ("prefix",),
    goodput: Goodput | None = None,
    percentiles: Sequence[float] = (90, 95, 99),
    keep_steps: bool = True,
    keep_token_times: bool = True,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = Quiet(),  # noqa: B008 (stateless)
) -> list[LabResult]:
    """Simulates the trace once for each policy, and with 2 replicas or more for each router, by name or class.

    Args:
      replicas: worlds behind one router; None: the replicas that the world itself has.
      trace: must give the same requests each time.
      keep_token_times: for ITLs; a cluster never keeps them.
      say: gets a line after each run.
      progress: called before each run.

    Raises ConfigError as `simulate`, `simulate_cluster` and `LabResult.of`, or for a trace that can be read only once.
    """
    if len(policies) * len(routers) > 1 and iter(trace) is trace:
        raise ConfigError("an iterator can be read once, and each policy needs all of it: give a Trace or a list")
    if replicas is not None and replicas > 1 and world.replicas > 1:
        raise ConfigError(
            f"{replicas} replicas of a server that has {world.replicas} itself (parallel.data) were asked for, and one "
            "router is simulated, not two behind each other; leave one of the two out"
        )
    replicas = world.replicas if replicas in (None, 1) else replicas
    results = []
    for policy, router in itertools.product(policies, routers if replicas > 1 else routers[:1]):
        label = _name(policy) if replicas == 1 else f"{_name(policy)}, {_name(router)}"
        progress.begin(f"simulating {label}")
        start_s = time.perf_counter()
        run: SimulationResult | ClusterResult
        if replicas == 1:
            run = simulate(
                policy,
                trace,
                world.cost_model,
                world.limits,
                options=world.options,
                accept=world.drafts,
                store=world.store,
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
                accept=world.drafts,
                store=world.store,
                keep_steps=keep_steps,
            )
        result = LabResult.of(label, run, goodput=goodput, percentiles=percentiles, num_pages=world.limits.num_pages)
        results.append(result)
        num_requests = len(result.simulation.requests)
        say(f"{label}: {num_requests} requests simulated in {time.perf_counter() - start_s:.1f} s")
    return results


def _name(policy: str | type[Policy] | type[Router]) -> str:
    return policy if isinstance(policy, str) else policy.__name__
