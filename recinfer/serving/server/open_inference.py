"""Converts the Open Inference Protocol (KServe v2) to recinfer's messages: tensors to a request, and an answer to tensors.

A request is rewritten (one copy, no loop over ids) as a PredictRequest or LookupRequest, and checked and answered as such, so
every protocol gives the same numbers and the same errors.

Inputs, B samples:
    ``F.values`` INT64 [ids] and ``F.lengths`` INT32 [B]     feature F with any number of ids per sample
    ``F.weights`` FP32 [ids]                                 one weight per id, of a weighted feature; without them each is 1
    ``F`` INT64 [B] or [B, n]                                feature F with one or n ids per sample
    ``dense`` FP32 [B, num_dense]; its other name where a feature has this one (:func:`recinfer.columns.dense_name`)
    ``T`` of T's datatype and shape                          tensor T, another input of the model
    ``J.values``, ``J.lengths`` INT32 [B], ``J.weights``     jagged input J, as a feature, with values of J's datatype [N, ...]
    ``J`` [B, n, ...]                                        jagged input J with n values per sample
    ``context.X``                                            any of these, of one sample that applies to all B samples
Ids may also be INT32 and lengths INT64; those of a feature that takes strings BYTES. Outputs: the model's outputs by name, FP32; or embeddings, ``F.embedding`` FP32
[B, dim], for an unpooled feature [ids, dim] with ``F.embedding.lengths`` INT32 [B]. A request that names embeddings as
outputs, or has the parameter ``method`` = ``"lookup"``, is a lookup of the features among its inputs; any other request is a
prediction if the model has a dense part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from recinfer.columns import Strings, as_float32, dense_name
from recinfer.errors import InputError
from recinfer.input_arrays import InputArrays
from recinfer.serving.engine.request import CallName
from recinfer.serving.wire import codec
from recinfer.serving.wire.arrays import Buffer, array_bytes, bytes_field, decode_lookup, decode_predict, encode_input
from recinfer.serving.wire.json_codec import text_of
from recinfer.serving.wire.limits import Limits
from recinfer.serving.wire.proto import inference_pb2 as pb

if TYPE_CHECKING:
    from recinfer.inference.named_inputs import NamedInputs
    from recinfer.inference.predictor import Predictor
    from recinfer.inference.specs import InputSpec
    from recinfer.serving.engine.registry import ServedModel

__all__ = [
    "BYTES",
    "CONTEXT",
    "DATATYPES",
    "EMBEDDING",
    "LENGTHS",
    "InferAnswer",
    "InferRequest",
    "InputTensor",
    "OutputTensor",
    "check_parameters",
    "dtype_of",
    "read_answer",
    "string_tensor",
    "to_call",
]

DATATYPES = {
    "int64": "INT64",
    "int32": "INT32",
    "float32": "FP32",
    "bool": "BOOL",
    "int8": "INT8",
    "uint8": "UINT8",
    "int16": "INT16",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float64": "FP64",
}
"""The protocol's name of each dtype of an input."""
BYTES = "BYTES"
"""The datatype of strings, by convention in UTF-8."""
_NAMES = {datatype: name for name, datatype in DATATYPES.items()}
_DTYPES = {datatype: codec.DTYPES[name] for datatype, name in _NAMES.items()}
_INTEGERS = ("INT64", "INT32")
_MAX_RANK = 8
CONTEXT = "context."
"""Prefix of the names of a context's inputs."""
EMBEDDING, LENGTHS = ".embedding", ".embedding.lengths"
"""Suffixes of a feature's name in the names of its outputs."""
_INT32_MAX = 2**31 - 1
_SHARED, _SEQUENCE = "send the tensor itself", "recinfer keeps no state between requests"
_REFUSED = {
    "classification": "recinfer gives every output whole",
    "shared_memory_region": _SHARED,
    "shared_memory_offset": _SHARED,
    "shared_memory_byte_size": _SHARED,
    "sequence_id": _SEQUENCE,
    "sequence_start": _SEQUENCE,
    "sequence_end": _SEQUENCE,
}
"""Parameters of Triton that would change the answer, each with the reason why recinfer refuses it."""
_TYPES: dict[str, type] = {"method": str, "binary_data_size": int, "binary_data": bool, "binary_data_output": bool}
_TYPE_NAMES = {str: "a string", int: "a whole number", bool: "true or false"}


