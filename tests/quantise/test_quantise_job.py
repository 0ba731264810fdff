"""The job: going on after a kill, its report against a whole model's, budgets, caches, and what it refuses."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import hf_oracle
import numpy as np
import pytest
from quantise_parts import llama, model, run, stored, write_texts

from jaxserve.cli import main
from jaxserve.errors import CheckpointError, ConfigError, UserError
from jaxserve.models import load_model
from jaxserve.models.quantised import Quantisation
from jaxserve.quantise.choice import Options, read_rules

HERE = Path(__file__).parent
KILLED = """
import sys, time
sys.path[:0] = [{here!r}]
from pathlib import Path
from quantise_parts import run

class Waiting:
    def begin(self, phase):
        if phase.startswith("layer 2 of 2: rounding"):
            print("layer 2", flush=True)
            time.sleep(600)
    def count(self, done, total, newest=""):
        pass

run(Path({source!r}), Path({target!r}), Path({data!r}), scheme="int4", group=16, method={method!r}, progress=Waiting())
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_a_killed_job_goes_on(method: str, tmp_path: Path) -> None:
    """SIGKILL in the middle of the second layer; the rest gives the same bytes as a job that was never killed."""
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128)
    whole, target = tmp_path / "whole", tmp_path / "out"
    code = KILLED.format(here=str(HERE), source=str(source), target=str(target), data=str(data), method=method)
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1]), "JAX_PLATFORMS": "cpu"}
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=environment, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "layer 2\n"
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
    first = tmp_path / "out.partial/model-00001-of-00003.safetensors"
    assert first.is_file() and not target.exists()
    written = first.stat().st_mtime_ns
    with pytest.raises(ConfigError, match="unfinished job that differs in options"):
        run(source, target, data, scheme="int4", group=16, method=method, damping=0.02)
    report = run(source, target, data, scheme="int4", group=16, method=method)
    assert (target / first.name).stat().st_mtime_ns == written
    assert report == run(source, whole, data, scheme="int4", group=16, method=method)
    assert {file.name: file.read_bytes() for file in target.iterdir()} == {
        file.name: file.read_bytes() for file in whole.iterdir()
    }


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize(
    ("scheme", "method"), [("int4", "gptq"), pytest.param("int4", "awq", marks=pytest.mark.slow), ("int8", "rtn")]
)
def test_the_report_is_that_of_whole_models(scheme: str, method: str, tmp_path: Path) -> None:
    """Divergence and perplexity from the logits of the two directories, loaded as servers load them, in float64."""
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128)
    judge = write_texts(tmp_path / "judge.jsonl", 128, count=4, seed=1)
    group = {"group": 16} if scheme == "int4" else {}
    report = run(source, tmp_path / "out", data, scheme=scheme, method=method, judge=judge, **group)
    texts = [json.loads(line)["prompt_token_ids"] for line in judge.read_text().splitlines()]
    divergences, losses, same = [], [], []
    drivers = [
        hf_oracle.Driver(load_model(path, dtype="float32", quantisation=wanted), num_rows=1, max_len=64, page_size=16)
        for path, wanted in ((source, Quantisation()), (tmp_path / "out", Quantisation(scheme="none")))
    ]
    for ids in texts:
        prompt = np.asarray(ids, np.int32)
        p, q = (log_softmax(driver.prefill([prompt], [[]])[0])[:-1] for driver in drivers)
        divergences += list((np.exp(p) * (p - q)).sum(axis=-1))
        losses += list(-q[np.arange(len(ids) - 1), prompt[1:]])
        same += list(p.argmax(axis=-1) == q.argmax(axis=-1))
    found = report["quality"]
    assert found["positions"] == len(divergences) and report["held_out"]
    assert found["kl_mean"] == pytest.approx(np.mean(divergences), rel=0.01, abs=1e-9)
    assert found["kl_max"] == pytest.approx(np.max(divergences), rel=0.01, abs=1e-8)
    assert found["perplexity"] == pytest.approx(np.exp(np.mean(losses)), rel=1e-4)
    assert found["same_top"] == pytest.approx(np.mean(same))


@pytest.mark.slow
def test_answers_are_counted(tmp_path: Path) -> None:
    """Of chats, the answers alone are judged; the demo model knows these."""
    chats = [
        [{"role": "user", "content": f"What is {a}+{b}?"}, {"role": "assistant", "content": answer}]
        for a, b, answer in ((12, 30, "42"), (683, 784, "1467"), (5, 5, "11"))
    ]
    data = tmp_path / "chats.jsonl"
    data.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    report = run("demo", tmp_path / "out", data, scheme="int8", judge=data)
    found = report["quality"]
    assert found["answers"] == 3
    assert found["right"] == found["right_float"] == pytest.approx(2 / 3)  # the last answer is wrong
    assert found["kl_mean"] < 1e-4


