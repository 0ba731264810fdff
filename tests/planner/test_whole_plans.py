"""Whole plans: steps compiled for devices that are not here, and what is read from them."""

import dataclasses
import importlib.metadata
import json
from typing import Any

import jax
import pytest
from plan_parts import CONFIGS, shipped, small_config, write_shape

from jaxserve.cli import main
from jaxserve.lab.compiled.collectives import Collective
from jaxserve.lab.compiled.topology import absent_devices
from jaxserve.lab.planner import PlanOptions, make_plan
from jaxserve.lab.planner.count import batch_of
from jaxserve.lab.planner.predict import Roofline
from jaxserve.lab.planner.report import StepFacts
from jaxserve.lab.planner.steps import few_layers
from jaxserve.lab.roofline import Assumptions, Work
from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.loading import decoder_config
from jaxserve.sched.plan import Bucket, Limits, PageGroup
from jaxserve.values.chips import parse_topology

DECODE = ("decode 16x16",)
LAYERS = 3


def tensor_sum_count(step) -> int:
    return sum(c.count for c in step.collectives if c.kind == "all-reduce")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "tensor", "kernels"),
    [
        ("v5e:2x2", 4, {"paged_kv_write": LAYERS, "paged_attention_decode": LAYERS}),
        ("h200:2", 2, {"write_tokens": LAYERS, "decode_splits": LAYERS, "combine_splits": LAYERS}),
    ],
)
def test_arithmetic_agrees_with_the_compiler_and_the_kernels_are_inside(tmp_path, topology, tensor, kernels):
    path = write_shape(tmp_path / "small", num_hidden_layers=LAYERS)
    config = small_config(path, **{"parallel.tensor": tensor})
    plan = make_plan(config, topology, PlanOptions(buckets=DECODE, exact=True, count=False))
    (step,) = plan.steps
    assert plan.fits and step.compiled_layers == (LAYERS,)
    assert dict(step.kernels) == kernels
    assert step.predicted_argument_bytes == pytest.approx(step.argument_bytes, rel=0.02)
    held = plan.memory.weight_bytes + plan.memory.kv_bytes
    assert held == pytest.approx(step.argument_bytes, rel=0.02), "row state and inputs are small"
    assert plan.memory.temporaries_compiled and plan.memory.temporary_bytes == step.temporary_bytes > 0
    if tensor > 1:
        assert 2 * LAYERS < tensor_sum_count(step) < 2 * LAYERS + 40, "two sums a layer, and those of sampling"
        assert all(c.group == tensor for c in step.collectives)
    assert (step.flops is None) == topology.startswith("h")


@pytest.mark.slow
def test_few_layers_tell_all(tmp_path):
    """The same plan from every layer, and extended from programs of two and four."""
    config = small_config(write_shape(tmp_path / "small"), **{"cache.num_pages": 50})
    exact, extended = (make_plan(config, "h200:1", PlanOptions(buckets=DECODE, exact=exact)) for exact in (True, False))
    (whole,), (line,) = exact.steps, extended.steps
    assert line.compiled_layers == (2, 4) and any(
        "compiled with 2 and 4 layers, extended to 8" in n for n in extended.notes
    )
    assert dict(line.kernels) == dict(whole.kernels)
    assert line.argument_bytes == pytest.approx(whole.argument_bytes, rel=1e-3)
    assert line.predicted_argument_bytes == whole.predicted_argument_bytes
    assert line.moved_bytes == pytest.approx(whole.moved_bytes, rel=0.05)
    assert extended.memory.weight_bytes == exact.memory.weight_bytes
    assert extended.memory.kv_bytes == exact.memory.kv_bytes


@pytest.mark.slow
def test_no_time_is_predicted_where_no_link_is_known(tmp_path):
    plain = {"kernels.paged_attention": "xla", "kernels.matmul": "xla"}  # Numba would compile for half a minute
    config = small_config(write_shape(tmp_path / "small", num_hidden_layers=1), **plain, **{"cache.num_pages": 50})
    plan = make_plan(config, "cpu:2", PlanOptions(tensor=2, buckets=DECODE, count=False))
    assert plan.steps[0].collectives and plan.predictions == ()
    assert any("nothing is known of the links between devices of cpu:2" in note for note in plan.notes)


