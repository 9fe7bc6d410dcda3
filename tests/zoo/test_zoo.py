"""Models as their users write them, exported by example batches: an archive answers as the model does.

One line of the table is one model; its columns say what the export has to find. Each model is exported once, in float32,
and answers batches of several sizes, and one user with many candidates.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recinfer.archive.manifest import Manifest
from recinfer.capture import _read_batch
from recinfer.errors import InputError
from recinfer.inference import export as export_module
from recinfer.inference.archived import ArchivedModel
from recinfer.inference.predictor import Predictor, load
from recinfer.inference.prepare import CutModel, cut_and_export
from recinfer.modules.embedding_configs import DataType
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from tests.archive.models import make_archive
from tests.zoo import easyrec as e
from tests.zoo import plain as p
from tests.zoo import rankers as r
from tests.zoo import sequences as s
from tests.zoo.drawing import Draw

BATCHES = (1, 5, 64)
CANDIDATES = 50
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Kind:
    """A model and the things that its export has to find.

    Attributes:
        model: has a static method ``draw`` that gives arguments of forward.
        inputs: the inputs beside ids, by name; empty where they are one matrix, which ``dense`` carries, or none.
        per_sample, as_long_as, counts: the facts.
        computed: the features that the ids program computes.
        engine: of the dense program.
        batches: number of example batches; 0: the export makes one.
        int8: also export with INT8 tables.
        user: the inputs of the user, whose part of forward is a program of its own.
        also: a further check of the archive.
        by_day: whether the model shows something of recinfer that no other kind shows; the rest are dense parts that differ by
            operators of torch.
    """

    model: type[nn.Module]
    inputs: tuple[str, ...] = ()
    per_sample: dict[str, int] = field(default_factory=dict)
    as_long_as: dict[str, str] = field(default_factory=dict)
    counts: dict[str, str] = field(default_factory=dict)
    computed: tuple[str, ...] = ()
    engine: str = "onnx"
    batches: int = 1
    int8: bool = False
    user: tuple[str, ...] = ()
    also: Callable[[Predictor], None] = lambda _: None
    by_day: bool = True


def check_free_axes(predictor: Predictor) -> None:
    """Axes of one name have one size, up to a largest one."""
    ids, words, seen = s.PaddedTensors.draw(Draw(6, 1))
    with pytest.raises(InputError, match="input 'seen': got 6 where 'words' has 5; expected the same size"):
        predictor.predict(None, ids, inputs={"words": words, "seen": torch.cat([seen, seen[:, :1]], 1)})
    long = {name: value.repeat(1, 5) for name, value in (("words", words), ("seen", seen))}
    with pytest.raises(InputError, match="input 'words': got an axis of 25; this model takes at most 20"):
        predictor.predict(None, ids, inputs=long)


def check_counts(predictor: Predictor) -> None:
    """The numbers of ids of each step are those that the ids have."""
    model, arguments = e.StepsOfSeveralIds(), e.StepsOfSeveralIds.draw(Draw(6, 1))
    features = request_of(predictor.manifest, model, arguments).features
    assert features is not None
    columns = {key: features[key].to_dense() for key in features.keys()}  # noqa: SIM118
    counts, tags = "batch.sequence_mulval_lengths.base.hist_tags", "batch.sparse_features.base.hist_tags"
    more = {**columns, tags: [*columns[tags][:3], torch.cat([columns[tags][3], torch.tensor([1])]), *columns[tags][4:]]}
    had = len(columns[tags][3])
    with pytest.raises(InputError, match=f"'{counts}': sample 3 counts {had} values and '{tags}' has {had + 1}"):
        predictor.predict(None, more)
    negative = {**columns, counts: [*columns[counts][:5], columns[counts][5] - 10]}
    with pytest.raises(InputError, match=f"'{counts}': got -.*; expected counts of the values of '{tags}', 0 or more"):
        predictor.predict(None, negative)
    assert f"counts of the values of {tags}" in {spec.facts for spec in predictor.inputs.specs}


def check_lists(predictor: Predictor) -> None:
    """Lists without any value do not tell how many numbers a value has."""
    none = predictor.predict(None, {"hist": [[], []]}, inputs={"prices": [[], []]})["output"]
    some = predictor.predict(None, {"hist": [[], [3]]}, inputs={"prices": [[], [[0.5, 1.5]]]})["output"]
    assert torch.equal(none[0], some[0])
    assert not torch.equal(none[1], some[1])
    with pytest.raises(
        InputError, match=r"'prices': got values of shape \[1\]; expected a list of float32 \[2\] per sample"
    ):
        predictor.predict(None, {"hist": [[1], [2]]}, inputs={"prices": [[[0.5]], [[0.5]]]})


def check_weights(predictor: Predictor) -> None:
    """Weights are those that forward reads, not all that the example batch has."""
    assert {spec.name: spec.weighted for spec in predictor.inputs.specs} == {"user": False, "hist": True}
    assert predictor.manifest.weighted_features == {"hist"}
    (ids,) = s.WeightsInForward.draw(Draw(6, 1))
    given = ids.keys(), ids.values(), None, ids.lengths()
    ones = KeyedJaggedTensor(*given[:2], torch.ones_like(ids.weights()), given[3])
    without = predictor.predict(None, KeyedJaggedTensor(*given))["output"]  # an id without a weight weighs 1
    assert torch.equal(without, predictor.predict(None, ones)["output"])
    assert not torch.equal(without, predictor.predict(None, ids)["output"])


def check_pooled(predictor: Predictor) -> None:
    """Tables of which each sample reads one row are pooled, so that requests are answered from their bytes."""
    assert [module.kind for module in predictor.manifest.modules] == ["pooled"]
    assert len(predictor.manifest.tables) == 6
    assert predictor.lookups.byte_tables is not None


# fmt: off
KINDS = [
    # Pooled vectors, and inputs of all types
    Kind(r.DeepFM, batches=0, int8=True),
    Kind(r.WideAndDeep, batches=0, by_day=False),
    Kind(r.SeveralTensors, ("price", "shown", "image", "flags")),
    Kind(r.DictOfTensors, ("age", "price")),
    Kind(r.IntegerTensor, ("hour", "day")),
    Kind(r.DenseKeyedTensor, ("price", "image")),
    Kind(r.DataclassBatch, ("price", "stats"), int8=True),
    Kind(r.WeightedAndPlain),
    Kind(
        r.DecayedWeights,
        ("age_bought", "age_returned"),
        as_long_as={"age_bought": "bought", "age_returned": "returned"},
        computed=("seen", "clicked", "bought", "returned"),
    ),
    Kind(r.FeatureProcessed),
    Kind(r.MMoE, batches=0),
    Kind(r.PLE),
    Kind(r.TwoTower),
    Kind(r.Autocast),
    Kind(r.BFloat16),
    Kind(r.FieldAttention, by_day=False),
    # Ids that forward computes, or takes apart
    Kind(r.HashedIds, per_sample={"user": 1, "item": 1}, computed=("user", "item", "cross")),
    Kind(r.IdsOfTensors, ("user", "item", "price"), computed=("user", "item")),
    Kind(r.ModuloIds, computed=("user", "item"), int8=True),
    Kind(r.BucketizedDense, ("dense",), computed=("age", "price")),
    Kind(r.SplitPermuteConcat),
    Kind(r.ReadsTheKjt),
    Kind(r.CalledTwice),
    Kind(r.OneNameTwice),
    # Sequences
    Kind(s.DIN, per_sample={"item": 1, "cat": 1}, as_long_as={"hist_cat": "hist"}, int8=True),
    Kind(s.BST, by_day=False),
    Kind(s.SASRec, per_sample={"item": 1}),
    Kind(s.GRU4Rec, per_sample={"item": 1}),
    Kind(s.Cells, by_day=False),
    Kind(s.Caser, by_day=False),
    Kind(s.NumericSequence, ("prices",), as_long_as={"prices": "hist"}, also=check_lists),
    Kind(s.WeightsInForward, also=check_weights),
    Kind(s.NewestFirst, ("times",)),
    Kind(s.SharedTable),
    Kind(s.NeedIndices),
    Kind(s.PaddedTensors, ("words", "seen"), batches=2, also=check_free_axes),
    Kind(s.MaskedSoftmax, per_sample={"item": 1}),
    Kind(s.SegmentReduce),
    Kind(s.JaggedSoftmax, per_sample={"item": 1}),
    Kind(s.FbgemmOperators, per_sample={"item": 1}),
    # TorchEasyRec
    Kind(
        e.StepsOfSeveralIds,
        counts={
            f"batch.sequence_mulval_lengths.base.{name}": f"batch.sparse_features.base.{name}"
            for name in ("hist_tags", "hist_words")
        },
        also=check_counts,
    ),
    Kind(e.ValuesAsColumns, per_sample={"last": 3}),
    Kind(e.VariationalDropout),
    Kind(e.Interests),
    Kind(e.SelfAttention),
    Kind(
        e.CandidatesAfterHistory,
        ("times", "asked"),
        as_long_as={"times": "hist", "asked": "candidate"},
        by_day=False,
    ),
    Kind(e.TwoTowers, user=("user", "age")),
    # Tables of torch.nn.Embedding and EmbeddingBag
    Kind(p.Fields, per_sample={"user": 1, "item": 1, "gender": 1}, int8=True, also=check_pooled),
    Kind(
        p.NextItem,
        ("item_seq_len",),
        per_sample={"item_seq": p.LENGTH, "item": 1},
        user=("item_seq", "item_seq_len"),
    ),
    Kind(p.Columns, ("columns",), computed=("user", "fields")),
    Kind(p.Bags, per_sample={"ids": p.LENGTH}),
    Kind(p.PaddedToTheLongest, ("hist",), per_sample={"item": 1}, computed=("item'", "item''"), batches=2),
]
# fmt: on


@pytest.fixture(autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """A trace makes many objects that live on, over which each collection goes."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(autouse=True)
def _plain_attention() -> Iterator[None]:
    """On an empty history the fast path of attention gives NaN."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@dataclass(frozen=True)
class Given:
    """A request: ``dense``, features and other inputs."""

    dense: Tensor | None
    features: KeyedJaggedTensor | None
    inputs: dict[str, Any]


def request_of(manifest: Manifest, model: nn.Module, arguments: tuple[Any, ...], only: set[str] | None = None) -> Given:
    """The request that brings ``arguments``; of ``only`` these features."""
    assert manifest.signature is not None
    reader, _ = _read_batch(model, arguments, {i.path for i in manifest.signature.inputs if i.kind == "ids"})
    parts = {(found.path, found.part): found.tensor for found in reader.found}
    bags: dict[str, JaggedTensor] = {}
    inputs: dict[str, Any] = {}
    dense = None
    for info in manifest.signature.inputs:
        if info.kind == "tensor":
            tensor = parts[info.path, "tensor"]
            if manifest.dense is not None and manifest.dense.num_dense:
                dense = tensor
            else:
                inputs[info.name] = tensor
            continue
        weights = parts.get((info.path, "weights"))
        bag = JaggedTensor(parts[info.path, "values"], weights, parts[info.path, "lengths"])
        if info.kind == "jagged":
            inputs[info.name] = bag
        elif only is None or info.name in only:
            bags[info.name] = bag
    if not bags:
        return Given(dense, None, inputs)
    weights = [bag.weights_or_none() for bag in bags.values()]
    if any(weight is not None for weight in weights):  # then all features of a request have weights
        weights = [torch.ones(len(b.values())) if w is None else w for b, w in zip(bags.values(), weights)]
    features = KeyedJaggedTensor(
        list(bags),
        torch.cat([bag.values() for bag in bags.values()]),
        None if weights[0] is None else torch.cat(weights),  # type: ignore[arg-type]
        lengths=torch.cat([bag.lengths() for bag in bags.values()]).int(),
    )
    return Given(dense, features, inputs)


def flat(value: Any) -> list[Tensor]:
    """The tensors of forward's result, in order."""
    if isinstance(value, Tensor):
        return [value.float()]
    values = value.values() if isinstance(value, dict) else value or ()
    return [tensor for part in values for tensor in flat(part)]


