"""Storage reservations: memory for dense parameters, the batch's features, and a margin."""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from recinfer.distributed.planner.interfaces import StorageReservation
from recinfer.distributed.planner.model.constraints import ParameterConstraints, PlannerError, PlannerErrorType
from recinfer.distributed.planner.model.facts import kjt_bytes
from recinfer.distributed.planner.model.tables import model_tables
from recinfer.distributed.planner.model.topology import Storage, Topology, storage_of
from recinfer.distributed.planner.model.walk import sharded_modules
from recinfer.distributed.planner.units import gb_to_bytes
from recinfer.distributed.types import ModuleSharder
from recinfer.distributed.types.tiers import TIER_NAMES, TIERS, near_tier
from recinfer.errors import ConfigError
from recinfer.sizes import exact_size

__all__ = [
    "FixedAbsoluteStorageReservation",
    "FixedPercentageStorageReservation",
    "HeuristicalStorageReservation",
    "InferenceStorageReservation",
]

Constraints = dict[str, ParameterConstraints] | None
_KJT_COPIES = 20  # batches of input alive in a training pipeline, with the buffers of their exchange


def _check(percentage: float) -> float:
    if not 0 <= percentage <= 1:
        raise ConfigError(f"percentage {percentage}; expected 0 to 1")
    return percentage


def _less(topology: Topology, amounts: list[Storage], why: str) -> Topology:
    """A copy of ``topology`` with ``amounts`` (one per rank) subtracted; raises PlannerError when a rank has less."""
    reserved = copy.copy(topology)
    reserved._devices = copy.deepcopy(topology.devices)
    for device, amount in zip(reserved.devices, amounts):
        before = device.storage
        device.storage = before - amount
        short = [tier for tier in TIER_NAMES if getattr(device.storage, tier) < 0]
        if short:
            sizes = " and ".join(
                f"{exact_size(getattr(amount, m))} of {m}, of which rank {device.rank} has "
                f"{exact_size(getattr(before, m))}"
                for m in short
            )
            raise PlannerError(
                f"{why} need {sizes}; give it more memory (hbm_cap and ddr_cap of a "
                "Topology are in bytes), or lower the batch size or the percentage",
                PlannerErrorType.INSUFFICIENT_STORAGE,
            )
    return reserved


def _on(topology: Topology, num_bytes: float) -> Storage:
    near = near_tier(topology.compute_device)
    return storage_of(int(num_bytes) if tier is near else 0 for tier in TIERS)


def _share(topology: Topology, percentage: float) -> list[Storage]:
    """The margin of each rank: of device memory, or of host memory if there is no device memory."""
    near = near_tier(topology.compute_device).name
    return [_on(topology, getattr(d.storage, near) * percentage) for d in topology.devices]


def _dense_bytes(module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> int:
    """Bytes of parameters and buffers that no sharder takes."""
    taken: set[str] = set()
    for path, child, sharder in sharded_modules(module, sharders):
        if sharder.shardable_parameters(child):
            prefix = f"{path}." if path else ""
            taken.update(prefix + name for name, _ in child.named_parameters())
            taken.update(prefix + name for name, _ in child.named_buffers())
    tensors: list[tuple[str, Any]] = [*module.named_parameters(), *module.named_buffers()]
    return sum(t.element_size() * t.nelement() for name, t in tensors if name not in taken)


class _Reservation(StorageReservation):
    def __init__(self) -> None:
        self._dense_storage: Storage | None = None
        self._kjt_storage: Storage | None = None
        self._last: Topology | None = None

    @property
    def last_reserved_topology(self) -> Topology | None:
        """The result of the last ``reserve``."""
        return self._last


class FixedPercentageStorageReservation(_Reservation):
    """Reserves a percentage of every rank's memory.

    Args:
        percentage: 0 to 1.
    """

    def __init__(self, percentage: float) -> None:
        super().__init__()
        self._percentage = _check(percentage)

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: Constraints = None,
    ) -> Topology:
        """A copy of ``topology`` with the remaining memory."""
        self._last = _less(topology, _share(topology, self._percentage), "the reserved percentage")
        return self._last


class FixedAbsoluteStorageReservation(_Reservation):
    """Reserves a number of bytes of every rank's memory.

    Args:
        hbm_reserved_bytes: bytes (of host memory on CPU).
    """

    def __init__(self, hbm_reserved_bytes: int) -> None:
        super().__init__()
        if hbm_reserved_bytes < 0:
            raise ConfigError(f"hbm_reserved_bytes {hbm_reserved_bytes}; expected 0 or more")
        self._hbm_reserved_bytes = hbm_reserved_bytes

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """A reservation in GiB."""
        return cls(gb_to_bytes(hbm_reserved_gb))

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: Constraints = None,
    ) -> Topology:
        """A copy of ``topology`` with the remaining memory."""
        amount = _on(topology, self._hbm_reserved_bytes)
        self._last = _less(topology, [amount] * topology.world_size, "the reserved bytes")
        return self._last


class _ModelReservation(_Reservation):
    """A share, the dense parameters times a factor, and the features of a batch times a factor."""

    _kjt_copies = 1

    def __init__(self, percentage: float, parameter_multiplier: float, dense_tensor_estimate: int | None) -> None:
        super().__init__()
        self._percentage = _check(percentage)
        self._parameter_multiplier = parameter_multiplier
        self._dense_tensor_estimate = dense_tensor_estimate

    def reserve(
        self,
        topology: Topology,
        batch_size: int,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]],
        constraints: Constraints = None,
    ) -> Topology:
        """A copy of ``topology`` with the remaining memory; raises PlannerError when none remains."""
        dense = self._dense_tensor_estimate
        if dense is None:
            dense = int(_dense_bytes(module, sharders) * self._parameter_multiplier)
        tables = model_tables(module, sharders, topology, batch_size, constraints)
        self._dense_storage = _on(topology, dense)
        self._kjt_storage = _on(topology, kjt_bytes(tables) * self._kjt_copies)
        fixed = self._dense_storage + self._kjt_storage
        amounts = [share + fixed for share in _share(topology, self._percentage)]
        self._last = _less(topology, amounts, "dense parameters, features and the margin")
        return self._last


class HeuristicalStorageReservation(_ModelReservation):
    """A reservation for training: a margin, dense parameters with gradients and optimizer state, features in flight.

    Args:
        percentage: margin, 0 to 1.
        parameter_multiplier: ratio of dense memory (parameters, gradients, optimizer, copies) to dense parameters.
        dense_tensor_estimate: bytes of dense memory instead of that.
    """

    _kjt_copies = _KJT_COPIES

    def __init__(
        self, percentage: float, parameter_multiplier: float = 6.0, dense_tensor_estimate: int | None = None
    ) -> None:
        super().__init__(percentage, parameter_multiplier, dense_tensor_estimate)


class InferenceStorageReservation(_ModelReservation):
    """A reservation for inference: a margin, the dense parameters once, the features of one batch.

    Args:
        percentage: margin, 0 to 1.
        dense_tensor_estimate: bytes of dense memory instead of the parameters'.
    """

    def __init__(self, percentage: float, dense_tensor_estimate: int | None = None) -> None:
        super().__init__(percentage, 1.0, dense_tensor_estimate)
