"""Golden states and answers of managed collisions, written by TorchRec 1.8 itself.

    python -m tests.golden.managed          (in an environment with torchrec 1.8)

The ids come from whole numbers, so that tests make the same ids again; ``managed.npz`` holds digests of each step's results,
some states in full, and the rows of ids that were seen, evicted or never seen.
"""

from __future__ import annotations

import hashlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "BATCH",
    "CASES",
    "FILE",
    "HASHED",
    "INTERVAL",
    "SEGMENTS",
    "SIZE",
    "STEPS",
    "digest",
    "hashed_identities",
    "hashed_queries",
    "ids_of_step",
    "policy_of",
    "queries",
    "train_step",
]

FILE = Path(__file__).with_name("managed.npz")
SIZE, INTERVAL, STEPS, BATCH = 97, 5, 120, 64

# case -> policy, its arguments, filter
CASES: dict[str, tuple[str, dict[str, float], str | None]] = {
    "lfu": ("LFU_EvictionPolicy", {}, None),
    "lru": ("LRU_EvictionPolicy", {}, None),
    "lru-squared": ("LRU_EvictionPolicy", {"decay_exponent": 2.0}, None),
    "distance": ("DistanceLFU_EvictionPolicy", {}, None),
    "distance-half": ("DistanceLFU_EvictionPolicy", {"decay_exponent": 0.5}, None),
    "lfu-dynamic": ("LFU_EvictionPolicy", {}, "dynamic_threshold_filter"),
    "distance-average": ("DistanceLFU_EvictionPolicy", {}, "average_threshold_filter"),
    "lru-probabilistic": ("LRU_EvictionPolicy", {}, "probabilistic_threshold_filter"),
}
# number of segments -> first rows, and the row behind the last, as row-wise plans of so many ranks cut the table
SEGMENTS = {1: [0, 97], 2: [0, 49, 97], 4: [0, 25, 50, 75, 97]}
INPUT_HASH_SIZE = 1 << 62

# case -> arguments of HashZchManagedCollisionModule
HASHED: dict[str, dict[str, Any]] = {
    "any-id": {"zch_size": 64, "total_num_buckets": 1},
    "buckets": {"zch_size": 120, "total_num_buckets": 8, "max_probe": 6},
    "blocks": {"zch_size": 120, "total_num_buckets": 4, "max_probe": 30, "input_hash_size": 10_000},
    "dropped": {"zch_size": 120, "total_num_buckets": 8, "max_probe": 5, "disable_fallback": True},
    "opt-in": {
        "zch_size": 120,
        "total_num_buckets": 4,
        "max_probe": 10,
        "opt_in_prob": 50,
        "percent_reserved_slots": 20.0,
    },
    "divided": {
        "zch_size": 60,
        "total_num_buckets": 3,
        "max_probe": 8,
        "inference_dispatch_div_train_world_size": True,
    },
}


def _spread(numbers: np.ndarray) -> Tensor:
    """int64 ids all over the range from small whole numbers; 0 to 9 stay."""
    spread = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return torch.from_numpy(np.where(numbers < 10, numbers, spread.view(np.int64)))


