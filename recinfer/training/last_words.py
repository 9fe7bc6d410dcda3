"""Messages that ranks leave before they exit, so that other ranks can name the one they lost.

Under torchrun on several hosts, a rank whose peer is killed on another host only sees a connection close.
"""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from recinfer.errors import UnavailableError

__all__ = ["LastWords"]

_WAIT_S = 5.0  # for ranks that lost their peers to notice and say so: those that are still silent then are gone
_RESUME = "--resume goes on from the last checkpoint of --save-every"


class LastWords:
    """One rank's, and those of the others.

    Args:
        store: that all ranks reach.
        rank, world_size: of this process.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = dist.PrefixStore("recinfer/last_words", store), rank, world_size

    def say(self, error: BaseException) -> None:
        """Note what this rank ends with; that it lost a peer says nothing of its own."""
        own = "" if is_lost_peer(error) else f"{type(error).__name__}: {error}"[:500]
        with contextlib.suppress(RuntimeError):  # the store went with the rank that held it
            self._store.set(str(self._rank), own)

    def explain(self) -> UnavailableError | None:
        """Why this rank lost a peer: the rank that failed, or those that said nothing for five seconds. None: nobody
        knows. Call it when this rank's own connections are closed, or ranks that wait for it stay silent too."""
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        end = time.monotonic() + _WAIT_S
        said: dict[int, str] = {}
        looks = 0
        with contextlib.suppress(RuntimeError):  # the store's rank may end first: then what was heard so far counts
            while len(said) < len(others) and time.monotonic() < end:
                for rank in others:
                    if rank not in said and self._store.check([str(rank)]):
                        said[rank] = self._store.get(str(rank)).decode()
                looks += 1
                time.sleep(0.05)
        if not looks:
            return UnavailableError(
                f"the rank that holds the store where ranks meet is gone; this rank stops. {_RESUME}"
            )
        silent = [rank for rank in others if rank not in said]
        failed = [f"rank {rank} failed with {why}" for rank, why in said.items() if why]
        if failed:
            return UnavailableError(f"{'; '.join(failed)}; this rank stops")
        if not silent:
            return None
        who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {', '.join(map(str, silent))}"
        return UnavailableError(f"{who} ended without a word, killed perhaps; this rank stops. {_RESUME}")


def is_lost_peer(error: BaseException) -> bool:
    """Whether it is gloo's or NCCL's word for a peer that closed its connection or does not answer."""
    return isinstance(error, RuntimeError) and any(backend in str(error) for backend in ("gloo", "NCCL"))
