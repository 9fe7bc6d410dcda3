"""A lookup split over threads gives the same bits, and is split only where that has been faster."""

from __future__ import annotations

import pytest
import torch

from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.threads import SplitLookup, Trial
from tests.quant.cases import MIXED, float_bags, random_features


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_split_lookup_has_the_same_bits(weighted: bool, threads: int) -> None:
    poolings = [PoolingType.SUM, PoolingType.MEAN, PoolingType.MEAN, PoolingType.SUM]
    module = EmbeddingBagCollection.from_float(float_bags(poolings, weighted), per_table=MIXED)
    features = random_features(module.embedding_bag_configs(), 37, weighted=weighted, longest=9)
    batch = module._lookup.batch
    arranged = module._lookup.arranger.arrange(features)
    ids, offsets, weights = arranged.values(), arranged.offsets(), arranged.weights_or_none()
    whole = batch(ids, offsets, weights)
    batch.use_threads(threads)
    split = batch._split
    assert split is not None
    assert torch.equal(split.split(ids, offsets, weights, 37), whole)
    with torch.inference_mode():
        assert torch.equal(split.split(ids, offsets, weights, 37), whole)
    empty = torch.zeros(offsets.numel(), dtype=offsets.dtype)
    assert split.split(ids[:0], empty, None if weights is None else weights[:0], 37).abs().sum() == 0
    batch.use_threads(1)
    assert batch._split is None


def test_small_lookups_are_never_split() -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    module._lookup.batch.use_threads(2)
    split = module._lookup.batch._split
    assert split is not None and not split.wants(torch.zeros(100, dtype=torch.int64))
    assert split.wants(torch.zeros(1 << 15, dtype=torch.int64))
    with pytest.raises(ConfigError, match="2 or more"):
        SplitLookup(1, [4], lambda first, last: None, torch.float32)  # type: ignore[arg-type,return-value]


def test_the_faster_way_is_kept_and_the_other_gets_another_chance() -> None:
    trial = Trial()
    ways = []
    for _ in range(600):
        split = trial.choose("size")
        ways.append(split)
        trial.record("size", split, 0.5 if split else 1.0)
    assert sum(ways[:8]) == 4 and trial.kept() == {"size": True}
    assert 0.97 < sum(ways[8:]) / len(ways[8:]) < 1
    slower = Trial()
    for _ in range(600):
        split = slower.choose("size")
        slower.record("size", split, 0.95 if split else 1.0)  # not by enough
    assert slower.kept() == {"size": False}


def test_large_lookups_stay_right_and_refuse_bad_ids() -> None:
    module = EmbeddingBagCollection.from_float(float_bags())
    features = random_features(module.embedding_bag_configs(), 4000, longest=6)
    expected = module(features).values()
    module._lookup.batch.use_threads(2)
    assert features.values().numel() >= 1 << 14
    for _ in range(12):
        assert torch.equal(module(features).values(), expected)
    features.values()[7] = 1 << 30
    for _ in range(3):
        with pytest.raises(InputError, match="out of range"):
            module(features)
