"""The cut of a model's forward into embedding modules and dense part, and errors that name what cannot be cut."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from recinfer.archive.cut import Cut, cut_model
from recinfer.archive.leaves import find_leaves
from recinfer.errors import ConfigError
from recinfer.models.dlrm import DLRM, DLRMTrain
from recinfer.modules.crossnet import CrossNet, LowRankCrossNet, VectorCrossNet
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.feature_processor_ import FeatureProcessor
from recinfer.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from tests.archive.models import Batch, Everything, Ranker


def tables(name: str = "t", features: tuple[str, ...] = ("a", "b"), device: str = "cpu") -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(20, 4, name, feature_names=list(features))
    return EmbeddingBagCollection(tables=[config], device=torch.device(device))


class Model(nn.Module):
    """A model whose forward is given."""

    def __init__(self, forward: Callable[..., Any], width: int = 8 + 3, ebc: nn.Module | None = None) -> None:
        super().__init__()
        self.ebc = tables() if ebc is None else ebc
        self.other = tables("u", ("c",))
        self.linear = nn.Linear(width, 2)
        self.norm = nn.LayerNorm(3)
        self._forward = forward

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        function = self._forward

        def bound(*args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        import inspect

        signature = inspect.signature(function)
        bound.__signature__ = signature.replace(parameters=list(signature.parameters.values())[1:])  # type: ignore[attr-defined]
        return bound


def cut(model: nn.Module, num_dense: int | None = None, batches: tuple[Any, ...] = ()) -> Cut:
    found = cut_model(model, find_leaves(model), lambda body: None, batches, num_dense)
    assert found is not None
    return found


def kjt(*names: str) -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 0, 1] * len(names))
    return KeyedJaggedTensor(list(names), torch.arange(3 * len(names)), lengths=lengths)


def head(self: Any, dense: Tensor, pooled: KeyedTensor) -> Tensor:
    return self.linear(torch.cat([dense, pooled.values()], dim=1))


def direct(self, dense, features):
    return head(self, dense, self.ebc(features))


def attributes(self, batch):
    return head(self, batch.inputs.dense, self.ebc(batch.inputs.ids))


def items(self, batch):
    return head(self, batch["dense"], self.ebc(batch["ids"]))


def keywords(self, *, features, dense, labels=None):
    assert labels is None
    return head(self, dense, self.ebc(features=features))


def methods(self, dense, features):
    return head(self, dense.float().clamp(min=0), self.ebc(features))


def arithmetic(self, dense, features):
    return head(self, 1 + 2 * dense, self.ebc(features))


def functions(self, dense, features):
    return head(self, torch.log1p(dense.abs()), self.ebc(features))


def pieces(self, dense, features):
    pooled = self.ebc(features)
    parts = [pooled[key] for key in pooled.keys()]  # noqa: SIM118 - not a dict
    parts += KeyedTensor.regroup([pooled], [["b"], ["a"]])
    return self.linear(torch.cat([dense, *parts[:2]], dim=1))


@pytest.mark.parametrize(
    "forward", [direct, attributes, items, keywords, methods, arithmetic, functions, pieces], ids=lambda f: f.__name__
)
def test_forward_may_be_written_in_many_ways(forward: Callable[..., Any]) -> None:
    # Two leaves are in Model; only the called one counts, so take the other away.
    model = Model(forward)
    del model.other
    found = cut(model)
    assert found.num_dense == 3
    assert found.dense.inputs == ["dense", "pooled_0"]
    assert found.outputs == {"output": (2,)}
    dense, pooled = torch.randn(3, 3), torch.randn(3, 8)
    expected = {
        "methods": lambda x: x.clamp(min=0),
        "arithmetic": lambda x: 1 + 2 * x,
        "functions": lambda x: torch.log1p(x.abs()),
    }.get(forward.__name__, lambda x: x)
    answer = found.dense.module(dense, pooled)["output"]
    assert torch.equal(answer, model.linear(torch.cat([expected(dense), pooled], dim=1)))


def test_the_cut_gives_what_the_model_gives() -> None:
    model = Ranker().eval()
    found = cut(model)
    features = kjt("f_user", "f_item", "f_hist", "f_cat")
    dense = torch.randn(3, 3)
    assert torch.equal(found.dense.module(dense, model.ebc(features).values())["output"], model(dense, features))


def test_every_kind_of_module() -> None:
    model = Everything().eval()
    leaves = find_leaves(model)
    assert [leaf.path for leaf in leaves] == ["ebc", "recent._embedding_bag_collection", "words"]
    assert leaves[1].about.path == "recent"
    assert leaves[1].position_weights == {
        "f_recent": ("recent._feature_processors.f_recent.position_weight", 3),
        "f_older": ("recent._feature_processors.f_older.position_weight", 5),
    }
    found = cut(model)
    features = kjt("f_user", "f_recent", "f_older", "f_word")
    dense = torch.randn(3, 2)
    words = model.words(features)["f_word"]
    embeddings = [model.ebc(features).values(), model.recent(features).values(), words.values(), words.lengths()]
    expected = model(Batch(dense, features))
    for name, value in found.dense.module(dense, *embeddings).items():
        assert torch.equal(value, expected[name])


def test_the_model_is_not_changed_and_tables_are_not_copied() -> None:
    model = Ranker()
    before = {key: value.data_ptr() for key, value in model.state_dict().items()}
    found = cut(model)
    assert {key: value.data_ptr() for key, value in model.state_dict().items()} == before
    assert isinstance(model.ebc, EmbeddingBagCollection)
    assert not any("ebc" in key for key in found.dense.module.state_dict())


def test_dlrm_and_its_training_form() -> None:
    ebc = EmbeddingBagCollection(tables=[EmbeddingBagConfig(20, 4, "t", feature_names=["a", "b"])])
    dlrm = DLRM(ebc, 5, [8, 4], [8, 1])
    found = cut(dlrm)
    assert (found.num_dense, found.outputs) == (5, {"output": (1,)})
    with pytest.raises(ConfigError, match=r"batch\.dense_features' and 'batch\.labels'"):
        cut(DLRMTrain(dlrm))


def test_two_inputs_for_two_modules() -> None:
    def forward(self, dense, one, two):
        return self.linear(torch.cat([dense, self.ebc(one).values(), self.other(two).values()], 1))

    assert cut(Model(forward, 8 + 4 + 3)).dense.inputs == ["dense", "pooled_0", "pooled_1"]


def test_one_embedding_module_has_no_dense_part() -> None:
    ebc = tables()
    assert cut_model(ebc, find_leaves(ebc), lambda body: None) is None


def test_no_dense_input() -> None:
    def forward(self, features):
        return self.linear(self.ebc(features).values())

    model = Model(forward, 8)
    del model.other
    found = cut(model)
    assert (found.num_dense, found.dense.inputs) == (0, ["pooled_0"])
    with pytest.raises(ConfigError, match="uses no dense tensor"):
        cut(model, 3)


class Two(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.parametrize(
    ("wrap", "names"),
    [
        (lambda y: {"p": y, "q": y[:, :1]}, ["p", "q"]),
        (lambda y: (y, y > 0), ["output_0", "output_1"]),
        (lambda y: Two(y, y), ["first", "second"]),
        (lambda y: KeyedTensor(["k", "l"], [1, 1], y), ["k", "l"]),
        (lambda y: {"a": [y, y], "b": {"c": y, "none": None}}, ["a_0", "a_1", "b.c"]),
    ],
)
def test_outputs(wrap: Callable[[Tensor], Any], names: list[str]) -> None:
    model = Model(lambda self, dense, features: wrap(head(self, dense, self.ebc(features))))
    del model.other
    found = cut(model)
    assert list(found.outputs) == names
    assert all(v.dtype == torch.float32 for v in found.dense.module(torch.randn(2, 3), torch.randn(2, 8)).values())


def test_an_integer_that_float32_cannot_hold_is_not_another_number() -> None:
    model = Model(lambda self, dense, features, ids: (head(self, dense, self.ebc(features)), ids))
    del model.other
    found = cut(model, batches=((torch.randn(3, 3), kjt("a", "b"), torch.tensor([3, 4, 2**24])),))
    raw = torch.tensor([-(2**24), 2**24 + 1, -(2**63)])
    tensors = {"dense": torch.randn(3, 3), "pooled_0": torch.randn(3, 8), "ids": raw}
    answer = found.dense.module(*(tensors[name] for name in found.dense.inputs))["output_1"]
    assert answer[0] == -(2**24)
    assert answer[1:].isnan().all()


def changed_ids(self, dense, features):
    ids = KeyedJaggedTensor(features.keys(), features.values() % 20, lengths=features.lengths())
    return head(self, dense, self.ebc(ids))


def read_ids(self, dense, features):
    return head(self, dense, self.ebc(features)) * features.lengths().sum()


def used_values(self, dense, features):
    return head(self, dense, self.ebc(features)) + features.values().sum()


def loop(self, batch):
    dense, features = batch
    return head(self, dense, self.ebc(features))


def normed(self, dense, features):
    return self.ebc(features).values()[:, :3] + self.norm(dense)


def two_tensors(self, dense, features, more):
    return head(self, dense + more, self.ebc(features))


@pytest.mark.parametrize(
    ("forward", "message", "arguments"),
    [
        (changed_ids, "forward calls features.keys; if 'features' is a KeyedJaggedTensor", 0),
        (read_ids, "forward calls features.lengths; if 'features' is a KeyedJaggedTensor", 0),
        (used_values, "forward uses features.values, of a tensor or a KeyedJaggedTensor", 0),
        (loop, "forward iterates over its input 'batch'", 1),
        (normed, "'dense' was taken for the dense input, because forward uses layer_norm with it", 0),
        (two_tensors, "forward uses two inputs as tensors, 'dense' and 'more'", 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_example_batch_is_asked_for_where_it_is_needed(
    forward: Callable[..., Any], message: str, arguments: int
) -> None:
    model = Model(forward)
    del model.other
    with pytest.raises(ConfigError, match=rf"{re.escape(message)}.*give an example batch \(recinfer export --inputs"):
        cut(model)
    dense, features = torch.randn(3, 3), kjt("a", "b")
    batch = [(dense, features), ((dense, features),), (dense, features, torch.randn(3, 3))][arguments]
    found = cut(model, batches=(batch,))
    assert found.outputs == {"output": (3 if forward is normed else 2,)}
    assert ("ids" in found.parts) == (forward is changed_ids)
    assert found.num_dense == (0 if forward is two_tensors else 3)


def loss(self, dense, features):
    return head(self, dense, self.ebc(features)).mean()


def text(self, dense, features):
    return {"a": [head(self, dense, self.ebc(features)), "hello"]}


def never(self, dense, features):
    return self.linear(torch.cat([dense, dense.new_zeros(dense.shape[0], 8)], 1))


def fails(self, dense, features):
    self.ebc(features)
    raise RuntimeError("no such luck")


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (loss, r"output 'output' of forward has shape \(\) for a batch of 3"),
        (text, "returns a str as 'a_1'"),
        (never, "never calls the embedding module 'ebc'"),
        (fails, "no such luck"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
def test_errors_name_the_place(forward: Callable[..., Any], message: str, given: bool) -> None:
    model = Model(forward)
    del model.other
    with pytest.raises(ConfigError, match=message):
        cut(model, 3, ((torch.randn(3, 3), kjt("a", "b")),) if given else ())


def test_one_module_called_with_two_inputs() -> None:
    def twice(self, dense, one, two):
        return head(self, dense, self.ebc(one)) + head(self, dense, self.ebc(two))

    model = Model(twice)
    del model.other
    assert cut(model).dense.inputs == ["dense", "pooled_0"]


class TwoCollections(nn.Module):
    """Two embedding modules that read one KeyedJaggedTensor."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = tables("t"), tables("u", ("c",))
        self.linear = nn.Linear(8 + 4 + 3, 2)


