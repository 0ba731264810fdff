"""scripts/device_check.py on this CPU: the whole flow with short cases, and kernels that crash, hang and are wrong."""

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import device_check
import kernel_peers
import numpy as np
import pytest
import tpu_peers
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ref_ragged_paged_attention
from kernel_peers import PEER_TOLERANCE, Dense, NoPeerError
from kernel_results import GIVE_UP, Results, summary
from kernel_runs import Turns, find_case, prepare

from jaxserve.kernels.cases import CASES, REAL
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.values.chips import CHIPS

ROOT = Path(__file__).parents[2]
SMALLEST = "llama3-8b-tp8/decode64/64/bfloat16"
DECODE, PREFILL = (f"llama3-8b-tp1/{mix}/64/bfloat16" for mix in ("decode64", "prefill8k"))


def command(*args: object) -> tuple[int, str]:
    """Runs the script; (exit status, what it printed)."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/device_check.py"), "--backend", "cpu", "--workers", "1", *map(str, args)],
        env=os.environ | {"PYTHONPATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


@pytest.mark.slow
def test_right_bodies_are_checked_timed_and_compared(tmp_path):
    record = tmp_path / "cpu.json"
    status, printed = command("--json", record, "--only", f"{PREFILL}/small")  # the peers want rows of one length
    assert status == 0, printed
    found = json.loads(record.read_text())
    assert found["about"]["device"]["backend"] == "cpu" and "jax" in found["about"]
    results = found["results"]
    assert results["unreached"] == []
    assert min(results["ceilings"][key] for key in ("copy_gb_per_s", "read_gb_per_s", "matmul_tflop_per_s")) > 0
    (check,) = results["checks"]
    assert check["passed"] and check["repeats_alike"] and check["error"] <= check["tolerance"]
    assert check["ms"] > 0 and 0 < check["share_of_matmul"] < 1.5
    assert check["peers_ms"]["jax-xla"] > 0
    torch = next(p for p in results["peers"] if p["peer"] == "torch")
    assert "ms" in torch or "refused" in torch
    (write,) = results["writes"]
    assert write["passed"] and write["ms"] > 0
    targets = {(t["case"], t["wanted"]): t["reached"] for t in results["targets"]}
    assert targets[PREFILL, 0.65] is None, "the xla implementation must not reach a target"
    assert PREFILL in printed and "not reached: 0" in printed


@pytest.mark.slow
def test_bodies_that_misbehave_lose_only_their_own_case(tmp_path):
    record = tmp_path / "cpu.json"
    names = [f"fake_implementations:{name}" for name in ("CRASH", "HANG", "WRONG", "LOSSY")]
    status, printed = command(
        *("--json", record, "--implementations", *names, "--patience-s", 6),
        *(
            "--only",
            f"check/{SMALLEST}/small/fake_implementations:(CRASH|HANG|WRONG)|write/{DECODE}/small/.*(LOSSY|WRONG)",
        ),
    )
    assert status == 1, printed
    results = json.loads(record.read_text())["results"]
    checks = {c["implementation"].partition(":")[2]: c for c in results["checks"]}
    assert "exit status 7" in checks["CRASH"]["failure"] and "stage 'compile'" in checks["CRASH"]["failure"]
    assert "more than 6 s in stage 'run'" in checks["HANG"]["failure"]
    assert not checks["WRONG"]["passed"] and checks["WRONG"]["error"] > checks["WRONG"]["tolerance"]
    writes = {w["implementation"].partition(":")[2]: w["passed"] for w in results["writes"]}
    assert writes == {"WRONG": True, "LOSSY": False}
    lines = [json.loads(line) for line in record.with_suffix(".jsonl").read_text().splitlines()]
    assert len(lines) == 6 and {r["kind"] for r in lines} == {"rates", "check", "write"}

    status, printed = command(
        "--json", record, "--resume", "--implementations", names[0], "--only", f"check/{SMALLEST}/small/"
    )
    assert status == 1 and len(json.loads(record.read_text())["results"]["checks"]) == 3, printed


class Stages:
    """Stands in for a channel."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def stage(self, name: str) -> None:
        self.names.append(name)


