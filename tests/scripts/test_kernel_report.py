"""scripts/kernel_report.py: the reading of what compilers print, and tables that claim nothing without a record."""

import dataclasses
import importlib.util
import json
import shutil
import subprocess
from argparse import Namespace
from pathlib import Path

import expert_steps
import jax
import kernel_ledger
import kernel_report
import pytest
import step_ledger
from kernel_builds import capture, compile_for, interpret, kernels_of
from kernel_runs import find_case, find_implementation, write_between

from jaxserve.kernels.cases import REAL
from jaxserve.lab.compiled.attention import compile_attend
from jaxserve.lab.compiled.topology import device_of_topology

ROOT = Path(__file__).parents[2]
DECODE = "llama3-8b-tp8/decode64/64/bfloat16"
needs_gpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="needs the extra 'aot' to compile for a GPU"
)

# Of ptxas 13.0 through Mosaic GPU of JAX 0.10.2, shortened: two kernels of one name, the second one spilling.
PRINTED = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for kernel_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 95 registers, used 16 barriers, 1 bytes smem
  %4 = call ptr @mosaic_gpu_get_function(ptr %3, ptr @kernel_mosaic_gpu_kernel_name, i32 109648, i32 1)
  call void @mosaic_gpu_launch_kernel(ptr %0, i32 64, i32 2, i32 1, i32 0, i32 0, i32 0, i32 256, i32 1, i32 1, \
i32 109648, ptr %1, ptr %379)
ptxas info    : Compiling entry function 'kernel_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for kernel_mosaic_gpu_kernel
    144 bytes stack frame, 136 bytes spill stores, 128 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers
  %4 = call ptr @mosaic_gpu_get_function(ptr %3, ptr @kernel_mosaic_gpu_kernel_name, i32 4096, i32 1)
