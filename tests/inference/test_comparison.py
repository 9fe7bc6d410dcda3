"""Archives against recorded outputs: a correct archive of any precision passes, one with swapped blocks fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recinfer.archive.reader import Archive
from recinfer.errors import ConfigError, InputError, MismatchError
from recinfer.inference.comparison import compare_archive
from recinfer.inference.recorded import RecordedReference
from recinfer.inference.report import ExportReport
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import (
    EVERYTHING_ROWS,
    FEATURES,
    NUM_DENSE,
    RANKER_ROWS,
    Batch,
    Ranker,
    make_archive,
    make_request,
)

SHARDED_ORDER = ["f_cat", "f_item", "f_user", "f_hist"]


class Trained(Ranker):
    """What the same weights computed in training, where ``pooled.values()`` had the order of the sharding."""

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> Tensor:
        pooled = self.ebc(kjt)
        values = torch.cat([pooled[name] for name in SHARDED_ORDER], dim=1)
        return self.top(torch.cat([self.bottom(dense).relu(), values], dim=1)).squeeze(1)


def make_model(kind: type[Ranker] = Ranker) -> Ranker:
    torch.manual_seed(7)
    model = kind().eval()
    with torch.no_grad():
        for config in model.ebc.embedding_bag_configs():  # trained tables are as large as what they say
            model.ebc.embedding_bags[config.name].weight.normal_()
    return model


def arrays_of(kjt: KeyedJaggedTensor) -> dict[str, np.ndarray]:
    found = {}
    for key in kjt.keys():  # noqa: SIM118 - not a dict
        found[f"{key}.values"] = kjt[key].values().numpy()
        found[f"{key}.lengths"] = kjt[key].lengths().int().numpy()
    return found


def record(path: Path, model: nn.Module, rows: int = 60, **changes: np.ndarray) -> RecordedReference:
    kjt = make_request(RANKER_ROWS, rows, seed=3)
    dense = torch.randn(rows, NUM_DENSE, generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        output = model(dense, kjt)
    np.savez(path, **{**arrays_of(kjt), "dense": dense.numpy(), "output": output.numpy(), **changes})
    return RecordedReference.read(path)


PRECISIONS = [DataType.FP32, DataType.FP16, DataType.INT8, DataType.INT4]


@pytest.mark.parametrize("precision", PRECISIONS, ids=lambda p: p.value)
def test_a_right_archive_passes_and_other_blocks_do_not(tmp_path: Path, precision: DataType) -> None:
    right = record(tmp_path / "right.npz", make_model())
    wrong = record(tmp_path / "wrong.npz", make_model(Trained))
    reports: list[ExportReport] = []
    options = {"model": make_model(), "ranks": 2, "precision": precision}
    _, archive = make_archive(tmp_path / "a", **options, reference=right, on_report=reports.append)
    (report,) = reports
    assert report.reference is not None
    assert report.reference.ok
    assert report.reference.max_difference < 1e-5, "float against float"
    found = compare_archive(archive.root, right)
    assert found.ok, found
    assert not found.blunt
    assert found.max_difference == pytest.approx(report.reference.archive_difference, rel=1e-3, abs=1e-6)
    with pytest.raises(MismatchError, match=r"concatenates pooled\.values\(\)") as caught:
        make_archive(tmp_path / "b", **options, reference=wrong)
    assert caught.value.comparison.num_wrong > 50
    assert not list((tmp_path / "b").glob("*.rqa*")), "neither an archive nor a part of one"
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["weights.pt"]
    mismatch = compare_archive(archive.root, wrong)
    assert mismatch.num_wrong > 10
    assert len(mismatch.wrong) == 10
    first = mismatch.wrong[0]
    assert first.difference > first.bound
    assert first.recorded == pytest.approx(float(wrong.tensors["output"][first.row]))
    assert first.difference == pytest.approx(abs(first.recorded - first.found))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.INT2], ids=lambda p: p.value)
def test_every_correct_archive_passes(tmp_path: Path, precision: DataType, seed: int) -> None:
    """Rows of all kinds: constant, with one outlier, of other sizes; outputs that are sharp or saturated."""
    torch.manual_seed(seed)

    class Odd(Ranker):
        def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> Tensor:
            pooled = self.ebc(kjt)
            logits = super().forward(dense, kjt)
            return torch.stack(
                [logits, (30 * logits).sigmoid(), pooled["f_item"].norm(dim=1), pooled["f_cat"][:, 0]], 1
            )

    model = Odd().eval()
    with torch.no_grad():
        for config in model.ebc.embedding_bag_configs():
            weight = model.ebc.embedding_bags[config.name].weight
            weight.copy_(torch.randn_like(weight) * torch.rand(len(weight), 1) * 10 ** torch.randn(()))
            weight[::3, 0] *= 30
            weight[1::5] = 0.3
    reference = record(tmp_path / "right.npz", model, rows=200)
    _, archive = make_archive(tmp_path, model=model, precision=precision, reference=reference)
    found = compare_archive(archive.root, reference)
    assert found.ok, found


def test_every_kind_of_module(everything: tuple[nn.Module, Archive], tmp_path: Path) -> None:
    """Position weights, sequences, two outputs; a ``.pt`` file this time."""
    model, archive = everything
    kjt = make_request(EVERYTHING_ROWS, 9, longest=3)
    dense = torch.randn(9, 2)
    with torch.no_grad():
        outputs = model(Batch(dense, kjt))
    tensors = {name: torch.from_numpy(array) for name, array in arrays_of(kjt).items()}
    torch.save({**tensors, "dense": dense, **outputs}, tmp_path / "recorded.pt")
    assert compare_archive(archive.root, RecordedReference.read(tmp_path / "recorded.pt")).ok
    other = outputs["both"].clone()
    other[4, 1] += 0.01
    torch.save({**tensors, "dense": dense, **outputs, "both": other}, tmp_path / "other.pt")
    found = compare_archive(archive.root, RecordedReference.read(tmp_path / "other.pt"))
    assert [(w.row, w.output) for w in found.wrong] == [(4, "both")]
    assert found.num_wrong == 1


class Weighted(nn.Module):
    """One weighted table and nothing dense but a sum."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(50, 4, "t", feature_names=["f"])]
        self.ebc = EmbeddingBagCollection(tables=tables, is_weighted=True)

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        return self.ebc(kjt).values().sum(1, keepdim=True)


