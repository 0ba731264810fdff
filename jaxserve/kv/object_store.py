"""`ObjectBlobs`: sealed pages in a bucket of S3, Google Cloud or Azure, or in what else `obstore` has a URL for.

`obstore` (extra `kv`) is the `object_store` crate of the Arrow project in Python: one wheel without dependencies, which
does not hold the interpreter's lock while it waits. s3fs would bring botocore, aiohttp and an event loop of its own,
and a client for each cloud. Credentials, regions and endpoints come from the places where each cloud's own tools look
for them, such as AWS_ACCESS_KEY_ID or the metadata service of a machine.

Each request has a time limit of its own, set here: a limit among the options of the library's client would replace all
those that it takes from the environment.

A bucket has no bound and no policy here: a lifecycle rule deletes what is old, which costs no request.
"""

import asyncio
import contextlib
import datetime
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from jaxserve.config.secret_files import check_secret
from jaxserve.errors import ConfigError, how_to_install
from jaxserve.kv.blobs import BlobsError, BlobTooLarge
from jaxserve.kv.names import BlobName
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.sealed_store import SealedStore
from jaxserve.kv.store import StoreOptions

_RETRIES, _RETRY_S = 1, 10  # the library would try for three minutes, and a deadline is usually a fraction of a second
_HEADS = 32  # requests at once that ask whether a page is there
_SET_ASIDE_S = 5.0
_IN_PROCESS = ("file:", "memory:")  # schemes without a network, whose stores take no options for one

T = TypeVar("T")


class ObjectBlobs:
    """`Blobs` in a store of `obstore`, as objects scope/page. Used by several threads."""

    def __init__(self, bucket: Any) -> None:
        """`bucket`: an `obstore.store.ObjectStore`."""
        import obstore  # the `kv` extra

        self._obstore: Any = obstore
        self._bucket = bucket

    def exists(self, names: Sequence[BlobName], timeout_s: float) -> list[bool]:
        async def exist() -> list[bool]:
            free = asyncio.Semaphore(_HEADS)

            async def ask(name: BlobName) -> bool:
                async with free:
                    try:
                        await self._obstore.head_async(self._bucket, _path(name))
                    except FileNotFoundError:
                        return False
                    return True

            async with asyncio.timeout(timeout_s):
                return await asyncio.gather(*map(ask, names))

        return self._run(exist())

    def read(self, name: BlobName, max_bytes: int, timeout_s: float) -> bytes | None:
        async def read() -> bytes | None:
            async with asyncio.timeout(timeout_s):
                try:
                    found = await self._obstore.get_async(self._bucket, _path(name))
                except FileNotFoundError:
                    return None
                if found.meta["size"] > max_bytes:
                    raise BlobTooLarge(f"it has {found.meta['size']} bytes, of {max_bytes} at most")
                return bytes(await found.bytes_async())

        return self._run(read())

    def write(self, name: BlobName, data: bytes, timeout_s: float) -> bool:
        async def write() -> bool:
            async with asyncio.timeout(timeout_s):
                await self._obstore.put_async(self._bucket, _path(name), data)
            return True

        return self._run(write())

    def delete(self, names: Sequence[BlobName], timeout_s: float) -> None:
        self._run(self._delete([_path(name) for name in names], timeout_s))

    def flush(self, scope: str | None, timeout_s: float) -> None:
        """The time is that of each request: a bucket may have any number of pages."""

        async def flush() -> None:
            listed = self._obstore.list(self._bucket, None if scope is None else f"{scope}/").__aiter__()
            while True:
                async with asyncio.timeout(timeout_s):
                    some = await anext(listed, None)
                if some is None:
                    return
                await self._delete([meta["path"] for meta in some], timeout_s)

        self._run(flush())

    def set_aside(self, name: BlobName, why: str) -> None:
        """Deleted: a bucket that keeps versions has it still."""
        self.delete([name], _SET_ASIDE_S)

    def close(self) -> None:
        """Connections end with the object."""

    async def _delete(self, paths: list[str], timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._obstore.delete_async(self._bucket, paths)
        except FileNotFoundError:  # a store that stops at the first that is gone already
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    async with asyncio.timeout(timeout_s):
                        await self._obstore.delete_async(self._bucket, path)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return asyncio.run(work)
        except TimeoutError as error:
            raise BlobsError("the bucket did not answer in time") from error
        except self._obstore.exceptions.BaseError as error:
            raise BlobsError(f"{type(error).__name__}: {str(error).splitlines()[0]:.200}") from error


def object_store(layout: PageLayout, options: StoreOptions) -> SealedStore:
    """The factory of the name "object"."""
    options.only("object", "location", "secret", "compression")
    url = options.needed("object", "location")
    if options.secret is None:
        raise ConfigError("the object store needs a secret, which all servers that share its pages have")
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise ConfigError(f"an object store needs the library obstore: {how_to_install('kv')}") from error
    retries: Any = {"max_retries": _RETRIES, "retry_timeout": datetime.timedelta(seconds=_RETRY_S)}
    try:
        bucket = from_url(url) if url.startswith(_IN_PROCESS) else from_url(url, retry_config=retries)
    except Exception as error:  # the library has errors of many kinds for a URL or a setting that it cannot use
        raise ConfigError(f"the object store cannot use {url!r:.200}: {str(error).splitlines()[0]:.200}") from error
    return SealedStore(
        ObjectBlobs(bucket),
        layout,
        check_secret(options.secret, "the store's options"),
        place=f"pages in {url.partition('?')[0]}",
        compression=options.compression or "none",
    )


def _path(name: BlobName) -> str:
    return f"{name.scope}/{name.page}"
