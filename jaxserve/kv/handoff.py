"""What servers tell each other of a prompt that one has computed for another: tickets, and frames of pages.

A *ticket* names the lease of the pages, the server that has them, and all that must agree before a page may be used:
the model with the form of its pages, the tokens of the prompt with their salt, the seed. It goes through a router,
which cannot read more of it than that and cannot make one: it has a MAC with the secret of the fleet. So a stranger can
neither make a server connect anywhere, nor claim pages of another prompt.

A *frame* has keys and values of successive tokens. Its MAC covers the lease, so that a frame of another prompt is
refused even where it is genuine. Nothing is unpickled.
"""

import hashlib
import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import grpc

from jaxserve.kv.channel import open_channel
from jaxserve.kv.gen import handoff_pb2 as pb
from jaxserve.kv.gen import handoff_pb2_grpc as pb_grpc
from jaxserve.kv.leases import ID_BYTES, LeaseName
from jaxserve.kv.names import is_mac, mac
from jaxserve.values.content import ContentSpan

MAX_TICKET_BYTES = 4096
FRAME_OVERHEAD = 1 << 16  # bytes of a message beside `data`
_MAC_BYTES = 32
_VERSION = 1


class BadTicket(Exception):
    """The bytes are no ticket of this fleet; the message says why."""


class BadFrame(Exception):
    """A frame is not what was asked for; the message says why."""


class Ticket(NamedTuple):
    """Where the pages of a prompt are, and what they are pages of.

    Attributes:
      name: of the lease.
      address: HOST:PORT of the port on which they are fetched.
      pages: a digest of the model and the form of its pages; see `digest_of`.
      prompt: `prompt_digest`.
      num_tokens: tokens from the beginning of the prompt that have pages.
    """

    name: LeaseName
    address: str
    pages: bytes
    prompt: bytes
    num_tokens: int


