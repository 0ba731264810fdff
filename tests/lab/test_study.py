"""`jaxserve study`: its file, its points, runs that are resumed, figures with intervals, tables and pictures."""

import ast
import csv
import importlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jaxserve.cli import main
from jaxserve.config.model_path import resolve_model_path
from jaxserve.errors import ConfigError
from jaxserve.lab.simulation.fairness import jain_index
from jaxserve.lab.simulation.requests import ClientOptions, sim_requests
from jaxserve.lab.simulation.simulate import FixedCost, StepCost, simulate
from jaxserve.lab.study import pictures
from jaxserve.lab.study.figures import experience, interval, run_figures
from jaxserve.lab.study.report import show_points
from jaxserve.lab.study.run import run_study
from jaxserve.lab.study.sources import PACKAGE, UNREAD, Sources
from jaxserve.lab.study.spec import Study, Targets, read_study
from jaxserve.lab.study.summary import PointSummary, differences, shown_values
from jaxserve.lab.workloads.samples import Part, Shape
from jaxserve.sched import Bucket, Limits

SMALL: dict[str, Any] = {"load.num_prompts": 20, "load.input_len": 40, "load.output_len": 10}
FILE = """
base: {load.num_prompts: 20, load.input_len: 40, load.output_len: 10, load.tenants: 2, policy: fair}
grid:
  load.rate: [5, 50]
  config.sched.max_rows: [2, 8]
seeds: 2
targets: {ttft: 200, tpot: 50}
"""


def write(path: Path, text: str = FILE) -> Path:
    path.write_text(text)
    return path


def test_a_study_from_its_file_to_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["study", str(write(tmp_path / "a.yaml")), "--out", str(out), "--processes", "1"]) == 0
    printed = capsys.readouterr().out
    assert "means over 2 seeds, ± half the interval of 95% confidence; the first 10%" in printed
    assert "times begin at the scheduler: HTTP, encoding" in printed
    with (out / "runs.csv").open() as file:
        runs = list(csv.DictReader(file))
    assert [(run["load.rate"], run["config.sched.max_rows"], run["seed"]) for run in runs] == [
        (rate, rows, seed) for rate in ("5", "50") for rows in ("2", "8") for seed in ("0", "1")
    ]
    assert all(run["completed"] == "18" for run in runs), "a tenth of 20 is warm-up"
    assert all(0 < float(run[name]) <= 1 for run in runs for name in ("jain", "qoe"))
    with (out / "points.csv").open() as file:
        points = list(csv.DictReader(file))
    assert len(points) == 4
    for number, point in enumerate(points):
        mean = sum(float(run["p99_ttft_ms"]) for run in runs[2 * number : 2 * number + 2]) / 2
        assert float(point["p99_ttft_ms"]) == pytest.approx(mean)
        assert float(point["p99_ttft_ms_half_width"]) > 0
    assert float(points[2]["p99_ttft_ms"]) > float(points[3]["p99_ttft_ms"]), "fewer rows wait longer"
    for name in ("lines.png", "pareto.png", "cdf.png", "differences.png"):
        assert (out / name).read_bytes()[:4] == b"\x89PNG"


