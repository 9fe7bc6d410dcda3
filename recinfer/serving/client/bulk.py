"""Predictions for many rows: each row's outputs or its error, in the order of the rows, with few rows in memory."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, count
from typing import Any

import numpy as np

from recinfer.columns import DENSE
from recinfer.errors import InputError, RecinferError
from recinfer.inference.specs import Outputs
from recinfer.input_arrays import InputArrays, as_input

__all__ = ["ScoredRow", "batch_of", "score", "score_async"]

Batch = Sequence[tuple[int, Any]]
Ask = Callable[[Any, Any, Any], Any]


@dataclass(frozen=True)
class ScoredRow:
    """The result of one row.

    Attributes:
        index: position of the row, from 0.
        outputs: the model's outputs of this row by name; None: the row failed. ``outputs.missing`` lists ranks that did not
            answer, so that vectors of their rows were zero.
        error: the error of a failed row, or None.
    """

    index: int
    outputs: Outputs | None
    error: RecinferError | None = None


def score(
    ask: Ask,
    rows: Iterable[Any],
    concurrency: int,
    batch_size: int,
    dense: str = DENSE,
    inputs: Collection[str] = (),
) -> Iterator[ScoredRow]:
    """Score rows for :meth:`InferenceClient.predict_many`.

    ``ask``: (dense, features, inputs) -> outputs; ``dense``: the key of a row's dense numbers; ``inputs``: the keys of its
    named inputs.
    """
    _check(concurrency, batch_size)
    pool = ThreadPoolExecutor(concurrency, thread_name_prefix="recinfer-score")
    waiting: deque[Future[list[ScoredRow]]] = deque()
    try:
        for batch in _batches(rows, batch_size):
            if len(waiting) == concurrency:
                yield from waiting.popleft().result()
            waiting.append(pool.submit(_score_batch, ask, batch, dense, inputs))
        while waiting:
            yield from waiting.popleft().result()
    finally:
        # The pool is not waited for: a caller that stops reading, also by Ctrl-C, closes the client, which ends the
        # running calls.
        pool.shutdown(wait=False, cancel_futures=True)


async def score_async(
    ask: Callable[[Any, Any, Any], Awaitable[Any]],
    rows: Iterable[Any],
    concurrency: int,
    batch_size: int,
    dense: str = DENSE,
    inputs: Collection[str] = (),
) -> AsyncIterator[ScoredRow]:
    """Score rows for :meth:`AsyncInferenceClient.predict_many`; see :func:`score`."""
    _check(concurrency, batch_size)
    waiting: deque[asyncio.Task[list[ScoredRow]]] = deque()
    try:
        for batch in _batches(rows, batch_size):
            if len(waiting) == concurrency:
                for row in await waiting.popleft():
                    yield row
            waiting.append(asyncio.create_task(_score_batch_async(ask, batch, dense, inputs)))
            await asyncio.sleep(0)  # lets the event loop send the call before more rows are read
        while waiting:
            for row in await waiting.popleft():
                yield row
    finally:
        for task in waiting:
            task.cancel()


def batch_of(
    rows: Sequence[Mapping[str, Any]], key: str = DENSE, inputs: Collection[str] = ()
) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Convert rows of the same names to dense rows (None without), columns of features and named inputs, as ``predict`` takes
    them.

    ``key``: the key of the dense numbers; ``inputs``: the keys of named inputs.
    """
    columns: dict[str, Any] = {}
    named: dict[str, Any] = {}
    dense = [row[key] for row in rows] if key in rows[0] and key not in inputs else None
    for name in rows[0]:
        if name == key and dense is not None:
            continue
        values = [row[name] for row in rows]
        if name in inputs:
            named[name] = (
                _weighted_input(name, values) if any(map(_is_pair_of_lists, values)) else as_input(name, values)
            )
        else:
            columns[name] = _weighted(values) if any(type(value) is tuple for value in values) else values
    return dense, columns, named


