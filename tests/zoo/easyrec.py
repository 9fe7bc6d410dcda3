"""Models in the manner of TorchEasyRec: a batch of groups, features grouped by KeyedTensor, sequences padded to the longest."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tests.zoo.drawing import Bag, Draw
from tests.zoo.rankers import DIM, EasyBatch, bags, mlp, user_and_item
from tests.zoo.sequences import rows


@dataclass
class SequenceBatch(EasyBatch):
    """A batch whose steps of a sequence may have several ids: their numbers are jagged too. Steps may have numbers."""

    sequence_dense_features: dict[str, JaggedTensor] = field(default_factory=dict)
    sequence_mulval_lengths: dict[str, KeyedJaggedTensor] = field(default_factory=dict)


def longest(lengths: Tensor) -> int:
    return int(torch.max(lengths).item())


class StepsOfSeveralIds(nn.Module):
    """DIN over a history whose steps have one item and any number of tags each, which are pooled step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("item", "hist"), ("tags", "hist_tags"), ("words", "hist_words"))
        self.attention, self.top = mlp(6 * DIM, 8, 1), mlp(5 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        hist, each = d.bag("hist", 40, user=True, least=1), {}
        several: list[Bag] = []
        for name in ("hist_tags", "hist_words"):
            counts = d.bag(name, 3, like=hist, user=True)
            each[name] = Bag(name, counts.values, hist.lengths)
            total = torch.cat([counts.values.new_zeros(1), counts.values.cumsum(0)])
            ends = hist.lengths.cumsum(0)
            several.append(d.bag(name, 40, like=Bag(name, counts.values, total[ends] - total[ends - hist.lengths])))
        item, tags, words = d.bag("item", 40, each=1), d.bag("tags", 40), d.bag("words", 40)
        sparse = {"base": d.kjt(hist, *several, item, tags, words)}
        return (SequenceBatch(sparse_features=sparse, sequence_mulval_lengths={"base": d.kjt(*each.values())}),)

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        found = self.ec(batch.sparse_features["base"])
        counts = batch.sequence_mulval_lengths["base"].to_dict()
        query = [found["item"].to_padded_dense(1).squeeze(1)]
        for name, pooling in (("tags", "sum"), ("words", "mean")):
            pooled = torch.segment_reduce(found[name].values(), pooling, lengths=found[name].lengths())
            query.append(torch.nan_to_num(pooled, nan=0.0))
        steps = {"hist": found["hist"]}
        for name, pooling in (("hist_tags", "sum"), ("hist_words", "mean")):
            pooled = torch.segment_reduce(found[name].values(), pooling, lengths=counts[name].values())
            steps[name] = JaggedTensor(values=torch.nan_to_num(pooled, nan=0.0), lengths=counts[name].lengths())
        lengths = steps["hist"].lengths()
        size = longest(lengths)
        keys = torch.cat([jagged.to_padded_dense(size) for jagged in steps.values()], 2)
        target = torch.cat(query, 1)
        scores = self.attention(torch.cat([target.unsqueeze(1).expand(-1, size, -1), keys], 2)).transpose(1, 2)
        mask = torch.arange(size).unsqueeze(0) < lengths.unsqueeze(1)
        scores = torch.where(mask.unsqueeze(1), scores, torch.full_like(scores, -1e9)).softmax(-1)
        logits = self.top(torch.cat([(scores @ keys).squeeze(1), target[:, : 2 * DIM]], 1)).squeeze(1)
        return {"logits": logits, "probs": torch.sigmoid(logits)}


class ValuesAsColumns(nn.Module):
    """The three ids of each sample side by side, by view(-1, ...) of an unpooled feature's values."""

    def __init__(self) -> None:
        super().__init__()
        self.ec, self.ebc = rows(("last",)), bags("user")
        self.top = mlp(4 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (d.kjt(d.bag("last", 40, each=3), d.bag("user", 40, user=True)),)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        last = self.ec(ids)["last"].values().view(-1, 3 * DIM)
        return self.top(torch.cat([last, self.ebc(ids).values()], 1))


class VariationalDropout(nn.Module):
    """A learned share of each feature; its penalty per sample is computed in forward and is no output."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.top = bags("user", "item"), mlp(2 * DIM, 8, 1)
        self.share = nn.Parameter(torch.randn(2))
        self.register_buffer("dims", torch.tensor([DIM, DIM], dtype=torch.int32))
        self.penalty: dict[str, Tensor] = {}

    draw = staticmethod(lambda d: (EasyBatch(sparse_features={"base": user_and_item(d)}),))

    def forward(self, batch: EasyBatch) -> dict[str, Tensor]:
        x = self.ebc(batch.sparse_features["base"]).values()
        share = self.share.sigmoid()
        each = torch.repeat_interleave(share.unsqueeze(0).tile([x.size(0), 1]), self.dims, dim=-1)
        self.penalty["loss"] = 0.01 / x.size(0) * torch.sum(1.0 - share)
        return {"logits": self.top(x * (1 - each)).squeeze(1)}


class Interests(nn.Module):
    """MIND's user tower: a history routed to several interests, from random numbers that were drawn once."""

    def __init__(self) -> None:
        super().__init__()
        self.ec, self.turned = rows(("hist",)), nn.Linear(DIM, DIM, bias=False)
        self.register_buffer("drawn", torch.randn(5, 3))  # steps, interests

    draw = staticmethod(lambda d: (d.kjt(d.bag("hist", 40, user=True)),))

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        hist = self.ec(ids)["hist"]
        steps, interests = self.drawn.shape
        known = (torch.arange(steps) < hist.lengths().unsqueeze(1)).unsqueeze(2).float()
        wanted = torch.arange(interests) < hist.lengths().clamp(1, interests).unsqueeze(1)
        vectors = self.turned(hist.to_padded_dense(steps))
        logits = self.drawn.expand(vectors.shape[0], -1, -1)
        found = vectors[:, :0]
        for _ in range(2):
            shares = logits.masked_fill(~wanted.unsqueeze(1), float("-inf")).softmax(2) * known
            found = shares.transpose(1, 2) @ vectors
            logits = logits + nn.functional.normalize(vectors, dim=2) @ found.transpose(1, 2)
        return {"user_tower_emb": nn.functional.normalize(found, dim=2) * wanted.unsqueeze(2)}


class SelfAttention(nn.Module):
    """A history attends to itself, padded to the longest one, with a mask for each head; without any step it gives zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.ec, self.heads = rows(("hist",)), 2
        self.attention = nn.MultiheadAttention(DIM, self.heads, batch_first=True)

    draw = staticmethod(lambda d: (d.kjt(d.bag("hist", 40, user=True), d.bag("other", 40)),))

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        hist = self.ec(ids)["hist"]
        x = hist.to_padded_dense(longest(hist.lengths()))
        known = (torch.arange(x.shape[1]) < hist.lengths().unsqueeze(1)).int()
        hidden = ~(known.unsqueeze(2) * known.unsqueeze(1)).bool()
        found = self.attention(x, x, x, attn_mask=hidden.repeat_interleave(self.heads, dim=0))[0]
        return {"user": torch.nan_to_num(found, nan=0.0).sum(1) / hist.lengths().clamp(min=1).unsqueeze(1)}


class TwoTowers(nn.Module):
    """DSSM: one collection has the tables of user and item, whose columns are grouped for a tower each."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = bags("user", "item", "age", "shop")
        self.towers = nn.ModuleDict({"user": mlp(2 * DIM, 8, 4), "item": mlp(2 * DIM + 1, 8, 4)})

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        user = [d.bag(name, 40, user=True) for name in ("user", "age")]
        sparse = {"base": d.kjt(*user, d.bag("item", 40), d.bag("shop", 40))}
        return (EasyBatch({"base": d.keyed(price=1)}, sparse),)

    def forward(self, batch: EasyBatch) -> dict[str, Tensor]:
        found = [self.ebc(batch.sparse_features["base"]), batch.dense_features["base"]]
        groups = KeyedTensor.regroup_as_dict(found, [["user", "age"], ["item", "shop", "price"]], ["user", "item"])
        towers = [nn.functional.normalize(self.towers[name](group), dim=1) for name, group in groups.items()]
        return {"similarity": (towers[0] * towers[1]).sum(1, keepdim=True) / 0.05}


def positive(number: Tensor) -> int:
    """The number in a tensor, as a size that is above 0 and fits an int32."""
    size: int = number.item()  # type: ignore[assignment]
    torch._check(size > 0)
    torch._check(size <= 2**31 - 1)
    return size


def steps_of(values: Tensor, offsets: Tensor, size: int) -> Tensor:
    padded: Tensor = torch.ops.fbgemm.jagged_to_padded_dense(values, [offsets], [size], 0.0)
    return padded


class CandidatesAfterHistory(nn.Module):
    """DLRM-HSTU: each candidate of a sample is a step after its history, and has its own score; up to three."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("hist", "candidate"))
        self.none = nn.Module()  # its configuration has no pooled features
        self.none.embedding_bag_configs = list  # type: ignore[assignment]
        self.positions = nn.Parameter(torch.randn(8, DIM))
        self.uvqk, self.norm, self.top = nn.Linear(DIM, 4 * DIM), nn.LayerNorm(DIM), mlp(DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        hist, candidates = d.bag("hist", 40, user=True, least=1), d.bag("candidate", 40, least=1, most=3)
        numbers = {
            "times": d.jagged(d.bag("times", 0, like=hist, user=True, kind=torch.float32)),
            "asked": d.jagged(d.bag("asked", 0, like=candidates, kind=torch.float32)),
        }
        return (SequenceBatch(sparse_features={"base": d.kjt(hist, candidates)}, sequence_dense_features=numbers),)

    def forward(self, batch: SequenceBatch) -> dict[str, Tensor]:
        found = self.ec(batch.sparse_features["base"])
        hist, candidates = found["hist"], found["candidate"]
        torch._check(hist.values().shape[0] <= 2**31 - 1)
        left, right = positive(hist.lengths().max()), positive(candidates.lengths().max())
        cumsum = torch.ops.fbgemm.asynchronous_complete_cumsum
        before, after = cumsum(hist.lengths()), cumsum(candidates.lengths())
        size, offsets, lengths = left + right, before + after, hist.lengths() + candidates.lengths()
        place = torch.arange(size).unsqueeze(0)
        numbers = batch.sequence_dense_features["times"]
        positive(numbers.lengths().max())
        times = steps_of(numbers.values().unsqueeze(1), before, left)
        past = steps_of(hist.values(), before, left) + times.tanh()
        asked = batch.sequence_dense_features["asked"]  # padded to its own longest, cut by the lengths of candidates
        late = steps_of(asked.values().unsqueeze(1), after, positive(asked.lengths().max())).sum(1, keepdim=True)
        both = torch.cat([past, steps_of(candidates.values(), after, right) + late.tanh()], 1)
        taken = (place < hist.lengths().unsqueeze(1)) | (
            (place >= left) & (place < left + candidates.lengths().unsqueeze(1))
        )
        positions = self.positions[place.expand(lengths.shape[0], size).flatten()].view(-1, size, DIM)
        x = both.flatten(0, 1)[taken.flatten()]
        x = torch.ops.fbgemm.jagged_dense_elementwise_add_jagged_output(x, [offsets], positions)[0]
        u, v, q, k = torch.nn.functional.silu(self.uvqk(x)).split([DIM] * 4, 1)
        q, k, v = (steps_of(part, offsets, size) for part in (q, k, v))
        step = place.clamp(max=hist.lengths().unsqueeze(1))
        seen = (step.unsqueeze(2) > step.unsqueeze(1)) | torch.eye(size, dtype=torch.bool).unsqueeze(0)
        scores = torch.nn.functional.silu(torch.einsum("bxa,bya->bxy", q, k)) / 20 * seen
        attended = torch.ops.fbgemm.dense_to_jagged(torch.einsum("bxy,byv->bxv", scores, v), [offsets], x.shape[0])[0]
        padded = steps_of(self.norm(attended) * u + x, offsets, size).flatten(0, 1)
        last = (place >= hist.lengths().unsqueeze(1)) & (place < lengths.unsqueeze(1))
        logits = self.top(padded[last.flatten()])
        return {"logits": steps_of(logits, after, 3).squeeze(2), "candidates": candidates.lengths()}
