"""`jaxserve simulate` as a user types it: tables, files, exit codes, complaints."""

import dataclasses
import json
import statistics
from pathlib import Path

import pytest

from jaxserve.cli import main
from jaxserve.config import load_config
from jaxserve.config.schema import CacheConfig
from jaxserve.errors import ConfigError
from jaxserve.lab.planner import PlanOptions, make_plan
from jaxserve.lab.simulation.chip_profile import topology_of
from jaxserve.lab.simulation.cli import ALL_FAILED
from jaxserve.lab.simulation.compare import compare_policies
from jaxserve.lab.simulation.requests import Trace
from jaxserve.lab.simulation.simulate import FixedCost, StepCost, simulate
from jaxserve.lab.simulation.world import World, world_of_device, world_of_log
from jaxserve.lab.workloads.arrivals import ArrivalOptions
from jaxserve.lab.workloads.datasets import DatasetOptions
from jaxserve.routing import RouterOptions
from jaxserve.runtime.memory import memory_share
from jaxserve.sched import Bucket, Limits, SchedulerOptions, StepPlan
from jaxserve.sched.record import LogEnd, LogHeader, StepRecord
from jaxserve.values.chips import parse_topology

SHAPE = str(Path(__file__).parents[2] / "configs" / "shapes" / "llama3.1-8b")
SMALL = ["simulate", "--num-prompts", "20", "--input-len", "40", "--output-len", "10"]
LIMITS = Limits(
    max_rows=4, num_pages=200, page_size=4, max_model_len=256, buckets=(Bucket(4, 4, True), Bucket(64, 4, False))
)


def test_policies_beside_each_other_with_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_path, png_path = tmp_path / "run.json", tmp_path / "run.png"
    arguments = ["simulate", "--policy", "fcfs", "--policy", "sjf", "--dataset", "sharegpt", "--rate", "4"]
    arguments += ["--num-prompts", "100", "--device", "v5e:2x2", "--model", SHAPE, "--goodput", "ttft:200"]
    assert main([*arguments, "--json", str(json_path), "--plot", str(png_path)]) == 0
    out, err = capsys.readouterr()
    for word in ("llama3.1-8b in bfloat16 on v5e:2x2, tensor 4", "fcfs", "sjf", "goodput/s", "TTFT p50", "preempted"):
        assert word in out
    assert "fcfs: 100 requests simulated" in err
    tree = json.loads(json_path.read_text())
    assert [run["label"] for run in tree["runs"]] == ["fcfs", "sjf"]
    for run in tree["runs"]:
        assert (run["completed"], run["failed"]) == (100, 0)
        # 8 G parameters in two bytes on 4 devices take 5 ms to read at 4 x 819 GB/s, and longer at a share of it.
        assert 5.0 < run["median_tpot_ms"] < 10.0
        assert run["median_itl_ms"] > 5.0
        assert len(run["requests"]) == 100
        for request in run["requests"]:
            assert request["arrival_s"] <= request["admitted_s"] < request["first_token_s"] <= request["last_token_s"]
    assert tree["load"]["dataset"] == "sharegpt"
    assert tree["load"]["rate"] == 4.0
    assert tree["world"]["limits"]["page_size"] > 0
    assert tree["about"]["versions"]["jaxserve"]
    assert png_path.read_bytes()[:4] == b"\x89PNG"


def test_without_options_it_is_the_demo_model_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out, err = capsys.readouterr()
    assert err.splitlines()[:2] == ["reading the costs of steps", "simulating fcfs"]
    assert "demo in float32 on cpu:1" in out
    assert "20, 0" in out
    assert "ITL (ms)" in out


def test_replicas_and_routers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--replicas", "3", "--router", "prefix", "--router", "round_robin", "--rate", "50"]
    assert main([*SMALL, *arguments]) == 0
    out = capsys.readouterr().out
    assert "3 replicas of demo" in out
    assert "fcfs, prefix" in out
    assert "fcfs, round_robin" in out


