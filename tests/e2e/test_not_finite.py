"""A sequence whose numbers are no numbers ends with an error of its own; its neighbours do not notice."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from whole import FIXTURES, POOL, build, run

from jaxserve.api import FinishReason, SamplingParams
from jaxserve.errors import NotFinite

BROKEN = 7  # its embedding is NaN, so the router of each layer of experts gets NaN
PROMPTS = [[1, 2, 3, 4, 5], [1, 2, BROKEN, 4], [9, 8], [BROKEN]]


@pytest.mark.slow
def test_a_token_of_nan_ends_its_own_request_alone(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(FIXTURES / "mixtral", path)
    weights = load_file(path / "model.safetensors")
    weights["model.embed_tokens.weight"][BROKEN] = np.nan
    save_file(weights, path / "model.safetensors")
    engine = build(path, **POOL)
    sampling = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    alone = [run(engine, [({"prompt_token_ids": prompt}, sampling)])[0][0] for prompt in (PROMPTS[0], PROMPTS[2])]
    crowd = [result for [result] in run(engine, [({"prompt_token_ids": prompt}, sampling) for prompt in PROMPTS])]
    assert [crowd[0].token_ids, crowd[2].token_ids] == [one.token_ids for one in alone]
    for broken in (crowd[1], crowd[3]):
        assert broken.finish_reason is FinishReason.ERROR and broken.token_ids == []
        assert isinstance(broken.error, NotFinite) and "token 1 of this answer" in str(broken.error)
    again = run(engine, [({"prompt_token_ids": PROMPTS[0]}, sampling)])[0][0]
    assert again.token_ids == alone[0].token_ids, "the engine goes on"