@dataclass(frozen=True)
class InputTensor:
    """One input: ``data`` is 1-D, row-major, of the dtype that ``datatype`` names, as many elements as ``shape`` says.

    ``strings``: the elements of a tensor of BYTES, whose ``data`` holds a 0 for each.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: np.ndarray
    strings: Strings | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements in memory."""
        return self.data.nbytes + (0 if self.strings is None else len(self.strings.data))


@dataclass(frozen=True)
class OutputTensor:
    """One output: ``data`` holds the elements little-endian and row-major."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer


@dataclass(frozen=True)
class InferAnswer:
    """The result of a ModelInfer. ``missing``: ranks that did not answer, so that their rows are zero."""

    version: str
    outputs: list[OutputTensor]
    missing: tuple[int, ...] = ()

    @property
    def parameters(self) -> dict[str, str]:
        """The parameters of the answer in either form: ``missing_ranks``, such as ``"0,2"``, if ranks are missing."""
        return {"missing_ranks": ",".join(map(str, self.missing))} if self.missing else {}


@dataclass(frozen=True)
class InferRequest:
    """A ModelInfer of either form; empty ``outputs``: all outputs; empty ``method``: the outputs decide."""

    model: str
    version: str
    id: str
    inputs: Sequence[InputTensor]
    outputs: Sequence[str] = ()
    method: str = ""


def string_tensor(name: str, shape: tuple[int, ...], strings: Strings) -> InputTensor:
    """An input of BYTES."""
    return InputTensor(name, BYTES, shape, np.zeros(strings.size, np.int64), strings)


def dtype_of(name: str, datatype: str) -> np.dtype:
    """The numpy dtype of input ``name``; raises InputError for a datatype that no input of recinfer has."""
    dtype = _DTYPES.get(datatype)
    if dtype is None:
        raise InputError(
            f"input {name!r}: got datatype {datatype[:40]!r}, expected one of {', '.join((*_DTYPES, BYTES))}"
        )
    return dtype


def check_parameters(place: str, given: Mapping[str, Any]) -> None:
    """Check the parameters of a request (``place`` empty), or of the input or output that ``place`` names, of either form.

    Unknown parameters have no effect: the protocol leaves them to each server. Zero, false and empty values count as absent.

    Raises:
        InputError: a parameter of Triton that would change the answer, or a parameter of a wrong type.
    """
    at = f"{place}: parameter" if place else "parameter"
    for name, value in given.items():
        if name in _REFUSED and value:
            raise InputError(f"{at} {name}: got {text_of(value)}, expected none: {_REFUSED[name]}")
        expected = _TYPES.get(name)
        if expected is not None and type(value) is not expected:
            raise InputError(f"{at} {name}: got {text_of(value)}, expected {_TYPE_NAMES[expected]}")


def _check_size(name: str, shape: Sequence[int], elements: int, is_named: bool) -> None:
    """Raise InputError unless ``shape`` has ``elements`` elements, and one or two sizes if it is no named input's."""
    # With one size 0 another may be anything, and recinfer's messages count samples in 31 bits.
    fits = len(shape) <= _MAX_RANK if is_named else 1 <= len(shape) <= 2
    if not fits or any(not 0 <= size <= _INT32_MAX for size in shape):
        how_many = f"at most {_MAX_RANK}" if is_named else "one or two"
        raise InputError(f"input {name!r}: got shape {list(shape)[:9]}, expected {how_many} sizes from 0 to 2^31 - 1")
    if math.prod(shape) != elements:
        raise InputError(f"input {name!r}: got {elements} elements, expected those of shape {list(shape)}")


# -- the request ---------------------------------------------------------------------------------------------------


