"""SearchReport: quality of a plan and effort of its search."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SearchReport"]


@dataclass
class SearchReport:
    """Quality of a plan and effort of its search.

    ``gap`` has two parts: how far the plan is above the optimum, and how far the bound is below it.
    """

    max_perf: float  # ms on the busiest rank
    lower_bound: float  # ms; no plan has a lower max_perf
    seconds: float = 0.0
    num_proposals: int = 0
    num_plans: int = 0
    moves: int = 0
    source: str = "search"

    @property
    def gap(self) -> float:
        """max_perf / lower_bound: no plan is better by more than this; 1 is optimal."""
        return self.max_perf / self.lower_bound if self.lower_bound > 0 else 1.0

    @property
    def proven(self) -> bool:
        """The plan is optimal: its busiest rank is at the bound."""
        return self.gap <= 1 + 1e-9
