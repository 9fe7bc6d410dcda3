"""Vocabularies of checkpoints with managed collisions give the rows that TorchRec gave, and unsound checkpoints are refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from recinfer.archive.captured import collections_of, read_program
from recinfer.archive.cut import cut_model
from recinfer.archive.leaves import find_leaves
from recinfer.capture import capture
from recinfer.checkpoint import CheckpointReader, load_into, save_checkpoint
from recinfer.checkpoint.live import LiveWeights
from recinfer.errors import CheckpointError, ConfigError
from recinfer.models.dlrm import DLRM
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.hash_mc_modules import HashZchManagedCollisionModule
from recinfer.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from recinfer.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from recinfer.modules.mc_slots import murmur_hash3, unsigned_remainder
from recinfer.modules.remapping import managed_collision_module
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
from recinfer.vocabulary.managed_collisions import vocabularies_of
from recinfer.vocabulary.table import TableVocabulary, segments_of
from tests.golden.managed import (
    FILE,
    HASHED,
    INPUT_HASH_SIZE,
    SEGMENTS,
    SIZE,
    digest,
    hashed_identities,
    hashed_queries,
    queries,
)

CPU, META = torch.device("cpu"), torch.device("meta")
PREFIX = "sparse._managed_collision_collection._managed_collision_modules.t."
TABLE = ("sparse._embedding_module", "t")
EMPTY = 2**63 - 1


def model_of(module: ManagedCollisionModule, returns_rows: bool = False) -> nn.Module:
    tables = [EmbeddingBagConfig(module.output_size(), 4, "t", feature_names=["f"])]
    collisions = ManagedCollisionCollection({"t": module}, tables)
    collection = EmbeddingBagCollection(tables=tables, device=META)
    return nn.ModuleDict({"sparse": ManagedCollisionEmbeddingBagCollection(collection, collisions, returns_rows)})


def sorted_model(size: int = SIZE, **arguments: Any) -> nn.Module:
    given = {"input_hash_size": INPUT_HASH_SIZE} | arguments
    return model_of(MCHManagedCollisionModule(size, META, DistanceLFU_EvictionPolicy(), 1, **given))


def hashed_model(arguments: dict[str, Any]) -> nn.Module:
    return model_of(HashZchManagedCollisionModule(device=META, is_inference=True, **arguments))


def checkpoint_of(folder: Path, state: Mapping[str, Tensor]) -> CheckpointReader:
    torch.save({PREFIX + key: value for key, value in state.items()}, folder / "model.pt")
    return CheckpointReader(folder / "model.pt")


def stored(case: str) -> dict[str, Tensor]:
    prefix = f"{case}/state/"
    with np.load(FILE) as golden:
        return {key.removeprefix(prefix): torch.from_numpy(golden[key]) for key in golden if key.startswith(prefix)}


def rows_of(vocabulary: TableVocabulary, ids: Tensor) -> Tensor:
    """The row of each id by the rules of a vocabulary, -1 for no row."""
    segments = [
        vocabulary.segments[s] for s in segments_of(ids.numpy(), len(vocabulary.segments), vocabulary.input_hash_size)
    ]
    spread = torch.tensor([max(segment.miss_rows, 1) for segment in segments])
    rows = torch.tensor([segment.miss_row for segment in segments]) + unsigned_remainder(murmur_hash3(ids), spread)
    rows[torch.tensor([segment.miss_rows == 0 for segment in segments])] = -1
    order = np.argsort(vocabulary.ids)
    known = vocabulary.ids[order]
    places = np.minimum(np.searchsorted(known, ids.numpy()), len(known) - 1)
    hits = torch.from_numpy(known[places] == ids.numpy())
    rows[hits] = torch.from_numpy(vocabulary.rows[order][places])[hits]
    return rows


@pytest.mark.parametrize("count", SEGMENTS)
def test_a_checkpoint_of_ranks_gives_the_rows_of_torchrec(count: int, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, stored(f"segments-{count}"))
    vocabulary = vocabularies_of(sorted_model(), checkpoint)[TABLE]
    assert [segment.first_row for segment in vocabulary.segments] == SEGMENTS[count][:-1]
    rows = rows_of(vocabulary, queries(100_000))
    with np.load(FILE) as golden:
        assert np.array_equal(rows[:2000].numpy(), golden[f"segments-{count}/rows"])
        assert digest(rows) == golden[f"segments-{count}/all_rows"]


@pytest.mark.parametrize("case", [case for case in HASHED if case != "divided"])
def test_a_hashed_checkpoint_gives_the_rows_of_torchrec(case: str, tmp_path: Path) -> None:
    arguments = HASHED[case]
    whole = HashZchManagedCollisionModule(device=torch.device("cpu"), is_inference=True, **arguments)
    whole._hash_zch_identities.data.copy_(hashed_identities(arguments))
    checkpoint = checkpoint_of(tmp_path, whole.state_dict())
    vocabulary = vocabularies_of(hashed_model(arguments), checkpoint)[TABLE]
    assert len(vocabulary.ids) > len(set(whole._hash_zch_identities.flatten().tolist())) - 2 > 30
    ids = hashed_queries(arguments, 2000)
    assert torch.equal(rows_of(vocabulary, ids), whole.slots_of(ids))


def test_the_ids_minus_1_and_int64_max_have_the_rows_that_torchrec_gives_them(tmp_path: Path) -> None:
    state = stored("segments-4")
    last = state["_mch_sorted_raw_ids"][75:]
    vocabulary = vocabularies_of(sorted_model(), checkpoint_of(tmp_path, state))[TABLE]
    row = vocabulary.rows[vocabulary.ids == EMPTY]
    assert row.tolist() == [int(state["_mch_remapped_ids_mapping"][75 + int((last == EMPTY).nonzero()[0])])]
    arguments = {"zch_size": 8, "total_num_buckets": 1}
    empty = torch.full((8, 1), -1)
    vocabulary = vocabularies_of(hashed_model(arguments), checkpoint_of(tmp_path, {"_hash_zch_identities": empty}))[
        TABLE
    ]
    assert vocabulary.ids.tolist() == [-1]


def bad(state: dict[str, Tensor], key: str, value: Any, place: Any = None) -> dict[str, Tensor]:
    changed = state[key].clone()
    if place is None:
        changed = torch.as_tensor(value)
    else:
        changed[place] = value
    return {**state, key: changed}


def test_unsound_checkpoints_are_refused(tmp_path: Path) -> None:
    two = stored("segments-2")

    def refused(state: dict[str, Tensor], message: str, model: nn.Module | None = None) -> None:
        with pytest.raises(CheckpointError, match=message):
            vocabularies_of(model or sorted_model(), checkpoint_of(tmp_path, state))

    ids = two["_mch_sorted_raw_ids"]
    refused(bad(two, "_mch_sorted_raw_ids", int(ids[0]), 1), "ids .* occur more than once.*input_hash_size")
    refused(bad(two, "_mch_remapped_ids_mapping", 3, 4), "rows 3 belong to more than one id|has row 3")
    refused(bad(two, "_mch_remapped_ids_mapping", 97, 4), "has row 97; the table has 97 rows")
    refused(bad(two, "_output_segments_tensor", [0, 60, 50, 97]), "segment 1 has rows 60 to 49")
    refused(bad(two, "_output_segments_tensor", [0, 60, 97]), "is an id of segment 1")
    refused(bad(two, "_output_segments_tensor", [0, 49]), "segments have 49 rows; the table has 97")
    refused(two, "is an id of segment 1 .* such as input_hash_size", sorted_model(input_hash_size=2**63 - 1))
    refused(bad(two, "_mch_sorted_raw_ids", ids.int()), r"is torch\.int32 \[97\]; expected int64 \[97\]")
    refused(two, r"is torch\.int64 \[97\]; expected int64 \[90\]", sorted_model(90))
    refused({k: v for k, v in two.items() if k != "_mch_sorted_raw_ids"}, "has no .*_mch_sorted_raw_ids")

    buckets = {"zch_size": 120, "total_num_buckets": 8, "max_probe": 20}
    whole = HashZchManagedCollisionModule(device=torch.device("cpu"), is_inference=True, **buckets)
    whole._hash_zch_identities.data[100] = 10**12
    refused(whole.state_dict(), "1 of 1 stored ids in no slot, such as 1000000000000", hashed_model(buckets))
    refused(whole.state_dict(), "have 8 buckets, the model's 4", hashed_model({**buckets, "total_num_buckets": 4}))


def test_settings_that_no_server_supports_are_refused(tmp_path: Path) -> None:
    checkpoint = checkpoint_of(tmp_path, stored("segments-1"))
    with pytest.raises(ConfigError, match="input_hash_func"):
        vocabularies_of(sorted_model(input_hash_func=lambda ids, size: ids), checkpoint)
    for name in ("inference_dispatch_div_train_world_size", "no_bag"):
        with pytest.raises(ConfigError, match=f"{name}=True"):
            vocabularies_of(hashed_model({"zch_size": 8, "total_num_buckets": 1, name: True}), checkpoint)

    class Other(MCHManagedCollisionModule):
        """A class that is not known by its name."""

    Other.__mro__[1].__name__ = "Renamed"
    try:
        with pytest.raises(ConfigError, match="of a Other; expected MCH"):
            vocabularies_of(model_of(Other(4, META, DistanceLFU_EvictionPolicy(), 1)), checkpoint)
    finally:
        Other.__mro__[1].__name__ = "MCHManagedCollisionModule"


def test_a_state_that_was_never_set_is_refused(tmp_path: Path) -> None:
    arguments = HASHED["any-id"]
    hashed = HashZchManagedCollisionModule(device=torch.device("cpu"), is_inference=True, **arguments).state_dict()
    for model, state in ((sorted_model(), stored("segments-2")), (hashed_model(arguments), hashed)):
        zeros = {key: torch.zeros_like(value) for key, value in state.items()}
        zeros |= {key: value for key, value in state.items() if key == HashZchManagedCollisionModule.BUCKET_BUFFER}
        with pytest.raises(
            CheckpointError, match=r"managed collisions of table 't' have a state of zeros alone; .* before saving"
        ):
            vocabularies_of(model, checkpoint_of(tmp_path, zeros))


class Ranker(nn.Module):
    """Pooled and unpooled tables with managed collisions, and a layer over both."""

    def __init__(self, device: torch.device = CPU, returns_rows: bool = False) -> None:
        super().__init__()

        def collisions(tables: Any, **hashed: Any) -> ManagedCollisionCollection:
            modules: dict[str, ManagedCollisionModule] = {
                t.name: MCHManagedCollisionModule(t.num_embeddings, device, DistanceLFU_EvictionPolicy(), 2)
                for t in tables
            }
            return ManagedCollisionCollection(modules | hashed, tables)

        bags = [
            EmbeddingBagConfig(24, 4, "goods", feature_names=["clicked", "shown"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(16, 8, "users", feature_names=["user"]),
        ]
        rows = [EmbeddingConfig(12, 4, "recent", feature_names=["history"])]
        hashed = HashZchManagedCollisionModule(16, device, 2, 5, is_inference=True)
        self.bags = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=bags, device=device), collisions(bags, users=hashed), returns_rows
        )
        self.rows = ManagedCollisionEmbeddingCollection(
            EmbeddingCollection(tables=rows, device=device), collisions(rows)
        )
        self.layer = nn.Linear(3 + 16 + 4, 1)

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        pooled, _ = self.bags(sparse)
        history, _ = self.rows(sparse)
        recent = history["history"].to_padded_dense(3).sum(1)
        return self.layer(torch.cat([dense, pooled.values(), recent], 1)).squeeze(1)


FEATURES = ["clicked", "shown", "user", "history"]


def ids_of(samples: int, seed: int) -> KeyedJaggedTensor:
    """Raw ids of the model's features: popular ones, rare ones and the ends of the range."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4 * samples,), generator=generator)
    numbers = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
    ids = torch.where(numbers < 2, EMPTY - numbers, numbers * 0x1234567890ABCDF - 2**61)
    return KeyedJaggedTensor(FEATURES, ids, lengths=lengths)


