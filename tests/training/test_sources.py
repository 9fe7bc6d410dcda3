"""Batches of a rank: every rank its share of the same global batches, from memory and from files."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch

from recinfer.data import load_dataset
from recinfer.data.criteo import DENSE, LABEL, SPARSE
from recinfer.data.dataset import Dataset
from recinfer.data.tables import write_csv
from recinfer.training import sources
from recinfer.training.batches import Batch
from recinfer.training.sources import BatchSource, FileSource, MemorySource

ROWS = 700


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return load_dataset(None, "synthetic", limit=ROWS, seed=2)


@pytest.fixture(scope="module")
def file(dataset: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.csv"
    write_csv(path, {name: dataset.columns[name] for name in (LABEL, *DENSE, *SPARSE)})
    return path


def source(kind: str, dataset: Dataset, file: Path, batch_size: int, rank: int = 0, world_size: int = 1) -> BatchSource:
    if kind == "memory":
        return MemorySource(dataset, batch_size, seed=5, rank=rank, world_size=world_size)
    return FileSource(file, "criteo", dataset.contract, batch_size, seed=5, rank=rank, world_size=world_size)


def rows(batches: list[Batch]) -> list[bytes]:
    return [row.numpy().tobytes() for batch in batches for row in batch.dense_features]


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_share_the_batches_of_one(
    kind: str, world_size: int, dataset: Dataset, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_SHUFFLE_ROWS", 100)
    alone = list(source(kind, dataset, file, 16 * world_size).batches(1))
    parts = [list(source(kind, dataset, file, 16, rank, world_size).batches(1)) for rank in range(world_size)]
    assert len({len(p) for p in parts}) == 1
    assert len(parts[0]) == len(alone) - (kind == "file")  # files: the last batch is not whole
    for step in range(len(parts[0])):
        together = [p[step] for p in parts]
        assert rows(together) == rows([alone[step]])
        assert torch.cat([b.labels for b in together]).equal(alone[step].labels)
        key = dataset.contract.feature_names[3]
        joined = torch.cat([b.sparse_features[key].values() for b in together])
        assert joined.equal(alone[step].sparse_features[key].values())


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_pass_holds_every_training_row_once_and_no_other(kind: str, dataset: Dataset, file: Path) -> None:
    made = source(kind, dataset, file, 32)
    trained, held = rows(list(made.batches(0))), rows(list(made.held_out()))
    assert len(trained) == made.num_train_rows == made.steps_per_epoch * 32 - (-len(trained) % 32)
    assert len(trained) + len(held) == ROWS
    whole = dataset.contract.apply(dataset.columns)[0]
    assert sorted(trained + held) == sorted(row.numpy().tobytes() for row in whole)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_held_out_rows_are_shared_out(kind: str, dataset: Dataset, file: Path) -> None:
    alone = rows(list(source(kind, dataset, file, 8).held_out()))
    parts = [r for rank in range(3) for r in rows(list(source(kind, dataset, file, 8, rank, 3).held_out()))]
    assert sorted(parts) == sorted(alone)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_skipping_steps_goes_on_where_a_run_stopped(
    kind: str, dataset: Dataset, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_SHUFFLE_ROWS", 100)
    whole = list(source(kind, dataset, file, 16).batches(1))
    assert rows(list(source(kind, dataset, file, 16).batches(1, skip=7))) == rows(whole[7:])


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_passes_differ_in_order_and_repeat_for_a_seed(kind: str, dataset: Dataset, file: Path) -> None:
    first, second = (rows(list(source(kind, dataset, file, 16).batches(epoch))) for epoch in (0, 1))
    assert first != second and sorted(first) == sorted(second)
    assert first == rows(list(source(kind, dataset, file, 16).batches(0)))


def test_a_file_is_read_in_blocks(dataset: Dataset, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_SHUFFLE_ROWS", 64)
    made = FileSource(file, "criteo", dataset.contract, 16)
    sizes = []
    blocks = made._stream.blocks

    def counted(count: int, keep=None):
        for block in blocks(count, keep):
            sizes.append(len(block[LABEL]))
            yield block

    made._stream.blocks = counted  # type: ignore[method-assign]
    assert sum(b.labels.numel() for b in made.batches(0)) == made.num_train_rows
    assert max(sizes) < 100 and np.sum(sizes) == made.num_train_rows


def test_memory_does_not_grow_with_the_file(
    dataset: Dataset, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_SHUFFLE_ROWS", 500)
    header, *lines = file.read_text().splitlines(keepends=True)
    peaks = []
    for times in (2, 12):
        path = tmp_path / f"{times}.csv"
        path.write_text(header + "".join(lines) * times)
        made = FileSource(path, "criteo", dataset.contract, 16)
        next(made.batches(0))  # what is loaded once
        gc.collect()
        tracemalloc.start()
        count = sum(len(batch.labels) for batch in made.batches(0))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert count == made.num_train_rows
    assert peaks[1] < 1.3 * peaks[0]
