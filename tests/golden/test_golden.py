"""Archives of older code open unchanged and give the same answers; today's code writes the same rows."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
import torch

from recinfer.archive.check import read_requests
from recinfer.inference.predictor import Predictor, load
from recinfer.inference.verify import verify
from tests.golden.make import ARCHIVES, NAMES, export_golden


def unpacked(name: str, folder: Path) -> Path:
    """The golden archive of that name as a folder."""
    root = folder / f"{name}.rqa"
    with zipfile.ZipFile(ARCHIVES / f"{name}.zip") as packed:
        packed.extractall(root)
    return root


def check_answers(predictor: Predictor) -> None:
    """Every lookup bit for bit, whatever the tables' place; the dense part as near as FORMAT.md asks (C2)."""
    for index, (request, answer) in enumerate(read_requests(predictor.archive)):
        given = predictor.replay(request)
        assert len(given.embeddings) == len(answer.embeddings)
        for mine, stored in zip(given.embeddings, answer.embeddings):
            assert torch.equal(mine, stored)
        predictor.check_request(index)


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_archive_opens_and_answers(name: str, tmp_path: Path) -> None:
    root = unpacked(name, tmp_path)
    assert verify(root).problems == ()
    check_answers(load(root))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_model_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    golden = unpacked(name, tmp_path)
    today = export_golden(name, tmp_path).root
    for path in [Path("plan.json"), *(shard.relative_to(golden) for shard in sorted(golden.glob("shards/*")))]:
        assert (today / path).read_bytes() == (golden / path).read_bytes(), path
