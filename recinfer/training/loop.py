"""The training loop: a dataset in, a trained DLRM with its held-out metrics and its checkpoint out; one process."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from recinfer.checkpoint import check_target, save_checkpoint
from recinfer.data.metrics import auc, log_loss, sigmoid
from recinfer.errors import ConfigError, InputError
from recinfer.models.dlrm import DLRM, DLRMTrain
from recinfer.training.batches import Batch, Examples
from recinfer.training.model import build_dlrm, start_at_rate
from recinfer.training.progress import Report, training_progress
from recinfer.training.rowwise_adagrad import RowWiseAdagrad, sparse_gradients

if TYPE_CHECKING:
    from recinfer.data.dataset import Dataset

__all__ = ["TrainResult", "predict_logits", "train"]

_EVALUATION_BATCH = 8192
_SMALL_BATCH = 4096
_WARMUP = 0.05  # part of the steps in which the learning rates rise; they then fall to 0 in a line


@dataclass(frozen=True)
class TrainResult:
    """What came out of a training.

    Attributes:
        auc: area under the ROC curve on the held-out rows; nan if they hold one class only.
        log_loss: mean log-loss on the held-out rows, natural logarithm.
        train_losses: mean training loss of each epoch.
        num_train_rows, num_test_rows: rows trained on and held out.
        num_steps: updates made.
        seconds: wall time of reading the columns, training and evaluation, without the checkpoint.
        checkpoint: the folder written, or None.
        model: the trained model, in eval mode.
    """

    auc: float
    log_loss: float
    train_losses: tuple[float, ...]
    num_train_rows: int
    num_test_rows: int
    num_steps: int
    seconds: float
    checkpoint: Path | None
    model: DLRM = field(repr=False)


def train(
    dataset: Dataset,
    *,
    embedding_dim: int = 16,
    epochs: int = 1,
    batch_size: int = 512,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
    dense_lr: float = 5e-3,
    sparse_lr: float = 5e-2,
) -> TrainResult:
    """Train a DLRM on ``dataset`` and evaluate it on the rows held out.

    Adam on the MLPs, row-wise Adagrad with sparse gradients on the tables: a step costs time in proportion to the ids
    of its batch, not to the tables. The same arguments on the same machine give the same weights.

    Args:
        dataset: rows, contract and split.
        embedding_dim: columns of every table.
        epochs: passes over the training rows.
        batch_size: rows a step.
        seed: of the initial weights and of the order of the rows.
        out: folder of the checkpoint (model, optimizers, model.json with the contract); None writes none.
        progress: show a progress bar on stderr.
        dense_lr: peak learning rate of the MLPs.
        sparse_lr: peak learning rate of the tables.

    Raises:
        ConfigError: settings below 1, a contract without labels, a loss that is no longer finite.
        InputError: values that the contract refuses, or a split with no rows.
        CheckpointError: ``out`` holds something that is no checkpoint (found before training).
    """
    started = time.perf_counter()
    if min(epochs, batch_size, embedding_dim) < 1:
        raise ConfigError(
            f"epochs={epochs}, batch_size={batch_size}, embedding_dim={embedding_dim}; expected at least 1"
        )
    if out is not None:
        check_target(out)
    examples = _examples(dataset, dataset.train, "training")
    held_out = _examples(dataset, dataset.test, "held-out")
    model = build_dlrm(dataset.contract, embedding_dim=embedding_dim, seed=seed)
    start_at_rate(model, float(examples.labels.mean()))
    optimizers = _optimizers(model, dense_lr, sparse_lr)
    num_steps = epochs * math.ceil(len(examples) / batch_size)
    with _threads_for(batch_size):
        with training_progress(num_steps, show=progress) as report, sparse_gradients(model):
            losses = _fit(model, optimizers, examples, epochs, batch_size, num_steps, seed, report)
        model.eval()
        logits = predict_logits(model, held_out)
    labels = held_out.labels.numpy()
    result_auc, result_loss = auc(labels, logits), log_loss(labels, sigmoid(logits))
    seconds = time.perf_counter() - started
    checkpoint = None
    if out is not None:
        checkpoint = save_checkpoint(
            out, model, optimizer=optimizers, contract=dataset.contract, model_name=dataset.name
        )
    return TrainResult(
        result_auc, result_loss, losses, len(examples), len(held_out), num_steps, seconds, checkpoint, model
    )


@torch.inference_mode()
def predict_logits(model: nn.Module, examples: Examples) -> NDArray[np.float32]:
    """The logits ``[N]`` of ``model`` (one an example) for all examples, in order."""
    found = [
        model(batch.dense_features, batch.sparse_features).reshape(-1) for batch in examples.batches(_EVALUATION_BATCH)
    ]
    return torch.cat(found).float().numpy()


@contextmanager
def _threads_for(batch_size: int) -> Iterator[None]:
    """One thread for small batches: their operators take microseconds, and waiting for a second thread takes longer.

    On two busy cores a step of 512 rows is 20 times slower with two threads; on idle ones it is a third faster. The
    results then do not depend on the number of cores either.
    """
    before = torch.get_num_threads()
    if batch_size <= _SMALL_BATCH:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _examples(dataset: Dataset, rows: NDArray[np.int64], what: str) -> Examples:
    if not len(rows):
        raise InputError(f"{dataset.name}: no {what} rows; expected at least 1, give more data")
    return Examples.from_columns(dataset.contract, dataset.take(rows))


def _optimizers(model: DLRM, dense_lr: float, sparse_lr: float) -> list[torch.optim.Optimizer]:
    tables = list(model.sparse_arch.parameters())
    of_tables = {id(p) for p in tables}
    rest = [p for p in model.parameters() if id(p) not in of_tables]
    return [torch.optim.Adam(rest, lr=dense_lr), RowWiseAdagrad(tables, lr=sparse_lr)]


def _fit(
    model: DLRM,
    optimizers: list[torch.optim.Optimizer],
    examples: Examples,
    epochs: int,
    batch_size: int,
    num_steps: int,
    seed: int,
    report: Report,
) -> tuple[float, ...]:
    """The steps; gives the mean loss of each epoch."""
    with_loss = DLRMTrain(model).train()
    generator = torch.Generator().manual_seed(seed)
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, _rate(num_steps)) for o in optimizers]
    losses = []
    for epoch in range(epochs):
        total = 0.0
        for batch in examples.batches(batch_size, generator):
            loss = _step(with_loss, optimizers, batch)
            for schedule in schedules:
                schedule.step()
            if not math.isfinite(loss):
                raise ConfigError(f"the training loss is {loss} in epoch {epoch + 1}; lower dense_lr or sparse_lr")
            total += loss * batch.labels.numel()
            report(epoch + 1, loss)
        losses.append(total / len(examples))
    return tuple(losses)


def _step(with_loss: DLRMTrain, optimizers: list[torch.optim.Optimizer], batch: Batch) -> float:
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=True)
    loss, _ = with_loss(batch)
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.item()


def _rate(num_steps: int) -> Callable[[int], float]:
    """Part of the peak learning rate at each step: up in a line, then down to 0 in a line."""
    warmup = max(1, round(_WARMUP * num_steps))
    return lambda step: min((step + 1) / warmup, max(0.0, (num_steps - step) / max(1, num_steps - warmup)), 1.0)