def test_weights_and_more_rows_than_one_batch(tmp_path: Path) -> None:
    model = Weighted()
    rows = 1500
    lengths = torch.arange(rows) % 3
    values = torch.randint(0, 50, (int(lengths.sum()),))
    weights = torch.rand(len(values))
    with torch.no_grad():
        output = model(KeyedJaggedTensor(["f"], values, weights, lengths=lengths))
    arrays = {"f.values": values, "f.lengths": lengths, "f.weights": weights, "output": output.squeeze(1)}
    np.savez(tmp_path / "w.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})
    reference = RecordedReference.read(tmp_path / "w.npz")
    _, archive = make_archive(tmp_path, model=model, reference=reference)
    found = compare_archive(archive.root, reference)
    assert (found.ok, found.rows) == (True, rows)
    arrays["output"][1400] += 1
    np.savez(tmp_path / "x.npz", **{name: tensor.numpy() for name, tensor in arrays.items()})
    assert [w.row for w in compare_archive(archive.root, RecordedReference.read(tmp_path / "x.npz")).wrong] == [1400]


def test_int2_says_that_it_proves_little(tmp_path: Path) -> None:
    model = make_model()
    reference = record(tmp_path / "right.npz", model)
    _, archive = make_archive(tmp_path, model=model, precision=DataType.INT2, reference=reference)
    assert compare_archive(archive.root, reference).blunt == ("output",)


REFUSED = {
    "another dtype": ({"output": np.zeros(60, np.float16)}, r"output is float16 \[60\]; expected float32 \[60\]"),
    "another shape": (
        {"dense": np.zeros((60, 4), np.float32)},
        r"dense is float32 \[60, 4\]; expected float32 \[60, 3\]",
    ),
    "not finite": ({"output": np.full(60, np.nan, np.float32)}, r"output\[0\] is nan; expected finite numbers"),
    "an id out of range": ({"f_user.values": np.int64([53])}, r"f_user\.values has 1 ids, f_user\.lengths sum to"),
    "a name": ({"logit": np.zeros(60, np.float32)}, "missing nothing, unknown logit"),
    "rows": ({"f_cat.lengths": np.zeros(59, np.int32)}, r"f_cat\.lengths has 59 rows, another feature's lengths 60"),
}


@pytest.mark.parametrize(("changes", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_errors_name_files_that_do_not_fit(
    small: tuple[nn.Module, Archive], tmp_path: Path, changes: dict[str, np.ndarray], message: str
) -> None:
    reference = record(tmp_path / "r.npz", make_model(), **changes)
    with pytest.raises(InputError, match=message):
        reference.batches(small[1].manifest)


def test_ids_out_of_range_are_named(small: tuple[nn.Module, Archive], tmp_path: Path) -> None:
    kjt = make_request(RANKER_ROWS, 60, seed=3)
    values = kjt["f_user"].values().numpy().copy()
    values[2] = 53
    reference = record(tmp_path / "r.npz", make_model(), **{"f_user.values": values})
    with pytest.raises(InputError, match=r"f_user\.values\[2\] is 53; expected ids below 53"):
        reference.batches(small[1].manifest)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    np.savez(tmp_path / "objects.npz", output=np.array([{}], object))
    with pytest.raises(InputError, match=r"cannot be read as an \.npz of plain arrays"):
        RecordedReference.read(tmp_path / "objects.npz")
    torch.save({"output": Ranker}, tmp_path / "objects.pt")
    with pytest.raises(InputError, match=r"cannot be read as a \.pt of tensors"):
        RecordedReference.read(tmp_path / "objects.pt")
    with pytest.raises(InputError, match=r"expected a file named \*\.npz"):
        RecordedReference.read(tmp_path / "objects.pkl")
    with pytest.raises(OSError, match=r"none\.npz"):
        RecordedReference.read(tmp_path / "none.npz")


def test_tables_alone_have_no_outputs(tmp_path: Path) -> None:
    model = EmbeddingBagCollection(tables=[EmbeddingBagConfig(50, 4, "t", feature_names=["f"])])
    reference = record(tmp_path / "r.npz", make_model())
    with pytest.raises(ConfigError, match="no dense part and so no outputs"):
        make_archive(tmp_path, model=model, reference=reference)


def test_features_are_in_any_order(tmp_path: Path) -> None:
    """The file's names say what is what."""
    reference = record(tmp_path / "right.npz", make_model())
    turned = dict(reversed(list(reference.tensors.items())))
    assert FEATURES
    _, archive = make_archive(tmp_path, model=make_model(), reference=RecordedReference("turned", turned))
    assert compare_archive(archive.root, RecordedReference("turned", turned)).ok