def decoder(tmp_path, windows) -> DecoderConfig:
    model = decoder_config(read_checkpoint(write_shape(tmp_path / "small")))[1]
    return dataclasses.replace(model, layers=tuple(dataclasses.replace(model.layers[0], window=w) for w in windows))


def test_layers_of_different_windows_are_extended_by_kind(tmp_path):
    alike = few_layers(decoder(tmp_path, [None] * 80))
    assert [m.num_layers for m in alike] == [2, 4]
    mixed = few_layers(decoder(tmp_path, [None, 512, 512] * 20))
    assert [m.windows for m in mixed] == [
        (None, None, 512, 512),
        (None, None, 512, 512, None, None),
        (None, None, 512, 512, 512, 512),
    ]
    shallow, lonely = decoder(tmp_path, [None] * 6), decoder(tmp_path, [None] * 70 + [512])
    assert few_layers(shallow) == [shallow] and few_layers(lonely) == [lonely]


@pytest.mark.slow
def test_steps_that_need_more_than_is_left_do_not_fit(tmp_path):
    """Pages may take all that the estimate of the temporaries leaves, and more: the compiled step has the last word."""
    path = write_shape(tmp_path / "small", num_hidden_layers=1)
    fitting = make_plan(small_config(path), "h100:1", PlanOptions(compile=False))
    total, memory = fitting.memory.total_bytes, fitting.memory
    most = (total - memory.weight_bytes - memory.state_bytes) // memory.page_bytes - 1
    plan = make_plan(small_config(path, **{"cache.num_pages": most}), "h100:1", PlanOptions(buckets=DECODE))
    assert not plan.fits and "of temporaries" in plan.problem and plan.memory.headroom_bytes < 0
    assert plan.steps and plan.predictions == ()
    assert all(step.counted is None for step in plan.steps)
    assert "no guess of a step's time by count: only the compiler for TPUs tells the cycles" in " ".join(plan.notes)


def test_seconds_follow_from_bytes_and_flops_by_hand(tmp_path):
    model = decoder(tmp_path, [None] * 8)
    work = Work(model=model, weight_size=2, cache_size=2)
    assert work.matrix_params == 8 * (512 * 128 * (2 * 8 + 2 * 4) + 3 * 512 * 1024)
    roofline = Roofline(
        topology=parse_topology("v6e:1"),
        work=work,
        steps=(),
        assumed=Assumptions(memory_share=0.5, compute_share=0.25),
        dtype="bfloat16",
        limits=limits(num_pages=71),
        replicas=3,
    )
    four = roofline.decode(4, 2000)
    weights = 2 * (work.matrix_params + 2048 * 512)
    cache = 2 * 4 * 128 * 2 * (8 * 4 * 2000 + 4 * 8)
    activations = 2 * 8 * 4 * (8 * 512 + 4 * 1024) + 8 * 4 * 2048
    assert four.moved_bytes == weights + cache + activations
    assert four.seconds == four.memory_seconds == four.moved_bytes / (0.5 * 1638e9)
    assert four.tokens_per_second == 3 * 4 / four.seconds
    assert four.fits_pages and not roofline.decode(5, 2000).fits_pages
    assert four.bound_by == "memory"
    prompt = roofline.prefill(1000)
    dense = 2 * 1000 * work.matrix_params + 2 * 512 * 2048
    assert prompt.flops == dense + 4 * 8 * (1000 * 1001 / 2) * 8 * 128
    assert prompt.compute_seconds == prompt.flops / (0.25 * 918e12)


DRAFTS = {"speculation.method": "ngram", "speculation.width": 4}


