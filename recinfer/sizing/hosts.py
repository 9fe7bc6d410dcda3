"""Kinds of hosts with prices, from a JSON file, or examples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from recinfer.errors import ConfigError, NotFoundError
from recinfer.strict_json import build, loads, raising_config_error

__all__ = ["EXAMPLE_HOSTS", "HostType", "priced", "read_hosts"]

_SYSTEM_BYTES = 1 << 30  # GiB for the operating system
_WORKER_BYTES = 200 << 20  # GiB per server process, without tables, which the processes of a host share


@dataclass(frozen=True)
class HostType:
    """A kind of host.

    Attributes:
        name: name of the kind.
        cores: hardware threads.
        memory_gib: GiB of memory.
        price: price per hour, in one currency for all kinds.
    """

    name: str
    cores: int
    memory_gib: float
    price: float

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("hosts: name: got '', expected text")
        if not 1 <= self.cores <= 4096:
            raise ConfigError(f"hosts: {self.name}: cores: got {self.cores!r}, expected a whole number of at least 1")
        for what in ("memory_gib", "price"):
            value = getattr(self, what)
            if not 0 <= value < math.inf or (what == "memory_gib" and not value):
                raise ConfigError(f"hosts: {self.name}: {what}: got {value!r}, expected a number above 0")

    @property
    def workers(self) -> int:
        """Number of server processes: each keeps one core busy with its event loop; gRPC's threads need some of the
        others."""
        return max(1, self.cores - self.cores // 4)

    @property
    def table_bytes(self) -> float:
        """Bytes of memory for tables."""
        return max(self.memory_gib * 2**30 - _SYSTEM_BYTES - self.workers * _WORKER_BYTES, 0.0)


EXAMPLE_HOSTS = (
    HostType("small", 4, 16.0, 0.20),
    HostType("medium", 8, 32.0, 0.40),
    HostType("memory", 8, 64.0, 0.53),
    HostType("large", 16, 64.0, 0.80),
)
"""Examples with made-up prices in usual proportions."""


@dataclass(frozen=True)
class _HostsJson:
    """The JSON of a file of hosts."""

    format: Literal["recinfer.hosts"]
    version: int
    hosts: tuple[HostType, ...]


def read_hosts(path: Path) -> tuple[HostType, ...]:
    """Read ``{"format": "recinfer.hosts", "version": 1, "hosts": [{"name", "cores", "memory_gib", "price"}, ...]}``.

    Raises:
        NotFoundError: no such file.
        ConfigError: the message has the value and what was expected.
    """
    try:
        with raising_config_error():
            found = build(_HostsJson, loads(path.read_bytes(), str(path)), str(path))
    except FileNotFoundError:
        raise NotFoundError(f"no host types {str(path)!r}; docs/how-to/choose-hosts.md describes the format") from None
    if found.version != 1 or not found.hosts:
        raise ConfigError(
            f"{path}: got version {found.version}, {len(found.hosts)} hosts; expected version 1, at least one host"
        )
    if len({host.name for host in found.hosts}) != len(found.hosts):
        raise ConfigError(f"{path}: two kinds of hosts have the same name")
    return found.hosts


def priced(hosts: Sequence[HostType], prices: Sequence[str]) -> tuple[HostType, ...]:
    """``hosts`` with prices from ``NAME=PRICE`` texts; raises ConfigError."""
    changed = {host.name: host for host in hosts}
    for text in prices:
        name, equals, value = text.partition("=")
        try:
            price = float(value)
        except ValueError:
            price = math.nan
        if not equals or name not in changed or not 0 <= price < math.inf:
            raise ConfigError(
                f"--price {text!r}: expected NAME=PRICE (per hour), with NAME one of {', '.join(changed)}"
            )
        changed[name] = replace(changed[name], price=price)
    return tuple(changed.values())
