"""Measures a served model through the client: quality on held-out rows, and latency."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recinfer.serving.client.client import InferenceClient
    from recinfer.training.batches import Batch, Examples

__all__ = ["Latency", "Quality", "measure_latency", "quality_of", "served_logits"]

_WARM_UP = 20
_SCORE_BATCH = 1024


@dataclass(frozen=True)
class Quality:
    """AUC and log-loss on the held-out rows; ``auc`` is nan if they hold only one class."""

    auc: float
    log_loss: float


@dataclass(frozen=True)
class Latency:
    """Latency in seconds through the client, one request at a time."""

    call: Literal["lookup", "predict"]
    batch: int
    requests: int
    p50: float
    p99: float


def quality_of(labels: NDArray[np.float32], logits: NDArray[np.float32]) -> Quality:
    """AUC and log-loss of ``logits [N]`` for ``labels [N]``, 0 or 1."""
    from recinfer.data.metrics import auc, log_loss, sigmoid

    return Quality(auc(labels, logits), log_loss(labels, sigmoid(logits)))


def served_logits(client: InferenceClient, examples: Examples) -> NDArray[np.float32]:
    """The served model's only output ``[N]`` for all examples, in order."""
    import torch

    found = [
        next(iter(client.predict(batch.dense_features, batch.sparse_features).values())).reshape(-1)
        for batch in examples.batches(_SCORE_BATCH)
    ]
    return torch.cat(found).numpy()


def measure_latency(
    client: InferenceClient, call: Literal["lookup", "predict"], examples: Examples, batch_size: int, requests: int
) -> Latency:
    """Time ``requests`` requests of ``batch_size`` rows, one after another, with different rows each."""
    import numpy as np
    import torch

    def ask(batch: Batch) -> float:
        start = time.perf_counter()
        if call == "lookup":
            client.lookup(batch.sparse_features)
        else:
            client.predict(batch.dense_features, batch.sparse_features)
        return time.perf_counter() - start

    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(examples), (_WARM_UP + requests, batch_size), generator=generator)
    seconds = [ask(examples.batch(chosen)) for chosen in rows][_WARM_UP:]
    p50, p99 = np.percentile(seconds, [50, 99])
    return Latency(call, batch_size, requests, float(p50), float(p99))
