"""The feature contract: plain data that defines how raw columns become a model's inputs, in training and serving.

It is stored in ``model.json`` and in an archive's manifest, so that every user of the model can convert raw rows:

    contract = FeatureContract(
        sparse=(SparseFeature("C1", Hash(1000)), SparseFeature("genres", Vocabulary(("Comedy", "Drama")), separator=" ")),
        dense=(DenseFeature("I1", clip_min=0.0, log=True),),
        label=Label("label"),
    )
    dense, kjt = contract.apply({"C1": ["68fd1e64", ""], "genres": ["Drama Comedy", None], "I1": [3, None]})

Shapes: ``B`` rows, ``F`` sparse features, ``N`` ids.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from recinfer.columns import FeatureArrays
from recinfer.data.columns import Columns, column, num_rows, require, to_numbers, to_text
from recinfer.data.tokens import Tokens, split_tokens
from recinfer.data.transforms import (
    TRANSFORMS,
    Hash,
    Identity,
    Transform,
    Vocabulary,
    check_text,
    check_whole,
    is_finite,
)
from recinfer.errors import ConfigError, InputError

if TYPE_CHECKING:
    from torch import Tensor

    from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "CONTRACT_FORMAT",
    "DenseFeature",
    "FeatureContract",
    "Hash",
    "Identity",
    "Label",
    "SparseFeature",
    "Transform",
    "Vocabulary",
]

CONTRACT_FORMAT = "recinfer.contract/1"
_T = TypeVar("_T")


@dataclass(frozen=True)
class SparseFeature:
    """One bag of ids for each row.

    Attributes:
        name: the feature's name in the KeyedJaggedTensor.
        transform: text to id.
        column: the raw column; "" is ``name``.
        separator: text between the values of one row; None is one value a row.
        missing: a row with no value gets an empty bag ("empty"), the id given, or fails the call ("reject"). Rows without
            the column always fail.
        out_of_range: an id outside the table fails the call ("reject"), or reads ``default_row`` ("default_row").
        default_row: that row.
    """

    name: str
    transform: Transform
    column: str = ""
    separator: str | None = None
    missing: Literal["empty", "reject"] | int = "empty"
    out_of_range: Literal["reject", "default_row"] = "reject"
    default_row: int = 0

    def __post_init__(self) -> None:
        what = f"sparse feature {self.name!r}"
        check_text(what, "name", self.name)
        check_text(what, "column", self.source)
        if not isinstance(self.transform, Hash | Vocabulary | Identity):
            raise ConfigError(f"{what}: transform {self.transform!r}; expected Hash, Vocabulary or Identity")
        if self.separator is not None:
            check_text(what, "separator", self.separator)
            if "\0" in self.separator:
                raise ConfigError(f"{what}: separator is {self.separator!r}; expected text without NUL characters")
        last = self.num_embeddings - 1
        if self.missing not in ("empty", "reject"):
            check_whole(what, "missing ('empty', 'reject' or an id)", self.missing, 0, last)
        if self.out_of_range not in ("reject", "default_row"):
            raise ConfigError(f"{what}: out_of_range {self.out_of_range!r}; expected 'reject' or 'default_row'")
        check_whole(what, "default_row", self.default_row, 0, last)

    @property
    def source(self) -> str:
        """Name of the raw column."""
        return self.column or self.name

    @property
    def num_embeddings(self) -> int:
        """Rows that the feature's table needs."""
        return self.transform.num_embeddings


@dataclass(frozen=True)
class DenseFeature:
    """One number for each row: fill, then clip, then log(1 + x), then ``(x - shift) / scale``.

    Attributes:
        name: what it is called.
        column: the raw column; "" is ``name``.
        fill: the raw value used for a missing one; None makes a missing value an error.
        clip_min, clip_max: bounds of the raw value; None is no bound.
        log: take log(1 + x); needs ``clip_min`` above -1.
        shift, scale: numbers; scale is not 0.
    """

    name: str
    column: str = ""
    fill: float | None = 0.0
    clip_min: float | None = None
    clip_max: float | None = None
    log: bool = False
    shift: float = 0.0
    scale: float = 1.0

    def __post_init__(self) -> None:
        what = f"dense feature {self.name!r}"
        check_text(what, "name", self.name)
        check_text(what, "column", self.source)
        for key in ("fill", "clip_min", "clip_max", "shift", "scale"):
            value = getattr(self, key)
            optional = key in ("fill", "clip_min", "clip_max")
            if not (optional and value is None) and not is_finite(value):
                raise ConfigError(f"{what}: {key} is {value!r}; expected a finite number")
        if not isinstance(self.log, bool):
            raise ConfigError(f"{what}: log is {self.log!r}; expected true or false")
        if self.clip_min is not None and self.clip_max is not None and self.clip_min > self.clip_max:
            raise ConfigError(f"{what}: clip_min {self.clip_min} is above clip_max {self.clip_max}")
        if self.log and (self.clip_min is None or self.clip_min <= -1):
            raise ConfigError(f"{what}: log(1 + x) needs clip_min above -1; it is {self.clip_min}")
        if self.scale == 0:
            raise ConfigError(f"{what}: scale is 0; expected another number")

    @property
    def source(self) -> str:
        """Name of the raw column."""
        return self.column or self.name

    def values(self, columns: Columns) -> NDArray[np.float64]:
        """The feature's value in each row, float64 ``[B]``; raises InputError for values that are not finite
        numbers."""
        what = f"dense feature {self.name!r}"
        x = to_numbers(column(columns, self.source, what), self.source)
        missing = np.isnan(x)
        if self.fill is not None:
            x[missing] = self.fill
        elif missing.any():
            row = int(np.flatnonzero(missing)[0])
            raise InputError(f"{what}, row {row}: no value in column {self.source!r}; expected one in every row")
        if self.clip_min is not None or self.clip_max is not None:
            x = np.clip(x, self.clip_min, self.clip_max)
        if self.log:
            x = np.log1p(x)
        x = (x - self.shift) / self.scale
        bad = ~(np.abs(x) <= np.finfo(np.float32).max)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            raise InputError(f"{what}, row {row}: becomes {x[row]}; expected a finite float32, set clip_min, clip_max")
        return x


