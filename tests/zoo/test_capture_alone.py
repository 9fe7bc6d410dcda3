"""recinfer/capture.py as a single file, where recinfer, TorchRec and FBGEMM are missing: it needs torch alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import recinfer.capture
from recinfer.archive.captured import read_program
from recinfer.capture import capture, read_capture
from tests.zoo.drawing import Draw
from tests.zoo.easyrec import VariationalDropout

TYPES = """
from dataclasses import dataclass
import torch


class JaggedTensor:
    def __init__(self, values, weights=None, lengths=None):
        self._values, self._weights, self._lengths = values, weights, lengths

    def values(self):
        return self._values

    def weights_or_none(self):
        return self._weights

    def lengths(self):
        return self._lengths


class KeyedJaggedTensor:
    def __init__(self, keys, values, weights=None, lengths=None):
        self._keys, self._values, self._weights, self._lengths = keys, values, weights, lengths

    def keys(self):
        return self._keys

    def values(self):
        return self._values

    def weights_or_none(self):
        return self._weights

    def lengths(self):
        return self._lengths

    def variable_stride_per_key(self):
        return False

    def to_dict(self):
        by_key = self._lengths.view(len(self._keys), -1)
        parts = self._values.split(by_key.sum(1).tolist())
        return {k: JaggedTensor(v, None, n) for k, v, n in zip(self._keys, parts, by_key)}

    @staticmethod
    def concat(kjt_list):
        raise NotImplementedError


class KeyedTensor:
    def __init__(self, keys, dims, values):
        self._keys, self._dims, self._values = keys, dims, values

    def values(self):
        return self._values

    @staticmethod
    def regroup(keyed_tensors, groups):
        raise NotImplementedError


@dataclass
class Config:
    name: str
    num_embeddings: int
    embedding_dim: int
    feature_names: list
    pooling: str = "SUM"
    data_type: str = "FP32"


class EmbeddingBagCollection(torch.nn.Module):
    def __init__(self, tables):
        super().__init__()
        self._configs = tables

    def embedding_bag_configs(self):
        return self._configs

    def is_weighted(self):
        return False
"""

SCRIPT = """
import sys

for name in ("recinfer", "torchrec", "fbgemm_gpu"):
    sys.modules[name] = None

import torch
from capture import capture
from ours.sparse.jagged_tensor import Config, EmbeddingBagCollection, KeyedJaggedTensor


class Ranker(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ebc = EmbeddingBagCollection([Config("user", 9, 4, ["user"]), Config("item", 9, 4, ["item", "hist"])])
        self.top = torch.nn.Linear(12 + 2, 1)

    def forward(self, dense, ids):
        return self.top(torch.cat([self.ebc(ids).values(), dense], 1))


lengths = torch.tensor([1, 0, 2, 1, 1, 1, 0, 3, 1])
ids = KeyedJaggedTensor(["user", "item", "hist"], torch.arange(10) % 9, lengths=lengths)
capture(Ranker(), (torch.randn(3, 2), ids)).save("model.rqp")
"""


def test_one_file_captures_without_recinfer(tmp_path: Path) -> None:
    shutil.copy(recinfer.capture.__file__, tmp_path / "capture.py")
    (tmp_path / "ours/sparse").mkdir(parents=True)
    (tmp_path / "ours/sparse/jagged_tensor.py").write_text(TYPES)
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    captured = read_capture(tmp_path / "model.rqp")
    assert [(slot.name, slot.part, slot.shape[0]) for slot in captured.slots if slot.part != "values"] == [
        ("dense", "tensor", "batch"),
        ("user", "lengths", "batch"),
        ("item", "lengths", "batch"),
        ("hist", "lengths", "batch"),
    ]
    (module,) = captured.modules
    assert (module.path, module.features, module.dims) == ("ebc", ("user", "item", "hist"), (4, 4, 4))
    assert captured.outputs == ("output",)


def test_a_file_has_no_operator_that_no_output_needs(tmp_path: Path) -> None:
    """The penalty divides a number by the number of samples, which D1 refuses."""
    capture(VariationalDropout().eval(), VariationalDropout.draw(Draw(6, 1))).save(tmp_path / "model.rqp")
    assert "truediv" not in str(read_program(tmp_path / "model.rqp").program.graph)
