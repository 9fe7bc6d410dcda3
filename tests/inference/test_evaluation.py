"""The report of an export: errors and bytes against plain computation, and float and quantized AUC against the models."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from recinfer.checkpoint import CheckpointReader
from recinfer.data.contract import DenseFeature, FeatureContract, Identity, Label, SparseFeature
from recinfer.data.metrics import auc, log_loss, normalized_entropy, sigmoid
from recinfer.errors import ArchiveError, ConfigError, InputError
from recinfer.inference.evaluation import EvalData
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import load
from recinfer.inference.report import ExportReport
from recinfer.modules.embedding_configs import DataType
from recinfer.quant.packing import pack_rows
from recinfer.quant.rows import unpack_rows
from tests.archive.models import RANKER_ROWS, Ranker, make_plan, save_weights

ROWS = 3000


@pytest.fixture(scope="module")
def contract() -> FeatureContract:
    sparse = tuple(SparseFeature(name, Identity(rows)) for name, rows in RANKER_ROWS.items())
    return FeatureContract(sparse, tuple(DenseFeature(f"d{i}") for i in range(3)), Label("label"))


@pytest.fixture(scope="module")
def case(contract: FeatureContract, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ranker, CheckpointReader, dict]:
    """A model whose table "item" matters and suffers (one huge value a row), and rows labelled by the float model."""
    torch.manual_seed(5)
    model = Ranker()
    with torch.no_grad():
        for table in model.ebc.embedding_bags.values():
            table.weight.normal_()
        model.ebc.embedding_bags["item"].weight[:, 0] += 300.0
    random = np.random.default_rng(0)
    columns: dict = {name: random.integers(0, rows, ROWS) for name, rows in RANKER_ROWS.items()}
    columns |= {f"d{i}": random.normal(size=ROWS) for i in range(3)}
    dense, features = contract.apply(columns)
    with torch.no_grad():
        logits = model(dense, features)
    columns["label"] = (logits > logits.median()).long().numpy()
    return model, save_weights(model, tmp_path_factory.mktemp("weights")), columns


def export(case: tuple, contract: FeatureContract, out: Path, **options: object) -> list[ExportReport]:
    model, reader, columns = case
    reports: list[ExportReport] = []
    data = EvalData.from_columns(contract, columns)
    precision = options.pop("precision", DataType.INT4)
    export_archive(
        model,
        reader,
        make_plan(model, 2, precision),  # type: ignore[arg-type]
        out,
        name="m",
        version="1",
        contract=contract,
        progress=False,
        eval_data=data,
        on_report=reports.append,
        **options,  # type: ignore[arg-type]
    )
    return reports


def test_errors_and_bytes_are_those_of_the_rows(case: tuple, contract: FeatureContract, tmp_path: Path) -> None:
    (report,) = export(case, contract, tmp_path / "m.rqa")
    for table in report.tables:
        weight = case[0].ebc.embedding_bags[table.table.rpartition(".")[2]].weight.detach()
        packed = pack_rows(weight, DataType.INT4)
        error = unpack_rows(packed, weight.shape[1], DataType.INT4) - weight
        assert table.max_abs_error == pytest.approx(float(error.abs().max()), rel=1e-5)
        assert table.rms_error == pytest.approx(float(error.double().square().mean().sqrt()), rel=1e-5)
        assert table.relative_error == pytest.approx(float(error.norm() / weight.norm()), rel=1e-4)
        assert (table.bytes_before, table.bytes_after) == (weight.nbytes, packed.nbytes)


def test_both_models_are_measured_on_the_same_rows(case: tuple, contract: FeatureContract, tmp_path: Path) -> None:
    (report,) = export(case, contract, tmp_path / "m.rqa")
    found = report.evaluation
    assert found is not None
    assert found.rows == ROWS
    model, _, columns = case
    dense, features = contract.apply(columns)
    with torch.no_grad():
        expected = model(dense, features).numpy()
    served = load(tmp_path / "m.rqa").predict(dense, features)["output"].numpy()
    for quality, logits in ((found.float_model, expected), (found.quantized_model, served)):
        assert quality.auc == pytest.approx(auc(columns["label"], logits), abs=1e-6)
        assert quality.log_loss == pytest.approx(log_loss(columns["label"], sigmoid(logits)), rel=1e-5)
        assert quality.normalized_entropy == pytest.approx(
            normalized_entropy(columns["label"], sigmoid(logits)), rel=1e-5
        )
    assert found.auc_drop > 0.001
    assert report.to_dict()["evaluation"]["auc_drop"] == found.auc_drop


def test_an_archive_that_loses_too_much_is_not_written(case: tuple, contract: FeatureContract, tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match=r"lowers the AUC by 0\.\d+ .* quantized alone: ebc\.item \(\+0") as caught:
        export(case, contract, tmp_path / "m.rqa", max_auc_drop=0.001)
    assert "ebc.cats" in str(caught.value)
    assert not list(tmp_path.iterdir())
    export(case, contract, tmp_path / "m.rqa", max_auc_drop=0.001, precision=DataType.FP32)


def test_what_cannot_be_measured_is_refused(case: tuple, contract: FeatureContract, tmp_path: Path) -> None:
    model, reader, columns = case
    with pytest.raises(ConfigError, match="outputs are output"):
        export(case, contract, tmp_path / "m.rqa", eval_output="click")
    with pytest.raises(ConfigError, match="eval_data"):
        export_archive(model, reader, make_plan(model, 1), tmp_path / "m.rqa", name="m", version="1", max_auc_drop=0.1)
    with pytest.raises(ConfigError, match="needs a feature contract"):
        EvalData.read(tmp_path / "rows.csv", "criteo", None)
    one_class = model, reader, columns | {"label": np.zeros(ROWS, dtype=np.int64)}
    with pytest.raises(InputError, match="one class"):
        export(one_class, contract, tmp_path / "m.rqa", max_auc_drop=0.1)
    assert not list(tmp_path.iterdir())


def test_normalized_entropy_of_the_mean_is_one() -> None:
    labels = np.array([0, 0, 0, 1])
    assert normalized_entropy(labels, np.full(4, 0.25)) == pytest.approx(1.0)
    assert np.isnan(normalized_entropy(np.zeros(3), np.full(3, 0.1)))


def test_a_narrow_terminal_still_names_the_tables() -> None:
    from rich.console import Console

    from recinfer.inference.report import TableReport

    def printed(*names: str) -> str:
        tables = [TableReport(name, "int8", 5, 16, 3 << 30, 700, 0.1, 0.01, 0.001) for name in names]
        console = Console(width=90, record=True, file=io.StringIO())
        console.print(ExportReport(tuple(tables), None))
        return console.export_text()

    text = printed("sparse_arch.embedding_bag_collection.t_C1", "sparse_arch.embedding_bag_collection.t_C26")
    assert "t_C1 " in text and "t_C26" in text and "3.0 GiB" in text and "700 bytes" in text
    assert "a.t" in printed("a.t", "b.t")  # of one name in two modules, both are told apart
