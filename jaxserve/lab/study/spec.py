"""`Study`: the file of `jaxserve study`, and the points of its grid.

    base:                                  # of all points; the names are those of the grid
      config.model.path: configs/shapes/llama3.1-8b
      device: v5e:2x2
      load.dataset: sharegpt
      load.num_prompts: 300
    grid:                                  # all combinations are run
      policy: [fcfs, sjf]
      load.rate: [2, 4, 8]
    seeds: 3
    targets: {ttft: 500, tpot: 50}         # milliseconds

A name is `policy`, `router`, `replicas`, `autoscale`, `device`, `tensor` or `length_error`, or begins with `load.`
(options of the dataset, the arrivals and the clients) or `config.` (any setting of a server).
"""

import dataclasses
import difflib
import hashlib
import itertools
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import pydantic
import yaml

from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.requests import ClientOptions
from jaxserve.lab.workloads.arrivals import ArrivalOptions, Diurnal, Ramp
from jaxserve.lab.workloads.datasets import DatasetOptions
from jaxserve.lab.workloads.flags import parse_numbers
from jaxserve.lab.workloads.metrics import Goodput

_CONFIG, _LOAD = "config.", "load."
_OWN: Mapping[str, Any] = {
    "policy": None,  # None: that of the config
    "router": None,
    "replicas": 1,
    "autoscale": None,  # as for `jaxserve simulate --autoscale`
    "device": "cpu:1",
    "tensor": None,
    "length_error": None,
}
_DATASET = {field.name for field in dataclasses.fields(DatasetOptions)} - {"name", "seed"} | {"dataset"}
_ARRIVALS = {field.name for field in dataclasses.fields(ArrivalOptions)}
_CLIENTS = {field.name for field in dataclasses.fields(ClientOptions)}
_COUNT = Annotated[int | None, pydantic.Field(ge=1)]
_TYPES: Mapping[str, Any] = {
    **{
        _LOAD + name: type_
        for options in (DatasetOptions, ArrivalOptions, ClientOptions)
        for name, type_ in typing.get_type_hints(options).items()
    },
    "load.dataset": str,
    "load.path": str | None,
    "load.ramp": str | None,
    "load.diurnal": str | None,
    "load.owner_weights": str | None,
    "policy": str | None,
    "router": str | None,
    "replicas": _COUNT,
    "autoscale": str | None,
    "device": str,
    "tensor": _COUNT,
    "length_error": Annotated[float | None, pydantic.Field(ge=1, allow_inf_nan=False)],
}
_FORMAT = 5  # of the files of runs; another one is run again


class Targets(pydantic.BaseModel):
    """Limits in milliseconds, all of which a good request keeps."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    ttft: float | None = pydantic.Field(default=None, gt=0)
    tpot: float | None = pydantic.Field(default=None, gt=0)
    e2el: float | None = pydantic.Field(default=None, gt=0)

    def goodput(self) -> Goodput | None:
        """As the metrics take them; None without any."""
        if self.ttft is self.tpot is self.e2el is None:
            return None
        return Goodput(ttft_ms=self.ttft, tpot_ms=self.tpot, e2el_ms=self.e2el)


class Capacity(pydantic.BaseModel):
    """A search for the highest rate at which `share` of the requests are good, instead of a `load.rate`.

    Attributes:
      low, high: requests a second between which it is looked for.
      within: the search ends when the bounds are this close, as a share of the lower one.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    share: float = pydantic.Field(default=0.9, gt=0, le=1)
    low: float = pydantic.Field(gt=0)
    high: float = pydantic.Field(gt=0, allow_inf_nan=False)
    within: float = pydantic.Field(default=0.05, ge=1e-6, le=1)

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Capacity":
        if self.high <= self.low:
            raise ValueError(f"high ({self.high}) must be above low ({self.low})")
        return self


