"""Deltas against a full export of the new checkpoint: the same answers, bit for bit, before, after and while they are applied."""

from __future__ import annotations

import copy
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from recinfer.archive.delta import read_delta
from recinfer.archive.reader import Archive
from recinfer.checkpoint import CheckpointReader, save_checkpoint
from recinfer.data.contract import FeatureContract
from recinfer.errors import ArchiveError, ConfigError, InputError
from recinfer.inference.delta import make_delta
from recinfer.inference.export import export_archive
from recinfer.inference.predictor import Predictor, load
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from tests.archive.models import (
    EVERYTHING_ROWS,
    NUM_DENSE,
    RANKER_ROWS,
    Everything,
    Ranker,
    make_archive,
    make_request,
)
from tests.inference.test_export import make_contract

KINDS = ("table_wise", "row_wise", "column_wise", "grid_shard")


def changed(model: nn.Module, seed: int, *, dense: bool = True, part: float = 0.05) -> nn.Module:
    """``model`` with some rows of every table and, if ``dense``, all else changed."""
    torch.manual_seed(seed)
    new = copy.deepcopy(model)
    with torch.no_grad():
        for name, parameter in new.named_parameters():
            if "embedding" in name and parameter.dim() == 2:
                rows = torch.rand(len(parameter)) < part
                parameter[rows] += torch.randn_like(parameter[rows])
            elif dense:
                parameter += 0.1 * torch.randn_like(parameter)
    return new


def save(model: nn.Module, path: Path) -> CheckpointReader:
    torch.save(model.state_dict(), path)
    return CheckpointReader(path)


def full(archive: Archive, model: nn.Module, folder: Path, name: str) -> Predictor:
    reader = save(model, folder / f"{name}.pt")
    out = folder / f"{name}.rqa"
    export_archive(model, reader, archive.plan, out, name="small", version="7", progress=False)
    return load(out)


def answers(predictor: Predictor, rows: dict[str, int], num_dense: int = NUM_DENSE) -> list[torch.Tensor]:
    request = make_request(rows, 33, seed=9, longest=3)
    found = predictor.lookup(request)
    outputs = predictor.predict(torch.ones(33, num_dense), request)
    pooled = [] if found.pooled is None else [found.pooled.values()]
    return [*pooled, *(s.values() for s in found.sequences.values()), *outputs.values()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b))


@pytest.mark.parametrize("precision", [DataType.INT8, DataType.INT4, DataType.FP16, DataType.BF16])
def test_a_delta_gives_what_a_full_export_gives(tmp_path: Path, precision: DataType) -> None:
    model, archive = make_archive(tmp_path / "a", precision=precision, kinds=KINDS)
    before = (archive.root / "shards/rank-00001.safetensors").read_bytes()
    new = changed(model, 1)
    report = make_delta(archive.root, new, save(new, tmp_path / "new.pt"), tmp_path / "d.rqd", progress=False)
    expected = full(archive, new, tmp_path, "new")
    predictor = load(archive.root)
    old = answers(predictor, RANKER_ROWS)
    predictor.apply_delta(tmp_path / "d.rqd")
    assert same(answers(predictor, RANKER_ROWS), answers(expected, RANKER_ROWS))
    assert not same(old, answers(predictor, RANKER_ROWS))
    assert predictor.manifest.tables == expected.manifest.tables
    assert predictor.manifest.check == expected.manifest.check
    assert torch.equal(predictor._state._mapped.buffer, expected._mapped.buffer)  # every byte of every row
    assert predictor.num_deltas == report.sequence == 1
    for table in archive.plan.tables:
        old_rows, new_rows = (m.get_submodule(f"ebc.embedding_bags.{table.table}").weight for m in (model, new))
        touched = int((old_rows != new_rows).any(1).sum())
        assert 0 < report.changed[f"ebc.{table.table}"] <= touched
    predictor.undo_delta()
    assert same(answers(predictor, RANKER_ROWS), old)
    assert (archive.root / "shards/rank-00001.safetensors").read_bytes() == before
    assert same(answers(load(archive.root), RANKER_ROWS), old)


