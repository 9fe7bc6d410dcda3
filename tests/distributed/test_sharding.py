"""The parts of sharding that need no ranks: layout, expansion, combination, grouping, dedup, helpers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

from recinfer.distributed.embedding import create_embedding_sharding
from recinfer.distributed.embedding import create_sharding_infos_by_sharding as infos_of_collection
from recinfer.distributed.embedding_sharding import (
    BaseEmbeddingDist,
    BaseSparseFeaturesDist,
    EmbeddingSharding,
    EmbeddingShardingContext,
    EmbeddingShardingInfo,
    KJTListAwaitable,
    KJTListSplitsAwaitable,
    ListOfKJTListAwaitable,
    ListOfKJTListSplitsAwaitable,
    bucketize_kjt_before_all2all,
    group_tables,
)
from recinfer.distributed.embedding_types import (
    EmbeddingComputeKernel,
    KJTList,
    ListOfKJTList,
    OptimType,
    ShardedEmbeddingTable,
)
from recinfer.distributed.embeddingbag import (
    EmbeddingBagCollectionContext,
    construct_output_kt,
    create_embedding_bag_sharding,
    create_sharding_infos_by_sharding,
    replace_placement_with_meta_device,
)
from recinfer.distributed.exchange.combine import ColumnPlan, JoinShardings, Sum, combine_sums
from recinfer.distributed.exchange.dedup import deduplicated
from recinfer.distributed.exchange.features import ShardFeaturesDist, join_keys
from recinfer.distributed.grouped_position_weighted import GroupedPositionWeightedModule
from recinfer.distributed.sharded.collection import _placed_on
from recinfer.distributed.sharded.sharding import PooledSharding
from recinfer.distributed.tables.slots import ShardLayout
from recinfer.distributed.types import BoundsCheckMode, CacheParams, NoWait, ParameterSharding, ShardingEnv
from recinfer.distributed.types.shardings import Sent
from recinfer.distributed.utils import (
    add_params_from_parameter_sharding,
    append_prefix,
    filter_state_dict,
    merge_fused_params,
    optimizer_fused_params,
    optimizer_type_to_emb_opt_type,
)
from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import (
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    EmbeddingTableConfig,
    PoolingType,
)
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.sparse.checks import MissingKeyError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor, kjt_is_equal

LOCAL = ShardingEnv.from_local(2, 0)


def plan(kind: str, rects: list[tuple[int, int, int, int, int]], kernel: str = "fused") -> ParameterSharding:
    """Of (row, column, rows, columns, rank) rectangles."""
    shards = [
        ShardMetadata(shard_offsets=[r, c], shard_sizes=[n, w], placement=f"rank:{k}/cpu") for r, c, n, w, k in rects
    ]
    return ParameterSharding(kind, kernel, [rect[4] for rect in rects], EnumerableShardingSpec(shards))


def info(
    name: str, rows: int, dim: int, features: list[str], sharding: ParameterSharding, **kwargs: Any
) -> EmbeddingShardingInfo:
    """A table without values."""
    config = EmbeddingTableConfig(rows, dim, name, feature_names=features, embedding_names=features, **kwargs)
    return EmbeddingShardingInfo(config, sharding, torch.empty(rows, dim, device="meta"))


def features(**lengths_and_values: tuple[list[int], list[int]]) -> KeyedJaggedTensor:
    """``name=(lengths, values)``."""
    return KeyedJaggedTensor(
        list(lengths_and_values),
        torch.tensor([v for _, values in lengths_and_values.values() for v in values]),
        lengths=torch.tensor([n for lengths, _ in lengths_and_values.values() for n in lengths]),
    )


class TestLayout:
    def layout(self, **kwargs: Any) -> ShardLayout:
        rows = info("rw", 10, 4, ["a", "b"], plan("row_wise", [(0, 0, 5, 4, 0), (5, 0, 5, 4, 1)]), **kwargs)
        columns = info("cw", 6, 8, ["a"], plan("column_wise", [(0, 4, 6, 4, 0), (0, 0, 6, 4, 1)]))
        whole = info("tw", 3, 4, ["c"], plan("table_wise", [(0, 0, 3, 4, 1)]))
        return ShardLayout([rows, columns, whole], 2, is_weighted=False, pooled=True)

    def test_slots_go_rank_by_rank(self) -> None:
        layout = self.layout()
        assert layout.slots_per_rank == [3, 4]
        assert [(s.rect.rank, s.feature) for s in layout.slots] == [
            (0, "a"), (0, "b"), (0, "a"), (1, "a"), (1, "b"), (1, "a"), (1, "c"),
        ]  # fmt: skip
        assert layout.widths_per_rank() == [[4, 4, 4], [4, 4, 4, 4]]
        assert layout.features == ["a", "b", "c"]

    def test_outputs_are_in_module_order_columns_from_the_left(self) -> None:
        layout = self.layout()
        assert [name for name, _, _ in layout.outputs] == ["a", "b", "a", "c"]
        assert layout.sums == [[[0, 3]], [[1, 4]], [[5], [2]], [[6]]]

    def test_cut_features_are_bucketized_once(self) -> None:
        layout = self.layout()
        assert layout.cuts == [("a", (0, 5, 10)), ("b", (0, 5, 10))]
        assert layout.slot_cuts == [(0, 0), (1, 0), None, (0, 1), (1, 1), None, None]
        assert layout.num_buckets == 2

    def test_row_pieces_of_mean_are_sums_divided_later(self) -> None:
        layout = self.layout(pooling=PoolingType.MEAN)
        assert layout.mean == [0, 1]
        assert {t.pooling for g in layout.groups_per_rank[0] for t in g.embedding_tables} == {PoolingType.SUM}

    def test_empty_pieces_are_left_out(self) -> None:
        table = info("t", 2, 4, ["a"], plan("row_wise", [(0, 0, 2, 4, 0), (2, 0, 0, 4, 1)]))
        layout = ShardLayout([table], 2, is_weighted=False, pooled=True)
        assert layout.slots_per_rank == [1, 0]
        assert layout.cuts == []

    @pytest.mark.parametrize(
        ("rects", "message"),
        [
            ([(0, 0, 5, 4, 0)], "no shard holds rows 5 to 10"),
            ([(0, 0, 10, 2, 0)], "no shard holds columns 2 to 4"),
            ([(0, 0, 4, 4, 0), (5, 0, 5, 4, 1)], "expected the next to begin at row 4"),
            ([(0, 0, 10, 2, 0), (0, 2, 5, 2, 1)], r"'t', shard t\[0:5, 2:4\]@1: no shard holds rows 5 to 10"),
            (
                [(0, 0, 10, 4, 0), (0, 4, 5, 2, 1)],
                r"shard t\[0:5, 4:6\]@1: expected a part of its 10 rows and 4 columns",
            ),
            ([(0, 0, 10, 4, 0), (10, 0, 2, 4, 1)], r"shard t\[10:12, 0:4\]@1: expected a part of its 10 rows"),
            ([(0, 0, 10, 4, 2)], "is on rank 2; expected a rank of at least 0 and below 2"),
        ],
    )
    def test_what_does_not_tile_is_refused(self, rects: list[tuple[int, int, int, int, int]], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            ShardLayout([info("t", 10, 4, ["a"], plan("row_wise", rects))], 2, is_weighted=False, pooled=True)

    @pytest.mark.parametrize(
        ("rects", "message"),
        [
            ([(0, 0, 10, 4, 0), (0, 2, 10, 2, 1)], r"shard t\[0:10, 2:4\]@1: expected .* row 0, column 4"),
            ([(0, 0, 10, 4, 0), (0, 2, 5, 2, 1)], r"shard t\[0:5, 2:4\]@1: expected .* row 0, column 4"),
            ([(0, 0, 10, 4, 0), (0, 0, 10, 4, 1)], r"shard t\[0:10, 0:4\]@1: expected .* row 10, column 0"),
            ([(0, 0, 6, 4, 0), (5, 0, 5, 4, 1)], r"shard t\[5:10, 0:4\]@1: expected .* row 6, column 0"),
        ],
    )
    def test_overlaps_are_refused(self, rects: list[tuple[int, int, int, int, int]], message: str) -> None:
        whole = plan("row_wise", rects[:1])
        assert isinstance(whole.sharding_spec, EnumerableShardingSpec)
        # Past torch's own check, which is made when the spec is, and cannot name the table.
        whole.sharding_spec.shards += plan("row_wise", rects[1:]).sharding_spec.shards  # type: ignore[union-attr]
        with pytest.raises(ConfigError, match=message):
            ShardLayout([info("t", 10, 4, ["a"], whole)], 2, is_weighted=False, pooled=True)

    def test_a_plan_without_shards_is_refused(self) -> None:
        table = info("t", 10, 4, ["a"], ParameterSharding("table_wise", "fused", [0], None))
        with pytest.raises(ConfigError, match="needs a sharding_spec"):
            ShardLayout([table], 2, is_weighted=False, pooled=True)


class TestFeatures:
    def test_slots_come_from_keys_and_buckets(self) -> None:
        layout = TestLayout().layout()
        given = features(c=([1, 0], [2]), b=([0, 1], [7]), a=([2, 2], [1, 6, 5, 0]))
        sent = ShardFeaturesDist(layout, None)(given).wait().wait()
        assert sent.keys() == ["a", "b", "a", "a", "b", "a", "c"]
        assert sent.to_dict()["c"].values().tolist() == [2]
        parts = [part.tolist() for part in sent.values().split(sent.length_per_key())]
        assert parts == [[1, 0], [], [1, 6, 5, 0], [1, 0], [2], [1, 6, 5, 0], [2]]
        assert sent.lengths().tolist() == [1, 1, 0, 0, 2, 2, 1, 1, 0, 1, 2, 2, 1, 0]

    def test_block_sizes_are_where_the_ids_are(self) -> None:
        """Whatever device the sharding was made for: ids of a batch may come from another one."""
        table = info("t", 10, 4, ["a"], plan("row_wise", [(0, 0, 5, 4, 0), (5, 0, 5, 4, 1)]))
        layout = ShardLayout([table], 2, is_weighted=False, pooled=True)
        sharding = PooledSharding([table], ShardingEnv.from_local(2, 0), torch.device("meta"))
        given = features(a=([2, 2], [1, 6, 5, 0]))
        sent = sharding.create_input_dist(torch.device("meta"))(given).wait().wait()
        expected = ShardFeaturesDist(layout, None)(given).wait().wait()
        assert torch.equal(sent.values(), expected.values()) and torch.equal(sent.lengths(), expected.lengths())

    def test_a_missing_feature_is_named(self) -> None:
        with pytest.raises(MissingKeyError, match=r"\['c'\] are not in the input"):
            ShardFeaturesDist(TestLayout().layout(), None)(features(a=([1], [1]), b=([1], [1])))

    def test_missing_weights_are_refused_and_others_dropped(self) -> None:
        table = info("t", 3, 4, ["a"], plan("table_wise", [(0, 0, 3, 4, 0)]))
        given = features(a=([1], [1]))
        weighted = ShardFeaturesDist(ShardLayout([table], 1, is_weighted=True, pooled=True), None)
        with pytest.raises(InputError, match="weights are missing"):
            weighted(given)
        given._weights = torch.ones(1)
        plain = ShardFeaturesDist(ShardLayout([table], 1, is_weighted=False, pooled=True), None)
        assert plain(given).wait().wait().weights_or_none() is None

    @given(st.lists(st.integers(0, 4), max_size=8))
    def test_joining_keys_is_permuting(self, order: list[int]) -> None:
        one = features(a=([1, 2], [1, 2, 3]), b=([0, 0], []))
        two = features(c=([1, 1], [4, 5]), d=([0, 3], [6, 7, 8]), e=([2, 0], [9, 10]))
        joined = join_keys([one, two], order)
        want = KeyedJaggedTensor.concat([one, two]).permute(order)
        assert kjt_is_equal(joined, want)

    def test_an_order_that_changes_nothing_copies_nothing(self) -> None:
        one = features(a=([1, 2], [1, 2, 3]), b=([0, 0], []))
        assert join_keys([one], [0, 1]) is one


class TestBucketize:
    def test_ids_count_from_their_bucket(self) -> None:
        given = features(a=([2, 1], [9, 1, 4]), b=([0, 2], [3, 0]))
        got, permute = bucketize_kjt_before_all2all(given, 2, torch.tensor([5, 2]), output_permute=True)
        assert got.keys() == ["a", "b", "a", "b"]
        assert got.values().tolist() == [1, 4, 0, 4, 1]
        assert got.lengths().tolist() == [1, 1, 0, 1, 1, 0, 0, 1]
        assert permute is not None
        assert torch.arange(5)[permute.argsort()].tolist() == [1, 2, 4, 0, 3]

    def test_uneven_edges_and_positions(self) -> None:
        given = features(a=([3], [9, 1, 4]))
        got, permute = bucketize_kjt_before_all2all(
            given, 2, torch.tensor([2]), bucketize_pos=True, block_bucketize_row_pos=[torch.tensor([0, 2, 10])]
        )
        assert permute is None
        assert got.values().tolist() == [1, 7, 2]
        assert got.weights().tolist() == [1.0, 0.0, 2.0]

    @pytest.mark.parametrize("uneven", [False, True])
    @pytest.mark.parametrize("variable", [False, True])
    def test_without_fbgemm_it_is_the_same(self, monkeypatch: pytest.MonkeyPatch, uneven: bool, variable: bool) -> None:
        generator = torch.Generator().manual_seed(3)
        strides = [[4, 1], [0, 2]] if variable else [[3], [3]]
        lengths = torch.randint(0, 4, (sum(map(sum, strides)),), generator=generator)
        values = torch.randint(0, 12, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(values), generator=generator)
        given = KeyedJaggedTensor(
            ["a", "b"], values, weights, lengths=lengths, stride_per_key_per_rank=strides if variable else None
        )
        edges = [torch.tensor([0, 2, 3, 12]), torch.tensor([0, 1, 10, 12])] if uneven else None
        found = []
        for installed in (True, False):
            monkeypatch.setattr("recinfer.fbgemm.INSTALLED", installed)
            for positions in (False, True):
                got, permute = bucketize_kjt_before_all2all(
                    given, 3, torch.tensor([4, 5]), True, positions, block_bucketize_row_pos=edges
                )
                found.append([got.values(), got.lengths(), got.weights(), permute])
        for theirs, mine in zip(found[:2], found[2:]):
            for one, other in zip(theirs, mine):
                assert one is not None and other is not None and torch.equal(one, other.to(one.dtype))

    def test_one_block_size_a_feature(self) -> None:
        with pytest.raises(InputError, match="got 2 block sizes for 1 features"):
            bucketize_kjt_before_all2all(features(a=([1], [1])), 2, torch.tensor([1, 2]))


class TestCombine:
    def test_sums_columns_and_divisors(self) -> None:
        received = torch.arange(12.0).view(2, 6)
        plan = ColumnPlan([1, 2, 1, 2], [Sum((1, 3), 0), Sum((2,)), Sum((0,))])
        got = plan(received, [torch.tensor([1.0, 0.5])])
        assert got.tolist() == [[1 + 4, 2 + 5, 3, 0], [(7 + 10) / 2, (8 + 11) / 2, 9, 6]]

    def test_neighbours_are_one_run(self) -> None:
        plan = ColumnPlan([1, 2, 1, 2], [Sum((0, 2)), Sum((1, 3))])
        assert plan(torch.arange(6.0).view(1, 6)).tolist() == [[3, 5, 7]]
        assert len(plan._runs) == 1

    def test_pieces_of_their_own_batch_sizes(self) -> None:
        pieces = [torch.ones(2, 1), torch.ones(3, 1), torch.ones(3, 1)]
        got = combine_sums(pieces, [[Sum((1, 2), 0)], [Sum((0,))]], [torch.full((3,), 0.25)])
        assert [g.tolist() for g in got] == [[[0.5]] * 3, [[1.0]] * 2]

    def test_groups_join_in_module_order(self) -> None:
        join = JoinShardings([[1, 2], [3]], [(0, 1), (1, 0), (0, 0)])
        first, second = torch.arange(3.0).view(1, 3), torch.arange(10.0, 13).view(1, 3)
        assert join([first, second]).tolist() == [[1, 2, 10, 11, 12, 0]]
        assert JoinShardings([[1, 2]], [(0, 0), (0, 1)])([first]) is first

    def test_output_kt(self) -> None:
        kt = construct_output_kt([torch.ones(2, 1), torch.zeros(2, 2)], ["a", "b"], [1, 2])
        assert kt["b"].tolist() == [[0, 0], [0, 0]]
        assert kt.keys() == ["a", "b"]


def test_groups_have_one_kernel_call_each() -> None:
    def table(name: str, **kwargs: Any) -> ShardedEmbeddingTable:
        settings = {"compute_kernel": EmbeddingComputeKernel.FUSED, "local_cols": 4, "feature_names": [name], **kwargs}
        return ShardedEmbeddingTable(8, 4, name, **settings)

    tables = [
        table("a"),
        table("half", data_type=DataType.FP16),
        table("b"),
        table("mean", pooling=PoolingType.MEAN),
        table("fast", fused_params={"learning_rate": 0.1}),
        table("dense", compute_kernel=EmbeddingComputeKernel.DENSE),
        table("weighted", is_weighted=True),
    ]
    groups = group_tables([tables, []])
    assert [g.table_names() for g in groups[0]] == [["a", "b"], ["half"], ["mean"], ["fast"], ["dense"], ["weighted"]]
    assert groups[1] == []
    assert groups[0][0].dim_sum() == 8
    narrow = [table("x", pooling=PoolingType.NONE), table("y", pooling=PoolingType.NONE, local_cols=2)]
    assert len(group_tables([narrow])[0]) == 2


def test_dedup_keeps_each_id_once() -> None:
    given = features(unused=([1], [4]), b=([3], [7, -1, 7]), a=([2], [7, 7]))
    got, reverse = deduplicated(given, ["a", "b"])
    assert got.keys() == ["a", "b"]
    assert got.values().tolist() == [7, -1, 7]
    assert got.length_per_key() == [1, 2]
    assert got.values()[reverse].tolist() == [7, 7, 7, -1, 7]


class TestInfos:
    def collection(self) -> EmbeddingBagCollection:
        tables = [EmbeddingBagConfig(4, 4, name, feature_names=["f", name]) for name in ("x", "y")]
        return EmbeddingBagCollection(tables, device=torch.device("meta"))

    def test_by_type_with_names_and_settings(self) -> None:
        module = self.collection()
        for name in ("x", "y"):
            module.embedding_bags[name].weight._optimizer_classes = [torch.optim.Adagrad]
            module.embedding_bags[name].weight._optimizer_kwargs = [{"lr": 0.25}]
        one = plan("table_wise", [(0, 0, 4, 4, 0)])
        one.bounds_check_mode = BoundsCheckMode.FATAL
        one.cache_params = CacheParams(load_factor=0.5)
        infos = create_sharding_infos_by_sharding(
            module,
            {"y": ParameterSharding("data_parallel", "dense", [0, 1]), "x": one},
            "embedding_bags.",
            {"eps": 1.0},
        )
        assert list(infos) == ["table_wise", "data_parallel"]
        x, y = infos["table_wise"][0], infos["data_parallel"][0]
        assert x.names() == ["f@x", "x"]
        of_plan = {"bounds_check_mode": BoundsCheckMode.FATAL, "cache_load_factor": 0.5}
        numbers = {"learning_rate": 0.25, "eps": 1.0, "weight_decay": 0}
        assert x.fused_params == {**numbers, "optimizer": OptimType.ADAGRAD, **of_plan}
        assert y.fused_params == {"eps": 1.0}  # dense: the caller's optimizer steps it
        assert y.param_sharding.compute_kernel == "dense"  # the plan's kernel counts, as in TorchRec

    def test_a_plan_must_name_the_tables(self) -> None:
        whole = plan("table_wise", [(0, 0, 4, 4, 0)])
        with pytest.raises(ConfigError, match=r"lacks tables \['y'\] and names unknown tables \['z'\]"):
            create_sharding_infos_by_sharding(self.collection(), {"x": whole, "z": whole}, "embedding_bags.", None)

    def test_types_have_their_names(self) -> None:
        whole = plan("table_wise", [(0, 0, 4, 4, 0)])
        infos = create_sharding_infos_by_sharding(self.collection(), {"x": whole, "y": whole}, "embedding_bags.", None)
        sharding = create_embedding_bag_sharding("table_wise", infos["table_wise"], LOCAL, permute_embeddings=True)
        assert isinstance(sharding, EmbeddingSharding)
        assert sharding.feature_names() == ["f", "x", "y"]
        with pytest.raises(ConfigError, match="is planned as table_wise; this sharding is row_wise"):
            create_embedding_bag_sharding("row_wise", infos["table_wise"], LOCAL)
        with pytest.raises(ConfigError, match="sharding type 'diagonal'"):
            create_embedding_bag_sharding("diagonal", infos["table_wise"], LOCAL)

    def test_unpooled_tables_too(self) -> None:
        module = EmbeddingCollection([EmbeddingConfig(4, 4, "x", feature_names=["f"])])
        infos = infos_of_collection(module, {"x": plan("column_wise", [(0, 0, 4, 2, 0), (0, 2, 4, 2, 1)])}, None)
        sharding = create_embedding_sharding("column_wise", infos["column_wise"], LOCAL)
        assert sharding.embedding_names_per_rank() == [["f"], ["f"]]
        assert isinstance(sharding.create_input_dist(), BaseSparseFeaturesDist)
        assert isinstance(sharding.create_output_dist(), BaseEmbeddingDist)
        with pytest.raises(ConfigError, match=r"expected one of .* for unpooled tables"):
            create_embedding_sharding("table_row_wise", [], LOCAL)

    def test_placements_move_to_meta(self) -> None:
        one = info("t", 4, 4, ["a"], plan("table_wise", [(0, 0, 4, 4, 1)]))
        replace_placement_with_meta_device([one])
        placed = one.param_sharding.sharding_spec.shards[0].placement
        assert (placed.rank(), placed.device()) == (1, torch.device("meta"))

    @pytest.mark.parametrize("local_size", [2, 4])
    def test_a_plan_for_cpu_on_gpus_gives_each_rank_a_gpu_of_its_host(
        self, local_size: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Here is rank 3, on a device that its program chose."""
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_size))
        one = info("t", 8, 4, ["a"], plan("row_wise", [(2 * rank, 0, 2, 4, rank) for rank in range(4)]))
        moved = _placed_on(one, torch.device("cuda:7"), ShardingEnv.from_local(4, 3))
        spec = moved.param_sharding.sharding_spec
        assert isinstance(spec, EnumerableShardingSpec)
        places = [shard.placement for shard in spec.shards]
        assert [place.rank() for place in places] == [0, 1, 2, 3]
        here = [place.device() for place in places]
        assert here == [torch.device("cuda", rank % local_size) for rank in range(3)] + [torch.device("cuda:7")]


