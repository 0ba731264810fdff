"""Events of pages, read as their readers do: by ZeroMQ, and by msgspec's typed decoder on structs in vLLM's layout."""

import contextlib
import dataclasses
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import zmq
from fake_parts import Fakes

from jaxserve import LLM, SamplingParams
from jaxserve.config.schema import CacheConfig, Config, EventsConfig
from jaxserve.errors import ConfigError
from jaxserve.kv.page_events import PageEvents, check_page_events
from jaxserve.sched import ContinuousScheduler, SchedulerOptions, create_scheduler
from jaxserve.sched.plan import HostSlots, PageGroup
from jaxserve.sched.prefix import PageEntry
from jaxserve.serve.metrics import EngineCollector
from jaxserve.testing import FakeRunner, drive, make_limits, make_request

WAIT_MS = 60_000


class BlockStored(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, array_like=True, tag=True):
    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, array_like=True, tag=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Reader:
    """A subscriber, which knows what it was told."""

    def __init__(self, port: int, topic: bytes) -> None:
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.SUBSCRIBE, topic)
        self.socket.connect(f"tcp://127.0.0.1:{port}")
        self.events: list[Any] = []
        self.numbers: list[int] = []
        self.batch: Batch

    def read(self) -> None:
        """One message, and those that have come with it."""
        assert self.socket.poll(WAIT_MS), "no message"
        while self.socket.poll(0):
            topic, number, payload = self.socket.recv_multipart()
            assert topic == b"kv@here@m"
            self.numbers.append(int.from_bytes(number, "big"))
            self.batch = msgspec.msgpack.decode(payload, type=Batch)
            self.events += self.batch.events

    def known(self) -> set[tuple[int, str | None, int | None]]:
        """Blocks that can be found, with their medium and group."""
        found: set[tuple[int, str | None, int | None]] = set()
        for event in self.events:
            if isinstance(event, AllBlocksCleared):
                found.clear()
                continue
            blocks = {(block, event.medium, event.group_idx) for block in event.block_hashes}
            found = found | blocks if isinstance(event, BlockStored) else found - blocks
        return found


@pytest.fixture
def opened() -> Iterator[list[Any]]:
    parts: list[Any] = []
    yield parts
    for part in parts:
        part.close()


def open_pair(opened: list[Any], **settings: Any) -> tuple[PageEvents, Reader]:
    config = EventsConfig(topic="kv@here@m", **settings)
    events = PageEvents(config, port=0, replica=3)
    reader = Reader(events.port, b"kv@")
    opened += [reader.socket, events]
    return events, reader


def join(events: PageEvents, reader: Reader) -> None:
    """Until the subscription has reached the publisher, which ZeroMQ does not tell: told over the same socket."""
    for _ in range(6000):
        events._socket.send_multipart((b"kv@here@m", b"hello", b""))
        if reader.socket.poll(10):
            break
    while reader.socket.poll(100):
        assert reader.socket.recv_multipart()[1] == b"hello"


def until(reader: Reader, wanted: set[Any]) -> None:
    deadline_s = time.monotonic() + WAIT_MS / 1000
    while reader.known() != wanted:
        assert time.monotonic() < deadline_s, reader.known() ^ wanted
        reader.read()


def in_cache(scheduler: ContinuousScheduler) -> set[tuple[int, str, int | None]]:
    """What the prefix cache and the host tier have, read from their own tables."""
    prefix = scheduler.memory.prefix
    assert prefix is not None
    several = len(scheduler.memory.groups) > 1
    found = set()
    for key, entry in prefix._by_key.items():
        (block,) = struct.unpack(">Q", key[-8:])
        for at, (page, slot) in enumerate(zip(entry.page_ids, entry.slots, strict=True)):
            group = at if several else None
            found |= {(block, "GPU", group)} if page else set()
            found |= {(block, "CPU", group)} if slot != -1 else set()
    return found


