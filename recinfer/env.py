"""All environment variables that recinfer reads; no other module reads the process environment.

RECINFER_DEBUG            1: the command line shows tracebacks of expected errors too
RECINFER_TOKEN            bearer token that a server requires and that clients send
RECINFER_CACHE            folder for archives that are downloaded from a URL; else recinfer in XDG_CACHE_HOME or ~/.cache
RECINFER_SUPERVISED       1, set by `recinfer serve --workers`: this process is one of its workers and starts no workers
RANK, WORLD_SIZE          this process's rank and the number of ranks, as torchrun sets them
LOCAL_WORLD_SIZE          ranks on this host, as torchrun sets it
OMP_NUM_THREADS           threads of an operator; unset, ranks that train on the CPU of one host divide its cores
INTRA_NODE_BANDWIDTH      bytes per millisecond between ranks of one host, for the planner
CROSS_NODE_BANDWIDTH      bytes per millisecond between hosts, for the planner
STORAGE_RESERVE_PERCENT   0 to 1: memory that the planner leaves free, default 0.15
RECINFER_KERNEL           fbgemm or triton: what looks packed rows up; else FBGEMM where it is installed
RECINFER_CUDA_GRAPHS      0: small lookups on a GPU are launched; else they are recorded and replayed as CUDA graphs
grpc_proxy, https_proxy, http_proxy  of gRPC: a client's error names the one that is used; rankers call shards without
no_grpc_proxy, no_proxy   of gRPC: hosts that are called without such a proxy

recinfer sets three variables, if they are unset:
ORT_DISABLE_TELEMETRY     1: turns off the telemetry of onnxruntime's Linux wheels, which uses a thread
GRPC_VERBOSITY            NONE, in `recinfer serve`: gRPC's core writes lines that callers without a token can cause
MALLOC_ARENA_MAX          2, in `recinfer serve`: threads share two heaps of glibc's malloc
"""

from __future__ import annotations

import ctypes
import ipaddress
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from recinfer.errors import ConfigError

__all__ = [
    "cache_folder",
    "child_environment",
    "cross_node_bandwidth",
    "cuda_graphs",
    "debug",
    "grpc_proxy",
    "intra_node_bandwidth",
    "keep_grpc_quiet",
    "keep_onnxruntime_quiet",
    "kernel",
    "local_world_size",
    "operator_threads",
    "set_torchrun",
    "share_heaps",
    "storage_reserve_percent",
    "supervised",
    "supervised_environment",
    "token",
    "torchrun_rank",
]

_M_ARENA_MAX = -8  # a constant of glibc's malloc.h
_HEAPS = 2

_OFF = frozenset({"", "0", "false", "no", "off"})


def debug() -> bool:
    """Whether ``RECINFER_DEBUG`` enables tracebacks."""
    return os.environ.get("RECINFER_DEBUG", "").strip().lower() not in _OFF


def cache_folder() -> Path:
    """``RECINFER_CACHE``, or ``recinfer`` in ``XDG_CACHE_HOME`` or in ``~/.cache``."""
    given = os.environ.get("RECINFER_CACHE", "").strip()
    return (
        Path(given)
        if given
        else Path(os.environ.get("XDG_CACHE_HOME", "").strip() or Path.home() / ".cache") / "recinfer"
    )


def grpc_proxy(target: str) -> str:
    """The name of the variable that makes gRPC call ``target``, ``host:port``, through a proxy; "" when none does.

    gRPC's core reads the same variables in the same way, http_proxy_mapper.cc: the first that is set counts, an empty one means no
    proxy, and a host matches by the end of its name, or by its network.
    """
    name = next((name for name in ("grpc_proxy", "https_proxy", "http_proxy") if name in os.environ), "")
    if not os.environ.get(name) or target.startswith("unix"):
        return ""
    host = target.rpartition(":")[0].rpartition("/")[2].strip("[]").lower()
    exempt = "no_grpc_proxy" if "no_grpc_proxy" in os.environ else "no_proxy"
    for entry in filter(None, map(str.strip, os.environ.get(exempt, "").lower().split(","))):
        if host.endswith(entry) or _is_in(host, entry):
            return ""
    return name


def _is_in(host: str, network: str) -> bool:
    """Whether ``host`` is an address in ``network``, such as 10.0.0.0/8."""
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:  # a name, or no network
        return False


def token() -> str | None:
    """``RECINFER_TOKEN``; None when not set or empty."""
    return os.environ.get("RECINFER_TOKEN", "").strip() or None


