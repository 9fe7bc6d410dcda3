"""Ragged data of many features: KeyedJaggedTensor (ids), JaggedTensor (one feature), KeyedTensor (pooled vectors)."""

from __future__ import annotations

from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
