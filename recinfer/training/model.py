"""Builds the DLRM to train, with one table per sparse feature of a feature contract; its logits for examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from recinfer.errors import ConfigError
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from recinfer.data.contract import FeatureContract
    from recinfer.training.batches import Examples

__all__ = ["build_dlrm", "predict_logits", "start_at_rate"]

_EVALUATION_BATCH = 8192


def build_dlrm(
    contract: FeatureContract,
    *,
    embedding_dim: int = 16,
    dense_layers: Sequence[int] = (64,),
    over_layers: Sequence[int] = (64, 32),
    seed: int = 0,
    table_device: torch.device | None = None,
) -> DLRM:
    """A DLRM for the features of ``contract``, with new weights.

    Each sparse feature has its own table, named ``t_<feature>``, pooled by sum.

    Args:
        contract: the feature contract, which defines the features, their table sizes and the number of dense features.
        embedding_dim: columns of every table.
        dense_layers: columns of the bottom MLP before its last layer, which has ``embedding_dim``.
        over_layers: columns of the top MLP before its last layer, which gives the logit.
        seed: seed of the initial weights; the global random state is unchanged.
        table_device: device of the tables; on meta they have no values.

    Raises:
        ConfigError: a contract with no sparse or no dense feature, or sizes below 1.
    """
    if not contract.feature_names or not contract.num_dense:
        raise ConfigError(
            f"a DLRM needs sparse and dense features; the feature contract has {len(contract.feature_names)} sparse "
            f"and {contract.num_dense} dense features"
        )
    if min((embedding_dim, *dense_layers, *over_layers)) < 1:
        raise ConfigError(
            f"embedding_dim={embedding_dim}, dense_layers={tuple(dense_layers)}, over_layers={tuple(over_layers)}; "
            "expected sizes of at least 1"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tables = [
            EmbeddingBagConfig(
                name=f"t_{feature.name}",
                num_embeddings=feature.num_embeddings,
                embedding_dim=embedding_dim,
                feature_names=[feature.name],
            )
            for feature in contract.sparse
        ]
        return DLRM(
            EmbeddingBagCollection(tables=tables, device=table_device),
            dense_in_features=contract.num_dense,
            dense_arch_layer_sizes=[*dense_layers, embedding_dim],
            over_arch_layer_sizes=[*over_layers, 1],
        )


@torch.no_grad()
def start_at_rate(model: DLRM, positive_rate: float) -> None:
    """Set the last bias to the log-odds of ``positive_rate``, so that training need not learn the base rate first."""
    rate = min(max(positive_rate, 1e-3), 1 - 1e-3)
    last = next(m for m in reversed(list(model.over_arch.modules())) if isinstance(m, nn.Linear))
    last.bias.fill_(math.log(rate / (1 - rate)))


@torch.inference_mode()
def predict_logits(model: nn.Module, examples: Examples) -> NDArray[np.float32]:
    """The logits ``[N]`` of ``model`` for all examples, in order."""
    found = [
        model(batch.dense_features, batch.sparse_features).reshape(-1) for batch in examples.batches(_EVALUATION_BATCH)
    ]
    return torch.cat(found).float().numpy()
