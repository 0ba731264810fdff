from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Name(_message.Message):
    __slots__ = ("scope", "page")
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    PAGE_FIELD_NUMBER: _ClassVar[int]
    scope: str
    page: str
    def __init__(self, scope: _Optional[str] = ..., page: _Optional[str] = ...) -> None: ...

class ExistsRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedCompositeFieldContainer[Name]
    def __init__(self, names: _Optional[_Iterable[_Union[Name, _Mapping]]] = ...) -> None: ...

class ExistsResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, found: _Optional[_Iterable[bool]] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("name", "max_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: Name
    max_bytes: int
    def __init__(self, name: _Optional[_Union[Name, _Mapping]] = ..., max_bytes: _Optional[int] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("data", "unfit")
    DATA_FIELD_NUMBER: _ClassVar[int]
    UNFIT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    unfit: str
    def __init__(self, data: _Optional[bytes] = ..., unfit: _Optional[str] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: Name
    data: bytes
    def __init__(self, name: _Optional[_Union[Name, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("taken",)
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    taken: bool
    def __init__(self, taken: bool = ...) -> None: ...

class DeleteRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedCompositeFieldContainer[Name]
    def __init__(self, names: _Optional[_Iterable[_Union[Name, _Mapping]]] = ...) -> None: ...

class DeleteResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("scope",)
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    scope: str
    def __init__(self, scope: _Optional[str] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetAsideRequest(_message.Message):
    __slots__ = ("name", "why")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    name: Name
    why: str
    def __init__(self, name: _Optional[_Union[Name, _Mapping]] = ..., why: _Optional[str] = ...) -> None: ...

class SetAsideResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
