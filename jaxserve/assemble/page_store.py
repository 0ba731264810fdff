"""The stores of pages that a config names, as the scheduler sees them: `sched.loading.SlotStore` over `kv.Transfers`.

The scheduler names pages by salt and content; here these become keys of a store, and slots become their bytes.
`PageStores` is made before the model is loaded, so that a wrong setting is found early, and opens a store once the
pages are known.
"""

import functools
import hashlib
import secrets
import threading
from collections.abc import Callable, Sequence

from jaxserve import __version__
from jaxserve.config.schema import Config, StoreConfig
from jaxserve.config.secret_files import read_secret
from jaxserve.errors import ConfigError
from jaxserve.kv.names import page_key, scope_of
from jaxserve.kv.page_format import PageLayout, layout_digest
from jaxserve.kv.sealed_store import SealedStore
from jaxserve.kv.store import STORES, KVStore, Outcome, StoreOptions, create_store
from jaxserve.kv.transfer import Filled as TransferFilled
from jaxserve.kv.transfer import Transfers
from jaxserve.kv.translated import Translated
from jaxserve.runtime.canonical_pages import SlotForm
from jaxserve.runtime.host_slots import SlotBytes
from jaxserve.sched.loading import Filled, StoreCounts, StoreKey, Written
from jaxserve.values.content import callers_salt

_NEEDED = {
    "memory": ("max_bytes",),
    "file": ("location", "max_bytes"),
    "remote": ("location", "secret_file"),
    "object": ("location", "secret_file"),
}
_NEEDED_ELSEWHERE = ("secret_file",)  # the names in any store that others reach are keyed by it
_OPTIONS = ("location", "max_bytes", "policy", "admission", "compression", "tls_ca", "tls_cert", "tls_key", "tls_name")
_WORD = 4
_EVENTS = {  # of pages, and the names that `Transfers.counts` has for them
    "filled": "fill_ok",
    "missed": "fill_miss",
    "late": "fill_late",
    "bad": "fill_bad",
    "failed": "fill_failed",
    "prefetch_used": "prefetch_used",
    "prefetch_late": "prefetch_late",
    "prefetch_wasted": "prefetch_wasted",
    "written": "write_ok",
    "write_late": "write_late",
    "write_refused": "write_refused",
    "write_failed": "write_failed",
    "write_skipped": "writes_skipped",
}
# Of a store that is only made to see whether its settings are right. No page is smaller: `max_bytes` that are too few
# for it are too few for any.
_TRIAL = PageLayout(namespace="", dtype="uint8", shape=(1,), element_bytes=1, page_bytes=1)


def prepare_page_stores(config: Config) -> "PageStores | None":
    """What opens the store of `store:` for each replica; None where `store.kind` is none.

    Raises ConfigError for settings of `store:` that cannot work, with each other or with the rest.
    """
    store = config.store
    if store.kind is None:
        unused = [name for name, value in store if value != StoreConfig.model_fields[name].default]
        if unused:
            raise ConfigError(f"store.{unused[0]} is set, but store.kind is not; name a store, or leave it out")
        return None
    if store.connector_options:
        raise ConfigError(
            f"store.connector_options is set, but store.kind is {store.kind!r}, which is no connector; leave one out"
        )
    check_surroundings(config, f"store.kind is {store.kind!r}")
    return PageStores(store)


def check_surroundings(config: Config, given: str) -> None:
    """Raises ConfigError where nothing can be behind host memory. `given` begins the message."""
    if not config.cache.host_bytes:
        raise ConfigError(f"{given}, but that fills slots of host memory and cache.host_bytes is 0; set that")


