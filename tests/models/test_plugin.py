"""Families from outside the tree: an installed package, a path in the config, a decoder class, and other fields."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import hf_oracle
import numpy as np
import pytest

from jaxserve.config.schema import ModelConfig
from jaxserve.errors import CheckpointError, ConfigError
from jaxserve.models import configured_checkpoint, decoder_config, load_model

PLUGIN = Path(__file__).parents[1] / "plugin"
PROGRAM = """
import json, sys
from jaxserve import LLM
from jaxserve.api import SamplingParams
path, prompt, more = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
sizes = {"model.max_len": 64, "sched.max_rows": 1, "sched.max_step_tokens": 8, "runtime.token_buckets": [8]}
llm = LLM.from_config(None, overrides={"model.path": path, "model.skip_tokenizer": True, **sizes, **more})
asked = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
print(json.dumps(list(llm.generate([prompt], asked, use_tqdm=False)[0].outputs[0].token_ids)))
"""


@pytest.fixture
def cousin(tmp_path: Path) -> Path:
    """The Llama fixture, as a checkpoint of an architecture that this package does not know."""
    shutil.copytree(hf_oracle.FIXTURES / "llama", tmp_path / "cousin")
    file = tmp_path / "cousin" / "config.json"
    config = json.loads(file.read_text())
    config |= {"architectures": ["CousinForCausalLM"], "num_cousins": config["num_hidden_layers"]}
    file.write_text(json.dumps(config))
    return file.parent


@pytest.mark.slow
def test_an_installed_package_adds_a_family(cousin: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    source = shutil.copytree(PLUGIN, tmp_path / "source")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(site), str(source)], check=True, timeout=300)
    answer = hf_oracle.answers("llama")[1]

    def generate(**more: object) -> list[int]:
        command = [sys.executable, "-c", PROGRAM, str(cousin), json.dumps(answer.prompt.tolist()), json.dumps(more)]
        env = os.environ | {"PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(command, env=env, check=True, timeout=300, capture_output=True, text=True)
        return json.loads(done.stdout.splitlines()[-1])

    assert generate() == answer.greedy[:8].tolist()
    mirrored = generate(**{"model.family": "cousin_family:MIRRORED"})
    assert mirrored[0] == int(answer.logits[-1].argmin())


def test_a_family_by_its_path_and_fields_that_have_other_values(cousin: Path) -> None:
    with pytest.raises(CheckpointError, match="'CousinForCausalLM' is unknown; known: .*Llama.*model.family"):
        load_model(cousin)
    llama = "jaxserve.models.families.llama:FAMILY"
    with pytest.raises(CheckpointError, match="num_cousins = 2: .* model.overrides may set it to null"):
        decoder_config(configured_checkpoint(ModelConfig(path=str(cousin), family=llama)))
    overrides = {"num_cousins": None, "rms_norm_eps": 0.5}
    changed = configured_checkpoint(ModelConfig(path=str(cousin), family=llama, overrides=overrides))
    config = decoder_config(changed)[1]
    assert config.norm.eps == 0.5
    truth = hf_oracle.answers("llama")[1]
    driver = hf_oracle.Driver(load_model(changed, dtype="float32"), num_rows=1, max_len=64, page_size=16)
    assert np.abs(driver.prefill([truth.prompt], [[]])[0] - truth.logits).max() > 0.1, "the field changed nothing"
    for name, message in (
        ("json:loads", "is a function and not a Family"),
        ("Lama", "no model family is called 'Lama'"),
    ):
        with pytest.raises(ConfigError, match=message):
            decoder_config(configured_checkpoint(ModelConfig(path=str(cousin), family=name)))
