"""A model with managed collisions: checkpoint, archive, answers to raw ids bit for bit as the quantized module's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import recinfer
from recinfer.archive.captured import collections_of, read_program
from recinfer.archive.reader import open_archive
from recinfer.capture import capture
from recinfer.checkpoint import CheckpointReader, save_checkpoint
from recinfer.distributed.model_parallel import DistributedModelParallel
from recinfer.distributed.planner.inference import plan_inference
from recinfer.errors import CheckpointError
from recinfer.inference.comparison import compare_archive
from recinfer.inference.delta import make_delta
from recinfer.inference.export import export_archive
from recinfer.inference.modules import quantize_inference_model
from recinfer.inference.recorded import RecordedReference
from recinfer.inference.reshard import reshard_archive
from recinfer.inference.verify import verify
from recinfer.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from recinfer.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from recinfer.modules.hash_mc_modules import HashZchManagedCollisionModule
from recinfer.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from recinfer.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.cli.test_main import invoke
from tests.golden.managed import FILE, INPUT_HASH_SIZE, SEGMENTS, SIZE, ids_of_step, queries

FEATURES = ["clicked", "shown", "user", "history"]
PARTS = ("values", "lengths")
CPU = torch.device("cpu")


class Lookups(nn.Module):
    """The vectors of pooled and unpooled tables with managed collisions, sorted and hashed."""

    def __init__(self, drops: bool = False) -> None:
        super().__init__()

        def collisions(tables: Any, **hashed: Any) -> ManagedCollisionCollection:
            modules: dict[str, ManagedCollisionModule] = {
                t.name: MCHManagedCollisionModule(t.num_embeddings, CPU, DistanceLFU_EvictionPolicy(), 2)
                for t in tables
            }
            return ManagedCollisionCollection(modules | hashed, tables)

        bags = [
            EmbeddingBagConfig(24, 4, "goods", feature_names=["clicked", "shown"], pooling=PoolingType.MEAN),
            EmbeddingBagConfig(16, 8, "users", feature_names=["user"]),
        ]
        rows = [EmbeddingConfig(12, 4, "recent", feature_names=["history"])]
        users = HashZchManagedCollisionModule(16, CPU, 2, 5, is_inference=True, disable_fallback=drops)
        self.bags = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=bags), collisions(bags, users=users)
        )
        self.rows = ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=rows), collisions(rows))

    def forward(self, sparse: KeyedJaggedTensor) -> dict[str, Tensor]:
        pooled, _ = self.bags(sparse)
        history, _ = self.rows(sparse)
        return {"pooled": pooled.values(), "history": history["history"].to_padded_dense(3)}


def ids_of(samples: int, seed: int) -> KeyedJaggedTensor:
    """Raw ids: popular ones, rare ones, negative ones and the ends of the range."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (4 * samples,), generator=generator)
    numbers = torch.randint(0, 40, (int(lengths.sum()),), generator=generator)
    ids = torch.where(numbers < 3, 2**63 - 1 + numbers, numbers * 0x1234567890ABCDF - 2**61)
    return KeyedJaggedTensor(FEATURES, ids, lengths=lengths)


def trained(steps: int = 6, drops: bool = False) -> Lookups:
    torch.manual_seed(0)
    model = Lookups(drops)
    users = model.bags._managed_collision_collection._managed_collision_modules["users"]
    assert isinstance(users, HashZchManagedCollisionModule)
    known = torch.unique(ids_of(64, 1)["user"].values())[::3]
    finding = HashZchManagedCollisionModule(16, CPU, 2, 5, is_inference=True)
    users._hash_zch_identities.data[finding.slots_of(known), 0] = known
    for step in range(steps):
        for module in (model.bags, model.rows):
            for name, part in module._managed_collision_collection._managed_collision_modules.items():
                part.train(name != "users")
        model(ids_of(8, step))
    return model.eval()


def exported(model: nn.Module, folder: Path, ranks: int = 1, name: str = "model") -> Path:
    """The model's archive, by way of a checkpoint."""
    save_checkpoint(folder / name, model)
    plan = plan_inference(model, world_size=ranks, precision=DataType.INT8)
    given = (ids_of(4, 9),)
    archive = export_archive(
        model,
        CheckpointReader(folder / name),
        plan,
        folder / f"{name}.rqa",
        name="m",
        version="1",
        inputs=[given],
        progress=False,
    )
    return archive.root


