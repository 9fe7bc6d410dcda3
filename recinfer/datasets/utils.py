"""The batch class, and helpers to read, split and limit streams of rows."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import IO, Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterDataPipe

from recinfer.errors import ConfigError, InputError
from recinfer.sparse.jagged_tensor import KeyedJaggedTensor
from recinfer.streamable import Pipelineable

__all__ = [
    "PATH_MANAGER_KEY",
    "Batch",
    "Limit",
    "LoadFiles",
    "ReadLinesFromCSV",
    "check_path_manager",
    "idx_split_train_val",
    "rand_split_train_val",
    "safe_cast",
]

PATH_MANAGER_KEY = "torchrec"
"""The only supported ``path_manager_key``, for files that ``open`` opens."""

T = TypeVar("T")


@dataclass
class Batch(Pipelineable):
    """``B`` examples of a click model.

    Attributes:
        dense_features: float ``[B, dense features]``.
        sparse_features: ids of each feature, of ``B`` examples.
        labels: ``[B]``.
    """

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The batch on ``device``."""
        return Batch(
            self.dense_features.to(device=device, non_blocking=non_blocking),
            self.sparse_features.to(device=device, non_blocking=non_blocking),
            self.labels.to(device=device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: Any) -> None:
        """Keep the memory alive until ``stream`` is done with it."""
        self.dense_features.record_stream(stream)
        self.sparse_features.record_stream(stream)
        self.labels.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The batch in page-locked memory."""
        return Batch(self.dense_features.pin_memory(), self.sparse_features.pin_memory(), self.labels.pin_memory())


class LoadFiles(IterDataPipe):
    """``(path, open file)`` of each path.

    Args:
        datapipe: the paths.
        mode: mode of ``open``; ``"b"`` and ``"t"`` are ``"rb"`` and ``"rt"``.
        length: the result of ``len``; -1 if unknown.
        path_manager_key: only :data:`PATH_MANAGER_KEY`.
        **open_kw: other arguments of ``open``.

    Raises:
        ConfigError: another path manager, or a mode that does not read.
    """

    def __init__(
        self,
        datapipe: Iterable[str],
        mode: str = "b",
        length: int = -1,
        path_manager_key: str = PATH_MANAGER_KEY,
        **open_kw: Any,
    ) -> None:
        super().__init__()
        if mode not in ("b", "t", "r", "rb", "rt"):
            raise ConfigError(f"mode is {mode!r}; expected one of b, t, r, rb, rt")
        check_path_manager(path_manager_key)
        self.datapipe = datapipe
        self.length = length
        self.open_kw = open_kw
        self.mode = mode if mode.startswith("r") else f"r{mode}"

    def __iter__(self) -> Iterator[tuple[str, IO[Any]]]:
        for path in self.datapipe:
            yield path, open(path, self.mode, **self.open_kw)  # noqa: SIM115 - whoever reads it closes it

    def __len__(self) -> int:
        if self.length == -1:
            raise NotImplementedError("the number of files is unknown; pass length=")
        return self.length


class ReadLinesFromCSV(IterDataPipe):
    """The rows of files, each a list of text.

    Args:
        datapipe: ``(path, open file)``, as :class:`LoadFiles` gives; a file is closed at its end.
        skip_first_line: leave out the first row of each file.
        **kw: arguments of ``csv.reader``.
    """

    def __init__(self, datapipe: Iterable[tuple[str, IO[Any]]], skip_first_line: bool = False, **kw: Any) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.skip_first_line = skip_first_line
        self.kw = kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, file in self.datapipe:
            with file:
                rows = csv.reader(file, **self.kw)
                if self.skip_first_line:
                    next(rows, None)
                yield from rows


class Limit(IterDataPipe):
    """The first ``limit`` items of a stream."""

    def __init__(self, datapipe: Iterable[Any], limit: int) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.limit = limit

    def __iter__(self) -> Iterator[Any]:
        for _, item in zip(range(self.limit), self.datapipe):
            yield item


class _Part(IterDataPipe):
    """The items of a stream whose number passes the test of ``make_test()``, which is called once per pass."""

    def __init__(self, datapipe: Iterable[Any], make_test: Callable[[], Callable[[int], bool]], wanted: bool) -> None:
        super().__init__()
        self.datapipe = datapipe
        self.make_test = make_test
        self.wanted = wanted

    def __iter__(self) -> Iterator[Any]:
        in_training = self.make_test()
        return (item for at, item in enumerate(self.datapipe) if in_training(at) is self.wanted)


def idx_split_train_val(
    datapipe: Iterable[Any],
    train_perc: float,
    decimal_places: int = 2,
    key_fn: Callable[[int], int] = int,
) -> tuple[IterDataPipe, IterDataPipe]:
    """Split a stream in two by item number: of every ``10 ** decimal_places`` the first ``train_perc`` train.

    Args:
        datapipe: the items.
        train_perc: part of the items in the first stream, in (0, 1).
        decimal_places: number of digits of ``train_perc`` that count.
        key_fn: the number that decides, from an item's place in the stream.

    Raises:
        InputError: ``train_perc`` outside of (0, 1).
    """
    _check_part(train_perc)
    period = 10**decimal_places
    make_test = partial(_by_number, key_fn, period, round(train_perc * period))
    return _Part(datapipe, make_test, True), _Part(datapipe, make_test, False)


def rand_split_train_val(
    datapipe: Iterable[Any], train_perc: float, random_seed: int = 0
) -> tuple[IterDataPipe, IterDataPipe]:
    """Split a stream in two at random, item by item; the same seed gives the same split.

    Args:
        datapipe: the items.
        train_perc: the probability of the first stream, in (0, 1).
        random_seed: seed of the split.

    Raises:
        InputError: ``train_perc`` outside of (0, 1).
    """
    _check_part(train_perc)
    make_test = partial(_by_coin, train_perc, random_seed)
    return _Part(datapipe, make_test, True), _Part(datapipe, make_test, False)


def _by_number(key_fn: Callable[[int], int], period: int, bound: int) -> Callable[[int], bool]:
    return lambda at: key_fn(at) % period < bound


def _by_coin(probability: float, seed: int) -> Callable[[int], bool]:
    coin = random.Random(seed)
    return lambda _: coin.random() < probability


def safe_cast(val: T, dest_type: Callable[[T], T], default: T) -> T:
    """``dest_type(val)``, or ``default`` if that raises ValueError."""
    try:
        return dest_type(val)
    except ValueError:
        return default


def check_path_manager(key: str) -> None:
    """Raise ConfigError unless the path manager is :data:`PATH_MANAGER_KEY`."""
    if key != PATH_MANAGER_KEY:
        raise ConfigError(
            f"path_manager_key is {key!r}: only Python's open is supported; leave it out, and copy or mount remote "
            f"files"
        )


def _check_part(train_perc: float) -> None:
    if not 0.0 < train_perc < 1.0:
        raise InputError(f"train_perc is {train_perc}; expected a number between 0.0 and 1.0, exclusive")
