"""Models that rank by pooled vectors, with all kinds of inputs, and ids computed in forward."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.modules.feature_processor_ import PositionWeightedModule
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from tests.zoo.drawing import Draw

DIM = 4


def bags(
    *features: str, rows: int = 40, dim: int = DIM, weighted: bool = False, mean: bool = False
) -> EmbeddingBagCollection:
    """One pooled table a feature."""
    pooling = PoolingType.MEAN if mean else PoolingType.SUM
    tables = [EmbeddingBagConfig(rows, dim, f"t_{name}", feature_names=[name], pooling=pooling) for name in features]
    return EmbeddingBagCollection(tables=tables, is_weighted=weighted)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(widths):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def user_and_item(d: Draw, **options: Any) -> KeyedJaggedTensor:
    return d.kjt(d.bag("user", 40, user=True, **options), d.bag("item", 40, **options))


class DeepFM(nn.Module):
    """First order, factorization machine and a deep part, of all fields and the dense input."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item", "shop")
        self.wide = bags("user", "item", "shop", dim=1)
        self.dense = mlp(5, 8, DIM)
        self.deep = mlp(4 * DIM, 8, 1)
        self.register_buffer("prior", torch.tensor([0.25]))

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return d.floats(5), d.kjt(d.bag("user", 40, user=True), d.bag("item", 40), d.bag("shop", 40))

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        pooled = self.ebc(sparse_features)
        fields = [self.dense(dense_features), *(pooled[key] for key in pooled.keys())]  # noqa: SIM118
        stacked = torch.stack(fields, 1)
        fm = 0.5 * (stacked.sum(1).pow(2) - stacked.pow(2).sum(1)).sum(1, keepdim=True)
        wide = self.wide(sparse_features).values().sum(1, keepdim=True)
        return (self.deep(torch.cat(fields, 1)) + fm + wide + self.prior).squeeze(-1).sigmoid()