def to_call(request: InferRequest, model: ServedModel, limits: Limits) -> tuple[CallName, bytes]:
    """The name of recinfer's call that answers ``request``, and its serialized message, which names the version ``model``.

    Raises:
        InputError: tensors that do not fit each other or the convention above; the message names the input.
    """
    call = _call_of(request, model.predictor)
    if len(request.inputs) > 3 * limits.max_keys + 1:
        raise InputError(f"inputs: got {len(request.inputs)} tensors, expected at most {3 * limits.max_keys + 1}")
    by_name = {tensor.name: tensor for tensor in request.inputs}
    if len(by_name) != len(request.inputs):
        raise InputError("inputs: got a name more than once, expected each input once")
    named, feature_names = model.predictor.inputs, model.predictor.intake.names
    of_context = _take_context(by_name, feature_names)
    own = {name for info in named.infos for name in (info.name, f"{info.name}.values")}
    for tensor in request.inputs:
        is_named = tensor.name in own or tensor.name.removeprefix(CONTEXT) in own
        _check_size(tensor.name, tensor.shape, tensor.data.size, is_named)
    inputs = [part for info in named.infos for part in _take_named(info, by_name)]
    once = _encode_context(of_context, named, feature_names, limits)
    dense = _dense(by_name, dense_name(feature_names), named.dense_name)
    features = _features(by_name, feature_names)
    if dense is not None and features and dense.shape[0] != features[0].batch:
        raise InputError(
            f"input {dense.name!r}: got {dense.shape[0]} samples, expected {features[0].batch} as the features"
        )
    if features:
        batch = features[0].batch
    elif once or not feature_names:
        batch = dense.shape[0] if dense is not None else _batch_of(request.inputs, named.infos)
        if once and not batch:
            raise InputError("inputs: got a context without samples, expected an input of the samples as well")
    else:
        batch = 0
    parts = _encode(features, batch, limits)
    # Both requests begin with the same two fields.
    head = pb.GetModelRequest(model=request.model, version=model.version)
    if call == "Lookup":
        return call, b"".join([head.SerializeToString(), *parts])
    tail = [] if dense is None else bytes_field(4, array_bytes(dense.data))
    return call, b"".join([head.SerializeToString(), *parts, *tail, *inputs, *once])


def _take_context(by_name: dict[str, InputTensor], feature_names: Sequence[str]) -> dict[str, InputTensor]:
    """Take the context's tensors out of ``by_name``, without the prefix; none if a feature's name has that prefix."""
    if any(name.startswith(CONTEXT) for name in feature_names):
        return {}
    names = [name for name in by_name if name.startswith(CONTEXT)]
    return {name.removeprefix(CONTEXT): by_name.pop(name) for name in names}


def _encode_context(
    by_name: dict[str, InputTensor], named: NamedInputs, feature_names: Sequence[str], limits: Limits
) -> list[Buffer]:
    """Parts of the fields ``context`` and ``context_inputs`` of a PredictRequest."""
    if not by_name:
        return []
    parts = [part for info in named.infos for part in _take_named(info, by_name, 8)]
    dense = _dense(by_name, dense_name(feature_names), named.dense_name)
    if dense is not None:
        parts += encode_input(named.dense_name or dense.name, InputArrays(dense.data), None, dense.shape, 8)
    features = _features(by_name, feature_names)
    return [*parts, *(_encode(features, features[0].batch, limits, 5) if features else [])]


def _take_named(info: InputSpec, by_name: dict[str, InputTensor], number: int = 7) -> list[Buffer]:
    """Take the tensors of a named input out of ``by_name``; returns its part of a PredictRequest, empty without them."""
    is_jagged = info.kind == "jagged" and f"{info.name}.values" in by_name
    found = by_name.pop(f"{info.name}.values" if is_jagged else info.name, None)
    if found is None:
        return []
    if found.strings is not None:
        raise InputError(f"input {found.name!r}: got BYTES, expected {DATATYPES[info.dtype]}")
    lengths = weights = None
    if is_jagged:
        lengths = _counts(info.name, "values", by_name)
    if info.weighted and f"{info.name}.weights" in by_name:
        weights = as_float32(by_name.pop(f"{info.name}.weights").data)
    given = InputArrays(found.data, lengths, weights)
    return encode_input(info.name, given, _NAMES[found.datatype], found.shape, number)


def _batch_of(tensors: Sequence[InputTensor], infos: Sequence[InputSpec]) -> int:
    """The number of samples of a request without features: that of the first named input that has samples."""
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    for info in infos:
        shape = shapes.get(f"{info.name}.lengths", shapes.get(info.name, ()))
        if shape and (info.kind == "jagged" or info.shape[0] == "batch"):
            return shape[0]
    return 0


def _dense(by_name: dict[str, InputTensor], name: str, own: str) -> InputTensor | None:
    """Take the dense numbers out of ``by_name``: the FP32 tensor ``name``, or that with its own name in forward, or an FP32
    tensor ``dense`` next to a feature of this name, whose ids are integers; None without such a tensor."""
    at = next((one for one in (name, own, "dense") if one in by_name and by_name[one].datatype == "FP32"), None)
    if at is None:
        odd = next((by_name[one] for one in (own, name) if own and one in by_name), None)
        if odd is not None:
            raise InputError(f"input {odd.name!r}: got {odd.datatype}, expected FP32")
        return None
    found = by_name.pop(at)
    if len(found.shape) != 2:
        raise InputError(f"input {at!r}: got shape {list(found.shape)}, expected [batch, num_dense]")
    return found


