"""Builds managed collisions for lookups from plain settings, as capture files and ``model.json`` hold them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.modules.hash_mc_modules import HashZchManagedCollisionModule
from recinfer.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)

__all__ = ["managed_collision_collection", "managed_collision_module", "training_settings"]

_POLICIES = {kind.__name__: kind for kind in (DistanceLFU_EvictionPolicy, LFU_EvictionPolicy, LRU_EvictionPolicy)}


def managed_collision_collection(
    settings: Mapping[str, Mapping[str, Any]], tables: Sequence[BaseEmbeddingConfig], device: torch.device
) -> ManagedCollisionCollection:
    """The managed collisions of ``tables``, without ids.

    Args:
        settings: table -> the settings of its module, see :func:`managed_collision_module`.
        tables: the tables, in the order of their collection.
        device: device of the buffers; meta works.

    Raises:
        ConfigError: settings that a class refuses, or of another number of rows than the table's.
    """
    modules = {table: managed_collision_module(each, device) for table, each in settings.items()}
    return ManagedCollisionCollection(modules, tables)


def managed_collision_module(settings: Mapping[str, Any], device: torch.device) -> ManagedCollisionModule:
    """The module of :func:`recinfer.capture.collision_settings`, without ids and in evaluation mode.

    Args:
        settings: its class and arguments; may have those of :func:`training_settings`.
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


def training_settings(module: nn.Module) -> dict[str, int]:
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
