"""Models that read sequences: attention, transformers, recurrent layers and jagged operators."""

from __future__ import annotations

from typing import Any

import fbgemm_gpu  # noqa: F401 - defines torch.ops.fbgemm
import torch
from torch import Tensor, nn

from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from tests.zoo.drawing import Draw
from tests.zoo.rankers import DIM, bags, mlp

LENGTH = 5


def rows(*tables: tuple[str, ...], need_indices: bool = False) -> EmbeddingCollection:
    """One unpooled table for each tuple of features."""
    configs = [EmbeddingConfig(40, DIM, f"s_{names[0]}", feature_names=list(names)) for names in tables]
    return EmbeddingCollection(tables=configs, need_indices=need_indices)


def history(d: Draw, least: int = 0) -> tuple[KeyedJaggedTensor]:
    """A user's history and one candidate a sample."""
    return (d.kjt(d.bag("hist", 40, user=True, least=least), d.bag("item", 40, each=1)),)


class DIN(nn.Module):
    """Target attention; the target by ``.values()``, item and category of the history summed as jagged values."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("item", "hist"), ("cat", "hist_cat"))
        self.attention, self.top = mlp(4 * DIM, 8, 1), mlp(2 * DIM + 2, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        hist = d.bag("hist", 40, user=True)
        one = {"each": 1}
        kjt = d.kjt(
            hist, d.bag("hist_cat", 40, like=hist, user=True), d.bag("item", 40, **one), d.bag("cat", 40, **one)
        )
        return kjt, d.floats(2)

    def forward(self, ids: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        found = self.ec(ids)
        target = found["item"].values() + found["cat"].values()
        hist = JaggedTensor(found["hist"].values() + found["hist_cat"].values(), lengths=found["hist"].lengths())
        keys = hist.to_padded_dense(LENGTH)
        mask = torch.arange(LENGTH).unsqueeze(0) < hist.lengths().unsqueeze(1)
        query = target.unsqueeze(1).expand(-1, LENGTH, -1)
        scores = self.attention(torch.cat([query, keys, query - keys, query * keys], 2)).squeeze(2)
        weights = torch.where(mask, scores.sigmoid(), 0.0)
        summed = torch.bmm(weights.unsqueeze(1), keys).squeeze(1)
        return self.top(torch.cat([summed, target, dense], 1))


class BST(nn.Module):
    """A transformer layer over history and candidate, with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("item", "hist"))
        self.positions = nn.Embedding(LENGTH + 1, DIM)
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 8, batch_first=True, dropout=0.1)
        self.top = mlp((LENGTH + 1) * DIM, 8, 1)

    draw = staticmethod(history)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        found = self.ec(ids)
        x = torch.cat([found["hist"].to_padded_dense(LENGTH), found["item"].to_padded_dense(1)], 1)
        return self.top(self.layer(x + self.positions(torch.arange(LENGTH + 1))).flatten(1))


class SASRec(nn.Module):
    """nn.TransformerEncoder with a causal and a padding mask; the last item against the candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("item", "hist"))
        self.positions = nn.Parameter(torch.randn(LENGTH, DIM))
        layer = nn.TransformerEncoderLayer(DIM, 2, 8, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(DIM), enable_nested_tensor=False)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return history(d, least=1)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        found = self.ec(ids)
        hist = found["hist"]
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        padding = torch.arange(LENGTH)[None, :] >= hist.lengths()[:, None]
        padding = torch.zeros(padding.shape).masked_fill(padding, float("-inf"))
        x = self.encoder(hist.to_padded_dense(LENGTH) + self.positions, mask=causal, src_key_padding_mask=padding)
        last = (hist.lengths() - 1).clamp(min=0)
        state = x[torch.arange(x.shape[0]), last]
        return (state * found["item"].values()).sum(1)


class GRU4Rec(nn.Module):
    """A recurrent layer over the history."""

    def __init__(self) -> None:
        super().__init__()
        self.ec, self.user = rows(("item", "hist")), bags("user")
        self.gru = nn.GRU(DIM, 6, batch_first=True)
        self.top = mlp(6 + 2 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (d.kjt(d.bag("user", 40, user=True), d.bag("hist", 40, user=True), d.bag("item", 40, each=1)),)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        found = self.ec(ids)
        states, _ = self.gru(found["hist"].to_padded_dense(LENGTH))
        index = (found["hist"].lengths() - 1).clamp(0, LENGTH - 1).view(-1, 1, 1).expand(-1, 1, 6)
        parts = [states.gather(1, index).squeeze(1), found["item"].values(), self.user(ids).values()]
        return self.top(torch.cat(parts, 1))


class Cells(nn.Module):
    """Recurrent cells, step by step over the places of the history."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("hist",))
        self.gru, self.lstm = nn.GRUCell(DIM, 6), nn.LSTMCell(DIM, 6, bias=False)

    draw = staticmethod(lambda d: (d.kjt(d.bag("hist", 40), d.bag("other", 40)),))

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        hist = self.ec(ids)["hist"]
        x = hist.to_padded_dense(LENGTH)
        one, two = x.new_zeros(x.shape[0], 6), None
        for step in range(LENGTH):
            one = torch.where((hist.lengths() > step).unsqueeze(1), self.gru(x[:, step], one), one)
            two = self.lstm(x[:, step], two)
        return torch.cat([one, *two], 1)  # type: ignore[misc]