def test_products_with_codes_are_checked_and_timed(tmp_path, monkeypatch):
    real = device_check.CODED_MATMUL_CASES["llama3.1-8b/down/64/int8"]
    small = dataclasses.replace(real, rows=3, out_shape=(64,), in_shape=(128,), dtype="float32")
    monkeypatch.setitem(device_check.CODED_MATMUL_CASES, "a/b/3/int8", small)
    channel, worker = Stages(), device_check.Worker(Turns(tmp_path))
    task = {"kind": "product", "case": "a/b/3/int8", "implementation": "xla"}
    found = worker.handle(task, channel)  # pyright: ignore[reportArgumentType]
    assert found["passed"] and found["error"] <= found["tolerance"] and found["ms"] > 0
    assert "wait" in channel.names and channel.names[-1] == "run"
    monkeypatch.setattr(device_check, "matmul_error", lambda *_: 1.0)
    assert not worker.handle(task, channel)["passed"]  # pyright: ignore[reportArgumentType]
    refused = worker.handle(task | {"implementation": "mosaic_gpu"}, channel)  # pyright: ignore[reportArgumentType]
    assert "Hopper" in refused["refused"]


def test_a_gpu_multiplies_codes_of_each_kind_beside_xla():
    tasks = device_check.plan("gpu", device_check.IMPLEMENTATIONS["gpu"], "^product/")
    named = {(task["case"].rpartition("/")[2], task["implementation"]) for task in tasks if task["kind"] == "product"}
    assert named == {(c, of) for c in ("int4-g128", "int8", "int8-a8", "fp8") for of in ("mosaic_gpu", "xla")}
    assert not any(t["kind"] == "product" for t in device_check.plan("tpu", device_check.IMPLEMENTATIONS["tpu"], ""))


def test_a_budget_that_is_too_short_lists_what_was_not_reached(tmp_path):
    record = tmp_path / "cpu.json"
    status, printed = command("--json", record, "--budget-s", 1, "--only", f"check/{SMALLEST}")
    results = json.loads(record.read_text())["results"]
    assert status == 0 and results["checks"] == []
    assert f"check/{SMALLEST}/small/xla" in results["unreached"] and "UNPROVEN" in printed


def test_plan_has_every_case_with_every_implementation_and_the_targets_first():
    tasks = device_check.plan("gpu", ("mosaic_gpu", "xla"), "")
    checks = {(t["case"], t["implementation"]) for t in tasks if t["kind"] == "check"}
    quick = [name for name in CASES if name.endswith("/bfloat16")]
    assert checks >= {(name, implementation) for name in (*REAL, *quick) for implementation in ("mosaic_gpu", "xla")}
    ids = [t["id"] for t in tasks]
    assert len(set(ids)) == len(ids) and ids[0] == "rates"
    whole = [t["case"] for t in tasks if t["kind"] == "check" and not t["case"].endswith("/small")]
    assert whole[:2] == [DECODE, PREFILL]
    own = whole[: len(set(whole))]
    assert own.index("qwen3-8b/busy/64/bfloat16") > own.index("phi3-mini/busy/64/bfloat16"), "the same as llama3-8b-tp1"
    peers = {t["peer"] for t in tasks if t["kind"] == "peer" and t["case"] == DECODE}
    assert peers == {"jax-stock", "jax-cudnn", "torch"}


def test_on_a_tpu_every_case_is_checked_by_one_process_beside_the_ragged_kernel_of_jax():
    tasks = device_check.plan("tpu", device_check.IMPLEMENTATIONS["tpu"], "")
    checks = {t["case"] for t in tasks if t["kind"] == "check" and t["implementation"] == "mosaic_tpu"}
    assert checks >= set(REAL)
    assert not any(t.get("process") for t in tasks) and device_check.WORKERS["tpu"] == 1, "a TPU has one owner"
    peers = {(t["case"], t["peer"]) for t in tasks if t["kind"] == "peer"}
    assert {peer for _, peer in peers} == {"jax-ragged"}
    assert {(name, "jax-ragged") for name in (DECODE, PREFILL, "llama3-8b-tp1/busy/64/bfloat16")} <= peers


