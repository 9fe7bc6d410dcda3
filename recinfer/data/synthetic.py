"""Generates synthetic rows in Criteo's format, with a signal that a model can learn.

Columns as in the real set: ``label``, 13 counts ``I1..I13`` with a heavy tail, 26 categories ``C1..C26`` as 8 hex
digits whose frequencies follow a bounded Zipf law; both may be empty. A click is drawn with the probability
``sigmoid(bias + dense effects + category effects + pair effects)``, which :class:`SyntheticRows` keeps, so that the
best possible AUC is known.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from recinfer.data.metrics import auc, sigmoid
from recinfer.errors import InputError

__all__ = ["NUM_DENSE", "NUM_SPARSE", "SyntheticRows", "generate_criteo"]

NUM_DENSE = 13
NUM_SPARSE = 26

# Distinct values of C1..C26: a few columns with many values and many with few, as in the real set.
CARDINALITIES = (
    1_400, 550, 40_000, 25_000, 300, 16, 11_000, 600, 3, 8_000, 5_000, 30_000, 3_000,
    26, 7_500, 20_000, 10, 4_000, 1_800, 4, 28_000, 14, 15, 12_000, 70, 9_000,
)  # fmt: skip
# Part of the rows in which a column is empty; the pattern repeats over the columns.
_DENSE_EMPTY = (0.45, 0.0, 0.2, 0.22, 0.03, 0.22, 0.04, 0.0, 0.04, 0.45, 0.04, 0.75, 0.22)
_SPARSE_EMPTY = (0.0, 0.0, 0.03, 0.03, 0.0, 0.12, 0.0, 0.0, 0.0, 0.0, 0.0, 0.03, 0.0)
_ZIPF_EXPONENT = 1.3
_ZIPF_SHIFT = 2.0
_NUM_PAIRS = 6  # pairs of categories with a joint effect, for which a model needs interactions
_SPREAD = {"dense": 1.0, "sparse": 1.6, "pairs": 0.7}  # standard deviations of the three parts of the log-odds
_BIAS = -1.6


@dataclass(frozen=True)
class SyntheticRows:
    """Generated rows with their true probabilities.

    Attributes:
        columns: ``label`` (int64), ``I1..I13`` (float64, nan is empty), ``C1..C26`` (str, ``""`` is empty).
        probability: float64 ``[rows]``, the probability that each label was drawn with.
    """

    columns: dict[str, NDArray]
    probability: NDArray[np.float64]

    def best_auc(self) -> float:
        """The AUC of the true probabilities on these labels, an upper bound for every model up to chance."""
        return auc(self.columns["label"], self.probability)


def generate_criteo(num_rows: int, seed: int = 0) -> SyntheticRows:
    """``num_rows`` rows in the format of the Criteo set; the same ``num_rows`` and seed give the same rows.

    The effects on the label depend only on the seed, so more rows with the same seed follow the same model.

    Raises:
        InputError: fewer than 1 row.
    """
    if num_rows < 1:
        raise InputError(f"synthetic data: got {num_rows} rows; expected at least 1")
    world, rng = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    dense, dense_effect = _dense_columns(world, rng, num_rows)
    sparse, sparse_effect, pair_effect = _sparse_columns(world, rng, num_rows)
    log_odds = (
        _BIAS + _SPREAD["dense"] * dense_effect + _SPREAD["sparse"] * sparse_effect + _SPREAD["pairs"] * pair_effect
    )
    probability = sigmoid(log_odds)
    label = (rng.random(num_rows) < probability).astype(np.int64)
    return SyntheticRows({"label": label, **dense, **sparse}, probability)


def _dense_columns(
    world: np.random.Generator, rng: np.random.Generator, num_rows: int
) -> tuple[dict[str, NDArray], NDArray]:
    """Count columns and the sum of their effects, with about unit variance; an empty value has no effect."""
    weights = world.normal(size=NUM_DENSE)
    weights /= np.linalg.norm(weights)
    spread, center = world.uniform(0.8, 1.6, NUM_DENSE), world.uniform(0.5, 4.0, NUM_DENSE)
    columns: dict[str, NDArray] = {}
    effect = np.zeros(num_rows)
    for at in range(NUM_DENSE):
        normal = rng.normal(size=num_rows)
        empty = rng.random(num_rows) < _DENSE_EMPTY[at]
        effect += np.where(empty, 0.0, weights[at] * normal)
        columns[f"I{at + 1}"] = np.where(empty, np.nan, np.floor(np.exp(normal * spread[at] + center[at])))
    return columns, effect


def _sparse_columns(
    world: np.random.Generator, rng: np.random.Generator, num_rows: int
) -> tuple[dict[str, NDArray], NDArray, NDArray]:
    """Category columns, the sum of their own effects and the sum of their pairwise effects, each with about unit
    variance."""
    weights = world.exponential(size=NUM_SPARSE)
    weights /= np.linalg.norm(weights)
    pairs = world.permutation(NUM_SPARSE)[: 2 * _NUM_PAIRS].reshape(2, -1)
    columns: dict[str, NDArray] = {}
    effect = np.zeros(num_rows)
    hidden = np.zeros((NUM_SPARSE, num_rows))  # a second trait of each value, for the pairs
    for at, cardinality in enumerate(CARDINALITIES):
        mass = (np.arange(cardinality) + _ZIPF_SHIFT) ** -_ZIPF_EXPONENT
        mass /= mass.sum()
        traits = world.normal(size=(2, cardinality))
        # The effects are centred and scaled by the values' frequencies, so that no frequent value alone decides the
        # rate of clicks.
        traits -= (traits @ mass)[:, None]
        traits /= np.sqrt(traits**2 @ mass)[:, None]
        ranks = np.minimum(np.searchsorted(np.cumsum(mass), rng.random(num_rows), side="right"), cardinality - 1)
        empty = rng.random(num_rows) < _SPARSE_EMPTY[at % len(_SPARSE_EMPTY)]
        effect += np.where(empty, 0.0, weights[at] * traits[0, ranks])
        hidden[at] = np.where(empty, 0.0, traits[1, ranks])
        columns[f"C{at + 1}"] = np.where(empty, "", _hex_tokens(at, cardinality)[ranks])
    pair_effect = (hidden[pairs[0]] * hidden[pairs[1]]).sum(axis=0) / np.sqrt(_NUM_PAIRS)
    return columns, effect, pair_effect


def _hex_tokens(column: int, cardinality: int) -> NDArray[np.str_]:
    """``cardinality`` different 8-digit hex words for a column: a bijection of 32-bit numbers, so none repeats."""
    x = np.arange(cardinality, dtype=np.uint64) + np.uint64(column * 1_000_003 + 1)
    mask = np.uint64(0xFFFFFFFF)
    for factor in (0x85EBCA6B, 0xC2B2AE35):  # odd: multiplication is a bijection modulo 2^32
        x = (x * np.uint64(factor)) & mask
        x ^= x >> np.uint64(16)
    nibbles = (x[:, None] >> np.arange(28, -4, -4, dtype=np.uint64)) & np.uint64(15)
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8).astype(np.uint32)[nibbles]
    return np.ascontiguousarray(digits).view("U8").reshape(-1)
