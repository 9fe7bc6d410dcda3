"""What a model asks of hosts: bytes of its messages and tables, and CPU of its lookups and its dense program."""

from __future__ import annotations

import statistics
import time
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from recinfer.archive.dense import open_dense
from recinfer.archive.manifest import DenseInput, Manifest
from recinfer.archive.reader import Archive
from recinfer.distributed.planner.calibration import HardwareProfile
from recinfer.distributed.planner.inference import plan_inference
from recinfer.distributed.planner.plan import Plan
from recinfer.distributed.planner.types import ParameterConstraints
from recinfer.errors import ConfigError
from recinfer.inference.reshard import embedding_model
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.packing import row_bytes

__all__ = ["Curve", "Model", "Shard", "Shards", "measure_dense", "shards_of"]

_LADDER = (1, 4, 16, 64, 256, 1024, 4096)
_DENSE_LADDER = (1, 8, 64, 512)
# Without a measured profile: what a call and a feature cost on the machine that this was written on.
_TYPICAL_CALL_S, _TYPICAL_FEATURE_S = 8e-6, 0.4e-6
_MESSAGE_BYTES = 64  # of a message beside its arrays
_KEY_BYTES = 8  # of a feature's name in it


@dataclass(frozen=True)
class Curve:
    """Seconds by samples: linear between the points, in proportion beyond the last."""

    samples: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, samples: float) -> float:
        """Seconds of a run of so many samples."""
        points, values = self.samples, self.seconds
        if samples <= points[0]:
            return values[0]
        if samples >= points[-1]:
            return values[-1] * samples / points[-1]
        i = bisect_right(points, samples) - 1
        share = (samples - points[i]) / (points[i + 1] - points[i])
        return values[i] + share * (values[i + 1] - values[i])


@dataclass(frozen=True)
class Model:
    """What of an archive matters here.

    Attributes:
        ids: mean ids a sample, by feature.
        dim: columns of all its features' vectors together.
        num_dense, num_outputs: numbers a sample that Predict takes beside ids, and gives.
        predicts: requests are Predict, else Lookup.
        dense: of the dense program, by samples.
    """

    manifest: Manifest
    ids: Mapping[str, float]
    dim: int
    num_dense: int
    num_outputs: int
    predicts: bool
    dense: Curve

    @classmethod
    def of(cls, manifest: Manifest, ids: Mapping[str, float], dense: Curve | None) -> Model:
        """``ids`` beyond one a sample; a dense program's curve where requests are to be Predict."""
        names = list(manifest.feature_tables)
        outputs = sum(int(np.prod(o.shape)) for o in manifest.dense.outputs) if manifest.dense else 0
        return cls(
            manifest,
            {name: float(ids.get(name, 1.0)) for name in names},
            sum(t.dim for tables in manifest.feature_tables.values() for t in tables),
            manifest.dense.num_dense if manifest.dense else 0,
            outputs,
            dense is not None,
            dense or Curve((1.0, 2.0), (0.0, 0.0)),
        )

    @property
    def ids_per_sample(self) -> float:
        """Over all features."""
        return sum(self.ids.values())

    def request_bytes(self, samples: int, ids: int) -> float:
        """Of a request: lengths and ids as the wire has them, and the dense inputs."""
        features = len(self.ids)
        dense = 4 * self.num_dense * samples if self.predicts else 0
        return _MESSAGE_BYTES + _KEY_BYTES * features + 4 * features * samples + 8 * ids + dense

    def answer_bytes(self, samples: int) -> float:
        """Of its answer."""
        return _MESSAGE_BYTES + 4 * samples * (self.num_outputs if self.predicts else self.dim)


@dataclass(frozen=True)
class Shard:
    """One rank of a plan.

    Attributes:
        bytes: of its packed rows.
        streams: features (or ranges of a feature's rows) that it is sent.
        ids: mean ids a sample that it is sent.
        vector_bytes: of what it gives back for a sample: rows as they are stored where a bag mostly holds one id, else sums.
        lookup: CPU of the op, by samples.
    """

    bytes: int
    streams: int
    ids: float
    vector_bytes: float
    lookup: Curve

    def request_bytes(self, samples: float) -> float:
        """Of a ShardRequest: ids are int32, lengths a byte each, none where every bag has one id."""
        lengths = 0.0 if self.ids == self.streams else self.streams * samples
        return _MESSAGE_BYTES + lengths + 4 * self.ids * samples

    def answer_bytes(self, samples: float) -> float:
        """Of its answer."""
        return _MESSAGE_BYTES + samples * self.vector_bytes


