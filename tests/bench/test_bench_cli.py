"""The commands as a user types them: tables, files, exit codes, complaints."""

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from fake_parts import Fakes
from scripted_server import Script, scripted

from jaxserve.cli import main
from jaxserve.lab.bench.cli import ALL_FAILED


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes().install(monkeypatch.setattr)


RATES = {"read_gb_per_s": {"1 thread": 11.0, "2 threads": 20.0}}


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine is not measured for each file."""
    monkeypatch.setattr("jaxserve.lab.bench.cli.machine_rates", lambda: RATES)


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def test_one_run_with_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_path, png_path = tmp_path / "run.json", tmp_path / "run.png"
    with scripted([Script(waits_s=(0.02, 0.01, 0.01))]) as server:
        arguments = ["bench", "serve", "--url", server.url + "/v1", "--num-prompts", "10", "--output-len", "3"]
        arguments += ["--rate", "100", "--goodput", "ttft:5000", "--goodput", "e2el:1", "--percentiles", "50,95"]
        assert main([*arguments, "--json", str(json_path), "--save-requests", "--plot", str(png_path)]) == 0
    out, err = capsys.readouterr()
    for word in ("TTFT (ms)", "TPOT (ms)", "ITL (ms)", "E2EL (ms)", "goodput, requests / s", "p95", "10, 0"):
        assert word in out
    assert "rate 100: 10 requests" in err
    tree = json.loads(json_path.read_text())
    [run] = tree["runs"]
    assert (run["completed"], run["failed"], run["request_rate"], run["request_goodput"]) == (10, 0, 100.0, 0.0)
    assert run["total_output_tokens"] == 30
    assert run["mean_ttft_ms"] >= 20
    assert run["mean_e2el_ms"] >= 40
    assert run["p95_itl_ms"] > 0
    assert len(run["requests"]) == 10
    assert run["requests"][0]["outputs"] == sorted(run["requests"][0]["outputs"])
    assert run["client"]["loop_p99_ms"] >= 0
    assert tree["target"]["model"] == "scripted"
    assert tree["about"]["versions"]["jaxserve"]
    assert tree["about"]["command"]
    assert tree["about"]["rates"] == RATES
    assert tree["load"]["dataset"] == "random"
    assert png_size(png_path) == (1210, 770)


def test_a_sweep_with_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    json_path, png_path = tmp_path / "sweep.json", tmp_path / "sweep.png"
    with scripted([Script(waits_s=(0.0, 0.005))]) as server:
        arguments = ["bench", "serve", "--backend", "openai-chat", "--url", server.url, "--num-prompts", "6"]
        arguments += ["--sweep-concurrency", "1,2,6", "--json", str(json_path), "--plot", str(png_path)]
        assert main(arguments) == 0
    out = capsys.readouterr().out
    assert all(label in out for label in ("concurrency 1", "concurrency 2", "concurrency 6"))
    assert "6 of 6 answers are shorter than asked for" in out
    runs = json.loads(json_path.read_text())["runs"]
    assert [run["max_concurrency"] for run in runs] == [1, 2, 6]
    assert [run["request_rate"] for run in runs] == ["inf"] * 3
    assert "requests" not in runs[0]
    assert png_size(png_path) == (1210, 770)


def test_a_trace_is_replayed_as_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    rows = [f"{1000 + second},10,2\n" for second in (0, 1, 2)]
    trace.write_text("Timestamp,Request tokens,Response tokens\n" + "".join(rows))
    with scripted([Script()]) as server:
        arguments = ["bench", "serve", "--url", server.url, "--dataset", "burstgpt", "--dataset-path", str(trace)]
        assert main([*arguments, "--speed", "10", "--json", str(tmp_path / "x.json")]) == 0
    [run] = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert (run["completed"], run["request_rate"], run["label"]) == (3, None, "as recorded")
    assert run["duration"] >= 0.2


def test_all_failed_is_told_by_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted([Script(status=503)]) as server:
        arguments = ["bench", "serve", "--url", server.url, "--num-prompts", "3", "--warmup", "0"]
        assert main(arguments) == ALL_FAILED
    out = capsys.readouterr().out
    assert "failed: 3 x HTTP 503" in out
    assert "scripted 503" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--url nowhere", "begins with http"),
        ("--url http://h --backend grpc", "HOST:PORT"),
        ("--url http://h --backend carrier-pigeon", "there are openai, openai-chat, grpc"),
        ("--url h:1 --backend grpc --model x", "for OpenAI servers"),
        ("--url http://h --sweep-rate 1,2 --rate 3", "leave them out"),
        ("--url http://h --sweep-rate 1 --sweep-concurrency 1", "not both"),
        ("--url http://h --sweep-rate 1;2", "commas"),
        ("--url http://h --max-concurrency 0", "1 or more"),
        ("--url http://h --rate 0", "--rate is 0.0"),
        ("--url http://h --goodput itl:3", "--goodput"),
        ("--url http://h --percentiles 100", "between 0 and 100"),
        ("--url http://h --extra-body [1]", "JSON object"),
        ("--url http://h --api-key-file /none", "--api-key-file: cannot read /none"),
        ("--url http://h --ca-file x", "not https"),
        ("--url http://h --save-requests", "needs --json"),
        ("--url http://h --json /none/x.json", "no directory"),
        ("--url http://h --backend openai-chat --vocab-size 9", "no token ids"),
        ("--url http://h --dataset agent", "for jaxserve simulate"),
        ("--url http://h --sweep-rate 1 --diurnal 1:2:60", "leave them out"),
        ("--url http://h --timeout 0", "--timeout"),
        ("--url http://h --timeout inf", "--timeout"),
        ("--url http://h --temperature -1", "--temperature is -1.0"),
        ("--url http://h --temperature inf", "--temperature is inf"),
        ("--url http://h --model ", "--model is ''"),
        ("--url  --backend grpc", "--url is ''"),
        ("--url h:1 --backend grpc --model ", "for OpenAI servers"),
        ("--url http://h --vocab-size 0", "'--vocab-size'"),
        ("--url http://h --sweep-rate ", "--sweep-rate is ''; write numbers"),
        ("--url http://h --sweep-concurrency ", "--sweep-concurrency is ''; write whole numbers"),
        ("--url http://h --burstiness 2", "give --rate"),
        ("--url http://127.0.0.1:9 --num-prompts 1", "does not answer"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *arguments.split(" ")]) == 2
    out, err = capsys.readouterr()
    assert not out
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert words in line


def test_throughput(fakes: Fakes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "throughput.json"
    arguments = ["bench", "throughput", "--num-prompts", "9", "--input-len", "20", "--output-len", "8"]
    assert main([*arguments, "--set", "model.name=fake", "--json", str(path)]) == 0
    assert "fake: 9 requests at once" in capsys.readouterr().out
    tree = json.loads(path.read_text())
    assert (tree["total_input_tokens"], tree["total_output_tokens"], tree["num_requests"]) == (180, 72, 9)
    assert tree["output_tokens_per_second"] == pytest.approx(72 / tree["elapsed_time"])
    assert tree["tokens_per_second"] == pytest.approx(252 / tree["elapsed_time"])
    assert tree["about"]["device"]["platform"] == "cpu"
    assert tree["about"]["rates"] == RATES


def test_a_wrong_dataset_is_told_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxserve.lab.bench.cli._load", lambda *_: pytest.fail("loaded"))
    assert main(["bench", "throughput", "--dataset", "shakespeare"]) == 2
    assert "no dataset 'shakespeare'" in capsys.readouterr().err


def test_sessions_are_refused_by_name(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxserve.lab.bench.cli._load", lambda *_: pytest.fail("loaded"))
    assert main(["bench", "throughput", "--dataset", "agent"]) == 2
    assert "for jaxserve simulate" in capsys.readouterr().err


def test_a_day_in_a_hurry(tmp_path: Path) -> None:
    path = tmp_path / "day.json"
    with scripted([Script()]) as server:
        arguments = ["bench", "serve", "--url", server.url, "--num-prompts", "12", "--diurnal", "20:200:0.1"]
        assert main([*arguments, "--json", str(path)]) == 0
    tree = json.loads(path.read_text())
    [run] = tree["runs"]
    assert (run["completed"], run["request_rate"]) == (12, None)
    assert run["label"] == "days of 0.1 s, 20 to 200 requests / s"
    assert tree["load"]["diurnal"]["day_s"] == 0.1


def test_latency(fakes: Fakes, tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    arguments = ["bench", "latency", "--batch-size", "3", "--input-len", "12", "--output-len", "5"]
    arguments += ["--iterations", "4", "--warmup", "1", "--json", str(path)]
    assert main(arguments) == 0
    tree = json.loads(path.read_text())
    assert tree["latency (ms)"]["count"] == 4
    assert tree["ms_per_output_token"] == pytest.approx(tree["avg_latency_ms"] / 5)
    assert fakes.runner is not None
    begins = [chunk.token_ids for plan in fakes.runner.plans for chunk in plan.chunks if chunk.start == 0]
    assert len(set(begins)) == len(begins) == 5 * 3  # new prompts each time


def test_a_model_without_tokenizer_needs_its_vocabulary(fakes: Fakes, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "latency", "--set", "model.skip_tokenizer=true", "--input-len", "4", "--output-len", "2"]
    assert main(arguments) == 2
    assert "--vocab-size" in capsys.readouterr().err
    assert main([*arguments, "--vocab-size", "100", "--iterations", "1", "--warmup", "0"]) == 0


def test_loading_a_server_loads_no_engine() -> None:
    code = "import sys; from jaxserve.lab.bench import cli, grpc_client, openai_client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    assert not {"jax", "flax", "matplotlib"} & set(loaded.stdout.split())


@pytest.mark.slow
def test_a_start_that_fails_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "startup", "--set", "model.path=/does/not/exist", "--cold", "0", "--warm", "1"]
    assert main(arguments) == 2
    assert "/does/not/exist" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("compiled_quickly")
def test_startup(tmp_path: Path) -> None:
    path = tmp_path / "startup.json"
    arguments = ["bench", "startup", "--cold", "1", "--warm", "1", "--json", str(path)]
    arguments += ["--set", "sched.max_rows=2", "--set", "sched.max_step_tokens=32", "--set", "cache.num_pages=32"]
    arguments += ["--set", "runtime.row_buckets=[2]", "--set", "runtime.token_buckets=[32]"]
    assert main(arguments) == 0
    tree = json.loads(path.read_text())
    for kind in ("cold", "warm"):
        phases = [tree[f"{kind} {phase} (ms)"]["mean"] for phase in ("import", "build", "first_token")]
        assert all(phase > 0 for phase in phases)
        assert tree[f"{kind} total (ms)"]["mean"] >= sum(phases)
        parts = [tree[f"{kind} {name} (ms)"]["mean"] for name in ("config", "tokenizer", "plan", "executables")]
        assert all(part > 0 for part in parts) and sum(parts) <= phases[1]
        assert 0 < tree[f"{kind} weights (ms)"]["mean"] <= phases[1]
    assert tree["about"]["device"]["platform"] == "cpu"