def check_equal(path: Path, model: nn.Module) -> None:
    quantized = quantize_inference_model(model, quantization_dtype=torch.int8)
    served = recinfer.load(path)
    for samples, seed in ((1, 11), (5, 12), (64, 13)):
        expected, got = quantized(ids_of(samples, seed)), served(ids_of(samples, seed))
        for name, values in expected.items():
            assert torch.equal(got[name], values), name


@pytest.mark.parametrize(("ranks", "drops"), [(1, False), (2, True)])
def test_an_archive_answers_raw_ids_as_the_quantized_module_does(ranks: int, drops: bool, tmp_path: Path) -> None:
    model = trained(drops=drops)
    path = exported(model, tmp_path, ranks)
    check_equal(path, model)
    assert verify(path).problems == ()
    plan = plan_inference(model, world_size=3 - ranks, precision=DataType.INT8)
    reshard_archive(path, plan, tmp_path / "other.rqa", progress=False)
    check_equal(tmp_path / "other.rqa", model)


def test_recorded_outputs_for_raw_ids_agree(tmp_path: Path) -> None:
    model = trained()
    ids = ids_of(64, 11)
    arrays = {
        f"{name}.{part}": getattr(jagged, part)().numpy() for name, jagged in ids.to_dict().items() for part in PARTS
    }
    with torch.no_grad():
        outputs = {name: output.numpy() for name, output in model(ids).items()}
    np.savez(tmp_path / "recorded.npz", **arrays, **outputs)
    comparison = compare_archive(exported(model, tmp_path), RecordedReference.read(tmp_path / "recorded.npz"))
    assert not comparison.wrong
    assert comparison.max_bound < 0.2 * outputs["pooled"].std()


def test_a_delta_brings_ids_and_rows_together(tmp_path: Path) -> None:
    path = exported(trained(4), tmp_path)
    model = trained(10)
    save_checkpoint(tmp_path / "newer", model)
    make_delta(
        path,
        model,
        CheckpointReader(tmp_path / "newer"),
        tmp_path / "newer.rqd",
        inputs=[(ids_of(4, 9),)],
        progress=False,
    )
    served = recinfer.load(path)
    served.apply_delta(tmp_path / "newer.rqd")
    expected = quantize_inference_model(model, quantization_dtype=torch.int8)(ids_of(64, 3))
    for name, values in served(ids_of(64, 3)).items():
        assert torch.equal(values, expected[name]), name


