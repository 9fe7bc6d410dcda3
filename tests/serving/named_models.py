"""Two models with named inputs as archives: tensors, jagged numbers and facts; and ids that forward computes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.checkpoint import CheckpointReader, save_checkpoint
from recinfer.distributed.planner.inference import plan_inference
from recinfer.inference.export import export_archive
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from tests.kept import kept

__all__ = ["Asked", "Hashed", "Priced", "ask_hashed", "ask_priced", "make_archive"]

DIM = 8
SLOTS = 2


class Priced(nn.Module):
    """A float and an int64 tensor, flags, a feature of two ids per sample, and a price of each item of a history."""

    def __init__(self) -> None:
        super().__init__()
        bags = [EmbeddingBagConfig(50, DIM, "t_user", feature_names=["user"])]
        lists = [
            EmbeddingConfig(40, DIM, "t_history", feature_names=["history"]),
            EmbeddingConfig(30, DIM, "t_slot", feature_names=["slot"]),
        ]
        self.bags = EmbeddingBagCollection(tables=bags)
        self.lists = EmbeddingCollection(tables=lists)
        self.days = nn.Linear(7, 4)
        self.head = nn.Linear(DIM + SLOTS * DIM + 2 + 4 + 1 + DIM, 3)

    def forward(
        self, price: Tensor, weekday: Tensor, flag: Tensor, features: KeyedJaggedTensor, history_price: JaggedTensor
    ) -> dict[str, Tensor]:
        found = self.lists(features)
        history = found["history"]
        paid = history.values() * history_price.values().unsqueeze(1)
        paid = torch.segment_reduce(paid, "sum", lengths=history.lengths().long(), axis=0)
        slots = found["slot"].values().view(price.shape[0], SLOTS * DIM)
        days = self.days(nn.functional.one_hot(weekday, 7).float())
        parts = [self.bags(features).values(), slots, price, days, flag.float().unsqueeze(1), paid]
        return {"score": self.head(torch.cat(parts, 1))}


class Hashed(nn.Module):
    """Ids from a tensor and from a feature, by modulo."""

    def __init__(self) -> None:
        super().__init__()
        bags = [
            EmbeddingBagConfig(50, DIM, "t_user", feature_names=["user"]),
            EmbeddingBagConfig(40, DIM, "t_item", feature_names=["item_hashed"]),
            EmbeddingBagConfig(30, DIM, "t_shop", feature_names=["shop"]),
        ]
        self.bags = EmbeddingBagCollection(tables=bags)
        self.head = nn.Linear(3 * DIM + 2, 1)

    def forward(self, user_id: Tensor, price: Tensor, features: KeyedJaggedTensor) -> Tensor:
        item, shop = features["item"], features["shop"]
        ids = torch.cat([user_id % 50, item.values() % 40, shop.values()])
        lengths = torch.stack([torch.ones_like(user_id).int(), item.lengths().int(), shop.lengths().int()]).view(-1)
        bags = self.bags(KeyedJaggedTensor(["user", "item_hashed", "shop"], ids, lengths=lengths))
        return self.head(torch.cat([bags.values(), price], 1))


@dataclass(frozen=True)
class Asked:
    """A request: forward's arguments, and the same as features and named inputs."""

    model: str
    args: tuple[Any, ...]
    features: KeyedJaggedTensor
    inputs: dict[str, Any]

    @property
    def batch(self) -> int:
        """Number of samples."""
        return self.features.stride()


def ask_priced(batch: int, seed: int = 0, *, user: bool = True) -> Asked:
    """Random inputs of Priced; without ``user`` its feature is left to the context."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (batch,), generator=random)
    columns = {"user": (50, torch.ones_like(lengths)), "history": (40, lengths), "slot": (30, SLOTS + 0 * lengths)}
    kjt = _kjt(columns if user else {name: columns[name] for name in ("history", "slot")}, random)
    price = torch.rand(batch, 2, generator=random)
    weekday = torch.randint(0, 7, (batch,), generator=random)
    flag = torch.randint(0, 2, (batch,), generator=random).bool()
    paid = JaggedTensor(torch.rand(int(lengths.sum()), generator=random), lengths=lengths.int())
    inputs = {"price": price, "weekday": weekday, "flag": flag, "history_price": paid}
    return Asked("priced", (price, weekday, flag, kjt, paid), kjt, inputs)


def ask_hashed(batch: int, seed: int = 0) -> Asked:
    """Random inputs of Hashed, with ids far beyond its tables."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2, batch), generator=random)
    kjt = _kjt({"item": (1 << 40, lengths[0]), "shop": (30, lengths[1])}, random)
    user = torch.randint(0, 1 << 40, (batch,), generator=random)
    price = torch.rand(batch, 2, generator=random)
    return Asked("hashed", (user, price, kjt), kjt, {"user_id": user, "price": price})


def _kjt(columns: dict[str, tuple[int, Tensor]], random: torch.Generator) -> KeyedJaggedTensor:
    ids = [torch.randint(0, rows, (int(lengths.sum()),), generator=random) for rows, lengths in columns.values()]
    lengths = torch.cat([lengths for _, lengths in columns.values()]).int()
    return KeyedJaggedTensor(list(columns), torch.cat(ids), lengths=lengths)


def build(name: str) -> nn.Module:
    """The float model."""
    torch.manual_seed(3)
    return (Priced() if name == "priced" else Hashed()).eval()


@kept
def make_archive(folder: Path, name: str) -> Path:
    """``build(name)`` as an FP32 archive of two ranks."""
    model = build(name)
    checkpoint = save_checkpoint(folder / "checkpoint", model, model_name=name, model_version="1")
    on_meta = copy.deepcopy(model).to("meta")
    plan = plan_inference(on_meta, world_size=2, precision=DataType.FP32)
    ask = ask_priced if name == "priced" else ask_hashed
    batches = [ask(batch, seed=batch).args for batch in (4, 7)]
    out = folder / f"{name}.rqa"
    export_archive(
        on_meta, CheckpointReader(checkpoint), plan, out, name=name, version="1", progress=False, inputs=batches
    )
    return out
