"""The functions of ``import recinfer``: live modules in, callable archives out; one user with many candidates."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import recinfer
from recinfer import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.errors import ArchiveError, ConfigError, InputError
from recinfer.inference.archived import ArchivedModel
from recinfer.inference.report import make_report
from recinfer.inference.results import input_specs
from recinfer.inference.together import PredictInputs
from recinfer.serving.bench import measure_load
from recinfer.serving.random_requests import RandomRequests
from recinfer.serving.server.server import Server

PLACES = 4


@dataclass
class Batch:
    """What a training loop passes to forward."""

    ids: dict[str, KeyedJaggedTensor]
    age: Tensor
    prices: JaggedTensor
    labels: Tensor


class Ranker(nn.Module):
    """A history of the user, candidates, a tensor and numbers of any count, out of a dataclass; a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(50, 8, "item", feature_names=["history", "candidate"])
        self.items = EmbeddingCollection(tables=[table])
        self.users = EmbeddingBagCollection(tables=[EmbeddingBagConfig(20, 8, "user", feature_names=["user"])])
        self.tower = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.ReLU(), nn.Linear(16, 8))
        self.age = nn.Linear(2, 8)

    def forward(self, batch: Batch) -> dict[str, Any]:
        sparse = batch.ids["base"]
        vectors = self.items(sparse)
        taken = sparse["history"].lengths().clamp(max=PLACES, min=1).unsqueeze(1)
        history = vectors["history"].to_padded_dense(PLACES).sum(1) / taken
        user = self.tower(history + self.users(sparse)["user"]) + self.age(batch.age)
        scores = (user * vectors["candidate"].values()).sum(1)
        return {"scores": scores, "parts": (scores * 2, user), "price": batch.prices.to_padded_dense(2).sum(1)}


def make_batch(batch: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    history = torch.randint(0, 6, (batch,), generator=generator)
    users = torch.randint(0, 3, (batch,), generator=generator)
    lengths = torch.cat([history, torch.ones(batch, dtype=torch.int64), users])
    ids = torch.cat(
        [
            torch.randint(0, 50, (int(history.sum()) + batch,), generator=generator),
            torch.randint(0, 20, (int(users.sum()),), generator=generator),
        ]
    )
    counts = torch.randint(0, 3, (batch,), generator=generator)
    return Batch(
        {"base": KeyedJaggedTensor(["history", "candidate", "user"], ids, lengths=lengths.int())},
        torch.randn(batch, 2, generator=generator),
        JaggedTensor(torch.rand(int(counts.sum()), generator=generator), lengths=counts),
        torch.zeros(batch),
    )


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ranker, ArchivedModel]:
    torch.manual_seed(0)
    model = Ranker()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    out = tmp_path_factory.mktemp("ranker") / "ranker.rqa"
    archived = recinfer.export(
        model, make_batch(6), out, precision="fp32", user=["history", "user", "age"], progress=False
    )
    assert model.training, "an export leaves the mode as it was"
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    return model.eval(), archived


@pytest.mark.parametrize("batch", [1, 2, 5, 64])
def test_an_archive_is_called_like_the_model(both: tuple[Ranker, ArchivedModel], batch: int) -> None:
    model, archived = both
    given = make_batch(batch, seed=batch)
    with torch.no_grad():
        expected = model(given)
    found = archived(given)
    assert found.keys() == expected.keys()
    assert isinstance(found["parts"], tuple)
    torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["parts"], expected["parts"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["price"], expected["price"], rtol=1e-5, atol=1e-6)


