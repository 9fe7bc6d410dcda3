"""How good a plan is, and what finding it took: data that a search hands out."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SearchReport"]


@dataclass
class SearchReport:
    """How good the plan is, and what finding it took.

    ``gap`` has two parts: what the search missed, and how far the bound lies below the optimum. Where ``proven`` is true
    the search missed nothing, and all of the gap is the bound's.
    """

    max_perf: float  # ms on the busiest rank
    lower_bound: float  # ms; no plan is below it
    seconds: float = 0.0
    num_proposals: int = 0
    num_plans: int = 0
    moves: int = 0
    source: str = "search"
    proven: bool = False  # the plan is optimal: it is at the bound, or all others were tried or ruled out

    @property
    def gap(self) -> float:
        """max_perf / lower_bound: no plan is better by more than this; 1 is optimal."""
        return self.max_perf / self.lower_bound if self.lower_bound > 0 else 1.0
