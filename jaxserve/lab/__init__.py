"""The scheduler lab: policies, devices and clusters on paper, judged by the metrics of real runs.

    Trace --requests--> simulate, or simulate_cluster --times--> LabResult --> table, data frame, picture
                                  ^
    World: limits of a device, and a cost model: Roofline (published peaks) or Fitted (steps that an engine ran)

Why it has this shape. The scheduler that is simulated is the very object that runs on a device, so what needs to be
imitated is small: how long a step takes, and when requests come. Each is a value that can be replaced alone. Requests
come from the datasets of `jaxserve bench`, and times are judged by its definitions, so a simulated row and a measured
row can stand in one table.

`requests` makes traces, `roofline` and `fitted` say what steps cost, `cluster` runs many engines behind a router,
`world` puts limits and costs together from a config, `compare` runs several policies, `results` and `plots` tell. The
simulation of one engine is `jaxserve.sched.simulate`, which needs nothing of this. Nothing here loads JAX before the
sizes of a model are read from a checkpoint.
"""

from jaxserve.lab.cluster import simulate_cluster
from jaxserve.lab.cluster_values import Autoscale, ClusterResult, Failure, ScaleTo, Slowdown
from jaxserve.lab.compare import compare_policies
from jaxserve.lab.fitted import Fitted
from jaxserve.lab.plots import plot_gantt, plot_latencies, plot_overview, plot_pages, save_figure
from jaxserve.lab.requests import ClientOptions, Trace, sim_requests
from jaxserve.lab.results import LabResult, compare_frame, show_results
from jaxserve.lab.roofline import DecoderShape, HostCost, Roofline
from jaxserve.lab.world import World, world_of_device, world_of_log
from jaxserve.workloads.arrivals import ArrivalOptions, Diurnal, Ramp
from jaxserve.workloads.datasets import DatasetOptions
from jaxserve.workloads.metrics import Goodput

__all__ = [
    "ArrivalOptions",
    "Autoscale",
    "ClientOptions",
    "ClusterResult",
    "DatasetOptions",
    "DecoderShape",
    "Diurnal",
    "Failure",
    "Fitted",
    "Goodput",
    "HostCost",
    "LabResult",
    "Ramp",
    "Roofline",
    "ScaleTo",
    "Slowdown",
    "Trace",
    "World",
    "compare_frame",
    "compare_policies",
    "plot_gantt",
    "plot_latencies",
    "plot_overview",
    "plot_pages",
    "save_figure",
    "show_results",
    "sim_requests",
    "simulate_cluster",
    "world_of_device",
    "world_of_log",
]
