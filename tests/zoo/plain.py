"""Models whose tables are torch.nn.Embedding and EmbeddingBag, as libraries of plain PyTorch write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.zoo.drawing import Draw

DIM = 4
ROWS = 60
LENGTH = 6


class Fields(nn.Module):
    """A table a field, in a ModuleDict; a table of few rows; first-order weights; inputs in a dict."""

    def __init__(self) -> None:
        super().__init__()
        rows = {"user": ROWS, "item": ROWS, "gender": 3}
        self.fields = nn.ModuleDict({name: nn.Embedding(number, DIM) for name, number in rows.items()})
        self.weights = nn.ModuleDict({name: nn.Embedding(number, 1) for name, number in rows.items()})
        self.register_buffer("upper", torch.triu(torch.ones(3, 3), 1).bool())
        self.deep = nn.Sequential(nn.Linear(3 * DIM + 2, 8), nn.ReLU(), nn.Linear(8, 1))

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        ids = {name: d.integers(rows) for name, rows in (("user", ROWS), ("item", ROWS), ("gender", 3))}
        return ({**ids, "gender": ids["gender"].double(), "price": d.floats(2)},)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        inputs = inputs | {"gender": inputs["gender"].long()}  # loaders of files have ids as floats
        fields = torch.stack([table(inputs[name]) for name, table in self.fields.items()], 1)
        products = torch.masked_select(fields @ fields.transpose(1, 2), self.upper)
        pairs = products.view(-1, 3).sum(1, keepdim=True)
        first = torch.cat([table(inputs[name]) for name, table in self.weights.items()], 1).sum(1, keepdim=True)
        return torch.sigmoid(pairs + first + self.deep(torch.cat([fields.flatten(1), inputs["price"]], 1))).squeeze(1)


class NextItem(nn.Module):
    """A transformer over a padded history, with positions; the scores of one item, and of all by the table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.item, self.position = nn.Embedding(ROWS, DIM, padding_idx=0), nn.Embedding(LENGTH, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 2, 8, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return d.integers(ROWS, LENGTH), d.integers(LENGTH) + 1, d.integers(ROWS)

    def forward(self, item_seq: Tensor, item_seq_len: Tensor, item: Tensor) -> tuple[Tensor, Tensor]:
        positions = torch.arange(item_seq.shape[1], device=item_seq.device).unsqueeze(0).expand_as(item_seq)
        causal = torch.triu(torch.full((LENGTH, LENGTH), float("-inf")), 1)
        hidden = self.encoder(self.item(item_seq) + self.position(positions), mask=causal)
        last = hidden[torch.arange(len(item_seq_len)), item_seq_len - 1]
        return (last * self.item(item)).sum(1), last @ self.item.weight.T


class Columns(nn.Module):
    """One float matrix with ids and numbers; one table for several fields, by offsets; rows by F.embedding and by index."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.fields = nn.Embedding(ROWS, DIM), nn.Embedding(2 * ROWS, DIM)
        self.positions = nn.Embedding(ROWS, DIM)
        self.register_buffer("offsets", torch.tensor([0, ROWS]))

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (torch.cat([d.integers(ROWS, 3).float(), d.floats(1)], 1),)

    def forward(self, columns: Tensor) -> Tensor:
        user, fields = columns[:, 0].long(), columns[:, 1:3].long() + self.offsets
        places = self.positions(torch.arange(fields.shape[1]))  # ids of no sample
        rows = self.user(user) + functional.embedding(user, weight=self.user.weight) + self.user.weight[user]
        return (self.fields(fields) + places).sum(1) + rows * columns[:, 3:]


class Bags(nn.Module):
    """Pooled rows, with a padding id that counts as none."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.mean = nn.EmbeddingBag(ROWS, DIM, mode="mean", padding_idx=0)
        self.max = nn.EmbeddingBag(ROWS, DIM, mode="max", padding_idx=0)
        with torch.no_grad():
            self.mean.weight[0] = 7.0  # the row of the padding counts for nothing

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        ids = d.integers(ROWS, LENGTH)
        return ids * (d.floats(LENGTH) > 0), d.floats(LENGTH)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return torch.cat([self.sum(ids, per_sample_weights=weights), self.mean(ids), self.max(ids)], 1)


class PaddedToTheLongest(nn.Module):
    """A history that is as long as the longest of its batch; its ids are changed in place before the lookup."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(ROWS, DIM, padding_idx=0)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (d.integers(5 * ROWS, 3 + d.batch % 4).int(), d.integers(ROWS))

    def forward(self, hist: Tensor, item: Tensor) -> Tensor:
        plain = self.item(item)
        hist, item = hist.clone(), item.clone()
        hist.remainder_(ROWS)
        item += 1
        item[item == ROWS] = 0
        mask = hist.data.ne(0).unsqueeze(2)
        return (self.item(hist) * mask).sum(1) / mask.sum(1).clamp(min=1) + 2 * plain + self.item(item)
