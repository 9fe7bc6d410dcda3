"""Starts the ranks of training on this host, or joins those that torchrun started; stops all if one fails."""

from __future__ import annotations

import contextlib
import gc
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
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from recinfer import env
from recinfer.errors import RecinferError, UnavailableError
from recinfer.files import write_file
from recinfer.group_device import device_and_backend
from recinfer.training.failure_reports import FailureReports, is_lost_peer

__all__ = ["process_group", "run_ranks"]

_GRACE = 5.0  # seconds a rank has to end before it is killed
_START = "spawn"  # ranks begin with nothing of this process
_report_error: Callable[[BaseException], None] | None = None  # on a rank of run_ranks: writes its error to a file


@contextlib.contextmanager
def process_group(device: str = "cpu", timeout: float = 600.0) -> Iterator[tuple[int, int]]:
    """The default process group that torchrun's environment describes; gives rank and world size.

    Args:
        device: ``cpu`` (gloo) or ``cuda`` (NCCL; one GPU a rank, which becomes the current one).
        timeout: seconds that a rank waits for the others in a collective.

    Raises:
        UnavailableError: this process is not a rank or has no such device; or another rank failed, which is named (under
            torchrun by reports between the ranks, otherwise by :func:`run_ranks`).
    """
    place = env.torchrun_rank()
    if place is None:
        raise UnavailableError("this process is not a rank: RANK is not set; start it with torchrun or run_ranks")
    rank, world_size = place
    here, backend = device_and_backend(device, rank, world_size)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    limit = timedelta(seconds=timeout)
    store, _, _ = next(iter(dist.rendezvous("env://", rank, world_size, timeout=limit)))
    store.set_timeout(limit)
    group = dist.PrefixStore("default_group", store)
    dist.init_process_group(backend, store=group, rank=rank, world_size=world_size, timeout=limit)
    reports = FailureReports(store, rank, world_size)
    lost: RuntimeError | None = None
    try:
        yield rank, world_size
    except BaseException as error:
        # The report is written before the other ranks lose this rank and fail too.
        if _report_error is not None:
            _report_error(error)
            raise
        reports.write(error)
        if not is_lost_peer(error):
            raise
        lost = error  # type: ignore[assignment]
        # The frames' variables would keep connections open that other ranks wait on.
        traceback.clear_frames(error.__traceback__)
        gc.collect()
    finally:
        dist.destroy_process_group()
    if lost is not None:
        raise reports.explain() or lost from lost


def run_ranks(world_size: int, function: Callable[..., Any], *args: Any) -> Any:
    """Run ``function(*args)`` on ``world_size`` new ranks of this host; returns the result of rank 0.

    Each rank is a process with torchrun's environment variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT); ``function`` joins with :func:`process_group`. The function must be importable by name,
    and arguments and result must pickle. Ctrl-C stops all ranks.

    Raises:
        RecinferError: the error of a rank, unchanged.
        UnavailableError: a rank was killed or failed; names the rank and the reason. The others are stopped within
            seconds.
    """
    context: Any = multiprocessing.get_context(_START)
    store = _store()
    with tempfile.TemporaryDirectory(prefix="recinfer-train-") as folder:
        ranks = [
            context.Process(
                target=_rank_main,
                args=(rank, world_size, store.port, folder, function, args),
                name=f"rank {rank}",
            )
            for rank in range(world_size)
        ]
        try:
            for process in ranks:
                process.start()
            failed = _failures(ranks)
        finally:
            _stop(ranks)
        if failed:
            raise _error(Path(folder), failed)
        return pickle.loads((Path(folder) / "result").read_bytes())


def _rank_main(rank: int, world_size: int, port: int, folder: str, function: Callable[..., Any], args: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C reaches all; the parent stops the ranks
    env.set_torchrun(rank, world_size, port)
    # torch deprecates its ShardedTensor, which TorchRec's checkpoints consist of, in favour of DTensor.
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    global _report_error
    _report_error = partial(_write_error, Path(folder), rank)
    try:
        result = function(*args)
        if rank == 0:
            write_file(Path(folder) / "result", pickle.dumps(result))
    except BaseException as error:
        _report_error(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Write this rank's first error and its time to a file; later errors are ignored."""
    path = folder / f"error-{rank}"
    if path.exists():
        return
    known = error if isinstance(error, RecinferError) else None
    record = time.monotonic(), type(error).__name__, known, "".join(traceback.format_exception(error))
    with contextlib.suppress(Exception):
        write_file(path, pickle.dumps(record))


def _failures(ranks: list[Any]) -> dict[int, int]:
    """Wait until all ranks finish or some fail; returns rank -> exit code of the failed ones."""
    alive = {process.sentinel: at for at, process in enumerate(ranks)}
    failed: dict[int, int] = {}
    end: float | None = None
    while alive:
        # A rank that ended by an error may only have lost its peer, so the other ranks get time to end too: one of them
        # may be the cause. A rank that was killed is always a cause.
        ready = wait(list(alive), None if end is None else max(0.0, end - time.monotonic()))
        if not ready:
            break
        for sentinel in ready:
            at = alive.pop(sentinel)  # type: ignore[arg-type]
            ranks[at].join()
            if ranks[at].exitcode:
                failed[at] = ranks[at].exitcode
        if any(code < 0 for code in failed.values()):
            break
        if failed and end is None:
            end = time.monotonic() + _GRACE
    return failed


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


def _error(folder: Path, failed: dict[int, int]) -> Exception:
    """The error to raise: a rank that was killed or wrote no error, else the error of the rank that failed first."""
    records = {int(path.name.rpartition("-")[2]): pickle.loads(path.read_bytes()) for path in folder.glob("error-*")}
    rank, code = min(failed.items(), key=lambda item: (item[1] >= 0, item[0] in records))
    if code > 0 and rank in records:
        rank, (_, name, known, text) = min(records.items(), key=lambda item: item[1][0])
        if known is not None:
            return known
        return UnavailableError(f"rank {rank} failed with {name}; the other ranks were stopped\n{text}")
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
        hint = "; was the machine out of memory?" if -code == signal.SIGKILL else ""
    else:
        how, hint = f"ended with exit code {code}", ""
    return UnavailableError(f"rank {rank} {how}{hint}; the other ranks were stopped. --resume continues from the last checkpoint of --save-every")  # fmt: skip


def _store() -> dist.TCPStore:
    """The rendezvous store of the ranks. This process hosts it instead of rank 0, because it holds the chosen port from
    the start, so that no other process can take it. The store listens on loopback only."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    limit = timedelta(minutes=10)
    return dist.TCPStore("127.0.0.1", port, None, True, limit, False, master_listen_fd=listening.detach())
