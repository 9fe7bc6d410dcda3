"""Metrics on the held-out rows of all ranks, as torchmetrics."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from recinfer.errors import InputError, UnavailableError

try:
    from torchmetrics import Metric, MetricCollection
    from torchmetrics.classification import BinaryAUROC
except ImportError as error:
    raise UnavailableError(f"training needs torchmetrics; pip install 'recinfer[train]' ({error})") from error

__all__ = ["LogLoss", "NormalizedEntropy", "evaluate", "held_out_metrics"]


class LogLoss(Metric):
    """Mean log-loss of logits, natural logarithm, in float64; sums over ranks.

    ``update(logits, labels)`` takes float tensors of one shape; labels are 0 or 1.
    """

    full_state_update = False
    higher_is_better = False
    loss: Tensor
    rows: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("loss", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rows", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add rows."""
        losses = nn.functional.binary_cross_entropy_with_logits(logits.double(), labels.double(), reduction="sum")
        self.loss += losses
        self.rows += labels.numel()

    def compute(self) -> Tensor:
        """The mean; nan without rows."""
        return self.loss / self.rows


class NormalizedEntropy(LogLoss):
    """The log-loss divided by the log-loss of a constant prediction of the labels' mean (He et al., "Practical Lessons
    from Predicting Clicks on Ads at Facebook", 2014): 1 is as good as the constant, lower is better; nan with only one
    class."""

    positives: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("positives", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add rows."""
        super().update(logits, labels)
        self.positives += labels.double().sum()

    def compute(self) -> Tensor:
        """The ratio."""
        mean = self.positives / self.rows
        entropy = -(torch.xlogy(mean, mean) + torch.xlogy(1 - mean, 1 - mean))
        return torch.where(entropy > 0, super().compute() / entropy, torch.nan)


def held_out_metrics() -> MetricCollection:
    """``auc`` (area under the ROC curve, exact), ``log_loss`` and ``normalized_entropy`` of logits."""
    return MetricCollection(
        {
            "auc": BinaryAUROC(thresholds=None, validate_args=False),
            "log_loss": LogLoss(),
            "normalized_entropy": NormalizedEntropy(),
        },
        compute_groups=False,
    )


def evaluate(batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """The metrics of (logits ``[B]``, labels ``[B]``) pairs, over all ranks of the default process group if there is one.

    Every rank calls it and gets the same figures; a rank may have no rows, all together may not.

    Raises:
        InputError: no rows at all, or logits that are not finite.
    """
    metrics = held_out_metrics()
    # The empty update lets a rank without rows take part in the exchange like the other ranks.
    metrics["auc"].update(torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64))
    for logits, labels in batches:
        if not torch.isfinite(logits).all():
            raise InputError("the model's logits hold nan or infinity on held-out rows; lower the learning rates")
        # BinaryAUROC would take values outside [0, 1] for logits and turn them itself, in float32, where ends tie.
        metrics["auc"].update(torch.sigmoid(logits.double()), labels.long())
        metrics["log_loss"].update(logits, labels)
        metrics["normalized_entropy"].update(logits, labels)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The ``compute`` method of metric")  # a rank without rows
        found = {name: float(metrics[name].compute()) for name in ("log_loss", "normalized_entropy")}
        if math.isnan(found["log_loss"]):
            raise InputError("got no held-out rows to evaluate on; give more data")
        one_class = math.isnan(found["normalized_entropy"])
        return {"auc": math.nan if one_class else float(metrics["auc"].compute()), **found}
