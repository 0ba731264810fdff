"""Pictures in the scheduler: encodes before chunks, the pool and its budget, and every small world with pictures."""

import dataclasses
import random

import pytest
from small_world import STOP, Rules, SmallWorld, explore

from jaxserve.api import Request
from jaxserve.errors import RequestRejected
from jaxserve.sched import ContinuousScheduler, SchedulerOptions, create_scheduler
from jaxserve.sched.draft import DraftChunk
from jaxserve.sched.encoder_cache import EncoderCache
from jaxserve.sched.plan import EncoderPool
from jaxserve.sched.state import Sequence
from jaxserve.testing import FakeRunner, drive, make_limits, make_picture, make_request

PAD = 7  # the id of a placeholder
ROOMY = EncoderPool(num_pages=16, page_size=2, max_patches=1000)


class World:
    """A scheduler on a fake device, which compares each embedding that a chunk reads with its picture."""

    def __init__(self, encoder: EncoderPool = ROOMY, *, max_tokens: int = 16, chunked: bool = True) -> None:
        limits = make_limits(max_rows=4, num_pages=64, token_buckets=(max_tokens,), encoder=encoder)
        options = SchedulerOptions(chunked_prefill=chunked)
        scheduler = create_scheduler("fcfs", limits, options=options)
        assert isinstance(scheduler, ContinuousScheduler)
        self.scheduler = scheduler
        self.runner = FakeRunner(limits, mode="context")

    def run(self, *requests: Request) -> list[list[int]]:
        """The tokens of each request."""
        self.runner.plans.clear()
        found = drive(self.scheduler, self.runner, requests, after_step=lambda _: self.scheduler.check())
        return [found[request.request_id, 0].token_ids for request in requests]

    @property
    def encodes(self) -> list[int]:
        """How many pictures each step of the last run encoded."""
        return [len(plan.encodes) for plan in self.runner.plans]


def with_pictures(request_id: str, *places: tuple[int, int, str], prompt_len: int = 12, salt: str = "") -> Request:
    """A prompt with pictures at (start, length, name)."""
    pictures = [make_picture(*place) for place in places]
    prompt = [PAD if any(p.start <= i < p.end for p in pictures) else i % 5 for i in range(prompt_len)]
    return make_request(request_id, prompt, 3, pictures=pictures, salt=salt)


@pytest.mark.parametrize("max_tokens", range(4, 14))
def test_chunks_that_end_anywhere_in_a_picture_change_nothing(max_tokens: int) -> None:
    """First, adjacent, repeated and last; the fake device compares what each placeholder reads."""
    request = with_pictures("a", (0, 3, "cat"), (3, 2, "dog"), (6, 3, "cat"), (9, 3, "cow"))
    [whole] = World(max_tokens=16).run(request)
    world = World(max_tokens=max_tokens)
    assert world.run(request) == [whole]
    assert sum(world.encodes) == 3, "a picture that comes twice is encoded once"


def test_a_picture_that_came_before_is_not_encoded_again() -> None:
    world = World()
    first, other = with_pictures("a", (2, 5, "cat")), with_pictures("b", (2, 5, "dog"))
    [tokens] = world.run(first)
    assert sum(world.encodes) == 1
    [repeated] = world.run(dataclasses.replace(first, request_id="again"))
    assert repeated == tokens and sum(world.encodes) == 0 and world.scheduler.memory.num_hit_tokens == 8
    [others] = world.run(other)
    assert others != tokens and sum(world.encodes) == 1 and world.scheduler.memory.num_hit_tokens == 8
    elsewhere = with_pictures("c", (4, 5, "cat"))  # no prefix is shared, but the picture is
    world.run(elsewhere)
    assert sum(world.encodes) == 0 and world.scheduler.encoder.num_hits == 1


def test_another_salt_shares_no_picture() -> None:
    """The time of an encode would tell one tenant what another has sent."""
    world = World()
    world.run(with_pictures("a", (2, 5, "cat"), salt="x"))
    world.run(with_pictures("b", (2, 5, "cat"), salt="y"))
    assert sum(world.encodes) == 1 and world.scheduler.encoder.num_hits == 0
    world.scheduler.flush("x")
    assert world.scheduler.encoder.num_pictures == 1
    world.run(with_pictures("c", (3, 5, "cat"), salt="x"))
    assert sum(world.encodes) == 1


def test_a_step_encodes_as_many_patches_as_its_budget_has() -> None:
    """The picture of eight tokens has more than the budget, and a step without another."""
    world = World(EncoderPool(num_pages=16, page_size=2, max_patches=16))
    requests = [with_pictures(name, (1, length, name)) for name, length in [("a", 2), ("b", 2), ("c", 8), ("d", 1)]]
    world.run(*requests)
    patches = [
        sum(encode.picture.num_patches for encode in plan.encodes) for plan in world.runner.plans if plan.encodes
    ]
    assert patches == [16, 32, 4], "4 patches a token"


