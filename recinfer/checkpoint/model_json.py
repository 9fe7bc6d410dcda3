"""Reads and writes ``model.json``, which describes a checkpoint's module as plain data, and builds the module.

    {"format": "recinfer.model/1", "name": "ranker", "version": "1",
     "model": {"class": "dlrm", ...} or null, "contract": {...} or null}

``model.class`` names an entry of a registry of builders; a module of a class that is not registered is stored with
``"model": null`` and is built by a function of the user (:func:`recinfer.checkpoint.resolve.resolve_model`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from recinfer.capture import CaptureError
from recinfer.errors import CheckpointError, ConfigError
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from recinfer.modules.remapping import SETTINGS, remapped, remapping_settings, without_remapping

__all__ = [
    "MODEL_FORMAT",
    "MODEL_JSON",
    "ModelKind",
    "build_model",
    "describe_model",
    "read_model_json",
    "register",
]

MODEL_JSON = "model.json"
MODEL_FORMAT = "recinfer.model/1"
_KEYS = {"format", "name", "version", "model", "contract"}


@dataclass(frozen=True)
class ModelKind:
    """Converts modules of one class to a config and back.

    Attributes:
        name: the ``class`` in model.json.
        describe: the module's config as JSON values, or None if the module is not of this kind.
        build: the module from that config, on a device, with weights not set.
    """

    name: str
    describe: Callable[[nn.Module], dict[str, Any] | None]
    build: Callable[[Mapping[str, Any], torch.device], nn.Module]


_KINDS: dict[str, ModelKind] = {}


def register(kind: ModelKind) -> None:
    """Register a class of modules; raises ConfigError for a name that is registered already."""
    if kind.name in _KINDS:
        raise ConfigError(f"model class {kind.name!r} is registered already")
    _KINDS[kind.name] = kind


def describe_model(model: nn.Module) -> dict[str, Any] | None:
    """The config of ``model`` with its ``class``; None if its class is not registered."""
    for kind in _KINDS.values():
        config = kind.describe(model)
        if config is not None:
            return {"class": kind.name, **config}
    return None


def build_model(description: Mapping[str, Any], device: str | torch.device, *, where: str) -> nn.Module:
    """The module of a whole model.json on ``device``.

    Raises:
        CheckpointError: no or an unknown class, or a config that builds no module; ``where`` is named.
    """
    config = description.get("model")
    if config is None:
        raise CheckpointError(
            f"{where}: {MODEL_JSON} has no config to build the module from; give a function that returns it (--model "
            f"pkg.module:function)"
        )
    kind = _KINDS.get(config.get("class"))
    if kind is None:
        raise CheckpointError(
            f"{where}: unknown model class {config.get('class')!r}; known classes: {', '.join(sorted(_KINDS))}"
        )
    try:
        return kind.build({k: v for k, v in config.items() if k != "class"}, torch.device(device))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{where}: {MODEL_JSON} does not build a {kind.name}: {error!r}") from error


def read_model_json(folder: Path) -> dict[str, Any] | None:
    """The content of ``folder/model.json``, checked; None without the file.

    Raises:
        CheckpointError: not JSON, another format, unknown or missing keys.
    """
    path = folder / MODEL_JSON
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != MODEL_FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"{path}: format {found!r}, expected {MODEL_FORMAT!r}; was it written by a newer version?"
        )
    if set(content) != _KEYS:
        raise CheckpointError(
            f"{path}: unknown keys {sorted(set(content) - _KEYS)}, missing keys {sorted(_KEYS - set(content))}"
        )
    for key, kinds in (("name", str), ("version", str), ("model", dict | None), ("contract", dict | None)):
        if not isinstance(content[key], kinds):
            raise CheckpointError(f"{path}: {key} is a {type(content[key]).__name__}, expected {kinds}")
    return content


# ---- the reference DLRM


def _linear_sizes(module: nn.Module) -> list[int]:
    return [m.out_features for m in module.modules() if isinstance(m, nn.Linear)]


def _describe_dlrm(model: nn.Module) -> dict[str, Any] | None:
    from recinfer.models.dlrm import DLRM

    if type(model) is not DLRM:
        return None
    outer: Any = model.sparse_arch.embedding_bag_collection
    collection: Any = without_remapping(outer)
    if not hasattr(collection, "is_weighted"):
        return None
    try:
        settings = remapping_settings(outer)
    except CaptureError:
        return None  # a function hashes the ids
    first = next(m for m in model.dense_arch.modules() if isinstance(m, nn.Linear))
    return {
        **({SETTINGS: settings} if settings else {}),
        "dense_in_features": first.in_features,
        "dense_arch_layer_sizes": _linear_sizes(model.dense_arch),
        "over_arch_layer_sizes": _linear_sizes(model.over_arch),
        "is_weighted": collection.is_weighted(),
        "tables": [
            {
                "name": t.name,
                "num_embeddings": t.num_embeddings,
                "embedding_dim": t.embedding_dim,
                "pooling": t.pooling.value,
                "data_type": t.data_type.value,
                "feature_names": list(t.feature_names),
            }
            for t in collection.embedding_bag_configs()
        ],
    }


def _build_dlrm(config: Mapping[str, Any], device: torch.device) -> nn.Module:
    from recinfer.models.dlrm import DLRM
    from recinfer.modules.embedding_modules import EmbeddingBagCollection

    tables = [
        EmbeddingBagConfig(**{**t, "pooling": PoolingType(t["pooling"]), "data_type": DataType.parse(t["data_type"])})
        for t in config["tables"]
    ]
    rest = {k: v for k, v in config.items() if k not in ("tables", "is_weighted", SETTINGS)}
    collection = EmbeddingBagCollection(tables=tables, is_weighted=config["is_weighted"], device=device)
    bags: Any = remapped(collection, config.get(SETTINGS, {}), tables, device)
    return DLRM(embedding_bag_collection=bags, dense_device=device, **rest)


register(ModelKind("dlrm", _describe_dlrm, _build_dlrm))
