"""Step shapes and the arithmetic of pages."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve.config import load_config
from jaxserve.config.schema import CacheConfig, RuntimeConfig
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.models import plan_model
from jaxserve.runtime import build
from jaxserve.runtime.buckets import make_buckets
from jaxserve.runtime.compile import make_cache_directory
from jaxserve.runtime.memory import (
    MemoryPlan,
    MemoryShare,
    check_host_memory,
    held_tokens,
    longest_sequence,
    memory_share,
    plan_memory,
    plan_slots,
    reserved_share,
)
from jaxserve.runtime.mesh import make_meshes
from jaxserve.runtime.page_groups import PageGroups
from jaxserve.runtime.page_moves import move_counts
from jaxserve.sched.plan import Bucket, HostSlots, Limits


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


LIMITS = Limits(
    max_rows=4, num_pages=0, page_size=4, max_model_len=64, buckets=(Bucket(4, 4, True), Bucket(16, 4, False))
)
LONG = dataclasses.replace(LIMITS, max_model_len=65536)
SIZES: dict[str, Any] = {
    "total_bytes": 10_000,
    "share": MemoryShare(fraction=0.5),
    "weight_bytes": 1_000,
    "temporary_bytes": 900,
    "state_bytes": 100,
    "page_bytes": 100,
    "limits": LIMITS,
    "page_groups": PageGroups.of((None, None), 64),
    "num_pages": None,
    "memory_bytes": None,
}


def test_pages_fill_what_the_fraction_leaves() -> None:
    plan = plan_memory(**SIZES)
    assert plan.num_pages == (5_000 - 2_000) // 100 - 1
    assert plan.cache_bytes == (plan.num_pages + 1) * 100
    assert any("30 + 1 pages" in line or "29 + 1 pages" in line for line in plan.lines())


def test_pages_stop_at_twice_what_all_rows_could_use() -> None:
    plan = plan_memory(**(SIZES | {"limits": dataclasses.replace(LIMITS, max_rows=1, max_model_len=10)}))
    assert plan.num_pages == 2 * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pages": 500}, r"cache.num_pages = 500 needs .* lower cache.num_pages to 88 or less"),
        ({"memory_bytes": 9_500}, r"cache.memory_bytes = 9500 .* does not fit"),
        ({"memory_bytes": 150}, r"cache.memory_bytes = 150 holds too few pages .* raise it to 200 or more"),
        ({"weight_bytes": 5_000}, r"no room for KV pages .* raise cache.memory_fraction"),
    ],
)
def test_impossible_sizes_name_the_remedy(change: dict[str, int], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        plan_memory(**(SIZES | change))


def test_free_memory_that_varies_gives_the_same_pages() -> None:
    """What happens to be free is never the same twice, and the number of pages is part of every compiled shape."""
    share = memory_share(CacheConfig(), "cpu")
    found = [20_000_000_000 + 100_000_000 * n for n in range(-3, 4)]
    limits = dataclasses.replace(LIMITS, max_rows=256, max_model_len=131072)
    sizes = SIZES | {"share": share, "page_bytes": 512 * 1024, "limits": limits}
    plans = [plan_memory(**(sizes | {"total_bytes": total})) for total in found]
    assert len({plan.num_pages for plan in plans}) <= 2
    for total, plan in zip(found, plans, strict=True):
        most = total // 4 // plan.page_bytes - 1
        assert 0.96 * most <= plan.num_pages <= most
    assert plans[0].chosen_by == "25% of the free memory"


@pytest.mark.parametrize("fraction", [None, 0.5])
def test_replicas_share_the_memory_of_a_cpu(monkeypatch: pytest.MonkeyPatch, fraction: float | None) -> None:
    settings = {"runtime.compile_cache": None, "kernels.matmul": "xla", "kernels.paged_attention": "xla"}
    settings |= {"parallel.data": 4, "sched.max_step_tokens": 64, "sched.max_rows": 64}
    config = load_config(None, {**settings, "cache.memory_fraction": fraction}, environ={}).config
    free = 2**30
    sized: list[MemoryPlan] = []

    def stop(plan: Any, *_: object) -> None:
        sized.append(plan.memory)
        raise InterruptedError

    monkeypatch.setattr(build, "_compile_stages", stop)
    monkeypatch.setattr(build, "device_memory_bytes", lambda device: free)
    [first, *others] = make_meshes(config.parallel, jax.devices())
    with pytest.raises(InterruptedError):
        build.build_runners(config, [plan_model("demo", mesh=first[0])], others=others, say=lambda line: None)
    [plan] = sized
    if fraction is None:
        assert plan.chosen_by == "25% of the free memory"
        assert 0.95 * free / 4 <= 4 * plan.cache_bytes <= free / 4
    else:
        assert 0.8 * free * fraction <= 4 * (plan.cache_bytes + plan.weight_bytes) <= free * fraction


def test_a_steady_device_is_filled_to_the_page() -> None:
    sizes = SIZES | {"share": memory_share(CacheConfig(), "tpu"), "limits": LONG, "total_bytes": 1_000_000}
    plan = plan_memory(**sizes)
    assert plan.num_pages == (900_000 - 2_000) // 100 - 1


def test_a_share_that_is_asked_for_holds_on_a_cpu_too() -> None:
    sizes = SIZES | {"share": memory_share(CacheConfig(memory_fraction=0.8), "cpu"), "limits": LONG}
    plan = plan_memory(**(sizes | {"total_bytes": 100_000}))
    assert plan.num_pages == 768, "780 less what lies between the lines of the grid"


def test_a_gpus_pool_is_what_was_asked_for_already() -> None:
    for fraction in (None, 0.5, 0.9):
        assert memory_share(CacheConfig(memory_fraction=fraction), "gpu").fraction > 0.95
    assert reserved_share(CacheConfig(memory_fraction=0.5), "gpu") == 0.5
    assert reserved_share(CacheConfig(), "gpu") == 0.9
    assert reserved_share(CacheConfig(), "tpu") == 1.0


def test_explicit_sizes_win() -> None:
    assert plan_memory(**(SIZES | {"num_pages": 7, "memory_bytes": 400})).num_pages == 7
    assert plan_memory(**(SIZES | {"memory_bytes": 400})).num_pages == 3


def test_measured_temporaries_must_fit() -> None:
    plan = plan_memory(**(SIZES | {"num_pages": 80}))
    plan.check_compiled(700, 100)
    with pytest.raises(CapacityError, match="lower cache.num_pages"):
        plan.check_compiled(700, 101)


def test_an_impossible_compile_cache_is_a_users_error(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"runtime.compile_cache .* cannot be made"):
        make_cache_directory(str(tmp_path / "file" / "cache"))


def test_a_default_compile_cache_that_cannot_be_made_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A read-only home; here a file is in the way, which stops root, too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache").write_text("")
    assert make_cache_directory(load_config(None, environ={}).config.runtime.compile_cache) is None
    assert make_cache_directory(RuntimeConfig().compile_cache) is None
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "each start compiles all anew" in caplog.messages[0]


def test_a_pool_below_one_sequence_says_so() -> None:
    assert any("can have 9 of the 64 tokens" in line for line in plan_memory(**(SIZES | {"num_pages": 2})).lines())
    assert not any("of the 64 tokens" in line for line in plan_memory(**SIZES).lines())


GROUPS = PageGroups.of((16, None) * 3, 64)
GROUPED = SIZES | {"limits": dataclasses.replace(LIMITS, page_groups=GROUPS.groups), "page_groups": GROUPS}


def test_pages_for_groups_stop_at_what_windows_leave() -> None:
    """16 columns of the layers that see all; of the others those of 15 + 16 positions in a row, 9 at most."""
    plan = plan_memory(**(GROUPED | {"total_bytes": 1_000_000}))
    assert plan.num_pages == 2 * LIMITS.max_rows * (16 + 9)


def test_the_lines_tell_the_groups_and_the_tokens_of_long_and_short_sequences() -> None:
    plan = plan_memory(**(GROUPED | {"num_pages": 42}))
    (groups,) = (line for line in plan.lines() if line.startswith("page groups"))
    assert groups.endswith("2 groups of 3 layers, 1 of them with a window of 16 tokens")
    # A sequence of 64 tokens holds 16 + 5 pages, one of 4 tokens holds 2.
    assert plan.lines()[-1] == "KV tokens             128 of sequences of 64 tokens; 84 of sequences within a page"
    assert not any("group" in line for line in plan_memory(**SIZES).lines())


@pytest.mark.parametrize(("num_pages", "longest"), [(2, 5), (3, 5), (10, 21), (11, 25), (20, 61), (21, 65), (99, 65)])
def test_the_longest_sequence_of_groups(num_pages: int, longest: int) -> None:
    plan = plan_memory(**(GROUPED | {"num_pages": num_pages, "total_bytes": 100_000}))
    assert longest_sequence(plan.limits) == longest
    assert any(f"can have {longest} of the 64 tokens" in line for line in plan.lines()) == (longest < 64)


def test_tokens_that_are_held_of_equal_layers_do_not_depend_on_lengths() -> None:
    limits = plan_memory(**SIZES).limits
    assert {held_tokens(limits, length) for length in (1, 7, 64)} == {limits.num_pages * 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_pages": 1}, r"num_pages = 1, but a sequence needs a page in each of 2 groups .* raise it to 2 or more"),
        ({"memory_bytes": 250}, r"a page in each of 2 groups of layers, and one is for padding; raise it to 300"),
        ({"weight_bytes": 3_800}, r"no room for KV pages of 100 bytes, .* leave 200 bytes"),
    ],
)
def test_every_group_needs_a_page(change: dict[str, int], message: str) -> None:
    with pytest.raises(CapacityError, match=message):
        plan_memory(**(GROUPED | change))


def test_slots_follow_from_bytes_and_pages_on_their_way_take_room() -> None:
    slots = plan_slots(CacheConfig(host_bytes=10_000), 900, 2, (1, 4, 16))
    assert slots == HostSlots(num_slots=5, max_draining=32, max_loads=16, page_bytes=900)
    assert plan_slots(CacheConfig(host_bytes=10_000, load_bytes_per_step=2_000), 900, 1, (1, 4)).max_loads == 2
    assert plan_slots(CacheConfig(), 900, 1, ()) == HostSlots()
    assert move_counts(1 << 20) == (1, 4, 16) and move_counts(16 << 20) == (1, 4) and move_counts(1 << 30) == (1,)
    without, with_slots = plan_memory(**SIZES), plan_memory(**SIZES, move_counts=(1, 2))
    assert with_slots.move_bytes == 4 * 2 * with_slots.page_bytes
    assert without.num_pages - with_slots.num_pages == 4 * 2
    sizes = SIZES | {"total_bytes": 100_000}
    for chosen in ({"num_pages": 1 << 40}, {"memory_bytes": 1 << 50}, {"temporary_bytes": 1 << 50}):
        with pytest.raises(CapacityError, match=r"pages on their way to and from host memory \(cache\.host_bytes\)"):
            plan_memory(**(sizes | chosen), move_counts=(1, 2))
    with pytest.raises(CapacityError, match="on their way"):
        with_slots.check_compiled(1 << 50, 0)


@pytest.mark.parametrize(
    ("cache", "error", "match"),
    [
        ({"host_bytes": 100}, CapacityError, "raise it to 900 or more"),
        ({"host_bytes": 10_000, "prefix_caching": False}, ConfigError, r"cache\.prefix_caching"),
        ({"load_bytes_per_step": 100}, ConfigError, r"cache\.load_bytes_per_step is 100.* without cache\.host_bytes"),
        ({"host_policy": "arc"}, ConfigError, r"cache\.host_policy is 'arc'.* without cache\.host_bytes"),
        ({"host_admission": "always"}, ConfigError, r"cache\.host_admission is 'always'.* without cache\.host_bytes"),
    ],
)
def test_slots_that_cannot_work(cache: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        plan_slots(CacheConfig(**cache), 900, 1, (1, 4))


def test_more_host_memory_than_there_is() -> None:
    check_host_memory(0, 0, 1 << 60)
    check_host_memory(1 << 20, 1 << 20, 0)
    with pytest.raises(CapacityError, match="this machine has left; lower it"):
        check_host_memory(1 << 60, 0, 0)
    with pytest.raises(CapacityError, match=r"same memory, are more than .* or cache\.num_pages"):
        check_host_memory(1 << 20, 0, 1 << 60)