def test_features_of_one_tensor_are_not_taken_apart(
    both: tuple[Ranker, ArchivedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 26 features that took twice as long as the prediction. Of features in another order, or beside others, the scores
    are the same."""
    _, archived = both
    given = make_batch(5)
    whole, parts = given.ids["base"], given.ids["base"].to_dict()
    beside = replace(given, ids={"base": KeyedJaggedTensor.from_jt_dict({**parts, "unused": parts["user"]})})
    found = [archived(given)["scores"], archived(beside)["scores"]]
    turned = whole.permute([2, 0, 1])
    narrow = KeyedJaggedTensor(whole.keys(), whole.values().int(), lengths=whole.lengths())
    strided = KeyedJaggedTensor(whole.keys(), whole.values().repeat_interleave(2)[::2], lengths=whole.lengths())
    monkeypatch.setattr(KeyedJaggedTensor, "to_dict", None)
    for ids in (whole, turned, narrow, strided):
        found.append(archived(replace(given, ids={"base": ids}))["scores"])
    assert all(torch.equal(each, found[1]) for each in found)


def test_signature_names_inputs_and_facts(both: tuple[Ranker, ArchivedModel]) -> None:
    signature = both[1].manifest.signature
    assert signature is not None
    assert {i.name: (i.path, i.kind) for i in signature.inputs} == {
        "history": ("batch.ids['base']['history']", "ids"),
        "candidate": ("batch.ids['base']['candidate']", "ids"),
        "user": ("batch.ids['base']['user']", "ids"),
        "age": ("batch.age", "tensor"),
        "prices": ("batch.prices", "jagged"),
    }
    assert signature.per_sample == {"candidate": 1}
    assert "exactly 1 per sample" in str(both[1])
    assert "fp32" in repr(both[1])


def candidates(count: int) -> tuple[Batch, dict[str, Any]]:
    """A batch of one user and ``count`` candidates, whole, and as a request with a context."""
    items = torch.arange(count) % 50
    history, users, age = [7, 3, 9], [4, 4], torch.tensor([[0.5, -1.0]])
    prices = [[0.25 * i] if i % 2 else [] for i in range(count)]
    lengths = torch.tensor([len(history)] * count + [1] * count + [len(users)] * count)
    ids = torch.cat([torch.tensor(history * count), items, torch.tensor(users * count)])
    jagged = JaggedTensor(
        torch.tensor([price for row in prices for price in row]), lengths=torch.tensor([len(row) for row in prices])
    )
    whole = Batch(
        {"base": KeyedJaggedTensor(["history", "candidate", "user"], ids, lengths=lengths.int())},
        age.repeat(count, 1),
        jagged,
        torch.zeros(count),
    )
    request = {
        "features": KeyedJaggedTensor(["candidate"], items, lengths=torch.ones(count).int()),
        "context": {"history": [history], "user": [users], "age": age},
        "inputs": {"prices": prices},
    }
    return whole, request


@pytest.mark.parametrize("count", [1, 2, 50])
def test_one_user_with_many_candidates(both: tuple[Ranker, ArchivedModel], count: int) -> None:
    model, archived = both
    whole, request = candidates(count)
    with torch.no_grad():
        expected = model(whole)
    found = archived.predict(None, **request)
    torch.testing.assert_close(found["scores"], expected["scores"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["price"], expected["price"], rtol=1e-5, atol=1e-6)


def test_requests_of_several_users_share_a_run(both: tuple[Ranker, ArchivedModel]) -> None:
    model, archived = both
    pairs = [candidates(count) for count in (3, 1, 8)]
    found = archived.predict_many([PredictInputs(None, **request) for _, request in pairs])
    for (whole, _), outputs in zip(pairs, found):
        assert not isinstance(outputs, Exception), outputs
        with torch.no_grad():
            torch.testing.assert_close(outputs["scores"], model(whole)["scores"], rtol=1e-5, atol=1e-6)


def test_the_user_part_runs_once(both: tuple[Ranker, ArchivedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    programs = both[1].predictor.state.user
    assert programs is not None
    rows: list[int] = []
    ordinary = programs._user

    class Counted:
        name = ordinary.name

        def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
            found = ordinary(tensors)
            rows.append(len(found[0]))
            return found

    monkeypatch.setattr(programs, "_user", Counted())
    both[1].predict(None, **candidates(50)[1])
    assert rows == [1]


def test_load_on_a_server_brings_the_user_once(both: tuple[Ranker, ArchivedModel]) -> None:
    with Server({"ranker": both[1].predictor}) as server, recinfer.InferenceClient(server.target, timeout=60) as client:
        about = client.get_model()
        assert {spec.name for spec in about.inputs if spec.user} == {"history", "user", "age"}
        assert RandomRequests(about).predict(1, {}).context is None
        context = RandomRequests(about).predict(4, {}).context
        assert context is not None
        assert context.keys() == {"history", "user", "age"}
        for batch in (1, 4):
            (found,) = measure_load(server.target, call="predict", concurrency=[1], duration=0.01, batch=batch, ids=2)
            assert found.errors == {}, found.reasons


def test_a_context_may_hold_more_than_the_user(tmp_path: Path) -> None:
    """Vectors of other features that the context brings reach every candidate."""
    torch.manual_seed(2)
    model = Ranker().eval()
    out = tmp_path / "ranker.rqa"
    archived = recinfer.export(model, make_batch(6), out, precision="fp32", user=["history", "age"], progress=False)
    whole, request = candidates(5)
    with torch.no_grad():
        torch.testing.assert_close(archived.predict(None, **request)["scores"], model(whole)["scores"])
    several = [PredictInputs(None, **candidates(count)[1]) for count in (3, 4)]
    for count, found in zip((3, 4), archived.predict_many(several)):
        assert not isinstance(found, Exception), found
        with torch.no_grad():
            torch.testing.assert_close(found["scores"], model(candidates(count)[0])["scores"])


def test_programs_that_disagree_are_found(both: tuple[Ranker, ArchivedModel], monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = both[1].predictor
    predictor.check_user()
    programs = predictor.state.user
    assert programs is not None
    ordinary = programs._candidates

    class Other:
        name = ordinary.name

        def __call__(self, tensors: list[Tensor]) -> list[Tensor]:
            return [output + 1 for output in ordinary(tensors)]

    monkeypatch.setattr(programs, "_candidates", Other())
    with pytest.raises(ArchiveError, match=r"C2.*with a context, output 'scores' differs by 1"):
        predictor.check_user()


def test_runs_of_the_user_part_count_as_dense_runs(both: tuple[Ranker, ArchivedModel]) -> None:
    stages = both[1].predictor.stages
    before = stages.state()["dense"].count
    both[1].predict(None, **candidates(8)[1])
    assert stages.state()["dense"].count == before + 1


class Scaled(nn.Module):
    """A number for all samples beside ids, and ids that forward computes."""

    def __init__(self) -> None:
        super().__init__()
        self.users = EmbeddingBagCollection(tables=[EmbeddingBagConfig(20, 8, "user", feature_names=["user"])])
        self.items = EmbeddingBagCollection(tables=[EmbeddingBagConfig(20, 8, "item", feature_names=["item"])])

    def forward(self, ids: KeyedJaggedTensor, scale: Tensor, row: Tensor) -> Tensor:
        item = ids["item"]
        hashed = KeyedJaggedTensor(["item"], item.values() % 20, lengths=item.lengths())
        return (self.users(ids).values() * self.items(hashed).values() * row).sum(1) * scale


def scaled(batch: int) -> tuple[KeyedJaggedTensor, Tensor, Tensor]:
    ids = KeyedJaggedTensor(["user", "item"], torch.arange(2 * batch) % 20, lengths=torch.ones(2 * batch).int())
    return ids, torch.tensor(0.5), torch.linspace(0, 1, 8).reshape(1, 8)


def test_inputs_without_a_batch_axis(tmp_path: Path) -> None:
    torch.manual_seed(4)
    model = Scaled().eval()
    archived = recinfer.export(model, scaled(4), tmp_path / "scaled.rqa", precision="fp32", progress=False)
    for batch in (1, 3):
        with torch.no_grad():
            torch.testing.assert_close(archived(*scaled(batch)), model(*scaled(batch)))
    assert {spec.name: spec.facts for spec in input_specs(archived.manifest) if spec.facts} == {
        "scale": "one tensor for all samples",
        "row": "one tensor for all samples",
    }
    ids, scale, row = scaled(3)
    context = KeyedJaggedTensor(["user"], torch.tensor([0]), lengths=torch.tensor([1]))
    item = KeyedJaggedTensor(["item"], ids["item"].values(), lengths=ids["item"].lengths())
    same = KeyedJaggedTensor(
        ["user", "item"], torch.cat([torch.zeros(3).long(), item.values()]), lengths=torch.ones(6).int()
    )
    found = archived.predict(None, item, {"user": context["user"].values().tolist(), "row": row}, {"scale": scale})
    with torch.no_grad():
        torch.testing.assert_close(found["output"], model(same, scale, row))


def test_the_report_names_tensors_that_may_vary(both: tuple[Ranker, ArchivedModel]) -> None:
    """Five rows beside six samples are taken as they are; an example batch of one size cannot tell."""
    manifest, report = both[1].manifest, both[1].report
    assert report is not None
    assert report.notes == ()
    assert manifest.signature is not None
    inputs = tuple(replace(i, shape=(5, 2)) if i.name == "age" else i for i in manifest.signature.inputs)
    changed = replace(manifest, signature=replace(manifest.signature, inputs=inputs))
    sizes = {(t.module, t.name): 4 for t in manifest.tables}
    (note,) = make_report(changed, sizes, None).notes
    assert note.startswith("input 'age' is taken as one tensor float32 [5, 2] for all samples")


def test_results_print(both: tuple[Ranker, ArchivedModel]) -> None:
    plan = recinfer.plan(Ranker(), precision="int4")
    assert repr(plan) == f"<plan {plan.hash[:12]}: 2 tables, int4, on 1 cpu ranks>"
    assert "relative" in str(both[1].report)
    for result in (plan, both[1], both[1].report):
        text = str(result)
        assert "user" in text
        assert max(map(len, text.splitlines())) <= 140
        assert html.unescape(result._repr_html_()) == f"<pre>{text}</pre>"  # type: ignore[union-attr]


def test_a_user_part_needs_ids_that_are_passed_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="user: forward computes the ids of 'item'"):
        recinfer.export(Scaled(), scaled(4), tmp_path / "scaled.rqa", user=["user"], progress=False)


def test_errors_name_input_and_sample(both: tuple[Ranker, ArchivedModel]) -> None:
    _, request = candidates(3)

    def predict(**changed: Any) -> Any:
        return both[1].predict(None, **{**request, **changed})

    with pytest.raises(InputError, match=r"'prices' is missing; expected a list of float32 per sample"):
        predict(inputs={})
    with pytest.raises(InputError, match=r"got 'cost'; this model takes"):
        predict(inputs={"cost": [1]})
    with pytest.raises(InputError, match=r"'age': got shape \[2, 2\]; expected float32 \[1, 2\]"):
        predict(context={**request["context"], "age": torch.zeros(2, 2)})
    with pytest.raises(InputError, match=r"'age': sample 0 has nan"):
        predict(context={**request["context"], "age": torch.tensor([[0.0, torch.nan]])})
    two = KeyedJaggedTensor(["candidate"], torch.arange(3), lengths=torch.tensor([1, 2, 0]))
    with pytest.raises(InputError, match=r"'candidate': sample 1 has 2 values; this model takes exactly 1"):
        predict(features=two)
    with pytest.raises(InputError, match="input 'age' is also in inputs"):
        predict(inputs={**request["inputs"], "age": torch.zeros(3, 2)})
    with pytest.raises(InputError, match=r"takes 1: batch"):
        both[1](1, 2)


def test_a_half_precision_model_is_to_be_exported_as_float(tmp_path: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        batch = make_batch(6)
        batch.age = batch.age.to(dtype)
        with pytest.raises(ConfigError, match=rf"parameters of {dtype}, .* export model\.float\(\)"):
            recinfer.export(Ranker().to(dtype), batch, tmp_path / "half.rqa", progress=False)


def test_a_state_dict_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: got a OrderedDict, expected the nn.Module .* load_state_dict"):
        recinfer.export(Ranker().state_dict(), make_batch(6), tmp_path / "none.rqa")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="model: got a str"):
        recinfer.plan("model.pt")  # type: ignore[arg-type]


def test_user_names_must_fit(tmp_path: Path) -> None:
    for names, message in (
        (["nobody"], "no input 'nobody'"),
        (["history", "candidate", "user"], "all features are the user's"),
    ):
        with pytest.raises(ConfigError, match=message):
            recinfer.export(Ranker(), make_batch(6), tmp_path / "a.rqa", user=names, progress=False)


def test_damage_is_raised(both: tuple[Ranker, ArchivedModel], tmp_path: Path) -> None:
    out = tmp_path / "b.rqa"
    recinfer.export(both[0], make_batch(6), out, precision="int8", progress=False)
    report = recinfer.verify(out)
    assert report.ok
    assert "5 replayed on torch, onnx" in str(report)
    assert report._repr_html_().startswith("<pre>")
    (out / "stray").write_text("")
    with pytest.raises(ArchiveError, match="F6"):
        recinfer.verify(out)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_model_is_exported_as_it_is(tmp_path: Path) -> None:
    torch.manual_seed(1)
    sharded = DistributedModelParallel(Ranker(), device=torch.device("cpu")).eval()
    archived = recinfer.export(sharded, make_batch(5), tmp_path / "c.rqa", precision="fp32", progress=False)
    given = make_batch(7, seed=3)
    with torch.no_grad():
        torch.testing.assert_close(archived(given)["scores"], sharded(given)["scores"], rtol=1e-5, atol=1e-6)


def test_public_names() -> None:
    names = [name for name in dir(ArchivedModel) if not name.startswith("_")]
    assert len(names) <= 15, names  # and .predictor
    assert {"plan", "export", "load", "verify"} <= set(recinfer.__all__)


def test_a_plan_of_a_live_module() -> None:
    plan = recinfer.plan(Ranker(), world_size=2, precision="int4")
    assert plan.world_size == 2
    assert {table.precision.value for table in plan.tables} == {"INT4"}
    head, names, *tables = str(plan).splitlines()
    assert head.endswith("2 ranks on cpu")
    assert names.split() == ["table", "rows", "x", "dim", "precision", "sharding", "ranks"]
    assert [line.split()[0] for line in tables] == ["items.item", "users.user"]


class Aged(nn.Module):
    """One matrix of dense numbers, under a name of forward's own."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(20, 4, name, feature_names=[name]) for name in ("user", "item")]
        self.bags = EmbeddingBagCollection(tables=tables)
        self.top = nn.Linear(8 + 2, 1)

    def forward(self, age: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return self.top(torch.cat([age, self.bags(ids).values()], 1))


class Halved(Aged):
    """Operators on a bfloat16 input itself, and on it as float32."""

    def forward(self, age: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return super().forward((torch.cat([age * 3, age.relu()], 1)[:, ::2]).float() + age.float(), ids)


class CastedAged(Aged):
    """The plain case: forward casts its input."""

    def forward(self, age: Tensor, ids: KeyedJaggedTensor) -> Tensor:
        return super().forward(age.float(), ids)


def test_a_bfloat16_input_runs_on_onnxruntime(tmp_path: Path) -> None:
    ids = KeyedJaggedTensor(["user", "item"], torch.arange(6), lengths=torch.tensor([2, 0, 1, 1, 1, 1]))
    for model in (Halved().eval(), CastedAged().eval()):
        age = torch.randn(3, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
        path = tmp_path / f"{type(model).__name__}.rqa"
        archived = recinfer.export(model, (age, ids), path, precision="fp32", progress=False)
        assert archived.predictor.engine == "onnx", archived.predictor.engine_reason
        with torch.no_grad():
            wanted = model(age, ids)
        torch.testing.assert_close(archived(age, ids), wanted)
        assert recinfer.verify(path).ok
        with Server({"m": archived.predictor}) as server, recinfer.InferenceClient(server.target, timeout=60) as client:
            torch.testing.assert_close(client.predict(None, ids, inputs={"age": age})["output"], wanted)


def test_the_dense_matrix_of_a_context_has_both_names_on_every_way(tmp_path: Path) -> None:
    ids = KeyedJaggedTensor(["user", "item"], torch.arange(6), lengths=torch.tensor([2, 0, 1, 1, 1, 1]))
    model = Aged().eval()
    archived = recinfer.export(model, (torch.rand(3, 2), ids), tmp_path / "aged.rqa", precision="fp32", progress=False)
    items = {"item": [[3], [4, 5]]}
    wanted = archived.predict([[0.3, 7.0]] * 2, {**items, "user": [[], []]})["output"]
    with Server({"aged": archived.predictor}) as server, recinfer.InferenceClient(server.target, timeout=60) as client:
        for one in (archived, client):
            for name in ("age", "dense"):
                for matrix in ([[0.3, 7.0]], torch.tensor([[0.3, 7.0]], dtype=torch.float64)):
                    found = one.predict(features=items, context={"user": [[]], name: matrix})["output"]
                    torch.testing.assert_close(found, wanted)
            with pytest.raises(InputError, match="got 'age' and 'dense', which are the same input"):
                one.predict(features=items, context={"user": [[]], "age": [[0.3, 7.0]], "dense": [[0.3, 7.0]]})


def test_a_collection_alone_is_called_like_the_model(tmp_path: Path) -> None:
    pooled = EmbeddingBagCollection(tables=[EmbeddingBagConfig(20, 8, "t", feature_names=["a", "b"])], is_weighted=True)
    rows = EmbeddingCollection(tables=[EmbeddingConfig(20, 8, "t", feature_names=["a", "b"])])
    lengths = torch.tensor([2, 0, 1, 1], dtype=torch.int32)
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(4), torch.rand(4), lengths=lengths)
    for model in (pooled, rows):
        path = tmp_path / f"{type(model).__name__}.rqa"
        recinfer.export(model, ids, path, precision="fp32")
        served = recinfer.load(path)
        for found in (served(ids), served(features=ids)):
            for name, expected in model(ids).to_dict().items() if model is pooled else model(ids).items():
                if isinstance(expected, JaggedTensor):
                    assert torch.equal(found[name].lengths(), expected.lengths())
                    assert torch.equal(found[name].values(), expected.values())
                else:
                    assert torch.allclose(found[name], expected)
        with pytest.raises(
            InputError, match="got Tensor, Tensor; this archive holds a collection alone, which takes one"
        ):
            served(torch.rand(2), torch.rand(2))
    assert torch.equal(served({"a": [[0, 1], []], "b": [[2], [3]]})["a"].values(), rows(ids)["a"].values())
