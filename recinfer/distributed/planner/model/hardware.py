"""Measured costs of quantized lookups on a machine, as data for the inference estimator.

``recinfer.distributed.quant.measure`` measures them; this module stores, interpolates and checks them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recinfer.errors import ConfigError, NotFoundError
from recinfer.files import write_file

__all__ = ["FEATURES_PER_CALL", "SECTOR_BYTES", "CacheSharers", "HardwareProfile", "LookupGrid"]

FEATURES_PER_CALL = 8
"""Features of a measured call, enough to make the call's own cost negligible and few enough for small outputs."""

SECTOR_BYTES = 128
"""Bytes that a cache miss loads, a line and its neighbour, which adjacent rows share."""

PROFILE_FORMAT = "recinfer.hardware/2"
FloatN = npt.NDArray[np.float64]
_FARTHEST = 64  # multiple of the largest measured set up to which costs grow, as page tables leave the caches too
_CALLS = np.logspace(0, 10, 41)  # numbers of calls for which CacheSharers.touched has an entry


@dataclass(frozen=True)
class LookupGrid:
    """Nanoseconds of one bag, over row sizes, sets of memory that rows are drawn from, and ids per bag.

    Rows are drawn uniformly from the whole set, so the size of a set determines the cache level that serves it. Axes
    ascend. Costs are interpolated and extrapolated linearly (in the logarithm of the set size).

    Args:
        row_bytes: bytes of a packed row.
        set_bytes: bytes of the rows that ids are drawn from, at least two figures.
        ids_per_bag: at least two lengths.
        bags_per_call: number of bags in a measured call, one figure per length.
        bag_ns: [row sizes][sets][lengths].
    """

    row_bytes: tuple[float, ...]
    set_bytes: tuple[float, ...]
    ids_per_bag: tuple[float, ...]
    bags_per_call: tuple[float, ...]
    bag_ns: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        shape = (len(self.row_bytes), len(self.set_bytes), len(self.ids_per_bag))
        values = np.array(self.bag_ns, float)
        if values.shape != shape or not np.isfinite(values).all() or (values < 0).any():
            raise ConfigError(f"bag_ns has shape {values.shape}; expected {shape} finite figures, none negative")
        for name in ("row_bytes", "set_bytes", "ids_per_bag"):
            _check_ascending(name, getattr(self, name), least=0.0 if name == "ids_per_bag" else 1e-9)
        if len(self.set_bytes) < 2 or len(self.ids_per_bag) < 2 or len(self.bags_per_call) != len(self.ids_per_bag):
            raise ConfigError(
                f"set_bytes {self.set_bytes}, ids_per_bag {self.ids_per_bag} and bags_per_call {self.bags_per_call}; "
                "expected two sets, two lengths, and a number of bags for each length"
            )

    def at(self, row_bytes: FloatN, set_bytes: FloatN, ids_per_bag: FloatN) -> FloatN:
        """Nanoseconds per bag [N]."""
        values = np.array(self.bag_ns)
        axes = (
            _locate(np.array(self.row_bytes), row_bytes),
            _locate(
                np.log(self.set_bytes), np.log(np.clip(set_bytes, 1.0, self.set_bytes[-1] * _FARTHEST)), beyond=True
            ),
            _locate(np.array(self.ids_per_bag), ids_per_bag, beyond=True),
        )
        out = np.zeros(row_bytes.shape)
        for corner in itertools.product((0, 1), repeat=3):
            index = tuple(np.minimum(i + c, n - 1) for (i, _), c, n in zip(axes, corner, values.shape))
            weight = np.prod([share if c else 1 - share for (_, share), c in zip(axes, corner)], axis=0)
            out += weight * values[index]
        return out * np.maximum(row_bytes / self.row_bytes[-1], 1.0)


def _check_ascending(name: str, points: Sequence[float], least: float) -> None:
    values = np.array(points, float)
    if values.size < 1 or (values < least).any() or (np.diff(values) <= 0).any():
        raise ConfigError(f"{name} {values.tolist()}; expected ascending figures, at least {least:g}")


def _locate(points: FloatN, x: FloatN, *, beyond: bool = False) -> tuple[npt.NDArray[np.int64], FloatN]:
    """Index of the grid point below ``x`` and the fraction of the way to the next point; within the grid unless
    ``beyond``."""
    if points.size == 1:
        return np.zeros(x.shape, np.int64), np.zeros(x.shape)
    at = np.maximum(x, points[0]) if beyond else np.clip(x, points[0], points[-1])
    i = np.clip(np.searchsorted(points, at, side="right") - 1, 0, points.size - 2)
    return i, (at - points[i]) / (points[i + 1] - points[i])


def _interpolate(x: FloatN, points: Sequence[tuple[float, float]]) -> FloatN:
    """Linear in log ``x`` between the points, in proportion to ``x`` before the first."""
    known, figures = np.array(points, float).T
    inside = np.interp(np.log(np.maximum(x, known[0])), np.log(known), figures)
    return inside * np.minimum(x / known[0], 1.0)


