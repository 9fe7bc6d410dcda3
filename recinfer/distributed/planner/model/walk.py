"""Finds the embedding collections of a model: all of them, or those that a sharder supports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from recinfer.distributed.planner.model.sharders import sharder_name
from recinfer.distributed.types import ModuleSharder
from recinfer.errors import ConfigError
from recinfer.module_tree import outermost_modules
from recinfer.modules.embedding_configs import BaseEmbeddingConfig

__all__ = ["embedding_tables", "managed_collisions", "sharded_modules"]


def embedding_tables(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[BaseEmbeddingConfig], bool]]:
    """Embedding collections of ``model``, outermost first: (module path, module, table configs, pooled).

    A collection is any module with ``embedding_bag_configs()`` (pooled) or ``embedding_configs()``; its children are
    not searched. The path of the model itself is ``""``. A module with several names appears once, under the first.
    Managed collisions themselves have no tables: the collection behind them is found.

    Raises:
        ConfigError: a module of in-table pruning.
    """

    def wanted(module: nn.Module) -> bool:
        return _configs(module) is not None or _remapping(module) == _PRUNING

    for path, module in outermost_modules(model, wanted):
        if _remapping(module) == _PRUNING:
            _refuse_remapping(path, module)
        configs = _configs(module)
        if configs is not None and not _is_managed_collision_collection(module):
            yield path, module, *configs


def managed_collisions(model: nn.Module) -> dict[int, Mapping[str, nn.Module]]:
    """``id`` of a collection whose tables take raw ids -> table -> its managed collision module."""
    found: dict[int, Mapping[str, nn.Module]] = {}
    for module in model.modules():
        collisions: Any = getattr(module, "_managed_collision_collection", None)
        tables = getattr(module, "_embedding_module", None)
        if collisions is not None and tables is not None:
            found[id(tables)] = getattr(collisions, "_managed_collision_modules", {})
    return found


def _configs(module: nn.Module) -> tuple[list[BaseEmbeddingConfig], bool] | None:
    """The tables of a collection, and whether it pools; None for other modules."""
    for method, pooled in (("embedding_bag_configs", True), ("embedding_configs", False)):
        configs = getattr(module, method, None)
        if callable(configs):
            return list(configs()), pooled
    return None


# Prefix of a class name of TorchRec's modules that change ids by their own state -> the change, as text.
_PRUNING = "in-table pruning"
_REMAPPING = {"ManagedCollision": "managed collisions", "ITEP": _PRUNING}


def _remapping(module: nn.Module) -> str | None:
    """The change of ids by ``module``, as text, or None; recognized by the class names of TorchRec's modules."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return next((what for part, what in _REMAPPING.items() if any(n.startswith(part) for n in names)), None)


def _is_managed_collision_collection(module: nn.Module) -> bool:
    """Whether ``module`` is a ManagedCollisionCollection, recinfer's or TorchRec's, which has configs but no rows."""
    return any(kind.__name__ == "ManagedCollisionCollection" for kind in type(module).__mro__)


def _refuse_remapping(path: str, module: nn.Module) -> None:
    what = _remapping(module)
    if what is not None:
        raise ConfigError(
            f"module {path!r} is a {type(module).__name__}; recinfer has no {what} yet. Train its "
            "EmbeddingBagCollection or EmbeddingCollection alone, and hash ids below num_embeddings before the lookup"
        )


def sharded_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """(path, module, sharder) of every module that a sharder supports, outermost first; modules inside it are skipped.
    A module with several names appears once, under the first.

    Raises:
        ConfigError: a module of managed collisions or in-table pruning that no sharder supports.
    """
    exact = {sharder_name(s.module_type): s for s in sharders}

    def sharder_of(child: nn.Module) -> ModuleSharder[Any] | None:
        sharder = exact.get(sharder_name(type(child)))
        return sharder or next((s for s in sharders if isinstance(child, s.module_type)), None)

    for path, child in outermost_modules(module, lambda m: sharder_of(m) is not None or _remapping(m) is not None):
        sharder = sharder_of(child)
        if sharder is None:
            _refuse_remapping(path, child)
        else:
            yield path, child, sharder
