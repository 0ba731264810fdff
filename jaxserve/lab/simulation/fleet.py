"""`Fleet`: the servers that one run simulates: one, several alike behind a router, or several that are unlike."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.arriving import Chains
from jaxserve.lab.simulation.cluster import simulate_cluster
from jaxserve.lab.simulation.cluster_values import Apart, Autoscale, ClusterResult, Machine
from jaxserve.lab.simulation.simulate import simulate
from jaxserve.lab.simulation.values import SimRequest, SimulationResult
from jaxserve.lab.simulation.world import World
from jaxserve.routing import Router
from jaxserve.sched import Policy, SchedulerOptions


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Servers behind one door.

    Attributes:
      world: of replica 0, and of all that are not in `unlike`. Schedulers, router, drafts and store are its own.
      replicas: how many there are; 1 without `autoscale` has no router.
      unlike: machines of other replicas, by number.
      autoscale: scaling by load, which begins with these replicas, its least number at least.
    """

    world: World
    replicas: int
    unlike: Mapping[int, Machine]
    autoscale: Autoscale | None = None

    @classmethod
    def of(
        cls, world: World | Sequence[World], replicas: int | None = None, autoscale: Autoscale | None = None
    ) -> "Fleet":
        """`replicas` servers of one world, None: as many as it has itself; or one server of each of several worlds.

        Raises ConfigError for numbers that contradict each other.
        """
        worlds = [world] if isinstance(world, World) else list(world)
        if not worlds:
            raise ConfigError("no world was given; each replica needs one")
        first = worlds[0]
        if len(worlds) > 1 and replicas not in (None, 1, len(worlds)):
            raise ConfigError(f"{replicas} replicas were asked for, and {len(worlds)} devices; leave the number out")
        asked = len(worlds) if len(worlds) > 1 else replicas or 1
        if asked > 1 and any(one.replicas > 1 for one in worlds):
            raise ConfigError(
                f"{asked} replicas of a server that has {first.replicas} itself (parallel.data) were asked for, and "
                "one router is simulated, not two behind each other; leave one of the two out"
            )
        unlike = {
            number: Machine(cost_model=one.cost_model, limits=one.limits)
            for number, one in enumerate(worlds)
            if one is not first
        }
        begin = max(asked, first.replicas, 1 if autoscale is None else autoscale.min_replicas)
        return cls(world=first, replicas=begin, unlike=unlike, autoscale=autoscale)

    @property
    def has_router(self) -> bool:
        return self.replicas > 1 or self.autoscale is not None

    @property
    def num_pages(self) -> int:
        """Of each replica; 0 where they differ."""
        return 0 if self.unlike else self.world.limits.num_pages

    def run(
        self,
        policy: str | type[Policy],
        load: Iterable[SimRequest] | Chains,
        *,
        router: str | type[Router] = "prefix",
        options: SchedulerOptions | None = None,
        apart: Apart | None = None,
        keep_steps: bool = False,
        keep_token_times: bool = False,
    ) -> SimulationResult | ClusterResult:
        """One run, of `simulate` or `simulate_cluster`. `options` None: the world's. Raises ConfigError as these."""
        world = self.world
        options = world.options if options is None else options
        if not self.has_router:
            if apart is not None:
                raise ConfigError("one replica cannot compute prompts for another; ask for 2 replicas or more")
            return simulate(
                policy,
                load,
                world.cost_model,
                world.limits,
                options=options,
                accept=world.drafts,
                store=world.store,
                keep_steps=keep_steps,
                keep_token_times=keep_token_times,
            )
        return simulate_cluster(
            policy,
            load,
            world.cost_model,
            world.limits,
            replicas=self.replicas,
            router=router,
            router_options=world.router_options,
            options=options,
            accept=world.drafts,
            store=world.store,
            autoscale=self.autoscale,
            keep_steps=keep_steps,
            keep_token_times=keep_token_times,
            apart=apart,
            unlike=self.unlike,
        )
