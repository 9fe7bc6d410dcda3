"""The random requests of the protocol comparisons: all shapes of features, the same for every protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recinfer.errors import InputError, NotFoundError, RecinferError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from tests.serving.conftest import ROWS, make_request

__all__ = ["BAD", "TOLERANCE", "Asked", "kjt_of", "nth_request", "with_context_repeated"]

TOLERANCE = {"rtol": 0, "atol": 1e-6}


@dataclass(frozen=True)
class Asked:
    """A lookup (``dense`` None) or a prediction, for the model of that name in the tests' archives."""

    model: str
    dense: Tensor | None
    features: KeyedJaggedTensor
    context: KeyedJaggedTensor | None = None


def nth_request(number: int) -> Asked:
    """Predictions, lookups of every subset of the features, contexts, weights, unpooled features; ids of both widths."""
    batch, form = 1 + number * 7 % 33, number % 6
    dtype = torch.int32 if number % 4 == 3 else torch.int64
    if form in (0, 1):
        return Asked("tiny", *make_request(number, batch, dtype=dtype))
    if form == 2:
        subset = [key for bit, key in enumerate(ROWS) if (number // 6 % 15 + 1) >> bit & 1]
        return Asked("tiny", None, make_request(number, batch, keys=subset, dtype=dtype)[1])
    if form == 3:
        user = ["user"] if number % 2 else ["user", "history"]
        rest = [key for key in ROWS if key not in user]
        dense, features = make_request(number, batch, keys=rest, dtype=dtype)
        return Asked("tiny", dense, features, make_request(number + 1, 1, keys=user, dtype=dtype)[1])
    model = "weighted" if form == 4 else "sequences"
    return Asked(model, None, _weighted_or_unpooled(number, batch, model, most=0 if number % 30 in (4, 5) else 4))


def with_context_repeated(asked: Asked) -> KeyedJaggedTensor:
    """The features of a request, its context's beside every sample."""
    if asked.context is None:
        return asked.features
    batch, parts = asked.features.stride(), asked.context.to_dict().values()
    repeated = KeyedJaggedTensor(
        asked.context.keys(),
        torch.cat([part.values().repeat(batch) for part in parts]),
        lengths=torch.cat([part.lengths().repeat(batch) for part in parts]),
    )
    return KeyedJaggedTensor.concat([asked.features, repeated])


def _weighted_or_unpooled(number: int, batch: int, model: str, most: int) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(number)
    rows = {"tag": 20} if model == "weighted" else {"clicks": 20, "page": 9, "buys": 20}
    keys = list(rows)[: 1 + number % len(rows)]
    lengths = torch.randint(0, most + 1, (len(keys), batch), generator=random, dtype=torch.int32)
    ids = [torch.randint(0, rows[k], (int(n.sum()),), generator=random) for k, n in zip(keys, lengths)]
    weights = torch.randn(int(lengths.sum()), generator=random) if model == "weighted" else None
    return KeyedJaggedTensor(keys, torch.cat(ids), weights=weights, lengths=lengths.reshape(-1))


def kjt_of(ids: dict[str, list[int]]) -> KeyedJaggedTensor:
    """One id per sample of each feature."""
    flat = torch.tensor([i for column in ids.values() for i in column], dtype=torch.int64)
    return KeyedJaggedTensor(list(ids), flat, lengths=torch.ones(len(flat), dtype=torch.int32))


_ONE_EACH = {name: [1] for name in ROWS}

# Mistake -> its error, and the request: ids by feature, and for some dense, model or version.
BAD: dict[str, tuple[type[RecinferError], dict[str, Any]]] = {
    "id out of range": (InputError, {"ids": {"user": [50]}}),
    "negative id": (InputError, {"ids": {"user": [-1]}}),
    "unknown feature": (InputError, {"ids": {"nobody": [1]}}),
    "nothing": (InputError, {"ids": {"user": []}}),
    "features left out": (InputError, {"ids": {"shop": [1], "user": [1]}, "dense": [[0.0] * 3]}),
    "nan in dense": (InputError, {"ids": _ONE_EACH, "dense": [[0.0, float("nan"), 0.0]]}),
    "dense too wide": (InputError, {"ids": _ONE_EACH, "dense": [[0.0] * 4]}),
    "another model": (NotFoundError, {"ids": {"user": [1]}, "model": "other"}),
    "another version": (NotFoundError, {"ids": {"user": [1]}, "version": "9"}),
}
