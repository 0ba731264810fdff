"""The store of pages that a config names, as the scheduler sees it: `sched.loading.SlotStore` over `kv.Transfers`.

The scheduler names pages by salt and content; here these become keys of a store, and slots become their bytes.
"""

import os
import threading
from collections.abc import Callable, Sequence

from jaxserve.config.schema import Config, StoreConfig
from jaxserve.config.secret_files import read_secret
from jaxserve.errors import ConfigError
from jaxserve.kv.names import page_key, scope_of
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.store import STORES, Outcome, StoreOptions, create_store
from jaxserve.kv.transfer import Filled as TransferFilled
from jaxserve.kv.transfer import Transfers
from jaxserve.runtime.host_slots import SlotBytes
from jaxserve.sched.loading import Filled, StoreKey, Written

# Scopes then only tell salts apart: the names in a store that others reach are keyed by the secret of that.
_NO_SECRET = b"jaxserve"
_WORD = 4
_LATE_S = 0.01  # after the deadline of a fill, so that the scheduler, woken then, finds it past


def check_page_store(config: Config) -> None:
    """Raises ConfigError for settings of `store:` that cannot work with each other or with the rest."""
    store = config.store
    if store.kind is None:
        unused = [name for name, value in store if value != StoreConfig.model_fields[name].default]
        if unused:
            raise ConfigError(f"store.{unused[0]} is set, but store.kind is not; name a store, or leave it out")
        return
    STORES.get(store.kind)
    if not config.cache.host_bytes:
        raise ConfigError(
            f"store.kind is {store.kind!r}, but a store fills slots of host memory and cache.host_bytes is 0; set that"
        )
    if config.hosts.num_processes > 1:
        raise ConfigError(
            f"store.kind is {store.kind!r} and hosts.num_processes {config.hosts.num_processes}, but the processes of "
            "one service would have to find the same pages at the same time; leave one of them out"
        )


def open_page_store(config: Config, slots: SlotBytes | None, layout: str, namespace: str) -> "PageStore | None":
    """The store of `store:` for one replica; None where `store.kind` is none.

    `layout` says how the bytes of a page are arranged, `namespace` what else they follow from (`Device`). Raises what
    the store raises.
    """
    store = config.store
    if store.kind is None:
        return None
    assert slots is not None, "`check_page_store` has seen cache.host_bytes"
    page_layout = PageLayout(
        namespace=f"{namespace}, {layout}",
        dtype="uint32",
        shape=(slots.words,),
        element_bytes=_WORD,
        page_bytes=_WORD * slots.words,
    )
    made = create_store(store.kind, page_layout, _options(store))

    def bytes_of(slot: int) -> list[memoryview]:
        slots.wait_for([slot])  # a page that a plan saved may still be on its way
        return slots.views(slot)

    secret = _secret(store) or _NO_SECRET
    return PageStore(lambda wake: Transfers(made, bytes_of, wake=wake, place=store.kind or ""), secret)


class PageStore:
    """A `SlotStore`. Called by the loop; `wake` is set before it."""

    def __init__(self, make: Callable[[Callable[[], None]], Transfers], secret: bytes) -> None:
        self.wake: Callable[[], None] = lambda: None
        self._transfers = make(lambda: self.wake())
        self._secret = secret
        self._scopes: dict[str, bytes] = {}  # of the latest salts
        self._timers: dict[int, threading.Timer] = {}

    def fill(self, keys: Sequence[StoreKey], slots: Sequence[int], deadline_s: float) -> int | None:
        """See `SlotStore`."""
        ticket = self._transfers.fill([self._key(key) for key in keys], slots, deadline_s)
        if ticket is not None:
            # A store that forgets its deadline must not make the loop sleep for ever.
            timer = self._timers[ticket] = threading.Timer(deadline_s + _LATE_S, lambda: self.wake())
            timer.daemon = True
            timer.start()
        return ticket

    def cancel(self, ticket: int) -> None:
        """See `SlotStore`."""
        self._transfers.cancel(ticket)

    def write(self, key: StoreKey, slot: int) -> bool:
        """See `SlotStore`."""
        return self._transfers.write_behind(self._key(key), slot)

    def poll(self) -> list[Filled | Written]:
        """See `SlotStore`."""
        events: list[Filled | Written] = []
        for event in self._transfers.poll():
            if isinstance(event, TransferFilled):
                self._timers.pop(event.ticket).cancel()
                events.append(Filled(event.ticket, tuple(outcome is Outcome.OK for outcome in event.outcomes)))
            else:
                events.append(Written(event.slot))
        return events

    def close(self) -> None:
        """Writes what waits to be written, and closes the store."""
        for timer in self._timers.values():
            timer.cancel()
        self._transfers.close()

    def _key(self, key: StoreKey) -> bytes:
        scope = self._scopes.get(key.salt)
        if scope is None:
            if len(self._scopes) >= 1024:  # salts are made up by clients
                self._scopes.clear()
            scope = self._scopes[key.salt] = scope_of(self._secret, key.salt)
        return page_key(scope, key.content)


def _options(store: StoreConfig) -> StoreOptions:
    names = ("location", "max_bytes", "policy", "admission", "compression", "tls_ca", "tls_cert", "tls_key", "tls_name")
    return StoreOptions(secret=_secret(store), **{name: getattr(store, name) for name in names})


def _secret(store: StoreConfig) -> bytes | None:
    if store.secret_file is None:
        return None
    return read_secret(os.path.expanduser(store.secret_file), "store.secret_file")
