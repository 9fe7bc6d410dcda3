"""Topology: ranks, hosts, capacities (bytes) and bandwidths (bytes per millisecond) of the hardware."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from operator import add, attrgetter, le, sub
from typing import Any

from recinfer.distributed.planner.constants import (
    BWD_COMPUTE_MULTIPLIER,
    CROSS_NODE_BANDWIDTH,
    DDR_MEM_BW,
    HBM_MEM_BW,
    HBM_TO_DDR_MEM_BW,
    INTRA_NODE_BANDWIDTH,
    WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
)
from recinfer.distributed.planner.model.hardware import HardwareProfile
from recinfer.distributed.planner.model.links import BasicCommsBandwidths, CollectiveType, GeneralizedCommsBandwidth
from recinfer.distributed.types.tiers import TIER_NAMES, TIERS, Tier
from recinfer.errors import ConfigError
from recinfer.ignored import warn_ignored

__all__ = [
    "CustomTopologyData",
    "DeviceHardware",
    "Perf",
    "Storage",
    "Topology",
    "storage_of",
    "tier_bytes",
    "topology_of",
]


@dataclass(repr=True, eq=True)
class Perf:
    """Milliseconds of one shard in one iteration, by part."""

    fwd_compute: float
    fwd_comms: float
    bwd_compute: float
    bwd_comms: float
    input_dist_comms: float = 0.0
    prefetch_compute: float = 0.0

    @property
    def total(self) -> float:
        """Forward and backward, plus the part of prefetch that does not overlap with them.

        The transfer of the inputs is overlapped by the pipeline and not counted, as in TorchRec.
        """
        return self.fwd_compute + self.bwd_compute + self.fwd_comms + self.bwd_comms + self.prefetch_compute

    def __add__(self, other: Perf) -> Perf:
        return Perf(
            self.fwd_compute + other.fwd_compute,
            self.fwd_comms + other.fwd_comms,
            self.bwd_compute + other.bwd_compute,
            self.bwd_comms + other.bwd_comms,
            self.input_dist_comms + other.input_dist_comms,
            self.prefetch_compute + other.prefetch_compute,
        )

    def __hash__(self) -> int:
        return hash(
            (
                self.fwd_compute,
                self.fwd_comms,
                self.bwd_compute,
                self.bwd_comms,
                self.input_dist_comms,
                self.prefetch_compute,
            )
        )


@dataclass(repr=True, eq=True)
class Storage:
    """Bytes of device memory (hbm), host memory (ddr) and disk (ssd)."""

    hbm: int
    ddr: int
    ssd: int = 0

    def __add__(self, other: Storage) -> Storage:
        return Storage(*map(add, _parts(self), _parts(other)))

    def __sub__(self, other: Storage) -> Storage:
        return Storage(*map(sub, _parts(self), _parts(other)))

    def __hash__(self) -> int:
        return hash(_parts(self))

    def fits_in(self, other: Storage) -> bool:
        """Every part is at most ``other``'s."""
        return all(map(le, _parts(self), _parts(other)))


def _parts(storage: Storage) -> tuple[int, ...]:
    return storage.hbm, storage.ddr, storage.ssd


tier_bytes = attrgetter(*TIER_NAMES)
"""The bytes of a :class:`Storage` in each tier [M]."""


def storage_of(num_bytes: Iterable[int]) -> Storage:
    """The storage with these bytes [M] in the tiers."""
    return Storage(**dict(zip(TIER_NAMES, num_bytes, strict=True)))


@dataclass
class DeviceHardware:
    """One rank: its free memory and its load."""

    rank: int
    storage: Storage
    perf: Perf


