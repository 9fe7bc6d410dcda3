"""Tables of torch.nn.Embedding: what is refused, and the way by a captured program and a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import recinfer
from recinfer.archive.captured import read_program
from recinfer.archive.cut import cut_model
from recinfer.archive.leaves import find_leaves
from recinfer.archive.subgraph import exported
from recinfer.capture import capture, plain_tables
from recinfer.checkpoint import CheckpointReader
from recinfer.errors import ConfigError, InputError
from recinfer.inference.archived import load
from recinfer.inference.export import export_archive
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.zoo import plain as p
from tests.zoo.drawing import Draw


class Small(nn.Module):
    """Two tables; a case is the forward."""

    def __init__(self, forward: Callable[[Small, Tensor], Tensor]) -> None:
        super().__init__()
        self.user, self.item, self.bag = nn.Embedding(50, 4), nn.Embedding(60, 4), nn.EmbeddingBag(70, 4)
        self.rest = forward

    def forward(self, ids: Tensor) -> Tensor:
        return self.rest(self, ids) + self.user(ids)


class Whole(nn.Module):
    """A table that is read as a whole alone."""

    def __init__(self) -> None:
        super().__init__()
        self.item = nn.Embedding(60, 4)

    def forward(self, user: Tensor) -> Tensor:
        return user @ self.item.weight.T


REFUSED = {
    "the ids of 'user' are computed from the vectors of 'user'": lambda m, ids: m.user(m.user(ids).sum(1).abs().long()),
    r"EmbeddingBag 'bag' offsets at test_plain.py:\d+": lambda m, ids: m.bag(ids, torch.arange(len(ids))) + m.item(ids),
}


@pytest.mark.parametrize(("text", "forward"), REFUSED.items(), ids=["stages", "offsets"])
def test_a_refusal_names_the_table(text: str, forward: Callable[[Small, Tensor], Tensor], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=text):
        recinfer.export(Small(forward), (torch.arange(6),), tmp_path / "plain.rqa", progress=False)


def test_a_model_needs_tables_and_an_example_batch(tmp_path: Path) -> None:
    limited = nn.Sequential(nn.Embedding(50, 4, max_norm=1.0), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=r"Sequential has no tables: .* EmbeddingBag without max_norm"):
        recinfer.export(limited, (torch.arange(6),), tmp_path / "plain.rqa", progress=False)
    with pytest.raises(ConfigError, match=r"tables are torch.nn.Embedding or EmbeddingBag.*; give an example batch"):
        recinfer.export(p.NextItem(), None, tmp_path / "plain.rqa", progress=False)


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


def test_an_embedding_that_changes_its_rows_is_no_table() -> None:
    hooked, rows = nn.Embedding(5, 4), nn.Embedding(5, 4)
    hooked.register_forward_hook(lambda module, given, found: found * 2)
    normed = nn.utils.parametrizations.weight_norm(nn.Embedding(5, 4))
    found = plain_tables(nn.ModuleList([Scaled(5, 4), hooked, normed, nn.Embedding(5, 4, max_norm=1.0), rows]))
    assert found is not None
    assert list(found.plain.values()) == ["4"]


class Limited(nn.Module):
    """Rows whose norm has a limit, by the module and by the function; the limit changes the tables in place."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item, self.shop = nn.Embedding(50, 4), nn.Embedding(50, 4, max_norm=0.5), nn.Embedding(50, 4)

    def forward(self, ids: Tensor) -> Tensor:
        limited = nn.functional.embedding(ids, self.shop.weight, max_norm=0.5)
        return limited + self.item(ids) + self.user(ids)


def test_rows_whose_norm_has_a_limit(tmp_path: Path) -> None:
    model, ids = Limited().eval(), torch.arange(6)
    served = recinfer.export(model, (ids,), tmp_path / "plain.rqa", precision="fp32", progress=False)
    assert [table.name for table in served.manifest.tables] == ["user"]
    torch.testing.assert_close(served(ids + 3), model(ids + 3))


