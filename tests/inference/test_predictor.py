"""The predictor against the live model: any order, subsets, absent features, policies, threads, bad input."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from recinfer.archive.reader import Archive
from recinfer.errors import InputError, NotFoundError
from recinfer.inference.predictor import Predictor, load
from recinfer.inference.together import PredictInputs
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from tests.archive.models import EVERYTHING_ROWS, RANKER_ROWS, Batch, Ranker, make_archive, make_request
from tests.inference.test_export import make_contract


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Predictor]:
    """FP32, so that the archive and the live model agree to float rounding."""
    torch.manual_seed(1)
    model, archive = make_archive(tmp_path_factory.mktemp("exact"), model=Ranker(), precision=DataType.FP32)
    return model, load(archive.root)


@pytest.fixture(scope="module")
def with_policies(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Archive]:
    torch.manual_seed(2)
    folder = tmp_path_factory.mktemp("policies")
    missing: dict[str, str | int] = {"f_item": 5, "f_hist": "empty"}
    return make_archive(folder, model=Ranker(), precision=DataType.FP32, contract=make_contract(), missing=missing)


def bag(**features: list[list[int]]) -> KeyedJaggedTensor:
    """A request from lists of lists of ids."""
    values = torch.tensor([i for lists in features.values() for ids in lists for i in ids], dtype=torch.int64)
    lengths = torch.tensor([len(ids) for lists in features.values() for ids in lists])
    return KeyedJaggedTensor(list(features), values, lengths=lengths)


def full(**features: list[list[int]]) -> KeyedJaggedTensor:
    """The same, of all of the ranker's features; those not given are empty."""
    batch = len(next(iter(features.values())))
    return bag(**{name: features.get(name, [[]] * batch) for name in RANKER_ROWS})


@pytest.mark.parametrize("batch", [1, 2, 33])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_predict_is_the_live_model(exact: tuple[nn.Module, Predictor], batch: int, dtype: torch.dtype) -> None:
    model, predictor = exact
    kjt, dense = make_request(RANKER_ROWS, batch, seed=batch), torch.randn(batch, 3)
    given = KeyedJaggedTensor(kjt.keys(), kjt.values().to(dtype), lengths=kjt.lengths().to(dtype))
    with torch.no_grad():
        expected = model(dense, kjt)
        pooled = model.ebc(kjt)
    torch.testing.assert_close(predictor.predict(dense, given)["output"], expected, atol=2e-6, rtol=1e-5)
    found = predictor.lookup(given)
    assert found.keys() == pooled.keys() == ["f_user", "f_item", "f_hist", "f_cat"]
    assert found.pooled is not None
    torch.testing.assert_close(found.pooled.values(), pooled.values(), atol=1e-6, rtol=1e-6)


def test_an_empty_batch(exact: tuple[nn.Module, Predictor]) -> None:
    kjt = KeyedJaggedTensor(
        list(RANKER_ROWS), torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64)
    )
    assert exact[1].predict(torch.empty(0, 3), kjt)["output"].shape == (0,)
    found = exact[1].lookup(kjt).pooled
    assert found is not None
    assert found.values().shape == (0, 64)


def test_every_kind_of_module_predicts(everything: tuple[nn.Module, Archive]) -> None:
    model, archive = everything
    predictor = load(archive.root)
    assert predictor.engine == "torch"
    for batch in (1, 5):
        kjt, dense = make_request(EVERYTHING_ROWS, batch, seed=batch), torch.randn(batch, 2)
        expected = model(Batch(dense, kjt))
        answer = predictor.predict(dense, kjt)
        assert list(answer) == ["click", "both"]
        for name, value in answer.items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)
        found = predictor.lookup(kjt)
        assert found.keys() == ["f_user", "f_recent", "f_older", "f_word"]
        assert isinstance(found["f_word"], JaggedTensor)
        words = model.words(kjt)["f_word"]
        assert torch.equal(found["f_word"].values(), words.values())
        assert torch.equal(found["f_word"].lengths(), words.lengths())
        torch.testing.assert_close(found["f_recent"], model.recent(kjt)["f_recent"], atol=1e-6, rtol=1e-5)


def test_bags_longer_than_position_weights_are_refused(everything: tuple[nn.Module, Archive]) -> None:
    predictor = load(everything[1].root)
    with pytest.raises(
        InputError, match="'f_recent', sample 1: got 4 ids, expected at most 3, its number of position weights"
    ):
        predictor.lookup(bag(f_user=[[1], []], f_recent=[[], [1, 2, 3, 4]]))
    predictor.lookup(bag(f_user=[[1, 2, 3, 4, 5, 6, 7]], f_recent=[[1, 2, 3]]))


