"""Properties of a sharder that the planner reads: name, codecs, settings and kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from recinfer.distributed.types import CommOp, ModuleSharder
from recinfer.distributed.types.embedding_sharders import BaseEmbeddingSharder, BaseQuantEmbeddingSharder

__all__ = ["SharderData", "SharderDataMap", "StorageUsageType", "build_sharder_data_map", "codec_bytes", "sharder_name"]


class StorageUsageType(Enum):
    """Kinds of sharders, by how they compute the bytes of a table."""

    BASE_QUANT = "BaseQuantEmbeddingSharder"
    BASE = "BaseEmbeddingSharder"
    DEFAULT = "ModuleSharder"


@dataclass
class SharderData:
    """Properties of a sharder that estimators read, as plain data; see ``planner.utils.build_sharder_data_map``.

    Attributes:
        fused_params: the sharder's settings for its kernels.
        qcomm_dtype_sizes: ``CommOp`` name -> bytes of an element in the forward and in the backward collective, for
            collectives with a codec.
        storage_usage_type: kind of sharder.
    """

    fused_params: dict[str, Any]
    qcomm_dtype_sizes: dict[str, tuple[float, float]]
    storage_usage_type: StorageUsageType


SharderDataMap = dict[str, SharderData]  # by ``sharder_name(sharder.module_type)``


def sharder_name(t: type[Any]) -> str:
    """``module.Class`` of a type."""
    return f"{t.__module__}.{t.__name__}"


def codec_bytes(codec: Any) -> float | None:
    """Bytes of an element on the wire with a communication codec; None without a codec, or if the codec keeps
    float32."""
    dtype = getattr(codec, "quantized_dtype", None)
    dtype = dtype() if callable(dtype) else dtype  # quantized_dtype is a method of the no-op codec
    return None if dtype is None else float(dtype.itemsize)


def build_sharder_data_map(sharder_map: Mapping[str, ModuleSharder[Any]]) -> SharderDataMap:
    """The sharder data that TorchRec 1.8's estimators take: ``sharder_name(module_type)`` -> :class:`SharderData`."""
    return {name: _sharder_data(sharder) for name, sharder in sharder_map.items()}


def _sharder_data(sharder: ModuleSharder[Any]) -> SharderData:
    registry = sharder.qcomm_codecs_registry or {}
    sizes = {}
    for op in CommOp:
        codecs = registry.get(op.name)
        forward, backward = (
            codec_bytes(getattr(codecs, "forward", None)),
            codec_bytes(getattr(codecs, "backward", None)),
        )
        if forward is not None and backward is not None:
            sizes[op.name] = (forward, backward)
    kind = StorageUsageType.DEFAULT
    if isinstance(sharder, BaseQuantEmbeddingSharder):
        kind = StorageUsageType.BASE_QUANT
    elif isinstance(sharder, BaseEmbeddingSharder):
        kind = StorageUsageType.BASE
    return SharderData(dict(getattr(sharder, "fused_params", None) or {}), sizes, kind)
