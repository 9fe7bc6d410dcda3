"""The description of a training run, and three ways to start it: in this process, on new ranks, on torchrun's ranks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recinfer import env
from recinfer.checkpoint import check_target
from recinfer.checkpoint.writer import partial_of
from recinfer.data.dataset import load_dataset
from recinfer.data.stream import RowStream, held_out_mask
from recinfer.errors import ConfigError, InputError
from recinfer.group_device import check_devices, device_and_backend
from recinfer.training.curve import Curve
from recinfer.training.launch import process_group, run_ranks
from recinfer.training.loop import TrainSettings, fit
from recinfer.training.sources import BatchSource, FileSource, MemorySource
from recinfer.training.start import Start, read_start
from recinfer.training.step_checkpoints import resume_folder

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract
    from recinfer.distributed.planner import Plan

__all__ = ["TrainJob", "TrainReport", "run_job"]

_STREAM_BYTES = 256 << 20  # parsed rows take several times the bytes of their text, on every rank
_CONTRACT_ROWS = 500_000  # rows that the feature contract is fitted to, if rows are streamed


@dataclass(frozen=True)
class TrainJob:
    """The settings of a training run; every field can be pickled.

    Attributes:
        out: checkpoint folder.
        data: a file or folder of rows; None for synthetic ones.
        format: ``criteo``, ``movielens`` or ``synthetic``.
        epochs, batch_size, embedding_dim, seed: see :class:`~recinfer.training.loop.TrainSettings`; the batch is a
            rank's.
        limit: use only that many rows.
        sharding: table -> sharding type.
        plan: a plan's file.
        stream: read rows from disk in every epoch; None decides by the file.
        metrics, plot: files for the learning curve.
        save_every, resume: step checkpoints.
        start_from: checkpoint of an earlier run to go on from; its contract and ``embedding_dim`` are used.
        device: ``cpu``, or ``cuda``: each rank on a GPU of its own.
    """

    out: Path
    data: Path | None = None
    format: str = "synthetic"
    epochs: int = 1
    batch_size: int = 512
    embedding_dim: int = 16
    limit: int | None = None
    seed: int = 0
    sharding: dict[str, str] = field(default_factory=dict)
    plan: Path | None = None
    stream: bool | None = None
    metrics: Path | None = None
    plot: Path | None = None
    save_every: int | None = None
    resume: bool = False
    start_from: Path | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class TrainReport:
    """The result of training as plain data; see :class:`~recinfer.training.loop.TrainResult`."""

    auc: float
    log_loss: float
    normalized_entropy: float
    train_losses: tuple[float, ...]
    num_train_rows: int
    num_test_rows: int
    num_steps: int
    ids_admitted: int
    ids_evicted: int
    samples_per_second: float
    world_size: int


def run_job(job: TrainJob, world_size: int = 1) -> TrainReport | None:
    """Train on the ranks of torchrun if this process is one of them, else on ``world_size`` ranks of this host.

    Returns:
        the report; None on every rank of torchrun but the first.

    Raises: as :func:`recinfer.training.loop.train`, and UnavailableError naming a rank that failed or a device
            that is missing.
    """
    check_target(job.out)
    if job.start_from is not None:
        read_start(job.start_from)  # a checkpoint that cannot be read ends the run before its ranks start
    if env.torchrun_rank() is None:
        check_devices(job.device, world_size)
    if (job.plan is not None or job.sharding) and world_size == 1 and env.torchrun_rank() is None:
        raise ConfigError(
            "--sharding and --plan need ranks to shard over; give --world-size 2 or more, or use torchrun"
        )
    if job.plan is not None:
        _plan(job.plan)  # a plan that cannot be read ends the run before its ranks start
    if env.torchrun_rank() is not None:
        return _on_rank(job)
    if world_size > 1:
        return _on_new_ranks(job, world_size, _on_rank)
    return _train(job, 0, 1)


def _on_new_ranks(job: TrainJob, world_size: int, function: Callable[[TrainJob], TrainReport | None]) -> TrainReport:
    """Run ``function`` on ranks of this host; removes a checkpoint that they were writing when they were stopped."""
    try:
        report: TrainReport = run_ranks(world_size, function, job)
        return report
    except BaseException:
        target = job.out.absolute()
        for partial in (partial_of(target), *resume_folder(target).glob(".step-*.partial")):
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _on_rank(job: TrainJob) -> TrainReport | None:
    with process_group(job.device) as (rank, world_size):
        report = _train(job, rank, world_size)
    return report if rank == 0 else None


def _plan(path: Path) -> Plan:
    from recinfer.distributed.planner import Plan

    return Plan.load(path)


def _train(job: TrainJob, rank: int, world_size: int) -> TrainReport:
    start = None if job.start_from is None else read_start(job.start_from)
    source = _source(job, start, rank, world_size)
    settings = TrainSettings(
        embedding_dim=job.embedding_dim if start is None else start.embedding_dim,
        epochs=job.epochs,
        seed=job.seed,
        sharding=job.sharding,
        plan=None if job.plan is None else _plan(job.plan),
        save_every=job.save_every,
        resume=job.resume,
        start_from=job.start_from,
        device=device_and_backend(job.device, rank, world_size)[0],
    )
    curve = Curve(job.metrics if rank == 0 else None)
    try:
        result = fit(source, settings, out=job.out, curve=curve)
    finally:
        if rank == 0 and job.plot is not None and curve.rows:
            curve.plot(job.plot)
    return TrainReport(
        result.auc,
        result.log_loss,
        result.normalized_entropy,
        result.train_losses,
        result.num_train_rows,
        result.num_test_rows,
        result.num_steps,
        result.ids_admitted,
        result.ids_evicted,
        result.samples_per_second,
        world_size,
    )


def _source(job: TrainJob, start: Start | None, rank: int, world_size: int) -> BatchSource:
    place = {"rank": rank, "world_size": world_size}
    if job.data is None or not _streams(job):
        dataset = load_dataset(job.data, job.format, limit=job.limit, seed=job.seed)
        if start is not None:
            dataset = replace(dataset, contract=start.contract, name=start.name)
        return MemorySource(dataset, job.batch_size, seed=job.seed, **place)
    contract, positive_rate = _fit_contract(job) if start is None else (start.contract, 0.5)
    source = FileSource(
        job.data, job.format, contract, job.batch_size,
        limit=job.limit, seed=job.seed, positive_rate=positive_rate, **place,
    )  # fmt: skip
    if start is not None:
        source.name = start.name
    return source


def _streams(job: TrainJob) -> bool:
    assert job.data is not None
    if job.stream is not None:
        return job.stream
    plain = job.data.is_file() and job.data.suffix not in (".gz", ".parquet", ".pq")
    return not plain or job.data.stat().st_size > _STREAM_BYTES


def _fit_contract(job: TrainJob) -> tuple[FeatureContract, float]:
    """The feature contract fitted to the first rows, and the share of their labels that is 1; the same on every
    rank."""
    from recinfer.data.criteo import criteo_contract
    from recinfer.data.movielens import movielens_contract

    assert job.data is not None
    rows = min(_CONTRACT_ROWS, job.limit or _CONTRACT_ROWS)

    def keep(first: int, count: int) -> np.ndarray:
        return np.flatnonzero(~held_out_mask(np.arange(first, first + count), 0.1, job.seed))

    columns = next(RowStream(job.data, job.format, rows).blocks(rows, keep), None)
    if columns is None or not len(next(iter(columns.values()))):
        raise InputError(f"{job.data}: no rows to train on; expected at least 2")
    contract = (movielens_contract if job.format == "movielens" else criteo_contract)(columns)
    return contract, float(contract.labels(columns).mean())