class TestAwaitables:
    def test_lists_of_lists(self) -> None:
        kjt = features(a=([1], [1]))
        ctx = EmbeddingBagCollectionContext([EmbeddingShardingContext()])
        splits = KJTListSplitsAwaitable([NoWait(NoWait(kjt))], ctx)
        tensors = splits.wait()
        assert isinstance(tensors, KJTListAwaitable)
        both = ListOfKJTListSplitsAwaitable([NoWait(tensors)]).wait()
        assert isinstance(both, ListOfKJTListAwaitable)
        lists = both.wait()
        assert isinstance(lists, ListOfKJTList)
        assert isinstance(lists[0], KJTList)
        assert lists[0][0] is kjt
        assert ctx.sharding_contexts[0].batch_size_per_rank == [1]

    def test_a_variable_batch_is_noted(self) -> None:
        kjt = KeyedJaggedTensor(
            ["a", "b"],
            torch.arange(3),
            lengths=torch.ones(3, dtype=torch.int64),
            stride_per_key_per_rank=[[1, 0], [1, 1]],
        )
        ctx = EmbeddingShardingContext()
        ctx.sent(kjt, Sent())
        ctx.received(kjt)
        assert ctx.variable_batch_per_feature
        assert ctx.batch_size_per_feature_pre_a2a == [1, 2]
        assert ctx.batch_size_per_rank_per_feature == [[1, 1], [0, 1]]