@pytest.mark.slow
def test_the_ragged_kernel_of_jax_is_held_against_float64(monkeypatch):
    """JAX's own reference of that kernel in its place: a CPU cannot run it, nor can the interpreter of TPUs."""
    own = tpu_peers.tpu_peers

    def peers(case, chip, folder, scale):
        peer = next(peer for peer in own(case, chip, folder) if peer.by == tpu_peers.RAGGED)
        known = peer.args[2:]  # its loop over the rows needs their lengths when it is compiled
        reference = lambda q, pages, *unknown: ref_ragged_paged_attention(q, pages, *known, sm_scale=scale)  # noqa: E731
        return [dataclasses.replace(peer, function=reference)]

    case = find_case("llama3-8b-tp8/busy/64/bfloat16/small")
    monkeypatch.setattr(kernel_peers, "_tpu_at_hand", lambda: CHIPS["v5e"])
    monkeypatch.setattr(kernel_peers, "seconds_per_call", lambda launch, calls: 1e-3)
    for scale, right in ((case.spec.scale, True), (2 * case.spec.scale, False)):
        monkeypatch.setattr(tpu_peers, "tpu_peers", functools.partial(peers, scale=scale))
        found = list(kernel_peers.time_ragged(case, contextlib.nullcontext, lambda stage: None))
        assert found and all((f["error"] <= PEER_TOLERANCE) is right and f["ms"] == 1.0 for f in found), found


def test_what_the_ragged_kernel_cannot_run_is_refused(monkeypatch):
    monkeypatch.setattr(kernel_peers, "_tpu_at_hand", lambda: CHIPS["v5e"])
    with pytest.raises(NoPeerError, match="heads of 128"):
        list(kernel_peers.time_ragged(REAL["gpt-oss/decode64/64/bfloat16"], contextlib.nullcontext, lambda stage: None))


def test_the_counted_time_of_a_tpu_stands_beside_the_measured_one(tmp_path):
    results = Results(tmp_path / "lines.jsonl", resume=False)
    tasks = {t["id"]: t for t in device_check.plan("tpu", ("mosaic_tpu", "xla"), "")}
    results.add(tasks["rates"], {"device": {"kind": "TPU v5 lite"}, "copy_gb_per_s": 700.0})
    for implementation in ("mosaic_tpu", "xla"):
        measured = {"error": 1e-3, "passed": True, "ms": 2.0, "gb_per_s": 500.0}
        results.add(tasks[f"check/{DECODE}/{implementation}"], measured)
    ledger = tmp_path / "ledger.json"
    counts = [("v5e", "jaxserve", 1600.0), ("v6e", "jaxserve", 700.0), ("v5e", "jax ragged_paged_attention", 1500.0)]
    rows = [{"case": DECODE, "chip": chip, "by": by, "us": us} for chip, by, us in counts]
    ledger.write_text(json.dumps({"results": rows}))
    ours, plain = summary(results, [], ledger)["checks"]
    assert (ours["counted_ms"], ours["over_counted"]) == (1.6, 1.25) and "counted_ms" not in plain


def test_the_same_kind_of_case_is_given_up_after_three_crashes(tmp_path):
    results = Results(tmp_path / "lines.jsonl", resume=False)
    tasks = [t for t in device_check.plan("gpu", ("a", "b"), "check/.*/busy/") if t["kind"] == "check"]
    own = [t for t in tasks if t["implementation"] == "a" and not t["case"].endswith("/small")]
    for task in own[:GIVE_UP]:
        assert results.skip(task) is None
        assert results.add(task, {"failure": "killed", "crashed": True, "parts": []}) == []
    assert "busy" in results.skip(own[GIVE_UP])
    assert all(results.skip(t) is None for t in tasks if t["implementation"] == "b")


def test_without_a_device_nothing_else_is_started(tmp_path):
    results = Results(tmp_path / "lines.jsonl", resume=False)
    rates, *others = device_check.plan("gpu", ("a",), "")
    assert results.skip(others[0]) is None
    results.add(rates, {"failure": "x\nno CUDA", "stage": "start"})
    assert all(results.skip(task) == "no device: no CUDA" for task in others)


def test_running_out_of_device_memory_is_tried_once_more(tmp_path):
    results = Results(tmp_path / "lines.jsonl", resume=False)
    task = device_check.plan("gpu", ("a",), "check/llama3-8b-tp1/busy/64/bfloat16/a")[-1]
    (again,) = results.add(task, {"failure": "RESOURCE_EXHAUSTED: Out of memory"})
    assert results.add(again, {"failure": "RESOURCE_EXHAUSTED: Out of memory"}) == []
    assert "RESOURCE_EXHAUSTED" in results.found[task["id"]]["failure"]


