"""`jaxserve kv-server` on threads of the test's process."""

import asyncio
import threading
from pathlib import Path

from jaxserve.config.schema import KVServerConfig
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.remote import remote_store
from jaxserve.kv.sealed_store import SealedStore
from jaxserve.kv.store import StoreOptions
from jaxserve.serve.kv_server import kv_server
from jaxserve.serve.shutdown import Shutdown

WAIT_S = 30.0
SECRET = b"a secret of the fleet, of 32 bytes"


class KVServer:
    """One server; `address` once it listens."""

    def __init__(self, config: KVServerConfig) -> None:
        self.address = ""
        self.error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(config,))
        self._thread.start()
        assert self._ready.wait(WAIT_S)
        if self.error is not None:
            self._thread.join(WAIT_S)
            raise self.error

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._shutdown.request)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()

    def _run(self, config: KVServerConfig) -> None:
        async def main() -> None:
            self._loop, self._shutdown = asyncio.get_running_loop(), Shutdown()
            await kv_server(config, self._shutdown, self._note_ready)

        try:
            asyncio.run(main())
        except BaseException as error:
            self.error = error
            self._ready.set()

    def _note_ready(self, address: str) -> None:
        self.address = address
        self._ready.set()


def connect(server: KVServer, layout: PageLayout, **options: str) -> SealedStore:
    return remote_store(layout, StoreOptions(location=server.address, secret=SECRET, **options))


class KVServers:
    """A server for each directory, started when it is asked for."""

    def __init__(self) -> None:
        self._servers: dict[tuple[Path, bool], KVServer] = {}

    def of(self, path: Path, *, in_memory: bool = False) -> KVServer:
        if (path, in_memory) not in self._servers:
            directory = None if in_memory else str(path)
            self._servers[path, in_memory] = KVServer(KVServerConfig(directory=directory))
        return self._servers[path, in_memory]

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()
        self._servers.clear()
