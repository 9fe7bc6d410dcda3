"""What the checkpoint tests share: TorchRec's checkpoint, where there is one, and the module it was saved from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from recinfer.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.sparse import KeyedJaggedTensor

FEATURES = ["f_user", "f_item", "f_hist", "f_cat", "f_country"]


class Ranker(nn.Module):
    """The module that TorchRec's test checkpoint was saved from, built of recinfer's modules."""

    def __init__(self, device: str = "meta") -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(2000, 16, "user_id", feature_names=["f_user"]),
            EmbeddingBagConfig(3000, 32, "item_id", feature_names=["f_item", "f_hist"]),
            EmbeddingBagConfig(501, 32, "category", feature_names=["f_cat"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(37, 16, "country", feature_names=["f_country"]),
        ]
        self.sparse_arch = nn.Module()
        self.sparse_arch.ebc = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        self.dense_arch = nn.Sequential(nn.Linear(4, 16, device=device), nn.ReLU())
        self.over_arch = nn.Sequential(nn.Linear(144, 32, device=device), nn.ReLU(), nn.Linear(32, 1, device=device))

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> Tensor:
        pooled = self.sparse_arch.ebc(kjt).to_dict()
        return self.over_arch(torch.cat([self.dense_arch(dense), *(pooled[f] for f in FEATURES)], dim=1)).squeeze(1)


@pytest.fixture(scope="session")
def torchrec_checkpoint(sample_data: Path) -> Path:
    return sample_data / "torchrec_ckpt"
