"""Options and fixtures that all tests share, and the folder of sample data if there is one."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.export_caches import cache_exports, keep_programs, programs_of_run
from tests.interpreter_caches import patch_once
from tests.tiers import TIERS, tier_of

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # tools/gpu_trial.py runs the kernel's tests where only torch, Triton, numpy and pytest are
    pass
else:
    # The time of an example depends on how busy the machine is, so no example is too slow.
    settings.register_profile("here", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    # A landing must not hang on the day's luck: CI draws the same examples each time. Elsewhere they are random, and a
    # case that fails there goes into its test as an @example.
    settings.register_profile("ci", settings.get_profile("here"), derandomize=True)
    settings.load_profile("ci" if os.environ.get("CI") else "here")

# Triton reads this when it is imported, which torch may do for its own reasons long before our kernel's tests run.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shell's background jobs ignore Ctrl-C, and so would all programs that tests start from there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests that take longest, and those that share something slow to start. See pytest_collection_modifyitems.
_FIRST = (
    "tests/torchserve/",
    "tests/serving/remote/test_docs.py",
    "tests/test_readme.py",
    "tests/deploy/test_ray",
    "tests/e2e/test_demo.py",
)

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--congruence", type=int, default=1000, help="how many random requests go through every protocol")
    parser.addoption(
        "--full-matrix",
        action="store_true",
        help="all of the parity matrix, 10,000 mutated messages in place of 1,000, and every export from its trace on",
    )
    parser.addoption("--torchrec-python", help="an interpreter that has torchrec, for trials beside it")
    parser.addoption("--update-surface", action="store_true", help="write the snapshot of the public surface anew")
    parser.addoption("--mutations", help="examples of each hostile mutation test, instead of a few hundred in all")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps imported modules out of garbage collections: they stay until the end.

    It is a million objects, and going through them once takes a second. Where tests look at what is collected, they
    collect; by itself that is done after ten thousand new objects, not after seven hundred.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the longest tests first: one that began last would leave the other cores without work.

    A worker of ``--dist worksteal`` that has nothing left takes the last half of what another one has, so what stands at the
    head stays with one worker too: what starts once for all of its tests starts in that one alone.
    """

    def place(item: pytest.Item) -> int:
        found = (at for at, begin in enumerate(_FIRST) if item.nodeid.startswith(begin))
        return next(found, len(_FIRST))

    items.sort(key=place)  # else they stay in their order


def pytest_configure(config: pytest.Config) -> None:
    for tier in TIERS:
        config.addinivalue_line("markers", f"{tier}: set by tests/tiers.py")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test with its tier, so that ``-m "pure or in_process"`` selects what answers fast."""
    item.add_marker(tier_of(item))


def pytest_runtest_setup() -> None:
    """Cache the work that every export of a small model, and every launch in Triton's interpreter, repeats.

    Each test begins with the same seed, so that models which tests build alike are equal and share it; with --full-matrix the
    random numbers go on from the test before.
    """
    cache_exports()
    patch_once()
    torch: Any = sys.modules.get("torch")
    if torch is not None and programs_of_run() is not None:
        torch.default_generator.manual_seed(0)
    for name in ("recinfer.inference.export", "recinfer.inference.delta"):
        module: Any = sys.modules.get(name)
        if programs_of_run() is not None and module is not None and not hasattr(module.cut_and_export, "__wrapped__"):
            from tests.programs import traced_once

            module.cut_and_export = traced_once(module.cut_and_export)


@pytest.fixture(scope="session", autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> None:
    """The folder of exported programs, which all processes of a test run share; none with --full-matrix."""
    if request.config.getoption("--full-matrix"):
        return
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "programs"
    folder.mkdir(exist_ok=True)
    keep_programs(folder)


@pytest.fixture(scope="session", autouse=True)
def temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Temporary files of this process and of those that tests start are in pytest's folder: pytest removes what a killed
    process, or torchrun, leaves there."""
    tempfile.tempdir = os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("files", numbered=False))


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """The package's loggers as they were after each test: a command that serves in this process sets them."""
    found = [logging.getLogger(name) for name in ("recinfer", "recinfer.changes", "recinfer.requests")]
    before = [(log.handlers[:], log.propagate, log.level) for log in found]
    yield
    for log, (handlers, propagate, level) in zip(found, before):
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


@pytest.fixture(scope="session")
def sample_data() -> Path:
    """The folder of sample data next to the repository; the test is skipped if there is none."""
    if not DATA.is_dir():
        pytest.skip("no sample data beside the repository (../shared/data)")
    return DATA
