"""The trace of a model that another environment holds: classes of other packages, sizes read from tensors."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recinfer.archive.captured import read_program
from recinfer.capture import Captured, CaptureError, _Int, capture, embedding_modules
from recinfer.errors import ConfigError
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor


@dataclass
class Batch:
    """A batch in the manner of TorchEasyRec."""

    dense_features: dict[str, KeyedTensor] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)
    batch_size: int = -1


def _batch(size: int) -> Batch:
    generator = torch.Generator().manual_seed(size)
    return Batch(
        {"base": KeyedTensor(["a", "b"], [3, 2], torch.randn(size, 5, generator=generator))},
        {
            "rows": torch.randn(size, 9, 4, generator=generator),
            "lengths": torch.randint(2, 9, (size,), generator=generator),
        },
        {"clk": torch.randint(0, 2, (size,), generator=generator)},
        size,
    )


def _check(model: nn.Module, captured: Captured) -> None:
    """Compare the trace with the model on batches of other sizes."""
    program = captured.program.module(check_guards=False)
    for size in (2, 4, 64):
        batch = _batch(size)
        tensors = [
            *batch.dense_features["base"].values().split([3, 2], 1),
            batch.tensors["rows"],
            batch.tensors["lengths"],
            batch.labels["clk"],
        ]
        with torch.no_grad():
            torch.testing.assert_close(program(*tensors)[0], model(batch))


class Padded(nn.Module):
    """Reads the longest history as a number, as padding by it does."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, affine=False) if norm else nn.Identity()
        for name, buffer in self.norm.named_buffers():
            if name != "num_batches_tracked":
                buffer.uniform_(0.5, 1.5)

    def forward(self, batch: Batch) -> Tensor:
        lengths = batch.tensors["lengths"]
        longest = int(torch.max(lengths).item())
        rows = self.norm(batch.tensors["rows"][:, :longest].transpose(1, 2)).transpose(1, 2)
        mask = torch.arange(longest) < lengths.unsqueeze(1)
        return torch.where(mask.unsqueeze(2), rows, 0.0).sum(1)


@pytest.mark.parametrize("norm", [False, True])
def test_int_of_a_number_in_a_tensor_may_be_a_size(norm: bool) -> None:
    model = Padded(norm).eval()
    _check(model, capture(model, (_batch(6),)))
    assert "int" not in globals()


class PaddedAndBranching(Padded):
    def forward(self, batch: Batch) -> Tensor:
        found = super().forward(batch)
        return found if found.sum() > 0 else -found


def _patched_names() -> list[object]:
    return [globals().get("int"), nn.functional.batch_norm, KeyedTensor.regroup, KeyedJaggedTensor.concat]


def test_traces_in_threads_leave_all_functions_as_they_were() -> None:
    before = _patched_names()
    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(capture, kind().eval(), (_batch(6),)) for kind in (Padded, PaddedAndBranching, Padded)]
    _check(Padded().eval(), done[0].result())
    _check(Padded().eval(), done[2].result())
    with pytest.raises(CaptureError, match="depends on the numbers in a tensor"):
        done[1].result()
    assert _patched_names() == before


def test_int_in_other_threads_stays_pythons() -> None:
    """While a trace runs, all code of the model's files reads the replaced name."""
    assert (_Int("7"), _Int("11", base=2), _Int(), _Int(torch.tensor(3)), _Int(2.5)) == (7, 3, 0, 3, 2)
    assert type(_Int("7")) is int
    assert isinstance(3, _Int)
    assert issubclass(bool, _Int)
    assert _Int.from_bytes(b"\1\0", "little") == 1
    assert isinstance(3, _Int | None)


class Sliced(nn.Module):
    """Takes the number of samples from the labels."""

    def forward(self, batch: Batch) -> Tensor:
        size = batch.labels["clk"].size(0)
        return batch.tensors["rows"][:size].sum(1) + batch.dense_features["base"]["a"][:, :1]


def test_labels_may_tell_the_number_of_samples() -> None:
    model = Sliced().eval()
    captured = capture(model, (_batch(6),))
    _check(model, captured)
    assert [slot.shape[0] for slot in captured.slots] == ["batch"] * 5


class ManyValues(Padded):
    """Its checks on sizes are those of TorchEasyRec's fx_numel and fx_int_item."""

    def forward(self, batch: Batch) -> Tensor:
        torch._check(batch.tensors["rows"].shape[0] <= 2**31 - 1)
        return super().forward(batch)


def test_the_largest_int32_is_no_limit() -> None:
    model = ManyValues().eval()
    captured = capture(model, (_batch(6),))
    _check(model, captured)
    assert captured.at_most == {}


def test_a_collection_without_tables_is_none() -> None:
    """A configuration may leave one in a model, whose forward never calls it."""
    model = Padded()
    model.none = nn.Module()
    model.none.embedding_bag_configs = list  # type: ignore[assignment]
    assert embedding_modules(model) == {}


