"""Sharded training against the unsharded module: cases, and what every rank runs for each of them."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec

from recinfer.distributed.embedding import EmbeddingCollectionSharder
from recinfer.distributed.embedding_types import EmbeddingComputeKernel, OptimType
from recinfer.distributed.embeddingbag import EmbeddingBagCollectionSharder
from recinfer.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingEnv
from recinfer.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

KINDS = (
    "table_wise",
    "column_wise",
    "row_wise",
    "row_wise_uneven",
    "table_column_wise",
    "table_row_wise",
    "grid_shard",
    "data_parallel",
    "mixed",
)
UNPOOLED = ("table_wise", "column_wise", "row_wise", "row_wise_uneven", "data_parallel", "mixed")
BATCHES = ("even", "uneven", "empty", "variable")
LEARNING_RATE = 0.5

# (name, rows, dim, features): f1 is read by two tables, one table has a single row, t4 no power of two anywhere.
TABLES = (
    ("t0", 13, 8, ["f0"]),
    ("t1", 7, 12, ["f1", "f2"]),
    ("t2", 5, 8, ["f1", "f3"]),
    ("t3", 1, 4, ["f4"]),
    ("t4", 29, 20, ["f5"]),
)
FEATURES = [f"f{i}" for i in range(6)]


@dataclass(frozen=True)
class Case:
    """One cell of the matrix."""

    kind: str
    pooling: str = "SUM"
    weighted: bool = False
    batch: str = "even"
    kernel: str = "fused"
    optimizer: str = "SGD"
    dedup: bool = False

    def __str__(self) -> str:
        weights = "weighted" if self.weighted else "dedup" if self.dedup else "plain"
        return f"{self.kind}-{self.pooling}-{weights}-{self.batch}-{self.kernel}-{self.optimizer}"

    @property
    def pooled(self) -> bool:
        """An EmbeddingBagCollection; else an EmbeddingCollection."""
        return self.pooling != "NONE"


def full_matrix() -> list[Case]:
    """Every sharding type, pooling, weighting and batch shape; and the other kernel and optimizers."""
    cases = [Case(*cell) for cell in product(KINDS, ("SUM", "MEAN"), (False, True), BATCHES)]
    cases += [Case(kind, "NONE", batch=batch, dedup=d) for kind in UNPOOLED for batch in BATCHES for d in (False, True)]
    cases += [Case(kind, "NONE", kernel="dense", batch="uneven") for kind in UNPOOLED]
    cases += [Case(kind, "NONE", optimizer=o) for kind in UNPOOLED for o in ("ADAGRAD", "ROWWISE_ADAGRAD")]
    cases += [Case(kind, kernel="dense", batch=batch) for kind in KINDS for batch in ("uneven", "variable")]
    cases += [
        Case(kind, optimizer=o, weighted=w) for kind in KINDS for o in ("ADAGRAD", "ROWWISE_ADAGRAD") for w in (0, 1)
    ]
    return cases


def representative() -> list[Case]:
    """What the suite runs: each kind with each batch shape, pooling and weighting in turn."""
    cases = []
    for i, (kind, batch) in enumerate(product(KINDS, BATCHES)):
        cases.append(
            Case(
                kind,
                ("SUM", "MEAN")[(i // 2) % 2],
                bool(i % 2),
                batch,
                optimizer=("SGD", "ROWWISE_ADAGRAD")[i % 3 == 0],
            )
        )
    for i, (kind, batch) in enumerate(product(UNPOOLED, BATCHES)):
        cases.append(
            Case(kind, "NONE", batch=batch, dedup=i % 3 == 1, optimizer=("SGD", "ROWWISE_ADAGRAD")[i % 3 == 0])
        )
    return cases + [Case(kind, kernel="dense", batch="uneven") for kind in ("mixed", "data_parallel", "row_wise")]


# --------------------------------------------------------------------------------------------------- plans


def _blocks(total: int, parts: int) -> list[tuple[int, int]]:
    """(start, size) as planners cut rows: equal blocks, the last short, further ones empty."""
    block = -(-total // parts)
    return [(min(i * block, total), max(min(block, total - i * block), 0)) for i in range(parts)]


def _uneven(total: int, parts: int) -> list[tuple[int, int]]:
    """(start, size) with sizes that follow no block size; some may be empty."""
    edges = sorted(min(total, (total * (i * i + 1)) // (parts * parts)) for i in range(1, parts))
    edges = [0, *edges, total]
    return [(a, b - a) for a, b in pairwise(edges)]


def _columns(total: int, parts: int) -> list[tuple[int, int]]:
    """(start, size) of column pieces in steps of four, uneven where it does not divide."""
    units = total // 4
    return [(a * 4, n * 4) for a, n in _blocks(units, min(parts, units)) if n]


def table_plan(
    config: BaseEmbeddingConfig, kind: str, world: int, local: int, index: int, kernel: str
) -> ParameterSharding:
    """A plan of one table: ``local`` ranks a host; ``index`` moves it around."""
    rows, cols = config.num_embeddings, config.embedding_dim
    host = (index % (world // local)) * local
    rects: list[tuple[int, int, int, int]]
    if kind == "data_parallel":
        return ParameterSharding(kind, kernel, list(range(world)), None)
    if kind == "table_wise":
        rects, ranks = [(0, 0, rows, cols)], [index % world]
    elif kind in ("row_wise", "row_wise_uneven"):
        spans = _blocks(rows, world) if kind == "row_wise" else _uneven(rows, world)
        rects, ranks = [(r, 0, n, cols) for r, n in spans], list(range(world))
        kind = "row_wise"
    elif kind == "column_wise":
        rects = [(0, c, rows, n) for c, n in _columns(cols, world + 1)]
        ranks = [(index + i) % world for i in range(len(rects))]
    elif kind == "table_column_wise":
        rects = [(0, c, rows, n) for c, n in _columns(cols, local)]
        ranks = [host + i % local for i in range(len(rects))]
    elif kind == "table_row_wise":
        rects, ranks = [(r, 0, n, cols) for r, n in _blocks(rows, local)], list(range(host, host + local))
    else:
        assert kind == "grid_shard"
        pieces = _columns(cols, max(world // local, 2))
        rects = [(r, c, n, w) for c, w in pieces for r, n in _blocks(rows, local)]
        ranks = [((p + index) % (world // local)) * local + r for p in range(len(pieces)) for r in range(local)]
    spec = EnumerableShardingSpec(
        [
            ShardMetadata(shard_offsets=[r, c], shard_sizes=[n, w], placement=f"rank:{rank}/cpu")
            for (r, c, n, w), rank in zip(rects, ranks)
        ]
    )
    return ParameterSharding(kind, kernel, ranks, spec)


def module_plan(configs: list[Any], case: Case, world: int, local: int) -> EmbeddingModuleShardingPlan:
    """The plan of all tables; ``mixed`` gives each its own type."""
    mixed = ("row_wise", "table_wise", "data_parallel", "column_wise", "grid_shard")
    plan = EmbeddingModuleShardingPlan()
    for i, config in enumerate(configs):
        kind = mixed[i % len(mixed)] if case.kind == "mixed" else case.kind
        kernel = case.kernel
        plan[config.name] = table_plan(config, kind, world, local, i, EmbeddingComputeKernel(kernel).value)
    return plan


# --------------------------------------------------------------------------------------------------- inputs


def batch_of(rank: int, step: int, case: Case) -> KeyedJaggedTensor:
    """The input of a rank: the features in an order of their own, and one that no table reads."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    size = {"even": 4, "uneven": 2 + 3 * rank, "empty": 3 if (rank + step) % 2 else 0, "variable": 5}[case.batch]
    rows = {f: config[1] for config in TABLES for f in config[3]}
    rows["f1"] = 5  # the smaller of the two tables that read it
    keys = ["unused", *reversed(FEATURES)]
    sizes = [size] * len(keys)
    inverse = None
    if case.batch == "variable":
        sizes = [1 + int(torch.randint(size, (), generator=g)) for _ in keys]
        inverse = (keys, torch.stack([torch.randint(n, (size,), generator=g) for n in sizes]))
    lengths = [torch.randint(0, 4, (n,), generator=g) for n in sizes]
    values = [torch.randint(rows.get(key, 3), (int(n.sum()),), generator=g) for key, n in zip(keys, lengths)]
    flat = torch.cat(values)
    return KeyedJaggedTensor(
        keys,
        flat,
        torch.rand(flat.numel(), generator=g) if case.weighted else None,
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=[[n] for n in sizes] if inverse is not None else None,
        stride=size if inverse is None else None,
        inverse_indices=inverse,
    )


