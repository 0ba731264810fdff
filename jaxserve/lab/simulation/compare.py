"""Several policies, of schedulers and of routers, on one trace and one world: the experiment that is run most.

Failures and scaling at given times are not part of it: call `simulate_cluster` for those.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable, Sequence

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.arriving import Chains
from jaxserve.lab.simulation.client_costs import ClientCosts
from jaxserve.lab.simulation.cluster_values import Apart, Autoscale
from jaxserve.lab.simulation.fleet import Fleet
from jaxserve.lab.simulation.requests import Trace
from jaxserve.lab.simulation.results import LabResult
from jaxserve.lab.simulation.simulate import SimRequest
from jaxserve.lab.simulation.values import SimulationResult
from jaxserve.lab.simulation.world import World
from jaxserve.lab.workloads.metrics import Goodput
from jaxserve.progress import Progress, Quiet
from jaxserve.routing import Router
from jaxserve.sched import Policy


def compare_policies(
    policies: Sequence[str | type[Policy]],
    trace: Iterable[SimRequest] | Chains,
    world: World | Sequence[World],
    *,
    replicas: int | None = None,
    routers: Sequence[str | type[Router]] = ("prefix",),
    apart: Sequence[Apart | None] = (None,),
    autoscale: Autoscale | None = None,
    client_costs: ClientCosts | None = None,
    goodput: Goodput | None = None,
    percentiles: Sequence[float] = (90, 95, 99),
    keep_steps: bool = True,
    keep_token_times: bool = True,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = Quiet(),  # noqa: B008 (stateless)
) -> list[LabResult]:
    """Simulates the trace once for each policy, and with 2 replicas or more for each router, by name or class, and for
    each way of `apart` (see `simulate_cluster`).

    Args:
      world: of one replica; or one for each, which may be unlike (see `Fleet`).
      replicas: worlds behind one router; None: the replicas that the world itself has, or as many as there are worlds.
      autoscale: scaling by load, which begins with these replicas.
      trace: must give the same requests each time.
      client_costs: delays that are added to all times of requests; None: they begin at the scheduler.
      keep_token_times: for ITLs.
      say: gets a line after each run.
      progress: called before each run.

    Raises ConfigError as `simulate`, `simulate_cluster` and `LabResult.of`, or for a trace that can be read only once.
    """
    if len(policies) * len(routers) * len(apart) > 1 and not isinstance(trace, Chains) and iter(trace) is trace:
        raise ConfigError("an iterator can be read once, and each policy needs all of it: give a Trace or a list")
    fleet = Fleet.of(world, replicas, autoscale)
    load = trace.load() if isinstance(trace, Trace) else trace
    if client_costs is not None and isinstance(load, Chains):
        raise ConfigError(
            "client costs are added behind a simulation, and here requests wait for answers, so they would come later, "
            "too: leave out --client-costs, or --clients and --turns-wait"
        )
    if any(apart) and not fleet.has_router:
        raise ConfigError("one replica cannot compute prompts for another; ask for 2 replicas or more")
    results = []
    ways = itertools.product(policies, routers if fleet.has_router else routers[:1], apart)
    for policy, router, way in ways:
        label = f"{_name(policy)}, {_name(router)}" if fleet.has_router else _name(policy)
        if way is not None:
            label += f", {way.prefill} apart"
        progress.begin(f"simulating {label}")
        start_s = time.perf_counter()
        run = fleet.run(
            policy, load, router=router, apart=way, keep_steps=keep_steps, keep_token_times=keep_token_times
        )
        if client_costs is not None:
            run = (
                client_costs.add_to(run)
                if isinstance(run, SimulationResult)
                else dataclasses.replace(run, total=client_costs.add_to(run.total))
            )
        result = LabResult.of(label, run, goodput=goodput, percentiles=percentiles, num_pages=fleet.num_pages)
        results.append(result)
        num_requests = len(result.simulation.requests)
        say(f"{label}: {num_requests} requests simulated in {time.perf_counter() - start_s:.1f} s")
    return results


def _name(policy: str | type[Policy] | type[Router]) -> str:
    return policy if isinstance(policy, str) else policy.__name__