def test_what_is_there_is_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More values, another order of names, and a name that moves from base to grid, leave the earlier runs as they are;
    other targets do not."""
    study = Study(base=SMALL, grid={"load.rate": [5.0]}, seeds=2)
    first = run_study(study, tmp_path, 1)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").iterdir()}
    assert len(times) == 2
    more = run_study(Study(base=dict(reversed(SMALL.items())), grid={"load.rate": [5.0, 9.0]}, seeds=2), tmp_path, 1)
    assert more[:2] == first
    assert len(list((tmp_path / "runs").iterdir())) == 4
    named = {"load.rate": [5.0], "load.input_len": [SMALL["load.input_len"]]}
    same = Study(base={n: v for n, v in SMALL.items() if n not in named}, grid=named, seeds=2)
    assert [run["axes"] for run in run_study(same, tmp_path, 1)] == [{"load.rate": 5.0, "load.input_len": 40}] * 2
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    run_study(study.model_copy(update={"targets": Targets(ttft=100)}), tmp_path, 1)
    assert len(list((tmp_path / "runs").iterdir())) == 6
    next(iter(times)).write_text("{")
    with pytest.raises(ConfigError, match="is no run of a study.*remove it"):
        run_study(study, tmp_path, 1)


@pytest.mark.slow
def test_a_study_that_was_killed_goes_on(tmp_path: Path) -> None:
    text = FILE.replace("load.num_prompts: 20", "load.num_prompts: 100")
    out, file = tmp_path / "out", write(tmp_path / "a.yaml", text)
    command = [sys.executable, "-m", "jaxserve", "study", str(file), "--out", str(out), "--processes", "2", "--no-plot"]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end_s = time.monotonic() + 120
    while not (kept := list(out.glob("runs/*.json"))) and time.monotonic() < end_s:
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert kept, "a run was finished before the end"
    times = {path: path.stat().st_mtime_ns for path in kept}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert len(list(out.glob("runs/*.json"))) == 8
    assert all(path.stat().st_mtime_ns == before for path, before in times.items())
    again = tmp_path / "again"
    assert main(["study", str(file), "--out", str(again), "--processes", "1", "--no-plot"]) == 0
    assert (again / "runs.csv").read_text() == (out / "runs.csv").read_text()


def test_capacity_is_the_highest_rate_that_meets_the_targets(tmp_path: Path) -> None:
    study = Study.model_validate(
        {
            "base": SMALL | {"load.num_prompts": 60, "config.sched.max_rows": 2},
            "seeds": 1,
            "targets": {"ttft": 20},
            "capacity": {"low": 0.5, "high": 500, "within": 0.02},
        }
    )
    [found] = run_study(study, tmp_path, 1)
    rate = found["figures"]["capacity"]
    assert not found["figures"]["capacity_is_bound"]
    assert found["figures"]["good_share"] >= 0.9
    shares = []
    for factor in (0.9, 1.05):
        fixed = Study(base={**study.base, "load.rate": rate * factor}, seeds=1, targets=study.targets)
        [run] = run_study(fixed, tmp_path, 1)
        shares.append(run["figures"]["good_share"])
    assert shares[0] >= 0.9 > shares[1]
    too_hard = study.model_copy(update={"targets": Targets(ttft=0.001)})
    assert run_study(too_hard, tmp_path, 1)[0]["figures"]["capacity"] is None
    easy = study.model_copy(update={"targets": Targets(ttft=1e9)})
    assert run_study(easy, tmp_path, 1)[0]["figures"]["capacity_is_bound"]


def test_an_oracle_of_lengths_orders_by_them(tmp_path: Path) -> None:
    """With one row and all there at once, the shortest first has the least mean time; a wrong oracle does worse."""
    base = SMALL | {
        "load.dataset": "lognormal",
        "load.num_prompts": 40,
        "load.max_tokens": 200,
        "load.length_cv": 2.0,
        "policy": "sjf",
        "config.sched.max_rows": 1,
    }
    study = Study(base=base, grid={"length_error": [None, 1.0, 30.0]}, seeds=1, warmup=0.0)
    blind, exact, wrong = (run["figures"]["mean_e2el_ms"] for run in run_study(study, tmp_path, 1))
    assert exact < wrong
    assert exact < blind


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "cannot be read"),
        ("grid: {load.speeed: [1]}", "'load.speeed' is no name; there are config.NAME and autoscale, device"),
        ("base: {polcy: fcfs}", "'polcy' is no name.*Did you mean 'policy'"),
        ("grid: {policy: []}", "policy has no value"),
        ("{base: {policy: fcfs}, grid: {policy: [sjf]}}", "in base and in grid"),
        ("seeds: 0", "seeds: Input should be greater"),
        ("capacity: {low: 1, high: 2}", "give targets"),
        ("{targets: {ttft: 1}, capacity: {low: 2, high: 1}}", "must be above low"),
        ("{targets: {ttft: 1}, capacity: {low: 1, high: 2}, base: {load.rate: 1}}", "leave out load.rate"),
        ("{base: {load.rate: -1}}", "rate is -1"),
        ("{base: {load.dataset: none}}", "none"),
        ("{base: {device: tpu9, load.num_prompts: 2}}", "the point: .*tpu9"),
        ("{base: {router: prefix, load.num_prompts: 2}}", "give replicas of 2 or more"),
        ("{base: {length_error: 0.5, load.num_prompts: 2}}", "length_error is 0.5"),
        ("{base: {length_error: .inf}}", "length_error is inf"),
        ("{base: {load.num_prompts: 2.5}}", "load.num_prompts is 2.5: Input should be a valid integer"),
        ("{base: {load.num_prompts: true}}", "load.num_prompts is True: Input should be a valid integer"),
        ("{base: {load.tenants: 2.5}}", "load.tenants is 2.5"),
        ("{base: {load.owner_weights: [1, 4]}}", "load.owner_weights is .1, 4.: Input should be a valid string"),
        ("{grid: {load.owner_weights: ['1', '1,x']}}", "load.owner_weights is '1,x'"),
        ("{base: {load.rate: '4'}}", "load.rate is '4': Input should be a valid number"),
        ("{base: {load.ramp: 5}}", "load.ramp is 5: Input should be a valid string"),
        ("{base: {load.path: 3}}", "load.path is 3"),
        ("{base: {load.turns: .nan, load.num_prompts: 2}}", "--turns is nan"),
        ("{grid: {replicas: [1, 0]}}", "replicas is 0"),
        ("{grid: {tensor: ['2']}}", "tensor is '2'"),
        ("{base: {device: null}}", "device is None"),
        ("{base: {autoscale: 5}}", "autoscale is 5"),
        ("{targets: {ttft: .inf}}", "targets.ttft: Input should be a finite number"),
        ("{targets: {ttft: 1}, capacity: {low: 1, high: 2, within: 0.00000001}}", "capacity.within"),
        ("{base: {device: 2024-13-99}}", "cannot be read"),
        ("{base: {config.sched.max_rowz: 2, load.num_prompts: 2}}", "max_rowz"),
    ],
)
def test_a_mistake_costs_a_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_study(read_study(write(tmp_path / "a.yaml", text)), tmp_path / "out", 1)


def test_a_folder_that_cannot_take_runs_is_told(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match="runs cannot be made"):
        run_study(Study(base=SMALL), tmp_path, 1)


def test_intervals_and_indices_have_their_published_values() -> None:
    """Student's t for 3 values is 4.303 at 95 %; Jain's own example; Andes' curve of one token late."""
    found = interval([1.0, 2.0, 3.0], 0.95)
    assert (found.mean, found.half_width) == (2.0, pytest.approx(4.3027 / math.sqrt(3), rel=1e-4))
    assert interval([4.0], 0.95).half_width is None
    assert jain_index([1.0, 1.0, 1.0]) == 1.0
    assert jain_index([5.0, 0.0, 0.0]) == pytest.approx(1 / 3)
    assert experience([0.5, 1.0, 1.5], ttft_s=1.0, tpot_s=1.0) == 1.0, "a token that is early is read when it is due"
    assert experience([1.0, 2.0, 4.0], ttft_s=1.0, tpot_s=1.0) == pytest.approx((3 + 2 + 0) / (3 + 2 + 1))
    assert experience([3.0], ttft_s=1.0, tpot_s=1.0) == 0.0