class Caser(nn.Module):
    """Convolutions over the history."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("item", "hist"))
        self.across, self.along = nn.Conv2d(1, 3, (2, DIM)), nn.Conv1d(LENGTH, 2, 1)
        self.top = mlp(3 + 2 * DIM + DIM, 8, 1)

    draw = staticmethod(history)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        found = self.ec(ids)
        x = found["hist"].to_padded_dense(LENGTH)
        across = self.across(x.unsqueeze(1)).relu().squeeze(3).amax(2)
        return self.top(torch.cat([across, self.along(x).flatten(1), found["item"].to_padded_dense(1).squeeze(1)], 1))


class NumericSequence(nn.Module):
    """Two prices of each item of the history."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("hist",))
        self.top = mlp(LENGTH * (DIM + 2), 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        hist = d.bag("hist", 40)
        one, other = (d.bag("prices", 0, like=hist, kind=torch.float32).values for _ in range(2))
        return d.kjt(hist), JaggedTensor(torch.stack([one, other], 1), lengths=hist.lengths)

    def forward(self, ids: KeyedJaggedTensor, prices: JaggedTensor) -> Tensor:
        hist = self.ec(ids)["hist"]
        both = torch.cat([hist.values(), torch.log1p(prices.values().abs())], 1)
        return self.top(JaggedTensor(both, lengths=hist.lengths()).to_padded_dense(LENGTH).flatten(1))


class WeightsInForward(nn.Module):
    """Seconds on each item of the history, as weights of ids that no collection reads."""

    def __init__(self) -> None:
        super().__init__()
        self.ec, self.user = rows(("hist",)), bags("user")
        self.top = mlp(2 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (d.kjt(d.bag("user", 40, user=True, weighted=True), d.bag("hist", 40, weighted=True)),)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        hist, seconds = self.ec(ids)["hist"], ids["hist"].weights()
        read = JaggedTensor(hist.values() * seconds.log1p().unsqueeze(1), lengths=hist.lengths())
        return self.top(torch.cat([read.to_padded_dense(LENGTH).sum(1), self.user(ids).values()], 1))


class NewestFirst(nn.Module):
    """The history by its times, and the distances of its newest item to a book of codes."""

    def __init__(self) -> None:
        super().__init__()
        self.ec, self.book = rows(("hist",)), nn.Parameter(torch.randn(6, DIM))

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return d.kjt(d.bag("hist", 40), d.bag("other", 40)), d.integers(4, LENGTH)

    def forward(self, ids: KeyedJaggedTensor, times: Tensor) -> dict[str, Tensor]:
        x = self.ec(ids)["hist"].to_padded_dense(LENGTH)
        order = times.argsort(dim=1, descending=True, stable=True)
        newest = x.gather(1, order[:, :1, None].expand(-1, -1, DIM)).squeeze(1)
        distances = torch.cdist(newest, self.book)
        return {"order": order, "codes": distances.argmin(1), "distances": distances}


class SharedTable(nn.Module):
    """The features of one name pooled in one collection and as a sequence in another."""

    def __init__(self) -> None:
        super().__init__()
        config = EmbeddingBagConfig(40, DIM, "products", feature_names=["hist", "item"])
        self.ebc, self.ec = EmbeddingBagCollection(tables=[config]), rows(("hist", "item"))
        self.top = mlp(2 * DIM + LENGTH * DIM, 8, 1)

    draw = staticmethod(history)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        return self.top(torch.cat([self.ebc(ids).values(), self.ec(ids)["hist"].to_padded_dense(LENGTH).flatten(1)], 1))


class NeedIndices(nn.Module):
    """Ids of a sequence as a mask: id 0 is padding."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("hist",), need_indices=True)
        self.top = mlp(DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (d.kjt(d.bag("hist", 4, user=True), d.bag("other", 40)),)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        hist = self.ec(ids)["hist"]
        kept = hist.values() * (hist.weights() != 0).unsqueeze(1)
        return self.top(JaggedTensor(kept, lengths=hist.lengths()).to_padded_dense(LENGTH).sum(1))


class PaddedTensors(nn.Module):
    """Histories padded by the loader to the longest one, into nn.Embedding, with positions and a mask of the same length."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.words = bags("user"), nn.Embedding(30, DIM, padding_idx=0)
        self.positions = nn.Parameter(torch.randn(20, DIM))
        self.top = mlp(2 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        length = 3 + d.batch % 4
        return d.kjt(d.bag("user", 40)), d.integers(30, length), d.integers(2, length).bool()

    def forward(self, ids: KeyedJaggedTensor, words: Tensor, seen: Tensor) -> Tensor:
        mask = seen.float().unsqueeze(2)
        vectors = self.words(words) + self.positions[: words.shape[1]]
        mean = (vectors * mask).sum(1) / mask.sum(1).clamp(min=1)
        return self.top(torch.cat([self.ebc(ids).values(), mean], 1))


class MaskedSoftmax(nn.Module):
    """A softmax over the history; an empty one gives the same weight to all places."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("item", "hist"))
        self.top = mlp(2 * DIM, 8, 1)

    draw = staticmethod(history)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        found = self.ec(ids)
        hist, target = found["hist"].to_padded_dense(LENGTH), found["item"].values()
        mask = torch.arange(LENGTH) < found["hist"].lengths().unsqueeze(1)
        scores = torch.einsum("bld,bd->bl", hist, target) / DIM**0.5
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        return self.top(torch.cat([(scores.softmax(1).unsqueeze(2) * hist).sum(1), target], 1))


class SegmentReduce(nn.Module):
    """Maxima and sums of each history by torch.segment_reduce."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("hist",))
        self.top = mlp(2 * DIM, 8, 1)

    @staticmethod
    def draw(d: Draw) -> tuple[Any, ...]:
        return (d.kjt(d.bag("hist", 40)),)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        hist = self.ec(ids)["hist"]
        most = torch.segment_reduce(hist.values(), "max", lengths=hist.lengths(), axis=0, initial=-1.0)
        total = torch.segment_reduce(hist.values(), "sum", lengths=hist.lengths(), axis=0)
        return self.top(torch.cat([most, total], 1))


class JaggedSoftmax(nn.Module):
    """Target attention on jagged values: the target repeated by lengths, a softmax by index_add."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("item", "hist"))
        self.top = mlp(2 * DIM, 8, 1)

    draw = staticmethod(history)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        found = self.ec(ids)
        hist, target = found["hist"], found["item"].values()
        values, lengths = hist.values(), hist.lengths()
        count = lengths.shape[0]
        bag = torch.repeat_interleave(torch.arange(count), lengths, output_size=values.shape[0])
        exponents = (values * target[bag]).sum(1).clamp(-20, 20).exp()
        total = torch.zeros(count).index_add(0, bag, exponents)
        weighted = values * (exponents / total[bag]).unsqueeze(1)
        return self.top(torch.cat([torch.zeros(count, DIM).index_add(0, bag, weighted), target], 1))


class FbgemmOperators(nn.Module):
    """FBGEMM's jagged operators, called by name."""

    def __init__(self) -> None:
        super().__init__()
        self.ec = rows(("item", "hist"))
        self.layer, self.top = nn.Linear(DIM, DIM), mlp(2 * DIM, 8, 1)

    draw = staticmethod(history)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        found = self.ec(ids)
        hist = found["hist"]
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(hist.lengths())
        padded = torch.ops.fbgemm.jagged_to_padded_dense(hist.values(), [offsets], [LENGTH], 0.0)
        back = torch.ops.fbgemm.dense_to_jagged(self.layer(padded).relu(), [offsets], hist.values().shape[0])[0]
        summed = torch.ops.fbgemm.jagged_to_padded_dense(back, [offsets], [LENGTH], 0.0).sum(1)
        return self.top(torch.cat([summed, found["item"].values()], 1))
