"""Step shapes and the arithmetic of pages."""

import pytest

from jaxserve.errors import CapacityError, ConfigError
from jaxserve.runtime.buckets import make_buckets
from jaxserve.runtime.compile import make_cache_directory
from jaxserve.runtime.memory import plan_memory
from jaxserve.sched.plan import Bucket, Limits


def test_default_buckets_are_a_sum_of_powers_of_two() -> None:
    buckets = make_buckets(20, 100, None, None)
    assert [b for b in buckets if b.decode_only] == [Bucket(n, n, True) for n in (1, 2, 4, 8, 16, 20)]
    assert [b for b in buckets if not b.decode_only] == [Bucket(n, 20, False) for n in (32, 64, 100)]


def test_given_buckets_are_completed_with_the_largest() -> None:
    buckets = make_buckets(4, 64, [16], [2])
    assert buckets == (Bucket(2, 2, True), Bucket(4, 4, True), Bucket(16, 4, False), Bucket(64, 4, False))


def test_bucket_beyond_the_limit_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"runtime.token_buckets holds 128; entries are 1..64 \(sched.max_step_tokens\)"
    ):
        make_buckets(4, 64, [128], None)


def _limits(buckets: tuple[Bucket, ...]) -> Limits:
    return Limits(max_rows=8, num_pages=10, page_size=4, max_model_len=32, buckets=buckets)


def test_the_cheapest_bucket_is_found() -> None:
    limits = _limits((Bucket(4, 4, True), Bucket(8, 8, True), Bucket(8, 8, False), Bucket(32, 8, False)))
    assert limits.find_bucket(3, 3, True) == Bucket(4, 4, True)
    assert limits.find_bucket(3, 1, False) == Bucket(8, 8, False)
    assert limits.find_bucket(9, 2, False) == Bucket(32, 8, False)
    assert limits.find_bucket(33, 2, False) is None
    assert limits.find_bucket(8, 8, True) == Bucket(8, 8, True)


SIZES = {
    "total_bytes": 10_000,
    "fraction": 0.5,
    "weight_bytes": 1_000,
    "temporary_bytes": 900,
    "state_bytes": 100,
    "page_bytes": 100,
    "page_size": 4,
    "max_rows": 4,
    "max_model_len": 64,
    "num_pages": None,
    "memory_bytes": None,
}


def test_pages_fill_what_the_fraction_leaves() -> None:
    plan = plan_memory(**SIZES)
    assert plan.num_pages == (5_000 - 2_000) // 100 - 1
    assert plan.cache_bytes == (plan.num_pages + 1) * 100
    assert any("30 + 1 pages" in line or "29 + 1 pages" in line for line in plan.lines())


def test_pages_stop_at_twice_what_all_rows_could_use() -> None:
    plan = plan_memory(**(SIZES | {"max_rows": 1, "max_model_len": 10}))
    assert plan.num_pages == 2 * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pages": 500}, r"cache.num_pages = 500 needs .* lower cache.num_pages to 88 or less"),
        ({"memory_bytes": 9_500}, r"cache.memory_bytes = 9500 .* does not fit"),
        ({"memory_bytes": 150}, r"cache.memory_bytes = 150 holds no page: .* raise it to 200 or more"),
        ({"weight_bytes": 5_000}, r"no room for a KV page .* raise cache.memory_fraction"),
    ],
)
def test_impossible_sizes_name_the_remedy(change: dict[str, int], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        plan_memory(**(SIZES | change))


def test_explicit_sizes_win() -> None:
    assert plan_memory(**(SIZES | {"num_pages": 7, "memory_bytes": 400})).num_pages == 7
    assert plan_memory(**(SIZES | {"memory_bytes": 400})).num_pages == 3


def test_measured_temporaries_must_fit() -> None:
    plan = plan_memory(**(SIZES | {"num_pages": 80}))
    plan.check_temporaries(800)
    with pytest.raises(CapacityError, match="lower cache.num_pages"):
        plan.check_temporaries(801)


def test_an_impossible_compile_cache_is_a_users_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runtime.compile_cache .* cannot be made"):
        make_cache_directory(str(tmp_path / "file" / "cache"))


def test_a_pool_below_one_sequence_says_so() -> None:
    assert any("can have 9 of the 64 tokens" in line for line in plan_memory(**(SIZES | {"num_pages": 2})).lines())
    assert not any("of the 64 tokens" in line for line in plan_memory(**SIZES).lines())