def _unique(pool: FloatN, draws: FloatN) -> FloatN:
    """Expected number of distinct items among ``draws`` uniform draws from ``pool`` items."""
    return pool * -np.expm1(-draws / np.maximum(pool, 1.0))


def _touched_bytes(rows: FloatN, ids: FloatN, row_bytes: FloatN) -> FloatN:
    """Bytes of the memory sectors that uniform ids touch; scattered rows of a large table fill more of a cache than
    their bytes."""
    sectors = np.maximum(rows * row_bytes / SECTOR_BYTES, 1.0)
    return _unique(sectors, ids * (1 + (row_bytes - 1) / SECTOR_BYTES)) * SECTOR_BYTES


def _tuples(value: Any) -> Any:
    """JSON's lists as tuples, at every depth."""
    if isinstance(value, dict):
        return {name: _tuples(inner) for name, inner in value.items()}
    return tuple(_tuples(inner) for inner in value) if isinstance(value, list) else value


@dataclass(frozen=True)
class CacheSharers:
    """The lookups that share a rank's caches: the bytes that all lookups of the rank touch in a number of calls.

    Args:
        touched: bytes for each number of calls in ``_CALLS``.
        output_bytes: bytes of the vectors of one call.
    """

    touched: FloatN
    output_bytes: float

    @classmethod
    def of(cls, rows: FloatN, ids: FloatN, row_bytes: FloatN, output_bytes: FloatN, share: float = 1.0) -> CacheSharers:
        """The lookups of tables with ``rows`` rows that get ``ids`` ids per call; a rank holds the fraction ``share``
        of the tables."""
        touched = np.array([float(_touched_bytes(rows, calls * ids, row_bytes).sum()) for calls in _CALLS])
        return cls(touched * share, float(output_bytes.sum()) * share)

    @classmethod
    def of_set(cls, set_bytes: float, output_bytes: float) -> CacheSharers:
        """The lookups of features that all draw their rows from one set of memory of ``set_bytes`` bytes."""
        return cls(np.full(_CALLS.shape, set_bytes * -np.expm1(-1.0)), output_bytes)

    def bytes_touched(self, calls: FloatN) -> FloatN:
        """Bytes touched [N] in ``calls`` calls."""
        return np.interp(np.log(calls), np.log(_CALLS), self.touched)