def new_module(case: Case) -> nn.Module:
    """The unsharded module, the same on every rank."""
    torch.manual_seed(7)
    if not case.pooled:
        return EmbeddingCollection(
            [EmbeddingConfig(rows, 20, name, feature_names=features) for name, rows, _, features in TABLES],
            need_indices=case.batch == "uneven",
        )
    tables = [
        EmbeddingBagConfig(rows, dim, name, feature_names=features, pooling=PoolingType[case.pooling])
        for name, rows, dim, features in TABLES
    ]
    return EmbeddingBagCollection(tables, is_weighted=case.weighted)


# ------------------------------------------------------------------------------------------------- the unsharded module


class Reference:
    """The unsharded module trained on all ranks' batches, with the optimizers written out."""

    def __init__(self, module: nn.Module, case: Case, plan: EmbeddingModuleShardingPlan) -> None:
        self.module = copy.deepcopy(module)
        self.case = case
        self.plan = plan
        self.state: dict[tuple[str, int], Tensor] = {}

    def tables(self) -> dict[str, nn.Parameter]:
        return {name.split(".")[1]: p for name, p in self.module.named_parameters()}

    def step(self, optimizer: str) -> None:
        """One step on ``.grad``; row-wise state is kept for each column piece, as shards keep it."""
        with torch.no_grad():
            for name, p in self.tables().items():
                grad = p.grad if p.grad is not None else torch.zeros_like(p)
                spec = self.plan[name].sharding_spec
                starts = sorted({s.shard_offsets[1] for s in spec.shards}) if spec is not None else [0]
                for a, b in zip(starts, [*starts[1:], p.shape[1]]):
                    self._update(p[:, a:b], grad[:, a:b], self.state, (name, a), optimizer)
                p.grad = None

    @staticmethod
    def _update(p: Tensor, grad: Tensor, state: dict[Any, Tensor], key: Any, optimizer: str) -> None:
        if optimizer == "SGD":
            p.sub_(LEARNING_RATE * grad)
            return
        squares = grad.pow(2) if optimizer == "ADAGRAD" else grad.pow(2).mean(1, keepdim=True)
        total = state[key] = state.get(key, torch.zeros_like(squares)) + squares
        p.sub_(LEARNING_RATE * grad / (total.sqrt() + 1e-8))


