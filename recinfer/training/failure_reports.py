"""Failure reports that ranks write to a shared store before they exit, so that other ranks can name the failed rank.

Under torchrun on several hosts, a rank whose peer is killed on another host only sees a connection close.
"""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from recinfer.errors import UnavailableError

__all__ = ["FailureReports"]

_WAIT_S = 5.0  # time for ranks that lost their peers to write a report; ranks without one by then have ended
_RESUME = "--resume continues from the last checkpoint of --save-every"


class FailureReports:
    """Writes this rank's failure report and reads those of other ranks.

    Args:
        store: a store that all ranks reach.
        rank, world_size: rank of this process, and the number of ranks.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store = dist.PrefixStore("recinfer/failure_reports", store)
        self._rank = rank
        self._world_size = world_size

    def write(self, error: BaseException) -> None:
        """Write this rank's failure report; the report is empty for the loss of a peer, which another rank caused."""
        own = "" if is_lost_peer(error) else f"{type(error).__name__}: {error}"[:500]
        with contextlib.suppress(RuntimeError):  # the store ended with its rank
            self._store.set(str(self._rank), own)

    def explain(self) -> UnavailableError | None:
        """The reason why this rank lost a peer: the rank that failed, or those that write no report within five
        seconds; None if unknown. Close this rank's connections first, or ranks that wait for it write no report
        either."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        end = time.monotonic() + _WAIT_S
        said: dict[int, str] = {}
        reads = 0
        with contextlib.suppress(RuntimeError):  # the store's rank may end first; the reports read so far then count
            while len(said) < len(others) and time.monotonic() < end:
                for rank in others:
                    if rank not in said and self._store.check([str(rank)]):
                        said[rank] = self._store.get(str(rank)).decode()
                reads += 1
                time.sleep(0.05)
        if not reads:
            return UnavailableError(f"the rank that holds the rendezvous store ended; this rank stops. {_RESUME}")
        silent = [rank for rank in others if rank not in said]
        failed = [f"rank {rank} failed with {why}" for rank, why in said.items() if why]
        if failed:
            return UnavailableError(f"{'; '.join(failed)}; this rank stops")
        if not silent:
            return None
        who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        return UnavailableError(
            f"{who} ended without an error message and may have been killed; this rank stops. {_RESUME}"
        )


def is_lost_peer(error: BaseException) -> bool:
    """Whether ``error`` is gloo's or NCCL's error for a peer that closed its connection or does not respond."""
    return isinstance(error, RuntimeError) and any(backend in str(error) for backend in ("gloo", "NCCL"))
