"""Kinds of hosts with prices, from a JSON file, or examples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recinfer.errors import ConfigError, NotFoundError

__all__ = ["EXAMPLE_HOSTS", "HostType", "priced", "read_hosts"]

FORMAT, VERSION = "recinfer.hosts", 1
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
        if not isinstance(self.name, str) or not self.name:
            raise ConfigError(f"hosts: name: got {self.name!r}, expected text")
        if type(self.cores) is not int or not 1 <= self.cores <= 4096:
            raise ConfigError(f"hosts: {self.name}: cores: got {self.cores!r}, expected a whole number of at least 1")
        for what in ("memory_gib", "price"):
            value = getattr(self, what)
            if type(value) not in (int, float) or not 0 <= value < math.inf or (what == "memory_gib" and not value):
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


def read_hosts(path: Path) -> tuple[HostType, ...]:
    """Read ``{"format": "recinfer.hosts", "version": 1, "hosts": [{"name", "cores", "memory_gib", "price"}, ...]}``.

    Raises:
        NotFoundError: no such file.
        ConfigError: the message has the value and what was expected.
    """
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise NotFoundError(f"no host types {str(path)!r}; docs/how-to/choose-hosts.md describes the format") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict) or (data.get("format"), data.get("version")) != (FORMAT, VERSION):
        raise ConfigError(f"{path}: expected an object of format {FORMAT!r}, version {VERSION}")
    entries = data.get("hosts")
    if data.keys() - {"format", "version", "hosts"} or not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected the entry hosts, a list of at least one kind of host")
    expected = {"name", "cores", "memory_gib", "price"}
    for entry in entries:
        if not isinstance(entry, dict) or entry.keys() != expected:
            raise ConfigError(f"{path}: got {str(entry)[:120]}; expected an object of {', '.join(sorted(expected))}")
    found = tuple(HostType(**entry) for entry in entries)
    if len({host.name for host in found}) != len(found):
        raise ConfigError(f"{path}: two kinds of hosts have the same name")
    return found


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
