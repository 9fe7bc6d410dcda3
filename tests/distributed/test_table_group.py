"""Groups of tables on CPU: forward, gradients and every optimizer against plain embedding bags, and odd shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm as FbgemmCacheAlgorithm
from torch import Tensor, nn

from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.tables.cpu import TableGroup, TableShape
from recinfer.distributed.tables.cpu_dense import DenseTableGroup
from recinfer.distributed.tables.cuda import ModuleDenseTableGroup, ModuleTableGroup, make_table_group
from recinfer.distributed.tables.replicas import LookupGradient
from recinfer.distributed.types import CacheAlgorithm, CacheParams, DataType, ParameterSharding
from recinfer.distributed.utils import add_params_from_parameter_sharding, optimizer_fused_params
from recinfer.errors import ConfigError, InputError
from recinfer.modules.embedding_configs import PoolingType
from recinfer.optim import optimizers
from recinfer.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from recinfer.optim.row_updates import UPDATES, Hyper
from recinfer.optim.rowwise_adagrad import RowWiseAdagrad

# FBGEMM's dense operator, which groups on a GPU use, lacks an autograd registration that torch warns about.
pytestmark = pytest.mark.filterwarnings("ignore:fbgemm..dense_embedding_codegen_lookup_function")

SUM, MEAN, NONE = PoolingType.SUM, PoolingType.MEAN, PoolingType.NONE
# An odd dim, one row, a dim of 1, and two features on one table.
MIXED = (TableShape("a", 9, 5, 2), TableShape("b", 1, 8), TableShape("c", 4, 1))
EVEN = (TableShape("a", 9, 4, 2), TableShape("b", 6, 4))
BATCH = 3


@dataclass
class Call:
    ids: Tensor
    offsets: Tensor
    weights: Tensor | None


def call(
    shapes: tuple[TableShape, ...], seed: int, *, weighted: bool = False, dtype: torch.dtype = torch.int64
) -> Call:
    """Bags of 0 to 3 ids; ids repeat, features of a table meet in rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = [s.rows for s in shapes for _ in range(s.num_features)]
    lengths = torch.randint(0, 4, (len(rows) * BATCH,), generator=generator)
    ids = [
        torch.randint(0, rows[f], (int(lengths[f * BATCH : (f + 1) * BATCH].sum()),), generator=generator)
        for f in range(len(rows))
    ]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(dtype)
    flat = torch.cat(ids).to(dtype)
    return Call(flat, offsets, torch.rand(flat.numel(), generator=generator) if weighted else None)


def plain(tables: list[Tensor], shapes: tuple[TableShape, ...], pooling: PoolingType, c: Call) -> Tensor:
    """The same lookup with torch's own functions."""
    out, feature = [], 0
    for table, shape in zip(tables, shapes):
        for _ in range(shape.num_features):
            bounds = c.offsets[feature * BATCH : (feature + 1) * BATCH + 1].long()
            ids = c.ids[bounds[0] : bounds[-1]].long()
            if pooling is NONE:
                out.append(table[ids])
            else:
                scale = 1.0 if c.weights is None else c.weights[bounds[0] : bounds[-1]].unsqueeze(1)
                bags = torch.repeat_interleave(torch.arange(BATCH), bounds.diff())
                sums = torch.zeros(BATCH, shape.dim).index_add(0, bags, table[ids] * scale)
                out.append(sums / bounds.diff().clamp(min=1).unsqueeze(1) if pooling is MEAN else sums)
            feature += 1
    return torch.cat(out, dim=0 if pooling is NONE else 1)