@dataclass(frozen=True)
class Shards:
    """A plan of the archive's tables over some ranks, in one precision."""

    plan: Plan
    precision: str
    ranks: tuple[Shard, ...]

    @property
    def bytes(self) -> int:
        """Of all packed rows."""
        return sum(rank.bytes for rank in self.ranks)


def shards_of(
    model: Model,
    num: int,
    *,
    precision: str | None = None,
    hardware: HardwareProfile | None = None,
    memory_bytes: float | None = None,
) -> Shards:
    """Plan the tables for ``num`` ranks, and say what each rank costs.

    Args:
        precision: of all tables; None: as they are stored.
        memory_bytes: of a rank for its tables.

    Raises:
        PlannerError: they do not fit.
    """
    manifest = model.manifest
    stored = {table.name: table.data_type for table in manifest.tables}
    chosen = stored if precision is None else dict.fromkeys(stored, DataType.parse(precision))
    tables = embedding_model(manifest)
    limits = {
        table.name: ParameterConstraints(pooling_factors=[max(model.ids[f], 1e-3) for f in table.features])
        for table in manifest.tables
    }

    def planned(batch: int, pinned: Plan | None = None) -> Plan:
        return plan_inference(
            tables,
            world_size=num,
            per_table_precision=chosen,
            ddr_gb=None if memory_bytes is None else memory_bytes / 2**30,
            batch_size=batch,
            constraints=limits,
            hardware=hardware,
            pinned=pinned,
        )

    plan = planned(64)
    by_batch = np.array([planned(batch, plan).estimates["perf_ms_per_rank"] for batch in _LADDER]) / 1e3
    shards = []
    for rank in range(num):
        num_bytes, streams, ids, vector_bytes = _of_rank(plan, rank, model)
        call = hardware.call_ms / 1e3 if hardware else _TYPICAL_CALL_S + _TYPICAL_FEATURE_S * streams
        seconds = np.maximum.accumulate(by_batch[:, rank]) + (call if streams else 0.0)
        curve = Curve(tuple(float(b) for b in _LADDER), tuple(seconds.tolist()))
        shards.append(Shard(num_bytes, streams, ids, vector_bytes, curve))
    return Shards(plan, precision or manifest.precision, tuple(shards))


def _of_rank(plan: Plan, rank: int, model: Model) -> tuple[int, int, float, float]:
    """(bytes, streams, ids a sample, bytes of a sample's vectors) of one rank."""
    features = {(t.module, t.name): t.features for t in model.manifest.tables}
    num_bytes, vector_bytes, ids = 0, 0.0, 0.0
    streams = set()
    for table in plan.tables:
        for shard in table.shards:
            if shard.rank != rank or not shard.rows:
                continue
            stored = row_bytes(shard.cols, DataType.parse(str(table.precision)))
            num_bytes += shard.rows * stored
            for feature in features[table.module, table.table]:
                stream = (feature, shard.row_start, shard.row_stop)
                here = model.ids[feature] * shard.rows / table.num_embeddings
                sums = 4.0 * shard.cols
                vector_bytes += sums if model.ids[feature] > 1 else min(sums, stored * here)
                if stream not in streams:
                    streams.add(stream)
                    ids += here
    return num_bytes, len(streams), ids, vector_bytes


def measure_dense(archive: Archive, seconds: float = 0.15) -> Curve:
    """Seconds of the archive's dense program here, by samples, on one thread; what its inputs hold changes nothing."""
    inputs_of = _inputs(archive)
    assert archive.manifest.dense is not None
    engine = open_dense(archive, archive.manifest.dense)
    found = []
    for batch in _DENSE_LADDER:
        inputs = [_dense_input(item.kind, item.dim, batch) for item in inputs_of]
        times: list[float] = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(times) < 3:
            begin = time.perf_counter()
            engine(inputs)
            times.append(time.perf_counter() - begin)
        found.append(statistics.median(times))
    values: list[float] = np.maximum.accumulate(found).tolist()
    return Curve(tuple(float(b) for b in _DENSE_LADDER), tuple(values))


def _inputs(archive: Archive) -> tuple[DenseInput, ...]:
    dense = archive.manifest.dense
    if dense is None:
        raise ConfigError(f"{archive.manifest.model}: it has no dense part, so requests can only be lookups")
    return dense.inputs


def _dense_input(kind: str, dim: int, batch: int) -> torch.Tensor:
    if kind == "lengths":
        return torch.ones(batch, dtype=torch.int64)
    return torch.zeros(batch, dim)
