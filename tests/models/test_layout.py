"""Slices of rearranged tensors equal slices of the whole, for random patterns and cuts; truth by plain numpy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models.layout import parse, read_target, write_source

SIZES = {"embed": 6, "heads": 4, "kv_heads": 2, "group": 3, "head_dim": 5, "mlp": 7, "vocab": 8}
SOURCES = (
    "(kv_heads group head_dim) embed",
    "embed (heads head_dim)",
    "mlp embed",
    "vocab embed",
    "(kv_heads head_dim)",
)


@st.composite
def cases(draw):
    left = draw(st.sampled_from(SOURCES))
    names = left.replace("(", "").replace(")", "").split()
    target = list(draw(st.permutations(names)))
    if draw(st.booleans()):
        target.insert(draw(st.integers(0, len(target))), "1")
    cuts = []
    for name in target:
        size = 1 if name == "1" else SIZES[name]
        start = draw(st.integers(0, size - 1))
        cuts.append(slice(start, draw(st.integers(start + 1, size))))
    return left, target, tuple(cuts)


@given(cases())
@settings(max_examples=300)
def test_a_slice_is_the_slice_of_the_whole(case) -> None:
    left, target, cuts = case
    pattern = parse(f"{left} -> {' '.join(target)}")
    names = left.replace("(", "").replace(")", "").split()
    source = np.arange(np.prod(pattern.source_shape(SIZES))).reshape(pattern.source_shape(SIZES))
    taken_apart = source.reshape([SIZES[name] for name in names])
    whole = taken_apart.transpose([names.index(name) for name in target if name != "1"])
    whole = whole.reshape([1 if name == "1" else SIZES[name] for name in target])
    got = read_target(lambda index: source[index], pattern, SIZES, cuts)
    np.testing.assert_array_equal(got, whole[cuts])
    np.testing.assert_array_equal(write_source(whole, pattern, SIZES), source)


def test_only_the_cut_is_read_when_the_outermost_factor_is_cut() -> None:
    seen = []
    source = np.arange(30 * 6).reshape(30, 6)

    def read(index):
        seen.append(source[index].shape)
        return source[index]

    pattern = parse("(kv_heads group head_dim) embed -> embed kv_heads group head_dim")
    read_target(read, pattern, SIZES, (slice(None), slice(1, 2), slice(None), slice(None)))
    read_target(read, pattern, SIZES, (slice(2, 4), slice(None), slice(0, 1), slice(None)))
    assert seen == [(15, 6), (30, 2)]


def test_a_pattern_that_drops_an_axis_is_a_bug() -> None:
    with pytest.raises(AssertionError):
        parse("embed mlp -> embed")
