"""Arrival times and sizes of requests: traces from files, and generated ones."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError, NotFoundError
from recinfer.files import NOT_GZIP, open_text, without_gz

__all__ = ["Trace", "poisson", "read_trace"]

_COLUMNS = ("time", "batch", "ids")
_MAX_LINE = 1 << 20
_MOST_COUNT, _LATEST_S = 2**31 - 1, 1e15  # larger numbers are not exact in floating point


@dataclass(frozen=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        times: seconds, float64 ``[N]``, ascending from 0.
        batches: samples per request, int64 ``[N]``.
        ids: ids per request over all features, int64 ``[N]``.
        ids_by_feature: mean ids per sample by feature, if the file has them.
    """

    times: NDArray[np.float64]
    batches: NDArray[np.int64]
    ids: NDArray[np.int64]
    ids_by_feature: Mapping[str, float]

    def __post_init__(self) -> None:
        times = self.times
        if not times.size or len(self.batches) != times.size or len(self.ids) != times.size:
            raise InputError(f"trace: {times.size} times, {len(self.batches)} batches and {len(self.ids)} ids")
        if not np.isfinite(times).all() or (np.diff(times) < 0).any():
            raise InputError("trace: expected finite, ascending times")
        if (self.batches < 1).any() or (self.ids < 0).any():
            raise InputError("trace: expected batches of at least 1 and ids of at least 0")

    def __len__(self) -> int:
        return self.times.size

    @property
    def qps(self) -> float:
        """Requests per second."""
        return self.times.size / self.duration

    @property
    def duration(self) -> float:
        """Seconds until the next request would arrive after the last one."""
        last = float(self.times[-1] - self.times[0])
        return last * self.times.size / max(self.times.size - 1, 1) or 1.0

    @property
    def ids_per_sample(self) -> float:
        """Mean over all samples."""
        return float(self.ids.sum() / self.batches.sum())

    def at_rate(self, qps: float, count: int, seed: int = 0) -> Trace:
        """About ``count`` requests with this trace's sizes and pattern, at ``qps`` requests per second.

        Gaps are scaled. A trace that is too short is repeated, each time from another position.
        """
        if not 0 < qps < math.inf or count < 1:
            raise InputError(f"trace: got {qps} requests per second and {count} requests, expected more than 0")
        random, size = np.random.default_rng(seed), self.times.size
        gaps = np.diff(self.times)
        gaps = np.append(gaps, gaps.mean() if gaps.size else 0.0)
        if count <= size:
            order = (np.arange(count) + random.integers(size - count + 1)) % size
        else:
            turns = -(-count // size)
            order = np.concatenate([(np.arange(size) + random.integers(size)) % size for _ in range(turns)])[:count]
        steps = gaps[order]
        mean = float(steps.mean())
        steps = steps / (mean * qps) if mean > 0 else np.full(order.size, 1 / qps)
        times = np.concatenate(([0.0], np.cumsum(steps)[:-1]))
        return Trace(times, self.batches[order], self.ids[order], self.ids_by_feature)


def poisson(
    qps: float, count: int, *, batch: int = 1, ids_per_sample: float = 1.0, seed: int = 0, spread_ids: bool = True
) -> Trace:
    """A Poisson process of requests with equal batch sizes.

    Args:
        spread_ids: ids per request vary like a sum of geometric bags; otherwise each request has the mean.
    """
    if not 0 < qps < math.inf or count < 1 or batch < 1 or not 0 <= ids_per_sample < math.inf:
        raise InputError(
            f"got {qps} requests per second, {count} requests of {batch} samples and {ids_per_sample} ids per sample; "
            "expected more than 0"
        )
    random = np.random.default_rng(seed)
    times = np.cumsum(random.exponential(1 / qps, count))
    mean = batch * ids_per_sample
    ids = np.full(count, round(mean), np.int64)
    if spread_ids and mean > 0:
        ids = random.poisson(mean, count)
    return Trace(times - times[0], np.full(count, batch, np.int64), ids, {})


def read_trace(path: Path) -> Trace:
    """Read a trace, JSON lines or CSV, each also as ``.gz``; docs/how-to/measure-capacity.md has the format.

    Raises:
        NotFoundError: no such file.
        InputError: the message has the line number, its content, and what was expected.
    """
    rows = _json_lines if without_gz(path).suffix.lower() in (".jsonl", ".json", ".ndjson") else _csv_lines
    times: list[float] = []
    batches: list[int] = []
    ids: list[int] = []
    by_feature: dict[str, float] = {}
    try:
        for number, row in rows(path):
            where = f"{path}, line {number}"
            time = _number(row.get("time"), where, "time", low=-math.inf)
            batch = int(_number(row.get("batch", 1), where, "batch", low=1, whole=True))
            mine = row.get("ids", 0)
            if isinstance(mine, dict):
                counts = {str(k): _number(v, where, f"ids of {k!r}", whole=True) for k, v in mine.items()}
                for name, value in counts.items():
                    by_feature[name] = by_feature.get(name, 0.0) + value
                total = int(sum(counts.values()))
            else:
                total = int(_number(mine, where, "ids", whole=True))
            if times and time < times[-1]:
                raise InputError(
                    f"{where}: time {time:g} is less than on the line before ({times[-1]:g}); sort the trace"
                )
            times.append(time)
            batches.append(batch)
            ids.append(total)
    except FileNotFoundError:
        raise NotFoundError(f"no trace {str(path)!r}; docs/how-to/measure-capacity.md describes the format") from None
    except NOT_GZIP as error:  # before OSError, because one of these classes is an OSError
        raise InputError(f"{path}: the compressed data is cut off or damaged: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read trace {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: expected text in UTF-8: {error}") from None
    if not times:
        raise InputError(f"{path}: contains no requests; expected one per line")
    samples = float(sum(batches))
    begin = np.array(times)
    means = {name: total / samples for name, total in sorted(by_feature.items())}
    return Trace(begin - begin[0], np.array(batches, np.int64), np.array(ids, np.int64), means)


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line[:_MAX_LINE])
            except ValueError as error:
                raise InputError(f"{path}, line {number}: not JSON: {error}") from None
            if not isinstance(row, dict) or not row.keys() <= set(_COLUMNS):
                raise InputError(f"{path}, line {number}: expected an object of time, batch and ids")
            yield number, row


