"""Simulated runs as figures: the metrics of `jaxserve bench`, its table, data frames.

The metrics are defined in `workloads.metrics`; pictures are in `plots`. `pandas` is needed for data frames only: the
extra `lab`.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import rich.console

from jaxserve.api import FinishReason
from jaxserve.errors import ConfigError, how_to_install
from jaxserve.lab.simulation.cluster_values import ClusterResult
from jaxserve.lab.simulation.fairness import fairness, service_over_time
from jaxserve.lab.simulation.simulate import SimulatedRequest, SimulatedStep, SimulationResult
from jaxserve.lab.workloads.metrics import Goodput, Metrics, compute_metrics
from jaxserve.lab.workloads.outcome import Outcome
from jaxserve.lab.workloads.tables import (
    compare_rates,
    compare_times,
    figures_table,
    make_console,
    make_title,
    times_table,
)

if TYPE_CHECKING:
    import pandas

CLOCK_NOTE = "times begin at the scheduler: HTTP, encoding of the prompt and the stream to a client are not in them"
_LEAST_S = 1e-9  # of a run that took no time at all, since something is divided by it
_REQUEST_FIELDS = tuple(field.name for field in dataclasses.fields(SimulatedRequest) if field.name != "token_times_s")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LabResult:
    """One simulated run, with its metrics.

    Attributes:
      label: of the run, such as its policy.
      simulation: as `simulate` gave it; of a cluster the total, with the steps of all replicas by their start.
      num_replicas: engines that ran side by side, at most.
      replica_s: seconds that engines existed, summed over engines.
      lanes: the steps of each engine, in order; empty unless kept.
      num_pages: of each engine; 0 where it is not known.
      tenants, owners: the metrics of the requests of each, by name; empty with one.
    """

    label: str
    metrics: Metrics
    simulation: SimulationResult
    num_replicas: int
    replica_s: float
    lanes: tuple[tuple[SimulatedStep, ...], ...]
    num_pages: int = 0
    tenants: Mapping[str, Metrics] = dataclasses.field(default_factory=dict)
    owners: Mapping[str, Metrics] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        label: str,
        run: SimulationResult | ClusterResult,
        *,
        goodput: Goodput | None = None,
        percentiles: Sequence[float] = (90, 95, 99),
        num_pages: int = 0,
    ) -> "LabResult":
        """Computes the metrics. Without `keep_token_times` there are no ITLs and no best second.

        Raises ConfigError for a run without requests.
        """
        if isinstance(run, ClusterResult):
            lanes = tuple(replica.steps for replica in run.replicas)
            steps = sorted(itertools.chain.from_iterable(lanes), key=lambda step: step.start_s)
            simulation = dataclasses.replace(run.total, steps=tuple(steps))
            num_replicas, replica_s = max(count for _, count in run.sizes), run.replica_s
        else:
            simulation, lanes, num_replicas, replica_s = run, (run.steps,), 1, run.duration_s
        if not simulation.requests:
            raise ConfigError(f"{label}: the simulated trace had no requests; nothing can be measured")
        every_output = any(request.token_times_s for request in simulation.requests)

        def metrics_of(requests: Sequence[SimulatedRequest]) -> Metrics:
            return compute_metrics(
                [outcome_of(request) for request in requests],
                max(simulation.duration_s, _LEAST_S),
                goodput=goodput,
                percentiles=percentiles,
                every_output=every_output,
            )

        def metrics_by(kind: Literal["tenant", "owner"]) -> dict[str, Metrics]:
            groups: dict[str, list[SimulatedRequest]] = {}
            for request in simulation.requests:
                groups.setdefault(getattr(request, kind), []).append(request)
            return {name: metrics_of(groups[name]) for name in sorted(groups)} if len(groups) > 1 else {}

        return cls(
            label=label,
            metrics=metrics_of(simulation.requests),
            simulation=simulation,
            num_replicas=num_replicas,
            replica_s=replica_s,
            lanes=lanes,
            num_pages=num_pages,
            tenants=metrics_by("tenant"),
            owners=metrics_by("owner"),
        )

    @property
    def busy_share(self) -> float:
        """The share of all devices' time in which a step ran."""
        return self.simulation.device_s / max(self.replica_s, _LEAST_S)

    @property
    def padded_share(self) -> float:
        """The share of the slots of all steps that held no token."""
        slots = self.simulation.padded_tokens
        return 1.0 - self.simulation.tokens / slots if slots else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a row which decodes draws in a step: 1 without rounds and drafts."""
        return self.simulation.row_tokens / self.simulation.row_steps if self.simulation.row_steps else 1.0

    @property
    def cached_share(self) -> float:
        """The share of all prompts' tokens that were found in a prefix cache."""
        return (self.metrics.cached_tokens or 0) / max(self.metrics.input_tokens, 1)

    @property
    def num_preemptions(self) -> int:
        """How often a request lost its row before it had ended, over all requests."""
        return sum(request.preemptions for request in self.simulation.requests)

    @property
    def jain(self) -> float | None:
        """Jain's index over tenants of the mean time for each output token; None with one tenant."""
        return fairness(self.simulation.requests)

    def to_frame(self) -> "pandas.DataFrame":
        """A line for each request, in the order of their ends: fields of `SimulatedRequest`, and its times in ms.

        `queue_ms` is from its arrival to its first row, `prefill_ms` from there to its first token: TTFT in two parts.
        `preempted_ms` is the time between the rows that it lost and those that it got again, in either part or later.

        Raises ConfigError without pandas.
        """
        frame = _import_pandas().DataFrame(
            [[getattr(request, name) for name in _REQUEST_FIELDS] for request in self.simulation.requests],
            columns=list(_REQUEST_FIELDS),
        )
        frame["finish_reason"] = [request.finish_reason.value for request in self.simulation.requests]
        first_s, last_s = frame["first_token_s"].astype(float), frame["last_token_s"].astype(float)
        admitted_s = frame["admitted_s"].astype(float)
        frame["queue_ms"] = (admitted_s - frame["arrival_s"]) * 1e3
        frame["preempted_ms"] = frame["preempted_s"] * 1e3
        frame["prefill_ms"] = (first_s - admitted_s) * 1e3
        frame["ttft_ms"] = (first_s - frame["arrival_s"]) * 1e3
        frame["e2el_ms"] = (last_s - frame["arrival_s"]) * 1e3
        gaps = frame["output_tokens"] - 1
        frame["tpot_ms"] = ((last_s - first_s) * 1e3 / gaps).where(gaps > 0)
        return frame

    def steps_frame(self) -> "pandas.DataFrame":
        """A line for each step, its bucket as text. Raises ConfigError without pandas, or when no steps were kept."""
        if not self.simulation.steps:
            raise ConfigError(f"{self.label} has no steps: simulate with keep_steps=True")
        frame = _import_pandas().DataFrame(self.simulation.steps, columns=list(SimulatedStep._fields))
        frame["bucket"] = [f"{step.bucket.tokens}x{step.bucket.rows}" for step in self.simulation.steps]
        return frame

    def tokens_frame(self) -> "pandas.DataFrame":
        """A line for each token: `request_id`, `tenant`, `number` from 0, `time_s`, and `gap_ms` from the one before.

        Raises ConfigError without pandas, or when the times of tokens were not kept.
        """
        if not any(request.token_times_s for request in self.simulation.requests):
            raise ConfigError(f"{self.label} has no times of tokens: simulate with keep_token_times=True")
        lines = [
            (request.request_id, request.tenant, number, time_s)
            for request in self.simulation.requests
            for number, time_s in enumerate(request.token_times_s)
        ]
        frame = _import_pandas().DataFrame(lines, columns=["request_id", "tenant", "number", "time_s"])
        frame["gap_ms"] = frame["time_s"].diff().where(frame["number"] > 0) * 1e3
        return frame

    def service_frame(self, window_s: float = 1.0) -> "pandas.DataFrame":
        """A line for each window, by its begin in seconds, and a column for each tenant: see `service_over_time`.

        Raises ConfigError as that, and without pandas.
        """
        service = service_over_time(self.simulation.requests, window_s)
        frame = _import_pandas().DataFrame(service)
        frame.index = frame.index * window_s
        frame.index.name = "time_s"
        return frame

    def requests_json(self) -> list[dict[str, Any]]:
        """Each request as plain values: the fields of `SimulatedRequest`, in the order of their ends."""
        return [
            {name: getattr(request, name) for name in _REQUEST_FIELDS}
            | {"finish_reason": request.finish_reason.value, "token_times_s": list(request.token_times_s)}
            for request in self.simulation.requests
        ]

    def as_json(self) -> dict[str, Any]:
        """Plain values, the metrics under the names of `jaxserve bench`."""
        return {
            "label": self.label,
            "replicas": self.num_replicas,
            "replica_seconds": self.replica_s,
            **self.metrics.as_json(),
            "steps": self.simulation.num_steps,
            "preemptions": self.num_preemptions,
            "device_busy_share": self.busy_share,
            "padded_share": self.padded_share,
            "tokens_per_step": self.tokens_per_step,
            "drafts": self.simulation.drafts._asdict(),
            "encodes": self.simulation.encodes,
            "encoded_patches": self.simulation.encoded_patches,
            "jain": self.jain,
            "tenants": {name: metrics.as_json() for name, metrics in self.tenants.items()},
            "owners": {name: metrics.as_json() for name, metrics in self.owners.items()},
        }


