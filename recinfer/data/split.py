"""Splits rows into training rows and held-out rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from recinfer.errors import InputError

__all__ = ["split_rows"]


def split_rows(
    num_rows: int, *, test_fraction: float = 0.1, seed: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row numbers for training and held-out rows: a random split, the same for the same arguments.

    Args:
        num_rows: at least 2.
        test_fraction: share of the rows to hold out, in (0, 1); each side gets at least one row.
        seed: seed of the choice.

    Returns:
        int64 arrays, each ascending, that together hold 0..num_rows-1 once.

    Raises:
        InputError: fewer than 2 rows, or a fraction outside (0, 1).
    """
    if num_rows < 2:
        raise InputError(f"got {num_rows} rows; expected at least 2, one to train on and one to hold out")
    if not 0 < test_fraction < 1:
        raise InputError(f"test_fraction is {test_fraction}; expected a number between 0 and 1")
    num_test = min(max(1, round(num_rows * test_fraction)), num_rows - 1)
    order = np.random.default_rng(seed).permutation(num_rows)
    return np.sort(order[num_test:]), np.sort(order[:num_test])
