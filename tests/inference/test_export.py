"""TorchRec's checkpoint to archives: what comes out is the float model within what the precision explains."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import recinfer
from recinfer.archive.check import Answer, compare_answers
from recinfer.archive.manifest_rules import read_manifest
from recinfer.checkpoint import CheckpointReader
from recinfer.distributed.planner.plan import Plan
from recinfer.errors import ArchiveError, ConfigError
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import load
from recinfer.inference.verify import verify
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from recinfer.quant.packing import pack_rows
from recinfer.quant.rows import quantization_step
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.archive.models import NUM_DENSE, Ranker, make_archive, make_plan, save_weights

FEATURES = ["f_user", "f_item", "f_hist", "f_cat", "f_country"]
KINDS = [("table_wise",), ("row_wise",), ("column_wise",), ("table_wise", "row_wise", "column_wise", "grid_shard")]


class TorchRecRanker(nn.Module):
    """The module that TorchRec's checkpoint was trained with, all of it on meta."""

    def __init__(self) -> None:
        super().__init__()
        meta = torch.device("meta")
        tables = [
            EmbeddingBagConfig(2000, 16, "user_id", feature_names=["f_user"]),
            EmbeddingBagConfig(3000, 32, "item_id", feature_names=["f_item", "f_hist"]),
            EmbeddingBagConfig(501, 32, "category", feature_names=["f_cat"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(37, 16, "country", feature_names=["f_country"]),
        ]
        self.sparse_arch = nn.Module()
        self.sparse_arch.ebc = EmbeddingBagCollection(tables=tables, device=meta)
        self.dense_arch = nn.Sequential(nn.Linear(4, 16, device=meta), nn.ReLU())
        self.over_arch = nn.Sequential(nn.Linear(144, 32, device=meta), nn.ReLU(), nn.Linear(32, 1, device=meta))

    def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> Tensor:
        pooled = self.sparse_arch.ebc(kjt)
        return self.over_arch(torch.cat([self.dense_arch(dense), *(pooled[f] for f in FEATURES)], dim=1)).squeeze(1)


@pytest.fixture(scope="module")
def checkpoint(sample_data: Path) -> CheckpointReader:
    return CheckpointReader(sample_data / "torchrec_ckpt" / "dcp_sharded_tensor")


@pytest.fixture(scope="module")
def reference(sample_data: Path) -> dict[str, object]:
    return torch.load(sample_data / "torchrec_ckpt" / "reference.pt", weights_only=True)


def bounds(checkpoint: CheckpointReader, kjt: KeyedJaggedTensor, precision: DataType) -> dict[str, Tensor]:
    """Per feature [B, 1]: half a scale step a row, summed over the bag (averaged for MEAN)."""
    result = {}
    for config in TorchRecRanker().sparse_arch.ebc.embedding_bag_configs():
        weight = checkpoint.read(f"sparse_arch.ebc.embedding_bags.{config.name}.weight")
        half = quantization_step(pack_rows(weight, precision), config.embedding_dim, precision) / 2
        for name in config.feature_names:
            bag = kjt[name]
            total = torch.segment_reduce(half[bag.values()], "sum", lengths=bag.lengths().long(), initial=0.0)
            if config.pooling is PoolingType.MEAN:
                total = total / bag.lengths().clamp(min=1)
            result[name] = total.unsqueeze(1)
    return result


@pytest.mark.parametrize("kinds", KINDS, ids=lambda kinds: "+".join(kinds))
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("precision", [DataType.INT8, DataType.FP32])
def test_torchrec_checkpoint(
    checkpoint: CheckpointReader,
    reference: dict[str, Tensor],
    tmp_path: Path,
    ranks: int,
    precision: DataType,
    kinds: tuple[str, ...],
) -> None:
    model = TorchRecRanker()
    plan = make_plan(model, ranks, precision, kinds)
    out = tmp_path / "model.rqa"
    export_archive(model, checkpoint, plan, out, name="torchrec", version="1", progress=False)
    predictor = load(out)
    kjt = KeyedJaggedTensor(reference["keys"], reference["values"], lengths=reference["lengths"])  # type: ignore[arg-type]
    pooled = predictor.lookup(kjt).pooled
    logits = predictor.predict(reference["dense"], kjt)["output"]
    assert pooled is not None
    assert pooled.keys() == FEATURES
    allowed = bounds(checkpoint, kjt, precision)
    for name, expected in reference["pooled"].items():  # type: ignore[attr-defined]
        difference = (pooled[name] - expected).abs()
        assert bool((difference <= allowed[name] + 1e-6).all()), (name, float(difference.max()))
    logit_bound = 2e-3 if precision is DataType.INT8 else 1e-6
    assert float((logits - reference["logits"]).abs().max()) <= logit_bound
    assert verify(out).ok


def test_plain_and_sharded_checkpoints_give_one_archive(checkpoint: CheckpointReader, tmp_path: Path) -> None:
    model = TorchRecRanker()
    plan = make_plan(model, 2)
    plain = CheckpointReader(checkpoint.path.parent / "plain.pt")
    hashes = []
    for i, reader in enumerate((checkpoint, plain)):
        archive = export_archive(model, reader, plan, tmp_path / f"{i}.rqa", name="m", version="1", progress=False)
        hashes.append({f.path: f.sha256 for f in archive.manifest.files if not f.path.endswith(".pt2")})
    assert hashes[0] == hashes[1]


def test_the_manifest_says_what_was_done(tmp_path: Path) -> None:
    model, archive = make_archive(tmp_path)
    manifest = archive.manifest
    assert (manifest.model, manifest.version, manifest.precision, manifest.world_size) == ("small", "7", "int8", 3)
    assert manifest.plan_hash == archive.plan.hash
    assert [(t.name, t.rows, t.dim, t.sharding) for t in manifest.tables] == [
        ("users", 53, 12, "table_wise"),
        ("item", 1201, 16, "row_wise"),
        ("cats", 307, 20, "column_wise"),
    ]
    assert [t.ranks for t in manifest.tables] == [(1,), (0, 1, 2), (0, 1, 2)]
    assert manifest.versions["torch"] == version("torch")  # without the "+cu130" of a CUDA build
    for table in manifest.tables:
        weight = model.ebc.embedding_bags[table.name].weight
        packed = pack_rows(weight, DataType.INT8)
        assert table.quantization.max_step == pytest.approx(
            float(quantization_step(packed, table.dim, DataType.INT8).max())
        )
        assert 0 < table.quantization.rms_error < table.quantization.max_abs_error <= table.quantization.max_step
    assert 0 < manifest.check.max_embedding_error < 0.1
    assert manifest.check.max_output_error is not None
    assert json.loads(manifest.to_json()) == json.loads((archive.root / "manifest.json").read_text())
    assert read_manifest(manifest.to_json().encode()) == manifest


def test_mixed_precision(tmp_path: Path) -> None:
    model = Ranker()
    plan = make_plan(model, 2)
    tables = list(plan.tables)
    from dataclasses import replace

    tables[0] = replace(tables[0], precision=DataType.FP16)
    tables[2] = replace(tables[2], precision=DataType.INT4)
    mixed = Plan(2, "cpu", tuple(tables))
    reader = save_weights(model, tmp_path)
    archive = export_archive(model, reader, mixed, tmp_path / "m.rqa", name="m", version="1", progress=False)
    assert archive.manifest.precision == "mixed"
    assert [t.precision for t in archive.manifest.tables] == ["fp16", "int8", "int4"]
    assert verify(archive.root).ok


def test_a_plan_of_another_model_is_refused(tmp_path: Path) -> None:
    model = Ranker()
    reader = save_weights(model, tmp_path)
    plan = make_plan(TorchRecRanker(), 1)
    with pytest.raises(ConfigError, match="does not fit the model"):
        export_archive(model, reader, plan, tmp_path / "m.rqa", name="m", version="1", progress=False)


def test_a_precision_that_is_not_stored_is_refused(tmp_path: Path) -> None:
    model = Ranker()
    reader = save_weights(model, tmp_path)
    plan = make_plan(model, 1, DataType.INT32)
    with pytest.raises(ConfigError, match="INT32"):
        export_archive(model, reader, plan, tmp_path / "m.rqa", name="m", version="1", progress=False)


@pytest.mark.parametrize("name", ["", "x" * 300, "a\nb"])
def test_names_that_no_manifest_holds_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="model name"):
        make_archive(tmp_path, name=name)


class Shared(nn.Module):
    """Feature x in two modules, whose lookups give x@user and x@item, and a feature of another name."""

    def __init__(self, other: str) -> None:
        super().__init__()
        self.other = other
        self.user = EmbeddingBagCollection(tables=[EmbeddingBagConfig(40, 8, "t", feature_names=["x"])])
        self.item = EmbeddingBagCollection(tables=[EmbeddingBagConfig(30, 8, "t", feature_names=["x", other])])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        items = self.item(features)
        return self.user(features)["x"] * items["x"] * items[self.other]


@pytest.mark.parametrize("other", ["x@user", "x@shop"])
def test_a_feature_with_the_name_of_another_output_is_refused(tmp_path: Path, other: str) -> None:
    if other == "x@shop":
        _, archive = make_archive(tmp_path, model=Shared(other))
        found = load(archive.root).lookup({"x": [1], other: [2]})
        assert found.pooled is not None and found.pooled.keys() == ["x@user", "x@item", "x@shop"]
        return
    with pytest.raises(ConfigError, match="feature 'x@user' has the name of another output of lookups"):
        make_archive(tmp_path, model=Shared(other))


@pytest.mark.parametrize("part", ["values", "lengths", "weights"])
def test_a_feature_with_the_name_of_a_part_of_another_is_refused(tmp_path: Path, part: str) -> None:
    with pytest.raises(
        ConfigError, match=f"feature 'x.{part}' has the name that requests give the {part} of 'x'; rename"
    ):
        make_archive(tmp_path, model=Shared(f"x.{part}"))


def test_a_contract_says_what_ids_out_of_range_become(tmp_path: Path) -> None:
    contract = make_contract()
    _, archive = make_archive(tmp_path, contract=contract)
    policies = {f.name: (f.missing, f.out_of_range, f.default_row) for f in archive.manifest.features}
    assert policies == {
        "f_user": ("reject", "reject", 0),
        "f_item": ("reject", "default_row", 9),
        "f_hist": ("reject", "default_row", 0),
        "f_cat": ("reject", "reject", 0),
    }
    assert load(archive.root).contract == contract


def make_contract(rows: int = 1201):  # type: ignore[no-untyped-def]
    from recinfer.data.contract import DenseFeature, FeatureContract, Identity, SparseFeature

    return FeatureContract(
        sparse=(
            SparseFeature("f_user", Identity(53), missing="reject"),
            SparseFeature("f_item", Identity(rows), missing=5, out_of_range="default_row", default_row=9),
            SparseFeature("f_hist", Identity(rows), out_of_range="default_row"),
            SparseFeature("f_cat", Identity(307)),
        ),
        dense=tuple(DenseFeature(f"d{i}") for i in range(NUM_DENSE)),
    )


def test_contracts_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    from recinfer.data.contract import DenseFeature

    with pytest.raises(ConfigError, match="1202 ids of feature"):
        make_archive(tmp_path, contract=make_contract(1202))
    with pytest.raises(ConfigError, match="differ from the model's: f_cat"):
        contract = make_contract()
        make_archive(tmp_path, contract=replace(contract, sparse=contract.sparse[:-1]))
    with pytest.raises(ConfigError, match=r"the feature contract has 4 dense columns .* but forward takes 3"):
        wide = tuple(DenseFeature(f"d{i}") for i in range(NUM_DENSE + 1))
        batch = torch.randn(2, NUM_DENSE), KeyedJaggedTensor(FEATURES[:4], torch.arange(8), lengths=torch.ones(8).int())
        make_archive(tmp_path, contract=replace(make_contract(), dense=wide), inputs=[batch])


def test_embeddings_only(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, archive = make_archive(tmp_path, model=Ranker().ebc)
    assert archive.manifest.dense is None
    assert archive.manifest.modules[0].path == ""
    predictor = load(archive.root)
    kjt = KeyedJaggedTensor(["f_cat"], torch.tensor([3, 4]), lengths=torch.tensor([2, 0]))
    expected = model.embedding_bags["cats"].weight[3:5].mean(0)
    assert torch.allclose(predictor.lookup(kjt)["f_cat"][0], expected, atol=5e-3)  # type: ignore[index]
    with pytest.raises(ValueError, match="no dense part"):
        predictor.predict(None, kjt)
    assert verify(archive.root).ok


def test_weights_that_are_nan_are_named(tmp_path: Path) -> None:
    model = Ranker()
    with torch.no_grad():
        model.top[0].weight[3, 5] = float("nan")
    with pytest.raises(
        ConfigError, match=r"output 'output' is NaN in 2 of 2 rows \(0, 1\) of golden request 0"
    ) as caught:
        make_archive(tmp_path, model=model)
    assert "top.0.weight in the checkpoint hold NaN" in str(caught.value)
    assert not (tmp_path / "small.rqa").exists()


def test_error_says_that_forward_makes_nan(tmp_path: Path) -> None:
    class Logarithm(Ranker):
        def forward(self, dense: Tensor, kjt: KeyedJaggedTensor) -> dict[str, Tensor]:
            return {"score": super().forward(dense, kjt), "log": dense[:, 0].log() + self.bottom(dense)[:, 0]}

    with pytest.raises(ConfigError, match=r"output 'log' is NaN in \d+ of \d+ rows") as caught:
        make_archive(tmp_path, model=Logarithm())
    assert "the weights are finite, so forward computes it from the golden request's inputs" in str(caught.value)
    assert "not what was exported" not in str(caught.value)


def test_bags_that_the_example_batch_never_has_empty_are_not_empty_where_that_gives_nan(tmp_path: Path) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc = EmbeddingBagCollection(tables=[EmbeddingBagConfig(20, 4, "t", feature_names=["hist"])])

        def forward(self, ids: KeyedJaggedTensor) -> Tensor:
            return self.ebc(ids).values() / ids["hist"].lengths().unsqueeze(1)

    def batch(*lengths: int) -> tuple[KeyedJaggedTensor]:
        values = torch.arange(sum(lengths))
        return (KeyedJaggedTensor(["hist"], values, lengths=torch.tensor(lengths, dtype=torch.int32)),)

    served = recinfer.export(Mean(), batch(2, 1, 3), tmp_path / "mean.rqa", precision="fp32")
    assert torch.isfinite(served(*batch(1, 4))).all()
    recinfer.verify(tmp_path / "mean.rqa")
    with pytest.raises(ConfigError, match=r"output 'output' is NaN"):
        recinfer.export(Mean(), batch(2, 0, 3), tmp_path / "other.rqa", precision="fp32")


def test_error_names_a_nan_answer() -> None:
    stored, found = torch.zeros(12), torch.zeros(12)
    found[2:] = float("nan")
    with pytest.raises(
        ArchiveError, match=r"request 1: output 0 is NaN in 10 of 12 rows \(2, 3, .* 9 \.\.\.\)"
    ) as caught:
        compare_answers(1, Answer([], [found]), Answer([], [stored]))
    assert "the stored answer is finite" in str(caught.value)
    assert caught.value.rule == "C2"
