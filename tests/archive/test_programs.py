"""Equal parts of models share their programs in a test run, other parts do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from recinfer.archive.cut import cut_model
from recinfer.archive.dense import ExportedDense, Part
from recinfer.archive.leaves import find_leaves
from recinfer.inference.prepare import CutModel
from tests.archive.models import Ranker, save_weights
from tests.programs import kept_in, traced_once


class Times(Ranker):
    """A number of forward's code, and a weight."""

    def __init__(self, number: float = 2.0, weight: float = 1.0) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.number, self.scale = number, nn.Parameter(torch.tensor(weight))

    def forward(self, dense, kjt):  # type: ignore[no-untyped-def]
        return super().forward(dense, kjt) * self.scale * self.number


def part_of(model: nn.Module) -> Part:
    cut = cut_model(model, find_leaves(model), lambda body: None)
    assert cut is not None
    return cut.dense


def test_only_an_equal_part_has_the_same_programs(tmp_path: Path) -> None:
    asked: list[Part] = []

    def export(part: Part) -> ExportedDense:
        asked.append(part)
        return ExportedDense(b"%d" % len(asked), None, None, "none")

    kept = kept_in(tmp_path, export)
    parts = [part_of(model) for model in (Times(), Times(number=3.0), Times(weight=1.5))]
    found = [kept(part).program for part in (*parts, *parts, part_of(Times()))]
    assert found == [b"1", b"2", b"3", b"1", b"2", b"3", b"1"]
    assert [path.suffix for path in tmp_path.iterdir()] == [".programs"] * 3


def test_an_error_is_not_kept(tmp_path: Path) -> None:
    def refuse(part: Part) -> ExportedDense:
        raise ValueError("no")

    part = part_of(Times())
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            kept_in(tmp_path, refuse)(part)
    assert not list(tmp_path.iterdir())


def test_only_an_equal_model_with_equal_weights_has_the_same_trace(tmp_path: Path) -> None:
    class Local(Ranker):
        pass

    def trace(*arguments: object) -> CutModel:
        traced.append(arguments)
        return CutModel()

    traced: list[object] = []
    once = traced_once(trace)
    of: dict[str, CutModel] = {}
    for name, model, more in (
        ("first", Times(), ((), ())),
        ("equal", Times(), ((), ())),
        ("attribute", Times(number=3.0), ((), ())),
        ("weight", Times(weight=1.5), ((), ())),
        ("argument", Times(), ((), ("f_user",))),
        ("local", Local(), ((), ())),
        ("local again", Local(), ((), ())),
    ):
        (tmp_path / name).mkdir()
        reader = save_weights(model, tmp_path / name)
        of[name] = once(model.to("meta"), [], reader, *more)
    trained = Times()
    with torch.no_grad():
        trained.bottom.weight[0, 0] += 1
    of["checkpoint"] = once(Times().to("meta"), [], save_weights(trained, tmp_path), (), ())
    assert of["equal"] is of["first"]
    assert len(traced) == len({id(found) for found in of.values()}) == len(of) - 1