def filled(group: TableGroup, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for rows in group.table_weights():
            rows.copy_(torch.randn(rows.shape, generator=generator))
    return [rows.detach().clone().float() for rows in group.table_weights()]


def touched_rows(shapes: tuple[TableShape, ...], c: Call) -> list[Tensor]:
    found, feature = [], 0
    for shape in shapes:
        bounds = c.offsets[[feature * BATCH, (feature + shape.num_features) * BATCH]]
        found.append(c.ids[bounds[0] : bounds[1]].long().unique())
        feature += shape.num_features
    return found


def train_plain(
    tables: list[Tensor],
    shapes: tuple[TableShape, ...],
    pooling: PoolingType,
    params: dict[str, Any],
    calls: list[Call],
) -> list[Tensor]:
    """Dense gradients by autograd; the formula on the rows that a step touches."""
    settings = FusedSettings.from_params(params)
    update = UPDATES[settings.optimizer.value]
    states = [
        {n: torch.zeros(s.rows if rowwise else (s.rows, s.dim)) for n, rowwise in update.states.items()} for s in shapes
    ]
    for t, c in enumerate(calls, start=1):
        leaves = [table.clone().requires_grad_() for table in tables]
        out = plain(leaves, shapes, pooling, c)
        out.backward(output_gradient(out, t))
        for i, rows in enumerate(touched_rows(shapes, c)):
            if not rows.numel():
                continue
            grad = leaves[i].grad
            assert grad is not None
            state = {n: values[rows] for n, values in states[i].items()}
            tables[i][rows] = update.step(tables[i][rows], grad[rows], state, settings.hyper(settings.learning_rate), t)
            for n, values in state.items():
                states[i][n][rows] = values
    return tables


def output_gradient(out: Tensor, seed: int) -> Tensor:
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(100 + seed))


OPTIMIZERS = [
    {"optimizer": name, "learning_rate": 0.1, "eps": 1e-4, **more}
    for name, more in [
        ("SGD", {}),
        ("SGD", {"weight_decay": 0.1, "weight_decay_mode": "L2"}),
        ("ADAGRAD", {}),
        ("ADAGRAD", {"weight_decay": 0.1, "weight_decay_mode": "DECOUPLE"}),
        ("ROWWISE_ADAGRAD", {}),
        ("ROWWISE_ADAGRAD", {"weight_decay": 0.1, "weight_decay_mode": "L2"}),
        ("ROWWISE_ADAGRAD", {"max_norm": 0.5}),
        ("ADAM", {"weight_decay": 0.1}),
        ("PARTIAL_ROWWISE_ADAM", {"beta1": 0.8, "beta2": 0.9}),
        ("LAMB", {}),
        ("PARTIAL_ROWWISE_LAMB", {"weight_decay": 0.1}),
        ("LARS_SGD", {"momentum": 0.5, "eta": 0.1, "weight_decay": 0.1}),
    ]
]


@pytest.mark.parametrize("pooling", [SUM, MEAN, NONE])
@pytest.mark.parametrize("params", OPTIMIZERS, ids=lambda p: "-".join(str(v) for v in p.values()))
def test_three_steps_of_every_optimizer(params: dict[str, Any], pooling: PoolingType) -> None:
    shapes = EVEN if pooling is NONE else MIXED
    group = TableGroup(shapes, pooling, FusedSettings.from_params(params))
    tables = filled(group)
    calls = [call(shapes, seed, weighted=pooling is SUM) for seed in range(3)]
    for t, c in enumerate(calls, start=1):
        out = group(c.ids, c.offsets, c.weights)
        out.backward(output_gradient(out, t))
    expected = train_plain(tables, shapes, pooling, params, calls)
    for rows, want in zip(group.table_weights(), expected):
        torch.testing.assert_close(rows, want)


@pytest.mark.parametrize("kind", [TableGroup, DenseTableGroup, ModuleTableGroup, ModuleDenseTableGroup])
@pytest.mark.parametrize("pooling", [SUM, MEAN, NONE])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_forward_and_the_gradient_of_weights(
    kind: type[TableGroup], pooling: PoolingType, weighted: bool, dtype: torch.dtype
) -> None:
    if pooling is not SUM and weighted:
        pytest.skip("weights are for sums")
    if pooling is NONE and kind is ModuleDenseTableGroup:
        pytest.skip("FBGEMM's dense module pools on CPU; on a GPU it does not")
    shapes = MIXED if pooling is not NONE and kind in (TableGroup, DenseTableGroup) else EVEN
    group = kind(shapes, pooling, FusedSettings())
    tables = filled(group)
    c = call(shapes, 5, weighted=weighted, dtype=dtype)
    weights = None if c.weights is None else c.weights.clone().requires_grad_()
    out = group(c.ids, c.offsets, weights)
    c.weights = None if c.weights is None else c.weights.requires_grad_()
    want = plain(tables, shapes, pooling, c)
    torch.testing.assert_close(out, want)
    if weights is not None:
        gradient = output_gradient(out, 0)
        out.backward(gradient)
        want.backward(gradient)
        assert c.weights is not None
        torch.testing.assert_close(weights.grad, c.weights.grad)


