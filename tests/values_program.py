"""A program written for TorchRec that prints its values as JSON; tests/test_values_of_torchrec.py runs it under both packages.

Its argument is the path of the file that takes the weights and the outputs of a model with FP16 tables and long bags.
"""

import json
import sys
import tempfile

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

ROWS, DIM = 10, 4
SGD = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}


TABLE = {"num_embeddings": ROWS, "embedding_dim": DIM, "name": "t", "feature_names": ["f"]}


def numbered(weight):
    """Row r holds r: TorchRec's sharded modules fill their tables again."""
    with torch.no_grad():
        return weight.copy_(torch.arange(float(weight.shape[0])).unsqueeze(1).expand_as(weight))


def bags():
    return EmbeddingBagCollection(tables=[EmbeddingBagConfig(**TABLE, init_fn=numbered)])


def rows():
    return EmbeddingCollection(tables=[EmbeddingConfig(**TABLE, init_fn=numbered)])


def sharded(module, kernel="fused", kind="table_wise", params=SGD, path=""):
    model = module if path else nn.Sequential(module)
    pooled = isinstance(model.get_submodule(path or "0"), EmbeddingBagCollection)
    sharder = (EmbeddingBagCollectionSharder if pooled else EmbeddingCollectionSharder)(fused_params=params)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=1, compute_device="cpu"),
        constraints={"t": ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel])},
    )
    plan = planner.plan(model, [sharder])
    return DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])


def ids_of(*ids, dtype=torch.int64):
    return KeyedJaggedTensor(["f"], torch.tensor(ids, dtype=dtype), lengths=torch.ones(len(ids), dtype=torch.int64))


def variable():
    return KeyedJaggedTensor(
        ["f"],
        torch.tensor([1, 2]),
        lengths=torch.tensor([1, 1]),
        stride_per_key_per_rank=[[2]],
        inverse_indices=(["f"], torch.tensor([[0, 1, 0]])),
    )


def failed(function):
    """Whether it raises, whatever its class: packages have their own."""
    try:
        function()
    except Exception:
        return True
    return False


def two_names():
    """The values of a collection under two names after a step, in TorchRec unsharded: its DMP shards the first name alone."""
    module = bags()
    both = nn.ModuleDict({"left": module, "right": module})
    if not EmbeddingBagCollection.__module__.startswith("torch" + "rec"):
        both = sharded(both, path="left").module
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    both["left"](ids_of(1))["f"].sum().backward()
    optimizer.step()
    return [both[name](ids_of(1))["f"][0, 0].item() for name in ("left", "right")]


def after_a_cast():
    dmp = sharded(bags())
    dmp.half().float()
    dmp(ids_of(1)).wait()["f"].sum().backward()
    (state,) = dmp.state_dict().values()
    return [dmp(ids_of(1)).wait()["f"][0, 0].item(), state.local_shards()[0].tensor[1, 0].item()]


def after_other_casts():
    """Row 1 after a cast there and back and a step: collections, shardings and types."""
    found = {}
    for name, module in (("bags", bags), ("rows", rows)):
        for kind in ("table_wise", "column_wise"):
            for there in (torch.bfloat16, torch.float64):
                dmp = sharded(module(), kind=kind)
                dmp.to(there).float()

                def row(dmp=dmp, module=module):
                    found = dmp(ids_of(1)).wait()["f"]
                    return found if module is bags else found.values()

                row().sum().backward()
                found[f"{name} {kind} {there}"] = row()[0, 0].item()
    return found


def narrow_tables():
    """A table of one column: pooled, unpooled, and after a step; None in TorchRec, which shards multiples of four columns."""
    if EmbeddingBagCollection.__module__.startswith("torch" + "rec"):
        return None
    table = {**TABLE, "embedding_dim": 1, "init_fn": numbered}
    pooled = sharded(EmbeddingBagCollection(tables=[EmbeddingBagConfig(**table)]))
    pooled(ids_of(1, 2)).wait()["f"].sum().backward()
    unpooled = sharded(EmbeddingCollection(tables=[EmbeddingConfig(**table)]))
    return [pooled(ids_of(1, 2, 3)).wait()["f"].tolist(), unpooled(ids_of(1, 2)).wait()["f"].values().tolist()]


def inverse_indices():
    found = sharded(rows())(variable()).wait()["f"]
    return {
        "bags": bags()(variable())["f"][:, 0].tolist(),
        "sharded bags": sharded(bags())(variable()).wait()["f"][:, 0].tolist(),
        "sharded rows": [found.values()[:, 0].tolist(), found.lengths().tolist()],
    }


def without_feature_names():
    table = EmbeddingBagConfig(num_embeddings=ROWS, embedding_dim=DIM, name="f")
    found = EmbeddingBagCollection(tables=[table])(ids_of(1, 2))
    return [found.keys(), list(found.values().shape)]


def bad_ids_fail():
    cases = [("fused", "table_wise", -1), ("dense", "data_parallel", -1), ("dense", "data_parallel", ROWS)]
    return [
        failed(lambda case=case: sharded(bags(), case[0], case[1])(ids_of(case[2])).wait().values()) for case in cases
    ]


def float_ids_fail():
    return failed(lambda: bags()(ids_of(1.9, dtype=torch.float32)).values())


def optimizers():
    """Rows 1 and 3 after two steps in the backward."""
    found = {}
    cases = {
        "SGD": (torch.optim.SGD, {"lr": 0.5}),
        "Adagrad": (torch.optim.Adagrad, {"lr": 0.5, "eps": 1e-6}),
    }
    for name, (kind, arguments) in cases.items():
        module = bags()
        apply_optimizer_in_backward(kind, module.parameters(), arguments)
        dmp = sharded(module, params=None)
        for _ in range(2):
            dmp(ids_of(1, 3, 3)).wait()["f"].square().sum().backward()
        found[name] = dmp(ids_of(1, 3)).wait()["f"][:, 0].tolist()
    return found


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        table = EmbeddingBagConfig(
            num_embeddings=200, embedding_dim=8, name="t", feature_names=["f"], data_type=DataType.FP16
        )
        self.ebc = EmbeddingBagCollection(tables=[table])
        self.top = nn.Linear(8, 1)

    def forward(self, features):
        return self.top(self.ebc(features).values().float()).squeeze(1)


def long_bags(path):
    torch.manual_seed(0)
    model = Half()
    model.ebc.embedding_bags["t"].weight.data.copy_(torch.rand(200, 8) + 0.5)
    lengths = torch.randint(40, 61, (60,), dtype=torch.int32)
    values = torch.randint(0, 200, (int(lengths.sum()),))
    output = model(KeyedJaggedTensor(["f"], values, lengths=lengths)).detach()
    torch.save(model.state_dict(), path + ".pt")
    np.savez(path + ".npz", **{"f.values": values.numpy(), "f.lengths": lengths.numpy(), "output": output.numpy()})


dist.init_process_group("gloo", init_method="file://" + tempfile.mktemp(), rank=0, world_size=1)
long_bags(sys.argv[1])
cases = [
    two_names,
    after_a_cast,
    after_other_casts,
    narrow_tables,
    inverse_indices,
    without_feature_names,
    bad_ids_fail,
    float_ids_fail,
    optimizers,
]
print(json.dumps({case.__name__: case() for case in cases}))