LIMITS = Limits(
    max_rows=1, num_pages=2000, page_size=16, max_model_len=64, buckets=(Bucket(1, 1, True), Bucket(16, 1, False))
)


def test_a_queue_of_one_server_agrees_with_queueing_theory() -> None:
    """M/D/1 by one row: a prompt of 16 tokens and 9 outputs take 9 steps of 10 ms. Pollaczek and Khinchine give the
    mean wait; Little's law ties the mean number in the system to the mean time in it."""
    import numpy as np

    service_s, count, rate = 0.09, 4000, 0.6 / 0.09
    arrivals = np.cumsum(np.random.default_rng(5).exponential(1 / rate, count))
    shapes = [Shape(parts=(Part(k, 16),), output_len=9, arrival_s=float(at)) for k, at in enumerate(arrivals)]
    result = simulate(
        "fcfs", list(sim_requests(shapes, ClientOptions())), FixedCost(cost=StepCost(host_s=0.0, device_s=0.01)), LIMITS
    )
    figures = run_figures(result, 0.1, Targets(), result.duration_s)
    expected_ms = 0.6 * service_s / (2 * (1 - 0.6)) * 1e3
    waits = np.array([(r.admitted_s or 0.0) - r.arrival_s for r in sorted(result.requests, key=lambda r: r.arrival_s)])
    batches = waits[400:].reshape(20, -1).mean(axis=1) * 1e3  # nearly independent means
    assert abs(figures["mean_queue_ms"] - expected_ms) < 3 * batches.std(ddof=1) / math.sqrt(20)
    edges = sorted(edge for r in result.requests for edge in ((r.arrival_s, 1), (r.last_token_s or 0.0, -1)))
    area, inside, last_s = 0.0, 0, 0.0
    for time_s, change in edges:
        area, inside, last_s = area + inside * (time_s - last_s), inside + change, time_s
    stays = sum((r.last_token_s or 0.0) - r.arrival_s for r in result.requests)
    assert area / last_s == pytest.approx(count / last_s * stays / count)
    assert json.dumps(figures)