@pytest.mark.parametrize("kind", [DenseTableGroup, ModuleDenseTableGroup])
@pytest.mark.parametrize("pooling", [SUM, MEAN, NONE])
def test_dense_groups_give_every_table_its_gradient(kind: type[DenseTableGroup], pooling: PoolingType) -> None:
    if pooling is NONE and kind is ModuleDenseTableGroup:
        pytest.skip("FBGEMM's dense module pools on CPU; on a GPU it does not")
    shapes = EVEN if pooling is NONE or kind is ModuleDenseTableGroup else MIXED
    group = kind(shapes, pooling, FusedSettings())
    tables = [table.requires_grad_() for table in filled(group)]
    c = call(shapes, 7, weighted=pooling is SUM)
    out, want = group(c.ids, c.offsets, c.weights), plain(tables, shapes, pooling, c)
    gradient = output_gradient(out, 0)
    out.backward(gradient)
    want.backward(gradient)
    for parameter, table in zip(group.tables, tables):
        torch.testing.assert_close(parameter.grad, table.grad)
    # The parameters are the rows that are looked up: any optimizer may step them.
    torch.optim.SGD(group.parameters(), lr=0.1).step()
    with torch.no_grad():
        stepped = [table - 0.1 * table.grad for table in tables if table.grad is not None]
    torch.testing.assert_close(group(c.ids, c.offsets, c.weights), plain(stepped, shapes, pooling, c))


def test_a_dense_group_of_fbgemms_operator_is_built_where_it_is_asked_for() -> None:
    """FBGEMM's dense module took memory on the current GPU, for its own first values beside the group's rows."""
    group = ModuleDenseTableGroup(EVEN, SUM, FusedSettings(), device=torch.device("meta"))
    assert {t.device.type for t in (group.weights, *group.tables, group._hash_sizes)} == {"meta"}


@pytest.mark.parametrize("optimizer", ["SGD", "ADAGRAD", "ROWWISE_ADAGRAD"])
def test_updates_are_those_of_fbgemms_module(optimizer: str) -> None:
    params = FusedSettings.from_params({"optimizer": optimizer, "learning_rate": 0.1})
    ours, module = TableGroup(EVEN, SUM, params), ModuleTableGroup(EVEN, SUM, params)
    filled(ours)
    filled(module)
    for seed in range(3):
        c = call(EVEN, seed, weighted=True)
        for group in (ours, module):
            out = group(c.ids, c.offsets, c.weights)
            out.backward(output_gradient(out, seed))
    for mine, its in zip(ours.table_weights(), module.table_weights()):
        torch.testing.assert_close(mine, its)
    for mine_s, its_s in zip(ours.table_states(), module.table_states()):
        assert mine_s.keys() == its_s.keys()
        for name, state in mine_s.items():
            torch.testing.assert_close(state, its_s[name].view_as(state))


@pytest.mark.parametrize("kind", [TableGroup, ModuleTableGroup])
def test_a_changed_rate_acts_on_the_next_update(kind: type[TableGroup]) -> None:
    group = kind(EVEN, SUM, FusedSettings.from_params({"learning_rate": 0.1}))
    before = filled(group)
    group.param_group["lr"] = 0.0
    c = call(EVEN, 1)
    group(c.ids, c.offsets).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(group.table_weights(), before))
    group.param_group["lr"] = 0.5
    group(c.ids, c.offsets).sum().backward()
    expected = train_plain(before, EVEN, SUM, {"learning_rate": 0.5}, [])
    counts = torch.bincount(c.ids[: c.offsets[2 * BATCH]], minlength=9).unsqueeze(1)
    torch.testing.assert_close(group.table_weights()[0], expected[0] - 0.5 * counts)


def test_gradients_are_clipped_by_element() -> None:
    group = TableGroup(
        EVEN, SUM, FusedSettings.from_params({"lr": 1.0, "gradient_clipping": True, "max_gradient": 0.25})
    )
    before = filled(group)
    group(torch.tensor([3]), torch.tensor([0, 1, 1, 1])).backward(torch.full((1, 12), -7.0))
    torch.testing.assert_close(group.table_weights()[0][3], before[0][3] + 0.25)


def test_an_empty_batch_and_empty_bags_change_nothing() -> None:
    for kind in (TableGroup, DenseTableGroup):
        group = kind(MIXED, MEAN, FusedSettings.from_params({"optimizer": "ADAM"}))
        before = filled(group)
        none = torch.zeros(0, dtype=torch.int64)
        out = group(none, torch.zeros(4 * BATCH + 1, dtype=torch.int64))
        assert torch.equal(out, torch.zeros(BATCH, 19))
        out.sum().backward()
        assert group(none, torch.zeros(1, dtype=torch.int64)).shape == (0, 19)
        assert all(torch.equal(a, b) for a, b in zip(group.table_weights(), before))


