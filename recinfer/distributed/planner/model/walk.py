"""Finds the embedding collections of a model: all of them, or those that a sharder supports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from recinfer.distributed.planner.model.sharders import sharder_name
from recinfer.distributed.types import ModuleSharder
from recinfer.errors import ConfigError
from recinfer.module_tree import outermost_modules
from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.modules.plain_tables import plain_collection
from recinfer.modules.remapping import PRUNING, has_no_rows, remapping

__all__ = ["embedding_tables", "sharded_modules"]


def embedding_tables(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[BaseEmbeddingConfig], bool]]:
    """Embedding collections of ``model``, outermost first: (module path, module, table configs, pooled).

    A collection is any module with ``embedding_bag_configs()`` (pooled) or ``embedding_configs()``; its children are
    not searched. The path of the model itself is ``""``. A module with several names appears once, under the first.
    A module that changes ids in front of a collection has no tables: the collection behind it is found. A collection without
    tables, which a configuration may leave in a model, is left out. Of a model without collections: its torch.nn.Embedding and
    EmbeddingBag (:func:`recinfer.capture.plain_tables`).

    Raises:
        ConfigError: a module of in-table pruning.
    """

    def wanted(module: nn.Module) -> bool:
        return _configs(module) is not None or remapping(module) == PRUNING

    collections = False
    for path, module in outermost_modules(model, wanted):
        if remapping(module) == PRUNING:
            _refuse_remapping(path, module)
        configs = _configs(module)
        if configs is not None and configs[0] and not has_no_rows(module):
            collections = True
            yield path, module, *configs
    if not collections:
        yield from plain_collection(model)


def _configs(module: nn.Module) -> tuple[list[BaseEmbeddingConfig], bool] | None:
    """The tables of a collection, and whether it pools; None for other modules."""
    for method, pooled in (("embedding_bag_configs", True), ("embedding_configs", False)):
        configs = getattr(module, method, None)
        if callable(configs):
            return list(configs()), pooled
    return None


def _refuse_remapping(path: str, module: nn.Module) -> None:
    what = remapping(module)
    if what is not None:
        name = type(module).__name__
        if what == PRUNING:
            raise ConfigError(
                f"module {path!r} is a {name}; recinfer has no {what}. Train its EmbeddingBagCollection or EmbeddingCollection "
                "alone, and hash ids below num_embeddings before the lookup"
            )
        raise ConfigError(
            f"module {path!r} is a {name}, which none of the given sharders shards; give its own sharder too, or leave "
            "sharders out: get_default_sharders() has it"
        )


def sharded_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """(path, module, sharder) of every module that a sharder supports, outermost first; modules inside it are skipped.
    A module with several names appears once, under the first.

    Raises:
        ConfigError: a module that changes ids by its own state, which no sharder supports.
    """
    exact = {sharder_name(s.module_type): s for s in sharders}

    def sharder_of(child: nn.Module) -> ModuleSharder[Any] | None:
        sharder = exact.get(sharder_name(type(child)))
        return sharder or next((s for s in sharders if isinstance(child, s.module_type)), None)

    for path, child in outermost_modules(module, lambda m: sharder_of(m) is not None or remapping(m) is not None):
        sharder = sharder_of(child)
        if sharder is None:
            _refuse_remapping(path, child)
        else:
            yield path, child, sharder
