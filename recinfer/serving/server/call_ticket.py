"""The memory budget's bytes of one gRPC call, and the timeouts of calls that hold bytes without progress."""

from __future__ import annotations

from dataclasses import dataclass

from recinfer.errors import DeadlineError, InputError, RecinferError
from recinfer.serving.engine.memory_budget import MemoryBudget, Ticket

__all__ = ["Bounds", "CallTicket"]

_SLOW_LOOKS = 3  # looks after which an incomplete message counts as ``slow_bytes``
_SENT_S = 30.0
"""Seconds after which a call ends whose client has not read the whole answer, also if the client reads slowly: gRPC's core
takes a whole message and reports only when all of it is sent, so the progress is not visible here. An answer of 64 MiB
needs a link of 18 Mbit/s."""

_RECEIVING, _RUNNING, _SENDING = range(3)


@dataclass(frozen=True)
class Bounds:
    """The limits of a method's calls.

    Attributes:
        budget: the memory budget that counts their messages and answers.
        most_bytes: largest size of a message.
        slow_bytes: bytes that a slow message counts as, since the part that has arrived is not visible.
        receive_s: seconds after which a call with an incomplete message is ended.
    """

    budget: MemoryBudget
    most_bytes: int
    slow_bytes: int
    receive_s: float


class CallTicket(Ticket):
    """The ticket of one gRPC call, from the wait for its first message on. gRPC's thread calls :meth:`look`.

    Args:
        bounds: the limits of the call's method.
    """

    __slots__ = ("_bounds", "_changes", "_looks", "_seen", "_since", "_stage")

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds.budget)
        self._bounds = bounds
        self._stage = _RECEIVING
        self._changes = self._seen = 0  # number of stage changes, now and at the last look
        self._since, self._looks = 0.0, 0  # time of the first look since the last change, and number of looks

    def receives(self) -> None:
        """Note that the call waits for a message."""
        self._enter(_RECEIVING)

    def received(self, num_bytes: int) -> None:
        """Count a message that has arrived; raises InputError if it is too large, OverloadedError if it does not fit."""
        self._enter(_RUNNING)
        if num_bytes > self._bounds.most_bytes:
            raise InputError(f"request: got {num_bytes} bytes, expected at most {self._bounds.most_bytes}")
        self.resize(num_bytes)

    def sends(self) -> None:
        """Note that an answer is being sent."""
        self._enter(_SENDING)

    def runs(self) -> None:
        """Note that one of many answers is sent, and more may follow."""
        self._enter(_RUNNING)

    def _enter(self, stage: int) -> None:
        self._stage = stage
        self._changes += 1

    def look(self, now: float) -> RecinferError | None:
        """The reason to end the call at ``now`` (``time.monotonic()``); None: the call goes on. Called at intervals."""
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
        # Counted in looks: a process that was stopped has not read the messages that arrived meanwhile.
        if self._looks >= _SLOW_LOOKS and self.held < bounds.slow_bytes:
            try:
                self.resize(bounds.slow_bytes)
            except RecinferError as error:
                return error
        return None