def test_servers_that_are_unlike_and_that_come_and_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile, json_path = tmp_path / "half.yaml", tmp_path / "run.json"
    profile.write_text("{name: half-h200, memory_gib: 70, memory_gb_s: 2400, tflops: {bfloat16: 495}}")
    arguments = ["--model", SHAPE, "--device", f"h200:1*2, {profile}:1", "--router", "round_robin", "--rate", "2"]
    assert main([*SMALL, *arguments, "--json", str(json_path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "2 x llama3.1-8b in bfloat16 on h200:1" in out and "1 x llama3.1-8b in bfloat16 on half-h200:1" in out
    tree = json.loads(json_path.read_text())
    assert [("half" in about) for about in tree["fleet"]] == [False, False, True]
    tpot_ms = [
        statistics.median(
            1e3 * (one["last_token_s"] - one["first_token_s"]) / (one["output_tokens"] - 1)
            for one in tree["runs"][0]["requests"]
            if one["replica"] == number
        )
        for number in range(3)
    ]
    assert tpot_ms[2] == pytest.approx(2 * tpot_ms[0], rel=0.2)  # half of the bandwidth
    assert main([*SMALL, "--rate", "50", "--autoscale", "1:3:2:0.1", "--router", "least_load"]) == 0
    assert "fcfs, least_load" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("memory_gib: .inf, memory_gb_s: 600, tflops: {bfloat16: 70}", "memory_gib: Input should be a finite number"),
        ("memory_gib: 24, memory_gb_s: .inf, tflops: {bfloat16: 70}", "memory_gb_s: Input should be a finite number"),
        ("memory_gib: 24, memory_gb_s: 600, tflops: {bfloat16: .inf}", "tflops.bfloat16: Input should be a finite"),
        ("memory_gib: 24, memory_gb_s: 600, tflops: {bfloat16: 70}, link_gb_s: .inf", "link_gb_s: Input should be a"),
        ("memory_gib: 2024-13-99", "cannot be read"),
    ],
)
def test_a_profile_that_cannot_be_is_told(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "chip.yaml"
    path.write_text(f"{{name: mine, {text}}}")
    with pytest.raises(ConfigError, match=words):
        topology_of(f"{path}:1")


def test_sessions_days_and_clients(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--dataset", "agent", "--turns", "3", "--session-rate", "2", "--max-session-len", "900"]) == 0
    assert "of the input, cached" in capsys.readouterr().out
    arguments = ["--diurnal", "1:20:10", "--tenants", "3", "--priorities", "2", "--max-tokens", "50", "--light"]
    assert main([*SMALL, *arguments, "--policy", "fair"]) == 0
    out = capsys.readouterr().out
    assert "fair, by tenant" in out and "by owner" not in out
    [itl] = [line for line in out.splitlines() if line.strip().startswith("ITL (ms)")]
    assert set(itl.split()[2:]) == {"-"}


def test_owners_are_shown_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--owner-weights", "1,4", "--policy", "fair"]) == 0
    out = capsys.readouterr().out
    assert "fair, by owner" in out and "owner-0" in out and "owner-1" in out


def test_all_failed_is_told_by_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "x.png"
    assert main(["simulate", "--num-prompts", "3", "--input-len", "5000", "--plot", str(plot)]) == ALL_FAILED
    out, err = capsys.readouterr()
    assert "3 failed; the first: request '0' has a prompt of 5000 tokens" in out
    assert "nothing to draw" in err and not plot.exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--policy nosuch", "no scheduler is called 'nosuch'"),
        ("--router prefix", "--replicas 2 or more"),
        ("--replicas 2 --router nosuch", "no router is called 'nosuch'"),
        ("--device v9:1", "no topology is called 'v9:1'"),
        ("--device v5e:2x2 --tensor 8", "is 8 x 1, but v5e:2x2 has 4 devices"),
        ("--model /does/not/exist", "/does/not/exist"),
        ("--model SHAPE --device v5e:1x1", "take more devices"),
        ("--step-log /none", "cannot read the step log"),
        ("--step-log /none --device v5e:2x2", "leave them out"),
        ("--light --plot x.png", "leave one of them out"),
        ("--dataset agent --rate 3", "--session-rate"),
        ("--dataset shakespeare", "no dataset"),
        ("--owner-weights 1,x", "--owner-weights is '1,x'"),
        ("--owner-weights 1,-2", "owner_weights has -2.0"),
        ("--diurnal 1:2", "--diurnal"),
        ("--rate 1 --ramp linear:1:2", "not two"),
        ("--percentiles 100", "between 0 and 100"),
        ("--goodput itl:3", "--goodput"),
        ("--json /none/x.json", "no directory"),
        (f"--json {'x' * 400}", "File name too long"),
        ("--device ", "no topology is called ''"),
        ("--device cpu:2", "take a tensor of 1"),
        ("--acceptance ", "--acceptance is ''; write numbers"),
        ("--percentiles ", "--percentiles is ''; write numbers"),
        ("--handoff-bandwidth nan", "--handoff-bandwidth is nan GB/s, but must be a number above 0"),
        ("--handoff-bandwidth inf", "--handoff-bandwidth is inf GB/s"),
        ("--turns inf", "--turns is inf"),
        ("--think nan", "--think nan"),
        ("--autoscale 1:2:inf", "target and interval_s are numbers above 0"),
        ("--autoscale 1:2:4:inf", "the other times from 0"),
        (
            "--store-latency-ms 0 --store-bandwidth inf --set store.kind=memory --set cache.host_bytes=67108864",
            "a number from 0, and one above 0",
        ),
        ("--rate 2 --burstiness 1e-06", "no times of 20 requests can be drawn for rate 2 and burstiness 1e-06"),
        ("--rate 1e-320", "raise the rate"),
        ("--burstiness 2", "give --rate, --ramp or --diurnal"),
        ("--set cache.memory_bytes=1000000", "set cache.num_pages"),
        ("--device v5e:2x2 --set parallel.pipeline=2", "simulate with --set parallel.pipeline=1"),
        ("--device v5e:2x2 --set parallel.data=8", "tensor x parallel.data is 1 x 8, but v5e:2x2 has 4"),
        ("--device v5e:2x2 --set parallel.expert=2", "know no parts of experts"),
        ("--device v5e:2x2 --set parallel.data=2 --replicas 2", "leave one of the two out"),
        ("--device h200:1*2 --replicas 3", "3 replicas were asked for, and 2 devices"),
        ("--device h200:1*x", "write h200:1*2"),
        ("--device none.yaml:1", "the profile none.yaml cannot be read"),
        ("--device none.yaml", "write none.yaml:1"),
        ("--autoscale 3", "write MIN:MAX:LOAD"),
        ("--autoscale 1:2:4 --replicas 2 --prefill 1 --set cache.host_bytes=67108864", "without events and scaling"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, *arguments.replace("SHAPE", SHAPE).split(" ")]) == 2
    out, err = capsys.readouterr()
    assert not out
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert words in line


def write_log(path: Path, limits: Limits = LIMITS, settings: dict[str, str] | None = None) -> None:
    """A log of a device that takes 2 ms for a step of decodes and 20 ms for one with prompts."""
    trace = Trace(dataset=DatasetOptions(num_prompts=40, input_len=30, output_len=12))
    run = simulate("fcfs", trace, FixedCost(cost=StepCost(0.0, 0.01)), limits, keep_plans=True)
    lines = [LogHeader(limits=limits, model="toy", policy="fcfs", vocab_size=99, settings=settings or {}).to_json()]
    for plan in run.plans:
        bucket = limits.find_bucket(plan.num_tokens, plan.num_rows, plan.decode_only)
        assert bucket is not None
        device_ms = 2.0 if plan.decode_only else 20.0
        record = StepRecord(
            plan=plan,
            bucket=bucket,
            token_ids=(7,) * len(plan.sampled_rows),
            start_s=0.0,
            schedule_ms=0.1,
            pack_ms=0.1,
            device_ms=device_ms,
            wait_ms=device_ms,
            commit_ms=0.1,
        )
        lines.append(record.to_json())
    lines.append(LogEnd(records=len(run.plans), dropped=0).to_json())
    path.write_text("".join(line + "\n" for line in lines))


def test_costs_from_a_step_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, json_path = tmp_path / "steps.jsonl", tmp_path / "run.json"
    write_log(log)
    arguments = [*SMALL, "--rate", "1", "--step-log", str(log), "--json", str(json_path)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "toy as fitted to" in out
    assert "off by" in out
    [run] = json.loads(json_path.read_text())["runs"]
    assert run["median_ttft_ms"] == pytest.approx(20.0, rel=0.1)
    assert run["median_tpot_ms"] == pytest.approx(2.0, rel=0.2)
    other, unlike = tmp_path / "other.jsonl", tmp_path / "unlike.jsonl"
    write_log(other, limits=dataclasses.replace(LIMITS, max_rows=2, buckets=(Bucket(2, 2, True), Bucket(32, 2, False))))
    write_log(unlike, settings={"kernels.attention": "other"})
    assert main([*arguments, "--step-log", str(other)]) == 0
    assert "of 2 logs" in (out := capsys.readouterr().out) and "in a log left out, at worst" in " ".join(out.split())
    assert main([*arguments, "--step-log", str(unlike)]) == 2
    assert "kernels.attention None and other" in capsys.readouterr().err


def test_an_iterator_cannot_be_simulated_twice() -> None:
    world = World(
        limits=LIMITS,
        cost_model=FixedCost(cost=StepCost(0.0, 0.01)),
        options=SchedulerOptions(),
        router_options=RouterOptions(),
        about="by hand",
    )
    trace = Trace(dataset=DatasetOptions(num_prompts=5, input_len=8, output_len=2))
    with pytest.raises(ConfigError, match="read once"):
        compare_policies(["fcfs", "sjf"], iter(trace), world)
    assert [r.label for r in compare_policies(["fcfs", "sjf"], trace, world)] == ["fcfs", "sjf"]
    assert len(compare_policies(["fcfs"], iter(trace), world)) == 1


def test_replicas_inside_a_server_share_its_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--device", "v5e:2x4", "--model", SHAPE, "--num-prompts", "40", "--rate", "30"]

    def medians(*more: str) -> tuple[float, str]:
        path = tmp_path / "run.json"
        assert main([*arguments, *more, "--json", str(path)]) == 0
        tree = json.loads(path.read_text())
        assert tree["runs"][0]["replicas"] == (4 if more else 1)
        return tree["runs"][0]["median_tpot_ms"], capsys.readouterr().out

    alone_ms, alone = medians()
    cut_ms, cut = medians("--set", "parallel.data=4", "--router", "round_robin")
    assert "on v5e:2x4, tensor 8, by" in alone
    assert "on v5e:2x4, 4 replicas of tensor 2, by" in cut
    assert cut_ms > 2 * alone_ms  # a step reads its weights with a quarter of the chips


def _world_limits(device: str, **settings: object) -> Limits:
    overrides = {name.replace("__", "."): value for name, value in settings.items()}
    return world_of_device(load_config(None, overrides, environ={}).config, device).limits


def test_pages_take_the_share_of_memory_that_a_server_takes() -> None:
    """A quarter of a CPU unless more is asked for, and of a GPU what JAX can place in the pool that it reserves."""
    demo = {"model__path": "demo", "sched__max_rows": 4096, "sched__max_step_tokens": 4096}
    token_bytes = 5 * 1024
    memory = parse_topology("cpu:1").chip.allocatable_bytes
    limits = _world_limits("cpu:1", **demo)
    assert limits.num_pages == memory // 4 // (limits.page_size * token_bytes)
    assert _world_limits("cpu:1", **demo, cache__memory_fraction=0.8).num_pages > 2 * limits.num_pages
    memory = parse_topology("h200:1").chip.allocatable_bytes
    half, most = (_world_limits("h200:1", model__path=SHAPE, cache__memory_fraction=part) for part in (0.5, 0.9))
    page_bytes = most.page_size * 2 * 32 * 8 * 128 * 2
    pool = memory_share(CacheConfig(), "gpu").fraction
    assert most.num_pages - half.num_pages == pytest.approx((0.9 - 0.5) * pool * memory / page_bytes, abs=1)


def test_weights_of_fewer_bits_take_the_time_of_the_plan() -> None:
    scheme = "int4"  # whose head has int8
    settings = {"model.path": SHAPE, "model.max_len": 4096, "sched.max_rows": 16}
    whole, coded = (
        world_of_device(load_config(None, settings | more).config, "v6e:1")
        for more in ({}, {"model.quantization": scheme})
    )
    config = load_config(None, settings | {"model.quantization": scheme}).config
    plan = make_plan(config, "v6e:1", PlanOptions(compile=False, context=2048))
    step = StepPlan(step_id=0, decode_rows=tuple(range(16)), decode_positions=(2047,) * 16)
    found, slower = (world.cost_model.step_seconds(step, Bucket(16, 16, True)).device_s for world in (coded, whole))
    predicted = next(one for one in plan.predictions if one.rows == 16)
    assert found == pytest.approx(predicted.seconds, rel=1e-9) and found < 0.7 * slower
    mine = dataclasses.replace(parse_topology("v6e:1").chip, name="mine").topology((1, 1))
    with pytest.raises(ConfigError, match=r"how mine:1x1 computes with them; set model.quantization=none"):
        world_of_device(config, mine)
    assert coded.limits.num_pages == pytest.approx(plan.memory.num_pages, rel=0.05) and f"and {scheme}" in coded.about


def test_layers_with_windows_have_tables_of_their_own() -> None:
    """As on a server: pages are of the layers of one group, here of half of them."""
    model = {"model__path": str(Path(SHAPE).parent / "gemma-2-9b"), "sched__max_rows": 64}
    limits, whole = (_world_limits("v6e:1", **model, model__max_len=length) for length in (8192, 4096))
    assert [group.window for group in limits.page_groups] == [None, 4096]
    assert [group.window for group in whole.page_groups] == [None], "no sequence outgrows the window"
    assert limits.num_pages == pytest.approx(2 * whole.num_pages, abs=1)


def test_a_log_holds_for_its_own_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "steps.jsonl"
    write_log(log, settings={"parallel.pipeline": "2", "parallel.tensor": "1"})
    for setting in ("parallel.pipeline=2", "parallel.data=3"):
        assert main([*SMALL, "--step-log", str(log), "--set", setting]) == 0
    assert "3 replicas of toy as fitted" in capsys.readouterr().out
    assert main([*SMALL, "--step-log", str(log), "--set", "parallel.pipeline=4"]) == 2
    assert "the engine that wrote the step log had 2" in capsys.readouterr().err


def test_together_and_apart_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    apart = [*SMALL, "--replicas", "3", "--prefill", "0", "--prefill", "1"]
    slots = ["--set", "cache.host_bytes=67108864", "--set", "route.prefill_above=16", "--set", "cache.page_size=16"]
    assert main([*apart, *slots]) == 0
    out, _ = capsys.readouterr()
    assert "1 apart" in out and out.count("20        0") == 2, "both have answered all"
    for arguments, wrong in (
        (apart, "set cache.host_bytes"),
        ([*SMALL, "--prefill", "1", *slots], "ask for 2 replicas or more"),
        ([*SMALL, "--replicas", "2", "--prefill", "2", *slots], "none answers"),
    ):
        assert main(arguments) == 2
        assert wrong in capsys.readouterr().err


def test_the_tables_say_where_their_clock_begins(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    assert "times begin at the scheduler: HTTP, encoding" in capsys.readouterr().out


def write_client_run(path: Path, log: Path, first_s: float, prompt_token_s: float, token_s: float) -> None:
    """A run of `bench serve` against the server of a log, seen by a client for whom all comes later by these costs."""
    trace = Trace(
        dataset=DatasetOptions(num_prompts=40, input_len=30, output_len=12, range_ratio=0.5),
        arrivals=ArrivalOptions(rate=20.0),
    )
    [result] = compare_policies(["fcfs"], trace, world_of_log(log, load_config(None).config))
    requests = [
        {
            "start": one.arrival_s,
            "outputs": [
                time_s - one.arrival_s + first_s + prompt_token_s * one.prompt_tokens + number * token_s
                for number, time_s in enumerate(one.token_times_s)
            ],
            "input_tokens": one.prompt_tokens,
            "output_tokens": one.output_tokens,
            "failure": None,
        }
        for one in result.simulation.requests
    ]
    failed = {"start": 0.0, "outputs": [], "input_tokens": 3, "output_tokens": None, "failure": "timeout"}
    path.write_text(json.dumps({"runs": [{"requests": [failed, *requests]}]}))


def test_times_of_a_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, run, json_path = tmp_path / "steps.jsonl", tmp_path / "run.json", tmp_path / "out.json"
    write_log(log)
    write_client_run(run, log, first_s=0.015, prompt_token_s=0.0002, token_s=0.001)
    arguments = [*SMALL, "--rate", "1", "--step-log", str(log), "--json", str(json_path)]
    assert main(arguments) == 0
    engine = json.loads(json_path.read_text())
    assert engine["client_costs"] is None
    capsys.readouterr()
    assert main([*arguments, "--client-costs", str(run), "--goodput", "ttft:25"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "times are those of a client" in out and "times begin at the scheduler" not in out
    client = json.loads(json_path.read_text())
    assert client["client_costs"] == pytest.approx(
        {"first_s": 0.015, "prompt_token_s": 0.0002, "token_s": 0.001}, abs=1e-6
    )
    [before], [after] = engine["runs"], client["runs"]
    for name, more_ms in (("ttft", 15 + 40 * 0.2), ("tpot", 1.0), ("itl", 1.0), ("e2el", 15 + 40 * 0.2 + 9 * 1.0)):
        name = f"median_{name}_ms"
        assert after[name] - before[name] == pytest.approx(more_ms, abs=0.05), name
    assert before["median_ttft_ms"] < 25 and after["request_goodput"] == 0, "targets are those of the client"
    assert after["duration"] == before["duration"] and after["completed"] == before["completed"] == 20


def test_client_costs_that_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, run = tmp_path / "steps.jsonl", tmp_path / "run.json"
    write_log(log)
    on_log = [*SMALL, "--step-log", str(log), "--client-costs", str(run)]
    few = {"start": 0.0, "outputs": [0.1], "input_tokens": 3, "output_tokens": 1, "failure": None}
    for text, wrong in (
        ("{", "is not JSON"),
        ('{"runs": [{"label": "rate 4"}]}', "--save-requests"),
        (json.dumps({"runs": [{"requests": [few]}]}), "has 1 answered requests"),
    ):
        run.write_text(text)
        assert main(on_log) == 2
        assert wrong in capsys.readouterr().err
    run.unlink()
    assert main(on_log) == 2
    assert "cannot be read" in capsys.readouterr().err
    write_client_run(run, log, 0.01, 0.0, 0.0)
    assert main([*SMALL, "--client-costs", str(run)]) == 2
    assert "--step-log FILE" in capsys.readouterr().err
    assert main([*on_log, "--clients", "2"]) == 2
    assert "leave out --client-costs" in capsys.readouterr().err