def kernel() -> Literal["fbgemm", "triton"] | None:
    """``RECINFER_KERNEL``; None when not set or empty. Raises ConfigError for values other than fbgemm and triton."""
    given = os.environ.get("RECINFER_KERNEL", "").strip().lower()
    if given not in ("", "fbgemm", "triton"):
        raise ConfigError(f"environment variable RECINFER_KERNEL={given!r}; expected fbgemm or triton")
    return None if given == "" else "triton" if given == "triton" else "fbgemm"


def cuda_graphs() -> bool:
    """Whether small lookups on a GPU are CUDA graphs: unless ``RECINFER_CUDA_GRAPHS`` is 0."""
    return os.environ.get("RECINFER_CUDA_GRAPHS", "").strip().lower() not in _OFF - {""}


def supervised() -> bool:
    """Whether a supervisor started this process or one of its ancestors."""
    return bool(os.environ.get("RECINFER_SUPERVISED", "").strip())


def supervised_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a process that a supervisor starts, from ``environment`` (None: this process's)."""
    return {**(os.environ if environment is None else environment), "RECINFER_SUPERVISED": "1"}


def keep_onnxruntime_quiet() -> None:
    """Turn off onnxruntime's telemetry unless the user's environment sets it; call this before importing
    onnxruntime."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def keep_grpc_quiet() -> None:
    """No lines of gRPC's core on stderr, unless the user's environment asks for them; call it before grpc is imported.

    It writes one for every compressed call and every failed TLS handshake, at no bounded rate and without the caller's address.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def share_heaps() -> None:
    """Let the threads of this process and of its children share two heaps of glibc's malloc, unless the user's environment says how
    many; call it before threads start.

    By default nearly each thread has a heap of its own, which grows until it has held the largest run that its thread ever does. So
    the memory of a server under steady load rises for hours.
    """
    if "MALLOC_ARENA_MAX" in os.environ:
        return
    os.environ["MALLOC_ARENA_MAX"] = str(_HEAPS)  # glibc reads it when a process starts
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _HEAPS)


def child_environment(**changes: str) -> dict[str, str]:
    """The environment for a child process: this one's, with ``changes``."""
    return {**os.environ, **changes}


def _number(name: str, expected: str, low: float, high: float) -> float | None:
    """The finite number of a variable; None when not set. Raises ConfigError naming it unless low <= number <= high."""
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (low <= value <= high and math.isfinite(value)):
        raise ConfigError(f"environment variable {name}={text!r}; expected {expected}")
    return value


def local_world_size(world_size: int) -> int:
    """Number of ranks on this host: ``LOCAL_WORLD_SIZE``, or ``world_size`` if it is unset."""
    expected = "a whole number of at least 1"
    given = _number("LOCAL_WORLD_SIZE", expected, 1, math.inf)
    if given is None:
        return world_size
    if given != int(given):
        raise ConfigError(f"environment variable LOCAL_WORLD_SIZE={given}; expected {expected}")
    return int(given)


def operator_threads() -> str | None:
    """``OMP_NUM_THREADS``, which torch reads; None when not set or empty."""
    return os.environ.get("OMP_NUM_THREADS", "").strip() or None


def torchrun_rank() -> tuple[int, int] | None:
    """``RANK`` and ``WORLD_SIZE`` of a process that torchrun or a similar launcher started; None for other processes.

    Raises:
        ConfigError: one of them is missing or no whole number, or they do not fit.
    """
    expected = "a whole number, as torchrun sets it, together with WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
    rank = _number("RANK", expected, 0, math.inf)
    if rank is None:
        return None
    world_size = _number("WORLD_SIZE", expected, 1, math.inf)
    if world_size is None or rank != int(rank) or world_size != int(world_size) or rank >= world_size:
        raise ConfigError(f"environment variables RANK={rank}, WORLD_SIZE={world_size}; expected {expected}")
    return int(rank), int(world_size)


def set_torchrun(rank: int, world_size: int, port: int) -> None:
    """Set torchrun's variables for this process, for ranks on one host that join a store at ``port``."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )


def intra_node_bandwidth() -> float | None:
    """``INTRA_NODE_BANDWIDTH``, bytes per millisecond; None when not set."""
    return _bandwidth("INTRA_NODE_BANDWIDTH")


def cross_node_bandwidth() -> float | None:
    """``CROSS_NODE_BANDWIDTH``, bytes per millisecond; None when not set."""
    return _bandwidth("CROSS_NODE_BANDWIDTH")


def _bandwidth(name: str) -> float | None:
    return _number(name, "bytes per millisecond, a number above 0", math.ulp(0.0), math.inf)


def storage_reserve_percent() -> float:
    """``STORAGE_RESERVE_PERCENT``, a share from 0 to 1; 0.15 when not set."""
    given = _number("STORAGE_RESERVE_PERCENT", "a share from 0 to 1, as in 0.15", 0, 1)
    return 0.15 if given is None else given
