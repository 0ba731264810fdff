"""All points of a study, over processes. Each run is a file, so that a call goes on where an earlier one has ended."""

import concurrent.futures
import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.lab.study.point import fleet_of, run_point
from jaxserve.lab.study.sources import Sources
from jaxserve.lab.study.spec import Point, Study
from jaxserve.progress import Progress, Quiet


def run_study(study: Study, folder: Path, processes: int, progress: Progress = Quiet()) -> list[dict[str, Any]]:  # noqa: B008
    """Every run, in the order of points and seeds, each as `run_point` gives it.

    Args:
      folder: gets `runs/KEY.json`, one for each point and seed. Those that are there already are not run again, also
        when the file of the study has got more values or seeds since.
      processes: at once; 1: in this one.

    Raises ConfigError for a point that cannot be simulated; what was finished until then is kept.
    """
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder / 'runs'} cannot be made: {error}") from error
    points = study.points()
    sources = Sources()
    files: list[list[Path]] = []  # of each point, by seed
    for point in points:  # mistakes are found before the first run
        for seed in range(study.seeds):
            point.load(seed, None if study.capacity is None else study.capacity.low)
        try:
            read = sources.of(point)
        except ConfigError as error:
            raise ConfigError(f"{_name(point)}: {error}") from error
        files.append([folder / "runs" / f"{point.key(seed, read)}.json" for seed in range(study.seeds)])
    missing = [
        (point, places)
        for point, each in zip(points, files, strict=True)
        if (places := {seed: path for seed, path in enumerate(each) if _read(path) is None})
    ]
    total = len(points) * study.seeds
    done = total - sum(len(places) for _, places in missing)
    progress.begin(f"simulating {total} runs, {done} of which are there")
    for name in _run_all(missing, processes):
        done += 1
        progress.count(done, total, name)
    found = []
    for point, each in zip(points, files, strict=True):
        for path in each:
            run = _read(path)
            assert run is not None, "every run has left its file"
            # A name may have been in `base` when the run was made.
            found.append({**run, "axes": point.axes})
    return found


def _run_all(tasks: list[tuple[Point, dict[int, Path]]], processes: int) -> Iterator[str]:
    """The names of runs as they end."""
    if processes == 1:
        for point, places in tasks:
            yield from _run_seeds(point, places)
        return
    # JAX has threads, and a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting = [pool.submit(_run_seeds, point, places) for point, places in tasks]
        try:
            for ended in concurrent.futures.as_completed(waiting):
                yield from ended.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _run_seeds(point: Point, places: dict[int, Path]) -> list[str]:
    """Some seeds of one point, which share its servers, each into its file."""
    try:
        fleet = fleet_of(point)
        for seed, path in places.items():
            _write(path, run_point(point, fleet, seed))
    except ConfigError as error:
        raise ConfigError(f"{_name(point)}: {error}") from error
    return [f"{_name(point)}, seed {seed}" for seed in places]


def _name(point: Point) -> str:
    return ", ".join(f"{axis} {value}" for axis, value in point.axes.items()) or "the point"


def _read(path: Path) -> dict[str, Any] | None:
    """None: the run is to be made."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is no run of a study: {error}; remove it") from error


def _write(path: Path, run: dict[str, Any]) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        partial.write_text(json.dumps(run), encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error}") from error
