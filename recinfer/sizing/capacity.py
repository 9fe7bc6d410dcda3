"""Capacity: the highest request rate at which a real server meets its p99 objective, measured under load."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import ConfigError, NotFoundError, UnavailableError
from recinfer.files import write_file
from recinfer.sizing.arrivals import Trace
from recinfer.sizing.load import Driver, Measurement
from recinfer.version import __version__

__all__ = ["OBJECTIVE_SHARE", "Measured", "Point", "find_knee", "this_machine"]

FORMAT, VERSION = "recinfer.capacity", 1
OBJECTIVE_SHARE = 0.99
"""The share of requests that the objective is about."""

_FIRST_QPS = 20.0
_FEWEST, _LONGER = 300, 5  # minimum requests per measurement, and how many times longer it may be for them
_REPEATS, _NEAR = 3, 1.1  # most measurements per rate; the search ends at rates this close
_SHARES = (0.25, 0.5, 0.7, 0.85)  # shares of the knee that are measured for the curve
_QUANTILES = 201  # quantiles that are stored of a distribution
_WARM_UP_S = 1.0

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Point:
    """Measurements at one rate.

    Attributes:
        qps: requests per second.
        p50_s, p99_s: medians over the measurements, over all scheduled requests; infinite if too many were not answered.
        spread_s: the smallest and the largest p99 of the measurements.
        within: share of the requests that were answered within the objective, median of the measurements.
        kept: whether most of the measurements met the objective.
        late_s: delay after the scheduled time within which 99 % of the requests were sent.
    """

    qps: float
    p50_s: float
    p99_s: float
    spread_s: tuple[float, float]
    within: float
    kept: bool
    late_s: float


@dataclass(frozen=True)
class Measured:
    """Measured capacity of a server.

    Attributes:
        what: ``"server"``, or ``"ranker and shard"``: one ranker and one shard server that holds all ranks.
        model, version: name and version of the archive's model.
        call: ``"lookup"`` or ``"predict"``.
        batch, ids: mean samples of a request and ids of a sample.
        p99_s: the objective.
        knee_qps: the highest rate at which the objective was met; 0 if at none.
        at_least: the objective was met at the highest allowed rate, so the knee may be higher.
        points: the measured rates, ascending.
        alone_s: latency of requests at the lowest rate, as quantiles from 0 to 1.
        service_s: time between two answers of a server that is never idle, as quantiles from 0 to 1; empty if
            ``at_least``.
        cpu_s: CPU seconds per request near the knee, by process, including the driver.
        machine: the machine that measured: host, processor, cores, date, versions.
        driver_late: the driver sent requests late near the knee, so the server's knee may be higher.
    """

    what: str
    model: str
    version: str
    call: str
    batch: float
    ids: float
    p99_s: float
    knee_qps: float
    at_least: bool
    points: tuple[Point, ...]
    alone_s: tuple[float, ...]
    service_s: tuple[float, ...]
    cpu_s: dict[str, float]
    machine: dict[str, Any]
    driver_late: bool = False

    def save(self, path: Path) -> None:
        """Write the measured capacity as JSON; an error leaves an existing file unchanged."""
        data = {"format": FORMAT, "version": VERSION, "measured": asdict(self)}
        write_file(path, (json.dumps(_finite(data), indent=1) + "\n").encode())

    @classmethod
    def load(cls, path: Path) -> Measured:
        """Read a file of :meth:`save`.

        Raises:
            NotFoundError: no such file.
            ConfigError: the file is not of this format or version.
        """
        try:
            data: Any = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise NotFoundError(f"no capacity {str(path)!r}; write one with recinfer bench capacity --out") from None
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path}: cannot be read: {error}") from None
        if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
            raise ConfigError(f"{path}: expected a file that recinfer bench capacity --out wrote, version {VERSION}")
        try:
            found = {name: _infinite(value) for name, value in data["measured"].items()}
            found["points"] = tuple(
                Point(**{**_infinite(point), "spread_s": tuple(_infinite(point["spread_s"]))})
                for point in data["measured"]["points"]
            )
            found |= {name: tuple(found[name]) for name in ("alone_s", "service_s")}
            return cls(**found)
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: {error}; measure again with recinfer bench capacity --out") from None


def find_knee(
    driver: Driver,
    trace: Trace,
    p99_s: float,
    *,
    seconds: float = 3.0,
    max_qps: float = 100_000.0,
    seed: int = 0,
    cpu_s: Callable[[], dict[str, float]] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Find the highest rate at which 99 % of requests are answered within ``p99_s``: rates double until one is too high, then
    rates between the last two are tried until two neighbours are within 10 %.

    Up to three measurements decide about a rate. At the end a longer measurement at the knee must meet the objective
    too, or the knee is lowered.

    Args:
        driver: sends the requests.
        trace: arrival times, scaled to each rate.
        seconds: length of one measurement; longer if it would have fewer than 300 requests.
        max_qps: the highest rate to try.
        cpu_s: returns the CPU seconds used so far, by process.

    Returns:
        The fields of :class:`Measured` that are measured.

    Raises:
        UnavailableError: the server answers no request.
    """
    return _Search(driver, trace, p99_s, seconds, max_qps, seed, cpu_s or dict, progress or (lambda *_: None)).run()