def outcome_of(request: SimulatedRequest) -> Outcome:
    """The outcome that a client would have seen. The times are those of its tokens, or of the first and the last."""
    failed = request.finish_reason in (FinishReason.ERROR, FinishReason.ABORT) or request.first_token_s is None
    times_s = request.token_times_s
    if not failed and not times_s:
        assert request.first_token_s is not None and request.last_token_s is not None, request
        times_s = (request.first_token_s, request.last_token_s)[: request.output_tokens]
    return Outcome(
        start_s=request.arrival_s,
        output_times_s=times_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        cached_tokens=request.cached_tokens,
        asked_tokens=request.asked_tokens,
        failure=("simulated error" if request.error else request.finish_reason.value) if failed else None,
        detail=request.error,
        end_s=request.last_token_s or request.arrival_s,
    )


def compare_frame(results: Sequence[LabResult]) -> "pandas.DataFrame":
    """A line for each run, by label, with every figure of `LabResult.as_json`. Raises ConfigError without pandas."""
    left_out = ("failures", "drafts", "tenants", "owners")
    rows = [{name: value for name, value in result.as_json().items() if name not in left_out} for result in results]
    return _import_pandas().DataFrame(rows).set_index("label")


def show_results(results: Sequence[LabResult], console: rich.console.Console | None = None) -> None:
    """Prints one run in full, or several as one line each, as `jaxserve bench serve` does, and why requests failed."""
    assert results, "nothing to show"
    console = make_console() if console is None else console
    if len(results) == 1:
        [result] = results
        console.print(make_title(f"{result.label}: {result.metrics.duration_s:.2f} s simulated"))
        more = {**_more(result), "padding": f"{result.padded_share:.0%}"}
        console.print(figures_table(result.metrics, list(more.items())), times_table(result.metrics))
    else:
        runs = [(result.label, result.metrics) for result in results]
        more = [{"cached": f"{result.cached_share:.0%}", **_more(result)} for result in results]
        names = dict.fromkeys(name for row in more for name in row)
        console.print(make_title("simulated, one line for each run"))
        console.print(compare_rates(runs, {name: [row.get(name, "") for row in more] for name in names}))
        console.print(make_title("times in ms"), compare_times(runs))
    for result in results:
        for kind, metrics in (("owner", result.owners), ("tenant", result.tenants)):
            if metrics:
                runs = list(metrics.items())
                console.print(make_title(f"{result.label}, by {kind}"), compare_rates(runs), compare_times(runs))
        _print_failures(result, console)


def _more(result: LabResult) -> dict[str, str]:
    more = {
        "preempted": str(result.num_preemptions),
        "busy": f"{result.busy_share:.0%}",
    }
    if result.jain is not None:
        more["Jain"] = f"{result.jain:.3f}"
    if result.simulation.row_tokens > result.simulation.row_steps:
        more["tokens a step"] = f"{result.tokens_per_step:.2f}"
    if result.simulation.drafts.drafted:
        more["accepted"] = f"{result.simulation.drafts.rate:.0%}"
    if result.simulation.encodes:
        more["encodes"] = str(result.simulation.encodes)
    return more


def _print_failures(result: LabResult, console: rich.console.Console) -> None:
    reasons = [r.error for r in result.simulation.requests if r.error]
    if reasons:
        console.print(f"{result.label}: {len(reasons)} failed; the first: {reasons[0]}")


def _import_pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(f"data frames need pandas: {how_to_install('lab')}") from error
    return pandas
