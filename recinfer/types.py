""":class:`DataType` under TorchRec's module name."""

from __future__ import annotations

from recinfer.modules.embedding_configs import DataType

__all__ = ["DataType"]
