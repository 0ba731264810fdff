"""What `device_check.py --server` runs, on this machine's CPU: parts that answer, fail and hang are in the record."""

import json
from pathlib import Path

import device_server
import pytest

pytestmark = pytest.mark.slow

SMALL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


def parts_of(path: Path) -> dict[str, dict]:
    return {part["part"]: part for part in json.loads(path.read_text())["results"]}


def test_parts_that_fail_or_hang_are_told_and_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "")  # one device
    record = tmp_path / "server.json"
    monkeypatch.setattr(device_server, "LIMITS_S", {"cold": 60, "demo": 0.01, "tensor2": 60})
    assert device_server.check(record, "cpu", str(tmp_path / "nowhere"), resume=False) == 1
    found = parts_of(record)
    assert "exit status 1" in found["cold"]["failure"] and "nowhere" in "".join(found["cold"]["log"])
    assert found["demo"]["failure"] == "no answer in 0 s"
    assert found["tensor2"]["left_out"] == "there is one device"
    capsys.readouterr()
    monkeypatch.setattr(device_server, "LIMITS_S", {"tensor2": 60, "plan": 120})
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    assert device_server.check(record, "cpu", str(tmp_path), resume=True) == 1, (
        "cold and demo have failed, and are not asked"
    )
    said = capsys.readouterr().out
    assert "plan: at most 120 s" in said and "tensor2: at most" not in said
    assert parts_of(record)["plan"]["predicted_ms"]["decode 64x64"] > 0
