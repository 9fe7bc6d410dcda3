"""Modules that change ids by their own state in front of an embedding collection, recinfer's or TorchRec's, found by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

__all__ = ["PRUNING", "has_no_rows", "remapped_tables", "remapping", "trained_id_bytes"]

PRUNING = "in-table pruning"
# Prefix of a class name of TorchRec's modules that change ids by their own state -> the change, as text.
_REMAPPING = {"ManagedCollision": "managed collisions", "ITEP": PRUNING}


def remapping(module: nn.Module) -> str | None:
    """The change of ids by ``module``, as text, or None."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return next((what for part, what in _REMAPPING.items() if any(n.startswith(part) for n in names)), None)


def has_no_rows(module: nn.Module) -> bool:
    """Whether ``module`` has the configs of tables, but not their rows: a ManagedCollisionCollection."""
    return any(kind.__name__ == "ManagedCollisionCollection" for kind in type(module).__mro__)


def remapped_tables(model: nn.Module) -> dict[int, Mapping[str, nn.Module]]:
    """``id`` of a collection whose tables take raw ids -> table -> the module that makes rows of its ids."""
    return {
        id(module._embedding_module): found
        for module in model.modules()
        if (found := _states(module)) and hasattr(module, "_embedding_module")
    }


def trained_id_bytes(module: nn.Module, table: str) -> float:
    """Bytes per row of what ``module`` keeps to make rows of a table's raw ids while it trains; 0 for tables that take rows."""
    states = _states(module)
    if table not in states:
        return 0.0
    state: Any = states[table]
    rows = state.output_size()
    tensors = [*state.parameters(), *state.buffers()]
    return sum(t.numel() * t.element_size() for t in tensors if t.dim() and t.shape[0] == rows) / rows


def _states(module: nn.Module) -> Mapping[str, Any]:
    """Table -> the module that makes rows of its raw ids, of a collection with managed collisions."""
    return getattr(getattr(module, "_managed_collision_collection", None), "_managed_collision_modules", {})
