"""Policies for missing features and ids out of range: what export writes, and what keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from recinfer.archive.reader import Archive, open_archive
from recinfer.data.contract import FeatureContract
from recinfer.errors import ConfigError, InputError
from recinfer.inference.delta import make_delta
from recinfer.inference.predictor import load
from recinfer.inference.reshard import plan_archive, reshard_archive
from tests.archive.models import RANKER_ROWS, Ranker, copy_with_missing, make_archive, save_weights
from tests.inference.test_export import make_contract
from tests.inference.test_predictor import bag, full

Policies = dict[str, tuple[str | int, str, int]]


def policies(archive: Archive) -> Policies:
    return {f.name: (f.missing, f.out_of_range, f.default_row) for f in archive.manifest.features}


def test_by_default_every_feature_is_needed(tmp_path: Path) -> None:
    assert set(policies(make_archive(tmp_path)[1]).values()) == {("reject", "reject", 0)}


def test_manifest_holds_the_policies_that_export_was_given(tmp_path: Path) -> None:
    missing: dict[str, str | int] = {"*": "empty", "f_user": "reject", "f_item": 1200}
    archive = make_archive(tmp_path, missing=missing, out_of_range={"f_hist": "default_row"})[1]
    assert policies(archive) == {
        "f_user": ("reject", "reject", 0),
        "f_item": (1200, "reject", 0),
        "f_hist": ("empty", "default_row", 0),
        "f_cat": ("empty", "reject", 0),
    }
    predictor, dense = load(archive.root), torch.randn(2, 3)
    short = predictor.predict(dense, bag(f_user=[[1], [2]]))["output"]
    assert torch.equal(short, predictor.predict(dense, full(f_user=[[1], [2]], f_item=[[1200], [1200]]))["output"])
    assert (predictor.intake.missing["f_item"], predictor.intake.missing["f_user"]) == (1, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"missing": {"f_other": "empty"}},
            "missing: the model has no feature 'f_other'; its features are f_user, f_item",
        ),
        ({"missing": {"f_user": "drop"}}, "missing: got 'drop' for feature 'f_user'; expected .* an id below 53"),
        ({"missing": {"f_user": 53}}, "missing: got 53 for feature 'f_user'"),
        ({"missing": {"f_user": -1}}, "missing: got -1 for feature 'f_user'"),
        ({"missing": {"f_user": True}}, "missing: got True for feature 'f_user'"),
        ({"missing": {"*": 60}}, "missing: got 60 for feature 'f_user'"),
        ({"out_of_range": {"f_other": "reject"}}, "out_of_range: the model has no feature 'f_other'"),
        ({"out_of_range": {"f_cat": "clip"}}, "out_of_range: got 'clip' for feature 'f_cat'"),
    ],
)
def test_policies_for_unknown_features_are_refused(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_archive(tmp_path, **options)
    assert not (tmp_path / "small.rqa").exists()


def test_a_contract_says_what_rows_without_a_value_are(tmp_path: Path) -> None:
    """A missing column is an error, whatever the archive's policy for missing features."""
    archive = make_archive(tmp_path, contract=make_contract(), missing={"*": "empty"})[1]
    predictor = load(archive.root)
    assert predictor.contract == make_contract()
    rows: dict[str, list[Any]] = {name: [1, 2] for name in predictor.contract.columns}
    dense, kjt = predictor.contract.apply({**rows, "f_item": [None, 3], "f_cat": [None, None]})
    assert [ids.tolist() for ids in kjt["f_item"].to_dense()] == [[5], [3]]
    assert kjt["f_cat"].lengths().tolist() == [0, 0]
    predictor.predict(dense, kjt)
    with pytest.raises(InputError, match="'f_user', row 1: no value"):
        predictor.contract.apply({**rows, "f_user": [1, None]})
    less = {name: rows[name] for name in rows if name not in ("f_item", "f_cat")}
    with pytest.raises(
        InputError, match=r"reads columns 'f_item', 'f_cat', which are missing; .*None \(null\) in rows"
    ):
        predictor.contract.apply(less)


def test_ids_and_raw_rows_are_out_of_range_alike(tmp_path: Path) -> None:
    options: dict[str, Any] = {"out_of_range": {"f_cat": "default_row", "f_item": "reject"}}
    archive = make_archive(tmp_path, contract=make_contract(), **options)[1]
    assert policies(archive) == {
        "f_user": ("reject", "reject", 0),
        "f_item": ("reject", "reject", 9),
        "f_hist": ("reject", "default_row", 0),
        "f_cat": ("reject", "default_row", 0),
    }
    contract = FeatureContract.from_dict(archive.manifest.contract or {})
    assert [f.out_of_range for f in contract.sparse] == [policies(archive)[f.name][1] for f in contract.sparse]
    assert [f.missing for f in contract.sparse] == [f.missing for f in make_contract().sparse]


def test_archives_from_before_0_2_0_keep_their_policy(tmp_path: Path) -> None:
    """Archives from when every feature could be left out."""
    archive = copy_with_missing(make_archive(tmp_path)[1].root, tmp_path / "before.rqa", "empty")
    predictor, dense = load(archive), torch.randn(2, 3)
    short, whole = bag(f_user=[[1], [2]]), full(f_user=[[1], [2]])
    expected = predictor.predict(dense, whole)["output"]
    assert torch.equal(predictor.predict(dense, short)["output"], expected)
    plan = plan_archive(predictor.manifest, world_size=2)
    resharded = reshard_archive(archive, plan, tmp_path / "two.rqa", progress=False)
    assert policies(resharded) == policies(open_archive(archive)) == dict.fromkeys(RANKER_ROWS, ("empty", "reject", 0))
    torch.manual_seed(8)
    new = tmp_path / "new"
    new.mkdir()
    model = Ranker()
    make_delta(archive, model, save_weights(model, new), tmp_path / "new.rqd", progress=False)
    predictor.apply_delta(tmp_path / "new.rqd")
    changed = predictor.predict(dense, short)["output"]
    assert torch.equal(changed, predictor.predict(dense, whole)["output"]) and not torch.equal(changed, expected)


def test_reshard_and_delta_keep_the_policies_of_the_export(tmp_path: Path) -> None:
    model, archive = make_archive(tmp_path, missing={"f_hist": "empty"}, out_of_range={"f_cat": "default_row"})
    plan = plan_archive(archive.manifest, world_size=1)
    resharded = reshard_archive(archive.root, plan, tmp_path / "one.rqa", progress=False)
    assert policies(resharded) == policies(archive)
    make_delta(archive.root, model, save_weights(model, tmp_path), tmp_path / "same.rqd", progress=False)
    predictor = load(archive.root)
    predictor.apply_delta(tmp_path / "same.rqd")
    predictor.predict(torch.zeros(1, 3), bag(f_user=[[1]], f_item=[[2]], f_cat=[[400]]))
    with pytest.raises(InputError, match="missing features: 'f_item'; got"):
        predictor.predict(torch.zeros(1, 3), bag(f_user=[[1]], f_cat=[[3]]))
