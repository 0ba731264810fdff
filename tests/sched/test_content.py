"""Keys of pages: the same in every process, of all that a page holds, and computed once."""

import os
import subprocess
import sys

import pytest

from jaxserve.api import Request, SamplingParams, check_request
from jaxserve.errors import InvalidRequest
from jaxserve.routing import key_of_tokens
from jaxserve.sched import ContinuousScheduler, SchedulerOptions, create_scheduler
from jaxserve.sched.plan import EncoderPool
from jaxserve.testing import FakeRunner, drive, make_limits, make_request
from jaxserve.values.content import Blocks, ContentSpan, Picture, PlacedPicture, block_key, root_key

PICTURE = 7  # the id of a placeholder


class World:
    """A scheduler on a fake device. `hashed`: what was hashed so far."""

    def __init__(self, namespace: str = "", *, sparse: bool = False) -> None:
        limits = make_limits(page_size=4, token_buckets=(8,), max_rows=2, encoder=EncoderPool(8, 4, 1))
        options = SchedulerOptions(namespace=namespace, sparse=sparse)
        scheduler = create_scheduler("fcfs", limits, options=options)
        assert isinstance(scheduler, ContinuousScheduler)
        assert scheduler.memory.prefix is not None
        self.prefix = scheduler.memory.prefix
        self.prefix._hash_block = self.hash_block
        self.hashed: list[bytes] = []
        self.alike = False
        self._scheduler = scheduler
        self._runner = FakeRunner(limits)

    def hash_block(self, parent: bytes, content: bytes) -> bytes:
        self.hashed.append(content)
        return b"all alike" if self.alike else block_key(parent, content)

    def ask(self, request: Request) -> int:
        """Runs the request; returns how many tokens of its prompt were cached."""
        self.last = drive(self._scheduler, self._runner, [request])[request.request_id, 0]
        assert self.last.prompt is not None
        return self.last.prompt.num_cached_tokens

    @property
    def keys(self) -> list[bytes]:
        """Of all pages that can be found, in the order in which they were recorded."""
        return list(self.prefix._by_key)


def of_spans(*spans: ContentSpan) -> tuple[PlacedPicture, ...]:
    return tuple(
        PlacedPicture(Picture(digest=digest, grid=(1, 1, 1), num_tokens=length, pixels=b""), start)
        for start, length, digest in spans
    )


def with_pictures(request_id: str, *spans: ContentSpan, length: int = 13) -> Request:
    return make_request(request_id, [PICTURE] * length, 1, pictures=of_spans(*spans))


_PROGRAM = """
from jaxserve.values.content import Picture, PlacedPicture
from jaxserve.routing import key_of_text, key_of_tokens
from jaxserve.sched import SchedulerOptions, create_scheduler
from jaxserve.sched.plan import EncoderPool
from jaxserve.testing import FakeRunner, drive, make_limits, make_request
limits = make_limits(page_size=4, encoder=EncoderPool(2))
scheduler = create_scheduler("fcfs", limits, options=SchedulerOptions(namespace="a checkpoint"))
picture = PlacedPicture(Picture(digest=b"picture", grid=(1, 4, 5), num_tokens=5, pixels=b""), 2)
request = make_request("r", range(9), 8, salt="s\\N{SNOWMAN}", pictures=[picture])
drive(scheduler, FakeRunner(limits), [request])
print([key.hex() for key in scheduler.memory.prefix._by_key])
print([key.hex() for key in (*key_of_tokens(range(40), cache_salt="s"), *key_of_text("text " * 40))])
"""


