"""Scales of AWQ change no layer: what divides the inputs and what multiplies the weights cancel, in every family."""

import ml_dtypes
import numpy as np
import pytest
from quantise_parts import FIXTURES

from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.models import read_checkpoint
from jaxserve.quantise.folding import apply, folds_of, shared_magnitude
from jaxserve.quantise.source import open_source
from jaxserve.quantise.streaming import Streams
from jaxserve.runtime.calibration import whole_batches

QKV, OUT, GATE_UP, UP, DOWN = "qkv", "out", "gate_up", "up", "down"
# What can be scaled, product by product; those in brackets share a norm.
FAMILIES = {
    "llama": [[QKV], [GATE_UP], [OUT], [DOWN]],
    "gemma2": [[QKV], [GATE_UP], [OUT], [DOWN]],  # norms are stored as the difference to 1, and in bfloat16
    "opt": [[QKV], [UP], [OUT], [DOWN]],  # ReLU lets scales through; biases everywhere
    "bloom": [[QKV], [UP], [OUT]],
    "phi": [[QKV, UP], [OUT]],  # one norm for both sub-blocks
    "olmo2": [[OUT], [DOWN]],  # norms behind the sub-blocks
    "mixtral": [[QKV], [OUT]],
    "phi3": [[QKV], [GATE_UP], [OUT], [DOWN]],
    "qwen2": [[QKV], [GATE_UP], [OUT], [DOWN]],
    "falcon_new": [[QKV], [UP], [OUT]],
}
FAST = ("llama", "gemma2")


@pytest.mark.parametrize(
    "family", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_a_layer_stays_the_same(family: str) -> None:
    source = open_source(read_checkpoint(FIXTURES / family))
    config, rng = source.config, np.random.default_rng(0)
    streams = Streams(config, np.dtype(np.float32), XLA_ATTENTION)
    steps = list(whole_batches([list(range(3, 40)), list(range(60, 20, -1))], 16))
    hidden = streams.embed(source.arrays(None, np.dtype(np.float32)), steps)
    arrays = plain = source.arrays(0, np.dtype(np.float32))
    folds = folds_of(config.layers[0])
    names = [[name.split(".")[1] for name in fold.consumers] for fold in folds]
    assert sorted(names) == sorted(FAMILIES[family])
    for fold in folds:
        depth = arrays[fold.consumers[0]].reshape(-1, _depth(fold.consumers[0], arrays)).shape[1]
        scales = shared_magnitude(fold, config, np.exp(rng.normal(size=depth)).astype(np.float32))
        before = dict(arrays)
        arrays, _ = apply(fold, config, arrays, scales, np.dtype(ml_dtypes.bfloat16))
        assert all(not np.allclose(arrays[name], before[name]) for name in fold.consumers)
    (expected,), _ = streams.advance(0, plain, steps, hidden)
    (found,), _ = streams.advance(0, arrays, steps, hidden)
    tokens = 37 + 40
    size = np.abs(expected[:tokens]).max()
    assert np.abs(found[:tokens] - expected[:tokens]).max() < 1e-5 * size + 1e-5


def _depth(name: str, arrays: dict[str, np.ndarray]) -> int:
    """Inputs of a product; those of the output of attention are two axes."""
    shape = arrays[name].shape
    return shape[-1] * shape[-2] if name == "attention.out.kernel" else shape[-1]