def _weighted(column: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The ids or values of each row, and their weights: 1 in a row that is no pair."""
    pairs = [value if type(value) is tuple and len(value) == 2 else (value, None) for value in column]
    values = [_listed(bag) for bag, _ in pairs]
    return values, [[1.0] * len(bag) if given is None else _listed(given) for bag, (_, given) in zip(values, pairs)]


def _is_pair_of_lists(value: Any) -> bool:
    """Whether a row of a named input has values and weights; a tuple of two numbers is a list of numbers."""
    return type(value) is tuple and len(value) == 2 and all(hasattr(part, "__len__") for part in value)


def _weighted_input(name: str, column: Sequence[Any]) -> InputArrays:
    values, weights = _weighted(column)
    lengths = list(map(len, values))
    for length, given in zip(lengths, map(len, weights)):
        if length != given:
            raise InputError(f"input {name!r}: got {given} weights for {length} values, expected one for each")
    flat, heavy = (list(chain.from_iterable(rows)) for rows in (values, weights))
    return as_input(name, (flat, np.array(lengths, np.int32), heavy))


def _check(concurrency: int, batch_size: int) -> None:
    for what, value in (("concurrency", concurrency), ("batch_size", batch_size)):
        if value < 1:
            raise InputError(f"{what}: got {value}, expected 1 or more")


def _listed(value: Any) -> Any:
    return [] if value is None else value if hasattr(value, "__len__") else [value]


def _batches(rows: Iterable[Any], size: int) -> Iterator[list[tuple[int, Any]]]:
    """Batches of up to ``size`` rows with the same names; an item that is no row is a batch of its own."""
    batch: list[tuple[int, Any]] = []
    for at, row in zip(count(), rows):
        if batch:
            alike = isinstance(row, Mapping) and isinstance(batch[0][1], Mapping) and row.keys() == batch[0][1].keys()
            if len(batch) == size or not alike:
                yield batch
                batch = []
        batch.append((at, row))
    if batch:
        yield batch


def _inputs_of(batch: Batch, dense: str, inputs: Collection[str]) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    first = batch[0][1]
    if isinstance(first, RecinferError):
        raise first
    if not isinstance(first, Mapping):
        raise InputError(f"row: got a {type(first).__name__}, expected a mapping of feature to ids")
    return batch_of([row for _, row in batch], dense, inputs)


def _rows_of(batch: Batch, outputs: Outputs) -> list[ScoredRow]:
    missing = outputs.missing
    return [
        ScoredRow(at, Outputs(((name, found[i]) for name, found in outputs.items()), missing=missing))
        for i, (at, _) in enumerate(batch)
    ]


def _halves(batch: Batch, error: RecinferError) -> list[Batch]:
    """Smaller batches to send instead of a failed batch; empty: all its rows have failed.

    Halving finds the row that the server refuses; a batch that failed for another reason would fail again.
    """
    if not isinstance(error, InputError) or len(batch) == 1:
        return []
    middle = len(batch) // 2
    return [batch[:middle], batch[middle:]]


def _score_batch(ask: Ask, batch: Batch, dense: str, inputs: Collection[str]) -> list[ScoredRow]:
    try:
        return _rows_of(batch, ask(*_inputs_of(batch, dense, inputs)))
    except RecinferError as error:
        halves = _halves(batch, error)
        if not halves:
            return [ScoredRow(at, None, error) for at, _ in batch]
    return [row for half in halves for row in _score_batch(ask, half, dense, inputs)]


async def _score_batch_async(
    ask: Callable[[Any, Any, Any], Awaitable[Any]], batch: Batch, dense: str, inputs: Collection[str]
) -> list[ScoredRow]:
    try:
        return _rows_of(batch, await ask(*_inputs_of(batch, dense, inputs)))
    except RecinferError as error:
        halves = _halves(batch, error)
        if not halves:
            return [ScoredRow(at, None, error) for at, _ in batch]
    return [row for half in halves for row in await _score_batch_async(ask, half, dense, inputs)]
