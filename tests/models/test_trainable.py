"""The decoder as a function of its parameters: tensors of a checkpoint both ways, HF's log-probabilities, gradients."""

import json
from pathlib import Path

import hf_oracle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxserve.errors import CheckpointError
from jaxserve.models import load_trainable

FIXTURES = hf_oracle.FIXTURES
GRADIENTS = json.loads((FIXTURES / "gradients.json").read_text(encoding="utf-8"))


def tensors_of(directory: Path) -> dict[str, np.ndarray]:
    return {name: array for file in sorted(directory.glob("*.safetensors")) for name, array in load_file(file).items()}


@pytest.mark.parametrize("name", hf_oracle.NAMES)
def test_tensors_of_a_checkpoint_both_ways(name: str) -> None:
    decoder, params = load_trainable(FIXTURES / name, dtype="float32")
    tensors, stored = decoder.to_hf(params), tensors_of(FIXTURES / name)
    for source, array in tensors.items():
        [match] = [key for key in stored if key == source or source.endswith("." + key)]  # some leave the prefix out
        np.testing.assert_array_equal(array, stored[match].astype(np.float32))
    back = decoder.from_hf(tensors)
    assert back.keys() == params.keys()
    for key in params:
        np.testing.assert_array_equal(back[key], params[key])


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("gemma2", "gpt_oss", "mpt")), "qwen3"]
)
def test_log_probabilities_are_those_of_transformers(name: str) -> None:
    """Soft caps, sinks, slopes; of rows of several lengths; and gradients that are finite everywhere."""
    decoder, params = load_trainable(FIXTURES / name, dtype="float32")
    asked = hf_oracle.answers(name)
    prompts = [answer.prompt for answer in asked]
    longest = max(map(len, prompts))
    tokens = np.zeros((len(prompts), longest), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    lengths = jnp.asarray([len(prompt) for prompt in prompts])

    def loss(params):
        found = decoder.log_probs(params, jnp.asarray(tokens), lengths)
        return -found.mean(), found

    (_, found), slopes = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert slopes.keys() == params.keys()
    for answer, row in zip(asked, np.asarray(found), strict=True):
        right = answer.logits[:-1] - answer.logits[:-1].max(-1, keepdims=True)
        right = right - np.log(np.exp(right).sum(-1, keepdims=True))
        count = len(answer.prompt) - 1
        assert np.abs(row[:count] - right[np.arange(count), answer.prompt[1:]]).max(initial=0) < 1e-3
        assert not row[count:].any()
    assert all(bool(jnp.isfinite(slope).all()) for slope in slopes.values())


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "qwen3" else pytest.mark.slow) for n in GRADIENTS])
def test_gradients_are_those_of_transformers(name: str) -> None:
    """Their lengths, and their inner products with a vector: `scripts/make_gradient_fixtures.py`."""
    decoder, params = load_trainable(FIXTURES / name, dtype="float32")
    tokens = jnp.asarray(max((answer.prompt for answer in hf_oracle.answers(name)), key=len))[None]
    slopes = decoder.to_hf(jax.jit(jax.grad(lambda params: decoder.log_probs(params, tokens).mean()))(params))
    assert slopes.keys() == GRADIENTS[name].keys()
    for source, (length, along) in GRADIENTS[name].items():
        slope = slopes[source].astype(np.float64)
        direction = np.sin(1.0 + np.arange(slope.size, dtype=np.float64) ** 1.5)
        assert np.linalg.norm(slope) == pytest.approx(length, rel=1e-4, abs=1e-7), source
        assert abs(slope.reshape(-1) @ direction - along) < 1e-4 * length * np.sqrt(slope.size) + 1e-7, source


def test_other_tensors_are_refused() -> None:
    decoder, params = load_trainable(FIXTURES / "qwen3", dtype="float32")
    tensors = decoder.to_hf(params)
    name = "model.norm.weight"
    for changed, match in (
        ({key: value for key, value in tensors.items() if key != name}, r"model\.norm\.weight \(missing\)"),
        ({**tensors, "x": tensors[name]}, r"x \(unknown\)"),
        ({**tensors, name: tensors[name][:3]}, r"has shape \[3\], and the model needs"),
    ):
        with pytest.raises(CheckpointError, match=match):
            decoder.from_hf(changed)
