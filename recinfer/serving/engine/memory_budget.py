"""The memory budget: the bytes that a process's requests and answers may hold, from first received to last sent."""

from __future__ import annotations

import threading
from contextvars import ContextVar

from recinfer.errors import OverloadedError, UnavailableError

__all__ = ["SMALL_BYTES", "UNCOUNTED", "MemoryBudget", "Ticket", "ticket_of_task"]

SMALL_BYTES = 1 << 20
"""The most bytes that a small call holds."""

_RESERVE = 8  # the budget divided by this is for small calls alone
_RETRY_S = 0.1


class MemoryBudget:
    """Counts the bytes that calls hold, and refuses bytes that do not fit. Any thread may call; no method waits.

    An eighth of the budget is for small calls alone (up to ``SMALL_BYTES`` each), so that large calls do not keep them from
    their answers. A large call that finds no other large call may exceed the budget, since it could never be answered
    otherwise. One large call that is being answered (:meth:`Ticket.grow_to_answer`) may exceed the budget too: several calls
    that each hold a part of their bytes would refuse one another, and none would be answered. So all calls together hold at
    most the budget and the bytes of one call.

    Args:
        budget_bytes: bytes for all calls together.

    Attributes:
        held: bytes that calls hold now.
        refused: number of refusals.
    """

    __slots__ = ("_exceeding", "_held_by_large", "_lock", "_reserve", "budget_bytes", "held", "refused")

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._reserve = budget_bytes // _RESERVE
        self.held = self._held_by_large = self.refused = 0
        self._exceeding: Ticket | None = None
        self._lock = threading.Lock()

    def admit(self, num_bytes: int) -> Ticket:
        """A ticket for a call that holds ``num_bytes``; raises OverloadedError when they do not fit."""
        ticket = Ticket(self)
        ticket.resize(num_bytes)
        return ticket

    def _resize_large(self, ticket: Ticket, wanted: int, may_exceed: bool) -> None:
        """Resize the ticket of a call that is large before or after to ``wanted`` bytes; the lock is held."""
        had = ticket.held
        others, others_large = self.held - had, self._held_by_large
        if had > SMALL_BYTES:
            others_large -= had
        if (
            wanted > had
            and not self._fits(others, others_large, wanted)
            and not (may_exceed and self._takes_excess(ticket))
        ):
            self.refused += 1
            raise OverloadedError(
                f"the server's requests and answers hold {self.held} bytes, and {wanted - had} more do not fit into its "
                f"memory budget of {self.budget_bytes}; try again in {_RETRY_S * 1e3:.0f} ms, or send less a request",
                retry_after=_RETRY_S,
            )
        self.held = others + wanted
        self._held_by_large = others_large + wanted if wanted > SMALL_BYTES else others_large
        if self._exceeding is ticket and self.held <= self.budget_bytes:
            self._exceeding = None

    def _takes_excess(self, ticket: Ticket) -> bool:
        if ticket.held <= SMALL_BYTES or self._exceeding not in (None, ticket):
            return False
        self._exceeding = ticket
        return True

    def _fits(self, others: int, others_large: int, wanted: int) -> bool:
        if wanted <= SMALL_BYTES:
            return others + wanted <= self.budget_bytes or others - others_large + wanted <= self._reserve
        if not others_large and others <= self._reserve:
            return True
        return others + wanted <= self.budget_bytes and others_large + wanted <= self.budget_bytes - self._reserve


class Ticket:
    """The bytes of a budget that one call holds. Any thread may call it.

    Attributes:
        held: number of bytes.
    """

    __slots__ = ("_budget", "_is_released", "held")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self.held = 0
        self._is_released = False

    @property
    def budget_bytes(self) -> int:
        """The bytes that all calls may hold together."""
        return self._budget.budget_bytes

    def grow(self, num_bytes: int) -> None:
        """Hold ``num_bytes`` more; call this before the bytes are allocated.

        Raises:
            OverloadedError: the bytes do not fit; the ticket keeps the bytes that it held.
            UnavailableError: the ticket was released: the call has ended.
        """
        self.resize(self.held + num_bytes)

    def grow_to_answer(self, num_bytes: int) -> None:
        """:meth:`grow` for a request that is complete and being answered: one large ticket at a time may exceed the budget."""
        self.resize(self.held + num_bytes, may_exceed=True)

    def resize(self, num_bytes: int, may_exceed: bool = False) -> None:
        """Hold ``num_bytes`` in all; raises the errors of :meth:`grow`."""
        budget = self._budget
        with budget._lock:
            had = self.held
            if self._is_released:
                raise UnavailableError("the caller is gone: nobody waits for the answer")
            held = budget.held + num_bytes - had
            if had <= SMALL_BYTES and num_bytes <= SMALL_BYTES and held <= budget.budget_bytes:
                budget.held = held  # the fast path, as most calls are small
            else:
                budget._resize_large(self, num_bytes, may_exceed)
            self.held = num_bytes

    def release(self) -> None:
        """Free all bytes; a second call has no effect."""
        budget = self._budget
        with budget._lock:
            if budget._exceeding is self:
                budget._exceeding = None
            if self.held <= SMALL_BYTES:
                budget.held -= self.held
            else:
                budget._resize_large(self, 0, False)
            self.held, self._is_released = 0, True


class _Uncounted(Ticket):
    def resize(self, num_bytes: int, may_exceed: bool = False) -> None:
        """Count nothing."""


UNCOUNTED: Ticket = _Uncounted(MemoryBudget(0))
"""The ticket of calls that no budget counts."""

ticket_of_task: ContextVar[Ticket] = ContextVar("ticket_of_task", default=UNCOUNTED)
"""The ticket of the call that the running task of the event loop answers, also in threads that work for this task."""
