"""scripts/tune_kernels.py on this CPU, with an implementation whose sizes are slow, wrong, deadly, refused or right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tune_kernels
import tuning_by_count
from fake_implementations import NAME, entry

from jaxserve.kernels.cases import REAL
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.tuning import TunedTable, file_name, read_table

ROOT = Path(__file__).parents[2]
USE = REAL["llama3-8b-tp8/decode64/64/bfloat16"].use


def command(*args: object) -> str:
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/tune_kernels.py"), "--backend", "cpu", "--workers", "1", *map(str, args)],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_quickest_right_size_is_written_whatever_the_others_do(tmp_path):
    wanted = entry("decode", USE)
    printed = command("--implementations", NAME, "--only", f"^{wanted}$", "--folder", tmp_path, "--commit", "abc")
    path = tmp_path / file_name("cpu")
    assert str(path) in printed
    found = json.loads(path.read_text())
    assert found["device_kind"] == "cpu" and found["commit"] == "abc" and "jax" in found["versions"]
    assert found["entries"] == {wanted: {"size": 6}}
    about = found["measured"][wanted]
    # Size 3 killed its process before it had a result.
    assert about["tried"] == 5 and about["right"] == 2 and about["ms"] < about["default_ms"]
    table = TunedTable(device_kind="cpu", entries=found["entries"], commit=found["commit"])
    assert table.get(NAME, "decode", USE) == {"size": 6}


def test_dry_run_lists_every_real_use_once():
    printed = command("--implementations", NAME, "--dry-run")
    entries = [line.split(": ")[0] for line in printed.splitlines()]
    assert set(entries) == {entry(variant, c.use) for variant in ("decode", "prefill") for c in REAL.values()}
    assert len(set(entries)) == len(entries)


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "mosaic_tpu"])
def test_every_real_implementation_has_candidates_and_its_own_choice_first(implementation):
    tasks = tune_kernels.plan([implementation], "page64/bfloat16", short=False)
    assert {t["variant"] for t in tasks} == {"decode", "prefill"}
    for task in tasks:
        default, _ = tune_kernels.search_of(implementation, task["variant"])
        assert len(task["candidates"]) > 1, task["id"]
        assert [c for c in task["candidates"] if c == task["candidates"][0]] == [task["candidates"][0]]
        assert tune_kernels.case_of(task).use.cache_dtype == "bfloat16"
        assert callable(default)


def part(size: int, milliseconds: float) -> dict[str, object]:
    return {"blocks": {"size": size}, "ms": milliseconds}


def test_the_bodys_own_choice_stays_unless_beaten_clearly():
    findings = tune_kernels.Findings(
        by_entry={
            "noise": [part(1, 1.0), part(2, 0.995)],
            "beaten": [part(1, 1.0), part(2, 0.9)],
            "default failed": [{"blocks": {"size": 1}, "failure": "x"}, part(2, 3.0)],
            "all failed": [{"blocks": {"size": 1}, "failure": "x"}],
        }
    )
    assert findings.entries()[0] == {"noise": {"size": 1}, "beaten": {"size": 2}, "default failed": {"size": 2}}


def test_entries_of_earlier_runs_are_kept_with_their_commit(tmp_path):
    device = Device(backend="gpu", kind="NVIDIA H200", compute_capability=(9, 0))
    for at, name in (("one", "a"), ("two", "b")):
        findings = tune_kernels.Findings(by_entry={name: [part(1, 1.0)]}, device=device)
        path = tune_kernels.write_table(tmp_path, findings, at)
    assert path is not None and path.name == "nvidia_h200.json"
    found = json.loads(path.read_text())
    assert set(found["entries"]) == {"a", "b"} and found["commit"] == "two"
    assert [found["measured"][name]["commit"] for name in "ab"] == ["one", "two"]
    assert tune_kernels.write_table(tmp_path, tune_kernels.Findings(by_entry={}, device=device), "x") is None


def test_counted_sizes_are_kept_beside_measured_ones_and_only_where_they_beat_the_heuristic(tmp_path):
    parts = [{"blocks": {"size": n}, "us": us} for n, us in ((1, 100.0), (2, 97.0), (3, None), (4, 98.5))]
    beaten = tuning_by_count.chosen(parts)
    assert (beaten["blocks"], beaten["us"], beaten["default_us"]) == ({"size": 2}, 97.0, 100.0)
    assert (beaten["tried"], beaten["right"]) == (4, 3)
    assert tuning_by_count.chosen([parts[0], parts[3]])["blocks"] is None, "1.5 % is not clear"
    device = Device(backend="tpu", kind="TPU v6 lite")
    measured = tune_kernels.Findings(by_entry={"a": [part(1, 1.0)]}, device=device)
    path = tmp_path / file_name(device.kind)
    tuning_by_count.keep(path, device.kind, "b", beaten | {"commit": "one", "compiler": "libtpu 1.2"})
    assert tune_kernels.write_table(tmp_path, measured, "two") == path
    tuning_by_count.keep(path, device.kind, "c", beaten | {"commit": "three", "compiler": "libtpu 1.2"})
    table = read_table(path.read_text())
    assert table.entries == {"a": {"size": 1}} and table.commit == "two"
    assert table.counted == {"b": {"size": 2}, "c": {"size": 2}}


def test_after_a_crash_the_rest_is_tried(capsys):
    findings = tune_kernels.Findings(by_entry={})
    task = {"id": "e", "candidates": [{"size": n} for n in (1, 2, 3)]}
    parts = [{"trying": {"size": 1}}, part(1, 1.0), {"trying": {"size": 2}}]
    (rest,) = findings.keep(task, {"failure": "died", "crashed": True, "parts": parts})
    assert rest["candidates"] == [{"size": 3}]
    assert findings.keep(rest, {"failure": "died at start", "crashed": True}) == []
    assert "died" in capsys.readouterr().out