def loss_weights(rank: int, step: int, like: Tensor) -> Tensor:
    """Factors of a rank's outputs before they are summed, so that all gradients differ."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(5000 + 100 * step + rank))


def check_state(sharded: nn.Module, reference: nn.Module, what: str) -> None:
    """Every local shard holds its rectangle of the unsharded table; keys are the same."""
    got, want = sharded.state_dict(), reference.state_dict()
    assert list(got) == list(want), what
    for key, value in got.items():
        if isinstance(value, ShardedTensor):
            assert tuple(value.metadata().size) == tuple(want[key].shape)
            for shard in value.local_shards():
                (r, c), (n, w) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                close(shard.tensor, want[key][r : r + n, c : c + w], f"{what}: {key}[{r}:{r + n}, {c}:{c + w}]")
        else:
            close(value, want[key], f"{what}: {key}")


def close(got: Tensor, want: Tensor, what: str) -> None:
    """Equal to the rounding of float32 sums."""
    torch.testing.assert_close(got.detach(), want.detach(), rtol=2e-5, atol=2e-6, msg=lambda m: f"{what}: {m}")


def shard(module: nn.Module, case: Case, plan: EmbeddingModuleShardingPlan) -> nn.Module:
    """The sharded module."""
    fused_params = {"optimizer": OptimType[case.optimizer], "learning_rate": LEARNING_RATE, "eps": 1e-8}
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    if case.pooled:
        return EmbeddingBagCollectionSharder(fused_params).shard(module, plan, env, torch.device("cpu"))
    sharder = EmbeddingCollectionSharder(fused_params, use_index_dedup=case.dedup)
    return sharder.shard(module, plan, env, torch.device("cpu"))


def flat(output: Any) -> Tensor:
    """All numbers that a module gave."""
    if isinstance(output, KeyedTensor) or hasattr(output, "length_per_key"):
        return output.values()
    return torch.cat([jt.values() for jt in output.values()])


def check_jagged(got: Any, want: dict[str, JaggedTensor], what: str) -> None:
    """Names, lengths and carried ids; the rows are compared with the rest."""
    assert list(got.keys()) == list(want), what
    for name, jt in want.items():
        assert torch.equal(got[name].lengths(), jt.lengths()), f"{what}: lengths of {name}"
        ids = jt.weights_or_none()
        assert ids is None or torch.equal(got[name].weights(), ids), f"{what}: ids of {name}"


def with_gradients(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The same batch; its weights, if it has any, are a leaf that wants gradients."""
    weights = features.weights_or_none()
    if weights is not None:
        weights.requires_grad_()
    return features


