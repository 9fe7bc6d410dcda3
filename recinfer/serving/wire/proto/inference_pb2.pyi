from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JaggedFeatures(_message.Message):
    __slots__ = ("keys", "batch_size", "lengths", "values", "weights", "values_int32", "weighted_keys", "string_keys", "strings", "string_lengths")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    VALUES_INT32_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_KEYS_FIELD_NUMBER: _ClassVar[int]
    STRING_KEYS_FIELD_NUMBER: _ClassVar[int]
    STRINGS_FIELD_NUMBER: _ClassVar[int]
    STRING_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    batch_size: int
    lengths: bytes
    values: bytes
    weights: bytes
    values_int32: bytes
    weighted_keys: _containers.RepeatedScalarFieldContainer[str]
    string_keys: _containers.RepeatedScalarFieldContainer[str]
    strings: bytes
    string_lengths: bytes
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., batch_size: _Optional[int] = ..., lengths: _Optional[bytes] = ..., values: _Optional[bytes] = ..., weights: _Optional[bytes] = ..., values_int32: _Optional[bytes] = ..., weighted_keys: _Optional[_Iterable[str]] = ..., string_keys: _Optional[_Iterable[str]] = ..., strings: _Optional[bytes] = ..., string_lengths: _Optional[bytes] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("model", "version", "features", "label")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    features: JaggedFeatures
    label: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., features: _Optional[_Union[JaggedFeatures, _Mapping]] = ..., label: _Optional[str] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("keys", "dims", "batch_size", "values", "model_version", "sequences", "missing_ranks")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    DIMS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MISSING_RANKS_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[str]
    dims: _containers.RepeatedScalarFieldContainer[int]
    batch_size: int
    values: bytes
    model_version: str
    sequences: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, keys: _Optional[_Iterable[str]] = ..., dims: _Optional[_Iterable[int]] = ..., batch_size: _Optional[int] = ..., values: _Optional[bytes] = ..., model_version: _Optional[str] = ..., sequences: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ..., missing_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("key", "dim", "lengths", "values")
    KEY_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    key: str
    dim: int
    lengths: bytes
    values: bytes
    def __init__(self, key: _Optional[str] = ..., dim: _Optional[int] = ..., lengths: _Optional[bytes] = ..., values: _Optional[bytes] = ...) -> None: ...

class PredictRequest(_message.Message):
    __slots__ = ("model", "version", "features", "dense", "context", "raw", "inputs", "context_inputs", "raw_context", "label")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DENSE_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_INPUTS_FIELD_NUMBER: _ClassVar[int]
    RAW_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    features: JaggedFeatures
    dense: bytes
    context: JaggedFeatures
    raw: bytes
    inputs: _containers.RepeatedCompositeFieldContainer[NamedInput]
    context_inputs: _containers.RepeatedCompositeFieldContainer[NamedInput]
    raw_context: bytes
    label: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., features: _Optional[_Union[JaggedFeatures, _Mapping]] = ..., dense: _Optional[bytes] = ..., context: _Optional[_Union[JaggedFeatures, _Mapping]] = ..., raw: _Optional[bytes] = ..., inputs: _Optional[_Iterable[_Union[NamedInput, _Mapping]]] = ..., context_inputs: _Optional[_Iterable[_Union[NamedInput, _Mapping]]] = ..., raw_context: _Optional[bytes] = ..., label: _Optional[str] = ...) -> None: ...

class NamedInput(_message.Message):
    __slots__ = ("name", "dtype", "shape", "values", "lengths", "weights")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    LENGTHS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    lengths: bytes
    weights: bytes
    def __init__(self, name: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ..., lengths: _Optional[bytes] = ..., weights: _Optional[bytes] = ...) -> None: ...

class NamedTensor(_message.Message):
    __slots__ = ("name", "shape", "values")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    values: bytes
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., values: _Optional[bytes] = ...) -> None: ...

class PredictResponse(_message.Message):
    __slots__ = ("outputs", "model_version", "missing_ranks")
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MISSING_RANKS_FIELD_NUMBER: _ClassVar[int]
    outputs: _containers.RepeatedCompositeFieldContainer[NamedTensor]
    model_version: str
    missing_ranks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, outputs: _Optional[_Iterable[_Union[NamedTensor, _Mapping]]] = ..., model_version: _Optional[str] = ..., missing_ranks: _Optional[_Iterable[int]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model", "version", "label")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    version: str
    label: str
    def __init__(self, model: _Optional[str] = ..., version: _Optional[str] = ..., label: _Optional[str] = ...) -> None: ...

class FeatureInfo(_message.Message):
    __slots__ = ("name", "table", "rows", "dim", "pooled", "missing", "weighted", "computed")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TABLE_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DIM_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_FIELD_NUMBER: _ClassVar[int]
    name: str
    table: str
    rows: int
    dim: int
    pooled: bool
    missing: str
    weighted: bool
    computed: bool
    def __init__(self, name: _Optional[str] = ..., table: _Optional[str] = ..., rows: _Optional[int] = ..., dim: _Optional[int] = ..., pooled: _Optional[bool] = ..., missing: _Optional[str] = ..., weighted: _Optional[bool] = ..., computed: _Optional[bool] = ...) -> None: ...

class InputInfo(_message.Message):
    __slots__ = ("name", "path", "kind", "dtype", "shape", "weighted", "per_sample", "as_long_as", "user", "counts")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    WEIGHTED_FIELD_NUMBER: _ClassVar[int]
    PER_SAMPLE_FIELD_NUMBER: _ClassVar[int]
    AS_LONG_AS_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    kind: str
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[str]
    weighted: bool
    per_sample: int
    as_long_as: str
    user: bool
    counts: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., kind: _Optional[str] = ..., dtype: _Optional[str] = ..., shape: _Optional[_Iterable[str]] = ..., weighted: _Optional[bool] = ..., per_sample: _Optional[int] = ..., as_long_as: _Optional[str] = ..., user: _Optional[bool] = ..., counts: _Optional[str] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("name", "version", "features", "num_dense", "precision", "plan_hash", "feature_contract", "needs_weights", "inputs", "string_features")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    NUM_DENSE_FIELD_NUMBER: _ClassVar[int]
    PRECISION_FIELD_NUMBER: _ClassVar[int]
    PLAN_HASH_FIELD_NUMBER: _ClassVar[int]
    FEATURE_CONTRACT_FIELD_NUMBER: _ClassVar[int]
    NEEDS_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    INPUTS_FIELD_NUMBER: _ClassVar[int]
    STRING_FEATURES_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    features: _containers.RepeatedCompositeFieldContainer[FeatureInfo]
    num_dense: int
    precision: str
    plan_hash: str
    feature_contract: str
    needs_weights: bool
    inputs: _containers.RepeatedCompositeFieldContainer[InputInfo]
    string_features: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., features: _Optional[_Iterable[_Union[FeatureInfo, _Mapping]]] = ..., num_dense: _Optional[int] = ..., precision: _Optional[str] = ..., plan_hash: _Optional[str] = ..., feature_contract: _Optional[str] = ..., needs_weights: _Optional[bool] = ..., inputs: _Optional[_Iterable[_Union[InputInfo, _Mapping]]] = ..., string_features: _Optional[_Iterable[str]] = ...) -> None: ...