def test_text_is_planned_beside_a_prompt_that_waits_for_its_picture() -> None:
    world = World(EncoderPool(num_pages=16, page_size=2, max_patches=1))
    world.run(
        with_pictures("a", (0, 2, "cat"), prompt_len=3),
        with_pictures("b", (2, 2, "dog"), prompt_len=4),
        make_request("c", [1, 2], 2),
    )
    first = world.runner.plans[0]
    assert [(len(chunk.token_ids), chunk.sample) for chunk in first.chunks] == [(3, True), (2, False), (2, True)]
    assert world.encodes[:2] == [1, 1], "the text before the second picture runs, the picture in the next step"


def test_without_chunks_a_prompt_is_cut_before_a_picture_that_has_no_room() -> None:
    world = World(EncoderPool(num_pages=2, page_size=2, max_patches=1000), chunked=False)
    request = with_pictures("a", (1, 4, "cat"), (6, 4, "dog"))
    assert world.run(request) == World().run(request)
    assert [chunk.start for plan in world.runner.plans for chunk in plan.chunks] == [0, 6]


def test_a_picture_that_never_fits_is_refused_before_anything_is_kept() -> None:
    world = World(EncoderPool(num_pages=2, page_size=2, max_patches=1000))
    with pytest.raises(RequestRejected, match="picture 2 .* 5 tokens, but the pool of the encoder holds 4"):
        world.scheduler.add(with_pictures("a", (0, 4, "cat"), (4, 5, "dog")))
    assert not world.scheduler.has_work()
    with pytest.raises(RequestRejected, match="holds 0"):
        World(EncoderPool()).scheduler.add(with_pictures("a", (0, 4, "cat")))


def test_an_abort_in_the_middle_of_a_picture_leaves_it_to_others() -> None:
    world = World(EncoderPool(num_pages=3, page_size=2, max_patches=1000), max_tokens=4)
    scheduler, request = world.scheduler, with_pictures("a", (1, 6, "cat"))
    scheduler.add(request)
    plan = scheduler.schedule()
    assert plan is not None and plan.chunks[0].token_ids == (0, PAD, PAD, PAD) and len(plan.encodes) == 1
    handle = world.runner.dispatch(plan)
    assert scheduler.abort("a")
    scheduler.commit(plan, handle.result())
    scheduler.check()
    world.run(with_pictures("b", (2, 6, "cat")))
    assert sum(world.encodes) == 0
    world.run(with_pictures("c", (2, 5, "dog")))
    assert sum(world.encodes) == 1 and scheduler.encoder.num_evicted == 1


def test_an_evicted_picture_comes_from_host_memory() -> None:
    pool = EncoderPool(num_pages=3, page_size=2, max_patches=1000, host_embeddings=10)
    world = World(pool)
    scheduler = world.scheduler
    cat, dog, cow = (with_pictures(name, (2, 5, name)) for name in ("cat", "dog", "cow"))
    first = world.run(cat, dog)
    assert sum(world.encodes) == 2 and scheduler.encoder.num_evicted == 1
    again = [dataclasses.replace(request, request_id=f"{request.request_id} again") for request in (cat, dog)]
    scheduler.memory.flush(None, ())  # the pages of prompts alone
    assert world.run(*again) == first
    encodes = [encode for plan in world.runner.plans for encode in plan.encodes]
    assert [encode.load for encode in encodes] == [True, True] and world.runner.num_encodes == 2
    assert (scheduler.encoder.num_encodes, scheduler.encoder.num_loads, scheduler.encoder.num_kept) == (2, 2, 10)
    world.run(cow)  # the cat goes, which was used before the dog
    assert scheduler.encoder.num_encodes == 3 and scheduler.encoder.num_kept == 10
    scheduler.memory.flush(None, ())
    world.run(dataclasses.replace(cat, request_id="and again"))
    assert (scheduler.encoder.num_encodes, scheduler.encoder.num_loads) == (4, 2)
    scheduler.flush("")
    world.run(dataclasses.replace(cow, request_id="forgotten"))
    assert (scheduler.encoder.num_encodes, scheduler.encoder.num_loads) == (5, 2)
    scheduler.use_tiers(host=False)
    assert scheduler.encoder.num_kept == 0
    world.run(dog, dataclasses.replace(cow, request_id="off"))
    assert (scheduler.encoder.num_loads, scheduler.encoder.num_kept) == (2, 0)
    scheduler.use_tiers(host=True)
    world.run(dataclasses.replace(cat, request_id="on"))
    assert scheduler.encoder.num_kept == 5