POLICY = """
import my_weights

from jaxserve.sched import Policy


class Mine(Policy):
    def key(self, seq, now_s):
        return my_weights.SIGN * seq.request.order_s
"""


def runs_in(folder: Path) -> set[str]:
    return {path.name for path in (folder / "runs").iterdir()}


def test_a_change_of_code_or_of_a_file_makes_runs_anew_and_nothing_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy's module, one that it imports, its trace, the config.json of the model; each alone, from a call of its
    own as from a shell."""
    policy, weights, trace = tmp_path / "my_study_policy.py", tmp_path / "my_weights.py", tmp_path / "trace.csv"
    rows = [f"2024-05-10 00:00:00.{number * 1000:06d}+00:00,40,8" for number in range(4)]
    model = tmp_path / "model"
    model.mkdir()
    for file in resolve_model_path("demo").glob("*.json"):
        shutil.copy(file, model)
    policy.write_text(POLICY)
    weights.write_text("SIGN = 1\n")
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    base = {"policy": "my_study_policy:Mine", "load.dataset": "azure", "load.path": str(trace), "load.num_prompts": 4}
    study = Study(base={**base, "config.model.path": str(model), "config.sched.max_rows": 1}, seeds=1)
    monkeypatch.syspath_prepend(tmp_path)

    def keys() -> str:
        for name in ("my_study_policy", "my_weights"):
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        [point] = study.points()
        return point.key(0, Sources().of(point))

    def changed(path: Path, text: str) -> bool:
        before, content = keys(), path.read_text()
        path.write_text(text)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # as text of equal length within a second
        after = keys()
        path.write_text(content)
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        assert keys() == before
        return after != before

    assert changed(policy, POLICY.replace("my_weights.SIGN *", "-"))
    assert changed(weights, "SIGN = -1\n")
    assert changed(trace, trace.read_text().replace(",40,8", ",40,9"))
    config = json.loads((model / "config.json").read_text())
    assert changed(model / "config.json", json.dumps(config | {"max_position_embeddings": 512}))
    other = tmp_path / "other_policy.py"
    other.write_text("")
    assert not changed(other, "import json\n")
    assert not changed(model / "tokenizer.json", "{}")
    monkeypatch.setenv("JAXSERVE_LOG_LEVEL", "debug")
    first = keys()
    monkeypatch.delenv("JAXSERVE_LOG_LEVEL")
    assert first == keys()


def test_a_policy_that_was_changed_has_its_own_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "my_changed_policy.py"
    monkeypatch.syspath_prepend(tmp_path)
    study = Study(
        base=SMALL | {"policy": "my_changed_policy:Mine", "config.sched.max_rows": 1, "load.rate": 200.0}, seeds=1
    )
    found = []
    for sign in ("", "-"):
        policy.write_text(POLICY.replace("import my_weights", "").replace("my_weights.SIGN * ", sign))
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        sys.modules.pop("my_changed_policy", None)
        importlib.invalidate_caches()
        found += run_study(study, tmp_path / "out", 1)
    assert len(runs_in(tmp_path / "out")) == 2
    assert found[0]["figures"]["p99_ttft_ms"] != found[1]["figures"]["p99_ttft_ms"], "the last come first"


def test_the_digest_of_the_package_has_all_that_a_run_imports() -> None:
    """Every module that can be reached from a run's own, by imports anywhere in the text, is in it."""
    waiting, seen = [PACKAGE / "lab/study/point.py"], set[Path]()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            else:
                continue
            for name in names:
                parts = name.split(".")
                for end in range(len(parts), 0, -1):
                    path = PACKAGE.parent.joinpath(*parts[:end])
                    waiting += [one for one in (path.with_suffix(".py"), path / "__init__.py") if one.is_file()]
    unread = [path for path in seen if any(path.is_relative_to(PACKAGE / part) for part in UNREAD)]
    assert not unread
    assert len(seen) > 100