def test_any_order(exact: tuple[nn.Module, Predictor]) -> None:
    kjt, dense = make_request(RANKER_ROWS, 6), torch.randn(6, 3)
    order = [2, 0, 3, 1]
    permuted = kjt.permute(order)
    assert permuted.keys() != kjt.keys()
    assert torch.equal(exact[1].predict(dense, kjt)["output"], exact[1].predict(dense, permuted)["output"])
    a, b = exact[1].lookup(kjt), exact[1].lookup(permuted)
    assert a.keys() == b.keys()
    assert a.pooled is not None and b.pooled is not None
    assert torch.equal(a.pooled.values(), b.pooled.values())


@pytest.mark.parametrize("names", [["f_cat"], ["f_hist", "f_user"], ["f_item", "f_cat", "f_hist"]])
def test_lookup_of_a_subset(exact: tuple[nn.Module, Predictor], names: list[str]) -> None:
    kjt = make_request(RANKER_ROWS, 4)
    whole = exact[1].lookup(kjt)
    part = exact[1].lookup(kjt.permute([kjt.keys().index(name) for name in names]))
    assert part.keys() == [name for name in RANKER_ROWS if name in names]
    for name in names:
        assert torch.equal(part[name], whole[name])  # type: ignore[arg-type]


def test_lookup_of_one_module_of_several(everything: tuple[nn.Module, Archive]) -> None:
    predictor = load(everything[1].root)
    found = predictor.lookup(bag(f_word=[[1, 2], []]))
    assert found.pooled is None
    assert found.keys() == ["f_word"]
    assert found["f_word"].values().shape == (2, 5)  # type: ignore[union-attr]
    with pytest.raises(NotFoundError, match=r"'f_user'.*has f_word"):
        found["f_user"]


def test_a_prediction_needs_every_feature(exact: tuple[nn.Module, Predictor]) -> None:
    """A forgotten feature is not an empty one: the answer would be wrong without an error."""
    predictor, dense = exact[1], torch.randn(2, 3)
    half = bag(f_cat=[[3, 4], []], f_user=[[1], [2]])
    said = r"^missing features: 'f_item', 'f_hist'; got f_cat, f_user\. .*empty list for a sample without ids.* --missing f_item=empty"
    with pytest.raises(InputError, match=said):
        predictor.predict(dense, half)
    # Features of a context count as given.
    rest = bag(f_item=[[7]], f_hist=[[]])
    whole = full(f_cat=[[3, 4], []], f_user=[[1], [2]], f_item=[[7], [7]])
    assert torch.equal(predictor.predict(dense, half, rest)["output"], predictor.predict(dense, whole)["output"])
    with pytest.raises(InputError, match=r"^missing features: 'f_hist'; got f_cat, f_user, f_item"):
        predictor.predict(dense, half, bag(f_item=[[7]]))
    # If requests share a run, only the one with missing features fails.
    refused, answer = predictor.predict_many([PredictInputs(dense, half), PredictInputs(dense, whole)])
    assert isinstance(refused, InputError) and str(refused).startswith("missing features: 'f_item', 'f_hist'; got")
    assert isinstance(answer, dict) and len(answer["output"]) == 2
    assert predictor.lookup(half).keys() == ["f_user", "f_cat"]


def test_a_dropped_model_needs_no_garbage_collector(exact: tuple[nn.Module, Predictor]) -> None:
    """Its pages stay mapped else until one runs, on an idle server for long; also after a request with an error."""
    root = exact[1].archive.root
    half, whole = bag(f_cat=[[3]], f_user=[[1]]), full(f_cat=[[3]], f_user=[[1]])
    dense = torch.randn(1, 3)
    load(root)  # what the first one imports
    gc.collect()
    gc.disable()
    try:
        predictor = load(root)
        dropped = weakref.ref(predictor)
        predictor.predict_many([PredictInputs(dense, half), PredictInputs(dense, whole)])
        del predictor
        assert dropped() is None
    finally:
        gc.enable()


