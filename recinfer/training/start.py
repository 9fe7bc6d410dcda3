"""Training that starts from an earlier checkpoint: its feature contract, its name and the shape of its model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from recinfer.checkpoint import CheckpointReader
from recinfer.errors import CheckpointError
from recinfer.models.dlrm import DLRM
from recinfer.modules.remapping import SETTINGS, untrainable_tables

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["Start", "read_start"]


@dataclass(frozen=True)
class Start:
    """The description of the checkpoint that a run starts from; weights and optimizer states are loaded later.

    Attributes:
        contract: the feature contract: the same text stays the same row, so that a delta can follow.
        name: name of the model.
        embedding_dim: columns of every table.
        reader: the checkpoint.
    """

    contract: FeatureContract
    name: str
    embedding_dim: int
    reader: CheckpointReader

    def build_model(self, device: torch.device) -> DLRM:
        """The checkpoint's model with new weights; the global random state is unchanged."""
        with torch.random.fork_rng(devices=[]):
            model = self.reader.build_model(device)
        assert isinstance(model, DLRM)
        return model


def read_start(checkpoint: str | os.PathLike[str]) -> Start:
    """Read the description of a checkpoint of recinfer's training loop.

    Raises:
        CheckpointError: there is no checkpoint, or one without the loop's model, or that does not say how its model admits raw ids.
    """
    reader = CheckpointReader(checkpoint)
    model = None if reader.model_json is None else reader.build_model("meta")
    if reader.contract is None or not isinstance(model, DLRM):
        raise CheckpointError(
            f"{os.fspath(checkpoint)}: has no DLRM with a feature contract; expected a checkpoint of recinfer train to start from"
        )
    assert reader.model_json is not None
    if unknown := untrainable_tables(reader.model_json["model"].get(SETTINGS, {})):
        raise CheckpointError(
            f"{os.fspath(checkpoint)}: table {unknown[0]!r} has an eviction policy that model.json does not hold; go on training by "
            "the program that made the model"
        )
    return Start(reader.contract, reader.model_json["name"], model.sparse_arch.D, reader)
