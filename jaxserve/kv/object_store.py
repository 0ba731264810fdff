"""`ObjectBlobs`: sealed pages in a bucket of S3, Google Cloud or Azure, or in what else `obstore` has a URL for.

`obstore` (extra `kv`) is the `object_store` crate of the Arrow project in Python: one wheel without dependencies, which
does not hold the interpreter's lock while it waits. s3fs would bring botocore, aiohttp and an event loop of its own,
and a client for each cloud. Credentials, regions and endpoints come from the places where each cloud's own tools look
for them, such as AWS_ACCESS_KEY_ID or the metadata service of a machine.

A bucket has no bound and no policy here: a lifecycle rule deletes what is old, which costs no request.
"""

import datetime
from collections.abc import Iterator, Sequence
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.kv.blobs import BlobsError, BlobTooLarge
from jaxserve.kv.names import BlobName, check_secret
from jaxserve.kv.page_format import PageLayout
from jaxserve.kv.sealed_store import SealedStore
from jaxserve.kv.store import StoreOptions

_RETRIES, _RETRY_S = 1, 10  # the library would try for three minutes, and a deadline is usually a fraction of a second
_IN_PROCESS = ("file:", "memory:")  # schemes without a network, whose stores take no options for one


class ObjectBlobs:
    """`Blobs` in a store of `obstore`, as objects scope/page. Used by several threads."""

    def __init__(self, bucket: Any) -> None:
        """`bucket`: an `obstore.store.ObjectStore`."""
        import obstore  # the `kv` extra

        self._obstore: Any = obstore
        self._bucket = bucket

    def exists(self, names: Sequence[BlobName], timeout_s: float) -> list[bool]:
        return [self._exists(name) for name in names]

    def read(self, name: BlobName, max_bytes: int, timeout_s: float) -> bytes | None:
        try:
            found = self._call(self._obstore.get, _path(name))
        except FileNotFoundError:
            return None
        if found.meta["size"] > max_bytes:
            raise BlobTooLarge(f"it has {found.meta['size']} bytes, of {max_bytes} at most")
        return bytes(self._caught(found.bytes))

    def write(self, name: BlobName, data: bytes, timeout_s: float) -> bool:
        self._call(self._obstore.put, _path(name), data)
        return True

    def delete(self, names: Sequence[BlobName], timeout_s: float) -> None:
        self._delete([_path(name) for name in names])

    def flush(self, scope: str | None, timeout_s: float) -> None:
        for paths in self._list(scope):
            self._delete(paths)

    def set_aside(self, name: BlobName, why: str) -> None:
        """Deleted: a bucket that keeps versions has it still."""
        self._delete([_path(name)])

    def close(self) -> None:
        """Connections end with the object."""

    def _exists(self, name: BlobName) -> bool:
        try:
            self._call(self._obstore.head, _path(name))
        except FileNotFoundError:
            return False
        return True

    def _list(self, scope: str | None) -> Iterator[list[str]]:
        listed = self._call(self._obstore.list, None if scope is None else f"{scope}/")
        while (some := self._caught(lambda: next(listed, None))) is not None:
            yield [meta["path"] for meta in some]

    def _delete(self, paths: list[str]) -> None:
        try:
            self._call(self._obstore.delete, paths)
        except FileNotFoundError:  # a store that stops at the first that is gone already
            for path in paths:
                try:
                    self._call(self._obstore.delete, path)
                except FileNotFoundError:
                    continue

    def _call(self, function: Any, *arguments: Any) -> Any:
        return self._caught(lambda: function(self._bucket, *arguments))

    def _caught(self, call: Any) -> Any:
        try:
            return call()
        except OSError:
            raise
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
        raise ConfigError("an object store needs the library obstore; install jaxserve[kv]") from error
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
