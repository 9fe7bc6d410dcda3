"""What the lookups of serving cost in a tight loop, without a server around them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from recinfer.inference.predictor import Predictor
from recinfer.serving.limits import Limits
from recinfer.serving.registry import ModelRegistry
from recinfer.serving.service import InferenceService, Message
from recinfer.sizing.loads import FEW, LARGE, SMALL

__all__ = ["InProcess"]


class InProcess:
    """Thread seconds of runs in a tight loop, and of the op alone in them."""

    def __init__(self, predictor: Predictor, requests: dict[int, list[bytes]]) -> None:
        service = InferenceService(ModelRegistry({"model": predictor}), Limits())
        small, large = requests[SMALL], requests[LARGE]
        self.direct_one, self.direct_large = (
            _seconds(lambda turn, data=data: service.direct.lookup(data[turn % len(data)]))  # type: ignore[misc]
            for data in (small, large)
        )
        service.direct.enabled = False  # as in the servers that are measured

        def run_of(data: Sequence[bytes]) -> Callable[[int], object]:
            return lambda turn: service.run([Message("Lookup", data[(turn + i) % len(data)]) for i in range(len(data))])

        answer = service.run([Message("Lookup", small[0])])[0], service.run([Message("Lookup", large[0])])[0]
        self.bytes = {
            batch: len(requests[batch][0]) + len(found)  # type: ignore[arg-type]
            for batch, found in zip((SMALL, LARGE), answer)
        }
        self.one = _seconds(lambda turn: service.run([Message("Lookup", small[turn % len(small)])]))
        self.few = _seconds(run_of(small[:FEW]))
        self.large = _seconds(lambda turn: service.run([Message("Lookup", large[turn % len(large)])]))
        self.op_one, self.op_few, self.op_large = (_op_seconds(predictor, n) for n in (SMALL, FEW, LARGE))


def _seconds(call: Callable[[int], object], least: float = 0.3) -> float:
    times: list[float] = []
    end = time.perf_counter() + least
    while time.perf_counter() < end or len(times) < 20:
        begin = time.thread_time()
        call(len(times))
        times.append(time.thread_time() - begin)
    return statistics.median(times)


def _op_seconds(predictor: Predictor, batch: int) -> float:
    """Of the lookup op alone, as the planner's calibration measures it, on tables of the same shape."""
    from recinfer.distributed.calibrate import random_module, random_request

    tables = predictor.manifest.tables
    module = random_module([(t.rows, t.dim) for t in tables], tables[0].data_type)
    asked = [random_request([t.rows for t in tables], [1.0] * len(tables), batch, seed=i) for i in range(32)]
    return _seconds(lambda turn: module(asked[turn % len(asked)]))
