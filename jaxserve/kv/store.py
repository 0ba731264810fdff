"""`KVStore`: pages of keys and values as bytes, kept outside the device. The seam for stores of other people.

A store moves bytes and knows nothing of models: a page is `page_bytes` bytes under a key (see `names`). Calls come from
several threads at once, never from the loop that runs the model. A store may be slow, full, broken or gone; it says so
by the outcome of each key, and the engine then computes what it did not get. Where there are no outcomes, it raises
StoreUnavailable: `contains` when it cannot say, `delete` and `flush` because they promise something to a person.

    memory  pages in this process
    file    a directory, which survives the process
    remote  `jaxserve kv-server` on another machine
    object  a bucket: S3, Google Cloud, Azure, or any URL that `obstore` takes

`conformance` is the test suite that all of them pass and that yours can run in one line. To bring a store, write a
class with these methods and name it: an entry point in the group `jaxserve.kv_stores`, `package.module:Class`, the
class, or the finished object.
"""

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import Protocol, cast, runtime_checkable

from jaxserve.errors import ConfigError, JaxserveError, Status
from jaxserve.kv.page_format import PageLayout
from jaxserve.values.registry import Registry, check_takes


class Outcome(enum.Enum):
    """What became of one key of a call."""

    OK = "ok"  # the whole page is there, or was taken; not that it is durable
    MISS = "miss"  # the store has no such page
    LATE = "late"  # not within the deadline; the page may still arrive in the store
    REFUSED = "refused"  # a put that the store does not want: no room, read only, not worth it
    BAD = "bad"  # there were bytes, but not those of this page
    FAILED = "failed"  # anything else; the store logs it

    @property
    def is_fault(self) -> bool:
        """Whether the store did not do its work, so that it may be better to leave it alone for a while."""
        return self in (Outcome.LATE, Outcome.FAILED)


class StoreUnavailable(JaxserveError):
    """The store did not answer, or refused: pages that were to be deleted may remain, or nobody knows what it has."""

    status = Status.UNAVAILABLE


@runtime_checkable
class KVStore(Protocol):
    """A store of pages. All methods may be called by several threads at once."""

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each page is there, as far as the store can say without reading it.

        Raises StoreUnavailable when it cannot say. It answers within a second or so.
        """
        ...

    def get(self, keys: Sequence[bytes], into: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        """Copies each page into its buffer of `page_bytes`.

        Only under OK is a buffer's content defined, and then it is the whole page. Once the call has returned, the
        store does not touch any buffer again. `deadline_s`: seconds from now; the call returns within them, up to the
        time of copying a page.
        """
        ...

    def put(self, keys: Sequence[bytes], pages: Sequence[memoryview], deadline_s: float) -> list[Outcome]:
        """Takes a copy of each page. Once the call has returned, the store does not read any buffer again.

        A page that is already there may be replaced or kept: equal keys mean equal pages.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> None:
        """Removes pages; those that are not there are no error. Raises StoreUnavailable when one may remain.

        A put that returned before, even with LATE, does not bring a page back.
        """
        ...

    def flush(self, scope: bytes | None) -> None:
        """`delete` for all pages whose key begins with `scope` (see `names.scope_of`); None: for all pages."""
        ...

    def close(self) -> None:
        """Ends threads and connections. Later calls miss, and refuse puts. May be called twice."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoreOptions:
    """What a store may be told. A store refuses those that it has no use for, so none is without effect.

    Attributes:
      location: directory, HOST:PORT, or URL of a bucket.
      max_bytes: of all pages; beyond it the policy chooses which go.
      policy: name of a `sched.tier_policy`.
      admission: "always" or "second_sight", see `TierOptions`.
      secret: of the fleet, for names and MACs. None: a directory makes its own, elsewhere it is an error.
      compression: "none", "zstd", or "auto", which compresses while the link is slower than the codec.
      tls_ca, tls_cert, tls_key, tls_name: PEM files, and the name in the server's certificate if it is not its address.
    """

    location: str | None = None
    max_bytes: int | None = None
    policy: str | None = None
    admission: str | None = None
    secret: bytes | None = None
    compression: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_name: str | None = None

    def only(self, store: str, *names: str) -> None:
        """Raises ConfigError if an option is set that is none of `names`."""
        set_names = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None]
        useless = [name for name in set_names if name not in names]
        if useless:
            raise ConfigError(
                f"the {store} store has no use for {', '.join(useless)}; it takes {', '.join(names) or 'no options'}"
            )

    def needed(self, store: str, name: str) -> str:
        """The option `name`. Raises ConfigError when it is not set."""
        value = getattr(self, name)
        if value is None:
            raise ConfigError(f"the {store} store needs {name}")
        return value


StoreFactory = Callable[[PageLayout, StoreOptions], KVStore]
"""What a name of `store.kind` leads to: it makes the store of an engine."""

STORES: Registry[StoreFactory | KVStore] = Registry(
    "store of pages",
    "jaxserve.kv_stores",
    {
        "memory": "jaxserve.kv.memory_store:memory_store",
        "file": "jaxserve.kv.file_store:file_store",
        "remote": "jaxserve.kv.remote:remote_store",
        "object": "jaxserve.kv.object_store:object_store",
    },
)
"""The stores that are built in, and the entry points of the group `jaxserve.kv_stores`."""
_METHODS = ("contains", "get", "put", "delete", "flush", "close")


def create_store(store: str | StoreFactory | KVStore, layout: PageLayout, options: StoreOptions) -> KVStore:
    """Builds the store that a config or a notebook asks for.

    `store` is a name (see `STORES.names()`), `package.module:Name`, a class or function of (layout, options), or a
    finished store, which is returned as it is and takes no options. Raises ConfigError when nothing has this name, when
    what was found is no store, or when an option does not fit it.
    """
    found = STORES.get(store)
    if isinstance(found, type) or not isinstance(found, KVStore):
        if not callable(found):
            raise ConfigError(f"the store {store!r:.120} is a {type(found).__name__}; give a class or an object")
        check_takes(STORES.kind, found, layout, options)
        found = cast(StoreFactory, found)(layout, options)
    else:
        options.only(f"finished {type(found).__name__}")
    missing = [name for name in _METHODS if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(
            f"the store {store!r:.120} gives a {type(found).__name__} without {', '.join(missing)}; a store has the "
            f"methods {', '.join(_METHODS)}"
        )
    return cast(KVStore, found)
