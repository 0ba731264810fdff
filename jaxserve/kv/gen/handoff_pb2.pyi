from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseName(_message.Message):
    __slots__ = ("transfer_id", "epoch")
    TRANSFER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    transfer_id: bytes
    epoch: bytes
    def __init__(self, transfer_id: _Optional[bytes] = ..., epoch: _Optional[bytes] = ...) -> None: ...

class PullRequest(_message.Message):
    __slots__ = ("lease", "first_token", "page_tokens", "max_frame_bytes")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_FRAME_BYTES_FIELD_NUMBER: _ClassVar[int]
    lease: LeaseName
    first_token: int
    page_tokens: int
    max_frame_bytes: int
    def __init__(self, lease: _Optional[_Union[LeaseName, _Mapping]] = ..., first_token: _Optional[int] = ..., page_tokens: _Optional[int] = ..., max_frame_bytes: _Optional[int] = ...) -> None: ...

class PageFrame(_message.Message):
    __slots__ = ("first_token", "end_token", "starts", "data", "mac")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MAC_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    end_token: int
    starts: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    mac: bytes
    def __init__(self, first_token: _Optional[int] = ..., end_token: _Optional[int] = ..., starts: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., mac: _Optional[bytes] = ...) -> None: ...

class Renewed(_message.Message):
    __slots__ = ("seconds",)
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    def __init__(self, seconds: _Optional[float] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