def test_tables_that_no_input_reads_stay_in_the_dense_part(tmp_path: Path) -> None:
    small = plain_tables(nn.ModuleDict({"a": nn.Embedding(3, 4), "b": nn.ModuleList([nn.Embedding(5, 4)])}))
    assert small is not None
    assert small.plain == {"a": "a", "b_0": "b.0"}

    def nearest(m: Small, ids: Tensor) -> Tensor:
        return m.item((m.user(ids) @ m.item.weight.T).argmax(1))

    model, ids = Small(nearest).eval(), torch.arange(6)
    served = recinfer.export(model, (ids,), tmp_path / "plain.rqa", precision="fp32", world_size=2, progress=False)
    assert [table.name for table in served.manifest.tables] == [table.table for table in served.plan.tables] == ["user"]
    torch.testing.assert_close(served(ids + 3), model(ids + 3))
    with pytest.raises(ConfigError, match=r"no row of a torch.nn.Embedding by ids of its inputs"):
        recinfer.export(Whole(), (torch.rand(6, 4),), tmp_path / "none.rqa", progress=False)
    lacking = recinfer.plan(nn.ModuleDict({"item": nn.Embedding(60, 4)}))
    with pytest.raises(ConfigError, match="the plan lacks user; plan this model again"):
        recinfer.export(model, (ids,), tmp_path / "none.rqa", plan=lacking, progress=False)


def test_a_captured_program_gets_the_checkpoints_tables(tmp_path: Path) -> None:
    model = p.Fields().eval()
    batch = p.Fields.draw(Draw(6, 1))
    capture(model, batch).save(tmp_path / "model.rqp")
    torch.save(model.state_dict(), tmp_path / "model.pt")
    captured, checkpoint = read_program(tmp_path / "model.rqp"), CheckpointReader(tmp_path / "model.pt")
    plan = recinfer.plan(model, precision="fp32", world_size=2)
    export_archive(captured, checkpoint, plan, tmp_path / "model.rqa", name="fields", version="1", progress=False)
    served = load(tmp_path / "model.rqa")
    torch.testing.assert_close(served(*batch), model(*batch))
    with pytest.raises(InputError, match=r"feature 'user', sample 2: id 60 is out of range; .* rows 0 to 59"):
        served({**batch[0], "user": torch.tensor([0, 1, 60, 0, 0, 0])})
    with pytest.raises(InputError, match=r"feature 'gender': got the id 0.5; expected whole numbers"):
        served({**batch[0], "gender": torch.full((6,), 0.5)})
    with pytest.raises(InputError, match=r"feature 'user': sample 0 has 2 values; .* exactly 1 of every sample"):
        served({**batch[0], "user": torch.zeros(6, 2, dtype=torch.int64)})


class InPlace(nn.Module):
    """Forward changes ids and their lengths in place, in every way that a KeyedJaggedTensor offers."""

    def __init__(self) -> None:
        super().__init__()
        tables = [recinfer.EmbeddingBagConfig(300, 4, name, feature_names=[name]) for name in "ab"]
        self.bags = recinfer.EmbeddingBagCollection(tables=tables)

    def forward(self, ids: KeyedJaggedTensor) -> dict[str, Tensor]:
        values = ids.values()
        values %= 50
        made = self.bags(KeyedJaggedTensor(ids.keys(), values, lengths=ids.lengths())).values()
        values.view(-1).clamp_(max=20)
        values[values > 10] = 0
        twice = torch.ones(ids.stride(), dtype=torch.int64)
        twice *= 2
        first = ids["a"].lengths().unsqueeze(1).expand(-1, 2).reshape(-1)
        filled = KeyedJaggedTensor(
            ["a", "b"], torch.cat([first, ids["b"].lengths()]), lengths=torch.cat([twice, torch.ones_like(twice)])
        )
        return {"made": made, "same": self.bags(ids).values(), "filled": self.bags(filled).values()}


def test_ids_that_forward_changes_in_place(tmp_path: Path) -> None:
    def draw(batch: int) -> KeyedJaggedTensor:
        d = Draw(batch, batch)
        return d.kjt(d.bag("a", 300), d.bag("b", 300))

    model = InPlace().eval()
    served = recinfer.export(model, draw(6), tmp_path / "model.rqa", precision="fp32", progress=False)
    found, expected = served(draw(9)), model(draw(9))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)


def test_a_program_has_the_sizes_of_its_trace() -> None:
    """The exporter of another program runs a convolution, whose kernel depends on the number of samples."""
    model, batch = p.Columns(), p.Columns.draw(Draw(6, 1))
    cut = cut_model(model, find_leaves(model), lambda body: None, [batch])
    assert cut is not None
    program = cut.parts["ids"].program
    (node,) = program.given
    assert node.meta["val"].shape[0] < 16  # which torch takes for a limit from now on
    assert {str(sizes.upper) for sizes in exported(program).range_constraints.values()} == {"int_oo"}
