"""The module whose checkpoint TorchRec wrote (the sample data's README describes it), for ``--model``."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from recinfer.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.sparse import KeyedJaggedTensor

__all__ = ["Model", "build"]

TABLES = (
    ("user_id", 2000, 16, PoolingType.SUM, ["f_user"]),
    ("item_id", 3000, 32, PoolingType.SUM, ["f_item", "f_hist"]),
    ("category", 501, 32, PoolingType.MEAN, ["f_cat"]),
    ("country", 37, 16, PoolingType.SUM, ["f_country"]),
)
FEATURES = [feature for *_, features in TABLES for feature in features]


class Sparse(nn.Module):
    """Holds the collection under the path that the checkpoint has it at."""

    def __init__(self) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=n, num_embeddings=r, embedding_dim=d, pooling=p, feature_names=f)
            for n, r, d, p, f in TABLES
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        return self.ebc(kjt).values()


class Model(nn.Module):
    """Dense part beside the embeddings, and a top MLP over both."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse_arch = Sparse()
        self.dense_arch = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
        self.over_arch = nn.Sequential(nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> Tensor:
        return self.over_arch(torch.cat([self.dense_arch(dense), self.sparse_arch(kjt)], dim=1)).squeeze(1)


def build() -> nn.Module:
    with torch.device("meta"):
        return Model()
