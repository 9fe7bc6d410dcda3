"""Lookups of a served archive with vocabularies and of one of the same rows without, in turn."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import recinfer
from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner.inference import plan_inference
from recinfer.inference.export import export_archive
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.vocabulary.table import TableVocabulary, even_segments

__all__ = ["compare"]

_FEATURES, _ROWS, _DIM = 26, 100_000, 64


def _archives(folder: Path) -> list[NDArray[np.int64]]:
    """Write ``plain.rqa`` and ``raw.rqa``; returns the raw id of each row, by table."""
    rng = np.random.default_rng(0)
    tables = [EmbeddingBagConfig(_ROWS, _DIM, f"t{i}", feature_names=[f"f{i}"]) for i in range(_FEATURES)]
    model = EmbeddingBagCollection(tables=tables)
    torch.save(model.state_dict(), folder / "weights.pt")
    reader = CheckpointReader(folder / "weights.pt")
    precisions = {table.name: DataType.INT8 for table in tables}
    plan = plan_inference(model, world_size=1, compute_device="cpu", per_table_precision=precisions)
    ids = [rng.permutation(np.unique(rng.integers(0, 2**62, 2 * _ROWS)))[:_ROWS] for _ in tables]
    made = {
        ("", f"t{i}"): TableVocabulary(each, np.arange(_ROWS), _ROWS, even_segments(_ROWS, 1), 2**62)
        for i, each in enumerate(ids)
    }
    for name, vocabularies in (("plain", None), ("raw", made)):
        out = folder / f"{name}.rqa"
        export_archive(model, reader, plan, out, name="m", version="1", vocabularies=vocabularies, progress=False)
    return ids


def compare(batches: tuple[int, ...], rounds: int) -> dict[int, float]:
    """Batch -> time of a lookup with vocabularies over the time without: medians over gRPC, in turn."""
    keys = [f"f{i}" for i in range(_FEATURES)]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        ids = _archives(Path(folder))
        with recinfer.serve(f"{folder}/plain.rqa") as plain, recinfer.serve(f"{folder}/raw.rqa") as raw:
            clients = plain.client(), raw.client()
            for batch in batches:
                rng = np.random.default_rng(batch)
                lengths = torch.ones(_FEATURES * batch, dtype=torch.int32)
                times: list[list[float]] = [[], []]
                for _ in range(rounds):
                    rows = rng.integers(0, _ROWS, (_FEATURES, batch))
                    given = rows, np.stack([each[row] for each, row in zip(ids, rows)])
                    for at, client in enumerate(clients):
                        features = KeyedJaggedTensor(keys, torch.from_numpy(given[at].reshape(-1)), lengths=lengths)
                        start = time.perf_counter()
                        client.lookup(features)
                        times[at].append(time.perf_counter() - start)
                found[batch] = float(np.median(times[1]) / np.median(times[0]))
    return found