class PageStores:
    """The stores of one engine: one for each layout of pages. Replicas with equal pages share theirs.

    Used by the thread that starts the engine.
    """

    def __init__(self, store: StoreConfig) -> None:
        """Checks all that does not depend on the pages. Raises ConfigError."""
        assert store.kind is not None
        self._kind = store.kind
        self._is_canonical = store.pages == "canonical"
        found = STORES.get(store.kind)
        for name in _NEEDED.get(store.kind, _NEEDED_ELSEWHERE):
            if getattr(store, name) is None:
                raise ConfigError(f"store.kind is {store.kind!r}, which needs store.{name}; set it")
        self._is_finished = not isinstance(found, type) and isinstance(found, KVStore)
        path = store.secret_file
        self._secret = None if path is None else read_secret(path, "store.secret_file")
        # The names of pages are keyed by the secret in any store; a finished one is not told of it.
        told = None if self._is_finished else self._secret
        self._options = StoreOptions(secret=told, **{name: getattr(store, name) for name in _OPTIONS})
        self._shared: dict[PageLayout, _Shared] = {}
        self._opened: list[PageStore] = []
        if self._is_finished:
            self._create(_TRIAL)
        elif store.kind in _NEEDED:  # a class of somebody else is made once, when the pages are known
            self._create(_TRIAL).close()

    def open(self, slots: SlotBytes | None, layout: str, namespace: str, form: SlotForm | None = None) -> "PageStore":
        """The store for one replica.

        `layout` says how the bytes of a slot are arranged, `namespace` what else they follow from (`Device`). `form`
        turns them into the canonical form; None: it is not known. Raises what the store raises, and ConfigError.
        """
        assert slots is not None, "`check_surroundings` has seen cache.host_bytes"
        if not self._is_canonical:
            form = None
            pages = page_layout(slots, layout, namespace)
        elif form is None:
            raise ConfigError(
                "store.pages is canonical, but the chosen implementation of paged attention does not say how it lays "
                "out pages; choose another (kernels.paged_attention), or leave store.pages out"
            )
        else:
            pages = _canonical_layout(form, namespace)
        shared = self._shared.get(pages)
        if shared is None or shared.is_closed:
            made = self._create(pages)
            secret = self._secret
            if secret is None:  # a directory's own; the names in this process's memory are seen by nobody
                secret = made.secret if isinstance(made, SealedStore) else secrets.token_bytes(32)
            shared = self._shared[pages] = _Shared(made, secret, is_ours=not self._is_finished)

        store = shared.store
        if form is not None:
            store = Translated(store, form.page_bytes, form.to_page, form.from_page)
        opened = PageStore(shared, store, bytes_of(slots), PageKeys(shared.secret, pages), self._kind)
        self._opened.append(opened)
        return opened

    def close(self) -> None:
        """Closes all that was opened: for a start that does not succeed."""
        for opened in self._opened:
            opened.close()

    def _create(self, layout: PageLayout) -> KVStore:
        try:
            return create_store(self._kind, layout, self._options)
        except ConfigError as error:
            raise ConfigError(f"store: {error}") from error


def page_layout(slots: SlotBytes, layout: str, namespace: str) -> PageLayout:
    """What the pages of a replica are to a store; see `PageStores.open`."""
    return PageLayout(
        namespace=f"{namespace}, {layout}",
        dtype="uint32",
        shape=(slots.words,),
        element_bytes=_WORD,
        page_bytes=_WORD * slots.words,
    )


def bytes_of(slots: SlotBytes) -> Callable[[int], list[memoryview]]:
    """The buffers of a slot, once the page that a plan has saved there is whole."""

    def read(slot: int) -> list[memoryview]:
        slots.wait_for([slot])
        return slots.views(slot)

    return read


class PageKeys:
    """Keys of pages in one layout: those of another one must not be found, even where nobody else tells them apart.

    Attributes:
      scope_of: `names.scope_of`, which remembers the latest salts: of those that clients make up may be any number.
    """

    def __init__(self, secret: bytes, layout: PageLayout) -> None:
        self.scope_of = functools.lru_cache(maxsize=1024)(functools.partial(scope_of, secret))
        self._layout = layout_digest(layout)

    def key(self, page: StoreKey) -> bytes:
        """See `names.page_key`. The scope is that of the caller's own salt, by which pages are flushed; the content
        follows from the whole salt."""
        content = hashlib.blake2b(page.content, key=self._layout, digest_size=32, person=b"page in layout").digest()
        return page_key(self.scope_of(callers_salt(page.salt)), content)