@pytest.mark.slow
def test_written_right_sees_a_number_in_a_wrong_page():
    case = find_case("demo/short/16/int8")
    inputs = prepare(case, XLA_ATTENTION)
    empty = XLA_ATTENTION.init_cache(
        inputs.cache.keys.shape[0] - 1, case.page_size, case.spec.num_kv_heads, case.spec.head_dim, case.cache_dtype
    )
    cache = XLA_ATTENTION.write(inputs.k, inputs.v, empty, inputs.batch, inputs.scales)
    leaves = [np.array(leaf) for leaf in (cache.keys, cache.values)]
    assert device_check.written_right(case, inputs, leaves)
    page = int(inputs.batch.block_tables[0, 0])
    leaves[1][[page, page - 1 or page + 1]] = leaves[1][[page - 1 or page + 1, page]]
    assert not device_check.written_right(case, inputs, leaves)


def test_dense_peers_get_the_same_work():
    decode = Dense(REAL["mistral-7b/decode64/64/bfloat16"])
    assert (decode.rows, decode.q_len, decode.kv_len, decode.window) == (64, 1, 4096, None)
    prefill = Dense(REAL["mistral-7b/prefill8k/64/bfloat16"])
    assert (prefill.rows, prefill.q_len, prefill.kv_len, prefill.window) == (1, 8192, 8192, 4096)
    short = Dense(REAL["gemma2-9b/row128k/64/bfloat16"])
    assert short.kv_len == 4096, "a decode row under a window reads the window alone"
    for name in (
        "llama3-8b-tp1/busy/64/bfloat16",
        "gpt-oss/decode64/64/bfloat16",
        "mpt-7b-alibi/prefill8k/64/bfloat16",
    ):
        with pytest.raises(NoPeerError):
            Dense(REAL[name])


def test_the_script_needs_nothing_that_a_bare_gpu_machine_lacks():
    """It has JAX, NumPy and rich, but neither pydantic nor typer."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('pydantic', 'typer', 'orbax', 'sentencepiece', 'tokenizers')));"
        "import device_check, tune_kernels, kernel_runs;"
        "from jaxserve.kernels.dispatch import Device;"
        "h200 = Device(backend='gpu', kind='NVIDIA H200', compute_capability=(9, 0));"
        "print(kernel_runs.find_implementation('mosaic_gpu', h200).name)"
    )
    path = os.pathsep.join([str(ROOT), str(ROOT / "scripts")])
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "mosaic_gpu", done.stderr


def test_targets_count_right_bodies_alone_and_name_what_was_missed(tmp_path):
    results = Results(tmp_path / "lines.jsonl", resume=False)
    tasks = {t["id"]: t for t in device_check.plan("gpu", ("a", "xla"), "")}
    results.add(tasks["rates"], {"copy_gb_per_s": 4000.0, "matmul_tflop_per_s": 800.0})
    right = {"error": 1e-3, "passed": True}
    results.add(tasks[f"check/{DECODE}/a"], right | {"ms": 0.3, "gb_per_s": 3600.0})
    results.add(tasks[f"peer/{DECODE}/torch"], {"ms": 0.28})
    results.add(tasks[f"peer/{DECODE}/jax-cudnn"], {"refused": "no"})
    results.add(
        tasks[f"check/{PREFILL}/a"], right | {"passed": False, "ms": 0.1, "gb_per_s": 1.0, "tflop_per_s": 790.0}
    )
    results.add(tasks[f"check/{PREFILL}/xla"], right | {"ms": 0.1, "gb_per_s": 1.0, "tflop_per_s": 790.0})
    found = summary(results, [tasks[f"peer/{PREFILL}/torch"]])
    reached = [(t["case"], t["wanted"], t["reached"]) for t in found["targets"]]
    assert reached == [(DECODE, 0.85, True), (DECODE, 1.0, False), (PREFILL, 0.65, None), (PREFILL, 1.0, None)]
    assert found["checks"][0]["share_of_copy"] == pytest.approx(0.9)
    assert found["unreached"] == [f"peer/{PREFILL}/torch"]


def test_decode_is_timed_by_bytes_and_prefill_by_products():
    timed = device_check._timed(REAL[DECODE], 1e-3)
    assert timed["gb_per_s"] == pytest.approx(64 * 4096 * 8 * 128 * 2 * 2 / 1e6) and "tflop_per_s" not in timed
    timed = device_check._timed(REAL[PREFILL], 1e-3)
    assert timed["tflop_per_s"] == pytest.approx(4 * 8192 * 8193 / 2 * 32 * 128 / 1e9)