def _csv_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with open_text(path) as file:
        reader = _cells(path, csv.reader(file))
        _, header = next(reader, (1, None))
        names = [name.strip() for name in header or []]
        if "time" not in names or len(set(names)) != len(names) or not all(_known(name) for name in names):
            raise InputError(
                f"{path}, line 1: got the columns {names[:10]}; expected time, batch, and ids or ids.<feature> columns"
            )
        for number, cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                raise InputError(f"{path}, line {number}: got {len(cells)} cells, expected {len(names)}")
            row: dict[str, Any] = {}
            for name, cell in zip(names, cells):
                if name.startswith("ids."):
                    row.setdefault("ids", {})[name[4:]] = cell
                else:
                    row[name] = cell
            yield number, row


def _cells(path: Path, reader: Iterable[list[str]]) -> Iterator[tuple[int, list[str]]]:
    number = 0
    try:
        for number, cells in enumerate(reader, 1):
            yield number, cells
    except csv.Error as error:
        raise InputError(f"{path}, line {number + 1}: {error}") from None


def _known(name: str) -> bool:
    return name in _COLUMNS or (name.startswith("ids.") and len(name) > 4)


def _number(value: Any, where: str, what: str, low: float = 0.0, whole: bool = False) -> float:
    most = _MOST_COUNT if whole else _LATEST_S
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or not low <= number <= most or (whole and number != int(number)):
        kind = "a whole number" if whole else "a number"
        least = f" of at most {most:,.0f}" if number > most else "" if low == -math.inf else f" of at least {low:g}"
        raise InputError(f"{where}: {what}: got {value!r}, expected {kind}{least}")
    return number