def test_policies(with_policies: tuple[nn.Module, Archive]) -> None:
    model, archive = with_policies
    predictor = load(archive.root)
    dense = torch.randn(2, 3)
    # f_item absent: id 5 in every sample. f_hist absent: empty. Ids out of range: rows 9 (f_item) and 0 (f_hist).
    expected = model(dense, bag(f_user=[[1], [2]], f_item=[[5], [5]], f_hist=[[], []], f_cat=[[3], []]))
    answer = predictor.predict(dense, bag(f_user=[[1], [2]], f_cat=[[3], []]))["output"]
    torch.testing.assert_close(answer, expected, atol=2e-6, rtol=1e-5)
    assert predictor.replaced_ids == 0
    strange = bag(f_user=[[1], [2]], f_item=[[1201], [7]], f_hist=[[-1, 3], [1 << 40]], f_cat=[[], [3]])
    plain = bag(f_user=[[1], [2]], f_item=[[9], [7]], f_hist=[[0, 3], [0]], f_cat=[[], [3]])
    torch.testing.assert_close(predictor.predict(dense, strange)["output"], model(dense, plain), atol=2e-6, rtol=1e-5)
    assert predictor.replaced_ids == 3
    with pytest.raises(InputError, match="missing features: 'f_user', 'f_cat'; got f_hist"):
        predictor.predict(dense, bag(f_hist=[[3], []]))
    assert predictor.lookup(bag(f_cat=[[3], []])).keys() == ["f_cat"]  # lookup takes a subset whatever the policy
    with pytest.raises(InputError, match="f_user"):
        predictor.lookup(bag(f_user=[[53]], f_item=[[1]]))


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (bag(f_user=[[1]], f_other=[[1]]), "unknown features 'f_other'; this model has f_user, f_item"),
        (bag(f_user=[[53]]), r"'f_user'.*53"),
        (bag(f_item=[[0, 1201]]), r"'f_item'.*1201"),
        (bag(f_cat=[[-1]]), r"'f_cat'.*-1"),
        (
            KeyedJaggedTensor(["f_user"], torch.tensor([1.0]), lengths=torch.tensor([1])),
            "ids are torch.float32 on cpu; expected int64 or int32",
        ),
        (
            KeyedJaggedTensor.from_parts_unchecked(
                ["f_user", "f_user"], torch.tensor([1, 1]), torch.tensor([1, 1]), stride=1
            ),
            "contains a name twice",
        ),
        (KeyedJaggedTensor.empty(values_dtype=torch.int64), "got none"),
        ({"f_user": [1.5]}, "expected integer ids"),
        ({"f_user": ([1], [0.5])}, r"weights\['f_user'\]: this feature takes no weights; features with weights: none"),
        (None, "got a NoneType, expected a KeyedJaggedTensor"),
    ],
)
def test_bad_features(exact: tuple[nn.Module, Predictor], features: KeyedJaggedTensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        exact[1].lookup(features)


@pytest.mark.parametrize(
    ("dense", "message"),
    [
        (torch.zeros(2, 4), r"got torch.float32 \[2, 4\]; expected float32 \[2, 3\]"),
        (torch.zeros(3, 3), r"\[3, 3\]; expected float32 \[2, 3\]"),
        (torch.zeros(6), r"\[6\]"),
        (torch.zeros(2, 3, dtype=torch.float64), "torch.float64"),
        (None, "dense is missing"),
        ([["x"] * 3] * 2, "rows of numbers"),
        (torch.tensor([[0, 0, 0], [0, float("nan"), 0]]), "sample 1, column 1 is nan"),
        (torch.tensor([[0, 0, float("inf")], [0, 0, float("-inf")]]), "sample 0, column 2 is inf"),
    ],
)
def test_bad_dense(exact: tuple[nn.Module, Predictor], dense: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        exact[1].predict(dense, full(f_user=[[1], [2]]))


def test_large_finite_dense_is_fine(exact: tuple[nn.Module, Predictor]) -> None:
    dense = torch.full((2, 3), 3e38)  # their sum is not finite
    exact[1].predict(dense, full(f_user=[[1], [2]]))


def test_strided_dense_is_fine(exact: tuple[nn.Module, Predictor]) -> None:
    dense = torch.randn(3, 2).t()
    kjt = full(f_user=[[1], [2]])
    assert torch.equal(exact[1].predict(dense, kjt)["output"], exact[1].predict(dense.contiguous(), kjt)["output"])


def test_dense_that_requires_a_gradient_is_fine(exact: tuple[nn.Module, Predictor]) -> None:
    dense, kjt = torch.randn(2, 3), full(f_user=[[1], [2]])
    expected = exact[1].predict(dense, kjt)["output"]
    assert torch.equal(exact[1].predict(dense.clone().requires_grad_(), kjt)["output"], expected)


def test_many_threads_give_what_one_gives(small: tuple[nn.Module, Archive]) -> None:
    predictor = load(small[1].root)
    requests = [(torch.randn(n, 3), make_request(RANKER_ROWS, n, seed=n)) for n in range(1, 30)]
    shuffled = [(dense, kjt.permute([3, 1, 0, 2])) for dense, kjt in requests]
    expected = [predictor.predict(*request)["output"] for request in requests]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(3):
            for given in (requests, shuffled):
                answers = list(pool.map(lambda request: predictor.predict(*request)["output"], given))
                assert all(torch.equal(a, b) for a, b in zip(answers, expected))


class Weighted(nn.Module):
    """Weighted tables, read by two modules under the same feature name."""

    def __init__(self) -> None:
        super().__init__()
        self.one = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(30, 4, "t", feature_names=["a"]),
                EmbeddingBagConfig(20, 4, "u", feature_names=["a"]),
            ],
            is_weighted=True,
        )
        self.two = EmbeddingCollection(tables=[EmbeddingConfig(25, 4, "v", feature_names=["a", "b"])])
        self.three = EmbeddingBagCollection(tables=[EmbeddingBagConfig(25, 4, "w", feature_names=["b"])])
        self.top = nn.Linear(12, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        self.two(features)
        return self.top(torch.cat([self.one(features).values(), self.three(features).values()], 1))


def test_weights_and_shared_names(tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, archive = make_archive(tmp_path, model=Weighted(), precision=DataType.FP32, ranks=2)
    predictor = load(archive.root)
    assert predictor.num_dense == 0
    plain = bag(a=[[1, 2], [19]], b=[[4], [5, 6]])
    kjt = KeyedJaggedTensor(plain.keys(), plain.values(), torch.rand(6), lengths=plain.lengths())
    torch.testing.assert_close(predictor.predict(None, kjt)["output"], model(kjt), atol=1e-6, rtol=1e-5)
    with pytest.raises(
        InputError, match=r"dense: got torch.float32 \[2, 1\]; this model takes no matrix.*leave dense out"
    ):
        predictor.predict(torch.ones(2, 1), kjt)
    found = predictor.lookup(kjt)
    assert found.keys() == ["a@t", "a@u", "b@three", "a", "b@two"]
    assert [f.name for f in predictor.features] == ["a@t", "a@u", "a", "b@two", "b@three"]
    ones = KeyedJaggedTensor(plain.keys(), plain.values(), torch.ones(6), lengths=plain.lengths())
    assert torch.equal(predictor.lookup(plain).pooled.values(), predictor.lookup(ones).pooled.values())
    some = KeyedJaggedTensor(
        plain.keys(), plain.values(), torch.tensor([2.0, 0.5, 3, 1, 1, 1]), lengths=plain.lengths()
    )
    asked = {"a": ([[1, 2], [19]], [[2, 0.5], 3]), "b": [[4], [5, 6]]}
    assert torch.equal(predictor.lookup(asked).pooled.values(), predictor.lookup(some).pooled.values())
    assert torch.equal(predictor.predict(None, asked)["output"], predictor.predict(None, some)["output"])
    with pytest.raises(InputError, match=r"weights\['b'\]: this feature takes no weights; features with weights: a"):
        predictor.lookup(asked | {"b": ([[4], [5, 6]], [[1], [1, 1]])})
    bad = KeyedJaggedTensor(plain.keys(), plain.values(), torch.full((6,), float("nan")), lengths=plain.lengths())
    with pytest.raises(InputError, match="feature 'a', sample 0: weight 0 is nan"):
        predictor.lookup(bad)
    with pytest.raises(InputError, match="feature 'a', sample 2: weight 1 is inf"):
        predictor.lookup({"a": ([[1], [], [2, 3]], [[1.0], [], [1.0, float("inf")]]), "b": [[4], [5], []]})
    with pytest.raises(InputError, match="id 22 is out of range"):
        predictor.lookup(KeyedJaggedTensor(["a"], torch.tensor([22]), torch.ones(1), lengths=torch.tensor([1])))


def test_preload_and_torch_engine(small: tuple[nn.Module, Archive]) -> None:
    kjt, dense = make_request(RANKER_ROWS, 5), torch.randn(5, 3)
    expected = load(small[1].root).predict(dense, kjt)["output"]
    other = load(small[1].root, preload=True, check_hashes=True, dense_engine="torch", dense_threads=2)
    assert other.engine == "torch"
    torch.testing.assert_close(other.predict(dense, kjt)["output"], expected, atol=1e-5, rtol=1e-5)


def test_attributes_of_a_predictor(small: tuple[nn.Module, Archive]) -> None:
    predictor = load(small[1].root)
    assert predictor.num_dense == 3
    assert predictor.contract is None
    assert predictor.plan == small[1].plan
    assert [(f.name, f.table, f.rows, f.dim, f.pooled) for f in predictor.features] == [
        ("f_user", "users", 53, 12, True),
        ("f_item", "item", 1201, 16, True),
        ("f_hist", "item", 1201, 16, True),
        ("f_cat", "cats", 307, 20, True),
    ]
