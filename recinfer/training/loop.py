"""The training loop: trains a DLRM, evaluates it on held-out rows, and writes its learning curve and checkpoints.

The same loop runs in one process and on every rank of a process group (see :mod:`recinfer.training.launch`).
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recinfer.checkpoint import check_target
from recinfer.errors import CheckpointError, ConfigError
from recinfer.training.batches import Batch, empty_batch
from recinfer.training.curve import Curve
from recinfer.training.metrics import evaluate
from recinfer.training.model import build_dlrm, start_at_rate
from recinfer.training.progress import Report, training_progress
from recinfer.training.sources import BatchSource, MemorySource
from recinfer.training.start import read_start
from recinfer.training.step_checkpoints import StepCheckpoints, resume_folder
from recinfer.training.trainers import LocalTrainer, ShardedTrainer, Trainer

if TYPE_CHECKING:
    from recinfer.data.dataset import Dataset
    from recinfer.distributed.planner import Plan
    from recinfer.models.dlrm import DLRM

__all__ = ["TrainResult", "TrainSettings", "fit", "train"]

_SMALL_BATCH = 4096
_SMALL_TABLES = 1 << 28  # bytes
_WARMUP = 0.05  # share of the steps in which the learning rates rise; the rates then fall linearly to 0
_WARMUP_STEPS = 500  # steps of the rise if the number of steps is unknown; the rates then stay constant
_MOVES = "admitted", "evicted"
_CURVE_POINTS = 200  # approximate number of the curve's rows in a run


@dataclass(frozen=True)
class TrainSettings:
    """Settings of the training loop.

    Attributes:
        embedding_dim: columns of every table.
        epochs: passes over the training rows.
        seed: seed of the initial weights.
        dense_lr, sparse_lr: peak learning rates of the MLPs (Adam) and of the tables (row-wise Adagrad).
        sharding: on several ranks, table -> sharding type; ``"*"`` for all others. The planner chooses for other
            tables.
        plan: on several ranks, a sharding made before.
        save_every: steps between checkpoints of the run under way; None for none.
        resume: continue from the last of them.
        start_from: checkpoint whose weights and optimizer states the run starts with; None: new ones.
        device: device of this rank; None: the CPU.
    """

    embedding_dim: int = 16
    epochs: int = 1
    seed: int = 0
    dense_lr: float = 5e-3
    sparse_lr: float = 5e-2
    sharding: Mapping[str, str] = field(default_factory=dict)
    plan: Plan | None = None
    save_every: int | None = None
    resume: bool = False
    start_from: Path | None = None
    device: torch.device | None = None

    def __post_init__(self) -> None:
        if min(self.epochs, self.embedding_dim, self.save_every or 1) < 1:
            raise ConfigError(
                f"epochs={self.epochs}, embedding_dim={self.embedding_dim}, save_every={self.save_every}; expected at "
                "least 1"
            )


@dataclass(frozen=True)
class TrainResult:
    """The result of training.

    Attributes:
        auc: area under the ROC curve on the held-out rows; nan if they hold one class only.
        log_loss: mean log-loss on the held-out rows, natural logarithm.
        normalized_entropy: log-loss divided by that of a constant prediction of the mean; nan with only one class.
        train_losses: mean training loss of each epoch (of a resumed run, of the steps since).
        num_train_rows, num_test_rows: rows trained on in a pass, and rows held out.
        num_steps: updates made, those before a resume too.
        ids_admitted, ids_evicted: raw ids that got a row and that lost theirs in this run, in a model whose tables take raw ids.
        seconds: wall time of training and evaluation, without the checkpoint.
        samples_per_second: rows trained on a second, over all ranks.
        checkpoint: the folder written, or None.
        model: the trained model, in eval mode.
    """

    auc: float
    log_loss: float
    normalized_entropy: float
    train_losses: tuple[float, ...]
    num_train_rows: int
    num_test_rows: int
    num_steps: int
    ids_admitted: int
    ids_evicted: int
    seconds: float
    samples_per_second: float
    checkpoint: Path | None
    model: nn.Module = field(repr=False)


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
    start_from: str | os.PathLike[str] | None = None,
) -> TrainResult:
    """Train a DLRM on ``dataset`` in this process and evaluate it on the rows held out.

    Adam on the MLPs, row-wise Adagrad with sparse gradients on the tables: a step costs time in proportion to the ids
    of its batch, not to the tables. The same arguments on the same machine give the same weights.

    Args:
        dataset: rows, contract and split.
        embedding_dim: columns of every table.
        epochs: passes over the training rows.
        batch_size: rows per step.
        seed: seed of the initial weights and of the order of the rows.
        out: folder of the checkpoint (model, optimizers, model.json with the contract); None writes none.
        progress: show a progress bar on stderr.
        dense_lr: peak learning rate of the MLPs.
        sparse_lr: peak learning rate of the tables.
        start_from: checkpoint of an earlier training to go on from with these rows: its weights, optimizer states, feature
            contract, name and ``embedding_dim`` replace those of the arguments.

    Raises:
        ConfigError: settings below 1, a contract without labels, a loss that is no longer finite.
        InputError: values that the contract refuses, or a split with no rows.
        CheckpointError: ``out`` holds files that are not a checkpoint (checked before training); ``start_from`` is none of
            this loop's.
    """
    started = time.perf_counter()
    settings = TrainSettings(embedding_dim, epochs, seed, dense_lr, sparse_lr)
    if start_from is not None:
        start = read_start(start_from)
        dataset = replace(dataset, contract=start.contract, name=start.name)
        settings = replace(settings, embedding_dim=start.embedding_dim, start_from=Path(start_from))
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}; expected at least 1")
    if out is not None:
        check_target(out)
    source = MemorySource(dataset, batch_size, seed=seed)
    result = fit(source, settings, out=out, progress=progress)
    return replace(result, seconds=time.perf_counter() - started)


def fit(
    source: BatchSource,
    settings: TrainSettings,
    *,
    model: DLRM | None = None,
    out: str | os.PathLike[str] | None = None,
    curve: Curve | None = None,
    progress: bool = True,
) -> TrainResult:
    """Train on the batches of ``source``; on several ranks every rank calls it, in the default process group.

    Args:
        source: this rank's batches.
        settings: settings of the loop.
        model: the model to train; None: one of the settings, for the source's contract.
        out: folder of the checkpoint; None writes none. Checkpoints of the running training are in
            :func:`~recinfer.training.step_checkpoints.resume_folder` next to it and are removed when the run is done.
        curve: takes the losses and metrics; only the first rank's is used.
        progress: show a progress bar on stderr (first rank).

    Raises: as :func:`train`; CheckpointError too if there is nothing to resume from.
    """
    if out is not None:
        check_target(out)
    first = source.rank == 0
    run = _Run(source, settings, _trainer(source, settings, model), out, curve or Curve())
    with _threads_for(source.batch_size), torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)  # modules may draw numbers while they train
        if settings.resume:
            run.resume()
        elif settings.start_from is not None:
            run.trainer.load(settings.start_from)
        with training_progress(
            run.num_steps, show=progress and first, done=run.step, rows=source.global_batch
        ) as report:
            run.train(report)
        run.trainer.close()
        checkpoint = None
        if out is not None:
            checkpoint = run.trainer.save(Path(out), source.contract, source.name)
            run.forget()
    metrics = run.metrics
    return TrainResult(
        metrics["auc"],
        metrics["log_loss"],
        metrics["normalized_entropy"],
        tuple(run.losses),
        source.num_train_rows or 0,
        run.num_test_rows,
        run.step,
        run.moved.get("ids_admitted", 0),
        run.moved.get("ids_evicted", 0),
        run.seconds,
        run.rows * source.world_size / max(run.train_seconds, 1e-9),
        checkpoint,
        run.trainer.model,
    )


class _Run:
    """A running training on this rank."""

    def __init__(
        self,
        source: BatchSource,
        settings: TrainSettings,
        trainer: Trainer,
        out: str | os.PathLike[str] | None,
        curve: Curve,
    ) -> None:
        self.source = source
        self.settings = settings
        self.trainer = trainer
        self.curve = curve
        self.checkpoints = None if out is None else StepCheckpoints(resume_folder(out))
        self.epoch = self.step = self.skip = self.rows = 0
        self.losses: list[float] = []
        self.metrics: dict[str, float] = {}
        self.moved: dict[str, int] = {}
        self.num_test_rows = 0
        self.seconds = self.train_seconds = 0.0
        self.started = time.perf_counter()
        per_epoch = source.steps_per_epoch
        self.num_steps = None if per_epoch is None else settings.epochs * per_epoch
        self.curve_every = max(1, (self.num_steps or 20 * _CURVE_POINTS) // _CURVE_POINTS)

    # ---------------------------------------------------------------------------------------------- the loop

    def train(self, report: Report) -> None:
        """Run the remaining epochs, each with an evaluation at its end."""
        while self.epoch < self.settings.epochs:
            started = time.perf_counter()
            self.losses.append(self._pass(report))
            self.train_seconds += time.perf_counter() - started
            self.epoch, self.skip = self.epoch + 1, 0
            self._evaluate()
        if not self.metrics:  # a run that was resumed after its last pass
            self._evaluate()
        self.seconds = time.perf_counter() - self.started

    def _pass(self, report: Report) -> float:
        batches = self.source.batches(self.epoch, self.skip)
        total = recent = 0.0
        rows = recent_rows = 0
        while True:
            self.trainer.set_rate(_rate(self.step, self.num_steps))
            try:
                loss, count = self.trainer.step(batches)
            except StopIteration:
                break
            if not math.isfinite(loss):
                raise ConfigError(f"the training loss is {loss} in epoch {self.epoch + 1}; lower dense_lr or sparse_lr")
            self.step += 1
            self.skip += 1
            self.rows += count
            total, rows = total + loss * count, rows + count
            recent, recent_rows = recent + loss * count, recent_rows + count
            report(self.epoch + 1, loss)
            if self.step % self.curve_every == 0:
                self._point(recent / recent_rows)
                recent, recent_rows = 0.0, 0
            if self.settings.save_every and self.checkpoints and self.step % self.settings.save_every == 0:
                self._save()
        if recent_rows:
            self._point(recent / recent_rows)
        return total / rows if rows else math.nan

    def _point(self, loss: float) -> None:
        self.curve.add_step(self.step, self.epoch + 1, self.step * self.source.global_batch, loss)

    def _evaluate(self) -> None:
        self.num_test_rows = 0

        def scored() -> Iterator[tuple[Tensor, Tensor]]:
            for batch in _padded_held_out(self.source):
                self.num_test_rows += batch.labels.numel()
                yield self.trainer.logits(batch), batch.labels

        self.metrics = evaluate(scored())
        self.num_test_rows = int(_sum(self.num_test_rows))
        parts = [part for part in self.trainer.model.modules() if hasattr(part, "num_admitted")]
        if parts:
            self.moved = {f"ids_{what}": sum(getattr(part, f"num_{what}") for part in parts) for what in _MOVES}
        samples = self.step * self.source.global_batch
        self.curve.add_evaluation(self.step, self.epoch, samples, {**self.metrics, **self.moved})

    # ---------------------------------------------------------------------------------------------- checkpoints

    def _save(self) -> None:
        assert self.checkpoints is not None
        position = {
            "epoch": self.epoch,
            "step": self.step,
            "steps_in_epoch": self.skip,
            "global_batch": self.source.global_batch,
            "curve": self.curve.rows,
        }

        def save(target: Path) -> None:
            self.trainer.save(target, self.source.contract, self.source.name)

        self.checkpoints.add(self.step, save, position, first=self.source.rank == 0)

    def resume(self) -> None:
        """Continue from the last complete checkpoint of the run."""
        if self.checkpoints is None:
            raise CheckpointError("resume: a run without out has no checkpoints to continue from; give out")
        folder, position = self.checkpoints.last()
        if position["global_batch"] != self.source.global_batch:
            raise ConfigError(
                f"{folder}: was trained with {position['global_batch']} rows per step over all ranks, but this run "
                f"has {self.source.global_batch}; choose the batch size so that batch size x ranks is the same"
            )
        if position["epoch"] >= self.settings.epochs:
            raise ConfigError(
                f"{folder}: is of epoch {position['epoch'] + 1}, but this run has {self.settings.epochs}; train for more epochs"
            )
        self.trainer.load(folder)
        self.epoch, self.step, self.skip = position["epoch"], position["step"], position["steps_in_epoch"]
        self.curve.restore(position["curve"])

    def forget(self) -> None:
        """Remove the step checkpoints of the finished run."""
        if self.source.rank == 0 and self.checkpoints is not None:
            self.checkpoints.forget()


def _trainer(source: BatchSource, settings: TrainSettings, model: DLRM | None) -> Trainer:
    sharded = dist.is_available() and dist.is_initialized()
    if source.world_size > 1 and not sharded:
        raise ConfigError(
            f"the source is for {source.world_size} ranks, but there is no process group; start the ranks with "
            "recinfer.training.launch or torchrun"
        )
    # Every rank creates small tables whole, so that any number of ranks starts from the same values; large tables are
    # created shard by shard.
    num_bytes = 4 * settings.embedding_dim * sum(f.num_embeddings for f in source.contract.sparse)
    device = torch.device("meta" if sharded and num_bytes > _SMALL_TABLES else "cpu")
    if model is None and settings.start_from is not None:
        model = read_start(settings.start_from).build_model(device)
    elif model is None:
        model = build_dlrm(
            source.contract, embedding_dim=settings.embedding_dim, seed=settings.seed, table_device=device
        )
    start_at_rate(model, source.positive_rate)
    rates = settings.dense_lr, settings.sparse_lr
    if not sharded:
        return LocalTrainer(model, *rates, settings.device)
    return ShardedTrainer(
        model,
        *rates,
        plan=settings.plan,
        sharding=settings.sharding,
        batch_size=source.batch_size,
        device=settings.device,
    )


def _padded_held_out(source: BatchSource) -> Iterator[Batch]:
    """The held-out batches of this rank, then empty batches while other ranks have more, because lookups are
    collective."""
    batches = source.held_out()
    while True:
        batch = next(batches, None)
        if not _sum(0 if batch is None else 1):
            return
        yield empty_batch(source.contract) if batch is None else batch


def _sum(value: int) -> int:
    """The sum over all ranks."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    total = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(total)
    return int(total)


@contextmanager
def _threads_for(batch_size: int) -> Iterator[None]:
    """Number of threads: one for small batches, whose operators take less time than waking a second thread.

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


def _rate(step: int, num_steps: int | None) -> float:
    """Fraction of the peak learning rate at a step: linear warm-up, then linear decay to 0 (or constant, if the number
    of steps is unknown)."""
    if num_steps is None:
        return min(1.0, (step + 1) / _WARMUP_STEPS)
    warmup = max(1, round(_WARMUP * num_steps))
    return min((step + 1) / warmup, max(0.0, (num_steps - step) / max(1, num_steps - warmup)), 1.0)
