"""A driver whose server is a simulated queue with a known knee, for tests of the capacity search."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recinfer.sizing.fanout import waits
from recinfer.sizing.load import Measurement


class QueueDriver:
    """Requests wait for one server, which takes ``service_s`` for each; ``alone_s`` more passes on the way.

    Attributes:
        rates: of the measurements so far.
    """

    def __init__(self, service_s: float, alone_s: float, *, refuses: bool = False, seed: int = 0) -> None:
        self._service_s, self._alone_s, self._refuses = service_s, alone_s, refuses
        self._random = np.random.default_rng(seed)
        self.rates: list[float] = []

    def run(self, due_s: NDArray[np.float64]) -> Measurement:
        """As :meth:`recinfer.sizing.load.Driver.run`, in no time."""
        count = due_s.size
        service_s = self._random.exponential(self._service_s, count)
        latency_s = waits(due_s, service_s) + service_s + self._alone_s
        if self._refuses:
            latency_s[:] = np.inf
        self.rates.append(count / float(due_s[-1] - due_s[0]))
        done = np.sort((due_s + latency_s)[np.isfinite(latency_s)])
        errors = {"OverloadedError": count} if self._refuses else {}
        return Measurement(self.rates[-1], np.zeros(count), latency_s, done, errors, "full" if self._refuses else "")
