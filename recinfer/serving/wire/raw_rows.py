"""Raw rows as an Arrow IPC stream, turned into a model's inputs by the feature contract of its archive."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, from_numpy

from recinfer.columns import FeatureArrays
from recinfer.errors import InputError, UnavailableError
from recinfer.serving.wire.limits import Limits
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["read_raw"]

_HEADER, _COMPRESSION = 2, 3  # fields of Arrow's Message and RecordBatch tables


def read_raw(
    data: bytes,
    contract: FeatureContract | None,
    limits: Limits,
    replaced: dict[str, int] | None = None,
    context: bytes = b"",
) -> tuple[Tensor, KeyedJaggedTensor, KeyedJaggedTensor | None]:
    """Dense inputs ``[B, num_dense]`` and ids of the rows in ``data``, and ids of the row in ``context``, if there is one.

    Args:
        data: an Arrow IPC stream of one record batch, uncompressed; columns of text, integers, floats, booleans, or
            lists of text or integers for features whose contract names a separator.
        contract: the model's feature contract; None when its archive has none.
        replaced: receives, by feature, the number of ids that became the default row.
        context: such a stream of one row, with columns that apply to all rows; empty: none.

    Raises:
        InputError: bytes that are no such stream, too many rows, columns that the contract refuses, or no contract.
        UnavailableError: pyarrow is not installed on the server.
    """
    if contract is None:
        raise InputError("raw: this model has no feature contract; send features and dense")
    try:
        import pyarrow
    except ImportError:
        raise UnavailableError("raw: the server has no pyarrow; pip install 'recinfer[arrow]', or send ids") from None
    columns = _read_columns(pyarrow, data, contract, limits)
    own: FeatureArrays | None = None
    if context:
        once = _read_columns(pyarrow, context, contract, limits, "raw_context")
        dense, features, own = contract.apply_with_context(columns, once, replaced)
    else:
        dense, features = contract.apply_arrays(columns, replaced)
    for given in (features, own):
        if given is not None and given.values.size > limits.max_ids:
            raise InputError(f"raw: got {given.values.size} ids in all, expected at most {limits.max_ids}")
    return from_numpy(dense), _as_kjt(features), None if own is None or not own.keys else _as_kjt(own)


def _as_kjt(features: FeatureArrays) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_parts_unchecked(
        list(features.keys), from_numpy(features.values), from_numpy(features.lengths), stride=features.batch
    )


def _read_columns(
    pyarrow: Any, data: bytes, contract: FeatureContract, limits: Limits, field: str = "raw"
) -> dict[str, Any]:
    try:
        return _columns(pyarrow, _read_batch(pyarrow, data), contract, limits)
    except InputError as error:
        raise error if field == "raw" else InputError(str(error).replace("raw:", f"{field}:", 1)) from None
    except (pyarrow.ArrowException, OSError, ValueError, struct.error) as error:
        raise InputError(f"{field}: {len(data)} bytes are not an Arrow IPC stream ({str(error)[:200]})") from None


def _read_batch(pyarrow: Any, data: bytes) -> Any:
    messages = list(pyarrow.ipc.MessageReader.open_stream(pyarrow.py_buffer(data)))
    kinds = [message.type for message in messages]
    if kinds != ["schema", "record batch"]:
        found = ", ".join(kinds[:5]) or "nothing"
        raise InputError(f"raw: got an Arrow stream of {found}; expected a schema and one record batch")
    if _is_compressed(messages[1].metadata.to_pybytes()):
        raise InputError("raw: the record batch is compressed; send it uncompressed")
    batch = pyarrow.ipc.read_record_batch(messages[1], pyarrow.ipc.read_schema(messages[0]))
    batch.validate(full=True)  # lengths and offsets come from the client
    return batch


def _columns(pyarrow: Any, batch: Any, contract: FeatureContract, limits: Limits) -> dict[str, Any]:
    """The columns that the contract reads, by name, as arrays or lists."""
    if not 1 <= batch.num_rows <= limits.max_batch:
        raise InputError(f"raw: got {batch.num_rows} rows, expected 1 to {limits.max_batch}")
    names = batch.schema.names
    if len(set(names)) != len(names):
        raise InputError(f"raw: got column {max(names, key=names.count)!r} more than once, expected each column once")
    separators = {feature.source: feature.separator for feature in contract.sparse}
    wanted = [name for name in contract.columns if name in names]
    return {name: _values(pyarrow, name, batch.column(name), separators) for name in wanted}


def _is_compressed(metadata: bytes) -> bool:
    """Whether a record batch's flatbuffer names a compression, with which a few bytes could expand to any size."""

    def field(table: int, number: int) -> int:
        vtable = table - struct.unpack_from("<i", metadata, table)[0]
        at = 4 + 2 * number
        if at + 2 > struct.unpack_from("<H", metadata, vtable)[0]:
            return 0
        offset = struct.unpack_from("<H", metadata, vtable + at)[0]
        return table + offset if offset else 0

    header = field(struct.unpack_from("<I", metadata, 0)[0], _HEADER)
    return bool(field(header + struct.unpack_from("<I", metadata, header)[0], _COMPRESSION))


def _values(pyarrow: Any, name: str, column: Any, separators: Mapping[str, str | None]) -> Any:
    types = pyarrow.types
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if types.is_list(column.type) or types.is_large_list(column.type) or types.is_fixed_size_list(column.type):
        column = _joined(pyarrow, name, column, separators.get(name))
    kind = column.type
    if types.is_string(kind) or types.is_large_string(kind):
        return column.to_numpy(zero_copy_only=False)
    if types.is_floating(kind):
        return column.to_numpy(zero_copy_only=False)
    if types.is_integer(kind) or types.is_boolean(kind):
        return column.to_numpy(zero_copy_only=False) if not column.null_count else column.to_pylist()
    if types.is_null(kind):
        return np.full(len(column), None, dtype=object)
    raise InputError(f"raw: column {name!r} holds {kind}; expected text, integers, floats, booleans or lists of them")


def _joined(pyarrow: Any, name: str, column: Any, separator: str | None) -> Any:
    """Join each list to one text with the separator at which the contract splits the text again."""
    from pyarrow import compute

    if separator is None:
        raise InputError(f"raw: column {name!r} holds lists; the feature contract has one value a row there")
    types, kind = pyarrow.types, column.type.value_type
    is_text = types.is_string(kind) or types.is_large_string(kind)
    if not (is_text or types.is_integer(kind) or types.is_null(kind)):  # null is the type of lists that are all empty
        raise InputError(f"raw: column {name!r} holds {column.type}; expected lists of text or integers")
    texts = column.cast(pyarrow.list_(pyarrow.string()))
    values = texts.flatten()
    if values.null_count:
        raise InputError(f"raw: column {name!r} holds a list with a null in it; leave it out of the list")
    if is_text and compute.any(compute.match_substring(values, separator)).as_py():
        raise InputError(f"raw: column {name!r} holds a value with {separator!r} in it, which separates values here")
    return compute.binary_join(texts, separator)
