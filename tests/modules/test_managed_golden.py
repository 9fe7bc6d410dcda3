"""Managed collisions train and look up bit for bit as TorchRec 1.8 did when it wrote the golden file."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from recinfer import fbgemm
from recinfer.modules import mc_modules
from recinfer.modules.hash_mc_modules import HashZchManagedCollisionModule
from recinfer.modules.mc_modules import MCHManagedCollisionModule
from recinfer.modules.mc_slots import segments_of, zero_collision_hash
from recinfer.sparse.jagged_tensor import JaggedTensor
from tests.golden.managed import (
    CASES,
    FILE,
    HASHED,
    INPUT_HASH_SIZE,
    INTERVAL,
    SEGMENTS,
    SIZE,
    STEPS,
    digest,
    hashed_identities,
    hashed_queries,
    ids_of_step,
    policy_of,
    queries,
    train_step,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(FILE) as stored:
        return dict(stored)


def state_of(golden: dict[str, np.ndarray], case: str) -> dict[str, Tensor]:
    """The state dict that TorchRec wrote."""
    prefix = f"{case}/state/"
    return {key.removeprefix(prefix): torch.from_numpy(v) for key, v in golden.items() if key.startswith(prefix)}


def module_of(case: str) -> MCHManagedCollisionModule:
    policy = policy_of(mc_modules, case)
    return MCHManagedCollisionModule(SIZE, CPU, policy, INTERVAL, input_hash_size=INPUT_HASH_SIZE, name="t")


def rows_of(module: Any, ids: Tensor) -> Tensor:
    rows = module.remap({"t": JaggedTensor(ids, lengths=torch.ones(len(ids), dtype=torch.int64))})["t"].values()
    assert isinstance(rows, Tensor)
    return rows


def check_state(module: MCHManagedCollisionModule, stored: dict[str, Tensor]) -> None:
    held = module.state_dict()
    assert sorted(held) == sorted(stored)
    for key, value in held.items():
        assert value.dtype == stored[key].dtype and torch.equal(value, stored[key]), key


@pytest.mark.parametrize("case", CASES)
def test_training_steps_are_those_of_torchrec(case: str, golden: dict[str, np.ndarray]) -> None:
    torch.manual_seed(3)  # for the filter that draws numbers
    module = module_of(case)
    for step in range(STEPS):
        rows, evicted = train_step(module, JaggedTensor, ids_of_step(step))
        held = module.state_dict()
        assert digest(rows, evicted, *(held[key] for key in sorted(held))) == golden[f"{case}/steps"][step], step
    check_state(module, state_of(golden, case))
    module.eval()
    before = digest(*module.state_dict().values())
    rows = rows_of(module, queries(100_000))
    assert np.array_equal(rows[:2000].numpy(), golden[f"{case}/rows"])
    assert digest(rows) == golden[f"{case}/all_rows"]
    assert torch.equal(module.open_slots(), torch.from_numpy(golden[f"{case}/open"]))
    train_step(module, JaggedTensor, ids_of_step(0))
    assert digest(*module.state_dict().values()) == before  # evaluation records nothing


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_of_torchrec_loads_and_answers(case: str, golden: dict[str, np.ndarray]) -> None:
    module = module_of(case)
    module.load_state_dict(state_of(golden, case))
    assert np.array_equal(rows_of(module, queries(100_000)[:2000]).numpy(), golden[f"{case}/rows"])
    check_state(module, state_of(golden, case))


@pytest.mark.parametrize("count", SEGMENTS)
def test_segments_of_ranks_answer_as_in_torchrec(count: int, golden: dict[str, np.ndarray]) -> None:
    starts, asked = SEGMENTS[count], queries(100_000)
    whole = module_of("distance")
    parts = [whole.rebuild_with_output_id_range(rows, starts) for rows in pairwise(starts)]
    for step in range(STEPS):
        ids = ids_of_step(step)
        segments = segments_of(ids, INPUT_HASH_SIZE, count)
        for segment, part in enumerate(parts):
            train_step(part, JaggedTensor, ids[segments == segment])
    stored = state_of(golden, f"segments-{count}")
    for (first, stop), part in zip(pairwise(starts), parts):
        own = {
            k: v if k in ("_output_segments_tensor", "_current_iter_tensor") else v[first:stop]
            for k, v in stored.items()
        }
        check_state(part, own)
        loaded = whole.rebuild_with_output_id_range((first, stop), starts)
        loaded.load_state_dict(own)
        check_state(loaded, own)
    segments = segments_of(asked, INPUT_HASH_SIZE, count)
    rows = torch.empty_like(asked)
    for segment, part in enumerate(parts):
        rows[segments == segment] = rows_of(part, asked[segments == segment])
    assert np.array_equal(rows[:2000].numpy(), golden[f"segments-{count}/rows"])
    assert digest(rows) == golden[f"segments-{count}/all_rows"]
    whole.load_state_dict(stored)
    assert np.array_equal(rows_of(whole, asked[:2000]).numpy(), golden[f"segments-{count}/unsharded"])


@pytest.mark.parametrize("case", HASHED)
def test_hashed_collisions_answer_as_in_torchrec(case: str, golden: dict[str, np.ndarray]) -> None:
    arguments = HASHED[case]
    module = HashZchManagedCollisionModule(device=CPU, is_inference=True, **arguments)
    assert sorted(module.state_dict()) == golden[f"hashed-{case}/keys"].tolist()
    module.load_state_dict({**module.state_dict(), module.IDENTITY_BUFFER: hashed_identities(arguments)})
    ids = hashed_queries(arguments, 2000)
    answer = module({"t": JaggedTensor(ids, lengths=torch.ones(len(ids), dtype=torch.int64))})["t"]
    assert np.array_equal(answer.values().numpy(), golden[f"hashed-{case}/rows"])
    assert np.array_equal(answer.lengths().numpy(), golden[f"hashed-{case}/lengths"])


@pytest.mark.skipif(not fbgemm.INSTALLED, reason="FBGEMM's operator is compared")
@pytest.mark.parametrize("reserved", [0, 40])
@pytest.mark.parametrize("fallback", [True, False])
def test_a_million_ids_have_the_slots_of_fbgemm(reserved: int, fallback: bool) -> None:
    buckets, size, count = 16, 4096, 1_000_000
    generator = torch.Generator().manual_seed(reserved)
    identities = torch.full((buckets * size,), -1)
    full = torch.randperm(len(identities), generator=generator)[: len(identities) * 2 // 3]
    identities[full] = torch.randint(0, 10**6, full.shape, generator=generator)
    # Slots by hash, so that most ids are found; the others of these ids miss.
    ids = torch.cat([identities[full], torch.randint(-(2**63), 2**63 - 1, (count - len(full),), generator=generator)])
    offsets, sizes = segments_of(ids, 10**6, buckets) * size, torch.full_like(ids, size)
    expected, _ = torch.ops.fbgemm.zero_collision_hash(
        input=ids,
        identities=identities.view(-1, 1),
        max_probe=3,
        circular_probe=True,
        readonly=True,
        local_sizes=sizes,
        offsets=offsets,
        disable_fallback=not fallback,
        opt_in_prob=50 if reserved else -1,
        num_reserved_slots=reserved or -1,
    )
    assert torch.equal(zero_collision_hash(ids, identities, sizes, offsets, 3, reserved, fallback), expected)


@pytest.mark.skipif(not fbgemm.INSTALLED, reason="FBGEMM's operator is compared")
@pytest.mark.parametrize("input_hash_size", [1, 7, 10**12, 2**62, 2**63 - 1])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 80])
def test_ids_are_sent_to_the_segments_of_fbgemm(input_hash_size: int, count: int) -> None:
    ids = torch.cat([queries(3000), torch.arange(-50, 50)])
    lengths, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.ones_like(ids),
        ids,
        False,
        False,
        torch.tensor([-(-input_hash_size // count)]),
        count,
        None,
        keep_orig_idx=True,
    )
    assert torch.equal(segments_of(ids, input_hash_size, count), lengths.view(count, -1).argmax(0))
