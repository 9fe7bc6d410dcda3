"""The one module that reads the environment."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from recinfer import env
from recinfer.errors import ConfigError


@pytest.mark.parametrize(
    ("value", "on"), [("1", True), ("true", True), ("0", False), ("", False), (" Off ", False), ("no", False)]
)
def test_debug(monkeypatch: pytest.MonkeyPatch, value: str, on: bool) -> None:
    monkeypatch.setenv("RECINFER_DEBUG", value)
    assert env.debug() is on


def test_debug_is_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RECINFER_DEBUG", raising=False)
    assert env.debug() is False


def test_a_child_gets_this_environment_with_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECINFER_DEBUG", "1")
    child = env.child_environment(RECINFER_DEBUG="0", OTHER="x")
    assert (child["RECINFER_DEBUG"], child["OTHER"]) == ("0", "x")
    assert "PATH" in child
    assert env.debug() is True


@pytest.mark.parametrize(("before", "after"), [(None, "1"), ("0", "0")])
def test_onnxruntime_sends_no_telemetry_unless_enabled(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    monkeypatch.setenv("ORT_DISABLE_TELEMETRY", before or "")
    if before is None:
        monkeypatch.delenv("ORT_DISABLE_TELEMETRY")
    env.keep_onnxruntime_quiet()
    assert env.child_environment()["ORT_DISABLE_TELEMETRY"] == after


@pytest.mark.parametrize(("before", "after"), [(None, "NONE"), ("INFO", "INFO")])
def test_grpc_writes_nothing_unless_its_variable_is_set(
    monkeypatch: pytest.MonkeyPatch, before: str | None, after: str
) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", before or "")
    if before is None:
        monkeypatch.delenv("GRPC_VERBOSITY")
    env.keep_grpc_quiet()
    assert env.child_environment()["GRPC_VERBOSITY"] == after


HEAPS = """
import ctypes, threading
from recinfer import env

env.share_heaps()
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.open_memstream.restype = ctypes.c_void_p
met = threading.Barrier(9)

def allocate():
    libc.malloc(ctypes.c_size_t(1 << 12))
    met.wait()  # a thread that ends leaves its heap to the next one
    met.wait()

for _ in range(8):
    threading.Thread(target=allocate, daemon=True).start()
met.wait()
text, size = ctypes.c_char_p(), ctypes.c_size_t()
stream = ctypes.c_void_p(libc.open_memstream(ctypes.byref(text), ctypes.byref(size)))
libc.malloc_info(0, stream)
libc.fclose(stream)
print(text.value.count(b"<heap nr="))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="heaps are shared by a setting of glibc's malloc")
def test_threads_share_two_heaps_unless_the_variable_is_set() -> None:
    def heaps(**changes: str) -> int:
        others = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
        command = [sys.executable, "-c", HEAPS]
        return int(subprocess.run(command, env=others | changes, capture_output=True, text=True, check=True).stdout)

    assert heaps() == 2
    assert heaps(MALLOC_ARENA_MAX="5") == 5


def test_numbers_for_the_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("LOCAL_WORLD_SIZE", "INTRA_NODE_BANDWIDTH", "CROSS_NODE_BANDWIDTH", "STORAGE_RESERVE_PERCENT")

    def read() -> tuple[float | None, ...]:
        return (
            env.local_world_size(8),
            env.intra_node_bandwidth(),
            env.cross_node_bandwidth(),
            env.storage_reserve_percent(),
        )

    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert read() == (8, None, None, 0.15)
    for name, text in zip(names, ("2", "1e6", " 5 ", "0")):
        monkeypatch.setenv(name, text)
    assert read() == (2, 1e6, 5.0, 0.0)


@pytest.mark.parametrize("text", ["two", "nan", "inf", "-1", "2.5 GB"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("LOCAL_WORLD_SIZE", lambda: env.local_world_size(8)),
        ("INTRA_NODE_BANDWIDTH", env.intra_node_bandwidth),
        ("CROSS_NODE_BANDWIDTH", env.cross_node_bandwidth),
        ("STORAGE_RESERVE_PERCENT", env.storage_reserve_percent),
    ],
)
def test_invalid_numbers_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, read, text: str) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name}=.*expected"):
        read()


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("LOCAL_WORLD_SIZE", "1.5", lambda: env.local_world_size(8)),
        ("LOCAL_WORLD_SIZE", "0", lambda: env.local_world_size(8)),
        ("CROSS_NODE_BANDWIDTH", "0", env.cross_node_bandwidth),
        ("STORAGE_RESERVE_PERCENT", "15", env.storage_reserve_percent),
    ],
)
def test_numbers_that_mean_nothing_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, text: str, read) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=f"{name}=.*expected"):
        read()
