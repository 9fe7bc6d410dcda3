"""How many requests go by themselves, and when they share runs instead."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

import recinfer.serving.engine.scheduler as module
from recinfer.serving.engine.pace import BUSY_S, Crowd, gains_nothing, most_away
from recinfer.serving.engine.scheduler import Batcher


@pytest.mark.parametrize(
    ("questions", "seconds", "most"),
    [
        (0, 0.0, 16),
        (2, 0.0, 16),
        (3, 0.0, 10),
        (8, 0.0, 4),
        (64, 0.0, 1),
        (1, 5e-4, 8),
        (1, 1.5e-3, 2),
        (1, 1.0, 1),
        (8, 1e-3, 4),
        (8, 3e-3, 1),
    ],
)
def test_as_many_go_by_themselves_as_ask_and_compute_little(questions: int, seconds: float, most: int):
    assert most_away(questions, seconds, 0) == most


@pytest.mark.parametrize(
    ("questions", "seconds", "num_bytes", "most"),
    [
        (1, 0.0, 4096, 64),
        (1, 0.0, 4095, 16),
        (2, 0.0, 1 << 16, 32),
        (1, 5e-4, 4096, 32),
        (1, 1.1e-3, 4096, 29),
        (100, 0.0, 4096, 1),
    ],
)
def test_more_of_those_that_gain_less_by_sharing(questions: int, seconds: float, num_bytes: int, most: int):
    assert most_away(questions, seconds, num_bytes) == most


def test_dense_runs_are_worth_sharing_for_longer():
    assert [gains_nothing(size, False) for size in (0, 4095, 4096)] == [False, False, True]
    assert [gains_nothing(size, True) for size in (4096, 16383, 16384)] == [False, False, True]


def test_a_crowd_lasts_longer_when_it_is_soon_there_again():
    crowd = Crowd()
    assert not crowd.is_there(0.0)
    lasted, now = [], 0.0
    for _ in range(9):
        crowd.too_many(now)
        begun = now
        while crowd.is_there(now):
            now += 1e-4
        lasted.append(round((now - begun) * 400))
    assert lasted == [1, 2, 4, 8, 16, 32, 64, 128, 128]
    crowd.too_many(now + 1.0)
    assert crowd.is_there(now + 1.0024) and not crowd.is_there(now + 1.0026)


@pytest.mark.parametrize("why", ["away", "busy"])
def test_those_that_come_after_too_many_share_runs_for_a_moment(monkeypatch: pytest.MonkeyPatch, why: str):
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=lambda: 0.0))
    with ThreadPoolExecutor(1) as pool:
        batcher = Batcher(list, pool, 1)
    assert batcher.may_go_away(2)
    backs = [batcher.goes_away("a", alone=False) for _ in range(2 if why == "away" else 1)]
    assert not batcher.may_go_away()
    assert batcher.may_go_away(2, 0.9 * BUSY_S) is (why == "busy")
    assert batcher.may_go_away(2, 1.1 * BUSY_S) is False
    for back in backs:
        back(1, 0.0)
    assert not batcher.may_go_away(2), "it was too many a moment ago"
    assert batcher.may_go_away(), "what goes alone is not held up"
    now[0] += 0.0026
    assert batcher.may_go_away(2)


def test_what_gains_nothing_goes_beside_shared_runs():
    """A stall that made requests wait once would else make all later ones wait, where they come faster than runs take them."""
    with ThreadPoolExecutor(1) as pool:
        batcher = Batcher(list, pool, 1)
    batcher.room.enter(1)
    assert not batcher.may_go_away(2)
    assert not batcher.may_go_away(1, mixes=True), "with one at a time it is better to share than to wait"
    assert batcher.may_go_away(2, mixes=True)
    backs = [batcher.goes_away("a", alone=False) for _ in range(2)]
    assert not batcher.may_go_away(2, mixes=True)
    for back in backs:
        back(1, 0.0)
    assert not batcher.may_go_away(2, mixes=True), "it was too many a moment ago"
    batcher.room.leave(1)
    assert batcher.may_go_away(2), "of its own kind there were not"


def test_how_many_may_be_away_follows_what_they_compute():
    with ThreadPoolExecutor(1) as pool:
        batcher = Batcher(list, pool, 1)
    assert batcher.most_away("a", 4, 1, 0) == 16
    batcher.goes_away("a", alone=False)(4, 2e-3)
    assert batcher.most_away("a", 4, 1, 0) == 2
    assert batcher.most_away("b", 4, 1, 0) == 16