def test_random_operations_on_pool_budget_and_host_memory() -> None:
    """10,000 steps against two lists of pictures in the order of their last use."""
    rng = random.Random(7)
    num_steps = num_encodes = num_refused = num_evicted = num_loads = num_dropped = 0
    for _ in range(100):
        pool = EncoderPool(rng.randint(3, 12), rng.choice([1, 2, 4]), rng.choice([1, 20, 60]), rng.choice([0, 9, 30]))
        cache, order, kept = EncoderCache(pool), list[bytes](), list[bytes]()
        pictures = [make_picture(1, rng.randint(1, 3 * pool.page_size), f"{i}") for i in range(rng.randint(2, 9))]
        size = {picture.digest: pool.pages_of(picture.num_tokens) for picture, _ in pictures}
        tokens = {picture.digest: picture.num_tokens for picture, _ in pictures}
        in_host = dict[int, str]()  # as a runner has it
        for _ in range(100):
            num_steps += 1
            cache.begin_step()
            held, budget, chunks, encoded, loaded = set[bytes](), None, [], 0, 0
            for placed in rng.choices(pictures, k=rng.randint(1, 5)):
                request = make_request("r", [PAD] * (placed.end + 1), pictures=[placed])
                seq, picture = Sequence(request, 0, 0, 100), placed.picture
                digest, known = picture.digest, picture.digest in order
                spare = pool.num_pages - sum(size[one] for one in held)
                cheap = digest in kept or budget is None or budget >= picture.num_patches
                may = known or (cheap and size[digest] <= spare)
                assert cache.hold(seq, 0, placed.end) == (placed.end if may else 1)
                num_refused += not may
                if not may:
                    continue
                if not known:
                    while sum(size[one] for one in order) + size[digest] > pool.num_pages:
                        order.pop(0)
                        num_evicted += 1
                if not known and digest in kept:
                    loaded += 1
                elif not known:
                    budget = (pool.max_patches if budget is None else budget) - picture.num_patches
                    encoded += 1
                    if tokens[digest] <= pool.host_embeddings:
                        while sum(tokens[one] for one in kept) + tokens[digest] > pool.host_embeddings:
                            kept.pop(0)
                            num_dropped += 1
                        kept.append(digest)
                if digest in kept:
                    kept = [one for one in kept if one != digest] + [digest]
                order = [one for one in order if one != digest] + [digest]
                held.add(digest)
                chunks.append(DraftChunk(seq, placed.end))
            encodes, places = cache.finish_step(chunks)
            for encode in encodes:
                if encode.load:
                    assert in_host[encode.host_id] == encode.digest
                    continue
                for host_id in encode.drops:
                    del in_host[host_id]
                if encode.host_id:
                    in_host[encode.host_id] = encode.digest
            assert sum(encode.load for encode in encodes) == loaded
            assert len(encodes) == encoded + loaded and len(places) == len(chunks)
            num_encodes, num_loads = num_encodes + encoded, num_loads + loaded
            assert [key.digest for key in cache._pages] == order
            assert [key.digest for key in cache._kept] == kept
            assert set(in_host.values()) >= {digest.hex() for digest in kept}
            cache.check()
            if rng.random() < 0.02:
                cache.flush(rng.choice([None, "", "another"]))
                order, kept = [key.digest for key in cache._pages], [key.digest for key in cache._kept]
        assert cache.num_queries - cache.num_hits <= cache.num_encodes
    assert num_steps == 10_000
    counts = (num_encodes, num_refused, num_evicted, num_loads, num_dropped)
    assert min(counts) > 1000, counts


# Pictures of two pages each in a pool of three, cut by steps of three tokens: each waits for another's pages, and is
# evicted in the middle. Host memory keeps two of the three.
PICTURES = Rules(
    encoder=EncoderPool(num_pages=3, page_size=1, max_patches=8, host_embeddings=4),
    token_bucket=3,
    max_ticks=0,
    requests=(
        make_request("a", [PAD, PAD, PAD], 2, stop=[STOP], pictures=[make_picture(0, 2, "x")]),
        make_request(
            "b", [PAD, PAD, PAD, PAD], 1, stop=[STOP], pictures=[make_picture(0, 2, "y"), make_picture(2, 2, "x")]
        ),
        make_request("c", [1, PAD], 2, stop=[STOP], pictures=[make_picture(1, 1, "z")]),
    ),
)


@pytest.mark.parametrize(
    ("num_requests", "windows", "moves"),
    [
        (2, (None,), 1),
        pytest.param(3, (None, 2), 0, marks=pytest.mark.slow),
        pytest.param(3, (None, 2), 1, marks=pytest.mark.slow),
    ],
)
def test_every_small_world_with_pictures(num_requests: int, windows: tuple[int | None, ...], moves: int) -> None:
    encoded = found = evicted = loaded = 0

    def count(world: SmallWorld) -> None:
        nonlocal encoded, found, evicted, loaded
        encoder = world.scheduler.encoder
        loaded += encoder.num_loads
        encoded, found = encoded + encoder.num_encodes, found + encoder.num_hits
        evicted += encoder.num_evicted

    rules = dataclasses.replace(
        PICTURES, num_requests=num_requests, windows=windows, num_pages=6 * len(windows), max_aborts=moves,
        max_preempts=moves,
    )  # fmt: skip
    num_worlds, _, _ = explore("fcfs", rules, count)
    assert num_worlds > (1500 if num_requests == 3 and moves else 150), num_worlds
    assert encoded > 300 and found > 50 and evicted > 50 and loaded > 20, (encoded, found, evicted, loaded)
