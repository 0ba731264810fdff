from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListQuarantinedRequest(_message.Message):
    __slots__ = ("limit",)
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    limit: int
    def __init__(self, limit: _Optional[int] = ...) -> None: ...

class ListQuarantinedResponse(_message.Message):
    __slots__ = ("entries", "total")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[QuarantinedContent]
    total: int
    def __init__(self, entries: _Optional[_Iterable[_Union[QuarantinedContent, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class QuarantinedContent(_message.Message):
    __slots__ = ("digest", "request_id", "why", "since_s", "left_s", "num_refused")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    LEFT_S_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    request_id: str
    why: str
    since_s: float
    left_s: float
    num_refused: int
    def __init__(self, digest: _Optional[str] = ..., request_id: _Optional[str] = ..., why: _Optional[str] = ..., since_s: _Optional[float] = ..., left_s: _Optional[float] = ..., num_refused: _Optional[int] = ...) -> None: ...

class RemoveQuarantinedRequest(_message.Message):
    __slots__ = ("digest",)
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    digest: str
    def __init__(self, digest: _Optional[str] = ...) -> None: ...

class RemoveQuarantinedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("cache_salts", "all")
    CACHE_SALTS_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    cache_salts: _containers.RepeatedScalarFieldContainer[str]
    all: bool
    def __init__(self, cache_salts: _Optional[_Iterable[str]] = ..., all: bool = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("pages", "slots")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    pages: int
    slots: int
    def __init__(self, pages: _Optional[int] = ..., slots: _Optional[int] = ...) -> None: ...

class ResizePoolRequest(_message.Message):
    __slots__ = ("num_pages", "preempt")
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PREEMPT_FIELD_NUMBER: _ClassVar[int]
    num_pages: int
    preempt: bool
    def __init__(self, num_pages: _Optional[int] = ..., preempt: bool = ...) -> None: ...

class SetTiersRequest(_message.Message):
    __slots__ = ("host", "store")
    HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    host: bool
    store: bool
    def __init__(self, host: bool = ..., store: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_s",)
    TIMEOUT_S_FIELD_NUMBER: _ClassVar[int]
    timeout_s: float
    def __init__(self, timeout_s: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_live",)
    NUM_LIVE_FIELD_NUMBER: _ClassVar[int]
    num_live: int
    def __init__(self, num_live: _Optional[int] = ...) -> None: ...

class GetCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[CacheState]
    def __init__(self, replicas: _Optional[_Iterable[_Union[CacheState, _Mapping]]] = ...) -> None: ...

class CacheState(_message.Message):
    __slots__ = ("pages", "grantable", "held", "host", "store", "rung")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    GRANTABLE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    RUNG_FIELD_NUMBER: _ClassVar[int]
    pages: int
    grantable: int
    held: int
    host: bool
    store: bool
    rung: str
    def __init__(self, pages: _Optional[int] = ..., grantable: _Optional[int] = ..., held: _Optional[int] = ..., host: bool = ..., store: bool = ..., rung: _Optional[str] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replace: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replace: bool = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("name", "path", "digest", "loaded_s", "in_memory")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOADED_S_FIELD_NUMBER: _ClassVar[int]
    IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: bytes
    loaded_s: float
    in_memory: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[bytes] = ..., loaded_s: _Optional[float] = ..., in_memory: bool = ...) -> None: ...
