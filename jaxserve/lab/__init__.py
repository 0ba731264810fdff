"""The workshop beside the engine: everything that measures, predicts, imitates or replays it, and that it never needs.

    workloads    requests for an engine, and the definitions of the metrics of its answers
    bench        sends requests to an endpoint, or to an engine in this process, and measures
    simulation   policies, devices and clusters on paper, judged by the same definitions
    study        grids of simulations with repeated seeds, from one file to tables and pictures
    planner      whether a config fits devices that are not here, and how fast it could be
    compiled     facts of a compiled step: collectives, bytes moved, for chips that are not here
    replay       step logs: run again, or read as a table
    training     draft heads for speculation, trained beside a frozen model
    roofline     seconds from operations, bytes and the peaks of a chip

The engine imports nothing of this, which a test checks. The names below are for notebooks; each is imported
when it is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.lab.simulation.arriving import Chains
    from jaxserve.lab.simulation.client_costs import ClientCosts, measure_client_costs
    from jaxserve.lab.simulation.cluster import simulate_cluster
    from jaxserve.lab.simulation.cluster_values import Apart, Autoscale, ClusterResult, Failure, ScaleTo, Slowdown
    from jaxserve.lab.simulation.compare import compare_policies
    from jaxserve.lab.simulation.drafts import SimulatedDrafts
    from jaxserve.lab.simulation.fitted import Fitted
    from jaxserve.lab.simulation.plots import plot_gantt, plot_latencies, plot_overview, plot_pages, save_figure
    from jaxserve.lab.simulation.requests import ClientOptions, Trace, sim_requests
    from jaxserve.lab.simulation.results import LabResult, compare_frame, show_results
    from jaxserve.lab.simulation.roofline import DecoderShape, HostCost, Roofline
    from jaxserve.lab.simulation.simulate import simulate
    from jaxserve.lab.simulation.values import (
        CostModel,
        FixedCost,
        SimRequest,
        SimulationResult,
        StepCost,
        VirtualClock,
    )
    from jaxserve.lab.simulation.world import World, world_of_device, world_of_log
    from jaxserve.lab.study.capacity import HighestRate, highest_rate
    from jaxserve.lab.workloads.arrivals import ArrivalOptions, Diurnal, Ramp
    from jaxserve.lab.workloads.datasets import DatasetOptions
    from jaxserve.lab.workloads.metrics import Goodput
    from jaxserve.lab.workloads.samples import Part, Shape

__all__ = [
    "Apart",
    "ArrivalOptions",
    "Autoscale",
    "Chains",
    "ClientCosts",
    "ClientOptions",
    "ClusterResult",
    "CostModel",
    "DatasetOptions",
    "DecoderShape",
    "Diurnal",
    "Failure",
    "Fitted",
    "FixedCost",
    "Goodput",
    "HighestRate",
    "HostCost",
    "LabResult",
    "Part",
    "Ramp",
    "Roofline",
    "ScaleTo",
    "Shape",
    "SimRequest",
    "SimulatedDrafts",
    "SimulationResult",
    "Slowdown",
    "StepCost",
    "Trace",
    "VirtualClock",
    "World",
    "compare_frame",
    "compare_policies",
    "highest_rate",
    "measure_client_costs",
    "plot_gantt",
    "plot_latencies",
    "plot_overview",
    "plot_pages",
    "save_figure",
    "show_results",
    "sim_requests",
    "simulate",
    "simulate_cluster",
    "world_of_device",
    "world_of_log",
]

_HOME = {
    "simulation.arriving": ("Chains",),
    "simulation.client_costs": ("ClientCosts", "measure_client_costs"),
    "simulation.cluster": ("simulate_cluster",),
    "simulation.cluster_values": (
        "Apart",
        "Autoscale",
        "ClusterResult",
        "Failure",
        "ScaleTo",
        "Slowdown",
    ),
    "simulation.compare": ("compare_policies",),
    "simulation.drafts": ("SimulatedDrafts",),
    "simulation.fitted": ("Fitted",),
    "simulation.plots": (
        "plot_gantt",
        "plot_latencies",
        "plot_overview",
        "plot_pages",
        "save_figure",
    ),
    "simulation.requests": (
        "ClientOptions",
        "Trace",
        "sim_requests",
    ),
    "simulation.results": (
        "LabResult",
        "compare_frame",
        "show_results",
    ),
    "simulation.roofline": (
        "DecoderShape",
        "HostCost",
        "Roofline",
    ),
    "simulation.simulate": ("simulate",),
    "simulation.values": (
        "CostModel",
        "FixedCost",
        "SimRequest",
        "SimulationResult",
        "StepCost",
        "VirtualClock",
    ),
    "simulation.world": (
        "World",
        "world_of_device",
        "world_of_log",
    ),
    "study.capacity": (
        "HighestRate",
        "highest_rate",
    ),
    "workloads.arrivals": (
        "ArrivalOptions",
        "Diurnal",
        "Ramp",
    ),
    "workloads.datasets": ("DatasetOptions",),
    "workloads.metrics": ("Goodput",),
    "workloads.samples": (
        "Part",
        "Shape",
    ),
}
_MODULES = {name: f"jaxserve.lab.{module}" for module, names in _HOME.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'jaxserve.lab' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)
