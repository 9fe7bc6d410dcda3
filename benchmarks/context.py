"""Measures one user with many candidates: a prediction with the user's inputs as its context against one candidate.

    OMP_NUM_THREADS=1 python -m benchmarks.context
    OMP_NUM_THREADS=1 python -m benchmarks.context --candidates 1 50 500 --turns 40

A sequence model (12 items of the user's history, width 16, two transformer layers) scores candidates with one thread. The
archive is exported with the user's inputs named, so that its user tower runs once per request. Beside it: the same request
with the user's inputs repeated for every candidate, which runs the tower for each. All cells take turns, and the time of
a cell is the least of its turns, since other work on the machine only adds to it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor, nn

import recinfer
from recinfer import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

_HISTORY, _WIDTH, _ITEMS = 12, 16, 100_000


class SequenceRanker(nn.Module):
    """A user tower over the history of items, and a product with each candidate's vector."""

    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(_ITEMS, _WIDTH, "item", feature_names=["history", "candidate"])
        self.items = EmbeddingCollection(tables=[table])
        self.places = nn.Parameter(torch.randn(_HISTORY, _WIDTH))
        layer = nn.TransformerEncoderLayer(_WIDTH, 2, 4 * _WIDTH, batch_first=True)
        self.tower = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: KeyedJaggedTensor) -> Tensor:
        """Scores [B]."""
        vectors = self.items(ids)
        lengths = ids["history"].lengths().unsqueeze(1).clamp(min=1)
        padding = torch.arange(_HISTORY) >= lengths
        states = self.tower(vectors["history"].to_padded_dense(_HISTORY) + self.places, src_key_padding_mask=padding)
        user = states.masked_fill(padding.unsqueeze(2), 0.0).sum(1) / lengths
        return (user * vectors["candidate"].values()).sum(1)


def main() -> None:
    """Print milliseconds and ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--candidates", type=int, nargs="+", default=[1, 50, 500])
    parser.add_argument("--turns", type=int, default=60)
    parser.add_argument("--out", type=Path, help="also write the figures as JSON to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        example = (_whole([3, 1, 2], [5, 6, 7]),)
        model = recinfer.export(
            SequenceRanker(), example, Path(folder) / "sequence.rqa", user=["history"], progress=False
        )
        cells: dict[tuple[str, int], Callable[[], object]] = {}
        for count in options.candidates:
            history, items = list(range(_HISTORY)), list(range(100, 100 + count))
            features = _ids({"candidate": [[item] for item in items]})
            context = _ids({"history": [history]})
            repeated = _ids({"history": [history] * count, "candidate": [[item] for item in items]})
            cells["context", count] = lambda f=features, c=context: model.predict(None, f, c)  # type: ignore[misc]
            cells["repeated", count] = lambda r=repeated: model.predict(None, r)  # type: ignore[misc]
        times: dict[tuple[str, int], list[float]] = {cell: [] for cell in cells}
        for turn in range(options.turns + 3):
            for cell, run in cells.items():
                start = time.perf_counter()
                run()
                if turn >= 3:
                    times[cell].append(time.perf_counter() - start)
    least = options.candidates[0]
    print(f"{'candidates':>10} {'context, ms':>12} {'over ' + str(least):>10} {'repeated, ms':>13} {'context is':>12}")
    rows = []
    for count in options.candidates:
        context, repeated = (1e3 * min(times[kind, count]) for kind in ("context", "repeated"))
        over = context / (1e3 * min(times["context", least]))
        print(f"{count:>10} {context:>12.2f} {over:>9.2f}x {repeated:>13.2f} {repeated / context:>10.1f}x")
        rows.append(
            {
                "candidates": count,
                "context_ms": context,
                "repeated_ms": repeated,
                "over_least": over,
                "repeated_over_context": repeated / context,
            }
        )
    if options.out is not None:
        options.out.write_text(json.dumps(rows))


def _whole(lengths: list[int], items: list[int]) -> KeyedJaggedTensor:
    return _ids({"history": [list(range(n)) for n in lengths], "candidate": [[item] for item in items]})


def _ids(features: dict[str, list[list[int]]]) -> KeyedJaggedTensor:
    lengths = [len(bag) for bags in features.values() for bag in bags]
    values = [item for bags in features.values() for bag in bags for item in bag]
    return KeyedJaggedTensor(list(features), torch.tensor(values), lengths=torch.tensor(lengths, dtype=torch.int32))


if __name__ == "__main__":
    main()