class WideAndDeep(nn.Module):
    """Groups of columns by KeyedTensor.regroup, BatchNorm and Dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.deep_ebc, self.wide_ebc = bags("user", "item"), bags("shop", dim=2, mean=True)
        self.deep = nn.Sequential(
            nn.Linear(2 * DIM + 3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.wide = nn.Linear(4, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return DeepFM.draw(d)[1], d.floats(3)

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        groups = KeyedTensor.regroup([self.deep_ebc(sparse), self.wide_ebc(sparse)], [["item", "user"], ["shop"]])
        return self.deep(torch.cat([groups[0], dense], 1)) + self.wide(torch.cat([groups[1]] * 2, 1))


class SeveralTensors(nn.Module):
    """Three dense tensors of other shapes and dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")
        self.top = mlp(2 * DIM + 1 + 3 + 6 + 2, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return user_and_item(d), d.floats(), d.floats(3), d.floats(2, 3).double(), d.integers(2, 2).bool()

    def forward(self, ids: KeyedJaggedTensor, price: Tensor, shown: Tensor, image: Tensor, flags: Tensor) -> Tensor:
        parts = [self.ebc(ids).values(), price.unsqueeze(1), shown, image.float().flatten(1), flags.float()]
        return self.top(torch.cat(parts, 1))


class DictOfTensors(nn.Module):
    """One dict of everything, with a text and a number that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")
        self.top = mlp(2 * DIM + 4, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        dense = {"age": d.floats(1), "price": d.floats(3)}
        return ({"ids": user_and_item(d), "dense": dense, "mode": "serve", "scale": 0.5, "label": None},)

    def forward(self, batch: dict[str, Any]) -> Tensor:
        dense = batch["dense"]
        parts = [self.ebc(batch["ids"]).values(), dense["age"], dense["price"] * batch["scale"]]
        return self.top(torch.cat(parts, 1))


class IntegerTensor(nn.Module):
    """Categories as an integer tensor into nn.Embedding and one_hot."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")
        self.hour, self.day = nn.Embedding(24, 3), 7
        self.top = mlp(2 * DIM + 3 + 7, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return user_and_item(d), d.integers(24), d.integers(7).int()

    def forward(self, ids: KeyedJaggedTensor, hour: Tensor, day: Tensor) -> Tensor:
        one_hot = nn.functional.one_hot(day.long(), self.day).float()
        return self.top(torch.cat([self.ebc(ids).values(), self.hour(hour), one_hot], 1))


class DenseKeyedTensor(nn.Module):
    """Dense features by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")
        self.top = mlp(2 * DIM + 3, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return d.keyed(price=1, image=2), user_and_item(d)

    def forward(self, dense: KeyedTensor, ids: KeyedJaggedTensor) -> Tensor:
        parts = [self.ebc(ids).values(), torch.log1p(dense["price"].abs()), dense["image"]]
        return self.top(torch.cat(parts, 1))


@dataclass
class EasyBatch:
    """A batch like TorchEasyRec's Batch: dicts of groups."""

    dense_features: dict[str, KeyedTensor] = field(default_factory=dict)
    sparse_features: dict[str, KeyedJaggedTensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)
    checkpoint_info: dict[str, Any] | None = None
    reserves: Tensor | None = None

    def to(self, device: torch.device) -> EasyBatch:
        return self


class DataclassBatch(nn.Module):
    """DeepFM of TorchEasyRec: a batch of groups, one of them weighted; labels are not read."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.weighted = bags("user", "item"), bags("tags", weighted=True)
        self.top = mlp(3 * DIM + 3, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        sparse = {"base": user_and_item(d), "weighted": d.kjt(d.bag("tags", 40, weighted=True))}
        return (EasyBatch({"base": d.keyed(price=1, stats=2)}, sparse, {"clk": d.integers(2)}),)

    def forward(self, batch: EasyBatch) -> dict[str, Tensor]:
        dense = batch.dense_features["base"].values()
        pooled = [self.ebc(batch.sparse_features["base"]), self.weighted(batch.sparse_features["weighted"])]
        grouped = KeyedTensor.regroup(pooled, [["user", "item", "tags"]])[0]
        logits = self.top(torch.cat([grouped, dense], 1)).squeeze(1)
        return {"logits": logits, "probs": torch.sigmoid(logits)}


class WeightedAndPlain(nn.Module):
    """One weighted and one unweighted collection, of the same KeyedJaggedTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.weighted = bags("user"), bags("item", weighted=True)
        self.top = mlp(2 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (user_and_item(d, weighted=True),)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.top(torch.cat([self.plain(ids).values(), self.weighted(ids).values()], 1))


class DecayedWeights(nn.Module):
    """Weights of ids that forward computes: from the weights of requests, and from the age of each id."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks, self.buys = bags("seen", "clicked", weighted=True), bags("bought", "returned", weighted=True)
        self.top = mlp(4 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        bought, returned = d.bag("bought", 40), d.bag("returned", 40)
        ages = [d.bag(f"age_{bag.name}", 0, like=bag, kind=torch.float32) for bag in (bought, returned)]
        seen = d.kjt(d.bag("seen", 40, weighted=True), d.bag("clicked", 40, weighted=True))
        return seen, d.kjt(bought, returned), d.kjt(*ages)

    def forward(self, seen: KeyedJaggedTensor, ids: KeyedJaggedTensor, ages: KeyedJaggedTensor) -> Tensor:
        pairs = (seen, 1 / (1 + seen.weights())), (ids, torch.exp(-ages.values().abs()))
        weighted = [KeyedJaggedTensor(k.keys(), k.values(), weights, lengths=k.lengths()) for k, weights in pairs]
        return self.top(torch.cat([self.clicks(weighted[0]).values(), self.buys(weighted[1]).values()], 1))


class FeatureProcessed(nn.Module):
    """Position weights, by TorchRec's FeatureProcessedEmbeddingBagCollection."""

    def __init__(self) -> None:
        super().__init__()
        processors = {"user": PositionWeightedModule(6), "item": PositionWeightedModule(6)}
        with torch.no_grad():
            for processor in processors.values():
                processor.position_weight.uniform_(0.5, 1.5)
        self.fp = FeatureProcessedEmbeddingBagCollection(bags("user", "item", weighted=True), processors)
        self.top = mlp(2 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (user_and_item(d),)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.top(self.fp(ids).values())


class MMoE(nn.Module):
    """Experts and gates of two tasks; a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")
        self.experts = nn.ModuleList(mlp(2 * DIM, 6) for _ in range(3))
        self.gates = nn.ModuleDict({task: nn.Linear(2 * DIM, 3) for task in ("click", "buy")})
        self.towers = nn.ModuleDict({task: mlp(6, 4, 1) for task in ("click", "buy")})

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (user_and_item(d),)

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        x = self.ebc(ids).values()
        experts = torch.stack([expert(x).relu() for expert in self.experts], 1)
        found = {}
        for task, tower in self.towers.items():
            gate = torch.softmax(self.gates[task](x), 1).unsqueeze(1)
            found[task] = tower((gate @ experts).squeeze(1)).squeeze(1).sigmoid()
        found["click_and_buy"] = found["click"] * found["buy"]
        return found


class PLE(nn.Module):
    """Shared and own experts, by a user tensor; a tuple of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")
        self.shared, self.own = mlp(2 * DIM + 2, 6), nn.ModuleList(mlp(2 * DIM + 2, 6) for _ in range(2))
        self.gates = nn.ModuleList(nn.Linear(2 * DIM + 2, 2) for _ in range(2))
        self.towers = nn.ModuleList(nn.Linear(6, 1) for _ in range(2))

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return d.floats(2), user_and_item(d)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> tuple[Tensor, ...]:
        x = torch.cat([self.ebc(ids).values(), dense], 1)
        outputs = []
        for own, gate, tower in zip(self.own, self.gates, self.towers):
            mixed = torch.einsum("bed,be->bd", torch.stack([self.shared(x), own(x)], 1), gate(x).softmax(-1))
            outputs.append(tower(mixed))
        return tuple(outputs)


class TwoTower(nn.Module):
    """A user and an item tower, each with a KeyedJaggedTensor of its own; vectors and score, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.user_ebc, self.item_ebc = bags("user", "city"), bags("item")
        self.user_tower, self.item_tower = mlp(2 * DIM, 8, 6), mlp(DIM + 2, 8, 6)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        users = d.kjt(d.bag("user", 40, each=1, user=True), d.bag("city", 40, user=True))
        return users, d.kjt(d.bag("item", 40)), d.floats(2)

    def forward(self, users: KeyedJaggedTensor, items: KeyedJaggedTensor, dense: Tensor) -> dict[str, Any]:
        u = nn.functional.normalize(self.user_tower(self.user_ebc(users).values()), dim=1)
        i = nn.functional.normalize(self.item_tower(torch.cat([self.item_ebc(items).values(), dense], 1)), dim=1)
        return {"vectors": [u, i], "scores": {"dot": (u * i).sum(1), "pair": (u[:, :1], i[:, :1])}, "aux": None}


class Autocast(nn.Module):
    """bfloat16 by autocast inside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")
        self.top = mlp(2 * DIM, 8, 1)

    draw = staticmethod(FeatureProcessed.draw)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        x = self.ebc(ids).values()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.top(x)
        return x.float()


class BFloat16(nn.Module):
    """A dense part in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")
        self.top = mlp(2 * DIM + 3, 8, 1).bfloat16()

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return d.floats(3), user_and_item(d)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return self.top(torch.cat([dense, self.ebc(ids).values()], 1).bfloat16())


class FieldAttention(nn.Module):
    """AutoInt: multi-head attention over fields, and a CIN layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item", "shop")
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.norm, self.cin = nn.LayerNorm(DIM), nn.Conv1d(9, 5, 1)
        self.top = nn.Linear(3 * DIM + 5, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (DeepFM.draw(d)[1],)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        x = self.ebc(ids).values().view(-1, 3, DIM)
        attended = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        outer = torch.einsum("bid,bjd->bijd", x, x).reshape(x.size(0), 9, DIM)
        return self.top(torch.cat([attended.flatten(1), self.cin(outer).sum(-1)], 1))


# ------------------------------------------------------------------------------------------------- ids in forward


class HashedIds(nn.Module):
    """Ids hashed into smaller tables, one crossed of two features that have one id each."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item", "cross")
        self.top = mlp(3 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (d.kjt(d.bag("user", 1 << 40, each=1, user=True), d.bag("item", 1 << 40, each=1)),)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        user, item = ids["user"].values(), ids["item"].values()
        hashed = [((x ^ (x >> 17)) * 0x9E3779B1 & 0x7FFFFFFF) % 40 for x in (user, item, user * 31 + item)]
        lengths = torch.ones(3 * ids.stride(), dtype=torch.int32)
        kjt = KeyedJaggedTensor(keys=["user", "item", "cross"], values=torch.cat(hashed), lengths=lengths)
        return self.top(self.ebc(kjt).values())


class IdsOfTensors(nn.Module):
    """No KeyedJaggedTensor among the arguments: forward makes one of tensors of ids."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")
        self.top = mlp(2 * DIM + 1, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return d.integers(40), d.integers(40), d.floats(1)

    def forward(self, user: Tensor, item: Tensor, price: Tensor) -> Tensor:
        lengths = torch.ones(2 * user.shape[0], dtype=torch.int32)
        ids = KeyedJaggedTensor(keys=["user", "item"], values=torch.cat([user, item]), lengths=lengths)
        return self.top(torch.cat([self.ebc(ids).values(), price], 1))


class ModuloIds(nn.Module):
    """All ids modulo the rows, with the lengths of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")
        self.top = mlp(2 * DIM + 2, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return d.kjt(d.bag("user", 1000, user=True), d.bag("item", 1000)), d.floats(2)

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        kjt = KeyedJaggedTensor(ids.keys(), ids.values() % 40, lengths=ids.lengths())
        return self.top(torch.cat([self.ebc(kjt).values(), dense], 1))


class BucketizedDense(nn.Module):
    """Buckets of numbers as ids, beside given ids."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.buckets = bags("user", "item"), bags("age", "price", rows=6)
        self.register_buffer("edges", torch.tensor([-1.0, -0.3, 0.0, 0.4, 1.2]))
        self.top = mlp(4 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return d.floats(2), user_and_item(d)

    def forward(self, dense: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        found = torch.bucketize(dense, self.edges)
        lengths = torch.ones(2 * dense.shape[0], dtype=torch.int32, device=dense.device)
        kjt = KeyedJaggedTensor(["age", "price"], found.t().flatten(), lengths=lengths)
        return self.top(torch.cat([self.ebc(ids).values(), self.buckets(kjt).values()], 1))


class SplitPermuteConcat(nn.Module):
    """KeyedJaggedTensors split, permuted and concatenated; no id changes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = bags("user", "shop"), bags("item", "city")
        self.top = mlp(4 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return DeepFM.draw(d)[1], d.kjt(d.bag("city", 40, user=True))

    def forward(self, ids: KeyedJaggedTensor, more: KeyedJaggedTensor) -> Tensor:
        users, others = ids.permute([0, 2, 1]).split([1, 2])
        shops, items = others.split([1, 1])
        first = self.one(KeyedJaggedTensor.concat([users, shops]))
        second = self.two(KeyedJaggedTensor.concat([items, more]))
        return self.top(torch.cat([first.values(), second.values()], 1))


class ReadsTheKjt(nn.Module):
    """Lengths, stride, keys and a dict of a KeyedJaggedTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item")
        self.bias = nn.Parameter(torch.randn(1, 2))
        self.top = mlp(2 * DIM + 6, 8, 1)

    draw = staticmethod(FeatureProcessed.draw)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        counts = ids.lengths().view(len(ids.keys()), ids.stride()).t()
        by_name = torch.stack([ids.to_dict()[key].lengths() for key in ids.keys()], 1)  # noqa: SIM118
        bias = self.bias.repeat(ids.stride(), 1)
        mean = self.ebc(ids).values() / counts.clamp(min=1).repeat_interleave(DIM, dim=1)
        return self.top(torch.cat([mean, torch.log1p(counts.float()), by_name.float(), bias], 1))


class CalledTwice(nn.Module):
    """One collection for the bag of the user's clicks and for the candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("item")
        self.top = mlp(2 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return d.kjt(d.bag("clicks", 40, user=True)), d.kjt(d.bag("item", 40, each=1))

    def forward(self, clicks: KeyedJaggedTensor, candidate: KeyedJaggedTensor) -> Tensor:
        renamed = KeyedJaggedTensor(["item"], clicks.values(), lengths=clicks.lengths())
        return self.top(torch.cat([self.ebc(renamed).values(), self.ebc(candidate).values()], 1))


class OneNameTwice(nn.Module):
    """The same feature name in two KeyedJaggedTensors."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = bags("item"), bags("item")
        self.top = mlp(2 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return d.kjt(d.bag("item", 40)), d.kjt(d.bag("item", 40))

    def forward(self, seen: KeyedJaggedTensor, candidate: KeyedJaggedTensor) -> Tensor:
        return self.top(torch.cat([self.one(seen).values(), self.two(candidate).values()], 1))
