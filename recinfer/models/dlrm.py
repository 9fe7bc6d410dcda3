"""The reference model, DLRM: dense MLP, embeddings, pairwise interaction, top MLP (Naumov et al., 2019).

Shapes: ``B`` batch, ``F`` sparse features, ``D`` embedding dim, ``d`` dense features.
"""

# Annotations stay classes in this module (no __future__ import): torch.fx would write their text into its code, where
# TorchScript does not know the names.

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from recinfer.errors import ConfigError
from recinfer.modules.crossnet import LowRankCrossNet
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.modules.mlp import MLP
from recinfer.sparse.checks import is_plain
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "DLRMTrain",
    "DLRM_Projection",
    "DenseArch",
    "InteractionArch",
    "InteractionDCNArch",
    "InteractionProjectionArch",
    "OverArch",
    "SparseArch",
    "choose",
]


def choose(n: int, k: int) -> int:
    """The binomial coefficient ``n`` over ``k``; 0 if ``k`` is not in 0..n."""
    if k < 0 or k > n:
        return 0
    result = 1
    for i in range(min(k, n - k)):
        result = result * (n - i) // (i + 1)
    return result


class SparseArch(nn.Module):
    """The embedding part: pooled vectors, feature by feature.

    Args:
        embedding_bag_collection: the tables, all of one dim; any module with ``embedding_bag_configs()`` whose
            forward gives a KeyedTensor; or a module around one, which gives the features with rows, too.

    Raises:
        ConfigError: no tables, or tables of different dims.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        tables = getattr(embedding_bag_collection, "_embedding_module", embedding_bag_collection)
        configs = tables.embedding_bag_configs()
        dims = sorted({c.embedding_dim for c in configs})
        if len(dims) != 1:
            raise ConfigError(f"DLRM: tables have dims {dims}; expected at least one table, and the same dim for all")
        self.D: int = dims[0]
        self._sparse_feature_names = [name for c in configs for name in c.feature_names]
        self.F: int = len(self._sparse_feature_names)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """``[B, F, D]``."""
        pooled = self.embedding_bag_collection(features)
        if isinstance(pooled, tuple):  # with the features whose raw ids became rows
            pooled = pooled[0]
        return pooled.values().reshape(-1, self.F, self.D)

    @property
    def sparse_feature_names(self) -> list[str]:
        """The features in the order of the output."""
        return self._sparse_feature_names


class DenseArch(nn.Module):
    """The MLP of the dense features.

    Args:
        in_features: ``d``.
        layer_sizes: columns after each layer; the last is ``D``.
        device: device of the parameters.
    """

    def __init__(self, in_features: int, layer_sizes: list[int], device: torch.device | None = None) -> None:
        super().__init__()
        self.model = MLP(in_features, layer_sizes, bias=True, activation="relu", device=device)

    def forward(self, features: Tensor) -> Tensor:
        """``[B, d]`` to ``[B, D]``."""
        return self.model(features)


def _together(dense_features: Tensor, sparse_features: Tensor) -> Tensor:
    return torch.cat((dense_features.unsqueeze(1), sparse_features), dim=1)


class InteractionArch(nn.Module):
    """Concatenates the dense vector and the dot products of all pairs of vectors (features and dense).

    Args:
        num_sparse_features: ``F``.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.F = num_sparse_features
        size = num_sparse_features + 1
        # The pairs are not a buffer: a buffer of a model on meta would have no numbers, and checkpoints do not store
        # them.
        with torch.device("cpu"):
            rows, columns = torch.triu_indices(size, size, offset=1)
        self._pairs = rows * size + columns
        self._pairs_on: dict[torch.device, Tensor] = {}

    def _pair_places(self, device: torch.device) -> Tensor:
        if device.type in ("cpu", "meta") or torch.compiler.is_compiling():
            return self._pairs.to(device)
        if device not in self._pairs_on:
            self._pairs_on[device] = self._pairs.to(device)
        return self._pairs_on[device]

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """``[B, D]`` and ``[B, F, D]`` to ``[B, D + F (F + 1) / 2]``."""
        if self.F <= 0:
            return dense_features
        vectors = _together(dense_features, sparse_features)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        if torch.jit.is_scripting():  # TorchScript has no dictionary by device
            places = self._pairs.to(products.device)
        elif is_plain(products):
            places = self._pair_places(products.device)
        else:  # a tracer's symbol, whose device is a symbol too
            places = self._pairs.to(products.device)
        pairs = products.index_select(1, places)
        return torch.cat((dense_features, pairs), dim=1)


