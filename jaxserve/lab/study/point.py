"""One point of a study with one seed: simulated once, or as often as the search for its capacity needs."""

import dataclasses
import math
import random
from typing import Any, NamedTuple

from jaxserve.config import load_config, policy_of
from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.cluster_values import Autoscale, ClusterResult
from jaxserve.lab.simulation.fleet import Fleet
from jaxserve.lab.simulation.requests import Trace
from jaxserve.lab.simulation.values import SimRequest, SimulationResult
from jaxserve.lab.simulation.world import worlds_of_devices
from jaxserve.lab.study.capacity import highest_rate
from jaxserve.lab.study.figures import distributions, run_figures
from jaxserve.lab.study.spec import Capacity, Point
from jaxserve.sched.lengths import max_output_len
from jaxserve.sched.state import Sequence


class _Run(NamedTuple):
    """`replica_s`: seconds that replicas existed, summed."""

    total: SimulationResult
    replica_s: float


class Oracle:
    """A `LengthPredictor` that knows every length up to a factor, drawn once for each request.

    Args:
      lengths: true ones, by request id.
      error: the most that a guess is too long or too short, as a factor; 1: none.
    """

    def __init__(self, lengths: dict[str, int], error: float) -> None:
        self._lengths = lengths
        self._spread = math.log(error)

    def expected_len(self, seq: Sequence) -> int:
        """Its guess, within what the sequence may still have."""
        request_id = seq.request.request_id
        factor = math.exp(random.Random(request_id).uniform(-self._spread, self._spread))
        return max(seq.num_outputs + 1, min(round(self._lengths[request_id] * factor), max_output_len(seq)))

    def learn(self, seq: Sequence) -> None:
        """It knows them already."""


def fleet_of(point: Point) -> Fleet:
    """The simulated servers of a point. Loads JAX. Raises ConfigError and its kin."""
    values = point.values
    worlds = worlds_of_devices(
        load_config(None, point.settings, every_variable=False).config, values["device"], values["tensor"]
    )
    autoscale = values["autoscale"] if values["autoscale"] is None else Autoscale.parse(values["autoscale"])
    return Fleet.of(worlds, values["replicas"], autoscale)


def run_point(point: Point, fleet: Fleet, seed: int) -> dict[str, Any]:
    """The figures of a run, its axes and seed first. Raises ConfigError."""
    capacity = point.study.capacity
    if capacity is None:
        result = _simulate(point, fleet, seed, None)
        found: dict[str, Any] = {}
    else:
        result, found = _search(point, fleet, seed, capacity)
    figures = run_figures(result.total, point.study.warmup, point.study.targets, result.replica_s)
    return {
        "axes": point.axes,
        "seed": seed,
        "figures": found | figures,
        "distributions": distributions(result.total, point.study.warmup),
    }


def _search(point: Point, fleet: Fleet, seed: int, capacity: Capacity) -> tuple[_Run, dict[str, Any]]:
    """The run at the highest rate that meets the targets. Every rate meets the same requests, closer or further apart.

    The rate is None where even the lowest does not meet them, and `capacity_is_bound` where even the highest does.
    """
    found = highest_rate(
        lambda rate: _simulate(point, fleet, seed, rate),
        lambda run: _meets(point, run, capacity),
        low=capacity.low,
        high=capacity.high,
        within=capacity.within,
    )
    return found.run, {"capacity": found.rate, "capacity_is_bound": found.is_bound}


def _meets(point: Point, run: _Run, capacity: Capacity) -> bool:
    return (
        run_figures(run.total, point.study.warmup, point.study.targets, run.replica_s)["good_share"] >= capacity.share
    )


def _simulate(point: Point, fleet: Fleet, seed: int, rate: float | None) -> _Run:
    dataset, arrivals, clients = point.load(seed, rate)
    trace = Trace(dataset=dataset, arrivals=arrivals, clients=clients)
    requests: list[SimRequest] = list(trace)
    if not requests:
        raise ConfigError("the trace of a point has no requests; nothing can be measured")
    load = requests if trace.load() is trace else trace.load()
    values, options = point.values, fleet.world.options
    if values["length_error"] is not None:
        lengths = {one.request.request_id: one.output_len for one in requests}
        options = dataclasses.replace(options, lengths=Oracle(lengths, values["length_error"]))
    if values["router"] is not None and not fleet.has_router:
        raise ConfigError("router chooses between replicas; give replicas of 2 or more, too")
    config = load_config(None, point.settings, every_variable=False).config
    run = fleet.run(
        values["policy"] or policy_of(config),
        load,
        router=values["router"] or config.route.policy,
        options=options,
        keep_token_times=True,
    )
    if isinstance(run, ClusterResult):
        return _Run(run.total, run.replica_s)
    return _Run(run, run.duration_s)
