"""A connector as a third party would write it, from the methods alone: pages on a shelf that all engines share."""

from typing import Any

from jaxserve.kv.connector import ConnectorMeta, ConnectorOptions, Load, Loaded, Match, PackedPages, PageRef, Saved

SHELVES: dict[str, dict[bytes, bytes]] = {}


class Shelf:
    """A `KVConnector`. Knows what it has at once, and loads within the step.

    `settings`: `shelf`, its name; `slow`, asks of a match before it knows; `breaks`, a method that raises.
    """

    def __init__(self, options: ConnectorOptions) -> None:
        settings = dict(options.settings)
        self.pages = SHELVES.setdefault(str(settings.pop("shelf")), {})
        self._slow = int(settings.pop("slow", 0))
        self._breaks = settings.pop("breaks", "")
        assert not settings, settings
        self._slot_bytes, self._page_size = options.slot_bytes, options.page_size
        self._asked: dict[str, int] = {}
        self._loads: list[Load] = []
        self._meta = ConnectorMeta()
        self._events: list[Loaded | Saved] = []
        self.calls: list[str] = []

    def get_num_new_matched_tokens(self, seq: Any, num_computed: int) -> Match:
        self._note("get_num_new_matched_tokens")
        assert num_computed == 0
        self._asked[seq.request_id] = self._asked.get(seq.request_id, 0) + 1
        if self._asked[seq.request_id] <= self._slow:
            return Match(None, True)
        count = next((n for n, key in enumerate(seq.page_keys) if key not in self.pages), len(seq.page_keys))
        return Match(count * self._page_size, is_async=False)

    def update_state_after_alloc(self, seq: Any, slots: Any, num_external: int) -> None:
        assert num_external == len(slots) * self._page_size
        pages = tuple(map(PageRef, seq.page_keys, slots))
        self._loads.append(Load(request_id=seq.request_id, pages=pages, deadline_s=1.0))

    def build_connector_meta(self, plan: Any) -> ConnectorMeta:
        loads, self._loads = tuple(self._loads), []
        return ConnectorMeta(loads=loads, saves=tuple(plan.saved_pages))

    def request_finished(self, seq: Any) -> None:
        del self._asked[seq.request_id]  # it is told once

    def bind_connector_metadata(self, meta: ConnectorMeta) -> None:
        self._meta = meta

    def start_load_kv(self) -> None:
        self._note("start_load_kv")

    def wait_for_layer_load(self, layer: int) -> None:
        self._note("wait_for_layer_load")
        for load in self._meta.loads:
            for key, slot in load.pages:
                page = self.pages[key]
                for view in self._slot_bytes(slot):
                    view[:], page = page[: view.nbytes], page[view.nbytes :]
            self._events.append(Loaded(load.request_id, len(load.pages), tuple(page.slot for page in load.pages)))

    def save_kv_layer(self, layer: int, pages: PackedPages) -> None:
        self._note("save_kv_layer")
        assert layer == 0
        for number, page in enumerate(self._meta.saves):
            self.pages[page.key] = bytes(pages.layer_of_page(number))
            self._events.append(Saved(page, True))

    def wait_for_save(self) -> None:
        self._meta = ConnectorMeta()

    def poll(self) -> list[Loaded | Saved]:
        events, self._events = self._events, []
        return events

    def failed_keys(self) -> frozenset[bytes]:
        return frozenset()

    def close(self) -> None:
        self._note("close")

    def _note(self, method: str) -> None:
        if method not in self.calls:
            self.calls.append(method)
        if method == self._breaks:
            raise RuntimeError("a defect of somebody else")


class ShelfThatForgets(Shelf):
    """With the method that operators need."""

    def flush(self, scope: bytes | None) -> None:
        for key in [key for key in self.pages if scope is None or key.startswith(scope)]:
            del self.pages[key]
