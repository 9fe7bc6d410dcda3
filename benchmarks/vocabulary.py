"""Raw ids to rows: the index of a vocabulary beside torch.searchsorted, TorchRec's remap and FBGEMM's operator, on one thread.

    python -m benchmarks.vocabulary [--ids 10000000] [--queries 200000] [--rounds 15] [--out FILE]

Every method answers the same queries in turn, in each of some rounds, so that load of the machine meets all alike; a figure is the
fastest round's. The index is mapped from a file, as a server maps it.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from recinfer.vocabulary._index import remap

from recinfer.vocabulary.index import IdIndex, build_index, open_index, segment_array
from recinfer.vocabulary.table import TableVocabulary, even_segments

Remap = Callable[[NDArray[np.int64]], object]
_PROBES = 128
_ZIPF = 1.1


def main() -> None:
    """Print the figures, and write them as JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--queries", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--served", action=argparse.BooleanOptionalAction, default=True, help="also time lookups of a server"
    )
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    made = _vocabulary(args.ids, rng)
    with tempfile.TemporaryDirectory() as folder:
        index, opened = _mapped(made, Path(folder))
        shape = index.shape
        print(f"{shape.ids:,} ids, load {shape.load:.3f}, {shape.num_bytes / shape.ids:.1f} bytes an id")
        print(f"opened and checked in {opened * 1000:.0f} ms")
        found: dict[str, Any] = {
            "ids": shape.ids,
            "bytes_per_id": shape.num_bytes / shape.ids,
            "open_s": opened,
            "ns": {},
        }
        methods = _methods(made, index)
        queries = _queries(made, args.queries, rng)
        for what, draw in queries.items():
            best = _best(methods, draw, args.rounds)
            found["ns"][what] = best
            ours = best["recinfer"]
            shown = ", ".join(f"{name} {ns:.0f} ns ({ns / ours:.1f}x)" for name, ns in best.items())
            print(f"{what}: {shown}")
    if args.served:
        from benchmarks.vocabulary_served import compare

        found["served"] = compare((1, 32, 256), args.rounds * 20)
        for batch, ratio in found["served"].items():
            print(f"served lookup of 26 features, batch {batch}: {ratio:.2f} of the time without vocabularies")
    if args.out is not None:
        args.out.write_text(json.dumps(found))


def _vocabulary(count: int, rng: np.random.Generator) -> TableVocabulary:
    drawn = np.unique(rng.integers(0, 2**62, count + count // 50, np.int64))
    ids = rng.permutation(drawn)[:count]
    return TableVocabulary(ids, rng.permutation(count), count, even_segments(count, 1), 2**62)


def _mapped(made: TableVocabulary, folder: Path) -> tuple[IdIndex, float]:
    built = build_index(made)
    path = folder / "index"
    path.write_bytes(built.shape.header() + built.buckets.tobytes())
    start = time.perf_counter()
    with path.open("rb") as file:
        index = open_index(file, "index", made.num_rows)
    index.check("index", made.segments, made.input_hash_size)
    return index, time.perf_counter() - start


def _methods(made: TableVocabulary, index: IdIndex) -> dict[str, Remap]:
    shape, segments = index.shape, segment_array(made.segments)
    block = made.input_hash_size
    place = index.buckets.ctypes.data, shape.sections, shape.section_buckets, shape.seed
    table = np.array([(*place, segments.ctypes.data, 1, block)], np.uint64)
    keys, counters = np.array([[0, 0]]), np.zeros((1, 2), np.int64)

    def ours(ids: NDArray[np.int64]) -> NDArray[np.int64]:
        out = np.empty(len(ids), np.int64)
        remap(table, keys, counters, ids, np.array([0, len(ids)]), out)
        return out

    order = np.argsort(made.ids)
    known, rows = torch.from_numpy(made.ids[order]), torch.from_numpy(made.rows[order])
    unknown = made.segments[0].miss_row
    methods: dict[str, Remap] = {
        "recinfer": ours,
        "torch.searchsorted": lambda ids: torch.searchsorted(known, torch.from_numpy(ids)),
        "TorchRec's steps": lambda ids: _sorted_remap(known, rows, unknown, torch.from_numpy(ids)),
    }
    try:
        import fbgemm_gpu  # noqa: F401 - registers the operator

        methods["FBGEMM's operator"] = _zero_collision(made)
    except (ImportError, AttributeError):
        print("FBGEMM's zero_collision_hash is not installed")
    return methods


def _sorted_remap(known: torch.Tensor, rows: torch.Tensor, unknown: int, ids: torch.Tensor) -> torch.Tensor:
    """The steps of a remap by a sorted vocabulary: search, compare, gather, and the row of unknown ids."""
    at = torch.searchsorted(known[:-1], ids)
    hit = known[at] == ids
    found = torch.empty_like(ids)
    found[hit] = rows[at[hit]]
    found[~hit] = unknown
    return found


def _zero_collision(made: TableVocabulary) -> Remap:
    """FBGEMM's operator on a table of its own: as many slots as buckets of ours have, filled by its hash."""
    slots = int(len(made.ids) / 0.85)
    identities = torch.full((slots, 1), -1)
    operator = torch.ops.fbgemm.zero_collision_hash
    homes, _ = operator(torch.from_numpy(made.ids), torch.full((slots, 1), -7), 1, True, -1, True)
    flat, first = identities.view(-1).numpy(), homes.numpy()
    left = np.arange(len(first))
    for distance in range(_PROBES):  # the first id of each free slot takes it
        at = (first[left] + distance) % slots
        free = flat[at] == -1
        place, which = np.unique(at[free], return_index=True)
        taken = left[free][which]
        flat[place] = made.ids[taken]
        left = np.setdiff1d(left, taken, assume_unique=True)
        if not len(left):
            break
    return lambda ids: operator(torch.from_numpy(ids), identities, _PROBES, True, -1, True)


def _queries(made: TableVocabulary, count: int, rng: np.random.Generator) -> dict[str, Callable[[], NDArray[np.int64]]]:
    ids = made.ids

    def half() -> NDArray[np.int64]:
        return np.where(rng.random(count) < 0.5, ids[rng.integers(0, len(ids), count)], rng.integers(0, 2**62, count))

    def zipf() -> NDArray[np.int64]:
        drawn = np.empty(0, np.int64)
        while len(drawn) < count:  # the part of the distribution beyond the last id is drawn again
            more = rng.zipf(_ZIPF, 2 * count)
            drawn = np.concatenate([drawn, more[more <= len(ids)]])
        return ids[drawn[:count] - 1]

    return {
        "known, uniform": lambda: ids[rng.integers(0, len(ids), count)],
        "half known, uniform": half,
        "known, Zipf": zipf,
    }


def _best(methods: dict[str, Remap], draw: Callable[[], NDArray[np.int64]], rounds: int) -> dict[str, float]:
    """The least nanoseconds of CPU time an id, by method."""
    best = dict.fromkeys(methods, float("inf"))
    for _ in range(rounds):
        for name, method in methods.items():
            method(draw())  # so that its table is in the caches as far as it fits, not those of the method before
            ids = draw()
            start = time.thread_time_ns()
            method(ids)
            best[name] = min(best[name], (time.thread_time_ns() - start) / len(ids))
    return best


if __name__ == "__main__":
    main()
