"""Keys in use stay cached, however many other keys come; memory stays bounded."""

from __future__ import annotations

import copy
import itertools
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from recinfer.archive.reader import Archive
from recinfer.inference.bags import bags_of
from recinfer.inference.intake import FeatureIntake
from recinfer.inference.predictor import Predictor
from recinfer.lru import LruCache
from recinfer.quant.arranger import FeatureArranger
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import FEATURES, RANKER_ROWS, make_request


def test_cache_keeps_the_keys_used_last_up_to_its_bound() -> None:
    cache: LruCache[int, str] = LruCache(8)
    for key in range(1000):
        cache[key] = str(key)
        assert cache[-1] == ("used" if key else None)
        cache[-1] = "used"
        for recent in range(max(0, key - 1), key + 1):
            assert cache[recent] == str(recent)
        assert len(cache) <= 4 and len(cache) + len(cache._older) <= 8
    assert cache[5] is None


def test_a_copy_begins_empty_with_the_same_bound() -> None:
    cache: LruCache[int, int] = LruCache(8)
    cache.update({1: 2})
    for copied in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert len(copied) == 0 and copied[1] is None
        for key in range(100):
            copied[key] = key
        assert len(copied) <= 4


def test_threads_find_what_was_put_or_nothing() -> None:
    cache: LruCache[int, int] = LruCache(16)

    def use(seed: int) -> None:
        for step in range(20_000):
            key = (step * seed) % 50
            assert cache[key] in (None, key * 2)
            cache[key] = key * 2

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, (1, 3, 7, 11)))
    assert len(cache) <= 8 + 4  # each thread may be between its lookup and its insertion


ORDERS = [order for size in range(1, 5) for order in itertools.permutations(FEATURES, size)]
MANY = 600


def test_a_new_order_of_keys_is_remembered_after_any_number_of_others(
    small: tuple[nn.Module, Archive], monkeypatch: pytest.MonkeyPatch
) -> None:
    intake = Predictor(small[1]).intake
    for number in range(MANY):  # the archive's few features have too few orders to fill it
        intake._orders[f"other {number}",] = intake._new_order(ORDERS[number % len(ORDERS)])
    bags = bags_of(make_request(RANKER_ROWS, 2))
    intake.take(bags, need_all=False)
    monkeypatch.delattr(FeatureIntake, "_new_order")
    intake.take(bags, need_all=False)
    assert len(intake._orders) < MANY


def test_bytes_of_keys_are_remembered_after_any_number_of_others(small: tuple[nn.Module, Archive]) -> None:
    tables = Predictor(small[1]).byte_tables
    if tables is None:
        pytest.skip("recinfer.quant._tables was not built")
    for number in range(MANY):
        assert tables.learn(b"other %d" % number, ORDERS[number % len(ORDERS)]) is not None
    learned = tables.learn(b"mine", FEATURES)
    assert learned is not None and tables.order(b"mine") is learned
    assert len(tables._orders) < MANY


def test_an_order_of_keys_is_arranged_as_before_after_any_number_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    arranger = FeatureArranger(FEATURES, [RANKER_ROWS[name] for name in FEATURES])
    for number in range(MANY):
        extra = KeyedJaggedTensor(
            [f"other {number}", *reversed(FEATURES)],
            torch.zeros(0, dtype=torch.int64),
            lengths=torch.zeros(len(FEATURES) + 1, dtype=torch.int32),
        )
        arranger.arrange(extra)
    monkeypatch.delattr(FeatureArranger, "_new_order")
    assert arranger.arrange(extra).keys() == list(FEATURES)
    assert len(arranger._orders) < MANY
