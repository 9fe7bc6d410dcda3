"""Converts features and dense numbers from lists, numpy, pandas, pyarrow or polars to the arrays of a request."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import countOf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.arrow import pyarrow_array, pyarrow_for, pyarrow_table, speaks_arrow
from recinfer.errors import InputError

__all__ = [
    "DENSE",
    "WEIGHTS_SUFFIX",
    "FeatureArrays",
    "Strings",
    "as_features",
    "as_float32",
    "as_matrix",
    "dense_name",
    "free_name",
    "of_context",
    "strings_of",
]

DENSE = "dense"
"""Name of a sample's dense numbers where they stand among its features by name; see :func:`dense_name`."""

WEIGHTS_SUFFIX = ".weights"
"""Suffix of a column with weights: in a DataFrame or Table, ``tags.weights`` has the weights of the ids in ``tags``."""


_BOOLS = frozenset((bool, np.bool_))
_TEXTS = frozenset((str, bytes, bytearray, np.str_, np.bytes_))
_TEXT = "UST"  # numpy's kinds of arrays of strings


@dataclass(frozen=True, slots=True)
class Strings:
    """Strings as bytes, by convention of UTF-8.

    Attributes:
        keys: the features whose ids are strings, in the request's order; empty for strings of no feature.
        data: the bytes of all strings, one after another.
        lengths: int32 ``[N]``, number of bytes of each.
    """

    keys: tuple[str, ...]
    data: bytes
    lengths: NDArray[np.int32]

    @property
    def size(self) -> int:
        """Number of strings."""
        return int(self.lengths.size)

    def picked(self, pieces: Sequence[tuple[int, int]]) -> Strings:
        """The strings of each range (first, stop), one after another."""
        ends = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64))).tolist()
        data = b"".join(self.data[ends[first] : ends[stop]] for first, stop in pieces)
        lengths = [self.lengths[first:stop] for first, stop in pieces]
        return Strings(self.keys, data, np.concatenate(lengths) if lengths else self.lengths[:0])


def strings_of(where: str, values: Sequence[Any], keys: tuple[str, ...] = ()) -> Strings:
    """Strings from str, as UTF-8, and from bytes, as they are; raises InputError, which begins with ``where``, for others."""
    try:
        if set(map(type, values)) == {str}:
            joined = "".join(values)
            data = joined.encode()
            if len(data) == len(joined):  # a byte per character
                return Strings(keys, data, np.fromiter(map(len, values), np.int32, len(values)))
        encoded = [value.encode() if isinstance(value, str) else bytes(memoryview(value)) for value in values]
    except UnicodeEncodeError:
        raise InputError(f"{where}: got text with a lone surrogate, expected valid Unicode") from None
    except TypeError:
        raise InputError(f"{where}: got strings and other values together, expected one kind") from None
    return Strings(keys, b"".join(encoded), np.fromiter(map(len, encoded), np.int32, len(encoded)))


