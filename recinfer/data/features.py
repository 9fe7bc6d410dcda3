"""The features of a contract: how one raw column becomes the ids of a bag, a number or a label.

Shapes: ``B`` rows, ``N`` ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from recinfer.data.columns import Columns, column, to_numbers, to_text
from recinfer.data.tokens import Tokens, split_tokens
from recinfer.data.transforms import Hash, Identity, Transform, Vocabulary, check_text, check_whole, is_finite
from recinfer.errors import ConfigError, InputError

__all__ = ["DenseFeature", "Label", "SparseFeature"]


@dataclass(frozen=True)
class SparseFeature:
    """A feature with one bag of ids for each row.

    Attributes:
        name: the feature's name in the KeyedJaggedTensor.
        transform: text to id.
        column: the raw column; "" is ``name``.
        separator: text between the values of one row; None is one value a row.
        missing: a row with no value gets an empty bag ("empty"), the id given, or fails the call ("reject"). Rows without
            the column always fail.
        out_of_range: an id outside the table fails the call ("reject"), or reads ``default_row`` ("default_row").
        default_row: the default row's id.
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

    def bags(
        self, columns: Columns, counters: dict[str, int] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(ids ``[N]``, number of ids of each row ``[B]``).

        Args:
            columns: raw values by column name.
            counters: ids that ``out_of_range="default_row"`` replaced are added here, by feature name.

        Raises:
            InputError: a value that the feature refuses.
        """
        values = column(columns, self.source, f"sparse feature {self.name!r}")
        tokens = split_tokens(to_text(values, self.source), self.source, self.separator)
        ids = self._in_range(tokens, self.transform.ids(tokens, self.source), counters)
        counts = tokens.counts
        empty = counts == 0
        if self.missing == "empty" or not empty.any():
            return ids, counts
        if self.missing == "reject":
            row = int(np.flatnonzero(empty)[0])
            raise InputError(
                f"sparse feature {self.name!r}, row {row}: no value in column {self.source!r}; expected one in "
                f"every row ({int(empty.sum())} rows without)"
            )
        before = (np.cumsum(counts) - counts)[empty]
        return np.insert(ids, before, self.missing), np.where(empty, 1, counts)

    def _in_range(self, tokens: Tokens, ids: NDArray[np.int64], counters: dict[str, int] | None) -> NDArray[np.int64]:
        if not isinstance(self.transform, Identity):
            return ids  # hashes and vocabularies give no id beyond their table
        outside = (ids < 0) | (ids >= self.num_embeddings)
        if not outside.any():
            return ids
        if self.out_of_range == "reject":
            at = int(np.flatnonzero(outside)[0])
            raise InputError(
                f"sparse feature {self.name!r}, row {int(tokens.rows[at])}: id {int(ids[at])} is outside its table of "
                f"{self.num_embeddings} rows ({int(outside.sum())} such ids)"
            )
        if counters is not None:
            counters[self.name] = counters.get(self.name, 0) + int(outside.sum())
        return np.where(outside, self.default_row, ids)


@dataclass(frozen=True)
class DenseFeature:
    """A feature with one number for each row: fill, then clip, then log(1 + x), then ``(x - shift) / scale``.

    Attributes:
        name: the feature's name.
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