class Times(nn.Module):
    """The lengths of ``ids`` cut ``times`` too."""

    def forward(self, ids: JaggedTensor, times: JaggedTensor) -> Tensor:
        torch._check(times.lengths().max().item() > 0)
        ends = ids.lengths().cumsum(0)
        steps = torch.cat([times.values().new_zeros(1), times.values().cumsum(0)])
        return steps[ends] - steps[ends - ids.lengths()] + ids.values().sum()


def test_numbers_whose_lengths_are_unread_are_as_many_as_the_ids() -> None:
    lengths = torch.tensor([2, 0, 1, 3])
    ids = JaggedTensor(torch.arange(6), lengths=lengths)
    captured = capture(Times(), (ids, JaggedTensor(torch.rand(6), lengths=lengths)))
    sizes = {slot.path: slot.shape[0] for slot in captured.slots if slot.part == "values"}
    assert sizes["ids"] == sizes["times"]
    other = JaggedTensor(torch.rand(6), lengths=torch.tensor([1, 1, 1, 3]))
    sizes = {slot.path: slot.shape[0] for slot in capture(Times(), (ids, other)).slots if slot.part == "values"}
    assert sizes["ids"] != sizes["times"]


class Joined(nn.Module):
    """Joins the lengths of all features, as the merged features of DLRMv3, and reads one row of them."""

    def forward(self, ids: KeyedJaggedTensor, times: KeyedJaggedTensor) -> Tensor:
        joined = torch.cat([torch.cat([ids.lengths()]), times.lengths()])
        lengths = joined.view(3, -1)[0]
        torch._check(joined.view(3, -1).sum(1).max().item() > 0)
        ends = lengths.cumsum(0)
        steps = torch.cat([times["time"].values().new_zeros(1), times["time"].values().cumsum(0)])
        return steps[ends] - steps[ends - lengths] + ids["id"].values().sum()


def test_a_row_of_joined_lengths_is_that_of_its_feature() -> None:
    lengths = torch.tensor([2, 0, 1, 3])
    ids = KeyedJaggedTensor(["id"], torch.arange(6), lengths=lengths)
    values, others = torch.rand(10), torch.tensor([1, 1, 1, 1])
    times = KeyedJaggedTensor(["time", "other"], values, lengths=torch.cat([lengths, others]))
    captured = capture(Joined(), (ids, times))
    sizes = {slot.path: slot.shape[0] for slot in captured.slots if slot.part == "values"}
    assert sizes["times['time']"] == sizes["ids['id']"]
    program = captured.program.module(check_guards=False)
    found = program(ids.values(), lengths, values[:6], lengths, values[6:], others)[0]
    torch.testing.assert_close(found, Joined()(ids, times))


def test_a_program_without_tables_is_refused(tmp_path: Path) -> None:
    """TorchEasyRec's models of semantic ids."""
    capture(Padded(), (_batch(6),)).save(tmp_path / "model.rqp")
    with pytest.raises(ConfigError, match=r"no embedding collection, .* by ONNX Runtime or TorchServe"):
        read_program(tmp_path / "model.rqp")


class Columns(nn.Module):
    def forward(self, batch: Batch) -> Tensor:
        size = batch.tensors["lengths"].max().item()
        places = torch.arange(size).expand(batch.tensors["lengths"].shape[0], size)  # type: ignore[arg-type]
        return batch.tensors["rows"][0, places.flatten() % 9].view(places.shape[0], places.shape[1], -1).sum(1)


def test_a_view_knows_its_last_size_where_it_is_empty() -> None:
    captured = capture(Columns(), (_batch(6),))
    views = [node for node in captured.program.graph.nodes if "aten.view" in str(node.target)]
    assert [node.args[1][-1] for node in views] == [4]


class KTRegroupAsDict(nn.Module):
    """As TorchRec's, whose first call computes what the others need."""

    def __init__(self, groups: list[list[str]], keys: list[str]) -> None:
        super().__init__()
        self._groups, self._keys = groups, keys

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        return {
            key: torch.cat([keyed_tensors[0][name] for name in names], 1)
            for key, names in zip(self._keys, self._groups)
        }


class Regrouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.regroup = KTRegroupAsDict([["b", "a"], ["b"]], ["deep", "wide"])

    def forward(self, batch: Batch) -> Tensor:
        groups = self.regroup([batch.dense_features["base"]])
        return groups["deep"] * groups["wide"].sum(1, keepdim=True)


def test_a_module_that_regroups_is_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("torchrec.modules.regroup")
    module.KTRegroupAsDict = KTRegroupAsDict
    monkeypatch.setitem(sys.modules, module.__name__, module)
    forward = KTRegroupAsDict.forward
    model = Regrouped().eval()
    _check(model, capture(model, (_batch(6),)))
    assert KTRegroupAsDict.forward is forward


class Branching(nn.Module):
    def forward(self, batch: Batch) -> Tensor:
        rows = batch.tensors["rows"]
        return rows.sum(1) if rows.sum() > 0 else rows.mean(1)


def test_a_refusal_prints_no_graph(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CaptureError, match="depends on the numbers in a tensor"):
        capture(Branching(), (_batch(6),))
    assert capfd.readouterr().err == ""
