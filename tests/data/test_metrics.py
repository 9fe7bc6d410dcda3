"""AUC and log-loss against what they are defined by: counted pairs, and torch's binary cross entropy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from recinfer.data.metrics import auc, log_loss, sigmoid
from recinfer.errors import InputError


def counted_auc(labels: np.ndarray, scores: np.ndarray) -> float:
    positive, negative = scores[labels == 1], scores[labels == 0]
    wins = (positive[:, None] > negative).sum() + 0.5 * (positive[:, None] == negative).sum()
    return wins / (positive.size * negative.size)


@given(st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=1, max_size=60))
def test_auc_counts_pairs_with_ties(rows: list[tuple[bool, int]]) -> None:
    labels, scores = np.array([r[0] for r in rows]), np.array([r[1] for r in rows], dtype=np.float32)
    if labels.all() or not labels.any():
        assert math.isnan(auc(labels, scores))
    else:
        assert auc(labels, scores) == pytest.approx(counted_auc(labels, scores), abs=1e-12)


def test_auc_of_many_rows_does_not_lose_digits() -> None:
    rng = np.random.default_rng(0)
    labels = rng.random(3000) < 0.02
    scores = rng.normal(size=3000) + labels
    assert auc(labels, scores) == pytest.approx(counted_auc(labels, scores), abs=1e-12)


def test_auc_knows_only_the_order() -> None:
    rng = np.random.default_rng(1)
    labels, scores = rng.integers(0, 2, 500), rng.normal(size=500)
    assert auc(labels, scores) == auc(labels, sigmoid(scores)) == 1 - auc(1 - labels, scores)
    assert auc(torch.from_numpy(labels), torch.from_numpy(scores)) == auc(labels, scores)


def test_auc_at_the_ends() -> None:
    assert auc([0, 0, 1], [1, 2, 3]) == 1.0
    assert auc([1, 0, 0], [1, 2, 3]) == 0.0
    assert auc([1, 0, 1], [2, 2, 2]) == 0.5


def test_log_loss_is_binary_cross_entropy() -> None:
    rng = np.random.default_rng(2)
    labels, logits = rng.integers(0, 2, 400), rng.normal(size=400) * 4
    expected = torch.nn.functional.binary_cross_entropy_with_logits(
        torch.from_numpy(logits), torch.from_numpy(labels).double()
    )
    assert log_loss(labels, sigmoid(logits)) == pytest.approx(expected.item(), rel=1e-12)


def test_a_confident_error_is_finite() -> None:
    assert log_loss([1, 0], [0.0, 0.0]) == pytest.approx(-math.log(1e-15) / 2)
    assert log_loss([1, 0], [1.0, 0.0]) == 0.0


def test_sigmoid_at_the_ends() -> None:
    with np.errstate(over="raise"):
        np.testing.assert_array_equal(sigmoid([-1000, 0, 1000]), [0, 0.5, 1])


@pytest.mark.parametrize("metric", [auc, log_loss])
@pytest.mark.parametrize(
    ("labels", "scores", "message"),
    [
        ([], [], "0 labels and 0 scores"),
        ([0, 1], [0.5], "2 labels and 1 scores"),
        ([0, 2], [0.5, 0.5], r"labels hold \[2\]"),
        ([0, float("nan")], [0.5, 0.5], "labels hold"),
        ([0, 1], [0.5, float("nan")], "1 of 2 scores are nan"),
        (["0", "1"], [0.5, 0.5], "labels have dtype"),
        ([[0, 1], [1, 0]], [[0.5, 0.1], [0.1, 0.1]], r"shape \(2, 2\)"),
    ],
)
def test_invalid_predictions_are_refused(metric, labels, scores, message) -> None:
    with pytest.raises(InputError, match=message):
        metric(labels, scores)


def test_log_loss_refuses_logits() -> None:
    with pytest.raises(InputError, match=r"sigmoid\(logits\)"):
        log_loss([0, 1], [0.5, 1.5])