def trained_ranker() -> Ranker:
    torch.manual_seed(0)
    model = Ranker()
    for step in range(6):
        model.bags._managed_collision_collection._managed_collision_modules["goods"].train()
        model(torch.randn(8, 3), ids_of(8, step))
    users = model.bags._managed_collision_collection._managed_collision_modules["users"]
    assert isinstance(users, HashZchManagedCollisionModule)
    known = torch.unique(ids_of(64, 1)["user"].values())[::3]
    users._hash_zch_identities.data[users.slots_of(known), 0] = known
    return model.eval()


def test_a_model_is_cut_at_its_lookups_of_raw_ids() -> None:
    model = trained_ranker()
    weights, leaves = LiveWeights(model), find_leaves(model)
    assert [leaf.path for leaf in leaves] == ["bags._embedding_module", "rows._embedding_module"]
    given = (torch.randn(4, 3), ids_of(4, 9))

    def load(body: nn.Module) -> None:
        load_into(weights, body, only=list(body.state_dict()))

    for batches in ([], [given]):
        cut = cut_model(model, leaves, load, batches)
        assert cut is not None and "ids" not in cut.parts
        assert [info.name for info in cut.signature.inputs if info.kind == "ids"] == FEATURES
    returning = Ranker(returns_rows=True)
    for batches in ([], [given]):
        with pytest.raises(
            ConfigError, match="'bags' is a ManagedCollisionEmbeddingBagCollection that returns the rows"
        ):
            cut_model(returning, find_leaves(returning), load, batches)


