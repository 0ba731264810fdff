"""What the two sides of a handoff share: the form of pages, and counts for metrics.

A prompt is computed on one server (`handoff_sender`) and its tokens are generated on another (`handoff_receiver`), as
routers ask for through `handoff_service`. `docs/apart.md` has the whole picture.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from jaxserve.config.schema import HandoffConfig
from jaxserve.kv.handoff import Frame
from jaxserve.sched.page_exchange import Lent, Place


class PageForm(Protocol):
    """Pages in slots as bytes for any engine of the model, and back. Any thread."""

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        ...

    @property
    def describe(self) -> str:
        """Equal for engines that may exchange pages now: it is another text once an engine has other weights."""
        ...

    def step(self, page_tokens: int, most_bytes: int) -> int:
        """Blocks of a frame for pages of other sizes."""
        ...

    def read(self, lent: Lent, begin: int, end: int) -> Frame:
        """The blocks [begin, end) of what is lent."""
        ...

    def write(self, frame: Frame, slots: Mapping[Place, int]) -> set[Place]:
        """Fills those of `slots` whose pages are in the frame; returns them. Raises BadFrame."""
        ...


class HandoffSetup(NamedTuple):
    """What an engine that takes part is given beside its config."""

    config: HandoffConfig
    form: PageForm


@dataclasses.dataclass(slots=True)
class HandoffCounts:
    """Since the start. Each is changed by one thread at a time, under its owner's lock.

    Attributes:
      prefills: prompts computed for others, by how that ended: lent, short (no full page), refused, failed.
      leases: that ended: released, expired.
      tokens: of prompts that came with a ticket: cached (here already), pulled, computed.
      missed: of the computed ones, those that were to be pulled, by reason.
      bytes_sent, bytes_pulled: of pages.
      live_leases, lent_slots: now.
    """

    prefills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    leases: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    tokens: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    missed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    bytes_sent: int = 0
    bytes_pulled: int = 0
    pull_s: float = 0.0
    num_pulls: int = 0
    live_leases: int = 0
    lent_slots: int = 0
