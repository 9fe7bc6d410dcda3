"""Fits the parts of a feature contract that depend on the training rows: scales and vocabularies."""

from __future__ import annotations

import dataclasses
from collections import Counter

from recinfer.data.columns import Columns, column, to_text
from recinfer.data.contract import DenseFeature, Vocabulary
from recinfer.data.tokens import split_tokens

__all__ = ["standardized", "vocabulary"]


def standardized(feature: DenseFeature, columns: Columns) -> DenseFeature:
    """``feature`` with shift and scale such that these rows have mean 0 and variance 1; a constant column becomes 0."""
    values = dataclasses.replace(feature, shift=0.0, scale=1.0).values(columns)
    if not values.size:
        return feature
    # The numbers are rounded, because further digits carry no information and people read model.json.
    shift, scale = float(f"{values.mean():.6g}"), float(f"{values.std():.6g}")
    return dataclasses.replace(feature, shift=shift, scale=scale if scale > 0 else 1.0)


def vocabulary(columns: Columns, name: str, separator: str | None = None, min_count: int = 1) -> Vocabulary:
    """The tokens of a column that occur at least ``min_count`` times, the most frequent first, then by text."""
    tokens = split_tokens(to_text(column(columns, name, "the vocabulary"), name), name, separator)
    counted = Counter(tokens.strings.tolist())
    kept = sorted((token for token, count in counted.items() if count >= min_count), key=lambda t: (-counted[t], t))
    return Vocabulary(tuple(kept))
