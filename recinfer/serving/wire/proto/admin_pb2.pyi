from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Change(_message.Message):
    __slots__ = ("reason", "who")
    REASON_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    reason: str
    who: str
    def __init__(self, reason: _Optional[str] = ..., who: _Optional[str] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("model", "version", "activate", "change")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ACTIVATE_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    activate: bool
    change: Change
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., activate: _Optional[bool] = ..., change: _Optional[_Union[Change, _Mapping]] = ...) -> None: ...

class UnloadRequest(_message.Message):
    __slots__ = ("model", "version", "change")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    change: Change
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., change: _Optional[_Union[Change, _Mapping]] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetDefaultRequest(_message.Message):
    __slots__ = ("model", "version", "change")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    change: Change
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., change: _Optional[_Union[Change, _Mapping]] = ...) -> None: ...

class VersionWeight(_message.Message):
    __slots__ = ("version", "weight")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    version: str
    weight: int
    def __init__(self, version: _Optional[str] = ..., weight: _Optional[int] = ...) -> None: ...

class SetWeightsRequest(_message.Message):
    __slots__ = ("model", "weights", "change")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    weights: _containers.RepeatedCompositeFieldContainer[VersionWeight]
    change: Change
    def __init__(self, model: _Optional[str] = ..., weights: _Optional[_Iterable[_Union[VersionWeight, _Mapping]]] = ..., change: _Optional[_Union[Change, _Mapping]] = ...) -> None: ...

class VersionLabel(_message.Message):
    __slots__ = ("label", "version")
    LABEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    label: str
    version: str
    def __init__(self, label: _Optional[str] = ..., version: _Optional[str] = ...) -> None: ...

class SetLabelsRequest(_message.Message):
    __slots__ = ("model", "labels", "change")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    labels: _containers.RepeatedCompositeFieldContainer[VersionLabel]
    change: Change
    def __init__(self, model: _Optional[str] = ..., labels: _Optional[_Iterable[_Union[VersionLabel, _Mapping]]] = ..., change: _Optional[_Union[Change, _Mapping]] = ...) -> None: ...

class RollbackRequest(_message.Message):
    __slots__ = ("model", "change")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    change: Change
    def __init__(self, model: _Optional[str] = ..., change: _Optional[_Union[Change, _Mapping]] = ...) -> None: ...

class ApplyDeltaRequest(_message.Message):
    __slots__ = ("model", "version", "delta", "change")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    delta: str
    change: Change
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., delta: _Optional[str] = ..., change: _Optional[_Union[Change, _Mapping]] = ...) -> None: ...

class UndoDeltaRequest(_message.Message):
    __slots__ = ("model", "version", "change")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CHANGE_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    change: Change
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., change: _Optional[_Union[Change, _Mapping]] = ...) -> None: ...

class VersionStatus(_message.Message):
    __slots__ = ("version", "weight", "plan_hash", "bytes", "deltas", "labels", "age_seconds", "engine")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    DELTAS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    AGE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    version: str
    weight: int
    plan_hash: str
    bytes: int
    deltas: int
    labels: _containers.RepeatedScalarFieldContainer[str]
    age_seconds: float
    engine: str
    def __init__(self, version: _Optional[str] = ..., weight: _Optional[int] = ..., plan_hash: _Optional[str] = ..., bytes: _Optional[int] = ..., deltas: _Optional[int] = ..., labels: _Optional[_Iterable[str]] = ..., age_seconds: _Optional[float] = ..., engine: _Optional[str] = ...) -> None: ...

class ModelStatus(_message.Message):
    __slots__ = ("model", "versions")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    model: str
    versions: _containers.RepeatedCompositeFieldContainer[VersionStatus]
    def __init__(self, model: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[VersionStatus, _Mapping]]] = ...) -> None: ...

class ShardReplica(_message.Message):
    __slots__ = ("rank", "address", "up", "why", "versions", "outstanding", "default_rows")
    RANK_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    OUTSTANDING_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_ROWS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    address: str
    up: bool
    why: str
    versions: _containers.RepeatedScalarFieldContainer[str]
    outstanding: int
    default_rows: int
    def __init__(self, rank: _Optional[int] = ..., address: _Optional[str] = ..., up: _Optional[bool] = ..., why: _Optional[str] = ..., versions: _Optional[_Iterable[str]] = ..., outstanding: _Optional[int] = ..., default_rows: _Optional[int] = ...) -> None: ...

class ModelList(_message.Message):
    __slots__ = ("models", "shards")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ModelStatus]
    shards: _containers.RepeatedCompositeFieldContainer[ShardReplica]
    def __init__(self, models: _Optional[_Iterable[_Union[ModelStatus, _Mapping]]] = ..., shards: _Optional[_Iterable[_Union[ShardReplica, _Mapping]]] = ...) -> None: ...