class Study(pydantic.BaseModel):
    """A whole study.

    Attributes:
      base: of all points.
      grid: the values of each name; every combination is a point.
      seeds: runs of each point, with seeds 0, 1, ….
      warmup: the share of the requests, the first to arrive, that are simulated and left out of the figures.
      confidence: of the intervals around the means over seeds.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    base: dict[str, Any] = pydantic.Field(default_factory=dict)
    grid: dict[str, list[Any]] = pydantic.Field(default_factory=dict)
    seeds: int = pydantic.Field(default=3, ge=1)
    warmup: float = pydantic.Field(default=0.1, ge=0, lt=1)
    confidence: float = pydantic.Field(default=0.95, gt=0, lt=1)
    targets: Targets = Targets()
    capacity: Capacity | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> "Study":
        for name, values in (*((name, [value]) for name, value in self.base.items()), *self.grid.items()):
            _check_name(name)
            for value in values:
                _check_value(name, value)
        if twice := self.base.keys() & self.grid.keys():
            raise ValueError(f"{', '.join(sorted(twice))} is in base and in grid; leave one out")
        if empty := [name for name, values in self.grid.items() if not values]:
            raise ValueError(f"grid: {', '.join(empty)} has no value")
        if self.capacity is not None:
            if self.targets.goodput() is None:
                raise ValueError("capacity is the highest rate that meets targets; give targets")
            if given := {"load.rate", "load.ramp", "load.diurnal", "load.clients"} & {*self.base, *self.grid}:
                raise ValueError(f"capacity looks for the rate; leave out {', '.join(sorted(given))}")
        return self

    def points(self) -> list["Point"]:
        """All combinations of the grid, the last name fastest."""
        ways = itertools.product(*self.grid.values())
        return [Point({**_OWN, **self.base, **dict(zip(self.grid, way, strict=True))}, self) for way in ways]


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """One combination of a study's grid. `values` has every name that was given, and the defaults of the others."""

    values: Mapping[str, Any]
    study: Study

    @property
    def axes(self) -> dict[str, Any]:
        """Where it is in the grid."""
        return {name: self.values[name] for name in self.study.grid}

    @property
    def settings(self) -> dict[str, Any]:
        """Of the server, by the names of a config."""
        return {n.removeprefix(_CONFIG): value for n, value in self.values.items() if n.startswith(_CONFIG)}

    def load(self, seed: int, rate: float | None = None) -> tuple[DatasetOptions, ArrivalOptions, ClientOptions]:
        """The options of its trace; `rate` in place of its own. Raises ConfigError."""
        given = {n.removeprefix(_LOAD): value for n, value in self.values.items() if n.startswith(_LOAD)}
        dataset: dict[str, Any] = {n: given[n] for n in given.keys() & _DATASET}
        dataset["name"] = dataset.pop("dataset", "random")
        if dataset.get("path") is not None:
            dataset["path"] = Path(dataset["path"])
        arrivals: dict[str, Any] = {n: given[n] for n in given.keys() & _ARRIVALS}
        for name, kind in (("ramp", Ramp), ("diurnal", Diurnal)):
            if arrivals.get(name) is not None:
                arrivals[name] = kind.parse(arrivals[name])
        if rate is not None:
            arrivals["rate"] = rate
        clients: dict[str, Any] = {n: given[n] for n in given.keys() & _CLIENTS}
        if "owner_weights" in clients:
            clients["owner_weights"] = tuple(parse_numbers(clients["owner_weights"], "load.owner_weights"))
        return DatasetOptions(**dataset, seed=seed), ArrivalOptions(**arrivals), ClientOptions(**clients)

    def key(self, seed: int, sources: Mapping[str, str]) -> str:
        """The name of its run with this seed: equal for runs that have equal results.

        `sources`: digests of what the result depends on beside words and numbers (`sources.Sources`).
        """
        study = self.study
        kept = study.model_dump(include={"warmup", "targets", "capacity"})
        text = json.dumps([_FORMAT, dict(self.values), kept, dict(sources), seed], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def read_study(path: Path) -> Study:
    """Raises ConfigError, which names the file and the place in it."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:  # ValueError: no UTF-8, or a date that is none
        raise ConfigError(f"{path} cannot be read: {error}") from error
    try:
        return Study.model_validate(tree)
    except pydantic.ValidationError as error:
        problems = [f"{'.'.join(map(str, one['loc'])) or 'study'}: {one['msg']}" for one in error.errors()]
        raise ConfigError(f"{path}: {'; '.join(problems[:5])}") from error


def _check_name(name: str) -> None:
    known = {*_OWN, *(_LOAD + one for one in _DATASET | _ARRIVALS | _CLIENTS)}
    if name not in known and not name.startswith(_CONFIG):
        close = difflib.get_close_matches(name, known, n=1)
        hint = f". Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name!r:.100} is no name; there are config.NAME and {', '.join(sorted(known))}{hint}")


def _check_value(name: str, value: Any) -> None:
    """Of a setting of a server, the config says it."""
    if name.startswith(_CONFIG):
        return
    try:
        pydantic.TypeAdapter(_TYPES[name]).validate_python(value, strict=True)
    except pydantic.ValidationError as error:
        raise ValueError(f"{name} is {value!r:.60}: {error.errors()[0]['msg']}") from error
