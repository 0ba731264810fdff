"""Pictures: what is drawn is what happened, and files are PNGs."""

import numpy as np
import pytest

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation import plots
from jaxserve.lab.simulation.cluster import simulate_cluster
from jaxserve.lab.simulation.requests import Trace
from jaxserve.lab.simulation.results import LabResult
from jaxserve.lab.simulation.simulate import FixedCost, StepCost, simulate
from jaxserve.lab.workloads.arrivals import ArrivalOptions
from jaxserve.lab.workloads.datasets import DatasetOptions
from jaxserve.sched import Bucket, Limits

LIMITS = Limits(
    max_rows=4, num_pages=40, page_size=4, max_model_len=256, buckets=(Bucket(4, 4, True), Bucket(32, 4, False))
)
TRACE = Trace(dataset=DatasetOptions(num_prompts=60, input_len=20, output_len=8), arrivals=ArrivalOptions(rate=20.0))


def run(policy: str = "fcfs", *, keep_steps: bool = True) -> LabResult:
    cost = FixedCost(cost=StepCost(0.001, 0.010, 0.001))
    simulation = simulate(policy, TRACE, cost, LIMITS, keep_steps=keep_steps)
    return LabResult.of(policy, simulation, num_pages=LIMITS.num_pages)


@pytest.fixture(scope="module")
def result() -> LabResult:
    return run()


def test_spans_are_cut_at_the_edges_of_bins() -> None:
    """From 0.5 to 2.5 with weight 3, and from 2 to 3 with weight 1."""
    begins, ends, weights = np.array([2.0, 0.5]), np.array([3.0, 2.5]), np.array([1.0, 3.0])
    found = plots._within_bins(begins, ends, weights, np.arange(5.0))
    np.testing.assert_allclose(found, [1.5, 3.0, 1.5 + 1.0, 0.0])


def test_pages_over_time_are_those_of_the_steps(result: LabResult) -> None:
    edges = np.linspace(0.0, result.simulation.duration_s, 51)
    means = plots._over_time(result, lambda step: step.held_pages, edges)
    steps = result.simulation.steps
    until = [*(step.start_s for step in steps[1:]), np.inf]
    done = [step.device_start_s + step.device_s + step.commit_s for step in steps]
    spans = [min(*ends) - step.start_s for step, *ends in zip(steps, until, done, strict=True)]
    expected = sum(step.held_pages * span for step, span in zip(steps, spans, strict=True))
    assert (means * np.diff(edges)).sum() == pytest.approx(expected)
    assert means.max() <= max(step.held_pages for step in result.simulation.steps) <= LIMITS.num_pages
    begun = plots._over_time(result, lambda step: 1.0, edges)
    assert ((begun >= 0) & (begun <= 1 + 1e-9)).all()
    assert begun.max() == pytest.approx(1.0)


def test_a_cluster_holds_the_pages_of_all_its_replicas() -> None:
    cost = FixedCost(cost=StepCost(0.001, 0.010, 0.001))
    run = simulate_cluster("fcfs", TRACE, cost, LIMITS, replicas=2, router="round_robin", keep_steps=True)
    both = LabResult.of("two", run, num_pages=LIMITS.num_pages)
    assert len(both.lanes) == 2
    edges = np.linspace(0.0, both.simulation.duration_s, 11)
    begun = plots._over_time(both, lambda step: 1.0, edges)
    assert 1.0 < begun.max() <= 2.0 + 1e-9


def test_a_window_is_what_was_asked_for_or_the_fullest_moment(result: LabResult) -> None:
    steps = result.simulation.steps
    window = plots._window(steps, 0.5, 0.7)
    assert window
    assert all(step.device_start_s + step.device_s >= 0.5 and step.start_s < 0.7 for step in window)
    fullest = max(step.waiting for step in steps)
    assert fullest in [step.waiting for step in plots._window(steps, None, None)]


def test_every_picture_is_a_png(result: LabResult, tmp_path) -> None:
    pictures = {
        "gantt": plots.plot_gantt(result),
        "window": plots.plot_gantt(result, 0.5, 0.7),
        "pages": plots.plot_pages([result]),
        "latencies": plots.plot_latencies([result, run("sjf")]),
        "overview": plots.plot_overview([result, run("sjf")], "two policies"),
    }
    for name, figure in pictures.items():
        path = tmp_path / f"{name}.png"
        plots.save_figure(figure, path)
        assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        assert path.stat().st_size > 10_000
    labels = [text.get_text() for text in pictures["latencies"].axes[0].get_legend().get_texts()]
    assert labels == ["fcfs", "sjf"]


def test_what_was_not_kept_cannot_be_drawn(result: LabResult) -> None:
    with pytest.raises(ConfigError, match="keep_steps"):
        plots.plot_gantt(run(keep_steps=False))
    with pytest.raises(ConfigError, match="no step between"):
        plots.plot_gantt(result, 1e6, 2e6)