def _drawn(seed: int, size: int, of: int) -> np.ndarray:
    """Whole numbers below ``of``, small ones more often; the same on any machine."""
    x = (np.arange(size, dtype=np.uint64) + np.uint64(1000 * seed + 1)) * np.uint64(0xD1342543DE82EF95)
    x ^= x >> np.uint64(32)
    x = x * np.uint64(0x2545F4914F6CDD1D) >> np.uint64(33)
    return ((x % np.uint64(of)) * ((x >> np.uint64(12)) % np.uint64(of)) // np.uint64(of)).astype(np.int64)


def ids_of_step(step: int, shift: bool = True) -> Tensor:
    """The ids of a training step, int64; the popular ones change slowly, and batches differ in size."""
    size = BATCH + (step % 7) * 9 - 20
    return _spread(_drawn(step, size, 400) + (step // 10 * 15 if shift else 0))


def queries(count: int) -> Tensor:
    """Ids to look up: seen and evicted ones, unseen ones, negative ones and the ends of the range."""
    ends = torch.tensor([2**63 - 1, -(2**63), -1, 0, 1, 2**62, 2**62 - 1, 2**61, -2, -3])
    numbers = np.arange(count - len(ends), dtype=np.int64) % 3000
    ids = _spread(numbers)
    return torch.cat([ends, torch.where(torch.from_numpy(numbers % 5 == 4), ids + 1, ids)])


def digest(*tensors: Tensor) -> str:
    """A digest of int64 tensors."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.long().numpy().astype("<i8").tobytes())
    return found.hexdigest()[:16]


def policy_of(package: Any, case: str) -> Any:
    """The eviction policy of a case, of a package's ``mc_modules``."""
    name, arguments, filtered = CASES[case]
    return getattr(package, name)(
        **arguments, threshold_filtering_func=None if filtered is None else getattr(package, filtered)
    )


def train_step(module: Any, jagged: Any, ids: Tensor) -> tuple[Tensor, Tensor]:
    """One training step; the rows of the ids, and the rows to reset."""
    rows = module({"t": jagged(values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))})["t"].values()
    evicted = module.evict()
    return rows, torch.empty(0, dtype=torch.int64) if evicted is None else evicted


def _murmur(number: int) -> int:
    """MurmurHash3 x64 of the 64-bit blocks (number, 0), both halves combined, with Python's numbers."""
    most = (1 << 64) - 1

    def rotated(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (64 - bits))) & most

    def mixed(x: int) -> int:
        x = (x ^ (x >> 33)) * 0xFF51AFD7ED558CCD & most
        x = (x ^ (x >> 33)) * 0xC4CEB9FE1A85EC53 & most
        return x ^ (x >> 33)

    k = rotated((number & most) * 0x87C37B91114253D5 & most, 31) * 0x4CF5AD432745937F & most
    a = (rotated(k, 27) * 5 + 0x52DCE729) & most
    b = (a * 5 + 0x38495AB5) & most
    a, b = a ^ 16, b ^ 16
    a = (a + b) & most
    b = (b + a) & most
    a, b = mixed(a), mixed(b)
    a = (a + b) & most
    return a ^ ((b + a) & most)


def hashed_identities(arguments: dict[str, Any]) -> Tensor:
    """Identities ``[Z, 1]`` of a table of hashed managed collisions, as a training leaves them: ids in the first empty slot of
    their search, some slots empty again, and ids that came back to an earlier slot and so occur twice."""
    size, buckets = arguments["zch_size"], arguments["total_num_buckets"]
    of, slots = arguments.get("input_hash_size", 0), size // buckets
    reserved = int(slots * arguments.get("percent_reserved_slots", 0) / 100)
    divides = arguments.get("inference_dispatch_div_train_world_size", False)
    held = [-1] * size
    drawn = _drawn(7, 3 * size, of or 500)
    for round_, numbers in enumerate((drawn[:size], drawn)):
        for id_ in (torch.from_numpy(numbers) if of else _spread(numbers)).tolist():
            bucket = id_ // (-(-of // buckets)) if of else id_ % buckets
            searched = id_ // buckets if divides else id_
            first = _murmur(searched) % (slots - reserved)
            for step in range(arguments.get("max_probe", 128)):
                slot = bucket * slots + (first + step) % (slots - reserved)
                if held[slot] in (-1, searched):
                    held[slot] = searched
                    break
        if not round_:
            held = [-1 if slot % 3 == 0 else id_ for slot, id_ in enumerate(held)]
    held = [-1 if slot % 7 == 0 else id_ for slot, id_ in enumerate(held)]
    return torch.tensor(held).view(-1, 1)


def hashed_queries(arguments: dict[str, Any], count: int) -> Tensor:
    """Ids to look up in such a table: within ``input_hash_size``, if it has one."""
    of, buckets = arguments.get("input_hash_size", 0), arguments["total_num_buckets"]
    if of:
        return torch.arange(count) * 5 % of
    ids = hashed_identities(arguments)[:, 0]
    if arguments.get("inference_dispatch_div_train_world_size"):
        ids = ids * buckets + torch.arange(len(ids)) // (len(ids) // buckets)
    return torch.cat([ids, queries(count - len(ids))])


def _write() -> None:
    import torchrec.modules.mc_modules as mc
    from fbgemm_gpu import __version__ as fbgemm
    from torchrec import __version__ as version
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
    from torchrec.sparse.jagged_tensor import JaggedTensor

    found: dict[str, Any] = {"versions": np.array([f"torchrec {version}", f"fbgemm {fbgemm}"])}
    cpu = torch.device("cpu")
    asked = queries(100_000)

    def module(case: str) -> Any:
        return mc.MCHManagedCollisionModule(
            SIZE, cpu, policy_of(mc, case), INTERVAL, input_hash_size=INPUT_HASH_SIZE, name="t"
        )

    def state(trained: Any) -> dict[str, Tensor]:
        return {key: value.clone() for key, value in trained.state_dict().items()}

    def rows_of(trained: Any, ids: Tensor) -> Tensor:
        return trained.remap({"t": JaggedTensor(values=ids, lengths=torch.ones(len(ids), dtype=torch.int64))})[
            "t"
        ].values()

    for case in CASES:
        torch.manual_seed(3)
        trained = module(case)
        steps = []
        for step in range(STEPS):
            rows, evicted = train_step(trained, JaggedTensor, ids_of_step(step))
            held = state(trained)
            steps.append(digest(rows, evicted, *(held[key] for key in sorted(held))))
        trained.eval()
        found[f"{case}/steps"] = np.array(steps)
        found |= {f"{case}/state/{key}": value.numpy() for key, value in state(trained).items()}
        found[f"{case}/rows"] = rows_of(trained, asked[:2000]).numpy().astype(np.int16)
        found[f"{case}/all_rows"] = np.array(digest(rows_of(trained, asked)))
        found[f"{case}/open"] = trained.open_slots().numpy()

    def route(ids: Tensor, segments: int) -> Tensor:
        block = torch.tensor([-(-INPUT_HASH_SIZE // segments)])
        lengths, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
            torch.ones(len(ids), dtype=torch.int64),
            ids,
            False,
            False,
            block.repeat(1),
            segments,
            None,
            keep_orig_idx=True,
        )
        return lengths.view(segments, -1).argmax(0)

    for count, starts in SEGMENTS.items():
        whole = module("distance")
        parts = [whole.rebuild_with_output_id_range((a, b), starts) for a, b in pairwise(starts)]
        for step in range(STEPS):
            ids = ids_of_step(step)
            for part, segment in zip(parts, range(count)):
                train_step(part, JaggedTensor, ids[route(ids, count) == segment])
        keys = [key for key in state(parts[0]) if key not in ("_output_segments_tensor", "_current_iter_tensor")]
        sharded = {key: torch.cat([state(part)[key] for part in parts]) for key in keys}
        sharded |= {key: value for key, value in state(parts[0]).items() if key not in keys}
        answers = torch.empty_like(asked)
        for part, segment in zip(parts, range(count)):
            chosen = route(asked, count) == segment
            answers[chosen] = rows_of(part.eval(), asked[chosen])
        found |= {f"segments-{count}/state/{key}": value.numpy() for key, value in sharded.items()}
        found[f"segments-{count}/rows"] = answers[:2000].numpy().astype(np.int16)
        found[f"segments-{count}/all_rows"] = np.array(digest(answers))
        whole = module("distance")
        whole.load_state_dict(sharded)
        found[f"segments-{count}/unsharded"] = rows_of(whole.eval(), asked[:2000]).numpy().astype(np.int16)

    for case, arguments in HASHED.items():
        hashed = HashZchManagedCollisionModule(device=cpu, is_inference=True, **arguments)
        found |= {f"hashed-{case}/keys": np.array(sorted(hashed.state_dict()))}
        hashed._hash_zch_identities.data.copy_(hashed_identities(arguments))
        ids = hashed_queries(arguments, 2000)
        ones = torch.ones(len(ids), dtype=torch.int64)
        answer = hashed({"t": JaggedTensor(values=ids, lengths=ones)})["t"]
        found[f"hashed-{case}/rows"] = answer.values().numpy().astype(np.int16)
        found[f"hashed-{case}/lengths"] = answer.lengths().numpy().astype(np.int8)
    np.savez_compressed(FILE, **found)


if __name__ == "__main__":
    _write()
