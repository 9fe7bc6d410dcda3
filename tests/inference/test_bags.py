"""Bags of ids as arrays: the same ids as the KeyedJaggedTensor they came from, in whatever order they are wanted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recinfer.errors import InputError
from recinfer.inference.bags import Bags, bags_of, merge_bags
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor

NAMES = ("a", "b", "c", "d")


def make(seed: int, batch: int, keys: tuple[str, ...], longest: int, dtype: torch.dtype) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(seed)
    low = 1 if longest == 1 else 0
    lengths = torch.randint(low, longest + 1, (len(keys) * batch,), generator=random, dtype=torch.int32)
    ids = torch.randint(0, 9, (int(lengths.sum()),), generator=random).to(dtype)
    weights = torch.rand(ids.numel(), generator=random)
    return KeyedJaggedTensor(list(keys), ids, weights, lengths=lengths)


requests = st.builds(
    make,
    st.integers(0, 999),
    st.integers(1, 5),
    st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True).map(tuple),
    st.sampled_from([1, 3]),
    st.sampled_from([torch.int64, torch.int32]),
)


def bag(kjt: KeyedJaggedTensor, name: str, sample: int) -> tuple[list[int], list[float]]:
    if name not in kjt.keys():  # noqa: SIM118 - not a dict
        return [], []
    jagged = kjt[name]
    start, stop = jagged.offsets()[sample : sample + 2].tolist()
    return jagged.values()[start:stop].tolist(), jagged.weights()[start:stop].tolist()


@settings(max_examples=60, deadline=None)
@given(requests, st.lists(st.sampled_from(NAMES), min_size=1, max_size=6))
def test_any_order_holds_the_same_bags(kjt: KeyedJaggedTensor, wanted: list[str]):
    arranged = bags_of(kjt).arranged(tuple(wanted))
    assert arranged.offsets.dtype == arranged.values.dtype
    for place, name in enumerate(wanted):
        for sample in range(kjt.stride()):
            start, stop = arranged.offsets[place * kjt.stride() + sample :][:2]
            assert (arranged.values[start:stop].tolist(), arranged.weights[start:stop].tolist()) == bag(
                kjt, name, sample
            )


@settings(max_examples=60, deadline=None)
@given(st.lists(requests, min_size=1, max_size=5), st.booleans())
def test_merged_requests_hold_each_ones_bags(kjts: list[KeyedJaggedTensor], same: bool):
    if same:  # one id per bag and the same keys in each: the fast path
        kjts = [make(i, 2, NAMES, 1, torch.int64) for i in range(len(kjts))]
    merged = merge_bags([bags_of(kjt) for kjt in kjts], NAMES, weighted=not same)
    assert merged.batch == sum(kjt.stride() for kjt in kjts)
    samples = [(kjt, sample) for kjt in kjts for sample in range(kjt.stride())]
    for place, name in enumerate(NAMES):
        for at, (kjt, sample) in enumerate(samples):
            start, stop = merged.offsets[place * merged.batch + at :][:2]
            ids, weights = bag(kjt, name, sample)
            assert merged.values[start:stop].tolist() == ids
            if not same:
                assert merged.weights[start:stop].tolist() == weights


def test_a_context_is_the_first_samples():
    both = bags_of(make(1, 3, ("a", "c"), 3, torch.int64)).with_context(bags_of(make(2, 1, ("b",), 3, torch.int64)))
    assert both.keys == ("a", "c", "b")
    assert both.lengths_FB[2, 1:].tolist() == [0, 0]
    start, stop = both.offsets[6:8]
    assert both.values[start:stop].tolist() == bag(make(2, 1, ("b",), 3, torch.int64), "b", 0)[0]


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize(
    ("ids", "lengths", "good"),
    [
        ([3, 4], [1, 1], True),
        ([4, 4], [1, 1], False),
        ([3, 5], [1, 1], False),
        ([-1, 0], [1, 1], False),
        ([4, 4], [0, 2], True),  # the empty feature's neighbour may have what it may not
        ([4], [1, 0], False),
        ([3], [1, 0], True),
        ([], [0, 0], True),
    ],
)
def test_ids_fit_their_features_rows(dtype: type, ids: list[int], lengths: list[int], good: bool):
    offsets = np.array([0, *np.cumsum(lengths)], dtype)
    bags = Bags(("x", "y"), 1, offsets, np.array(ids, dtype))
    assert bags.fits(np.array([4, 5], np.uint64)) is good


def test_what_is_no_request_is_refused():
    with pytest.raises(InputError, match="expected a KeyedJaggedTensor"):
        bags_of([1])  # type: ignore[arg-type]
    ids = torch.ones(2, dtype=torch.int64)
    uneven = KeyedJaggedTensor(["a", "b"], ids, lengths=torch.tensor([1, 1, 0]), stride_per_key_per_rank=[[1], [2]])
    with pytest.raises(InputError, match="batch sizes differ"):
        bags_of(uneven)
    with pytest.raises(InputError, match=r"weights are torch.float64; expected float32"):
        bags_of(KeyedJaggedTensor(["a"], ids, ids.double(), lengths=ids))
