"""Measures each part of the planner's search: plans without the part beside plans with all parts.

    python -m benchmarks.planner_parts              # 96 problems, some five minutes
    python -m benchmarks.planner_parts --cases 1

A problem is one of :mod:`benchmarks.planner_milp`: random tables, INT8, on CPU ranks whose memory the tables fill to a stated
share. The ratio is the busiest rank's time without the part divided by that with all parts.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from unittest.mock import patch

import numpy as np

from benchmarks.planner_milp import full_problem
from recinfer.distributed.planner.solve import search as search_module
from recinfer.distributed.planner.solve.local_search import LocalSearch
from recinfer.distributed.planner.solve.problem import Problem
from recinfer.distributed.planner.solve.search import search
from recinfer.distributed.planner.solve.starts import Starts

_SIZES, _SHARES = [(6, 4), (20, 2), (20, 4), (60, 8), (120, 16), (200, 8)], [0.5, 0.9, 0.95, 0.98]

_WITHOUT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "(all parts)": nullcontext,
    "annealing": lambda: patch.object(search_module, "anneal", lambda *_: []),
    "perturbed restarts": lambda: patch.object(LocalSearch, "shake", lambda self, best, target: best),
    "swaps": lambda: patch.object(LocalSearch, "_best_swap", lambda *_: (np.inf, (0, 0))),
    "changes of option": lambda: patch.object(LocalSearch, "_change_option", lambda *_: False),
    "starts at memory prices": lambda: patch.object(Starts, "around_memory_prices", lambda self: None),
    "starts of cut tables": lambda: patch.object(Starts, "row_wise_and_packed", lambda self: None),
}


def worst_times(problems: list[Problem]) -> np.ndarray:
    """Time of the busiest rank of each problem's plan [N]; infinity without a plan."""
    return np.array([np.inf if (found := search(each)[0]) is None else found.worst for each in problems])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=4, help="problems of each size and share")
    cases = range(parser.parse_args().cases)
    problems = [full_problem(seed, share, *size) for size, share, seed in itertools.product(_SIZES, _SHARES, cases)]
    whole = np.empty(0)
    print(f"{'without':24} {'mean':>7} {'worst':>7} {'1 % worse':>10} {'1 % better':>11} {'no plan':>8}")
    for name, without in _WITHOUT.items():
        with without():
            times = worst_times(problems)
        whole = times if not whole.size else whole
        both = np.isfinite(times) & np.isfinite(whole)
        ratio = times[both] / whole[both]
        lost = int((np.isfinite(whole) & ~np.isfinite(times)).sum())
        print(
            f"{name:24} {np.exp(np.log(ratio).mean()):7.4f} {ratio.max():7.3f} {(ratio > 1.01).sum():10} "
            f"{(ratio < 0.99).sum():11} {lost:8}"
        )


if __name__ == "__main__":
    main()