def test_policies_are_loaded_before_the_first_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for wrong, message in (
        ("my_absent:P", "policy my_absent:P: .*No module named 'my_absent'"),
        ("fcfs?quantum=1", "has no parameter 'quantum'"),
    ):
        with pytest.raises(ConfigError, match=message):
            run_study(Study(base=SMALL, grid={"policy": ["fcfs", wrong]}, seeds=1), tmp_path / "out", 1)
    assert not runs_in(tmp_path / "out")


def test_a_policy_in_a_file_and_its_parameters_are_an_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "from jaxserve.sched import Policy\n"
        "class Mine(Policy):\n"
        "    def __init__(self, options=None, sign=1):\n"
        "        super().__init__(options)\n"
        "        self.sign = sign\n"
        "    def key(self, seq, now_s):\n"
        "        return self.sign * seq.request.order_s\n"
    )
    base = SMALL | {"config.sched.max_rows": 1, "load.rate": 200.0}
    choices = ["fcfs", "./mine.py:Mine", "./mine.py:Mine?sign=-1"]
    study = Study(base=base, grid={"policy": choices}, seeds=1)
    fcfs, mine, last = (run["figures"]["p99_ttft_ms"] for run in run_study(study, tmp_path / "out", 2))
    assert fcfs == mine != last


def made_points(policies: list[str], rates: list[float], seeds: int = 3) -> list[PointSummary]:
    """Points whose seeds differ much, and whose policies differ by a millisecond in each."""
    points = []
    for number, policy in enumerate(policies):
        for rate in rates:
            runs = [
                {
                    "seed": seed,
                    "figures": {
                        "request_goodput": rate,
                        "output_throughput": 10 * rate + seed,
                        "median_ttft_ms": 5.0,
                        "p99_ttft_ms": 100.0 * (seed + 1) * rate + number,
                        "p99_tpot_ms": None if rate == 3.0 else 4.0 + number,
                    },
                    "distributions": {"ttft_ms": [1.0, 2.0, 500.0], "tpot_ms": [4.0, 5.0]},
                }
                for seed in range(seeds)
            ]
            points.append(PointSummary({"policy": policy, "load.rate": rate}, runs, 0.95))
    return points