class _Search:
    def __init__(
        self,
        driver: Driver,
        trace: Trace,
        p99_s: float,
        seconds: float,
        max_qps: float,
        seed: int,
        cpu_s: Callable[[], dict[str, float]],
        say: Progress,
    ) -> None:
        self._driver = driver
        self._trace = trace
        self._p99_s = p99_s
        self._seconds = seconds
        self._seed = seed
        self._max_qps = max_qps
        self._cpu_s = cpu_s
        self._say = say
        self._done = 0
        self._measurements: dict[float, list[Measurement]] = {}

    def run(self) -> dict[str, Any]:
        self._measure(_FIRST_QPS, min(_WARM_UP_S, self._seconds))
        alone = self._measure(_FIRST_QPS)
        if not np.isfinite(alone.latency_s).any():
            raise UnavailableError(f"the server answered none of {alone.latency_s.size} requests: {alone.reason}")
        knee, broken = self._bracket()
        while knee and broken is not None and broken / knee > _NEAR:
            middle = math.sqrt(knee * broken)
            knee, broken = (middle, broken) if self._kept(middle) else (knee, middle)
        knee, cpu_s = self._confirmed(knee)
        for qps in (share * knee for share in _SHARES):
            if qps >= _FIRST_QPS:
                self._kept(qps, at_least=2)
        points = tuple(self._point(qps, found) for qps, found in sorted(self._measurements.items()))
        near = [point for point in points if knee and point.qps <= knee * 1.001]
        return {
            "knee_qps": knee,
            "at_least": broken is None,
            "points": points,
            "alone_s": _quantiles(alone.latency_s[np.isfinite(alone.latency_s)]),
            "service_s": () if broken is None else _quantiles(self._gaps(broken)),
            "cpu_s": cpu_s,
            "driver_late": bool(near and near[-1].late_s > 0.2 * self._p99_s),
        }

    def _bracket(self) -> tuple[float, float | None]:
        """A rate that meets the objective (0 if none does), and one that does not (None if the highest one does)."""
        knee, rate = 0.0, min(_FIRST_QPS, self._max_qps)
        while self._kept(rate):
            if rate >= self._max_qps:
                return rate, None
            knee, rate = rate, min(2 * rate, self._max_qps)
        return knee, rate

    def _confirmed(self, knee: float) -> tuple[float, dict[str, float]]:
        """The knee, lowered until a longer measurement meets the objective, and CPU seconds per request there."""
        while knee > _FIRST_QPS:
            before, start = self._cpu_s(), time.process_time()
            found = self._measure(knee, 3 * self._seconds)
            spent = {name: after - before[name] for name, after in self._cpu_s().items()}
            spent["driver"] = time.process_time() - start
            if found.share_within(self._p99_s) >= OBJECTIVE_SHARE:
                return knee, {name: each / found.latency_s.size for name, each in spent.items()}
            knee /= _NEAR
        return knee, {}

    def _kept(self, qps: float, at_least: int = 1) -> bool:
        """Whether most of three measurements meet the objective; a first measurement far from the objective decides
        alone."""
        kept: list[bool] = []
        while len(kept) < _REPEATS:
            found = self._measure(qps)
            p99_s = found.percentile(100 * OBJECTIVE_SHARE)
            kept.append(p99_s <= self._p99_s)
            far = not 0.7 * self._p99_s < p99_s < 3 * self._p99_s
            most = max(kept.count(True), kept.count(False))
            if len(kept) >= at_least and (far or most > _REPEATS // 2):
                break
        return 2 * kept.count(True) > len(kept)

    def _measure(self, qps: float, seconds: float | None = None) -> Measurement:
        wanted = self._seconds if seconds is None else seconds
        count = max(int(qps * wanted), min(_FEWEST, int(qps * _LONGER * wanted)) if seconds is None else 1, 2)
        self._say(f"{qps:,.0f} requests per second", self._done, self._done + 8)
        due = self._trace.at_rate(qps, count, self._seed + self._done)
        self._done += 1
        found = self._driver.run(due.times)
        if seconds is None or seconds > self._seconds:  # shorter measurements are for warming up or deliberate overload
            self._measurements.setdefault(qps, []).append(found)
        return found

    def _gaps(self, qps: float) -> NDArray[np.float64]:
        """Seconds between two answers while requests wait: at a rate well above the knee, without the first quarter."""
        busiest = max(self._measurements, default=qps)
        over = self._measure(max(1.5 * qps, busiest), self._seconds)
        done = over.done_s
        waiting = done[done.size // 4 : done.size * 3 // 4]
        return np.diff(waiting) if waiting.size > 2 else np.array([1 / qps])

    def _point(self, qps: float, measurements: Sequence[Measurement]) -> Point:
        p99s = [each.percentile(100 * OBJECTIVE_SHARE) for each in measurements]
        within = [each.share_within(self._p99_s) for each in measurements]
        return Point(
            qps=qps,
            p50_s=statistics.median(each.percentile(50) for each in measurements),
            p99_s=statistics.median(p99s),
            spread_s=(min(p99s), max(p99s)),
            within=statistics.median(within),
            kept=2 * sum(share >= OBJECTIVE_SHARE for share in within) > len(within),
            late_s=statistics.median(float(np.nanpercentile(each.sent_s, 99)) for each in measurements),
        )


def this_machine() -> dict[str, Any]:
    """Description of this machine."""
    import torch

    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            model = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), model)
    except OSError:
        pass
    return {
        "host": platform.node(),
        "processor": model,
        "cores": len(os.sched_getaffinity(0)),
        "date": time.strftime("%Y-%m-%d"),
        "recinfer": __version__,
        "torch": torch.__version__,
    }


def _quantiles(values: NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(float(each) for each in np.quantile(values, np.linspace(0, 1, _QUANTILES)))


def _finite(value: Any) -> Any:
    """Infinite numbers become None, as JSON has no infinity."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _infinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _infinite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_infinite(each) for each in value]
    return math.inf if value is None else value
