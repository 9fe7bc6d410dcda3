"""Lists a model's embedding modules, with their features and output names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from recinfer.capture import EmbeddingModule, described
from recinfer.distributed.planner.plan import embedding_tables
from recinfer.errors import ConfigError
from recinfer.modules.embedding_configs import BaseEmbeddingConfig
from recinfer.modules.embedding_modules import get_embedding_names_by_table
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

__all__ = ["Leaf", "find_leaves"]


@dataclass(frozen=True)
class Leaf:
    """An embedding collection of the model.

    Attributes:
        path: path of the collection, as the plan and the checkpoint name it.
        module: the module to replace: the collection, or the feature-processed module around it.
        module_path: the path of ``module``.
        configs: the collection's tables.
        pooled: EmbeddingBagCollection (True) or EmbeddingCollection.
        is_weighted: ids carry weights.
        position_weights: feature -> (state-dict key, positions), for position-weighted modules.
    """

    path: str
    module: nn.Module
    module_path: str
    configs: tuple[BaseEmbeddingConfig, ...]
    pooled: bool
    is_weighted: bool
    position_weights: dict[str, tuple[str, int]] | None

    @property
    def about(self) -> EmbeddingModule:
        """The module as a trace describes it."""
        return described(self.module_path, self.module, self.configs, self.pooled)

    @property
    def outputs(self) -> list[str]:
        """Embedding names in output order."""
        return [name for names in get_embedding_names_by_table(self.configs) for name in names]

    def output_names(self, features: Sequence[Sequence[str]]) -> list[str]:
        """Names of the outputs where the tables look up ``features``: the feature, or ``feature@table`` for a feature of
        several tables."""
        count = Counter(name for names in features for name in names)
        return [
            f"{name}@{config.name}" if count[name] > 1 else name
            for config, names in zip(self.configs, features)
            for name in names
        ]

    @property
    def features(self) -> list[str]:
        """The feature of each output."""
        return [feature for config in self.configs for feature in config.feature_names]

    @property
    def dims(self) -> list[int]:
        """Columns of each output."""
        return [config.embedding_dim for config in self.configs for _ in config.feature_names]


def find_leaves(model: nn.Module) -> list[Leaf]:
    """The embedding collections of ``model`` in module order.

    Raises:
        ConfigError: none there, or a feature processor other than position weights.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    leaves = []
    for path, module, configs, pooled in embedding_tables(model):
        parent_path = path.rpartition(".")[0]
        parent = modules.get(parent_path) if path else None
        weights = None
        outer, outer_path = module, path
        if parent is not None and _processes_features(parent):
            outer, outer_path = parent, parent_path
            weights = _position_weights(parent, parent_path)
        is_weighted: Any = getattr(module, "is_weighted", None)
        weighted = callable(is_weighted) and bool(is_weighted())
        leaves.append(Leaf(path, outer, outer_path, tuple(configs), pooled, weighted, weights))
    if not leaves:
        raise ConfigError(
            f"{type(model).__name__} has no EmbeddingBagCollection or EmbeddingCollection; expected a model whose "
            f"tables are in these modules"
        )
    return leaves


def _processes_features(module: nn.Module) -> bool:
    """Whether ``module`` is a FeatureProcessedEmbeddingBagCollection, recinfer's or TorchRec's."""
    return any(kind.__name__ == FeatureProcessedEmbeddingBagCollection.__name__ for kind in type(module).__mro__)


def _position_weights(module: nn.Module, path: str) -> dict[str, tuple[str, int]]:
    prefix = f"{path}." if path else ""
    found = {}
    for name, parameter in module.get_submodule("_feature_processors").named_parameters():
        parts = name.split(".")
        if parts[-1] == "position_weight":
            feature = ".".join(parts[:-1])
        elif parts[0] == "position_weights":
            feature = ".".join(parts[1:])
        else:
            raise ConfigError(
                f"feature processor of {path!r} has the parameter {name!r}; expected a PositionWeightedModule or "
                f"PositionWeightedModuleCollection"
            )
        found[feature.removeprefix("_feature_processors.")] = (
            f"{prefix}_feature_processors.{name}",
            parameter.shape[0],
        )
    return found
