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
from recinfer.strict_json import build, loads, raising_config_error

__all__ = ["HardwareProfile", "LookupGrid"]

PROFILE_FORMAT = "recinfer.hardware/3"
FloatN = npt.NDArray[np.float64]
_FARTHEST = 64  # multiple of the largest measured set up to which costs grow, as page tables leave the caches too


@dataclass(frozen=True)
class LookupGrid:
    """Nanoseconds of one bag, over row sizes, sets of memory that rows are drawn from, and ids per bag.

    Rows are drawn uniformly from the whole set, so the size of a set determines the cache level that serves it. Axes
    ascend. Costs are interpolated and extrapolated linearly (in the logarithm of the set size).

    Args:
        row_bytes: bytes of a packed row.
        set_bytes: bytes of the rows that ids are drawn from, at least two figures.
        ids_per_bag: at least two lengths.
        bag_ns: [row sizes][sets][lengths].
    """

    row_bytes: tuple[float, ...]
    set_bytes: tuple[float, ...]
    ids_per_bag: tuple[float, ...]
    bag_ns: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        shape = (len(self.row_bytes), len(self.set_bytes), len(self.ids_per_bag))
        values = np.array(self.bag_ns, float)
        if values.shape != shape or not np.isfinite(values).all() or (values < 0).any():
            raise ConfigError(f"bag_ns has shape {values.shape}; expected {shape} finite figures, none negative")
        for name in ("row_bytes", "set_bytes", "ids_per_bag"):
            _check_ascending(name, getattr(self, name), least=0.0 if name == "ids_per_bag" else 1e-9)
        if len(self.set_bytes) < 2 or len(self.ids_per_bag) < 2:
            raise ConfigError(
                f"set_bytes {self.set_bytes} and ids_per_bag {self.ids_per_bag}; expected two sets and two lengths"
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
        self, *, ids: FloatN, bags: FloatN, row_bytes: FloatN, bits: FloatN, rows: FloatN, features: FloatN
    ) -> FloatN:
        """Milliseconds [N] of looking up ``ids`` rows into ``bags`` bags, each entry one shard of one table.

        The figures are those of the nearest number of bits. Ids are assumed to be uniform. Excludes ``call_ms``, which
        a rank pays once.
        """
        shape = np.broadcast_shapes(*(np.shape(x) for x in (ids, bags, row_bytes, bits, rows)))
        ids, bags, row, bits, rows = (
            np.broadcast_to(np.asarray(x, float), shape) for x in (ids, bags, row_bytes, bits, rows)
        )
        table, length = np.maximum(rows, 1.0) * row, ids / np.maximum(bags, 1e-9)
        bag_ns = np.zeros(shape)
        known = np.array(sorted(self.grids))
        nearest = known[np.abs(known - bits[:, None]).argmin(axis=1)]
        for b in np.unique(nearest):
            here = nearest == b
            bag_ns[here] = self.grids[int(b)].at(row[here], table[here], length[here])
        return bags * bag_ns * 1e-6 + features * self.feature_ms

    # ------------------------------------------------------------------ JSON

    def to_json(self) -> str:
        """Deterministic text."""
        data = dataclasses.asdict(self)
        data["grids"] = {str(bits): dataclasses.asdict(grid) for bits, grid in sorted(self.grids.items())}
        return json.dumps({"format": PROFILE_FORMAT, **data}, indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> HardwareProfile:
        """Read :meth:`to_json`'s text; raises ConfigError on anything else."""
        with raising_config_error():
            data = loads(text.encode() if isinstance(text, str) else text, "the hardware profile")
            if data.pop("format", None) != PROFILE_FORMAT:
                raise ConfigError(
                    f"not a hardware profile of format {PROFILE_FORMAT!r}; write one with recinfer calibrate"
                )
            return build(cls, data, "hardware profile")

    def save(self, path: str | Path) -> None:
        """Write the JSON; an error leaves the file as it was."""
        write_file(path, self.to_json().encode())

    @classmethod
    def load(cls, path: str | Path) -> HardwareProfile:
        """Read the JSON; raises ConfigError, or NotFoundError when there is no such file."""
        try:
            return cls.from_json(Path(path).read_bytes())
        except FileNotFoundError:
            raise NotFoundError(f"no hardware profile {str(path)!r}; write one with recinfer calibrate") from None
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; expected a file of `recinfer calibrate`") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