def make_scheduler(
    events: PageEvents, groups: tuple[PageGroup, ...] = (PageGroup(),), **options: Any
) -> tuple[ContinuousScheduler, FakeRunner]:
    limits = dataclasses.replace(make_limits(**options), page_groups=groups)
    scheduler = create_scheduler("fcfs", limits, options=SchedulerOptions())
    assert isinstance(scheduler, ContinuousScheduler)
    scheduler.watch_pages(events)
    events.start(limits.page_size, limits.page_groups)
    return scheduler, FakeRunner(limits)


@pytest.mark.parametrize("groups", [(PageGroup(),), (PageGroup(), PageGroup(window=8))])
def test_a_reader_knows_what_the_cache_has(opened: list[Any], groups: tuple[PageGroup, ...]) -> None:
    """Through evictions, and a tier that takes what the device gives up, under two kinds of layers."""
    events, reader = open_pair(opened)
    join(events, reader)
    slots = HostSlots(num_slots=4, max_draining=4, max_loads=4)
    scheduler, runner = make_scheduler(events, groups, num_pages=16, page_size=4, slots=slots)
    for number in range(8):
        drive(scheduler, runner, [make_request(f"r{number}", [number % 5] * 13, max_tokens=6)])
    wanted = in_cache(scheduler)
    assert {medium for _, medium, _ in wanted} == {"GPU", "CPU"}
    until(reader, wanted)
    stored = [event for event in reader.events if isinstance(event, BlockStored)]
    assert any(isinstance(event, BlockRemoved) for event in reader.events)
    assert reader.numbers == list(range(len(reader.numbers)))
    assert reader.batch.data_parallel_rank == 3 and abs(time.time() - reader.batch.ts) < 3600
    assert {event.block_size for event in stored} == {4}
    assert {tuple(event.token_ids) for event in stored} == {()}, "token ids are off"
    if len(groups) > 1:
        kinds = {(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in stored}
        assert kinds == {(0, "full_attention", None), (1, "sliding_window", 8)}
    assert (events.num_lost, events.num_noted >= len(wanted)) == (0, True)


def test_blocks_that_follow_each_other_share_an_event_with_their_tokens(opened: list[Any]) -> None:
    events, reader = open_pair(opened, token_ids=True)
    join(events, reader)
    scheduler, runner = make_scheduler(events, num_pages=32, page_size=4)
    drive(scheduler, runner, [make_request("a", [7, 8, 9, 10, 1, 2, 3, 4, 5], max_tokens=1)])
    until(reader, in_cache(scheduler))
    drive(scheduler, runner, [make_request("b", [7, 8, 9, 10, 6, 6, 6, 6, 5], max_tokens=1)])
    until(reader, in_cache(scheduler))
    blocks = {}
    for event in reader.events:
        parent = event.parent_block_hash
        for number, block in enumerate(event.block_hashes):
            blocks[block] = (parent, event.token_ids[4 * number : 4 * number + 4])
            parent = block
    first = next(block for block, (parent, _) in blocks.items() if parent is None)
    assert [tokens for block, (parent, tokens) in blocks.items() if parent is None] == [[7, 8, 9, 10]]
    assert sorted(tokens for parent, tokens in blocks.values() if parent == first) == [[1, 2, 3, 4], [6, 6, 6, 6]]


def test_tokens_of_an_event_are_those_of_all_its_blocks(opened: list[Any]) -> None:
    """A block of a picture has none, so it stands in an event of its own."""
    events, reader = open_pair(opened, token_ids=True)
    join(events, reader)
    parent = PageEntry(b"0" * 16, None, b"", 0)
    for key, content in ((b"1", [1, 2]), (b"2", [3, 4]), (b"3", [0, 0, 5]), (b"4", [6, 7])):
        parent = PageEntry(key * 16, parent, struct.pack(f"<{len(content)}q", *content), 1)
        events.stored(parent, 0, "device")
    events.start(2, (PageGroup(),))
    reader.read()
    assert [(len(event.block_hashes), event.token_ids) for event in reader.events] == [
        (2, [1, 2, 3, 4]), (1, []), (1, [6, 7]),
    ]  # fmt: skip
    parents = [event.parent_block_hash for event in reader.events]
    assert parents == [None, int.from_bytes(b"2" * 8, "big"), int.from_bytes(b"3" * 8, "big")]


def test_what_finds_no_room_is_counted_and_the_reader_starts_again(opened: list[Any]) -> None:
    """Everything is noted before anything is sent: two events fit."""
    events, reader = open_pair(opened, max_queued=2)
    join(events, reader)
    limits = make_limits(num_pages=32, page_size=4)
    scheduler = create_scheduler("fcfs", limits)
    assert isinstance(scheduler, ContinuousScheduler)
    scheduler.watch_pages(events)
    runner = FakeRunner(limits)
    drive(scheduler, runner, [make_request("a", list(range(17)), max_tokens=1)])
    assert (events.num_noted, events.num_lost) == (2, 2)
    events.start(limits.page_size, limits.page_groups)
    reader.read()
    assert [type(event) for event in reader.events] == [BlockStored, AllBlocksCleared]
    assert reader.known() == set()
    before = in_cache(scheduler)
    drive(scheduler, runner, [make_request("b", [99] * 9, max_tokens=1)])
    until(reader, in_cache(scheduler) - before)
    assert len(reader.known()) == 2


def test_a_port_in_use_and_settings_without_effect_are_told(opened: list[Any]) -> None:
    events, _ = open_pair(opened)
    with pytest.raises(ConfigError, match=rf"cannot send events on 127\.0\.0\.1:{events.port}: .* set events\.host"):
        PageEvents(EventsConfig(), port=events.port, replica=0)
    with pytest.raises(ConfigError, match=r"cannot send events on"):
        check_page_events(Config(events=EventsConfig(port=events.port)))
    with pytest.raises(ConfigError, match=r"events\.topic is set, but events\.port is not"):
        check_page_events(Config(events=EventsConfig(topic="a")))
    with pytest.raises(ConfigError, match=r"cache\.prefix_caching is false"):
        check_page_events(Config(events=EventsConfig(port=5557), cache=CacheConfig(prefix_caching=False)))


class OtherScheduler:
    """None of ours."""

    def __init__(self, limits: Any, options: Any) -> None:
        self.add = self.abort = self.schedule = self.commit = self.has_work = lambda *given: None


def test_each_replica_of_an_engine_sends_its_own_and_gives_its_port_back(monkeypatch: pytest.MonkeyPatch) -> None:
    Fakes().install(monkeypatch.setattr)
    port = 0
    while not (port and _is_free(port) and _is_free(port + 1)):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
    settings = {"events.port": port, "events.topic": "kv@here@m", "parallel.data": 2}
    four = SamplingParams(temperature=0.0, max_tokens=4)
    with contextlib.ExitStack() as held, LLM.from_config(None, settings) as llm:
        readers = [Reader(port + number, b"kv@") for number in range(2)]
        for reader in readers:
            held.callback(reader.socket.close)
        deadline_s, number = time.monotonic() + WAIT_MS / 1000, 0
        while not all(reader.socket.poll(0) for reader in readers):  # a reader that has just come misses some
            llm.generate([[number % 250] * 20, [number % 250 + 1] * 20], four, use_tqdm=False)
            number += 1
            assert time.monotonic() < deadline_s
        for reader in readers:
            reader.read()
        assert [reader.batch.data_parallel_rank for reader in readers] == [0, 1]
        families = {family.name: family for family in EngineCollector(llm._engine).collect()}
        noted = {tuple(sample.labels.values())[1:]: sample.value for sample in families["jaxserve:kv_events"].samples}
        assert noted["0", "noted"] > 0 < noted["1", "noted"] and noted["0", "lost"] == 0
    while not _is_free(port):  # ZeroMQ gives it back later than it says
        assert time.monotonic() < deadline_s
    with pytest.raises(ConfigError, match="OtherScheduler.* is none of jaxserve's, and tells of no pages"):
        LLM.from_config(None, {"events.port": port}, scheduler=OtherScheduler)


def _is_free(port: int) -> bool:
    try:
        check_page_events(Config(events=EventsConfig(port=port)))
    except ConfigError:
        return False
    return True