@pytest.mark.parametrize("optimizer", ["SGD", "ROWWISE_ADAGRAD", "ADAM"])
def test_a_piece_without_rows_between_others(optimizer: str) -> None:
    """Kernels tell tables apart by their first row, and a piece with no rows has its neighbour's."""
    shapes = (TableShape("a", 3, 2), TableShape("none", 0, 5), TableShape("b", 4, 3), TableShape("end", 0, 1))
    group = TableGroup(shapes, SUM, FusedSettings.from_params({"optimizer": optimizer, "lr": 0.1}))
    filled(group)
    alone = TableGroup(shapes[2:3], SUM, group.settings)
    with torch.no_grad():
        alone.table_weights()[0].copy_(group.table_weights()[2])
    assert [tuple(w.shape) for w in group.table_weights()] == [(3, 2), (0, 5), (4, 3), (0, 1)]
    ids = torch.tensor([2, 1, 1])
    out = group(torch.cat([torch.tensor([0]), ids]), torch.tensor([0, 1, 1, 1, 1, 3, 4, 4, 4]))
    out.sum().backward()
    alone(ids, torch.tensor([0, 2, 3])).sum().backward()
    assert torch.equal(group.table_weights()[2], alone.table_weights()[0])


@pytest.mark.parametrize("optimizer", ["SGD", "ROWWISE_ADAGRAD", "ADAM"])
def test_half_precision_rows_and_outputs(optimizer: str) -> None:
    params = {"optimizer": optimizer, "learning_rate": 0.1, "output_dtype": "fp16", "eps": 1e-3}
    group = TableGroup(EVEN, SUM, FusedSettings.from_params(params), torch.float16)
    tables = filled(group)
    c = call(EVEN, 2, weighted=True)
    weights = c.weights
    assert weights is not None
    weights.requires_grad_()
    out = group(c.ids, c.offsets, weights)
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), plain(tables, EVEN, SUM, c).detach(), atol=2e-2, rtol=2e-2)
    out.backward(output_gradient(out, 1).half())
    assert weights.grad is not None
    c.weights = weights.detach()
    expected = train_plain(tables, EVEN, SUM, params, [c])
    for rows, want in zip(group.table_weights(), expected):
        assert rows.dtype == torch.float16
        torch.testing.assert_close(rows.float(), want, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", [TableGroup, DenseTableGroup, ModuleTableGroup])
def test_variable_batch_is_rank_by_rank_and_trains_alike(kind: type[TableGroup]) -> None:
    """Against FBGEMM's own layout, with a feature that has no bag on a rank."""
    sizes = [[2, 1], [0, 3], [1, 1]]
    settings = FusedSettings.from_params({"optimizer": "ROWWISE_ADAGRAD", "learning_rate": 0.1})
    group, module = kind(EVEN, SUM, settings), ModuleTableGroup(EVEN, SUM, settings)
    filled(group)
    filled(module)
    lengths = torch.tensor([1, 0, 2, 3, 1, 1, 0, 2])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.tensor([0, 8, 3, 3, 1, 0, 2, 5, 1, 0])
    out, want = (g(ids, offsets, None, sizes) for g in (group, module))
    assert out.shape == (sum(sum(s) for s in sizes) * 4,)
    torch.testing.assert_close(out, want)
    gradient = output_gradient(out, 0)
    out.backward(gradient)
    want.backward(gradient)
    if kind is not DenseTableGroup:
        for mine, its in zip(group.table_weights(), module.table_weights()):
            torch.testing.assert_close(mine, its)


def test_variable_batch_unpooled() -> None:
    group = TableGroup(EVEN, NONE, FusedSettings())
    tables = filled(group)
    ids = torch.tensor([0, 8, 3, 5])
    out = group(ids, torch.tensor([0, 1, 1, 2, 3, 4]), None, [[2], [1], [2]])
    torch.testing.assert_close(out, torch.stack([tables[0][0], tables[0][8], tables[1][3], tables[1][5]]))
    out.sum().backward()


@pytest.mark.parametrize("mode", ["WARNING", "IGNORE"])
def test_ids_outside_a_table_read_row_0(mode: str, capfd: pytest.CaptureFixture[str]) -> None:
    group = TableGroup(EVEN, SUM, FusedSettings.from_params({"bounds_check_mode": mode}))
    tables = filled(group)
    ids = torch.tensor([9, -1, 5])
    out = group(ids, torch.tensor([0, 1, 2, 3]))
    assert ids.tolist() == [9, -1, 5]  # the caller's batch stays as it is
    out.sum().backward()
    torch.testing.assert_close(out, torch.cat([tables[0][0], tables[0][0], tables[1][5]]).unsqueeze(0))


def test_fatal_bounds_check_names_the_tables() -> None:
    group = TableGroup(EVEN, SUM, FusedSettings.from_params({"bounds_check_mode": "FATAL"}))
    with pytest.raises(InputError, match=r"'a', 9"):
        group(torch.tensor([9]), torch.tensor([0, 1, 1, 1]))


def test_two_lookups_before_their_backward() -> None:
    """Each backward applies its own ids, in the order of the backward."""
    group = TableGroup(EVEN, SUM, FusedSettings.from_params({"lr": 1.0}))
    before = filled(group)
    first = group(torch.tensor([0]), torch.tensor([0, 1, 1, 1]))
    second = group(torch.tensor([1]), torch.tensor([0, 1, 1, 1]))
    second.backward(torch.full((1, 12), 2.0))
    first.backward(torch.full((1, 12), 3.0))
    torch.testing.assert_close(group.table_weights()[0][:2], before[0][:2] - torch.tensor([[3.0], [2.0]]))


def test_no_gradients_no_update() -> None:
    group = TableGroup(EVEN, SUM, FusedSettings())
    with torch.no_grad():
        assert not group(torch.tensor([0]), torch.tensor([0, 1, 1, 1])).requires_grad


def test_unsupported_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="the same dim"):
        TableGroup(MIXED, NONE, FusedSettings())
    with pytest.raises(ConfigError, match="float32"):
        TableGroup(EVEN, SUM, FusedSettings(), torch.bfloat16)
    with pytest.raises(ConfigError, match="multiple of 4"):
        ModuleTableGroup(MIXED, SUM, FusedSettings())
    decaying = FusedSettings.from_params({"weight_decay": 0.1, "weight_decay_mode": "L2"})
    with pytest.raises(ConfigError, match="weight decay"):
        ModuleTableGroup(EVEN, SUM, decaying)