def test_a_captured_program_brings_the_settings_of_its_collisions(tmp_path: Path) -> None:
    model = trained_ranker()
    capture(model, (torch.randn(4, 3), ids_of(4, 9))).save(tmp_path / "model.capture")
    captured = collections_of(read_program(tmp_path / "model.capture"))
    expected = vocabularies_of(model, LiveWeights(model))
    found = vocabularies_of(captured, LiveWeights(model))
    assert (
        list(found) == list(expected) == [(leaf.path, c.name) for leaf in find_leaves(captured) for c in leaf.configs]
    )
    for key, vocabulary in found.items():
        assert np.array_equal(vocabulary.ids, expected[key].ids) and np.array_equal(vocabulary.rows, expected[key].rows)
        assert vocabulary.segments == expected[key].segments


def test_settings_of_another_file_are_checked() -> None:
    for settings in (
        {},
        {"class": "Other"},
        {"class": "MCHManagedCollisionModule", "size": 3},
        {"class": "MCHManagedCollisionModule"},
    ):
        with pytest.raises(ConfigError, match="settings of managed collisions"):
            managed_collision_module(settings, META)


def dlrm(**arguments: Any) -> DLRM:
    tables = [EmbeddingBagConfig(12, 4, "t", feature_names=["f"]), EmbeddingBagConfig(8, 4, "u", feature_names=["g"])]
    modules: dict[str, ManagedCollisionModule] = {
        "t": MCHManagedCollisionModule(12, CPU, LFU_EvictionPolicy(), 1, input_hash_size=2**40, **arguments),
        "u": HashZchManagedCollisionModule(8, CPU, 2, 3, input_hash_size=1000, is_inference=True),
    }
    collection: Any = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables), ManagedCollisionCollection(modules, tables)
    )
    return DLRM(collection, 3, [4], [4, 1])


