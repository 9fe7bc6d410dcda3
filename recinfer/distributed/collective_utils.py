"""Run a function on one rank of a process group and give its result to all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from recinfer.errors import InputError, RecinferError, UnavailableError

__all__ = ["invoke_on_rank_and_broadcast_result", "is_leader", "run_on_leader"]

T = TypeVar("T")


def is_leader(pg: dist.ProcessGroup | None, leader_rank: int = 0) -> bool:
    """Whether this process is rank ``leader_rank`` of ``pg``; always true without a process group."""
    return pg is None or pg.rank() == leader_rank


def invoke_on_rank_and_broadcast_result(
    pg: dist.ProcessGroup, rank: int, func: Callable[..., T], *args: Any, **kwargs: Any
) -> T:
    """Run ``func(*args, **kwargs)`` on one rank and return its result on all ranks of ``pg``.

    Args:
        pg: all of its ranks must call this.
        rank: the rank of ``pg`` that runs ``func``.
        func: its result must be picklable.

    Raises:
        InputError: no such rank.
        RecinferError: on all ranks, if ``func`` raised one. Any other error of ``func`` is raised on ``rank`` as it is,
            and on the others as UnavailableError, so that no rank waits forever.

    Example:
        >>> id = invoke_on_rank_and_broadcast_result(pg, 0, allocate_id)  # doctest: +SKIP
    """
    if not 0 <= rank < pg.size():
        raise InputError(f"rank {rank} of a group of {pg.size()} ranks; expected 0 to {pg.size() - 1}")
    if pg.size() == 1:
        return func(*args, **kwargs)
    outcome: list[Any] = [None]
    error: Exception | None = None
    if pg.rank() == rank:
        try:
            outcome = [(func(*args, **kwargs), None)]
        except Exception as caught:
            error = caught
            outcome = [(None, caught if isinstance(caught, RecinferError) else f"{type(caught).__name__}: {caught}")]
    dist.broadcast_object_list(outcome, group=pg, group_src=rank)
    if error is not None:
        raise error
    result, failure = outcome[0]
    if isinstance(failure, RecinferError):
        raise failure
    if failure is not None:
        raise UnavailableError(f"rank {rank} failed in {getattr(func, '__name__', func)!s}: {failure}")
    return result  # type: ignore[no-any-return]


def run_on_leader(pg: dist.ProcessGroup, rank: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Decorator: a call of the function, by all ranks of ``pg``, runs on ``rank`` and returns its result on all."""

    def decorate(func: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(func)
        def on_leader(*args: Any, **kwargs: Any) -> T:
            return invoke_on_rank_and_broadcast_result(pg, rank, func, *args, **kwargs)

        return on_leader

    return decorate
