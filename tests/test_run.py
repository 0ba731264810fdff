"""The command line: exit codes, what is written where, and that one bad entry harms no other."""

import importlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_parts import Fakes

from jaxserve import __version__, assemble, cli, run
from jaxserve.api import SamplingParams
from jaxserve.client import Client, RequestFailed, Retries
from jaxserve.errors import Status, how_to_install

ROOT = Path(__file__).parents[1]
FAKE = [sys.executable, str(ROOT / "tests" / "fake_parts.py"), "--set", "model.name=fake"]
REAL = [sys.executable, "-m", "jaxserve.run"]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes(sampling_defaults={"temperature": 0.0}).install(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    logger = logging.getLogger("jaxserve")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers[:], logger.level, logger.propagate = before


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(fakes: Fakes, capsysbinary: pytest.CaptureFixture[bytes]) -> Call:
    """Runs the command line in this process; returns exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run.main(["--set", "model.name=fake", *arguments])
        out, err = capsysbinary.readouterr()
        return code, out.decode(), err.decode()

    return call


def process(command: list[str], *arguments: str, **keywords: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=300, env=environment, check=False, **keywords
    )


def objects(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_json_objects(call: Call) -> None:
    code, out, _ = call("--prompt", "abc", "--prompt", "ef", "--max-tokens", "4", "--json")
    assert code == 0
    assert objects(out) == [
        {
            "prompt": "abc", "text": "defg", "token_ids": [100, 101, 102, 103], "finish_reason": "length",
            "stop_reason": None,
            "usage": {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8, "cached_tokens": 0},
        },
        {
            "prompt": "ef", "text": "ghij", "token_ids": [103, 104, 105, 106], "finish_reason": "length",
            "stop_reason": None,
            "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "cached_tokens": 0},
        },
    ]  # fmt: skip


def test_what_a_model_directory_lacks_is_told_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = ROOT / "configs" / "shapes" / "llama3.1-8b"
    assert run.main(["--config", str(ROOT / "configs" / "llama3.1-8b-v5e-4.yaml")]) == 2
    error = capsys.readouterr().err
    assert "neither model.safetensors nor model.safetensors.index.json" in error and "jaxserve plan" in error
    assert "tokenizer" not in error
    (tmp_path / "config.json").write_text((shape / "config.json").read_text()[:-20])
    assert run.main(["--set", f"model.path={tmp_path}", "--prompt", "a"]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path}/config.json cannot be read as JSON" in error
    assert "tokenizer" not in error


def test_for_people(call: Call) -> None:
    code, out, _ = call("--prompt", "[b]abc[/b]:smile:", "--max-tokens", "3", "--echo")
    assert code == 0
    assert out == "> [b]abc[/b]:smile:\n[b]abc[/b]:smile:;<=\n(3 tokens, length)\n\n"


@pytest.mark.parametrize(
    ("options", "has_log"),
    [
        ([], False),
        (["-v"], True),
        (["--set", "runtime.log_level=info"], True),
        (["--set", "runtime.log_format=json"], True),
        (["-v", "--set", "runtime.log_level=error"], False),
    ],
)
def test_the_log_is_for_those_who_ask_for_it(
    call: Call, fakes: Fakes, monkeypatch: pytest.MonkeyPatch, options: list[str], has_log: bool
) -> None:
    """Warnings are shown to all who do not ask for errors alone."""

    def build(config: Any, progress: Any) -> Any:
        logger = logging.getLogger("jaxserve.x")
        logger.info("some detail")
        logger.warning("some danger")
        return fakes.build_devices(config, progress)

    monkeypatch.setattr(assemble, "build_devices", build)
    code, _, err = call("--prompt", "a", "--max-tokens", "2", *options)
    assert code == 0
    assert ("some detail" in err) == has_log
    assert ("some danger" in err) == ("runtime.log_level=error" not in options)
    assert "building the fake" in err, "what a start waits for is told to all"


def test_chat(call: Call) -> None:
    _, out, _ = call("--chat", "--prompt", "hi", "--max-tokens", "2", "--json")
    [result] = objects(out)
    assert result["prompt"] == "hi"
    assert result["usage"]["prompt_tokens"] == len("_user: hi\n_assistant: ")
    assert result["text"] == '!"'


def test_pictures_of_the_command_line(call: Call, fakes: Fakes, tmp_path: Path) -> None:
    """Each misuse is one line, before anything is loaded."""
    file = tmp_path / "a.png"
    file.write_bytes(b"bytes")
    for arguments, message in (
        (["--picture", str(file), "--prompt", "hi"], "give --prompt and --chat, too"),
        (["--picture", str(file)], "--picture given, but nothing to answer"),
        (["--picture", str(tmp_path / "b.png"), "--chat", "--prompt", "hi"], "b.png cannot be read: No such file"),
        (["--picture", str(file), "--chat", "--prompt", "hi"], "demo takes text only; demo-vision takes them"),
    ):
        code, _, err = call(*arguments)
        assert code == 2 and message in err and fakes.config is None, err


def test_options_reach_the_device(call: Call, fakes: Fakes) -> None:
    call("--prompt", "a", "--temperature", "0.5", "--top-p", "0.9", "--seed", "7", "--max-tokens", "2")
    assert fakes.runner is not None
    [setup] = fakes.runner.plans[0].setups
    sampling = setup.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0.5, 0.9, 7)


def test_without_max_tokens_the_context_is_the_limit(call: Call) -> None:
    _, out, _ = call("--prompt", "a" * 40, "--json")
    [result] = objects(out)
    assert result["usage"]["total_tokens"] == 64
    _, out, _ = call("--prompt", "a", "--json", "--set", "model.max_len=400", "--set", "cache.num_pages=200")
    [result] = objects(out)
    assert result["usage"]["completion_tokens"] == 257 - 97, "the end token comes before 256 tokens are full"


def write_lines(path: Path, *lines: object) -> Path:
    path.write_bytes(b"\n".join(x if isinstance(x, bytes) else json.dumps(x).encode() for x in lines) + b"\n")
    return path


GOOD = {"prompt": "abc", "max_tokens": 4}
BAD_LINES: list[tuple[object, str]] = [
    (b"{", "not valid JSON"),
    (b'{"prompt": "\xff"}', "not valid UTF-8"),
    (b"[" * 100_000, "not valid JSON"),
    (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "not valid JSON"),
    (b'{"prompt": "a", "temperature": NaN}', "temperature is nan"),
    (b'{"prompt": "a", "temperature": 1e999}', "temperature is inf"),
    ([1, 2], "a line is a JSON object"),
    ({}, "exactly one of prompt, prompt_token_ids, messages"),
    ({"prompt": "a", "messages": []}, "exactly one of"),
    ({"prompt": None}, "exactly one of"),
    ({"prompt_token_ids": []}, "the prompt is empty"),
    ({"prompt_token_ids": "abc"}, "must be a list of token ids"),
    ({"prompt_token_ids": [1, 259]}, "token id 259 is outside the vocabulary"),
    ({"prompt_token_ids": [1, -1]}, "token id -1"),
    ({"prompt_token_ids": [1, "a"]}, "'a'"),
    ({"prompt": 7}, "int"),
    ({"prompt": "\ud800"}, "not valid Unicode"),
    ({"prompt": "a" * 64}, "the prompt has 65 tokens; a sequence holds 64"),
    ({"prompt": "a", "max_tokens": 63}, "at most 62"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0"),
    ({"prompt": "a", "max_tokens": "4"}, "max_tokens must be an int"),
    ({"prompt": "a", "max_token": 4}, "Did you mean 'max_tokens'"),
    ({"prompt": "a", "top_p": 0}, "top_p is 0"),
    ({"prompt": "a", "n": 0}, "n is 0"),
    ({"prompt": "a", "stop": 7}, "stop must be a list"),
    ({"prompt": "a", "allowed_token_ids": 7}, "allowed_token_ids must be a list"),
    ({"prompt": "a", "bad_words": "word"}, "bad_words must be a list"),
    ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias must map"),
    ({"prompt": "a", "logit_bias": {"1": 10**400}}, "logit_bias of token 1 must be"),
    ({"prompt": "a", "top_k": 10**400}, "top_k"),
    ({"prompt": "a", "stop_token_ids": [10**400]}, "stop_token_ids"),
    ({"prompt": "a", "allowed_token_ids": [259]}, "259"),
    ({"messages": "hi"}, "messages must be a non-empty list"),
    ({"messages": [{"role": "user"}]}, "messages[0] needs content"),
    ({"messages": []}, "messages must be a non-empty list"),
]


def test_bad_lines_are_reported_and_the_rest_is_done(call: Call, tmp_path: Path) -> None:
    lines = [GOOD, *(x for bad, _ in BAD_LINES for x in (bad, GOOD))]
    source, target = write_lines(tmp_path / "in.jsonl", *lines), tmp_path / "out.jsonl"
    code, out, err = call("--input", str(source), "--output", str(target))
    assert (code, out) == (3, "")
    results = objects(target.read_text())
    assert len(results) == len(lines)
    assert [r["text"] for r in results[::2]] == ["defg"] * (len(BAD_LINES) + 1)
    reports = [line for line in err.splitlines() if line.startswith("error: ")]
    for number, ((bad, fragment), result, report) in enumerate(zip(BAD_LINES, results[1::2], reports, strict=True)):
        assert result["line"] == 2 * number + 2
        assert fragment in result["error"], (bad, result)
        assert report.startswith(f"error: {source}:{result['line']}: ")
        assert set(result) == {"line", "error", "error_type"}
    assert f"{len(BAD_LINES) + 1} of {len(lines)} entries of {source} succeeded" in err
    assert "Traceback" not in err


def test_every_kind_of_line(call: Call, tmp_path: Path) -> None:
    source = write_lines(
        tmp_path / "in.jsonl",
        b"\xef\xbb\xbf" + json.dumps({"id": "first", **GOOD}).encode(),
        b"   ",
        {"id": {"any": 1}, "prompt_token_ids": [1, 2], "max_tokens": 1},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
        {**GOOD, "n": 2, "logprobs": 1, "prompt_logprobs": 0},
        {"prompt": [256, 97], "max_tokens": 1},
        {"id": 9, "prompt": "a", "max_tokens": 0},
    )
    code, out, _ = call("--input", str(source), "--max-tokens", "2")
    assert code == 3  # one of them failed
    first, ids, messages, n0, n1, listed, bad = objects(out)
    assert (first["id"], first["text"]) == ("first", "defg")
    assert (ids["id"], ids["token_ids"], ids["prompt"]) == ({"any": 1}, [3], None)
    assert messages["prompt"] == "<|chat|>user: hi\n<|chat|>assistant: "
    assert (n0["index"], n1["index"]) == (0, 1)
    chosen = {"logprob": -0.5, "rank": 1, "decoded_token": "d"}
    assert n0["logprobs"][0] == {"100": chosen}
    assert n0["cumulative_logprob"] == -2.0
    assert n0["prompt_logprobs"][0] is None
    assert len(n0["prompt_logprobs"]) == 4
    assert listed["text"] == "b"
    assert (bad["id"], bad["line"]) == (9, 7)


def test_output_is_in_the_order_of_the_input(call: Call, tmp_path: Path) -> None:
    lengths = [30, 1, 20, 2, 10, 3] * 20
    source = write_lines(
        tmp_path / "in.jsonl", *({"id": i, "prompt": "!", "max_tokens": n} for i, n in enumerate(lengths))
    )
    _, out, _ = call("--input", str(source), "--set", "sched.max_waiting=3")
    assert [(r["id"], len(r["token_ids"])) for r in objects(out)] == list(enumerate(lengths))


def test_nothing_succeeded_is_a_user_error(call: Call, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", b"{", b"}")
    code, out, err = call("--input", str(source))
    assert code == 2
    assert [r["line"] for r in objects(out)] == [1, 2]
    assert "0 of 2 entries" in err
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert call("--input", str(tmp_path / "empty.jsonl"))[:2] == (0, "")


def test_bad_prompts_of_the_command_line(call: Call) -> None:
    code, out, err = call("--prompt", "a" * 64, "--json")
    assert code == 2
    assert next(line for line in err.splitlines() if "error" in line).startswith("error: the prompt has 65 tokens")
    [result] = objects(out)
    assert result["error_type"] == "PromptTooLong"
    code, out, err = call("--prompt", "a" * 64, "--prompt", "abc", "--max-tokens", "4")
    assert code == 3
    assert "error: prompt 1: the prompt has 65 tokens" in err
    assert out == "> abc\ndefg\n(4 tokens, length)\n\n"


def test_a_missing_extra_for_traces_is_told_before_anything_is_loaded(
    call: Call, fakes: Fakes, monkeypatch: pytest.MonkeyPatch
) -> None:
    importlib.import_module("jaxserve.serve.service")  # FastAPI needs OpenTelemetry's API itself, when it is imported
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "jaxserve.telemetry.traces", raising=False)
    code, _, err = call("--set", "serve.grpc.port=0", "--set", "runtime.trace_endpoint=http://localhost:4317")
    assert code == 2 and err.splitlines()[-1].endswith(how_to_install("otel"))
    assert fakes.config is None


def test_a_port_in_use_is_told_before_anything_is_loaded(call: Call, fakes: Fakes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        for setting in ("serve.grpc.port", "serve.http.port"):
            code, out, err = call("--set", f"{setting}={port}")
            assert (code, out) == (2, "")
            assert err.splitlines()[-1].startswith(f"error: cannot listen on 127.0.0.1:{port}: ")
            assert f"set serve.host or {setting}" in err
            assert "add_port" not in err, "gRPC's own line"
    assert fakes.config is None


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("sched.policy=fcsf", "no scheduler is called 'fcsf'"),
        ("sched.lengths=lerned", "no length predictor is called 'lerned'"),
        ("route.policy=prefx", "no router is called 'prefx'"),
        ("sched.policy=jaxserve.sched.policy:Policy", "the policy Policy lacks the method key"),
        ("cache.page_shares={a: 0.7, b: 0.6}", "2 tenants with 1.3 of the pages in all"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_is_loaded(call: Call, fakes: Fakes, setting: str, words: str) -> None:
    code, _, err = call("--prompt", "a", "--set", setting)
    assert code == 2
    assert words in err.splitlines()[-1]
    assert fakes.config is None


def test_results_survive_a_config_that_cannot_load(call: Call, fakes: Fakes, tmp_path: Path) -> None:
    source, target = write_lines(tmp_path / "in.jsonl", GOOD), write_lines(tmp_path / "out.jsonl", {"old": 1})
    code, _, err = call("--input", str(source), "--output", str(target), "--set", "sched.policy=fcsf")
    assert (code, objects(target.read_text())) == (2, [{"old": 1}])
    assert err.splitlines()[-1].startswith("error: no scheduler is called 'fcsf'")
    assert call("--input", str(source), "--output", str(target))[0] == 0
    assert [r["text"] for r in objects(target.read_text())] == ["defg"]


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "give --prompt TEXT or --input FILE to answer prompts, or a port"),
        (["--chat"], "--chat given, but nothing to answer"),
        (["--max-tokens", "3"], "--max-tokens given"),
        (["--prompt", "a", "--input", "b"], "not both"),
        (["--prompt", "a", "--temperature", "nan"], "temperature is nan"),
        (["--prompt", "a", "--max-tokens", "0"], "max_tokens is 0"),
        (["--prompt", "a", "--max-tokens", "x"], "--max-tokens"),
        (["--prompt", "a", "--top-p", "2"], "top_p is 2.0"),
        (["--promt", "a"], "--prompt"),
        (["--prompt"], "--prompt"),
        (["demo", "stray"], "stray"),
        (["--input", "/no/such/file"], "cannot open /no/such/file"),
        (["--prompt", "a", "--output", "/no/such/file"], "cannot open /no/such/file"),
        (["--prompt", "a", "--config", "/no/such.yaml"], "cannot read the config file /no/such.yaml"),
        (["--prompt", "a", "--set", "cache.num_page=1"], "did you mean 'cache.num_pages'"),
    ],
)  # fmt: skip
def test_wrong_use_is_one_line_before_anything_is_loaded(call: Call, fakes: Fakes, arguments, fragment) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert line.startswith("error: ")
    assert fragment in line
    assert fakes.config is None


def test_a_model_may_be_named_by_its_own_option(call: Call, fakes: Fakes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((ROOT / "tests" / "fixtures" / "llama" / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_text("{}")  # which a fake device does not read
    assert call("--set", "model.path=/nowhere", "--model", str(tmp_path), "--prompt", "abc")[0] == 0
    assert fakes.config is not None
    assert fakes.config.model.path == str(tmp_path)


def test_input_and_output_must_differ(call: Call, tmp_path: Path) -> None:
    source = write_lines(tmp_path / "in.jsonl", GOOD)
    code, _, err = call("--input", str(source), "--output", str(tmp_path / "." / "in.jsonl"))
    assert code == 2
    assert "the same file" in err
    assert objects(source.read_text()) == [GOOD]


def test_a_defect_is_not_swallowed(call: Call, fakes: Fakes) -> None:
    fakes.fail_at = (0, "dispatch")
    with pytest.raises(RuntimeError, match="injected"):
        call("--prompt", "abc")


def test_the_console_script(capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("JAXSERVE_LOG_LEVEL", raising=False)
    path = tmp_path / "c.yaml"
    path.write_text("cache:\n  num_pages: 7\n")
    assert cli.main(["config", "--config", str(path), "--set", "serve.grpc.port=1"]) == 0
    out, err = capsysbinary.readouterr()
    assert f"# {path}:2" in out.decode()
    assert b"port: 1" in out
    assert err == b""
    assert cli.main(["--version"]) == 0
    assert capsysbinary.readouterr().out == f"jaxserve {__version__}\n".encode()
    assert cli.main(["version"]) == 0
    assert capsysbinary.readouterr().out.startswith(f"jaxserve {__version__}\njax ".encode())
    for wrong in ([], ["nonsense"], ["config", "--set", "x=1"], ["convert", "a"], ["run"]):
        assert cli.main(wrong) == 2
        out, err = capsysbinary.readouterr()
        assert out == b""
        assert err.startswith(b"error: ")
        assert err.count(b"\n") == 1


def test_every_help_is_told_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["-h"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for command in cli.COMMANDS.values():
        assert command.about in told
    for words in (["plan", "-h"], ["bench", "latency", "-h"]):
        assert cli.main(words) == 0
        assert "Usage:" in capsys.readouterr().out
    assert run.main(["-h"]) == 0


# ---- processes -----------------------------------------------------------------------------------------------------


def test_process_user_error_needs_no_jax() -> None:
    done = process([sys.executable, "-X", "importtime", "-m", "jaxserve.run"], "--prompt", "a", "--set", "a.b=c")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "jaxserve.config" in imported
    assert not {"jax", "flax", "grpc"} & imported
    rest = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, done.stdout) == (2, "")
    sections = "model, cache, sched, degrade, speculation, adapters, kernels, attention, parallel, hosts, runtime, "
    sections += "vision, rerank, serve, watchdog, route, store, handoff, events, kv_server"
    assert rest == [f"error: --set: unknown key 'a.b'; known here: {sections}"]


def test_process_the_package_is_the_console_script() -> None:
    done = process([sys.executable, "-m", "jaxserve"], "--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"jaxserve {__version__}\n", "")


def test_process_json_is_all_there_is_on_stdout() -> None:
    done = process(FAKE, "--prompt", "é", "--prompt", "abc", "--json", "--max-tokens", "3", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert [o["prompt"] for o in objects(done.stdout)] == ["é", "abc"]
    assert "2/2" in done.stderr


def test_process_defect_is_exit_code_one_with_a_traceback() -> None:
    done = process(FAKE, "--broken-device", "--prompt", "abc", "--json")
    assert (done.returncode, done.stdout) == (1, "")
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().endswith("RuntimeError: injected failure of step 0")


def test_process_probes_are_silent_until_it_is_built_and_green_until_sigterm() -> None:
    """As deploy/README.md says of the startup probe. What a drain does to probes: tests/serve/test_lifecycle.py."""
    probes = yaml.safe_load_all((ROOT / "deploy/k8s/cpu.yaml").read_text())
    (container,) = next(d for d in probes if d["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"]
    names = {kind: container[f"{kind}Probe"]["grpc"]["service"] for kind in ("startup", "readiness", "liveness")}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with subprocess.Popen(
        [*FAKE, "--slow-device", "--set", f"serve.grpc.port={port}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as server:  # fmt: skip
        assert server.stdin is not None and server.stdout is not None
        assert server.stdout.readline() == "building\n"
        with Client(f"127.0.0.1:{port}") as client, pytest.raises(RequestFailed) as caught:
            client.check_health(names["startup"], timeout_s=60)
        assert caught.value.status is Status.UNAVAILABLE, "the port is held, and nobody listens"
        server.stdin.write("\n")
        server.stdin.flush()
        line = server.stdout.readline()
        with Client(f"127.0.0.1:{port}") as client:
            health = {kind: client.check_health(name, timeout_s=60) for kind, name in names.items()}
        server.send_signal(signal.SIGTERM)
        _, err = server.communicate(timeout=120)
    assert line == f"serving gRPC on 127.0.0.1:{port}\n", err
    assert health == {"startup": True, "readiness": True, "liveness": True}
    assert server.returncode == 0, err
    assert "Traceback" not in err


def test_process_whose_device_hangs_has_an_exit_code_of_its_own() -> None:
    """It does not wait for the device, and its client hears of it first."""
    with subprocess.Popen(
        [*FAKE, "--hanging-device", "--set", "serve.grpc.port=0", "--set", "watchdog.floor_s=0.3"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as server:  # fmt: skip
        try:
            assert server.stdout is not None
            address = server.stdout.readline().removeprefix("serving gRPC on ").strip()
            with (
                Client(address, retries=Retries(attempts=0)) as client,
                pytest.raises(RequestFailed, match="a step has not ended for .* twice its deadline of 0.3 s") as caught,
            ):
                client.complete("a", SamplingParams(max_tokens=4), timeout_s=120)
            _, err = server.communicate(timeout=120)
        finally:
            server.kill()
    assert caught.value.status is Status.UNAVAILABLE
    assert server.returncode == 5, err
    assert "a step has not ended within its deadline of 0.3 s" in err
    assert "threading.Event().wait()" in err, "the stack of the thread that hangs"


@pytest.mark.slow
def test_process_demo_model_answers() -> None:
    asked = {"What is 683+784?": "1467", "What is 120+345?": "465", 'Reverse "wagon".': "nogaw"}
    prompts = [argument for prompt in asked for argument in ("--prompt", prompt)]
    config = ["--config", str(ROOT / "configs" / "demo.yaml")]
    done = process(REAL, *config, "--chat", "--json", "--temperature", "0", *prompts)
    assert done.returncode == 0, done.stderr
    results = objects(done.stdout)
    assert [r["prompt"] for r in results] == list(asked)
    assert {r["finish_reason"] for r in results} == {"stop"}
    right = [answer in r["text"] for r, answer in zip(results, asked.values(), strict=True)]
    assert sum(right) >= 2, results  # a small model may miss one; an engine that is wrong misses all


def test_echo_without_text_is_an_error_of_its_entry(call: Call, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "a", "detokenize": false}\n')
    code, out, err = call("--input", str(path), "--echo", "--max-tokens", "2")
    first, second = objects(out)
    assert code == 3
    assert first["text"] == "abc"
    assert second["error_type"] == "UnsupportedOption"
    assert "detokenize" in err
