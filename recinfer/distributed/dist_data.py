"""Inputs to the ranks that have the tables, outputs to the ranks that have the examples, as modules.

Between processes :mod:`recinfer.distributed.dist_kjt` moves features and :mod:`recinfer.distributed.dist_outputs`
embeddings; :mod:`recinfer.distributed.dist_one` moves both between the devices of one process.
"""

from __future__ import annotations

from recinfer.distributed.dist_kjt import KJTAllToAll, KJTAllToAllSplitsAwaitable, SplitsAllToAllAwaitable
from recinfer.distributed.dist_one import (
    EmbeddingsAllToOne,
    EmbeddingsAllToOneReduce,
    KJTOneToAll,
    SeqEmbeddingsAllToOne,
)
from recinfer.distributed.dist_outputs import (
    PooledEmbeddingsAllGather,
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter,
    SequenceEmbeddingsAllToAll,
    SequenceEmbeddingsAwaitable,
    VariableBatchPooledEmbeddingsAllToAll,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from recinfer.distributed.dist_tensors import KJTAllToAllTensorsAwaitable

__all__ = [
    "EmbeddingsAllToOne",
    "EmbeddingsAllToOneReduce",
    "KJTAllToAll",
    "KJTAllToAllSplitsAwaitable",
    "KJTAllToAllTensorsAwaitable",
    "KJTOneToAll",
    "PooledEmbeddingsAllGather",
    "PooledEmbeddingsAllToAll",
    "PooledEmbeddingsAwaitable",
    "PooledEmbeddingsReduceScatter",
    "SeqEmbeddingsAllToOne",
    "SequenceEmbeddingsAllToAll",
    "SequenceEmbeddingsAwaitable",
    "SplitsAllToAllAwaitable",
    "VariableBatchPooledEmbeddingsAllToAll",
    "VariableBatchPooledEmbeddingsReduceScatter",
]
