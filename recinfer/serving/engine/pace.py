"""How many requests a run waits for, and when they share none. What is about to come cannot be seen: it is learned from what came lately."""

from __future__ import annotations

import math

__all__ = ["BUSY_S", "MOST_AWAY", "REST_S", "Crowd", "Pace", "gains_nothing", "most_away"]

_MIN_PROBE, _MAX_PROBE = 8, 256
_HITS_BEFORE_GROWTH, _HITS_AT_FIRST = 8, 2
_SHORTEST_CROWD_S, _LONGEST_CROWD_S = 0.0025, 0.32

MOST_AWAY = 64
"""Requests that may go by themselves at a time; see :func:`most_away`."""
_LONG_BYTES = 4 << 10
_AWAY, _QUESTIONS_AWAY, _COMPUTED_AWAY_S = 16, 32, 4e-3  # of short ones
_LONG_QUESTIONS_AWAY, _LONG_COMPUTED_AWAY_S = 64, 32e-3

REST_S, BUSY_S = 3e-4, 0.05
"""gRPC's thread is busy when it has not waited ``REST_S`` seconds for anything for ``BUSY_S``. What comes to it then waits
where nobody sees it, and refuses nothing; the queue of those that share runs is bounded, and they take less of that thread.
"""


def gains_nothing(num_bytes: int, predicts: bool) -> bool:
    """Whether a request of so many bytes had better never share a run. What is saved by that is the same for each, but for
    dense runs, and what it costs goes with the bytes.
    """
    return num_bytes >= (4 * _LONG_BYTES if predicts else _LONG_BYTES)


def most_away(questions: int, seconds: float, num_bytes: int) -> int:
    """How many requests may go by themselves at a time, each of ``num_bytes``, asking other hosts ``questions`` and computing
    ``seconds`` then.

    Of a few at a time it is twice as fast as sharing runs, which is more work than they save, and all of it the event loop's.
    Of more, what the shards are asked counts, and what is computed on the one thread that hears of their answers; less so
    where sharing costs more. docs/decisions.md has the measurements.
    """
    long = num_bytes >= _LONG_BYTES
    most, asked = (MOST_AWAY, _LONG_QUESTIONS_AWAY) if long else (_AWAY, _QUESTIONS_AWAY)
    computed_s = _LONG_COMPUTED_AWAY_S if long else _COMPUTED_AWAY_S
    most = min(most // 2 if seconds else most, asked // max(questions, 1))
    return max(1, most if most * seconds <= computed_s else int(computed_s / seconds))


class Pace:
    """1 while requests come alone, else as many as came together lately, and a few more.

    Attributes:
        target: how many a run waits for now.
    """

    def __init__(self) -> None:
        self.target = 1
        self._alone = self._hits = 0
        self._needed = _HITS_AT_FIRST
        self._until_probe = _MIN_PROBE

    def goes_alone(self) -> bool:
        """Whether a request that finds nothing waiting is run without a wait; now and then one is not, as a probe."""
        if self.target > 1:
            return False
        self._alone += 1
        if self._alone < self._until_probe:
            return True
        self._alone, self.target = 0, 2
        return False

    @property
    def is_alone(self) -> bool:
        """Whether the next request is neither waited with nor a probe."""
        return self.target == 1 and self._alone + 1 < self._until_probe

    def reached(self) -> None:
        """As many came as were waited for."""
        self._hits += 1
        if self._hits >= self._needed:
            self._hits = 0
            self.target += max(1, self.target // 4)

    def missed(self, came: int) -> None:
        """The wait is over, and only ``came`` requests are there."""
        self._until_probe = (
            max(_MIN_PROBE, self._until_probe // 4) if came > 1 else min(_MAX_PROBE, self._until_probe * 2)
        )
        self._hits, self.target = 0, max(1, (self.target + came) // 2)
        self._needed = _HITS_BEFORE_GROWTH if came > 1 else _HITS_AT_FIRST


class Crowd:
    """Of requests that go by themselves while few are under way: after there were too many, those of the next moment share
    runs, as some that do and some that do not hinder each other. A few milliseconds at first; twice as long each time
    when soon there were too many again.

    All times are in seconds of one clock.
    """

    def __init__(self) -> None:
        self._until, self._lasts = -math.inf, 0.0

    def is_there(self, now: float) -> bool:
        """A request that comes now is to share a run."""
        return now < self._until

    def too_many(self, now: float) -> None:
        """One came that would have been too many."""
        soon = now - self._until < self._lasts
        self._lasts = min(2 * self._lasts, _LONGEST_CROWD_S) if soon else _SHORTEST_CROWD_S
        self._until = now + self._lasts
