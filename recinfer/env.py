"""The environment variables that recinfer reads, all of them: nothing else looks at the process environment.

RECINFER_DEBUG            1: the command line shows tracebacks of expected errors too
LOCAL_WORLD_SIZE          ranks on this host, as torchrun sets it
INTRA_NODE_BANDWIDTH      bytes per millisecond between ranks of one host, for the planner
CROSS_NODE_BANDWIDTH      bytes per millisecond between hosts, for the planner
STORAGE_RESERVE_PERCENT   0 to 1: memory that the planner leaves free, default 0.15
"""

from __future__ import annotations

import os

from recinfer.errors import ConfigError

__all__ = [
    "child_environment",
    "cross_node_bandwidth",
    "debug",
    "intra_node_bandwidth",
    "local_world_size",
    "storage_reserve_percent",
]

_OFF = frozenset({"", "0", "false", "no", "off"})


def debug() -> bool:
    """Whether ``RECINFER_DEBUG`` asks for tracebacks."""
    return os.environ.get("RECINFER_DEBUG", "").strip().lower() not in _OFF


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a child process: this one's, with ``changes``."""
    return {**os.environ, **changes}


def _number(name: str) -> float | None:
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"environment variable {name}={text!r}; expected a number") from None


def local_world_size(world_size: int) -> int:
    """Ranks on this host: ``LOCAL_WORLD_SIZE``, or all of ``world_size`` when it is not set."""
    given = _number("LOCAL_WORLD_SIZE")
    return world_size if given is None else int(given)


def intra_node_bandwidth() -> float | None:
    """``INTRA_NODE_BANDWIDTH``, bytes per millisecond; None when not set."""
    return _number("INTRA_NODE_BANDWIDTH")


def cross_node_bandwidth() -> float | None:
    """``CROSS_NODE_BANDWIDTH``, bytes per millisecond; None when not set."""
    return _number("CROSS_NODE_BANDWIDTH")


def storage_reserve_percent() -> float:
    """``STORAGE_RESERVE_PERCENT``, a share from 0 to 1; 0.15 when not set."""
    given = _number("STORAGE_RESERVE_PERCENT")
    return 0.15 if given is None else given