class CustomTopologyData:
    """Capacities that differ by rank.

    Args:
        data: ``"hbm_cap"`` and/or ``"ddr_cap"`` -> bytes of each rank.
        world_size: ranks.
    """

    supported_fields = tuple(sorted(f"{name}_cap" for name in TIER_NAMES))

    def __init__(self, data: dict[str, list[int]], world_size: int) -> None:
        unknown = sorted(set(data) - set(self.supported_fields))
        if unknown:
            raise ConfigError(f"custom topology data has {unknown}; expected some of {list(self.supported_fields)}")
        for key, values in data.items():
            if len(values) != world_size:
                raise ConfigError(f"custom {key} lists {len(values)} ranks; the world has {world_size}")
        self._data = data
        self._world_size = world_size

    def get_data(self, key: str) -> list[int]:
        """Bytes of each rank."""
        if key not in self._data:
            raise ConfigError(f"custom topology data has no {key!r}; it has {sorted(self._data)}")
        return self._data[key]

    def has_data(self, key: str) -> bool:
        """Whether the data has ``key``."""
        return key in self._data


class Topology:
    """The hardware of a plan: ranks, hosts, memories and links.

    Args:
        world_size: ranks in all.
        compute_device: ``"cuda"``, ``"cpu"`` or ``"mtia"``.
        hbm_cap: bytes of device memory per rank (default 32 GiB; on CPU 0, and a given one warns). A list gives one figure per rank.
        ddr_cap: bytes of host memory per rank (default 128 GiB). A list gives one figure per rank.
        ssd_cap, ssd_mem_bw, pod_size: do nothing (:mod:`recinfer.ignored`): no tier of
            :data:`recinfer.distributed.types.tiers.TIERS` is on SSD, and links are inside a host or between hosts.
        local_world_size: ranks per host; default all on one. At most ``world_size``: 8 becomes 2 in a world of 2.
        hbm_mem_bw, ddr_mem_bw, hbm_to_ddr_mem_bw: memory bandwidths, bytes per millisecond.
        intra_host_bw, inter_host_bw: link bandwidths, bytes per millisecond.
        bwd_compute_multiplier: backward compute over forward compute.
        custom_topology_data: capacities that differ by rank.
        weighted_feature_bwd_compute_multiplier, uneven_sharding_perf_multiplier: model factors.
        generalized_comms_bandwidths: replaces the two link figures.
        hardware: a measured profile (see ``recinfer calibrate``); the inference estimator prefers its figures.

    Raises:
        ConfigError: sizes that do not fit together.
    """

    def __init__(
        self,
        world_size: int,
        compute_device: str,
        hbm_cap: int | Sequence[int] | None = None,
        ddr_cap: int | Sequence[int] | None = None,
        ssd_cap: int | None = None,
        local_world_size: int | None = None,
        pod_size: int | None = None,
        hbm_mem_bw: float = HBM_MEM_BW,
        ddr_mem_bw: float = DDR_MEM_BW,
        ssd_mem_bw: float = 0.0,
        hbm_to_ddr_mem_bw: float = HBM_TO_DDR_MEM_BW,
        intra_host_bw: float = INTRA_NODE_BANDWIDTH,
        inter_host_bw: float = CROSS_NODE_BANDWIDTH,
        bwd_compute_multiplier: float = BWD_COMPUTE_MULTIPLIER,
        custom_topology_data: CustomTopologyData | None = None,
        weighted_feature_bwd_compute_multiplier: float = WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER,
        uneven_sharding_perf_multiplier: float = 1.0,
        generalized_comms_bandwidths: GeneralizedCommsBandwidth | None = None,
        hardware: HardwareProfile | None = None,
    ) -> None:
        caps: dict[str, int | Sequence[int] | None] = {"hbm": hbm_cap, "ddr": ddr_cap, "ssd": ssd_cap}
        bandwidths = {"hbm": hbm_mem_bw, "ddr": ddr_mem_bw, "ssd": ssd_mem_bw}
        unused = [name for name in caps if name not in TIER_NAMES]
        ignored: list[tuple[str, Any]] = [(f"{name}_cap", caps[name]) for name in unused]
        ignored += [(f"{name}_mem_bw", bandwidths[name]) for name in unused]
        for name, given in (*ignored, ("pod_size", pod_size)):
            warn_ignored("distributed.planner.Topology", name, given)
        if compute_device == "cpu":
            warn_ignored(
                "distributed.planner.Topology", "hbm_cap", any(hbm_cap) if isinstance(hbm_cap, Sequence) else hbm_cap
            )
        if compute_device not in ("cpu", "cuda", "mtia"):
            raise ConfigError(f"compute_device {compute_device!r}; expected cuda, cpu or mtia")
        if not (isinstance(world_size, Integral) and world_size >= 1):
            raise ConfigError(f"world_size {world_size!r}; expected a whole number of at least 1")
        if not isinstance(local_world_size, Integral | None):
            raise ConfigError(f"local_world_size {local_world_size!r}; expected a whole number")
        memories = {"hbm_mem_bw": hbm_mem_bw, "ddr_mem_bw": ddr_mem_bw, "hbm_to_ddr_mem_bw": hbm_to_ddr_mem_bw}
        for tier in TIERS:
            memories.setdefault(f"{tier.name}_mem_bw", bandwidths[tier.name] or tier.bandwidth)
        links = {"intra_host_bw": intra_host_bw, "inter_host_bw": inter_host_bw}
        for name, figure in (memories | links).items():
            if not (isinstance(figure, Real) and figure > 0):
                raise ConfigError(f"{name} {figure!r}; expected bytes per millisecond above 0")
        local = min(local_world_size or world_size, world_size)
        if local < 1 or world_size % local:
            raise ConfigError(f"local_world_size {local} must divide world_size {world_size}")
        self._world_size = world_size
        self._local_world_size = local
        self._pod_size = pod_size
        self._compute_device = compute_device
        self._bandwidths = memories
        self._comms = generalized_comms_bandwidths or BasicCommsBandwidths(inter_host_bw, intra_host_bw)
        self._bwd_compute_multiplier = bwd_compute_multiplier
        self._weighted_multiplier = weighted_feature_bwd_compute_multiplier
        self._uneven_multiplier = uneven_sharding_perf_multiplier
        self._custom_topology_data = custom_topology_data
        self.hardware = hardware
        self._devices = [DeviceHardware(r, Storage(0, 0, ssd_cap or 0), Perf(0, 0, 0, 0)) for r in range(world_size)]
        for tier in TIERS:
            per_rank = self._per_rank(f"{tier.name}_cap", caps[tier.name], tier.capacity)
            for device, num_bytes in zip(self._devices, per_rank):
                setattr(device.storage, tier.name, num_bytes if compute_device in tier.devices else 0)

    def _per_rank(self, name: str, given: int | Sequence[int] | None, default: int) -> list[int]:
        custom = self._custom_topology_data
        if custom is not None and custom.has_data(name):
            caps: list[int] = list(custom.get_data(name))
        elif given is None:
            caps = [default] * self._world_size
        else:
            each = list(given) if isinstance(given, Sequence) else [given] * self._world_size
            wrong = [x for x in each if not isinstance(x, Real)]
            if wrong:
                raise ConfigError(f"{name} is {wrong[0]!r}; expected bytes, a whole number")
            caps = [int(x) for x in each]
        if len(caps) != self._world_size:
            raise ConfigError(f"{name} lists {len(caps)} ranks; the world has {self._world_size}")
        if min(caps) < 0:
            raise ConfigError(f"{name} of rank {caps.index(min(caps))} is {min(caps)} bytes; expected 0 or more")
        return caps

    @property
    def compute_device(self) -> str:
        """Kind of device."""
        return self._compute_device

    @property
    def devices(self) -> list[DeviceHardware]:
        """One entry per rank; partitioners change ``storage`` and ``perf`` of a copy."""
        return self._devices

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self._world_size

    @property
    def local_world_size(self) -> int:
        """Ranks per host."""
        return self._local_world_size

    @property
    def intra_group_size(self) -> int:
        """Ranks within the fast interconnect: the pod, or the host."""
        return self._pod_size or self._local_world_size

    @property
    def hbm_mem_bw(self) -> float:
        """Device memory, bytes per millisecond."""
        return self._bandwidths["hbm_mem_bw"]

    @property
    def ddr_mem_bw(self) -> float:
        """Host memory, bytes per millisecond."""
        return self._bandwidths["ddr_mem_bw"]

    @property
    def hbm_to_ddr_mem_bw(self) -> float:
        """Link between the two, bytes per millisecond."""
        return self._bandwidths["hbm_to_ddr_mem_bw"]

    def tier_bandwidth(self, tier: Tier) -> float:
        """(ours) Bytes per millisecond at which a rank reads ``tier``."""
        return self._bandwidths[f"{tier.name}_mem_bw"]

    @property
    def comms_bandwidths(self) -> GeneralizedCommsBandwidth:
        """The links between ranks."""
        return self._comms

    def collective_bw(
        self, collective: CollectiveType, world_size: int | None = None, local_world_size: int | None = None
    ) -> float:
        """(ours) Bytes per millisecond of a collective over ``world_size`` ranks (default all), ``local_world_size`` of
        them per host.

        Raises:
            ConfigError: the topology's bandwidths return a figure that is not above 0.
        """
        local = self._local_world_size if local_world_size is None else local_world_size
        world = self._world_size if world_size is None else world_size
        found = self._comms.get_bw(local, world, collective)
        if not found > 0:
            raise ConfigError(
                f"{type(self._comms).__name__}: {found} bytes per millisecond for {collective.value} over {world} "
                f"ranks, {local} per host; expected more than 0"
            )
        return float(found)

    @property
    def intra_host_bw(self) -> float:
        """Bytes per millisecond within a host; if the bandwidths do not name it, of an all-to-all."""
        return self._comms.intra_host_bw or self.collective_bw(CollectiveType.ALL_TO_ALL, self._local_world_size)

    @property
    def inter_host_bw(self) -> float:
        """Bytes per millisecond between hosts; if the bandwidths do not name it, of an all-to-all with one rank per
        host."""
        hosts = max(self._world_size // self._local_world_size, 2)
        return self._comms.inter_host_bw or self.collective_bw(CollectiveType.ALL_TO_ALL, hosts, 1)

    @property
    def bwd_compute_multiplier(self) -> float:
        """Backward compute over forward compute."""
        return self._bwd_compute_multiplier

    @property
    def weighted_feature_bwd_compute_multiplier(self) -> float:
        """Extra backward compute of weighted features."""
        return self._weighted_multiplier

    @property
    def uneven_sharding_perf_multiplier(self) -> float:
        """Slowdown of unevenly cut tables."""
        return self._uneven_multiplier

    def signature(self) -> tuple[Any, ...]:
        """The data on which plans depend."""
        caps = tuple(tier_bytes(d.storage) for d in self._devices)
        factors = (self._bwd_compute_multiplier, self._weighted_multiplier, self._uneven_multiplier)
        links: tuple[float, ...] = (self.intra_host_bw, self.inter_host_bw)
        if type(self._comms) is not BasicCommsBandwidths:
            links += tuple(self.collective_bw(collective) for collective in CollectiveType)
        sizes = (self._world_size, self._local_world_size, self._compute_device)
        hardware = None if self.hardware is None else self.hardware.to_json()
        return (*sizes, caps, tuple(self._bandwidths.values()), links, factors, hardware)

    def __repr__(self) -> str:
        lines = [f"world_size={self._world_size}", f"compute_device={self._compute_device}", "devices="]
        lines += [f"\tdevice {d.rank} {d.storage}" for d in self._devices]
        lines += [f"local_world_size={self._local_world_size}", str(self._comms)]
        return " \n".join(lines) + "\n"


def topology_of(profile: HardwareProfile, world_size: int, **sizes: Any) -> Topology:
    """A topology of ``world_size`` ranks of a measured machine, with its bandwidths and lookup figures.

    Args:
        sizes: further arguments of :class:`Topology` (``hbm_cap``, ``ddr_cap``, ``local_world_size`` ...).
    """
    measured = {
        "ddr_mem_bw": profile.memory_bytes_per_ms,
        "hbm_mem_bw": profile.device_memory_bytes_per_ms,
        "hbm_to_ddr_mem_bw": profile.host_to_device_bytes_per_ms,
        "intra_host_bw": profile.device_to_device_bytes_per_ms,
    }
    given = {name: value for name, value in measured.items() if value > 0}
    return Topology(world_size, profile.device, hardware=profile, **(given | sizes))
