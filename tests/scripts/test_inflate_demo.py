"""The demo model in a larger shape answers as the demo model does, and its head guesses as before."""

from pathlib import Path

import inflate_demo
import pytest

from jaxserve import LLM, SamplingParams

pytestmark = pytest.mark.usefixtures("compiled_quickly")

CHAT = [{"role": "user", "content": "Tell me a story about a fox."}]
SIZES = {
    "sched.max_rows": 1,
    "runtime.background_buckets": False,
    "sched.max_step_tokens": 64,
    "runtime.token_buckets": [64],
    "model.max_len": 128,
    "model.dtype": "float32",
}


def answer(path: Path | str, **more: object) -> tuple[list[int], int]:
    """Greedy tokens, and how many of them were drafts."""
    with LLM.from_config(None, overrides={"model.path": str(path), **SIZES, **more}) as llm:
        [output] = llm.chat(CHAT, SamplingParams(temperature=0.0, max_tokens=32), use_tqdm=False)
    assert output.metrics is not None
    return list(output.outputs[0].token_ids), output.metrics.accepted_tokens


@pytest.mark.slow
def test_answers_are_those_of_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"_HIDDEN": 512, "_LAYERS": 6, "_FFN": 768, "_VOCAB": 1500}.items():
        monkeypatch.setattr(inflate_demo, name, size)
    made = inflate_demo.ensure_inflated(tmp_path)
    speculation = {"speculation.method": "eagle", "speculation.adaptive": False}
    tokens, num_drafts = answer(made, **speculation)
    assert tokens == answer("demo")[0]
    assert num_drafts > 16  # of 32; the head takes 90 % of its first guesses in stories
    assert inflate_demo.ensure_inflated(tmp_path) == made
