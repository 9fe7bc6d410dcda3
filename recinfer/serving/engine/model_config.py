"""The file that says which models and versions of a store are served, with labels and weights."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recinfer.errors import ConfigError
from recinfer.excerpts import excerpt

__all__ = ["ModelChoice", "parse_model_config", "read_text"]

_KEYS = ("versions", "labels", "weights")
_MAX_WEIGHT = 2**32 - 1


@dataclass(frozen=True)
class ModelChoice:
    """The versions of one model to serve, with labels and weights.

    Attributes:
        latest: number of newest versions to serve; None: all versions, or ``names``.
        names: the only versions to serve; empty: ``latest`` decides.
        labels: label -> version.
        weights: version -> share of the requests that name no version; empty: all these requests go to the newest version.
    """

    latest: int | None = None
    names: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)

    def of(self, versions: Sequence[str]) -> list[str]:
        """The versions to serve out of ``versions``, which are sorted with the newest first."""
        if self.names:
            return [version for version in versions if version in self.names]
        return list(versions if self.latest is None else versions[: self.latest])

    def check(self, model: str, versions: Sequence[str]) -> None:
        """Raise ConfigError if a named version is not served: ``versions``, the store's, lacks it, or ``of`` leaves it out."""
        chosen = self.of(versions)
        named = [*self.names, *self.labels.values(), *self.weights]
        lacking = [version for version in named if version not in chosen]
        if lacking:
            known = ", ".join(map(repr, chosen)) or "none"
            raise ConfigError(
                f"model {model!r} names version {lacking[0]!r}, and what it serves of the store is {known}"
            )


def read_text(path: Path) -> str:
    """The text of the file; raises ConfigError."""
    try:
        return path.read_text(encoding="utf-8-sig")  # editors on Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def parse_model_config(text: str, name: str) -> dict[str, ModelChoice]:
    """Read the choice for each model.

    Args:
        text: TOML, or JSON where ``name`` ends in .json: ``models.NAME`` with ``versions`` ("all", {"latest": N} or a list),
            ``labels`` ({label: version}) and ``weights`` ({version: weight}), all of which may be left out.
        name: name of the file, for its format and for messages.

    Raises:
        ConfigError: the text is malformed; the message says what came where, and what was expected.
    """
    try:
        found = json.loads(text) if name.endswith(".json") else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}: {error}") from None
    models = found.get("models") if isinstance(found, dict) else None
    if not isinstance(models, dict) or not models or set(found) != {"models"}:
        raise ConfigError(f"{name}: expected `models` alone, a table of at least one model by name")
    return {model: _choice(value, f"{name}: models.{model}") for model, value in models.items()}


def _choice(value: Any, at: str) -> ModelChoice:
    if not isinstance(value, dict) or not set(value) <= set(_KEYS):
        raise ConfigError(f"{at}: got {excerpt(repr(value))}, expected a table of {', '.join(_KEYS)}")
    latest, names = _versions(value.get("versions", "all"), f"{at}.versions")
    labels, weights = value.get("labels", {}), value.get("weights", {})
    if not isinstance(labels, dict) or not all(key and isinstance(v, str) for key, v in labels.items()):
        raise ConfigError(f'{at}.labels: got {excerpt(repr(labels))}, expected label = "version"')
    if not isinstance(weights, dict) or not all(type(v) is int and 0 <= v <= _MAX_WEIGHT for v in weights.values()):
        raise ConfigError(f'{at}.weights: got {excerpt(repr(weights))}, expected "version" = a whole number from 0')
    if weights and not any(weights.values()):
        raise ConfigError(f"{at}.weights: got {excerpt(repr(weights))}, expected at least one above 0")
    return ModelChoice(latest, names, labels, weights)


def _versions(value: Any, at: str) -> tuple[int | None, tuple[str, ...]]:
    if value == "all":
        return None, ()
    if isinstance(value, dict) and set(value) == {"latest"} and type(value["latest"]) is int and value["latest"] > 0:
        return value["latest"], ()
    if isinstance(value, list) and value and all(isinstance(item, str) and item for item in value):
        return None, tuple(value)
    raise ConfigError(
        f'{at}: got {excerpt(repr(value))}, expected "all", {{latest = N}} with N from 1, or a list of versions'
    )
