"""Modules that send inputs to the ranks that hold the tables, and outputs to the ranks that hold the examples.

Between processes :mod:`recinfer.distributed.exchange.kjt` moves features and :mod:`recinfer.distributed.exchange.outputs`
embeddings; :mod:`recinfer.distributed.exchange.devices` moves both between the devices of one process.
"""

from __future__ import annotations

from recinfer.distributed.exchange.devices import (
    EmbeddingsAllToOne,
    EmbeddingsAllToOneReduce,
    KJTOneToAll,
    SeqEmbeddingsAllToOne,
)
from recinfer.distributed.exchange.kjt import KJTAllToAll, KJTAllToAllSplitsAwaitable, SplitsAllToAllAwaitable
from recinfer.distributed.exchange.outputs import (
    PooledEmbeddingsAllGather,
    PooledEmbeddingsAllToAll,
    PooledEmbeddingsAwaitable,
    PooledEmbeddingsReduceScatter,
    SequenceEmbeddingsAllToAll,
    SequenceEmbeddingsAwaitable,
    VariableBatchPooledEmbeddingsAllToAll,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from recinfer.distributed.exchange.tensors import KJTAllToAllTensorsAwaitable

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
