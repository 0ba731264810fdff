from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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

class GetCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CacheResponse(_message.Message):
    __slots__ = ("replicas",)
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[CacheState]
    def __init__(self, replicas: _Optional[_Iterable[_Union[CacheState, _Mapping]]] = ...) -> None: ...

class CacheState(_message.Message):
    __slots__ = ("pages", "grantable", "held", "host", "store")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    GRANTABLE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    pages: int
    grantable: int
    held: int
    host: bool
    store: bool
    def __init__(self, pages: _Optional[int] = ..., grantable: _Optional[int] = ..., held: _Optional[int] = ..., host: bool = ..., store: bool = ...) -> None: ...