@dataclass(frozen=True, slots=True)
class FeatureArrays:
    """Ids of F features for B samples.

    Attributes:
        keys: names of the features.
        batch: B.
        lengths: int32 ``[F * B]``, key-major: how many ids each sample has.
        values: ids ``[N]``, int64 or int32, of the features that are not in ``strings``.
        weights: float32, one an id, of the features in ``weighted``, or of all where that is empty; None: each is 1.
        weighted: the features that ``weights`` are of, in the order of ``keys``.
        strings: the ids of features whose ids are strings; None without such a feature.
    """

    keys: tuple[str, ...]
    batch: int
    lengths: NDArray[np.int32]
    values: NDArray[Any]
    weights: NDArray[np.float32] | None = None
    weighted: tuple[str, ...] = ()
    strings: Strings | None = None

    @property
    def num_ids(self) -> int:
        """Number of ids, strings included."""
        return int(self.values.size) + (0 if self.strings is None else self.strings.size)

    def rows(self, start: int, stop: int) -> FeatureArrays:
        """The samples ``start`` to ``stop``, or to the end."""
        if self.strings is not None:
            return self._rows_with_strings(self.strings, start, min(stop, self.batch))
        count = len(self.keys)
        stop, ends = min(stop, self.batch), np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        edges = [(int(ends[f * self.batch + start]), int(ends[f * self.batch + stop])) for f in range(count)]
        lengths = self.lengths.reshape(count, self.batch)[:, start:stop].reshape(-1)
        values = np.concatenate([self.values[a:b] for a, b in edges])
        if self.weights is None:
            return FeatureArrays(self.keys, stop - start, lengths, values)
        parts, at = [], 0
        for f, key in enumerate(self.keys):
            if self.weighted and key not in self.weighted:
                continue
            first, last = int(ends[f * self.batch]), int(ends[(f + 1) * self.batch])
            parts.append(self.weights[at + edges[f][0] - first : at + edges[f][1] - first])
            at += last - first
        return FeatureArrays(self.keys, stop - start, lengths, values, np.concatenate(parts), self.weighted)

    def _rows_with_strings(self, strings: Strings, start: int, stop: int) -> FeatureArrays:
        """:meth:`rows`, with features whose ids are strings."""
        lengths_FB = self.lengths.reshape(len(self.keys), self.batch)
        per_feature: dict[str, list[tuple[int, int]]] = {"values": [], "strings": [], "weights": []}
        at = dict.fromkeys(per_feature, 0)
        for key, lengths in zip(self.keys, lengths_FB):
            before, inside, total = int(lengths[:start].sum()), int(lengths[start:stop].sum()), int(lengths.sum())
            kinds = ["strings" if key in strings.keys else "values"]
            if self.weights is not None and (not self.weighted or key in self.weighted):
                kinds.append("weights")
            for kind in kinds:
                per_feature[kind].append((at[kind] + before, at[kind] + before + inside))
                at[kind] += total
        values = [self.values[first:last] for first, last in per_feature["values"]]
        weights = [] if self.weights is None else [self.weights[first:last] for first, last in per_feature["weights"]]
        return FeatureArrays(
            self.keys,
            stop - start,
            lengths_FB[:, start:stop].reshape(-1),
            np.concatenate(values) if values else self.values[:0],
            np.concatenate(weights) if weights else None,
            self.weighted,
            strings.picked(per_feature["strings"]),
        )


def as_features(data: Any) -> FeatureArrays:
    """The features of ``data``, which is

    - a mapping of feature name to column, or to a pair (a tuple) of a column and the weights of its ids, in the same form,
    - a pandas DataFrame, a pyarrow Table, or a table of another library that lends it through Arrow's PyCapsule interface
      (polars), whose columns are the features; the column ``tags.weights`` holds the weights of the ids in ``tags``,
    - a KeyedJaggedTensor,
    - FeatureArrays, given back as they are.

    A column has one entry a sample: an id, a list of ids, or None (in pandas NA and NaN, what numpy masks) for no ids. It is a list, a
    tensor or numpy array ``[B]`` or ``[B, n]``, a pandas Series, or an Arrow array (of pyarrow, polars) of integers or of lists
    of them. Where pandas has made floats of ids because some are missing, they are ids again. An id without a weight weighs 1.
    The ids of a column may be strings instead of integers (str, or bytes in UTF-8), for a feature that takes strings.

    Raises:
        InputError: a column that holds something else or is there twice, columns of different length, or weights of
            another form than their ids.
        UnavailableError: a column or table of another library, and pyarrow is not installed.

    >>> as_features({"user": [3, 4], "clicks": [[1, 2], []]}).lengths.tolist()
    [1, 1, 2, 0]
    """
    if isinstance(data, FeatureArrays):
        return data
    if hasattr(data, "variable_stride_per_key"):
        return _of_keyed_jagged_tensor(data)
    columns = _columns(data)
    if not columns:
        raise InputError("features: got none, expected at least one feature with its ids")
    return _of_lists(columns) or _of_columns(columns)