@dataclass(frozen=True)
class HardwareProfile:
    """Measured figures of one machine.

    Args:
        device: ``"cpu"`` or ``"cuda"``: the device that was measured.
        name: name of the processor.
        threads: threads that a lookup ran on.
        call_ms: milliseconds of a lookup call without its features.
        feature_ms: milliseconds per feature of a call without its bags.
        grids: bits of an element -> figures.
        memory_bytes_per_ms: sequential reading of host memory.
        device_memory_bytes_per_ms, host_to_device_bytes_per_ms, device_to_device_bytes_per_ms: 0 when not measured.
        write_ns: (bytes, ns per bag, ns per byte): cost of writing vectors when a call writes that many bytes.
        first_rows_ns: (bytes of the set, ((ids, ns per feature), ...)): extra cost of a feature's ids in a short call,
            compared with the grid's figures for long calls, in which memory accesses overlap.
        mixed: ratio of measured to planned time of random collections; planned times are multiplied by it.
    """

    device: str
    name: str
    threads: int
    call_ms: float
    feature_ms: float
    grids: Mapping[int, LookupGrid]
    memory_bytes_per_ms: float
    device_memory_bytes_per_ms: float = 0.0
    host_to_device_bytes_per_ms: float = 0.0
    device_to_device_bytes_per_ms: float = 0.0
    write_ns: tuple[tuple[float, float, float], ...] = ((1.0, 0.0, 0.0),)
    first_rows_ns: tuple[tuple[float, tuple[tuple[float, float], ...]], ...] = ()
    mixed: float = 1.0
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"hardware profile of device {self.device!r}; expected cpu or cuda")
        if not self.grids:
            raise ConfigError("a hardware profile needs lookup figures for at least one precision")
        _check_ascending("sizes of write_ns", [size for size, *_ in self.write_ns], least=1.0)
        if self.first_rows_ns:
            _check_ascending("sets of first_rows_ns", [size for size, _ in self.first_rows_ns], least=1.0)
        for _, figures in self.first_rows_ns:
            _check_ascending("ids of first_rows_ns", [ids for ids, _ in figures], least=1.0)
        if not 0.1 <= self.mixed <= 10:
            raise ConfigError(f"mixed is {self.mixed}; expected a ratio between 0.1 and 10")

    def lookup_ms(
        self,
        *,
        ids: FloatN,
        bags: FloatN,
        row_bytes: FloatN,
        bits: FloatN,
        rows: FloatN,
        features: FloatN,
        vector_bytes: FloatN,
        sharers: CacheSharers | None = None,
    ) -> FloatN:
        """Milliseconds [N] of looking up ``ids`` rows into ``bags`` bags, each entry one shard of one table.

        The first access of a call to a memory sector costs as much as the traffic since its last use implies; further
        accesses cost as much as the table's own working set implies. Reading and writing overlap: their times add as
        the root of the sum of squares. Ids are assumed to be uniform. Excludes ``call_ms``, which a rank pays once.

        Args:
            sharers: all lookups of the rank; None: the table's own lookup alone.
        """
        shape = np.broadcast_shapes(*(np.shape(x) for x in (ids, bags, row_bytes, bits, rows)))
        ids, bags, row, bits, rows, vector = (
            np.broadcast_to(np.asarray(x, float), shape) for x in (ids, bags, row_bytes, bits, rows, vector_bytes)
        )
        rows, drawn = np.maximum(rows, 1.0), np.maximum(ids, 1e-9)
        table, length = rows * row, ids / np.maximum(bags, 1e-9)
        own = _touched_bytes(rows, drawn, row)
        touches = drawn * (1 + (row - 1) / SECTOR_BYTES)
        new = _unique(np.maximum(table / SECTOR_BYTES, 1.0), touches) / touches
        if sharers is None:
            whole, written = table, bags * vector
        else:
            # In a grid's set of w bytes, two uses of a row are (1 - 1/e) w bytes apart on average, and some are nearer.
            # With sharers, where tables take turns, all uses are as far apart, so sharers count as a set with that
            # average.
            apart = sharers.bytes_touched(np.maximum(rows / drawn, 1.0))
            whole = np.maximum(apart / -np.expm1(-1.0), own)
            written = np.full(shape, sharers.output_bytes)
        write = self._write_ns(written, vector)
        out = np.zeros(shape)
        known = np.array(sorted(self.grids))
        nearest = known[np.abs(known - bits[:, None]).argmin(axis=1)]
        for b in np.unique(nearest):
            here, grid = nearest == b, self.grids[int(b)]
            far = grid.at(row[here], whole[here], length[here])
            near = grid.at(row[here], own[here], length[here])
            measured = new[here] * far + (1 - new[here]) * near
            bags_there = np.interp(length[here], grid.ids_per_bag, grid.bags_per_call)
            there = np.minimum(self._write_ns(bags_there * vector[here], vector[here]), measured)
            out[here] = np.sqrt(measured**2 - there**2 + write[here] ** 2)
        features = np.broadcast_to(np.asarray(features, float), shape)
        first = features * self._first_rows_ns(whole, drawn * new / np.maximum(features, 1.0))
        return ((bags * out + first) * 1e-6 + features * self.feature_ms) * self.mixed

    def _first_rows_ns(self, set_bytes: FloatN, ids: FloatN) -> FloatN:
        """Nanoseconds per feature [N] for ``ids`` ids per call from rows in a set of ``set_bytes``; linear in
        logarithms."""
        if not self.first_rows_ns:
            return np.zeros(set_bytes.shape)
        at_sets = np.stack([_interpolate(ids, figures) for _, figures in self.first_rows_ns])
        points = np.log([size for size, _ in self.first_rows_ns])
        i, share = _locate(points, np.log(np.maximum(set_bytes, 1.0)))
        above = np.minimum(i + 1, points.size - 1)
        n = np.arange(set_bytes.size)
        return (1 - share) * at_sets[i, n] + share * at_sets[above, n]

    def _write_ns(self, call_bytes: FloatN, vector_bytes: FloatN) -> FloatN:
        """Nanoseconds of writing one vector in a call that writes ``call_bytes`` in all."""
        sizes, a_bag, a_byte = np.array(self.write_ns, float).T
        at, known = np.log(np.maximum(call_bytes, 1.0)), np.log(sizes)
        return np.interp(at, known, a_bag) + np.interp(at, known, a_byte) * vector_bytes

    # ------------------------------------------------------------------ JSON

    def to_json(self) -> str:
        """Deterministic text."""
        data = dataclasses.asdict(self)
        data["grids"] = {str(bits): dataclasses.asdict(grid) for bits, grid in sorted(self.grids.items())}
        return json.dumps({"format": PROFILE_FORMAT, **data}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> HardwareProfile:
        """Read :meth:`to_json`'s text; raises ConfigError on anything else."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the hardware profile is not JSON: {error}") from None
        if not isinstance(data, dict) or data.pop("format", None) != PROFILE_FORMAT:
            raise ConfigError(f"not a hardware profile of format {PROFILE_FORMAT!r}; write one with recinfer calibrate")
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ConfigError(f"the hardware profile has unknown keys {unknown}; expected {sorted(known)}")
        try:
            grids = {int(bits): LookupGrid(**_tuples(grid)) for bits, grid in data.pop("grids").items()}
            data.update({name: _tuples(data[name]) for name in ("write_ns", "first_rows_ns") if name in data})
            return cls(grids=grids, **data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the hardware profile is incomplete: {error!r}; run recinfer calibrate again") from None

    def save(self, path: str | Path) -> None:
        """Write the JSON; an error leaves the file as it was."""
        write_file(path, self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """Read the JSON; raises NotFoundError when there is no such file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise NotFoundError(f"no hardware profile {str(path)!r}; write one with recinfer calibrate") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"cannot read the hardware profile {str(path)!r}: {error}") from None
