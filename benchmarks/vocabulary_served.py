"""One lookup from a request's bytes with vocabularies and without, in turn."""

from __future__ import annotations

import functools
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner.inference import plan_inference
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import Predictor, load
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.serving.engine.byte_path import lookup_now
from recinfer.serving.engine.decoded_path import InferenceService
from recinfer.serving.engine.plain import PlainReader
from recinfer.serving.engine.registry import ModelRegistry
from recinfer.serving.wire import codec
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.vocabulary.table import TableVocabulary, even_segments

__all__ = ["compare"]

_FEATURES, _ROWS, _DIM = 26, 100_000, 64


@functools.cache
def _predictors() -> tuple[Predictor, Predictor, list[np.ndarray]]:
    """Two archives of the same rows, without and with vocabularies, and the ids of each table."""
    rng = np.random.default_rng(0)
    tables = [EmbeddingBagConfig(_ROWS, _DIM, f"t{i}", feature_names=[f"f{i}"]) for i in range(_FEATURES)]
    model = EmbeddingBagCollection(tables=tables)
    folder = Path(tempfile.mkdtemp())
    torch.save(model.state_dict(), folder / "weights.pt")
    reader = CheckpointReader(folder / "weights.pt")
    precisions = {table.name: DataType.INT8 for table in tables}
    plan = plan_inference(model, world_size=1, compute_device="cpu", per_table_precision=precisions)
    ids = [rng.permutation(np.unique(rng.integers(0, 2**62, 2 * _ROWS)))[:_ROWS] for _ in tables]
    made = {
        ("", f"t{i}"): TableVocabulary(each, np.arange(_ROWS), _ROWS, even_segments(_ROWS, 1), 2**62)
        for i, each in enumerate(ids)
    }
    options = {"name": "m", "version": "1", "progress": False}
    for name, vocabularies in (("plain", None), ("raw", made)):
        export_archive(model, reader, plan, folder / f"{name}.rqa", vocabularies=vocabularies, **options)  # type: ignore[arg-type]
    return load(folder / "plain.rqa"), load(folder / "raw.rqa"), ids


def compare(batch: int, rounds: int) -> float:
    """Time of a lookup with vocabularies over the time without: medians of rounds in turn."""
    plain, raw, ids = _predictors()
    services = [InferenceService(ModelRegistry({"m": predictor})) for predictor in (plain, raw)]
    readers = [PlainReader(service.registry, service.limits) for service in services]
    rng = np.random.default_rng(batch)
    keys = [f"f{i}" for i in range(_FEATURES)]
    lengths = torch.ones(_FEATURES * batch, dtype=torch.int32)
    times: list[list[float]] = [[], []]
    for _ in range(rounds):
        rows = rng.integers(0, _ROWS, (_FEATURES, batch))
        given = rows, np.stack([each[row] for each, row in zip(ids, rows)])
        for at, (reader, service) in enumerate(zip(readers, services)):
            data = codec.encode_lookup_request(
                KeyedJaggedTensor(keys, torch.from_numpy(given[at].reshape(-1)), lengths=lengths)
            )
            start = time.thread_time_ns()
            request = reader.read(data)
            assert request is not None
            lookup_now(request, service.stats)
            times[at].append(time.thread_time_ns() - start)
    return float(np.median(times[1]) / np.median(times[0]))
