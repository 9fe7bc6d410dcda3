"""Starts the ranks of a training on this host, or joins those that torchrun started; stops all when one dies."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from recinfer import env
from recinfer.errors import RecinferError, UnavailableError

__all__ = ["process_group", "run_ranks"]

_GRACE = 5.0  # seconds a rank has to end before it is killed


@contextlib.contextmanager
def process_group(timeout: float = 600.0) -> Iterator[tuple[int, int]]:
    """The default process group (gloo) that torchrun's environment describes; gives rank and world size.

    Args:
        timeout: seconds that a rank waits for the others in a collective.
    """
    place = env.torchrun_rank()
    if place is None:
        raise UnavailableError("this process is no rank: RANK is not set; start it with torchrun or run_ranks")
    rank, world_size = place
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    try:
        yield rank, world_size
    finally:
        dist.destroy_process_group()


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` on ``world_size`` new ranks of this host; what rank 0 returned.

    Each rank is a process of its own with torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT); ``function`` joins with :func:`process_group`. It must be importable by
    name, and arguments and result must pickle. Ctrl-C stops all ranks.

    Raises:
        RecinferError: that a rank raised, as it was raised.
        UnavailableError: a rank died or failed otherwise; names it and says how. The others are stopped at once.
    """
    context = multiprocessing.get_context("spawn")
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="recinfer-train-") as folder:
        ranks = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, port, folder, function, args),
                name=f"rank {rank}",
            )
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            failed = _first_failure(ranks)
        finally:
            _stop(ranks)
        if failed is not None:
            raise _error(Path(folder), failed, ranks[failed].exitcode)
        return pickle.loads((Path(folder) / "result").read_bytes())


def _rank_main(rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the parent stops the ranks
    env.set_torchrun(rank, world_size, port)
    # torch says of its own ShardedTensor, which TorchRec's checkpoints are made of, that DTensor will follow it.
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    try:
        result = function(*args)
        if rank == 0:
            part = Path(folder) / ".result"
            part.write_bytes(pickle.dumps(result))
            part.rename(Path(folder) / "result")
    except BaseException as error:
        # The first to fail is the cause: those that fail later lost their peer.
        story = (type(error).__module__, type(error).__name__, error if isinstance(error, RecinferError) else None,
                 traceback.format_exc())  # fmt: skip
        with contextlib.suppress(Exception):
            (Path(folder) / f"error-{rank}").write_bytes(pickle.dumps(story))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _first_failure(ranks: list[Any]) -> int | None:
    """Wait until all ranks are done, or the first fails; its number."""
    alive = {process.sentinel: at for at, process in enumerate(ranks)}
    while alive:
        failed = []
        for sentinel in wait(list(alive)):
            at = alive.pop(sentinel)  # type: ignore[arg-type]
            ranks[at].join()
            if ranks[at].exitcode:
                failed.append(at)
        if failed:
            # One that was killed is the cause; one that ended by an error may only have lost its peer, a moment before
            # this process heard of the first.
            time.sleep(0.2)
            failed += [at for at in alive.values() if ranks[at].exitcode]
            killed = [at for at in failed if (ranks[at].exitcode or 0) < 0]
            return (killed or failed)[0]
    return None


def _stop(ranks: list[Any]) -> None:
    started = [process for process in ranks if process.pid is not None]
    for process in started:
        if process.is_alive():
            process.terminate()
    end = time.monotonic() + _GRACE
    for process in started:
        process.join(max(0.0, end - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _error(folder: Path, rank: int, exitcode: int | None) -> Exception:
    path = folder / f"error-{rank}"
    if path.exists():
        _module, name, known, text = pickle.loads(path.read_bytes())
        if known is not None:
            return known
        return UnavailableError(f"rank {rank} failed with {name}; the other ranks were stopped\n{text}")
    if exitcode is not None and exitcode < 0:
        how = f"was killed by {signal.Signals(-exitcode).name}"
        hint = "; was the machine out of memory?" if -exitcode == signal.SIGKILL else ""
    else:
        how, hint = f"ended with exit code {exitcode}", ""
    return UnavailableError(f"rank {rank} {how}{hint}; the other ranks were stopped. --resume goes on from the last "
                            "checkpoint of --save-every")  # fmt: skip


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
