"""How many bytes the requests and answers of a process may hold together, from the first received byte to the last sent one."""

from __future__ import annotations

import threading
from contextvars import ContextVar

from recinfer.errors import OverloadedError, UnavailableError

__all__ = ["SMALL_BYTES", "UNCOUNTED", "MemoryBudget", "Ticket", "ticket_of_task"]

SMALL_BYTES = 1 << 20
"""What a small call holds at most."""

_RESERVE = 8  # one part in so many is for small calls alone
_RETRY_S = 0.1


class MemoryBudget:
    """Counts the bytes that calls hold, and refuses what does not fit. Any thread may call it; it never waits.

    An eighth of the budget is for small calls alone (up to ``SMALL_BYTES`` each), so that large ones do not keep others from
    their answers. A call that finds no other large one may exceed the budget, since it could never be answered otherwise. One
    large call may wait for room (:meth:`Ticket.waits_for_room`); meanwhile no other large one gets any, since of several that
    each hold a part of what they need none would be answered.

    Args:
        budget_bytes: for all calls together.

    Attributes:
        held: bytes that calls hold now.
        refused: how often bytes did not fit.
    """

    __slots__ = ("_held_by_large", "_lock", "_reserve", "_waiting", "budget_bytes", "held", "refused")

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self._reserve = budget_bytes, budget_bytes // _RESERVE
        self.held = self._held_by_large = self.refused = 0
        self._waiting: Ticket | None = None  # for room
        self._lock = threading.Lock()

    def admit(self, num_bytes: int) -> Ticket:
        """A ticket for a call that holds ``num_bytes``; raises OverloadedError when they do not fit."""
        ticket = Ticket(self)
        ticket.resize(num_bytes)
        return ticket

    def _move(self, ticket: Ticket, wanted: int) -> None:
        """``ticket``, of a call that is large before or after it, holds ``wanted`` bytes. With the lock."""
        had = ticket.held
        others, others_large = self.held - had, self._held_by_large
        if had > SMALL_BYTES:
            others_large -= had
        is_behind = wanted > SMALL_BYTES and self._waiting not in (None, ticket)
        if wanted > had and (is_behind or not self._fits(others, others_large, wanted)):
            self.refused += 1
            raise OverloadedError(
                f"the server's requests and answers hold {self.held} bytes, and {wanted - had} more do not fit into its "
                f"memory budget of {self.budget_bytes}; try again in {_RETRY_S * 1e3:.0f} ms, or send less a request",
                retry_after=_RETRY_S,
            )
        self.held = others + wanted
        self._held_by_large = others_large + wanted if wanted > SMALL_BYTES else others_large
        if wanted > had and self._waiting is ticket:
            self._waiting = None

    def _fits(self, others: int, others_large: int, wanted: int) -> bool:
        if wanted <= SMALL_BYTES:
            return others + wanted <= self.budget_bytes or others - others_large + wanted <= self._reserve
        if not others_large and others <= self._reserve:
            return True
        return others + wanted <= self.budget_bytes and others_large + wanted <= self.budget_bytes - self._reserve


class Ticket:
    """What one call holds of a budget. Any thread may call it.

    Attributes:
        held: bytes.
    """

    __slots__ = ("_budget", "_is_released", "held")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget, self.held, self._is_released = budget, 0, False

    @property
    def budget_bytes(self) -> int:
        """What all calls may hold together."""
        return self._budget.budget_bytes

    def grow(self, num_bytes: int) -> None:
        """Hold so many more; call it before they are allocated.

        Raises:
            OverloadedError: they do not fit; what was held still is.
            UnavailableError: the ticket was released: the call has ended.
        """
        self.resize(self.held + num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Hold so many in all; raises as :meth:`grow`."""
        budget = self._budget
        with budget._lock:
            had = self.held
            if self._is_released:
                raise UnavailableError("the caller is gone: nobody waits for the answer")
            held = budget.held + num_bytes - had
            if had <= SMALL_BYTES and num_bytes <= SMALL_BYTES and held <= budget.budget_bytes:
                budget.held = held  # most calls are small: this is what they cost
            else:
                budget._move(self, num_bytes)
            self.held = num_bytes

    def release(self) -> None:
        """Free all bytes; a second call does nothing."""
        budget = self._budget
        with budget._lock:
            if budget._waiting is self:
                budget._waiting = None
            if self.held <= SMALL_BYTES:
                budget.held -= self.held
            else:
                budget._move(self, 0)
            self.held, self._is_released = 0, True

    def waits_for_room(self) -> bool:
        """Whether the next room for a large call is this one's, until it grows or is released; False: another call waits, or
        no other large one holds what it could wait for."""
        budget = self._budget
        with budget._lock:
            others = budget._held_by_large - (self.held if self.held > SMALL_BYTES else 0)
            if self._is_released or not others or budget._waiting not in (None, self):
                return False
            budget._waiting = self
            return True


class _Uncounted(Ticket):
    def resize(self, num_bytes: int) -> None:
        """Count nothing."""


UNCOUNTED: Ticket = _Uncounted(MemoryBudget(0))
"""Of calls that no budget counts."""

ticket_of_task: ContextVar[Ticket] = ContextVar("ticket_of_task", default=UNCOUNTED)
"""Of the call that this task of the event loop answers, and threads that work for it."""
