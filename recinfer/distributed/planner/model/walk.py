"""Finds the embedding collections of a model: all of them, or those that a sharder supports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from recinfer.distributed.planner.model.sharders import sharder_name
from recinfer.distributed.types import ModuleSharder
from recinfer.modules.embedding_configs import BaseEmbeddingConfig

__all__ = ["embedding_tables", "sharded_modules"]


def embedding_tables(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[BaseEmbeddingConfig], bool]]:
    """Embedding collections of ``model``, outermost first: (module path, module, table configs, pooled).

    A collection is any module with ``embedding_bag_configs()`` (pooled) or ``embedding_configs()``; its children are
    not searched. The path of the model itself is ``""``.
    """
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:
        path, module = stack.pop()
        for method, pooled in (("embedding_bag_configs", True), ("embedding_configs", False)):
            configs = getattr(module, method, None)
            if callable(configs):
                yield path, module, list(configs()), pooled
                break
        else:
            prefix = f"{path}." if path else ""
            stack.extend(reversed([(prefix + name, child) for name, child in module.named_children()]))


def sharded_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """(path, module, sharder) of every module that a sharder supports, outermost first; modules inside it are
    skipped."""
    exact = {sharder_name(s.module_type): s for s in sharders}
    stack: list[tuple[str, nn.Module]] = [("", module)]
    while stack:
        path, child = stack.pop()
        sharder = exact.get(sharder_name(type(child)))
        if sharder is None:
            sharder = next((s for s in sharders if isinstance(child, s.module_type)), None)
        if sharder is not None:
            yield path, child, sharder
            continue
        prefix = f"{path}." if path else ""
        stack.extend(reversed([(prefix + name, inner) for name, inner in child.named_children()]))
