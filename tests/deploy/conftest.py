"""An archive on two ranks for the tests of deployments."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serving.conftest import build_archive


@pytest.fixture(scope="session")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the model ``tiny``, version 3."""
    return build_archive(tmp_path_factory.mktemp("deployed"))
