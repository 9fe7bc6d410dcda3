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
    their answers. A large call that finds no other large one may exceed the budget, since it could never be answered otherwise.
    So may one large call that is being answered (:meth:`Ticket.grow_to_answer`): of several that each hold a part of what they
    need, all would be refused because of the others, and none answered. So calls hold at most the budget and one call's needs.

    Args:
        budget_bytes: for all calls together.

    Attributes:
        held: bytes that calls hold now.
        refused: how often bytes did not fit.
    """

    __slots__ = ("_exceeding", "_held_by_large", "_lock", "_reserve", "budget_bytes", "held", "refused")

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes, self._reserve = budget_bytes, budget_bytes // _RESERVE
        self.held = self._held_by_large = self.refused = 0
        self._exceeding: Ticket | None = None
        self._lock = threading.Lock()

    def admit(self, num_bytes: int) -> Ticket:
        """A ticket for a call that holds ``num_bytes``; raises OverloadedError when they do not fit."""
        ticket = Ticket(self)
        ticket.resize(num_bytes)
        return ticket

    def _move(self, ticket: Ticket, wanted: int, may_exceed: bool) -> None:
        """``ticket``, of a call that is large before or after it, holds ``wanted`` bytes. With the lock."""
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

    def grow_to_answer(self, num_bytes: int) -> None:
        """As :meth:`grow`, for a large request that is complete and being answered: one at a time may exceed the budget."""
        self.resize(self.held + num_bytes, may_exceed=True)

    def resize(self, num_bytes: int, may_exceed: bool = False) -> None:
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
                budget._move(self, num_bytes, may_exceed)
            self.held = num_bytes

    def release(self) -> None:
        """Free all bytes; a second call does nothing."""
        budget = self._budget
        with budget._lock:
            if budget._exceeding is self:
                budget._exceeding = None
            if self.held <= SMALL_BYTES:
                budget.held -= self.held
            else:
                budget._move(self, 0, False)
            self.held, self._is_released = 0, True


class _Uncounted(Ticket):
    def resize(self, num_bytes: int, may_exceed: bool = False) -> None:
        """Count nothing."""


UNCOUNTED: Ticket = _Uncounted(MemoryBudget(0))
"""Of calls that no budget counts."""

ticket_of_task: ContextVar[Ticket] = ContextVar("ticket_of_task", default=UNCOUNTED)
"""Of the call that this task of the event loop answers, and threads that work for it."""
