"""`LoadedAdapters`: the LoRA adapters of an engine by their names, and their weights in the memory of the host.

A request that names an adapter gets its weights from here, and keeps them to its end: so an adapter can be unloaded,
or loaded anew with other weights, while requests run with it. Memory is limited: weights that no request has give way,
those that were wanted longest ago first, and are read again from their directory when a request names them. The
device's slots are the scheduler's (`sched.adapter_slots`).
"""

import collections
import difflib
import logging
import os
import re
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from jaxserve.errors import AdapterError, AdapterMemoryFull, ChangeUnderWay, InvalidRequest, UnknownModel
from jaxserve.values.content import Adapter

logger = logging.getLogger(__name__)

MAX_NAMES = 10_000  # which are listed by /v1/models and searched for the nearest one
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


class AdapterInfo(NamedTuple):
    """`digest`: of the weights. `path`: the directory that they came from. `loaded_s`: the time, in seconds of Unix."""

    name: str
    digest: bytes
    path: str
    loaded_s: float


class AdapterMemory(NamedTuple):
    """What has become of adapters so far, and where they are.

    Attributes:
      names: that requests may give.
      kept: of these, adapters whose weights are in memory.
      events: how often, by "loaded", "unloaded", "evicted" (weights that gave way), "reloaded" (read again since a
        request needed them) and "failed" (to be loaded or read again).
    """

    names: int
    kept: int
    events: dict[str, int]


