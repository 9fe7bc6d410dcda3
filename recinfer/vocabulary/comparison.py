"""Compares three vocabularies of the same data: a row for each id, hashed ids, and raw ids with managed collisions."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from recinfer.checkpoint import check_target
from recinfer.data.features import SparseFeature
from recinfer.data.transforms import Hash
from recinfer.errors import ConfigError
from recinfer.models.dlrm import DLRM
from recinfer.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from recinfer.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from recinfer.training.loop import TrainSettings, fit
from recinfer.training.model import build_dlrm
from recinfer.training.sources import MemorySource

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract
    from recinfer.data.dataset import Dataset

__all__ = ["VocabularyResult", "compare_vocabularies", "managed_dlrm"]

_SMALL = 100  # tables of fewer rows stay as they are: their ids need no sharing
_DECISIONS = 20  # decisions which ids have rows, in a run
_RAW_IDS = 1 << 62


@dataclass(frozen=True)
class VocabularyResult:
    """Quality of one vocabulary on the held-out rows.

    Attributes:
        name: ``"full"``, ``"hashed"`` or ``"managed"``.
        rows: rows of all tables.
        auc, log_loss: of the held-out rows.
        ids_admitted, ids_evicted: raw ids that got a row and that lost theirs while training.
    """

    name: str
    rows: int
    auc: float
    log_loss: float
    ids_admitted: int = 0
    ids_evicted: int = 0


def compare_vocabularies(
    dataset: Dataset,
    *,
    share: float = 0.1,
    embedding_dim: int = 16,
    epochs: int = 1,
    batch_size: int = 512,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Iterator[VocabularyResult]:
    """Train the same DLRM three times, and yield each result: with a row for each id, with ids hashed to ``share`` of the rows,
    and with raw 64-bit ids of which the most frequent have rows, of as many.

    Args:
        dataset: rows, contract and split.
        share: rows of a large table, as a part of its ids.
        embedding_dim, epochs, batch_size, seed, progress: see :func:`recinfer.training.loop.train`.
        out: folder of the checkpoint of the model with raw ids; None writes none.

    Raises:
        ConfigError: ``share`` outside 0 to 1.
        CheckpointError: ``out`` holds files that are not a checkpoint (checked before training).
    """
    if not 0 < share < 1:
        raise ConfigError(f"share is {share}; expected a number between 0 and 1")
    if out is not None:
        check_target(out)
    rows = {
        feature.name: max(2, round(feature.num_embeddings * share))
        for feature in dataset.contract.sparse
        if feature.num_embeddings >= _SMALL
    }
    steps = epochs * -(-len(dataset.train) // batch_size)
    settings = TrainSettings(embedding_dim, epochs, seed)
    hashed = {name: Hash(size, seed=0) for name, size in rows.items()}
    raw = {name: Hash(_RAW_IDS, seed=0) for name in rows}
    for name, transforms in (("full", {}), ("hashed", hashed), ("managed", raw)):
        sparse = tuple(_with(feature, transforms.get(feature.name)) for feature in dataset.contract.sparse)
        contract = replace(dataset.contract, sparse=sparse)
        source = MemorySource(replace(dataset, contract=contract), batch_size, seed=seed)
        model, target = None, None
        if name == "managed":
            every = max(1, steps // _DECISIONS)
            model, target = managed_dlrm(contract, rows, every, embedding_dim=embedding_dim, seed=seed), out
        result = fit(source, settings, model=model, out=target, progress=progress)
        total = sum(table.shape[0] for name, table in result.model.named_parameters() if "embedding_bags" in name)
        yield VocabularyResult(name, total, result.auc, result.log_loss, result.ids_admitted, result.ids_evicted)


def managed_dlrm(
    contract: FeatureContract,
    rows: Mapping[str, int],
    eviction_interval: int,
    *,
    embedding_dim: int = 16,
    seed: int = 0,
) -> DLRM:
    """A DLRM with new weights, whose tables all take raw ids and admit them by how often they occur.

    Args:
        contract: its ids are the raw ids.
        rows: feature -> rows of its table, of which the last is that of all ids without a row; the table of a feature that is
            not in it has a row for each id and one for unknown ids.
        eviction_interval: batches between two decisions which ids have rows, in tables of ``rows``.
        embedding_dim, seed: see :func:`recinfer.training.model.build_dlrm`.
    """
    sizes = [SparseFeature(f.name, Hash(rows.get(f.name, f.num_embeddings + 1))) for f in contract.sparse]
    model = build_dlrm(replace(contract, sparse=tuple(sizes)), embedding_dim=embedding_dim, seed=seed)
    arch: Any = model.sparse_arch
    collection = arch.embedding_bag_collection
    tables = collection.embedding_bag_configs()
    modules: dict[str, ManagedCollisionModule] = {
        table.name: MCHManagedCollisionModule(
            zch_size=table.num_embeddings,
            device=collection.device,
            eviction_policy=LFU_EvictionPolicy(),
            eviction_interval=eviction_interval if feature.name in rows else 1,
            input_hash_size=feature.num_embeddings,
            name=table.name,
        )
        for table, feature in zip(tables, contract.sparse)
    }
    collisions = ManagedCollisionCollection(modules, tables)
    arch.embedding_bag_collection = ManagedCollisionEmbeddingBagCollection(collection, collisions)
    return model


def _with(feature: SparseFeature, transform: Hash | None) -> SparseFeature:
    return feature if transform is None else replace(feature, transform=transform)
