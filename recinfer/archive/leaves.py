"""Lists a model's embedding modules, with their tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Sequence
from dataclasses import dataclass, replace

from torch import nn

from recinfer.capture import EmbeddingModule, described, plain_tables, with_tables
from recinfer.distributed.planner.plan import embedding_tables
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.modules.plain_tables import is_plain

__all__ = ["Leaf", "find_leaves"]


@dataclass(frozen=True)
class Leaf:
    """An embedding collection of the model.

    Attributes:
        path: path of the collection, as the plan and the checkpoint name it.
        module: the module to replace: the collection, or the feature-processed module around it.
        configs: the collection's tables.
        about: ``module`` as a trace describes it.
    """

    path: str
    module: nn.Module
    configs: tuple[BaseEmbeddingConfig, ...]
    about: EmbeddingModule

    def with_tables(self, names: Container[str]) -> Leaf:
        """A model without collections with these of its tables."""
        kept = [config for config in self.configs if config.name in names]
        about = with_tables(self.about, [table for table in self.about.tables if table.name in names])
        return replace(self, configs=tuple(kept), about=about)

    def key(self, table: str) -> str:
        """The key of a table's weight in a state dict of the model."""
        middle = "embedding_bags" if self.about.pooled else "embeddings"
        names = (self.about.plain[table],) if self.about.plain else (self.path, middle, table)
        return ".".join(part for part in (*names, "weight") if part)

    @property
    def position_weights(self) -> dict[str, tuple[str, int]] | None:
        """Feature -> (state-dict key, positions), for position-weighted modules."""
        if not self.about.processed:
            return None
        prefix = f"{self.about.path}._feature_processors.".lstrip(".")
        return {feature: (f"{prefix}{name}", count) for feature, name, count in self.about.positions}

    def output_names(self, features: Sequence[Sequence[str]]) -> list[str]:
        """Names of the outputs for the tables' ``features``: the feature, or ``feature@table`` if several tables read it."""
        count = Counter(name for names in features for name in names)
        return [
            f"{name}@{config.name}" if count[name] > 1 else name
            for config, names in zip(self.configs, features)
            for name in names
        ]


def find_leaves(model: nn.Module) -> list[Leaf]:
    """The embedding collections of ``model`` in module order.

    Raises:
        ConfigError: none there, or a feature processor other than position weights.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    leaves = []
    for path, module, configs, pooled in embedding_tables(model):
        outer_path, outer = path, module
        parent = modules.get(path.rpartition(".")[0]) if path else None
        if parent is not None and _processes_features(parent):
            outer_path, outer = path.rpartition(".")[0], parent
        about = (plain_tables(model) if is_plain(module) else None) or described(outer_path, outer, configs, pooled)
        for _, name, _ in about.positions:
            if not name.startswith("position_weights.") and not name.endswith(".position_weight"):
                raise ConfigError(
                    f"feature processor of {outer_path!r} has the parameter {name!r}; expected a PositionWeightedModule or "
                    f"PositionWeightedModuleCollection"
                )
        leaves.append(Leaf(path, outer, tuple(configs), about))
    if not leaves:
        raise ConfigError(
            f"{type(model).__name__} has no EmbeddingBagCollection, EmbeddingCollection, torch.nn.Embedding or EmbeddingBag; "
            f"expected a model with tables"
        )
    return leaves


def _processes_features(module: nn.Module) -> bool:
    """Whether ``module`` is a FeatureProcessedEmbeddingBagCollection, recinfer's or TorchRec's."""
    return any(kind.__name__ == FeatureProcessedEmbeddingBagCollection.__name__ for kind in type(module).__mro__)
