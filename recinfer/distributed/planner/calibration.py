"""A machine's measured figures as data: what a quantized lookup costs there, for the inference estimator.

``recinfer.distributed.calibrate`` measures them; this file only knows how to keep, interpolate and check them.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from recinfer.distributed.planner.topology import Topology
from recinfer.errors import ConfigError, NotFoundError

__all__ = ["TABLES_IN_COMPANY", "HardwareProfile", "LookupGrid"]

TABLES_IN_COMPANY = 8  # tables in a measured call: what one reads, another pushes out of the cache, as in a real model

PROFILE_FORMAT = "recinfer.hardware/1"
FloatN = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LookupGrid:
    """Nanoseconds of one row read and of one bag written, over row sizes and table sizes (bytes, ascending).

    ``row_ns`` and ``bag_ns`` are [row sizes][table sizes], of a table among ``TABLES_IN_COMPANY`` alike.
    """

    row_bytes: tuple[float, ...]
    table_bytes: tuple[float, ...]
    row_ns: tuple[tuple[float, ...], ...]
    bag_ns: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        shape = (len(self.row_bytes), len(self.table_bytes))
        for name in ("row_ns", "bag_ns"):
            values = np.array(getattr(self, name), float)
            if values.shape != shape or not np.isfinite(values).all() or (values < 0).any():
                raise ConfigError(f"{name} has shape {values.shape}; expected {shape} finite figures, none negative")
        for name in ("row_bytes", "table_bytes"):
            values = np.array(getattr(self, name), float)
            if values.size < 1 or (values <= 0).any() or (np.diff(values) <= 0).any():
                raise ConfigError(f"{name} {values.tolist()}; expected ascending figures above 0")

    def at(self, row_bytes: FloatN, table_bytes: FloatN) -> tuple[FloatN, FloatN]:
        """(row_ns, bag_ns) [N]: linear in the row size, in the logarithm of the table size; scaled beyond the last row."""
        i, u = _locate(np.array(self.row_bytes), row_bytes)
        j, v = _locate(np.log(self.table_bytes), np.log(np.maximum(table_bytes, 1.0)))
        beyond = np.maximum(row_bytes / self.row_bytes[-1], 1.0)
        found = []
        for values in (np.array(self.row_ns), np.array(self.bag_ns)):
            up, right = np.minimum(i + 1, values.shape[0] - 1), np.minimum(j + 1, values.shape[1] - 1)
            low = values[i, j] * (1 - v) + values[i, right] * v
            high = values[up, j] * (1 - v) + values[up, right] * v
            found.append((low * (1 - u) + high * u) * beyond)
        return found[0], found[1]


def _locate(points: FloatN, x: FloatN) -> tuple[npt.NDArray[np.int64], FloatN]:
    """Index of the grid point below ``x`` and the share of the way to the next, clamped to the grid."""
    if points.size == 1:
        return np.zeros(x.shape, np.int64), np.zeros(x.shape)
    at = np.clip(x, points[0], points[-1])
    i = np.clip(np.searchsorted(points, at, side="right") - 1, 0, points.size - 2)
    return i, (at - points[i]) / (points[i + 1] - points[i])


@dataclass(frozen=True)
class HardwareProfile:
    """Measured figures of one machine.

    Args:
        device: ``"cpu"`` or ``"cuda"``: what the figures are of.
        name: of the processor, for people.
        threads: threads that a lookup ran on.
        call_ms: milliseconds of a lookup call beyond its tables.
        feature_ms: milliseconds a feature of a call beyond its rows and bags.
        grids: bits of an element -> figures.
        memory_bytes_per_ms: sequential reading of host memory.
        device_memory_bytes_per_ms, host_to_device_bytes_per_ms, device_to_device_bytes_per_ms: 0 when not measured.
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
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.device not in ("cpu", "cuda"):
            raise ConfigError(f"hardware profile of device {self.device!r}; expected cpu or cuda")
        if not self.grids:
            raise ConfigError("a hardware profile needs lookup figures for at least one precision")

    def lookup_ms(
        self,
        ids: FloatN,
        vectors: FloatN,
        row_bytes: Any,
        bits: FloatN,
        rows: Any,
        features: FloatN,
        cols: Any,
    ) -> FloatN:
        """Milliseconds [N] of looking up ``ids`` rows into ``vectors`` bags, each entry one shard of one table.

        Without the call itself (``call_ms``), which a rank pays once however many shards it holds.
        """
        known = np.array(sorted(self.grids))
        row = np.asarray(row_bytes, float)
        table = row * np.maximum(np.asarray(rows, float), 1.0)
        out = np.zeros(row.shape)
        nearest = known[np.abs(known[None, :] - np.asarray(bits)[:, None]).argmin(axis=1)]
        for b in np.unique(nearest):
            here = nearest == b
            row_ns, bag_ns = self.grids[int(b)].at(row[here], table[here])
            out[here] = (ids[here] * row_ns + vectors[here] * bag_ns) * 1e-6 + features[here] * self.feature_ms
        return out

    def topology(self, world_size: int, **sizes: Any) -> Topology:
        """A topology of ``world_size`` ranks of this machine: its bandwidths, and these figures for lookups.

        Args:
            sizes: further arguments of :class:`Topology` (``hbm_cap``, ``ddr_cap``, ``local_world_size`` ...).
        """
        measured = {
            "ddr_mem_bw": self.memory_bytes_per_ms,
            "hbm_mem_bw": self.device_memory_bytes_per_ms,
            "hbm_to_ddr_mem_bw": self.host_to_device_bytes_per_ms,
            "intra_host_bw": self.device_to_device_bytes_per_ms,
        }
        given: dict[str, Any] = {name: value for name, value in measured.items() if value > 0 and name not in sizes}
        return Topology(world_size, self.device, hardware=self, **given, **sizes)

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
            grids = {
                int(bits): LookupGrid(
                    row_bytes=tuple(grid["row_bytes"]),
                    table_bytes=tuple(grid["table_bytes"]),
                    row_ns=tuple(tuple(row) for row in grid["row_ns"]),
                    bag_ns=tuple(tuple(row) for row in grid["bag_ns"]),
                )
                for bits, grid in data.pop("grids").items()
            }
            return cls(grids=grids, **data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the hardware profile is incomplete: {error!r}; run recinfer calibrate again") from None

    def save(self, path: str | Path) -> None:
        """Write the JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """Read the JSON; raises NotFoundError when there is no such file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise NotFoundError(f"no hardware profile {str(path)!r}; write one with recinfer calibrate") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"cannot read the hardware profile {str(path)!r}: {error}") from None
