"""transformers and compressed-tensors read what `jaxserve quantize` writes as we do.

The fixtures are of scripts/make_written_fixtures.py.
"""

from pathlib import Path

import hf_oracle
import numpy as np
import pytest
from make_written_fixtures import MODULES, PROMPT, SCHEMES
from quantise_parts import FIXTURES, llama, run, write_texts

from jaxserve.models import load_model, read_checkpoint
from jaxserve.models.loading import decoder_config
from jaxserve.models.quantised import Quantisation
from jaxserve.models.shard_reading import checked_tensors
from jaxserve.quantise.source import open_source


@pytest.mark.parametrize("name", SCHEMES)
def test_the_same_weights_and_logits(name: str, tmp_path: Path) -> None:
    source, data = llama(tmp_path / "source"), write_texts(tmp_path / "texts.jsonl", 128, count=2)
    run(source, tmp_path / "out", data, **({"scheme": name} | SCHEMES[name]))
    expected = np.load(FIXTURES / "written" / f"{name}.npz")
    checkpoint = read_checkpoint(tmp_path / "out")
    family, config = decoder_config(checkpoint)
    tensors = checked_tensors(checkpoint, family, config, open_source(read_checkpoint(source)).plan)
    for module in MODULES:
        tensor = tensors[f"{module}.weight"]
        found = tensor.read(tuple(slice(0, size) for size in tensor.shape))
        np.testing.assert_array_equal(found, expected[module], err_msg=module)
    loaded = load_model(checkpoint, dtype="float32", quantisation=Quantisation(scheme="none"))
    driver = hf_oracle.Driver(loaded, num_rows=1, max_len=64, page_size=16)
    logits = driver.prefill([PROMPT.astype(np.int32)], [[]])[0]
    # Of int8-a8, transformers rounds the inputs of products, too.
    assert np.abs(logits - expected["logits"]).max() < (0.5 if name == "int8-a8" else 1e-4)
