"""Compares a float model and its quantized archive on held-out rows: AUC, log-loss, normalized entropy, and the AUC
drop per table.

The float model is computed as recinfer.inference.float_model has it, for models of any size.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from recinfer.archive.check import Request
from recinfer.archive.manifest import Manifest
from recinfer.data.metrics import auc, log_loss, normalized_entropy, sigmoid
from recinfer.errors import ConfigError, InputError
from recinfer.inference.float_model import FloatModel, table_columns

if TYPE_CHECKING:
    from recinfer.data.contract import FeatureContract

__all__ = ["EvalData", "Evaluation", "Quality", "TableDrop", "evaluate"]

_BATCH = 1024


@dataclass(frozen=True)
class Quality:
    """Metrics of logits on labelled rows; ``auc`` and ``normalized_entropy`` are nan if the rows have one class."""

    auc: float
    log_loss: float
    normalized_entropy: float

    @classmethod
    def of(cls, labels: NDArray[np.float32], logits: NDArray[np.float32]) -> Quality:
        """Compute the three metrics."""
        probabilities = sigmoid(logits)
        return cls(auc(labels, logits), log_loss(labels, probabilities), normalized_entropy(labels, probabilities))


@dataclass(frozen=True)
class TableDrop:
    """The AUC drop from quantizing one table while all others are float."""

    table: str
    auc_drop: float


@dataclass(frozen=True)
class Evaluation:
    """Metrics of both models on the same rows.

    Attributes:
        rows: number of rows.
        float_model, quantized_model: their figures.
        worst: tables by AUC drop, the largest first; empty unless requested.
    """

    rows: int
    float_model: Quality
    quantized_model: Quality
    worst: tuple[TableDrop, ...] = ()

    @property
    def auc_drop(self) -> float:
        """The float model's AUC minus the quantized model's AUC."""
        return self.float_model.auc - self.quantized_model.auc


@dataclass(frozen=True)
class EvalData:
    """Labelled rows, one request per batch.

    Attributes:
        labels: float32 ``[rows]``, 0 or 1.
    """

    requests: tuple[Request, ...]
    labels: NDArray[np.float32]

    @classmethod
    def from_columns(cls, contract: FeatureContract, columns: Mapping[str, NDArray]) -> EvalData:
        """Convert raw columns by the model's feature contract; raises InputError for values that it rejects."""
        labels = contract.labels(columns).numpy()
        requests = []
        for start in range(0, len(labels), _BATCH):
            dense, features = contract.apply({k: np.asarray(v)[start : start + _BATCH] for k, v in columns.items()})
            requests.append(Request(dense if contract.num_dense else None, features))
        if not requests:
            raise InputError("evaluation: no rows; expected at least one")
        return cls(tuple(requests), labels)

    @classmethod
    def read(
        cls, path: str | os.PathLike[str], format: str, contract: FeatureContract | None, limit: int | None = None
    ) -> EvalData:
        """Read the rows of a file; the caller ensures that they are held out.

        Raises:
            ConfigError: no contract, so that raw rows mean nothing; or an unknown format.
            InputError: rows that cannot be read.
        """
        from recinfer.data.dataset import read_columns

        if contract is None:
            raise ConfigError(
                "evaluation needs a feature contract to convert raw rows, and this checkpoint has none (model.json)"
            )
        return cls.from_columns(contract, read_columns(path, format, limit))


def evaluate(
    model: FloatModel,
    data: EvalData,
    *,
    output: str | None = None,
    blame: bool = False,
) -> Evaluation:
    """Run both models on the same rows.

    Args:
        model: the archive and its float model, with the float rows of the data's ids.
        output: the output that holds logits; needed when there are several.
        blame: also quantize one table at a time.

    Raises:
        ConfigError: no dense part, or no one output of one number a row.
    """
    manifest = model.manifest
    index = _output_index(manifest, output)
    tables = list(manifest.tables) if blame else []
    floats: list[Tensor] = []
    quantized: list[Tensor] = []
    alone: list[list[Tensor]] = [[] for _ in tables]
    for request in data.requests:
        answer = model.predictor.replay(request)
        quantized.append(answer.outputs[index].reshape(-1))
        embeddings = model.embeddings(request)
        floats.append(model.outputs(request, embeddings)[index].reshape(-1))
        for table, found in zip(tables, alone):
            mixed = [part.vectors for part in embeddings]
            for other, place, columns in table_columns(manifest):
                if other is table:
                    mixed[place] = mixed[place].clone()
                    mixed[place][:, columns] = answer.embeddings[place][:, columns]
            found.append(model.outputs(request, embeddings, mixed)[index].reshape(-1))
    labels = data.labels
    reference = Quality.of(labels, torch.cat(floats).numpy())
    drops = [
        TableDrop(table.full_name, reference.auc - auc(labels, torch.cat(found).numpy()))
        for table, found in zip(tables, alone)
    ]
    worst = tuple(sorted(drops, key=lambda drop: -drop.auc_drop))
    return Evaluation(len(labels), reference, Quality.of(labels, torch.cat(quantized).numpy()), worst)


def _output_index(manifest: Manifest, output: str | None) -> int:
    outputs = [] if manifest.dense is None else list(manifest.dense.outputs)
    chosen = [i for i, o in enumerate(outputs) if output is None or o.name == output]
    if len(chosen) != 1 or outputs[chosen[0]].shape not in ((), (1,)):
        have = ", ".join(f"{o.name} {list(o.shape)}" for o in outputs) or "none: the archive has no dense part"
        raise ConfigError(f"evaluation: expected one output with one logit per row, got {output!r}; outputs are {have}")
    return chosen[0]