class InteractionDCNArch(nn.Module):
    """A cross network over the concatenation of all vectors.

    Args:
        num_sparse_features: ``F``.
        crossnet: maps ``[B, (F + 1) D]`` to the same shape.
    """

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """``[B, D]`` and ``[B, F, D]`` to ``[B, (F + 1) D]``."""
        if self.F <= 0:
            return dense_features
        return self.crossnet(_together(dense_features, sparse_features).flatten(1))


class InteractionProjectionArch(nn.Module):
    """Concatenates the dense vector and the dot products between two projections of all vectors.

    Args:
        num_sparse_features: ``F``.
        interaction_branch1: maps ``[B, (F + 1) D]`` to ``[B, P1 D]``.
        interaction_branch2: maps ``[B, (F + 1) D]`` to ``[B, D P2]``.
    """

    def __init__(
        self, num_sparse_features: int, interaction_branch1: nn.Module, interaction_branch2: nn.Module
    ) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """``[B, D]`` and ``[B, F, D]`` to ``[B, D + P1 P2]``."""
        if self.F <= 0:
            return dense_features
        dim = dense_features.shape[1]
        flat = _together(dense_features, sparse_features).flatten(1)
        left = self.interaction_branch1(flat).unflatten(1, (-1, dim))
        right = self.interaction_branch2(flat).unflatten(1, (dim, -1))
        return torch.cat((dense_features, torch.bmm(left, right).flatten(1)), dim=1)


class OverArch(nn.Module):
    """The top MLP; its last layer is linear.

    Args:
        in_features: columns of the interaction.
        layer_sizes: columns after each layer, at least two layers.
        device: device of the parameters.

    Raises:
        ConfigError: fewer than two layers.
    """

    def __init__(self, in_features: int, layer_sizes: list[int], device: torch.device | None = None) -> None:
        super().__init__()
        if len(layer_sizes) < 2:
            raise ConfigError(f"DLRM: over_arch_layer_sizes is {layer_sizes}; expected at least two layers")
        self.model = nn.Sequential(
            MLP(in_features, layer_sizes[:-1], bias=True, activation="relu", device=device),
            nn.Linear(layer_sizes[-2], layer_sizes[-1], bias=True, device=device),
        )

    def forward(self, features: Tensor) -> Tensor:
        """``[B, in_features]`` to ``[B, layer_sizes[-1]]``."""
        return self.model(features)


class DLRM(nn.Module):
    """Deep Learning Recommendation Model.

    Args:
        embedding_bag_collection: the tables, all of dim ``D``.
        dense_in_features: ``d``.
        dense_arch_layer_sizes: columns of the bottom MLP; the last is ``D``.
        over_arch_layer_sizes: columns of the top MLP, at least two layers; the last is 1 for one logit.
        dense_device: device of the dense parameters.

    Raises:
        ConfigError: inconsistent sizes.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        num_features, dim = self.sparse_arch.F, self.sparse_arch.D
        if not dense_arch_layer_sizes or dense_arch_layer_sizes[-1] != dim:
            raise ConfigError(
                f"DLRM: dense_arch_layer_sizes is {dense_arch_layer_sizes} but the tables have dim {dim}; the last "
                "dense layer must have that size"
            )
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, device=dense_device)
        self.inter_arch, width = self._interaction(num_features, dim)
        self.over_arch = OverArch(width, over_arch_layer_sizes, device=dense_device)

    def _interaction(self, num_features: int, dim: int) -> tuple[nn.Module, int]:
        return InteractionArch(num_features), dim + choose(num_features + 1, 2)

    def compile_dense_path(self, compile_mode: str = "reduce-overhead") -> None:
        """Compile the dense parts in place with torch.compile."""
        for part in (self.dense_arch, self.inter_arch, self.over_arch):
            part.compile(mode=compile_mode)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Compute the logits.

        Args:
            dense_features: float ``[B, d]``.
            sparse_features: at least the features of the tables.

        Returns:
            Tensor: ``[B, over_arch_layer_sizes[-1]]``.
        """
        embedded_dense = self.dense_arch(dense_features)
        embedded_sparse = self.sparse_arch(sparse_features)
        return self.over_arch(self.inter_arch(embedded_dense, embedded_sparse))


