"""``recinfer delta`` and what ``recinfer inspect`` shows of one."""

from __future__ import annotations

from pathlib import Path

import torch

from recinfer.archive.reader import open_archive
from recinfer.checkpoint import save_checkpoint
from tests.cli.conftest import Exported
from tests.e2e.commands import run_json
from tests.serving.conftest import build_model


def test_inspect_shows_what_a_delta_changes(exported: Exported, tmp_path: Path) -> None:
    model = build_model()
    with torch.no_grad():
        model.state_dict()["sparse_arch.embedding_bag_collection.embedding_bags.t_user.weight"][3] += 1
    checkpoint = save_checkpoint(tmp_path / "newer.ckpt", model, model_name="tiny", model_version="3")
    out = tmp_path / "monday.rqd"
    made = run_json("delta", exported.archive, checkpoint, "--out", out)
    found = run_json("inspect", out)
    archive = open_archive(exported.archive, ranks=())
    assert made["archive_bytes"] == archive.manifest.bytes_total
    assert made["larger_than_archive"] == (out.stat().st_size >= made["archive_bytes"])
    assert (found["kind"], found["model"], found["base"]) == ("delta", "tiny", archive.manifest_sha256)
    assert [(t["name"], t["rows"]) for t in found["tables"]] == [("t_user", 1)]
    assert found["num_bytes"] == out.stat().st_size