def _call_of(request: InferRequest, predictor: Predictor) -> CallName:
    if request.method not in ("", "predict", "lookup"):
        raise InputError(f"parameter method: got {request.method[:40]!r}, expected 'predict' or 'lookup'")
    known = _output_names(predictor)
    wanted = {known[name] for name in request.outputs if name in known}
    unknown = [name for name in request.outputs if name not in known]
    if unknown:
        listed = ", ".join(list(known)[:20])
        raise InputError(f"outputs: got {unknown[0][:80]!r}, expected some of {listed}")
    if len(wanted) > 1:
        raise InputError("outputs: got model outputs and embeddings together, expected one kind; send two requests")
    if request.method:
        call: CallName = "Lookup" if request.method == "lookup" else "Predict"
        if wanted and wanted != {call}:
            raise InputError(f"outputs: got outputs that method {request.method!r} does not give")
        return call
    if wanted:
        return wanted.pop()
    return "Lookup" if predictor.engine is None else "Predict"


def _output_names(predictor: Predictor) -> dict[str, CallName]:
    """The call that computes each output that a request may name."""
    names: dict[str, CallName] = {}
    if predictor.manifest.dense is not None:
        names.update((output.name, "Predict") for output in predictor.manifest.dense.outputs)
    for feature in predictor.features:
        names[feature.name + EMBEDDING] = "Lookup"
        if not feature.pooled:
            names[feature.name + LENGTHS] = "Lookup"
    return names


@dataclass(frozen=True)
class _Feature:
    name: str
    batch: int
    values: InputTensor
    lengths: np.ndarray | int  # int32 [B], or the number of ids of every sample
    weights: InputTensor | None


def _features(by_name: dict[str, InputTensor], known: Sequence[str]) -> list[_Feature]:
    """Take all tensors out of ``by_name``, as features; the caller refuses those that are not ``known``."""
    found = []
    while by_name:
        name = next(iter(by_name))
        stem, _, part = name.rpartition(".")
        if stem and part in ("values", "lengths", "weights") and f"{stem}.values" in by_name:
            found.append(_jagged(stem, by_name))
        elif (stem and part in ("values", "lengths")) or (part == "weights" and stem and stem not in by_name):
            raise InputError(f"input {name!r}: got it alone, expected {stem + '.values'!r} and {stem + '.lengths'!r}")
        elif stem and part == "weights":
            found.append(_rectangular(stem, by_name))
        elif name not in known and by_name[name].strings is None and by_name[name].datatype not in _INTEGERS:
            raise InputError(
                f"input {name!r}: got {by_name[name].datatype}, which no input of this model is; the model's metadata lists its inputs"
            )
        else:
            found.append(_rectangular(name, by_name))
    for feature in found:
        if feature.batch != found[0].batch:
            raise InputError(
                f"feature {feature.name!r}: got {feature.batch} samples, expected {found[0].batch} as {found[0].name!r}"
            )
    return found


def _jagged(name: str, by_name: dict[str, InputTensor]) -> _Feature:
    values = _one_dimensional(_ids(by_name.pop(f"{name}.values")))
    counts = _counts(name, "ids", by_name)
    total = int(counts.sum(dtype=np.int64))
    if total != values.data.size:
        if counts.size and int(counts.min()) < 0:
            at = int(np.argmin(counts))
            raise InputError(f"input '{name}.lengths': sample {at} has {counts[at]}, expected 0 or more ids per sample")
        raise InputError(f"input '{name}.values': got {values.data.size} ids, expected {total}, the sum of the lengths")
    return _Feature(name, counts.size, values, counts, _weights(name, values, by_name))


def _counts(name: str, what: str, by_name: dict[str, InputTensor]) -> np.ndarray:
    """Take the lengths int32 [B] of ``name`` out of ``by_name``."""
    lengths = by_name.pop(f"{name}.lengths", None)
    if lengths is None:
        raise InputError(f"input '{name}.lengths': got none, expected INT32 [batch] together with '{name}.values'")
    counts = _one_dimensional(_integers(lengths)).data
    if lengths.datatype == "INT64":
        if counts.size and not 0 <= int(counts.min()) <= int(counts.max()) <= _INT32_MAX:
            raise InputError(f"input {lengths.name!r}: got a length out of range, expected 0 or more {what} per sample")
        counts = counts.astype(np.int32)
    return counts