def test_differences_are_taken_seed_by_seed() -> None:
    points = made_points(["fcfs", "sjf", "fair"], [1.0, 2.0])
    found = differences(points, 0.95)
    assert [(one.axes["policy"], one.axes["load.rate"], one.against) for one in found] == [
        (policy, rate, "fcfs") for policy in ("sjf", "fair") for rate in (1.0, 2.0)
    ]
    late = found[2].figures["p99_ttft_ms"]
    assert (late.mean, late.half_width) == (2.0, 0.0), "the seeds differ by hundreds, the policies by 2 in each"
    assert points[0].figures["p99_ttft_ms"].half_width is not None
    assert points[0].figures["p99_ttft_ms"].half_width > 100
    assert not differences(made_points(["fcfs"], [1.0, 2.0]), 0.95)
    numbers = [PointSummary({"load.rate": point.axes["load.rate"]}, point.runs, 0.95) for point in points[:2]]
    assert [(one.axis, one.against) for one in differences(numbers, 0.95)] == [("load.rate", 1.0)]


def test_policies_are_called_by_their_class_unless_two_are_alike() -> None:
    names = ["fcfs", "./mine.py:Mine?quantum=2", "a:Same", "b:Same"]
    shown = shown_values(made_points(names, [1.0]))
    assert [shown["policy", name] for name in names] == ["fcfs", "Mine?quantum=2", "a:Same", "b:Same"]


def test_a_table_cuts_no_name_at_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    points = made_points(["my_policies:LeastAttainedServiceWithLevels", "my_policies:LeastAttainedServiceFirst"], [1.0])
    show_points(points, differences(points, 0.95), Study(), Console(width=80))
    printed = capsys.readouterr().out
    assert printed.count("LeastAttainedServiceWithLevels") > 1
    assert "differences from policy LeastAttainedServiceWithLevels, seed by seed" in printed
    assert max(map(len, printed.splitlines())) <= 80 and "…" not in printed


def drawn_figures(points: list[PointSummary], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: figures.update({path.name: figure}))
    pictures.draw(points, differences(points, 0.95), folder)
    return figures


def test_pictures_have_goodput_bands_and_logarithmic_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = made_points(["fcfs", "sjf"], [1.0, 2.0, 40.0])
    figures = drawn_figures(points, tmp_path, monkeypatch)
    panels = {plot.get_ylabel(): plot for plot in figures["lines.png"].axes}
    assert list(panels) == ["goodput, requests/s", "TTFT p50, ms", "TTFT p99, ms", "TPOT p99, ms"]
    assert all(len(plot.collections) == 2 for plot in panels.values()), "a band for each policy"
    assert {name: plot.get_yscale() for name, plot in panels.items()} == {
        "goodput, requests/s": "linear", "TTFT p50, ms": "linear", "TTFT p99, ms": "log", "TPOT p99, ms": "linear"
    }  # fmt: skip
    assert {plot.get_xscale() for plot in figures["cdf.png"].axes[:3]} == {"log"}
    assert not any(plot.texts for plot in figures["pareto.png"].axes), "labels are in the legend"
    assert "against policy fcfs" in figures["differences.png"].get_suptitle()


def test_the_picture_of_distributions_says_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = [1.0, 2.0, 4.0, 5.0, 6.0, 18.0]
    figure = drawn_figures(made_points([f"m:P{k}" for k in range(8)], rates), tmp_path, monkeypatch)["cdf.png"]
    titles = [plot.get_title() for plot in figure.axes[:4]]
    assert titles[0] == "TTFT, rate 1" and titles[-1] == "TTFT, rate 18", "the first and the last are there"
    assert figure.get_suptitle() == "all seeds together; shown: 4 of 6 values of rate and 6 of 8 lines"
    few = drawn_figures(made_points(["fcfs", "sjf"], [1.0, 3.0]), tmp_path, monkeypatch)
    assert few["cdf.png"].get_suptitle() == "all seeds together"
    assert "TPOT p99, ms" not in [plot.get_ylabel() for plot in few["lines.png"].axes], "no value at one of the rates"