def test_a_round_with_drafts_moves_little_more_than_one_without() -> None:
    config = shipped("llama3.1-8b-v6e-1", **DRAFTS)
    plan = make_plan(config, "v6e:1", PlanOptions(compile=False, context=2048))
    found = {(p.width, p.rows): p for p in plan.predictions if p.decode}
    plain, wide = found[1, 16], found[4, 16]
    assert 1.0 < wide.moved_bytes / plain.moved_bytes < 1.1
    assert wide.flops == pytest.approx(4 * plain.flops)
    assert wide.seconds < 1.1 * plain.seconds
    assert wide.tokens_per_second > 3.6 * plain.tokens_per_second, "if all its drafts are right"
    assert [p.width for p in plan.predictions] == [*sorted(p.width for p in plan.predictions[:-1]), 1]


def test_the_widest_step_is_counted_with_its_tokens() -> None:
    limits = Limits(max_rows=8, num_pages=100, page_size=16, max_model_len=512, buckets=(Bucket(32, 8, True, 4),))
    assert batch_of(limits.buckets[0], limits, 64) == ((4, 64),) * 8
    assert batch_of(limits.buckets[0], limits, 2) == ((4, 4),) * 8, "a row sees the tokens that it feeds"


@pytest.mark.slow
def test_a_step_with_drafts_is_compiled_beside_the_others(tmp_path, capsys) -> None:
    path = write_shape(tmp_path / "small", num_hidden_layers=LAYERS)
    plan = make_plan(small_config(path, **DRAFTS), "v5e:1", PlanOptions(count=False))
    names = ["decode 16x16", "mixed 64x16", "decode 64x16 of 4, up to 1 rounds"]
    assert [step.name for step in plan.steps] == names
    plain, _, wide = plan.steps
    assert (plain.width, wide.width) == (1, 4)
    assert plain.moved_bytes < wide.moved_bytes
    assert {p.width: p.compiled for p in plan.predictions if p.rows == 16} == {1: True, 2: False, 4: True}


def test_what_the_program_adds_is_scaled_to_other_batches(tmp_path):
    model = decoder(tmp_path, [None] * 8)
    work = Work(model=model, weight_size=2, cache_size=2)
    sums = Collective(kind="all-reduce", group=4, count=20, payload_bytes=32_000)
    facts = StepFacts(
        name="decode 16x16",
        tokens=16,
        rows=16,
        decode_only=True,
        compiled_layers=(8,),
        compile_seconds=1.0,
        temporary_bytes=0,
        argument_bytes=0,
        predicted_argument_bytes=0,
        flops=None,
        moved_bytes=1.5 * work.other_bytes(16, 16) + 1600,
        sampling_bytes=1600,
        kernels={"paged_attention_decode": 8},
        collectives=(sums,),
    )
    roofline = Roofline(
        topology=parse_topology("v5e:2x2"),
        work=work,
        steps=(facts,),
        assumed=Assumptions(link_share=0.25, hop_seconds=3e-6),
        dtype="bfloat16",
        limits=limits(num_pages=10**4),
        replicas=1,
    )
    two = roofline.decode(2, 100)
    assert two.moved_bytes == pytest.approx(work.cache_bytes(2, 2, 100) + 1.5 * work.other_bytes(2, 2) + 200)
    # Two hops out and two back on the square; a ring of four sends 1.5 times the payload of an eighth of the tokens.
    assert two.collective_seconds == pytest.approx(20 * 4 * 3e-6 + 1.5 * 4000 / (0.25 * 200e9))
    assert two.seconds == two.memory_seconds + two.collective_seconds
    assert roofline.decode(16, 100).compiled and not two.compiled
    # No mixed step was compiled: what a layer exchanges is known from the other.
    prompt = roofline.prefill(160)
    assert prompt.sent_bytes == pytest.approx(1.5 * 320_000) and not prompt.compiled
    assert prompt.moved_bytes == work.cache_bytes(160, 1, 160) + work.other_bytes(160, 1)


