"""Managed collisions in front of tables: features and tables in any order, evicted rows, states, dropped ids, quantized forms."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from recinfer.checkpoint import CheckpointReader, load_into
from recinfer.errors import CheckpointError, ConfigError, InputError, UnavailableError
from recinfer.fx import symbolic_trace
from recinfer.inference.modules import quantize_inference_model
from recinfer.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType, QuantConfig
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.hash_mc_modules import (
    HashZchEvictionConfig,
    HashZchEvictionPolicyName,
    HashZchManagedCollisionModule,
)
from recinfer.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from recinfer.modules.mc_modules import (
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
    apply_mc_method_to_jt_dict,
    dynamic_threshold_filter,
)
from recinfer.quant.embedding_modules import (
    QuantManagedCollisionEmbeddingBagCollection,
    QuantManagedCollisionEmbeddingCollection,
)
from recinfer.sparse.checks import MissingKeyError
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

CPU = torch.device("cpu")
EMPTY = 2**63 - 1


def sorted_module(size: int = 4, interval: int = 1, **arguments: Any) -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(size, CPU, LRU_EvictionPolicy(), interval, **arguments)


def hashed_module(size: int = 8, buckets: int = 1, **arguments: Any) -> HashZchManagedCollisionModule:
    return HashZchManagedCollisionModule(size, CPU, buckets, is_inference=True, **arguments)


def with_ids(module: HashZchManagedCollisionModule, *ids: int) -> HashZchManagedCollisionModule:
    """The module with ids at the slots of their hashes, as far as these differ."""
    module.state_dict()[module.IDENTITY_BUFFER].fill_(-1)
    placed = module.slots_of(torch.tensor(ids)) if not module.disable_fallback else None
    assert placed is not None
    module._hash_zch_identities.data[placed, 0] = torch.tensor(ids)
    return module


def bag_tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(4, 8, "goods", feature_names=["clicked", "shown"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(3, 4, "users", feature_names=["user"]),
    ]


def collisions(tables: Any, **modules: ManagedCollisionModule) -> ManagedCollisionCollection:
    given: dict[str, ManagedCollisionModule] = {t.name: sorted_module(t.num_embeddings) for t in tables} | modules
    return ManagedCollisionCollection(given, tables)


def pooled(**modules: ManagedCollisionModule) -> ManagedCollisionEmbeddingBagCollection:
    torch.manual_seed(0)
    tables = bag_tables()
    return ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables), collisions(tables, **modules), return_remapped_features=True
    )


def unpooled() -> ManagedCollisionEmbeddingCollection:
    torch.manual_seed(0)
    tables = [EmbeddingConfig(4, 8, "goods", feature_names=["clicked"])]
    return ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=tables), collisions(tables))


def features(**ids: list[list[int]]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict(
        {
            name: JaggedTensor.from_dense([torch.tensor(bag, dtype=torch.int64) for bag in bags])
            for name, bags in ids.items()
        }
    )


FIRST = {"user": [[7], []], "other": [[1], [2]], "shown": [[-5], [10**15, -5]], "clicked": [[10**15], []]}


def test_features_come_in_any_order_and_leave_in_the_order_of_the_tables() -> None:
    module = pooled()
    result, rows = module(features(**FIRST))
    assert rows is not None and rows.keys() == ["clicked", "shown", "user"]
    # Empty slots are filled from the last one on; the very last row belongs to unknown ids.
    assert rows["clicked"].to_dense()[0].tolist() == [2] and rows["shown"].to_dense()[1].tolist() == [2, 1]
    assert rows["user"].values().tolist() == [1]
    goods = module.get_parameter("_embedding_module.embedding_bags.goods.weight")
    assert torch.equal(result["shown"][1], goods[1:3].mean(0))
    assert torch.equal(result["clicked"][1], torch.zeros(8))
    module.eval()
    _, rows = module(features(**{**FIRST, "user": [[-(2**63)], [2**63 - 2]]}))
    assert rows["user"].values().tolist() == [2, 2]


def test_weights_and_variable_batches_stay() -> None:
    collection = collisions(bag_tables())
    given = features(clicked=[[1], [2, 3]], shown=[[], [4]], user=[[5], [6]])
    weighted = KeyedJaggedTensor(given.keys(), given.values(), torch.rand(6), given.lengths())
    assert torch.equal(collection(weighted).weights(), weighted.weights())
    variable = KeyedJaggedTensor(
        given.keys(),
        given.values(),
        lengths=torch.tensor([1, 2, 1, 2]),
        stride_per_key_per_rank=[[2], [1], [1]],
        inverse_indices=(given.keys(), torch.tensor([[0, 1], [0, 0], [0, 0]])),
    )
    result = collection(variable)
    assert result.stride_per_key() == [2, 1, 1] and result.inverse_indices_or_none() is not None


def test_a_new_id_does_not_begin_with_the_vector_of_the_evicted_one() -> None:
    module = pooled()
    goods = module.get_parameter("_embedding_module.embedding_bags.goods.weight")
    first = {"clicked": [[1, 2, 3]], "shown": [[]], "user": [[]]}
    optimizer = torch.optim.SGD([goods], lr=1.0)
    result, rows = module(features(**first))
    assert rows["clicked"].values().tolist() == [0, 1, 2]
    result.values().sum().backward()
    optimizer.step()
    trained = goods.detach().clone()
    _, rows = module(features(**{**first, "clicked": [[3, 8, 9]]}))
    assert rows["clicked"].values().tolist() == [2, 0, 1]
    assert torch.equal(goods[2:], trained[2:])
    assert not torch.isclose(goods[:2], trained[:2]).any()
    assert goods[:2].abs().max() <= 0.5  # the bounds of the table's initial values
    _, rows = module.eval()(features(**first))
    assert rows["clicked"].values().tolist() == [3, 3, 2]  # the evicted ids are unknown


def test_the_initial_values_of_evicted_rows_come_from_the_table() -> None:
    def fill(weight: Tensor) -> Tensor:
        return weight.data.fill_(3.0)

    tables = [EmbeddingConfig(3, 2, "t", feature_names=["f"], init_fn=fill)]
    module = ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=tables), collisions(tables))
    weight = module.get_parameter("_embedding_module.embeddings.t.weight")
    weight.data.zero_()
    result, remapped = module(features(f=[[5], [6]]))
    assert remapped is None and torch.equal(result["f"].values(), torch.full((2, 2), 3.0))
    assert weight[:, 0].tolist() == [3.0, 3.0, 0.0]


def test_ids_beyond_the_history_are_not_recorded() -> None:
    module = sorted_module(50, interval=2)
    for ids in (torch.arange(4), torch.arange(100, 140)):
        module({"t": JaggedTensor(ids, lengths=torch.ones_like(ids))})
    held = module.state_dict()["_mch_sorted_raw_ids"]
    assert held[held != EMPTY].tolist() == [0, 1, 2, 3, *range(100, 106)]  # 1.25 * 2 batches of 4
    assert int(module.open_slots()) == 39


def test_hashed_ids_are_recorded_and_looked_up() -> None:
    module = sorted_module(4, input_hash_size=10, input_hash_func=lambda ids, size: ids % size)
    rows = apply_mc_method_to_jt_dict(
        module, "forward", {"t": JaggedTensor(torch.tensor([13, 3]), lengths=torch.ones(2).int())}
    )
    assert rows["t"].values().tolist() == [2, 2]
    assert int(module.state_dict()["_mch_sorted_raw_ids"][0]) == 3


def test_moves_and_copies_keep_the_numbers_of_the_policy() -> None:
    module = sorted_module(4)
    for clone in (copy.deepcopy(module), copy.deepcopy(module).to_empty(device=CPU)):
        clone.load_state_dict(copy.deepcopy(module.state_dict()), assign=True)
        clone({"t": JaggedTensor(torch.tensor([5]), lengths=torch.tensor([1]))})
        assert clone.state_dict()["_mch_last_access_iter"].tolist() == [1, 0, 0, 1]


def test_a_meta_module_takes_a_checkpoint_and_sorts_it(tmp_path: Path) -> None:
    source = pooled()
    source(features(**FIRST))
    state = source.state_dict()
    key = "_managed_collision_collection._managed_collision_modules.goods."
    flipped = {k: v.flip(0) if k.startswith(f"{key}_mch") else v for k, v in state.items()}
    torch.save(flipped, tmp_path / "model.pt")
    tables = bag_tables()
    modules: dict[str, ManagedCollisionModule] = {
        t.name: MCHManagedCollisionModule(t.num_embeddings, torch.device("meta"), LRU_EvictionPolicy(), 1)
        for t in tables
    }
    empty = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
        ManagedCollisionCollection(modules, tables),
        True,
    )
    load_into(CheckpointReader(tmp_path / "model.pt"), empty)
    given = features(**FIRST)
    for expected, got in zip(source.eval()(given), empty.eval()(given)):
        assert torch.equal(expected.values(), got.values())
    assert int(modules["goods"].open_slots()) == 1


def test_a_state_of_other_rows_is_refused() -> None:
    part = sorted_module(6).rebuild_with_output_id_range((2, 4), [0, 2, 4, 6])
    assert part.state_dict()["_output_segments_tensor"][:5].tolist() == [0, 2, 4, 6, -1]
    part.load_state_dict(part.state_dict() | {"_output_segments_tensor": torch.tensor([0, 2, 4, 5, 6] + [-1] * 1020)})
    assert part.state_dict()["_output_segments_tensor"][:5].tolist() == [0, 2, 4, 6, -1]
    with pytest.raises(CheckpointError, match=r"rows 2 to 3 are not whole segments .* begin at \[0, 3, 6\]"):
        part.load_state_dict(part.state_dict() | {"_output_segments_tensor": torch.tensor([0, 3, 6] + [-1] * 1022)})


def test_settings_that_do_not_fit_are_refused() -> None:
    tables = bag_tables()
    with pytest.raises(ConfigError, match="table 'users' has no managed collision module"):
        ManagedCollisionCollection({"goods": sorted_module(4)}, tables)
    with pytest.raises(ConfigError, match="table 'users' gives rows 0 to 3; expected 3 rows"):
        collisions(tables, users=sorted_module(4))
    with pytest.raises(ConfigError, match=r"the tables \['goods', 'users'\] and those"):
        ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=tables), collisions(tables[:1]))
    with pytest.raises(ConfigError, match="expected an EmbeddingBagCollection"):
        ManagedCollisionEmbeddingBagCollection(nn.Linear(1, 1), collisions(tables))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="zch_size is 0"):
        sorted_module(0)
    with pytest.raises(ConfigError, match="1100 segments"):
        sorted_module(4, output_segments=list(range(1101)))
    with pytest.raises(ConfigError, match="10 slots are not 4 equal buckets"):
        hashed_module(10, 4)
    with pytest.raises(ConfigError, match="opt_in_prob is 50 with 0 reserved slots"):
        hashed_module(8, opt_in_prob=50)
    with pytest.raises(ConfigError, match="percent_reserved_slots is 100"):
        hashed_module(8, percent_reserved_slots=100)
    with pytest.raises(ConfigError, match="3 segments"):
        hashed_module(8, 2, output_segments=[0, 2, 4, 8])


def test_bad_features_are_refused() -> None:
    module = pooled()
    with pytest.raises(MissingKeyError, match="'user' is not in the input"):
        module(features(clicked=[[1]], shown=[[1]]))
    given = features(clicked=[[1]], shown=[[1]], user=[[1]])
    with pytest.raises(InputError, match=r"got torch\.float32"):
        module(KeyedJaggedTensor(given.keys(), given.values().float(), lengths=given.lengths()))


def test_ids_without_a_slot_leave_their_bags() -> None:
    dropping = hashed_module(4, max_probe=1, disable_fallback=True)
    keeping = with_ids(hashed_module(4, max_probe=1), 10)
    dropping.load_state_dict(keeping.state_dict())
    module = pooled(goods=dropping).eval()
    result, rows = module(features(clicked=[[10, 77], [], [78]], shown=[[], [10], []], user=[[1], [2], [3]]))
    slot = int(keeping.slots_of(torch.tensor([10])))
    assert rows["clicked"].lengths().tolist() == [1, 0, 0] and rows.values()[:2].tolist() == [slot, slot]
    goods = module.get_parameter("_embedding_module.embedding_bags.goods.weight")
    assert torch.equal(result["clicked"][0], goods[slot])  # the mean over the ids that stayed
    weighted = features(clicked=[[10, 77]], shown=[[]], user=[[1]])
    with pytest.raises(InputError, match="1 ids have no row"):
        module(KeyedJaggedTensor(weighted.keys(), weighted.values(), torch.ones(3), weighted.lengths()))
    with pytest.raises(ConfigError, match="no_bag=False and mutate_miss_lengths=False"):
        module(weighted, mutate_miss_lengths=False)
    staying = hashed_module(4, max_probe=1, disable_fallback=True, no_bag=True)
    staying.load_state_dict(keeping.state_dict())
    bags = {"t": JaggedTensor(torch.tensor([77, 10]), lengths=torch.tensor([2, 0]))}
    assert staying(bags, mutate_miss_lengths=False)["t"].values().tolist() == [0, slot]


def test_buckets_of_a_table_on_several_ranks_answer_as_the_whole_table() -> None:
    whole = hashed_module(24, 6, max_probe=3, input_hash_size=600)
    whole._hash_zch_identities.data.copy_(torch.arange(0, 24 * 25, 25).view(-1, 1))
    ids = torch.arange(600)
    expected = whole.slots_of(ids)
    for first, stop, chosen in ((0, 8, ids < 200), (8, 24, ids >= 200)):
        part = whole.rebuild_with_output_id_range((first, stop))
        assert part.is_sharded and not part.training
        part._hash_zch_identities.data.copy_(whole._hash_zch_identities[first:stop])
        assert torch.equal(part.slots_of(ids[chosen]), expected[chosen])
        with pytest.raises(InputError, match="got ids of buckets 0 to 5"):
            part.slots_of(ids)
    with pytest.raises(ConfigError, match="slots 0 to 8 are not whole buckets"):
        whole.rebuild_with_output_id_range((0, 9))


def test_hashed_tables_are_not_trained_and_leave_metadata_out() -> None:
    config = HashZchEvictionConfig(["f"], single_ttl=24)
    policy = HashZchEvictionPolicyName.SINGLE_TTL_EVICTION
    trained = HashZchManagedCollisionModule(
        8, CPU, 2, eviction_policy_name=policy, eviction_config=config, track_id_freq=True
    )
    state = trained.state_dict()
    assert list(state) == ["_hash_zch_identities", "_hash_zch_runtime_meta", "_hash_zch_metadata", "_hash_zch_bucket"]
    assert trained.evict() is None and trained.buckets() == 2
    with pytest.raises(UnavailableError, match=r"call eval\(\)"):
        trained({"t": JaggedTensor(torch.tensor([1]), lengths=torch.tensor([1]))})
    served = nn.Sequential(hashed_module(8, 2, track_id_freq=True))
    served.load_state_dict({f"0.{key}": value for key, value in state.items()})


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32])
def test_quantized_forms_look_up_what_the_float_modules_look_up(dtype: torch.dtype) -> None:
    module = pooled()
    given = features(**FIRST)
    module(given)
    module.qconfig = QuantConfig(
        lambda: torch.empty(0), lambda: torch.empty(0, dtype=torch.int8), {"goods": dtype, "users": dtype}
    )
    quantized = QuantManagedCollisionEmbeddingBagCollection.from_float(module)
    assert module.training and module._managed_collision_collection.training
    for part in quantized._managed_collision_collection._managed_collision_modules.values():
        assert not part.training
    result, rows = quantized(given)
    expected, expected_rows = module.eval()(given)
    assert torch.equal(rows.values(), expected_rows.values())
    torch.testing.assert_close(result.values(), expected.values(), atol=0 if dtype is torch.float32 else 0.01, rtol=0)
    moved = copy.deepcopy(quantized).to("cpu")
    assert torch.equal(moved(given)[0].values(), result.values())
    assert (
        "_managed_collision_collection._managed_collision_modules.goods._mch_sorted_raw_ids" in quantized.state_dict()
    )
    by_model = quantize_inference_model(nn.Sequential(module), quantization_dtype=dtype)
    assert torch.equal(by_model(given)[0].values(), result.values())


def test_quantized_unpooled_rows() -> None:
    module = unpooled()
    given = features(clicked=[[5, 6], [7]])
    module(given)
    module.qconfig = QuantConfig(
        lambda: torch.empty(0), lambda: torch.empty(0, dtype=torch.int8), {"goods": torch.float32}
    )
    quantized = QuantManagedCollisionEmbeddingCollection.from_float(module)
    result, rows = quantized(given)
    assert torch.equal(result["clicked"].values(), module.eval()(given)[0]["clicked"].values())
    assert rows.values().tolist() == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"managed collisions of tables \[\]"):
        QuantManagedCollisionEmbeddingCollection(
            module._embedding_module.embedding_configs(), managed_collision_collection=None
        )


def test_a_trace_keeps_the_module_as_one_call() -> None:
    graph = symbolic_trace(pooled().eval())
    assert [node.op for node in graph.graph.nodes if node.op not in ("placeholder", "output")] == ["call_module"]
    model = nn.Sequential(unpooled().eval())
    calls = [str(node.target) for node in symbolic_trace(model).graph.nodes if node.op == "call_module"]
    assert calls == ["0"]


def test_a_filter_of_an_empty_history_admits_no_id() -> None:
    mask, threshold = dynamic_threshold_filter(torch.empty(0, dtype=torch.int64))
    assert mask.numel() == 0 and float(threshold) == 0.0
    module = MCHManagedCollisionModule(3, CPU, LFU_EvictionPolicy(dynamic_threshold_filter), 1)
    module({"t": JaggedTensor(torch.empty(0, dtype=torch.int64), lengths=torch.tensor([0]))})
    assert module.state_dict()["_mch_sorted_raw_ids"].tolist() == [EMPTY] * 3
