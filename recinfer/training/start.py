"""Training that starts from an earlier checkpoint: its feature contract, its name and the shape of its model."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from recinfer.checkpoint import CheckpointReader
from recinfer.errors import CheckpointError
from recinfer.models.dlrm import DLRM

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
    """

    contract: FeatureContract
    name: str
    embedding_dim: int


def read_start(checkpoint: str | os.PathLike[str]) -> Start:
    """Read the description of a checkpoint of recinfer's training loop.

    Raises:
        CheckpointError: there is no checkpoint, or one without the loop's model.
    """
    reader = CheckpointReader(checkpoint)
    model = None if reader.model_json is None else reader.build_model("meta")
    if reader.contract is None or not isinstance(model, DLRM):
        raise CheckpointError(
            f"{os.fspath(checkpoint)}: has no DLRM with a feature contract; expected a checkpoint of recinfer train to start from"
        )
    assert reader.model_json is not None
    return Start(reader.contract, reader.model_json["name"], model.sparse_arch.D)