def test_a_window_bounds_what_attention_reads(tmp_path):
    full, windowed = decoder(tmp_path, [None] * 4), decoder(tmp_path, [100] * 4)
    reads = [Work(model=m, weight_size=2, cache_size=1).cache_bytes(1, 1, 1000) for m in (full, windowed)]
    assert reads == [2 * 4 * 128 * 4 * 1001, 2 * 4 * 128 * 4 * 101]


def test_a_guess_is_of_a_batch_that_the_pages_hold():
    decode, mixed = Bucket(64, 64, True), Bucket(1024, 64, False)
    assert batch_of(decode, limits(num_pages=10_000), context=2048) == ((1, 2048),) * 64
    assert batch_of(decode, limits(num_pages=64 * 12 + 5), context=2048) == ((1, 12 * 128),) * 64
    assert batch_of(decode, limits(num_pages=10), context=2048) == ((1, 128),) * 10
    assert batch_of(decode, limits(num_pages=10_000), context=9000) == ((1, 4096),) * 64
    assert batch_of(mixed, limits(num_pages=10_000), context=2048) == ((1024, 1024),)
    assert batch_of(mixed, limits(num_pages=3), context=2048) == ((384, 384),)
    # A window of 256 tokens: three pages for a row that decodes, all of them for a prompt in one step.
    groups = (PageGroup(), PageGroup(256))
    assert batch_of(decode, limits(num_pages=64 * 12 + 5, page_groups=groups), context=2048) == ((1, 9 * 128),) * 64
    assert batch_of(decode, limits(num_pages=11, page_groups=groups), context=2048) == ((1, 128),) * 5
    assert batch_of(mixed, limits(num_pages=11, page_groups=groups), context=2048) == ((640, 640),)


def limits(**more: Any) -> Limits:
    buckets = (Bucket(64, 64, True), Bucket(1024, 64, False))
    return Limits(**{"max_rows": 64, "page_size": 128, "max_model_len": 4096, "buckets": buckets, **more})


def run_cli(capsys, *arguments: str) -> tuple[int, str]:
    code = main(["plan", *arguments])
    return code, capsys.readouterr().out


def test_the_command_line_says_it_with_its_exit_code(capsys):
    config = ("--config", str(CONFIGS / "llama3.1-8b-v5e-4.yaml"), "--quick")
    code, out = run_cli(capsys, *config, "--topology", "v5e:2x2", "--json")
    plan = json.loads(out)
    assert code == 0 and plan["fits"] is True and plan["topology"] == "v5e:2x2" and plan["tensor"] == 4
    code, out = run_cli(capsys, *config, "--topology", "v5e:1", "--tensor", "1", "--json")
    plan = json.loads(out)
    assert code == 3 and plan["fits"] is False and plan["suggestion"] == {"topology": "v5e:2x2", "tensor": 2}
    code, out = run_cli(capsys, *config, "--topology", "v5e:1", "--topology", "v6e:1", "--compare")
    assert code == 0 and "the smallest that fits: v5e:2x2 with parallel.tensor 2" in out
    assert [line.split()[:3] for line in out.splitlines() if line.startswith(" v")] == [
        ["v5e:1x1", "1", "NO"],
        ["v6e:1x1", "1", "yes"],
    ]
    code, out = run_cli(capsys, *config, "--topology", "v5e:2x2", "--set", "sched.max_rows=8")
    assert code == 0 and "fits, " in out and "KV pages" in out


@pytest.fixture
def no_compilers(monkeypatch):
    """As where neither libtpu nor the CUDA plugin is installed, and no device may be looked for."""
    installed = importlib.metadata.version

    def version(name: str) -> str:
        if name in ("libtpu", "jax-cuda13-plugin"):
            raise importlib.metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("a device was asked for"))


def test_quick_plans_need_no_compiler_and_no_device(no_compilers, capsys):
    config = ("--config", str(CONFIGS / "llama3.1-8b-v5e-4.yaml"), "--quick", "--compare")
    code, out = run_cli(capsys, *config, "--topology", "v5e:2x2", "--topology", "h200:1", "--topology", "cpu:2")
    assert code == 0
    assert {line.split()[0] for line in out.splitlines() if " yes " in line} >= {"v5e:2x2", "h200:1"}


