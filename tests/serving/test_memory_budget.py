"""The memory budget alone: admissions, refusals, and that all bytes are freed in the end."""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recinfer.errors import OverloadedError, UnavailableError
from recinfer.serving.engine.memory_budget import SMALL_BYTES, MemoryBudget, Ticket

MIB = 1 << 20
BUDGET = 32 * MIB
RESERVE = BUDGET // 8


def test_large_calls_share_what_is_not_kept_for_small_ones():
    budget = MemoryBudget(BUDGET)
    first = budget.admit(20 * MIB)
    second = budget.admit(8 * MIB)
    with pytest.raises(OverloadedError) as refused:
        budget.admit(2 * MIB)
    assert refused.value.retry_after > 0
    assert str(28 * MIB) in str(refused.value) and str(BUDGET) in str(refused.value)
    assert (budget.held, budget.refused) == (28 * MIB, 1)
    second.release()
    budget.admit(2 * MIB).release()
    first.release()
    assert budget.held == 0


def test_one_large_call_may_exceed_the_budget_and_never_two():
    budget = MemoryBudget(BUDGET)
    alone = budget.admit(BUDGET)
    alone.grow(10 * BUDGET)
    with pytest.raises(OverloadedError):
        budget.admit(2 * MIB)
    alone.release()
    first, second = budget.admit(10 * MIB), budget.admit(10 * MIB)
    first.grow_to_answer(BUDGET)
    with pytest.raises(OverloadedError):
        second.grow_to_answer(BUDGET)
    with pytest.raises(OverloadedError):
        first.grow(1)  # a message that is not complete has no such right
    assert budget.held == 20 * MIB + BUDGET  # what did not fit is not held


def test_of_large_calls_that_all_need_more_one_gets_it():
    """Without that each is refused because of what the others hold, and none is answered."""
    budget = MemoryBudget(BUDGET)
    first, second = budget.admit(10 * MIB), budget.admit(10 * MIB)
    first.grow_to_answer(20 * MIB)
    first.grow_to_answer(20 * MIB)
    with pytest.raises(OverloadedError):
        second.grow_to_answer(20 * MIB)
    with pytest.raises(OverloadedError):
        budget.admit(2 * MIB)
    budget.admit(SMALL_BYTES).release()
    first.release()
    second.grow_to_answer(10 * MIB)
    budget.admit(2 * MIB).release()
    second.release()
    assert budget.held == 0


def test_a_call_that_fits_again_no_longer_exceeds_the_budget():
    budget = MemoryBudget(BUDGET)
    first, second = budget.admit(10 * MIB), budget.admit(10 * MIB)
    first.grow_to_answer(20 * MIB)
    first.resize(10 * MIB)
    second.grow_to_answer(20 * MIB)
    with pytest.raises(OverloadedError):
        first.grow_to_answer(20 * MIB)


def test_small_calls_are_answered_beside_one_that_exceeds_the_budget():
    budget = MemoryBudget(BUDGET)
    budget.admit(10 * BUDGET)
    small = [budget.admit(SMALL_BYTES) for _ in range(RESERVE // SMALL_BYTES)]
    with pytest.raises(OverloadedError):
        budget.admit(1)
    small.pop().release()
    budget.admit(1)


def test_small_calls_may_use_all_free_memory():
    budget = MemoryBudget(BUDGET)
    for _ in range(BUDGET // SMALL_BYTES):
        budget.admit(SMALL_BYTES)
    with pytest.raises(OverloadedError):
        budget.admit(1)
    with pytest.raises(
        OverloadedError
    ):  # it is the only large call, but the small ones already use more than the reserve
        budget.admit(BUDGET)


def test_a_released_ticket_holds_nothing_and_takes_nothing():
    budget = MemoryBudget(BUDGET)
    ticket = budget.admit(MIB)
    ticket.resize(3)
    assert (ticket.held, budget.held) == (3, 3)
    ticket.release()
    ticket.release()
    with pytest.raises(UnavailableError):
        ticket.grow(1)
    assert (ticket.held, budget.held) == (0, 0)


SIZES = st.integers(0, BUDGET // SMALL_BYTES + 3).map(lambda n: n * SMALL_BYTES) | st.integers(0, 2 * BUDGET)
STEPS = st.lists(
    st.tuples(st.sampled_from(["admit", "resize", "answer", "release"]), st.integers(0, 7), SIZES), max_size=60
)


@given(STEPS)
@settings(deadline=None)
def test_whatever_calls_do_the_sums_are_right_and_the_bounds_hold(steps: list[tuple[str, int, int]]):
    budget, tickets = MemoryBudget(BUDGET), list[Ticket]()
    for what, which, size in steps:
        before = budget.held
        try:
            if what == "admit":
                tickets.append(budget.admit(size))
            elif tickets and what in ("resize", "answer"):
                tickets[which % len(tickets)].resize(size, may_exceed=what == "answer")
            elif tickets:
                tickets.pop(which % len(tickets)).release()
        except OverloadedError:
            assert budget.held == before
        held = [ticket.held for ticket in tickets]
        large = [size for size in held if size > SMALL_BYTES]
        assert budget.held == sum(held)
        assert sum(held) - sum(large) <= BUDGET
        assert sum(large) - max(large, default=0) <= BUDGET
        assert sum(held) <= 2 * BUDGET or sum(held) - max(large) <= BUDGET
    for ticket in tickets:
        ticket.release()
    assert budget.held == 0
    budget.admit(10 * BUDGET)


def test_many_threads_lose_no_byte():
    budget = MemoryBudget(BUDGET)

    def work(size: int) -> None:
        for _ in range(2000):
            with suppress(OverloadedError):
                ticket = budget.admit(size)
                with suppress(OverloadedError):
                    ticket.grow(size)
                ticket.release()

    threads = [threading.Thread(target=work, args=(size,)) for size in (1, 100, SMALL_BYTES, 2 * MIB, 16 * MIB)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.held == 0