def test_every_kind_of_module(tmp_path: Path) -> None:
    torch.manual_seed(2)
    model, archive = make_archive(tmp_path / "a", model=Everything(), ranks=2, kinds=("row_wise", "column_wise"))
    new = changed(model, 3)
    report = make_delta(archive.root, new, save(new, tmp_path / "new.pt"), tmp_path / "d.rqd", progress=False)
    assert "dense/position_weights.safetensors" in report.dense_changed
    predictor = load(archive.root)
    predictor.apply_delta(tmp_path / "d.rqd")
    assert same(
        answers(predictor, EVERYTHING_ROWS, 2), answers(full(archive, new, tmp_path, "new"), EVERYTHING_ROWS, 2)
    )


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Archive, list[Path], list[Predictor], Path]:
    """An archive, three deltas in a row, and the full export of each state (the archive itself first)."""
    folder = tmp_path_factory.mktemp("chain")
    model, archive = make_archive(folder / "a")
    paths: list[Path] = []
    states = [load(archive.root)]
    for i in range(3):
        model = changed(model, 10 + i, dense=i != 1)
        reader = save(model, folder / f"{i}.pt")
        path = folder / f"{i}.rqd"
        report = make_delta(archive.root, model, reader, path, after=paths, progress=False, max_chunk_bytes=3000)
        assert report.sequence == i + 1
        paths.append(path)
        states.append(full(archive, model, folder, f"full{i}"))
    return archive, paths, states, folder


def test_deltas_follow_one_another_and_go_back(chain: tuple[Any, ...]) -> None:
    archive, paths, states, _ = chain
    expected = [answers(state, RANKER_ROWS) for state in states]
    predictor = load(archive.root)
    for i, path in enumerate(paths):
        assert same(answers(predictor, RANKER_ROWS), expected[i])
        predictor.apply_delta(path)
    for i in (3, 2, 1, 0):
        assert predictor.num_deltas == i
        assert same(answers(predictor, RANKER_ROWS), expected[i])
        if i:
            predictor.undo_delta()
    with pytest.raises(InputError, match="none to undo"):
        predictor.undo_delta()
    predictor.apply_delta(paths[0])
    assert same(answers(predictor, RANKER_ROWS), expected[1])


def test_order_and_base_are_checked_and_nothing_changes(chain: tuple[Any, ...], tmp_path: Path) -> None:
    archive, paths, states, _ = chain
    predictor = load(archive.root)
    for path in (paths[1], paths[2]):
        with pytest.raises(ArchiveError) as caught:
            predictor.apply_delta(path)
        assert caught.value.rule == "X6"
    predictor.apply_delta(paths[0])
    with pytest.raises(ArchiveError) as caught:
        predictor.apply_delta(paths[0])
    assert caught.value.rule == "X6"
    assert same(answers(predictor, RANKER_ROWS), answers(states[1], RANKER_ROWS))
    with pytest.raises(ArchiveError) as caught:
        load(states[1].archive.root).apply_delta(paths[0])
    assert caught.value.rule == "X5"
    moved = tmp_path / "moved.rqa"
    shutil.copytree(archive.root, moved)
    loaded = load(moved)
    text = (moved / "manifest.json").read_text()
    (moved / "manifest.json").write_text(text + " ")
    with pytest.raises(ArchiveError, match="was replaced"):
        loaded.apply_delta(paths[0])


def test_requests_see_all_of_a_delta_or_nothing(chain: tuple[Any, ...]) -> None:
    archive, paths, states, _ = chain
    allowed = [answers(state, RANKER_ROWS) for state in states[:2]]
    predictor = load(archive.root)
    stop = threading.Event()
    wrong: list[Any] = []
    counts, seen = [0, 0], [0, 0]  # answers of either kind, and of either state
    request = make_request(RANKER_ROWS, 33, seed=9, longest=3)
    dense = torch.ones(33, NUM_DENSE)

    def ask() -> None:
        while not stop.is_set():
            pooled = predictor.lookup(request).pooled
            output = predictor.predict(dense, request)["output"]
            for given, place in ((pooled.values(), 0), (output, 1)):
                matches = [torch.equal(given, state[place]) for state in allowed]
                counts[place] += 1
                if any(matches):
                    seen[matches.index(True)] += 1
                else:
                    wrong.append(given)

    def wait(state: int) -> None:
        """Until some more answers of that state have come."""
        goal, end = seen[state] + 6, time.monotonic() + 120
        while seen[state] < goal and not wrong:
            assert time.monotonic() < end
            time.sleep(0.002)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(10):
        predictor.apply_delta(paths[0])
        wait(1)
        predictor.undo_delta()
        wait(0)
    stop.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(counts) > 0 and min(seen) >= 60


