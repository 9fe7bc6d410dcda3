"""A lookup split over threads gives the same bits, and is split only where that has been faster."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.quant.embedding_modules import EmbeddingBagCollection
from recinfer.quant.threads import SplitLookup, Trial
from tests.quant.cases import MIXED, float_bags, random_features
from tests.warm import Program


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


def test_lookups_that_fail_or_have_not_ended_are_not_timed() -> None:
    trial = Trial()
    ways = [trial.choose("size") for _ in range(20)]  # none is recorded
    assert sum(ways) == 10 and trial.kept() == {}
    for _ in range(4):
        trial.record("size", False, 1.0)
    assert sum(trial.choose("size") for _ in range(20)) == 10  # the split ones failed
    trial.record("size", True, 0.1)
    assert sum(trial.choose("size") for _ in range(20)) == 20


SPLITS = """
import os, signal, sys, threading, torch
from recinfer.quant.threads import SplitLookup

def part(first, last):
    return lambda ids, offsets, weights: torch.full((4, last - first), float(first))

lookup = SplitLookup(3, [1, 1, 1], part, torch.float32)
ids, offsets = torch.zeros(12, dtype=torch.int64), torch.arange(13)

def split():
    return lookup.split(ids, offsets, None, 4).sum().item()

number = int(sys.argv[1])
"""

INTERRUPTED = """
enter, entered = threading.Condition.__enter__, 0

def interrupted(self):  # as Ctrl-C does that comes when the lock is taken and the block has not begun
    global entered
    found = enter(self)
    if threading.current_thread() is threading.main_thread():
        entered += 1
        if entered == number:
            raise KeyboardInterrupt
    return found

threading.Condition.__enter__ = interrupted
for _ in range(50):
    try:
        split()
    except KeyboardInterrupt:
        pass
print(split(), flush=True)
"""

AT_ANY_MOMENT = """
def interrupt(*_):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
for turn in range(number):
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-6 * (1 + turn % 199))
        while True:
            split()
    except KeyboardInterrupt:
        pass
print(split(), flush=True)
"""

FORKED = """
os.getpid = lambda: 7  # as in a new namespace of processes, or after all numbers have been used
split()
for _ in range(number):
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # ends this process if it waits for threads that it does not have
        os._exit(0 if split() == split() == 12.0 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print(split(), flush=True)
"""


@pytest.mark.parametrize(
    ("how", "numbers"),
    [(INTERRUPTED, (1, 2, 5, 20)), (AT_ANY_MOMENT, (600,)), (FORKED, (3,))],
    ids=["lock", "any", "fork"],
)
def test_ctrl_c_and_a_fork_leave_lookups_that_work(how: str, numbers: tuple[int, ...]) -> None:
    for number in numbers:
        with Program(SPLITS + how, number) as program:
            out, err = program.communicate(timeout=60)
        assert out == "12.0\n" and program.returncode == 0, err


def test_an_error_of_one_part_is_raised_when_all_have_ended() -> None:
    ended = []

    def part(first: int, last: int) -> Any:
        def run(ids: torch.Tensor, offsets: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
            ended.append(first)
            if first < 2:
                raise InputError(f"part {first}")
            return torch.zeros(4, last - first)

        return run

    lookup = SplitLookup(3, [1, 1, 1], part, torch.float32)
    with pytest.raises(InputError, match="part 0"):
        lookup.split(torch.zeros(12, dtype=torch.int64), torch.arange(13), None, 4)
    assert sorted(ended) == [0, 1, 2]


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
