"""Measures the machine for ``recinfer calibrate``: processor name, memory bandwidth, and copies between devices."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

__all__ = ["copies_per_ms", "memory_per_ms", "processor"]


def _fastest_ms(call: Callable[[], object], synchronize: Callable[[], None]) -> float:
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        call()
        synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return min(times)


def memory_per_ms(device: torch.device, synchronize: Callable[[], None]) -> float:
    """Bytes per millisecond of reading a large tensor once."""
    data = torch.ones(1 << 25, dtype=torch.float32, device=device)
    return data.nbytes / _fastest_ms(data.sum, synchronize)


def copies_per_ms(device: str, synchronize: Callable[[], None]) -> tuple[float, float]:
    """(host to device, device to device) bytes per millisecond; 0 without a device to measure."""
    if device != "cuda":
        return 0.0, 0.0
    host = torch.ones(1 << 24, dtype=torch.float32).pin_memory()
    there = host.to("cuda:0")
    up = host.nbytes / _fastest_ms(lambda: there.copy_(host, non_blocking=True), synchronize)
    if torch.cuda.device_count() < 2:
        return up, 0.0
    other = torch.empty_like(there, device="cuda:1")
    return up, host.nbytes / _fastest_ms(lambda: other.copy_(there, non_blocking=True), synchronize)


def processor() -> str:
    """Name of the processor, as the system reports it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