def test_model_json_holds_the_settings_of_managed_collisions(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = dlrm()
    ids = KeyedJaggedTensor(["f", "g"], torch.tensor([2**41, -7, 5, 6]), lengths=torch.ones(4, dtype=torch.int64))
    collisions = model.sparse_arch.embedding_bag_collection._managed_collision_collection
    collisions._managed_collision_modules["t"](  # type: ignore[operator]
        {"t": JaggedTensor(torch.tensor([2**41, -7]), lengths=torch.tensor([1, 1]))}
    )
    expected = model.eval()(torch.ones(2, 3), ids)
    save_checkpoint(tmp_path / "checkpoint", model)
    checkpoint = CheckpointReader(tmp_path / "checkpoint")
    built = checkpoint.build_model()
    load_into(checkpoint, built)
    assert torch.equal(built(torch.ones(2, 3), ids), expected)
    found = vocabularies_of(checkpoint.build_model(), checkpoint)[
        "sparse_arch.embedding_bag_collection._embedding_module", "t"
    ]
    assert {2**41, -7} <= set(found.ids.tolist()) and found.input_hash_size == 2**40
    save_checkpoint(tmp_path / "hashed", dlrm(input_hash_func=lambda ids, size: ids))
    assert (CheckpointReader(tmp_path / "hashed").model_json or {})["model"] is None