def test_the_group_follows_the_device() -> None:
    assert type(make_table_group(EVEN, SUM, FusedSettings())) is TableGroup
    assert type(make_table_group(EVEN, SUM, None)) is DenseTableGroup
    meta = make_table_group(EVEN, SUM, FusedSettings(), device=torch.device("meta"))
    assert all(w.is_meta for w in meta.table_weights())


def test_hyper_numbers_come_from_the_settings() -> None:
    settings = FusedSettings.from_params({"optimizer": "ADAM", "betas": (0.5, 0.6), "eps": 0.1, "weight_decay": 0.2})
    assert settings.hyper(0.3) == Hyper(0.3, eps=0.1, beta1=0.5, beta2=0.6, weight_decay=0.2)


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"optimizer": "SGD", "momentum": 0.9}, "momentum"),
        ({"optimizer": "ADAM", "momentum": 0.9}, "momentum"),
        ({"optimizer": "ADAGRAD", "max_norm": 1.0}, "max_norm"),
        ({"optimizer": "ROWWISE_ADAGRAD", "weight_decay": 0.1}, "weight_decay_mode"),
        ({"weight_decay": 0.1}, "weight_decay_mode"),
    ],
)
def test_settings_that_a_formula_ignores_are_refused(params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        FusedSettings.from_params(params)
    off = {**params, "momentum": 0.0, "max_norm": 0.0, "weight_decay": 0.0}
    assert FusedSettings.from_params(off).weight_decay == 0
    assert FusedSettings.from_params({"weight_decay": 0.1, "weight_decay_mode": "NONE"}).has_cpu_kernel


@pytest.mark.parametrize(
    ("optimizer", "kwargs"),
    [
        (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.2}),
        (torch.optim.Adagrad, {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.2}),
        (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.2}),
        (optimizers.SGD, {"lr": 0.1, "weight_decay": 0.2}),
        (optimizers.Adagrad, {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.2}),
    ],
)
def test_the_decay_of_an_optimizer_class_is_that_of_its_kernel(optimizer: Any, kwargs: dict[str, Any]) -> None:
    noted = nn.Parameter(torch.zeros(4, 2))
    apply_optimizer_in_backward(optimizer, [noted], kwargs)
    group = TableGroup((TableShape("a", 4, 2),), SUM, FusedSettings.from_params(optimizer_fused_params(noted)))
    group.table_weights()[0].copy_(torch.arange(8.0).view(4, 2))
    alone = nn.Parameter(torch.arange(8.0).view(4, 2))
    stepper = optimizer([alone], **kwargs)
    for _ in range(3):
        group(torch.arange(4), torch.arange(5)).square().sum().backward()  # every row, as torch's steps all
        stepper.zero_grad()
        alone.square().sum().backward()
        stepper.step()
    torch.testing.assert_close(group.table_weights()[0], alone.detach())


