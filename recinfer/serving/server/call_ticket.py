"""The memory budget's bytes of one gRPC call, and the timeouts of calls that hold bytes without progress."""

from __future__ import annotations

from dataclasses import dataclass

from recinfer.errors import DeadlineError, InputError, RecinferError
from recinfer.serving.engine.memory_budget import MemoryBudget, Ticket

__all__ = ["Bounds", "CallTicket"]

_SLOW_LOOKS = 3  # looks after which a message that is not complete counts as the largest one
_SENT_S = 30.0
"""An answer that its caller has not taken whole by then is given up, also one that is still being read, but slowly: gRPC's core
takes a message whole and says only that all of it is sent, so nobody here can see how much of it is. An answer of 64 MiB
needs a link of 18 Mbit/s."""

_RECEIVING, _RUNNING, _SENDING = range(3)


@dataclass(frozen=True)
class Bounds:
    """What the calls of a method may hold.

    Attributes:
        budget: that their messages and answers are counted by.
        most_bytes: of a message.
        slow_bytes: what a message is counted as that is slow to come: nobody can see how much of it is there.
        receive_s: seconds after which a message that is not complete is given up.
    """

    budget: MemoryBudget
    most_bytes: int
    slow_bytes: int
    receive_s: float


class CallTicket(Ticket):
    """It begins where the call waits for a message. :meth:`look` is for gRPC's thread.

    Args:
        bounds: of the call's method.
    """

    __slots__ = ("_bounds", "_changes", "_looks", "_seen", "_since", "_stage")

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds.budget)
        self._bounds = bounds
        self._stage = _RECEIVING
        self._changes = self._seen = 0  # of its stage: how many there were, and at the last look
        self._since, self._looks = 0.0, 0  # when it was first seen in its stage, and how often since

    def receives(self) -> None:
        """The call waits for a message."""
        self._enter(_RECEIVING)

    def received(self, num_bytes: int) -> None:
        """The message is here; raises InputError where it is too large, OverloadedError."""
        self._enter(_RUNNING)
        if num_bytes > self._bounds.most_bytes:
            raise InputError(f"request: got {num_bytes} bytes, expected at most {self._bounds.most_bytes}")
        self.resize(num_bytes)

    def sends(self) -> None:
        """The answer, or one of many, is being sent."""
        self._enter(_SENDING)

    def runs(self) -> None:
        """One of many answers is sent, and more may follow."""
        self._enter(_RUNNING)

    def _enter(self, stage: int) -> None:
        self._stage = stage
        self._changes += 1

    def look(self, now: float) -> RecinferError | None:
        """Why the call is to be given up, at ``time.monotonic()``; None: it goes on. Called every so often."""
        if self._changes != self._seen or not self._looks:
            self._seen, self._since, self._looks = self._changes, now, 1
            return None
        self._looks += 1
        spent, bounds = now - self._since, self._bounds
        if self._stage == _SENDING and spent > _SENT_S:
            return DeadlineError(f"the answer was not taken for {_SENT_S:g} s")
        if self._stage != _RECEIVING:
            return None
        if spent > bounds.receive_s:
            return DeadlineError(f"request: not complete after {bounds.receive_s:g} s")
        # Counted in looks: a server that stood still has not seen what came meanwhile.
        if self._looks >= _SLOW_LOOKS and self.held < bounds.slow_bytes:
            try:
                self.resize(bounds.slow_bytes)
            except RecinferError as error:
                return error
        return None