@contextmanager
def of_context() -> Iterator[None]:
    """The errors of a context's features name the context, since features beside it may be right."""
    try:
        yield
    except InputError as error:
        raise InputError(
            f"context: {error} (a context is one sample: a list with one entry for each feature)"
        ) from None


def dense_name(taken: Iterable[str]) -> str:
    """The name of the dense numbers next to inputs named ``taken``: ``dense``, with ``_`` added while an input has it.

    >>> dense_name(["user"]), dense_name(["user", "dense"])
    ('dense', 'dense_')
    """
    return free_name(DENSE, taken)


def free_name(name: str, taken: Iterable[str]) -> str:
    """``name``, with ``_`` added while it is among ``taken``."""
    others = set(taken)
    while name in others:
        name += "_"
    return name


def as_float32(values: NDArray[Any]) -> NDArray[np.float32]:
    """``values`` as float32; numbers beyond its range become infinite, which the predictor refuses."""
    with np.errstate(over="ignore"):
        return values.astype(np.float32, copy=False)


def as_matrix(data: Any) -> NDArray[np.float32]:
    """``data``, a tensor, array, list of rows, DataFrame or Table of numbers, as float32 ``[B, num_dense]``.

    Raises:
        InputError: it is no matrix of numbers. A bool in a list is none; arrays, tensors and columns of type bool are flags,
            1.0 and 0.0.
    """
    if isinstance(data, Mapping):
        raise InputError(
            f"dense: got a {type(data).__name__}, expected rows of numbers; features are the argument after it"
        )
    data = without_torch(data)
    if speaks_arrow(data) and not hasattr(data, "__array__"):
        data = pyarrow_table("dense", data)
    if hasattr(data, "column_names"):  # a pyarrow Table or RecordBatch
        columns = [column.to_numpy(zero_copy_only=False) for column in data.columns]
        data = np.stack(columns, axis=1) if columns else []
    try:
        found = np.asarray(data)
        if found.dtype.kind not in "biufO" or isinstance(data, np.ma.MaskedArray):
            raise TypeError  # numpy would make numbers of text, drop imaginary parts, and show what is masked
        found = as_float32(found)
    except (TypeError, ValueError):
        raise InputError(
            "dense: got rows that are not numbers or differ in length; expected rows of numbers of one length"
        ) from None
    except OverflowError:
        raise InputError("dense: got a number beyond float64; expected rows of numbers that float32 holds") from None
    if isinstance(data, list | tuple):
        _refuse_bools(data)
    if found.ndim != 2:
        raise InputError(f"dense: got shape {list(found.shape)}, expected [batch, num_dense]")
    return np.ascontiguousarray(found)


def _refuse_bools(rows: list[Any] | tuple[Any, ...]) -> None:
    """Raise InputError for a bool in a list of ``rows``; numpy made 1.0 and 0.0 of them."""
    if not _BOOLS & set(map(type, chain.from_iterable(row for row in rows if isinstance(row, list | tuple)))):
        return
    for at, row in enumerate(rows):
        for column, value in enumerate(row if isinstance(row, list | tuple) else ()):
            if type(value) in _BOOLS:
                raise InputError(f"dense[{at}][{column}]: got {str(bool(value)).lower()}, expected a number")


# -- plain lists, which most callers have --------------------------------------------------------------------------


