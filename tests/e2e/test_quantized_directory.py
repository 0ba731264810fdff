"""The demo model as `jaxserve quantize` writes it, served: the tokens are those of the weights that it stands for."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from whole import DEMO, build, run

from jaxserve.api import SamplingParams
from jaxserve.assemble.quantise import quantise_checkpoint
from jaxserve.config import load_config
from jaxserve.models import read_checkpoint, resolve_model_path
from jaxserve.models.loading import decoder_config
from jaxserve.models.shard_reading import checked_tensors
from jaxserve.quantise.choice import Options
from jaxserve.quantise.source import open_source

PROMPTS = ["What is 683+784?", 'Spell "wagon" backwards.', "Sort: 9 3 7 1."]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


def widened(directory: Path, target: Path) -> Path:
    """The same weights as floats, without a config that calls them quantised."""
    checkpoint = read_checkpoint(directory)
    family, config = decoder_config(checkpoint)
    plan = open_source(read_checkpoint("demo")).plan
    tensors = checked_tensors(checkpoint, family, config, plan)
    floats = {n: t.read(tuple(slice(0, size) for size in t.shape)).astype(np.float32) for n, t in tensors.items()}
    target.mkdir()
    save_file({name: np.ascontiguousarray(array) for name, array in floats.items()}, target / "model.safetensors")
    for file in directory.iterdir():
        if file.suffix != ".safetensors" and "index" not in file.name:
            (target / file.name).write_bytes(file.read_bytes())
    values = json.loads((directory / "config.json").read_text())
    del values["quantization_config"]
    (target / "config.json").write_text(json.dumps(values))
    return target


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "method"), [("int4", "gptq"), ("int8", "rtn")])
def test_tokens_are_those_of_the_widened_weights(scheme: str, method: str, tmp_path: Path) -> None:
    chat = [{"role": "user", "content": PROMPTS[0]}, {"role": "assistant", "content": "1467"}]
    data = tmp_path / "texts.jsonl"
    data.write_text((json.dumps({"messages": chat}) + "\n") * 2)
    config = load_config(None, ["model.path=demo"]).config
    quantise_checkpoint(config, Options(scheme=scheme, method=method), data, tmp_path / "coded")
    assert any(
        name.endswith("weight_packed") for f in (tmp_path / "coded").glob("*.safetensors") for name in load_file(f)
    )
    floats = widened(tmp_path / "coded", tmp_path / "floats")
    tokens: list[Any] = []
    for path in (tmp_path / "coded", floats):
        engine = build(str(path), **DEMO)
        tokens.append([result.token_ids for [result] in run(engine, [(prompt, GREEDY) for prompt in PROMPTS])])
    assert tokens[0] == tokens[1]
    assert tokens[0][0], resolve_model_path("demo")
