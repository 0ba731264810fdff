"""The demo model as one GGUF file, with its tokenizer and its template, answers as it does."""

from pathlib import Path

import gguf_files
import gguf_models
import numpy as np
import pytest
from demo_tasks import TASKS, check, held_out_items
from safetensors.numpy import load_file

from jaxserve import LLM, SamplingParams
from jaxserve.models import read_checkpoint, resolve_model_path
from jaxserve.text import load_tokenizer


def q8_0(weight: np.ndarray) -> gguf_files.Packed:
    """A scale for 32 weights, the largest of which is 127."""
    blocks = weight.astype(np.float32).reshape(len(weight), -1, 32)
    scales = (np.abs(blocks).max(-1, keepdims=True) / 127).astype("<f2")
    codes = np.round(blocks / scales.astype(np.float32)).astype(np.int8)
    octets = np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], axis=-1)
    return gguf_files.Packed(kind="Q8_0", shape=weight.shape, octets=octets)


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """Matrices in Q8_0, the table of embeddings in F16."""
    directory = resolve_model_path("demo")
    config = read_checkpoint(directory).config
    tensors: dict[str, np.ndarray | gguf_files.Packed] = {}
    for name, array in load_file(directory / "model.safetensors").items():
        array = array.astype(np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            array = gguf_models.in_pairs(array, config["head_dim"])
        kept = array if array.ndim == 1 else array.astype(np.float16) if "embed" in name else q8_0(array)
        tensors[gguf_models.gguf_name("llama", name)] = kept
    metadata = {
        **gguf_models.metadata_of("llama", config),
        **gguf_files.sentencepiece_metadata(directory),
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": (directory / "chat_template.jinja").read_text(),
    }
    return gguf_files.write(tmp_path / "demo-q8_0.gguf", metadata, tensors)


@pytest.mark.slow
def test_held_out_tasks(demo: Path) -> None:
    sizes = {
        "sched.max_rows": 16,
        "sched.max_step_tokens": 256,
        "runtime.token_buckets": [256],
        "runtime.row_buckets": [16],
    }
    llm = LLM.from_config(None, overrides={"model.path": str(demo), "model.dtype": "float32", **sizes})
    assert llm.model_name == "demo-q8_0.gguf"
    items = [item for task in TASKS for item in held_out_items(task, 2, seed=21)]
    greedy = SamplingParams(temperature=0.0, max_tokens=None)
    outputs = llm.chat([list(item.messages) for item in items], greedy, use_tqdm=False)
    right = [check(item, output.outputs[0].text) for item, output in zip(items, outputs, strict=True)]
    assert sum(right) >= len(items) - 1
    assert all(output.outputs[0].finish_reason == "stop" for output in outputs)
    tokenizer = load_tokenizer(resolve_model_path("demo"))
    text = "Zoe: what is 12+30?"
    assert llm.get_tokenizer().encode(text) == tokenizer.encode(text)  # pyright: ignore[reportOptionalMemberAccess]
