"""`RemoteBlobs`: sealed pages on another machine, kept by `jaxserve kv-server` (`jaxserve.serve.kv_server`).

Pages are sealed before they leave: the server has no salts and no keys, and cannot change a page without being found
out. It can read pages, since sealing does not encrypt (see `page_format`), and whoever reads them can read what prompts
left in them. The connection is mutual TLS, or does not leave the machine.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grpc

from jaxserve.config.addresses import is_loopback
from jaxserve.config.secret_files import check_secret, read_mutual_tls
from jaxserve.errors import ConfigError
from jaxserve.kv.blobs import BlobsError, BlobTooLarge
from jaxserve.kv.channel import open_channel
from jaxserve.kv.gen import pages_pb2 as pb
from jaxserve.kv.gen import pages_pb2_grpc as pb_grpc
from jaxserve.kv.names import BlobName
from jaxserve.kv.page_format import PageLayout, max_sealed_bytes
from jaxserve.kv.sealed_store import SealedStore
from jaxserve.kv.store import StoreOptions

MAX_NAMES = 256  # of one message, for clients and servers
MESSAGE_OVERHEAD = 1 << 16  # bytes of a message beside those of a page; so many names fit, too
_SET_ASIDE_S = 5.0

T = TypeVar("T")


class RemoteBlobs:
    """`Blobs` behind a channel of gRPC. Used by several threads."""

    def __init__(
        self,
        address: str,
        max_blob_bytes: int,
        *,
        credentials: grpc.ChannelCredentials | None,
        tls_name: str | None = None,
    ) -> None:
        """Connects with the first call. `tls_name`: the one in the server's certificate, if not its address."""
        longest, any_length = max_blob_bytes + MESSAGE_OVERHEAD, ("grpc.max_send_message_length", -1)
        self._channel = open_channel(address, credentials, tls_name, longest, [any_length])
        self._stub: Any = pb_grpc.PagesStub(self._channel)

    def exists(self, names: Sequence[BlobName], timeout_s: float) -> list[bool]:
        found: list[bool] = []
        for start in range(0, len(names), MAX_NAMES):
            some = names[start : start + MAX_NAMES]
            request = pb.ExistsRequest(names=_names(some))
            answer = _call(lambda request=request: self._stub.Exists(request, timeout=timeout_s))
            if len(answer.found) != len(some):
                raise BlobsError(f"{len(answer.found)} answers for {len(some)} names")
            found.extend(answer.found)
        return found

    def read(self, name: BlobName, max_bytes: int, timeout_s: float) -> bytes | None:
        request = pb.ReadRequest(name=_name(name), max_bytes=max_bytes)
        answer = _call(lambda: self._stub.Read(request, timeout=timeout_s))
        if answer.unfit:
            raise BlobTooLarge(answer.unfit)
        return answer.data if answer.HasField("data") else None

    def write(self, name: BlobName, data: bytes, timeout_s: float) -> bool:
        request = pb.WriteRequest(name=_name(name), data=data)
        return _call(lambda: self._stub.Write(request, timeout=timeout_s)).taken

    def delete(self, names: Sequence[BlobName], timeout_s: float) -> None:
        for start in range(0, len(names), MAX_NAMES):
            request = pb.DeleteRequest(names=_names(names[start : start + MAX_NAMES]))
            _call(lambda request=request: self._stub.Delete(request, timeout=timeout_s))

    def flush(self, scope: str | None, timeout_s: float) -> None:
        _call(lambda: self._stub.Flush(pb.FlushRequest(scope=scope), timeout=timeout_s))

    def set_aside(self, name: BlobName, why: str) -> None:
        request = pb.SetAsideRequest(name=_name(name), why=why[:200])
        _call(lambda: self._stub.SetAside(request, timeout=_SET_ASIDE_S))

    def close(self) -> None:
        self._channel.close()


def remote_store(layout: PageLayout, options: StoreOptions) -> SealedStore:
    """The factory of the name "remote"."""
    tls = ("tls_ca", "tls_cert", "tls_key", "tls_name")
    options.only("remote", "location", "secret", "compression", *tls)
    address = options.needed("remote", "location")
    if options.secret is None:
        raise ConfigError("the remote store needs a secret, which all servers that share its pages have")
    blobs = RemoteBlobs(
        address, max_sealed_bytes(layout), credentials=_credentials(options, address), tls_name=options.tls_name
    )
    return SealedStore(
        blobs,
        layout,
        check_secret(options.secret, "the store's options"),
        place=f"pages on {address}",
        compression=options.compression or "none",
    )


def _credentials(options: StoreOptions, address: str) -> grpc.ChannelCredentials | None:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        raise ConfigError(f"the remote store's location is {address!r:.120}, but must be HOST:PORT")
    cert, key, authorities = options.tls_cert, options.tls_key, options.tls_ca
    if cert is None or key is None or authorities is None:
        given = {"tls_ca": authorities, "tls_cert": cert, "tls_key": key, "tls_name": options.tls_name}
        if any(given.values()):
            missing = [name for name, path in given.items() if path is None and name != "tls_name"]
            raise ConfigError(
                f"{', '.join(name for name, path in given.items() if path)} is set, but TLS of the remote store needs "
                f"all of tls_ca, tls_cert and tls_key; not set: {', '.join(missing)}"
            )
        if not is_loopback(host):
            raise ConfigError(
                f"the remote store {address} is on another machine; set tls_ca, tls_cert and tls_key, since whoever "
                "can connect to a store of pages can delete them"
            )
        return None
    tls = read_mutual_tls(cert, key, authorities, "the remote store's ")
    return grpc.ssl_channel_credentials(tls.authorities, tls.key, tls.certificate)


def _call(call: Callable[[], T]) -> T:
    try:
        return call()
    except grpc.RpcError as error:
        code, details = (error.code(), error.details()) if isinstance(error, grpc.Call) else (None, str(error))
        raise BlobsError(f"{'error' if code is None else code.name}: {details!s:.200}") from error
    except ValueError as error:  # the channel was closed
        raise BlobsError(str(error)) from error


def _name(name: BlobName) -> pb.Name:
    return pb.Name(scope=name.scope, page=name.page)


def _names(names: Sequence[BlobName]) -> list[pb.Name]:
    return [_name(name) for name in names]
