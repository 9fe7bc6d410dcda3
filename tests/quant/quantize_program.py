"""A program written for TorchRec: quantizes two tables in every precision, and saves packed rows and looked-up vectors."""

import sys

import torch
import torchrec
from torch.ao.quantization import PlaceholderObserver, QConfig
from torchrec.quant.embedding_modules import EmbeddingBagCollection as Quantized

torch.manual_seed(0)
kjt = torchrec.KeyedJaggedTensor.from_lengths_sync(
    ["a", "b"],
    torch.randint(0, 50, (60,)),
    torch.randint(0, 4, (40,)).index_fill_(0, torch.arange(40), 0) + torch.tensor([1, 2] * 20),
)
found = {}
for weight in (torch.qint8, torch.quint4x2, torch.quint2x4, torch.float16):
    for pooling in (torchrec.PoolingType.SUM, torchrec.PoolingType.MEAN):
        tables = [
            torchrec.EmbeddingBagConfig(
                name=f"t_{f}", embedding_dim=16, num_embeddings=50, feature_names=[f], pooling=pooling
            )
            for f in ("a", "b")
        ]
        bags = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        torch.manual_seed(1)  # after the tables, whose first values are drawn too
        with torch.no_grad():
            for parameter in bags.parameters():
                parameter.copy_(torch.randn(parameter.shape))
        bags.qconfig = QConfig(
            activation=PlaceholderObserver.with_args(dtype=torch.float),
            weight=PlaceholderObserver.with_args(dtype=weight),
        )
        quantized = Quantized.from_float(bags)
        name = f"{weight} {pooling.name}"
        found[f"{name} vectors"] = quantized(kjt).values()
        for key, value in quantized.state_dict().items():
            if key.endswith("weight"):
                found[f"{name} {key}"] = getattr(value, "elem", value).clone()
torch.save(found, sys.argv[1])
