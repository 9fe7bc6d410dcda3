"""Tensors of several features: KeyedJaggedTensor (ids), JaggedTensor (ids of one feature) and KeyedTensor (pooled
vectors)."""

from __future__ import annotations

from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
