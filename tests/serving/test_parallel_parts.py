"""Parallel parts: their results in order, whichever thread ran them."""

from __future__ import annotations

import threading

import pytest

from recinfer.serving.engine.dispatcher import ParallelParts

WAIT_S = 60


def own_threads(before: set[threading.Thread]) -> list[threading.Thread]:
    return [
        thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("recinfer-part")
    ]


def test_works_run_at_once_and_give_their_results_in_order() -> None:
    both_there = threading.Barrier(2, timeout=WAIT_S)  # broken unless two threads are in it

    def work(number: int) -> tuple[int, int]:
        both_there.wait()
        return number, threading.get_ident()

    pair = ParallelParts(2)
    (first, second), elsewhere = pair.run([lambda: work(1), lambda: work(2)])
    pair.close()
    assert (first[0], second[0]) == (1, 2)
    assert first[1] == threading.get_ident() != second[1]
    assert elsewhere >= 0


def test_caller_runs_parts_that_no_other_thread_begins() -> None:
    pair, busy, done = ParallelParts(2), threading.Event(), threading.Event()

    def hold() -> None:
        busy.set()
        assert done.wait(WAIT_S)

    def holds_the_other() -> None:
        assert busy.wait(WAIT_S)  # the caller's own part goes on once the other thread is in hold

    caller = threading.Thread(target=pair.run, args=([holds_the_other, hold],))
    caller.start()
    assert busy.wait(WAIT_S)
    given, elsewhere = pair.run([threading.get_ident] * 4)
    assert given == [threading.get_ident()] * 4
    assert elsewhere == 0
    done.set()
    caller.join(WAIT_S)
    assert not caller.is_alive()
    pair.close()


def test_an_error_is_raised_when_all_works_are_over() -> None:
    pair, over = ParallelParts(3), []

    def fail() -> None:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        pair.run([fail, lambda: over.append(1), lambda: over.append(2)])
    assert sorted(over) == [1, 2]
    pair.close()


def test_threads_come_when_needed_and_go_when_closed() -> None:
    before = set(threading.enumerate())
    three = ParallelParts(3)
    assert three.run([lambda: 1]) == ([1], 0.0)
    assert not own_threads(before)
    three.run([int, int, int])
    threads = own_threads(before)
    assert 1 <= len(threads) <= 2  # an idle thread takes the next part
    three.close()
    three.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert three.run([lambda: 1, lambda: 2])[0] == [1, 2]
    never = ParallelParts(2)
    never.close()
    assert never.run([lambda: 3, lambda: 4]) == ([3, 4], 0.0)