def run_case(rank: int, world: int, case: Case, local: int) -> None:
    """Three steps of both modules: outputs and gradients of weights of each, state after the first and the third."""
    module = new_module(case)
    configs = module.embedding_bag_configs() if case.pooled else module.embedding_configs()
    plan = module_plan(configs, case, world, local)
    reference = Reference(module, case, plan)
    sharded = shard(module, case, plan)
    check_state(sharded, reference.module, f"{case} at first")
    for step in range(3):
        batches = [with_gradients(batch_of(r, step, case)) for r in range(world)]
        outputs = []
        for r in range(world):
            out = flat(reference.module(batches[r]))
            outputs.append(out)
            ((out * loss_weights(r, step, out)).sum() / world).backward()
        mine = with_gradients(batch_of(rank, step, case))
        result = sharded(mine)
        want = reference.module(batch_of(rank, step, case))
        if case.pooled:
            assert result.keys() == want.keys()
        else:
            check_jagged(result, want, f"{case} step {step}")
        close(flat(result), outputs[rank], f"{case} step {step}: forward")
        (flat(result) * loss_weights(rank, step, outputs[rank])).sum().backward()
        if case.weighted and mine.values().numel():
            # Weights belong to this rank's loss alone; the reference's is divided by the number of ranks.
            close(
                mine.weights().grad, batches[rank].weights().grad * world, f"{case} step {step}: gradients of weights"
            )
        step_dense(sharded, reference, case, f"{case} step {step}")
        reference.step(case.optimizer)
        if step != 1:
            check_state(sharded, reference.module, f"{case} after {step + 1} steps")


def step_dense(sharded: nn.Module, reference: Reference, case: Case, what: str) -> None:
    """Dense kernels leave gradients: compare them, then do SGD."""
    if case.kernel != "dense":
        return
    assert case.optimizer == "SGD"
    tables = reference.tables()
    for name, p in sharded.named_parameters():
        if not p.numel():  # the table lies on other ranks
            continue
        shards = sharded.get_submodule(name.rpartition(".")[0]).shards()
        piece = next(piece for piece, rows in shards if rows.data_ptr() == p.data_ptr())
        want = tables[name.split(".")[1]].grad
        assert p.grad is not None, f"{what}: {name} has no gradient"
        close(p.grad, want[piece.row_start : piece.row_stop, piece.col_start : piece.col_stop], f"{what}: {name}.grad")
        with torch.no_grad():
            p.sub_(LEARNING_RATE * p.grad)
        p.grad = None


def run_cases(rank: int, world: int, cases: list[Case], local: int) -> None:
    """All cases in one process group: starting ranks takes longer than a case."""
    for case in cases:
        run_case(rank, world, case, local)