class LoadedAdapters:
    """Used by any thread.

    `max_held` adapters are in memory at most, those included that only requests have any more: `limit_bytes` divided by
    the bytes of one, which are the same for all.
    """

    def __init__(self, read: Callable[[Path, str], Adapter], *, num_bytes: int, limit_bytes: int) -> None:
        """`read`: makes an adapter of `num_bytes` from a directory and a name; raises AdapterError."""
        self.max_held = limit_bytes // num_bytes
        self._read = read
        self._num_bytes = num_bytes
        self._limit_bytes = limit_bytes
        self._known: dict[str, AdapterInfo] = {}
        self._kept: collections.OrderedDict[str, Adapter] = collections.OrderedDict()  # wanted longest ago first
        self._held: list[weakref.ref[Adapter]] = []  # all that somebody has, and some that nobody has any more
        self._num_reading = 0  # adapters that have room, and are being read
        self._loading: set[str] = set()
        self._reloads: dict[AdapterInfo, Future[Adapter]] = {}
        self._events: dict[str, int] = dict.fromkeys(("loaded", "unloaded", "evicted", "reloaded", "failed"), 0)
        self._lock = threading.Lock()

    @property
    def all(self) -> list[AdapterInfo]:
        """In the order in which they were loaded."""
        with self._lock:
            return list(self._known.values())

    @property
    def kept(self) -> frozenset[str]:
        """Names of the adapters whose weights are in memory."""
        with self._lock:
            return frozenset(self._kept)

    @property
    def memory(self) -> AdapterMemory:
        """The counts now."""
        with self._lock:
            return AdapterMemory(len(self._known), len(self._kept), dict(self._events))

    def check(self, name: str, model: str) -> AdapterInfo:
        """The adapter of that name, beside the model called `model`. Raises UnknownModel with the nearest name."""
        with self._lock:
            info = self._known.get(name) if isinstance(name, str) else None
            names = [model, *self._known]
        if info is not None:
            return info
        near = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
        hint = f"did you mean {near[0]!r}?" if near else f"there is {model!r}, and {len(names) - 1} adapters"
        raise UnknownModel(f"the model {name!r:.200} is not served here; {hint}")

    def find(self, name: str, model: str) -> Adapter:
        """The same with its weights, which stay in memory for as long as the caller has them.

        Takes the time of a read where they have given way to others. Raises UnknownModel, AdapterMemoryFull, and
        AdapterError when the directory has no such weights any more.
        """
        info = self.check(name, model)
        with self._lock:
            if self._known.get(name) is info and (adapter := self._kept.get(name)) is not None:
                self._kept.move_to_end(name)
                return adapter
            reload = self._reloads.get(info)
            mine = reload is None
            if reload is None:
                reload = self._reloads[info] = Future()
        if mine:
            try:
                reload.set_result(self._read_again(info))
            except BaseException as error:  # for the others that wait for it
                reload.set_exception(error)
            finally:
                with self._lock:
                    del self._reloads[info]
        try:
            return reload.result()
        finally:
            del reload  # an error in it has this frame in its traceback

    def load(self, name: str, path: str | os.PathLike[str], model: str, *, replace: bool = False) -> AdapterInfo:
        """Reads an adapter; requests may name it from now on.

        `model`: the name of the model, which no adapter may have. `replace`: another adapter of the name gives way, for
        requests from now on. Raises InvalidRequest for a name or a path that may not be, ChangeUnderWay while one of
        this name is being loaded, AdapterError for files that do not fit, AdapterMemoryFull; nothing has changed then,
        but that weights which no request had may have given way.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise InvalidRequest(
                f"the name of an adapter has 1 to 64 letters, digits, dots, hyphens or underscores, got {name!r:.200}"
            )
        if name == model:
            raise InvalidRequest(f"{name!r} is the name of the model itself; choose another one")
        self._begin(name, replace)
        begin_s = time.perf_counter()
        try:
            directory = Path(path).resolve()
            if not directory.is_dir():
                raise AdapterError(f"{os.fspath(path)!r:.200} is no directory")
            adapter = self._read_with_room(directory, name)
            with self._lock:
                info = self._known[name] = AdapterInfo(name, adapter.digest, str(directory), time.time())
                self._keep(name, adapter)
                self._events["loaded"] += 1
        finally:
            with self._lock:
                self._loading.remove(name)
        logger.info("adapter %r from %s, in %.2f s", name, directory, time.perf_counter() - begin_s)
        return info

    def unload(self, name: str, model: str) -> None:
        """No request may name it any more; those that run end with it. Raises UnknownModel, or ChangeUnderWay while one
        of this name is being loaded."""
        with self._lock:
            self._refuse_loading(name)
            found = self._known.pop(name, None) if isinstance(name, str) else None
            if found is not None:
                self._kept.pop(name, None)
                self._events["unloaded"] += 1
        if found is None:
            self.check(name, model)
        logger.info("adapter %r is unloaded", name)

    def _begin(self, name: str, replace: bool) -> None:
        with self._lock:
            self._refuse_loading(name)
            if name in self._known and not replace:
                raise InvalidRequest(
                    f"there is an adapter {name!r} already; unload it first, or have it replaced (over HTTP: "
                    "load_inplace)"
                )
            if len((self._known.keys() | self._loading) - {name}) >= MAX_NAMES:
                raise InvalidRequest(f"there are {MAX_NAMES} adapters, and no more are taken; unload one")
            self._loading.add(name)

    def _refuse_loading(self, name: str) -> None:
        if name in self._loading:
            raise ChangeUnderWay(f"an adapter {name!r} is being loaded; call again when that has ended")

    def _read_again(self, info: AdapterInfo) -> Adapter:
        """The weights of an adapter that gave way. They are kept, unless the name has become another's meanwhile."""
        begin_s = time.perf_counter()
        adapter = self._read_with_room(Path(info.path), info.name)
        with self._lock:
            if adapter.digest != info.digest:
                del adapter  # which the traceback would keep in memory
                self._events["failed"] += 1
                raise AdapterError(
                    f"the adapter {info.name!r} gave way to others, and {info.path} has other weights now than those "
                    "that were loaded; load it anew"
                )
            if self._known.get(info.name) is info:
                self._keep(info.name, adapter)
            self._events["reloaded"] += 1
        logger.info("adapter %r is read again, in %.2f s", info.name, time.perf_counter() - begin_s)
        return adapter

    def _read_with_room(self, directory: Path, name: str) -> Adapter:
        with self._lock:
            self._make_room(name)
            self._num_reading += 1
        adapter = None
        try:
            adapter = self._read(directory, name)
            return adapter
        finally:
            with self._lock:
                self._num_reading -= 1
                if adapter is None:
                    self._events["failed"] += 1
                else:
                    self._held.append(weakref.ref(adapter))

    def _keep(self, name: str, adapter: Adapter) -> None:
        self._kept[name] = adapter
        self._kept.move_to_end(name)

    def _make_room(self, wanted: str) -> None:
        """Lets weights go until one more adapter fits. Those that a request has are in memory anyway."""
        for name in list(self._kept):
            if self._num_held() < self.max_held:
                return
            held = weakref.ref(self._kept[name])
            del self._kept[name]
            if (in_use := held()) is None:
                self._events["evicted"] += 1
                logger.info("adapter %r gives way to %r in the memory of the host", name, wanted)
            else:
                self._keep(name, in_use)  # and it was wanted just now
                del in_use
        if self._num_held() >= self.max_held:
            raise AdapterMemoryFull(
                f"the adapter {wanted!r} does not fit: adapters.host_bytes, {self._limit_bytes}, has room for "
                f"{self.max_held} of {self._num_bytes} bytes, and requests have them all; try again when some have "
                "ended, or raise it"
            )

    def _num_held(self) -> int:
        self._held = [held for held in self._held if held() is not None]
        return len(self._held) + self._num_reading
