"""Modules that change ids by their own state in front of an embedding collection, recinfer's or TorchRec's.

They are found by their names. Their settings are plain data, as capture files and ``model.json`` hold them, from which a module
for lookups is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.modules.hash_mc_modules import HashZchManagedCollisionModule
from recinfer.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from recinfer.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)

__all__ = [
    "PRUNING",
    "SETTINGS",
    "SHARDERS",
    "add_remapping",
    "has_no_rows",
    "managed_collision_module",
    "remapped",
    "remapped_tables",
    "remapping",
    "remapping_settings",
    "trained_id_bytes",
    "untrainable_tables",
    "without_remapping",
]

PRUNING = "in-table pruning"
# Prefix of a class name of TorchRec's modules that change ids by their own state -> the change, as text.
_REMAPPING = {"ManagedCollision": "managed collisions", "ITEP": PRUNING}
_COLLECTION = "_managed_collision_collection"
_POLICIES = {kind.__name__: kind for kind in (DistanceLFU_EvictionPolicy, LFU_EvictionPolicy, LRU_EvictionPolicy)}

SETTINGS = "managed_collisions"
"""The key of a model's config in ``model.json`` that has :func:`remapping_settings`."""
SHARDERS = (
    ("recinfer.distributed.mc_embeddingbag", "ManagedCollisionEmbeddingBagCollectionSharder"),
    ("recinfer.distributed.mc_embedding", "ManagedCollisionEmbeddingCollectionSharder"),
)
"""Module and class of each sharder of these modules."""


# ---- in a model


def remapping(module: nn.Module) -> str | None:
    """The change of ids by ``module``, as text, or None."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return next((what for part, what in _REMAPPING.items() if any(n.startswith(part) for n in names)), None)


def has_no_rows(module: nn.Module) -> bool:
    """Whether ``module`` has the configs of tables, but not their rows: a ManagedCollisionCollection."""
    return any(kind.__name__ == "ManagedCollisionCollection" for kind in type(module).__mro__)


def without_remapping(module: nn.Module) -> nn.Module:
    """The collection behind ``module``; ``module`` itself if it is a collection whose ids are rows."""
    return module._embedding_module if _states(module) else module  # type: ignore[return-value]


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
    return getattr(getattr(module, _COLLECTION, None), "_managed_collision_modules", {})


# ---- as plain data


def remapping_settings(module: nn.Module) -> dict[str, dict[str, Any]]:
    """Table -> the settings of the module that makes rows of its raw ids; empty where ids are rows.

    Raises:
        CaptureError: a module whose lookups depend on more, such as a function that hashes the ids.
    """
    from recinfer.capture import collision_settings  # a planner needs no traces

    tables: Any = without_remapping(module)
    rows = {table.name: table.num_embeddings for table in tables.embedding_bag_configs()}
    return {  # a module of one rank has other rows than its table
        table: {**collision_settings(state), **_training_settings(state), "zch_size": rows[table]}
        for table, state in _states(module).items()
    }


def untrainable_tables(settings: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The tables whose :func:`remapping_settings` lack a setting of their training, such as the arguments of a policy."""
    return [table for table, each in settings.items() if "eviction_interval" not in each]


def remapped(
    collection: nn.Module,
    settings: Mapping[str, Mapping[str, Any]],
    tables: Sequence[BaseEmbeddingConfig],
    device: torch.device,
) -> nn.Module:
    """The module that makes rows of raw ids for ``collection``, without ids; ``collection`` itself without settings.

    Args:
        settings: see :func:`remapping_settings`.
        tables: the tables of the collection, in its order.
        device: device of the buffers; meta works.

    Raises:
        ConfigError: settings that a class refuses, or of another number of rows than the table's.
    """
    if not settings:
        return collection
    return ManagedCollisionEmbeddingBagCollection(collection, _collisions(settings, tables, device))  # type: ignore[arg-type]


def add_remapping(
    parent: nn.Module, settings: Mapping[str, Mapping[str, Any]], tables: Sequence[BaseEmbeddingConfig]
) -> None:
    """Give ``parent``, which has a collection with ``tables``, what makes rows of their raw ids, on meta; nothing without settings.

    Raises:
        ConfigError: see :func:`remapped`.
    """
    if settings:
        parent.add_module(_COLLECTION, _collisions(settings, tables, torch.device("meta")))


def _collisions(
    settings: Mapping[str, Mapping[str, Any]], tables: Sequence[BaseEmbeddingConfig], device: torch.device
) -> ManagedCollisionCollection:
    return ManagedCollisionCollection({t: managed_collision_module(s, device) for t, s in settings.items()}, tables)


def managed_collision_module(settings: Mapping[str, Any], device: torch.device) -> ManagedCollisionModule:
    """The module of :func:`recinfer.capture.collision_settings`, without ids and in evaluation mode.

    Args:
        settings: its class and arguments; may have ``eviction_interval``.
        device: device of the buffers; meta works.

    Raises:
        ConfigError: an unknown class, or arguments that the class refuses.
    """
    arguments = {name: value for name, value in settings.items() if name not in ("class", "eviction_policy")}
    # Lookups ask no policy; the state has the numbers of the policy.
    policy = _POLICIES.get(settings.get("eviction_policy", ""), DistanceLFU_EvictionPolicy)
    try:
        if settings.get("class") == MCHManagedCollisionModule.__name__:
            arguments = {"eviction_interval": 1, **arguments}
            return MCHManagedCollisionModule(device=device, eviction_policy=policy(), **arguments).eval()
        if settings.get("class") == HashZchManagedCollisionModule.__name__:
            return HashZchManagedCollisionModule(device=device, is_inference=True, **arguments)
    except TypeError as error:
        raise ConfigError(f"settings of managed collisions: {error}") from None
    raise ConfigError(
        f"settings of managed collisions: class {settings.get('class')!r}; expected {MCHManagedCollisionModule.__name__} or "
        f"{HashZchManagedCollisionModule.__name__}"
    )


def _training_settings(module: nn.Module) -> dict[str, int]:
    """The argument that training depends on and lookups do not: ``eviction_interval``.

    Empty for a module whose training depends on more: a policy with arguments, or a hashed module.
    """
    if not isinstance(module, MCHManagedCollisionModule):
        return {}
    policy = module._eviction_policy
    kind: Any = type(policy)
    if kind not in _POLICIES.values() or vars(policy) != vars(kind()):
        return {}
    return {"eviction_interval": module._eviction_interval}