@pytest.mark.parametrize("arguments", ["sparse=None", "dense=None, sparse=None", "sparse, dense=None"])
def test_an_argument_whose_default_is_none_is_named(arguments: str) -> None:
    """A made batch leaves it out; the error spoke of a NoneType computed inside forward."""
    scope: dict[str, Any] = {}
    exec(
        f"def forward(self, {arguments}): return self.linear(dense) + self.ebc(sparse).values() + self.other(sparse)",
        scope,
    )
    names = re.findall(r"(\w+)=None", arguments)
    told = f"leaves out the arguments of forward whose default is None: {', '.join(map(repr, names))}; give an example"
    scope["dense"] = torch.zeros(4, 11)
    with pytest.raises(ConfigError, match=told):
        cut(Model(scope["forward"]))


class Ids(nn.Module):
    """An unpooled collection with indices; its forward is given."""

    def __init__(self, forward: Callable[[JaggedTensor], Tensor], need_indices: bool = True) -> None:
        super().__init__()
        tables = [EmbeddingConfig(9, 4, "item", feature_names=["item"])]
        self.ec = EmbeddingCollection(tables=tables, need_indices=need_indices)
        self._forward = forward

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self._forward(self.ec(features)["item"])


READS_IDS: list[Callable[[JaggedTensor], Any]] = [
    lambda item: item.to_padded_dense_weights(2),
    lambda item: item.to_padded_dense(2).sum((1, 2)) + (0 if item.weights_or_none() is None else 1),
    lambda item: JaggedTensor(item.values() * (item.weights() > 0)[:, None], lengths=item.lengths()).to_padded_dense(2),
]


