"""Re-exports the context of unpooled tables under TorchRec's module name."""

from __future__ import annotations

from recinfer.distributed.exchange.sequence import SequenceShardingContext

__all__ = ["SequenceShardingContext"]
