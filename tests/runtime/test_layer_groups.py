"""How layers share block tables and cache arrays, and what a sequence holds of the pages."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.runtime.mesh import layer_ranges
from jaxserve.runtime.page_groups import PageGroups
from jaxserve.sched.plan import Bucket, Limits, PageGroup

LONG = 1 << 20


def pattern(window: int, every: int, num_layers: int) -> list[int | None]:
    """Layers with a window, but every so many without."""
    return [None if number % every == 0 else window for number in range(1, num_layers + 1)]


@pytest.mark.parametrize(
    ("name", "windows", "slots", "groups"),
    [
        ("Llama 3 8B", [None] * 32, 32, [None]),
        ("Mistral 7B 0.1", [4096] * 32, 32, [4096]),
        ("Gemma 2 9B", pattern(4096, 2, 42), 21, [None, 4096]),
        ("gpt-oss 20B", pattern(128, 2, 24), 12, [None, 128]),
        ("Gemma 3 1B", pattern(512, 6, 26), 4, [None] + [512] * 6),
        ("Gemma 3 4B", pattern(1024, 6, 34), 5, [None] + [1024] * 6),
        ("Gemma 3 12B", pattern(1024, 6, 48), 8, [None] + [1024] * 5),
        ("Gemma 3 27B", pattern(1024, 6, 62), 11, [None] + [1024] * 5),
        ("Qwen2: the last layers have a window", [None] * 28 + [4096] * 4, 7, [None] * 4 + [4096]),
        ("nearly as many of either", [None] * 9 + [64] * 10, 10, [None, 64]),
        ("three kinds", [None] * 4 + [64] * 8 + [128] * 4, 4, [None, 64, 64, 128]),
        ("a single layer that sees all", [None] + [64] * 3, 1, [None, 64, 64, 64]),
    ],
)
def test_groups_of_families(name, windows, slots, groups) -> None:
    found = PageGroups.of(windows, LONG)
    assert [group.window for group in found.groups] == groups
    assert found.num_slots(range(len(windows))) == slots


def test_a_window_that_no_sequence_outgrows_is_none() -> None:
    """Models of the windows that a run does not use pay for no second table."""
    windows = pattern(4096, 2, 26)
    assert PageGroups.of(windows, 4096).groups == (PageGroup(),)
    assert len(PageGroups.of(windows, 4097).groups) == 2


@pytest.mark.parametrize(
    ("windows", "text"),
    [
        ([None] * 3, "1 group of 3 layers"),
        ([64] * 3, "1 group of 3 layers, with a window of 64 tokens"),
        (pattern(1024, 6, 34), "7 groups of 5 layers, 6 of them with a window of 1024 tokens"),
    ],
)
def test_descriptions(windows, text) -> None:
    assert PageGroups.of(windows, LONG).describe() == text


any_windows = st.lists(st.sampled_from([None, None, 8, 64, 100]), min_size=1, max_size=64)


@settings(deadline=None)
@given(any_windows, st.integers(1, 128), st.integers(1, 5))
def test_every_layer_has_a_place_of_its_own_in_a_group_of_its_kind(windows, max_model_len, num_stages) -> None:
    found = PageGroups.of(windows, max_model_len)
    assert found.groups == tuple(sorted(found.groups, key=lambda group: (group.window is not None, group.window or 0)))
    for layers in layer_ranges(len(windows), min(num_stages, len(windows))):
        places = found.places(layers)
        assert len(set(places)) == len(places) == len(layers)
        for layer, place in zip(layers, places, strict=True):
            window = windows[layer]
            assert found.groups[place.group].window == (None if window is None or window >= max_model_len else window)
        for _, slots in itertools.groupby(sorted(places), key=lambda place: place.group):
            used = [place.slot for place in slots]
            assert used == list(range(len(used))), "a group leaves no slot out but the last"
    wasted = len(found.groups) * found.num_slots(range(len(windows))) - len(windows)
    assert wasted <= len(windows) / 8


def test_few_layers_of_a_model_have_its_groups() -> None:
    found = PageGroups.of(pattern(1024, 6, 34), LONG).of_layers([None, None, 1024, 1024])
    assert len(found.groups) == 7
    assert found.places(range(4)) == ((0, 0), (0, 1), (1, 0), (2, 0))


@settings(deadline=None)
@given(
    page_size=st.integers(1, 9),
    window=st.none() | st.integers(1, 40),
    num_tokens=st.integers(1, 90),
    chunk=st.integers(1, 20),
)
def test_the_most_pages_of_a_sequence(page_size, window, num_tokens, chunk) -> None:
    """However the tokens are cut: the columns from the first that is seen to the last that is written."""
    group = PageGroup(window)
    limits = Limits(
        max_rows=1,
        num_pages=1,
        page_size=page_size,
        max_model_len=99,
        buckets=(Bucket(1, 1, True),),
        page_groups=(group,),
    )
    most = max(
        -(-end // page_size) - group.first_column(start, page_size)
        for start in range(num_tokens)
        for end in range(start + 1, min(start + chunk, num_tokens) + 1)
    )
    assert most <= limits.pages_of(num_tokens, chunk)
    if num_tokens >= (window or 0) + chunk + page_size:
        assert most == limits.pages_of(num_tokens, chunk), "no looser than need be"
