from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShardPart(_message.Message):
    __slots__ = ("rank", "module", "lengths", "length_bytes", "ids", "ids_int64", "weights")
    RANK_FIELD_NUMBER: _ClassVar[int]
    MODULE_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDS_FIELD_NUMBER: _ClassVar[int]
    IDS_INT64_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    module: int
    lengths: bytes
    length_bytes: int
    ids: bytes
    ids_int64: bytes
    weights: bytes
    def __init__(self, rank: _Optional[int] = ..., module: _Optional[int] = ..., lengths: _Optional[bytes] = ..., length_bytes: _Optional[int] = ..., ids: _Optional[bytes] = ..., ids_int64: _Optional[bytes] = ..., weights: _Optional[bytes] = ...) -> None: ...

class ShardRequest(_message.Message):
    __slots__ = ("version", "batch_size", "parts", "stored", "trace")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    version: str
    batch_size: int
    parts: _containers.RepeatedCompositeFieldContainer[ShardPart]
    stored: bool
    trace: Trace
    def __init__(self, version: _Optional[str] = ..., batch_size: _Optional[int] = ..., parts: _Optional[_Iterable[_Union[ShardPart, _Mapping]]] = ..., stored: _Optional[bool] = ..., trace: _Optional[_Union[Trace, _Mapping]] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("request_id", "traceparent", "tracestate")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    traceparent: str
    tracestate: str
    def __init__(self, request_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class ShardResponse(_message.Message):
    __slots__ = ("values", "packed", "failure", "fill")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    PACKED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FILL_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[bytes]
    packed: _containers.RepeatedScalarFieldContainer[bytes]
    failure: Failure
    fill: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, values: _Optional[_Iterable[bytes]] = ..., packed: _Optional[_Iterable[bytes]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ..., fill: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class PrepareRequest(_message.Message):
    __slots__ = ("version", "folder", "deltas", "wanted")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    version: str
    folder: str
    deltas: _containers.RepeatedScalarFieldContainer[str]
    wanted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[str] = ..., folder: _Optional[str] = ..., deltas: _Optional[_Iterable[str]] = ..., wanted: _Optional[_Iterable[str]] = ...) -> None: ...

class StateRequest(_message.Message):
    __slots__ = ("wanted",)
    WANTED_FIELD_NUMBER: _ClassVar[int]
    wanted: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, wanted: _Optional[_Iterable[str]] = ...) -> None: ...

class ShardState(_message.Message):
    __slots__ = ("ranks", "versions", "socket_port", "socket_server", "socket_bytes")
    RANKS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PORT_FIELD_NUMBER: _ClassVar[int]
    SOCKET_SERVER_FIELD_NUMBER: _ClassVar[int]
    SOCKET_BYTES_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedScalarFieldContainer[int]
    versions: _containers.RepeatedScalarFieldContainer[str]
    socket_port: int
    socket_server: bytes
    socket_bytes: int
    def __init__(self, ranks: _Optional[_Iterable[int]] = ..., versions: _Optional[_Iterable[str]] = ..., socket_port: _Optional[int] = ..., socket_server: _Optional[bytes] = ..., socket_bytes: _Optional[int] = ...) -> None: ...