def test_gptq_and_awq_are_better_than_rounding_to_nearest(tmp_path: Path) -> None:
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128, count=48)
    reports = {
        method: run(source, tmp_path / method, data, scheme="int4", group=16, method=method)
        for method in ("rtn", "gptq", "awq")
    }
    errors = {
        method: np.mean([w["error"] for layer in report["layers"] for w in layer["weights"].values()])
        for method, report in reports.items()
    }
    assert errors["gptq"] < 0.8 * errors["rtn"]
    assert errors["awq"] < errors["rtn"]


def test_a_budget_raises_what_costs_most(tmp_path: Path) -> None:
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128)
    plain = run(source, tmp_path / "plain", data, scheme="int4", group=16)
    report = run(source, tmp_path / "out", data, scheme="int4", group=16, budget_bits=7.0)
    assert plain["bits_per_weight"] < report["bits_per_weight"] <= 7.0
    schemes = {name: w["scheme"] for layer in report["layers"] for name, w in layer["weights"].items()}
    assert set(schemes.values()) == {"int4", "int8"}
    for layer in range(2):  # weights of one parameter have one scheme
        attention = {schemes[f"model.layers.{layer}.self_attn.{name}_proj"] for name in "qkv"}
        assert len(attention) == 1
    assert report["quality"]["kl_mean"] < plain["quality"]["kl_mean"]
    load_model(tmp_path / "out", dtype="float32")


def test_scales_of_keys_and_values(tmp_path: Path) -> None:
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128)
    run(source, tmp_path / "out", data, cache_scales=True)
    table = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert table == {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
    by_head = load_model(tmp_path / "out", dtype="float32", cache_dtype="int8").cache_scales
    assert by_head is not None and by_head.keys.shape == (2, 2)
    (tmp_path / "out/cache_scales.json").unlink()
    by_layer = load_model(tmp_path / "out", dtype="float32", cache_dtype="int8").cache_scales
    assert by_layer is not None and not by_layer.is_one
    np.testing.assert_allclose(by_layer.keys, by_head.keys.max(axis=1, keepdims=True).repeat(2, axis=1), rtol=1e-5)
    tensors = stored(tmp_path / "out")
    assert tensors["model.layers.1.self_attn.v_scale"].shape == (1,)


def test_ranges_that_awq_makes_stale(tmp_path: Path) -> None:
    """AWQ divides values by its scales, so what the source says of their size does not hold any more."""
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128, count=2)
    run(source, tmp_path / "first", data, cache_scales=True)
    shutil.copyfile(tmp_path / "first/cache_scales.json", source / "cache_scales.json")
    report = run(source, tmp_path / "awq", data, method="awq")
    assert not (tmp_path / "awq/cache_scales.json").exists()
    assert any("cache_scales.json of the source is left out" in note for note in report["notes"])
    run(source, tmp_path / "gptq", data, method="gptq")
    assert (tmp_path / "gptq/cache_scales.json").is_file()


def test_text_that_is_too_little_to_hold_out(tmp_path: Path) -> None:
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128, count=1)
    assert not run(source, tmp_path / "out", data)["held_out"]


BAD: dict[str, tuple[dict[str, Any], type[UserError], str]] = {
    "scheme": ({"scheme": "int3"}, ConfigError, r"--scheme is 'int3'; known: int8, int8-a8, int4, fp8"),
    "method": ({"method": "magic"}, ConfigError, r"--method is 'magic'; known: rtn, gptq, awq"),
    "head": ({"head": "int4"}, ConfigError, r"--head is 'int4'; known: none, int8"),
    "damping": ({"damping": 0.0}, ConfigError, r"--damping is 0.0, but must lie between 0 and 1"),
    "group that does not divide": (
        {"scheme": "int4", "group": 32},
        ConfigError,
        r"groups of 32 inputs do not divide the 48 of model\.layers\.0\..*, and 13 weights more; take --group 16",
    ),
    "no group divides": ({"scheme": "int4"}, ConfigError, r"groups of 32 inputs do not divide .*take --group 16"),
    "group without int4": ({"group": 16}, ConfigError, r"--group is 16, but no weight is int4"),
    "budget too low": (
        {"scheme": "int4", "group": 16, "budget_bits": 4.5},
        ConfigError,
        r"--budget-bits is 4\.5, but .* have 6\.000 bits in int4 and .*raise it",
    ),
    "budget too high": (
        {"scheme": "int4", "group": 16, "budget_bits": 12.0},
        ConfigError,
        r"--budget-bits is 12\.0, but .*lower it",
    ),
    "budget of int8": ({"budget_bits": 6.0}, ConfigError, r"--scheme is int8; set it to int4"),
    "rule that matches nothing": (
        {"rules": {"model.layers.7.mlp": "none"}},
        ConfigError,
        r"--rule: 'model\.layers\.7\.mlp' is the whole name of no weight; near it are model\.layers\.",
    ),
    "rule with an unknown scheme": ({"rules": {".*": "int2"}}, ConfigError, r"--rule: '\.\*' has 'int2'; known: none"),
    "rule that is no pattern": ({"rules": {"(": "none"}}, ConfigError, r"is no regular expression"),
    "nothing is left": ({"rules": {".*": "none"}}, ConfigError, r"no weight would be rounded"),
    "table of embeddings": (
        {"rules": {".*embed_tokens": "int4"}},
        ConfigError,
        r"is a table of embeddings, which can be int8 or none",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_options_that_cannot_be(case: str, tmp_path: Path) -> None:
    options, error, message = BAD[case]
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128, count=2)
    with pytest.raises(error, match=message):
        run(source, tmp_path / "out", data, **options)
    assert {path.name for path in tmp_path.iterdir()} == {"source", "texts.jsonl"}


def test_rules_as_they_are_written() -> None:
    assert read_rules([".*=a=none", "x=int8"]) == {".*=a": "none", "x": "int8"}
    for bad in ("int8", "=int8"):
        with pytest.raises(ConfigError, match="must be NAME=SCHEME"):
            read_rules([bad])


def test_empty_text(tmp_path: Path) -> None:
    source, data = llama(tmp_path / "source"), tmp_path / "texts.txt"
    data.write_text(" \n")
    with pytest.raises(ConfigError, match="holds no text"):
        run(source, tmp_path / "out", data)
    (tmp_path / "one.jsonl").write_text('{"prompt_token_ids": [3]}\n')
    with pytest.raises(ConfigError, match="no text of two tokens or more"):
        run(source, tmp_path / "out", tmp_path / "one.jsonl")
    (tmp_path / "large.jsonl").write_text('{"prompt_token_ids": [3, 128]}\n')
    with pytest.raises(ConfigError, match="has token 128, but the model has 128"):
        run(source, tmp_path / "out", tmp_path / "large.jsonl")


def test_target_that_is_not_empty(tmp_path: Path) -> None:
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128, count=2)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="exists already; give a new or empty directory"):
        run(source, tmp_path / "out", data)
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial/notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="has files of no job"):
        run(source, tmp_path / "new", data)


