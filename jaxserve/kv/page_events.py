"""Which pages a server can find, told to whoever chooses servers: events over ZeroMQ, in the format of vLLM.

A message has three parts: the topic, the number of the message (8 bytes, big endian, from 0) and a MessagePack array

    [seconds since 1970, [event, ...], number of the replica]

whose events are arrays, too:

    ["BlockStored", [hash, ...], hash of the block before or nil, [token id, ...], tokens of a block, nil, medium]
    ["BlockRemoved", [hash, ...], medium]
    ["AllBlocksCleared"]

A hash is an unsigned integer: the last 8 bytes of the block's key (`content`), big endian. Media are "GPU", which here
means the device, whatever it is, and "CPU", slots of host memory. A model with several groups of layers (`PageGroup`)
has an event for each; BlockStored then goes on with [nil, nil, group, "full_attention" or "sliding_window", window or
nil], and BlockRemoved with the group. The layout is that of vLLM's KV cache events as arrays.

Sending never delays the loop. It notes events in a list of bounded length; a thread sends them. Where the list is full,
events are lost and counted, and AllBlocksCleared follows: a reader then knows fewer pages than there are, and never
believes in one that is gone for want of a message. ZeroMQ drops messages of a reader that is too slow; their numbers
show it. There is no way to ask for old messages, so a reader knows what was stored since it came.
"""

import logging
import socket
import struct
import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxserve.config.addresses import address_of
from jaxserve.config.schema import Config, EventsConfig
from jaxserve.errors import ConfigError, how_to_install
from jaxserve.sched.entry import PageEntry
from jaxserve.sched.page_watch import PageWatcher, Tier
from jaxserve.sched.plan import PageGroup

logger = logging.getLogger(__name__)

_MEDIA: dict[Tier, str] = {"device": "GPU", "host": "CPU"}  # vLLM's words, which readers weigh
_HIGH_WATER = 10_000  # messages that wait for one reader
_BATCH_S = 0.01  # events of this long travel together
_CLOSE_S = 2.0


class _Event(NamedTuple):
    """`tokens`: packed; None for a removal."""

    key: bytes
    parent: bytes | None
    tokens: bytes | None
    at: int
    tier: Tier


def check_page_events(config: Config) -> None:
    """Raises ConfigError for settings of `events:` that can have no effect, a port in use, or a missing extra."""
    events = config.events
    if events.port is None:
        unused = [name for name, value in events if value != EventsConfig.model_fields[name].default]
        if unused:
            raise ConfigError(f"events.{unused[0]} is set, but events.port is not; set a port, or leave it out")
        return
    if not config.cache.prefix_caching:
        raise ConfigError("events.port is set, but cache.prefix_caching is false, so no page is ever found; set one")
    if events.port + config.parallel.data > 65536:
        raise ConfigError(
            f"events.port is {events.port}, and each of {config.parallel.data} replicas takes the next one; ports end "
            "at 65535, so choose a smaller one"
        )
    _libraries()
    family = socket.AF_INET6 if ":" in events.host else socket.AF_INET
    for port in range(events.port, events.port + config.parallel.data):
        try:  # ZeroMQ gives a port back later than it says, so this is not its bind
            socket.create_server((events.host, port), family=family).close()
        except OSError as error:
            raise _cannot_bind(events.host, port, error) from error


def _cannot_bind(host: str, port: int, error: Exception) -> ConfigError:
    return ConfigError(f"cannot send events on {address_of(host, port)}: {error}; set events.host or events.port")


def open_page_events(config: Config) -> "list[PageEvents]":
    """One for each replica, on ports from `events.port` on; none where it is not set. Raises ConfigError."""
    events = config.events
    if events.port is None:
        return []
    opened: list[PageEvents] = []
    try:
        for replica in range(config.parallel.data):
            opened.append(open_page_events_of(config, replica))
    except ConfigError:
        for one in opened:
            one.close()
        raise
    return opened


def open_page_events_of(config: Config, replica: int) -> "PageEvents":
    """That of one replica. Raises ConfigError."""
    assert config.events.port is not None
    return PageEvents(config.events, port=config.events.port + replica, replica=replica)


