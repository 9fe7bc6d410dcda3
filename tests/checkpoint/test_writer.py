"""Writing: round trips, reading by torch's own loader, model.json, and errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from recinfer.checkpoint import CheckpointReader, load_into, resolve_model, save_checkpoint
from recinfer.errors import CheckpointError, ConfigError, NotFoundError, UnavailableError
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection
from tests.distributed.spawn import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def dlrm(device: str = "cpu") -> DLRM:
    tables = [
        EmbeddingBagConfig(50, 8, "t1", feature_names=["f1", "f2"]),
        EmbeddingBagConfig(30, 8, "t2", feature_names=["f3"], pooling=PoolingType.MEAN),
    ]
    return DLRM(EmbeddingBagCollection(tables=tables, device=torch.device(device)), 4, [16, 8], [12, 6, 1])


def test_a_dlrm_comes_back_from_the_folder_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = dlrm()
    save_checkpoint(tmp_path / "ck", model, model_name="clicks", model_version="7")
    reader = CheckpointReader(tmp_path / "ck")
    assert reader.keys() == sorted(model.state_dict())
    assert "sparse_arch.embedding_bag_collection.embedding_bags.t1.weight" in reader
    assert reader.model_json is not None
    assert (reader.model_json["name"], reader.model_json["version"]) == ("clicks", "7")
    assert reader.contract is None
    again = reader.build_model()
    assert all(p.is_meta for p in again.parameters())
    load_into(reader, again)
    assert {k: v.shape for k, v in again.state_dict().items()} == {k: v.shape for k, v in model.state_dict().items()}
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    collections = [m.sparse_arch.embedding_bag_collection for m in (model, again)]  # type: ignore[union-attr]
    assert collections[0].embedding_bag_configs() == collections[1].embedding_bag_configs()


def test_torchs_own_loader_reads_it_into_a_module(tmp_path: Path) -> None:
    model, other = dlrm(), dlrm()
    save_checkpoint(tmp_path / "ck", model)
    state = other.state_dict()
    dcp.load({"model": state}, checkpoint_id=tmp_path / "ck", no_dist=True)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))


def test_optimizer_state_is_saved_under_the_parameters_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    tables, rest = torch.optim.Adagrad(model[0].parameters()), torch.optim.Adam(model[1].parameters())
    model(torch.ones(4, 3)).sum().backward()
    tables.step()
    rest.step()
    save_checkpoint(tmp_path / "ck", model, optimizer=[tables, rest])
    reader = CheckpointReader(tmp_path / "ck")
    assert reader.keys() == sorted(model.state_dict())
    raw = CheckpointReader(tmp_path / "ck", prefix="optim.")
    assert torch.equal(raw.read("state.0.weight.sum"), tables.state[model[0].weight]["sum"])
    assert torch.equal(raw.read("state.1.bias.exp_avg"), rest.state[model[1].bias]["exp_avg"])


def test_a_module_that_is_not_registered_needs_a_function(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ck", nn.Linear(2, 1))
    reader = CheckpointReader(tmp_path / "ck")
    assert reader.model_json is not None
    assert reader.model_json["model"] is None
    with pytest.raises(CheckpointError, match="has no config to build the module from; give a function"):
        reader.build_model()
    (tmp_path / "ck" / "model.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no model\.json"):
        CheckpointReader(tmp_path / "ck").build_model()


def test_an_earlier_checkpoint_is_replaced_and_nothing_is_left_over(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "ck", nn.Linear(2, 1), model_version="1")
    newer = nn.Linear(2, 1)
    save_checkpoint(tmp_path / "ck", newer, model_version="2")
    assert [p.name for p in tmp_path.iterdir()] == ["ck"]
    assert torch.equal(CheckpointReader(tmp_path / "ck").read("weight"), newer.weight)


def test_folder_that_is_not_a_checkpoint_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(CheckpointError, match="holds files that are not a checkpoint"):
        save_checkpoint(tmp_path / "mine", nn.Linear(2, 1))
    with pytest.raises(CheckpointError, match="is not a folder"):
        save_checkpoint(tmp_path / "mine" / "thesis.txt", nn.Linear(2, 1))
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "x"


def test_weights_on_meta_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="weight, bias: on the meta device"):
        save_checkpoint(tmp_path / "ck", nn.Linear(2, 1, device="meta"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "recinfer.model/9"}, "format 'recinfer.model/9', expected 'recinfer.model/1'"),
        ({"extra": 1}, r"unknown keys \['extra'\], missing keys \[\]"),
        ({"name": 3}, "name is a int"),
        ({"model": "dlrm"}, "model is a str"),
        ({"model": {"class": "os.system"}}, "unknown model class 'os.system'; known classes: dlrm"),
        ({"model": {"class": "dlrm", "tables": []}}, "does not build a dlrm"),
    ],
)
def test_a_wrong_model_json_is_explained(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    save_checkpoint(tmp_path / "ck", dlrm())
    path = tmp_path / "ck" / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path / "ck").build_model()
    path.write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        CheckpointReader(tmp_path / "ck").build_model()


def test_table_types_survive(tmp_path: Path) -> None:
    tables = [EmbeddingBagConfig(5, 4, "t", feature_names=["f"], data_type=DataType.FP16)]
    model = DLRM(EmbeddingBagCollection(tables=tables), 2, [4], [3, 1])
    save_checkpoint(tmp_path / "ck", model)
    again = CheckpointReader(tmp_path / "ck").build_model()
    weight = again.state_dict()["sparse_arch.embedding_bag_collection.embedding_bags.t.weight"]
    assert weight.dtype == torch.float16


def _save_sharded(rank: int, world_size: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Module()
    model.rows = nn.Parameter(distribute_tensor(torch.arange(70.0).view(7, 10), mesh, [Shard(0)]))
    model.columns = nn.Parameter(distribute_tensor(torch.arange(70.0).view(7, 10), mesh, [Shard(1)]))
    save_checkpoint(folder, model)


@pytest.mark.slow
def test_two_ranks_write_one_checkpoint(tmp_path: Path) -> None:
    run_ranks(2, _save_sharded, str(tmp_path / "ck"))
    reader = CheckpointReader(tmp_path / "ck")
    expected = torch.arange(70.0).view(7, 10)
    for key in ("rows", "columns"):
        assert len(reader._tensors["model." + key].chunks) == 2
        assert torch.equal(reader.read(key), expected)
        assert torch.equal(reader.read_rows(key, 3, 5), expected[3:5])
    assert (tmp_path / "ck" / "model.json").exists()


# ---- --model pkg.module:function


def test_a_users_function_builds_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_ranker_ab.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Linear(2, 1, device='meta')\ndef other():\n    return 3\n"
    )
    (tmp_path / "my_broken_ab.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    assert isinstance(resolve_model("my_ranker_ab:build"), nn.Linear)
    with pytest.raises(NotFoundError, match="no function 'biuld'; it has build, other"):
        resolve_model("my_ranker_ab:biuld")
    with pytest.raises(NotFoundError, match="no module 'nowhere_ab'"):
        resolve_model("nowhere_ab:build")
    with pytest.raises(ConfigError, match="returned a int"):
        resolve_model("my_ranker_ab:other")
    with pytest.raises(UnavailableError, match="it imports 'a_package_that_is_not_there', which is not"):
        resolve_model("my_broken_ab:build")
    for spec in ("my_ranker_ab", "my_ranker_ab:", ":build", "a.b:c.d"):
        with pytest.raises(ConfigError, match=r"expected pkg\.module:function"):
            resolve_model(spec)
