"""The feature contract: plain data that defines how raw columns become a model's inputs, in training and serving.

The contract is stored in ``model.json`` and in an archive's manifest, so that every user of the model can convert raw
rows:

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
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from recinfer.columns import FeatureArrays
from recinfer.data.columns import Columns, column, num_rows, require, to_numbers
from recinfer.data.features import DenseFeature, Label, SparseFeature
from recinfer.data.transforms import TRANSFORMS, Hash, Identity, Transform, Vocabulary
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
        return _applied(self.sparse, self.dense, columns, counters)

    def apply_with_context(
        self, columns: Columns, context: Columns, counters: dict[str, int] | None = None
    ) -> tuple[NDArray[np.float32], FeatureArrays, FeatureArrays]:
        """:meth:`apply_arrays` for rows that share some columns, as a user's candidates do.

        Args:
            columns: the columns of ``B`` rows; of the contract's columns those that ``context`` does not have.
            context: the shared columns, of one row.

        Returns:
            dense float32 ``[B, num_dense]``; the features of the rows; those of the context, a batch of 1.

        Raises:
            InputError: see :meth:`apply`; a column in both, or no column that differs by row.
        """
        shared = [name for name in self.columns if name in context]
        twice = [name for name in shared if name in columns]
        if twice:
            raise InputError(f"context: column {twice[0]!r} is also in the rows; give it in one of them")
        if len(shared) == len(self.columns):
            raise InputError(
                "context: it has all columns of the feature contract; leave those to the rows that differ by row"
            )
        each, features = _applied(*self._of(shared, False), columns, counters)
        if not shared:
            return each, features, FeatureArrays((), 1, np.empty(0, np.int32), np.empty(0, np.int64))
        try:
            once, own = _applied(*self._of(shared, True), context, counters)
        except InputError as error:
            raise InputError(f"context: {error}") from None
        if own.batch != 1:
            raise InputError(f"context: got {own.batch} rows, expected one, which applies to all rows")
        dense = np.empty((features.batch, self.num_dense), dtype=np.float32)
        is_shared = np.array([feature.source in shared for feature in self.dense], dtype=bool)
        dense[:, is_shared], dense[:, ~is_shared] = once, each
        return dense, features, own

    def _of(self, shared: Sequence[str], inside: bool) -> tuple[list[SparseFeature], list[DenseFeature]]:
        """The features of the columns ``shared``, or of all others."""
        return [f for f in self.sparse if (f.source in shared) == inside], [
            f for f in self.dense if (f.source in shared) == inside
        ]

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
        """The inverse of :meth:`to_dict`.

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

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FeatureContract:
        """The contract in a JSON file of :meth:`to_dict`.

        Raises:
            ConfigError: the file cannot be read, or its content is not a contract.
        """
        try:
            data = json.loads(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"feature contract {str(path)!r}: {error}; expected a JSON file of FeatureContract.to_dict()"
            ) from None
        return cls.from_dict(data)


# ---- to data and back


def _applied(
    sparse: Sequence[SparseFeature], dense: Sequence[DenseFeature], columns: Columns, counters: dict[str, int] | None
) -> tuple[NDArray[np.float32], FeatureArrays]:
    """The numbers ``[B, len(dense)]`` and the ids of some features."""
    needed_by = "the feature contract"
    names = list(dict.fromkeys([f.source for f in sparse] + [f.source for f in dense]))
    require(columns, names, needed_by, ". Send every column, with None (null) in rows that have no value")
    arrays = {name: column(columns, name, needed_by) for name in names}
    rows = num_rows(arrays, names)
    numbers = np.empty((rows, len(dense)), dtype=np.float32)
    for at, feature in enumerate(dense):
        numbers[:, at] = feature.values(arrays)
    bags = [feature.bags(arrays, counters) for feature in sparse]
    values = np.concatenate([ids for ids, _ in bags]) if bags else np.empty(0, dtype=np.int64)
    lengths = np.concatenate([counts for _, counts in bags]) if bags else np.empty(0, dtype=np.int64)
    return numbers, FeatureArrays(tuple(f.name for f in sparse), rows, lengths.astype(np.int32), values)


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