class TestGroupedPositionWeighted:
    def test_weights_are_those_of_the_places(self) -> None:
        module = GroupedPositionWeightedModule({"a": 3})
        weight = dict(module.named_parameters("x"))["x.position_weights.a"]
        with torch.no_grad():
            weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        got = module(features(a=([2, 3], [5, 5, 5, 5, 5]), b=([1, 0], [5])))
        assert got.weights().tolist() == [1, 2, 1, 2, 3, 1]
        got.weights().sum().backward()
        assert weight.grad is not None
        assert weight.grad.tolist() == [2, 2, 1]

    def test_weights_that_came_are_places(self) -> None:
        module = GroupedPositionWeightedModule({"a.b": 2})
        kjt = features(**{"a.b": ([2], [1, 2])})
        kjt._weights = torch.tensor([1.0, 1.0])
        assert module(kjt).weights().tolist() == [1, 1]
        assert list(module.state_dict()) == ["position_weights.a.b"]
        assert not list(module.named_buffers())
        other = GroupedPositionWeightedModule({"a.b": 2})
        other.load_state_dict({"position_weights.a.b": torch.tensor([3.0, 4.0])})
        assert other(kjt).weights().tolist() == [4, 4]
        assert not GroupedPositionWeightedModule({"a": 1}).load_state_dict({}, strict=False).unexpected_keys

    def test_what_does_not_fit_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="max_feature_length=0"):
            GroupedPositionWeightedModule({"a": 0})
        with pytest.raises(InputError, match="bag of 2 ids but only 1"):
            GroupedPositionWeightedModule({"a": 1})(features(a=([2], [1, 2])))
        with pytest.raises(RuntimeError, match="expected \\(1,\\)"):
            GroupedPositionWeightedModule({"a": 1}).load_state_dict({"position_weights.a": torch.ones(2)})


class TestHelpers:
    def test_names(self) -> None:
        assert [append_prefix(*args) for args in (("a", "b"), ("", "b"), ("a", ""))] == ["a.b", "b", "a"]
        assert filter_state_dict({"a.b": 1, "ab": 2, "a.c.d": 3}, "a") == {"b": 1, "c.d": 3}

    def test_settings(self) -> None:
        assert merge_fused_params({"a": 1, "b": 2}, {"b": 3}) == {"a": 1, "b": 3}
        bare = ParameterSharding("table_wise", "fused")
        assert add_params_from_parameter_sharding(None, bare) == {}
        assert optimizer_fused_params(torch.empty(1)) == {}
        assert optimizer_type_to_emb_opt_type(torch.optim.SGD) is OptimType.SGD
        with pytest.raises(ConfigError, match="Rprop has no fused kernel"):
            optimizer_type_to_emb_opt_type(torch.optim.Rprop)
        several = torch.empty(1)
        several._optimizer_classes = [torch.optim.SGD, torch.optim.Adam]  # type: ignore[attr-defined]
        with pytest.raises(ConfigError, match="a fused kernel supports only one"):
            optimizer_fused_params(several)
