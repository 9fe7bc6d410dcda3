"""TorchRec's half of test_torchrec_trains_on.py, run by an interpreter that has torchrec: ``torchrec_side.py FOLDER``.

Two gloo ranks load ``FOLDER/ours`` (model and optimizer) under another sharding, train on ``FOLDER/batches.pt``, write their
logits to ``FOLDER/logits-<rank>.pt`` and a checkpoint of their own to ``FOLDER/theirs``.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn


def model_of(torchrec: Any, config: Any) -> nn.Module:
    """The module of the sample checkpoint, its tables on meta."""
    tables = [
        config(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, pooling=pooling)
        for name, rows, dim, features, pooling in (
            ("user_id", 2000, 16, ["f_user"], torchrec.PoolingType.SUM),
            ("item_id", 3000, 32, ["f_item", "f_hist"], torchrec.PoolingType.SUM),
            ("category", 501, 32, ["f_cat"], torchrec.PoolingType.MEAN),
            ("country", 37, 16, ["f_country"], torchrec.PoolingType.SUM),
        )
    ]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sparse_arch = nn.Module()
            self.sparse_arch.ebc = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
            self.dense_arch = nn.Sequential(nn.Linear(4, 16), nn.ReLU())
            self.over_arch = nn.Sequential(nn.Linear(144, 32), nn.ReLU(), nn.Linear(32, 1))

        def forward(self, dense: torch.Tensor, sparse: Any) -> torch.Tensor:
            pooled = self.sparse_arch.ebc(sparse)
            parts = [pooled[f] for f in ("f_user", "f_item", "f_hist", "f_cat", "f_country")]
            return self.over_arch(torch.cat([self.dense_arch(dense), *parts], dim=1)).squeeze(1)

    return Model()


def side(rank: int, folder: str) -> None:
    """One rank."""
    import torchrec
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan, ShardingType
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    class AnySharder(EmbeddingBagCollectionSharder):
        def sharding_types(self, compute_device_type: str) -> list[str]:
            return [t.value for t in ShardingType]

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.set_num_threads(1)
    model = model_of(torchrec, EmbeddingBagConfig)
    ebc = model.sparse_arch.ebc
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.02, "eps": 1e-8})
    plan = construct_module_sharding_plan(
        ebc,
        {
            "user_id": table_wise(rank=1),  # row-wise in ours
            "item_id": row_wise(),  # table-wise in ours
            "category": column_wise(ranks=[1, 0]),  # ours: the other way round
            "country": table_wise(rank=0),  # row-wise in ours
        },
        AnySharder(),
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    dmp = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({"sparse_arch.ebc": plan}), sharders=[AnySharder()]
    )
    state = {"model": dmp.state_dict(), "optim": dmp.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/ours")
    dmp.load_state_dict(state["model"])
    dmp.fused_optimizer.load_state_dict(state["optim"])
    dense = torch.optim.SGD([p for n, p in dmp.named_parameters() if "sparse_arch" not in n], lr=0.1)
    logits = []
    for keys, values, lengths, numbers, labels in torch.load(f"{folder}/batches.pt")[rank]:
        dense.zero_grad()
        out = dmp(numbers, torchrec.KeyedJaggedTensor(keys=keys, values=values, lengths=lengths))
        (out - labels).pow(2).mean().backward()
        dense.step()
        logits.append(out.detach())
    torch.save(logits, f"{folder}/logits-{rank}.pt")
    dcp.save({"model": dmp.state_dict(), "optim": dmp.fused_optimizer.state_dict()}, checkpoint_id=f"{folder}/theirs")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(side, (sys.argv[1],), nprocs=2)