def test_source_that_is_quantised_already(tmp_path: Path) -> None:
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128, count=2)
    run(source, tmp_path / "out", data)
    with pytest.raises(CheckpointError, match="is quantised already .*take the checkpoint that it was made of"):
        run(tmp_path / "out", tmp_path / "again", data)


def test_families_that_cannot_be(tmp_path: Path) -> None:
    data = write_texts(tmp_path / "texts.jsonl", 96, count=2)
    with pytest.raises(CheckpointError, match="GPT2LMHeadModel stores inputs before outputs"):
        run(model(tmp_path / "gpt2", "gpt2"), tmp_path / "out", data)
    with pytest.raises(ConfigError, match="is its table of embeddings; use --embedding"):
        run(model(tmp_path / "opt", "opt"), tmp_path / "out", data, head="int8")
    with pytest.raises(ConfigError, match=r"BloomForCausalLM calls it transformer\.h\.0\.self_attention"):
        run(model(tmp_path / "bloom", "bloom"), tmp_path / "out", data, cache_scales=True)


@pytest.mark.slow
def test_experts_of_one_tensor_stay_floats(tmp_path: Path) -> None:
    """gpt-oss has all experts of a layer in one tensor, which no format here has."""
    data = write_texts(tmp_path / "texts.jsonl", 96, count=2)
    report = run(model(tmp_path / "source", "gpt_oss"), tmp_path / "out", data)
    assert any("tensors of whole experts stay floats" in note for note in report["notes"])
    load_model(tmp_path / "out", dtype="float32")


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128, count=2)
    tensors = stored(source)
    broken = tensors["model.layers.1.mlp.up_proj.weight"].copy()
    broken[3, 5] = np.nan
    save_file(tensors | {"model.layers.1.mlp.up_proj.weight": broken}, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 numbers of .*layers\.1\.mlp\..* are NaN or infinite"):
        run(source, tmp_path / "out", data)
    assert not (tmp_path / "out").exists()


def test_options_are_checked_when_they_are_made() -> None:
    with pytest.raises(ConfigError, match="--embedding is 'fp8'"):
        Options(scheme="int8", embedding="fp8")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128, count=4)
    fixed = ["--set", "model.dtype=float32", "--set", "kernels.paged_attention=xla", "--data", str(data)]
    command = ["quantize", str(source), str(tmp_path / "out"), *fixed]
    assert main([*command, "--scheme", "int3"]) == 2
    assert "--scheme is 'int3'; known: int8, int8-a8, int4, fp8" in capsys.readouterr().err
    assert main([*command, "--scheme", "int8", "--set", "model.quantization=int8"]) == 2
    assert "quantize reads float weights" in capsys.readouterr().err
    assert main([*command, "--scheme", "int4", "--group", "16", "--rule", r".*\.down_proj=int8"]) == 0
    shown = capsys.readouterr()
    assert "int4 by rtn:" in shown.out and "same likeliest" in shown.out
    assert "layer 2 of 2" in shown.err
    report = json.loads((tmp_path / "out/quality.json").read_text())
    assert report["layers"][1]["weights"]["model.layers.1.mlp.down_proj"]["scheme"] == "int8"
