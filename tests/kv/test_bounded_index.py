"""The index of a store of bounded size: what it counts, and what goes."""

import pytest

from jaxserve.kv.bounded_index import BoundedIndex
from jaxserve.sched.tier_policy import create_tier_policy


@pytest.mark.parametrize(("size", "gone"), [(10, []), (60, [("s", b"b")]), (90, [("s", b"b"), ("t", b"c")])])
def test_an_item_that_is_written_again_counts_with_its_new_size(size: int, gone: list[tuple[str, bytes]]) -> None:
    index: BoundedIndex[str] = BoundedIndex(create_tier_policy("lru"), 100)
    for scope, name in (("s", b"a"), ("s", b"b"), ("t", b"c")):
        index.insert(scope, name, 30)
    index.insert("s", b"a", size)
    index.touch(b"a")
    assert index.num_bytes == size + 60
    assert index.make_room(0) == gone
    assert index.num_bytes == size + 60 - 30 * len(gone) <= 100
    assert index.names() == [name for name in (b"a", b"b", b"c") if name not in [found for _, found in gone]]
    assert index.names("t") == ([] if len(gone) == 2 else [b"c"])