def digest_of(text: str) -> bytes:
    """Equal for equal texts alone."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def prompt_digest(salt: str, token_ids: Sequence[int], content: Sequence[ContentSpan], seed: int) -> bytes:
    """Equal for equal prompts, salts and seeds alone."""
    digest = hashlib.blake2b(digest_size=32, person=b"jaxserve prompt")
    text = salt.encode("utf-8", "surrogatepass")
    digest.update(struct.pack("<QQQQ", seed, len(text), len(token_ids), len(content)) + text)
    digest.update(struct.pack(f"<{len(token_ids)}q", *token_ids))
    for span in content:
        digest.update(struct.pack("<QQQ", span.start, span.length, len(span.digest)) + span.digest)
    return digest.digest()


def seal_ticket(secret: bytes, ticket: Ticket) -> bytes:
    """The ticket as bytes that only an owner of the secret can make."""
    fields = {
        "version": _VERSION,
        "transfer": ticket.name.transfer_id.hex(),
        "epoch": ticket.name.epoch.hex(),
        "address": ticket.address,
        "pages": ticket.pages.hex(),
        "prompt": ticket.prompt.hex(),
        "tokens": ticket.num_tokens,
    }
    text = json.dumps(fields).encode()
    sealed = mac(secret, b"ticket", text) + text
    assert len(sealed) <= MAX_TICKET_BYTES, ticket
    return sealed


def open_ticket(secret: bytes, sealed: bytes) -> Ticket:
    """The ticket that `seal_ticket` sealed. Raises BadTicket."""
    if not _MAC_BYTES < len(sealed) <= MAX_TICKET_BYTES:
        raise BadTicket(f"{len(sealed)} bytes are no ticket")
    text = sealed[_MAC_BYTES:]
    if not is_mac(sealed[:_MAC_BYTES], mac(secret, b"ticket", text)):
        raise BadTicket("it was not made by a server with this secret")
    fields: dict[str, Any] = json.loads(text)
    if fields["version"] != _VERSION:
        raise BadTicket(f"it has version {fields['version']}, and this server knows {_VERSION}")
    return Ticket(
        LeaseName(bytes.fromhex(fields["transfer"]), bytes.fromhex(fields["epoch"])),
        fields["address"],
        bytes.fromhex(fields["pages"]),
        bytes.fromhex(fields["prompt"]),
        fields["tokens"],
    )


class Frame(NamedTuple):
    """Keys and values of the tokens [first_token, end_token), in their canonical form.

    `starts`: of each layer the position of its first token, `end_token` for one that has none of these.
    """

    first_token: int
    end_token: int
    starts: tuple[int, ...]
    data: bytes


def frame_to_proto(secret: bytes, name: LeaseName, frame: Frame) -> pb.PageFrame:
    """The message of a frame, with its MAC."""
    return pb.PageFrame(**frame._asdict(), mac=_frame_mac(secret, name, frame))


def frame_from_proto(secret: bytes, name: LeaseName, message: pb.PageFrame) -> Frame:
    """The frame of a message. Raises BadFrame for one that another one made, or of another lease."""
    frame = Frame(message.first_token, message.end_token, tuple(message.starts), message.data)
    if not is_mac(message.mac, _frame_mac(secret, name, frame)):
        raise BadFrame("the MAC of a frame is not one of this secret and lease")
    return frame


def _frame_mac(secret: bytes, name: LeaseName, frame: Frame) -> bytes:
    numbers = (frame.first_token, frame.end_token, len(frame.starts), *frame.starts)
    return mac(secret, b"frame", *name, struct.pack(f"<{len(numbers)}Q", *numbers), frame.data)


def lease_from_proto(message: pb.LeaseName) -> LeaseName | None:
    """None for bytes of other lengths than names have."""
    if len(message.transfer_id) != ID_BYTES or len(message.epoch) != ID_BYTES:
        return None
    return LeaseName(message.transfer_id, message.epoch)


class HandoffPeer:
    """The port of another server. Any thread. Connects with the first call."""

    def __init__(
        self, address: str, credentials: grpc.ChannelCredentials | None, tls_name: str | None, frame_bytes: int
    ) -> None:
        """`credentials` None: without TLS. `frame_bytes`: most bytes of `Frame.data` that are taken."""
        soon, alone = ("grpc.initial_reconnect_backoff_ms", 200), ("grpc.use_local_subchannel_pool", 1)
        self._channel = open_channel(address, credentials, tls_name, frame_bytes + FRAME_OVERHEAD, [soon, alone])
        self._stub: Any = pb_grpc.HandoffsStub(self._channel)
        self._frame_bytes = frame_bytes
        self._releases: set[Any] = set()

    def pull(self, name: LeaseName, first_token: int, page_tokens: int, timeout_s: float) -> "Pull":
        """Asks for the pages from `first_token` on, in whole pages of `page_tokens`."""
        request = pb.PullRequest(
            lease=pb.LeaseName(**name._asdict()),
            first_token=first_token,
            page_tokens=page_tokens,
            max_frame_bytes=self._frame_bytes,
        )
        return Pull(self._stub.Pull(request, timeout=timeout_s))

    def renew(self, name: LeaseName, timeout_s: float) -> float:
        """Renews a lease; returns its seconds. Raises grpc.RpcError."""
        return self._stub.Renew(pb.LeaseName(**name._asdict()), timeout=timeout_s).seconds

    def release(self, name: LeaseName, timeout_s: float) -> None:
        """Gives a lease back, in the background: it ends by itself if this does not arrive."""
        call = self._stub.Release.future(pb.LeaseName(**name._asdict()), timeout=timeout_s)
        self._releases.add(call)  # one that nobody refers to is cancelled
        call.add_done_callback(self._releases.discard)

    def close(self) -> None:
        """Ends all calls."""
        self._channel.close()


class Pull:
    """Messages of one pull. Iterated by one thread; `cancel` may be called by another."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def __iter__(self) -> Iterator[pb.PageFrame]:
        """Raises grpc.RpcError."""
        return iter(self._call)

    def cancel(self) -> None:
        """Ends it."""
        self._call.cancel()