def test_two_processes_agree() -> None:
    found = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", _PROGRAM]
        found.append(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert found[0] == found[1]
    assert found[0].count("'") == 2 * (4 + 2 + 3), "pages of the prompt and of the answer; blocks of a router"


def test_router_and_cache_have_the_same_keys() -> None:
    world = World("model")
    pictures = of_spans(ContentSpan(1, 2, b"cat"))
    request = make_request("r", [5, PICTURE, PICTURE, *range(9)], 1, salt="s", pictures=pictures)
    world.ask(request)
    routed = key_of_tokens(
        request.prompt_token_ids, namespace="model", cache_salt="s", content=request.content, block_tokens=4
    )
    assert list(routed) == world.keys
    assert len(routed) == 3


def test_namespace_salt_and_size_of_a_block_keep_keys_apart() -> None:
    roots = {
        root_key("", "", "16 tokens"),
        root_key("", "", "32 tokens"),
        root_key("ab", "", "16 tokens"),
        root_key("a", "b", "16 tokens"),
        root_key("", "ab", "16 tokens"),
    }
    assert len(roots) == 5
    worlds = [World("one"), World("other")]
    for world in worlds:
        world.ask(make_request("r", range(9), 1))
    assert not set(worlds[0].keys) & set(worlds[1].keys)


def test_pictures_behind_equal_placeholders_do_not_hit_each_other() -> None:
    world = World()
    cat, dog = ContentSpan(5, 6, b"cat"), ContentSpan(5, 6, b"dog")
    assert world.ask(with_pictures("a", cat)) == 0
    assert world.ask(with_pictures("b", dog)) == 4, "the page before the picture holds token ids alone"
    assert world.ask(with_pictures("c", cat)) == 12
    assert world.ask(with_pictures("d", dog)) == 12
    assert world.ask(with_pictures("e")) == 4, "and the same ids are not a picture"


def keys_of(*spans: ContentSpan) -> list[bytes]:
    """Of three blocks of four placeholders each."""
    blocks = Blocks(b"root", 4, [PICTURE] * 13, spans)
    for _ in range(3):
        blocks.extend()
    return blocks.keys


def test_a_page_knows_which_part_of_a_picture_it_holds() -> None:
    whole = keys_of(ContentSpan(0, 12, b"cat"))
    again = keys_of(ContentSpan(0, 8, b"cat"), ContentSpan(8, 4, b"cat"))
    assert again[:2] == whole[:2] and again[2] != whole[2]
    assert not set(keys_of(ContentSpan(1, 12, b"cat"))) & set(whole)


def test_what_is_verified_is_what_the_key_covers() -> None:
    world = World()
    world.alike = True
    cat, dog = ContentSpan(0, 4, b"cat"), ContentSpan(0, 4, b"dog")
    assert world.ask(with_pictures("a", cat, length=6)) == 0
    assert world.ask(with_pictures("b", dog, length=6)) == 0
    assert world.ask(with_pictures("c", cat, length=6)) == 4


def test_with_sparse_attention_pages_of_an_answer_are_no_pages_of_a_prompt() -> None:
    for sparse, hits in ((False, 12), (True, 4)):
        world = World(sparse=sparse)
        prompt = [*range(6)]
        assert world.ask(make_request("a", prompt, 7)) == 0
        answer = world.last.token_ids
        assert world.ask(make_request("b", [*prompt, *answer], 1)) == hits, "block 1 begins in the prompt"
        assert world.ask(make_request("c", [*prompt, 99], 1)) == 4
    parts = [(ContentSpan(end, 1 << 62, b"generated"),) for end in (6, 7, 12)]
    keys = []
    for spans in parts:
        blocks = Blocks(root_key("", "", "4 tokens"), 4, range(12), spans)
        for _ in range(3):
            blocks.extend()
        keys.append(blocks.keys)
    assert keys[0][0] == keys[1][0] == keys[2][0], "a page of the prompt"
    assert len({each[1] for each in keys}) == 3 and len({each[2] for each in keys}) == 3


def test_a_block_is_hashed_once_in_the_life_of_a_sequence() -> None:
    world = World()
    world.ask(make_request("a", range(13), 6))
    assert len(world.hashed) == 4, "three pages of the prompt and one that the answer filled"
    world.hashed.clear()
    world.ask(make_request("b", range(13), 6, sampling=SamplingParams(temperature=0, max_tokens=6, n=2)))
    assert len(world.hashed) == 5, "three pages of the prompt, which the fork takes over, and one of each answer"


def test_a_known_block_stays_when_tokens_come() -> None:
    tokens = [1, 2, 3]
    blocks = Blocks(b"root", 2, tokens)
    blocks.extend()
    tokens += [2**40, 5]
    blocks.extend()
    other = Blocks(b"root", 2, (1, 2, 3, 0))
    other.extend()
    other.extend()
    assert blocks.keys[0] == other.keys[0]
    assert blocks.keys[1] != other.keys[1]


@pytest.mark.parametrize(
    "spans",
    [
        (ContentSpan(0, 0, b"x"),),
        (ContentSpan(-1, 2, b"x"),),
        (ContentSpan(3, 2, b"x"),),
        (ContentSpan(2, 1, b"x"), ContentSpan(0, 1, b"x")),
        (ContentSpan(0, 2, b"x"), ContentSpan(1, 2, b"x")),
        (ContentSpan(0, 1, b""),),
        (ContentSpan(0, 1, b"x" * 65),),
    ],
)
def test_content_that_cannot_be_is_refused(spans: tuple[ContentSpan, ...]) -> None:
    with pytest.raises(InvalidRequest, match="picture"):
        check_request(with_pictures("r", *spans, length=4), 100)


def test_content_in_order_is_taken() -> None:
    check_request(with_pictures("r", ContentSpan(0, 1, b"x"), ContentSpan(1, 3, b"y"), length=4), 100)