@pytest.mark.parametrize("forward", READS_IDS)
def test_ids_beside_the_vectors_of_a_sequence(forward: Callable[[JaggedTensor], Any]) -> None:
    """TorchRec gives them as weights with need_indices=True."""
    assert cut(Ids(forward)).dense.inputs[:2] == ["sequence_0_0_values", "sequence_0_0_lengths"]


def test_a_collection_with_ids_that_forward_does_not_read() -> None:
    found = cut(Ids(lambda item: item.to_padded_dense(2).sum((1, 2))))
    assert found.outputs == {"output": ()}


@pytest.mark.parametrize(
    "forward",
    [lambda item: item.values() * torch.ones(4, 4), lambda item: item.values().sum(1)],
    ids=["inside", "output"],
)
def test_values_of_a_sequence_are_not_one_a_sample(forward: Callable[[JaggedTensor], Tensor]) -> None:
    with pytest.raises(ConfigError, match=r"one id.*\.to_padded_dense\(1\)\.squeeze\(1\)"):
        cut(Ids(forward))
    with pytest.raises(ConfigError, match=r"size of tensor|\.to_padded_dense\(1\)\.squeeze\(1\)"):
        cut(Ids(forward), batches=((kjt("item"),),))


def test_an_example_batch_shows_that_each_sample_has_one_id() -> None:
    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ebc, self.ec = (
                tables("t", ("a",)),
                EmbeddingCollection(tables=[EmbeddingConfig(9, 4, "i", feature_names=["item"])]),
            )

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            return self.ebc(features).values() * self.ec(features)["item"].values()

    ones = KeyedJaggedTensor(["a", "item"], torch.arange(6), lengths=torch.tensor([3, 0, 0, 1, 1, 1]))
    assert cut(Target(), batches=((ones,),)).signature.per_sample == {"item": 1}


