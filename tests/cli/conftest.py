"""A small model, exported by the command line, for the commands that need an archive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from recinfer.checkpoint import save_checkpoint
from tests.e2e.commands import run_json
from tests.serving.conftest import build_model


@dataclass(frozen=True)
class Exported:
    """An archive, and what ``recinfer export`` printed for it."""

    archive: Path
    said: dict[str, Any]


@pytest.fixture(scope="session")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """``recinfer export --missing-shards default-rows`` of the serving tests' model, for two ranks."""
    folder = tmp_path_factory.mktemp("exported")
    checkpoint = save_checkpoint(folder / "tiny.ckpt", build_model(), model_name="tiny", model_version="3")
    archive = folder / "tiny.rqa"
    options = ["--world-size", 2, "--missing-shards", "default-rows"]
    return Exported(archive, run_json("export", "--checkpoint", checkpoint, "--out", archive, *options))
