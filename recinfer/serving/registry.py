"""Which models and versions a server has, and which one a request means."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recinfer.errors import ConfigError, NotFoundError

if TYPE_CHECKING:
    from recinfer.inference.predictor import Predictor

__all__ = ["ModelRegistry", "ServedModel"]


@dataclass(frozen=True)
class ServedModel:
    """One version of one model, ready to answer.

    Attributes:
        name: what requests call it; need not be the name in its archive.
        version: the version in its archive's manifest.
        predictor: runs it.
        pooled_width: sum of the widths of its pooled features.
        sequence_width: sum of the widths of its unpooled features.
    """

    name: str
    version: str
    predictor: Predictor
    pooled_width: int
    sequence_width: int

    @classmethod
    def of(cls, name: str, predictor: Predictor) -> ServedModel:
        """Wrap ``predictor`` under ``name``."""
        widths = [(feature.dim, feature.pooled) for feature in predictor.features]
        return cls(
            name=name,
            version=predictor.manifest.version,
            predictor=predictor,
            pooled_width=sum(dim for dim, pooled in widths if pooled),
            sequence_width=sum(dim for dim, pooled in widths if not pooled),
        )

    def widths_of(self, keys: Iterable[str]) -> tuple[int, int]:
        """``pooled_width`` and ``sequence_width`` of the features ``keys`` alone."""
        wanted = set(keys)
        pooled = sequence = 0
        for feature in self.predictor.features:
            # A feature that several tables read has one output a table, named feature@table.
            if feature.name in wanted or feature.name.split("@")[0] in wanted:
                pooled += feature.dim * feature.pooled
                sequence += feature.dim * (not feature.pooled)
        return pooled, sequence


class ModelRegistry:
    """The served models by name and version; the first one added is the default.

    Args:
        predictors: name -> predictor.

    Raises:
        ConfigError: no model, or a name that is empty.
    """

    def __init__(self, predictors: Mapping[str, Predictor]) -> None:
        if not predictors or not all(predictors):
            raise ConfigError(f"models: got {list(predictors)}, expected at least one model, each with a name")
        self._default = next(iter(predictors))
        self._models = {name: {"": ServedModel.of(name, predictor)} for name, predictor in predictors.items()}
        for versions in self._models.values():
            versions[versions[""].version] = versions[""]

    def names(self) -> list[str]:
        """The names of all models, the default first."""
        return list(self._models)

    def get(self, name: str = "", version: str = "") -> ServedModel:
        """The model ``name`` (empty: the default one) at ``version`` (empty: its default one).

        Raises:
            NotFoundError: there is none; the message lists what there is.
        """
        versions = self._models.get(name or self._default)
        if versions is None:
            raise NotFoundError(f"model: got {_short(name)}, expected one of {', '.join(map(repr, self._models))}")
        model = versions.get(version)
        if model is None:
            known = ", ".join(repr(v) for v in versions if v)
            raise NotFoundError(
                f"version: got {_short(version)} of model {name or self._default!r}, expected one of {known}"
            )
        return model


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}... ({len(text)} characters)"