def _canonical_layout(form: SlotForm, namespace: str) -> PageLayout:
    """Of pages for all engines of a model, whatever their kernels, devices, stages and JAX."""
    kinds = {cache.kind for cache in form.caches}
    uniform = next(iter(kinds)) if len(kinds) == 1 else None
    return PageLayout(
        namespace=f"{namespace}, jaxserve {__version__}, {form.describe()}",
        dtype="uint8" if uniform is None else uniform.dtype,
        shape=(form.page_bytes,)
        if uniform is None
        else (len(form.caches), 2, form.page_size, uniform.num_heads, uniform.head_dim),
        element_bytes=1 if uniform is None else uniform.bits.itemsize,
        page_bytes=form.page_bytes,
    )


class _Shared:
    """A store that several replicas use. Any thread.

    Attributes:
      secret: by which the names of pages are keyed.
      is_closed: the last user has left.
    """

    def __init__(self, store: KVStore, secret: bytes, *, is_ours: bool) -> None:
        """`is_ours`: it was made here, and not by whoever wrote the config."""
        self.store = store
        self.secret = secret
        self._is_ours = is_ours
        self.is_closed = False
        self._num_users = 0
        self._lock = threading.Lock()

    def join(self) -> None:
        """One more uses it."""
        with self._lock:
            self._num_users += 1

    def leave(self) -> bool:
        """One uses it no more. Whether it is to be closed now."""
        with self._lock:
            self._num_users -= 1
            self.is_closed = self._is_ours and not self._num_users
            return self.is_closed


class PageStore:
    """A `SlotStore`. Called by the loop; `wake` is set before it."""

    def __init__(
        self, shared: _Shared, store: KVStore, slot_bytes: Callable[[int], list[memoryview]], keys: PageKeys, place: str
    ) -> None:
        """`store`: the shared one, or one around it. `slot_bytes`: the buffers of a slot. `place` names it in logs."""
        self.wake: Callable[[], None] = lambda: None
        self._shared = shared
        self._transfers = Transfers(store, slot_bytes, wake=lambda: self.wake(), place=place)
        self._keys = keys
        self._closed = False
        shared.join()

    def fill(self, keys: Sequence[StoreKey], slots: Sequence[int], deadline_s: float) -> int | None:
        """See `SlotStore`."""
        return self._transfers.fill([self._keys.key(key) for key in keys], slots, deadline_s)

    def prefetch(self, keys: Sequence[StoreKey], slots: Sequence[int], deadline_s: float) -> int | None:
        """See `SlotStore`."""
        return self._transfers.prefetch([self._keys.key(key) for key in keys], slots, deadline_s)

    def settle(self, ticket: int, num_used: int) -> None:
        """See `SlotStore`."""
        self._transfers.settle(ticket, num_used)

    def flush(self, salt: str | None) -> None:
        """See `SlotStore`. Of no salt but that: other models and page sizes with it go, too."""
        self._transfers.flush(None if salt is None else self._keys.scope_of(salt))

    def cancel(self, ticket: int) -> None:
        """See `SlotStore`."""
        self._transfers.cancel(ticket)

    def write(self, key: StoreKey, slot: int) -> bool:
        """See `SlotStore`."""
        return self._transfers.write_behind(self._keys.key(key), slot)

    def poll(self) -> list[Filled | Written]:
        """See `SlotStore`."""
        events: list[Filled | Written] = []
        for event in self._transfers.poll():
            if isinstance(event, TransferFilled):
                events.append(Filled(event.ticket, tuple(outcome is Outcome.OK for outcome in event.outcomes)))
            else:
                events.append(Written(event.slot))
        return events

    @property
    def counts(self) -> StoreCounts:
        """See `SlotStore`."""
        found = self._transfers.counts
        return StoreCounts(
            {event: found[name] for event, name in _EVENTS.items()}, self._transfers.guard.counts["opened"]
        )

    def close(self) -> None:
        """Writes what waits to be written. The last replica that uses the store closes it. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._transfers.close()
        if self._shared.leave():
            self._transfers.guard.close()
