"""When a call counts as slow and when it is ended, check by check, with a simulated clock."""

from __future__ import annotations

import pytest

from recinfer.errors import DeadlineError, InputError, OverloadedError, UnavailableError
from recinfer.serving.engine.memory_budget import MemoryBudget
from recinfer.serving.server.grpc_call import Bounds, CallTicket

MIB = 1 << 20
BOUNDS = Bounds(MemoryBudget(32 * MIB), most_bytes=8 * MIB, slow_bytes=10 * MIB, receive_s=3.0)


def bounds(budget: MemoryBudget) -> Bounds:
    return Bounds(budget, BOUNDS.most_bytes, BOUNDS.slow_bytes, BOUNDS.receive_s)


def test_a_message_counts_as_the_largest_once_it_was_looked_for_three_times():
    budget = MemoryBudget(32 * MIB)
    ticket = CallTicket(bounds(budget))
    assert ticket.look(100.0) is None and ticket.look(102.0) is None  # a server that was stopped has checked twice
    assert budget.held == 0
    assert ticket.look(102.1) is None and ticket.look(102.2) is None
    assert budget.held == 10 * MIB
    ticket.received(5)
    assert budget.held == 5
    for now in range(200, 300):
        assert ticket.look(float(now)) is None  # a run may take as long as it does
    assert budget.held == 5


def test_slow_call_that_does_not_fit_is_ended():
    budget = MemoryBudget(32 * MIB)
    tickets = [CallTicket(bounds(budget)) for _ in range(3)]
    for now in (0.0, 0.05):
        assert [ticket.look(now) for ticket in tickets] == [None] * 3
    first, second, third = (ticket.look(0.1) for ticket in tickets)
    assert first is None and second is None and isinstance(third, OverloadedError)
    assert str(third).startswith("a request that arrives slowly counts as 10485760 bytes: the server's requests")
    assert third.retry_after > 0


def test_call_without_its_message_is_ended():
    ticket = CallTicket(bounds(MemoryBudget(32 * MIB)))
    assert ticket.look(10.0) is None and ticket.look(13.0) is None
    assert isinstance(ticket.look(13.1), DeadlineError)


def test_each_message_of_a_stream_has_its_own_time():
    ticket = CallTicket(bounds(MemoryBudget(32 * MIB)))
    for now in (0.0, 3.0, 6.0):
        ticket.receives()
        assert ticket.look(now) is None and ticket.look(now + 2.9) is None
        ticket.received(1)
        assert ticket.look(now + 2.95) is None
    ticket.receives()
    assert ticket.look(9.0) is None
    assert isinstance(ticket.look(12.1), DeadlineError)


def test_call_whose_answer_is_not_read_is_ended():
    ticket = CallTicket(bounds(MemoryBudget(32 * MIB)))
    ticket.received(1)
    ticket.sends()
    assert ticket.look(0.0) is None and ticket.look(30.0) is None
    assert isinstance(ticket.look(30.1), DeadlineError)


def test_each_answer_of_a_stream_has_its_own_time():
    ticket = CallTicket(bounds(MemoryBudget(32 * MIB)))
    ticket.received(1)
    for now in (0.0, 30.0, 60.0):  # checked only while it sends, each time a different answer
        ticket.sends()
        assert ticket.look(now) is None and ticket.look(now + 29.0) is None
        ticket.runs()
    ticket.sends()
    assert ticket.look(90.0) is None
    assert isinstance(ticket.look(120.1), DeadlineError)


def test_a_message_that_is_too_large_or_whose_call_is_over_is_refused():
    ticket = CallTicket(bounds(MemoryBudget(32 * MIB)))
    with pytest.raises(InputError, match=f"got {9 * MIB} bytes, expected at most {8 * MIB}"):
        ticket.received(9 * MIB)
    ticket.release()
    with pytest.raises(UnavailableError, match="gone"):
        ticket.received(1)