def check(given: dict[str, Tensor], expected: Any, tolerance: float) -> None:
    for (name, mine), theirs in zip(given.items(), flat(expected), strict=True):
        assert mine.shape == theirs.shape, name
        error = float((mine - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))
        assert error <= tolerance, name


def export(kind: Kind, folder: Path, precision: DataType) -> tuple[nn.Module, Predictor]:
    torch.manual_seed(3)
    model = kind.model().eval()
    inputs = [kind.model.draw(Draw(6 + i, 10 + i)) for i in range(kind.batches)]
    make_archive(
        folder, model=model, ranks=1, precision=precision, kinds=("table_wise",), inputs=inputs, user=kind.user
    )
    return model, load(folder / "small.rqa")


@pytest.mark.parametrize(
    "kind",
    [pytest.param(k, id=k.model.__name__, marks=[] if k.by_day else [pytest.mark.nightly]) for k in KINDS],
)
def test_an_archive_answers_as_its_model(kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs: list[CutModel] = []
    monkeypatch.setattr(
        export_module, "cut_and_export", lambda *args: programs.append(cut_and_export(*args)) or programs[0]
    )
    model, predictor = export(kind, tmp_path / "fp32", DataType.FP32)
    manifest = predictor.manifest
    assert manifest.dense is not None
    assert manifest.signature is not None
    for batch in BATCHES:
        arguments = kind.model.draw(Draw(batch, batch))
        given = request_of(manifest, model, arguments)
        with torch.no_grad():
            expected = model(*arguments)
        check(predictor.predict(given.dense, given.features, inputs=given.inputs), expected, TOLERANCE)
    called = dict(
        enumerate(flat(ArchivedModel(predictor)(*arguments)))
    )  # takes what forward takes, weights that nothing reads too
    check(called, expected, TOLERANCE)
    check_one_user(kind, model, predictor)
    ids = manifest.signature.ids
    assert (
        tuple(info.name for info in manifest.named_inputs),
        manifest.signature.per_sample,
        manifest.signature.as_long_as,
        manifest.signature.counts,
        () if ids is None else ids.features,
        manifest.dense.engine,
    ) == (kind.inputs, kind.per_sample, kind.as_long_as, kind.counts, kind.computed, kind.engine), (
        manifest.dense.onnx_refused
    )
    kind.also(predictor)
    if kind.int8:  # the programs are the same ones: tracing takes most of the time
        monkeypatch.setattr(export_module, "cut_and_export", lambda *args: programs[0])
        model, predictor = export(kind, tmp_path / "int8", DataType.INT8)
        arguments = kind.model.draw(Draw(64, 3))
        given = request_of(predictor.manifest, model, arguments)
        with torch.no_grad():
            check(predictor.predict(given.dense, given.features, inputs=given.inputs), model(*arguments), 0.03)


def check_one_user(kind: Kind, model: nn.Module, predictor: Predictor) -> None:
    """One user's features as context of many candidates."""
    draw = Draw(CANDIDATES, 7, one_user=True)
    arguments = kind.model.draw(draw)
    names = {i.name for i in predictor.manifest.signature.inputs if i.kind == "ids"}  # type: ignore[union-attr]
    user = draw.user & names
    if not user or user == names:
        return
    candidates = request_of(predictor.manifest, model, arguments, names - user)
    users = request_of(predictor.manifest, model, arguments, user)
    with torch.no_grad():
        expected = model(*arguments)
    answer = predictor.predict(candidates.dense, candidates.features, first_sample(users.features), candidates.inputs)
    check(answer, expected, TOLERANCE)
    signature = predictor.manifest.signature
    assert signature is not None
    assert (() if signature.user is None else signature.user.names) == kind.user
    if signature.user is not None:  # the tower runs there, and nothing of the user behind it but its vector
        assert len(signature.user.between) == 1


def first_sample(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    bags = [features[key] for key in features.keys()]  # noqa: SIM118
    counts = [int(bag.lengths()[0]) for bag in bags]
    weights = None
    if features.weights_or_none() is not None:
        weights = torch.cat([bag.weights()[:n] for bag, n in zip(bags, counts)])
    values = torch.cat([bag.values()[:n] for bag, n in zip(bags, counts)])
    return KeyedJaggedTensor(features.keys(), values, weights, lengths=torch.tensor(counts, dtype=torch.int32))
