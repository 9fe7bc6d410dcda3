"""Reads programs that recinfer/capture.py wrote in another environment, and gives them the weights of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from recinfer.archive.program import check_program
from recinfer.capture import Captured, CaptureError, EmbeddingModule, read_capture
from recinfer.checkpoint import CheckpointReader
from recinfer.errors import CheckpointError, ConfigError
from recinfer.modules.embedding_configs import data_type_to_dtype
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.modules.plain_tables import table_configs
from recinfer.modules.remapping import add_remapping

__all__ = ["add_at", "collections_of", "load_weights", "read_program"]

_META = torch.device("meta")
_MODEL = "model."
"""Prefix of the model's keys in a captured program."""


def read_program(path: str | os.PathLike[str]) -> Captured:
    """Read a captured program; raises ConfigError for another file, an unknown version, a program that D1 refuses, or a model
    without tables.
    """
    try:
        captured = read_capture(path, lambda data: check_program(data, lookups=True))
    except CaptureError as error:
        raise ConfigError(str(error)) from None
    if not captured.modules:
        raise ConfigError(
            f"{path}: the captured model has no embedding collection, torch.nn.Embedding or EmbeddingBag, and an archive needs a "
            f"table; serve a model without tables by ONNX Runtime or TorchServe"
        )
    return captured


def collections_of(captured: Captured) -> nn.Module:
    """A module that has the captured model's embedding collections on meta, at their paths, and nothing else."""
    root = nn.Module()
    for about in captured.modules:
        tables = table_configs(about)
        if about.plain:  # the model itself
            return _plain_model(about, tables)
        made = _collection(about, tables)
        if not about.path:
            return made
        parent = add_at(root, about.path, made)
        add_remapping(parent, about.collisions, tables)
    return root


def add_at(root: nn.Module, path: str, module: nn.Module) -> nn.Module:
    """Adds a module to a tree, with the parents it lacks; gives the parent."""
    *parents, last = path.split(".")
    for name in parents:
        if name not in root._modules:
            root.add_module(name, nn.Module())
        root = root.get_submodule(name)
    root.add_module(last, module)
    return root


def _plain_model(about: EmbeddingModule, tables: Sequence[Any]) -> nn.Module:
    root = nn.Module()
    for config in tables:
        dtype = data_type_to_dtype(config.data_type)
        table = nn.Embedding(config.num_embeddings, config.embedding_dim, device=_META, dtype=dtype)
        if not about.plain[config.name]:
            return table
        add_at(root, about.plain[config.name], table)
    return root


def _collection(about: EmbeddingModule, tables: list[Any]) -> nn.Module:
    if not about.pooled:
        return EmbeddingCollection(tables=tables, device=_META)
    collection = EmbeddingBagCollection(tables=tables, is_weighted=about.is_weighted, device=_META)
    if not about.processed:
        return collection
    lengths = {feature: count for feature, _, count in about.positions}
    if any(name.startswith("position_weights.") for _, name, _ in about.positions):
        return FeatureProcessedEmbeddingBagCollection(collection, PositionWeightedModuleCollection(lengths, _META))
    return FeatureProcessedEmbeddingBagCollection(
        collection, {feature: PositionWeightedModule(count, _META) for feature, count in lengths.items()}
    )


def load_weights(captured: Captured, checkpoint: CheckpointReader) -> int:
    """Put the checkpoint's weights into the program's dense part, where it has them; returns how many it has.

    Raises:
        CheckpointError: a weight has another shape than the program's.
    """
    found = 0
    for name, tensor in captured.program.state_dict.items():
        key = name.removeprefix(_MODEL)
        if key not in checkpoint:
            continue
        if checkpoint.shape(key) != tuple(tensor.shape):
            raise CheckpointError(
                f"{checkpoint.path}: {key} is {list(checkpoint.shape(key))}, the captured program's {list(tensor.shape)}; "
                f"capture the model that this checkpoint is of"
            )
        with torch.no_grad():
            tensor.copy_(checkpoint.read(key))
        found += 1
    return found