def test_nothing_changed_is_a_small_delta(tmp_path: Path) -> None:
    model, archive = make_archive(tmp_path)
    report = make_delta(archive.root, model, save(model, tmp_path / "n.pt"), tmp_path / "d.rqd", progress=False)
    assert report.rows == 0 and report.changed == {}
    predictor = load(archive.root)
    old = answers(predictor, RANKER_ROWS)
    predictor.apply_delta(tmp_path / "d.rqd")
    assert same(answers(predictor, RANKER_ROWS), old)


def test_another_model_needs_another_archive(tmp_path: Path) -> None:
    _, archive = make_archive(tmp_path)
    model = Ranker()
    table = EmbeddingBagConfig(53, 12, "users", feature_names=["f_user", "f_more"])
    model.ebc = EmbeddingBagCollection(tables=[table, *model.ebc.embedding_bag_configs()[1:]])
    model.top[0] = nn.Linear(8 + 24 + 16 + 16 + 20, 16)
    with pytest.raises(ConfigError, match="modules differ from the archive's"):
        make_delta(archive.root, model, save(model, tmp_path / "n.pt"), tmp_path / "d.rqd", progress=False)
    assert not list(tmp_path.glob("*.rqd")) and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("what", ["f_item", "d0", "same"])
def test_a_checkpoint_of_another_feature_contract_needs_another_archive(tmp_path: Path, what: str) -> None:
    """Its weights would get other ids and other dense numbers than in training."""
    contract = make_contract()
    model, archive = make_archive(tmp_path / "a", contract=contract, out_of_range={"f_user": "default_row"})
    sparse = [replace(f, missing=1) if f.name == what else f for f in contract.sparse]
    dense = [replace(f, shift=1.5) if f.name == what else f for f in contract.dense]
    checkpoint = save_checkpoint(tmp_path / "new", model, contract=FeatureContract(tuple(sparse), tuple(dense)))
    out = tmp_path / "d.rqd"
    if what == "same":
        make_delta(archive.root, model, CheckpointReader(checkpoint), out, progress=False)
        return
    with pytest.raises(ConfigError, match=f"the checkpoint's feature contract of {what} differs"):
        make_delta(archive.root, model, CheckpointReader(checkpoint), out, progress=False)
    assert not out.exists()


def test_a_model_with_other_shapes_needs_another_archive(tmp_path: Path) -> None:
    _, archive = make_archive(tmp_path)
    model = Ranker()
    table = EmbeddingBagConfig(54, 12, "users", feature_names=["f_user"])
    model.ebc = EmbeddingBagCollection(tables=[table, *model.ebc.embedding_bag_configs()[1:]])
    with pytest.raises(ConfigError, match=r"as a new version: .* ebc.users is 54 x 12 in the model, 53 x 12") as caught:
        make_delta(archive.root, model, save(model, tmp_path / "n.pt"), tmp_path / "d.rqd", progress=False)
    assert "plan this model again" not in str(caught.value)


def test_a_failed_delta_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, archive = make_archive(tmp_path)
    from recinfer.archive.delta import DeltaWriter

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(DeltaWriter, "add_rows", fail)
    before = sorted(tmp_path.iterdir())
    reader = save(changed(model, 1), tmp_path / "weights.pt")
    with pytest.raises(KeyboardInterrupt):
        make_delta(archive.root, model, reader, tmp_path / "d.rqd", progress=False)
    assert sorted(tmp_path.iterdir()) == before


def test_other_tools_read_a_delta(chain: tuple[Any, ...]) -> None:
    from safetensors.torch import load_file

    path = chain[1][0]
    delta = read_delta(path)
    tensors = load_file(path)
    for i, rows in enumerate(delta.rows):
        assert torch.equal(tensors[f"rows/{i}"].view(torch.int64).squeeze(1), torch.from_numpy(rows))
        assert torch.equal(tensors[f"packed/{i}"], torch.from_numpy(delta.packed[i]))
