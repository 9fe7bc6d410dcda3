"""What trains on a GPU, each against the CPU's own groups or the plain loop: groups of tables, models, pipelines, copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from recinfer import fbgemm
from recinfer.distributed.embedding_types import EmbeddingLocation
from recinfer.distributed.fused_params import FusedSettings
from recinfer.distributed.quant.measure import calibrate
from recinfer.distributed.sharded.copying import copied_to
from recinfer.distributed.tables.cpu import TableGroup
from recinfer.distributed.tables.cpu_dense import DenseTableGroup
from recinfer.distributed.tables.cuda import ModuleDenseTableGroup, ModuleTableGroup
from recinfer.modules.embedding_configs import DataType, PoolingType
from tests.distributed.spawn import run_ranks
from tests.distributed.test_model_parallel import optimizer_of, sharded
from tests.distributed.test_table_group import EVEN, call, filled, output_gradient
from tests.distributed.test_train_pipeline import PIPELINES, batches_of, drain
from tests.gpu.devices import BACKENDS, DEVICES, skip_unless_fbgemm_has

CPU = torch.device("cpu")
SUM, MEAN, NONE = PoolingType.SUM, PoolingType.MEAN, PoolingType.NONE
# FBGEMM's dense operator lacks an autograd registration that torch warns about.
pytestmark = pytest.mark.filterwarnings("ignore:fbgemm..dense_embedding_codegen_lookup_function")


def three_steps(group: TableGroup, device: torch.device, step: Callable[[], None] = lambda: None) -> list[Tensor]:
    """Outputs, weight gradients and rows of three steps on the CPU."""
    found = []
    weighted = group.pooling is SUM  # a MEAN is divided after the exchange, weights are for sums
    for number in range(1, 4):
        batch = call(EVEN, number, weighted=weighted)
        weights = None if batch.weights is None else batch.weights.to(device).requires_grad_()
        out = group(batch.ids.to(device), batch.offsets.to(device), weights)
        out.backward(output_gradient(out, number).to(device))
        step()
        found += [out.detach().cpu(), *(rows.detach().cpu().clone() for rows in group.table_weights())]
        if weights is not None and weights.grad is not None:
            found.append(weights.grad.cpu())
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pooling", [SUM, MEAN, NONE], ids=lambda p: p.value)
@pytest.mark.parametrize("optimizer", ["SGD", "ROWWISE_ADAGRAD", "ADAM"])
def test_a_group_trains_as_the_cpus_operators_do(device: str, pooling: PoolingType, optimizer: str) -> None:
    skip_unless_fbgemm_has(optimizer, device)
    settings = FusedSettings.from_params({"optimizer": optimizer, "learning_rate": 0.1, "eps": 1e-4})
    here = torch.device(device)
    module, ours = ModuleTableGroup(EVEN, pooling, settings, device=here), TableGroup(EVEN, pooling, settings)
    for group in (module, ours):
        filled(group)
    for mine, its in zip(three_steps(module, here), three_steps(ours, CPU), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("pooling", [SUM, MEAN], ids=lambda p: p.value)
def test_a_dense_group_trains_as_the_cpus_does(device: str, pooling: PoolingType) -> None:
    here = torch.device(device)
    found = []
    for kind, place in ((ModuleDenseTableGroup, here), (DenseTableGroup, CPU)):
        group = kind(EVEN, pooling, FusedSettings(), device=place)
        filled(group)
        optimizer = torch.optim.SGD(group.tables, lr=0.1)
        found.append(three_steps(group, place, optimizer.step))
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def held(state: dict[str, Any]) -> dict[str, Tensor]:
    """The state of one rank, which holds all of it, on the CPU."""
    found = {}
    for key, value in state.items():
        if not hasattr(value, "local_shards"):
            found[key] = value.detach().cpu().clone()
            continue
        found[key] = torch.empty(value.size())
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            found[key][row : row + rows, column : column + columns] = shard.tensor.detach().cpu()
    return found


def trained(rank: int, world: int, kind: str | None) -> tuple[str, list[float], dict[str, Tensor]]:
    """Device, losses and state of a model after two passes, by a pipeline or (None) the plain loop."""
    dmp = sharded(rank, world)
    optimizer, batches, losses = optimizer_of(dmp), batches_of(rank, world), []
    for _ in range(2):
        if kind is not None:
            losses += drain(PIPELINES[kind](dmp, optimizer, dmp.device), batches)
            continue
        for batch in batches:
            optimizer.zero_grad()
            loss, _ = dmp(batch.to(dmp.device))
            loss.backward()
            optimizer.step()
            losses.append(float(loss))
    return dmp.device.type, losses, held(dmp.state_dict())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [None, *PIPELINES])
def test_a_model_trains_as_on_the_cpu(device: str, kind: str | None) -> None:
    ((_, losses, state),) = run_ranks(1, trained, None)
    ((where, mine, its),) = run_ranks(1, trained, kind, backend=BACKENDS[device])
    assert where == device and mine == pytest.approx(losses, rel=1e-4)
    for name, value in state.items():
        torch.testing.assert_close(its[name], value, rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def copied(rank: int, world: int) -> None:
    dmp = sharded(rank, world)
    other = dmp.copy(dmp.device)
    before, batch = held(dmp.state_dict()), batches_of(rank, world)[0].to(dmp.device)
    assert torch.equal(dmp.eval()(batch)[0], other.eval()(batch)[0])
    other.train()(batch)[0].backward()
    after, its = held(dmp.state_dict()), held(other.state_dict())
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    assert any(not torch.equal(its[name], value) for name, value in before.items())
    assert {p.device for p in other.parameters()} == {dmp.device}


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_trains_on_its_own(device: str) -> None:
    run_ranks(1, copied, backend=BACKENDS[device])


@pytest.mark.gpu
@pytest.mark.skipif(not (torch.cuda.is_available() and fbgemm.HAS_CUDA), reason="needs a GPU and FBGEMM for it")
def test_a_copy_leaves_rows_in_host_memory_there() -> None:
    settings = FusedSettings.from_params({"optimizer": "SGD", "learning_rate": 0.1})
    gpu = torch.device("cuda", 0)
    group = ModuleTableGroup(EVEN, SUM, settings, device=gpu, location=EmbeddingLocation.MANAGED)
    filled(group)
    other = copied_to(group, gpu)
    for mine, its in zip(group.table_weights(), other.table_weights()):
        assert torch.equal(mine, its) and mine.data_ptr() != its.data_ptr()
        assert torch.ops.fbgemm.is_uvm_tensor(mine) and torch.ops.fbgemm.is_uvm_tensor(its)


@pytest.mark.parametrize("device", DEVICES)
def test_a_calibration_measures_the_device(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recinfer.distributed.quant.measure._ROUNDS", 1)
    found = calibrate(device, seconds_per_point=0.0005, precisions=[DataType.INT8], max_set_bytes=1 << 20)
    assert found.device == device and found.call_ms > 0
    assert (found.device_memory_bytes_per_ms > 0) is (device == "cuda")
    assert set(found.grids) == {8}
