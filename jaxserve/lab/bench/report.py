"""Results of the commands: one value for each, that prints as a table or as JSON."""

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.lab.bench.lag import ClientLag
from jaxserve.lab.workloads.metrics import Metrics, Spread
from jaxserve.lab.workloads.outcome import Outcome


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load and its result.

    Attributes:
      label: of the run within a sweep, such as "rate 4".
      rate: requests a second, as asked for; inf: as fast as `max_concurrency` allows; None: as recorded, or a ramp.
      start_s: on the clock of the outcomes.
      warnings: reasons why the figures may be wrong.
      notes: further facts.
    """

    label: str
    rate: float | None
    max_concurrency: int | None
    metrics: Metrics
    lag: ClientLag
    outcomes: tuple[Outcome, ...]
    start_s: float
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def as_json(self, *, with_requests: bool) -> dict[str, Any]:
        """Plain values; an infinite rate is the text "inf", as in vLLM's files."""
        tree: dict[str, Any] = {
            "label": self.label,
            "request_rate": "inf" if self.rate == math.inf else self.rate,
            "max_concurrency": self.max_concurrency,
            **self.metrics.as_json(),
            "client": dataclasses.asdict(self.lag),
            "warnings": list(self.warnings),
            "notes": list(self.notes),
        }
        if with_requests:
            tree["requests"] = [self._request(outcome) for outcome in self.outcomes]
        return tree

    def _request(self, outcome: Outcome) -> dict[str, Any]:
        return {
            "start": outcome.start_s - self.start_s,
            "outputs": [time_s - outcome.start_s for time_s in outcome.output_times_s],
            "input_tokens": outcome.prompt_tokens,
            "output_tokens": outcome.output_tokens,
            "failure": outcome.failure,
            "detail": outcome.detail,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeReport:
    """The report of `bench serve`: one run, or those of a sweep."""

    about: Mapping[str, Any]
    target: Mapping[str, Any]
    load: Mapping[str, Any]
    runs: tuple[Run, ...]

    def as_json(self, *, with_requests: bool) -> dict[str, Any]:
        """Plain values; `with_requests` adds the times of each request."""
        return {
            "about": dict(self.about),
            "target": dict(self.target),
            "load": dict(self.load),
            "runs": [run.as_json(with_requests=with_requests) for run in self.runs],
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OfflineReport:
    """The report of the commands that run a model in this process.

    Attributes:
      title: of the table.
      figures: name, with its unit, to value.
      spreads: distributions in milliseconds, by name.
    """

    title: str
    about: Mapping[str, Any]
    load: Mapping[str, Any]
    figures: Mapping[str, float | int | None]
    spreads: Mapping[str, Spread] = dataclasses.field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "about": dict(self.about),
            "load": dict(self.load),
            **self.figures,
            **{name: _spread(spread) for name, spread in self.spreads.items()},
            "warnings": list(self.warnings),
        }


def _spread(spread: Spread) -> dict[str, Any]:
    tree = dataclasses.asdict(spread)
    return tree | {"percentiles": {f"{percent:g}": value for percent, value in spread.percentiles.items()}}


def check_writable(path: Path | None, option: str) -> None:
    """Raises ConfigError for a file that cannot be made, before anything has been measured."""
    if path is None:
        return
    try:
        if not path.absolute().parent.is_dir():
            raise ConfigError(f"{option} {path}: there is no directory {path.absolute().parent}")
        if path.is_dir():
            raise ConfigError(f"{option} {path} is a directory")
        if not path.exists():
            path.touch()
            path.unlink()
        elif not os.access(path, os.W_OK):
            raise ConfigError(f"{option} {path} is there, and must not be written to")
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {path}: {error}") from error


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Writes a file. Raises ConfigError."""
    try:
        path.write_text(json.dumps(tree, indent=1, default=str) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}") from error