class DLRM_Projection(DLRM):
    """DLRM with the interaction of two projections.

    Args:
        interaction_branch1_layer_sizes, interaction_branch2_layer_sizes: columns of the projections; the last of each
            is a multiple of ``D``. The others are those of :class:`DLRM`.

    Raises:
        ConfigError: inconsistent sizes.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        interaction_branch1_layer_sizes: list[int],
        interaction_branch2_layer_sizes: list[int],
        dense_device: torch.device | None = None,
    ) -> None:
        self._branches = (interaction_branch1_layer_sizes, interaction_branch2_layer_sizes)
        self._dense_device = dense_device
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device
        )

    def _interaction(self, num_features: int, dim: int) -> tuple[nn.Module, int]:
        for at, sizes in enumerate(self._branches, start=1):
            if not sizes or sizes[-1] % dim:
                raise ConfigError(
                    f"DLRM_Projection: interaction_branch{at}_layer_sizes is {sizes}; the last must be a multiple of "
                    f"the tables' dim {dim}"
                )
        width = (num_features + 1) * dim
        one, two = (DenseArch(width, sizes, device=self._dense_device) for sizes in self._branches)
        pairs = (self._branches[0][-1] // dim) * (self._branches[1][-1] // dim)
        return InteractionProjectionArch(num_features, one, two), dim + pairs


class DLRM_DCN(DLRM):
    """DLRM with a low-rank cross network as the interaction (DCN-v2).

    Args:
        dcn_num_layers: cross layers.
        dcn_low_rank_dim: their rank. The others are those of :class:`DLRM`.

    Raises:
        ConfigError: inconsistent sizes.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
    ) -> None:
        self._cross = (dcn_num_layers, dcn_low_rank_dim)
        self._dense_device = dense_device
        super().__init__(
            embedding_bag_collection, dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes, dense_device
        )

    def _interaction(self, num_features: int, dim: int) -> tuple[nn.Module, int]:
        width = (num_features + 1) * dim
        num_layers, low_rank = self._cross
        with torch.device(self._dense_device or torch.get_default_device()):
            crossnet = LowRankCrossNet(width, num_layers, low_rank)
        return InteractionDCNArch(num_features, crossnet), width


class _Batch(Protocol):
    @property
    def dense_features(self) -> Tensor: ...

    @property
    def sparse_features(self) -> KeyedJaggedTensor: ...

    @property
    def labels(self) -> Tensor: ...


class DLRMTrain(nn.Module):
    """A DLRM with its loss, binary cross entropy on the logits.

    Args:
        dlrm_module: the model, with one logit per example.
    """

    def __init__(self, dlrm_module: DLRM) -> None:
        super().__init__()
        self.model = dlrm_module
        self.loss_fn: nn.Module = nn.BCEWithLogitsLoss()

    def forward(self, batch: _Batch | Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """The mean loss, and (loss, logits ``[B]``, labels ``[B]``) detached.

        Args:
            batch: anything with ``dense_features`` ``[B, d]``, ``sparse_features`` and ``labels`` ``[B]`` (0 or 1).
        """
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = self.loss_fn(logits, batch.labels.to(logits.dtype))
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())