def test_a_missing_compiler_costs_its_own_line_alone(no_compilers, monkeypatch, capsys):
    shipped_config = str(CONFIGS / "llama3.1-8b-v5e-4.yaml")

    def plan(config, name, options, say, progress):
        absent_devices(name) if name != "v5e:2x2" else None
        return make_plan(config, name, dataclasses.replace(options, compile=False), say, progress)

    monkeypatch.setattr("jaxserve.lab.planner.command.make_plan", plan)
    arguments = ["plan", "--config", shipped_config, "--compare", "--topology", "v5e:2x2", "--topology"]
    assert main([*arguments, "h200:1"]) == 0
    out, err = capsys.readouterr()
    assert "v5e:2x2" in out
    assert "h200:1 is not planned: compiling for a device that is not here needs the package jax-cuda13-plugin" in err
    assert main(["plan", "--config", shipped_config, "--topology", "h200:1", "--topology", "h200:1"]) == 2
    assert "jax-cuda13-plugin" in capsys.readouterr().err


def test_the_command_line_refuses_in_one_line(capsys):
    for arguments, message in (
        (("--quick",), "give --topology"),
        (("--topology", "v5e:7x7"), "no topology is called 'v5e:7x7'"),
        (("--topology", "v5e:1", "--model", "nowhere"), "does not exist"),
        (("--topology", "v5e:1", "--tensor", "²"), "--tensor is '²', but must be 'auto' or a number"),
        (("--topology", "v5e:1", "--quick", "--buckets", "all"), "--quick compiles nothing"),
        (("--topology", "v5e:1", "--quick", "--extend"), "--quick compiles nothing"),
    ):
        assert main(["plan", *arguments]) == 2
        assert message in capsys.readouterr().err


def test_another_directory_can_be_planned_with_the_same_config(tmp_path, capsys):
    path = write_shape(tmp_path / "other")
    config = str(CONFIGS / "llama3.1-8b-v6e-1.yaml")
    _, out = run_cli(
        capsys,
        "--config",
        config,
        "--model",
        str(path),
        "--set",
        "model.max_len=1024",
        "--topology",
        "v5e:1",
        "--quick",
        "--json",
    )
    assert json.loads(out)["memory"]["weight_bytes"] < 2**26


@pytest.mark.slow
def test_a_shipped_config_compiles_where_it_is_meant_to_run():
    """Decode alone, from few layers, which tell all: a mixed step takes a minute more.

    The others compile for minutes with the same kernels (for a GPU: the tests above). That they fit is the arithmetic
    of the quick tests.
    """
    config = shipped("llama3.1-8b-v5e-4")
    rows = config.sched.max_rows
    plan = make_plan(config, "v5e:2x2", PlanOptions(buckets=(f"decode {rows}x{rows}",), exact=False))
    assert plan.fits, plan.problem
    (step,) = plan.steps
    assert step.predicted_argument_bytes == pytest.approx(step.argument_bytes, rel=0.02)
    layers = decoder_config(read_checkpoint(config.model.path))[1].num_layers
    assert step.kernels["paged_attention_decode"] == layers
    times = [p.seconds for p in plan.predictions if p.decode]
    assert times == sorted(times) and 1e-3 < times[0] < times[-1] < 1
    counted = step.counted
    assert counted is not None and (counted.rows, counted.context) == (rows, 2048), plan.notes
    assert sum(counted.parts.values()) == pytest.approx(counted.seconds)
    assert max(counted.byte_seconds, counted.flop_seconds) <= counted.seconds < 1.5 * times[-1]
    assert counted.parts["attention"] >= layers * counted.kernels[-1].byte_seconds
    # Of few layers XLA keeps some weights in the fast memory: their products are shorter than those of all layers.
    assert counted.parts["products"] > 0.5 * plan.memory.weight_bytes / 819e9
    assert {kernel.name: kernel.spills for kernel in counted.kernels} == dict.fromkeys(step.kernels, 0)
