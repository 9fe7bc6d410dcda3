"""Ragged features as Python lists: the slow, obvious implementation that the sparse types are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from recinfer.sparse import KeyedJaggedTensor

Bags = list[list[int]]


@dataclass
class NaiveFeatures:
    """Key to bags of ids, in order; ``weighted`` gives every id the weight id / 2."""

    bags: list[tuple[str, Bags]]
    weighted: bool
    ranks: list[list[int]] | None  # batch size of each key on each rank: a variable batch

    def build(self, *, offsets: bool = False, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
        """The same as a KeyedJaggedTensor."""
        ids = [i for _, bags in self.bags for bag in bags for i in bag]
        lengths = torch.tensor([len(bag) for _, bags in self.bags for bag in bags], dtype=dtype)
        ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0).to(dtype)])
        values = torch.tensor(ids, dtype=torch.int64)
        return KeyedJaggedTensor(
            [key for key, _ in self.bags],
            values,
            values / 2 if self.weighted else None,
            lengths=None if offsets else lengths,
            offsets=ends if offsets else None,
            stride_per_key_per_rank=self.ranks,
        )

    def pick(self, order: list[int]) -> NaiveFeatures:
        """The keys at ``order``."""
        ranks = None if self.ranks is None else [self.ranks[i] for i in order]
        return NaiveFeatures([self.bags[i] for i in order], self.weighted, ranks)

    def check(self, kjt: KeyedJaggedTensor) -> None:
        """Assert that every property and method of ``kjt`` gives the same."""
        assert kjt.keys() == [key for key, _ in self.bags]
        assert kjt.stride_per_key() == [len(bags) for _, bags in self.bags]
        assert kjt.stride_per_key_per_rank() == (self.ranks or [])
        assert kjt.length_per_key() == [sum(map(len, bags)) for _, bags in self.bags]
        assert kjt.offsets().tolist()[1:] == kjt.lengths().cumsum(0).tolist()
        assert kjt.offset_per_key()[-1] == kjt.values().shape[0]
        parts = kjt.to_dict()
        for key, bags in dict(self.bags).items():
            for part in (parts[key], kjt[key]):
                assert [row.tolist() for row in part.to_dense()] == bags
                assert part.offsets().tolist()[0] == 0
                assert part.offsets().tolist()[1:] == part.lengths().cumsum(0).tolist()
                weights = part.to_dense_weights()
                if self.weighted:
                    assert weights is not None
                    assert [row.tolist() for row in weights] == [[i / 2 for i in bag] for bag in bags]
                else:
                    assert weights is None


@st.composite
def features(draw: st.DrawFn, *, variable: bool | None = None) -> NaiveFeatures:
    """Random features: 1 to 4 keys, small batches, empty bags, with and without weights and variable batch."""
    count = draw(st.integers(1, 4))
    is_variable = draw(st.booleans()) if variable is None else variable
    ranks = None
    if is_variable:
        num_ranks = draw(st.integers(1, 3))
        ranks = [[draw(st.integers(0, 2)) for _ in range(num_ranks)] for _ in range(count)]
        strides = [sum(r) for r in ranks]
    else:
        strides = [draw(st.integers(0, 3))] * count
    bag = st.lists(st.integers(0, 99), max_size=3)
    bags = [(f"f{i}", [draw(bag) for _ in range(stride)]) for i, stride in enumerate(strides)]
    return NaiveFeatures(bags, draw(st.booleans()), ranks)
