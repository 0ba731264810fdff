"""Slices of rearranged tensors equal slices of the whole, for random layouts and cuts; truth by plain numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models.layout import parse_axes, pattern_of, read_target, write_source

SIZES = {"embed": 6, "heads": 4, "kv_heads": 2, "slots": 3, "head_dim": 5, "mlp": 7, "vocab": 8, "gate_up": 1}
SOURCES = (
    "(kv_heads slots head_dim) embed",
    "(slots kv_heads head_dim) embed",
    "embed (heads head_dim)",
    "mlp embed",
    "vocab embed",
    "(kv_heads head_dim)",
)


@st.composite
def cases(draw):
    left = draw(st.sampled_from(SOURCES))
    names = [name for group in parse_axes(left) for name in group]
    target = list(draw(st.permutations(names)))
    if draw(st.booleans()):
        target.insert(draw(st.integers(0, len(target))), "gate_up")
    cuts = []
    for name in target:
        start = draw(st.integers(0, SIZES[name] - 1))
        cuts.append(slice(start, draw(st.integers(start + 1, SIZES[name]))))
    return left, tuple(target), tuple(cuts)


@given(cases())
@settings(max_examples=300)
def test_a_slice_is_the_slice_of_the_whole(case) -> None:
    left, target, cuts = case
    pattern = pattern_of(left, target, tuple(SIZES[name] for name in target))
    names = [name for group in parse_axes(left) for name in group]
    source = np.arange(np.prod(pattern.source_shape)).reshape(pattern.source_shape)
    taken_apart = source.reshape([SIZES[name] for name in names])
    whole = taken_apart.transpose([names.index(name) for name in target if name in names])
    whole = whole.reshape([SIZES[name] for name in target])
    got = read_target(lambda index: source[index], pattern, cuts)
    np.testing.assert_array_equal(got, whole[cuts])
    np.testing.assert_array_equal(write_source(whole, pattern), source)


def test_only_the_cut_is_read_when_the_outermost_factor_is_cut() -> None:
    seen = []
    source = np.arange(30 * 6).reshape(30, 6)

    def read(index):
        seen.append(source[index].shape)
        return source[index]

    pattern = pattern_of("(kv_heads slots head_dim) embed", ("embed", "kv_heads", "slots", "head_dim"), (6, 2, 3, 5))
    read_target(read, pattern, (slice(None), slice(1, 2), slice(None), slice(None)))
    read_target(read, pattern, (slice(2, 4), slice(None), slice(0, 1), slice(None)))
    assert seen == [(15, 6), (30, 2)]


def test_a_pattern_that_drops_or_invents_an_axis_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        pattern_of("embed", ("embed", "mlp"), (6, 7))
    with pytest.raises(AssertionError):
        pattern_of("embed mlp", ("embed",), (6,))
