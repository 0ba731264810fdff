"""Rotations against complex multiplication in float64, and frequencies against the published definitions."""

import json
import math

import hf_oracle
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.checkpoint import read_checkpoint
from jaxserve.models.decoder_config import RopeConfig, RopeScaling
from jaxserve.models.hf_config import HfConfig, read_rope
from jaxserve.models.loading import decoder_config
from jaxserve.models.rope import inverse_frequencies, rope_table, rotate


@pytest.mark.parametrize("rotary_dim", [4, 8, 12])
def test_rotation_is_multiplication_by_a_unit_complex_number(rotary_dim: int) -> None:
    rope = RopeConfig(theta=100.0, rotary_dim=rotary_dim)
    x = np.random.default_rng(0).normal(size=(5, 3, 12)).astype(np.float32)
    positions = np.array([0, 1, 7, 100, 1000])
    turned = np.asarray(rotate(jnp.asarray(x), rope_table(rope, jnp.asarray(positions), jnp.asarray(positions + 1))))
    half = rotary_dim // 2
    frequencies = 100.0 ** (-np.arange(half) / half)
    unit = np.exp(1j * positions[:, None] * frequencies)[:, None]
    wanted = (x[..., :half] + 1j * x[..., half:rotary_dim]) * unit
    np.testing.assert_allclose(turned[..., :half], wanted.real, atol=1e-3)
    np.testing.assert_allclose(turned[..., half:rotary_dim], wanted.imag, atol=1e-3)
    np.testing.assert_array_equal(turned[..., rotary_dim:], x[..., rotary_dim:])


def test_scores_depend_on_distance_alone() -> None:
    rope = RopeConfig(theta=1e4, rotary_dim=16)
    q, k = np.random.default_rng(1).normal(size=(2, 1, 1, 16)).astype(np.float32)

    def score(p: int, s: int) -> float:
        tables = [rope_table(rope, jnp.array([i]), jnp.array([i + 1])) for i in (p, s)]
        return float(jnp.sum(rotate(jnp.asarray(q), tables[0]) * rotate(jnp.asarray(k), tables[1])))

    assert score(5, 2) == pytest.approx(score(105, 102), abs=1e-4)
    assert score(5, 2) != pytest.approx(score(5, 3), abs=1e-2)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    """The bands of Llama 3.1: wavelengths under 8192 / 4 kept, over 8192 / 1 divided by 8."""
    scaled = RopeConfig(
        theta=5e5,
        rotary_dim=128,
        scaling=RopeScaling.LLAMA3,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position=8192,
    )
    plain = inverse_frequencies(RopeConfig(theta=5e5, rotary_dim=128))
    ratio, waves = inverse_frequencies(scaled) / plain, 2 * math.pi / plain
    np.testing.assert_allclose(ratio[waves < 2048], 1.0)
    np.testing.assert_allclose(ratio[waves > 8192], 1 / 8)
    between = ratio[(waves >= 2048) & (waves <= 8192)]
    assert len(between) > 3
    assert np.all(np.diff(between) < 0)


def test_dynamic_growth_follows_its_definition_and_starts_at_the_trained_length() -> None:
    rope = RopeConfig(theta=1e4, rotary_dim=16, scaling=RopeScaling.DYNAMIC, factor=4.0, original_max_position=64)
    plain = RopeConfig(theta=1e4, rotary_dim=16)
    positions = jnp.array([10, 63, 63, 63])
    lengths = jnp.array([11, 64, 65, 300])
    cos, _ = rope_table(rope, positions, lengths)
    np.testing.assert_array_equal(cos[:2], rope_table(plain, positions, lengths)[0][:2])
    for row, length in ((2, 65), (3, 300)):
        theta = 1e4 * (4.0 * length / 64 - 3.0) ** (16 / 14)
        wanted = np.cos(63 * theta ** (-np.arange(0, 16, 2) / 16))
        np.testing.assert_allclose(cos[row], wanted, atol=1e-5)


def test_both_spellings_of_config_json_mean_the_same(tmp_path) -> None:
    for name in ("llama_yarn_mscale", "qwen3", "llama"):
        config = json.loads((hf_oracle.FIXTURES / name / "config.json").read_text())
        assert "rope_parameters" in config
        new = decoder_config(read_checkpoint(hf_oracle.FIXTURES / name))[1]
        parameters = config.pop("rope_parameters")
        config |= {"rope_theta": parameters.pop("rope_theta"), "rope_scaling": parameters}
        parameters["type"] = parameters.pop("rope_type")
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert decoder_config(read_checkpoint(tmp_path))[1] == new


def test_yarn_attention_factor_is_given_or_follows() -> None:
    def factor(**rope) -> float:
        table = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64} | rope
        return read_rope(HfConfig({"rope_scaling": table}, "config.json"), 16).attention_factor

    assert factor() == pytest.approx(0.1 * math.log(16) + 1)
    assert factor(attention_factor=0.7) == 0.7
    assert factor(mscale=1.0, mscale_all_dim=1.0) == 1.0
    assert factor(mscale=0.707) == factor()
    assert factor(factor=1.0) == 1.0