def _of_lists(columns: Mapping[str, Any]) -> FeatureArrays | None:
    """Columns that are all lists of int, or of lists of int; None for any others.

    All ids become an array at once: one numpy operation a feature would cost more than all of this.
    """
    ids: list[int] = []
    sizes: list[int] = []  # how many ids each sample has, of the columns in ``ragged``; of the others 1
    ragged: list[int] = []
    batch = -1
    for number, column in enumerate(columns.values()):
        if type(column) is not list or not column:
            return None
        if batch < 0:
            batch = len(column)
        elif len(column) != batch:
            return None
        if type(column[0]) is int:
            ids += column
            continue
        if countOf(map(type, column), list) != batch:
            return None
        try:
            ids += [only for [only] in column]  # a third of the time of what follows
        except ValueError:
            ids += chain.from_iterable(column)
            sizes += map(len, column)
            ragged.append(number)
    try:
        values = np.frombuffer(struct.pack(f"<{len(ids)}q", *ids), np.int64)
    except struct.error:
        return None
    if any(type(ids[at]) is bool for at in (values.view(np.uint64) < 2).nonzero()[0]):
        return None  # struct takes a bool for an id
    lengths = np.ones((len(columns), batch), np.int32)
    if ragged:
        lengths[ragged] = np.frombuffer(struct.pack(f"<{len(sizes)}i", *sizes), np.int32).reshape(-1, batch)
    return FeatureArrays(tuple(columns), batch, lengths.reshape(-1), values)


# -- everything else -----------------------------------------------------------------------------------------------


def _of_columns(columns: Mapping[str, Any]) -> FeatureArrays:
    values, lengths, weights, weighted = [], [], [], []
    texts: dict[str, Strings] = {}
    batch, first = -1, ""
    for name, column in columns.items():
        pair = column if type(column) is tuple and len(column) == 2 else (column, None)
        ids, own = _jagged(name, pair[0])
        if batch < 0:
            batch, first = own.size, name
        if own.size != batch:
            raise InputError(f"features[{name!r}]: got {own.size} samples, expected {batch} as in {first!r}")
        if isinstance(ids, Strings):
            texts[name] = ids
        else:
            values.append(ids)
        lengths.append(own)
        if pair[1] is not None:
            weights.append(_weights(name, pair[1], own))
            weighted.append(name)
    joined = np.concatenate(weights) if weights else None
    ids = np.concatenate(values) if values else np.zeros(0, np.int64)
    strings = None
    if texts:
        data, sizes = b"".join(text.data for text in texts.values()), [text.lengths for text in texts.values()]
        strings = Strings(tuple(texts), data, np.concatenate(sizes))
    return FeatureArrays(tuple(columns), batch, np.concatenate(lengths), ids, joined, tuple(weighted), strings)


def _of_keyed_jagged_tensor(features: Any) -> FeatureArrays:
    if features.variable_stride_per_key():
        raise InputError("features: got different batch sizes per key, expected one batch size for all")
    values, weights = without_torch(features.values()), features.weights_or_none()
    if values.dtype not in (np.int32, np.int64):
        raise InputError(f"features.values: got {features.values().dtype}, expected torch.int64 or torch.int32")
    lengths = without_torch(features.lengths()).astype(np.int32, copy=False)
    given = None if weights is None else without_torch(weights)
    if given is not None and given.dtype.kind not in "iuf":
        raise InputError(f"features.weights: got {given.dtype} values, expected numbers")
    given = None if given is None else np.ascontiguousarray(given, np.float32)
    return FeatureArrays(tuple(features.keys()), features.stride(), lengths, values, given)


