"""Policies of a tier against the algorithms of their papers, written as plain lists, and the admission to a tier."""

import random
from collections.abc import Callable

import pytest

from jaxserve.errors import ConfigError
from jaxserve.sched.tier_admission import SecondSight
from jaxserve.sched.tier_policies import AgeingLfu, Arc, Lru, S3Fifo
from jaxserve.sched.tier_policy import TIER_POLICIES, TierOptions, TierPolicy, create_tier_policy

ALWAYS = TierOptions(admission="always")
ALL = [Lru, AgeingLfu, Arc, S3Fifo]


def key(number: int) -> bytes:
    return number.to_bytes(4, "big")


def uses(seed: int, num: int = 4000, num_keys: int = 60) -> list[bytes]:
    """Some keys often, most rarely, and what is popular moves."""
    rng = random.Random(seed)
    return [key(int(rng.paretovariate(0.8)) % num_keys + (i // 800) * 7) for i in range(num)]


def lru_oracle(asked: list[bytes], capacity: int) -> list[bool]:
    hits, stack = [], []
    for page in asked:
        hits.append(page in stack)
        if page in stack:
            stack.remove(page)
        elif len(stack) == capacity:
            stack.pop(0)
        stack.append(page)
    return hits


def lfu_oracle(asked: list[bytes], capacity: int) -> list[bool]:
    hits: list[bool] = []
    count: dict[bytes, int] = {}
    priority: dict[bytes, int] = {}
    last: dict[bytes, int] = {}
    age = 0
    for time, page in enumerate(asked):
        hits.append(page in priority)
        if page not in priority and len(priority) == capacity:
            gone = min(priority, key=lambda p: (priority[p], last[p]))
            age = priority.pop(gone)
            del count[gone]
        count[page] = count.get(page, 0) + 1
        priority[page] = age + count[page]
        last[page] = time
    return hits


def arc_oracle(asked: list[bytes], capacity: int) -> list[bool]:
    """Figure 4 of the paper; lists run from least to most recent."""
    hits = []
    t1: list[bytes] = []
    t2: list[bytes] = []
    b1: list[bytes] = []
    b2: list[bytes] = []
    p = 0.0

    def replace(page: bytes) -> None:
        if t1 and (len(t1) > p or (page in b2 and len(t1) == p)):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for page in asked:
        hits.append(page in t1 or page in t2)
        if page in t1 or page in t2:
            (t1 if page in t1 else t2).remove(page)
            t2.append(page)
        elif page in b1:
            p = min(float(capacity), p + max(1.0, len(b2) / len(b1)))
            replace(page)
            b1.remove(page)
            t2.append(page)
        elif page in b2:
            p = max(0.0, p - max(1.0, len(b1) / len(b2)))
            replace(page)
            b2.remove(page)
            t2.append(page)
        else:
            if len(t1) + len(b1) == capacity:
                if len(t1) < capacity:
                    b1.pop(0)
                    replace(page)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= capacity:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                    b2.pop(0)
                replace(page)
            t1.append(page)
    return hits


def s3fifo_oracle(asked: list[bytes], capacity: int) -> list[bool]:
    """Algorithm 1 of the paper; queues run from oldest to newest."""
    hits = []
    small: list[bytes] = []
    main: list[bytes] = []
    ghost: list[bytes] = []
    freq: dict[bytes, int] = {}

    def evict_main() -> bool:
        while main:
            page = main.pop(0)
            if freq[page] == 0:
                return True
            freq[page] -= 1
            main.append(page)
        return False

    def evict_small() -> bool:
        while small:
            page = small.pop(0)
            if freq[page] > 1:
                freq[page] = 0
                main.append(page)
            else:
                ghost.append(page)
                if len(ghost) > max(1, round(0.9 * capacity)):
                    ghost.pop(0)
                return True
        return False

    for page in asked:
        hits.append(page in small or page in main)
        if page in small or page in main:
            freq[page] = min(3, freq[page] + 1)
            continue
        if len(small) + len(main) == capacity:
            if len(small) >= 0.1 * capacity:
                assert evict_small() or evict_main()
            else:
                assert evict_main() or evict_small()
        freq[page] = 0
        if page in ghost:
            ghost.remove(page)
            main.append(page)
        else:
            small.append(page)
    return hits


def run(policy: TierPolicy, asked: list[bytes], capacity: int, seed: int | None = None) -> list[bool]:
    """The hits of a tier of `capacity` pages. `seed`: a page is held at random moments, and never given up then."""
    rng = random.Random(seed)
    hits, there = [], set()
    for page in asked:
        hits.append(page in there)
        if page in there:
            policy.touch(page)
        elif policy.admit(page):
            held = {rng.choice(asked) for _ in range(3)} if seed is not None else set()
            if len(policy) == capacity:
                gone = policy.victim(page, held.__contains__)
                if gone is None:
                    continue
                assert gone not in held
                there.remove(gone)
            policy.insert(page)
            there.add(page)
        assert len(policy) == len(there) <= capacity
    return hits


@pytest.mark.parametrize("capacity", [1, 2, 10, 37])
@pytest.mark.parametrize(
    ("policy", "oracle"), [(Lru, lru_oracle), (AgeingLfu, lfu_oracle), (Arc, arc_oracle), (S3Fifo, s3fifo_oracle)]
)
def test_hits_are_those_of_the_paper(
    policy: type[TierPolicy], oracle: Callable[[list[bytes], int], list[bool]], capacity: int
) -> None:
    for seed in range(3):
        asked = uses(seed)
        wanted = oracle(asked, capacity)
        assert run(policy(ALWAYS), asked, capacity) == wanted
        assert 0 < sum(wanted) < len(wanted)


def test_the_policies_differ() -> None:
    hits = {policy: sum(run(policy(ALWAYS), uses(0), 10)) for policy in ALL}
    assert len(set(hits.values())) == len(ALL)


@pytest.mark.parametrize("policy", ALL)
def test_held_pages_stay(policy: type[TierPolicy]) -> None:
    run(policy(ALWAYS), uses(1), 8, seed=3)
    small = policy(ALWAYS)
    for number in range(3):
        small.insert(key(number))
    assert small.victim(key(9), lambda k: True) is None
    assert len(small) == 3, "a victim that is held must not be forgotten"
    assert small.victim(key(9), lambda k: k != key(1)) == key(1)


@pytest.mark.parametrize("policy", ALL)
def test_a_tier_that_shrinks_and_deletes(policy: type[TierPolicy]) -> None:
    """Without an incoming key, and with pages that vanish for other reasons, to nothing and up again."""
    rng = random.Random(5)
    tier, there = policy(ALWAYS), set()
    for step in range(6000):
        page = key(rng.randrange(200))
        if page in there and rng.random() < 0.2:
            tier.remove(page)
            there.discard(page)
        elif page in there:
            tier.touch(page)
        else:
            capacity = 50 if step % 2000 < 1000 else 5
            while len(there) >= capacity:
                gone = tier.victim(page if rng.random() < 0.5 else None)
                assert gone is not None
                there.remove(gone)
            tier.insert(page)
            there.add(page)
        assert len(tier) == len(there)
    while there:
        gone = tier.victim()
        assert gone is not None
        there.remove(gone)
    assert tier.victim() is None


def test_lfu_forgets_removed_pages() -> None:
    tier = AgeingLfu(ALWAYS)
    for number in range(10_000):
        tier.insert(key(number))
        tier.remove(key(number))
    assert len(tier._heap) <= 66


def test_lfu_ages() -> None:
    """A page that was used often long ago gives way to those of now."""
    asked = [key(0)] * 10 + [key(number) for number in range(1, 40) for _ in range(2)]
    tier = AgeingLfu(ALWAYS)
    assert not run(tier, [*asked, key(0)], 4)[-1]


def offer(admission: SecondSight, pages: list[int]) -> list[bool]:
    return [admission.admit(key(page)) for page in pages]


def test_second_sight_only_when_pages_would_not_survive() -> None:
    rounds = [number for _ in range(10) for number in range(100)]  # each page comes back after 100 offers
    roomy, tight, idle = (SecondSight(ghost_keys=1000) for _ in range(3))
    roomy.full(100)
    tight.full(99)
    assert all(offer(roomy, rounds)) and not roomy.strict
    offer(tight, rounds)
    assert tight.strict
    assert all(offer(idle, rounds)) and not idle.strict, "a tier that was never full does not turn over"
    assert offer(tight, [500, 501, 500]) == [False, False, True]
    tight.full(200)  # it was made larger
    assert all(offer(tight, [*rounds, 700])[-1:]) and not tight.strict


def test_hits_in_the_tier_count_as_reuse() -> None:
    admission = SecondSight(ghost_keys=1000)
    admission.full(50)
    for number in range(400):
        admission.admit(key(number))
        admission.seen(key(number))  # gap 0
    assert not admission.strict
    assert admission.admit(key(999))


def test_ghosts_are_bounded() -> None:
    admission = SecondSight(ghost_keys=10)
    admission.full(1)
    offer(admission, [*range(3)] * 40)  # gaps of 3 offers in a tier of one page
    assert admission.strict
    offer(admission, list(range(100, 200)))
    assert len(admission._last_seen) == 10
    assert offer(admission, [199, 100]) == [True, False]


def test_second_sight_helps_a_tier_that_turns_over_too_fast() -> None:
    """Three of four pages are used once; the others come back after 80 offers, of which 20 are theirs."""
    often = [key(number) for number in range(20)]
    fresh = iter(range(1000, 100_000))
    asked = [page for _ in range(60) for known in often for page in (known, *(key(next(fresh)) for _ in range(3)))]
    always, second = (run(Lru(TierOptions(admission=a)), asked, 24) for a in ("always", "second_sight"))
    assert sum(always) == 0
    assert sum(second) > 0.9 * 60 * 20 - 100


def test_names() -> None:
    assert TIER_POLICIES.names() == ["lru", "lfu", "arc", "s3-fifo"]
    for name, kind in zip(TIER_POLICIES.names(), ALL, strict=True):
        assert type(create_tier_policy(name)) is kind
    mine = Lru(ALWAYS)
    assert create_tier_policy(mine) is mine
    assert create_tier_policy(mine, ALWAYS) is mine
    assert type(create_tier_policy(f"{Arc.__module__}:Arc")) is Arc


def test_wrong_names_and_settings() -> None:
    with pytest.raises(ConfigError, match="no tier policy is called 'lrru'.*Did you mean 'lru'"):
        create_tier_policy("lrru")
    with pytest.raises(ConfigError, match="must derive from"):
        create_tier_policy("jaxserve.sched.tier_policy:TierOptions")
    with pytest.raises(ConfigError, match="lacks the method"):
        create_tier_policy(TierPolicy)
    with pytest.raises(ConfigError, match="was made with .*'always'.*asks for .*'second_sight'"):
        create_tier_policy(Lru(ALWAYS), TierOptions())

    class Bare(Lru):
        def __init__(self) -> None:
            super().__init__()

    with pytest.raises(ConfigError, match=r"the tier policy Bare takes \(\).*is called with \(TierOptions\)"):
        create_tier_policy(Bare, ALWAYS)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="second_sight"):
        TierOptions(admission="third_sight")
    with pytest.raises(ConfigError, match="ghost_keys"):
        TierOptions(ghost_keys=0)