class OneTable(nn.Module):
    """A table of the golden states."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(SIZE, 4, "t", feature_names=["f"])]
        module = MCHManagedCollisionModule(SIZE, CPU, DistanceLFU_EvictionPolicy(), 5, input_hash_size=INPUT_HASH_SIZE)
        self.bags = ManagedCollisionEmbeddingBagCollection(
            EmbeddingBagCollection(tables=tables), ManagedCollisionCollection({"t": module}, tables)
        )

    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        return self.bags(sparse)[0].values()


@pytest.mark.parametrize("count", SEGMENTS)
def test_checkpoints_of_ranks_keep_their_segments(count: int, tmp_path: Path) -> None:
    model = OneTable()
    weight = torch.arange(SIZE * 4.0).view(SIZE, 4)
    prefix = "bags._managed_collision_collection._managed_collision_modules.t."
    state = {"bags._embedding_module.embedding_bags.t.weight": weight}
    with np.load(FILE) as golden:
        stored = f"segments-{count}/state/"
        state |= {
            prefix + key.removeprefix(stored): torch.from_numpy(golden[key]) for key in golden if key.startswith(stored)
        }
        rows = torch.from_numpy(golden[f"segments-{count}/rows"]).long()
    torch.save(state, tmp_path / "model.pt")
    ids = one_feature(queries(100_000)[: len(rows)])
    for ranks in (1, 2):
        plan = plan_inference(model, world_size=ranks, precision=DataType.FP32)
        out = tmp_path / f"{ranks}.rqa"
        checkpoint = CheckpointReader(tmp_path / "model.pt")
        export_archive(model, checkpoint, plan, out, name="m", version="1", inputs=[(ids_for_trace(),)], progress=False)
        assert torch.equal(recinfer.load(out)(ids), weight[rows])
        reshard_archive(
            out,
            plan_inference(model, world_size=3 - ranks, precision=DataType.FP32),
            tmp_path / f"{ranks}b.rqa",
            progress=False,
        )
        assert torch.equal(recinfer.load(tmp_path / f"{ranks}b.rqa")(ids), weight[rows])


def ids_for_trace() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.tensor([5, -7, 2**40, 1]), lengths=torch.tensor([2, 0, 2]))


def test_a_checkpoint_without_ids_exports_nothing(tmp_path: Path) -> None:
    model = OneTable()
    weights = {k: v for k, v in model.state_dict().items() if "_mch" not in k}
    torch.save(weights, tmp_path / "model.pt")
    plan = plan_inference(model, world_size=1, precision=DataType.FP32)
    with pytest.raises(CheckpointError, match="_mch_sorted_raw_ids"):
        export_archive(
            model,
            CheckpointReader(tmp_path / "model.pt"),
            plan,
            tmp_path / "m.rqa",
            name="m",
            version="1",
            inputs=[(ids_for_trace(),)],
            progress=False,
        )
    assert not (tmp_path / "m.rqa").exists()


def test_a_captured_program_is_exported_with_its_vocabularies(tmp_path: Path) -> None:
    model = trained()
    capture(model, (ids_of(4, 9),)).save(tmp_path / "model.rqp")
    captured = read_program(tmp_path / "model.rqp")
    plan = plan_inference(collections_of(captured), world_size=1, precision=DataType.INT8)
    save_checkpoint(tmp_path / "model", model)
    checkpoint = CheckpointReader(tmp_path / "model")
    export_archive(captured, checkpoint, plan, tmp_path / "m.rqa", name="m", version="1", progress=False)
    check_equal(tmp_path / "m.rqa", model)


def build() -> nn.Module:
    """The model without its weights, for the command line."""
    return Lookups()


def example() -> list[Any]:
    """An example batch, for the command line."""
    return [(ids_of(4, 9),)]


def test_the_command_line_exports_and_inspects_vocabularies(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "model", trained())
    given = ["--model", f"{__name__}:build", "--checkpoint", tmp_path / "model"]
    code, _, err = invoke("plan", *given, "--world-size", 2, "--out", tmp_path / "plan.json")
    assert code == 0, err
    out = tmp_path / "m.rqa"
    code, _, err = invoke(
        "export", *given, "--plan", tmp_path / "plan.json", "--inputs", f"{__name__}:example", "--out", out
    )
    assert code == 0, err
    check_equal(out, trained())
    assert {info.table for info in open_archive(out).manifest.vocabularies} == {"goods", "users", "recent"}


def test_a_module_sharded_by_one_rank_is_exported_live(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        sharded = DistributedModelParallel(OneTable(), device=CPU)
        for step in range(12):
            sharded(one_feature(ids_of_step(step)))
        sharded.eval()
        recinfer.export(sharded, (ids_for_trace(),), tmp_path / "m.rqa", precision="fp32", progress=False)
        ids = one_feature(torch.cat([ids_of_step(11), queries(200)]))
        assert torch.equal(recinfer.load(tmp_path / "m.rqa")(ids), sharded(ids))
    finally:
        dist.destroy_process_group()


class Hashed(OneTable):
    """Computes the raw ids of its table from those of the request, under the same name."""

    def forward(self, sparse: KeyedJaggedTensor) -> Tensor:
        ids = (sparse.values() * 31 + 7) % 1_000_003
        return super().forward(KeyedJaggedTensor(sparse.keys(), ids, lengths=sparse.lengths()))


def test_raw_ids_that_forward_computes(tmp_path: Path) -> None:
    model = Hashed()
    for step in range(12):
        model(one_feature(ids_of_step(step)))
    model.eval()
    served = recinfer.export(model, (ids_for_trace(),), tmp_path / "m.rqa", precision="fp32", progress=False)
    assert verify(tmp_path / "m.rqa").ok
    ids = one_feature(torch.cat([ids_of_step(11), queries(200)]))
    assert torch.equal(served(ids), model(ids))
    assert len(served(ids).unique(dim=0)) > 3


def one_feature(ids: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], ids, lengths=torch.ones_like(ids))