@dataclass(frozen=True)
class Label:
    """The target of the model: 1 where the column is at least ``threshold``; without a threshold the column holds 0 and
    1."""

    column: str
    threshold: float | None = None

    def __post_init__(self) -> None:
        check_text("label", "column", self.column)
        if self.threshold is not None and not is_finite(self.threshold):
            raise ConfigError(f"label: threshold is {self.threshold!r}; expected a finite number")


@dataclass(frozen=True)
class FeatureContract:
    """How raw columns become the model's inputs.

    Attributes:
        sparse: the features of the KeyedJaggedTensor, in its order.
        dense: the columns of the dense input, in order.
        label: None if the data has none.
    """

    sparse: tuple[SparseFeature, ...] = ()
    dense: tuple[DenseFeature, ...] = ()
    label: Label | None = field(default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sparse", tuple(self.sparse))
        object.__setattr__(self, "dense", tuple(self.dense))
        if not self.sparse and not self.dense:
            raise ConfigError("a feature contract with no features; expected at least one")
        for what, kind, features in (
            ("sparse", SparseFeature, self.sparse),
            ("dense", DenseFeature, self.dense),
        ):
            odd = [f for f in features if not isinstance(f, kind)]
            if odd:
                raise ConfigError(f"{what} features: got a {type(odd[0]).__name__}, expected {kind.__name__}")
            names = [f.name for f in features]
            twice = sorted({n for n in names if names.count(n) > 1})
            if twice:
                raise ConfigError(f"{what} features: duplicate names {', '.join(twice)}; expected each name once")

    @property
    def num_dense(self) -> int:
        """Columns of the dense input."""
        return len(self.dense)

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the sparse features, in order."""
        return tuple(f.name for f in self.sparse)

    @property
    def columns(self) -> tuple[str, ...]:
        """The raw columns that :meth:`apply` reads, each once (the label's not among them)."""
        return tuple(dict.fromkeys([f.source for f in self.sparse] + [f.source for f in self.dense]))

    def apply(self, columns: Columns, counters: dict[str, int] | None = None) -> tuple[Tensor, KeyedJaggedTensor]:
        """The model's inputs for raw rows.

        Args:
            columns: raw values by column name, lists or 1-D arrays of text, numbers, None and nan; more columns than
                needed are fine.
            counters: ids that ``out_of_range="default_row"`` replaced are added here, by feature name.

        Returns:
            dense float32 ``[B, num_dense]``; KeyedJaggedTensor of int64 values ``[N]`` and int32 lengths ``[F * B]``.

        Raises:
            InputError: a column missing or of another length, a value that a feature refuses; names feature, row, value.
        """
        import torch

        from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

        dense, features = self.apply_arrays(columns, counters)
        values, lengths = torch.from_numpy(features.values), torch.from_numpy(features.lengths)
        kjt = KeyedJaggedTensor.from_parts_unchecked(list(features.keys), values, lengths, stride=features.batch)
        return torch.from_numpy(dense), kjt

    def apply_arrays(
        self, columns: Columns, counters: dict[str, int] | None = None
    ) -> tuple[NDArray[np.float32], FeatureArrays]:
        """:meth:`apply` as numpy arrays, which needs no torch."""
        needed_by = "the feature contract"
        require(columns, self.columns, needed_by, ". Send every column, with None (null) in rows that have no value")
        arrays = {name: column(columns, name, needed_by) for name in self.columns}
        rows = num_rows(arrays, self.columns)
        dense = np.empty((rows, self.num_dense), dtype=np.float32)
        for at, feature in enumerate(self.dense):
            dense[:, at] = feature.values(arrays)
        bags = [_bags(feature, arrays[feature.source], counters) for feature in self.sparse]
        values = np.concatenate([ids for ids, _ in bags]) if bags else np.empty(0, dtype=np.int64)
        lengths = np.concatenate([counts for _, counts in bags]) if bags else np.empty(0, dtype=np.int64)
        return dense, FeatureArrays(self.feature_names, rows, lengths.astype(np.int32), values)

    def labels(self, columns: Columns) -> Tensor:
        """Float32 ``[B]`` of 0 and 1.

        Raises:
            ConfigError: the contract has no label.
            InputError: no such column, a row without a label, or labels other than 0 and 1 where no threshold is set.
        """
        if self.label is None:
            raise ConfigError("the feature contract has no label; add Label(column) to train or to measure quality")
        values = to_numbers(column(columns, self.label.column, "the label"), self.label.column)
        bad = np.isnan(values)
        if self.label.threshold is None:
            bad |= (values != 0) & (values != 1)
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            expected = "a number" if self.label.threshold is not None else "0 or 1 (or set a threshold)"
            raise InputError(f"label {self.label.column!r}, row {row}: got {values[row]}, expected {expected}")
        found = values if self.label.threshold is None else values >= self.label.threshold
        import torch

        return torch.from_numpy(found.astype(np.float32))

    def to_dict(self) -> dict[str, Any]:
        """The contract as JSON values; :meth:`from_dict` reads it back."""
        return {
            "format": CONTRACT_FORMAT,
            "sparse": [
                _fields(f) | {"transform": {"kind": f.transform.kind, **_fields(f.transform)}} for f in self.sparse
            ],
            "dense": [_fields(f) for f in self.dense],
            "label": None if self.label is None else _fields(self.label),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> FeatureContract:
        """The contract of :meth:`to_dict`.

        Raises:
            ConfigError: another format, unknown or missing keys, or invalid values.
        """
        if not isinstance(data, Mapping) or data.get("format") != CONTRACT_FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise ConfigError(f"feature contract: format {found!r}, expected {CONTRACT_FORMAT!r}")
        if set(data) != {"format", "sparse", "dense", "label"}:
            raise ConfigError(f"feature contract: keys {sorted(data)}, expected dense, format, label, sparse")
        if not isinstance(data["sparse"], list) or not isinstance(data["dense"], list):
            raise ConfigError("feature contract: sparse and dense are lists of features")
        return cls(
            tuple(_sparse_from(entry) for entry in data["sparse"]),
            tuple(_build(DenseFeature, entry, "dense feature") for entry in data["dense"]),
            None if data["label"] is None else _build(Label, data["label"], "label"),
        )


def _bags(
    feature: SparseFeature, values: NDArray[Any], counters: dict[str, int] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(ids ``[N]``, how many each row has ``[B]``)."""
    tokens = split_tokens(to_text(values, feature.source), feature.source, feature.separator)
    ids = _in_range(feature, tokens, feature.transform.ids(tokens, feature.source), counters)
    counts = tokens.counts
    empty = counts == 0
    if feature.missing == "empty" or not empty.any():
        return ids, counts
    if feature.missing == "reject":
        row = int(np.flatnonzero(empty)[0])
        raise InputError(
            f"sparse feature {feature.name!r}, row {row}: no value in column {feature.source!r}; expected one in "
            f"every row ({int(empty.sum())} rows without)"
        )
    before = (np.cumsum(counts) - counts)[empty]
    return np.insert(ids, before, feature.missing), np.where(empty, 1, counts)


def _in_range(
    feature: SparseFeature, tokens: Tokens, ids: NDArray[np.int64], counters: dict[str, int] | None
) -> NDArray[np.int64]:
    if not isinstance(feature.transform, Identity):
        return ids  # these cannot leave their table
    outside = (ids < 0) | (ids >= feature.num_embeddings)
    if not outside.any():
        return ids
    if feature.out_of_range == "reject":
        at = int(np.flatnonzero(outside)[0])
        raise InputError(
            f"sparse feature {feature.name!r}, row {int(tokens.rows[at])}: id {int(ids[at])} is outside its table of "
            f"{feature.num_embeddings} rows ({int(outside.sum())} such ids)"
        )
    if counters is not None:
        counters[feature.name] = counters.get(feature.name, 0) + int(outside.sum())
    return np.where(outside, feature.default_row, ids)


# ---- to data and back


def _fields(item: Any) -> dict[str, Any]:
    found = {f.name: getattr(item, f.name) for f in dataclasses.fields(item)}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in found.items()}


def _sparse_from(entry: Any) -> SparseFeature:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("transform"), Mapping):
        raise ConfigError(f"sparse feature: got {entry!r:.80}, expected an object with a transform")
    transform = dict(entry["transform"])
    kind = transform.pop("kind", None)
    made = TRANSFORMS.get(kind) if isinstance(kind, str) else None
    if made is None:
        raise ConfigError(f"sparse feature {entry.get('name')!r}: transform {kind!r}; known: {', '.join(TRANSFORMS)}")
    return _build(SparseFeature, {**entry, "transform": _build(made, transform, f"transform {kind}")}, "sparse feature")


def _build(kind: type[_T], entry: Any, what: str) -> _T:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{what}: got {entry!r:.80}, expected an object")
    known = {f.name for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(set(entry) - known):
        raise ConfigError(f"{what} {entry.get('name', '')!r}: unknown keys {unknown}; known: {sorted(known)}")
    try:
        return kind(**entry)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} {entry.get('name', '')!r}: {error}") from error