def _rectangular(name: str, by_name: dict[str, InputTensor]) -> _Feature:
    values = _ids(by_name.pop(name))
    each = values.shape[1] if len(values.shape) == 2 else 1
    return _Feature(name, values.shape[0], values, each, _weights(name, values, by_name))


def _weights(name: str, values: InputTensor, by_name: dict[str, InputTensor]) -> InputTensor | None:
    weights = by_name.pop(f"{name}.weights", None)
    if weights is None:
        return None
    if weights.datatype != "FP32" or weights.data.size != values.data.size:
        raise InputError(
            f"input {weights.name!r}: got {weights.datatype} {list(weights.shape)}, "
            f"expected FP32 {list(values.shape)}, one weight an id"
        )
    return weights


def _ids(tensor: InputTensor) -> InputTensor:
    return tensor if tensor.strings is not None else _integers(tensor)


def _integers(tensor: InputTensor) -> InputTensor:
    if tensor.datatype not in _INTEGERS:
        raise InputError(f"input {tensor.name!r}: got {tensor.datatype}, expected INT64 or INT32")
    return tensor


def _one_dimensional(tensor: InputTensor) -> InputTensor:
    if len(tensor.shape) != 1:
        raise InputError(f"input {tensor.name!r}: got shape {list(tensor.shape)}, expected one size")
    return tensor


def _encode(features: Sequence[_Feature], batch: int, limits: Limits, number: int = 3) -> list[Buffer]:
    """Parts of the field ``number`` of recinfer's request: 3 ``features``, 5 ``context``."""
    if batch > limits.max_batch or len(features) > limits.max_keys:
        # The codec refuses the request here, before lengths are written for that many samples.
        codec.decode_bags(pb.JaggedFeatures(keys=[f.name for f in features], batch_size=batch), limits)
    lengths = [array_bytes(_lengths(feature)) for feature in features]
    texts = [(feature.name, feature.values.strings) for feature in features if feature.values.strings is not None]
    numbers = [feature.values for feature in features if feature.values.strings is None]
    narrow = all(tensor.datatype == "INT32" for tensor in numbers)
    dtype = _DTYPES["INT32" if narrow else "INT64"]
    values = [array_bytes(tensor.data.astype(dtype, copy=False)) for tensor in numbers]
    weighted = [feature for feature in features if feature.weights is not None]
    small = pb.JaggedFeatures(
        keys=[feature.name for feature in features],
        batch_size=batch,
        weighted_keys=[feature.name for feature in weighted],
        string_keys=[name for name, _ in texts],
    ).SerializeToString()
    parts: list[Buffer] = [small, *bytes_field(3, *lengths), *bytes_field(6 if narrow else 4, *values)]
    if weighted:
        parts += bytes_field(
            5, *(array_bytes(feature.weights.data) for feature in weighted if feature.weights is not None)
        )
    if texts:
        parts += bytes_field(9, *(strings.data for _, strings in texts))
        parts += bytes_field(10, *(array_bytes(strings.lengths) for _, strings in texts))
    return bytes_field(number, *parts)


def _lengths(feature: _Feature) -> np.ndarray:
    if isinstance(feature.lengths, int):
        return np.full(feature.batch, feature.lengths, np.int32)
    return feature.lengths


# -- the answer ----------------------------------------------------------------------------------------------------


def read_answer(call: CallName, data: bytes, wanted: Sequence[str] = ()) -> InferAnswer:
    """Convert recinfer's serialized answer to ``call``; ``wanted``: the names of the outputs in order, empty for all.

    Raises:
        InputError: the feature of a wanted output is not among the inputs.
    """
    if call == "Predict":
        arrays, version, missing = decode_predict(data)
        outputs = [_output(name, "FP32", array) for name, array in arrays.items()]
    else:
        found = decode_lookup(data)
        version, missing = found.version, found.missing
        outputs = [_output(key + EMBEDDING, "FP32", block) for key, block in found.pooled().items()]
        for key, (lengths, vectors) in found.sequences.items():
            outputs += [_output(key + EMBEDDING, "FP32", vectors), _output(key + LENGTHS, "INT32", lengths)]
    if not wanted:
        return InferAnswer(version, outputs, missing)
    by_name = {output.name: output for output in outputs}
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise InputError(f"outputs: got {unknown[0]!r}, whose feature is not among the inputs")
    return InferAnswer(version, [by_name[name] for name in wanted], missing)


def _output(name: str, datatype: str, array: np.ndarray) -> OutputTensor:
    return OutputTensor(name, datatype, array.shape, array_bytes(array))