"""


def test_kernels_are_read_from_what_the_compiler_prints():
    first, second = kernels_of(PRINTED)
    assert first == {
        "kernel": "kernel_mosaic_gpu_kernel",
        "stack_bytes": 0,
        "spill_bytes": 0,
        "registers": 95,
        "shared_bytes": 109648,
        "threads": 256,
    }
    assert second == {
        "kernel": "kernel_mosaic_gpu_kernel#2",
        "stack_bytes": 144,
        "spill_bytes": 264,
        "registers": 255,
        "shared_bytes": 4096,
    }


def test_products_that_wait_for_each_other_are_reported():
    note = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in the function 'kernel_mosaic_gpu_kernel'\n"
    )
    assert all(kernel["serialized"] for kernel in kernels_of(note + PRINTED))
    assert not any(kernel.get("serialized") for kernel in kernels_of(note.replace("kernel'", "other'") + PRINTED))


def test_capture_hears_python_and_other_programs_of_the_process(capfd):
    with capture() as printed:
        print("from Python", flush=True)
        subprocess.run(["echo", "from elsewhere"], check=True)
    assert printed == ["from Python\nfrom elsewhere\n"]
    print("after")
    assert capfd.readouterr().out == "after\n"


@pytest.mark.slow
@needs_gpu_compiler
def test_kernels_for_an_h200_are_reported_and_leave_a_multiprocessor_to_two_programs(monkeypatch):
    """Where shared memory has room for two programs, so must the registers: one computes while the other waits. The
    step has 52 tokens, which copies do not divide evenly."""
    for name, value in kernel_report.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    # A kernel that this process has compiled before is not reported on: take a shape that no other test has.
    case = dataclasses.replace(REAL["llama3-8b-tp4/busy/32/float8_e5m2"], rows=((1, 4096), (1, 777), (46, 300)))
    found = compile_for(case, "mosaic_gpu", "h200:1")
    assert len(found["kernels"]) == 4, found
    for kernel in found["kernels"]:
        assert 16 <= kernel["registers"] <= 255 and kernel["threads"] % 128 == 0, kernel
        assert 0 < kernel["shared_bytes"] <= 232448, kernel
        programs = 2 if 2 * (kernel["shared_bytes"] + 1024) <= 233472 else 1
        # JAX 0.11 gives decode of float8 139 registers: one program has the place of two.
        assert programs * kernel["registers"] * kernel["threads"] <= 65536 or jax.__version_info__ >= (0, 11), kernel
        assert kernel["spill_bytes"] == 0 and not kernel.get("serialized"), kernel


@needs_gpu_compiler
def test_several_layers_in_one_program_copy_no_cache():
    """What device_check times is attention, not a copy that XLA put between the layers."""
    case = REAL[DECODE]
    pages = 64 * 64 + 3 + 1
    implementation = find_implementation("mosaic_gpu", device_of_topology("h200:1"))
    hlo = compile_attend(case, implementation, "h200:1", layers=2)[0].as_text()
    copies = [line for line in hlo.splitlines() if f"[{pages}," in line and ("copy(" in line or "copy-start(" in line)]
    assert f"[{pages}," in hlo and not copies, copies


def test_a_short_case_is_interpreted_and_a_refusal_is_a_fact():
    found = interpret(find_case(f"{DECODE}/small"), "xla")
    assert found["error"] < 1e-5 and found["races"] is False
    refused = interpret(find_case("llama3-8b-tp1/decode64/24/bfloat16/small"), "mosaic_gpu")
    assert "page size 24" in refused["refused"]


def test_programs_that_differ_in_name_only_are_asked_for_once():
    args = Namespace(implementations=["mosaic_gpu"], only="", compile=True, interpret=False, missing=False)
    tasks = kernel_report.plan(args, {})
    of = [name for task in tasks for name in task["of"]]
    assert sorted(of) == sorted(REAL)
    assert dataclasses.replace(REAL["qwen3-8b/busy/64/bfloat16"], name="") == dataclasses.replace(
        REAL["llama3-8b-tp1/busy/64/bfloat16"], name=""
    )
    assert len(tasks) < len(REAL)


FACTS: kernel_report.Facts = {
    DECODE: {
        "mosaic_gpu": {
            "compiled h200": {
                "seconds": 3.2,
                "kernels": [{"kernel": "k", "registers": 95, "threads": 256, "shared_bytes": 108544, "spill_bytes": 8}],
            },
            "interpreted": {"error": 1.4e-3, "races": True, "seconds": 3},
        },
        "mosaic_tpu": {"compiled v5e": {"refused": "too wide"}, "compiled v6e": {"failure": "Mosaic said no"}},
        "xla": {"interpreted": {"error": 3e-3, "races": False, "seconds": 1}},
    }
}


def test_only_what_is_missing_is_asked_again():
    args = Namespace(
        implementations=["mosaic_tpu", "mosaic_gpu"], only=f"^{DECODE} ", compile=True, interpret=True, missing=True
    )
    asked = {(task["implementation"], task["fact"]) for task in kernel_report.plan(args, FACTS)}
    assert asked == {("mosaic_tpu", "interpreted"), ("mosaic_tpu", "compiled v6e")}, "v6e failed"


def rows(facts: kernel_report.Facts, measured: kernel_report.Measured) -> dict[str, list[str]]:
    lines = [line for line in kernel_report.table(facts, measured) if line.startswith("| ")]
    return {line.split(" | ")[0].removeprefix("| "): line.removesuffix(" |").split(" | ")[1:] for line in lines}


def test_without_facts_everything_is_unproven():
    found = rows({}, {})
    assert set(found) == {"case", *REAL}
    assert {cell for name in REAL for cell in found[name]} == {"unproven"}


def test_cells_say_what_is_known_and_what_is_wrong():
    tpu_compiled, tpu_run, tpu_measured, gpu_compiled, gpu_run, gpu_measured, *batched, xla_run, xla_measured = rows(
        FACTS, {(DECODE, "mosaic_gpu"): {"NVIDIA H200": {"passed": True}}}
    )[DECODE]
    assert tpu_compiled == "v5e: refused (1)<br>v6e: **failed**" and tpu_run == "unproven" and tpu_measured == "-"
    assert gpu_compiled == "h200: 3 s; 95 registers x 256, 106 KiB, **8 B spilled**"
    assert gpu_run == "**1.4e-03, race**" and gpu_measured == "NVIDIA H200: right"
    assert batched == ["unproven"] * 3
    assert xla_run == "**3.0e-03**" and xla_measured == "unproven"
    assert list(kernel_report.table(FACTS, {}))[-1] == "Refused: (1) too wide."


def summed_up(facts: kernel_report.Facts, measured: kernel_report.Measured) -> dict[tuple[str, str], list[str]]:
    lines = list(kernel_report.summary(facts, measured))[2:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return {(implementation.strip("`"), proof): counts for implementation, proof, *counts in cells}


def test_the_summary_counts_the_cases_of_each_proof():
    others = str(len(REAL) - 1)
    measured = {
        (DECODE, "mosaic_gpu"): {"NVIDIA H200": {"passed": True, "error": 1e-3, "ms": 0.25, "share_of_copy": 0.9}},
        (DECODE, "xla"): {"NVIDIA H200": {"failure": "died"}, "NVIDIA H100": {"skipped": "no time"}},
    }
    found = summed_up(FACTS, measured)
    assert found == {
        ("mosaic_tpu", "compiled for v5e"): ["0", "1", "0", others, "-"],
        ("mosaic_tpu", "compiled for v6e"): ["0", "0", "**1**", others, "-"],
        ("mosaic_tpu", "interpreted on a CPU"): ["0", "0", "0", str(len(REAL)), "-"],
        ("mosaic_tpu", "measured on a GPU or TPU"): ["0", "0", "0", str(len(REAL)), "-"],
        ("mosaic_gpu", "compiled for h200"): ["0", "0", "**1**", others, "-"],
        ("mosaic_gpu", "interpreted on a CPU"): ["0", "0", "**1**", others, "1.4e-03"],
        ("mosaic_gpu", "measured on NVIDIA H200"): ["1", "0", "0", others, "1.0e-03"],
        **{
            ("xla_batched", proof): ["0", "0", "0", str(len(REAL)), "-"]
            for proof in (
                *(f"compiled for {chip}" for chip in ("a100", "l40s", "b200")),
                "run on a CPU",
                "measured on a GPU or TPU",
            )
        },
        ("xla", "run on a CPU"): ["0", "0", "**1**", others, "3.0e-03"],
        ("xla", "measured on NVIDIA H100"): ["0", "0", "0", str(len(REAL)), "-"],
        ("xla", "measured on NVIDIA H200"): ["0", "0", "**1**", others, "-"],
    }


def test_measurements_come_from_records(tmp_path):
    checks = [
        {
            "case": DECODE,
            "implementation": "mosaic_gpu",
            "passed": True,
            "error": 1e-3,
            "ms": 0.25,
            "share_of_copy": 0.9,
        },
        {"case": f"{DECODE}/small", "implementation": "mosaic_gpu", "passed": True, "error": 1e-3},
        {"case": DECODE, "implementation": "xla", "failure": "died"},
    ]
    record = {"about": {"device": {"kind": "NVIDIA H200"}}, "results": {"checks": checks}}
    (tmp_path / "device_check_h200.json").write_text(json.dumps(record))
    measured = kernel_report.measurements(tmp_path)
    cells = rows({}, measured)[DECODE]
    assert cells[5] == "NVIDIA H200: right, 0.25 ms, 90% of copy bandwidth"
    assert cells[-1] == "NVIDIA H200: **failed**"
    assert measured.keys() == {(DECODE, "mosaic_gpu"), (DECODE, "xla")}, "short forms are no measurement"


def test_the_page_in_the_repository_is_what_the_script_writes(tmp_path):
    page = tmp_path / "kernels.md"
    shutil.copy(ROOT / "docs/kernels.md", page)
    facts = json.loads((ROOT / "benchmarks/kernels.json").read_text())["results"]
    lines = list(kernel_report.summary(facts, kernel_report.measurements(ROOT / "benchmarks")))
    write_between(page, kernel_report.BEGIN, kernel_report.END, lines)
    assert page.read_text() == (ROOT / "docs/kernels.md").read_text(), "run scripts/kernel_report.py"


@pytest.mark.parametrize(
    ("script", "name"), [(kernel_ledger, "kernels"), (step_ledger, "planning"), (expert_steps, "planning")]
)
def test_the_tables_of_the_ledgers_are_those_of_their_records(script, name, tmp_path):
    page = ROOT / f"docs/{name}.md"
    copied = Path(shutil.copy(page, tmp_path))
    write_between(copied, script.BEGIN, script.END, script.table(json.loads(script.RECORD.read_text())["results"]))
    assert copied.read_text() == page.read_text(), f"run scripts/{script.__name__}.py --table"


def test_a_page_without_markers_is_refused(tmp_path):
    page = tmp_path / "kernels.md"
    page.write_text("# Kernels\n")
    with pytest.raises(AssertionError, match="marker"):
        write_between(page, kernel_report.BEGIN, kernel_report.END, [])
