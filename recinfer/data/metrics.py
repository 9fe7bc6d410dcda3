"""Computes metrics of predictions in numpy: AUC, log-loss and normalized entropy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from recinfer.errors import InputError

__all__ = ["auc", "log_loss", "normalized_entropy", "sigmoid"]


def auc(labels: ArrayLike, scores: ArrayLike) -> float:
    """The area under the ROC curve: the probability that a positive scores above a negative; ties count half.

    Computed from mid-ranks (Mann-Whitney), in O(n log n). Any increasing function of the scores gives the same result,
    so logits and probabilities do alike.

    Args:
        labels: ``[n]``, 0 or 1 (bool too).
        scores: ``[n]``, finite numbers; higher means more likely positive. Torch tensors on the CPU are fine.

    Returns:
        float: in [0, 1]; nan with only one class, since then nothing is ranked.

    Raises:
        InputError: no rows, different lengths, labels other than 0 and 1, scores that are not finite.

    >>> auc([0, 1, 1, 0], [0.1, 0.9, 0.4, 0.4])
    0.875
    """
    positive, values = _pair("auc", labels, scores)
    num_positive = int(positive.sum())
    num_negative = positive.size - num_positive
    if not num_positive or not num_negative:
        return float("nan")
    order = np.argsort(values, kind="stable")
    ranked = values[order]
    # Scores that tie form runs; each member of a run has the mean of the run's ranks.
    starts = np.flatnonzero(np.concatenate(([True], ranked[1:] != ranked[:-1])))
    ends = np.concatenate((starts[1:], [ranked.size]))
    positives_in_run = np.add.reduceat(positive[order].astype(np.int64), starts)
    rank_sum = float(np.dot(positives_in_run, (starts + 1 + ends) / 2))
    return (rank_sum - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


def log_loss(labels: ArrayLike, probabilities: ArrayLike, eps: float = 1e-15) -> float:
    """The mean negative log-likelihood of the labels (natural log), the loss of binary cross entropy.

    Args:
        labels: ``[n]``, 0 or 1.
        probabilities: ``[n]``, in [0, 1]: the probability of 1.
        eps: probabilities are kept this far from 0 and 1, so a confident error costs ``-log(eps)``, not infinity.

    Raises:
        InputError: no rows, different lengths, labels other than 0 and 1, numbers outside [0, 1].

    >>> round(log_loss([1, 0], [0.5, 0.5]), 4)
    0.6931
    """
    positive, values = _pair("log_loss", labels, probabilities)
    if values.min() < 0 or values.max() > 1:
        raise InputError(
            f"log_loss: probabilities reach from {values.min():g} to {values.max():g}; expected numbers in [0, 1] "
            "(for logits: sigmoid(logits))"
        )
    likelihood = np.where(positive, values, 1 - values)
    return float(-np.log(np.maximum(likelihood, eps)).mean())


def normalized_entropy(labels: ArrayLike, probabilities: ArrayLike, eps: float = 1e-15) -> float:
    """The log-loss divided by the log-loss of a constant prediction of the labels' mean (He et al., "Practical Lessons
    from Predicting Clicks on Ads at Facebook", 2014): 1 is as good as the constant, lower is better.

    Args: as :func:`log_loss`.

    Returns:
        float: nan with only one class.

    >>> round(normalized_entropy([1, 0, 0, 1], [0.9, 0.1, 0.2, 0.8]), 4)
    0.237
    """
    loss = log_loss(labels, probabilities, eps)
    mean = float(_flat("normalized_entropy", "labels", labels).astype(np.float64).mean())
    if not 0 < mean < 1:
        return float("nan")
    return loss / float(-(mean * np.log(mean) + (1 - mean) * np.log(1 - mean)))


def sigmoid(logits: ArrayLike) -> NDArray[np.float64]:
    """``1 / (1 + exp(-x))`` element by element, in float64, without overflow."""
    x = np.asarray(logits, dtype=np.float64)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, small) / (1 + small)


def _pair(what: str, labels: ArrayLike, scores: ArrayLike) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    y, s = _flat(what, "labels", labels), _flat(what, "scores", scores).astype(np.float64)
    if y.size != s.size or not y.size:
        raise InputError(f"{what}: got {y.size} labels and {s.size} scores; expected the same number, at least one")
    positive = y == 1
    if not np.all(positive | (y == 0)):
        odd = y[~(positive | (y == 0))][:3].tolist()
        raise InputError(f"{what}: labels hold {odd}; expected only 0 and 1")
    if not np.all(np.isfinite(s)):
        raise InputError(f"{what}: {int((~np.isfinite(s)).sum())} of {s.size} scores are nan or infinite")
    return positive, s


def _flat(what: str, name: str, values: Any) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise InputError(f"{what}: {name} have dtype {array.dtype}; expected numbers")
    if array.ndim > 1 and array.size != max(array.shape):
        raise InputError(f"{what}: {name} have shape {array.shape}; expected one number per row")
    return array.reshape(-1)
