"""The contract: values row by row against plain Python, JSON round trips, and an error that names each refused value."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from recinfer.data.contract import (
    DenseFeature,
    FeatureContract,
    Hash,
    Identity,
    Label,
    SparseFeature,
    Vocabulary,
)
from recinfer.data.tokens import hash_tokens, split_tokens
from recinfer.errors import ConfigError, InputError

FULL = FeatureContract(
    sparse=(
        SparseFeature("city", Hash(1000, seed=3)),
        SparseFeature("genres", Vocabulary(("Comedy", "Drama", "Ünïcödé")), column="class", separator="|"),
        SparseFeature("age", Identity(100), missing=99, out_of_range="default_row", default_row=98),
        SparseFeature("rare", Vocabulary(("a", "b"), out_of_vocabulary=0), missing="reject"),
    ),
    dense=(
        DenseFeature("clicks", clip_min=0.0, log=True),
        DenseFeature("price", column="cost", fill=5.0, clip_min=-10.0, clip_max=10.0, shift=1.0, scale=2.0),
    ),
    label=Label("rating", 4.0),
)
ROWS: dict[str, Any] = {
    "city": ["Rome", None, "", "Oslo"],
    "class": ["Drama|Comedy", "Western", None, "Ünïcödé||Drama"],
    "age": [7, None, 200, -1],
    "rare": ["b", "a", "z", "b"],
    "clicks": [3, None, -4, float("nan")],
    "cost": ["1.5", "", "100", "-100"],
    "rating": [5, 3.5, "4", 0],
    "unused": [object()] * 4,
}


def bag(kjt: Any, name: str) -> list[list[int]]:
    return [row.tolist() for row in kjt[name].to_dense()]


def test_raw_rows_become_inputs() -> None:
    counters: dict[str, int] = {}
    dense, kjt = FULL.apply(ROWS, counters)
    assert kjt.keys() == ["city", "genres", "age", "rare"]
    assert kjt.stride() == 4
    assert kjt.values().dtype == torch.int64
    assert kjt.lengths().dtype == torch.int32
    rome, oslo = hash_tokens(split_tokens(["Rome", "Oslo"], "city"), 3, 1000).tolist()
    assert bag(kjt, "city") == [[rome], [], [], [oslo]]
    assert bag(kjt, "genres") == [[1, 0], [3], [], [2, 1]]
    assert bag(kjt, "age") == [[7], [99], [98], [98]]
    assert counters == {"age": 2}
    assert bag(kjt, "rare") == [[1], [0], [0], [1]]
    assert dense.dtype == torch.float32
    expected = [[math.log(4), 0.25], [0, 2.0], [0, 4.5], [0, -5.5]]
    torch.testing.assert_close(dense, torch.tensor(expected))
    assert FULL.labels(ROWS).tolist() == [1.0, 0.0, 1.0, 0.0]


def test_one_row_at_a_time_gives_the_same() -> None:
    dense, kjt = FULL.apply(ROWS)
    for row in range(4):
        one_dense, one = FULL.apply({name: values[row : row + 1] for name, values in ROWS.items()})
        assert torch.equal(one_dense, dense[row : row + 1])
        for name in kjt.keys():  # noqa: SIM118 - no dict
            assert bag(one, name) == bag(kjt, name)[row : row + 1]


def test_sizes_and_names_are_what_a_model_is_built_from() -> None:
    assert FULL.num_dense == 2
    assert FULL.feature_names == ("city", "genres", "age", "rare")
    assert [f.num_embeddings for f in FULL.sparse] == [1000, 4, 100, 2]
    assert FULL.columns == ("city", "class", "age", "rare", "clicks", "cost")


def test_no_rows() -> None:
    dense, kjt = FULL.apply({name: [] for name in FULL.columns})
    assert dense.shape == (0, 2)
    assert kjt.stride() == 0
    assert kjt.lengths().numel() == 0


@pytest.mark.parametrize(
    "values",
    [
        [7, 12, 7],
        [7.0, 12.0, 7.0],
        ["7", "12", "7"],
        (7, "12", 7.0),
        np.array([7, 12, 7], dtype=np.int32),
        np.array([7, 12, 7], dtype=np.float32),
        np.array(["7", "12", "7"]),
        np.array([b"7", b"12", b"7"]),
        np.array([7, "12", np.int64(7)], dtype=object),
        np.array(["7", "12", "7"], dtype=np.dtypes.StringDType()),
    ],
)
def test_numbers_and_their_text_are_the_same_value(values: Any) -> None:
    contract = FeatureContract(
        sparse=(
            SparseFeature("h", Hash(1000), column="x"),
            SparseFeature("v", Vocabulary(("12", "7")), column="x"),
            SparseFeature("i", Identity(20), column="x"),
        ),
        dense=(DenseFeature("d", column="x"),),
    )
    dense, kjt = contract.apply({"x": values})
    seven, twelve = hash_tokens(split_tokens(["7", "12"], "x"), 0, 1000).tolist()
    assert kjt["h"].values().tolist() == [seven, twelve, seven]
    assert kjt["v"].values().tolist() == [1, 0, 1]
    assert kjt["i"].values().tolist() == [7, 12, 7]
    assert dense.flatten().tolist() == [7, 12, 7]


@pytest.mark.parametrize("missing", [None, "", float("nan"), np.nan, np.float32("nan")])
def test_every_empty_value_is_missing(missing: Any) -> None:
    contract = FeatureContract((SparseFeature("x", Hash(10)),), (DenseFeature("y", fill=-1.0),))
    dense, kjt = contract.apply({"x": ["a", missing], "y": [2, missing]})
    assert kjt.lengths().tolist() == [1, 0]
    assert dense.flatten().tolist() == [2.0, -1.0]


def test_floats_that_are_no_integers_keep_their_text() -> None:
    contract = FeatureContract((SparseFeature("x", Vocabulary(("1.5", "1e+300", "9007199254740993"))),))
    _, kjt = contract.apply({"x": [1.5, 1e300, 2.0]})
    assert kjt.values().tolist() == [0, 1, 3]
    _, kjt = contract.apply({"x": [2**53 + 1, 2**70, True]})
    assert kjt.values().tolist() == [2, 3, 3]


@settings(max_examples=60)
@given(st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6), st.integers(-1000, 1000)), max_size=20))
def test_dense_values_against_plain_python(values: list[Any]) -> None:
    feature = DenseFeature("x", fill=2.0, clip_min=-0.5, clip_max=1e5, log=True, shift=0.3, scale=1.7)
    dense, _ = FeatureContract(dense=(feature,)).apply({"x": values})
    expected = [(math.log1p(min(max(2.0 if v is None else v, -0.5), 1e5)) - 0.3) / 1.7 for v in values]
    np.testing.assert_allclose(dense[:, 0].numpy(), expected, rtol=1e-6, atol=1e-6)


# ---- JSON


def test_json_and_back() -> None:
    text = json.dumps(FULL.to_dict(), allow_nan=False)
    again = FeatureContract.from_dict(json.loads(text))
    assert again == FULL
    for a, b in zip(again.apply(ROWS), FULL.apply(ROWS)):
        assert str(a) == str(b)
    assert FeatureContract.from_dict(FeatureContract(dense=(DenseFeature("x"),)).to_dict()).label is None


def broken(**change: Any) -> dict[str, Any]:
    return json.loads(json.dumps(FULL.to_dict())) | change


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "format 'list', expected 'recinfer.contract/1'"),
        (broken(format="recinfer.contract/2"), "format 'recinfer.contract/2'"),
        (broken(more=1), r"keys \['dense', 'format', 'label', 'more', 'sparse'\]"),
        (broken(sparse={}), "sparse and dense are lists"),
        (broken(sparse=[3]), "sparse feature: got 3"),
        (broken(sparse=[{"name": "x", "transform": {"kind": "exec"}}]), "transform 'exec'; known: hash, vocabulary"),
        (broken(sparse=[{"name": "x", "transform": {"kind": ["hash"]}}]), "transform"),
        (broken(sparse=[{"name": "x", "transform": {"kind": "hash"}}]), "num_buckets"),
        (broken(sparse=[{"name": "x", "transform": {"kind": "hash", "num_buckets": 5, "salt": 1}}]), r"\['salt'\]"),
        (broken(sparse=[{"name": "x", "transform": {"kind": "vocabulary", "tokens": "abc"}}]), "expected a list"),
        (broken(sparse=[{"name": "x", "transform": {"kind": "vocabulary", "tokens": 3}}]), "transform vocabulary"),
        (broken(dense=[{"name": "x", "mean": 1}]), r"unknown keys \['mean'\]"),
        (broken(dense=[{}]), "name"),
        (broken(label={"column": ""}), "label: column is ''"),
        (broken(sparse=[], dense=[]), "no features"),
    ],
)
def test_other_json_is_refused(data: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FeatureContract.from_dict(data)


# ---- invalid contracts


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Hash(0), "num_buckets is 0"),
        (lambda: Hash(5, seed=-1), "seed is -1"),
        (lambda: Hash(True), "num_buckets is True"),
        (lambda: Identity(2.0), "num_embeddings is 2.0"),  # type: ignore[arg-type]
        (lambda: Vocabulary(("a", "b", "a")), "token 'a' occurs twice"),
        (lambda: Vocabulary(("a", "")), "token ''"),
        (lambda: Vocabulary(("a",), out_of_vocabulary=2), "out_of_vocabulary is 2"),
        (lambda: SparseFeature("", Hash(3)), "name is ''"),
        (lambda: SparseFeature("x", "hash"), "transform 'hash'"),  # type: ignore[arg-type]
        (lambda: SparseFeature("x", Hash(3), separator=""), "separator is ''"),
        (lambda: SparseFeature("x", Hash(3), separator="\0"), "without NUL"),
        (lambda: SparseFeature("x", Hash(3), missing=3), "missing .* is 3"),
        (lambda: SparseFeature("x", Hash(3), missing="drop"), "missing"),  # type: ignore[arg-type]
        (lambda: SparseFeature("x", Hash(3), out_of_range="clip"), "out_of_range 'clip'"),  # type: ignore[arg-type]
        (lambda: SparseFeature("x", Hash(3), default_row=3), "default_row is 3"),
        (lambda: DenseFeature("x", fill=math.nan), "fill is nan"),
        (lambda: DenseFeature("x", clip_min=2, clip_max=1), "clip_min 2 is above clip_max 1"),
        (lambda: DenseFeature("x", log=True), "needs clip_min above -1"),
        (lambda: DenseFeature("x", scale=0), "scale is 0"),
        (lambda: Label("y", threshold=math.inf), "threshold is inf"),
        (lambda: FeatureContract((SparseFeature("x", Hash(3)), SparseFeature("x", Hash(4)))), "duplicate names x"),
        (lambda: FeatureContract((DenseFeature("x"),)), "got a DenseFeature, expected SparseFeature"),  # type: ignore[arg-type]
        (lambda: FeatureContract(), "no features"),
    ],
)
def test_inconsistent_contract_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


# ---- refused rows


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"city": None}, "reads column 'city', which is missing; the input has class, age"),
        ({"city": ["Rome"]}, "columns differ in rows: 'city' has 1, .* has 4"),
        ({"city": "Rome"}, "column 'city': got one str"),
        ({"city": [["Rome"], [], [], []]}, "column 'city': holds values of type list"),
        ({"city": ["Rome", object(), "", ""]}, "column 'city', row 1: got <object"),
        ({"city": np.zeros((4, 2))}, r"column 'city': has shape \(4, 2\)"),
        ({"city": np.zeros(4, dtype=complex)}, "column 'city': dtype complex"),
        ({"age": ["1", "two", "3", "4"]}, "column 'age', row 1: got 'two', expected a whole number"),
        ({"age": [1, 2.5, 3, 4]}, "column 'age', row 1: got '2.5'"),
        ({"rare": ["a", "b", None, "a"]}, "sparse feature 'rare', row 2: no value in column 'rare'"),
        ({"cost": ["1", "2", "cheap", "4"]}, "column 'cost', row 2: got 'cheap' .* expected a number"),
        ({"cost": ["1", 10**400, None, 4.5]}, r"column 'cost', row 1: got 10+ \(int\), expected a number"),
        ({"age": [1, 10**400, 2.5, 4]}, r"column 'age', row 1: got '10+'"),
        ({"clicks": [1, 2, 3, math.inf]}, "dense feature 'clicks', row 3: becomes inf"),
    ],
)
def test_rows_that_a_feature_refuses_are_named(change: dict[str, Any], message: str) -> None:
    rows = {name: values for name, values in (ROWS | change).items() if values is not None}
    with pytest.raises(InputError, match=message):
        FULL.apply(rows)


def test_ids_outside_their_table_are_named() -> None:
    contract = FeatureContract((SparseFeature("x", Identity(10), separator=","),))
    with pytest.raises(InputError, match=r"sparse feature 'x', row 2: id 10 is outside its table of 10 rows \(2 such"):
        contract.apply({"x": ["1", "2,3", "4,10", "-1"]})


def test_a_dense_value_that_must_be_there() -> None:
    with pytest.raises(InputError, match="dense feature 'x', row 1: no value"):
        FeatureContract(dense=(DenseFeature("x", fill=None),)).apply({"x": [1, None]})


def test_invalid_labels() -> None:
    contract = FeatureContract(dense=(DenseFeature("x"),), label=Label("y"))
    assert contract.labels({"y": ["0", "1", 1]}).tolist() == [0, 1, 1]
    with pytest.raises(InputError, match=r"label 'y', row 1: got 2\.0, expected 0 or 1"):
        contract.labels({"y": [0, 2]})
    with pytest.raises(InputError, match=r"label 'y', row 0: got nan, expected 0 or 1"):
        contract.labels({"y": [None, 1]})
    with pytest.raises(ConfigError, match="has no label"):
        FeatureContract(dense=(DenseFeature("x"),)).labels({"y": [1]})


def test_a_pandas_frame_is_columns_too() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({name: ROWS[name] for name in FULL.columns})
    for a, b in zip(FULL.apply(frame), FULL.apply(ROWS)):
        assert str(a) == str(b)