class PageEvents(PageWatcher):
    """The events of one replica. `stored` and `removed` belong to the scheduler's thread, the rest to any.

    The port is bound at once; events are sent from `start` on.
    """

    passes_on = True

    def __init__(self, config: EventsConfig, *, port: int, replica: int) -> None:
        """`port` 0 takes a free one. Raises ConfigError when it cannot be bound, or the extra is missing."""
        self.num_noted = self.num_lost = 0
        self._topic = config.topic.encode()
        self._with_tokens = config.token_ids
        self._capacity = config.max_queued
        self._replica = replica
        self._page_size = 0
        self._groups: tuple[PageGroup, ...] = ()
        self._noted: list[_Event] = []
        self._losing = False  # events were lost since the last that was taken
        self._lock = threading.Lock()  # over the two above
        self._some = threading.Event()
        self._closed = False
        self._sequence = 0
        self._zmq, self._pack = _libraries()
        self._socket = self._zmq.Context.instance().socket(self._zmq.PUB)
        self._socket.setsockopt(self._zmq.SNDHWM, _HIGH_WATER)
        self._socket.setsockopt(self._zmq.LINGER, 0)
        host = f"[{config.host}]" if ":" in config.host else config.host
        self._socket.setsockopt(self._zmq.IPV6, ":" in config.host)
        try:
            self._socket.bind(f"tcp://{host}:{port or '*'}")
        except self._zmq.ZMQError as error:
            self._socket.close()
            raise _cannot_bind(config.host, port, error) from error
        self.port = int(self._socket.getsockopt(self._zmq.LAST_ENDPOINT).decode().rstrip("\0").rpartition(":")[2])
        self._thread = threading.Thread(target=self._run, name=f"jaxserve-page-events-{replica}", daemon=True)

    def start(self, page_size: int, groups: tuple[PageGroup, ...]) -> None:
        """The pages that will be told of have `page_size` tokens, and belong to these groups of layers."""
        self._page_size, self._groups = page_size, groups
        self._thread.start()
        logger.info("events of pages are sent on port %d", self.port)

    def stored(self, entry: PageEntry, at: int, tier: Tier) -> None:
        """See `PageWatcher`."""
        before = entry.parent
        parent = None if before is None or before.parent is None else before.key  # a root is no block
        self._note(_Event(entry.key, parent, entry.content, at, tier))

    def removed(self, entry: PageEntry, at: int, tier: Tier) -> None:
        """See `PageWatcher`."""
        self._note(_Event(entry.key, None, None, at, tier))

    def close(self) -> None:
        """Sends what is noted, and gives the port back."""
        if self._closed:
            return
        self._closed = True
        self._some.set()
        if self._thread.ident is None:
            self._socket.close()
        else:
            self._thread.join(_CLOSE_S)

    def _note(self, event: _Event) -> None:
        with self._lock:
            if len(self._noted) >= self._capacity:
                self._losing = True
                self.num_lost += 1
                return
            self._noted.append(event)
            self.num_noted += 1
        if not self._some.is_set():
            self._some.set()

    def _run(self) -> None:
        try:
            while not self._closed:
                self._some.wait()
                self._some.clear()
                self._send()
                time.sleep(_BATCH_S)
            self._send()
        except Exception:  # a defect, or ZeroMQ's: serving goes on
            logger.exception("no more events of pages are sent; from now on they are lost")
        finally:
            self._socket.close()

    def _send(self) -> None:
        with self._lock:
            noted, self._noted = self._noted, []
            losing, self._losing = self._losing, False
        events = self._encoded(noted)
        if losing:  # what was lost came after all that was noted
            logger.warning("events of pages are lost, %d by now; see events.max_queued", self.num_lost)
            events.append(["AllBlocksCleared"])
        if events:
            number = self._sequence.to_bytes(8, "big")
            self._socket.send_multipart((self._topic, number, self._pack([time.time(), events, self._replica])))
            self._sequence += 1

    def _encoded(self, noted: Sequence[_Event]) -> list[Any]:
        """One event for each run of blocks that follow each other, or of removals, of one group on one tier."""
        events: list[Any] = []
        last: _Event | None = None
        for event in noted:
            alike = last is not None and (event.at, event.tier) == (last.at, last.tier)
            if event.tokens is None:
                if last is not None and alike and last.tokens is None:
                    events[-1][1].append(_hash(event.key))
                else:
                    group = [event.at] if len(self._groups) > 1 else []
                    events.append(["BlockRemoved", [_hash(event.key)], _MEDIA[event.tier], *group])
            else:
                token_ids = self._token_ids(event.tokens)
                follows = last is not None and alike and last.tokens is not None and event.parent == last.key
                if follows and bool(token_ids) == bool(events[-1][3]):  # tokens of all its blocks, or of none
                    events[-1][1].append(_hash(event.key))
                    events[-1][3].extend(token_ids)
                else:
                    parent = None if event.parent is None else _hash(event.parent)
                    fields = [[_hash(event.key)], parent, token_ids, self._page_size, None]
                    events.append(["BlockStored", *fields, _MEDIA[event.tier], *self._group(event.at)])
            last = event
        return events

    def _group(self, at: int) -> list[Any]:
        if len(self._groups) < 2:
            return []
        window = self._groups[at].window
        return [None, None, at, "full_attention" if window is None else "sliding_window", window]

    def _token_ids(self, content: bytes) -> list[int]:
        """Of a block; none where they are not sent, or stand for pictures (see `content`)."""
        if not self._with_tokens or len(content) != 8 * self._page_size:
            return []
        return list(struct.unpack(f"<{self._page_size}q", content))


def _hash(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")


def _libraries() -> tuple[Any, Any]:
    """ZeroMQ, and the function that packs."""
    try:
        import msgpack
        import zmq
    except ImportError as error:
        raise ConfigError(f"events.port needs ZeroMQ and MessagePack: {how_to_install('kv-events')}") from error
    return zmq, msgpack.packb