def without_torch(data: Any) -> Any:
    """A tensor as an array, sharing memory if possible; anything else unchanged. Does not import torch."""
    if not hasattr(data, "detach"):
        return data
    tensor = data.detach().cpu()
    return (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()


def _columns(data: Any) -> Mapping[str, Any]:
    if isinstance(data, Mapping):
        return data
    if speaks_arrow(data):
        data = pyarrow_table("features", data)
        pairs = list(zip(data.column_names, data.columns))
    elif hasattr(data, "columns") and hasattr(data, "items"):
        pairs = list(data.items())
    else:
        raise InputError(
            f"features: got a {type(data).__name__}, expected a KeyedJaggedTensor, a mapping of columns, a DataFrame or Table"
        )
    columns = dict(pairs)
    if len(columns) < len(pairs):
        names = [name for name, _ in pairs]
        raise InputError(
            f"features: got column {max(names, key=names.count)!r} more than once, expected each feature once"
        )
    for name in [name for name in columns if f"{name}{WEIGHTS_SUFFIX}" in columns]:
        columns[name] = (columns[name], columns.pop(f"{name}{WEIGHTS_SUFFIX}"))
    return columns


def _jagged(name: str, column: Any) -> tuple[NDArray[Any] | Strings, NDArray[np.int32]]:
    """Ids, int64 or strings ``[N]``, and lengths int32 ``[B]``."""
    if type(column) is list and (found := _of_plain_list(name, column)) is not None:
        return found
    values, lengths = _flat(name, column)
    if values.ndim == 1 and (values.dtype.kind in _TEXT or (values.dtype == object and _is_text(values))):
        return strings_of(f"features[{name!r}]", values.tolist()), lengths
    return _ids(name, values), lengths


def _of_plain_list(name: str, column: list[Any]) -> tuple[NDArray[Any] | Strings, NDArray[np.int32]] | None:
    """Ids and lengths of a list of str, of lists of str, of int or of lists of int; None for any others."""
    kinds = set(map(type, column))
    flat = column if kinds == {str} else list(chain.from_iterable(column)) if kinds == {list} else []
    if flat and set(map(type, flat)) == {str}:
        lengths = np.fromiter(map(len, column), np.int32, len(column)) if flat is not column else None
        strings = strings_of(f"features[{name!r}]", flat)
        return strings, np.ones(len(column), np.int32) if lengths is None else lengths
    found = _of_lists({name: column})
    return None if found is None else (found.values, found.lengths)


def _is_text(values: NDArray[Any]) -> bool:
    return values.size > 0 and set(map(type, values)) <= _TEXTS


def _weights(name: str, column: Any, lengths: NDArray[np.int32]) -> NDArray[np.float32]:
    """One float32 per id."""
    values, own = _flat(name, column, "weights")
    if values.size and values.dtype.kind not in "iuf":
        kind = "strings" if _is_text(values) else f"{values.dtype} values"
        raise InputError(f"weights[{name!r}]: got {kind}, expected numbers")
    if values.ndim != 1 or own.size != lengths.size or (own != lengths).any():
        raise InputError(
            f"weights[{name!r}]: got a different structure than the ids, expected one weight per id of each sample"
        )
    return as_float32(values)


def _flat(name: str, column: Any, field: str = "features") -> tuple[NDArray[Any], NDArray[np.int32]]:
    """All values ``[N]`` of a column and the number of values per sample ``[B]``."""
    if speaks_arrow(column):
        return _arrow(name, column, field)
    column = without_torch(column)
    if hasattr(column, "to_numpy"):
        column = _pandas(name, column, field)
    if isinstance(column, np.ma.MaskedArray):
        column = [np.ma.compressed(row) for row in column.reshape(len(column), -1)]
    if isinstance(column, np.ndarray) and column.dtype != object:
        if column.ndim not in (1, 2):
            raise InputError(f"{field}[{name!r}]: got shape {list(column.shape)}, expected [batch] or [batch, n]")
        each = 1 if column.ndim == 1 else column.shape[1]
        return column.reshape(-1), np.full(column.shape[0], each, np.int32)
    if isinstance(column, str | bytes) or not isinstance(column, Sequence | np.ndarray):
        raise InputError(f"{field}[{name!r}]: got a {type(column).__name__}, expected one entry per sample")
    bags = [bag_of(entry) for entry in column]
    lengths = np.fromiter(map(len, bags), np.int32, len(bags))
    flat = list(chain.from_iterable(bags))
    return (_array(flat) if flat else np.zeros(0, np.int64)), lengths


def _array(values: list[Any]) -> NDArray[Any]:
    kinds = set(map(type, values))
    if _BOOLS & kinds:
        return np.array([True])  # numpy would make 1 of True beside numbers
    if _TEXTS & kinds:
        array = np.empty(
            len(values), object
        )  # numpy's own strings end before their last NUL, and are all as wide as the longest
        array[:] = values
        return array
    try:
        return np.array(values)
    except ValueError:
        return np.array([None])


def bag_of(entry: Any) -> Any:
    """The values of one sample of a list: a sequence as it is, one value as a sequence of it, None as an empty one."""
    if entry is None:
        return ()
    entry = without_torch(entry)
    return entry if isinstance(entry, list | tuple) or bool(getattr(entry, "ndim", 0)) else (entry,)


def _pandas(name: str, column: Any, field: str) -> NDArray[Any]:
    """The values of a Series. A missing entry (NA, NaN, None) becomes None, which means no ids."""
    missing = np.asarray(column.isna()) if hasattr(column, "isna") else np.zeros(0, bool)
    if not missing.any():
        return np.asarray(column.to_numpy())
    found = column.to_numpy(dtype=object).copy()
    dtype = getattr(column.dtype, "numpy_dtype", column.dtype)  # numpy_dtype is for pandas' own Float64
    if getattr(dtype, "kind", "") == "f" and field == "features":
        found[~missing] = _whole(name, found[~missing].astype(dtype))
    found[missing] = None
    return found


def _whole(name: str, floats: NDArray[Any]) -> NDArray[Any]:
    """``floats`` as integers if all are whole; unchanged otherwise, which fails in a later check."""
    if not np.array_equal(floats, np.floor(floats)) or not np.isfinite(floats).all():
        return floats
    exact = 2 ** (np.finfo(floats.dtype).nmant + 1)  # from it on several integers became the same float
    if np.abs(floats).max(initial=0) >= exact:
        raise InputError(
            f"features[{name!r}]: got {floats.dtype} with ids of {exact} or more, which floats do not represent "
            f"exactly; give the column pandas' dtype 'Int64'"
        )
    return floats.astype(np.int64)


def _arrow(name: str, column: Any, field: str) -> tuple[NDArray[Any], NDArray[np.int32]]:
    where = f"{field}[{name!r}]"
    pa = pyarrow_for(f"{where}: a {type(column).__name__} needs")
    found = pyarrow_array(where, column)
    types, compute = pa.types, pa.compute
    if not any(is_one(found.type) for is_one in (types.is_list, types.is_large_list, types.is_fixed_size_list)):
        lengths = compute.is_valid(found).cast(pa.int32()).to_numpy(zero_copy_only=False)
        return found.drop_null().to_numpy(zero_copy_only=False), lengths
    lengths = compute.fill_null(compute.list_value_length(found), 0).cast(pa.int32()).to_numpy(zero_copy_only=False)
    values = found.flatten()
    if values.null_count:
        raise InputError(f"{where}: got null among ids, expected integers")
    return values.to_numpy(zero_copy_only=False), lengths


def _ids(name: str, values: NDArray[Any]) -> NDArray[np.int64]:
    if not values.size:
        return np.zeros(0, np.int64)
    if values.dtype == object and any(type(value) in _TEXTS for value in values.flat):
        raise InputError(
            f"features[{name!r}]: got strings and other values together, expected integer ids, or strings alone"
        )
    if values.dtype == object and all(isinstance(value, int) for value in values.flat):
        raise InputError(f"features[{name!r}]: got an integer of more than 64 bits, expected ids of 64 bits")
    if values.dtype == np.uint64 and values.max() >= 1 << 63:
        raise InputError(f"features[{name!r}]: got {values.max()}, expected ids of 64 bits with a sign, up to 2^63 - 1")
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise InputError(f"features[{name!r}]: got {values.dtype} values, expected integer ids or lists of them")
    return values.astype(np.int64, copy=False)
