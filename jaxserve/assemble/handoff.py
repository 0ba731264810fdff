"""The pages of one engine for another: slots in the canonical form, and back (`serve.handoff`'s `PageForm`).

Both engines need the same checkpoint and type of cache. Their kernels, devices, stages and sizes of pages may differ.
"""

import collections
import math
from collections.abc import Callable, Mapping

import numpy as np

from jaxserve import __version__
from jaxserve.assemble.page_store import bytes_of
from jaxserve.config.schema import Config, HandoffConfig
from jaxserve.config.secret_files import read_mutual_tls, read_secret
from jaxserve.errors import ConfigError
from jaxserve.kv.handoff import BadFrame, Frame
from jaxserve.runtime.canonical_pages import CanonicalPages, GroupPages, SlotForm, export_pages, import_pages
from jaxserve.runtime.host_slots import SlotBytes
from jaxserve.sched.page_exchange import Lent, Place

_TLS = ("tls_cert", "tls_key", "tls_ca")


def check_handoff(config: Config) -> bool:
    """Whether the config asks for handoffs. Raises ConfigError for settings that cannot work together."""
    handoff = config.handoff
    if handoff.secret_file is None:
        changed = [name for name, value in handoff if value != HandoffConfig.model_fields[name].default]
        if changed:
            raise ConfigError(f"handoff.{changed[0]} is set, but handoff.secret_file is not; set it, or leave it out")
        return False
    read_secret(handoff.secret_file, "handoff.secret_file")
    given = [name for name in _TLS if getattr(handoff, name) is not None]
    if given and len(given) < len(_TLS):
        missing = [name for name in _TLS if name not in given]
        raise ConfigError(f"handoff.{given[0]} is set and handoff.{missing[0]} is not; TLS needs all of tls_*")
    if handoff.tls_name is not None and not given:
        raise ConfigError("handoff.tls_name is set, but the servers have no TLS; set handoff.tls_cert, tls_key, tls_ca")
    if handoff.tls_cert is not None and handoff.tls_key is not None and handoff.tls_ca is not None:
        read_mutual_tls(handoff.tls_cert, handoff.tls_key, handoff.tls_ca, "handoff.")
    for fault, remedy in (
        (not config.cache.host_bytes, "pages wait in slots of host memory: set cache.host_bytes"),
        (not config.cache.prefix_caching, "pages are found by the prefix cache: set cache.prefix_caching"),
        (
            config.parallel.data > 1,
            "the pages of a prompt are one replica's: set parallel.data to 1, and start more servers",
        ),
        (config.hosts.num_processes > 1, "no process has whole pages: leave hosts out"),
        (config.serve.grpc.port is None, "routers ask over gRPC: set serve.grpc.port"),
    ):
        if fault:
            raise ConfigError(f"handoff.secret_file is set, but {remedy}")
    return True


class CanonicalSlots:
    """A `PageForm`. Any thread.

    Attributes:
      page_tokens: of a page.
      token_bytes: of a token of all layers, in the canonical form.
    """

    def __init__(self, slots: SlotBytes, form: SlotForm, namespace: Callable[[], str]) -> None:
        """`namespace`: of the keys of pages, which is another one once the engine has other weights."""
        self.page_tokens = form.page_size
        self.token_bytes = sum(2 * kind.num_heads * kind.head_dim * kind.bits.itemsize for kind in form.layers)
        layers = collections.Counter(map(str, form.layers))  # their order follows from the checkpoint
        self._described = f"jaxserve {__version__}, canonical pages 1, {dict(layers)}"
        self._namespace = namespace
        self._form = form
        self._bytes: Callable[[int], list[memoryview]] = bytes_of(slots)

    @classmethod
    def of(
        cls, slots: SlotBytes | None, form: SlotForm | None, namespace: Callable[[], str], frame_bytes: int
    ) -> "CanonicalSlots":
        """Raises ConfigError where the layout of pages is not known, or no page fits into a frame."""
        if slots is None or form is None:
            raise ConfigError(
                "handoff.secret_file is set, but the chosen implementation of paged attention does not say how it lays "
                "out pages; choose another (kernels.paged_attention), or leave handoff out"
            )
        made = cls(slots, form, namespace)
        if made.page_tokens * made.token_bytes > frame_bytes:
            raise ConfigError(
                f"a page of {made.page_tokens} tokens has {made.page_tokens * made.token_bytes} bytes, more than "
                f"handoff.frame_bytes, {frame_bytes}; raise that, on all servers, or lower cache.page_size"
            )
        return made

    @property
    def describe(self) -> str:
        """Equal for engines that may exchange pages now."""
        return f"{self._described}, {self._namespace()}"

    def read(self, lent: Lent, begin: int, end: int) -> Frame:
        """The blocks [begin, end) of what is lent."""
        groups = []
        for first, slots in zip(lent.firsts, lent.slots, strict=True):
            start = min(max(first, begin), end)
            groups.append(GroupPages(start, self._stack(slots[start - first : end - first] if start < end else ())))
        pages = export_pages(self._form, groups)
        return Frame(begin * self.page_tokens, pages.end, pages.starts, pages.data)

    def write(self, frame: Frame, slots: Mapping[Place, int]) -> set[Place]:
        """Fills those of `slots` whose pages are in the frame; returns them. Raises BadFrame."""
        starts = [min(start, frame.end_token) for start in frame.starts]
        if len(starts) != len(self._form.layers) or min(starts, default=0) < frame.first_token:
            raise BadFrame(f"a frame of the tokens from {frame.first_token} on has {len(starts)} layers from {starts}")
        pages = CanonicalPages(layers=self._form.layers, starts=tuple(starts), end=frame.end_token, data=frame.data)
        try:
            groups = import_pages(self._form, pages)
        except ConfigError as error:
            raise BadFrame(str(error)) from error
        filled = set()
        for at, group in enumerate(groups):
            for number, page in enumerate(group.slots, start=group.first):
                slot = slots.get(Place(number, at))
                if slot is not None:
                    _spread(page, self._bytes(slot))
                    filled.add(Place(number, at))
        return filled

    def step(self, page_tokens: int, most_bytes: int) -> int:
        """Blocks of a frame for pages of other sizes, so many at least, within `most_bytes` if that is possible."""
        unit = math.lcm(self.page_tokens, page_tokens)
        return unit // self.page_tokens * max(1, most_bytes // (unit * self.token_bytes))

    def _stack(self, slots: tuple[int, ...]) -> np.ndarray:
        """uint8 [S, slot_bytes]."""
        stacked = np.empty((len(slots), self._form.slot_bytes), np.uint8)
        for line, slot in zip(stacked, slots, strict=True):
            at = 0
            for view in self._bytes(slot):
                line[at : at + view.nbytes] = np.frombuffer(view, np.uint8)
                at += view.nbytes
        return stacked


def _spread(page: np.ndarray, views: list[memoryview]) -> None:
    at = 0
    for view in views:
        np.frombuffer(view, np.uint8)[:] = page[at : at + view.nbytes]
        at += view.nbytes
