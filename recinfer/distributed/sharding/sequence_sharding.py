"""The documented place of the context of unpooled tables."""

from __future__ import annotations

from recinfer.distributed.exchange.sequence import SequenceShardingContext

__all__ = ["SequenceShardingContext"]
