"""Archives against recorded outputs: a correct archive of any precision passes, one with swapped blocks fails."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recinfer.archive.check import Request
from recinfer.archive.reader import Archive
from recinfer.errors import ArchiveError, ConfigError, InputError, MismatchError
from recinfer.inference.comparison import compare_archive
from recinfer.inference.float_model import FloatModel, FloatRows
from recinfer.inference.predictor import Predictor
from recinfer.inference.recorded import RecordedReference
from recinfer.inference.report import ExportReport
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.modules.feature_processor_ import PositionWeightedModule
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
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
from tests.zoo.drawing import Draw
from tests.zoo.rankers import HashedIds

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


class NamedDense(Ranker):
    """An output that is called as the dense numbers of a record are."""

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> dict[str, Tensor]:
        return {"dense": super().forward(dense, kjt)}


def test_an_output_may_be_called_dense(tmp_path: Path) -> None:
    kjt, numbers = make_request(RANKER_ROWS, 60, seed=3), torch.randn(60, NUM_DENSE)
    model = make_model(NamedDense)
    with torch.no_grad():
        output = model(numbers, kjt)["dense"]
    np.savez(tmp_path / "r.npz", **arrays_of(kjt), dense_=numbers.numpy(), dense=output.numpy())
    _, archive = make_archive(tmp_path / "a", model=model, ranks=1, precision=DataType.FP16)
    assert compare_archive(archive.root, RecordedReference.read(tmp_path / "r.npz")).ok


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


def test_ids_that_forward_computes(tmp_path: Path) -> None:
    model = HashedIds().eval()
    _, archive = make_archive(
        tmp_path,
        model=model,
        ranks=1,
        precision=DataType.INT8,
        kinds=("table_wise",),
        inputs=[HashedIds.draw(Draw(6, 1))],
    )
    (ids,) = HashedIds.draw(Draw(60, 2))
    with torch.no_grad():
        output = model(ids).numpy()
    np.savez(tmp_path / "recorded.npz", **arrays_of(ids), output=output)
    comparison = compare_archive(archive.root, RecordedReference.read(tmp_path / "recorded.npz"))
    assert not comparison.wrong
    assert comparison.max_bound < output.std()
    np.savez(tmp_path / "recorded.npz", **arrays_of(ids), output=output[::-1])
    assert compare_archive(archive.root, RecordedReference.read(tmp_path / "recorded.npz")).wrong


def test_int2_proves_little_which_is_not_ok(tmp_path: Path) -> None:
    model = make_model()
    reference = record(tmp_path / "right.npz", model)
    _, archive = make_archive(tmp_path, model=model, precision=DataType.INT2, reference=reference)
    found = compare_archive(archive.root, reference)
    assert (found.blunt, found.num_wrong, found.ok, found.to_dict()["ok"]) == (("output",), 0, False, False)
    assert "proves little for output" in found.message()


def test_one_recorded_row_proves_little_if_the_bound_exceeds_it(tmp_path: Path) -> None:
    model = make_model()
    reference = record(tmp_path / "one.npz", model, rows=1)
    _, archive = make_archive(tmp_path, model=model, precision=DataType.INT2)
    assert not compare_archive(archive.root, reference).ok


class Wide(nn.Module):
    """The wide part of a Wide & Deep: a number for each id, summed."""

    def __init__(self, dims: tuple[int, ...] = (1, 1), scale: float = 0.1) -> None:
        super().__init__()
        self.names = [f"f_{i}" for i in range(len(dims))]
        self.ebc = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(50, dim, f"t_{i}", feature_names=[f"f_{i}"]) for i, dim in enumerate(dims)]
        )
        with torch.no_grad():
            for parameter in self.ebc.parameters():
                parameter.normal_(0.3 * scale, scale)

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        return self.ebc(kjt).values().sum(1)


def record_bags(path: Path, model: nn.Module, names: list[str], lowest: int, highest: int) -> RecordedReference:
    """40 rows with bags of so many ids."""
    random = torch.Generator().manual_seed(5)
    lengths = torch.randint(lowest, highest, (len(names), 40), generator=random)
    ids = [torch.randint(0, 50, (n,), generator=random) for n in lengths.sum(1).tolist()]
    kjt = KeyedJaggedTensor(names, torch.cat(ids), lengths=lengths.flatten())
    with torch.no_grad():
        np.savez(path, **arrays_of(kjt), output=model(kjt).numpy())
    return RecordedReference.read(path)


@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.INT2], ids=lambda p: p.value)
def test_rows_of_one_value_are_exact(tmp_path: Path, precision: DataType) -> None:
    """FBGEMM stores the scale 1 for them; half of it was allowed as their error, so that any weights passed."""
    torch.manual_seed(1)
    model = Wide()
    right, other = (record_bags(tmp_path / f"{i}.npz", m, model.names, 1, 4) for i, m in enumerate((model, Wide())))
    _, archive = make_archive(tmp_path, model=model, precision=precision, reference=right)
    found = compare_archive(archive.root, right)
    assert found.ok, found
    assert found.max_difference < found.max_bound < 0.01
    assert compare_archive(archive.root, other).num_wrong > 30


def test_an_export_checks_rows_beside_a_row_of_one_value(tmp_path: Path) -> None:
    """Its scale of 1 is not the step of the other rows of the table."""
    model = make_model()
    with torch.no_grad():
        for parameter in model.ebc.parameters():
            parameter[0] = 0.5
    _, archive = make_archive(tmp_path, model=model)
    predictor = Predictor(archive)
    bags = KeyedJaggedTensor(FEATURES, torch.arange(64) % 50, lengths=torch.full((32,), 2))
    request = Request(torch.randn(8, NUM_DENSE), bags)
    rows = FloatRows(archive.manifest, [request])
    for table in archive.manifest.tables:
        rows.collect("ebc", table.name, 0, model.ebc.embedding_bags[table.name].weight.detach())
    answer = predictor.replay(request)
    model = FloatModel(predictor, rows, {})
    model.compare(request, answer)
    answer.embeddings[0][3, 5] += 0.2
    with pytest.raises(ArchiveError, match=r"embeddings differ from the float model's by 0\.2"):
        model.compare(request, answer)


@pytest.mark.parametrize("scale", [1e-3, 1e-4, 1e-5])
@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.INT2], ids=lambda p: p.value)
def test_rows_whose_scale_is_small_for_fp16(tmp_path: Path, precision: DataType, scale: float) -> None:
    """An export of such tables was refused, for an error that the format has."""
    torch.manual_seed(2)
    model = Wide((16, 12, 1), scale)
    reference = record_bags(tmp_path / "r.npz", model, model.names, 0, 4)
    _, archive = make_archive(tmp_path, model=model, precision=precision, reference=reference)
    assert not compare_archive(archive.root, reference).num_wrong


class Half(nn.Module):
    """Tables trained in 16 bits, which TorchRec pools in that type; a weighted one and a mean are among them."""

    def __init__(self, data_type: DataType) -> None:
        super().__init__()
        sums, means, weighted = (
            EmbeddingBagConfig(50, 16, f"t_{i}", feature_names=[f"f_{i}"], data_type=data_type, pooling=pooling)
            for i, pooling in enumerate((PoolingType.SUM, PoolingType.MEAN, PoolingType.SUM))
        )
        self.ebc = EmbeddingBagCollection(tables=[sums, means])
        self.recent = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables=[weighted], is_weighted=True), {"f_2": PositionWeightedModule(60)}
        )
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.rand_like(parameter.float()) + 0.5)
        self.top = nn.Linear(48, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        return self.top(torch.cat([self.ebc(kjt).values(), self.recent(kjt).values()], dim=1)).squeeze(1)


@pytest.mark.parametrize("archived", [DataType.FP16, DataType.FP32, DataType.INT8], ids=lambda p: p.value)
@pytest.mark.parametrize("trained", [DataType.FP16, DataType.BF16], ids=lambda p: p.value)
def test_long_bags_pooled_in_16_bits(tmp_path: Path, trained: DataType, archived: DataType) -> None:
    torch.manual_seed(3)
    model = Half(trained)
    names = ["f_0", "f_1", "f_2"]
    reference = record_bags(tmp_path / "half.npz", model, names, 40, 60)
    reports: list[ExportReport] = []
    _, archive = make_archive(tmp_path, model=model, precision=archived, reference=reference, on_report=reports.append)
    float_comparison = reports[0].reference
    assert float_comparison is not None
    assert float_comparison.max_difference > 1e-4 * float_comparison.largest_recorded, "more than float32 explains"
    found = compare_archive(archive.root, reference)
    assert found.ok, found
    if archived is not DataType.INT8:
        torch.manual_seed(4)
        other = record_bags(tmp_path / "other.npz", Half(trained), names, 40, 60)
        assert compare_archive(archive.root, other).num_wrong > 30


def test_small_differences_are_not_blamed_on_the_order_of_features(tmp_path: Path) -> None:
    model = make_model()
    output = record(tmp_path / "right.npz", model).tensors["output"].numpy()
    reference = record(tmp_path / "off.npz", model, output=output * np.float32(1.003))
    with pytest.raises(MismatchError, match="So small a difference") as caught:
        make_archive(tmp_path, model=model, reference=reference)
    assert "pooled.values()" not in str(caught.value)


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