def test_a_view_of_several_values_as_one_row_may_leave_the_number_of_rows_open() -> None:
    class Codes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ec = EmbeddingCollection(tables=[EmbeddingConfig(9, 4, "i", feature_names=["item", "codes"])])

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            rows = self.ec(features)
            return rows["codes"].values().view(-1, 3, 4).sum(1) + rows["item"].to_padded_dense(2).sum(1)

    lengths = torch.tensor([2, 0, 1, 3, 3, 3])
    batch = KeyedJaggedTensor(["item", "codes"], torch.arange(12) % 9, lengths=lengths)
    assert cut(Codes(), batches=((batch,),)).signature.per_sample == {"codes": 3}


def by_jagged_tensors(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict({name: ids[name] for name in ("b", "a")})


def by_computed_jagged_tensors(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    bags = {name: JaggedTensor(ids[name].values() * 7 % 20, lengths=ids[name].lengths()) for name in ("b", "a")}
    return KeyedJaggedTensor.from_jt_dict(bags)


def by_offsets(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_offsets_sync(ids.keys(), ids.values(), ids.offsets())


def by_lengths(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_lengths_sync(ids.keys(), ids.values() % 19, ids.lengths())


@pytest.mark.parametrize("make", [by_jagged_tensors, by_computed_jagged_tensors, by_offsets, by_lengths])
def test_forward_may_make_the_sparse_input_in_many_ways(make: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> None:
    model = Model(lambda self, dense, features: head(self, dense, self.ebc(make(features))))
    del model.other
    batch = (torch.randn(3, 3), kjt("a", "b"))
    found = cut(model, batches=(batch,))
    assert ("ids" not in found.parts) == (make is by_jagged_tensors)
    ids = kjt("a", "b")
    pooled = model.ebc(make(ids))
    with torch.no_grad():
        answer = found.dense.module(batch[0], torch.cat([pooled["a"], pooled["b"]], 1))["output"]
        torch.testing.assert_close(answer, model(batch[0], ids))


@pytest.mark.parametrize("codes", [16, 40], ids=["few codes", "many codes"])
def test_the_distance_to_codes_is_traced_for_all_numbers_of_samples(codes: int) -> None:
    """Torch computes it in another way beyond 25 samples or codes."""
    book = torch.randn(codes, 3)

    def forward(self, dense, features):
        return head(self, torch.cdist(dense, book).topk(3, largest=False).values, self.ebc(features))

    model = Model(forward)
    del model.other
    found = cut(model, batches=((torch.randn(3, 3), kjt("a", "b")),))
    for samples in (1, 64):
        dense = torch.randn(samples, 3)
        features = KeyedJaggedTensor(
            ["a", "b"], torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(2 * samples, dtype=torch.int64)
        )
        with torch.no_grad():
            answer = found.dense.module(dense, torch.zeros(samples, 8))["output"]
            torch.testing.assert_close(answer, model(dense, features), atol=1e-5, rtol=1e-4)


def test_sizes_of_ids_that_forward_joins_and_hashes_are_known() -> None:
    """Rows are taken as one a sample, which is known of the joined ids only as long as their parts are."""

    class Hashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            tables = [EmbeddingConfig(9, 4, name, feature_names=[name]) for name in ("user", "item")]
            self.ec = EmbeddingCollection(tables=tables)

        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            user, item = features["user"], features["item"]
            ids = torch.cat([user.values(), item.values()]) * 7 % 9
            rows = self.ec(
                KeyedJaggedTensor(["user", "item"], ids, lengths=torch.cat([user.lengths(), item.lengths()]))
            )
            return (rows["user"].values() * rows["item"].values()).sum(1) + user.lengths()

    ones = KeyedJaggedTensor(["user", "item"], torch.arange(6), lengths=torch.ones(6, dtype=torch.int64))
    found = cut(Hashed(), batches=((ones,),))
    assert found.signature.per_sample == {"user": 1, "item": 1}
    assert list(found.computed) == ["user", "item"]


def test_a_split_of_the_sparse_input_goes_to_two_modules() -> None:
    class Split(TwoCollections):
        def forward(self, dense, sparse):
            first, second = sparse.split([2, 1])
            return self.linear(torch.cat([dense, self.one(first).values(), self.two(second).values()], 1))

    model = Split()
    made = cut(model)
    assert made.num_dense == 3
    features, dense = kjt("a", "b", "c"), torch.randn(3, 3)
    with torch.no_grad():
        expected = model(dense, features)
        pooled = [model.one(features).values(), model.two(features).values()]
        torch.testing.assert_close(made.dense.module(dense, *pooled)["output"], expected)


def test_a_dense_input_may_be_split_too() -> None:
    class Halves(TwoCollections):
        def forward(self, dense, sparse):
            left, right = dense.split([2, 1], dim=1)
            return self.linear(torch.cat([right, left, self.one(sparse).values(), self.two(sparse).values()], 1))

    assert cut(Halves(), 3).num_dense == 3


def test_one_feature_name_in_two_inputs() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = tables("t"), tables("u")

        def forward(self, first, second):
            return self.one(first).values() + self.two(second).values()

    names = [info.name for info in cut(Both()).signature.inputs]
    assert names == ["first.a", "first.b", "second.a", "second.b"]


def test_the_vectors_of_a_lookup_may_be_an_output() -> None:
    model = Model(lambda self, dense, features: (self.ebc(features).values(), head(self, dense, self.ebc(features))))
    del model.other
    found = cut(model)
    pooled = torch.randn(3, 8)
    assert torch.equal(found.dense.module(torch.randn(3, 3), pooled)["output_0"], pooled)


def test_a_feature_keeps_the_dots_of_its_name() -> None:
    """Its name in requests is the key, as models of TorchRec name it."""
    model = Model(direct, ebc=tables("t", ("user.age", "b")))
    del model.other
    assert [info.name for info in cut(model).signature.inputs] == ["dense", "user.age", "b"]


def test_num_dense_without_a_linear_that_shows_it() -> None:
    model = Model(normed)
    del model.other
    assert cut(model, 3).num_dense == 3


def test_a_collection_without_tables_is_left_out() -> None:
    model = Model(direct)
    model.none = nn.Module()
    model.none.embedding_bag_configs = list  # type: ignore[assignment]
    assert "none" not in [leaf.about.path for leaf in find_leaves(model)]


def test_models_without_tables_are_refused() -> None:
    with pytest.raises(ConfigError, match="no EmbeddingBagCollection"):
        find_leaves(nn.Linear(3, 3))


def test_error_names_an_unsupported_feature_processor() -> None:
    class Scale(FeatureProcessor):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, features: JaggedTensor) -> JaggedTensor:
            return features

    ebc = EmbeddingBagCollection(tables=[EmbeddingBagConfig(20, 4, "t", feature_names=["a"])], is_weighted=True)
    model = nn.Module()
    model.processed = FeatureProcessedEmbeddingBagCollection(ebc, {"a": Scale()})
    with pytest.raises(ConfigError, match=r"'processed'.*scale"):
        find_leaves(model)


def test_error_names_a_tensor_on_meta() -> None:
    model = Model(direct)
    del model.other
    model.register_buffer("places", torch.empty(3, device="meta"), persistent=False)
    model.table_of_mine = torch.empty(3, device="meta")
    with pytest.raises(ConfigError, match="places, table_of_mine"):
        cut(model)


def test_sequences_may_be_summed_by_the_model() -> None:
    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ec = EmbeddingCollection(tables=[EmbeddingConfig(30, 4, "t", feature_names=["a"])])
            self.linear = nn.Linear(4, 1)

        def forward(self, features):
            found = self.ec(features)["a"]
            return self.linear(found.to_padded_dense(5).sum(1))

    found = cut(Summed())
    assert found.dense.inputs == ["sequence_0_0_values", "sequence_0_0_lengths"]
    shapes = [node.meta["val"].shape for node in found.dense.program.given]
    assert [[axis for axis, size in enumerate(shape) if not isinstance(size, int)] for shape in shapes] == [[0], [0]]


@pytest.mark.parametrize("cross", [CrossNet, LowRankCrossNet, VectorCrossNet])
def test_the_width_of_dense_inputs_that_a_crossnet_reads_first(cross: type[nn.Module]) -> None:
    def forward(self, dense, features):
        return self.linear(self.cross(torch.cat([self.ebc(features).values(), dense], 1)))

    model = Model(forward)
    del model.other
    model.cross = cross(11, 2)
    assert cut(model).num_dense == 3


def test_the_width_of_dense_inputs_that_a_product_from_the_left_reads_first() -> None:
    def forward(self, dense, features):
        both = torch.cat([dense, self.ebc(features).values()], 1).unsqueeze(2)
        return torch.matmul(self.linear.weight, both).squeeze(2)

    model = Model(forward)
    del model.other
    assert cut(model).num_dense == 3


def test_an_output_may_not_depend_on_the_other_samples() -> None:
    model = Model(lambda self, dense, ids: (lambda x: x @ x.T)(direct(self, dense, ids)))
    model.other = nn.Identity()
    with pytest.raises(ConfigError, match=r"shape \(3,\) in a batch of 3 and \(6,\) in a batch of 6"):
        cut(model, 3)