def test_cache_settings_of_a_plan_become_fbgemms_own() -> None:
    """FBGEMM compares with its own enumerations, and raises for a cache on a GPU that is given others."""
    ours = CacheParams(algorithm=CacheAlgorithm.LFU, load_factor=0.3, precision=DataType.FP16)
    plan = ParameterSharding("table_wise", "fused_uvm_caching", [0], cache_params=ours)
    as_text = {"cache_algorithm": "lfu", "cache_precision": torch.float16, "cache_load_factor": 0.3}
    as_fbgemm = {**as_text, "cache_algorithm": FbgemmCacheAlgorithm.LFU, "cache_precision": SparseType.FP16}
    for params in (add_params_from_parameter_sharding({}, plan), as_text, as_fbgemm):
        settings = FusedSettings.from_params(params)
        assert settings.placement == {
            "cache_algorithm": CacheAlgorithm.LFU,
            "cache_precision": torch.float16,
            "cache_load_factor": 0.3,
        }
        module = ModuleTableGroup(EVEN, SUM, settings).tbe
        assert module.cache_algorithm is FbgemmCacheAlgorithm.LFU
        assert module.lxu_cache_weights.dtype == torch.float16
    assert FusedSettings.from_params({"cache_algorithm": None, "cache_precision": None}).placement == {}
    for wrong in ({"cache_precision": DataType.INT4}, {"cache_algorithm": "FIFO"}, {"output_dtype": torch.int8}):
        with pytest.raises(ConfigError, match="expected one of"):
            FusedSettings.from_params(wrong)


def test_momentum_of_an_optimizer_class_is_refused() -> None:
    table = nn.Parameter(torch.zeros(4, 2))
    apply_optimizer_in_backward(torch.optim.SGD, [table], {"lr": 0.1, "momentum": 0.9})
    with pytest.raises(ConfigError, match="no momentum"):
        FusedSettings.from_params(optimizer_fused_params(table))


@pytest.mark.parametrize("pooling", [SUM, MEAN, NONE])
@pytest.mark.parametrize("weighted", [False, True])
def test_many_ids_are_stepped_by_the_formula_as_by_the_kernel(pooling: PoolingType, weighted: bool) -> None:
    shapes = (TableShape("a", 3000, 8, 2), TableShape("b", 1, 8), TableShape("c", 2000, 8 if pooling is NONE else 5))
    settings = FusedSettings.from_params({"optimizer": "ROWWISE_ADAGRAD", "learning_rate": 0.1, "eps": 1e-4})
    formula, kernel = TableGroup(shapes, pooling, settings), TableGroup(shapes, pooling, settings)
    kernel.weights.copy_(formula.weights.uniform_(-1, 1))
    generator = torch.Generator().manual_seed(0)
    rows = [3000, 3000, 1, 2000]
    for _ in range(2):
        lengths = torch.randint(0, 3, (4 * 900,), generator=generator)
        lengths[:900] = 0  # a feature without ids
        counts = lengths.view(4, 900).sum(1).tolist()
        ids = torch.cat([torch.randint(0, r, (n,), generator=generator) for r, n in zip(rows, counts)])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        weights = torch.rand(ids.numel(), generator=generator) if weighted and pooling is SUM else None
        width = 8 if pooling is NONE else sum(formula.feature_dims)
        gradient = torch.randn(ids.numel() if pooling is NONE else 900, width, generator=generator)
        of_call = LookupGradient(ids, offsets, weights, gradient)
        formula._update_by_formula(of_call)
        kernel._update_by_kernel(of_call)
    torch.testing.assert_close(formula.weights, kernel.weights)
    torch.testing.assert_close(formula._states["momentum1"], kernel._states["momentum1"])
