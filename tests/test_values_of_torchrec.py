"""One program under recinfer and, where it is installed, under TorchRec: the values of trained and looked-up rows are the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recinfer.inference.comparison import compare_archive
from recinfer.inference.recorded import RecordedReference
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import make_archive
from tests.pages import ROOT, run_page
from tests.test_coming_from_torchrec import torchrec

__all__ = ["torchrec"]  # a fixture

RIGHT = {
    "two_names": [0.0, 0.0],
    "after_a_cast": [0.0, 0.0],
    "after_other_casts": {
        f"{name} {kind} {there}": 0.0
        for name in ("bags", "rows")
        for kind in ("table_wise", "column_wise")
        for there in (torch.bfloat16, torch.float64)
    },
    "narrow_tables": [[[0.0], [1.0], [3.0]], [[1.0], [2.0]]],
    "inverse_indices": {
        "bags": [1.0, 2.0, 1.0],
        "sharded bags": [1.0, 2.0, 1.0],
        "sharded rows": [[1.0, 2.0, 1.0], [1, 1, 1]],
    },
    "without_feature_names": [["f"], [2, 4]],
    "bad_ids_fail": [True, True, True],
    "float_ids_fail": True,
}


def values(package: str, folder: Path, beside: str = "") -> dict[str, Any]:
    """What the program prints under a package; files with the model of long bags lie in ``folder``."""
    program = (ROOT / "tests/values_program.py").read_text().replace("torchrec", package)
    script = f"cat > values.py <<'END'\n{program}END\npython values.py {folder / package}\n"
    done = run_page(script, folder / f"run-{package}", beside=beside)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


class Half(nn.Module):
    """The program's model."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(200, 8, "t", feature_names=["f"], data_type=DataType.FP16)
        self.ebc = EmbeddingBagCollection([table])
        self.top = nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.top(self.ebc(features).values().float()).squeeze(1)


def check_long_bags(folder: Path, package: str) -> None:
    model = Half()
    model.load_state_dict(torch.load(folder / f"{package}.pt"))
    reference = RecordedReference.read(folder / f"{package}.npz")
    _, archive = make_archive(folder, model=model, precision=DataType.FP16, reference=reference)
    found = compare_archive(archive.root, reference)
    assert found.ok, found


def test_values_are_right_under_recinfer(tmp_path: Path) -> None:
    found = values("recinfer", tmp_path)
    assert {name: found[name] for name in RIGHT} == RIGHT
    check_long_bags(tmp_path, "recinfer")


def test_values_are_those_of_torchrec(tmp_path: Path, torchrec: str) -> None:
    theirs, ours = values("torchrec", tmp_path, torchrec), values("recinfer", tmp_path, torchrec)
    for name, rows in theirs.pop("optimizers").items():
        assert ours["optimizers"][name] == pytest.approx(rows, rel=1e-6), name
    del ours["optimizers"]
    assert theirs.pop("narrow_tables") is None
    del ours["narrow_tables"]
    assert ours == theirs
    check_long_bags(tmp_path, "torchrec")  # it pools the rows of an FP16 table in FP16
