"""Packing: a few kilobytes that name the archive's folder, and clear errors."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

from recinfer.errors import ArchiveError, InputError
from recinfer.serving.mar import pack
from tests.torchserve.conftest import needs


def test_no_archive_holds_the_handler_and_the_path(archive: Path, tmp_path: Path):
    needs("model_archiver")
    entry = pack(archive, tmp_path / "store", workers=2)
    assert entry == tmp_path / "store" / "tiny"
    files = {path.relative_to(entry).as_posix() for path in entry.rglob("*") if path.is_file()}
    assert files == {"MAR-INF/MANIFEST.json", "model-config.yaml", "recinfer_handler.py"}
    config = json.loads((entry / "model-config.yaml").read_text())
    assert config["handler"]["archive"] == str(archive.resolve())
    assert config["handler"]["max_response_bytes"] < 6_553_500
    assert (config["minWorkers"], config["batchSize"]) == (2, 1)
    model = json.loads((entry / "MAR-INF" / "MANIFEST.json").read_text())["model"]
    assert (model["modelName"], model["modelVersion"]) == ("tiny", "3")
    assert list((tmp_path / "store").iterdir()) == [entry]


def test_zip_store_is_one_small_file(archive: Path, tmp_path: Path):
    needs("model_archiver")
    entry = pack(archive, tmp_path, archive_format="zip-store", model_name="other", archive_at="/models/tiny.rqa")
    assert entry == tmp_path / "other.mar"
    assert entry.stat().st_size < 20_000
    with zipfile.ZipFile(entry) as mar:
        assert all(item.compress_type == zipfile.ZIP_STORED for item in mar.infolist())
        assert json.loads(mar.read("model-config.yaml"))["handler"]["archive"] == "/models/tiny.rqa"


def test_entry_is_overwritten_only_with_force(archive: Path, tmp_path: Path):
    needs("model_archiver")
    entry = pack(archive, tmp_path)
    with pytest.raises(InputError, match="exists already"):
        pack(archive, tmp_path)
    assert pack(archive, tmp_path, force=True, workers=3) == entry
    assert json.loads((entry / "model-config.yaml").read_text())["minWorkers"] == 3


def test_refusals(archive: Path, tmp_path: Path):
    with pytest.raises(InputError, match="archive_format: got 'tgz'"):
        pack(archive, tmp_path, archive_format="tgz")
    with pytest.raises(InputError, match="model name: got 'a b'"):
        pack(archive, tmp_path, model_name="a b")
    with pytest.raises(InputError, match="workers: got 0"):
        pack(archive, tmp_path, workers=0)
    with pytest.raises(ArchiveError, match="F1"):
        pack(tmp_path, tmp_path)
